"""Stages while an engine computes: the tracker by itself, then the policy that goes by them, and what chat shows."""

import numpy as np
import pytest
from llama_cpp import _internals

import edgemoe as em
from edgemoe import cue_sets
from edgemoe.errors import ModelError
from edgemoe.routing_shift import ShiftDetector, ShiftOptions
from edgemoe.stage_tracker import StageTracker

PIECES = {1: "<think>", 2: "First.", 3: " Wait", 4: ", no.", 5: " So", 6: "</think>", 7: " 4"}


def tracker(**options):
    counts = [0, 0, 0]
    t = StageTracker(lambda tokens: "".join(PIECES[x] for x in tokens).encode(), lambda: tuple(counts), **options)
    return t, counts


def test_each_token_has_its_stage():
    t, counts = tracker()
    heard = []
    t.heard = heard.append
    numbers = [t.before([1, 2, 3, 4])]   # a prompt: its tags are read, its cues are none
    t.after()
    for token in (2, 3, 4, 5, 6, 7):
        numbers.append(t.before([token]))
        counts[:] = [counts[0] + 10, counts[1] + 4, counts[2] + (token == 4) * 3]
        t.after()
    assert numbers == [0, 0, 0, 1, 1, 1, 2]   # a cue has ended when the next piece begins, and so has a tag
    assert [(s.name, s.token, s.n_tokens, s.accesses, s.hits, s.moved) for s in t.timeline()] == [
        ("start", 0, 2, 20, 8, 0), ("Wait", 2, 3, 30, 12, 3), ("thinking ends", 5, 1, 10, 4, 0),
    ]
    assert [s.name for s in heard] == ["Wait", "thinking ends"]
    t.begin()
    assert [(s.number, s.n_tokens) for s in t.timeline()] == [(0, 0)]


def test_everywhere():
    t, _ = tracker(where="everywhere")
    assert [t.before([x]) for x in (2, 3, 4, 5)] == [0, 0, 1, 1]


def test_each_sequence_of_a_batch_has_stages_of_its_own():
    t, counts = tracker()
    t.before([1, 2, 1, 2], [0, 0, 5, 5], [0, 1, 0, 1])
    t.after()
    numbers = []
    for step in ((3, 2), (4, 3), (2, 4), (2, 2), (2, 6), (2, 2)):   # in sequence 0 "Wait" ends with the second step, in 5 with the third
        numbers.append(t.before(list(step), [0, 5]))
        counts[:] = [n + k for n, k in zip(counts, (10, 4, 0))]
        t.after()
    assert numbers == [0, 1, 2, 2, 2, 3]
    assert [(s.name, s.token, s.n_tokens, s.accesses) for s in t.timeline(0)] == [("start", 0, 1, 10), ("Wait", 1, 5, 50)]
    assert [(s.name, s.token, s.n_tokens) for s in t.timeline(5)] == [("start", 0, 2), ("Wait", 2, 3), ("thinking ends", 5, 1)]
    # A prompt of one beside a token of the other; then the other begins anew.
    t.before([2, 1, 2], [0, 5, 5], [8, 0, 1])
    assert [s.n_tokens for s in t.timeline(0)] == [1, 6] and [(s.name, s.n_tokens) for s in t.timeline(5)] == [("start", 0)]


def test_a_shift_of_the_routing_begins_a_stage_with_the_token_after():
    used = np.zeros((1, 4), np.int64)
    shift = ShiftDetector(1, 4, ShiftOptions(threshold=0.1, short=2, long=8, every=1, min_stage=4))
    t, _ = tracker(by="both", shift=shift, uses=used.copy)
    t.before([1, 2])
    numbers = []
    for i in range(16):
        numbers.append(t.before([2 if i < 14 else 7]))
        used[0, 0 if i < 8 else 3] += 1
        t.after()
    assert numbers.index(1) in (9, 10) and numbers[-1] == 1
    assert [s.name for s in t.timeline()] == ["start", "the routing shifts"]
    used[:] = 0   # as when the cache is cleared
    t.before([2])
    t.after()
    assert (shift._short >= 0).all()


