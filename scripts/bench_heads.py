"""Learned heads on a frozen model beside other policies: train, simulate, and print the tables of docs/results/heads.md.

    edgemoe trace models/demo.gguf --prompts questions.jsonl -n 180 --temp 0.7 --seed 1 --full-probs --hidden --out train.npz       and test.npz, of other questions
    python scripts/bench_heads.py --model models/demo.gguf --train train.npz --test test.npz --work DIR

Whatever has a seed (heads; ProMoE's perceptrons and FineMoE's store) is fitted once per seed, the rest once. Misses are loaded, every sequence begins with empty slots, prompts are not
counted. DIR keeps heads, tables and counts: a run that was stopped goes on, and more seeds or sweeps add to what is there.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from edgemoe import fit, heads as heads_file, policies, simulate
from edgemoe.head_outputs import with_heads
from edgemoe.package import Source
from edgemoe.routers import native_routers
from edgemoe.simulate_report import aligned
from edgemoe.trace import Trace
from edgemoe.train_heads import Options, heads_of, start, train

PLAIN = ("lru", "lfu", "lrfu", "least-stale", "belady", "belady:force=0")
FITTED = ("promoe", "finemoe")
MODES = {"temporal": "temporal", "spatio-temporal": "spatio-temporal:R={R}", "spatio": "spatio:R={R}"}
COUNTS = ("n_tokens", "n_accesses", "n_hits", "n_demand", "n_proactive", "n_unused")
NAMES = {"lru": "LRU", "lfu": "LFU", "lrfu": "LRFU, λ = 0.5", "least-stale": "Least-Stale", "belady": "Belady, forced *", "belady:force=0": "Belady, free *", "promoe": "ProMoE (MLP)", "finemoe": "FineMoE"}
# Published: Qwen3-30B-A3B, 20 of 128, GSM8K; heads on a frozen model. hit, adjusted hit, MB per token.
PAPER = {
    "lru": (61.2, None, 1407), "lfu": (60.0, None, None), "lrfu": (62.7, None, None), "least-stale": (68.5, 31.1, 5496), "promoe": (89.4, 64.4, 1792), "finemoe": (76.7, 54.8, 2288),
    "temporal": (63.0, None, 1341), "spatio-temporal": (67.4, 62.5, 1748),
}


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Work:
    """A folder of heads, tables and results; a result that is there is not made again."""

    def __init__(self, folder: str, options):
        self.folder, self.options = Path(folder), options
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "results.json"
        self.results = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.train_parts = [Trace.load(path) for path in options.train]
        self.test_parts = [Trace.load(path) for path in options.test]
        if options.sequences:
            self.test_parts = [t.select(range(min(options.sequences, t.n_sequences))) for t in self.test_parts]
        simulate.MOST_JOINED_BYTES = 8 << 30  # perceptrons read hidden states, which must not be left out
        simulate.require_apart(self.train_parts, self.test_parts)
        self.test = simulate.joined(self.test_parts)
        with Source(options.model) as source:
            self.routers = native_routers(source)

    def counts(self, key: str, trace_of, wanted: list[tuple[str, int]], learned=None) -> None:
        """Replays (policy, slots) that have no result below `key` yet."""
        missing = [(p, n) for p, n in wanted if f"{key}{p} {n}" not in self.results]
        if not missing:
            return
        trace = trace_of()
        runs = [simulate.Run(p, n, "load") for p, n in missing]
        note(f"{key or 'plain '}{', '.join(dict.fromkeys(p for p, _ in missing))}")
        outcomes = simulate.run_all(trace, simulate.Plan(runs), learned, n_threads=self.options.threads)
        for f in simulate.figures_of(trace, outcomes, simulate.Rates()):
            row = {**{name: int(n.sum()) for name, n in f.counts.items()}, "n_tokens": int(f.n_tokens.sum()), "load_mb": float(f.loaded() / 1e6)}
            self.results[f"{key}{f.outcome.run.policy} {f.outcome.run.n_slots}"] = {name: row[name] for name in (*COUNTS, "load_mb")}
        self.save()

    def save(self) -> None:
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.results, indent=0) + "\n")
        os.replace(beside, self.path)

    def tables(self, name: str, seed: int) -> dict:
        path = self.folder / f"{name}-{seed}.fit.npz"
        if not path.exists():
            note(f"fitting {name}, seed {seed}")
            fit.save(path, fit.fit(self.train_parts, {"spatial"} if name == "promoe" else {"maps", "map_tokens"}, None, seed))
        return policies.load_learned(str(path))

    def heads(self, mode: str, slots: int, tau: float, seed: int):
        o = self.options
        path = self.folder / f"{mode}-B{slots}-t{tau:g}-s{seed}.gguf"
        if not path.exists():
            began = time.perf_counter()
            chosen = Options(mode, slots, tau, o.epochs, o.rate, o.batch, seed, o.holdout, o.patience)
            found = train(self.train_parts, self.routers, chosen, path.with_suffix(".state.npz"), True)
            found.training["seconds"] = round(time.perf_counter() - began, 1)
            heads_file.save(path, found)
            note(f"{path.name}: best epoch {found.training['best_epoch']} of {len(found.training['held_out']) - 1}, {found.training['seconds']} s")
        return heads_file.load(path)

    def with_heads(self, heads, of_others: bool = False):
        """The test trace with what heads say; of_others: of another token's hidden states, drawn by chance."""
        simulate.require_not_learned(heads, self.test_parts)
        found = simulate.outputs(heads, self.test_parts, self.test.n_expert)
        order = np.random.default_rng(0).permutation(self.test.n_tokens) if of_others else None
        return with_heads(self.test, {head: a if order is None else a[order] for head, a in found.items()})

    def untrained(self, mode: str):
        """Heads as they begin: the native routers."""
        return heads_of(start(self.routers, mode), self.test_parts[0], Options(mode, self.options.slots))


