#!/usr/bin/env python3
"""Decoding with less memory than the model has bytes: edgemoe against llama.cpp (weights mapped) under the same limit, from a cold page cache.

    .venv/bin/python scripts/bench_bigger_than_ram.py --model models/demo.gguf --package models/demo.edgemoe \\
        --limits 1100M,800M,550M,none --ram auto,mapped --plot plots
    .venv/bin/python scripts/bench_bigger_than_ram.py --model random.gguf --random-tokens --limits 3600M,2400M,1600M --neighbour 2400M

Every measurement is a process in a control group of its own with the limit (sizes are powers of 1024), entered before Python starts; the model's files are dropped from the page cache
before it. Per limit and round: llama.cpp, the edgemoe variants, llama.cpp again; ratios are to the mean of both llama.cpp of the same round. In the window: llama_decode with its
batch, one token at a time. Outside: loading, the prompt (both are reported), copying logits. All sides are fed the same tokens: the text goes on as it does, whatever a model would have
chosen. A slow side stops after --most-seconds; its speed is that of the tokens it decoded.

Parity: logits of every tenth token against llama.cpp's run that got furthest, rms in standard deviations (bound: that of edgemoe verify; 0 with --exact), and how often both would
have chosen the same token. Roofline: the slower of the disk (direct reads of an expert's size, after each edgemoe run) moving what an edgemoe token read, and of computing (edgemoe in
place, no limit, second pass over the same tokens; the best of a measurement before each limit). --neighbour: how long another process takes to touch 500 MiB, in its own group, while a model decodes.

Two things decide what a run is worth. Others' cores: how many were busy with something else in the window; threads that wait for each other by spinning become many times slower on a
core that is shared. The disk's read-ahead: a page fault of llama.cpp reads that much around it, wanted or not; a file of one expert ends before.
"""

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parent.parent
LOGITS_EVERY = 10
MIB = 1 << 20
NEIGHBOUR_BYTES, NEIGHBOUR_LIMIT, NEIGHBOUR_PAUSE_S, NEIGHBOUR_ALONE_S = 500 * MIB, 600 * MIB, 0.02, 10
READ_THREADS = (1, 2, 4, 8)  # the disk's rate is that of the best
PLAIN, AGAIN = "llama.cpp", "llama.cpp again"

# The child processes: a model, and the neighbour.


def open_model(spec: dict):
    from edgemoe import engine

    options = dict(n_ctx=spec["n_ctx"], n_threads=spec["threads"], n_threads_batch=spec["threads"], verbose=False)
    return engine.open_plain([spec["path"]], **options) if spec["plain"] else engine.Llama(spec["path"], **spec["edgemoe"], **options)


def counters(llm) -> dict:
    read = next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))
    stats = {k: v for k, v in llm.expert_stats().items() if isinstance(v, (int, float))} if hasattr(llm, "expert_stats") else {}
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"at": time.monotonic(), "read_bytes": read, "major_faults": faults, "stats": stats, "cpu_s": time.process_time(), "busy_s": busy_seconds()}


def busy_seconds() -> float:
    """Of all cores, time that the host took away included."""
    user, nice, system, _, _, irq, softirq, stolen = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def run_model(folder: Path) -> None:
    """Reads spec.json, writes result.json and logits.npy."""
    import numpy as np

    spec = json.loads((folder / "spec.json").read_text())
    started = time.monotonic()
    llm = open_model(spec)
    result = {"load_s": time.monotonic() - started}
    for _ in range(spec["n_passes"]):
        llm.reset()
        start = time.monotonic()
        llm.eval(spec["prompt"])
        result["prompt_s"] = time.monotonic() - start
        result["begin"], logits = counters(llm), []
        seconds, chosen = [], []
        for i, token in enumerate(spec["tokens"]):
            start = time.monotonic()
            llm.eval([token])
            seconds.append(time.monotonic() - start)
            row = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),))
            chosen.append(int(row.argmax()))
            if i % LOGITS_EVERY == 0:
                logits.append(row.copy())
            if sum(seconds) > spec["most_seconds"]:
                break
        result["end"] = counters(llm)
    result["ram"] = {} if spec["plain"] else llm.ram_info()
    np.save(folder / "logits.npy", np.stack(logits))
    (folder / "result.json").write_text(json.dumps(result | {"token_s": seconds, "chosen": chosen}))


