"""Learned heads: what a layer's router input says about the events to come. One file per model, bound to it by its fingerprint; docs/formats.md has every key.

    p^T = softmax(W_T h + b)    the layer's own next event, of the next token                     (Cache-Aware Temporal Router)
    p^S = softmax(W_S h + b)    the event of the next layer, after the last one the first layer's of the next token     (Spatio-Temporal Router)

A file is checked as a whole before anything of it is used: format, shapes, checksum, finite numbers. Nothing here knows how heads are trained or used.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgemoe.errors import EdgemoeError
from edgemoe.recommendation import folder

FORMAT = 1
ARCHITECTURE = "edgemoe-heads"
IN_SIDECAR = "edgemoe-router"  # a package's router.gguf may have them, too
MODES = {"temporal": ("head_t",), "spatio": ("head_s",), "spatio-temporal": ("head_t", "head_s")}
TYPES = {"f16": "F16", "q8_0": "Q8_0"}
LARGEST_F16 = 65504.0
MARK_DIGITS = 12  # of a sequence's hash, in training["sequences"]


class HeadsError(EdgemoeError):
    """A file of learned heads that is damaged, of another version, or of another model; or heads that are no such thing."""


@dataclass
class Heads:
    """Heads of L layers with experts, in the order of `layers`.

    weights_t, weights_s: float32 [E, D] per layer, or None where the mode has no such head; a spatial head has as many rows as the next layer has experts. biases_t,
    biases_s: float32 [E] per layer, or None.
    """

    fingerprint: str
    layers: list[int]  # block numbers
    expert_counts: list[int]
    mode: str  # of MODES
    slots: int  # B, experts per layer that they were trained for
    tau: float  # of the soft choice that they were trained with; 0: unknown
    weights_t: list[np.ndarray] | None = None
    weights_s: list[np.ndarray] | None = None
    biases_t: list[np.ndarray] | None = None
    biases_s: list[np.ndarray] | None = None
    training: dict = field(default_factory=dict)
    where: str = field(default="heads", compare=False)
    dtype: str = field(default="f16", compare=False)  # of TYPES, that the weights have in the file: packing them so again gives its bytes

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_embd(self) -> int:
        return (self.weights_t or self.weights_s)[0].shape[1]

    def of(self, head: str) -> tuple[list[np.ndarray] | None, list[np.ndarray] | None]:
        """Weights and biases of "head_t" or "head_s"."""
        return (self.weights_t, self.biases_t) if head == "head_t" else (self.weights_s, self.biases_s)

    def n_rows(self, head: str, index: int) -> int:
        """What a head of layer `index` predicts: experts of that layer, or of the next."""
        return self.expert_counts[index if head == "head_t" else (index + 1) % self.n_layers]

    def probs(self, head: str, index: int, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, E] from router inputs [n, D] of layer `index`."""
        weights, biases = self.of(head)
        z = np.asarray(hidden, np.float32) @ weights[index].T
        if biases is not None:
            z += biases[index]
        return softmax(z)

    def check(self) -> None:
        """Raises HeadsError for what cannot be heads."""
        _check(self)

    def check_fits(self, source) -> None:
        """source: an opened edgemoe.package.Source. Raises HeadsError when the heads are of another model."""
        mark = source.package_fingerprint()
        if mark != self.fingerprint:
            raise HeadsError(f"{self.where}: are heads of another model: found fingerprint {self.fingerprint[:8]}, wanted {mark[:8] or 'none'} of {source.path}")
        found = list(zip(self.layers, self.expert_counts))
        wanted = [(layer.layer, layer.n_expert) for layer in source.layers]
        if found != wanted:
            raise HeadsError(f"{self.where}: found heads of {_shape(found)}, wanted {_shape(wanted)} as in {source.path}")
        self.check_width(source.integer("embedding_length", self.n_embd), source.path)

    def check_trace(self, trace) -> None:
        """Raises HeadsError when a trace is of another model, or has not what heads read."""
        mark = trace.meta["fingerprint"]
        if mark != self.fingerprint:
            raise HeadsError(f"{trace.where}: was recorded from another model: found fingerprint {mark[:8] or 'none'}, wanted {self.fingerprint[:8]} of {self.where}")
        if trace.meta["layers"] != self.layers or any(n > trace.n_expert for n in self.expert_counts):
            raise HeadsError(f"{trace.where}: found {len(trace.meta['layers'])} layers of {trace.n_expert} experts, wanted {_shape(list(zip(self.layers, self.expert_counts)))} as in {self.where}")
        if trace.hidden is None:
            raise HeadsError(f"{trace.where}: has no hidden states, which heads read: record it with --hidden")
        self.check_width(trace.hidden.shape[-1], trace.where)

    def trained_on(self, trace) -> list[int]:
        """The sequences of a trace that these heads were trained on, or chosen by."""
        seen = set(self.training.get("sequences", ()))
        return [i for i, mark in enumerate(trace.sequence_hashes()) if mark[:MARK_DIGITS] in seen]

    def check_width(self, n_embd: int, where: str) -> None:
        if n_embd != self.n_embd:
            raise HeadsError(f"{self.where}: found heads of {self.n_embd} values, wanted {n_embd} as in {where}")


