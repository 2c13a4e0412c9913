"""Stages of a recorded text: boundaries by cues, by the shift of the routing, or at chosen places, written into a trace as stage ids.

In each sequence stages count from 0; the rows of its prompt have none. A boundary lies where an engine could first act on it: a cue at the token that settled it (which is
known before its routing is computed), a shift at the token after the one whose routing showed it.

    TCseq: of the dominant experts (those that most tokens used) of a stage and of the stage before, the share that both have, the mean over layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from edgemoe.errors import TraceError
from edgemoe.routing_shift import SHIFT, ShiftDetector, ShiftOptions, scores, threshold
from edgemoe.stage import CLOSE, OPEN, TAGS, Automaton, boundaries, opens_thinking
from edgemoe.trace import NO_STAGE, PROMPT, Sequence, Trace

UNKNOWN_PIECE = "\ufffd"


@dataclass(frozen=True)
class Mark:
    """A stage begins at this row of a sequence."""

    row: int
    cue: str
    kind: str
    n_char: int = -1  # where the cue begins in the text of the decoded rows; -1: no cue


# --- text


def pieces_of(trace: Trace, generated: list[list[str]] | None = None) -> list[list[str]]:
    """The text of every row, by sequence. generated: instead of the trace's own, a list of pieces per sequence, for its decoded rows (further ones are ignored).
    Raises TraceError."""
    if generated is not None:
        if len(generated) != trace.n_sequences:
            raise TraceError(f"{trace.where}: found pieces of {len(generated)} sequences, wanted {trace.n_sequences}")
        return [_beside(trace, s, pieces) for s, pieces in zip(trace.sequences(), generated)]
    known = trace.meta.get("pieces")
    if not isinstance(known, dict):
        raise TraceError(f"{trace.where}: does not say what text its tokens are: record it again with this version, or give --pieces FILE")
    return [[str(known.get(str(t), UNKNOWN_PIECE)) for t in s.token_ids.tolist()] for s in trace.sequences()]


def _beside(trace: Trace, s: Sequence, pieces: list[str]) -> list[str]:
    n_prompt = int((s.phase == PROMPT).sum())
    if len(pieces) < len(s.ids) - n_prompt:
        raise TraceError(f"{trace.where}: sequence {s.index}: found {len(pieces)} pieces, wanted {len(s.ids) - n_prompt}: one for each decoded token")
    return [""] * n_prompt + pieces[: len(s.ids) - n_prompt]


def read_pieces(path: str) -> list[list[str]]:
    """JSON lines, an object per sequence with a list of strings called generated. Raises TraceError."""
    found = []
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                pieces = json.loads(line).get("generated")
                if not isinstance(pieces, list) or not all(isinstance(p, str) for p in pieces):
                    raise TraceError(f"{path}: line {number}: wanted a list of strings called generated")
                found.append(pieces)
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from None
    except (ValueError, AttributeError) as e:
        raise e if isinstance(e, TraceError) else TraceError(f"{path}: not JSON lines of objects: {e}") from None
    return found


# --- boundaries


def by_cues(s: Sequence, pieces: list[str], automaton: Automaton, where: str = "thinking", min_stage: int = 0) -> list[Mark]:
    """Cues and tags in the decoded rows. pieces: as pieces_of makes them. Of a sequence that is all prompt the prompt is read as if it had been decoded."""
    first = first_decoded(s)
    prompt, answer = "".join(pieces[:first]), "".join(pieces[first:])
    heard = boundaries((as_bytes(p) for p in pieces[first:]), automaton, where=where, opened=opens_thinking(prompt) or was_opened(answer), min_stage=min_stage)
    # What opens the thinking at the very start of an answer parts nothing.
    return [Mark(first + b.heard, b.cue, b.kind, b.char) for b in heard if b.kind != OPEN or answer[: b.char].strip()]


def all_by_cues(trace: Trace, pieces: list[list[str]], automaton: Automaton, where: str, min_stage: int = 0) -> list[list[Mark]]:
    """by_cues of every sequence, one boundary per row."""
    return [merged(by_cues(s, p, automaton, where, min_stage), min_stage) for s, p in zip(trace.sequences(), pieces)]


def as_bytes(piece: str) -> bytes:
    """Bytes that are no UTF-8 by themselves, such as a part of an emoji, are kept in a trace as Python's surrogates."""
    return piece.encode("utf-8", "surrogateescape" if not any("\ud800" <= ch < "\udc80" or "\udcff" < ch <= "\udfff" for ch in piece) else "replace")


