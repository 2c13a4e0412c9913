#!/usr/bin/env python3
"""Learned heads in the engine with less memory than the model has bytes: LRU against Temporal and Spatio-Temporal on a pool of experts in RAM above the disk.

    .venv/bin/python scripts/bench_heads_engine.py --model models/demo.edgemoe --heads heads.gguf --limit 900M --rounds 3
    .venv/bin/python scripts/bench_heads_engine.py --model models/demo.edgemoe --native --limit 900M       # heads that are the model's own routers

Every run is a process in a control group of its own with the limit, from a cold page cache, as in bench_bigger_than_ram.py, which does the measuring and says what is in the timed
window. Per round: LRU, each policy, LRU again; ratios are to the mean of both LRU of the same round. Reading ahead of the router is off for all (--read-ahead): it adds loads of
its own. P are loads that no event waited for; every one is charged: adjusted hit = hits / (A + P). Parity: the logits of every tenth token, and the best token of each, are those of LRU.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import bench_bigger_than_ram as bench

AGAIN = "lru again"
COUNTS = {"A": "n_ram_accesses", "hits": "n_ram_hits", "D": "n_ram_demand", "P": "n_ram_proactive"}


def native_heads(model: Path, to: Path) -> Path:
    """W_T of a layer is its router, W_S that of the next one: how training starts."""
    from edgemoe import heads
    from edgemoe.package import Source
    from edgemoe.routers import native_routers

    with Source(model) as source:
        routers = native_routers(source)
        own = [r.weight for r in routers]
        biases = [r.bias for r in routers] if all(r.bias is not None for r in routers) else None
        following = [x and [*x[1:], x[0]] for x in (own, biases)]
        counts = [layer.n_expert for layer in source.layers]
        made = heads.Heads(
            source.package_fingerprint(), [layer.layer for layer in source.layers], counts, "spatio-temporal", max(1, min(counts) // 4), 0.0, own, following[0], biases, following[1],
            training={"how": "the model's own routers, not trained"},
        )  # fmt: skip
    heads.save(to, made)
    return to


def row_of(name: str, runs: dict[str, list[dict]]) -> dict:
    done = [r for r in runs[name] if "failed" not in r]
    if not done:
        return {"variant": name, "failed": runs[name][0]["failed"]}
    counts = {short: sum(r["end"]["stats"][long] - r["begin"]["stats"][long] for r in done) for short, long in COUNTS.items()}
    rounds = [(r, a, b) for r, a, b in zip(runs[name], runs["lru"], runs[AGAIN]) if not any("failed" in x for x in (r, a, b))]
    references = [r for r in runs["lru"] if "failed" not in r]
    return {
        "variant": name, "failed": None, "speeds": [bench.speed(r) for r in done], "ratios": [bench.speed(r) / mean((bench.speed(a), bench.speed(b))) for r, a, b in rounds],
        "read_bytes": median(bench.used(r, "read_bytes") for r in done), "n_tokens": sum(len(r["token_s"]) for r in done), "pool_bytes": done[0]["ram"]["budget"],
        "stall_ms": median(1e-3 * (r["end"]["stats"]["ram_stall_us"] - r["begin"]["stats"]["ram_stall_us"]) / len(r["token_s"]) for r in done),
        "parity": max((bench.parity(r, references[0]) for r in done), key=lambda p: p["rms"]) if references else None, "others": max(map(bench.others, done)), **counts,
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    from bigger_than_ram_report import spread

    lines = ["| policy | decode, tok/s | x LRU | hits / A | hit | D per token | P per token | adjusted hit | MB read per token | waited, ms per token | parity: rms, same best token |"]
    lines.append("|" + " --- |" * 11)
    for r in rows:
        if r["failed"]:
            lines.append(f"| {r['variant']} | {r['failed']} |" + " - |" * 9)
            continue
        same = f"{r['parity']['rms']:.2g}, {r['parity']['same_best_token']}/{r['parity']['of']}" if r["parity"] else "-"
        lines.append(
            f"| {r['variant']} | {spread(r['speeds'])} | {spread(r['ratios']) if r['ratios'] else '-'} | {r['hits']} / {r['A']} | {r['hits'] / r['A']:.1%} | {r['D'] / r['n_tokens']:.1f} | "
            f"{r['P'] / r['n_tokens']:.1f} | {r['hits'] / (r['A'] + r['P']):.1%} | {r['read_bytes'] / 1e6:.1f} | {r['stall_ms']:.1f} | {same} |"
        )
    return "\n".join(lines)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF or a package")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--heads", type=Path, help="a file of learned heads of this model")
    which.add_argument("--native", action="store_true", help="heads that are the model's own routers")
    parser.add_argument("--limit", required=True, help="of memory, such as 900M, or none")
    parser.add_argument("--ram", default="auto", help="of expert slots: auto, or a size (default %(default)s)")
    parser.add_argument("--policies", default="temporal spatio-temporal:R=2 spatio-temporal:R=15", help="beside LRU, separated by spaces (default %(default)s)")
    parser.add_argument("--read-ahead", choices=("off", "on", "auto"), default="off", help="default %(default)s")
    parser.add_argument("--exact", action="store_true", help="with llama.cpp's kernels")
    bench.add_run_options(parser, n_prompt=64, n_tokens=100)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    return parser.parse_args()


def tokens_of(o) -> tuple[list[int], list[int]]:
    """Prompt, and what follows it. Of a package edgemoe reads the vocabulary, of a GGUF llama.cpp."""
    if not o.model.is_dir():
        return bench.tokens_for(o)
    import numpy as np

    import edgemoe

    n = o.n_prompt + o.tokens
    llm = edgemoe.Llama(str(o.model), n_ctx=64, ram=o.ram_bytes, verbose=False)
    found = np.random.default_rng(7).integers(0, llm.n_vocab(), n).tolist() if o.random_tokens else llm.tokenize(o.text.read_bytes())
    llm.close()
    if len(found) < n:
        sys.exit(f"{o.text}: has {len(found)} tokens, wanted {n}: --n-prompt and --tokens together")
    return found[: o.n_prompt], found[o.n_prompt : n]


def main() -> int:
    o = options_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that groups are removed
    o.ram_bytes = None if o.ram == "auto" else bench.size(o.ram)
    prompt, tokens = tokens_of(o)
    files = bench.files_of(o.model)
    with tempfile.TemporaryDirectory() as folder:
        heads = str(native_heads(o.model, Path(folder, "native.gguf")) if o.native else o.heads)

        def spec(policy: str) -> dict:
            options = {"ram": o.ram_bytes, "ram_policy": policy, "exact": o.exact, "read_ahead": o.read_ahead} | ({} if policy == "lru" else {"heads": heads})
            return {
                "plain": False, "path": str(o.model), "prompt": prompt, "tokens": tokens, "n_ctx": o.n_ctx, "threads": o.threads, "most_seconds": o.most_seconds, "n_passes": 1, "edgemoe": options,
            }  # fmt: skip

        specs = {"lru": spec("lru"), **{policy: spec(policy) for policy in o.policies.split(" ")}, AGAIN: spec("lru")}
        runs = {name: [] for name in specs}
        for i in range(o.rounds):
            for name, each in specs.items():
                runs[name].append(bench.measure(each, bench.size(o.limit), files, cold=True))
                bench.say(f"round {i + 1} of {o.rounds}, {name}: {runs[name][-1].get('failed') or f'{bench.speed(runs[name][-1]):.2f} tok/s'}")
    rows = [row_of(name, runs) for name in specs]
    head = {"model": o.model.name, "heads": "native routers" if o.native else o.heads.name, "limit": o.limit, "threads": o.threads, "read_ahead": o.read_ahead, "exact": o.exact, "rounds": o.rounds}
    pool = next((r["pool_bytes"] for r in rows if not r["failed"]), 0)
    print(", ".join(f"{k} {v}" for k, v in head.items()) + f", pool {pool / 1e6:.0f} MB\n" + table(rows))
    if o.json:
        o.json.write_text(json.dumps({"about": head, "rows": rows}))
    return int(any(r["failed"] or not r["parity"] or r["parity"]["rms"] > 0 or r["parity"]["same_best_token"] != r["parity"]["of"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
