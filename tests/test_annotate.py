"""Stages of traces: shifts of the routing, boundaries by cues and controls, coherence, calibration, and the commands."""

import json

import numpy as np
import pytest
from conftest import SHARED

import edgemoe
from edgemoe import annotate, calibrate, cue_sets, routing_shift
from edgemoe.annotate import Mark
from edgemoe.cli import main
from edgemoe.errors import TraceError
from edgemoe.package import Source
from edgemoe.replay import replay
from edgemoe.routing_shift import ShiftDetector, ShiftOptions
from edgemoe.stage import Automaton, CueError
from edgemoe.trace import DECODE, FORMAT, PROMPT, Trace

N_EXPERT, N_LAYERS = 8, 2


def trace_of(sequences, pieces=None, n_prompt=0, **meta):
    """sequences: per sequence, per token the experts that both layers use."""
    ids = np.array([[experts] * N_LAYERS for s in sequences for experts in s], np.uint8)
    texts = [p for each in pieces or [] for p in each]
    meta = {
        "format": FORMAT, "model": "made up", "architecture": "", "fingerprint": "", "n_expert": N_EXPERT, "n_used": ids.shape[2], "layers": list(range(N_LAYERS)),
        "bytes_per_expert": [10] * N_LAYERS, "n_embd": 0, "probs": None,
    } | ({"pieces": {str(i): p for i, p in enumerate(texts)}} if pieces else {}) | meta  # fmt: skip
    phase = np.concatenate([np.where(np.arange(len(s)) < n_prompt, PROMPT, DECODE) for s in sequences]).astype(np.uint8)
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    return Trace(ids=ids, token_ids=np.arange(len(ids), dtype=np.int32), offsets=offsets, phase=phase, meta=meta)


# Two tokens with the experts 0 and 1, then two with 2 and 3; the text says so at its third token, which the fourth settles.
PIECES = [[" So", ".", " Wait", ",", " no"]]
STORY = trace_of([[[0, 1], [0, 1], [0, 1], [2, 3], [2, 3]]], PIECES)
WAIT = Automaton({"alternative": ("Wait",)})


# --- the shift of the routing


def test_divergence_of_what_is_equal_and_of_what_has_nothing_in_common():
    a = np.array([[1.0, 1, 0, 0]])
    assert routing_shift.divergence(a, 3 * a) == pytest.approx(0, abs=1e-6)
    assert routing_shift.divergence(a, a[:, ::-1]) == pytest.approx(1)
    assert routing_shift.divergence(np.zeros((1, 4)), np.zeros((1, 4))) == 0


def test_a_shift_is_heard_once_and_soon():
    other = [[0, 1]] * 100 + [[4, 5]] * 100
    options = ShiftOptions(threshold=0.2, short=8, long=64, every=1, min_stage=8)
    marks = annotate.by_shift(trace_of([other]).sequence(0), N_EXPERT, options)
    assert [m.kind for m in marks] == ["shift"] and 100 < marks[0].row <= 110


def test_absent_experts_count_for_nothing():
    detector = ShiftDetector(1, 4, ShiftOptions(every=1))
    detector.feed(np.array([[0, 255]]))
    assert detector._short[0].tolist() == [1, 0, 0, 0]
    assert detector.score == pytest.approx(0, abs=1e-6)


def test_a_threshold_is_a_quantile_of_the_scores():
    trace = trace_of([[[i % 4, 4 + i % 3] for i in range(200)]] * 2)
    low, high = (annotate.shift_threshold(trace, q) for q in (0.5, 0.99))
    assert 0 <= low < high < 1
    assert annotate.shift_threshold(trace_of([[[0, 1]]]), 0.5) == float("inf")


# --- boundaries


