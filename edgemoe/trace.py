"""Routing traces: which experts each token was sent to, in each layer. One NumPy .npz per trace; docs/formats.md has every array.

A trace is written once and read many times: writing streams what is large and renames at the end, reading maps it. Both sides check everything but the values of
hidden states, which may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edgemoe import npz
from edgemoe.errors import TraceError

FORMAT = 1
PROMPT, DECODE = 0, 1
UNKNOWN_TOKEN = -1
NO_STAGE = -1
CHUNK = 4096  # tokens that are looked at together

# name: (dtype, axes, must be there)
ARRAYS = {
    "ids": ("uint", "TLK", True),
    "probs": ("float16", "TLP", False),
    "hidden": ("float16", "TLD", False),
    "token_ids": ("int32", "T", True),
    "offsets": ("int64", "O", True),
    "phase": ("uint8", "T", True),
    "step": ("int32", "T", False),
    "stage": ("int16", "T", False),
    "head_t": ("float16", "TLE", False),
    "head_s": ("float16", "TLE", False),
}
PER_TOKEN = [name for name, (_, axes, _) in ARRAYS.items() if axes[0] == "T"]
REQUIRED_META = {"format": int, "model": str, "architecture": str, "fingerprint": str, "n_expert": int, "n_used": int, "layers": list, "bytes_per_expert": list, "n_embd": int}


def ids_dtype(n_expert: int) -> np.dtype:
    return np.dtype(np.uint8 if n_expert <= 254 else np.uint16)


def absent(dtype) -> int:
    """What stands for "no expert" in ids of this dtype."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True)
class Sequence:
    """A view of one sequence; fields as in Trace."""

    index: int
    ids: np.ndarray
    token_ids: np.ndarray
    phase: np.ndarray
    step: np.ndarray
    probs: np.ndarray | None = None
    hidden: np.ndarray | None = None
    stage: np.ndarray | None = None


@dataclass
class Trace:
    """T tokens in S sequences, L layers with experts, K experts per token of E, router inputs of D values.

    ids [T, L, K]: by falling probability; the dtype's largest value is "no expert", and only others of that kind follow it in a row.
    probs [T, L, K] of these, or [T, L, E] of all; hidden [T, L, D]. meta says how the probabilities were made. Arrays of a loaded trace may be read-only maps.
    """

    ids: np.ndarray
    token_ids: np.ndarray
    offsets: np.ndarray
    phase: np.ndarray
    meta: dict
    probs: np.ndarray | None = None
    hidden: np.ndarray | None = None
    step: np.ndarray | None = None
    stage: np.ndarray | None = None
    head_t: np.ndarray | None = None
    head_s: np.ndarray | None = None
    where: str = field(default="trace", compare=False)

    @property
    def n_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def n_layers(self) -> int:
        return self.ids.shape[1]

    @property
    def n_used(self) -> int:
        return self.ids.shape[2]

    @property
    def n_expert(self) -> int:
        return self.meta["n_expert"]

    @property
    def n_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def absent(self) -> int:
        return absent(self.ids.dtype)

    def sequence(self, index: int) -> Sequence:
        if not 0 <= index < self.n_sequences:
            raise IndexError(f"sequence {index}, wanted less than {self.n_sequences}")
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        step = self.step[rows] if self.step is not None else np.arange(rows.start, rows.stop, dtype=np.int32)
        cut = {name: getattr(self, name)[rows] for name in ("probs", "hidden", "stage") if getattr(self, name) is not None}
        return Sequence(index, self.ids[rows], self.token_ids[rows], self.phase[rows], step, **cut)

    def sequences(self) -> Iterator[Sequence]:
        return (self.sequence(i) for i in range(self.n_sequences))

    def select(self, indices: Iterable[int]) -> Trace:
        """These sequences, in this order, as a trace of its own. A run of neighbours is a view, anything else a copy."""
        indices = [int(i) for i in indices]
        parts = [self.sequence(i) for i in indices]  # checks them
        lengths = [len(p.ids) for p in parts]
        if indices and indices == list(range(indices[0], indices[-1] + 1)):
            rows = slice(int(self.offsets[indices[0]]), int(self.offsets[indices[-1] + 1]))
        else:
            rows = np.concatenate([np.empty(0, np.int64), *(np.arange(self.offsets[i], self.offsets[i + 1]) for i in indices)])
        cut = {name: getattr(self, name)[rows] for name in PER_TOKEN if getattr(self, name) is not None}
        if cut.get("step") is not None:
            cut["step"] = _renumbered(cut["step"], lengths)
        meta = dict(self.meta)
        if "sequences" in meta:
            meta["sequences"] = [meta["sequences"][i] for i in indices]
        return replace(self, **cut, offsets=np.cumsum([0, *lengths], dtype=np.int64), meta=meta)

    def sequence_hashes(self) -> list[str]:
        """One per sequence, of ids and token_ids: equal exactly when the same tokens went to the same experts. For telling train and test traces apart."""
        return [_sequence_hash(s, self.absent) for s in self.sequences()]

    @classmethod
    def load(cls, path: str | os.PathLike) -> Trace:
        """Raises TraceError: no such file, no trace, damaged, or of a version that is not known here."""
        path = Path(path)
        arrays = npz.read(path, {*ARRAYS, "meta"}, unchecked=("hidden",))
        meta = _read_meta(arrays.pop("meta", None), path)
        for name, (_, _, required) in ARRAYS.items():
            if required and name not in arrays:
                raise TraceError(f"{path}: array {name} is missing")
        trace = cls(**{name: a for name, a in arrays.items() if name in ARRAYS}, meta=meta, where=str(path))
        trace.check()
        return trace

    def save(self, path: str | os.PathLike) -> None:
        """Checks, writes beside `path`, and renames: a file of that name is always whole. Raises TraceError, OSError as TraceError."""
        self.check()
        arrays = {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}
        _publish(Path(path), self.meta, {name: (a.dtype, a.shape, _chunks(a)) for name, a in arrays.items()})

    def check(self) -> None:
        """Raises TraceError when the arrays do not fit each other or hold what no trace can."""
        _check_shapes(self)
        _check_values(self)


