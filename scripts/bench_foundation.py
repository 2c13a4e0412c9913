#!/usr/bin/env python3
"""Load time, prompt and decode speed of llama.cpp (weights mapped, not repacked) against edgemoe on a GGUF and on its package; and edgemoe-convert against cp.

    .venv/bin/python scripts/bench_foundation.py models/demo.gguf [--rounds 5] [--threads 2] [--json OUT.json]

Each measurement is a process of its own, and the variants take turns (A B C A B C ...), so that a slow minute of the machine hits all of them. Outside of every
timed window: starting Python and importing modules. Inside "load": everything from the constructor's call to its return. The page cache is warm. A speed counts only
with its parity: every variant must give the same logits, bit by bit, for the prompt's last token and for each of the 64 decoded ones.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

N_PROMPT, N_DECODE = 512, 64
VARIANTS = ("plain", "gguf", "package")


def measure(variant: str, path: str, threads: int) -> dict:
    """One process's work. Times in seconds; `logits` is a digest."""
    import numpy as np

    from edgemoe import engine

    options = dict(n_ctx=N_PROMPT + N_DECODE, n_batch=N_PROMPT, n_ubatch=N_PROMPT, n_threads=threads, n_threads_batch=threads, verbose=False)
    start = time.perf_counter()
    llm = engine.open_plain([path], **options) if variant == "plain" else engine.Llama(path, **options)
    load = time.perf_counter() - start
    # Random tokens: decode then visits experts as if every token were a surprise, the same ones for every variant.
    tokens = np.random.default_rng(7).integers(0, llm.n_vocab(), N_PROMPT + N_DECODE).tolist()
    for _ in range(2):  # the first pass brings the pages in
        llm.reset()
        digest = hashlib.sha256()
        start = time.perf_counter()
        llm.eval(tokens[:N_PROMPT])
        prompt = time.perf_counter() - start
        decode = 0.0
        for token in tokens[N_PROMPT:]:
            digest.update(logits(llm, np))
            start = time.perf_counter()
            llm.eval([token])
            decode += time.perf_counter() - start
        digest.update(logits(llm, np))
    return {"load": load, "prompt": N_PROMPT / prompt, "decode": N_DECODE / decode, "logits": digest.hexdigest()}


def logits(llm, np) -> bytes:
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).tobytes()


def run_child(variant: str, path: Path, threads: int) -> dict:
    command = [sys.executable, __file__, str(path), "--child", variant, "--threads", str(threads)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_convert(source: Path, folder: Path, rounds: int) -> dict:
    """cp and edgemoe-convert of the same file, in turns; seconds and the sizes."""
    times: dict[str, list[float]] = {"cp": [], "convert": []}
    report = {}
    for i in range(rounds):
        for name in times:
            # New names each round, deleted at the end: ext4 is slow to hand out inodes that were freed a minute ago.
            copy, package = folder / f"bench-{i}.gguf", folder / f"bench-{i}.edgemoe"
            os.sync()  # nobody pays for another's dirty pages
            start = time.perf_counter()
            if name == "cp":
                subprocess.run(["cp", str(source), str(copy)], check=True)
            else:
                command = [str(Path(sys.executable).parent / "edgemoe-convert"), str(source), str(package), "--json", "--quiet"]
                report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            times[name].append(time.perf_counter() - start)
    for i in range(rounds):
        (folder / f"bench-{i}.gguf").unlink()
        if i < rounds - 1:
            shutil.rmtree(folder / f"bench-{i}.edgemoe")
    size = source.stat().st_size
    packed = sum(f.stat().st_size for f in package.rglob("*") if f.is_file())
    return {
        "seconds": times,
        "speed_ratio": median(times["cp"]) / median(times["convert"]),
        "size_ratio": packed / size,
        "peak_rss_bytes": report["peak_rss_bytes"],
        "package": str(package),
    }


def spread(values: list[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the copy and the package are written (default: beside the model)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, str(options.model), options.threads)))
        return 0
    convert = measure_convert(options.model, options.folder or options.model.parent, options.rounds)
    seconds = convert["seconds"]
    print(f"{options.model.name}, {options.model.stat().st_size / 1e9:.2f} GB, {options.threads} threads, {options.rounds} rounds, medians (min to max)")
    print(f"  cp {spread(seconds['cp'])} s, convert {spread(seconds['convert'])} s: {convert['speed_ratio']:.2f} x the speed of cp, "
          f"peak RSS {convert['peak_rss_bytes'] / 1e6:.0f} MB, package {convert['size_ratio']:.4f} x the source")  # fmt: skip
    paths = {"plain": options.model, "gguf": options.model, "package": Path(convert["package"])}
    results: dict[str, list[dict]] = {v: [] for v in VARIANTS}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            results[variant].append(run_child(variant, paths[variant], options.threads))
    shutil.rmtree(convert["package"])
    same = len({r["logits"] for rs in results.values() for r in rs}) == 1
    print(f"  parity: logits of all {len(VARIANTS) * options.rounds} runs {'are bit-identical' if same else 'DIFFER'}")
    for variant, runs in results.items():
        columns = []
        for key, digits in (("load", 3), ("prompt", 1), ("decode", 2)):
            values = [r[key] for r in runs]
            ratio = median(values) / median(r[key] for r in results["plain"])
            columns.append(f"{key} {spread(values, digits)} {'s' if key == 'load' else 'tok/s'} = {ratio:.3f} x")
        print(f"  {variant:<8} " + "; ".join(columns))
    if options.json:
        options.json.write_text(json.dumps({"convert": convert, "runs": results, "parity": same}, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