def run_neighbour() -> None:
    """Prints when each pass began and how long it took, until it is killed."""
    import numpy as np

    memory = np.zeros(NEIGHBOUR_BYTES, np.uint8)
    while True:
        start = time.monotonic()
        memory[::4096] += 1
        print(start, time.monotonic() - start, flush=True)
        time.sleep(NEIGHBOUR_PAUSE_S)


# The parent: one run after the other.


def measure(spec: dict, limit: int | None, files: list[Path], cold: bool) -> dict:
    """One model process. What it wrote, with the samples of its memory, or {"failed": why}."""
    import memory_group as groups
    import numpy as np

    page_cache = groups.drop_cached(files) if cold else None
    with tempfile.TemporaryDirectory() as name, open(Path(name, "log"), "w+b") as log, groups.memory_group(limit) as group:
        folder = Path(name)
        (folder / "spec.json").write_text(json.dumps(spec))
        command = [sys.executable, __file__, "--child", "model", str(folder)]
        with groups.started(group, command, stdout=log, stderr=log) as process:
            samples = groups.watch(process, group)
        about = {"page_cache": page_cache, "samples": samples, "peak": peaks(samples)}
        if process.returncode:
            log.seek(0)
            why = "killed: the limit is too small" if group.n_killed() else (log.read().decode(errors="replace").strip().splitlines() or [""])[-1]
            return about | {"failed": why or f"ended with {process.returncode}"}
        return about | json.loads((folder / "result.json").read_text()) | {"logits": np.load(folder / "logits.npy")}


def peaks(samples: list[tuple]) -> dict[str, int]:
    from memory_group import COLUMNS

    return {name: max((s[i] for s in samples), default=0) for i, name in enumerate(COLUMNS) if name != "at"}


def speed(run: dict) -> float:
    return len(run["token_s"]) / sum(run["token_s"])


def used(run: dict, name: str) -> float:
    """Per decoded token."""
    return (run["end"][name] - run["begin"][name]) / len(run["token_s"])


def others(run: dict) -> float:
    """Cores that were busy with something else during the window."""
    cpu, busy, seconds = (run["end"][k] - run["begin"][k] for k in ("cpu_s", "busy_s", "at"))
    return max(0.0, (busy - cpu) / seconds)


def parity(run: dict, reference: dict) -> dict:
    """Over the tokens that both decoded."""
    import numpy as np

    n = min(len(run["logits"]), len(reference["logits"]))
    a, b = run["logits"][:n], reference["logits"][:n]
    n_chosen = min(len(run["chosen"]), len(reference["chosen"]))
    same = sum(x == y for x, y in zip(run["chosen"], reference["chosen"]))
    rms = float(np.sqrt(np.mean((a - b) ** 2, dtype=np.float64)) / b.std(dtype=np.float64))
    return {"rms": rms, "max": float(np.abs(a - b).max()), "same_best_token": same, "of": n_chosen}


def disk_rate(o, path: str) -> float:
    """Bytes per second of direct reads from the GGUF in pieces as an expert of `path` lies: whole in a package, one per projection in a GGUF."""
    import edgemoe
    from memory_group import direct_read_rate

    with edgemoe.Source(path) as source:
        first = source.layers[0]
        piece = first.bytes_per_expert if source.kind == "package" else first.projections[0].bytes
    return max(direct_read_rate(o.model, piece, n) for n in READ_THREADS)


def files_of(model: Path) -> list[Path]:
    import edgemoe

    if model.is_dir():
        return [f for f in model.rglob("*") if f.is_file()]
    with edgemoe.Source(model) as source:
        return [Path(f) for f in source.files]


def tokens_for(o) -> tuple[list[int], list[int]]:
    """Prompt, and what follows it."""
    import llama_cpp
    import numpy as np

    n = o.n_prompt + o.tokens
    with closing(llama_cpp.Llama(str(o.model), vocab_only=True, verbose=False)) as llm:
        found = np.random.default_rng(7).integers(0, llm.n_vocab(), n).tolist() if o.random_tokens else llm.tokenize(o.text.read_bytes())
    if len(found) < n:
        sys.exit(f"{o.text}: has {len(found)} tokens, wanted {n}: --n-prompt and --tokens together")
    return found[: o.n_prompt], found[o.n_prompt : n]


