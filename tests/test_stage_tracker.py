"""Stages while an engine computes: the tracker by itself, then the policy that goes by them, and what chat shows."""

import numpy as np

import edgemoe as em
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


def test_chat_marks_stages_and_lists_them(edgemoe, small_demo):
    text = 'Say this: "Wait, no."'
    result = edgemoe("chat", small_demo, "--stages", "everywhere", "--temp", "0", "-n", "40", input=f"{text}\n/stages\n/exit\n")
    assert result.returncode == 0 and "begins with" in result.stderr and " start" in result.stderr
    off = edgemoe("chat", small_demo, "--temp", "0", "-n", "4", input="Hello\n/stages\n/exit\n")
    assert "stages are not looked for: --stages, or --policy stage" in off.stderr