def softmax(z: np.ndarray) -> np.ndarray:
    """Over the last axis, in place."""
    z -= z.max(-1, keepdims=True)
    np.exp(z, out=z)
    z /= z.sum(-1, keepdims=True)
    return z


def default_path(mark: str) -> Path:
    """Where the heads of a model with this fingerprint are looked for: $XDG_CONFIG_HOME/edgemoe/heads/FINGERPRINT.gguf (~/.config/edgemoe/heads/)."""
    return folder("heads") / f"{mark}.gguf"


def load(path: str | os.PathLike) -> Heads:
    """Raises HeadsError: no such file, no heads, damaged, or of a version that is not known here."""
    from edgemoe.convert.arrays import Arrays
    from edgemoe.convert.errors import ConvertError

    if not os.path.isfile(path):
        raise HeadsError(f"{path}: no such file")
    try:
        with Arrays(path) as file:
            heads = _read(file, str(path))
    except ConvertError as e:
        raise HeadsError(str(e)) from None
    except OSError as e:
        raise HeadsError(f"{path}: {e.strerror}") from None
    heads.check()
    return heads


def in_sidecar(path: str | os.PathLike) -> bool:
    """Whether a package's sidecar has keys of heads; what they are worth says load. Raises HeadsError."""
    from edgemoe.convert.arrays import Arrays
    from edgemoe.convert.errors import ConvertError

    try:
        with Arrays(path) as file:
            return file.value("edgemoe.heads.format_version") is not None
    except (ConvertError, OSError) as e:
        raise HeadsError(str(e)) from None


def save(path: str | os.PathLike, heads: Heads, dtype: str = "f16") -> None:
    """Checks, writes beside `path` and renames: a file of that name is always whole. dtype of the weights: "f16" or "q8_0". Raises HeadsError."""
    from edgemoe.convert.arrays import packed, write_arrays
    from edgemoe.convert.errors import ConvertError

    heads.check()
    path = Path(path)
    if dtype not in TYPES:
        raise HeadsError(f"{path}: weights as {dtype}: wanted one of {', '.join(TYPES)}")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        tensors = [(name, kind, packed(array, kind)) for name, kind, array in _tensors(heads, TYPES[dtype])]
        crc = 0
        for _, _, data in tensors:
            crc = zlib.crc32(data, crc)
        write_arrays(beside, ARCHITECTURE, [*_keys(heads), ("edgemoe.heads.crc32", "u32", crc)], tensors)
        os.replace(beside, path)
    except ConvertError as e:
        raise HeadsError(f"{path}: {e}") from None
    except OSError as e:
        raise HeadsError(f"{path}: {e.strerror}") from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _keys(heads: Heads) -> list[tuple[str, str, object]]:
    return [
        ("edgemoe.heads.format_version", "u32", FORMAT),
        ("edgemoe.fingerprint", "string", heads.fingerprint),
        ("edgemoe.layers", "u32[]", heads.layers),
        ("edgemoe.expert_counts", "u32[]", heads.expert_counts),
        ("edgemoe.heads.mode", "string", heads.mode),
        ("edgemoe.heads.slots", "u32", heads.slots),
        ("edgemoe.heads.tau", "f32", heads.tau),
        ("edgemoe.heads.training", "string", json.dumps(heads.training, sort_keys=True)),
    ]


