"""The trace format: what is written is read back, and everything that is no trace is refused by name."""

import json
import os

import numpy as np
import pytest

from edgemoe import trace as module
from edgemoe.errors import TraceError
from edgemoe.trace import DECODE, Trace, TraceWriter

META = {
    "format": 1, "model": "m", "architecture": "qwen3moe", "fingerprint": "", "n_expert": 8, "n_used": 2, "layers": [1, 2, 3], "bytes_per_expert": [10, 10, 12],
    "n_embd": 4, "probs": "chosen", "probs_are": "softmax over all", "recorded": {"how": "by hand", "options": {}}, "source": "",
}  # fmt: skip


def small(n_expert=8, **changes):
    """Two sequences of 3 and 2 tokens; rows 0 and 1 were computed together; the last layer of row 0 is absent."""
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.random((5, 3, n_expert)), axis=2)[:, :, :2].astype(module.ids_dtype(n_expert))
    ids[0, 2] = module.absent(ids.dtype)
    fields = dict(
        ids=ids,
        token_ids=np.array([5, 6, -1, 5, 7], np.int32),
        offsets=np.array([0, 3, 5], np.int64),
        phase=np.array([0, 0, 1, 0, 1], np.uint8),
        step=np.array([0, 0, 1, 2, 3], np.int32),
        stage=np.array([-1, -1, 2, 0, 1], np.int16),
        probs=rng.random((5, 3, 2)).astype(np.float16),
        hidden=rng.random((5, 3, 4)).astype(np.float16),
        meta=META | {"n_expert": n_expert},
    )
    return Trace(**(fields | changes))


def same(a, b):
    assert a.meta == b.meta
    for name in module.ARRAYS:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)


@pytest.mark.parametrize("n_expert, dtype", [(8, np.uint8), (254, np.uint8), (255, np.uint16), (512, np.uint16)])
def test_round_trip(n_expert, dtype, tmp_path):
    t = small(n_expert)
    t.save(tmp_path / "t.npz")
    back = Trace.load(tmp_path / "t.npz")
    same(t, back)
    assert back.ids.dtype == dtype and isinstance(back.ids, np.memmap) and back.ids.flags.aligned
    assert (back.n_tokens, back.n_layers, back.n_used, back.n_expert, back.n_sequences) == (5, 3, 2, n_expert, 2)
    assert os.listdir(tmp_path) == ["t.npz"]


def test_plain_numpy_reads_it(tmp_path):
    t = small()
    t.save(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz", allow_pickle=False) as z:
        np.testing.assert_array_equal(z["ids"], t.ids)
        assert json.loads(str(z["meta"])) == t.meta


def test_what_numpy_writes_is_read(tmp_path):
    t = small()
    arrays = {name: getattr(t, name) for name in module.ARRAYS if getattr(t, name) is not None} | {"ids": np.asfortranarray(t.ids)}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "t.npz", meta=np.array(json.dumps(t.meta)), **arrays)
        same(t, Trace.load(tmp_path / "t.npz"))


def test_optional_arrays_may_be_missing(tmp_path):
    t = small(probs=None, hidden=None, step=None, stage=None, meta=META | {"probs": None})
    t.save(tmp_path / "t.npz")
    back = Trace.load(tmp_path / "t.npz")
    same(t, back)
    assert back.sequence(1).step.tolist() == [3, 4]


def test_heads_and_full_probabilities(tmp_path):
    rng = np.random.default_rng(0)
    heads = {name: rng.random((5, 3, 8)).astype(np.float16) for name in ("head_t", "head_s", "probs")}
    t = small(**heads, meta=META | {"probs": "all"})
    t.save(tmp_path / "t.npz")
    same(t, Trace.load(tmp_path / "t.npz"))


