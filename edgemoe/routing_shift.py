"""Stage boundaries without words: the experts that are used now differ from those that were used for a while.

Two histograms of the chosen experts per layer, one over a short and one over a long window (both fade, so that a token costs the same however long the windows are), are
compared by their Jensen-Shannon divergence, the mean over some of the layers, in bits: 0 for equal ones, at most 1. Above a threshold, which is a quantile of what a trace
of the model has, a stage ends; the long window then begins again with what the short one holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_LAYERS = 8
SHIFT = "shift"  # the kind of boundary


@dataclass(frozen=True)
class ShiftOptions:
    """short, long: tokens. every: tokens from one comparison to the next. min_stage: tokens from one boundary to the next, and from the start to the first."""

    threshold: float = np.inf
    short: int = 16
    long: int = 64
    every: int = 4
    min_stage: int = 16
    most_layers: int = MOST_LAYERS


class ShiftDetector:
    """Hears the routing of one sequence, token by token. `score`: of the last comparison."""

    def __init__(self, n_layers: int, n_expert: int, options: ShiftOptions = ShiftOptions()):
        self.options = options
        self.layers = np.unique(np.linspace(0, n_layers - 1, min(n_layers, options.most_layers)).astype(int))
        self._rows = np.arange(len(self.layers))[:, None]
        self._short, self._long = (np.zeros((len(self.layers), n_expert), np.float32) for _ in range(2))
        self._fade = [np.float32(1 - 1 / max(1, n)) for n in (options.short, options.long)]
        self.n_expert = n_expert
        self.clear()

    def clear(self) -> None:
        self._short[:] = 0
        self._long[:] = 0
        self.n_tokens = self.n_since = 0
        self.score = 0.0

    def feed(self, ids: np.ndarray, probs: np.ndarray | None = None) -> bool:
        """ids [layers, used] of one token; n_expert or more is no expert. probs likewise: what each choice weighs (default: all the same). True: a stage has ended with this
        token."""
        counts = np.zeros((len(self.layers), self.n_expert + 1), np.float32)  # the last column is for what is absent
        counts[self._rows, np.minimum(ids[self.layers], self.n_expert)] = 1 if probs is None else probs[self.layers]
        return self.feed_counts(counts[:, :-1])

    def feed_counts(self, counts: np.ndarray) -> bool:
        """The same of a step whose tokens may be of several sequences: how many used each expert, float32 [len(self.layers), n_expert]."""
        for window, fade in ((self._short, self._fade[0]), (self._long, self._fade[1])):
            window *= fade
            window += counts
        self.n_tokens += 1
        self.n_since += 1
        if self.n_tokens % self.options.every:
            return False
        self.score = divergence(self._short, self._long)
        if self.score <= self.options.threshold or self.n_since < self.options.min_stage:
            return False
        self._long[:] = self._short
        self.n_since = 0
        return True


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Jensen-Shannon, in bits, of the rows of two tables of counts [layers, experts]; the mean over the rows."""
    p, q = (x / np.maximum(x.sum(1, keepdims=True), 1e-9) for x in (a, b))
    m = (p + q) / 2
    # x log x is 0 for x = 0, which the small number does.
    parts = [(x * np.log2(np.maximum(x, 1e-12))).sum(1) for x in (m, p, q)]
    return float(np.maximum(0, (parts[1] + parts[2]) / 2 - parts[0]).mean())


def scores(ids: np.ndarray, n_expert: int, options: ShiftOptions = ShiftOptions(), probs: np.ndarray | None = None) -> np.ndarray:
    """Of every comparison in a sequence ids [tokens, layers, used], without boundaries."""
    detector = ShiftDetector(ids.shape[1], n_expert, ShiftOptions(short=options.short, long=options.long, every=options.every, most_layers=options.most_layers))
    found = []
    for i, row in enumerate(ids):
        detector.feed(row, None if probs is None else probs[i])
        if detector.n_tokens % options.every == 0 and detector.n_tokens >= options.min_stage:
            found.append(detector.score)
    return np.array(found)


def threshold(parts: list[np.ndarray], quantile: float) -> float:
    """Of the scores of several sequences; infinite where there are none."""
    together = np.concatenate([np.empty(0), *parts])
    return float(np.quantile(together, quantile)) if len(together) else float("inf")
