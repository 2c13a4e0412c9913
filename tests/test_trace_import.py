"""Recordings of others: the CSV variants that are about, the refusals, and the real recordings where they are at hand."""

import json

import numpy as np
import pytest
from conftest import SHARED

from edgemoe.errors import TraceError
from edgemoe.trace import Trace
from edgemoe.trace_import import Facts, import_trace

# Two tokens, layers 3 and 5, two of eight experts each: what every variant below says.
IDS = [[[4, 1], [0, 7]], [[2, 6], [5, 0]]]
PROBS = [[[0.75, 0.25], [0.5, 0.25]], [[0.5, 0.375], [0.625, 0.125]]]

LONG = "token,layer,expert\n0,3,4\n0,3,1\n0,5,0\n0,5,7\n1,3,2\n1,3,6\n1,5,5\n1,5,0\n"
SHUFFLED = "layer,token,prob,expert\n5,1,0.125,0\n3,0,0.25,1\n3,0,0.75,4\n5,0,0.25,7\n5,0,0.5,0\n3,1,0.5,2\n3,1,0.375,6\n5,1,0.625,5\n"
WIDE = "token,layer,expert_0,expert_1,prob_0,prob_1\n0,3,4,1,.75,.25\n0,5,0,7,.5,.25\n1,3,2,6,.5,.375\n1,5,5,0,.625,.125\n"
VARIANTS = {
    "long": (LONG, False),
    "long without names": (LONG.split("\n", 1)[1], False),
    "long with probabilities, in any order": (SHUFFLED, True),
    "probabilities without names": ("0,3,4,0.75\n0,3,1,0.25\n0,5,0,0.5\n0,5,7,0.25\n1,3,2,0.5\n1,3,6,0.375\n1,5,5,0.625\n1,5,0,0.125\n", True),
    "wide": (WIDE, True),
    "wide, other names": (WIDE.replace("token,layer,expert_0,expert_1,prob_0,prob_1", "token_idx,layer_id,e0,e1,p0,p1"), True),
    "wide without names": ("0,3,4,1\n0,5,0,7\n1,3,2,6\n1,5,5,0\n", False),
    "lists": ('Position,Layer,Experts,Probs\n0,3,"[4, 1]","[0.75, 0.25]"\n0,5,0 7,0.5 0.25\n1,3,2;6,.5;.375\n1,5,5|0,.625|.125\n', True),
    "semicolons": (LONG.replace(",", ";"), False),
    "tabs, BOM, blank lines, Windows": ("\ufeff" + LONG.replace(",", "\t").replace("\n", "\r\n\r\n"), False),
    "a column that means nothing": ("time,token,layer,expert\n" + "".join(f"9.5s,{line}\n" for line in LONG.splitlines()[1:]), False),
}


def write(tmp_path, text):
    path = tmp_path / "routing.csv"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("text, has_probs", VARIANTS.values(), ids=VARIANTS)
def test_csv_variants(text, has_probs, tmp_path):
    t = import_trace(write(tmp_path, text), Facts(model="m", n_expert=8, bytes_per_expert=100))
    assert t.ids.tolist() == IDS and t.meta["layers"] == [3, 5] and t.n_expert == 8 and t.meta["bytes_per_expert"] == [100, 100]
    assert t.offsets.tolist() == [0, 2] and t.phase.tolist() == [1, 1] and t.token_ids.tolist() == [-1, -1] and t.step is None
    assert (t.probs is not None) == has_probs
    if has_probs:
        assert t.probs.tolist() == PROBS
    t.save(tmp_path / "t.npz")
    assert Trace.load(tmp_path / "t.npz").meta == t.meta


