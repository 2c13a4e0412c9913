#!/usr/bin/env python3
"""Prompt and decode speed of edgemoe on the CPU against llama.cpp (as it comes; mapped and not repacked) and ik_llama.cpp, on the same GGUF.

    .venv/bin/python scripts/bench_cpu_speed.py models/demo.gguf [MORE.gguf] [--threads 1,2] [--rounds 7] [--ik-python IK_VENV/bin/python] [--json OUT.json]

Each variant is a process of its own that holds the model open; the processes take turns (edgemoe, default, plain, ik, edgemoe again), so that a slow minute of the
machine hits all of them, and each figure is divided by edgemoe's of the same round (the mean of its two turns). Idle processes wait on a pipe. Tokens are random
and new in every round: decode visits experts as if every token were a surprise. Inside the window is llama_decode with its batch set-up; outside are clearing the KV cache,
the tokens before a decode and copying logits out. Round 0 warms up and is not counted. First token: the constructor and one token, without Python's start and imports.
The page cache is warm. A speed counts only with its parity: in every round, round 0 too, each variant's logits are compared with plain's.

ik: `pip install ik-llama-cpp-python` in a virtual environment of its own, because it has its own libggml; give that environment's interpreter.
"""

# Only the standard library up here: ik's interpreter runs this file too, and has neither edgemoe nor gguf.
import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

VARIANTS = ("edgemoe", "edgemoe avxvnni", "edgemoe avx2", "edgemoe exact", "default", "plain", "ik")  # a round's turns; edgemoe has the last one, too
NEEDED = {"edgemoe", "plain"}  # the base of ratios, and of parity
PHASES = ("prompt", "decode")
N_CTX, N_BATCH = 1024, 512  # N_BATCH is also n_ubatch
N_BEFORE = 8  # tokens in the KV cache when a decode begins
BANDWIDTH_BYTES = 1 << 30  # more than any CPU's caches

# The child: one model, open for the whole run.


class LlamaCppPython:
    """llama_cpp.Llama or one of edgemoe's."""

    def __init__(self, constructor, path: str, threads: int):
        self.llm = constructor(path, n_ctx=N_CTX, n_batch=N_BATCH, n_ubatch=N_BATCH, n_threads=threads, n_threads_batch=threads)
        self.n_vocab = self.llm.n_vocab()
        self.about = f"flash attention {('off', 'on', 'auto')[self.llm.context_params.flash_attn_type]}"  # auto is -1
        self.version = f"llama-cpp-python {version('llama-cpp-python')}"

    def clear(self) -> None:
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()

    def feed(self, tokens: list[int]):
        """A pointer to the last token's logits; the next call overwrites them."""
        self.llm.eval(tokens)
        return self.llm._ctx.get_logits()


class IkLlama:
    """ik_llama.cpp through its C calls: the package's own class sets no n_ubatch and, without py-cpuinfo, turns flash attention off. The rest is at ik's defaults."""

    def __init__(self, api, path: str, threads: int):
        self.api, self.n_past = api, 0
        api.llama_backend_init()
        options, context = api.llama_model_default_params(), api.llama_context_default_params()
        options.use_mmap, options.repack_tensors, options.n_gpu_layers = True, False, 0
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_threads, context.n_threads_batch = N_CTX, N_BATCH, N_BATCH, threads, threads
        self.model = api.llama_model_load_from_file(os.fsencode(path), options)
        self.context = self.model and api.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError(f"{path}: ik_llama.cpp cannot load it")
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(N_BATCH, 0, 1)
        switches = {"flash attention": context.flash_attn, "fused MoE": context.fused_moe_up_gate, "run-time repack": options.repack_tensors}
        self.about = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in switches.items())
        self.version = f"ik-llama-cpp-python {version('ik-llama-cpp-python')}"

    def clear(self) -> None:
        self.api.llama_kv_cache_clear(self.context)
        self.n_past = 0

    def feed(self, tokens: list[int]):
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, self.n_past + i, 1, 0, 0
        batch.logits[len(tokens) - 1] = 1
        code = self.api.llama_decode(self.context, batch)
        if code != 0:
            raise RuntimeError(f"ik_llama.cpp: llama_decode returned {code}")
        self.n_past += len(tokens)
        return self.api.llama_get_logits_ith(self.context, -1)


