"""Policies that change what the model computes. They hit always, by construction, so they are listed apart: what counts is the router mass that they lose.

temporally-extended (like Temporally-Extended Mixture-of-Experts): each layer keeps a set of experts, and routing is masked to it. When the router mass that the set
captures, averaged over the last `window` tokens, falls under `threshold`, the best by the averaged probabilities become the new set, and every expert that comes in is
charged. Unsure in the public text: how the average begins (here over as many tokens as there are), and what stays when probabilities are equal (here what is there).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgemoe.errors import EdgemoeError
from edgemoe.trace import DECODE, Trace

NAME = "temporally-extended"
DEFAULTS = {"window": 16.0, "threshold": 0.6}
MOST_BYTES = 256 << 20  # of the window's probabilities


@dataclass(frozen=True)
class Lossy:
    """Of decoding. proactive: changes; mass_lost: share of the router's mass outside of the sets; chosen_outside: routed pairs outside, of n_pairs. Per sequence [S]."""

    policy: str
    n_slots: int
    n_tokens: np.ndarray
    n_proactive: np.ndarray
    mass_lost: np.ndarray  # summed over tokens and layers
    n_rows: np.ndarray  # (token, layer) pairs with a routing
    n_outside: np.ndarray
    n_pairs: np.ndarray


def read(text: str) -> tuple[int, float]:
    """window, threshold of "temporally-extended:window=16,threshold=0.6". Raises EdgemoeError."""
    values = dict(DEFAULTS)
    for part in filter(None, text.partition(":")[2].split(",")):
        key, _, value = part.partition("=")
        try:
            if key not in values:
                raise ValueError
            values[key] = float(value)
        except ValueError:
            raise EdgemoeError(f"policy {text}: {part}: wanted window=TOKENS, threshold=SHARE") from None
    window, threshold = values["window"], values["threshold"]
    if window < 1 or window != int(window) or not 0 < threshold <= 1:
        raise EdgemoeError(f"policy {text}: wanted a window of 1 token or more and a threshold above 0, up to 1")
    return int(window), threshold