def variants(o, prompt: list[int], tokens: list[int]) -> dict[str, dict]:
    """What is run, in this order; name -> spec."""
    plain = {
        "plain": True, "path": str(o.model), "prompt": prompt, "tokens": tokens, "n_ctx": o.n_ctx, "threads": o.threads, "most_seconds": o.most_seconds, "n_passes": 1,
    }  # fmt: skip
    ours = {
        ", ".join(filter(None, ("edgemoe", kind, ram, policy))): plain | {"plain": False, "path": str(path), "edgemoe": {"ram": ram_of(ram), "ram_policy": policy, "exact": o.exact}}
        for ram in o.ram.split(",")
        for policy in (o.policies.split(",") if ram != "mapped" else [None])
        for kind, path in (("GGUF", o.model), ("package", o.package))
        if path
    }
    return {"plain": {PLAIN: plain}, "edgemoe": ours}.get(o.only) or {PLAIN: plain, **ours, AGAIN: plain}


def ram_of(text: str) -> int | str | None:
    """What Llama's `ram` is given."""
    if text == "auto":
        return None
    return text if text == "mapped" else size(text)


def size(text: str) -> int | None:
    from edgemoe.machine import parse_bytes

    return None if text == "none" else parse_bytes(text)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_in_place(o, specs: dict[str, dict]) -> dict[str, float]:
    """Tokens per second of each path that edgemoe opens, with everything in memory: what computing alone allows."""
    rates = {}
    for path, spec in {s["path"]: s for s in specs.values() if not s["plain"]}.items():
        run = measure(spec | {"edgemoe": {"ram": "mapped", "exact": o.exact}, "n_passes": 2}, None, o.files, cold=False)
        if "failed" in run:
            sys.exit(f"{path}, in place without a limit: {run['failed']}")
        rates[path] = speed(run)
        say(f"no limit, in place, warm, {path}: {rates[path]:.2f} tok/s")
    return rates


def measure_limit(o, limit: str, specs: dict[str, dict]) -> dict[str, list[dict]]:
    """Runs by variant, one per round."""
    runs: dict[str, list[dict]] = {name: [] for name in specs}
    for i in range(o.rounds):
        for name, spec in specs.items():
            run = measure(spec, size(limit), o.files, cold=True)
            if not spec["plain"] and "failed" not in run:
                run["disk_rate"] = disk_rate(o, spec["path"])
            runs[name].append(run)
            say(f"limit {limit}, round {i + 1} of {o.rounds}, {name}: {run.get('failed') or f'{speed(run):.2f} tok/s'}")
    return runs


@contextmanager
def neighbour():
    """Yields a function of a window: the seconds of the passes that began in it."""
    import memory_group as groups

    command = [sys.executable, __file__, "--child", "neighbour"]
    with tempfile.NamedTemporaryFile("w+") as passes, groups.memory_group(NEIGHBOUR_LIMIT) as group, groups.started(group, command, stdout=passes) as process:
        while not Path(passes.name).stat().st_size:
            if process.poll() is not None:
                sys.exit("the neighbour ended before its first pass")
            time.sleep(0.1)

        def within(begin: float, end: float) -> list[float]:
            lines = [[float(x) for x in line.split()] for line in Path(passes.name).read_text().splitlines()]
            return [seconds for at, seconds in lines if begin <= at <= end]

        yield within


def measure_neighbour(o, specs: dict[str, dict]) -> dict[str, dict]:
    """Seconds of the neighbour's passes: alone, and while each variant decodes."""
    with neighbour() as passes_within:
        begin = time.monotonic()
        time.sleep(NEIGHBOUR_ALONE_S)
        found = {"nothing else": {"pass_s": passes_within(begin, time.monotonic())}}
        turns = [(name, spec, o.neighbour) for name, spec in specs.items() if name != AGAIN]
        turns += [(f"{PLAIN}, no limit", specs[PLAIN], "none")] if PLAIN in specs else []  # what cores that are busy do to a neighbour, without any reading
        for name, spec, limit in turns:
            run = measure(spec, size(limit), o.files, cold=True)
            found[name] = run if "failed" in run else {"pass_s": passes_within(run["begin"]["at"], run["end"]["at"]), "tokens_per_s": speed(run)}
            say(f"limit {limit}, with a neighbour, {name}: {run.get('failed') or f'{speed(run):.2f} tok/s'}")
    return found


