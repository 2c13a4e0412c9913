"""The child process of `edgemoe doctor`: loads and tries what may crash, and names each step before it begins, so that the parent can tell what killed it."""

import json

PROBE_MARK = "edgemoe-probe: "

# ggml's numbers (ggml.h, ggml-backend.h)
GGML_F32 = 0
WEIGHT_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12}
DEVICE_TYPES = ("CPU", "GPU", "IGPU", "ACCEL", "META")
DEVICE_CPU = 0


def probe():
    """The child's side: one JSON line before a step and one after it."""
    _tell("begin", "import", None)
    try:
        import llama_cpp
    except Exception as error:
        return _tell("error", "import", f"{type(error).__name__}: {error}")
    steps = {
        "system": lambda: llama_cpp.llama_print_system_info().decode(),
        "devices": lambda: list_devices(Ggml()),
        "compute": lambda: try_products(Ggml()),
        "native": load_native,
    }
    for name, step in steps.items():
        _tell("begin", name, None)
        try:
            _tell("result", name, step())
        except Exception as error:
            _tell("error", name, f"{type(error).__name__}: {error}")


def _tell(event, step, value):
    print(f"\n{PROBE_MARK}{json.dumps([event, step, value])}", flush=True)


def load_native():
    """The instruction set of its kernels, which it chooses without running any."""
    from edgemoe import _native

    return _native.best_isa()


class Ggml:
    """The ggml that llama_cpp has loaded, through its public C interface. `ggml.name(...)` calls `ggml_name`."""

    # Every other function used here returns a pointer or nothing.
    INTS = ("backend_dev_type", "backend_graph_compute")
    SIZES = ("backend_dev_count", "quantize_chunk")
    STRINGS = ("backend_dev_name", "backend_dev_description", "backend_buft_name")
    BOOLS = ("backend_dev_supports_op",)

    def __init__(self):
        import ctypes

        import llama_cpp.llama_cpp as llama

        self.c = ctypes
        # libllama's handle finds ggml's functions too. Opening libggml.so by its path could load a second ggml with devices of its own.
        self.library = llama._lib

    def __getattr__(self, name):
        function = getattr(self.library, f"ggml_{name}")
        function.restype = self.c.c_void_p
        for names, kind in (
            (self.INTS, self.c.c_int),
            (self.SIZES, self.c.c_size_t),
            (self.STRINGS, self.c.c_char_p),
            (self.BOOLS, self.c.c_bool),
        ):
            if name in names:
                function.restype = kind
        return lambda *arguments: function(*(self._argument(value) for value in arguments))

    def _argument(self, value):
        if isinstance(value, int):  # a pointer or an int64_t; smaller integers take the same register
            return self.c.c_int64(value)
        return value

    def new_context(self):
        class Params(self.c.Structure):  # struct ggml_init_params
            _fields_ = [("mem_size", self.c.c_size_t), ("mem_buffer", self.c.c_void_p), ("no_alloc", self.c.c_bool)]

        return self.init(Params(1 << 20, None, True))

    def function(self, address, *types):
        return self.c.CFUNCTYPE(*types)(address)


def list_devices(ggml):
    """[[name, type, description, free bytes, total bytes], ...]"""
    found = []
    for i in range(ggml.backend_dev_count()):
        device = ggml.backend_dev_get(i)
        free, total = ggml.c.c_size_t(), ggml.c.c_size_t()
        ggml.backend_dev_memory(device, ggml.c.byref(free), ggml.c.byref(total))
        kind = ggml.backend_dev_type(device)
        kind = DEVICE_TYPES[kind] if kind < len(DEVICE_TYPES) else f"type {kind}"
        name, description = ggml.backend_dev_name(device), ggml.backend_dev_description(device)
        found.append([name.decode(), kind, description.decode(), free.value, total.value])
    return found


def try_products(ggml):
    """Weights × tokens for every weight type in every buffer type of the CPU device, each checked against numpy.

    The buffer types beside the plain one (AMX, CPU_REPACK, ...) are where llama.cpp puts weights when it may, and where a
    miscompiled kernel crashes. A batch of tokens is needed: one token alone takes a path without AMX tiles.
    Returns [[weight type, buffer type], ...] of what was tried.
    """
    device = ggml.backend_dev_by_type(DEVICE_CPU)
    backend = ggml.backend_dev_init(device, None)
    tried = []
    for buffer_type in [ggml.backend_dev_buffer_type(device), *_extra_buffer_types(ggml, device)]:
        layout = ggml.backend_buft_name(buffer_type).decode()
        for name, number in WEIGHT_TYPES.items():
            _tell("begin", f"compute {name} in {layout}", None)
            error = _relative_error(ggml, device, backend, buffer_type, number)
            if error is None:
                continue
            if not error < 0.2:  # the coarsest type here is off by 0.1; NaN fails as well
                raise ArithmeticError(f"{name} in {layout}: product is off by {error:.2g}, wanted less than 0.2")
            tried.append([name, layout])
    ggml.backend_free(backend)
    return tried


def _extra_buffer_types(ggml, device):
    registry = ggml.backend_dev_backend_reg(device)
    address = ggml.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return
    pointer = ggml.c.c_void_p
    list_of = ggml.function(address, ggml.c.POINTER(pointer), pointer)(device)
    while list_of and list_of[0]:
        yield list_of[0]
        list_of = ggml.c.cast(ggml.c.addressof(list_of.contents) + ggml.c.sizeof(pointer), ggml.c.POINTER(pointer))


def _relative_error(ggml, device, backend, buffer_type, weight_type, n_in=256, n_out=64, n_token=32):
    """|ggml − numpy| / |numpy|, or None where the layout does not take this type."""
    import numpy as np

    random = np.random.default_rng(1)
    weights = random.standard_normal((n_out, n_in), dtype=np.float32)
    tokens = random.standard_normal((n_token, n_in), dtype=np.float32)
    weight_bytes, result = np.zeros(4 * weights.size, np.uint8), np.zeros((n_token, n_out), np.float32)

    fixed, moving = ggml.new_context(), ggml.new_context()
    w = ggml.new_tensor_2d(fixed, weight_type, n_in, n_out)
    x = ggml.new_tensor_2d(moving, GGML_F32, n_in, n_token)
    y = ggml.mul_mat(moving, w, x)
    fixed_buffer = ggml.backend_alloc_ctx_tensors_from_buft(fixed, buffer_type)
    moving_buffer = ggml.backend_alloc_ctx_tensors_from_buft(moving, ggml.backend_dev_buffer_type(device))
    takes_it = bool(fixed_buffer) and ggml.backend_dev_supports_op(device, y)
    if takes_it:
        n = ggml.quantize_chunk(weight_type, weights.ctypes, weight_bytes.ctypes, 0, n_out, n_in, None)
        ggml.backend_tensor_set(w, weight_bytes.ctypes, 0, n)
        ggml.backend_tensor_set(x, tokens.ctypes, 0, tokens.nbytes)
        graph = ggml.new_graph(moving)
        ggml.build_forward_expand(graph, y)
        status = ggml.backend_graph_compute(backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        ggml.backend_tensor_get(y, result.ctypes, 0, result.nbytes)
    for buffer in (fixed_buffer, moving_buffer):
        if buffer:
            ggml.backend_buffer_free(buffer)
    ggml.free(fixed)
    ggml.free(moving)
    if not takes_it:
        return None
    wanted = tokens @ weights.T
    return float(np.linalg.norm(result - wanted) / np.linalg.norm(wanted))