def simulate(trace: Trace, text: str, n_slots: int, warm: bool = False, progress=None) -> Lossy:
    """n_slots: experts per layer. warm: sets are kept from one sequence to the next. Prompts count for the sets, not in the result. progress: called per sequence.

    Raises EdgemoeError for a trace without probabilities. Of traces with those of the chosen experts only, the mass is that of the chosen."""
    window, threshold = read(text)
    if trace.probs is None:
        raise EdgemoeError(f"policy {text}: {trace.where} has no probabilities")
    n_sequences = len(trace.offsets) - 1
    found = np.zeros((6, n_sequences))
    at_once = max(1, MOST_BYTES // (4 * window * trace.n_layers * trace.n_expert))
    groups = [range(i, i + 1) for i in range(n_sequences)] if warm else [range(i, min(i + at_once, n_sequences)) for i in range(0, n_sequences, at_once)]
    state = None
    for group in groups:
        if state is None or not warm:
            state = _Sets(len(group), trace, n_slots, window, threshold)
        found[:, list(group)] = _sequences(trace, group, state)
        for _ in group if progress else ():
            progress()
    n_tokens, n_proactive, mass_lost, n_rows, n_outside, n_pairs = found
    return Lossy(text, n_slots, n_tokens.astype(int), n_proactive.astype(int), mass_lost, n_rows.astype(int), n_outside.astype(int), n_pairs.astype(int))


class _Sets:
    """The sets of all layers of several sequences that run side by side, and the probabilities of the last tokens of each."""

    def __init__(self, n: int, trace: Trace, n_slots: int, window: int, threshold: float):
        shape = (n, trace.n_layers, trace.n_expert)
        self.n_slots, self.window, self.threshold = n_slots, window, threshold
        self.held = np.zeros(shape, bool)
        self.last = np.zeros((window, *shape), np.float32)
        self.place = 0

    def step(self, probs: np.ndarray, active: np.ndarray) -> np.ndarray:
        """probs [n, layers, experts] of one token each, shares of its mass; active [n]. Returns how many experts came in, [n]."""
        self.last[self.place] = probs
        self.place = (self.place + 1) % self.window
        mean = self.last.sum(0)
        mass = mean.sum(-1)
        captured = np.divide((mean * self.held).sum(-1), mass, out=np.ones_like(mass), where=mass > 0)
        sequence, layer = np.nonzero((captured < self.threshold) & active[:, None])
        came = np.zeros(len(probs), int)
        if len(sequence):
            rank = mean[sequence, layer] + 1e-6 * self.held[sequence, layer]
            best = np.argsort(-rank, axis=1, kind="stable")[:, : self.n_slots]
            new = np.zeros(rank.shape, bool)
            np.put_along_axis(new, best, np.take_along_axis(rank, best, 1) > 0, 1)
            np.add.at(came, sequence, (new & ~self.held[sequence, layer]).sum(1))
            self.held[sequence, layer] = new
        return came


def _sequences(trace: Trace, group: range, sets: _Sets) -> np.ndarray:
    """[6, sequences]: the fields of Lossy, in its order."""
    starts, ends = trace.offsets[list(group)], trace.offsets[[i + 1 for i in group]]
    found = np.zeros((6, len(group)))
    everyone = np.arange(len(group))
    for t in range(int((ends - starts).max(initial=0))):
        active = starts + t < ends
        rows = np.minimum(starts + t, trace.n_tokens - 1)
        ids = trace.ids[rows]
        routed = (ids != trace.absent) & active[:, None, None]
        probs = _dense(trace, rows, ids, routed)
        there = routed.any(-1)
        ids = np.where(routed, ids, 0)
        inside = sets.held[everyone[:, None, None], np.arange(trace.n_layers)[:, None], ids]
        lost = ((probs * ~sets.held).sum(-1) * there).sum(-1)
        counted = active & (trace.phase[rows] == DECODE)
        came = sets.step(probs, active)
        found += np.array([np.ones(len(group)), came, lost, there.sum(-1), (routed & ~inside).sum((1, 2)), routed.sum((1, 2))]) * counted
    return found


def _dense(trace: Trace, rows: np.ndarray, ids: np.ndarray, routed: np.ndarray) -> np.ndarray:
    """[n, layers, experts] float32 that add up to 1, or to 0 where nothing was routed."""
    probs = np.asarray(trace.probs[rows], np.float32)
    if probs.shape[-1] == trace.n_expert and trace.meta.get("probs") != "chosen":
        dense = probs * routed.any(-1)[..., None]
    else:
        dense = np.zeros((*ids.shape[:2], trace.n_expert), np.float32)
        # Absent ones come first, so that what stands for them cannot overwrite an expert 0 that is there.
        order = np.argsort(routed, axis=-1, kind="stable")
        np.put_along_axis(dense, np.take_along_axis(np.where(routed, ids, 0).astype(np.int64), order, -1), np.take_along_axis(probs * routed, order, -1), -1)
    total = dense.sum(-1, keepdims=True)
    return np.divide(dense, total, out=dense, where=total > 0)


def summary(found: Lossy, trace: Trace) -> dict:
    """A row for reports."""
    n_tokens, n_rows = int(found.n_tokens.sum()), int(found.n_rows.sum())
    sizes = np.array(trace.meta["bytes_per_expert"], np.float64)
    per_token = float(found.n_proactive.sum() / n_tokens) if n_tokens else None
    return {
        "policy": found.policy,
        "n_slots": found.n_slots,
        "n_tokens": n_tokens,
        "n_proactive": int(found.n_proactive.sum()),
        "changes_per_token": per_token,
        # Layers differ little in size, and changes are not kept by layer.
        "load_mb": per_token * float(sizes.mean()) / 1e6 if n_tokens and sizes.all() else None,
        "mass_lost": float(found.mass_lost.sum() / n_rows) if n_rows else None,
        "n_outside": int(found.n_outside.sum()),
        "n_pairs": int(found.n_pairs.sum()),
        "mass_of": "all experts" if trace.meta.get("probs") == "all" else "the chosen experts",
    }
