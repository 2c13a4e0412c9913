"""Files of learned heads: what is written is read again, and what is not whole, not of this version or not of this model is refused by name."""

import struct

import numpy as np
import pytest

from edgemoe import heads as h
from edgemoe.heads import Heads, HeadsError, load, save
from edgemoe.package import Source

MARK = "0123456789abcdef" * 2
LAYERS, COUNTS, WIDTH = [1, 2, 5], [4, 6, 6], 32


def made(mode="spatio-temporal", seed=0, biases=True, counts=COUNTS, layers=LAYERS, width=WIDTH, mark=MARK):
    rng = np.random.default_rng(seed)
    ahead = [*counts[1:], counts[0]]  # a spatial head has a row per expert of the next layer

    def draw(rows):
        return [rng.normal(0, 1, (n, width)).astype(np.float32) for n in rows], [rng.normal(0, 1, n).astype(np.float32) for n in rows] if biases else None

    found = Heads(mark, list(layers), list(counts), mode, slots=3, tau=0.05, training={"seed": seed, "text": "größer"})
    if mode != "spatio":
        found.weights_t, found.biases_t = draw(counts)
    if mode != "temporal":
        found.weights_s, found.biases_s = draw(ahead)
    return found


def same(a, b, tolerance):
    return all(np.abs(x - y).max() <= tolerance * np.abs(x).max() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", h.MODES)
@pytest.mark.parametrize("biases", [True, False])
def test_what_is_written_is_read_again(tmp_path, mode, biases):
    heads = made(mode, biases=biases)
    save(tmp_path / "heads.gguf", heads)
    found = load(tmp_path / "heads.gguf")
    for name in ("fingerprint", "layers", "expert_counts", "mode", "slots", "training", "n_embd"):
        assert getattr(found, name) == getattr(heads, name), name
    assert found.tau == np.float32(0.05)
    for head in ("head_t", "head_s"):
        (weights, bias), (wanted, wanted_bias) = found.of(head), heads.of(head)
        assert (weights is None) == (wanted is None) == (head not in h.MODES[mode])
        assert (bias is None) == (wanted_bias is None)
        if weights:
            assert [w.tolist() for w in weights] == [w.astype(np.float16).astype(np.float32).tolist() for w in wanted] and weights[0].dtype == np.float32
            assert bias is None or [b.tolist() for b in bias] == [b.tolist() for b in wanted_bias]


def test_q8_0_is_within_its_rounding(tmp_path):
    heads = made()
    save(tmp_path / "heads.gguf", heads, "q8_0")
    found = load(tmp_path / "heads.gguf")
    assert same(heads.weights_t, found.weights_t, 1 / 127) and same(heads.weights_s, found.weights_s, 1 / 127)
    assert not same(heads.weights_t, found.weights_t, 1e-5)
    with pytest.raises(HeadsError, match="rows of 20 values cannot be Q8_0"):
        save(tmp_path / "odd.gguf", made(width=20), "q8_0")
    with pytest.raises(HeadsError, match="weights as q4_0: wanted one of f16, q8_0"):
        save(tmp_path / "odd.gguf", heads, "q4_0")
    assert [p.name for p in tmp_path.iterdir()] == ["heads.gguf"]


def test_the_same_heads_are_the_same_bytes(tmp_path):
    for name in "ab":
        save(tmp_path / name, made())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_probabilities_are_the_softmax_of_w_h_and_b():
    heads = made()
    hidden = np.random.default_rng(1).normal(0, 1, (5, WIDTH)).astype(np.float16)
    for head, index, n in (("head_t", 0, 4), ("head_s", 0, 6), ("head_s", 2, 4)):
        weights, biases = heads.of(head)
        z = np.exp(hidden.astype(np.float64) @ weights[index].T + biases[index])
        found = heads.probs(head, index, hidden)
        assert found.shape == (5, n) and found.dtype == np.float32
        assert np.allclose(found, z / z.sum(1, keepdims=True), atol=1e-6)


# --- refused by name


def corrupted(path, find, replace):
    data = path.read_bytes()
    assert data.count(find) == 1
    path.write_bytes(data.replace(find, replace))


def key(name, kind, value):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


U32, F32, STRING = 4, 6, 8


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    "find, replace, message",
    [
        (key("general.architecture", STRING, text("edgemoe-heads")), key("general.architecture", STRING, text("edgemoe-hoods")), "found a GGUF of 'edgemoe-hoods', wanted 'edgemoe-heads'"),
        (key("edgemoe.heads.format_version", U32, struct.pack("<I", 1)), key("edgemoe.heads.format_version", U32, struct.pack("<I", 0)), "found heads of format 0, wanted 1"),
        (key("edgemoe.heads.format_version", U32, struct.pack("<I", 1)), key("edgemoe.heads.format_version", U32, struct.pack("<I", 2)), "found heads of format 2, wanted 1"),
        (b"edgemoe.heads.format_version", b"edgemoe.heads.format_versiom", "found heads of format None, wanted 1"),
        (key("edgemoe.heads.mode", STRING, text("spatio-temporal")), key("edgemoe.heads.mode", STRING, text("spatio-temperal")), "edgemoe.heads.mode: found 'spatio-temperal'"),
        (b"edgemoe.heads.slots", b"edgemoe.heads.slits", "edgemoe.heads.slots: found None, wanted int"),
        (key("edgemoe.heads.slots", U32, struct.pack("<I", 3)), key("edgemoe.heads.slots", U32, struct.pack("<I", 99)), "slots: found 99, wanted 1 to 6"),
        (key("edgemoe.heads.tau", F32, struct.pack("<f", 0.05)), key("edgemoe.heads.tau", F32, struct.pack("<f", float("nan"))), "tau: found nan"),
        (b'{"seed": 0', b'{"seed"; 0', "edgemoe.heads.training: not JSON"),
        (b"blk.5.head_s.weight", b"blk.6.head_s.weight", "tensor blk.6.head_s.weight: wanted only heads of a spatio-temporal file's layers"),
        (b"blk.5.head_s.weight", b"blk.5.had__s.weight", "tensor blk.5.head_s.weight is missing"),
        (b"blk.2.head_t.bias", b"blk.2.head_t.biaz", "tensor blk.2.head_t.biaz: wanted only heads"),
    ],
    ids=["architecture", "old", "newer", "no version", "mode", "no slots", "slots", "tau", "training", "layer", "missing", "strange"],
)
def test_what_is_not_of_this_format_is_refused_by_name(tmp_path, find, replace, message):
    path = tmp_path / "heads.gguf"
    save(path, made())
    corrupted(path, find, replace)
    with pytest.raises(HeadsError) as e:
        load(path)
    assert str(path) in str(e.value) and message in str(e.value) and "\n" not in str(e.value)


