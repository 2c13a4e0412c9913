"""Routing that others recorded, as a Trace: .npz files with `ids`, and CSV with a line per (token, layer) or per (token, layer, expert).

What a source does not say is not made up: rows are decode rows, each a step of its own, token ids unknown, sizes of experts 0.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import zipfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgemoe.errors import TraceError
from edgemoe.trace import DECODE, FORMAT, NO_STAGE, PROMPT, UNKNOWN_TOKEN, Trace, absent, ids_dtype

CHANNELS = {1: "analysis", 2: "final"}  # of gpt-oss; kept as stages
LONGEST_TEXT = 200  # of what is kept about a sequence: names, not whole prompts


@dataclass(frozen=True)
class Facts:
    """What the caller knows about the model. None: taken from the recording (experts: the highest number in it, and one), or left empty."""

    model: str = ""
    architecture: str = ""
    n_expert: int | None = None
    bytes_per_expert: int = 0
    version: str = ""  # of edgemoe


def import_trace(path: str | os.PathLike, facts: Facts) -> Trace:
    """Raises TraceError."""
    path = Path(path)
    return (_import_npz if path.suffix == ".npz" else _import_csv)(path, facts)


def _made(path: Path, facts: Facts, ids: np.ndarray, layers: list[int], offsets, probs=None, **more) -> Trace:
    """The trace of what was read; `ids` in any integer dtype, -1 absent."""
    highest = int(ids.max()) if ids.size else -1
    n_expert = facts.n_expert or max(highest + 1, ids.shape[2])
    if highest >= n_expert:
        row, layer, _ = np.argwhere(ids == highest)[0]
        raise TraceError(f"{path}: row {row}, layer {layers[layer]}: found expert {highest}, wanted 0 to {n_expert - 1}")
    dtype = ids_dtype(n_expert)
    narrow = ids.astype(dtype)
    narrow[ids < 0] = absent(dtype)
    n_tokens = len(ids)
    given = {name: value for name, value in (("experts", facts.n_expert), ("expert_bytes", facts.bytes_per_expert), ("model_name", facts.model)) if value}
    meta = {
        "format": FORMAT,
        "model": facts.model or path.stem,
        "architecture": facts.architecture,
        "fingerprint": "",
        "n_expert": n_expert,
        "n_used": ids.shape[2],
        "layers": [int(i) for i in layers],
        "bytes_per_expert": [facts.bytes_per_expert] * len(layers),
        "n_embd": 0,
        "probs": None if probs is None else "chosen",
        "recorded": {"how": "edgemoe trace import", "version": facts.version, "options": given},
        "source": path.name,
    }
    if probs is not None:
        meta["probs_are"] = _describe(probs, ids)
    meta |= more.pop("meta", {})
    trace = Trace(
        ids=narrow,
        token_ids=more.pop("token_ids", np.full(n_tokens, UNKNOWN_TOKEN, np.int32)).astype(np.int32),
        offsets=np.asarray(offsets, np.int64),
        phase=more.pop("phase", np.full(n_tokens, DECODE, np.uint8)).astype(np.uint8),
        probs=None if probs is None else probs.astype(np.float16),
        meta=meta,
        where=str(path),
        **more,
    )
    trace.check()
    return trace


def _describe(probs: np.ndarray, ids: np.ndarray) -> str:
    sums = probs.astype(np.float32).sum(axis=2)[(ids >= 0).all(axis=2)]
    summed = "each row sums to 1" if sums.size and np.abs(sums - 1).max() < 0.02 else "rows do not sum to 1"
    return f"as in the source: {summed}"


# --- .npz


def _import_npz(path: Path, facts: Facts) -> Trace:
    try:
        with np.load(path, allow_pickle=False) as z:
            if "meta" in z.files:
                raise TraceError(f"{path}: is a trace already")
            found = {name: z[name] for name in ("ids", "probs", "offsets", "token_ids", "phase", "channel", "layers") if name in z.files}
            names = z.files
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror or e}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as e:
        raise e if isinstance(e, TraceError) else TraceError(f"{path}: not an .npz of arrays, or cut off: {e}") from None
    ids = found.get("ids")
    if ids is None or ids.ndim != 3 or ids.dtype.kind not in "ui":
        raise TraceError(f"{path}: found arrays {', '.join(names)}, wanted ids, integers [tokens, layers, used]")
    n_tokens, n_layers, _ = ids.shape
    wide = ids.astype(np.int32)
    if ids.dtype.kind == "u":
        wide[ids == absent(ids.dtype)] = -1
    layers = found.get("layers", np.arange(n_layers))
    if layers.shape != (n_layers,):
        raise TraceError(f"{path}: layers: found {list(layers.shape)}, wanted [{n_layers}]")
    more = {name: found[name] for name in ("token_ids", "phase") if name in found}
    meta = {}
    if "channel" in found:
        channel = found["channel"]
        more["stage"] = np.where(np.isin(channel, list(CHANNELS)), channel, NO_STAGE).astype(np.int16)
        meta["stages"] = {str(number): name for number, name in CHANNELS.items()}
    offsets = found.get("offsets", np.array([0, n_tokens]))
    said = _said_beside(path.with_name(path.stem + ".meta.jsonl"), len(offsets) - 1)
    if said:
        meta["sequences"] = [_notes(each) for each in said]
        pieces = _pieces(said, offsets, found.get("token_ids"))
        if pieces:
            meta["pieces"] = pieces
    return _made(path, facts, wide, layers.tolist(), offsets, found.get("probs"), meta=meta, **more)


def _said_beside(path: Path, n_sequences: int) -> list[dict]:
    """What a file beside the recording says about each sequence."""
    if not path.exists():
        return []
    found = []
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                said = json.loads(line)
            except ValueError as e:
                raise TraceError(f"{path}: line {number}: not JSON: {e}") from None
            if not isinstance(said, dict):
                raise TraceError(f"{path}: line {number}: found {line[:40]!r}, wanted an object")
            found.append(said)
    if len(found) != n_sequences:
        raise TraceError(f"{path}: found {len(found)} lines, wanted {n_sequences}: one per sequence")
    return found


def _notes(said: dict) -> dict:
    """Numbers and short texts."""
    return {k: v for k, v in said.items() if isinstance(v, (int, float, bool)) or (isinstance(v, str) and len(v) <= LONGEST_TEXT)}


def _pieces(said: list[dict], offsets: np.ndarray, token_ids: np.ndarray | None) -> dict[str, str]:
    """The text of each token id, where a list of strings called generated says what the rows of each sequence are."""
    pieces: dict[str, str] = {}
    for each, first, end in zip(said, offsets, offsets[1:]):
        texts = each.get("generated")
        if token_ids is None or not isinstance(texts, list) or len(texts) < end - first:
            return {}
        pieces |= {str(t): text for t, text in zip(token_ids[first:end].tolist(), texts) if t >= 0 and isinstance(text, str)}
    return pieces


# --- CSV

NAMES = {
    "sequence": ("sequence", "seq", "sequence_id", "seq_id", "sequence_index", "request", "request_id", "prompt", "prompt_id", "sample", "sample_id"),
    "token": ("token", "token_index", "token_idx", "token_pos", "token_position", "position", "pos"),
    "layer": ("layer", "layer_id", "layer_idx", "layer_index", "block"),
    "expert": ("expert", "expert_id", "expert_idx", "expert_index"),
    "experts": ("experts", "expert_ids", "topk", "top_k", "selected_experts"),
    "prob": ("prob", "probability", "weight", "gate", "score", "router_prob", "router_weight"),
    "probs": ("probs", "probabilities", "weights", "gates", "scores"),
    "token_id": ("token_id",),
    "phase": ("phase",),
}
ROLE_OF = {name: role for role, names in NAMES.items() for name in names}
NUMBERED = {"expert": re.compile(r"(?:expert|expert_id|topk|top|e)_?(\d+)"), "prob": re.compile(r"(?:prob|probability|weight|gate|score|p|w)_?(\d+)")}
PHASES = {"0": PROMPT, "prompt": PROMPT, "prefill": PROMPT, "1": DECODE, "decode": DECODE, "generate": DECODE, "generation": DECODE}
NONE = ("", "-1")
MOST = 65535


@dataclass
class _Columns:
    """Which column is what."""

    at: dict[str, int] = field(default_factory=dict)
    experts: list[int] = field(default_factory=list)  # one expert each
    probs: list[int] = field(default_factory=list)
    n: int = 0


def _import_csv(path: Path, facts: Facts) -> Trace:
    try:
        with open(path, encoding="utf-8-sig", newline="") as f:
            first = f.readline()
            f.seek(0)
            delimiter = max(",;\t", key=first.count) if first else ","
            return _assemble(path, facts, *_read_lines(path, csv.reader(f, delimiter=delimiter)))
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: neither an .npz nor text") from None
    except csv.Error as e:
        raise TraceError(f"{path}: not CSV: {e}") from None


@dataclass
class _Lines:
    """What the lines say. Experts of all lines stand behind one another, n_of[i] of line i."""

    sequence: array = field(default_factory=lambda: array("i"))
    token: array = field(default_factory=lambda: array("q"))
    layer: array = field(default_factory=lambda: array("i"))
    token_id: array = field(default_factory=lambda: array("i"))
    phase: array = field(default_factory=lambda: array("B"))
    number: array = field(default_factory=lambda: array("q"))
    n_of: array = field(default_factory=lambda: array("i"))
    experts: array = field(default_factory=lambda: array("i"))
    probs: array = field(default_factory=lambda: array("f"))
    sequences: dict[str, int] = field(default_factory=dict)  # name: index, as they come


def _read_lines(path: Path, reader) -> tuple[_Columns, _Lines]:
    lines, columns = _Lines(), None
    for cells in reader:
        cells = [cell.strip() for cell in cells]
        if not any(cells):
            continue
        where = f"{path}: line {reader.line_num}"
        if columns is None:
            named = any(cell and not _is_number(cell) and not _is_list(cell) for cell in cells)
            columns = _named(where, cells) if named else _unnamed(where, cells)
            if named:
                continue
        if len(cells) != columns.n:
            raise TraceError(f"{where}: found {len(cells)} columns, wanted {columns.n}")
        _read_line(where, reader.line_num, cells, columns, lines)
    if columns is None or not lines.number:
        raise TraceError(f"{path}: found no lines of routing, wanted token, layer, expert")
    return columns, lines


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_list(cell: str) -> bool:
    return all(map(_is_number, _split(cell)))


def _split(cell: str) -> list[str]:
    return re.split(r"[\s,;|]+", cell.strip("[]() \t"))


def _named(where: str, header: list[str]) -> _Columns:
    columns = _Columns(n=len(header))
    numbered: dict[str, list[tuple[int, int]]] = {"expert": [], "prob": []}
    for i, cell in enumerate(header):
        name = re.sub(r"[\s-]+", "_", cell.lower())
        role = ROLE_OF.get(name)
        if role in columns.at:
            raise TraceError(f"{where}: columns {header[columns.at[role]]} and {cell} both name the {role}")
        if role:
            columns.at[role] = i
            continue
        for kind, pattern in NUMBERED.items():
            if match := pattern.fullmatch(name):
                numbered[kind].append((int(match[1]), i))
    columns.experts, columns.probs = ([i for _, i in sorted(numbered[kind])] for kind in ("expert", "prob"))
    ways = [bool(columns.experts), "expert" in columns.at, "experts" in columns.at]
    if not {"token", "layer"} <= columns.at.keys() or sum(ways) != 1:
        raise TraceError(f"{where}: found columns {', '.join(header)}; wanted token, layer and one of: expert, experts, expert_0 and so on")
    if columns.probs and len(columns.probs) != len(columns.experts):
        raise TraceError(f"{where}: found {len(columns.probs)} columns of probabilities, wanted {len(columns.experts)} as of experts")
    if "expert" in columns.at:
        columns.experts = [columns.at["expert"]]
        columns.probs = [columns.at["prob"]] if "prob" in columns.at else []
    return columns


def _unnamed(where: str, cells: list[str]) -> _Columns:
    """token, layer, then an expert, an expert and its probability (it has a point), or several experts."""
    n = len(cells)
    columns = _Columns({"token": 0, "layer": 1}, n=n)
    if n < 3:
        raise TraceError(f"{where}: found {n} columns, wanted token, layer, expert")
    if n == 3 and not _is_number(cells[2]):
        columns.at["experts"] = 2
    elif n == 4 and not re.fullmatch(r"-?\d+", cells[3]):
        columns.experts, columns.probs = [2], [3]
    else:
        columns.experts = list(range(2, n))
    return columns


def _integer(where: str, what: str, cell: str, most: int) -> int:
    try:
        value = int(cell)
    except ValueError:
        value = -1
    if not 0 <= value <= most:
        raise TraceError(f"{where}: {what}: found {cell!r}, wanted a whole number from 0 to {most}")
    return value


def _real(where: str, cell: str) -> float:
    value = float(cell) if _is_number(cell) else math.nan
    if not abs(value) <= 65504:  # what a half float holds; false for nan
        raise TraceError(f"{where}: probability: found {cell!r}, wanted a number")
    return value


def _read_line(where: str, number: int, cells: list[str], columns: _Columns, lines: _Lines) -> None:
    at = columns.at
    experts = [cells[i] for i in columns.experts] or _split(cells[at["experts"]])
    probs = [cells[i] for i in columns.probs] or (_split(cells[at["probs"]]) if "probs" in at else [])
    while experts and experts[-1] in NONE:
        experts.pop()
    if (probs or "probs" in at) and len(probs) < len(experts):
        raise TraceError(f"{where}: found {len(probs)} probabilities, wanted {len(experts)}")
    lines.sequence.append(lines.sequences.setdefault(cells[at["sequence"]] if "sequence" in at else "", len(lines.sequences)))
    lines.token.append(_integer(where, "token", cells[at["token"]], 2**40))
    lines.layer.append(_integer(where, "layer", cells[at["layer"]], MOST))
    token_id = cells[at["token_id"]] if "token_id" in at else "-1"
    lines.token_id.append(UNKNOWN_TOKEN if token_id in NONE else _integer(where, "token_id", token_id, 2**31 - 1))
    phase = cells[at["phase"]].lower() if "phase" in at else "decode"
    if phase not in PHASES:
        raise TraceError(f"{where}: phase: found {phase!r}, wanted prompt or decode")
    lines.phase.append(PHASES[phase])
    lines.number.append(number)
    lines.n_of.append(len(experts))
    lines.experts.extend(_integer(where, "expert", cell, MOST - 1) for cell in experts)
    lines.probs.extend([_real(where, cell) for cell in probs[: len(experts)]])


def _assemble(path: Path, facts: Facts, columns: _Columns, lines: _Lines) -> Trace:
    """Experts of one (sequence, token, layer) come together, by falling probability, or as they came where there is none."""
    per_line = {name: np.array(getattr(lines, name), np.int64) for name in ("sequence", "token", "layer", "token_id", "phase", "number")}
    e = {name: np.repeat(a, lines.n_of) for name, a in per_line.items()}
    experts = np.array(lines.experts, np.int64)
    probs = np.array(lines.probs, np.float32) if len(lines.probs) else None
    order = np.lexsort((e["number"], *(() if probs is None else (-probs,)), e["layer"], e["token"], e["sequence"]))
    if not len(experts):
        raise TraceError(f"{path}: found no experts")
    layers = np.unique(per_line["layer"])
    tokens, first_line = np.unique(np.stack([per_line["sequence"], per_line["token"]]), axis=1, return_index=True)
    # Row of the token and column of the layer, then each expert's place among those of its pair.
    key_of = per_line["sequence"] * (2**41) + per_line["token"]
    keys = tokens[0] * (2**41) + tokens[1]
    row = np.searchsorted(keys, np.repeat(key_of, lines.n_of))[order]
    column = np.searchsorted(layers, e["layer"])[order]
    pair = row * len(layers) + column
    starts = np.flatnonzero(np.diff(pair, prepend=-1))
    rank = np.arange(len(pair)) - np.repeat(starts, np.diff(np.append(starts, len(pair))))
    experts, number = experts[order], e["number"][order]
    _refuse_repeats(path, pair, experts, number, e, order, len(columns.experts) != 1)
    n_used = int(rank.max()) + 1
    ids = np.full((len(keys), len(layers), n_used), -1, np.int32)
    ids[row, column, rank] = experts
    if probs is not None:
        table = np.zeros(ids.shape, np.float16)
        table[row, column, rank] = probs[order]
        probs = table
    offsets = np.searchsorted(tokens[0], np.arange(len(lines.sequences) + 1))
    names = list(lines.sequences)
    meta = {"sequences": [{"name": name} for name in names]} if "sequence" in columns.at else {}
    more = {"token_ids": per_line["token_id"][first_line], "phase": per_line["phase"][first_line]}
    return _made(path, facts, ids, layers.tolist(), offsets, probs, meta=meta, **more)


def _refuse_repeats(path: Path, pair, experts, number, e, order, one_line_each: bool) -> None:
    """The same expert twice for one token and layer, or two lines where there should be one, are two sequences that nothing tells apart."""
    by = np.lexsort((number, experts, pair))
    same = (np.diff(pair[by]) == 0) & (np.diff(experts[by]) == 0)
    which = by[np.flatnonzero(same) + 1]
    if one_line_each and not len(which):
        which = np.flatnonzero((np.diff(pair, prepend=-1) == 0) & (np.diff(number, prepend=-1) != 0))
    if len(which):
        i = which[np.argmin(number[which])]
        earlier = number[(pair == pair[i]) & (number <= number[i])].min()
        token, layer = e["token"][order][i], e["layer"][order][i]
        raise TraceError(f"{path}: line {number[i]}: token {token}, layer {layer}, expert {experts[i]}: stood in line {earlier} already; a column sequence tells sequences apart")