def constructor_of(variant: str):
    """Its modules are imported when this returns."""
    if variant == "ik":
        try:
            from ik_llama_cpp import _ctypes_api
        except OSError:  # built from the sdist, its libllama.so does not look for the libggml.so beside it
            ctypes.CDLL(str(Path(importlib.util.find_spec("ik_llama_cpp").origin).parent / "lib" / "libggml.so"))
            from ik_llama_cpp import _ctypes_api
        return partial(IkLlama, _ctypes_api)
    if variant == "default":
        import llama_cpp  # and not edgemoe, which registers a device

        return partial(LlamaCppPython, llama_cpp.Llama)
    from edgemoe import engine

    plain = lambda path, **options: engine.open_plain([path], **options)  # noqa: E731
    _, _, kernels = variant.partition(" ")
    return partial(LlamaCppPython, plain if variant == "plain" else partial(engine.Llama, exact=kernels == "exact", isa=None if kernels == "exact" else kernels or None))


def serve(variant: str, path: str, threads: int, logits_file: str) -> None:
    """Answers one request a line until the parent closes the pipe. A request: tokens `before`, not timed, and `steps`, lists of tokens, timed one by one."""
    import numpy as np

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log, not between the answers
    construct = constructor_of(variant)
    start = time.perf_counter()
    model = construct(path, threads)
    model.feed([1])
    answer = {"seconds": time.perf_counter() - start, "n_vocab": model.n_vocab, "about": model.about, "version": model.version}
    print(json.dumps(answer), file=answers)
    for line in sys.stdin:
        request, seconds, logits = json.loads(line), 0.0, []
        model.clear()
        if request["before"]:
            model.feed(request["before"])
        for tokens in request["steps"]:
            start = time.perf_counter()
            pointer = model.feed(tokens)
            seconds += time.perf_counter() - start
            logits.append(np.ctypeslib.as_array(pointer, shape=(model.n_vocab,)).copy())
        np.save(logits_file, np.stack(logits))
        print(json.dumps({"seconds": seconds, "memory": private_memory()}), file=answers)


def private_memory() -> dict[str, int]:
    """Bytes. Private_Dirty: pages that this process alone has and has written. Anonymous: pages of no file."""
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if f[0] in ("Private_Dirty:", "Anonymous:")}


# The parent.


class ChildDied(Exception):
    """args: variant, reason."""


class Child:
    """A variant's process. Its log is libllama's: it tells why the process died, and how large its KV cache is."""

    def __init__(self, variant: str, path: Path, threads: int, ik_python: str | None, scratch: str):
        self.variant, self.logits, self.log = variant, Path(scratch, f"{variant}.npy"), Path(scratch, f"{variant}.log")
        is_ik = variant == "ik"
        env = {k: v for k, v in os.environ.items() if not (is_ik and k == "PYTHONPATH")}  # made for our own environment
        command = [ik_python if is_ik else sys.executable, __file__, path, "--child", variant, "--threads", str(threads), "--logits", self.logits]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        self.hello = self._answer()

    def ask(self, **request) -> dict:
        with contextlib.suppress(BrokenPipeError):  # _answer says why
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            tail = " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])
            raise ChildDied(self.variant, f"its process ended with code {self.process.wait()}: {tail}")
        return json.loads(line)

    def kv_cache_bytes(self) -> int:
        return round(sum(float(mib) for mib in re.findall(r"KV buffer size = +([\d.]+) MiB", self.log.read_text(errors="replace"))) * (1 << 20))

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def read_bandwidth(threads: int) -> float:
    """Bytes per second, the best of five: libc's memcmp of two equal halves of 1 GiB, each thread on its part; both halves count."""
    import numpy as np

    memory = np.ones(BANDWIDTH_BYTES, np.uint8)  # written: untouched pages would all be the one zero page
    memcmp = ctypes.CDLL(None).memcmp  # ctypes lets go of Python's lock
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    first, half = memory.ctypes.data, BANDWIDTH_BYTES // 2
    part = half // threads
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(lambda i: memcmp(first + i * part, first + half + i * part, part), range(threads)))
            seconds.append(time.perf_counter() - start)
    return 2 * part * threads / min(seconds)


def bytes_per_token(path: Path) -> int:
    """Weights that one decoded token reads: its share of the routed experts, and all the rest but the embedding (unless that is the output matrix, too)."""
    import gguf

    reader = gguf.GGUFReader(path)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    routed = sum(size for name, size in sizes.items() if "_exps." in name)
    unread = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    architecture = reader.fields["general.architecture"].contents()
    n_used, n_expert = (reader.fields[f"{architecture}.{key}"].contents() if routed else 1 for key in ("expert_used_count", "expert_count"))
    return sum(sizes.values()) - unread - routed + routed * n_used // n_expert


