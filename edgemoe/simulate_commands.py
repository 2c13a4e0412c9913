"""The terminal side of `edgemoe simulate` and `edgemoe policies`. Progress goes to standard error, results to standard output or files."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from edgemoe import fit, heads, lossy, policy_list, simulate, simulate_report
from edgemoe.policies import heads_of, name_of
from edgemoe.simulate import Rates, SimulationError


@contextmanager
def progress(total: int, unit: str = "sequence"):
    """A function to call once per unit; a bar on standard error when that is a terminal."""
    with tqdm(total=total, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty(), leave=False, smoothing=0) as bar:
        yield bar.update


def policies_(options) -> int:
    """`edgemoe policies`."""
    print(json.dumps({"policies": policy_list.listing()}) if options.json else policy_list.text())
    return 0


def simulate_(options) -> int:
    """`edgemoe simulate`."""
    outputs = [("--json", options.json), ("--csv", options.csv)]
    options.json = options.json if options.json == "-" else None  # whether main prints errors as JSON
    _check_outputs(outputs, options)
    test = [simulate.load_trace(path, options.expert_bytes) for path in options.traces]
    train = [simulate.load_trace(path, options.expert_bytes) for path in options.train]
    simulate.require_apart(train, test)
    trace = _joined(options, test)
    for each in train:
        simulate.require_same_model(trace, each)
    if options.sequences:
        trace = trace.select(range(min(options.sequences, len(trace.offsets) - 1)))
    if not trace.n_tokens:
        raise SimulationError(f"{trace.where}: no tokens")
    document, plan, rates = _run(options, trace, train)
    _write(options, outputs, document, trace, plan, rates)
    return 0


def _joined(options, test):
    """The traces as one, with what the heads of --heads say."""
    if not options.heads:
        return simulate.joined(test)
    found = heads.load(options.heads)
    simulate.require_not_learned(found, test)
    with progress(sum(t.n_tokens for t in test), "row") as done:
        return simulate.joined_with_heads(test, found, done)


def _check_outputs(outputs: list[tuple[str, str | None]], options) -> None:
    """Before an hour's work and not after it."""
    for name, path in outputs:
        if path and path.endswith((".npz", ".gguf")):
            raise SimulationError(f"{name} {path}: wanted a file to write, that looks like one to read; without a file, put {name} last")
        if path and path != "-" and not Path(path).parent.is_dir():
            raise SimulationError(f"{name} {path}: no folder {Path(path).parent}")
    if all(path == "-" for _, path in outputs):
        raise SimulationError("--json and --csv: only one of them can go to standard output")
    if options.save_fit is not None and not options.train:
        raise SimulationError("--save-fit: wanted --train, there is nothing to learn from")
    if options.plot:
        from edgemoe import simulate_plots

        simulate_plots.require()


def _run(options, trace, train) -> tuple[dict, simulate.Plan, Rates]:
    asked = simulate.read_policies(" ".join(options.policy or ["all"]).split())
    changing = [p for p in asked if name_of(p) == lossy.NAME]
    if trace.probs is not None and any("all" in p.split() or "sweep" in p.split() for p in options.policy or ["all"]):
        changing = changing or [lossy.NAME]
    asked = [p for p in asked if name_of(p) != lossy.NAME]
    for policy in changing:
        lossy.read(policy)
    capacities = simulate.read_capacities(options.capacity, trace.n_expert)
    with tqdm(file=sys.stderr, disable=not (train and sys.stderr.isatty()), leave=False, bar_format="learning {desc}...") as bar:
        learned = simulate.learn(train, asked, bar.set_description_str, heads_of(trace))
    if learned and options.save_fit is not None:
        path = options.save_fit or str(Path(options.train[0]).with_suffix(".fit.npz"))
        fit.save(path, learned)
        print(path, file=sys.stderr)
    regimes = simulate.REGIMES if options.misses == "both" else (options.misses,)
    plan = simulate.plan_runs(trace, asked, capacities, regimes, learned, shared=options.scope == "model", warm=options.warm)
    rates = Rates(options.link, options.cpu, options.device_rate)
    n_sequences = len(trace.offsets) - 1
    with progress(n_sequences * (len(plan.runs) + len(changing) * len(capacities))) as done:
        outcomes = simulate.run_all(trace, plan, learned, done)
        sets = [lossy.summary(lossy.simulate(trace, policy, n, plan.warm, done), trace) for policy in changing for n in capacities]
    rows = simulate.summaries(trace, outcomes, rates, options.per_sequence, options.seed)
    return {**simulate_report.document(trace, plan, rates, rows, sets, options.train), "heads": options.heads}, plan, rates


def _write(options, outputs, document: dict, trace, plan, rates) -> None:
    if options.plot:
        from edgemoe import simulate_plots

        for path in simulate_plots.draw_all(trace, document, options.plot):
            print(path, file=sys.stderr)
    to_stdout = False
    for (name, path), make in zip(outputs, (lambda: json.dumps(document) + "\n", lambda: simulate_report.to_csv(document["runs"]))):
        if path == "-":
            sys.stdout.write(make())
            to_stdout = True
        elif path:
            try:
                Path(path).write_text(make(), encoding="utf-8")
            except OSError as e:
                raise SimulationError(f"{name} {path}: {e.strerror}") from None
    if not to_stdout:
        print(simulate_report.table(trace, plan, rates, document["runs"], document["lossy"]))