def run(work: Work) -> None:
    o = work.options
    seeds, capacities = range(o.seeds), [int(n) for n in o.capacities.split(",")]
    work.counts("", lambda: work.test, [(p, n) for n in capacities for p in PLAIN])
    for mode, text in MODES.items():
        asked = [(text.format(R=o.budget), n) for n in capacities]
        work.counts("untrained ", lambda m=mode: work.with_heads(work.untrained(m)), asked)
        for seed in seeds:
            work.counts(f"seed {seed} ", lambda m=mode, s=seed: work.with_heads(work.heads(m, o.slots, o.tau, s)), asked)
    for mode, text in MODES.items():
        work.counts("others ", lambda m=mode: work.with_heads(work.heads(m, o.slots, o.tau, 0), True), [(text.format(R=o.budget), o.slots)])
    if "R" in o.sweep:
        for mode in ("spatio-temporal", "spatio"):
            asked = [(f"{mode}:R={R}", n) for R in o.budgets for n in capacities]
            work.counts("seed 0 ", lambda m=mode: work.with_heads(work.heads(m, o.slots, o.tau, 0)), asked)
    if "B" in o.sweep:
        for slots in capacities:
            work.counts(f"B {slots} ", lambda b=slots: work.with_heads(work.heads("temporal", b, o.tau, 0)), [("temporal", n) for n in capacities])
    if "tau" in o.sweep:
        for tau in o.taus:
            work.counts(f"tau {tau:g} ", lambda t=tau: work.with_heads(work.heads("temporal", o.slots, t, 0)), [("temporal", o.slots)])
    for policy in FITTED:
        for seed in seeds[: o.fitted_seeds]:
            wanted = [(policy, n) for n in capacities]
            if any(f"seed {seed} {p} {n}" not in work.results for p, n in wanted):
                work.counts(f"seed {seed} ", lambda: work.test, wanted, work.tables(policy, seed))


# --- tables


def figures(row: dict) -> tuple[float, float, float]:
    """Hit and adjusted hit in percent, MB per token."""
    return 100 * row["n_hits"] / row["n_accesses"], 100 * row["n_hits"] / (row["n_accesses"] + row["n_proactive"]), row["load_mb"]


def spread(values: list[float], digits: int) -> str:
    text = f"{statistics.mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits + 1}f}"


def rows_of(work: Work, policy: str, n_slots: int, key: str | None = None) -> list[dict]:
    """Results of a policy: one, or one per seed."""
    keys = [f"{key}{policy} {n_slots}"] if key is not None else [f"{policy} {n_slots}", *(f"seed {s} {policy} {n_slots}" for s in range(work.options.seeds))]
    return [work.results[k] for k in keys if k in work.results]


def markdown(headers: list[str], cells: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (headers, ["---"] * len(headers), *cells)]


def cells_of(rows: list[dict]) -> list[str]:
    hit, adjusted, load = zip(*map(figures, rows))
    n_hits = statistics.mean(r["n_hits"] for r in rows)
    return [f"{n_hits:,.0f}", spread(hit, 1), spread(adjusted, 1), spread(load, 2), f"{statistics.mean(r['n_proactive'] for r in rows):,.0f}", str(len(rows))]


