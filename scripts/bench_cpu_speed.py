#!/usr/bin/env python3
"""Prompt and decode speed of edgemoe on the CPU against llama.cpp (as it comes; mapped and not repacked) and ik_llama.cpp, on the same GGUF.

    .venv/bin/python scripts/bench_cpu_speed.py models/demo.gguf [MORE.gguf] [--threads 1,2] [--rounds 7] [--ik-python IK_VENV/bin/python] [--json OUT.json]

Each variant is a process of its own that holds the model open; the processes take turns (edgemoe, default, plain, ik, edgemoe again), so that a slow minute of the
machine hits all of them, and each figure is divided by edgemoe's of the same round (the mean of its two turns). Idle processes wait on a pipe. Tokens are random and new in
every round: decode visits experts as if every token were a surprise. Inside the window is llama_decode with its batch set-up; outside are clearing the KV
cache, the tokens before a decode and copying logits out. Round 0 warms up and is not counted. First token: the constructor and one token, without Python's start and
imports. The page cache is warm. A speed counts only with its parity: in every round, round 0 too, each variant's logits are compared with plain's.

ik: `pip install ik-llama-cpp-python` in a virtual environment of its own, because it has its own libggml; give that environment's interpreter.
"""

import argparse
import ctypes
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

# Nothing else is imported up here: ik's interpreter runs this file too, and has neither edgemoe nor gguf.

PHASES = ("prompt", "decode")
N_BEFORE = 8  # tokens in the KV cache when a decode begins
MAX_RMS = 0.15  # of logits that come from the same weights; beyond it something else was computed
BANDWIDTH_BYTES = 1 << 30


# In the child: one model, open for the whole run.


class LlamaCppPython:
    """llama_cpp.Llama or one of edgemoe's."""

    def __init__(self, constructor, path: str, threads: int, n_ctx: int, n_batch: int):
        options = dict(n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch, n_threads=threads, n_threads_batch=threads)
        self.llm = constructor(path, **options)
        self.n_vocab = self.llm.n_vocab()
        # 0: off, 1: on, -1: where llama.cpp thinks it helps
        self.about = f"flash attention {('off', 'on', 'auto')[self.llm.context_params.flash_attn_type]}"

    def clear(self) -> None:
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()

    def feed(self, tokens: list[int]):
        """A pointer to the last token's logits; the next call overwrites them."""
        self.llm.eval(tokens)
        return self.llm._ctx.get_logits()


class IkLlama:
    """ik_llama.cpp through the C calls of ik_llama_cpp: its own IkLlama sets neither n_ubatch nor, without py-cpuinfo, flash attention. All else is at its defaults."""

    def __init__(self, api, path: str, threads: int, n_ctx: int, n_batch: int):
        self.api = api
        api.llama_backend_init()
        options = api.llama_model_default_params()
        options.use_mmap, options.n_gpu_layers, options.repack_tensors = True, 0, False
        self.model = api.llama_model_load_from_file(os.fsencode(path), options)
        context = api.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, n_batch, n_batch
        context.n_threads, context.n_threads_batch = threads, threads
        self.context = self.model and api.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError(f"{path}: ik_llama.cpp cannot load it")
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(n_batch, 0, 1)
        self.n_past = 0
        switches = {"flash attention": context.flash_attn, "fused MoE": context.fused_moe_up_gate, "run-time repack": options.repack_tensors}
        self.about = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in switches.items())

    def clear(self) -> None:
        self.api.llama_kv_cache_clear(self.context)
        self.n_past = 0

    def feed(self, tokens: list[int]):
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self.n_past + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        code = self.api.llama_decode(self.context, batch)
        if code != 0:
            raise RuntimeError(f"ik_llama.cpp: llama_decode returned {code}")
        self.n_past += len(tokens)
        return self.api.llama_get_logits_ith(self.context, -1)


def import_default():
    import llama_cpp  # and not edgemoe, which would register its device

    return lambda *sizes: LlamaCppPython(llama_cpp.Llama, *sizes)


def import_plain():
    from edgemoe import engine

    return lambda *sizes: LlamaCppPython(lambda path, **options: engine.open_plain([path], **options), *sizes)


def import_edgemoe(exact: bool = False):
    from edgemoe import engine

    return lambda *sizes: LlamaCppPython(lambda path, **options: engine.Llama(path, exact=exact, **options), *sizes)


def import_ik():
    from ik_llama_cpp import _ctypes_api

    return lambda *sizes: IkLlama(_ctypes_api, *sizes)


