"""Training learned heads on recorded traces of a frozen model: the soft top-B coverage loss (edgemoe.coverage), Adam, NumPy.

What is trained for layer l is to have in its B best experts what the layer's next event uses:

    temporal          p^R + p^T of its last token                                           the choice of `update`
    spatio            p^R of its last token + p^S of the layer before                       the choice of `refine`
    spatio-temporal   the mean of both losses: p^R + p^T, and p^R + p^T + p^S               one choice after an event, one before the next

p^R is what the native router said. "The layer before" the first one is the last one of the token before. Only decoded rows count, and only those whose next token is of the same
sequence. Heads start as the native routers: W_T of layer l as the router of l, W_S as that of the next layer. Layers have nothing in common but the order in which they are
trained, so a layer's rows are read when its turn comes: in blocks, runs of neighbouring rows drawn by chance, shuffled within the block.

After each epoch the heads are tried on held-out sequences in the native cache with B slots per layer; the best epoch's are kept. What counts is hits / (A + P), which is the hit
rate where nothing is prefetched. Same traces, options and seed: same heads, also when training was interrupted and went on from its state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from edgemoe import npz
from edgemoe.coverage import coverage_loss, through_softmax
from edgemoe.errors import EdgemoeError, TraceError
from edgemoe.head_outputs import fill, with_heads
from edgemoe.heads import MARK_DIGITS, MODES, Heads, softmax
from edgemoe.policies import policy
from edgemoe.replay import DECODE, Replay, rows_of
from edgemoe.routers import Router, gating_of
from edgemoe.trace import Trace

RUN = 64  # neighbouring rows that are read together
BLOCK_BYTES = 128 << 20  # of one block's hidden states
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam
LEAST_SEQUENCES = 2


class TrainingError(EdgemoeError):
    """Traces, options or a saved state that cannot be trained from."""


@dataclass(frozen=True)
class Options:
    mode: str = "temporal"
    slots: int = 20  # B
    tau: float = 0.001  # of the soft choice, in units of probability
    epochs: int = 8
    rate: float = 1e-3
    batch: int = 256
    seed: int = 0
    holdout: float = 0.1  # share of the sequences
    patience: int = 2  # epochs without a better held-out figure


@dataclass
class Step:
    """What a progress display hears of after each layer."""

    epoch: int  # from 1; 0: nothing is trained yet
    layer: int  # index of the next one
    loss: float | None  # mean over the rows since the epoch began
    hit: float | None  # held-out, the last that is known


# --- rows


class Rows:
    """The pairs of decoded rows (now, next) of some sequences: row numbers in their traces, which may be larger than memory."""

    def __init__(self, traces: list[Trace], chosen: list[tuple[int, int]], routers: list[Router] | None):
        """chosen: (trace, sequence). routers: for traces that have not the probabilities of all experts."""
        self.traces, self.routers = traces, routers
        self.n_layers, self.n_expert = traces[0].n_layers, traces[0].n_expert
        pairs = []
        for number, trace in enumerate(traces):
            decoded = np.asarray(trace.phase) == 1
            for s in sorted(s for t, s in chosen if t == number):
                rows = np.arange(trace.offsets[s], trace.offsets[s + 1] - 1)
                rows = rows[decoded[rows] & decoded[rows + 1]]
                pairs.append(np.stack([np.full(len(rows), number), rows], 1))
        self.pairs = np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64)

    def __len__(self) -> int:
        return len(self.pairs)

    def blocks(self, rng: np.random.Generator, row_bytes: int):
        """Arrays of row numbers, all of them once, in an order of chance: as many together as BLOCK_BYTES hold."""
        runs = np.split(np.arange(len(self)), np.arange(RUN, len(self), RUN))
        order = rng.permutation(len(runs))
        n = max(1, BLOCK_BYTES // row_bytes // RUN)
        for start in range(0, len(order), n):
            yield np.sort(np.concatenate([runs[i] for i in order[start : start + n]]))

    def read(self, name: str, which: np.ndarray, layer: int, after: int) -> np.ndarray:
        """[n, ...] of a trace's array in one layer; after=1: of the next token."""
        pairs = self.pairs[which]
        parts = [np.asarray(getattr(t, name)[pairs[pairs[:, 0] == i, 1] + after, layer]) for i, t in enumerate(self.traces) if (pairs[:, 0] == i).any()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)  # `which` ascends, and so do the traces

    def native(self, which: np.ndarray, layer: int) -> np.ndarray:
        """p^R, float32 [n, E], of the token now."""
        if self.traces[0].meta["probs"] == "all":
            return self.read("probs", which, layer, 0).astype(np.float32)
        z = self.routers[layer].logits(self.read("hidden", which, layer, 0))
        return softmax(z) if gating_of(self.traces[0].meta.get("probs_are", "")) == "softmax" else 1 / (1 + np.exp(-z))

    def demand(self, which: np.ndarray, layer: int) -> np.ndarray:
        """float32 [n, E]: 1 for the experts that the next event uses."""
        ids = np.minimum(self.read("ids", which, layer, 1).astype(np.int64), self.n_expert)
        found = np.zeros((len(ids), self.n_expert + 1), np.float32)
        np.put_along_axis(found, ids, 1, 1)  # the last column is for absent ones
        return found[:, : self.n_expert]


