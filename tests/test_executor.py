"""The executor alone: an expert layer on our device, with routing that no model should produce but a bug might. With ggml's kernels and with ours."""

from pathlib import Path

import cffi
import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from edgemoe import _native
from edgemoe.package import Source

GGML = """
typedef struct ggml_context ggml_context; typedef struct ggml_tensor ggml_tensor; typedef struct ggml_cgraph ggml_cgraph;
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
ggml_context * ggml_init(struct ggml_init_params params);
void ggml_free(ggml_context * ctx);
ggml_tensor * ggml_new_tensor_3d(ggml_context * ctx, int type, int64_t ne0, int64_t ne1, int64_t ne2);
ggml_tensor * ggml_view_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
ggml_tensor * ggml_set_name(ggml_tensor * tensor, const char * name);
ggml_tensor * ggml_mul_mat_id(ggml_context * ctx, ggml_tensor * as, ggml_tensor * b, ggml_tensor * ids);
ggml_tensor * ggml_swiglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_mul(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_add(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_cgraph * ggml_new_graph(ggml_context * ctx);
void ggml_build_forward_expand(ggml_cgraph * graph, ggml_tensor * tensor);
void * ggml_backend_alloc_ctx_tensors_from_buft(ggml_context * ctx, void * buft);
void * ggml_backend_cpu_buffer_type(void);
void ggml_backend_buffer_free(void * buffer);
void ggml_backend_tensor_set(ggml_tensor * tensor, const void * data, size_t offset, size_t size);
void ggml_backend_tensor_get(const ggml_tensor * tensor, void * data, size_t offset, size_t size);
void * ggml_backend_dev_by_name(const char * name);
void * ggml_backend_dev_init(void * device, const char * params);
int ggml_backend_graph_compute(void * backend, ggml_cgraph * graph);
void ggml_backend_free(void * backend);
"""
F32, I32 = 0, 26
FAILED, SUCCESS = -1, 0


@pytest.fixture(scope="module")
def ggml():
    ffi = cffi.FFI()
    ffi.cdef(GGML)
    # libllama's handle finds ggml's functions too. Opening libggml.so by its path could load a second ggml with a registry of its own.
    return ffi, ffi.dlopen(str(Path(llama_cpp.__file__).parent / "lib" / "libllama.so"))


