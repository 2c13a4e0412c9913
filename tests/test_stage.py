"""Cues and tags in text that comes in pieces, and the inputs that break such detectors."""

import json
import random

import pytest

from edgemoe import stage
from edgemoe.stage import CLOSE, OPEN, Automaton, CueError, Detector, boundaries, opens_thinking

FEW = Automaton({"alternative": ("Wait", "But wait", "Alternatively", "another way"), "verification": ("Let me check", "Let me check again"), "conclusion": ("Therefore",)})


def found(*pieces, where="everywhere", automaton=FEW, **options):
    return [(b.cue, b.token) for b in boundaries(pieces, automaton, where=where, **options)]


def cues(text, **options):
    return [b.cue for b in boundaries(text, FEW, **({"where": "everywhere"} | options))]


def test_a_cue_across_token_boundaries_begins_where_its_first_character_is():
    assert boundaries(["So 4.", " Al", "tern", "atively", ", it"], FEW, where="everywhere") == [stage.Boundary("Alternatively", "alternative", char=6, token=1, heard=4)]


@pytest.mark.parametrize(
    "text, heard",
    [
        ("So. Wait, no", ["Wait"]),
        ("So. WAIT, no", ["Wait"]),
        ("So\nWait, no", ["Wait"]),
        ("So\n\n- **Wait** no", ["Wait"]),
        ('He said. "Wait," she', ["Wait"]),
        ("1. Wait, no", ["Wait"]),
        ("We Wait here", []),  # not at the start of a sentence
        ("So. wait, no", []),  # not with a capital letter
        ("So. Waiting is", []),
        ("So. Wait4 it", []),
        ("So. Await", []),
        ("So. But wait, no", ["But wait"]),  # and not "wait" once more
        ("It is 3.14. Therefore 3", ["Therefore"]),
        ("there is Another WAY to", ["another way"]),  # anywhere, whatever its case
        ("there is manother way", []),
        ("Let me\ncheck this", ["Let me check"]),
        ("Let\u00a0me check", ["Let me check"]),
    ],
)
def test_case_and_the_start_of_sentences(text, heard):
    assert cues(text) == heard
    assert [b.cue for b in boundaries([text], FEW, where="everywhere")] == heard


def test_a_cue_at_the_very_start_and_the_very_end():
    assert found("Wait", ", so", " it.", " Wait") == [("Wait", 0), ("Wait", 3)]
    assert found("Wait") == [("Wait", 0)]
    last = boundaries(["Yes.", " Wa", "it"], FEW, where="everywhere")[0]
    assert (last.char, last.token, last.heard) == (5, 1, 2)


def test_cues_that_overlap_count_once():
    assert cues("Let me check again. So") == ["Let me check"]  # the first that has ended; the longer one overlaps it
    assert cues("Wait. Wait. Wait") == ["Wait"] * 3


def test_curly_apostrophes_and_hyphens_are_those_of_the_cue():
    automaton = Automaton({"verification": ("Let's double-check",)})
    assert boundaries("Let\u2019s double\u2011check it", automaton, where="everywhere")


def test_min_stage_counts_pieces_from_the_start_and_from_the_last_boundary():
    pieces = ["Wait", ".", " Wait", ".", " x", ".", " Wait", "."]
    assert found(*pieces) == [("Wait", 0), ("Wait", 2), ("Wait", 6)]
    assert found(*pieces, min_stage=3) == [("Wait", 2), ("Wait", 6)]
    assert found(*pieces, min_stage=5) == [("Wait", 6)]


# --- tags


def test_cues_count_in_the_thinking_only():
    text = "Wait. <think>Wait, no. Therefore</think>Therefore, Wait"
    assert cues(text, where="thinking") == ["<think>", "Wait", "Therefore", "</think>"]
    assert [b.kind for b in boundaries(text, FEW)] == [OPEN, "alternative", "conclusion", CLOSE]


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_tag_split_over_two_pieces(cut):
    tag = "<think>"
    assert found(tag[:cut], tag[cut:], "Wait", ".", "</thi", "nk>", "Wait.", where="thinking") == [("<think>", 0), ("Wait", 2), ("</think>", 4)]


