"""Which cues part a model's text into stages that are worth something, by a trace of it.

From a list of candidates go, in this order: what is so frequent, or begins stages so short, that it is noise (the worst first, since others then have longer stages, and longer
cues that begin with it are heard); what is rare; and what parts stages of less coherence than boundaries at chance places do, by more than a tolerance. Coherence is TCseq of edgemoe.annotate: experts of the finished stage are to
foretell those of the next. Rows of a table say what became of each, with the figures by which it was judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edgemoe import annotate
from edgemoe.routing_shift import ShiftOptions
from edgemoe.stage import CLOSE, CUES, OPEN, Automaton, checked_cues
from edgemoe.trace import Trace

# Beside the default cues: what is tried, too.
FURTHER = {
    "alternative": ("But", "However", "Let me", "Let's", "Now", "Suppose", "Consider", "What about", "On the other hand", "In other words", "If", "Or", "Okay", "Next"),
    "verification": ("Is", "Check", "Yes", "No", "Correct", "Wait, is", "Is that", "Does"),
    "conclusion": ("So", "Then", "That is", "That means", "Which means", "We get", "Finally", "Overall"),
}
N_CHANCE = 5  # draws of random boundaries


@dataclass(frozen=True)
class Limits:
    least_count: int = 3
    most_per_1000: float = 10.0
    least_median: int = 16  # tokens, of the stages that begin with the cue
    tolerance: float = 0.05  # of TCseq below that of boundaries at chance places


@dataclass
class Row:
    """One candidate, by the segmentation in which it was judged."""

    cue: str
    kind: str
    count: int = 0
    per_1000: float = 0.0
    median_length: float | None = None  # tokens
    tcseq: float | None = None
    fate: str = "kept"  # or why it was not
    dominant: list[list[int]] = field(default_factory=list)  # per layer: experts that most tokens used in the stages that it begins


@dataclass
class Calibrated:
    cues: dict[str, tuple[str, ...]]
    rows: list[Row]  # the kept first, the most frequent first
    n_tokens: int
    n_sequences: int
    n_stages: int
    n_dominant: int
    median_length: float | None
    tcseq: float | None  # over the boundaries of all kept cues
    tcseq_chance: float | None  # as many boundaries at chance places
    shift_threshold: float


def candidates(further: Mapping[str, tuple[str, ...]] | None = None) -> dict[str, tuple[str, ...]]:
    """The default cues and FURTHER, or what is given instead of FURTHER."""
    further = FURTHER if further is None else checked_cues(further)
    return {kind: tuple(dict.fromkeys((*CUES.get(kind, ()), *further.get(kind, ())))) for kind in (*CUES, *(k for k in further if k not in CUES))}


def calibrate(trace: Trace, pieces: list[list[str]], wanted: Mapping[str, tuple[str, ...]], where: str, limits: Limits = Limits(), quantile: float = 0.9, seed: int = 0) -> Calibrated:
    """pieces, where: as annotate.pieces_of and where_of make them."""
    n_tokens = sum(len(s.ids) - annotate.first_decoded(s) for s in trace.sequences())
    kinds = {cue: kind for kind, cues in wanted.items() for cue in cues}
    gone: dict[str, Row] = {}
    while True:
        marks = _marks(trace, pieces, {k: v for k, v in kinds.items() if k not in gone}, where)
        rows = _rows(trace, marks, {k: v for k, v in kinds.items() if k not in gone}, n_tokens)
        worst = _noisiest(rows, limits)
        if not worst:
            break
        gone |= {row.cue: row for row in worst}
    chance = _chance(trace, marks, seed)
    for row in rows:
        if chance is not None and row.tcseq is not None and row.tcseq < chance - limits.tolerance:
            row.fate = f"coherence below {chance - limits.tolerance:.3f}"
            gone[row.cue] = row
    left = {k: v for k, v in kinds.items() if k not in gone}
    marks = _marks(trace, pieces, left, where)
    kept = _rows(trace, marks, left, n_tokens, with_dominant=True)
    coherence, lengths = _coherence(trace, marks), _lengths(trace, marks)
    return Calibrated(
        cues={kind: tuple(c for c, k in left.items() if k == kind) for kind in wanted},
        rows=[*sorted(kept, key=lambda r: -r.count), *sorted(gone.values(), key=lambda r: -r.count)],
        n_tokens=n_tokens, n_sequences=trace.n_sequences, n_stages=len(lengths), n_dominant=annotate.n_dominant_of(trace),
        median_length=float(np.median(lengths)) if len(lengths) else None,
        tcseq=float(coherence.mean()) if len(coherence) else None, tcseq_chance=_chance(trace, marks, seed),
        shift_threshold=annotate.shift_threshold(trace, quantile, ShiftOptions()),
    )  # fmt: skip


def _marks(trace: Trace, pieces: list[list[str]], kinds: dict[str, str], where: str) -> list[list[annotate.Mark]]:
    by_kind: dict[str, list[str]] = {}
    for cue, kind in kinds.items():
        by_kind.setdefault(kind, []).append(cue)
    automaton = Automaton(by_kind)
    return [annotate.merged(annotate.by_cues(s, p, automaton, where)) for s, p in zip(trace.sequences(), pieces)]


def _noisiest(rows: list[Row], limits: Limits) -> list[Row]:
    """The most frequent one, if it is too frequent; or else the one that begins the shortest stages, if they are too short; or else all that are rare."""
    for row in sorted(rows, key=lambda r: -r.per_1000)[:1]:
        if row.per_1000 > limits.most_per_1000:
            row.fate = f"noise: more than {limits.most_per_1000:g} per 1000 tokens"
            return [row]
    common = [row for row in rows if row.count >= limits.least_count]
    for row in sorted(common, key=lambda r: (r.median_length, -r.count))[:1]:
        if row.median_length < limits.least_median:
            row.fate = f"noise: stages shorter than {limits.least_median} tokens"
            return [row]
    rare = [row for row in rows if row.count < limits.least_count]
    for row in rare:
        row.fate = f"rare: fewer than {limits.least_count}" if row.count else "not found"
    return rare


def _edges(s, marks: list[annotate.Mark]) -> list[int]:
    return [annotate.first_decoded(s), *(m.row for m in marks), len(s.ids)]


def _rows(trace: Trace, marks: list[list[annotate.Mark]], kinds: dict[str, str], n_tokens: int, with_dominant: bool = False) -> list[Row]:
    lengths: dict[str, list[int]] = {cue: [] for cue in kinds}
    overlaps: dict[str, list[float]] = {cue: [] for cue in kinds}
    used: dict[str, np.ndarray] = {}
    n = annotate.n_dominant_of(trace)
    for s, found in zip(trace.sequences(), marks):
        counts = annotate.stage_counts(s, [m.row for m in found], trace.n_expert)
        for i, (mark, length, overlap) in enumerate(zip(found, np.diff(_edges(s, found))[1:], annotate.tcseq(counts, n))):
            if mark.kind not in (OPEN, CLOSE):
                lengths[mark.cue].append(int(length))
                overlaps[mark.cue].append(float(overlap))
                used[mark.cue] = used.get(mark.cue, 0) + counts[i + 1]
    rows = []
    for cue, kind in kinds.items():
        row = Row(cue, kind, len(lengths[cue]), 1000 * len(lengths[cue]) / max(1, n_tokens))
        if row.count:
            row.median_length, row.tcseq = float(np.median(lengths[cue])), float(np.mean(overlaps[cue]))
            if with_dominant:
                row.dominant = [np.flatnonzero(layer).tolist() for layer in annotate.dominant(used[cue], n)]
        rows.append(row)
    return rows


def _lengths(trace: Trace, marks: list[list[annotate.Mark]]) -> np.ndarray:
    return np.concatenate([np.empty(0), *(np.diff(_edges(s, found)) for s, found in zip(trace.sequences(), marks))])


def _coherence(trace: Trace, marks: list[list[annotate.Mark]]) -> np.ndarray:
    n = annotate.n_dominant_of(trace)
    parts = (annotate.tcseq(annotate.stage_counts(s, [m.row for m in found], trace.n_expert), n) for s, found in zip(trace.sequences(), marks))
    return np.concatenate([np.empty(0), *parts])


def _chance(trace: Trace, marks: list[list[annotate.Mark]], seed: int) -> float | None:
    staged = annotate.with_stages(trace, marks, {})
    drawn = np.concatenate([np.empty(0), *(_coherence(trace, annotate.random_like(staged, seed + i)) for i in range(N_CHANCE))])
    return float(drawn.mean()) if len(drawn) else None