def test_a_cue_counts_from_the_token_that_settles_it():
    marks = annotate.by_cues(STORY.sequence(0), annotate.pieces_of(STORY)[0], WAIT, "everywhere")
    assert marks == [Mark(3, "Wait", "alternative", 5)]
    staged = annotate.with_stages(STORY, [marks], {"by": "hand"})
    assert staged.stage.tolist() == [0, 0, 0, 1, 1]
    assert staged.meta["sequences"] == [{"boundaries": [[3, "Wait", "alternative"]]}] and staged.meta["annotated"] == {"by": "hand"}


def test_rows_of_a_prompt_have_no_stage_and_may_open_the_thinking():
    pieces = [["<think>", "\n", "Wait", ",", " no", "</think>", "Wait", "."]]
    trace = trace_of([[[0, 1]] * 8], pieces, n_prompt=2)
    marks = annotate.by_cues(trace.sequence(0), annotate.pieces_of(trace)[0], WAIT)
    assert [(m.row, m.cue) for m in marks] == [(3, "Wait"), (6, "</think>")]
    assert annotate.with_stages(trace, [marks], {}).stage.tolist() == [-1, -1, 0, 1, 1, 1, 2, 2]


def test_a_thinking_that_only_closes_was_opened_by_the_prompt():
    pieces = [["Wait", ",", "</think>", "Wait", "."]]
    trace = trace_of([[[0, 1]] * 5], pieces)
    assert annotate.where_of(pieces) == "thinking" and annotate.where_of([["Wait"]]) == "everywhere"
    assert [m.cue for m in annotate.by_cues(trace.sequence(0), pieces[0], WAIT)] == ["Wait", "</think>"]


def test_merging_keeps_tags_and_drops_what_comes_too_soon():
    marks = [Mark(4, "shift", "shift"), Mark(4, "Wait", "alternative"), Mark(6, "Wait", "alternative"), Mark(7, "</think>", "close"), Mark(12, "shift", "shift")]
    assert [m.row for m in annotate.merged(marks)] == [4, 6, 7, 12]
    assert annotate.merged(marks)[0].cue == "Wait"
    assert [(m.row, m.cue) for m in annotate.merged(marks, 5)] == [(4, "Wait"), (7, "</think>"), (12, "shift")]


def test_controls_have_as_many_boundaries():
    trace = trace_of([[[0, 1]] * 20, [[0, 1]] * 10])
    staged = annotate.with_stages(trace, [[Mark(3, "a", "a"), Mark(4, "a", "a"), Mark(19, "a", "a")], []], {})
    assert annotate.stage_rows(staged) == [[3, 4, 19], []]
    assert [[m.row for m in s] for s in annotate.evenly_like(staged)] == [[5, 10, 15], []]
    drawn = annotate.random_like(staged, 1)
    assert [len(s) for s in drawn] == [3, 0] and all(0 < m.row < 20 for m in drawn[0])
    assert drawn == annotate.random_like(staged, 1) != annotate.random_like(staged, 2)
    assert [[m.row for m in s] for s in annotate.every(trace, 8)] == [[8, 16], [8]]
    assert [m.row for m in annotate.filled(trace.sequence(0), [Mark(3, "a", "a")], 8)] == [3, 11, 19]
    with pytest.raises(TraceError, match="no stages"):
        annotate.random_like(trace)


def test_stages_reach_the_policy():
    # Two slots: after the boundary the stage policy still has what the first stage used, the oracle what is coming.
    staged = annotate.with_stages(STORY, annotate.every(STORY, 3), {})
    oracle, stage = (replay(staged, p, 2, "cpu").total() for p in ("oracle", "stage"))
    assert oracle["n_hits"] > stage["n_hits"]


# --- text


def test_a_trace_without_text_says_what_to_do():
    with pytest.raises(TraceError, match="--pieces"):
        annotate.pieces_of(trace_of([[[0, 1]]]))
    with pytest.raises(TraceError, match="found 1 pieces, wanted 5"):
        annotate.pieces_of(STORY, [["a"]])
    assert annotate.pieces_of(STORY, [[*"abcdefg"]]) == [[*"abcde"]]