def was_opened(text: str) -> bool:
    """Whether the first tag in a whole text closes a thinking that nothing in it has opened: then the prompt has."""
    places = [(at, what) for pair in TAGS for tag, what in zip(pair, (OPEN, CLOSE)) if (at := text.find(tag)) >= 0]
    return bool(places) and min(places)[1] == CLOSE


def where_of(pieces: list[list[str]]) -> str:
    """Where cues count when nobody has said: in the thinking, if any of the texts has tags around it."""
    texts = map("".join, pieces)
    return "thinking" if any(tag in text for text in texts for pair in TAGS for tag in pair) else "everywhere"


def by_shift(s: Sequence, n_expert: int, options: ShiftOptions) -> list[Mark]:
    detector = ShiftDetector(s.ids.shape[1], n_expert, options)
    first = first_decoded(s)
    rows = [first + i + 1 for i, row in enumerate(s.ids[first:]) if detector.feed(row)]
    return [Mark(row, SHIFT, SHIFT) for row in rows if row < len(s.ids)]


def shift_threshold(trace: Trace, quantile: float, options: ShiftOptions = ShiftOptions()) -> float:
    return threshold([scores(s.ids[first_decoded(s) :], trace.n_expert, options) for s in trace.sequences()], quantile)


def merged(marks: Iterable[Mark], min_stage: int = 0) -> list[Mark]:
    """In order, one per row; tags before cues before shifts. One that comes sooner than min_stage rows after the last is dropped, unless it is a tag."""
    ranks = {"open": 0, "close": 0, SHIFT: 2}
    found: list[Mark] = []
    for mark in sorted(marks, key=lambda m: (m.row, ranks.get(m.kind, 1))):
        near = found and (mark.row == found[-1].row or mark.row - found[-1].row < min_stage)
        if not near or (ranks.get(mark.kind) == 0 and mark.row > found[-1].row):
            found.append(mark)
    return found


def filled(s: Sequence, marks: list[Mark], most: int) -> list[Mark]:
    """With further boundaries where a stage would be longer than `most` tokens, counted from its start."""
    found: list[Mark] = []
    start = first_decoded(s)
    for mark in [*marks, Mark(len(s.ids), "", "")]:
        found += [*_at(range(start + most, mark.row, most), "every"), mark]
        start = mark.row
    return found[:-1]


def every(trace: Trace, n: int) -> list[list[Mark]]:
    """Every n decoded tokens."""
    return [_at(range(first_decoded(s) + n, len(s.ids), n), "every") for s in trace.sequences()]


def evenly_like(trace: Trace) -> list[list[Mark]]:
    """As many boundaries per sequence as the trace has, at equal distances."""
    found = []
    for s, rows in zip(trace.sequences(), stage_rows(trace)):
        first = first_decoded(s)
        found.append(_at(sorted({first + round((i + 1) * (len(s.ids) - first) / (len(rows) + 1)) for i in range(len(rows))}), "every"))
    return found


def random_like(trace: Trace, seed: int = 0) -> list[list[Mark]]:
    """As many boundaries per sequence as the trace has, anywhere."""
    rng = np.random.default_rng(seed)
    found = []
    for s, rows in zip(trace.sequences(), stage_rows(trace)):
        places = np.arange(first_decoded(s) + 1, len(s.ids))
        found.append(_at(sorted(rng.choice(places, len(rows), replace=False).tolist()), "random"))
    return found