# What came of it.


def longest(runs: dict[str, dict[str, list[dict]]]) -> dict | None:
    """llama.cpp's run with the most tokens, of all limits: what the others are compared with."""
    done = [r for by_name in runs.values() for r in by_name.get(PLAIN, []) if "failed" not in r]
    return max(done, key=lambda r: len(r["token_s"]), default=None)


def rows_of(limit: str, runs: dict[str, list[dict]], reference: dict | None, in_place: dict[str, float], specs: dict[str, dict]) -> list[dict]:
    """One row per variant. Rounds in which it failed are left out; one in which llama.cpp failed has no ratio."""
    rows = []
    for name, every in runs.items():
        done = [r for r in every if "failed" not in r]
        row = {"limit": limit, "variant": name, "failed": next((r["failed"] for r in every if "failed" in r), None), "n_done": len(done), "n_rounds": len(every)}
        rows.append(row)
        if not done:
            continue
        row |= {"speeds": [speed(r) for r in done], "n_tokens": min(len(r["token_s"]) for r in done), "load_s": median(r["load_s"] for r in done)}
        row |= {"prompt_s": median(r["prompt_s"] for r in done), "read_bytes": median(used(r, "read_bytes") for r in done)}
        row |= {"major_faults": median(used(r, "major_faults") for r in done), "peak": {k: max(r["peak"][k] for r in done) for k in done[0]["peak"]}}
        row |= {"slowest_token_s": max(max(r["token_s"]) for r in done), "others": max(map(others, done))}
        if done[-1]["ram"]:
            before, after = (done[-1][side]["stats"] for side in ("begin", "end"))
            row |= {"pool_bytes": done[-1]["ram"]["budget"], **{name: after[name] - before[name] for name in ("n_ram_hits", "n_ram_accesses", "ram_stall_us")}}
        if AGAIN in runs:
            rounds = zip(every, runs[PLAIN], runs[AGAIN])
            row["ratios"] = [speed(r) / mean((speed(a), speed(b))) for r, a, b in rounds if not any("failed" in x for x in (r, a, b))]
        if reference:
            row["parity"] = max((parity(r, reference) for r in done), key=lambda p: p["rms"])
        if not specs[name]["plain"]:
            row |= roofline(row, median(r["disk_rate"] for r in done), in_place[specs[name]["path"]])
    return rows


def roofline(row: dict, disk: float, in_place: float) -> dict:
    """Tokens per second that the disk and the cores allow, each alone; `reached` is the share of the lower one."""
    by_disk = disk / row["read_bytes"] if row["read_bytes"] else None  # nothing was read: the disk allows everything
    return {"disk_rate": disk, "by_disk": by_disk, "by_cores": in_place, "reached": median(row["speeds"]) / min(by_disk or in_place, in_place)}


