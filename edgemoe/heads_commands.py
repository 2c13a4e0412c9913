"""The terminal side of `edgemoe heads`: what is in a file of learned heads, and such a file into a package."""

from __future__ import annotations

import json
import os

from edgemoe.heads import HeadsError, load
from edgemoe.package import Source


def show(options) -> int:
    """`edgemoe heads show`."""
    heads = load(os.path.join(options.path, "router.gguf") if os.path.isdir(options.path) else options.path)
    said = {
        "path": options.path, "fingerprint": heads.fingerprint, "mode": heads.mode, "layers": heads.layers, "expert_counts": heads.expert_counts, "n_embd": heads.n_embd,
        "slots": heads.slots, "tau": heads.tau, "type": heads.dtype, "training": heads.training,
    }  # fmt: skip
    if options.json:
        print(json.dumps(said))
        return 0
    held_out = heads.training.get("held_out")
    best = [row for row in held_out if isinstance(row, dict) and row.get("epoch") == heads.training.get("best_epoch")] if isinstance(held_out, list) else []
    rows = [
        ("heads", f"{heads.mode}, for {heads.slots} slots per layer (any number may be used), {heads.dtype}"),
        ("of model", heads.fingerprint),
        ("layers", f"{heads.n_layers} ({heads.layers[0]} to {heads.layers[-1]}) of {min(heads.expert_counts)} to {max(heads.expert_counts)} experts, {heads.n_embd} values wide"),
        *(("held out", ", ".join(f"{name} {value}" for name, value in row.items())) for row in best),
    ]
    print("\n".join(f"{name:<9} {text}" for name, text in rows))
    return 0


def add(options) -> int:
    """`edgemoe heads add`: the file is checked first, then goes into the package's sidecar."""
    from edgemoe.convert.errors import ConvertError
    from edgemoe.convert.sidecar import add_heads

    heads = load(options.file)
    with Source(options.package, check_blobs=False) as source:
        if source.kind != "package":
            raise HeadsError(f"{options.package}: wanted a package directory, which edgemoe-convert makes; for a GGUF, name the file with --heads")
        heads.check_fits(source)
    try:
        path = add_heads(options.package, options.file)
    except ConvertError as e:
        raise HeadsError(str(e)) from None
    except OSError as e:
        raise HeadsError(f"{e.filename or options.package}: {e.strerror}") from None
    said = {"package": options.package, "sidecar": str(path), "bytes": path.stat().st_size, "mode": heads.mode}
    print(json.dumps(said) if options.json else f"{path}: has {heads.mode} heads of {heads.n_layers} layers now, {said['bytes'] / 1e6:.1f} MB")
    return 0