def _at(rows: Iterable[int], cue: str) -> list[Mark]:
    return [Mark(int(row), cue, cue) for row in rows]


def first_decoded(s: Sequence) -> int:
    """The row after the prompt; 0 where all is prompt, which then is read as text that was generated."""
    n = int((s.phase == PROMPT).sum())
    return n if n < len(s.ids) else 0


def stage_rows(trace: Trace) -> list[list[int]]:
    """Rows at which a stage begins, but for the first of each sequence. Raises TraceError for a trace without stages."""
    if trace.stage is None:
        raise TraceError(f"{trace.where}: has no stages; `edgemoe trace annotate` without --random-like and --evenly-like finds them")
    return [(1 + np.flatnonzero((np.diff(s.stage) != 0) & (s.stage[:-1] != NO_STAGE))).tolist() for s in trace.sequences()]


def with_stages(trace: Trace, marks: list[list[Mark]], how: dict) -> Trace:
    """The trace with stage ids, and with its boundaries [row, cue, kind] among the notes of each sequence. how: said in its metadata."""
    stage = np.full(trace.n_tokens, NO_STAGE, np.int16)
    notes = [dict(n) for n in trace.meta.get("sequences", [{}] * trace.n_sequences)]
    for s, found, note in zip(trace.sequences(), marks, notes):
        ids = np.zeros(len(s.ids), np.int16)
        for mark in found:
            ids[mark.row :] += 1
        ids[: first_decoded(s)] = NO_STAGE
        stage[trace.offsets[s.index] : trace.offsets[s.index + 1]] = ids
        note["boundaries"] = [[m.row, m.cue, m.kind] for m in found]
    meta = {k: v for k, v in trace.meta.items() if k != "stages"} | {"sequences": notes, "annotated": how}
    return replace(trace, stage=stage, meta=meta)


# --- coherence of adjacent stages


def n_dominant_of(trace: Trace) -> int:
    """A quarter of the experts of a layer, and no fewer than a token uses."""
    return max(trace.n_used, trace.n_expert // 4)


def stage_counts(s: Sequence, rows: list[int], n_expert: int) -> np.ndarray:
    """Tokens that used each expert: [stages, layers, experts]. rows: where stages begin, but for the first."""
    edges = [first_decoded(s), *rows, len(s.ids)]
    layers = np.arange(s.ids.shape[1])[None, :, None] * (n_expert + 1)
    counts = []
    for start, end in zip(edges, edges[1:]):
        keys = (np.minimum(s.ids[start:end].astype(np.int64), n_expert) + layers).ravel()
        counts.append(np.bincount(keys, minlength=s.ids.shape[1] * (n_expert + 1)).reshape(-1, n_expert + 1)[:, :n_expert])
    return np.array(counts)


def dominant(counts: np.ndarray, n: int) -> np.ndarray:
    """bool, as counts [..., experts]: the n that most tokens used (of equal ones the lower id), and that any used."""
    order = np.argsort(-counts, axis=-1, kind="stable")[..., :n]
    found = np.zeros(counts.shape, bool)
    np.put_along_axis(found, order, True, -1)
    return found & (counts > 0)


def tcseq(counts: np.ndarray, n: int) -> np.ndarray:
    """float [stages - 1], from the counts of stage_counts: the share of n that a stage's dominant experts have in common with those of the stage before. Layers that one of the
    two stages has nothing of (the last one in a prompt) are left out."""
    sets = dominant(counts, n)
    if len(sets) < 2:
        return np.empty(0)
    known = sets[1:].any(-1) & sets[:-1].any(-1)
    return ((sets[1:] & sets[:-1]).sum(-1) * known).sum(-1) / np.maximum(1, known.sum(-1)) / n