# In the order of a round's turns; edgemoe has the last one, too.
VARIANTS = {"edgemoe": import_edgemoe, "edgemoe exact": lambda: import_edgemoe(exact=True), "default": import_default, "plain": import_plain, "ik": import_ik}


def timed(model, tokens: list[int]):
    """Seconds, and a copy of the last token's logits [n_vocab]."""
    import numpy as np

    start = time.perf_counter()
    pointer = model.feed(tokens)
    seconds = time.perf_counter() - start
    return seconds, np.ctypeslib.as_array(pointer, shape=(model.n_vocab,)).copy()


def private_memory() -> dict[str, int]:
    """Bytes of this process that no file backs: Private_Dirty counts what was written, Anonymous what has no file (a subset, or nearly)."""
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if f[0] in ("Private_Dirty:", "Anonymous:")}


def serve(options) -> None:
    """Answers one request a line until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log and not between the answers
    import numpy as np

    construct = VARIANTS[options.child]()
    start = time.perf_counter()
    model = construct(str(options.models[0]), options.threads[0], *context_size(options))
    model.feed([1])
    print(json.dumps({"seconds": time.perf_counter() - start, "n_vocab": model.n_vocab, "about": model.about, "version": version_of(options.child)}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if "memory" in request:
            print(json.dumps(private_memory()), file=answers)
            continue
        model.clear()
        if "decode" in request:
            model.feed(request["after"])
            steps = [timed(model, [token]) for token in request["decode"]]
        else:
            steps = [timed(model, request["prompt"])]
        np.save(options.logits, np.stack([logits for _, logits in steps]))
        print(json.dumps({"seconds": sum(seconds for seconds, _ in steps)}), file=answers)


def context_size(options) -> tuple[int, int]:
    """n_ctx, and n_batch = n_ubatch."""
    return max(1024, options.n_prompt, N_BEFORE + options.n_decode), max(512, options.n_prompt)


def version_of(variant: str) -> str:
    from importlib.metadata import version

    package = "ik-llama-cpp-python" if variant == "ik" else "llama-cpp-python"
    return f"{package} {version(package)}"


# In the parent.


class ChildDied(Exception):
    pass


class Child:
    """A variant's process. Its log is libllama's and tells why it died and how large its KV cache is."""

    def __init__(self, variant: str, path: Path, threads: int, options, scratch: str):
        self.variant, self.logits = variant, Path(scratch, f"{variant}.npy")
        self.log = Path(scratch, f"{variant}.log")
        env = dict(os.environ)
        if variant == "ik":
            env.pop("PYTHONPATH", None)  # made for our own environment
        command = [options.ik_python if variant == "ik" else sys.executable, __file__, path, "--child", variant, "--threads", threads, "--logits", self.logits]
        command += ["--n-prompt", options.n_prompt, "--n-decode", options.n_decode]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        self.hello = self._answer()

    def ask(self, **request) -> dict:
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer says why
        return self._answer()

    def measure(self, **request):
        """Seconds, and the logits [steps, n_vocab]."""
        import numpy as np

        return self.ask(**request)["seconds"], np.load(self.logits)

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            tail = " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])
            raise ChildDied(f"{self.variant}: its process ended with code {self.process.wait()}: {tail}")
        return json.loads(line)

    def kv_cache_bytes(self) -> int:
        return round(sum(float(mib) for mib in re.findall(r"KV buffer size = +([\d.]+) MiB", self.log.read_text(errors="replace"))) * (1 << 20))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def read_bandwidth(threads: int) -> float:
    """Bytes per second, the best of ten: libc's memcmp of two equal halves of 1 GiB, each thread its own part; both halves are counted."""
    import numpy as np

    memory = np.ones(BANDWIDTH_BYTES, np.uint8)  # written, or every page would be the one zero page
    memcmp = ctypes.CDLL(None).memcmp  # lets go of Python's lock
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    first, half = memory.ctypes.data, BANDWIDTH_BYTES // 2
    part = half // threads

    def one_pass() -> float:
        readers = [threading.Thread(target=memcmp, args=(first + i * part, first + half + i * part, part)) for i in range(threads)]
        start = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return time.perf_counter() - start

    return 2 * part * threads / min(one_pass() for _ in range(10))


def bytes_per_token(path: Path) -> int:
    """Weights that one decoded token reads: everything but the embedding (one row of it, unless it is the output, too), and its share of the routed experts."""
    import gguf

    reader = gguf.GGUFReader(path)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    routed = sum(size for name, size in sizes.items() if "_exps." in name)
    unread = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    architecture = reader.fields["general.architecture"].contents()
    n_used, n_expert = (reader.fields[f"{architecture}.{key}"].contents() if routed else 1 for key in ("expert_used_count", "expert_count"))
    return sum(sizes.values()) - unread - routed + routed * n_used // n_expert


