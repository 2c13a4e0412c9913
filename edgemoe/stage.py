"""Where the reasoning in a text takes another line: cue phrases ("Wait", "Alternatively") and the tags around a model's thinking, found while the text is generated.

One finite automaton reads the pieces character by character, so that a phrase may lie across any number of tokens. Its states are made when they are first needed and kept:
a character costs one look into a table. A phrase counts when the next character shows that it has ended ("Wait" is none in "Waiting"), or when the text ends. A cue that is
written with a capital letter counts only at the start of a sentence and only with a capital letter; one that is written small counts anywhere. Otherwise case does not matter.

What is no tag: in quotes or backticks, and all between lines that begin with ```; there cues do not count either. Tags do not nest; one that has no partner is no error.
"""

from __future__ import annotations

import codecs
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgemoe.errors import EdgemoeError

# kind: cues. Of what many texts have, those that hardly occur in answers without thinking (docs/results/stages.md).
CUES = {
    "alternative": (
        "Wait", "But wait", "Oh wait", "No wait", "Hmm", "Hold on", "Alternatively", "Or maybe", "Maybe", "Perhaps", "What if", "Another way", "Another approach", "Another idea",
        "Another thought", "Instead", "Let me try", "Let's try", "Let me think", "Let's think", "Let me see if", "Let me consider", "Let me approach", "But maybe", "On second thought",
        "But perhaps", "So maybe", "So perhaps", "Let me start over", "Let me use", "Or, we could",
    ),
    "verification": (
        "Let me check", "Let's check", "Let me double-check", "Let me double check", "Let's double-check", "Let's double check", "Let me verify", "Let's verify", "Let me confirm",
        "Let me recheck", "Let me recap", "Let me go over", "Let me make sure", "Let me test", "Let's test", "Actually", "But just to be", "Just to be", "Just to make sure", "To verify",
        "To check", "To confirm", "Checking", "Verify", "Verifying", "But let me", "So let me",
    ),
    "conclusion": (
        "Therefore", "Thus", "Hence", "So the answer", "So answer", "So the final answer", "So the correct answer", "The answer is", "Final answer", "Answer:", "In conclusion", "So the maximum", "So the minimum",
        "In summary", "So all in all", "So overall", "So, the answer", "So, putting it all together", "Putting it all together",
    ),
}  # fmt: skip
# What stands around thinking: (opens, closes). A model may open with one and close with another.
TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final"),
)
OPEN, CLOSE = "open", "close"  # kinds of boundaries that tags make
FENCE = "\n```"
QUOTES = "`'\""
FOLDED = {"\u2019": "'", "\u2018": "'", "\u2010": "-", "\u2011": "-", "\u00a0": " ", "\u202f": " "}
MOST_KEPT = 1024  # characters in a state's table, which would grow with every alphabet; the others are looked up anew
FIRST_UNSPACED = "\u2e80"  # writing without spaces between words: a cue may begin and end anywhere

IN_WORD, BETWEEN, STOPPED, START = range(4)


class CueError(EdgemoeError):
    """Cues that cannot be used."""


@dataclass(frozen=True)
class Boundary:
    """A stage ends here and another begins."""

    cue: str  # as it stands in the set, or the tag
    kind: str  # of the set, or "open" and "close" for tags
    char: int  # where it begins, in characters of all pieces
    token: int  # the piece in which it begins, from 0
    heard: int  # the piece that settled it, from when on one can act


def read_cues(path: str) -> dict[str, tuple[str, ...]]:
    """A JSON object: kind -> list of cues; or an object with such a one under "cues", as `edgemoe calibrate` writes. Raises CueError."""
    try:
        with open(path, encoding="utf-8") as f:
            said = json.load(f)
    except OSError as e:
        raise CueError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise CueError(f"{path}: not JSON: {e}") from None
    said = said.get("cues", said) if isinstance(said, dict) else said
    if not isinstance(said, dict) or not all(isinstance(cues, list) for cues in said.values()):
        raise CueError(f"{path}: wanted an object of kinds, each with a list of cues")
    return checked_cues(said, path)


def checked_cues(cues: Mapping[str, Iterable[str]], where: str = "cues") -> dict[str, tuple[str, ...]]:
    cues = {kind: tuple(texts) for kind, texts in cues.items()}
    for kind, texts in cues.items():
        for text in texts:
            if not isinstance(text, str) or not text.strip() or text != text.strip():
                raise CueError(f"{where}: {kind}: found {text!r}, wanted a phrase without spaces around it")
    return cues