def test_csv_with_sequences_phases_and_token_ids(tmp_path):
    text = "request,phase,token,token_id,layer,expert\nb,prefill,0,17,0,1\nb,prefill,0,17,1,3\nb,decode,1,18,0,2\na,1,0,9,1,0\na,1,0,9,0,0\n"
    t = import_trace(write(tmp_path, text), Facts())
    assert t.offsets.tolist() == [0, 2, 3] and t.meta["sequences"] == [{"name": "b"}, {"name": "a"}]
    assert t.ids[:, :, 0].tolist() == [[1, 3], [2, 255], [0, 0]]  # the second token of b has no layer 1: absent
    assert t.phase.tolist() == [0, 1, 1] and t.token_ids.tolist() == [17, 18, 9] and t.n_expert == 4


def test_csv_rows_may_have_fewer_experts(tmp_path):
    t = import_trace(write(tmp_path, "token,layer,e0,e1\n0,0,3,-1\n1,0,2,1\n2,0,,\n"), Facts())
    assert t.ids.tolist() == [[[3, 255]], [[2, 1]], [[255, 255]]]


def test_many_experts_are_wide(tmp_path):
    t = import_trace(write(tmp_path, "0,0,300\n1,0,2\n"), Facts())
    assert t.ids.dtype == np.uint16 and t.n_expert == 301


REFUSED = [
    ("", "found no lines of routing"),
    ("token,layer,expert\n", "found no lines of routing"),
    ("a,b,c\n1,2,3\n", "line 1: found columns a, b, c; wanted token, layer and one of"),
    ("token,layer\n1,2\n", "line 1: found columns token, layer; wanted"),
    ("1,2\n", "line 1: found 2 columns, wanted token, layer, expert"),
    ("token,layer,expert,experts\n1,2,3,4\n", "wanted token, layer and one of"),
    ("token,position,layer,expert\n1,1,2,3\n", "line 1: columns token and position both name the token"),
    ("token,layer,e0,e1,p0\n1,2,3,4,5\n", "line 1: found 1 columns of probabilities, wanted 2 as of experts"),
    (LONG + "1,5\n", "line 10: found 2 columns, wanted 3"),
    (LONG + "x,5,1\n", "line 10: token: found 'x', wanted a whole number from 0"),
    (LONG + "2,-5,1\n", "line 10: layer: found '-5'"),
    (LONG + "2,5,1.5\n", "line 10: expert: found '1.5'"),
    (LONG + "2,5,9\n", "found expert 9, wanted 0 to 7"),
    (SHUFFLED + "5,2,nan,0\n", "line 10: probability: found 'nan', wanted a number"),
    (SHUFFLED + "5,2,,0\n", "line 10: probability: found ''"),
    ("token,layer,expert,phase\n0,0,0,maybe\n", "line 2: phase: found 'maybe', wanted prompt or decode"),
    (LONG + "0,3,4\n", "line 10: token 0, layer 3, expert 4: stood in line 2 already; a column sequence tells sequences apart"),
    ("0,3,4,1\n0,3,2,5\n", "line 2: token 0, layer 3"),
    ("token,layer,experts,probs\n0,0,1 2,0.5\n", "line 2: found 1 probabilities, wanted 2"),
]


@pytest.mark.parametrize("text, said", REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_csv_refusals_name_the_line(text, said, tmp_path):
    with pytest.raises(TraceError) as error:
        import_trace(write(tmp_path, text), Facts(n_expert=8))
    assert said in str(error.value) and "routing.csv" in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_recording(tmp_path):
    path = tmp_path / "x.npz"
    for content, said in ((b"PK\3\4", "not an .npz"), (b"", "not an .npz")):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=said):
            import_trace(path, Facts())
    np.savez(path, a=np.zeros(3))
    with pytest.raises(TraceError, match="found arrays a, wanted ids"):
        import_trace(path, Facts())
    np.savez(path, ids=np.zeros((2, 1, 2), np.uint8))
    with pytest.raises(TraceError, match="row 0, layer 0: found expert 0, wanted each expert once"):
        import_trace(path, Facts())
    with pytest.raises(TraceError, match="No such file"):
        import_trace(tmp_path / "missing.csv", Facts())
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="neither an .npz nor text"):
        import_trace(tmp_path / "x.csv", Facts())


