#!/usr/bin/env python3
"""Load time, prompt and decode speed of llama.cpp (weights mapped, not repacked) against edgemoe on a GGUF and on its package, both with ggml's own kernels
(exact=True); and edgemoe-convert against cp.

    .venv/bin/python scripts/bench_foundation.py models/demo.gguf [--rounds 10] [--threads 2] [--json OUT.json]

The variants take turns (plain, gguf, package, plain again, ...), so that a slow minute of the machine hits all of them, and each figure is compared with plain's of the
same round. Load: each in a process of its own; inside the window is the constructor, outside are Python's start and imports. Speed: all variants are open in
one process; inside the window is llama_decode with its batch set-up. The page cache is warm. A speed counts only with its parity: in every round the logits of all variants
must be equal, bit by bit, after the prompt and after each decoded token.
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

N_PROMPT, N_DECODE = 512, 24
VARIANTS = ("plain", "gguf", "package", "plain again")


def open_variant(variant: str, path: Path, threads: int):
    from edgemoe import engine

    options = dict(n_ctx=2 * N_PROMPT, n_batch=N_PROMPT, n_ubatch=N_PROMPT, n_threads=threads, n_threads_batch=threads, verbose=False)
    return engine.open_plain([str(path)], **options) if variant.startswith("plain") else engine.Llama(path, exact=True, **options)


def time_load(variant: str, path: Path, threads: int) -> float:
    """Seconds, in this process."""
    from edgemoe import engine  # noqa: F401  (imports are not part of it)

    start = time.perf_counter()
    open_variant(variant, path, threads)
    return time.perf_counter() - start


def measure_loads(paths: dict[str, Path], threads: int, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {v: [] for v in VARIANTS}
    for _ in range(rounds):
        for variant in VARIANTS:
            command = [sys.executable, __file__, str(paths[variant]), "--child", variant, "--threads", str(threads)]
            seconds[variant].append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return seconds


def measure_speeds(paths: dict[str, Path], threads: int, rounds: int) -> tuple[dict, dict, bool]:
    """Tokens per second of every round for prompt and decode, and whether all logits were equal."""
    import numpy as np

    models = {v: open_variant(v, paths[v], threads) for v in VARIANTS}
    n_vocab = models["plain"].n_vocab()
    random = np.random.default_rng(7)
    prompts, decodes, same = {v: [] for v in VARIANTS}, {v: [] for v in VARIANTS}, True
    for i in range(rounds + 1):  # round 0 brings the pages in
        # Random tokens: decode visits experts as if every token were a surprise.
        prompt, following = random.integers(0, n_vocab, N_PROMPT).tolist(), random.integers(0, n_vocab, N_DECODE).tolist()
        digests = set()
        for variant, llm in models.items():
            llm.reset()
            prompt_s, decode_s, digest = one_pass(llm, prompt, following, n_vocab)
            digests.add(digest)
            if i > 0:
                prompts[variant].append(N_PROMPT / prompt_s)
                decodes[variant].append(N_DECODE / decode_s)
        same = same and len(digests) == 1
    return prompts, decodes, same


def one_pass(llm, prompt: list[int], following: list[int], n_vocab: int) -> tuple[float, float, str]:
    """Seconds for the prompt, seconds for the tokens after it, and a digest of the logits after the prompt and after each of them."""
    import numpy as np

    digest = hashlib.sha256()

    def evaluate(tokens):
        start = time.perf_counter()
        llm.eval(tokens)
        seconds = time.perf_counter() - start
        digest.update(np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(n_vocab,)).tobytes())
        return seconds

    return evaluate(prompt), sum(evaluate([token]) for token in following), digest.hexdigest()


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
        "speed_ratio": median(a / b for a, b in zip(times["cp"], times["convert"])),
        "size_ratio": packed / size,
        "peak_rss_bytes": report["peak_rss_bytes"],
        "package": str(package),
    }


def spread(values: list[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratio(values: list[float], base: list[float]) -> float:
    """Median of the ratios within each round."""
    return median(v / b for v, b in zip(values, base))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--convert-rounds", type=int, default=3, help="each leaves a copy and a package on the disk until the end")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where copies and packages are written (default: beside the model)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(time_load(options.child, options.model, options.threads))
        return 0
    print(f"{options.model.name}, {options.model.stat().st_size / 1e9:.2f} GB, {options.threads} threads, medians (min to max)")
    convert = measure_convert(options.model, options.folder or options.model.parent, options.convert_rounds)
    seconds = convert["seconds"]
    print(f"  cp {spread(seconds['cp'])} s, convert {spread(seconds['convert'])} s: {convert['speed_ratio']:.2f} x the speed of cp, "
          f"peak RSS {convert['peak_rss_bytes'] / 1e6:.0f} MB, package {convert['size_ratio']:.4f} x the source", flush=True)  # fmt: skip
    paths = {v: Path(convert["package"]) if v == "package" else options.model for v in VARIANTS}
    loads = measure_loads(paths, options.threads, options.rounds)
    prompts, decodes, same = measure_speeds(paths, options.threads, options.rounds)
    shutil.rmtree(convert["package"])
    print(f"  parity: logits of all variants in all {options.rounds + 1} rounds {'are bit-identical' if same else 'DIFFER'}")
    for v in VARIANTS:
        print(f"  {v:<12} load {spread(loads[v], 3)} s = {ratio(loads[v], loads['plain']):.3f} x; "
              f"prompt {spread(prompts[v], 1)} tok/s = {ratio(prompts[v], prompts['plain']):.3f} x; "
              f"decode {spread(decodes[v])} tok/s = {ratio(decodes[v], decodes['plain']):.3f} x")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"convert": convert, "load_s": loads, "prompt": prompts, "decode": decodes, "parity": same}, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