def test_a_changed_byte_is_found(tmp_path):
    path = tmp_path / "heads.gguf"
    save(path, made())
    whole = bytearray(path.read_bytes())
    for at in (len(whole) - 40, len(whole) - 900):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(HeadsError, match="damaged: found checksum"):
            load(path)


def test_a_cut_file_is_refused_wherever_it_ends(tmp_path):
    path = tmp_path / "heads.gguf"
    save(path, made())
    whole = path.read_bytes()
    for n in [0, 3, 30, *range(100, len(whole) - 32, 257)]:  # the last bytes may be padding
        path.write_bytes(whole[:n])
        with pytest.raises(HeadsError, match="heads.gguf"):
            load(path)


def test_other_files_are_refused(tmp_path, models):
    (tmp_path / "text").write_text("no GGUF at all")
    for path, message in ((tmp_path / "none", "no such file"), (tmp_path, "no such file"), (tmp_path / "text", "not a GGUF file"), (models("qwen3moe", "Q8_0"), "found a GGUF of 'qwen3moe'")):
        with pytest.raises(HeadsError, match=message):
            load(path)


def test_a_sidecar_without_heads_says_so(models, packages):
    with pytest.raises(HeadsError, match="a sidecar without learned heads"):
        load(packages(models("qwen3moe", "Q8_0")) / "router.gguf")


def nan(a):
    a[1, 2] = np.nan
    return a


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: nan(x.weights_t[1]), r"blk.2.head_t.weight: found nan, wanted numbers that float16 can hold"),
        (lambda x: x.weights_s.__setitem__(0, x.weights_s[0] * 1e6), r"blk.1.head_s.weight: found .*, wanted numbers that float16"),
        (lambda x: x.biases_s[2].fill(np.inf), r"blk.5.head_s.bias: found inf"),
        (lambda x: x.weights_t.__setitem__(2, x.weights_t[2][:, 1:]), r"blk.5.head_t.weight: found shape \[6, 31\], wanted \[6, 32\]"),
        (lambda x: x.weights_s.__setitem__(2, x.weights_s[1]), r"blk.5.head_s.weight: found shape \[6, 32\], wanted \[4, 32\]"),
        (lambda x: x.biases_t.__setitem__(0, x.biases_t[1]), r"blk.1.head_t.bias: found shape \[6\], wanted \[4\]"),
        (lambda x: x.weights_t.pop(), "head_t: found heads of 2 layers, wanted 3"),
        (lambda x: setattr(x, "weights_s", None), "head_s: missing"),
        (lambda x: setattr(x, "mode", "temporal"), "head_s: there, but not wanted"),
        (lambda x: setattr(x, "slots", 0), "slots: found 0"),
        (lambda x: setattr(x, "layers", [2, 1, 5]), "wanted rising block numbers"),
    ],
)
def test_what_are_no_heads_is_not_written(tmp_path, change, message):
    heads = made()
    change(heads)
    with pytest.raises(HeadsError, match=message):
        save(tmp_path / "heads.gguf", heads)
    assert not list(tmp_path.iterdir())


def test_nan_in_a_file_is_refused(tmp_path, monkeypatch):
    heads = made()
    nan(heads.weights_t[1])
    monkeypatch.setattr(Heads, "check", lambda self: None)
    save(tmp_path / "heads.gguf", heads)
    monkeypatch.undo()
    with pytest.raises(HeadsError, match="blk.2.head_t.weight: found nan"):
        load(tmp_path / "heads.gguf")


def test_heads_are_bound_to_their_model(models, packages):
    model = models("qwen3moe", "Q8_0")
    with Source(model) as source, Source(packages(model)) as package, Source(models("olmoe", "Q8_0")) as other:
        shape = {"layers": [layer.layer for layer in source.layers], "counts": [layer.n_expert for layer in source.layers], "width": source.integer("embedding_length")}
        heads = made(**shape, mark=source.package_fingerprint())
        heads.check_fits(source)
        heads.check_fits(package)
        with pytest.raises(HeadsError, match="are heads of another model: found fingerprint"):
            heads.check_fits(other)
        mark = source.package_fingerprint()
        for change, message in (({"counts": [8] * len(source.layers)}, "of 8 experts, wanted 2 layers"), ({"width": 64}, "found heads of 64 values, wanted 256")):
            with pytest.raises(HeadsError, match=message):
                made(**{**shape, **change}, mark=mark).check_fits(source)


def test_where_heads_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert h.default_path(MARK) == tmp_path / "edgemoe" / "heads" / f"{MARK}.gguf"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(HeadsError, match="nowhere/heads.gguf: No such file or directory"):
        save(tmp_path / "nowhere" / "heads.gguf", made())