def test_same_input_same_bytes(tmp_path):
    small().save(tmp_path / "a.npz")
    small().save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_sequences_and_select():
    t = small()
    assert [len(s.ids) for s in t.sequences()] == [3, 2]
    turned = t.select([1, 0, 1])
    turned.check()
    assert turned.offsets.tolist() == [0, 2, 5, 7] and turned.step.tolist() == [0, 1, 2, 2, 3, 4, 5]
    assert turned.sequence_hashes() == [t.sequence_hashes()[i] for i in (1, 0, 1)]
    np.testing.assert_array_equal(turned.hidden[2:5], t.hidden[:3])
    assert np.shares_memory(t.select([1]).ids, t.ids)
    assert t.select([]).n_tokens == 0
    with pytest.raises(IndexError):
        t.select([2])


def test_a_hash_tells_routing_and_tokens_apart_and_nothing_else():
    t = small()
    first, second = t.sequence_hashes()
    assert first != second
    wide = small(ids=np.where(t.ids == 255, 65535, t.ids.astype(np.uint16)).astype(np.uint16), probs=None, meta=META | {"probs": None})
    assert wide.sequence_hashes() == [first, second]
    other = t.ids.copy()
    other[4, 0] = other[4, 0][::-1]
    assert small(ids=other).sequence_hashes()[0] == first and small(ids=other).sequence_hashes()[1] != second
    assert small(token_ids=np.array([5, 6, 0, 5, 7], np.int32)).sequence_hashes()[0] != first


def changed(name, index, value):
    a = getattr(small(), name).copy()
    a[index] = value
    return {name: a}


BAD = [
    (changed("ids", (3, 1, 0), 8), "ids: row 3, layer 2: found expert 8, wanted 0 to 7, or 255 for none"),
    (changed("ids", (3, 1), 4), "ids: row 3, layer 2: found expert 4, wanted each expert once"),
    (changed("ids", (3, 1, 0), 255), "wanted nothing after 255"),
    (changed("probs", (2, 0, 1), np.inf), "probs: row 2, layer 1: not finite"),
    (changed("probs", (2, 0, 1), np.nan), "probs: row 2, layer 1: not finite"),
    (changed("offsets", 1, 6), "offsets: wanted ascending numbers from 0 to 5, found [0, 6, 5]"),
    (changed("offsets", 2, 4), "found [0, 3, 4]"),
    (dict(offsets=np.array([], np.int64)), "offsets"),
    (changed("phase", 2, 2), "phase: row 2: found 2, wanted 0 (prompt) or 1 (decode)"),
    (changed("step", 4, 1), "step: row 4: wanted numbers that never fall"),
    (changed("step", slice(0, 2), -1), "step: row 0"),
    (changed("token_ids", 1, -2), "token_ids: row 1: found -2, wanted -1 or more"),
    (dict(phase=np.zeros(4, np.uint8)), "phase: found uint8 [4], wanted uint8 [5]"),
    (dict(step=np.zeros(5, np.int64)), "step: found int64 [5], wanted int32 [5]"),
    (dict(probs=np.zeros((5, 3, 8), np.float16)), "probs: found float16 [5, 3, 8], wanted float16 [5, 3, 2]"),
    (dict(hidden=np.zeros((5, 3, 5), np.float16)), "hidden: found float16 [5, 3, 5], wanted float16 [5, 3, 4]"),
    (dict(ids=np.zeros((5, 3), np.uint8)), "ids: found uint8 [5, 3], wanted uint8 or uint16 [tokens, layers, used]"),
    (dict(ids=np.zeros((5, 3, 2), np.int32)), "ids: found int32"),
    (dict(meta=META | {"layers": [1, 2]}), "meta: found 2 layers, 3 sizes of experts, 2 used, wanted 3, 3, 2 as in ids"),
    (dict(meta=META | {"n_used": 3}), "3 used"),
    (dict(meta=META | {"layers": [1, 3, 2]}), "meta: layers: found [1, 3, 2], wanted rising whole numbers"),
    (dict(meta=META | {"bytes_per_expert": [1, 2, "3"]}), "meta: bytes_per_expert: found [1, 2, '3'], wanted whole numbers"),
    (dict(meta=META | {"n_expert": 1}), "meta: n_expert: found 1, wanted 2 to 255"),
    (dict(meta=META | {"probs": None}), "meta: probs: found None, wanted all or chosen"),
    (dict(meta=META | {"sequences": [{}]}), "meta: sequences: found 1, wanted 2"),
]