class Layer:
    """The first expert layer of an opened model; every object is freed at the end. Arrays are [token, expert of the token, element]."""

    def __init__(self, ggml, path, isa):
        self.ffi, self.g = ggml
        self.native_ffi, self.native = _native.load()
        self.source = Source(path)
        self.model = _native.opened(self.native.edgemoe_model_open(self.source.handle, isa.encode(), self.ffi.NULL))
        assert self.native.edgemoe_model_loaded(self.model) == 0, _native.last_error()
        layer = self.source.layers[0]
        buffer_type = self.ffi.cast("void *", int(self.native_ffi.cast("uintptr_t", self.native.edgemoe_model_buffer_type(self.model))))
        self.contexts = [self._context() for _ in range(3)]
        weights, self.inputs, self.nodes = self.contexts
        self.weights = {}
        for p in layer.projections:
            tensor = self.g.ggml_new_tensor_3d(weights, GGMLQuantizationType[p.type.upper()], p.n_in, p.n_out, layer.n_expert)
            self.weights[p.name.split("_")[1]] = self.g.ggml_set_name(tensor, p.name.encode())
        self.n_embd, self.n_ff, self.n_expert = p.n_out, p.n_in, layer.n_expert  # down is the last projection
        self.buffers = [self.g.ggml_backend_alloc_ctx_tensors_from_buft(weights, buffer_type)]
        self.backend = self.g.ggml_backend_dev_init(self.g.ggml_backend_dev_by_name(b"EdgeMoE"), self.ffi.NULL)

    def _context(self):
        return self.g.ggml_init({"mem_size": 1 << 20, "mem_buffer": self.ffi.NULL, "no_alloc": True})

    def _allocate(self, context):
        self.buffers.append(self.g.ggml_backend_alloc_ctx_tensors_from_buft(context, self.g.ggml_backend_cpu_buffer_type()))

    def _input(self, array):
        n_2, n_1, n_0 = (1,) * (3 - array.ndim) + array.shape
        tensor = self.g.ggml_new_tensor_3d(self.inputs, I32 if array.dtype == np.int32 else F32, n_0, n_1, n_2)
        self._allocate(self.inputs)
        self.g.ggml_backend_tensor_set(tensor, self.ffi.from_buffer(array), 0, array.nbytes)
        return tensor

    def _ids(self, ids, spare_columns):
        """`spare_columns`: a strided view into a wider tensor, as llama.cpp's ids are."""
        n_tokens, n_used = ids.shape
        wide = np.full((n_tokens, n_used + spare_columns), 10_000, np.int32)
        wide[:, :n_used] = ids
        return self.g.ggml_view_2d(self.nodes, self._input(wide), n_used, n_tokens, 4 * (n_used + spare_columns), 0)

    def _compute(self, y, *shape):
        """(status, result)."""
        graph = self.g.ggml_new_graph(self.nodes)
        self.g.ggml_build_forward_expand(graph, y)
        self._allocate(self.nodes)
        status = self.g.ggml_backend_graph_compute(self.backend, graph)
        out = np.zeros(shape, np.float32)
        self.g.ggml_backend_tensor_get(y, self.ffi.from_buffer(out), 0, out.nbytes)
        return status, out

    def product(self, x, ids, spare_columns=0):
        """down[ids] · x, for one x per token or one per pair."""
        y = self.g.ggml_mul_mat_id(self.nodes, self.weights["down"], self._input(x), self._ids(ids, spare_columns))
        return self._compute(y, *ids.shape, self.n_embd)

    def expert(self, x, ids, router_weights, spare_columns=0):
        """The whole layer as llama.cpp builds it: gate and up, SwiGLU, down, router weights, and the sum over the experts of a token."""
        g, nodes, (n_tokens, n_used) = self.g, self.nodes, ids.shape
        x, ids = self._input(x), self._ids(ids, spare_columns)
        hidden = g.ggml_swiglu_split(nodes, *(g.ggml_mul_mat_id(nodes, self.weights[name], x, ids) for name in ("gate", "up")))
        weighted = g.ggml_mul(nodes, g.ggml_mul_mat_id(nodes, self.weights["down"], hidden, ids), self._input(router_weights[..., None]))
        row = 4 * self.n_embd
        columns = [g.ggml_view_2d(nodes, weighted, self.n_embd, n_tokens, n_used * row, k * row) for k in range(n_used)]
        total = columns[0]
        for column in columns[1:]:
            total = g.ggml_add(nodes, total, column)
        return self._compute(total if n_used > 1 else weighted, n_tokens, self.n_embd)

    def down_through_ggml(self):
        """What ggml reads back from our buffer: the stacked tensor."""
        out = np.zeros((self.n_expert, self.n_embd, self.n_ff), np.float32)
        self.g.ggml_backend_tensor_get(self.weights["down"], self.ffi.from_buffer(out), 0, out.nbytes)
        return out

    def fault(self):
        return _native.text(self.native.edgemoe_model_fault(self.model))

    def stats(self):
        stats = self.native_ffi.new("struct edgemoe_stats *")
        self.native.edgemoe_model_get_stats(self.model, stats)
        return stats

    def close(self):
        self.g.ggml_backend_free(self.backend)
        for buffer in self.buffers:
            self.g.ggml_backend_buffer_free(buffer)
        for context in self.contexts:
            self.g.ggml_free(context)
        self.native.edgemoe_model_close(self.model)


def best_isa():
    isa = _native.best_isa()
    if isa == "none":
        pytest.skip("this CPU has none of the instruction sets")
    return isa


