#!/usr/bin/env python3
"""Stage-aware placement in the engine: tokens per second while chains of thought are decoded, batch by batch and capacity by capacity, beside what does without stages.

    .venv/bin/python scripts/bench_stages_engine.py models/demo.edgemoe --gguf models/demo.gguf --chains chains.jsonl --tier ram --capacity 3%,12.5%,50% --batch 1,8
    .venv/bin/python scripts/bench_stages_engine.py models/demo.gguf --chains chains.jsonl --tier CPU --batch 1

Chains are JSON lines with `problem` and `full_response`. Every variant is fed the same tokens: the problem with "Let's think step by step.", then the chain as it was written, --tokens of it, whatever
this model would have said; those chains that have most boundaries there, which is in favour of stages. Each group of --batch chains is decoded side by side, one token of each per step, by a model that was just opened: from empty slots. Where a stage begins is found in
the texts (cues in the thinking); a boundary in one chain is one for all.

--tier ram: the experts that a capacity allows are in RAM, the others on the disk, read past the page cache, and every miss is loaded; the process is in a control group whose limit is
the pool and --beside more. --tier DEVICE: slots on that device. "CPU" is a device like others, but on the same cores, so that its hits save nothing: what counts there are hits, loads and parity.

static and mixtral-offloading learn from chains that are not decoded (--train of them). oracle is told how often each stage of the same chains will use each expert, from a run before.
In the window: llama_decode with its batch, all decoded steps. Outside: loading, prompts, copying logits. Rounds of A/B/A: the first variant runs again at the end of each; ratios are to the mean of both.
Parity: logits of every tenth step against llama.cpp, rms in standard deviations; 0 for variants without our kernels.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing, nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from llama_cpp import _internals

LOGITS_EVERY = 10
AGAIN = " again"
COT, OPENS = "\n\nLet's think step by step.\n", "<think>\n"

# name: what Llama gets; {fit}, {oracle}: files. By tier.
IN_RAM = {
    "LRU": {"ram_policy": "lru", "read_ahead": "off"},
    "LRU, read-ahead": {"ram_policy": "lru", "read_ahead": "on"},
    "auto": {},
    "auto, no read-ahead": {"read_ahead": "off"},
    "placement": {"ram_policy": "placement", "read_ahead": "off"},
    "static": {"ram_policy": "static:fit={fit}", "read_ahead": "off"},
    "stage": {"ram_policy": "stage", "read_ahead": "off"},
    "stage+lru": {"ram_policy": "stage+lru", "read_ahead": "off"},
    "oracle replayed": {"ram_policy": "oracle:fit={oracle}", "read_ahead": "off", "stages": "thinking"},
}
ON_DEVICE = {
    "LRU, load": {"policy": "lru", "misses": "load"},
    "Mixtral-Offloading": {"policy": "mixtral-offloading:fit={fit}", "misses": "load"},
    "static, CPU": {"policy": "static:fit={fit}", "misses": "cpu"},
    "stage, load": {"policy": "stage", "misses": "load"},
    "stage, CPU, no repack": {"policy": "stage", "misses": "cpu", "exact": True},
    "stage, CPU, repack": {"policy": "stage", "misses": "cpu"},
    "stage+lru, CPU, repack": {"policy": "stage+lru", "misses": "cpu"},
    "placement, CPU, repack": {"policy": "placement", "misses": "cpu"},
    "auto": {},
    "oracle replayed, CPU": {"policy": "oracle:fit={oracle}", "misses": "cpu", "stages": "thinking"},
}


# --- a process: one variant, all groups of chains


def run(folder: Path) -> None:
    """Reads spec.json, writes result.json and logits.npy."""
    spec = json.loads((folder / "spec.json").read_text())
    groups, logits = [], []
    for i, chains in enumerate(spec["groups"]):
        options = json.loads(json.dumps(spec["options"]).replace("{oracle}", f"{spec['oracle']}.{i}.npz"))
        with closing(open_model(spec, options)) as llm:
            found, some = decode(llm, chains, spec.get("write_oracle") and f"{spec['write_oracle']}.{i}.npz")
        groups.append(found)
        logits += some
    np.save(folder / "logits.npy", np.stack(logits))
    (folder / "result.json").write_text(json.dumps(groups))


def open_model(spec: dict, options: dict):
    from edgemoe import engine

    common = dict(n_ctx=spec["n_ctx"], n_threads=spec["threads"], n_threads_batch=spec["threads"], n_seq_max=len(spec["groups"][0]), verbose=False)
    if options is None:
        return engine.open_plain([spec["path"]], **common)
    return engine.Llama(spec["path"], **options, **common)


def decode(llm, chains: list[dict], oracle: str | None) -> tuple[dict, list[np.ndarray]]:
    """What it took, and logits of some steps. oracle: the file in which to write what each stage used."""
    batch = _internals.LlamaBatch(n_tokens=llm.n_batch, embd=0, n_seq_max=1)
    tracker = llm._experts.stages if hasattr(llm, "_experts") else None
    position = [0] * len(chains)
    for i, chain in enumerate(chains):
        for start in range(0, len(chain["prompt"]), llm.n_batch):
            part = chain["prompt"][start : start + llm.n_batch]
            fill(batch.batch, part, range(start, start + len(part)), [i] * len(part))
            llm._ctx.decode(batch)
        position[i] = len(chain["prompt"])
    before, seconds, logits, used = counters(llm), [], [], []
    for step in range(len(chains[0]["tokens"])):
        fill(batch.batch, [c["tokens"][step] for c in chains], position, range(len(chains)))
        position = [p + 1 for p in position]
        uses = uses_of(llm) if oracle else None
        start = time.perf_counter()
        llm._ctx.decode(batch)
        llm._ctx.get_logits_ith(0)  # waits for a device
        seconds.append(time.perf_counter() - start)
        if oracle:
            used += [np.zeros_like(uses) for _ in range(tracker.number + 1 - len(used))]
            used[tracker.number] += uses_of(llm) - uses
        if step % LOGITS_EVERY == 0:
            logits.append(np.stack([np.ctypeslib.as_array(llm._ctx.get_logits_ith(i), (llm.n_vocab(),)).copy() for i in range(len(chains))]))
    after = counters(llm)
    if oracle:
        np.savez(oracle, coming=np.array(used, np.float32))
    n_stages = [len(llm.stages(i)) for i in range(len(chains))] if tracker else []
    return {"seconds": seconds, "stats": {k: after[k] - before[k] for k in after}, "n_stages": n_stages}, logits


def fill(b, tokens, positions, sequences) -> None:
    b.n_tokens = len(tokens)
    for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences)):
        b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, len(set(sequences)) > 1 or i == len(tokens) - 1
        b.seq_id[i][0] = sequence


def counters(llm) -> dict:
    return {k: v for k, v in llm.expert_stats().items() if isinstance(v, int)} if hasattr(llm, "expert_stats") else {}


def uses_of(llm) -> np.ndarray:
    return np.stack([llm._experts.uses(1 if llm.ram_info() else 0, i) for i in range(len(llm.source.layers))])


# --- all of them


def main() -> int:
    o = options_of()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        test, train = chains_for(o)
        o.fit = learn(o, train, folder)
        sections = []
        for n in o.batch:
            groups = [test[i : i + n] for i in range(0, max(n, o.chains_alone if n == 1 else n), n)]
            reference = measure(o, folder, groups, None, None, None)
            oracle = folder / f"oracle.{n}"
            measure(o, folder, groups, pool_of(o, o.capacity[-1]), {"ram_policy" if o.tier == "ram" else "policy": "lru", "stages": "thinking"}, oracle, writes=True)
            for capacity in o.capacity:
                sections.append(section(o, folder, n, groups, capacity, reference, oracle))
                if o.json:
                    o.json.write_text(json.dumps(sections))
                print(table(sections[-1], o), flush=True)
    return int(any(r["rms"] > (0 if r["exact"] else o.bound) for s in sections for r in s["rows"]))


def section(o, folder: Path, n: int, groups: list, capacity: str, reference: dict, oracle: Path) -> dict:
    pool = pool_of(o, capacity)
    variants = {k: v for k, v in (IN_RAM if o.tier == "ram" else ON_DEVICE).items() if not o.only or k in o.only}
    first = next(iter(variants))
    runs: dict[str, list] = {name: [] for name in [*variants, first + AGAIN]}
    for _ in range(o.rounds):
        for name in runs:
            runs[name].append(measure(o, folder, groups, pool, variants[name.removesuffix(AGAIN)], oracle))
            print(f"batch {n}, {capacity}, {name}: {speed(runs[name][-1], n):.2f} tok/s", file=sys.stderr, flush=True)
    base = [(speed(a, n) + speed(b, n)) / 2 for a, b in zip(runs[first], runs[first + AGAIN])]
    rows = [row(name, runs[name], n, base, reference, variants[name.removesuffix(AGAIN)]) for name in runs]
    n_stages = next(([n for g in r[0]["groups"] for n in g["n_stages"]] for name, r in runs.items() if name.startswith("stage")), [])
    return {"batch": n, "capacity": capacity, "slots": pool.slots, "rows": rows, "n_chains": sum(map(len, groups)), "n_stages": n_stages}


class Pool(NamedTuple):
    slots: int  # per layer
    n_bytes: int  # of all of them


def pool_of(o, capacity: str) -> Pool:
    import edgemoe

    with edgemoe.Source(o.model) as source:
        n_expert = max(layer.n_expert for layer in source.layers)
        slots = max(1, round(n_expert * float(capacity[:-1]) / 100)) if capacity.endswith("%") else int(capacity)
        return Pool(slots, slots * sum(layer.bytes_per_expert + 4096 for layer in source.layers))


def measure(o, folder: Path, groups: list, pool: Pool | None, options: dict | None, oracle: Path | None, writes: bool = False) -> dict:
    """One process, in a group with the limit when experts are in RAM. pool None: llama.cpp."""
    import memory_group as memory

    limit = None
    if pool is not None:
        options = json.loads(json.dumps(options).replace("{fit}", str(o.fit)))
        if o.tier == "ram":
            options["ram"] = pool.n_bytes
            limit = pool.n_bytes + o.beside
        else:
            options |= {"slots": pool.slots, "device": o.tier, "n_gpu_layers": o.gpu_layers}
    spec = {
        "path": str(o.model if pool is not None else o.gguf), "groups": groups, "options": options, "oracle": str(oracle), "n_ctx": 64 + sum(len(c["prompt"]) + len(c["tokens"]) for c in groups[0]),
        "threads": o.threads, "write_oracle": str(oracle) if writes else None,
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    with (memory.memory_group(limit) if limit else nullcontext()) as group, open(folder / "log", "w+") as log:
        command = [sys.executable, __file__, "--child", str(folder)]
        if group:
            with memory.started(group, command, stdout=log, stderr=log) as process:
                process.wait()
        else:
            process = subprocess.run(command, stdout=log, stderr=log)
        if process.returncode:
            sys.exit(f"{options}: ended with {process.returncode}\n" + (folder / "log").read_text()[-2000:])
    return {"groups": json.loads((folder / "result.json").read_text()), "logits": np.load(folder / "logits.npy")}


def speed(r: dict, n: int) -> float:
    return n * sum(len(g["seconds"]) for g in r["groups"]) / sum(sum(g["seconds"]) for g in r["groups"])


def row(name: str, runs: list[dict], n: int, base: list[float], reference: dict, options: dict) -> dict:
    stats = {k: sum(g["stats"].get(k, 0) for g in runs[-1]["groups"]) for k in runs[-1]["groups"][0]["stats"]}
    a, d = ("n_ram_accesses", "n_ram_demand") if "n_ram_accesses" in stats else ("n_decode_accesses", "n_decode_demand")
    hits, p, loaded = ("n_ram_hits", "n_ram_proactive", "ram_bytes_read") if "n_ram_accesses" in stats else ("n_decode_hits", "n_proactive", "bytes_loaded")
    n_tokens = n * sum(len(g["seconds"]) for g in runs[-1]["groups"])
    rms = max(float(np.sqrt(np.mean((r["logits"] - reference["logits"]) ** 2)) / reference["logits"].std()) for r in runs)
    ratios = [speed(r, n) / b for r, b in zip(runs, base)]
    return {
        "variant": name, "tokens_per_s": median(speed(r, n) for r in runs), "ratio": median(ratios), "least": min(ratios), "most": max(ratios), "A": stats[a], "hits": stats[hits], "D": stats[d],
        "P": stats[p], "mb_per_token": stats[loaded] / n_tokens / 1e6, "rms": rms, "exact": bool(options.get("exact")),
    }  # fmt: skip


def table(s: dict, o) -> str:
    stages = f"; stages per chain: {', '.join(map(str, s['n_stages']))}" if s["n_stages"] else ""
    lines = [
        f"\n{o.tier}, batch {s['batch']}, {s['capacity']} ({s['slots']} slots per layer), {s['n_chains']} chains of {o.tokens} tokens{stages}\n",
        "| variant | tok/s | × first | least, most | hit % | D per token | P per token | MB per token | rms |", "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    n = s["n_chains"] * o.tokens
    for r in s["rows"]:
        hit = f"{100 * r['hits'] / r['A']:.1f}" if r["A"] else "–"
        lines.append(
            f"| {r['variant']} | {r['tokens_per_s']:.2f} | {r['ratio']:.2f} | {r['least']:.2f}, {r['most']:.2f} | {hit} | {r['D'] / n:.1f} | {r['P'] / n:.1f} | {r['mb_per_token']:.1f} | {r['rms']:.2g} |"
        )
    return "\n".join(lines)


def chains_for(o) -> tuple[list[dict], list[dict]]:
    """Tokens of the chains to decode, and of those to learn from."""
    import llama_cpp

    from edgemoe.stage import boundaries

    needed = max(max(o.batch), o.chains_alone)
    found = []
    with closing(llama_cpp.Llama(str(o.gguf), vocab_only=True, verbose=False)) as llm:
        for line in o.chains.read_text().splitlines():
            said = json.loads(line)
            chain = said["full_response"].removeprefix(OPENS).lstrip()  # some models' templates open the thinking
            prompt, tokens = (llm.tokenize(t.encode(), add_bos=first, special=True) for t, first in ((said["problem"] + COT + OPENS, True), (chain, False)))
            if len(tokens) >= o.tokens:
                n_stages = len(boundaries((llm.detokenize([t], special=True) for t in tokens[: o.tokens]), opened=True))
                found.append({"prompt": prompt, "tokens": tokens[: o.tokens], "n_stages": n_stages})
    found.sort(key=lambda c: -c["n_stages"])
    if len(found) < needed + o.train:
        sys.exit(f"{o.chains}: {len(found)} chains have {o.tokens} tokens, wanted {needed + o.train}")
    return found[:needed], found[needed : needed + o.train]


def learn(o, train: list[dict], folder: Path) -> Path:
    """What static and mixtral-offloading go by, from a recording of the chains that are not decoded."""
    import edgemoe
    from edgemoe import fit

    with closing(edgemoe.Llama(str(o.model), n_ctx=1024, n_threads=o.threads, verbose=False)) as llm:
        with edgemoe.Recorder(llm, folder / "train.npz", full_probs=True) as recorder:
            for chain in train:
                with recorder.sequence():
                    llm.eval(chain["prompt"])
                    for token in chain["tokens"]:
                        llm.eval([token])
    fit.save(folder / "fit.npz", fit.fit(edgemoe.Trace.load(folder / "train.npz"), {"usage", "spatial"}))
    return folder / "fit.npz"


def options_of():
    from edgemoe import machine
    from edgemoe.verify import BOUND

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF or a package")
    parser.add_argument("--gguf", type=Path, help="the GGUF that llama.cpp opens (default: the model)")
    parser.add_argument("--chains", type=Path, required=True)
    parser.add_argument("--tier", default="ram", help="ram, or a device (default %(default)s)")
    parser.add_argument("--gpu-layers", type=int, default=0)
    parser.add_argument("--batch", default="1,8", help="chains side by side (default %(default)s)")
    parser.add_argument("--capacity", default="3%,12.5%,50%", help="experts per layer, shares or numbers (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=160, help="decoded per chain (default %(default)s)")
    parser.add_argument("--chains-alone", type=int, default=2, help="chains with a batch of 1 (default %(default)s)")
    parser.add_argument("--train", type=int, default=4, help="chains to learn from (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="these variants, the first of which is what the others are compared with")
    parser.add_argument("--beside", type=int, default=700 << 20, metavar="BYTES", help="of the limit, for all but the pool (default 700 MiB)")
    parser.add_argument("--threads", type=int, default=machine.default_threads())
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    o.batch, o.capacity, o.gguf, o.bound = [int(n) for n in o.batch.split(",")], o.capacity.split(","), o.gguf or o.model, BOUND
    return o


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run(Path(sys.argv[2]))
    else:
        sys.exit(main())