# --- the automaton


def _folded(ch: str) -> str:
    return FOLDED.get(ch) or ("\n" if ch == "\n" else " " if ch.isspace() else ch.lower()[:1])


def _in_word(ch: str) -> bool:
    return ch.isalnum() and ch < FIRST_UNSPACED


class _Node:
    """Of a tree of phrases, by folded characters."""

    __slots__ = ("children", "phrase")

    def __init__(self):
        self.children: dict[str, _Node] = {}
        self.phrase: _Phrase | None = None

    def add(self, text: str, phrase: _Phrase) -> None:
        node = self
        for ch in text:
            node = node.children.setdefault(_folded(ch), _Node())
        node.phrase = node.phrase or phrase


@dataclass(frozen=True)
class _Phrase:
    text: str
    kind: str
    length: int
    what: str = "cue"  # or open, close, fence, quoted (a tag behind a quote)


class _State:
    """How far each phrase has come, and what the next character may be the start of. `ended`: phrases whose last character was the last one, the longest first."""

    __slots__ = ("place", "active", "ended", "next")

    def __init__(self, place: int, active: tuple[_Node, ...]):
        self.place, self.active = place, active
        self.ended = tuple(sorted((n.phrase for n in active if n.phrase), key=lambda p: -p.length))
        self.next: dict[str, _State] = {}


def _place(place: int, ch: str) -> int:
    """Where a text stands after this character."""
    if ch == "\n":
        return START
    if ch in ".!?\u2026:;\u3002\uff01\uff1f":
        return STOPPED
    if ch.isspace():
        return START if place in (STOPPED, START) else BETWEEN
    if _in_word(ch):
        return IN_WORD
    return place if place in (STOPPED, START) and ch in "\"'`*_()[]#>-\u2013\u2014\u201c\u201d\u2018\u2019$\\" else BETWEEN


class Automaton:
    """Cues and tags, for any number of detectors. tags: pairs of what opens and closes thinking."""

    def __init__(self, cues: Mapping[str, Iterable[str]] = CUES, tags: Iterable[tuple[str, str]] = TAGS):
        self.at_start, self.anywhere, self.in_any_place = _Node(), _Node(), _Node()
        cues, tags = checked_cues(cues), tuple(tags)
        for kind, texts in cues.items():
            for text in texts:
                (self.at_start if text[0].isupper() else self.anywhere).add(text, _Phrase(text, kind, len(text)))
        for pair in tags:
            for text, what in zip(pair, (OPEN, CLOSE)):
                self.in_any_place.add(text, _Phrase(text, what, len(text), what))
                for quote in QUOTES:
                    self.in_any_place.add(quote + text, _Phrase(quote + text, what, len(text) + 1, "quoted"))
        self.in_any_place.add(FENCE, _Phrase(FENCE, "", len(FENCE), "fence"))
        phrases = [*(text for texts in cues.values() for text in texts), *(quote + text for pair in tags for text in pair for quote in QUOTES), FENCE]
        self.alphabet = {_folded(ch) for text in phrases for ch in text} | {" "}
        self.longest = max(map(len, phrases))
        self.states: dict[tuple, _State] = {}
        self.start = self.step(self._state(START, ()), "\n")

    def _state(self, place: int, active: tuple[_Node, ...]) -> _State:
        return self.states.setdefault((place, active), _State(place, active))

    def step(self, state: _State, ch: str) -> _State:
        """The state after one more character, kept for the next time."""
        folded = _folded(ch)
        active = self._active(state, ch, folded) if folded in self.alphabet else ()
        to = self._state(_place(state.place, ch), active)
        if len(state.next) < MOST_KEPT:
            state.next[ch] = to
        return to

    def _active(self, state: _State, ch: str, folded: str) -> tuple[_Node, ...]:
        roots = [self.in_any_place]
        if state.place != IN_WORD or ch >= FIRST_UNSPACED:
            roots.append(self.anywhere)
        if state.place == START and ch.isupper():
            roots.append(self.at_start)
        found = []
        for node in (*state.active, *roots):
            for key in (folded, " ") if folded == "\n" else (folded,):
                if key in node.children:
                    found.append(node.children[key])
        return tuple(found)