def report(work: Work) -> str:
    o = work.options
    capacities = [int(n) for n in o.capacities.split(",")]
    lines = []
    for n in capacities:
        lru = rows_of(work, "lru", n)[0]
        lines += ["", f"### {n} of {work.test.n_expert} slots per layer: A = {lru['n_accesses']:,} over {lru['n_tokens']:,} decoded tokens", ""]
        entries = [(NAMES[p], rows_of(work, p, n), PAPER.get(p)) for p in PLAIN[:4]]
        entries += [(NAMES[p], rows_of(work, p, n), PAPER.get(p)) for p in FITTED]
        for mode, text in MODES.items():
            policy, label = text.format(R=o.budget), mode + (f", R = {o.budget}" if mode != "temporal" else "")
            entries += [(f"{label}, as the routers", rows_of(work, policy, n, "untrained "), None), (f"**{label}, trained**", rows_of(work, policy, n), PAPER.get(mode))]
            entries += [(f"{label}, trained, but fed with the hidden states of other tokens", rows_of(work, policy, n, "others "), None)]
        entries += [(NAMES[p], rows_of(work, p, n), None) for p in PLAIN[4:]]
        cells = []
        for name, rows, paper in entries:
            if rows:
                over = spread([figures(r)[0] - figures(lru)[0] for r in rows], 1)
                said = " / ".join("–" if x is None else f"{x:g}" for x in paper) if paper and n == 20 else ""
                cells.append([name, *cells_of(rows)[:2], over, *cells_of(rows)[2:], said])
        lines += markdown(["policy", "hits", "hit %", "over LRU", "adjusted %", "MB per token", "P", "seeds", "published, other model: hit / adjusted / MB"], cells)
    lines += sweeps(work, capacities)
    return "\n".join(lines)


def sweeps(work: Work, capacities: list[int]) -> list[str]:
    o, lines = work.options, []
    for mode in ("spatio-temporal", "spatio"):
        cells = [[str(R), *(" / ".join(f"{x:.1f}" for x in figures(rows[0])) if (rows := rows_of(work, f"{mode}:R={R}", n, "seed 0 ")) else "" for n in capacities)] for R in o.budgets]
        if sum(any(c[1:]) for c in cells) > 1:
            lines += ["", f"R of {mode}, heads of seed 0: hit % / adjusted % / MB per token", "", *markdown(["R", *(f"{n} slots" for n in capacities)], cells)]
    cells = [[str(b), *(" / ".join(f"{x:.1f}" for x in figures(rows[0])[::2]) if (rows := rows_of(work, "temporal", n, f"B {b} ")) else "" for n in capacities)] for b in capacities]
    if any(any(c[1:]) for c in cells):
        lines += ["", "Temporal heads trained for B slots, used with others: hit % / MB per token", "", *markdown(["trained for B", *(f"{n} slots" for n in capacities)], cells)]
    cells = [[f"{t:g}", *(f"{x:.2f}" for x in figures(rows[0])[::2])] for t in o.taus if (rows := rows_of(work, "temporal", o.slots, f"tau {t:g} "))]
    if cells:
        lines += ["", f"τ of temporal heads, {o.slots} slots, seed 0", "", *markdown(["τ", "hit %", "MB per token"], cells)]
    return lines


def training(work: Work) -> str:
    """What the heads' files say of their training."""
    cells = []
    for path in sorted(work.folder.glob("*.gguf")):
        h = heads_file.load(path)
        said, best = h.training, h.training["held_out"][h.training["best_epoch"]]
        shown = [said["held_out"][0], best]
        cells.append([path.stem, str(said["n_rows"]), str(said["best_epoch"]), *(f"{100 * r['n_hits'] / r['n_accesses']:.1f}" for r in (said["lru"], *shown)), f"{best['loss'] or 0:.4f}", f"{said.get('seconds', 0):.0f}"])
    return "\n".join(aligned(["heads", "rows", "best epoch", "LRU held-out %", "as routers %", "trained %", "loss", "seconds"], cells, [True] + [False] * 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--test", nargs="+", required=True)
    parser.add_argument("--work", required=True, help="folder that keeps everything")
    parser.add_argument("--sequences", type=int, help="only the first N of each test trace")
    parser.add_argument("--capacities", default="10,20,32")
    parser.add_argument("--slots", type=int, default=20, help="B that heads are trained for")
    parser.add_argument("--budget", type=int, default=15, help="R")
    parser.add_argument("--tau", type=float, default=0.001)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--fitted-seeds", type=int, help="fewer of them for ProMoE and FineMoE, which take longest to replay")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--holdout", type=float, default=0.1)
    parser.add_argument("--sweep", nargs="*", choices=("R", "B", "tau"), default=["R", "B", "tau"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[1, 2, 4, 8, 15, 30])
    parser.add_argument("--taus", nargs="+", type=float, default=[0.0003, 0.001, 0.003, 0.01, 0.03])
    parser.add_argument("--threads", type=int, help="of the simulator")
    parser.add_argument("--report", action="store_true", help="only print the tables of what is there")
    options = parser.parse_args()
    work = Work(options.work, options)
    if not options.report:
        run(work)
    print(report(work))
    print("\n" + training(work), file=sys.stderr)


if __name__ == "__main__":
    main()
