"""The terminal side of `edgemoe train-joint` and `edgemoe export-checkpoint`. Progress goes to standard error, results to standard output."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from edgemoe import resumable
from edgemoe.joint.options import JointError, JointOptions
from edgemoe.simulate_report import aligned

EXTRA = {"train-joint": ("torch", "transformers", "safetensors"), "export-checkpoint": ("safetensors",)}
FROM_COMMAND = ("mode", "weight", "train", "slots", "tau", "steps", "batch_tokens", "micro_tokens", "context", "rate", "head_rate", "warmup", "schedule", "weight_decay", "clip", "seed", "holdout", "save_every")


def require_extra(command: str) -> None:
    """Raises JointError that says what to install."""
    missing = [name for name in EXTRA[command] if importlib.util.find_spec(name) is None]
    if missing:
        raise JointError(f"{command} needs {' and '.join(missing)}: pip install 'edgemoe[train]'")


def export(options) -> int:
    """`edgemoe export-checkpoint`."""
    require_extra("export-checkpoint")
    from edgemoe.joint.checkpoint import export_checkpoint

    with tqdm(unit="", unit_scale=True, desc="parameters", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar:
        folder = export_checkpoint(options.path, options.folder, bar.update)
    n_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(json.dumps({"checkpoint": str(folder), "bytes": n_bytes}) if options.json else f"{folder}: {n_bytes / 1e6:.0f} MB, float32")
    return 0


def train_joint(options) -> int:
    """`edgemoe train-joint`."""
    require_extra("train-joint")
    chosen = JointOptions(**{name: getattr(options, name) for name in FROM_COMMAND})
    chosen.check()
    out = Path(options.out)
    state = resumable.state_beside(out, "pt", options.resume, *([Path(options.heads)] if options.heads else []))
    import torch

    from edgemoe.joint import back
    from edgemoe.joint.examples import Vocabulary, read_examples
    from edgemoe.joint.train import load_model, prepare, train

    if options.threads:
        torch.set_num_threads(options.threads)
    examples = read_examples(options.data, Vocabulary(options.gguf), chosen.context)
    joint = prepare(load_model(options.checkpoint, options.device, options.dtype), chosen)
    parameters = dict(joint.model.named_parameters())
    back.require_same(options.gguf, {name: tuple(parameters[name].shape) for name in joint.trained})
    with tqdm(total=chosen.steps, unit="step", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar:

        def show(step) -> None:
            bar.set_postfix_str(f"language {step.lm:.4f}, heads {step.heads:.4f}", refresh=False)
            bar.update(step.done - bar.n)

        with resumable.saying_where(state):
            train(joint, examples, state, options.resume, show)
    said = _said(joint, examples, options)
    found = back.write_model(joint, options.gguf, out, options.heads, said, options.type)
    print(json.dumps({**found, **said, "history": joint.history}) if options.json else _text(joint, found, said))
    return 0


def _said(joint, examples, options) -> dict:
    return {
        "how": "joint" if joint.options.weight else "control: the model by its language loss alone, the heads beside it",
        "options": asdict(joint.options), "data": [Path(path).name for path in options.data], "n_examples": len(examples), "steps": joint.step, "n_tokens": joint.n_tokens,
        "n_parameters": sum(p.numel() for p in joint.optimizer.param_groups[0]["params"]), "held_out": joint.held_out,
    }


def _text(joint, found: dict, said: dict) -> str:
    cells = [[f"step {row['step']}", f"{row['lm']:.4f}", f"{row['heads']:.4f}", str(row["n_tokens"])] for row in said["held_out"]]
    changed = sorted({pair for pair in found["types"].values() if pair[0] != pair[1]})
    return "\n".join([
        f"lambda {joint.options.weight:g}, {joint.options.mode}, {joint.options.train}: {said['n_parameters']} parameters, {joint.step} steps, {joint.n_tokens} tokens of answers",
        *aligned(["held out", "language", "heads", "tokens"], cells, [True, False, False, False]),
        f"{found['model']}: {len(found['types'])} tensors replaced" + "".join(f"; {a} became {b}, which is all that can be written" for a, b in changed),
        f"{found['heads']}: heads",
    ])
