"""The executor alone: one expert product on our device, with routing that no model should produce but a bug might."""

from pathlib import Path

import cffi
import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader

from edgemoe import _native
from edgemoe.package import Source

GGML = """
typedef struct ggml_context ggml_context; typedef struct ggml_tensor ggml_tensor; typedef struct ggml_cgraph ggml_cgraph;
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
ggml_context * ggml_init(struct ggml_init_params params);
void ggml_free(ggml_context * ctx);
ggml_tensor * ggml_new_tensor_2d(ggml_context * ctx, int type, int64_t ne0, int64_t ne1);
ggml_tensor * ggml_new_tensor_3d(ggml_context * ctx, int type, int64_t ne0, int64_t ne1, int64_t ne2);
ggml_tensor * ggml_view_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
ggml_tensor * ggml_set_name(ggml_tensor * tensor, const char * name);
ggml_tensor * ggml_mul_mat_id(ggml_context * ctx, ggml_tensor * as, ggml_tensor * b, ggml_tensor * ids);
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


class Product:
    """down[ids] · x on an opened model's first expert layer; every object is freed at the end."""

    def __init__(self, ggml, path):
        self.ffi, self.g = ggml
        self.native_ffi, self.native = _native.load()
        self.model = _native.opened("edgemoe_model_open", str(path))
        assert self.native.edgemoe_model_loaded(self.model) == 0, _native.last_error()
        layer = Source(path, self.native.edgemoe_model_source(self.model)).layers[0]
        projection = layer.projections[-1]
        self.n_in, self.n_out, self.n_expert = projection.n_in, projection.n_out, layer.n_expert
        buffer_type = self.ffi.cast("void *", int(self.native_ffi.cast("uintptr_t", self.native.edgemoe_model_buffer_type(self.model))))
        self.contexts = [self._context() for _ in range(3)]
        weights, self.inputs, self.nodes = self.contexts
        self.weight = self.g.ggml_new_tensor_3d(weights, F32, self.n_in, self.n_out, self.n_expert)
        self.g.ggml_set_name(self.weight, projection.name.encode())
        self.buffers = [self.g.ggml_backend_alloc_ctx_tensors_from_buft(weights, buffer_type)]
        self.backend = self.g.ggml_backend_dev_init(self.g.ggml_backend_dev_by_name(b"EdgeMoE"), self.ffi.NULL)

    def _context(self):
        return self.g.ggml_init({"mem_size": 1 << 20, "mem_buffer": self.ffi.NULL, "no_alloc": True})

    def compute(self, x, ids, spare_columns=0):
        """(status, result [n_tokens, n_used, n_out]). `spare_columns`: the ids are a strided view into a wider tensor, as llama.cpp's are."""
        g, ffi = self.g, self.ffi
        n_tokens, n_used = ids.shape
        wide = np.full((n_tokens, n_used + spare_columns), 10_000, np.int32)
        wide[:, :n_used] = ids
        tx = g.ggml_new_tensor_3d(self.inputs, F32, self.n_in, 1, n_tokens)
        tids = g.ggml_new_tensor_2d(self.inputs, I32, n_used + spare_columns, n_tokens)
        view = g.ggml_view_2d(self.nodes, tids, n_used, n_tokens, 4 * (n_used + spare_columns), 0)
        y = g.ggml_mul_mat_id(self.nodes, self.weight, tx, view)
        graph = g.ggml_new_graph(self.nodes)
        g.ggml_build_forward_expand(graph, y)
        cpu = g.ggml_backend_cpu_buffer_type()
        self.buffers += [g.ggml_backend_alloc_ctx_tensors_from_buft(self.inputs, cpu), g.ggml_backend_alloc_ctx_tensors_from_buft(self.nodes, cpu)]
        g.ggml_backend_tensor_set(tx, ffi.from_buffer(np.ascontiguousarray(x, np.float32)), 0, x.size * 4)
        g.ggml_backend_tensor_set(tids, ffi.from_buffer(wide), 0, wide.nbytes)
        status = g.ggml_backend_graph_compute(self.backend, graph)
        out = np.zeros((n_tokens, n_used, self.n_out), np.float32)
        g.ggml_backend_tensor_get(y, ffi.from_buffer(out), 0, out.nbytes)
        return status, out

    def weights_through_ggml(self):
        """What ggml reads back from our buffer: the stacked tensor."""
        out = np.zeros((self.n_expert, self.n_out, self.n_in), np.float32)
        self.g.ggml_backend_tensor_get(self.weight, self.ffi.from_buffer(out), 0, out.nbytes)
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


@pytest.fixture(params=["stacked", "package"])
def product(request, ggml, models, packages):
    gguf = models("qwen3moe", "F32")
    p = Product(ggml, gguf if request.param == "stacked" else packages(gguf))
    p.expected_weights = next(np.array(t.data) for t in GGUFReader(gguf).tensors if t.name == "blk.0.ffn_down_exps.weight")
    yield p
    p.close()


ROUTING = {
    "one token": [[3, 0, 7, 15]],
    "two tokens share an expert": [[1, 2], [2, 5]],
    "an expert id repeated in a token": [[4, 4, 9], [9, 9, 9]],
    "all to one": [[6]] * 33,
}


@pytest.mark.parametrize("spare_columns", [0, 5])
@pytest.mark.parametrize("name", ROUTING)
def test_products_are_right(name, spare_columns, product):
    ids = np.array(ROUTING[name], np.int32)
    x = np.random.default_rng(0).standard_normal((len(ids), product.n_in), np.float32)
    status, result = product.compute(x, ids, spare_columns)
    assert status == SUCCESS and product.fault() == ""
    np.testing.assert_allclose(result, np.einsum("tkoi,ti->tko", product.expected_weights[ids], x), rtol=1e-4, atol=1e-4)


def test_counters(product):
    ids = np.array([[1, 2], [2, 5], [2, 2]], np.int32)
    product.compute(np.ones((3, product.n_in), np.float32), ids)
    stats = product.stats()
    assert (stats.n_events, stats.n_pairs, stats.n_accesses, stats.n_computed_on_cpu) == (1, 6, 3, 3)


@pytest.mark.parametrize("bad", [-1, 16, 2**31 - 1, -(2**31)])
def test_an_id_that_names_no_expert_is_refused(bad, product):
    status, _ = product.compute(np.ones((2, product.n_in), np.float32), np.array([[0, 1], [2, bad]], np.int32))
    assert status == FAILED
    assert f"token 1 is routed to expert {bad}, wanted 0 to 15" in product.fault()


def test_weights_can_be_read_back(product):
    np.testing.assert_array_equal(product.weights_through_ggml(), product.expected_weights)