@pytest.fixture(params=["ggml, stacked", "ggml, package", "kernels, stacked", "kernels, package"])
def layer(request, ggml, models, packages):
    kernels, kind = request.param.split(", ")
    gguf = models("qwen3moe", "F32")
    made = Layer(ggml, gguf if kind == "stacked" else packages(gguf), best_isa() if kernels == "kernels" else "none")
    made.is_ours = kernels == "kernels"
    made.expected = {t.name.split("_")[1]: np.array(t.data) for t in GGUFReader(gguf).tensors if "blk.0.ffn" in t.name and "_exps" in t.name}
    yield made
    made.close()


ROUTING = {
    "one token": [[3, 0, 7, 15]],
    "one expert": [[3], [0], [3]],
    "two tokens share an expert": [[1, 2], [2, 5]],
    "an expert id repeated in a token": [[4, 4, 9], [9, 9, 9]],
    "all to one": [[6]] * 33,
}


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize("spare_columns", [0, 5])
@pytest.mark.parametrize("name", ROUTING)
def test_products_are_right(name, spare_columns, per_pair, layer):
    ids = np.array(ROUTING[name], np.int32)
    x = random(len(ids), ids.shape[1] if per_pair else 1, layer.n_ff)
    status, result = layer.product(x, ids, spare_columns)
    assert status == SUCCESS and layer.fault() == ""
    expected = np.einsum("tkoi,tki->tko", layer.expected["down"][ids], np.broadcast_to(x, (*ids.shape, layer.n_ff)))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spare_columns", [0, 5])
@pytest.mark.parametrize("name", ROUTING)
def test_whole_experts_are_right(name, spare_columns, layer):
    ids = np.array(ROUTING[name], np.int32)
    x, router_weights = random(len(ids), 1, layer.n_embd), random(*ids.shape)
    status, result = layer.expert(x, ids, router_weights, spare_columns)
    assert status == SUCCESS and layer.fault() == ""
    gate, up = (np.einsum("tkfi,ti->tkf", layer.expected[p][ids], x[:, 0]) for p in ("gate", "up"))
    expected = np.einsum("tkof,tkf,tk->to", layer.expected["down"][ids], gate / (1 + np.exp(-gate)) * up, router_weights)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    assert layer.stats().n_events == 1 and layer.stats().n_fused == layer.is_ours


@pytest.mark.parametrize("expert_type", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("name", ROUTING)
def test_our_kernels_round_as_ggml_does(name, expert_type, ggml, models, packages):
    ids = np.array(ROUTING[name], np.int32)
    results = []
    for isa in ("none", best_isa()):
        layer = Layer(ggml, packages(models("qwen3moe", expert_type)), isa)
        results.append(layer.product(random(len(ids), 1, layer.n_ff), ids)[1])
        layer.close()
    np.testing.assert_allclose(*results, rtol=0, atol=1e-6 * np.abs(results[0]).max())


def test_counters(layer):
    ids = np.array([[1, 2], [2, 5], [2, 2]], np.int32)
    layer.product(random(3, 1, layer.n_ff), ids)
    stats = layer.stats()
    assert (stats.n_events, stats.n_pairs, stats.n_accesses, stats.n_computed_on_cpu, stats.n_fused) == (1, 6, 3, 3, 0)


@pytest.mark.parametrize("bad", [-1, 16, 2**31 - 1, -(2**31)])
def test_an_id_that_names_no_expert_is_refused(bad, layer):
    status, _ = layer.product(random(2, 1, layer.n_ff), np.array([[0, 1], [2, bad]], np.int32))
    assert status == FAILED
    assert f"token 1 is routed to expert {bad}, wanted 0 to 15" in layer.fault()


def test_weights_can_be_read_back(layer):
    np.testing.assert_array_equal(layer.down_through_ggml(), layer.expected["down"])
