"""The stages of the texts that an engine is computing: which one the next batch belongs to, and what each has cost.

A batch may have tokens of several sequences, each a text with stages of its own. What the cache's policy hears is one number, which grows when a stage begins in any of them: its
slots belong to all, and so do the counts by which it chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edgemoe.routing_shift import SHIFT, ShiftDetector
from edgemoe.stage import CLOSE, OPEN, Automaton, Boundary, Detector


@dataclass
class Stage:
    """A stretch of decoded tokens. `token` counts them from the beginning of the text; the counters are those of this stage, of all sequences that were computed together;
    `moved` those that its beginning brought in."""

    number: int
    cue: str  # "" for the first one
    kind: str
    token: int
    n_tokens: int = 0
    accesses: int = 0
    hits: int = 0
    moved: int = 0

    @property
    def name(self) -> str:
        return {OPEN: "thinking begins", CLOSE: "thinking ends", SHIFT: "the routing shifts"}.get(self.kind, self.cue) or "start"


@dataclass
class _Text:
    """One sequence."""

    detector: Detector
    stages: list[Stage] = field(default_factory=lambda: [Stage(0, "", "", 0)])
    n_tokens: int = 0  # decoded
    at: tuple[int, int, int] | None = None  # the counters up to which its last stage has been charged


class StageTracker:
    """counters() gives accesses, hits and loads that nobody waited for, since the model was opened; piece_of the bytes of some tokens, control tokens too.

    by: "cues", "shift" (of the routing) or "both". shift: the detector; uses(): tokens that used each expert of its layers since the model was opened, int64 [layers, experts].
    Boundaries count in what is decoded; a prompt is read for its tags only."""

    def __init__(
        self, piece_of: Callable[[list[int]], bytes], counters: Callable[[], tuple[int, int, int]], automaton: Automaton | None = None, where: str = "thinking", by: str = "cues",
        shift: ShiftDetector | None = None, uses: Callable[[], np.ndarray] | None = None,
    ):
        self.piece_of, self.counters, self.automaton, self.where, self.by, self.shift, self.uses = piece_of, counters, automaton, where, by, shift, uses
        self.heard: Callable[[Stage], None] | None = None  # called when a stage begins, once its first token is computed
        self.begin()

    def begin(self) -> None:
        """New texts, in all sequences."""
        self.texts: dict[int, _Text] = {}
        self.number = 0  # boundaries so far, of all sequences
        self._begun: list[Stage] = []
        self._before = (0, 0, 0)
        self._decodes = self._shifted = False
        if self.shift:
            self.shift.clear()
            self._used = self.uses()

    def _text(self, sequence: int) -> _Text:
        if sequence not in self.texts:
            self.texts[sequence] = _Text(Detector(self.automaton, where=self.where))
        return self.texts[sequence]

    def before(self, tokens: list[int], sequences: list[int] | None = None, positions: list[int] | None = None) -> int:
        """Tokens that are about to be computed together, the sequence of each, and its place in that (default: all of one that goes on). A sequence with one token is decoded. The
        number of the batch's stage."""
        sequences = sequences or [0] * len(tokens)
        for sequence, position in zip(sequences, positions or ()):
            if position == 0:
                self.texts.pop(sequence, None)
        found: dict[int, list[Boundary]] = {sequence: [] for sequence in sequences}
        for token, sequence in zip(tokens, sequences):
            text = self._text(sequence)
            if self.by != "shift":
                found[sequence] += text.detector.feed(self.piece_of([token]))
        decoded = [s for s, n in Counter(sequences).items() if n == 1]
        self._decodes, self._begun = len(decoded) == len(found), []
        now = self.counters() if decoded else None
        for sequence in decoded:
            text = self._text(sequence)
            begins = self._begins(text, found[sequence])
            if begins:
                _charge(text, now)
                text.stages.append(begins)
                self._begun.append(begins)
            elif text.at is None:
                text.at = now
            text.n_tokens += 1
            text.stages[-1].n_tokens += 1
        self._shifted = False
        if self._begun:
            self.number += 1
            self._before = now
        return self.number

    def _begins(self, text: _Text, found: list[Boundary]) -> Stage | None:
        """The stage that begins with the text's next token."""
        number, token = len(text.stages), text.n_tokens
        if found:
            return Stage(number, found[-1].cue, found[-1].kind, token)
        if self._shifted and text.stages[-1].n_tokens >= self.shift.options.min_stage:
            return Stage(number, SHIFT, SHIFT, token)
        return None

    def after(self) -> None:
        """They have been computed."""
        if self._begun:
            moved = self.counters()[2] - self._before[2]
            for stage in self._begun:
                stage.moved = moved
                if self.heard:
                    self.heard(stage)
            self._begun = []
        if self.shift:
            used = self.uses()
            if self._decodes:
                self._shifted = self.shift.feed_counts(np.maximum(used - self._used, 0).astype(np.float32))
            self._used = used

    def timeline(self, sequence: int = 0) -> list[Stage]:
        """All stages of a sequence's text so far."""
        text = self._text(sequence)
        if text.at:
            _charge(text, self.counters())
        return list(text.stages)


def _charge(text: _Text, now: tuple[int, int, int]) -> None:
    """Adds what was counted since to the text's last stage."""
    if text.at:
        text.stages[-1].accesses += now[0] - text.at[0]
        text.stages[-1].hits += now[1] - text.at[1]
    text.at = now