def _tensors(heads: Heads, kind: str):
    for index, layer in enumerate(heads.layers):
        for head in MODES[heads.mode]:
            weights, biases = heads.of(head)
            yield f"blk.{layer}.{head}.weight", kind, weights[index]
            if biases is not None:
                yield f"blk.{layer}.{head}.bias", "F32", biases[index]


def _read(file, where: str) -> Heads:
    architecture = file.value("general.architecture")
    if architecture not in (ARCHITECTURE, IN_SIDECAR):
        raise HeadsError(f"{where}: found a GGUF of {architecture!r}, wanted {ARCHITECTURE!r}")
    version = file.value("edgemoe.heads.format_version")
    if architecture == IN_SIDECAR and version is None:
        raise HeadsError(f"{where}: a sidecar without learned heads")
    if version != FORMAT:
        raise HeadsError(f"{where}: found heads of format {version}, wanted {FORMAT}: train them again")
    kinds = {"fingerprint": str, "layers": list, "expert_counts": list, "heads.mode": str, "heads.slots": int, "heads.tau": float, "heads.crc32": int, "heads.training": str}
    said = {name: file.value(f"edgemoe.{name}") for name in kinds}
    for name, kind in kinds.items():
        if type(said[name]) is not kind:
            raise HeadsError(f"{where}: edgemoe.{name}: found {said[name]!r}, wanted {kind.__name__}")
    layers, counts, mode = said["layers"], said["expert_counts"], said["heads.mode"]
    if mode not in MODES:
        raise HeadsError(f"{where}: edgemoe.heads.mode: found {mode!r}, wanted one of {', '.join(MODES)}")
    if not layers or len(layers) != len(counts):
        raise HeadsError(f"{where}: found {len(layers)} layers and {len(counts)} counts of experts, wanted one for each")
    arrays = _read_tensors(file, layers, mode, said["heads.crc32"], where)
    kinds_there = {file.tensors[name].type.name for name in arrays if name.endswith("weight")}
    dtype = "q8_0" if kinds_there == {"Q8_0"} else "f16"
    try:
        training = json.loads(said["heads.training"])
    except ValueError as e:
        raise HeadsError(f"{where}: edgemoe.heads.training: not JSON: {e}") from None

    def column(head: str, part: str) -> list | None:
        found = [arrays.get(f"blk.{layer}.{head}.{part}") for layer in layers]
        if part == "bias" and any(a is not None for a in found):  # a layer without one adds nothing
            found = [np.zeros(len(w), np.float32) if b is None else b for b, w in zip(found, column(head, "weight"))]
        return None if found[0] is None else found

    parts = {f"{what}_{head[-1]}": column(head, part) for head in MODES[mode] for what, part in (("weights", "weight"), ("biases", "bias"))}
    return Heads(said["fingerprint"], layers, counts, mode, said["heads.slots"], said["heads.tau"], **parts, training=training, where=where, dtype=dtype)