def test_the_stage_policy_moves_at_boundaries_only_and_no_bits_change(small_demo):
    """The same tokens with all experts mapped: the same logits. Between boundaries nothing moves in."""
    def run(**options):
        llm = em.Llama(str(small_demo), n_ctx=512, n_threads=2, verbose=False, exact=True, **options)
        tokens = llm.tokenize(b"<think>The sky is blue. Wait, is it? It may be that the light is scattered by the air. Wait, let me think again about the colours of it.</think>Yes.")
        moved = []
        llm.eval(tokens[:4])
        for token in tokens[4:]:
            llm.eval([token])
            llm.wait_cache()
            moved.append(llm.expert_stats().get("n_proactive", 0))
        found = llm._scores[-1].copy(), llm.stages(), np.diff(moved)
        llm.close()
        return found

    expected, nothing, _ = run()
    assert nothing == []
    logits, stages, moved = run(slots=4, device="CPU", policy="stage", misses="cpu")
    np.testing.assert_array_equal(logits, expected)
    assert [s.name for s in stages] == ["start", "Wait", "Wait", "thinking ends"]
    # Empty slots are filled by whoever comes; once they are full, only a boundary brings anybody in.
    begins = {s.token - 1 for s in stages[1:]}
    late = [i for i in np.flatnonzero(moved) if i > stages[1].token]
    assert late and set(late) <= begins, (late, begins)
    assert sum(s.moved for s in stages) > 0


def decode_together(llm, tokens, position):
    """One token of each sequence, as a batch; their logits."""
    batch = _internals.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
    b = batch.batch
    b.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, True
        b.seq_id[i][0] = i
    llm._ctx.decode(batch)
    return np.stack([np.ctypeslib.as_array(llm._ctx.get_logits_ith(i), (llm.n_vocab(),)).copy() for i in range(len(tokens))])


@pytest.mark.parametrize("where", [dict(slots=4, device="CPU", policy="stage", misses="cpu"), dict(ram=40 << 20, ram_policy="stage+lru")])
def test_sequences_side_by_side(where, small_demo):
    """A boundary in one chooses anew for all; the logits are those of all experts mapped."""
    texts = b"Red. Wait, is it red or blue, or is it green?", b"One, two, three, four. Hmm, that is five? No."
    def run(**options):
        llm = em.Llama(str(small_demo), n_ctx=256, n_threads=2, verbose=False, exact=True, n_seq_max=2, **options)
        tokens = np.array([llm.tokenize(t)[:11] for t in texts])
        logits = [decode_together(llm, step, i) for i, step in enumerate(tokens.T.tolist())]
        stages, moved = [[s.name for s in llm.stages(i)] for i in range(2)], llm.stages(1)[-1].moved if "stages" in options else 0
        llm.close()
        return np.stack(logits), stages, moved

    expected, _, _ = run()
    logits, stages, moved = run(stages="everywhere", **where)
    np.testing.assert_array_equal(logits, expected)
    assert stages == [["start", "Wait"], ["start", "Hmm"]] and moved > 0


def test_a_shift_needs_slots_and_a_threshold(small_demo, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    options = dict(n_ctx=64, verbose=False)
    with pytest.raises(ModelError, match="all experts are mapped"):
        em.Llama(str(small_demo), stage_by="shift", **options)
    with pytest.raises(ModelError, match="no threshold is known; `edgemoe calibrate`"):
        em.Llama(str(small_demo), stage_by="shift", slots=4, device="CPU", **options)
    with pytest.raises(ModelError, match="found 'words', wanted one of cues, shift, both"):
        em.Llama(str(small_demo), stage_by="words", **options)
    llm = em.Llama(str(small_demo), slots=4, device="CPU", **options)
    mark = llm.source.package_fingerprint()
    llm.close()
    cue_sets.write(cue_sets.CueSet({"alternative": ("Wait",)}, mark, "demo", "2026-01-01", "0", shift_threshold=0.0))
    llm = em.Llama(str(small_demo), slots=4, device="CPU", stage_by="shift", policy="stage", **options)
    for token in llm.tokenize(b"Wait, the quick brown fox jumps over the lazy dog. " * 4)[:40]:
        llm.eval([token])
    # Every comparison is above the threshold: only the shortest stage holds them back.
    assert [(s.name, s.token) for s in llm.stages()] == [("start", 0), ("the routing shifts", 16), ("the routing shifts", 32)]
    llm.close()


def test_chat_marks_stages_and_lists_them(edgemoe, small_demo):
    text = 'Say this: "Wait, no."'
    result = edgemoe("chat", small_demo, "--stages", "everywhere", "--temp", "0", "-n", "40", input=f"{text}\n/stages\n/exit\n")
    assert result.returncode == 0 and "begins with" in result.stderr and " start" in result.stderr
    off = edgemoe("chat", small_demo, "--temp", "0", "-n", "4", input="Hello\n/stages\n/exit\n")
    assert "stages are not looked for: --stages, or --policy stage" in off.stderr
