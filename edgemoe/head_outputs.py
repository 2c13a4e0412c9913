"""What learned heads say on recorded hidden states: the arrays head_t and head_s of a trace, in float32 as an engine computes them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgemoe.heads import MODES, Heads
from edgemoe.trace import Trace

ROWS = 1024  # that are read together
MOST_IN_MEMORY = 256 << 20  # bytes; larger arrays lie in a file that goes when they do


def outputs(heads: Heads, traces: list[Trace], n_expert: int, progress: Callable[[int], None] | None = None) -> dict[str, np.ndarray]:
    """{"head_t": [rows, L, n_expert], ...} of all rows of the traces, one behind the other; 0 where a layer has fewer experts. Hidden states are read in pieces.

    progress: called with the number of rows after each piece. Raises HeadsError for traces of another model, or without hidden states."""
    for trace in traces:
        heads.check_trace(trace)
    n = sum(trace.n_tokens for trace in traces)
    found = {head: _array((n, heads.n_layers, n_expert)) for head in MODES[heads.mode]}
    at = 0
    for trace in traces:
        for start in range(0, trace.n_tokens, ROWS):
            fill(heads, trace.hidden[start : start + ROWS], {head: a[at : at + ROWS] for head, a in found.items()})
            n_rows = min(ROWS, trace.n_tokens - start)
            at += n_rows
            if progress:
                progress(n_rows)
    return found


def fill(heads: Heads, hidden: np.ndarray, to: dict[str, np.ndarray]) -> None:
    """The outputs of rows [n, L, D] into arrays [n or more, L, E]."""
    for head, array in to.items():
        for index in range(heads.n_layers):
            probs = heads.probs(head, index, hidden[:, index])
            array[: len(hidden), index, : probs.shape[1]] = probs


def with_heads(trace: Trace, found: dict[str, np.ndarray]) -> Trace:
    """The trace with these outputs instead of any that it has."""
    return replace(trace, **{"head_t": None, "head_s": None, **found})


def _array(shape: tuple[int, ...]) -> np.ndarray:
    if 4 * int(np.prod(shape)) <= MOST_IN_MEMORY:
        return np.zeros(shape, np.float32)
    with tempfile.TemporaryFile(prefix="edgemoe-") as file:
        return np.memmap(file, np.float32, "w+", shape=shape)