# --- the detector


class Detector:
    """Reads one text piece by piece. where: "thinking" (cues count between tags only) or "everywhere". opened: the prompt has opened the thinking already.
    min_stage: cues that come sooner after the last boundary, in pieces, do not count; tags do.

    >>> d = Detector(where="everywhere")
    >>> [b.cue for piece in ("So 4.", " Wa", "it", ", no") for b in d.feed(piece)]
    ['Wait']
    """

    def __init__(self, automaton: Automaton | None = None, *, where: str = "thinking", opened: bool = False, min_stage: int = 0):
        if where not in ("thinking", "everywhere"):
            raise CueError(f"where: found {where!r}, wanted thinking or everywhere")
        self.automaton = automaton or default_automaton()
        self.everywhere = where == "everywhere"
        self.min_stage = min_stage
        self.thinking = opened
        self.n_pieces = self.n_chars = 0
        self._state = self.automaton.start
        self._fenced = False
        self._last = 0  # piece of the last boundary
        self._busy = 0  # end of the last cue: one that overlaps it does not count
        self._starts: deque[tuple[int, int]] = deque(maxlen=self.automaton.longest + 2)  # (character, piece) of pieces that have any text
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, piece: str | bytes) -> list[Boundary]:
        """Boundaries that this piece has settled; they begin in it or in an earlier one. Bytes may end within a character."""
        if not isinstance(piece, str):
            piece = self._decode(piece)
        found: list[Boundary] = []
        at, state, step = self.n_chars, self._state, self.automaton.step
        if piece:
            self._starts.append((at, self.n_pieces))
        for ch in piece:
            if state.ended:
                state = self._settle(state, ch, at, found)
            state = state.next.get(ch) or step(state, ch)
            at += 1
        self.n_chars, self._state = at, state
        self.n_pieces += 1
        return found

    def finish(self) -> list[Boundary]:
        """What the end of the text settles: it was heard with the last piece. The detector then is at the start of another text of the same conversation."""
        found: list[Boundary] = []
        if self._state.ended:
            self.n_pieces -= 1
            self._settle(self._state, "", self.n_chars, found)
            self.n_pieces += 1
        self._state = self.automaton.start
        return found

    def _settle(self, state: _State, ch: str, at: int, found: list[Boundary]) -> _State:
        """Phrases have ended before `ch`, the character at `at`; from which state it is read on."""
        longest = state.ended[0]
        if longest.what == "fence":
            self._fenced = not self._fenced
        elif longest.what == "cue":
            if (self.thinking or self.everywhere) and not self._fenced and not (_in_word(ch[:1]) and _in_word(longest.text[-1])):
                self._cue(longest, at, found)
        elif not self._fenced and not (longest.what == "quoted" and longest.text[0] == ch):
            tag = next(p for p in state.ended if p.what in (OPEN, CLOSE))
            if self.thinking != (tag.what == OPEN):
                self.thinking = tag.what == OPEN
                self._add(tag, at, found)
            return self.automaton.start
        return state

    def _cue(self, phrase: _Phrase, at: int, found: list[Boundary]) -> None:
        if at - phrase.length < self._busy:
            return
        self._busy = at
        if self.n_pieces and self.n_pieces - self._last < self.min_stage:
            return
        self._add(phrase, at, found)

    def _add(self, phrase: _Phrase, at: int, found: list[Boundary]) -> None:
        char = at - phrase.length
        token = next((n for start, n in reversed(self._starts) if start <= char), 0)
        self._last = self.n_pieces
        found.append(Boundary(phrase.text, phrase.kind, char, token, self.n_pieces))


_default: list[Automaton] = []


def default_automaton() -> Automaton:
    """Of CUES and TAGS; made once."""
    if not _default:
        _default.append(Automaton())
    return _default[0]


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt, as the template made it, leaves the thinking open for the answer."""
    detector = Detector(_tags_only())
    detector.feed(prompt)
    detector.finish()
    return detector.thinking


def _tags_only() -> Automaton:
    return Automaton({})


def boundaries(text: str | Iterable[str | bytes], automaton: Automaton | None = None, **options) -> list[Boundary]:
    """All of a text, or of the pieces of one; options as of Detector. Of a plain text, tokens are characters."""
    detector = Detector(automaton, **options)
    found = [b for piece in text for b in detector.feed(piece)]
    return found + detector.finish()