def require_trainable(traces: list[Trace], routers: list[Router], options: Options) -> None:
    """Raises TrainingError for traces that heads of this model cannot be trained from."""
    first = traces[0]
    for t in traces:
        if t.hidden is None:
            raise TrainingError(f"{t.where}: has no hidden states, which heads read: record it with --hidden")
        if t.meta["fingerprint"] != first.meta["fingerprint"] or t.ids.shape[1:] != first.ids.shape[1:] or t.n_expert != first.n_expert:
            raise TrainingError(f"{t.where}: is of another model than {first.where}")
        if (t.meta["probs"], t.meta.get("probs_are")) != (first.meta["probs"], first.meta.get("probs_are")):
            raise TrainingError(f"{t.where}: found {t.meta['probs'] or 'no'} probabilities ({t.meta.get('probs_are', '')}), wanted {first.meta['probs'] or 'none'} as in {first.where}")
    if first.meta["probs"] != "all" and not gating_of(first.meta.get("probs_are", "")):
        raise TrainingError(f"{first.where}: has not the probabilities of all experts and does not say how the model makes them: record it with --full-probs")
    n_embd = routers[0].weight.shape[1]
    if first.hidden.shape[-1] != n_embd or len(routers) != first.n_layers:
        raise TrainingError(f"{first.where}: found {first.n_layers} layers of {first.hidden.shape[-1]} values, wanted {len(routers)} of {n_embd} as the model's routers have")
    if any(len(r.weight) != first.n_expert for r in routers):
        raise TrainingError(f"{first.where}: layers with different numbers of experts cannot be trained yet")
    if not 0 < options.slots < first.n_expert:
        raise TrainingError(f"slots {options.slots}, wanted 1 to {first.n_expert - 1}: a layer has {first.n_expert} experts")


