"""Every kernel against two others: numpy, which multiplies gguf's dequantised weights with the rounded activations in double precision, and ggml.

A kernel may differ from the exact sum by float rounding alone: TOLERANCE of the magnitude, the sum over groups of 32 of (largest |weight| * sum of
|activation|). Weights, activations and results each end where a page without access begins: going past the end is a crash, and not luck. A CPU that
lacks an instruction set skips its tests; one that has it and finds no kernel fails.
"""

import ctypes
import mmap
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import cffi
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from llama_cpp import llama_cpp

from edgemoe import _native

TOLERANCE = 2e-6
UNDERFLOW = 1e-38   # products of the smallest scales are denormal floats, where nothing relative holds


# Activations [tokens, n] as ggml's CPU backend rounds them: what weights are multiplied with, and what the min of a block is, where it has one.

def divide(a, b):
    """As floats, and 0 where b is."""
    return np.divide(np.float32(a), b, out=np.zeros_like(b), where=b != 0)


def q8_K(x):
    """By the first element of the largest magnitude, with its sign."""
    blocks = x.reshape(len(x), -1, 256)
    scale = divide(-127, np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1))
    return (np.rint(scale * blocks) * divide(1, scale).astype(float)).reshape(x.shape), None


def q8_1(x):
    """Q8_0, with d * sum of each block, which is rounded to f16 from a d that is not."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    q, d = np.rint(divide(127, largest) * blocks), largest / np.float32(127)
    sums = (d * q.sum(-1, keepdims=True)).astype(np.float16)[..., 0]
    return (q * d.astype(np.float16).astype(float)).reshape(x.shape), sums.astype(float)


def unrounded(x):
    return x.astype(float), None


# Rounding of the activation, and the bytes in a block where its f16 scales begin. MXFP4's scale is one byte; a float weight is its own scale.
TYPES = {
    "q4_K": (q8_K, (0, 2)), "q5_K": (q8_K, (0, 2)), "q6_K": (q8_K, (208,)), "q3_K": (q8_K, (108,)), "iq4_xs": (q8_K, (0,)),
    "q8_0": (q8_1, (0,)), "q4_0": (q8_1, (0,)), "q5_0": (q8_1, (0,)), "iq4_nl": (q8_1, (0,)), "mxfp4": (q8_1, ()),
    "q4_1": (q8_1, (0, 2)), "q5_1": (q8_1, (0, 2)), "f16": (unrounded, ()), "bf16": (unrounded, ()), "f32": (unrounded, ()),
}
QUANTISATION = {name: GGMLQuantizationType[name.upper()] for name in TYPES}
FLOATS = ("f16", "bf16", "f32")
HAS_MIN = ("q4_1", "q5_1")
FORMS = ("dot", "tiled")
AVX2 = {"avx2", "fma", "f16c"}
NEEDS = {"avx2": AVX2, "avxvnni": AVX2 | {"avx_vnni"}, "avx512": AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}}
CPUINFO = Path("/proc/cpuinfo")
CPU_HAS = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set()

# By block size. Tiles are of 16 rows and passes of 8 tokens, with what is left behind them; blocks of 32 go in pairs, with an odd one behind.
LENGTHS = {256: (256, 512, 768, 2048, 2816), 32: (32, 64, 96, 160, 2880), 1: (1, 7, 33, 100)}
LENGTH_OF_MANY_ROWS = {256: 512, 32: 96, 1: 33}
N_ROWS, N_TOKENS = (1, 3, 5, 16, 17, 33), (1, 2, 3, 5, 8, 9, 17)
GAPS = {"mxfp4": (1, 2, 34), "f32": (4, 36)}    # bytes between rows: multiples of the type's alignment, which is 2 for the others
SCALES = {
    "usual": lambda rng, shape: rng.uniform(-0.02, 0.02, shape),
    "zero": lambda rng, shape: np.zeros(shape),
    "largest": lambda rng, shape: rng.choice([-65504.0, 65504.0], shape),
    "denormal": lambda rng, shape: rng.integers(-1023, 1024, shape) * 2.0**-24,
}
# Bytes of values whose sums overflow first when all activations are 127 or -127. No block is all zero under a scale, which no quantiser writes:
# kernels that add an offset to the weights leave its rounding there.
EXTREMES = ([0x00, 0x0F], [0x77], [0x7F], [0x80, 0x8F], [0xEF, 0xFF], [0x00, 0x7F, 0x80, 0xFF])
E8M0 = {"usual": (118, 124), "zero": (0, 1), "largest": (240, 241), "denormal": (0, 3)}
ACTIVATIONS = {
    "usual": lambda rng, shape: rng.uniform(-3, 3, shape),
    "zero": lambda rng, shape: np.zeros(shape),
    "tiny": lambda rng, shape: rng.uniform(0, 1e-3, shape),             # their scale is denormal in f16
    "tiniest": lambda rng, shape: rng.uniform(-1e-7, 1e-7, shape),      # theirs is 0
    "largest": lambda rng, shape: np.full(shape, 3.0) * rng.choice([-1, 1], (shape[0], 1)),
    "zero but for a third": lambda rng, shape: np.where(np.arange(shape[1]) < shape[1] / 3, rng.uniform(-3, 3, shape), 0),
}


def random_rows(rng, name, n, n_rows, scales="usual", values=range(256)):
    """uint8 [rows, blocks, bytes]: bytes drawn from `values`, but for the scales. Float weights are drawn as scales."""
    block, size = GGML_QUANT_SIZES[QUANTISATION[name]]
    shape = (n_rows, n // block)
    if name in FLOATS:
        return quantize(SCALES[scales](rng, shape).astype(np.float32), QUANTISATION[name]).view(np.uint8).reshape(*shape, size)
    rows = rng.choice(np.array(values, np.uint8), (*shape, size))
    for at in TYPES[name][1]:
        rows[..., at:at + 2] = SCALES[scales](rng, (*shape, 1)).astype(np.float16).view(np.uint8)
    if name == "mxfp4":
        rows[..., 0] = rng.integers(*E8M0[scales], shape)
    return rows


def random_activations(rng, n, n_tokens, kind="usual"):
    return ACTIVATIONS[kind](rng, (n_tokens, n)).astype(np.float32)


def expected(name, rows, x):
    """[tokens, rows] products in double precision, and their magnitudes."""
    w = dequantize(rows.reshape(len(rows), -1), QUANTISATION[name]).astype(float)
    rounded, sums = TYPES[name][0](x)
    groups = np.arange(0, x.shape[1], 32)
    magnitude = np.add.reduceat(np.abs(rounded), groups, axis=1) @ np.maximum.reduceat(np.abs(w), groups, axis=1).T
    y = rounded @ w.T
    if name in HAS_MIN:
        y += (sums - np.add.reduceat(rounded, groups, axis=1)) @ rows[..., 2:4].copy().view(np.float16)[..., 0].astype(float).T
    return y, magnitude


@lru_cache(maxsize=1)
def cases(name):
    """(title, case) for what every kernel of the type must get right."""
    block = GGML_QUANT_SIZES[QUANTISATION[name]][0]
    many = LENGTH_OF_MANY_ROWS[block]
    shapes = [dict(n=n) for size, lengths in LENGTHS.items() if size >= block for n in lengths]
    shapes += [dict(n=many, n_rows=r, n_tokens=t) for r, t in product(N_ROWS, N_TOKENS)]
    shapes += [dict(n=many, n_rows=17, gap=gap) for gap in GAPS.get(name, (2, 34))]
    shapes += [dict(n=n, scales=scales) for scales in SCALES for n in (768, many)]
    shapes += [dict(n=768, scales="zero", values=[0])] + [dict(n=768, activations=activations) for activations in ACTIVATIONS]
    shapes += [dict(n=768, n_tokens=4, values=values, activations="largest") for values in EXTREMES]
    rng, made = np.random.default_rng(0), []
    for shape in shapes:
        case = SimpleNamespace(**{**dict(n_rows=3, n_tokens=2, gap=0, scales="usual", values=range(256), activations="usual"), **shape})
        case.rows = random_rows(rng, name, case.n, case.n_rows, case.scales, case.values)
        case.x = random_activations(rng, case.n, case.n_tokens, case.activations)
        case.expected, case.magnitude = expected(name, case.rows, case.x)
        made.append((", ".join(f"{k} {v}" for k, v in shape.items()), case))
    return made


@lru_cache(maxsize=1)
def broken_cases(name):
    """(title, rows, x, where in [tokens, rows] the result is no number): one scale or one activation is infinite or NaN."""
    rng, made = np.random.default_rng(1), []
    rows, x = random_rows(rng, name, 512, 3), random_activations(rng, 512, 3)
    one_row = np.eye(3, dtype=bool)[[1, 1, 1]]
    for value in (np.inf, -np.inf, np.nan):
        its_bytes = quantize(np.full(1, value, np.float32), QUANTISATION[name if name in FLOATS else "f16"]).view(np.uint8)
        for at in (0,) if name in FLOATS else TYPES[name][1]:
            broken = rows.copy()
            broken[1, -1, at:at + len(its_bytes)] = its_bytes
            made.append((f"{value} as the scale at byte {at}", broken, x, one_row))
        broken = x.copy()
        broken[1, 300] = value
        made.append((f"{value} as an activation", rows, broken, one_row.T))
    return made


def guarded(room=1 << 18, prot_none=0):
    """Bytes that end where a page without access begins."""
    memory = np.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + room), ctypes.c_size_t(mmap.PAGESIZE), prot_none) == 0
    return memory[:room]


def last_of(memory, dtype, *shape):
    return memory[len(memory) - int(np.prod(shape)) * np.dtype(dtype).itemsize:].view(dtype).reshape(shape)


W, X, Y = guarded(), guarded(), guarded()


def multiply(name, isa, form, rows, x, gap=0):
    """(code, y [tokens, rows]). What was not written of y is NaN."""
    ffi, lib = _native.load()
    row_bytes = rows[0].size + gap
    w = last_of(W, np.uint8, len(rows) * row_bytes - gap)
    w[:] = 255      # in the gap, a NaN to who takes it for a float
    for r, row in enumerate(rows):
        w[r * row_bytes:][:row.size] = row.ravel()
    x_there, y = last_of(X, np.float32, *x.shape), last_of(Y, np.float32, len(x), len(rows))
    x_there[:], y[:] = x, np.nan
    code = lib.edgemoe_kernel_multiply(
        name.encode(), isa.encode() if isa else ffi.NULL, form == "tiled", ffi.from_buffer(w), row_bytes, x.shape[1], len(rows),
        ffi.from_buffer("float[]", x_there), len(x), ffi.from_buffer("float[]", y))
    return code, y.copy()


def assert_close(y, wanted, magnitude, title):
    far = ~(np.abs(y - wanted) <= TOLERANCE * magnitude + UNDERFLOW)
    for t, r in np.argwhere(far):
        pytest.fail(f"{title}: {far.sum()} of {far.size} are wrong; token {t}, row {r}: {y[t, r]}, wanted {wanted[t, r]} of {magnitude[t, r]:.3g}")


@pytest.mark.parametrize("name, isa, form", [pytest.param(*k, id="-".join(k)) for k in product(TYPES, NEEDS, FORMS)])
def test_kernel(name, isa, form):
    def compute(rows, x, gap=0):
        code, y = multiply(name, isa, form, rows, x, gap)
        if code == 1 and (missing := NEEDS[isa] - CPU_HAS):
            pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
        assert code == 0, "no such kernel" if code == 1 else _native.last_error()
        return y

    for title, case in cases(name):
        assert_close(compute(case.rows, case.x, case.gap), case.expected, case.magnitude, title)
    # What is no number shows in its row or its token, and nowhere else.
    for title, rows, x, broken in broken_cases(name):
        np.testing.assert_array_equal(~np.isfinite(compute(rows, x)), broken, title)


GGML = """
typedef struct ggml_context ggml_context; typedef struct ggml_tensor ggml_tensor; typedef struct ggml_cgraph ggml_cgraph;
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
ggml_context * ggml_init(struct ggml_init_params params); void ggml_free(ggml_context * ctx);
ggml_tensor * ggml_new_tensor_2d(ggml_context * ctx, int type, int64_t ne0, int64_t ne1);
void * ggml_get_data(const ggml_tensor * tensor);
ggml_tensor * ggml_mul_mat(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_cgraph * ggml_new_graph(ggml_context * ctx); void ggml_build_forward_expand(ggml_cgraph * graph, ggml_tensor * tensor);
int ggml_graph_compute_with_ctx(ggml_context * ctx, ggml_cgraph * graph, int n_threads);
"""


def ggml_multiply(name, rows, x):
    """The same product by ggml's CPU backend."""
    ffi = cffi.FFI()
    ffi.cdef(GGML)
    # libllama's handle finds ggml's functions too. Opening libggml-cpu.so by its path could load a second ggml.
    g = ffi.dlopen(ffi.cast("void *", llama_cpp._lib._handle))
    ctx = g.ggml_init({"mem_size": 16 << 20, "mem_buffer": ffi.NULL, "no_alloc": False})
    operands = []
    for kind, array in ((QUANTISATION[name], rows), (GGMLQuantizationType.F32, x)):
        operands.append(g.ggml_new_tensor_2d(ctx, kind, x.shape[1], len(array)))
        ffi.memmove(g.ggml_get_data(operands[-1]), ffi.from_buffer(array), array.nbytes)
    y, graph = g.ggml_mul_mat(ctx, *operands), g.ggml_new_graph(ctx)
    g.ggml_build_forward_expand(graph, y)
    assert g.ggml_graph_compute_with_ctx(ctx, graph, 1) == 0
    result = np.frombuffer(ffi.buffer(g.ggml_get_data(y), 4 * len(x) * len(rows)), np.float32).reshape(len(x), len(rows)).copy()
    g.ggml_free(ctx)
    return result


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("name", TYPES)
def test_ggml_computes_the_same(name, n_tokens):
    rng = np.random.default_rng(2)
    rows, x = random_rows(rng, name, 768, 33), random_activations(rng, 768, n_tokens)
    if name in FLOATS:
        x = np.rint(x * 32) / np.float32(32)    # ggml rounds activations to F16 and BF16 for such weights, our kernels do not: these are in both
    (wanted, magnitude), theirs = expected(name, rows, x), ggml_multiply(name, rows, x)
    assert_close(theirs, wanted, magnitude, "ggml against numpy")
    for isa, form in product(NEEDS, FORMS):
        code, y = multiply(name, isa, form, rows, x)
        if code == 0:   # test_kernel knows which must be there
            assert_close(y, theirs, 2 * magnitude, f"{isa} {form} against ggml")


# d = 2, min = 0.5; the first 16 values are 3, the others 5: weights of 6.5 and of 10.5.
BLOCK_OF_Q4_1 = np.frombuffer(np.array([2, 0.5], np.float16).tobytes() + 16 * b"\x53", np.uint8).reshape(1, 1, 20)


@pytest.mark.parametrize("form", FORMS)
def test_a_product_by_hand(form):
    best = _native.text(_native.load()[1].edgemoe_best_isa())
    if best == "none":
        pytest.skip("this CPU has none of the instruction sets")
    x = np.zeros((1, 32), np.float32)
    x[0, [0, 31]] = 127, -126
    for isa in (best, None):
        assert multiply("q4_1", isa, form, BLOCK_OF_Q4_1, x) == (0, 127 * 6.5 - 126 * 10.5)


@pytest.mark.parametrize("name, isa, n, message", [
    ("q9_K", "avx2", 32, "type q9_K, wanted one of ggml's"),
    ("q4_1", "mmx", 32, "instruction set mmx, wanted avx2, avxvnni or avx512"),
    ("q4_1", "avx2", 48, "48 elements per row, wanted a multiple of 32"),
    ("q4_1", "avx2", 0, "0 elements per row, wanted a multiple of 32"),
])
def test_wrong_arguments_are_refused(name, isa, n, message):
    code, y = multiply(name, isa, "dot", BLOCK_OF_Q4_1, np.ones((1, n), np.float32))
    assert (code, _native.last_error()) == (-1, message) and np.isnan(y).all()