def test_channels_of_gpt_oss():
    pieces = ["<|channel|>", "analysis", "<|message|>", "Wait", ",", " x", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Wait", "."]
    assert found(*pieces, where="thinking") == [("<|channel|>analysis<|message|>", 0), ("Wait", 3), ("<|end|>", 6)]
    assert found("<|channel|>", "analysis", "<|message|>", "x", "<|channel|>", "final", "<|message|>", where="thinking")[-1] == ("<|channel|>final", 4)


def test_no_tag_two_thinkings_and_a_prompt_that_has_opened_one():
    assert cues("Wait. Therefore", where="thinking") == []
    twice = "<think>Wait.</think>a<think>Wait.</think>Wait"
    assert cues(twice, where="thinking") == ["<think>", "Wait", "</think>"] * 2
    assert cues("Wait.</think>Wait", where="thinking", opened=True) == ["Wait", "</think>"]


@pytest.mark.parametrize(
    "prompt, opened",
    [
        ("<|user|>hello<|assistant|><think>\n", True),
        ("<|user|>hello<|assistant|><think>\n\n</think>\n\n", False),
        ("<|user|>hello<|assistant|>", False),
        ("<|user|>what is `<think>`?<|assistant|>", False),
        ("", False),
    ],
)
def test_whether_a_prompt_has_opened_the_thinking(prompt, opened):
    assert opens_thinking(prompt) is opened


@pytest.mark.parametrize("text", ["the tag `</think>` ends it. ", 'print("</think>")\n', "x = '</think>'\n", "look:\n```html\n</think>\nWait\n```\n"])
def test_a_literal_tag_in_code_is_none(text):
    assert cues("<think>" + text + "Therefore</think>", where="thinking") == ["<think>", "Therefore", "</think>"]


def test_a_tag_right_behind_code_is_one():
    assert cues("<think>it is `x`</think>", where="thinking") == ["<think>", "</think>"]


@pytest.mark.parametrize(
    "text, tags",
    [
        ("<think><think>a</think>b</think>c", ["<think>", "</think>"]),  # they do not nest
        ("</think></think>", []),
        ("<think", []),
        ("<<think>a<</think>", ["<think>", "</think>"]),
        ("<think>a", ["<think>"]),
        ("<|channel|>analysis", []),
        ("<think>a</think", ["<think>"]),
    ],
)
def test_malformed_and_nested_tags(text, tags):
    assert cues(text, where="thinking") == tags
    assert [b.cue for b in boundaries([text], FEW)] == tags


# --- pieces


def test_bytes_of_an_emoji_over_several_tokens():
    emoji = "\U0001f600".encode()
    pieces = [b"So", emoji[:1], emoji[1:3], emoji[3:], b". Wait", b", "]
    assert boundaries(pieces, FEW, where="everywhere") == [stage.Boundary("Wait", "alternative", char=5, token=4, heard=5)]
    assert found(b"\xff\xfe", emoji[:2], b". Wait.") == [("Wait", 2)]  # broken ones


def test_empty_pieces_have_a_place_and_no_text():
    assert found("", "", "Wait", "", "", ".") == [("Wait", 2)]
    assert found() == found("") == []


def test_writing_without_spaces():
    automaton = Automaton({"alternative": ("\u7b49\u7b49",)})
    assert len(boundaries("\u4e0d\u5bf9\uff0c\u7b49\u7b49\uff0c\u518d\u60f3\u7b49\u7b49\u770b", automaton, where="everywhere")) == 2


def test_any_cut_of_any_text_finds_the_same():
    rng = random.Random(5)
    parts = ["Wait", "But wait", " ", "\n", ". ", "<think>", "</think>", "`", "```", "\n```\n", '"', "Let me check", "again", "x", "\u00e9", "\U0001f600", "\ud800", "<|channel|>", "analysis", "<|message|>", "<|end|>"]
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(0, 25)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        for where in ("thinking", "everywhere"):
            whole, cut = (boundaries(p, FEW, where=where) for p in (text, pieces))
            assert [(b.cue, b.char) for b in whole] == [(b.cue, b.char) for b in cut]


def test_the_automaton_does_not_grow_with_what_it_reads():
    automaton = Automaton({"alternative": ("Wait",)})
    for start in range(0x2000, 0xD000, 64):
        boundaries(". Wa" + "".join(map(chr, range(start, start + 64))), automaton, where="everywhere")
    n = len(automaton.states)
    assert n < 100 and all(len(s.next) <= stage.MOST_KEPT for s in automaton.states.values())
    boundaries("Wait. " * 1000, automaton, where="everywhere")
    assert len(automaton.states) < n + 20


def test_a_detector_goes_on_after_the_end_of_a_text():
    d = Detector(FEW, where="everywhere")
    assert [b.cue for b in d.feed("Wait") + d.finish() + d.finish() + d.feed("Wait") + d.finish()] == ["Wait", "Wait"]


# --- sets


def test_cues_are_read_from_a_file(tmp_path):
    path = tmp_path / "cues.json"
    path.write_text(json.dumps({"alternative": ["Hmm"]}))
    assert stage.read_cues(str(path)) == {"alternative": ("Hmm",)}
    path.write_text(json.dumps({"format": 1, "cues": {"alternative": ["Hmm"]}}))
    assert stage.read_cues(str(path)) == {"alternative": ("Hmm",)}


@pytest.mark.parametrize("text", ["", "[]", '{"a": "Hmm"}', '{"a": [""]}', '{"a": [" Hmm"]}', '{"a": [1]}', '{"cues": 3}', "\xff"])
def test_files_that_are_no_cues_are_refused(text, tmp_path):
    path = tmp_path / "cues.json"
    path.write_text(text)
    with pytest.raises(CueError, match="cues.json"):
        stage.read_cues(str(path))


def test_the_default_cues_are_well_formed():
    assert stage.checked_cues(stage.CUES) == stage.CUES
    assert len({c for cues in stage.CUES.values() for c in cues}) == sum(map(len, stage.CUES.values()))
    for kind, texts in stage.CUES.items():
        for text in texts:
            assert any(b.kind == kind for b in boundaries(f"So. {text} it", where="everywhere")), text
