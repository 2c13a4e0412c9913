#!/usr/bin/env python3
"""What learned heads cost while a model decodes and everything that it uses is in RAM, so that nothing can be gained: the worst case.

    .venv/bin/python scripts/make_random_model.py random48.gguf --layers 48        # 48 layers, 128 experts, width 2048
    .venv/bin/python scripts/bench_heads_cost.py random48.gguf --ram 12G

Every variant is a process of its own, one after the other: LRU, each policy with heads of random weights, and LRU again; ratios are to the mean of both LRU of the round.
A process decodes a few random tokens over and over, each time from an empty context: experts are read in the first pass and are there in the others, which are timed: llama_decode, one
token at a time. What is compared is the median over all these tokens: of the time on the clock, and of the processor time of all threads, which other processes disturb less (with one
thread the two are the same on a quiet machine; waiting threads spin). Parity: the logits of every token of the last pass are the same bits in all variants.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median, quantiles


def make_heads(model: str, folder: Path, dtype: str) -> Path:
    """Random ones, of both kinds."""
    import numpy as np

    from edgemoe import heads
    from edgemoe.package import Source

    random = np.random.default_rng(0)
    with Source(model) as source:
        counts, n_embd = [layer.n_expert for layer in source.layers], source.integer("embedding_length")
        matrices = [[random.standard_normal((n, n_embd), dtype=np.float32) * np.float32(n_embd**-0.5) for n in counts] for _ in range(2)]
        made = heads.Heads(source.package_fingerprint(), [layer.layer for layer in source.layers], counts, "spatio-temporal", 20, 0.01, *matrices)
    heads.save(folder / f"{dtype}.gguf", made, dtype)
    return folder / f"{dtype}.gguf"


def run(spec: dict) -> None:
    """The child: prints one JSON object."""
    import numpy as np

    import edgemoe

    llm = edgemoe.Llama(
        spec["model"], n_ctx=512, n_threads=spec["threads"], verbose=False, ram=spec["ram"], ram_policy=spec["policy"], heads=spec["heads"], read_ahead="off", exact=spec["exact"]
    )
    tokens = np.random.default_rng(3).integers(300, llm.n_vocab(), spec["tokens"]).tolist()
    seconds, cpu, digest = [], [], None
    for i in range(spec["passes"] + 1):
        llm.reset()
        llm._ctx.kv_cache_clear()
        digest = hashlib.blake2b()
        for token in tokens:
            start, cpu_start = time.perf_counter(), time.process_time()
            llm.eval([token])
            if i:
                seconds.append(time.perf_counter() - start)
                cpu.append(time.process_time() - cpu_start)
            digest.update(np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).tobytes())
        if i == 0:
            first = llm.expert_stats()
    last = llm.expert_stats()
    print(json.dumps({"seconds": seconds, "cpu": cpu, "logits": digest.hexdigest(), **{name: last[name] - first[name] for name in ("n_ram_accesses", "n_ram_hits", "n_ram_demand", "n_ram_proactive")}}))


def measure(spec: dict) -> dict:
    done = subprocess.run([sys.executable, __file__, "--child", json.dumps(spec)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"a run ended with {done.returncode}")
    return json.loads(done.stdout)


def main() -> int:
    from edgemoe import arguments as types, machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF or a package")
    parser.add_argument("--ram", type=types.size, required=True, help="of expert slots: what the tokens use must fit")
    parser.add_argument("--policies", default="temporal spatio-temporal:R=15", help="separated by spaces (default %(default)s)")
    parser.add_argument("--types", default="q8_0 f16", help="of the heads (default %(default)s)")
    parser.add_argument("--tokens", type=types.positive, default=12, help="per pass (default %(default)s)")
    parser.add_argument("--passes", type=types.positive, default=8, help="that are timed (default %(default)s)")
    parser.add_argument("--rounds", type=types.positive, default=1, help="default %(default)s")
    parser.add_argument("--threads", type=types.positive, default=machine.default_threads(), help="default %(default)s")
    parser.add_argument("--exact", action="store_true", help="with llama.cpp's kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        files = {kind: str(make_heads(o.model, Path(name), kind)) for kind in o.types.split()}
        base = {"model": o.model, "ram": o.ram, "tokens": o.tokens, "passes": o.passes, "threads": o.threads, "exact": o.exact, "policy": "lru", "heads": None}
        specs = {"lru": base, **{f"{policy}, {kind}": base | {"policy": policy, "heads": file} for kind, file in files.items() for policy in o.policies.split(" ")}, "lru again": base}
        runs = {variant: [] for variant in specs}
        for i in range(o.rounds):
            for variant, spec in specs.items():
                runs[variant].append(measure(spec))
                print(f"round {i + 1} of {o.rounds}, {variant}: {1e3 * median(runs[variant][-1]['seconds']):.2f} ms/token", file=sys.stderr, flush=True)
    every = [r for done in runs.values() for r in done]
    same = len({r["logits"] for r in every}) == 1
    rows = []
    for variant, done in runs.items():
        seconds = [s for r in done for s in r["seconds"]]
        low, _, high = quantiles(seconds, n=4)
        costs = {
            kind: [median(r[kind]) / mean((median(a[kind]), median(b[kind]))) - 1 for r, a, b in zip(done, runs["lru"], runs["lru again"])] for kind in ("seconds", "cpu")
        }
        counts = {name: sum(r[name] for r in done) for name in ("n_ram_hits", "n_ram_accesses", "n_ram_demand", "n_ram_proactive")}
        rows.append({"variant": variant, "ms": 1e3 * median(seconds), "quartiles_ms": [1e3 * low, 1e3 * high], "cpu_ms": 1e3 * median(s for r in done for s in r["cpu"]), "cost": costs, **counts})
    print("| variant | ms per token (quartiles) | over LRU, per round | processor ms per token | over LRU, per round | hits / A | D | P |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        clock, cpu = (", ".join(f"{100 * c:+.1f} %" for c in r["cost"][kind]) for kind in ("seconds", "cpu"))
        print(f"| {r['variant']} | {r['ms']:.2f} ({r['quartiles_ms'][0]:.2f} to {r['quartiles_ms'][1]:.2f}) | {clock} | {r['cpu_ms']:.2f} | {cpu} | {r['n_ram_hits']} / {r['n_ram_accesses']} | {r['n_ram_demand']} | {r['n_ram_proactive']} |")
    print(f"{len(rows)} variants, {o.rounds} rounds of {o.passes * o.tokens} timed tokens, {o.threads} threads; logits of all variants are {'the same bits' if same else 'NOT the same'}")
    if o.json:
        o.json.write_text(json.dumps({"rows": rows, "same_bits": same, "runs": runs}))
    return 0 if same else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