def parted(traces: list[Trace], share: float, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(trace, sequence) to train on and to hold out, drawn by chance; the same text twice is on one side. Raises TrainingError when there are too few."""
    marks: dict[str, list[tuple[int, int]]] = {}
    for number, trace in enumerate(traces):
        for s, mark in enumerate(trace.sequence_hashes()):
            marks.setdefault(mark, []).append((number, s))
    groups = list(marks.values())
    if len(groups) < LEAST_SEQUENCES:
        raise TrainingError(f"{traces[0].where}: found {len(groups)} different sequence, wanted {LEAST_SEQUENCES} or more: some are held out")
    order = np.random.default_rng([seed, 1]).permutation(len(groups))
    n = min(max(1, round(share * len(groups))), len(groups) - 1)
    return sorted(x for i in order[n:] for x in groups[i]), sorted(x for i in order[:n] for x in groups[i])


# --- one layer


def start(routers: list[Router], mode: str) -> dict[str, list[np.ndarray]]:
    """Weights and biases by name and layer, as the native routers have them; a spatial head that of the next layer."""
    found = {}
    for head in MODES[mode]:
        ahead = routers if head == "head_t" else routers[1:] + routers[:1]
        found[f"{head}.weight"] = [r.weight.copy() for r in ahead]
        found[f"{head}.bias"] = [np.zeros(len(r.weight), np.float32) if r.bias is None else r.bias.copy() for r in ahead]
    return found


def loss_and_gradients(mode: str, weights: dict[str, np.ndarray], native: np.ndarray, hidden: dict[str, np.ndarray], demand: np.ndarray, slots: int, tau: float):
    """Mean loss over rows, and its gradient by each of the weights: one layer's head_t and the layer before's head_s.

    weights: "head_t.weight" [E, D], "head_t.bias" [E], and the same of head_s, as the mode has them; native p^R [n, E]; hidden: "head_t", "head_s" [n, D]; demand [n, E]."""
    probs = {head: softmax(hidden[head] @ weights[f"{head}.weight"].T + weights[f"{head}.bias"]) for head in MODES[mode]}
    by_probs = {head: 0.0 for head in probs}
    stages = [("head_t",), ("head_t", "head_s")] if mode == "spatio-temporal" else [MODES[mode]]
    total = 0.0
    for used in stages:
        loss, by_score = coverage_loss(native + sum(probs[head] for head in used), demand, slots, tau)
        total += float(loss.mean(dtype=np.float64)) / len(stages)
        for head in used:  # a score is a sum: its gradient is that of each part
            by_probs[head] = by_probs[head] + by_score / (len(stages) * len(native))
    gradients = {}
    for head, p in probs.items():
        by_z = through_softmax(p, by_probs[head])
        gradients[f"{head}.weight"], gradients[f"{head}.bias"] = by_z.T @ hidden[head], by_z.sum(0)
    return total, gradients


@dataclass
class Adam:
    """Moments by name of one layer's weights. step counts from 0."""

    moments: dict[str, tuple[np.ndarray, np.ndarray]]
    step: int = 0

    def apply(self, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray], rate: float) -> None:
        self.step += 1
        for name, g in gradients.items():
            m, v = self.moments[name]
            m += (1 - BETA1) * (g - m)
            v += (1 - BETA2) * (g * g - v)
            weights[name] -= rate / (1 - BETA1**self.step) * m / (np.sqrt(v / (1 - BETA2**self.step)) + EPSILON)


def train_layer(rows: Rows, layer: int, options: Options, weights: dict[str, np.ndarray], adam: Adam, rng: np.random.Generator) -> float:
    """One epoch of one layer, in place. Returns the mean loss."""
    before = (layer - 1) % rows.n_layers
    places = {"head_t": (layer, 0), "head_s": (before, 1 if layer else 0)}  # of the token now, or of the next
    heads = MODES[options.mode]
    row_bytes = 2 * len(heads) * rows.traces[0].hidden.shape[-1]
    total, n_rows = 0.0, 0
    for which in rows.blocks(rng, row_bytes):
        hidden = {head: rows.read("hidden", which, *places[head]) for head in heads}
        native, demand = rows.native(which, layer), rows.demand(which, layer)
        order = rng.permutation(len(which))
        for first in range(0, len(order), options.batch):
            part = order[first : first + options.batch]
            if len(part) < options.batch and first:  # a few rows would be as loud as a whole batch
                break
            inputs = {head: h[part].astype(np.float32) for head, h in hidden.items()}
            loss, gradients = loss_and_gradients(options.mode, weights, native[part], inputs, demand[part], options.slots, options.tau)
            adam.apply(weights, gradients, options.rate)
            total, n_rows = total + loss * len(part), n_rows + len(part)
    return total / max(1, n_rows)


# --- held out


class Trial:
    """Held-out sequences, to try heads on in the native cache."""

    def __init__(self, traces: list[Trace], chosen: list[tuple[int, int]], options: Options):
        self.parts = [(t, replace(t, hidden=None, head_t=None, head_s=None).select(s)) for i, t in enumerate(traces) if (s := [s for n, s in chosen if n == i])]
        self.rows = [np.concatenate([np.arange(t.offsets[s], t.offsets[s + 1]) for n, s in chosen if n == i]) for i, t in enumerate(traces) if any(n == i for n, _ in chosen)]
        self.options = options

    def counts(self, heads: Heads | None) -> dict[str, int]:
        """accesses, hits and proactive loads of decoding, in caches that begin each sequence empty; None: by LRU."""
        first = self.parts[0][0]
        chosen = policy(heads.mode, None, MODES[heads.mode]) if heads else policy("lru")
        cache = Replay([first.n_expert] * first.n_layers, self.options.slots, chosen, "load")
        for (trace, cut), rows in zip(self.parts, self.rows):
            for s in range(cut.n_sequences):
                part = rows[cut.offsets[s] : cut.offsets[s + 1]]
                found = {head: np.zeros((len(part), trace.n_layers, trace.n_expert), np.float32) for head in (MODES[heads.mode] if heads else ())}
                if heads and len(part):
                    fill(heads, trace.hidden[part[0] : part[-1] + 1], found)
                cache.clear()
                cache.sequence(rows_of(with_heads(cut.select([s]), found), 0))
        total = cache.counts()[DECODE].sum(0)
        return {"n_accesses": int(total[1]), "n_hits": int(total[2]), "n_proactive": int(total[5])}