def warm_page_cache(path: Path) -> None:
    buffer = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def parity(logits, plain) -> dict:
    """rms: of the difference, in standard deviations of plain's logits. n_equal: steps with the same best token, of n."""
    import numpy as np

    return {
        "rms": float(np.sqrt(np.mean((logits - plain) ** 2)) / np.std(plain)),
        "n_equal": int(np.sum(logits.argmax(-1) == plain.argmax(-1))),
        "n": len(plain),
    }


def open_children(variants: list[str], path: Path, threads: int, options, scratch: str) -> tuple[dict[str, Child], dict[str, list[float]]]:
    """The processes, and each start's seconds to the first token. A peer that cannot open the model is left out."""
    children, starts = {}, {v: [] for v in variants}
    for _ in range(options.starts):
        for variant in variants:
            if variant in children:
                children.pop(variant).close()
            elif starts[variant]:
                continue
            try:
                children[variant] = Child(variant, path, threads, options, scratch)
            except ChildDied as e:
                leave_out(variant, e)
                starts[variant] = [math.nan]
                continue
            starts[variant].append(children[variant].hello["seconds"])
    return children, starts


def leave_out(variant: str, reason: ChildDied) -> None:
    if variant in ("edgemoe", "plain"):
        raise reason
    print(f"{variant} is left out: {reason}", flush=True)


def run_rounds(children: dict[str, Child], options) -> list[dict]:
    """One record per round and turn: tokens per second and parity of both phases. A peer that dies is left out from there on."""
    import numpy as np

    random = np.random.default_rng(7)
    n_vocab = children["plain"].hello["n_vocab"]
    records = []
    for i in range(options.rounds + 1):
        prompt, before, decode = (random.integers(0, n_vocab, n).tolist() for n in (options.n_prompt, N_BEFORE, options.n_decode))
        turns = []
        for variant in [*children, "edgemoe"]:
            try:
                turns.append((variant, children[variant].measure(prompt=prompt), children[variant].measure(decode=decode, after=before)))
            except ChildDied as e:
                leave_out(variant, e)
                del children[variant]
        plain = next(turn for turn in turns if turn[0] == "plain")
        for variant, *measured in turns:
            record = {"round": i, "variant": variant}
            for phase, tokens, (seconds, logits), (_, expected) in zip(PHASES, (prompt, decode), measured, plain[1:]):
                record[phase] = {"tok_s": len(tokens) / seconds, **parity(logits, expected)}
            records.append(record)
        print(f"round {i} of {options.rounds}", file=sys.stderr, flush=True)
    return records


def summary(records: list[dict], variant: str, phase: str) -> dict:
    """Speeds and ratios of the counted rounds, parity of all."""
    mine = [r for r in records if r["variant"] == variant]
    counted = [r for r in mine if r["round"] > 0]
    turns: dict[int, list[float]] = {}
    for r in records:
        if r["variant"] == "edgemoe":
            turns.setdefault(r["round"], []).append(r[phase]["tok_s"])
    worst = max((r[phase]["rms"] for r in mine), key=lambda rms: math.inf if math.isnan(rms) else rms)
    return {
        "tok_s": [r[phase]["tok_s"] for r in counted],
        # Both of edgemoe's turns did the same work: their mean is over seconds, not over speeds.
        "ratios": [r[phase]["tok_s"] * sum(1 / speed for speed in turns[r["round"]]) / 2 for r in counted],
        "again": [last / first for i, (first, last) in turns.items() if i > 0],
        "worst_rms": worst,
        "n_equal": sum(r[phase]["n_equal"] for r in mine),
        "n": sum(r[phase]["n"] for r in mine),
        "comparable": worst <= MAX_RMS,  # not a number is not comparable either
    }


def spread(values: list[float], digits: int = 1) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def quartiles(values: list[float]) -> str:
    import numpy as np

    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"**{middle:.2f}** ({low:.2f} to {high:.2f})"


COLUMNS = ("variant", "prompt, tok/s", "× edgemoe", "decode, tok/s", "× edgemoe", "of bandwidth", "first token, s", "private, MB (KV)", "rms, prompt; decode", "same argmax")