needs_recordings = pytest.mark.skipif(not (SHARED / "traces").is_dir(), reason="no recordings of real models beside this checkout")
RECORDINGS = [
    ("gptoss20b/mmlu_dev", (24629, 24, 4), 32, 97),
    ("gptoss20b/mmlu_validation", (40122, 24, 4), 32, 145),
    ("gptoss20b/mmlu_pro_validation", (7061, 24, 4), 32, 26),
    ("gptoss20b/mmlu_test", (61020, 24, 4), 32, 201),
    *((f"deepseek_v2_lite/{name}", (n, 26, 6), 64, s) for name, n, s in (("intent", 8222, 127), ("law", 8327, 33), ("summary", 8479, 13), ("translation", 8251, 40))),
    ("qwen3_30b_phone/qwen", (156, 48, 6), 128, 1),
]


@needs_recordings
@pytest.mark.parametrize("name, shape, n_expert, n_sequences", RECORDINGS, ids=[r[0] for r in RECORDINGS])
def test_real_recordings(name, shape, n_expert, n_sequences, tmp_path):
    path = SHARED / "traces" / f"{name}.npz"
    import_trace(path, Facts(n_expert=n_expert)).save(tmp_path / "t.npz")
    t = Trace.load(tmp_path / "t.npz")
    assert t.ids.shape == shape and t.n_sequences == n_sequences and t.meta["probs"] == "chosen"
    with np.load(path) as z:
        np.testing.assert_array_equal(t.ids, z["ids"])
        np.testing.assert_array_equal(t.probs, z["probs"])
        if "token_ids" in z:
            np.testing.assert_array_equal(t.token_ids, z["token_ids"])
            np.testing.assert_array_equal(t.stage, z["channel"])
        if "layers" in z:
            assert t.meta["layers"] == z["layers"].tolist()
        if "phase" in z:
            np.testing.assert_array_equal(t.phase, z["phase"])
    sums = "rows do not sum to 1" if name.startswith("deepseek") else "each row sums to 1"
    assert t.meta["probs_are"] == f"as in the source: {sums}"
    assert len(set(t.sequence_hashes())) == n_sequences
    if name.startswith("gptoss"):
        notes = [json.loads(line) for line in open(path.with_name(path.stem + ".meta.jsonl"))]
        assert [s["category"] for s in t.meta["sequences"]] == [n["category"] for n in notes]
        assert t.meta["stages"] == {"1": "analysis", "2": "final"} and "prompt" not in t.meta["sequences"][0]


@needs_recordings
def test_real_recordings_do_not_overlap():
    hashes = [h for name, *_ in RECORDINGS[:4] for h in import_trace(SHARED / "traces" / f"{name}.npz", Facts()).sequence_hashes()]
    assert len(set(hashes)) == len(hashes) == 97 + 145 + 26 + 201


def test_the_command(edgemoe, tmp_path):
    write(tmp_path, WIDE)
    result = edgemoe("trace", "import", "routing.csv", "--out", "t.npz", "--experts", "8", "--expert-bytes", "2M", "--model-name", "mine")
    assert result.returncode == 0 and result.stderr == ""
    assert "2 layers (3 to 5) of 8, 2 used per token, each 2.10 MB" in result.stdout
    shown = edgemoe("trace", "show", "t.npz", "--json")
    said = json.loads(shown.stdout)
    assert said["model"] == "mine" and said["n_tokens"] == 2 and said["recorded"]["options"] == {"experts": 8, "expert_bytes": 2 << 20, "model_name": "mine"}
    again = edgemoe("trace", "import", "t.npz", "--out", "u.npz")
    assert again.returncode == 1 and again.stderr == "edgemoe: error: t.npz: is a trace already\n"
    assert edgemoe("trace", "show", "routing.csv").stderr.startswith("edgemoe: error: routing.csv: not an .npz, or cut off")
