"""Joint post-training: L = L_LM + lambda * L_heads, AdamW, over batches of examples; held-out losses before and after; a state to resume from.

L_LM is the cross entropy of the answers' tokens. L_heads (edgemoe.joint.losses) is the mean over layers and over pairs of neighbouring answer tokens; its gradient reaches the heads,
the routers and whatever is trained below them. With lambda = 0, the control, the model hears of the language alone, and the heads learn beside it from what it does: same data, same
steps, same start. The balancing loss that some models were pretrained with is not added. Same examples, options and seed on the same machine: same result, also when training was
interrupted and went on from its state.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from edgemoe.joint.examples import Example, batches, micro_batches, parted
from edgemoe.joint.families import FAMILIES, parameter_groups
from edgemoe.joint.losses import joint_loss
from edgemoe.joint.options import TRAINED, JointError, JointOptions
from edgemoe.joint.tap import CacheHeads, RouterTap


@dataclass
class Step:
    """What a progress display hears of: losses of the step, and how many steps are done."""

    done: int
    lm: float
    heads: float


@dataclass
class Joint:
    """A model in training. history: losses of each step, [lm, heads]; held_out: before training, and after it."""

    model: torch.nn.Module
    options: JointOptions
    tap: RouterTap = None
    heads: CacheHeads = None
    trained: list[str] = field(default_factory=list)  # names of the model's parameters that change
    optimizer: torch.optim.Optimizer = None
    step: int = 0
    n_tokens: int = 0  # of answers, that were learned from
    history: list[list[float]] = field(default_factory=list)
    held_out: list[dict] = field(default_factory=list)


def load_model(folder: str | os.PathLike, device: str = "cpu", dtype: str = "float32") -> torch.nn.Module:
    """A checkpoint directory, never a name to download. Raises JointError."""
    import transformers

    if not Path(folder, "config.json").is_file():
        raise JointError(f"{folder}: has no config.json, wanted a checkpoint directory (edgemoe export-checkpoint makes one of a GGUF)")
    known = {family.model_type: family for family in FAMILIES.values()}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in known:
            raise JointError(f"{folder}: a model of type {config.model_type!r}, wanted one of {', '.join(known)}")
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).to(device).eval()
    except (OSError, ValueError, RuntimeError) as e:
        raise JointError(f"{folder}: {str(e).splitlines()[0]}") from None
    if device == "cpu":
        model.config._experts_implementation = "eager"  # one expert after the other: grouped products are slower there
    return model


def prepare(model: torch.nn.Module, options: JointOptions) -> Joint:
    """Taps the routers, starts the heads, freezes what is not trained. Raises JointError."""
    options.check()
    family = next((f for f in FAMILIES.values() if f.class_name == type(model).__name__), None)
    if family is None:
        raise JointError(f"{type(model).__name__}: wanted one of {', '.join(f.class_name for f in FAMILIES.values())}")
    joint = Joint(model, options, RouterTap(model))
    options.n_slots(joint.tap.n_expert, joint.tap.n_used)
    joint.heads = CacheHeads(joint.tap, options.mode).to(joint.tap.routers[0].weight.device)
    groups = TRAINED[options.train]
    for name, parameter in model.named_parameters():
        # What is chosen by, and not weighed by, has no gradient: transformers keeps it fixed.
        wanted = parameter_groups(family, name) in groups and "e_score_correction_bias" not in name
        parameter.requires_grad_(wanted)
        if wanted:
            joint.trained.append(name)
    ours = [p for p in model.parameters() if p.requires_grad]
    joint.optimizer = torch.optim.AdamW(
        [{"params": ours, "lr": options.rate, "full": options.rate, "weight_decay": options.weight_decay},
         {"params": list(joint.heads.parameters()), "lr": options.head_rate, "full": options.head_rate, "weight_decay": 0.0}]
    )
    return joint


def losses(joint: Joint, examples: list[Example]) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    """One pass over examples of similar lengths: (sum of L_LM, its tokens, sum of L_heads, its pairs times layers)."""
    device = joint.tap.routers[0].weight.device
    width = max(len(e.tokens) for e in examples)
    # Filled up at the end, where no token that counts can see it: no mask is needed.
    tokens = torch.tensor([e.tokens + [0] * (width - len(e.tokens)) for e in examples], device=device)
    states = joint.model.model(input_ids=tokens, use_cache=False).last_hidden_state
    heard = joint.tap.take()
    foretold = torch.cat([states[i, e.start - 1 : len(e.tokens) - 1] for i, e in enumerate(examples)])
    answers = torch.cat([tokens[i, e.start : len(e.tokens)] for i, e in enumerate(examples)])
    lm = F.cross_entropy(joint.model.lm_head(foretold).float(), answers, reduction="sum")
    if joint.options.weight == 0:
        heard = heard.detached()
    options, n = joint.options, joint.tap
    slots = options.n_slots(n.n_expert, n.n_used)
    parts, demand = [], heard.demand()
    for i, e in enumerate(examples):
        rows = slice(i * width + e.start, i * width + len(e.tokens))
        said = joint.heads(heard.hidden[rows])
        parts.append(joint_loss(options.mode, heard.probs[rows], demand[rows], said, slots, options.tau).flatten())
    found = torch.cat(parts)
    return lm, len(answers), found.sum(), len(found)


def train(
    joint: Joint, examples: list[Example], state_path: Path | None = None, resume: bool = False, progress: Callable[[Step], None] = lambda step: None
) -> None:
    """Trains in place. state_path: where the state is kept every so many steps and when training is interrupted; removed at the end. resume: goes on from there, if it is there.
    Raises JointError; KeyboardInterrupt with the state written."""
    options = joint.options
    fit, out = parted(examples, options.holdout, options.seed)
    out = _first(out, options.held_out_tokens)
    torch.manual_seed(options.seed)
    mark = _mark(joint, examples)
    if resume and state_path and state_path.exists():
        _load_state(state_path, mark, joint)
    if not joint.held_out:
        joint.held_out.append(evaluate(joint, out))
    try:
        for epoch, part in _batches_from(fit, options, joint.step):
            if joint.step >= options.steps:
                break
            _step(joint, fit, part)
            progress(Step(joint.step, *joint.history[-1]))
            if state_path and joint.step % options.save_every == 0 and joint.step < options.steps:
                _save_state(state_path, mark, joint)
    except KeyboardInterrupt:
        if state_path:
            _save_state(state_path, mark, joint)
        raise
    joint.held_out.append(evaluate(joint, out))
    if state_path:
        with suppress(OSError):
            state_path.unlink(missing_ok=True)


def _first(examples: list[Example], n_tokens: int) -> list[Example]:
    """As many as have so many tokens together, one at least."""
    found, n = [], 0
    for e in examples:
        if found and n + len(e.tokens) > n_tokens:
            break
        found.append(e)
        n += len(e.tokens)
    return found


def _batches_from(examples: list[Example], options: JointOptions, step: int):
    """(epoch, batch) from a step on, without end."""
    epoch, n = 0, 0
    while True:
        for part in batches(examples, options.batch_tokens, options.seed, epoch):
            if n >= step:
                yield epoch, part
            n += 1
        epoch += 1


def _step(joint: Joint, examples: list[Example], batch: list[int]) -> None:
    options = joint.options
    joint.optimizer.zero_grad(set_to_none=True)
    n_lm = sum(len(examples[i].tokens) - examples[i].start for i in batch)
    n_pairs = sum(len(examples[i].tokens) - examples[i].start - 1 for i in batch) * len(joint.tap.layers)
    total_lm = total_heads = 0.0
    for part in micro_batches(batch, examples, options.micro_tokens):
        lm, _, heads, _ = losses(joint, [examples[i] for i in part])
        # In the control the heads' loss has no way into the model: its weight only scales what Adam scales away.
        (lm / n_lm + (options.weight or 1.0) * heads / max(1, n_pairs)).backward()
        total_lm, total_heads = total_lm + float(lm.detach()), total_heads + float(heads.detach())
    ours = joint.optimizer.param_groups[0]["params"]
    if options.clip:
        torch.nn.utils.clip_grad_norm_(ours, options.clip)
    for group in joint.optimizer.param_groups:
        group["lr"] = group["full"] * options.rate_share(joint.step)
    joint.optimizer.step()
    joint.step += 1
    joint.n_tokens += n_lm
    joint.history.append([total_lm / n_lm, total_heads / max(1, n_pairs)])


@torch.no_grad()
def evaluate(joint: Joint, examples: list[Example]) -> dict:
    """Mean losses: {"step", "lm" (nats per token of the answers), "heads", "n_tokens", "n_examples"}."""
    lm = heads = 0.0
    n_lm = n_heads = 0
    for part in micro_batches(list(range(len(examples))), examples, joint.options.micro_tokens):
        a, n_a, b, n_b = losses(joint, [examples[i] for i in part])
        lm, n_lm, heads, n_heads = lm + float(a), n_lm + n_a, heads + float(b), n_heads + n_b
    return {"step": joint.step, "lm": lm / n_lm, "heads": heads / max(1, n_heads), "n_tokens": n_lm, "n_examples": len(examples)}


# --- the state on disk


def _mark(joint: Joint, examples: list[Example]) -> str:
    """Of everything that decides what is trained, but for the number of examples that are looked at and how often the state is kept."""
    said = {**asdict(joint.options), "save_every": 0, "held_out_tokens": 0, "class": type(joint.model).__name__}
    digest = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16)
    for e in examples:
        digest.update(json.dumps([e.tokens, e.start]).encode())
    for router in joint.tap.routers[:2]:  # as they begin
        digest.update(router.weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _save_state(path: Path, mark: str, joint: Joint) -> None:
    parameters = dict(joint.model.named_parameters())
    state = {
        "mark": mark, "model": {name: parameters[name].detach() for name in joint.trained}, "heads": joint.heads.state_dict(), "optimizer": joint.optimizer.state_dict(),
        "step": joint.step, "n_tokens": joint.n_tokens, "history": joint.history, "held_out": joint.held_out,
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        torch.save(state, beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as e:
        raise JointError(f"{path}: {e}") from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _load_state(path: Path, mark: str, joint: Joint) -> None:
    try:
        state = torch.load(path, map_location=joint.tap.routers[0].weight.device, weights_only=True)
        found = state["mark"]
    except Exception as e:  # torch.load raises what it likes
        raise JointError(f"{path}: cannot be read as the state of a training: {str(e).splitlines()[0]}") from None
    if found != mark:
        raise JointError(f"{path}: is the state of a training with other options, examples or model: without --resume it begins anew")
    parameters = dict(joint.model.named_parameters())
    with torch.no_grad():
        for name, value in state["model"].items():
            parameters[name].copy_(value)
    joint.heads.load_state_dict(state["heads"])
    joint.optimizer.load_state_dict(state["optimizer"])
    joint.step, joint.n_tokens, joint.history, joint.held_out = state["step"], state["n_tokens"], state["history"], state["held_out"]