@pytest.mark.parametrize("text", ["", "x\n", "[]\n", '{"generated": "a"}\n', '{"generated": [1]}\n'])
def test_pieces_that_are_none(text, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError):
        annotate.pieces_of(STORY, annotate.read_pieces(str(path)))


def test_surrogates_of_a_trace_become_bytes_again():
    emoji = "\U0001f600".encode()
    parts = [emoji[:2].decode("utf-8", "surrogateescape"), emoji[2:].decode("utf-8", "surrogateescape")]
    assert b"".join(map(annotate.as_bytes, parts)) == emoji
    assert annotate.as_bytes("\ud83d") == b"?"  # half of a pair in somebody's JSON


# --- coherence


def test_coherence_by_hand():
    counts = annotate.stage_counts(STORY.sequence(0), [3], N_EXPERT)
    assert counts.shape == (2, N_LAYERS, N_EXPERT) and counts[0, 0].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    assert annotate.tcseq(counts, 2).tolist() == [0.0]
    assert annotate.tcseq(annotate.stage_counts(STORY.sequence(0), [1], N_EXPERT), 2).tolist() == [1.0]
    assert annotate.tcseq(counts[:1], 2).tolist() == []


# --- calibration


def text_of_stages(n=6, length=30):
    """Each stage begins with "Wait" and a boundary of the routing; "So" comes every fifth token; "Hmm" once."""
    pieces, experts = [], []
    for i in range(n):
        words = [" Wait", ",", *[" So" if j % 5 == 0 else " x" for j in range(length)], "."]
        words[10:11] = ["."] if i else [". Hmm", "."]
        pieces += [w if w != " So" else ". So" for w in words]
        experts += [[(2 * i) % 8, (2 * i + 1) % 8]] * len(words)
    return trace_of([experts], [pieces])


def test_calibration_drops_noise_and_what_is_rare():
    trace = text_of_stages()
    found = calibrate.calibrate(trace, annotate.pieces_of(trace), {"alternative": ("Wait", "Hmm", "Alternatively"), "conclusion": ("So",)}, "everywhere", calibrate.Limits(most_per_1000=50, tolerance=1.0))
    assert found.cues == {"alternative": ("Wait",), "conclusion": ()}
    fates = {r.cue: r.fate for r in found.rows}
    assert fates["Wait"] == "kept" and fates["So"].startswith("noise") and fates["Hmm"].startswith("rare") and fates["Alternatively"] == "not found"
    wait = found.rows[0]
    assert wait.count == 6 and wait.median_length == 33 and len(wait.dominant) == N_LAYERS


def test_calibration_drops_what_parts_worse_than_chance():
    trace = text_of_stages()
    found = calibrate.calibrate(trace, annotate.pieces_of(trace), {"alternative": ("Wait",)}, "everywhere", calibrate.Limits(most_per_1000=50, tolerance=0.0))
    assert found.cues == {"alternative": ()} and found.rows[0].fate.startswith("coherence") and found.tcseq is None


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "edgemoe" / "cues"


def test_cue_sets_are_kept_by_model(models, config):
    with Source(models()) as source:
        assert cue_sets.find(source) is None
        mark = source.package_fingerprint()
        written = cue_sets.CueSet({"alternative": ("Wait",)}, mark, "m", "2030-01-01", "0", 0.1, 0.9)
        assert cue_sets.write(written) == config / f"{mark}.json"
        assert cue_sets.find(source) == written
        for damage in ("", "[]", '{"format": 2}', '{"format": 1, "cues": {"a": [1]}}'):
            (config / f"{mark}.json").write_text(damage)
            with pytest.raises(CueError):
                cue_sets.find(source)


# --- the commands