def add_run_options(parser: argparse.ArgumentParser, n_prompt: int, n_tokens: int) -> None:
    """What is decoded, and how often."""
    from edgemoe import arguments as types, machine

    parser.add_argument("--text", type=Path, default=ROOT / "models" / "README.md", help="prompt and continuation (default %(default)s)")
    parser.add_argument("--random-tokens", action="store_true", help="seeded random tokens instead of a text")
    parser.add_argument("--n-prompt", type=types.positive, default=n_prompt, help="default %(default)s")
    parser.add_argument("--tokens", type=types.positive, default=n_tokens, help="decoded tokens (default %(default)s)")
    parser.add_argument("--most-seconds", type=float, default=60, help="of decoding (default %(default)s)")
    parser.add_argument("--rounds", type=types.positive, default=1, help="default %(default)s")
    parser.add_argument("--threads", type=types.positive, default=machine.default_threads(), help="default %(default)s")
    parser.add_argument("--n-ctx", type=types.positive, default=1024, help="default %(default)s")


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    from edgemoe import arguments as types

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF")
    parser.add_argument("--package", type=Path, help="what edgemoe-convert made of it; measured too")
    parser.add_argument("--limits", default="none", help="memory limits, such as 1100M,800M,none (default %(default)s)")
    parser.add_argument("--ram", default="auto", help="edgemoe's, one or more: auto, mapped, sizes (default %(default)s)")
    parser.add_argument("--policies", default="lru", help="of edgemoe's pool, one or more (default %(default)s)")
    parser.add_argument("--exact", action="store_true", help="edgemoe with llama.cpp's kernels")
    parser.add_argument("--only", choices=("plain", "edgemoe"), help="one side alone: no ratios")
    add_run_options(parser, n_prompt=128, n_tokens=200)
    parser.add_argument("--read-ahead", type=types.positive, metavar="KB", help="of the model's disk while this runs (as root): Linux has 128, and llama.cpp's faults read that much and more")
    parser.add_argument("--neighbour", metavar="LIMIT", help="also measure how another process fares beside a model under this limit")
    parser.add_argument("--json", type=Path, help="write everything to this file, after every limit")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="pictures of memory over time and of the neighbour's passes (needs matplotlib)")
    return parser.parse_args(arguments)


def about(o) -> dict:
    from edgemoe import machine

    memory = machine.memory()
    return {
        "model": o.model.name, "bytes": sum(f.stat().st_size for f in files_of(o.model)), "cpu": machine.cpu_name(), "memory_bytes": memory.total, "swap_bytes": memory.swap_total,
        "threads": o.threads, "n_ctx": o.n_ctx, "ram": o.ram, "exact": o.exact, "tokens": "random" if o.random_tokens else o.text.name, "n_prompt": o.n_prompt,
        "n_decode": o.tokens, "rounds": o.rounds,
    }  # fmt: skip


def page_cache(runs: list[dict]) -> dict:
    """How the files left the page cache, and the most that stayed in it."""
    tried = [r["page_cache"] for r in runs]
    return {"page_cache": sorted({t["how"] for t in tried}), "most_bytes_left": max(t["left_bytes"] for t in tried)}


def main() -> int:
    import bigger_than_ram_report as report
    import memory_group as groups
    from edgemoe.verify import BOUND

    o = options_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that groups are removed
    o.files = [f for path in (o.model, o.package) if path for f in files_of(path)]
    with groups.read_ahead(o.model, o.read_ahead) as kb:
        head, specs = about(o) | {"read_ahead_kb": kb}, variants(o, *tokens_for(o))
        in_place, runs, beside = {}, {}, {}
        for limit in o.limits.split(","):
            for path, rate in measure_in_place(o, specs).items():
                in_place[path] = max(rate, in_place.get(path, 0))  # the best is what the cores allow when nobody else has them
            runs[limit] = measure_limit(o, limit, specs)
            rows = [row for done in runs for row in rows_of(done, runs[done], longest(runs), in_place, specs)]
            head |= page_cache([r for by_name in runs.values() for every in by_name.values() for r in every])
            save(o, head, rows, runs, beside)
        if o.neighbour:
            beside = measure_neighbour(o, specs)
            save(o, head, rows, runs, beside)
    print(report.text(head, rows, beside))
    if o.plot:
        say("\n".join(report.draw_all(o.plot, head["model"], runs, beside)))
    ours = [r for r in rows if not specs[r["variant"]]["plain"]]
    return int(any(r["failed"] or ("parity" in r and not r["parity"]["rms"] <= (0 if o.exact else BOUND)) for r in ours))


def save(o, head: dict, rows: list[dict], runs: dict, beside: dict) -> None:
    if o.json:
        slim = {limit: {name: [{k: v for k, v in r.items() if k != "logits"} for r in every] for name, every in by_name.items()} for limit, by_name in runs.items()}
        o.json.write_text(json.dumps({"about": head, "rows": rows, "neighbour": beside, "runs": slim}))


CHILDREN = {"model": lambda folder: run_model(Path(folder)), "neighbour": run_neighbour}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        CHILDREN[sys.argv[2]](*sys.argv[3:])
    else:
        sys.exit(main())