def warm_page_cache(path: Path) -> None:
    buffer = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def run_rounds(children: dict[str, Child], threads: int, options) -> tuple[list[dict], list[float]]:
    """One record per round and turn: tokens per second of both phases, and their logits against plain's. And each round's memory bandwidth."""
    import numpy as np

    random, n_vocab = np.random.default_rng(7), children["plain"].hello["n_vocab"]
    records, bandwidths = [], []
    for i in range(options.rounds + 1):
        bandwidths.append(read_bandwidth(threads))
        prompt, before, decode = (random.integers(0, n_vocab, n).tolist() for n in (options.n_prompt, N_BEFORE, options.n_decode))
        requests = {"prompt": {"before": [], "steps": [prompt]}, "decode": {"before": before, "steps": [[token] for token in decode]}}
        logits = []
        for variant in [*children, "edgemoe"]:
            records.append({"round": i, "variant": variant})
            for phase, request in requests.items():
                answer = children[variant].ask(**request)
                records[-1][phase] = {"tok_s": sum(map(len, request["steps"])) / answer["seconds"]}
                records[-1]["memory"] = answer["memory"]
                logits.append((records[-1], phase, np.load(children[variant].logits)))
        plain = {phase: values for record, phase, values in logits if record["variant"] == "plain"}
        for record, phase, values in logits:
            record[phase] |= parity(values, plain[phase])
        print(f"round {i} of {options.rounds}", file=sys.stderr, flush=True)
    return records, bandwidths


def parity(logits, plain) -> dict:
    """[steps, n_vocab] both. rms: of the difference, in standard deviations of plain's. n_equal: steps with the same best token, of n."""
    import numpy as np

    rms = float(np.sqrt(np.mean((logits - plain) ** 2)) / np.std(plain))
    return {"rms": rms if np.isfinite(rms) else float("inf"), "n_equal": int(np.sum(logits.argmax(-1) == plain.argmax(-1))), "n": len(plain)}


def summary(records: list[dict], variant: str, phase: str, max_rms: float) -> dict:
    """Speeds and ratios of the counted rounds, parity of all. For edgemoe the ratios are those of its last turn to its first: the noise."""
    mine, turns = [r for r in records if r["variant"] == variant], {}
    for r in records:
        if r["variant"] == "edgemoe":
            turns.setdefault(r["round"], []).append(r[phase]["tok_s"])
    counted = [r for r in mine if r["round"] > 0]
    if variant == "edgemoe":
        ratios = [last / first for i, (first, last) in turns.items() if i > 0]
    else:  # the mean of edgemoe's two turns is one of seconds
        ratios = [r[phase]["tok_s"] * sum(1 / speed for speed in turns[r["round"]]) / 2 for r in counted]
    # One position in one round says little: a single expert chosen otherwise makes it differ. What was computed shows over all rounds.
    rms = mean(r[phase]["rms"] ** 2 for r in mine) ** 0.5
    counts = {key: sum(r[phase][key] for r in mine) for key in ("n_equal", "n")}
    return {"tok_s": [r[phase]["tok_s"] for r in counted], "ratios": ratios, "rms": rms, "comparable": rms <= max_rms, **counts}


def bench(path: Path, threads: int, variants: list[str], options) -> dict:
    """All about one model with so many threads. Raises ChildDied."""
    from edgemoe import __version__, machine

    git = subprocess.run(["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"], capture_output=True, text=True)
    result = {"model": path.name, "bytes": path.stat().st_size, "threads": threads, "cpu": machine.cpu_name(), "n_cpus": machine.usable_cpus()}
    result |= {"edgemoe": git.stdout.strip() or __version__, "bytes_per_token": bytes_per_token(path)}
    warm_page_cache(path)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        children, starts = {}, {variant: [] for variant in variants}
        for _ in range(options.starts):
            for variant in variants:
                if variant in children:
                    children[variant].close()
                children[variant] = stack.enter_context(contextlib.closing(Child(variant, path, threads, options.ik_python, scratch)))
                starts[variant].append(children[variant].hello["seconds"])
        records, bandwidths = run_rounds(children, threads, options)
        result["variants"] = {
            variant: child.hello
            | {phase: summary(records, variant, phase, options.max_rms) for phase in PHASES}
            | {"first_token_s": starts[variant], "kv_cache_bytes": child.kv_cache_bytes()}
            | {"memory": [r["memory"] for r in records if r["variant"] == variant][-1]}
            for variant, child in children.items()
        }
    return {**result, "bandwidth": max(bandwidths), "bandwidths": bandwidths, "records": records}


def bench_survivors(path: Path, threads: int, options) -> dict:
    """A peer that dies is left out, and all begins anew without it."""
    variants = options.variants
    while True:
        try:
            return bench(path, threads, variants, options)
        except ChildDied as death:
            dead, reason = death.args
            if dead in NEEDED:
                raise
            print(f"\n{path.name}, {threads} thread(s): {dead} is left out: {reason}", flush=True)
            variants = [variant for variant in variants if variant != dead]


def spread(values: list[float], digits: int = 1) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def quartiles(values: list[float]) -> str:
    import numpy as np

    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"**{middle:.2f}** ({low:.2f} to {high:.2f})"