def table(result: dict) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for variant, v in result["variants"].items():
        speeds = []
        for phase in PHASES:
            speeds += [spread(v[phase]["tok_s"]), quartiles(v[phase]["ratios"])] if v[phase]["comparable"] else ["not comparable", "–"]
        used = result["bytes_per_token"] * median(v["decode"]["tok_s"]) / result["bandwidth"]
        memory = f"{v['memory']['Private_Dirty'] / 1e6:.0f} ({v['kv_cache_bytes'] / 1e6:.0f})"
        rms = "; ".join(f"{v[p]['worst_rms']:.2g}{'' if v[p]['comparable'] else ' **!**'}" for p in PHASES)
        equal = "; ".join(f"{v[p]['n_equal']}/{v[p]['n']}" for p in PHASES)
        rows.append((variant, *speeds, f"{used:.0%}" if v["decode"]["comparable"] else "–", spread(v["first_token_s"], 2), memory, rms, equal))
    again = [quartiles(result["variants"]["edgemoe"][phase]["again"]) for phase in PHASES]
    rows.append(("edgemoe, last turn / first", "", again[0], "", again[1], *[""] * 5))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def heading(result: dict, options) -> str:
    versions = ", ".join(dict.fromkeys(v["version"] for v in result["variants"].values()))
    about = "; ".join(f"{name}: {v['about']}" for name, v in result["variants"].items())
    n_ctx, n_batch = context_size(options)
    return (
        f"**{result['model']}**, {result['bytes'] / 1e9:.2f} GB, {result['threads']} thread(s) on {result['cpu']} ({os.cpu_count()} cores); edgemoe {result['commit']}, {versions}; "
        f"everything on the CPU, page cache warm. Prompt of {options.n_prompt}, decode of {options.n_decode} random tokens after {N_BEFORE}, n_ctx {n_ctx}, n_ubatch {n_batch}; "
        f"{options.rounds} rounds, {options.starts} start(s): medians (min to max), ratios within rounds (quartiles). {result['bytes_per_token'] / 1e6:.1f} MB of weights per decoded token; "
        f"memory reads at {result['bandwidth'] / 1e9:.1f} GB/s with this many threads (memcmp, both streams, best of 10). Private: Private_Dirty after the run. "
        f"rms: worst round's difference to plain in standard deviations of its logits; not comparable above {MAX_RMS}. Settings: {about}."
    )


def bench(path: Path, threads: int, options) -> dict:
    """Everything that is known about one model with so many threads."""
    from edgemoe import __version__, machine

    git = subprocess.run(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True)
    result = {"model": path.name, "bytes": path.stat().st_size, "threads": threads, "cpu": machine.cpu_name(), "commit": git.stdout.strip() or __version__}
    result |= {"bytes_per_token": bytes_per_token(path), "bandwidth": read_bandwidth(threads)}
    warm_page_cache(path)
    with tempfile.TemporaryDirectory() as scratch:
        children, starts = open_children(options.variants, path, threads, options, scratch)
        records = run_rounds(children, options)
        result["variants"] = {
            variant: {
                **{phase: summary(records, variant, phase) for phase in PHASES},
                **{key: child.hello[key] for key in ("about", "version")},
                "first_token_s": starts[variant],
                "memory": child.ask(memory=True),
                "kv_cache_bytes": child.kv_cache_bytes(),
            }
            for variant, child in children.items()
        }
        for child in children.values():
            child.close()
    return {**result, "records": records}


def chosen_variants(options, parser) -> list[str]:
    names = options.variants.split(",") + ["edgemoe exact"] * options.exact
    unknown = set(names) - set(VARIANTS)
    if unknown or not {"edgemoe", "plain"} <= set(names):
        parser.error(f"--variants: found {','.join(names)}, wanted some of {','.join(VARIANTS)}, always with edgemoe (the base of ratios) and plain (of parity)")
    if "ik" in names and not options.ik_python:
        print("ik is left out: no --ik-python")
        names.remove("ik")
    return [v for v in VARIANTS if v in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="GGUFs of one file each")
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2], help="a list; each is a full run (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=3, help="how often each process is started for the time to its first token")
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-decode", type=int, default=24)
    parser.add_argument("--variants", default="edgemoe,default,plain,ik")
    parser.add_argument("--exact", action="store_true", help="edgemoe with ggml's kernels, too")
    parser.add_argument("--ik-python", help="interpreter of the environment with ik-llama-cpp-python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--logits", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
        return 0
    options.variants = chosen_variants(options, parser)
    results = []
    for path in options.models:
        for threads in options.threads:
            results.append(bench(path, threads, options))
            print(f"\n{heading(results[-1], options)}\n\n{table(results[-1])}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(v[p]["comparable"] for r in results for v in r["variants"].values() for p in PHASES) else 1


if __name__ == "__main__":
    sys.exit(main())