def _renumbered(step: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Steps counted from 0 again: sequences in a new order would have them falling."""
    new, start, n_steps = np.empty(len(step), np.int32), 0, 0
    for n in lengths:
        if n:
            _, within = np.unique(step[start : start + n], return_inverse=True)
            new[start : start + n] = within + n_steps
            n_steps += int(within[-1]) + 1
        start += n
    return new


def _sequence_hash(s: Sequence, none: int) -> str:
    digest = hashlib.blake2b(struct.pack("<2Q", *s.ids.shape[1:]), digest_size=16)
    digest.update(np.ascontiguousarray(s.token_ids, "<i4"))
    for rows in (s.ids[i : i + CHUNK] for i in range(0, len(s.ids), CHUNK)):
        wide = rows.astype("<u2")
        wide[rows == none] = 0xFFFF  # the same in every dtype
        digest.update(wide)
    return digest.hexdigest()


# --- checks


def _check_shapes(t: Trace) -> None:
    if t.ids.ndim != 3 or t.ids.dtype not in (np.uint8, np.uint16):
        raise TraceError(f"{t.where}: ids: found {t.ids.dtype} {list(t.ids.shape)}, wanted uint8 or uint16 [tokens, layers, used]")
    sizes = dict(zip("TLK", t.ids.shape)) | {"E": t.meta["n_expert"], "D": t.meta["n_embd"], "O": len(t.offsets)}
    sizes["P"] = sizes["E"] if t.meta.get("probs") == "all" else sizes["K"]
    for name, (dtype, axes, _) in ARRAYS.items():
        a = getattr(t, name)
        if a is None or name == "ids":
            continue
        wanted = tuple(sizes[axis] for axis in axes)
        if a.dtype != dtype or a.shape != wanted:
            raise TraceError(f"{t.where}: {name}: found {a.dtype} {list(a.shape)}, wanted {dtype} {list(wanted)}")
    found = (len(t.meta["layers"]), len(t.meta["bytes_per_expert"]), t.meta["n_used"])
    if found != (t.n_layers, t.n_layers, t.n_used):
        raise TraceError(f"{t.where}: meta: found {found[0]} layers, {found[1]} sizes of experts, {found[2]} used, wanted {t.n_layers}, {t.n_layers}, {t.n_used} as in ids")
    for name, rising in (("layers", True), ("bytes_per_expert", False)):
        values = t.meta[name]
        if not all(type(v) is int and v >= 0 for v in values) or (rising and values != sorted(set(values))):
            raise TraceError(f"{t.where}: meta: {name}: found {values}, wanted {'rising ' if rising else ''}whole numbers")
    if (t.probs is None) != (t.meta.get("probs") is None):
        raise TraceError(f"{t.where}: meta: probs: found {t.meta.get('probs')!r}, wanted {'null' if t.probs is None else 'all or chosen'}")
    if not 0 < t.n_used <= t.n_expert <= t.absent:
        raise TraceError(f"{t.where}: meta: n_expert: found {t.n_expert}, wanted {max(t.n_used, 1)} to {t.absent}")
    if "sequences" in t.meta and len(t.meta["sequences"]) != t.n_sequences:
        raise TraceError(f"{t.where}: meta: sequences: found {len(t.meta['sequences'])}, wanted {t.n_sequences}")


def _check_values(t: Trace) -> None:
    offsets = t.offsets
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != t.n_tokens or (np.diff(offsets) < 0).any():
        raise TraceError(f"{t.where}: offsets: wanted ascending numbers from 0 to {t.n_tokens}, found {_few(offsets)}")
    if (t.phase > 1).any():
        raise TraceError(f"{t.where}: phase: row {_first(t.phase > 1)}: found {t.phase.max()}, wanted 0 (prompt) or 1 (decode)")
    if (t.token_ids < UNKNOWN_TOKEN).any():
        raise TraceError(f"{t.where}: token_ids: row {_first(t.token_ids < UNKNOWN_TOKEN)}: found {t.token_ids.min()}, wanted -1 or more")
    if t.step is not None and t.n_tokens:
        falls = np.diff(t.step) < 0
        if t.step[0] < 0 or falls.any():
            raise TraceError(f"{t.where}: step: row {_first(falls) + 1 if falls.any() else 0}: wanted numbers that never fall, from 0 on")
    for start in range(0, t.n_tokens, CHUNK):
        _check_ids(t, start, np.ascontiguousarray(np.moveaxis(t.ids[start : start + CHUNK], 2, 0)))
        if t.probs is not None and not np.isfinite(t.probs[start : start + CHUNK]).all():
            row, layer = np.argwhere(~np.isfinite(t.probs[start : start + CHUNK]).all(axis=2))[0]
            raise TraceError(f"{t.where}: probs: row {start + row}, layer {t.meta['layers'][layer]}: not finite")


def _check_ids(t: Trace, start: int, ids: np.ndarray) -> None:
    """ids [K, tokens, layers] of the tokens from `start` on."""
    none = t.absent
    for k, column in enumerate(ids):
        outside = (column >= t.n_expert) & (column != none)
        repeated = np.zeros(column.shape, bool)
        for earlier in ids[:k]:
            repeated |= column == earlier
        repeated &= column != none
        gap = (ids[k - 1] == none) & (column != none) if k else np.zeros(column.shape, bool)
        for wrong, wanted in ((outside, f"0 to {t.n_expert - 1}, or {none} for none"), (repeated, "each expert once"), (gap, f"nothing after {none}")):
            if wrong.any():
                row, layer = np.argwhere(wrong)[0]
                raise TraceError(f"{t.where}: ids: row {start + row}, layer {t.meta['layers'][layer]}: found expert {column[row, layer]}, wanted {wanted}")


def _first(mask: np.ndarray) -> int:
    return int(np.argmax(mask))


def _few(a: np.ndarray) -> str:
    return str(a.tolist()) if len(a) <= 4 else f"{a[0]}, {a[1]}, ..., {a[-1]}"


# --- files


def _read_meta(a: np.ndarray | None, path: Path) -> dict:
    if a is None:
        raise TraceError(f"{path}: array meta is missing: not a routing trace (edgemoe trace import reads those of others)")
    if a.ndim or a.dtype.kind != "U":
        raise TraceError(f"{path}: meta: found {a.dtype} {list(a.shape)}, wanted one string")
    try:
        meta = json.loads(str(a))
    except ValueError as e:
        raise TraceError(f"{path}: meta: not JSON: {e}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise TraceError(f"{path}: meta: found format {meta.get('format') if isinstance(meta, dict) else meta!r}, wanted {FORMAT}")
    for name, kind in REQUIRED_META.items():
        if not isinstance(meta.get(name), kind):
            raise TraceError(f"{path}: meta: {name}: found {meta.get(name)!r}, wanted {kind.__name__}")
    return meta


def _chunks(a: np.ndarray) -> Iterator[bytes]:
    for i in range(0, len(a), CHUNK):
        yield np.ascontiguousarray(a[i : i + CHUNK])


def _publish(path: Path, meta: dict, arrays: dict[str, tuple[np.dtype, tuple, Iterable[bytes]]]) -> None:
    text = np.array(json.dumps(meta, ensure_ascii=False))
    npz.publish(path, {"meta": (text.dtype, (), [text.tobytes()]), **arrays})


class TraceWriter:
    """Builds a trace piece by piece; ids, probs and hidden states wait on disk beside the target. A context manager: leaving it removes what was not finished.

    >>> with TraceWriter("t.npz", meta, probs=meta["n_used"]) as writer:
    ...     writer.append(ids, token_ids, DECODE, step, probs)      # of one sequence, as often as needed
    ...     writer.end_sequence()
    ...     writer.finish()
    """

    def __init__(self, path: str | os.PathLike, meta: dict, probs: int = 0, hidden: int = 0):
        """`probs`, `hidden`: values per token and layer; 0: not in this trace. Raises TraceError when nothing can be written there."""
        self.path = Path(path)
        self.meta = meta
        shape = (len(meta["layers"]),)
        self.rows = {"ids": (ids_dtype(meta["n_expert"]), (*shape, meta["n_used"]))}
        self.rows |= {name: (np.dtype(np.float16), (*shape, n)) for name, n in (("probs", probs), ("hidden", hidden)) if n}
        self.small = {"token_ids": array("i"), "phase": array("B"), "step": array("i")}
        self.offsets = [0]
        self.n_open = 0  # tokens of the sequence that has not ended
        self.next_step = 0
        self.closed_step = 0  # steps of the sequences that have ended
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".part", dir=self.path.parent))
            self.files = {name: open(self.folder / name, "w+b") for name in self.rows}
        except OSError as e:
            raise TraceError(f"{self.path}: {e.strerror}") from None

    @property
    def n_tokens(self) -> int:
        return self.offsets[-1] + self.n_open

    @property
    def n_sequences(self) -> int:
        return len(self.offsets) - 1

    def append(self, ids: np.ndarray, token_ids, phase: int, step: np.ndarray, probs: np.ndarray | None = None, hidden: np.ndarray | None = None) -> None:
        """Tokens of the open sequence. ids [n, L, K] in the dtype of the trace; `phase` of all of them; `step` counts from 0 within this call."""
        n = len(ids)
        try:
            for name, rows in (("ids", ids), ("probs", probs), ("hidden", hidden)):
                if name in self.rows:
                    dtype, shape = self.rows[name]
                    assert rows.dtype == dtype and rows.shape == (n, *shape), (name, rows.dtype, rows.shape)
                    self.files[name].write(np.ascontiguousarray(rows))
        except OSError as e:
            raise TraceError(f"{self.path}: {e.strerror}") from None
        for name, values in (("token_ids", token_ids), ("phase", np.full(n, phase)), ("step", np.asarray(step) + self.next_step)):
            self.small[name].frombytes(np.asarray(values, ARRAYS[name][0]).tobytes())
        self.n_open += n
        self.next_step += int(step[-1]) + 1 if n else 0

    def end_sequence(self) -> None:
        self.offsets.append(self.n_tokens)
        self.closed_step, self.n_open = self.next_step, 0

    def drop_sequence(self) -> None:
        """Forgets the tokens of the sequence that has not ended."""
        n = self.offsets[-1]
        for values in self.small.values():
            del values[n:]
        for name, file in self.files.items():
            dtype, shape = self.rows[name]
            try:
                file.truncate(n * dtype.itemsize * int(np.prod(shape)))
                file.seek(0, os.SEEK_END)
            except OSError as e:
                raise TraceError(f"{self.path}: {e.strerror}") from None
        self.next_step, self.n_open = self.closed_step, 0

    def finish(self) -> None:
        """Drops what is open and writes the trace. Raises TraceError."""
        self.drop_sequence()
        n = self.n_tokens
        arrays = {}
        for name, (dtype, shape) in self.rows.items():
            self.files[name].seek(0)
            arrays[name] = (dtype, (n, *shape), iter(lambda f=self.files[name]: f.read(1 << 22), b""))
        small = {name: np.array(values, ARRAYS[name][0]) for name, values in self.small.items()}
        small["offsets"] = np.array(self.offsets, np.int64)
        for name, a in small.items():
            arrays[name] = (a.dtype, a.shape, [a.tobytes()])
        _publish(self.path, self.meta, arrays)

    def close(self) -> None:
        for file in self.files.values():
            with suppress(OSError):  # a full disk, once more: the file goes anyway
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