def _read_tensors(file, layers: list[int], mode: str, wanted_crc: int, where: str) -> dict[str, np.ndarray]:
    """All tensors of heads by name, once their checksum is right."""
    names = [name for name in file.tensors if ".head_t." in name or ".head_s." in name]
    known = {f"blk.{layer}.{head}.{part}" for layer in layers for head in MODES[mode] for part in ("weight", "bias")}
    strange = [name for name in names if name not in known]
    if strange:
        raise HeadsError(f"{where}: tensor {strange[0]}: wanted only heads of a {mode} file's layers")
    missing = [name for name in sorted(known) if name.endswith("weight") and name not in file.tensors]
    if missing:
        raise HeadsError(f"{where}: tensor {missing[0]} is missing")
    crc, arrays = 0, {}
    for name in names:
        kind = file.tensors[name].type.name
        if kind not in (("F32",) if name.endswith("bias") else TYPES.values()):
            raise HeadsError(f"{where}: tensor {name}: found type {kind}, wanted {'F32' if name.endswith('bias') else ' or '.join(TYPES.values())}")
        raw = file.raw(name)
        crc = zlib.crc32(raw, crc)
        arrays[name] = file.array(name, raw)
    if crc != wanted_crc:
        raise HeadsError(f"{where}: damaged: found checksum {crc:#010x} of its tensors, wanted {wanted_crc:#010x}")
    return arrays


def _check(h: Heads) -> None:
    if h.mode not in MODES:
        raise HeadsError(f"{h.where}: mode: found {h.mode!r}, wanted one of {', '.join(MODES)}")
    if not h.layers or len(h.layers) != len(h.expert_counts) or list(h.layers) != sorted(set(h.layers)) or min(h.expert_counts) < 1:
        raise HeadsError(f"{h.where}: layers: found {h.layers} with {h.expert_counts} experts, wanted rising block numbers, each with a count of experts")
    if not 0 < h.slots <= max(h.expert_counts):
        raise HeadsError(f"{h.where}: slots: found {h.slots}, wanted 1 to {max(h.expert_counts)}")
    if not (np.isfinite(h.tau) and h.tau >= 0):
        raise HeadsError(f"{h.where}: tau: found {h.tau}, wanted a number that is not negative")
    width = None
    for head in ("head_t", "head_s"):
        weights, biases = h.of(head)
        if (weights is not None) != (head in MODES[h.mode]):
            raise HeadsError(f"{h.where}: {head}: {'missing, wanted' if weights is None else 'there, but not wanted'} with mode {h.mode}")
        if weights is None:
            continue
        if len(weights) != h.n_layers or (biases is not None and len(biases) != h.n_layers):
            raise HeadsError(f"{h.where}: {head}: found heads of {len(weights)} layers, wanted {h.n_layers}")
        for index, layer in enumerate(h.layers):
            name, n = f"{h.where}: blk.{layer}.{head}", h.n_rows(head, index)
            width = weights[0].shape[-1] if width is None else width
            if weights[index].shape != (n, width):
                raise HeadsError(f"{name}.weight: found shape {list(weights[index].shape)}, wanted {[n, width]}")
            if biases is not None and biases[index].shape != (n,):
                raise HeadsError(f"{name}.bias: found shape {list(biases[index].shape)}, wanted {[n]}")
            if not (np.abs(weights[index]) <= LARGEST_F16).all():  # NaN is not, either
                raise HeadsError(f"{name}.weight: found {_worst(weights[index])}, wanted numbers that float16 can hold")
            if biases is not None and not np.isfinite(biases[index]).all():
                raise HeadsError(f"{name}.bias: found {_worst(biases[index])}, wanted finite numbers")


def _worst(a: np.ndarray) -> float:
    bad = a[~np.isfinite(a)]
    return float(bad[0] if len(bad) else a.flat[np.abs(a).argmax()])


def _shape(layers: list[tuple[int, int]]) -> str:
    counts = sorted({n for _, n in layers})
    return f"{len(layers)} layers ({layers[0][0]} to {layers[-1][0]}) of {' to '.join(map(str, counts[:1] + counts[1:][-1:]))} experts"
