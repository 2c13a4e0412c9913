"""The stages of the text that an engine is computing: which one the next batch belongs to, and what each has cost.

One text at a time: tokens are taken in the order in which they are computed, whatever sequence they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgemoe.stage import CLOSE, OPEN, Automaton, Boundary, Detector

@dataclass
class Stage:
    """A stretch of decoded tokens. `token` counts them from the beginning of the text; the counters are those of this stage, `moved` those that its beginning brought in."""

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
        return {OPEN: "thinking begins", CLOSE: "thinking ends"}.get(self.kind, self.cue) or "start"


class StageTracker:
    """counters() gives accesses, hits and loads that nobody waited for, since the model was opened; piece_of the bytes of some tokens, control tokens too.

    Boundaries count in what is decoded; a prompt is read for its tags only."""

    def __init__(self, piece_of: Callable[[list[int]], bytes], counters: Callable[[], tuple[int, int, int]], automaton: Automaton | None = None, where: str = "thinking"):
        self.piece_of, self.counters, self.automaton, self.where = piece_of, counters, automaton, where
        self.heard: Callable[[Stage], None] | None = None  # called when a stage begins, once its first token is computed
        self.begin()

    def begin(self) -> None:
        """A new text."""
        self.detector = Detector(self.automaton, where=self.where)
        self.stages = [Stage(0, "", "", 0)]
        self.n_tokens = 0  # decoded
        self._before = self._at = None

    def before(self, tokens: list[int]) -> int:
        """Tokens that are about to be computed together; the number of their stage."""
        found: list[Boundary] = []
        for token in tokens:
            found += self.detector.feed(self.piece_of([token]))
        self._before = None
        if len(tokens) == 1:
            if found:
                self._close()
                self.stages.append(Stage(len(self.stages), found[-1].cue, found[-1].kind, self.n_tokens))
                self._before = self._at
            elif self._at is None:
                self._at = self.counters()
            self.n_tokens += 1
            self.stages[-1].n_tokens += 1
        return self.stages[-1].number

    def after(self) -> None:
        """They have been computed."""
        if self._before:
            self.stages[-1].moved = self.counters()[2] - self._before[2]
            if self.heard:
                self.heard(self.stages[-1])

    def timeline(self) -> list[Stage]:
        """All stages of this text so far."""
        self._close()
        return list(self.stages)

    def _close(self) -> None:
        """Adds what was counted since to the last stage."""
        now = self.counters()
        if self._at:
            self.stages[-1].accesses += now[0] - self._at[0]
            self.stages[-1].hits += now[1] - self._at[1]
        self._at = now
