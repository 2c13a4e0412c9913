"""The terminal side of `edgemoe train-heads`. Progress goes to standard error, results to standard output."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from edgemoe import heads as heads_file, resumable
from edgemoe.package import Source
from edgemoe.routers import native_routers
from edgemoe.simulate_report import aligned
from edgemoe.trace import Trace
from edgemoe.train_heads import Options, Step, TrainingError, adjusted, train

SAVE_EVERY = 16  # layers: what a killed run may lose


def train_heads_(options) -> int:
    """`edgemoe train-heads`."""
    with Source(options.model) as source:
        if not source.layers:
            raise TrainingError(f"{options.model}: a dense model has no experts to foretell")
        mark = source.package_fingerprint()
        traces = [Trace.load(path) for path in options.traces]
        for trace in traces:
            if not mark or trace.meta["fingerprint"] != mark:
                raise TrainingError(f"{trace.where}: was recorded from another model: found fingerprint {trace.meta['fingerprint'][:8] or 'none'}, wanted {mark[:8] or 'one'} of {options.model}")
        routers = native_routers(source)
    out = Path(options.out) if options.out else heads_file.default_path(mark)
    if not options.out:
        out.parent.mkdir(parents=True, exist_ok=True)
    state = resumable.state_beside(out, "npz", options.resume)
    chosen = _options(options, traces[0])
    with _bar(chosen.epochs * traces[0].n_layers, traces[0].n_layers) as show, resumable.saying_where(state):
        found = train(traces, routers, chosen, state, options.resume, show, SAVE_EVERY)
    heads_file.save(out, found, options.type)
    said = {name: value for name, value in found.training.items() if name != "sequences"}
    print(json.dumps({"heads": str(out), "bytes": os.path.getsize(out), "mode": found.mode, "slots": found.slots, "tau": found.tau, **said}) if options.json else _text(found, out))
    return 0


def _options(options, trace: Trace) -> Options:
    slots = options.slots or min(trace.n_used * 5 // 2, trace.n_expert - 1)
    return Options(options.mode, slots, options.tau, options.epochs, options.rate, options.batch, options.seed, options.holdout, options.patience)


@contextmanager
def _bar(total: int, n_layers: int):
    """A function to call after each layer; a bar on standard error when that is a terminal."""
    with tqdm(total=total, unit="layer", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False, smoothing=0) as bar:

        def show(step: Step) -> None:
            done = step.epoch * n_layers if step.layer == 0 or step.loss is None else (step.epoch - 1) * n_layers + step.layer
            done += step.layer if step.loss is None else 0
            bar.set_postfix_str(", ".join(f"{name} {value:.4f}" for name, value in (("loss", step.loss), ("held-out hit", step.hit)) if value is not None), refresh=False)
            bar.update(done - bar.n)

        yield show


def _text(found, out: Path) -> str:
    said = found.training
    cells = []
    for name, row in [("LRU", said["lru"]), *((f"after epoch {r['epoch']}" if r["epoch"] else "as the routers", r) for r in said["held_out"])]:
        mark = " (kept)" if row.get("epoch") == said["best_epoch"] else ""
        loss = f"{row['loss']:.4f}" if row.get("loss") is not None else ""
        cells.append([name + mark, loss, f"{row['n_hits']}/{row['n_accesses']}", f"{100 * row['n_hits'] / max(1, row['n_accesses']):.1f}", str(row["n_proactive"]), f"{100 * adjusted(row):.1f}"])
    return "\n".join([
        f"{found.mode} heads for {found.slots} slots per layer: {said['n_rows']} tokens of {said['n_sequences']} sequences to learn from, {said['n_held_out']} sequences to try on",
        *aligned(["held out", "loss", "hits / A", "hit %", "P", "adjusted %"], cells, [True, False, False, False, False, False]),
        f"{out}: {os.path.getsize(out) / 1e6:.1f} MB",
    ])
