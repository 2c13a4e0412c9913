"""Learned heads in an engine: found for a model, checked, and handed to the library, which evaluates them.

Policies that go by heads (policies.BY_HEADS) and bring no fitted tables look for a file that was named, or else for what `edgemoe train-heads` wrote for this model, or for heads
in a package's sidecar. Heads that cannot be used are refused by name in one line, and the default policy serves; where there are none at all that is an error, which says how to
get them.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from edgemoe import _native
from edgemoe.heads import MODES, TYPES, Heads, HeadsError, default_path, in_sidecar, load
from edgemoe.package import Source
from edgemoe.policies import BY_HEADS, Policy, PolicyError, lacks, name_of, policy as read_policy

HOW = "edgemoe train-heads makes them from traces with hidden states, --heads FILE names them; or fit=FILE.npz with tables that edgemoe simulate --save-fit has written"


class NativeHeads:
    """Heads as the library evaluates them: weights as float16 or Q8_0, inputs rounded to float16 and outputs too, as in a trace. Raises HeadsError."""

    def __init__(self, heads: Heads):
        from edgemoe.convert.arrays import packed
        from edgemoe.convert.errors import ConvertError

        ffi, self._lib = _native.load()
        self.heads, kept = heads, []

        def column(head: str):
            weights, biases = heads.of(head)
            if weights is None:
                return ffi.NULL
            rows = ffi.new("struct edgemoe_head[]", heads.n_layers)
            for i, row in enumerate(rows):
                arrays = [packed(weights[i], TYPES[heads.dtype]), None if biases is None else np.ascontiguousarray(biases[i], np.float32)]
                kind = ffi.new("char[]", heads.dtype.encode())
                row.type, row.weights = kind, ffi.from_buffer(arrays[0])
                row.bias = ffi.NULL if arrays[1] is None else ffi.from_buffer("float[]", arrays[1])
                kept.extend([arrays, kind])
            return rows

        try:
            handle = self._lib.edgemoe_heads_open(ffi.new("uint32_t[]", heads.expert_counts), heads.n_layers, heads.n_embd, column("head_t"), column("head_s"))
        except ConvertError as e:
            raise HeadsError(f"{heads.where}: {e}") from None
        if not handle:
            raise HeadsError(f"{heads.where}: {_native.last_error()}")
        self.handle = ffi.gc(handle, self._lib.edgemoe_heads_close)

    def probs(self, head: str, index: int, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, E], numbers that float16 holds, from router inputs [n, D] of layer `index`: what an engine hears, bit by bit. head: "head_t" or "head_s"."""
        ffi, _ = _native.load()
        hidden = np.ascontiguousarray(hidden, np.float32)
        found = np.zeros((len(hidden), self.heads.n_rows(head, index)), np.float32)
        if self._lib.edgemoe_heads_evaluate(self.handle, head == "head_s", index, ffi.from_buffer("float[]", hidden), len(hidden), ffi.from_buffer("float[]", found)):
            raise HeadsError(f"{self.heads.where}: {_native.last_error()}")
        return found


def find(source: Source, path: str | os.PathLike | None) -> Heads | None:
    """The heads of this model: those of `path`, or the user's, or those in its package; None: there are none. Raises HeadsError for a file that cannot be used."""
    places = [path] if path else [default_path(source.package_fingerprint())]
    sidecar = Path(source.path, "router.gguf")
    if not path and source.kind == "package" and not os.path.isfile(places[0]) and in_sidecar(sidecar):
        places = [sidecar]
    if not path and not os.path.isfile(places[0]):
        return None
    heads = load(places[0])
    heads.check_fits(source)
    return heads


def wants_heads(text: str) -> bool:
    return name_of(text) in BY_HEADS and "fit=" not in text


def policies_for(source: Source, path: str | os.PathLike | None, *asked: tuple[str, str]) -> tuple[list[Policy], str]:
    """Each text of a policy as a Policy, with heads where it goes by them; and one line of warning, or "". asked: (text, text of the tier's default).

    Raises PolicyError, and HeadsError for a path where nothing is."""
    if path and not os.path.exists(path):
        raise HeadsError(f"{path}: no such file")
    if not any(wants_heads(text) for text, _ in asked):
        unused = f"{path}: not used: no policy goes by learned heads ({', '.join(BY_HEADS)} do)" if path else ""
        return [read_policy(text) for text, _ in asked], unused
    by_heads = next(text for text, _ in asked if wants_heads(text))
    if not source.layers:
        raise PolicyError(f"policy {by_heads}: {source.path}: a dense model has no experts to predict")
    try:
        heads = find(source, path)
        native = heads and NativeHeads(heads)
    except HeadsError as e:
        instead = [default if wants_heads(text) else text for text, default in asked]
        used = ", ".join(dict.fromkeys(default for text, default in asked if wants_heads(text)))
        return [read_policy(text) for text in instead], f"{e}; without learned heads, policy {used} is used instead of {by_heads}"
    if heads is None:
        raise PolicyError(f"policy {by_heads}: it goes by learned heads, and there are none for this model: {HOW}")
    return [_with(text, native) if wants_heads(text) else read_policy(text) for text, _ in asked], ""


def _with(text: str, native: NativeHeads) -> Policy:
    there = MODES[native.heads.mode]
    if lacks(name_of(text), None, there):
        raise PolicyError(f"policy {text}: {native.heads.where} has heads of mode {native.heads.mode}: wanted such as were trained with --mode {name_of(text)}")
    chosen = read_policy(text, None, there)
    chosen.learned_heads = native
    return chosen
