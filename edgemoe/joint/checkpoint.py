"""A GGUF as a Hugging Face style checkpoint directory: config.json and safetensors in float32, whatever the types in the GGUF are. No tokenizer: texts are cut by the GGUF's own.

    DIR/config.json, model-00001-of-0000N.safetensors, model.safetensors.index.json
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgemoe.joint.families import CheckpointError, Keys, Place, config_of, family_of

SHARD_BYTES = 2 << 30
NOT_NEEDED = ("rope_freqs.weight",)  # llama.cpp's own; transformers computes them from config.json


def places(architecture: str, names, where: str) -> dict[str, Place]:
    """Where each tensor of a GGUF lies. Raises CheckpointError for a tensor that has no place."""
    family, found = family_of(architecture, where), {}
    for name in names:
        if name in NOT_NEEDED:
            continue
        place = family.place(name)
        if place is None:
            raise CheckpointError(f"{where}: tensor {name}: has no place in {family.class_name}")
        found[name] = place
    return found


def export_checkpoint(model: str | os.PathLike, folder: str | os.PathLike, progress: Callable[[int], None] | None = None) -> Path:
    """Writes the checkpoint of a GGUF into a new folder; written beside and renamed. progress: called with the parameters of each file.

    Memory is that of one file of up to 2 GiB. Raises CheckpointError."""
    from edgemoe.convert.arrays import Arrays
    from edgemoe.convert.errors import ConvertError

    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder}: exists, wanted the name of a new folder")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with Arrays(model) as file:
            beside.mkdir(parents=True)
            _write(file, str(model), beside, progress or (lambda n: None))
        os.replace(beside, folder)
    except ConvertError as e:
        raise CheckpointError(str(e)) from None
    except OSError as e:
        raise CheckpointError(f"{folder}: {e.strerror or e}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _write(file, where: str, folder: Path, progress) -> None:
    from safetensors.numpy import save_file

    keys = Keys(file.value, where)
    shapes = {name: tensor.shape[::-1] for name, tensor in file.tensors.items()}
    by_parameter: dict[str, list[tuple[str, Place]]] = {}
    for name, place in places(keys.architecture, shapes, where).items():
        by_parameter.setdefault(place.parameter, []).append((name, place))
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{where}: tensor token_embd.weight is missing")
    config = config_of(keys, shapes["token_embd.weight"][0], "output.weight" not in shapes)
    sizes = {parameter: 4 * int(np.prod(parts[0][1].shape(shapes[parts[0][0]]))) for parameter, parts in by_parameter.items()}
    absent = _left_out(keys, shapes)
    sizes |= {name: 4 * n for name, n in absent.items()}
    shards = _shards(sizes)
    index = {}
    for number, names in enumerate(shards, 1):
        title = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: np.zeros((1, absent[name]), np.float32) if name in absent else _parameter(file, shapes, by_parameter[name]) for name in names}, folder / title, {"format": "pt"})
        index |= {name: title for name in names}
        progress(sum(sizes[name] for name in names) // 4)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _left_out(keys: Keys, shapes: dict) -> dict[str, int]:
    """Parameters of one row of zeros that the class has and the GGUF need not have, with their lengths."""
    family = family_of(keys.architecture, keys.where)
    routers = {name.removesuffix("ffn_gate_inp.weight"): shape[0] for name, shape in shapes.items() if name.endswith(".ffn_gate_inp.weight")}
    return {family.place(layer + family.zero).parameter: n for layer, n in routers.items() if family.zero and layer + family.zero not in shapes}


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    shards, filled = [[]], 0
    for name, n in sizes.items():
        if shards[-1] and filled + n > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += n
    return shards


def _parameter(file, shapes: dict, parts: list[tuple[str, Place]]) -> np.ndarray:
    """float32; every element is written by exactly one of the parts."""
    whole = np.empty(parts[0][1].shape(shapes[parts[0][0]]), np.float32)
    n = 0
    for name, place in parts:
        view = place.view(whole)
        if view.shape != shapes[name]:
            raise CheckpointError(f"tensor {name}: found shape {list(shapes[name])}, wanted {list(view.shape)} beside {parts[0][0]}")
        view[...] = file.array(name)
        n += view.size
    if n != whole.size:
        raise CheckpointError(f"tensor {parts[0][0]}: the other half of {parts[0][1].parameter} is missing")
    return whole