def adjusted(counts: dict[str, int]) -> float:
    return counts["n_hits"] / max(1, counts["n_accesses"] + counts["n_proactive"])


# --- all of it


@dataclass
class State:
    """Between two layers. weights: by name, [layers]; moments: [m, v] by name."""

    weights: dict[str, list[np.ndarray]]
    moments: dict[str, list[list[np.ndarray]]]
    steps: list[int]  # of Adam, by target layer
    epoch: int = 0  # that is under way, from 0
    layer: int = 0  # that comes next in it
    losses: list[float] = field(default_factory=list)  # of the layers of this epoch
    history: list[dict] = field(default_factory=list)  # held-out counts and loss after each epoch; before the first one, too
    best: dict[str, list[np.ndarray]] = field(default_factory=dict)
    best_epoch: int = 0


def new_state(routers: list[Router], mode: str) -> State:
    weights = start(routers, mode)
    moments = {name: [[np.zeros_like(w), np.zeros_like(w)] for w in layers] for name, layers in weights.items()}
    return State(weights, moments, [0] * len(routers), best={name: [w.copy() for w in layers] for name, layers in weights.items()})


def heads_of(weights: dict[str, list[np.ndarray]], trace: Trace, options: Options, training: dict | None = None) -> Heads:
    parts = {f"{'weights' if part == 'weight' else 'biases'}_{head[-1]}": weights[f"{head}.{part}"] for head in MODES[options.mode] for part in ("weight", "bias")}
    meta = trace.meta
    return Heads(meta["fingerprint"], list(meta["layers"]), [trace.n_expert] * trace.n_layers, options.mode, options.slots, options.tau, **parts, training=training or {})


def train(
    traces: list[Trace], routers: list[Router], options: Options, state_path: Path | None = None, resume: bool = False,
    progress: Callable[[Step], None] = lambda step: None, save_every: int = 0,
) -> Heads:
    """Trains, and returns the best epoch's heads; `training` of them says how, and what was held out.

    state_path: where the state is kept, after every epoch and (save_every) after so many layers, and when training is interrupted; it is removed at the end. resume: goes on from
    there, if it is there. Raises TrainingError; KeyboardInterrupt with the state written."""
    require_trainable(traces, routers, options)
    fit, held_out = parted(traces, options.holdout, options.seed)
    rows, trial = Rows(traces, fit, routers), Trial(traces, held_out, options)
    if len(rows) < options.batch:
        raise TrainingError(f"{traces[0].where}: found {len(rows)} decoded tokens with a next one in {len(fit)} sequences, wanted a batch of {options.batch} or more")
    mark = _mark(traces, options)
    state = _load_state(state_path, mark, routers, options) if resume and state_path and state_path.exists() else new_state(routers, options.mode)
    try:
        _run(rows, trial, traces[0], options, state, state_path and (lambda: _save_state(state_path, mark, state)), progress, save_every)
    except KeyboardInterrupt:
        if state_path:
            _save_state(state_path, mark, state)
        raise
    training = {
        "options": asdict(options), "traces": [{"name": Path(t.where).name, "source": t.meta["source"], "n_sequences": t.n_sequences} for t in traces],
        "sequences": sorted({h[:MARK_DIGITS] for t in traces for h in t.sequence_hashes()}), "n_sequences": len(fit), "n_held_out": len(held_out), "n_rows": len(rows),
        "best_epoch": state.best_epoch, "steps": state.steps[0], "held_out": state.history, "lru": trial.counts(None),
    }
    heads = heads_of(state.best, traces[0], options, training)
    if state_path:
        with suppress(OSError):
            state_path.unlink(missing_ok=True)
    return heads


