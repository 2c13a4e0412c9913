"""Joint post-training at several lambdas: train, record held-out texts through the engine, simulate, and print the tables of docs/results/heads_joint.md.

    python scripts/bench_joint.py --model models/demo-small.gguf --data gsm8k_train.jsonl math500_test.jsonl --work DIR

Each lambda trains from the same start, on the same data, for the same steps (edgemoe train-joint); 0 is the control. The questions held out in training are then put through each trained
GGUF in the engine, with their own answers, so that every model sees the same text. LRU, Temporal and Spatio-Temporal are simulated on these traces with the model's own heads;
misses are loaded, every sequence begins with empty slots, questions are not counted. DIR keeps everything: a run that was stopped goes on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import edgemoe
from edgemoe import heads as heads_file
from edgemoe.head_outputs import outputs, with_heads
from edgemoe.joint.examples import Vocabulary, parted, read_examples
from edgemoe.package import Source
from edgemoe.replay import replay
from edgemoe.routers import native_routers
from edgemoe.trace import DECODE, Trace
from edgemoe.train_heads import Options, heads_of, start

BEFORE = "before"  # the model as it was, with heads as they begin: its own routers
POLICIES = ("lru", "temporal", "spatio-temporal", "belady")
# Published: Qwen3-30B-A3B, 20 of 128 slots, GSM8K: hit %, adjusted hit %, MB per token.
PAPER = [
    ("LRU", "frozen", 61.2, None, 1407), ("Temporal", "frozen", 63.0, None, 1341), ("Temporal", "joint", 73.1, None, 974),
    ("Spatio-Temporal", "frozen", 67.4, 62.5, 1748), ("Spatio-Temporal, R = 15", "joint", 90.6, 69.0, 1474),
]


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def train(o, name: str) -> dict:
    """What training said; it is done where that is not there yet."""
    said = o.work / f"lambda-{name}.json"
    if not said.exists():
        note(f"training, lambda {name}")
        command = [
            sys.executable, "-m", "edgemoe.cli", "train-joint", o.checkpoint, "--gguf", o.model, "--data", *o.data, "--mode", "spatio-temporal", "--lambda", name, "--slots", o.slots,
            "--train", o.train, "--steps", o.steps, "--warmup", o.warmup, "--batch-tokens", o.batch_tokens, "--context", o.context, "--holdout", o.holdout, "--rate", o.rate, "--threads", o.threads,
            "--seed", o.seed, "--save-every", 8, "--resume", "--json", "--out", o.work / f"lambda-{name}.gguf", "--heads", o.work / f"lambda-{name}.heads.gguf",
        ]
        found = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, check=True, text=True).stdout
        said.with_suffix(".part").write_text(found)
        os.replace(said.with_suffix(".part"), said)
    return json.loads(said.read_text())


def record(model: Path, out: Path, examples, o) -> Trace:
    """The examples through the engine. An answer is computed in one go, as it is known, and counted as if it had been decoded: what a token is sent to does not depend on that."""
    if not out.exists():
        note(f"recording {out.name}: {len(examples)} sequences")
        beside, nats = out.with_name(f"{out.name}.part.npz"), []
        llm = edgemoe.Llama(str(model), n_ctx=o.context + 8, n_threads=o.threads, n_gpu_layers=0, logits_all=True, verbose=False)
        with edgemoe.Recorder(llm, beside, full_probs=True, hidden=True, source="held-out questions with their answers") as recorder:
            for e in examples:
                with recorder.sequence(question=e.mark):
                    llm.eval(e.tokens)
                    said = np.array(llm.scores[e.start - 1 : len(e.tokens) - 1], np.float64)
                said -= said.max(1, keepdims=True)
                nats.append(np.log(np.exp(said).sum(1)) - said[np.arange(len(said)), e.tokens[e.start :]])
        llm.close()
        trace = Trace.load(beside)
        phase, step = np.array(trace.phase), np.array(trace.step)
        for s, e in enumerate(examples):
            answer = slice(int(trace.offsets[s]) + e.start, int(trace.offsets[s + 1]))
            assert answer.stop - answer.start == len(e.tokens) - e.start
            phase[answer] = DECODE
        step = np.cumsum((phase == DECODE) | (np.diff(phase, prepend=1) != 0) | (np.diff(step, prepend=-1) != 0)).astype(np.int32) - 1
        trace.meta["language"] = float(np.concatenate(nats).mean())  # as the engine computes it, with the types of the GGUF
        replace(trace, phase=phase, step=step).save(out)
        beside.unlink()
    return Trace.load(out)


def native_heads(model: Path, trace: Trace, slots: int):
    with Source(model) as source:
        return heads_of(start(native_routers(source), "spatio-temporal"), trace, Options("spatio-temporal", slots))


def simulated(trace: Trace, heads, o) -> dict:
    """Counts by "policy slots"."""
    ready = with_heads(trace, outputs(heads, [trace], trace.n_expert))
    mb = sum(trace.meta["bytes_per_expert"]) / len(trace.meta["bytes_per_expert"]) / 1e6
    found = {}
    for slots in o.capacities:
        for policy in POLICIES:
            text = f"spatio-temporal:R={max(1, round(o.budget * slots))}" if policy == "spatio-temporal" else policy
            counts = replay(ready, text, slots, "load").total()
            tokens = int((trace.phase == DECODE).sum())
            found[f"{policy} {slots}"] = {
                "policy": text, "n_tokens": tokens, **counts, "hit": counts["n_hits"] / counts["n_accesses"], "adjusted": counts["n_hits"] / (counts["n_accesses"] + counts["n_proactive"]),
                "load_mb": (counts["n_demand"] + counts["n_proactive"]) * mb / tokens,
            }
    return found


def spread(trace: Trace) -> dict:
    """How even the load is: bits of entropy of the experts used, mean over the layers; and how much of what a token uses the next one uses too."""
    decoded = np.flatnonzero(trace.phase == DECODE)
    used = np.zeros((trace.n_tokens, trace.n_layers, trace.n_expert), bool)
    np.put_along_axis(used, np.minimum(trace.ids.astype(int), trace.n_expert - 1), True, 2)
    share = used[decoded].mean(0) / trace.n_used
    entropy = -(share * np.log2(np.maximum(share, 1e-12))).sum(1).mean()
    pairs = decoded[:-1][np.diff(decoded) == 1]
    return {"entropy_bits": float(entropy), "overlap": float((used[pairs] & used[pairs + 1]).sum() / used[pairs].sum())}


def measure(o) -> dict:
    examples = read_examples(o.data, Vocabulary(o.model), o.context)
    _, held_out = parted(examples, o.holdout, o.seed)
    results = {}
    for name in (BEFORE, *o.lambdas):
        if o.only and name not in o.only:
            continue
        kept = o.work / f"{name}.results.json"
        if not kept.exists():
            said = {} if name == BEFORE else train(o, name)
            model = Path(o.model) if name == BEFORE else o.work / f"lambda-{name}.gguf"
            trace = record(model, o.work / f"{name}.trace.npz", held_out, o)
            heads = native_heads(model, trace, o.slots) if name == BEFORE else heads_file.load(o.work / f"lambda-{name}.heads.gguf")
            note(f"simulating {name}")
            found = {"said": {k: v for k, v in said.items() if k not in ("types", "history")}, "simulated": simulated(trace, heads, o), "language": trace.meta["language"], **spread(trace)}
            kept.with_suffix(".part").write_text(json.dumps(found, indent=1) + "\n")
            os.replace(kept.with_suffix(".part"), kept)
        results[name] = json.loads(kept.read_text())
    if BEFORE not in results or not any(r["said"] for r in results.values()):
        return results
    first = next(r for r in results.values() if r["said"])
    results[BEFORE]["said"] = {"held_out": first["said"]["held_out"][:1]}  # all begin as this one
    return results


# --- tables


def tables(results: dict, o) -> str:
    lines = []
    first = results[BEFORE]["said"]["held_out"][0]
    lines += [
        f"Held out: {first['n_examples']} questions, {first['n_tokens']} tokens of answers. Language loss: nats per token of the answers.", "",
        "| model | language, PyTorch | language, engine | coverage loss | next token uses the same | entropy of the load |", "|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        last = r["said"]["held_out"][-1]
        lines.append(f"| {title(name)} | {last['lm']:.4f} ({last['lm'] - first['lm']:+.4f}) | {r['language']:.4f} ({r['language'] - results[BEFORE]['language']:+.4f}) | {last['heads']:.4f} | {100 * r['overlap']:.1f} % | {r['entropy_bits']:.2f} bits |")
    for slots in o.capacities:
        rows = {name: {p: r["simulated"][f"{p} {slots}"] for p in POLICIES} for name, r in results.items()}
        n = rows[BEFORE]["lru"]
        st = rows[BEFORE]["spatio-temporal"]["policy"].partition(":")[2]
        lines += [
            "", f"{slots} slots of {o.n_expert} per layer, {n['n_tokens']} tokens, A = {n['n_accesses']} accesses. Hit %, MB per token; of Spatio-Temporal ({st}) hit / adjusted hit %.", "",
            "| model | LRU | Temporal | Spatio-Temporal | Belady * |", "|---|---|---|---|---|",
        ]
        for name, row in rows.items():
            cells = [f"{100 * row[p]['hit']:.1f}" + (f" / {100 * row[p]['adjusted']:.1f}" if p == "spatio-temporal" else "") + f", {row[p]['load_mb']:.2f}" for p in POLICIES]
            lines.append(f"| {title(name)} | " + " | ".join(cells) + " |")
    lines += ["", "\\* knows the future; no policy without prefetch hits more.", "", "Published (Qwen3-30B-A3B, 20 of 128 slots, GSM8K), not measured here:", "",
              "| policy | model | hit % | adjusted hit % | MB per token |", "|---|---|---|---|---|"]
    lines += [f"| {p} | {kind} | {hit:.1f} | {f'{adjusted:.1f}' if adjusted else ''} | {mb} |" for p, kind, hit, adjusted, mb in PAPER]
    return "\n".join(lines)


def title(name: str) -> str:
    return {BEFORE: "as it was, heads as the routers", "0": "λ = 0, the control"}.get(name, f"λ = {name}")


def plot(results: dict, o, path: Path) -> None:
    """Hit rate against language loss, a line per policy, a point per lambda."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(o.capacities), figsize=(4.6 * len(o.capacities), 4), sharey=True, squeeze=False)
    names = {"lru": "LRU", "temporal": "Temporal", "spatio-temporal": "Spatio-Temporal", "belady": "Belady (knows the future)"}
    points = {name: r for name, r in results.items() if name != BEFORE}
    for axis, slots in zip(axes[0], o.capacities):
        for policy, marker in zip(POLICIES, "os^x"):
            x = [r["said"]["held_out"][-1]["lm"] for r in points.values()]
            y = [100 * r["simulated"][f"{policy} {slots}"]["hit"] for r in points.values()]
            line, = axis.plot(x, y, marker=marker, label=names[policy])
            before = results[BEFORE]
            axis.plot(before["said"]["held_out"][0]["lm"], 100 * before["simulated"][f"{policy} {slots}"]["hit"], marker=marker, color=line.get_color(), fillstyle="none", linestyle="")
            if policy == "lru":
                for name, a, b in zip(points, x, y):
                    axis.annotate(f"λ={name}", (a, b), textcoords="offset points", xytext=(3, -12), fontsize=8)
        axis.set(title=f"{slots} slots of {o.n_expert}", xlabel="language loss on held-out answers, nats per token")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("hit rate, %")
    axes[0][0].legend(fontsize=8)
    figure.suptitle("Joint post-training of the demo model; hollow: before training", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="the GGUF to begin with")
    parser.add_argument("--data", nargs="+", required=True, help="JSON lines with questions and answers")
    parser.add_argument("--work", type=Path, required=True, help="folder of everything")
    parser.add_argument("--checkpoint", help="the model as a checkpoint (exported into the folder where it is not given)")
    parser.add_argument("--lambdas", type=lambda t: t.split(","), default=["0", "0.1", "0.3", "1"])
    parser.add_argument("--train", default="routers", choices=("routers", "experts", "all"))
    parser.add_argument("--slots", type=int, default=6, help="that heads are trained for")
    parser.add_argument("--capacities", type=lambda t: [int(n) for n in t.split(",")], default=[5, 6, 8], help="slots that are simulated")
    parser.add_argument("--budget", type=float, default=0.75, help="R of Spatio-Temporal as a share of the slots, as the paper's 15 of 20")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=384)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--holdout", type=float, default=0.003)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="of before and the lambdas: only these, as JSON")
    parser.add_argument("--plot", type=Path, help="picture of the trade-off (.png); needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    o = parse_arguments(argv)
    o.work.mkdir(parents=True, exist_ok=True)
    if not o.checkpoint:
        o.checkpoint = str(o.work / "checkpoint")
        if not Path(o.checkpoint).exists():
            note(f"exporting {o.model}")
            from edgemoe.joint.checkpoint import export_checkpoint

            export_checkpoint(o.model, o.checkpoint)
    with Source(o.model) as source:
        o.n_expert = source.layers[0].n_expert
    results = measure(o)
    if o.plot:
        plot(results, o, o.plot)
    print(json.dumps(results) if o.json or o.only else tables(results, o))
    return 0


if __name__ == "__main__":
    sys.exit(main())