def test_annotate_and_controls(tmp_path, capsys):
    STORY.save(tmp_path / "t.npz")
    (tmp_path / "cues.json").write_text('{"alternative": ["Wait"]}')

    def run(name, out, *options):
        assert main(["trace", "annotate", str(tmp_path / name), "--out", str(tmp_path / out), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out), Trace.load(tmp_path / out)

    report, staged = run("t.npz", "s.npz", "--cues", str(tmp_path / "cues.json"))
    assert report["n_boundaries"] == 1 and report["cues"] == {"alternative": {"Wait": 1}} and report["tcseq"] == 0.0
    assert staged.stage.tolist() == [0, 0, 0, 1, 1]
    report, even = run("s.npz", "e.npz", "--evenly-like")
    assert even.stage.tolist() == [0, 0, 1, 1, 1] and report["how"]["like"]["by"] == ["cues"]
    assert run("t.npz", "n.npz", "--every", "2")[1].stage.tolist() == [0, 0, 1, 1, 2]
    assert run("s.npz", "r.npz", "--random-like", "--seed", "3")[0]["n_boundaries"] == 1
    assert run("t.npz", "h.npz", "--cues", "none", "--shift")[0]["n_boundaries"] == 0
    assert run("t.npz", "m.npz", "--max-stage", "2")[1].stage.tolist() == [0, 0, 1, 2, 2]
    assert main(["trace", "annotate", str(tmp_path / "t.npz"), "--out", str(tmp_path / "s.npz")]) == 0
    assert "1 boundaries in 5 tokens of 1 sequences, by cues" in capsys.readouterr().out
    assert main(["trace", "annotate", str(tmp_path / "t.npz"), "--out", str(tmp_path / "s.npz"), "--cues", "none"]) == 1


def test_a_recorded_trace_says_what_its_tokens_are(models, tmp_path):
    llm = edgemoe.Llama(models(), n_ctx=128, n_threads=1, verbose=False)
    tokens = [5, 9, 300 % llm.n_vocab(), 9]
    with edgemoe.Recorder(llm, tmp_path / "t.npz") as recorder, recorder.sequence():
        llm.eval(tokens)
    wanted = [llm.detokenize([t], special=True) for t in tokens]
    llm.close()
    trace = Trace.load(tmp_path / "t.npz")
    assert [annotate.as_bytes(p) for p in annotate.pieces_of(trace)[0]] == wanted


def test_calibrate_reads_texts_with_the_model(models, tmp_path, config, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "Wait, no. " * 8}) + "\n" + json.dumps({"answer": "So. Wait, no. " * 4}) + "\n")
    asked = ["calibrate", str(models()), "--texts", str(texts), "--ctx", "64", "--threads", "1", "--least-median", "1", "--most-per-1000", "500", "--tolerance", "1"]
    assert main(asked) == 0
    captured = capsys.readouterr()
    assert "candidates were not found" in captured.out
    with Source(models()) as source:
        kept = cue_sets.find(source)
    assert kept.figures["n_sequences"] == 2 and str(config) in captured.out
    assert main([*asked, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] is None
    assert main(["calibrate", str(models()), "--texts", str(tmp_path / "none")]) == 1


# --- recordings of others


def test_cues_in_real_channels():
    path = SHARED / "traces" / "gptoss20b" / "mmlu_pro_validation.npz"
    if not path.exists():
        pytest.skip(f"{path}: not here")
    from edgemoe.trace_import import Facts, import_trace

    trace = import_trace(path, Facts())
    pieces = annotate.pieces_of(trace)
    assert annotate.where_of(pieces) == "thinking"
    marks = [annotate.by_cues(s, p, Automaton(), "thinking") for s, p in zip(trace.sequences(), pieces)]
    # What the recording says of channels: the close of the thinking is where analysis gives way to final, within the tokens that name the channel.
    n = 0
    for s, found in zip(trace.sequences(), marks):
        final = np.flatnonzero(s.stage == 2)
        closes = [m.row for m in found if m.kind == "close"]
        if len(final):
            assert len(closes) == 1 and abs(closes[0] - final[0]) <= 8
            n += 1
    assert n and sum(map(len, marks)) > 2 * n
