#!/usr/bin/env python3
"""edgemoe's kernels against ggml's plain ones, type by type, on the same rows in memory. A kernel stays only where it wins.

    .venv/bin/python scripts/bench_kernels.py [--threads 2] [--types q4_K,q8_0] [--json OUT.json]

decode: one activation times rows that no cache holds, in GB/s of weights read. prompt: 32 activations times 6144 rows, in billions of multiply-adds per second; edgemoe's side
includes turning the rows into tiles. The sides take turns within rounds; medians of the rounds. Inside the window is one call, which also quantises the activations.
A figure counts only with its parity: results of both sides differ by less than 1e-4 of their standard deviation (1e-2 for F16 and BF16, where ggml rounds activations and edgemoe does not).
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import cffi
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp
from tqdm import tqdm

from edgemoe import _native

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tiny_models import quantize  # noqa: E402

TYPES = ("q4_K", "q5_K", "q6_K", "q3_K", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_xs", "iq4_nl", "mxfp4", "f16", "bf16", "f32")
ISAS = ("avx512", "avxvnni", "avx2")
N, N_DRAWN, N_TOKENS, N_PROMPT_ROWS = 2048, 512, 32, 6144
BYTES = 1 << 30
SETTLE = 0.02  # seconds; until ggml's threads, which are not those of our side here, have gone to sleep
GGML = """
typedef struct ggml_context ggml_context; typedef struct ggml_tensor ggml_tensor; typedef struct ggml_cgraph ggml_cgraph;
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
ggml_context * ggml_init(struct ggml_init_params params); void ggml_free(ggml_context * ctx);
ggml_tensor * ggml_new_tensor_2d(ggml_context * ctx, int type, int64_t ne0, int64_t ne1);
ggml_tensor * ggml_view_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
void * ggml_get_data(const ggml_tensor * tensor);
ggml_tensor * ggml_mul_mat(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_cgraph * ggml_new_graph(ggml_context * ctx); void ggml_build_forward_expand(ggml_cgraph * graph, ggml_tensor * tensor);
int ggml_graph_compute_with_ctx(ggml_context * ctx, ggml_cgraph * graph, int n_threads);
"""


class Rows:
    """BYTES of weight rows inside a ggml context, so that both sides read the same memory."""

    def __init__(self, kind: str, threads: int):
        self.kind, self.threads = kind, threads
        self.ffi = cffi.FFI()
        self.ffi.cdef(GGML)
        self.ggml = self.ffi.dlopen(llama_cpp._lib._name)  # finds ggml's functions too
        type_ = GGMLQuantizationType[kind.upper()]
        block, size = GGML_QUANT_SIZES[type_]
        self.row_bytes = N // block * size
        self.n_rows = BYTES // self.row_bytes // N_PROMPT_ROWS * N_PROMPT_ROWS
        self.context = self.ggml.ggml_init({"mem_size": BYTES + (256 << 20), "mem_buffer": self.ffi.NULL, "no_alloc": False})
        self.weights = self.ggml.ggml_new_tensor_2d(self.context, type_, N, self.n_rows)
        self.data = self.ggml.ggml_get_data(self.weights)
        random = np.random.default_rng(0)
        drawn = np.ascontiguousarray(quantize(random.standard_normal((N_DRAWN, N), dtype=np.float32), kind.upper())).view(np.uint8).reshape(N_DRAWN, self.row_bytes)
        memory = np.frombuffer(self.ffi.buffer(self.data, self.n_rows * self.row_bytes), np.uint8).reshape(self.n_rows, self.row_bytes)
        for start in range(0, self.n_rows, 4096):
            chosen = random.integers(0, N_DRAWN, min(4096, self.n_rows - start))
            memory[start : start + 4096] = drawn[chosen]
        self.x = random.standard_normal((N_TOKENS, N), dtype=np.float32)

    def close(self):
        self.ggml.ggml_free(self.context)

    def graph(self, n_rows: int, n_tokens: int):
        """Computes the first n_rows times n_tokens by ggml; returns a function that does it and gives y [n_tokens, n_rows]."""
        g, ffi = self.ggml, self.ffi
        w = g.ggml_view_2d(self.context, self.weights, N, n_rows, self.row_bytes, 0)
        x = g.ggml_new_tensor_2d(self.context, GGMLQuantizationType.F32, N, n_tokens)
        ffi.memmove(g.ggml_get_data(x), ffi.from_buffer(self.x[:n_tokens]), n_tokens * N * 4)
        y, graph = g.ggml_mul_mat(self.context, w, x), g.ggml_new_graph(self.context)
        g.ggml_build_forward_expand(graph, y)

        def compute():
            assert g.ggml_graph_compute_with_ctx(self.context, graph, self.threads) == 0
            return np.frombuffer(ffi.buffer(g.ggml_get_data(y), n_rows * n_tokens * 4), np.float32).reshape(n_tokens, n_rows)

        return compute

    def kernel(self, isa: str, n_rows: int, n_tokens: int, pool: ThreadPoolExecutor):
        """The same by edgemoe, rows shared out to the threads; None when this CPU has no such kernel."""
        ffi, lib = _native.load()
        base, x = _native.number(self.data), ffi.from_buffer("float[]", self.x)
        edges = [n_rows * t // self.threads // 16 * 16 for t in range(self.threads)] + [n_rows]
        parts = [np.empty((n_tokens, last - first), np.float32) for first, last in zip(edges, edges[1:])]

        def part(t):
            w = ffi.cast("void *", base + edges[t] * self.row_bytes)
            y = ffi.from_buffer("float[]", parts[t], require_writable=True)
            return lib.edgemoe_kernel_multiply(self.kind.encode(), isa.encode(), n_tokens > 1, w, self.row_bytes, N, edges[t + 1] - edges[t], x, n_tokens, y)

        def compute():
            assert list(pool.map(part, range(self.threads))) == [0] * self.threads
            return np.concatenate(parts, axis=1)

        return compute if part(0) == 0 else None


def measure(kind: str, threads: int, rounds: int) -> dict:
    """{"decode": {side: GB/s}, "prompt": {side: G multiply-adds/s}}; sides: ggml and ISAS."""
    rows, result = Rows(kind, threads), {}
    with ThreadPoolExecutor(threads) as pool:
        for phase, n_rows, n_tokens, amount in (("decode", rows.n_rows, 1, rows.n_rows * rows.row_bytes), ("prompt", N_PROMPT_ROWS, N_TOKENS, N_PROMPT_ROWS * N_TOKENS * N)):
            sides = {"ggml": rows.graph(n_rows, n_tokens)} | {isa: rows.kernel(isa, n_rows, n_tokens, pool) for isa in ISAS}
            sides = {name: compute for name, compute in sides.items() if compute}
            wanted, speeds = sides["ggml"]().copy(), {name: [] for name in sides}
            for name, compute in sides.items():
                error = np.sqrt(np.mean((compute() - wanted) ** 2)) / wanted.std()
                assert error < (1e-2 if kind in ("f16", "bf16") else 1e-4), f"{kind} {name} {phase}: results differ by {error:.2g}"
            for _ in range(rounds if phase == "decode" else 5 * rounds):
                for name, compute in sides.items():
                    time.sleep(SETTLE)
                    start = time.perf_counter()
                    compute()
                    speeds[name].append(amount / (time.perf_counter() - start) / 1e9)
            result[phase] = {name: median(s) for name, s in speeds.items()}
    rows.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {kind: measure(kind, options.threads, options.rounds) for kind in tqdm(options.types.split(","), disable=not sys.stderr.isatty())}
    print(f"{options.threads} threads; decode in GB/s of weights, prompt in G multiply-adds/s\n")
    heads = [f"{phase}: {side}" for phase in ("decode", "prompt") for side in ("ggml", *ISAS)]
    print("| type | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads))
    for kind, result in results.items():
        cells = [f"{result[phase][side]:.1f}" if side in result[phase] else "" for phase in ("decode", "prompt") for side in ("ggml", *ISAS)]
        print(f"| {kind} | " + " | ".join(cells) + " |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