def _run(rows: Rows, trial: Trial, trace: Trace, options: Options, state: State, keep: Callable[[], None] | None, progress, save_every: int) -> None:
    if not state.history:
        state.history.append({"epoch": 0, "loss": None, **trial.counts(heads_of(state.weights, trace, options))})
    progress(Step(state.epoch, state.layer, None, adjusted(state.history[-1])))
    while state.epoch < options.epochs and state.epoch - state.best_epoch < options.patience:
        while state.layer < rows.n_layers:
            _one_layer(rows, options, state)
            progress(Step(state.epoch + 1, state.layer, float(np.mean(state.losses)), adjusted(state.history[-1])))
            if keep and save_every and state.layer % save_every == 0:
                keep()
        counts = trial.counts(heads_of(state.weights, trace, options))
        if adjusted(counts) > max(map(adjusted, state.history)):
            state.best, state.best_epoch = {name: [w.copy() for w in layers] for name, layers in state.weights.items()}, state.epoch + 1
        state.history.append({"epoch": state.epoch + 1, "loss": float(np.mean(state.losses)), **counts})
        state.epoch, state.layer, state.losses = state.epoch + 1, 0, []
        progress(Step(state.epoch, 0, state.history[-1]["loss"], adjusted(counts)))
        if keep:
            keep()


def _one_layer(rows: Rows, options: Options, state: State) -> None:
    """On copies: what interrupts a layer leaves the state as it was before it."""
    layer = state.layer
    owners = {name: layer if name.startswith("head_t") else (layer - 1) % rows.n_layers for name in state.weights}
    weights = {name: state.weights[name][at].copy() for name, at in owners.items()}
    adam = Adam({name: tuple(m.copy() for m in state.moments[name][at]) for name, at in owners.items()}, state.steps[layer])
    loss = train_layer(rows, layer, options, weights, adam, np.random.default_rng([options.seed, 2, state.epoch, layer]))
    for name, at in owners.items():
        state.weights[name][at], state.moments[name][at] = weights[name], list(adam.moments[name])
    state.steps[layer] = adam.step
    state.losses.append(loss)
    state.layer += 1


# --- the state on disk


def _mark(traces: list[Trace], options: Options) -> str:
    """Of everything that decides what is trained; the number of epochs may change."""
    said = {**asdict(options), "epochs": 0, "patience": 0}
    digest = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16)
    for t in traces:
        digest.update(t.meta["fingerprint"].encode())
        for h in t.sequence_hashes():
            digest.update(h.encode())
    return digest.hexdigest()


def _save_state(path: Path, mark: str, state: State) -> None:
    arrays = {}
    for name, layers in state.weights.items():
        moments = [np.stack([layer[i] for layer in state.moments[name]]) for i in range(2)]
        arrays |= {f"{name}.now": np.stack(layers), f"{name}.best": np.stack(state.best[name]), f"{name}.m": moments[0], f"{name}.v": moments[1]}
    said = {"mark": mark, **{name: getattr(state, name) for name in ("steps", "epoch", "layer", "losses", "history", "best_epoch")}}
    arrays["state"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    try:
        npz.publish(path, {name: (a.dtype, a.shape, [a.tobytes()]) for name, a in arrays.items()})
    except TraceError as e:
        raise TrainingError(str(e)) from None


def _load_state(path: Path, mark: str, routers: list[Router], options: Options) -> State:
    state = new_state(routers, options.mode)
    names = [f"{name}.{part}" for name in state.weights for part in ("now", "best", "m", "v")]
    try:
        arrays = npz.read(path, [*names, "state"])
        said = json.loads(bytes(arrays["state"]))
        if said.pop("mark") != mark:
            raise TrainingError(f"{path}: is the state of a training with other options or traces: without --resume it begins anew")
        for name, layers in state.weights.items():
            shape = (len(layers), *layers[0].shape)
            found = [np.array(arrays[f"{name}.{part}"], np.float32).reshape(shape) for part in ("now", "best", "m", "v")]
            state.weights[name], state.best[name] = list(found[0]), list(found[1])
            state.moments[name] = [list(pair) for pair in zip(found[2], found[3])]
        for name, value in said.items():
            setattr(state, name, value)
    except (TraceError, KeyError, ValueError) as e:
        raise e if isinstance(e, TrainingError) else TrainingError(f"{path}: cannot be read as the state of a training: {e}") from None
    return state
