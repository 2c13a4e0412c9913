"""The routers that a model was trained with: where learned heads start from, and p^R of traces that have not kept it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgemoe.errors import EdgemoeError
from edgemoe.package import Source


class RouterError(EdgemoeError):
    """A model whose routers cannot be read."""


@dataclass
class Router:
    weight: np.ndarray  # float32 [E, D]
    bias: np.ndarray | None = None  # float32 [E], of the logits; what a model chooses by without weighing by it is not here

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, E] from router inputs [n, D]."""
        z = np.asarray(hidden, np.float32) @ self.weight.T
        return z if self.bias is None else z + self.bias


def native_routers(source: Source) -> list[Router]:
    """One per layer of source.layers: of a GGUF from its tensors, of a package from its sidecar. Raises RouterError."""
    from edgemoe.convert.arrays import Arrays
    from edgemoe.convert.errors import ConvertError

    path = Path(source.path, "router.gguf") if source.kind == "package" else source.path
    try:
        with Arrays(path) as file:
            return [_router(file, path, layer.layer, layer.n_expert) for layer in source.layers]
    except ConvertError as e:
        raise RouterError(str(e)) from None


def _router(file, path, layer: int, n_expert: int) -> Router:
    name = f"blk.{layer}.ffn_gate_inp"
    if f"{name}.weight" not in file.tensors:
        raise RouterError(f"{path}: tensor {name}.weight is missing: the router of layer {layer}")
    weight = file.array(f"{name}.weight")
    if weight.ndim != 2 or weight.shape[0] != n_expert:
        raise RouterError(f"{path}: tensor {name}.weight: found shape {list(weight.shape)}, wanted {n_expert} rows")
    return Router(weight, file.array(f"{name}.bias") if f"{name}.bias" in file.tensors else None)


def gating_of(probs_are: str) -> str:
    """"softmax" or "sigmoid", from what a trace says about its probabilities; empty where it does not say."""
    return next((name for name in ("softmax", "sigmoid") if probs_are.startswith(name)), "")
