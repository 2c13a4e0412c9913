"""From a trained model back to a GGUF and its file of heads. What was trained replaces its tensors in the GGUF the model came from; everything else, metadata too, stays byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from edgemoe import __version__, heads as heads_file
from edgemoe.heads import MODES, Heads
from edgemoe.joint.checkpoint import places
from edgemoe.joint.families import CheckpointError
from edgemoe.package import Source

NOTE = "edgemoe.joint.training"


def replace_parameters(src: str | os.PathLike, out: str | os.PathLike, parameters: dict[str, Callable[[], np.ndarray]], note: dict, progress=None) -> dict[str, tuple[str, str]]:
    """Writes `out`: the GGUF `src` with these parameters of the transformers class, functions that return float32. note: kept in the metadata, so that the new model has a
    fingerprint of its own in any case. Returns the types before and now of each replaced tensor. Raises CheckpointError."""
    from edgemoe.convert.arrays import Arrays
    from edgemoe.convert.errors import ConvertError
    from edgemoe.convert.replace import replace_tensors

    try:
        with Arrays(src) as file:
            where = places(file.value("general.architecture", ""), file.tensors, str(src))
        missing = sorted(set(parameters) - {place.parameter for place in where.values()})
        if missing:
            raise CheckpointError(f"{src}: has no tensor for {missing[0]}: is it the model that the checkpoint was made of?")
        arrays = {name: (lambda place=place: place.view(parameters[place.parameter]())) for name, place in where.items() if place.parameter in parameters}
        return replace_tensors(src, out, arrays, {NOTE: json.dumps(note, sort_keys=True)}, progress)
    except ConvertError as e:
        raise CheckpointError(str(e)) from None
    except OSError as e:
        raise CheckpointError(f"{out}: {e.strerror or e}") from None


def require_same(src: str | os.PathLike, parameters: dict[str, tuple[int, ...]]) -> None:
    """Before an hour's work: the GGUF has a tensor for each of these parameters, and in its shape. Raises CheckpointError."""
    from edgemoe.convert.arrays import Arrays
    from edgemoe.convert.errors import ConvertError

    try:
        with Arrays(src) as file:
            shapes = {name: tensor.shape[::-1] for name, tensor in file.tensors.items()}
            where = places(file.value("general.architecture", ""), shapes, str(src))
    except ConvertError as e:
        raise CheckpointError(str(e)) from None
    found = {place.parameter: place.shape(shapes[name]) for name, place in where.items()}
    for name, shape in parameters.items():
        if found.get(name) != tuple(shape):
            raise CheckpointError(f"{src}: found {list(found[name]) if name in found else 'no tensor'} for {name}, wanted {list(shape)} as in the checkpoint")


def array_of(parameter) -> np.ndarray:
    """float32 of a torch parameter."""
    return parameter.detach().float().cpu().numpy()


def write_model(joint, src: str | os.PathLike, out: str | os.PathLike, heads_out: str | os.PathLike | None, said: dict, dtype: str = "f16", progress=None) -> dict:
    """The trained model as `out`, and its heads, bound to it; heads_out: None for where tune and the engine look for them. said: kept with both.

    Returns {"model", "heads", "types", "fingerprint"}. Raises CheckpointError, HeadsError."""
    parameters = dict(joint.model.named_parameters())
    wanted = {name: (lambda name=name: array_of(parameters[name])) for name in joint.trained}
    types = replace_parameters(src, out, wanted, {"options": asdict(joint.options), "steps": joint.step, "edgemoe": __version__}, progress)
    with Source(out) as source:
        found = heads_of(joint, source, said)
    heads_out = Path(heads_out) if heads_out else heads_file.default_path(found.fingerprint)
    heads_file.save(heads_out, found, dtype)
    return {"model": str(out), "heads": str(heads_out), "types": types, "fingerprint": found.fingerprint}


def heads_of(joint, source: Source, said: dict) -> Heads:
    """The heads of a trained model, bound to its GGUF."""
    slots = joint.options.n_slots(joint.tap.n_expert, joint.tap.n_used)
    parts = {}
    for head in MODES[joint.options.mode]:
        module = getattr(joint.heads, head)
        parts[f"weights_{head[-1]}"], parts[f"biases_{head[-1]}"] = list(array_of(module["weight"])), list(array_of(module["bias"]))
    layers = [layer.layer for layer in source.layers]
    if layers != joint.tap.layers:
        raise CheckpointError(f"{source.path}: found experts in layers {layers}, wanted {joint.tap.layers} as in the checkpoint")
    return Heads(source.package_fingerprint(), layers, [layer.n_expert for layer in source.layers], joint.options.mode, slots, joint.options.tau, **parts, training=said)