COLUMNS = ("", "prompt, tok/s", "× edgemoe", "decode, tok/s", "× edgemoe", "of bandwidth", "first token, s", "private, MB (KV cache)", "rms, prompt; decode", "same best token")


def table(result: dict) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for variant, v in result["variants"].items():
        cells = [variant]
        for phase in PHASES:
            if v[phase]["comparable"]:
                ratio = "1" if variant == "edgemoe" else quartiles(v[phase]["ratios"])
                cells += [spread(v[phase]["tok_s"]), ratio if result["variants"]["edgemoe"][phase]["comparable"] else "–"]
            else:
                cells += ["not comparable", "–"]
        of_bandwidth = result["bytes_per_token"] * median(v["decode"]["tok_s"]) / result["bandwidth"]
        cells.append(f"{of_bandwidth:.0%}" if v["decode"]["comparable"] else "–")
        cells += [spread(v["first_token_s"], 2), f"{v['memory']['Private_Dirty'] / 1e6:.0f} ({v['kv_cache_bytes'] / 1e6:.0f})"]
        cells.append("; ".join(f"{v[p]['rms']:.2g}{'' if v[p]['comparable'] else ' **!**'}" for p in PHASES))
        cells.append("; ".join(f"{v[p]['n_equal']}/{v[p]['n']}" for p in PHASES))
        rows.append(cells)
    noise = [quartiles(result["variants"]["edgemoe"][phase]["ratios"]) for phase in PHASES]
    rows.append(["edgemoe, last turn / first", "", noise[0], "", noise[1], *[""] * 5])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def heading(result: dict, options) -> str:
    versions = ", ".join(dict.fromkeys(v["version"] for v in result["variants"].values()))
    about = "; ".join(f"{name}: {v['about']}" for name, v in result["variants"].items())
    return (
        f"**{result['model']}**, {result['bytes'] / 1e9:.2f} GB, **{result['threads']} thread(s)** on {result['cpu']} ({result['n_cpus']} cores); "
        f"edgemoe {result['edgemoe']}, {versions}; everything on the CPU, page cache warm, no expert cache. "
        f"Prompt of {options.n_prompt}; decode of {options.n_decode} random tokens after {N_BEFORE}; n_ctx {N_CTX}, n_batch and n_ubatch {N_BATCH}; "
        f"{options.rounds} rounds, {options.starts} starts. Medians (min to max); ratios within rounds (quartiles). "
        f"{result['bytes_per_token'] / 1e6:.1f} MB of weights per decoded token; these threads read {result['bandwidth'] / 1e9:.1f} GB/s "
        "(memcmp, both streams, the best of all rounds). Private: Private_Dirty after the run. "
        f"rms: difference to plain over all rounds, in standard deviations of its logits, not comparable above {options.max_rms}. {about}."
    )


def parsed_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="GGUFs of one file each")
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2], help="a list; each is a full run (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=3, help="how often each process is started, for the time to its first token")
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-decode", type=int, default=24)
    parser.add_argument("--variants", default="edgemoe,default,plain,ik", help="of " + ",".join(VARIANTS) + " (default: %(default)s)")
    parser.add_argument("--max-rms", type=float, default=0.15, help="between logits of the same weights; beyond it something else was computed")
    parser.add_argument("--ik-python", help="interpreter of the environment with ik-llama-cpp-python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--logits", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for path in options.models:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    names = set(options.variants.split(","))
    if not NEEDED <= names <= set(VARIANTS):
        parser.error(f"--variants: found {options.variants}, wanted some of {','.join(VARIANTS)}, {' and '.join(sorted(NEEDED))} among them")
    if not 0 < options.n_prompt <= N_BATCH or not 0 < options.n_decode <= N_CTX - N_BEFORE or min(options.rounds, options.starts) < 1:
        parser.error(f"wanted 1 to {N_BATCH} for --n-prompt, 1 to {N_CTX - N_BEFORE} for --n-decode, at least 1 for --rounds and --starts")
    if "ik" in names and not options.ik_python and not options.child:
        print("ik is left out: no --ik-python")
        names.remove("ik")
    options.variants = [variant for variant in VARIANTS if variant in names]
    return options


def main() -> int:
    options = parsed_options()
    if options.child:
        serve(options.child, str(options.models[0]), options.threads[0], options.logits)
        return 0
    results = []
    for path in options.models:
        for threads in options.threads:
            results.append(bench_survivors(path, threads, options))
            print(f"\n{heading(results[-1], options)}\n\n{table(results[-1])}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(v[phase]["comparable"] for r in results for v in r["variants"].values() for phase in PHASES) else 1


if __name__ == "__main__":
    sys.exit(main())