@pytest.mark.parametrize("changes, said", BAD, ids=[said[:30] for _, said in BAD])
def test_what_no_trace_can_hold_is_refused(changes, said, tmp_path):
    bad = small(**changes)
    with pytest.raises(TraceError) as error:
        bad.save(tmp_path / "bad.npz")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert os.listdir(tmp_path) == []
    # The same when it comes from a file that somebody else wrote.
    arrays = {name: getattr(bad, name) for name in module.ARRAYS if getattr(bad, name) is not None}
    np.savez(tmp_path / "bad.npz", meta=np.array(json.dumps(bad.meta)), **arrays)
    with pytest.raises(TraceError) as error:
        Trace.load(tmp_path / "bad.npz")
    assert said in str(error.value) and str(tmp_path / "bad.npz") in str(error.value)


def refused(path, said):
    with pytest.raises(TraceError) as error:
        Trace.load(path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_traces(tmp_path):
    path = tmp_path / "t.npz"
    refused(path, "No such file")
    refused(tmp_path, "Is a directory")
    for content in (b"", b"PK", b"hello" * 100, b"\x93NUMPY"):
        path.write_bytes(content)
        refused(path, "not an .npz, or cut off")
    np.savez(path, ids=np.zeros((1, 1, 1), np.uint8))
    refused(path, "array meta is missing: not a routing trace")
    for meta, said in (
        (np.array("{"), "meta: not JSON"),
        (np.array(3), "meta: found int64 [], wanted one string"),
        (np.array("[]"), "meta: found format [], wanted 1"),
        (np.array(json.dumps(META | {"format": 2})), "meta: found format 2, wanted 1"),
        (np.array(json.dumps(META | {"n_used": "2"})), "meta: n_used: found '2', wanted int"),
        (np.array(json.dumps({"format": 1})), "meta: model: found None, wanted str"),
        (np.array(json.dumps(META)), "array ids is missing"),
    ):
        np.savez(path, meta=meta)
        refused(path, said)
    np.savez(path, meta=np.array(json.dumps(META)), ids=np.array([{}], dtype=object))
    refused(path, "ids")


def test_every_truncation_is_refused(tmp_path):
    small().save(tmp_path / "t.npz")
    whole = (tmp_path / "t.npz").read_bytes()
    for n in range(0, len(whole), 97):
        (tmp_path / "cut.npz").write_bytes(whole[:n])
        refused(tmp_path / "cut.npz", "cut.npz")


def test_a_flipped_bit_is_noticed(tmp_path):
    small().save(tmp_path / "t.npz")
    whole = bytearray((tmp_path / "t.npz").read_bytes())
    whole[whole.find(small().ids.tobytes())] ^= 1
    (tmp_path / "t.npz").write_bytes(whole)
    refused(tmp_path / "t.npz", "damaged")


def test_flipped_bits_anywhere_end_in_a_trace_or_a_word(tmp_path):
    small().save(tmp_path / "t.npz")
    whole = (tmp_path / "t.npz").read_bytes()
    rng = np.random.default_rng(0)
    n_refused = 0
    for at in rng.integers(0, len(whole), 600):
        bad = bytearray(whole)
        bad[at] ^= 1 << int(rng.integers(8))
        (tmp_path / "bad.npz").write_bytes(bad)
        try:
            Trace.load(tmp_path / "bad.npz")
        except TraceError as e:
            assert "\n" not in str(e) and "bad.npz" in str(e)
            n_refused += 1
    assert n_refused > 300  # the others: names, dates and padding of the zip, and hidden states


def test_a_million_tokens_are_mapped_not_copied(tmp_path, python):
    rng = np.random.default_rng(0)
    n = 200_000
    one = np.argsort(rng.random((64, 24, 32)), axis=2)[:, :, :8].astype(np.uint8)
    ids = np.tile(one, (n // 64, 1, 1))
    n = len(ids)
    meta = META | {"n_expert": 32, "n_used": 8, "layers": list(range(24)), "bytes_per_expert": [1] * 24, "probs": None}
    Trace(ids, np.full(n, -1, np.int32), np.array([0, n]), np.ones(n, np.uint8), meta).save(tmp_path / "t.npz")
    code = """
import re, sys
from edgemoe.trace import Trace
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before = anonymous()
t = Trace.load(sys.argv[1])
rows = t.sequence(0).ids
print(anonymous() - before, rows.nbytes >> 20)
"""
    grown, size = map(int, python(code, tmp_path / "t.npz").stdout.split())
    assert size > 30 and grown < 20


def append(writer, n, seed=0, **more):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((n, 3, 8)), axis=2)[:, :, :2].astype(np.uint8)
    writer.append(ids, np.arange(n), DECODE, np.arange(n), rng.random((n, 3, 2)).astype(np.float16), **more)
    return ids


def test_writer_keeps_only_complete_sequences(tmp_path):
    with TraceWriter(tmp_path / "t.npz", dict(META), probs=2) as writer:
        first = append(writer, 3)
        writer.end_sequence()
        append(writer, 4, seed=1)
        writer.drop_sequence()
        second = append(writer, 2, seed=2)
        writer.end_sequence()
        append(writer, 5, seed=3)
        assert (writer.n_tokens, writer.n_sequences) == (10, 2)
        writer.finish()
    t = Trace.load(tmp_path / "t.npz")
    assert t.offsets.tolist() == [0, 3, 5] and t.step.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(t.ids, np.concatenate([first, second]))
    assert os.listdir(tmp_path) == ["t.npz"]


def test_writer_that_is_left_early_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path / "t.npz", dict(META), probs=2) as writer:
        append(writer, 3)
        writer.end_sequence()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


FULL_DISK = """
import resource, signal, sys
import numpy as np
from edgemoe.errors import TraceError
from edgemoe.trace import Trace, TraceWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
meta = {**eval(sys.argv[3]), "n_embd": 512}
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    with TraceWriter(sys.argv[1], meta, probs=2, hidden=512) as writer:
        for _ in range(50):
            writer.append(np.tile(np.array([[1, 2]], np.uint8), (8, 3, 1)), range(8), 1, np.arange(8), np.zeros((8, 3, 2), np.float16), np.zeros((8, 3, 512), np.float16))
            writer.end_sequence()
        writer.finish()
    print("written")
except TraceError as e:
    print(e)
"""


@pytest.mark.parametrize("n_bytes", [100_000, 1_229_000])  # while hidden states wait, and while the trace is put together
def test_a_full_disk_is_said_and_leaves_nothing(n_bytes, tmp_path, python):
    folder = tmp_path / "out"
    folder.mkdir()
    result = python(FULL_DISK, folder / "t.npz", n_bytes, repr(META))
    assert result.stdout == f"{folder / 't.npz'}: File too large\n", result.stdout + result.stderr
    assert os.listdir(folder) == []
    assert python(FULL_DISK, folder / "t.npz", 10_000_000, repr(META)).stdout == "written\n"


def test_saving_over_a_trace_that_is_in_use(tmp_path):
    small().save(tmp_path / "t.npz")
    before = Trace.load(tmp_path / "t.npz")
    small(stage=None).save(tmp_path / "t.npz")
    same(before, small())  # its map is of the file that was
    assert Trace.load(tmp_path / "t.npz").stage is None


def test_no_folder_to_write_to(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        small().save(tmp_path / "missing" / "t.npz")
    with pytest.raises(TraceError, match="No such file"):
        TraceWriter(tmp_path / "missing" / "t.npz", dict(META))
