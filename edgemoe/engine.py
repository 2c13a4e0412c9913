"""`Llama`: llama_cpp.Llama whose routed experts belong to edgemoe's ggml device.

Everything but loading and the guard around decoding is llama-cpp-python's. Loading steps in at two places: the functions with which its LlamaModel and its
LlamaContext ask libllama for a model and for a context.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import warnings
from contextlib import contextmanager, nullcontext

import jinja2
import llama_cpp
import numpy as np
from llama_cpp import _internals as internals, _logger, llama_cpp as C
from llama_cpp.llama_tokenizer import LlamaTokenizer

from edgemoe import _native, cue_sets, engine_heads, machine
from edgemoe.cache_plan import CachePlan, plan_cache
from edgemoe.devices import devices, has_gpu
from edgemoe.errors import EdgemoeError, ModelError, ModelFault
from edgemoe.package import Source
from edgemoe.policies import BY_STAGES, DEFAULT, DEFAULT_SIDE_BY_SIDE, Policy, name_of
from edgemoe.ram_plan import plan_ram
from edgemoe.routing_shift import ShiftDetector, ShiftOptions
from edgemoe.stage import Automaton
from edgemoe.stage_tracker import Stage, StageTracker
from edgemoe.tokenizer import WholePieceTokenizer

# llama_cpp takes warnings (level 3 of ggml) for errors and prints them even when it is told to be quiet.
_logger.GGML_LOG_LEVEL_TO_LOGGING_LEVEL[3] = logging.WARNING

_native.load()  # here, not at the first load: like llama_cpp, whose import loads its libraries

_pending = threading.local()
_load_from_file = C.llama_model_load_from_file
_init_from_model = C.llama_init_from_model


ON_DEVICE, IN_RAM = 0, 1  # enum edgemoe_tier
STAGE_COUNTERS = ("n_decode_accesses", "n_ram_accesses"), ("n_decode_hits", "n_ram_hits"), ("n_proactive", "n_ram_proactive")
DECODE, PROMPT = 0, 1  # enum edgemoe_phase
STAGES_BY = ("cues", "shift", "both")


class _BufferOverride(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def _load(path: bytes, params):
    """Stands in for llama_model_load_from_file, for every caller in the process; only a load that this module announced is changed."""
    loader = getattr(_pending, "loader", None)
    return loader.load(params) if loader else _load_from_file(path, params)


def _init(model, params):
    """Stands in for llama_init_from_model in the same way: the announced model's first context is the one whose routers its tap hears."""
    loader = getattr(_pending, "loader", None)
    return _init_from_model(model, loader.listening(params) if loader else params)


C.llama_model_load_from_file = _load
C.llama_init_from_model = _init


def _load_mapped(files: list[str], params, use_extra_bufts: bool):
    """One GGUF or its splits in order, mapped (a package's second split has no bytes that could be read instead)."""
    params.use_extra_bufts = use_extra_bufts
    locked = params.load_mode in (C.LLAMA_LOAD_MODE_MLOCK, C.LLAMA_LOAD_MODE_MMAP_MLOCK)
    params.load_mode = C.LLAMA_LOAD_MODE_MMAP_MLOCK if locked else C.LLAMA_LOAD_MODE_MMAP
    paths = [os.fsencode(f) for f in files]
    if len(paths) == 1:
        return _load_from_file(paths[0], params)
    return C.llama_model_load_from_splits((ctypes.c_char_p * len(paths))(*paths), len(paths), params)


class _Plain:
    """What edgemoe is compared with: llama.cpp alone, its weights mapped and not repacked."""

    def __init__(self, files: list[str], n_seq_max: int = 1):
        self.files, self.n_seq_max = files, n_seq_max

    def load(self, params):
        return _load_mapped(self.files, params, use_extra_bufts=False)

    def listening(self, params):
        return _for_sequences(params, self.n_seq_max)


def _for_sequences(params, n: int):
    """A context's parameters for batches of up to n sequences: a copy, since llama_cpp uses its own for further contexts."""
    ours = type(params).from_buffer_copy(params)
    if n > 1:
        ours.n_seq_max, ours.kv_unified = n, True
    return ours


def open_plain(files: list[str], n_seq_max: int = 1, **options) -> llama_cpp.Llama:
    """A llama_cpp.Llama on one GGUF or its splits, in the mode that edgemoe is bit-identical to. n_seq_max: as of Llama. Raises ModelError."""
    with _announced(_Plain(files, n_seq_max)) as reasons, _explained(files[0], reasons):
        return llama_cpp.Llama(files[0], **options)


def _offloads_dense(n_gpu_layers: int) -> bool:
    """True when llama.cpp will put dense weights on a GPU."""
    return n_gpu_layers != 0 and any(d.type in ("gpu", "igpu") for d in devices())


def plan_slots(source: Source, slots: int | None, vram: int | None, device: str | None, n_gpu_layers: int, n_ctx: int, n_ubatch: int = 512) -> CachePlan:
    """Where Llama with these arguments will put experts; loads nothing. Slots are for whoever asks, and for a real GPU that has the dense layers."""
    dense_on_device = _offloads_dense(n_gpu_layers)
    wanted = not (slots is None and vram is None and device is None) or (dense_on_device and has_gpu())
    return plan_cache(
        source,
        devices(),
        n_ctx=n_ctx or source.integer("context_length", 4096),
        slots=slots if wanted or not has_gpu() else 0,
        vram=vram,
        device=device,
        dense_on_device=dense_on_device,
        n_ubatch=n_ubatch,
    )


class _Experts:
    """One opened model: its source, and the native side that owns the routed experts."""

    handle = None

    def __init__(self, path: str, use_extra_bufts: bool):
        self.use_extra_bufts = use_extra_bufts
        self.all_on_device = False  # nothing is left for us to do: llama.cpp takes the experts too
        self.tap: bool | None = None  # None: where we compute the experts
        self.policies: list[Policy] = []  # of the slots on a device and in RAM; their score functions are called while the model is open
        self.n_seq_max = 1
        self.has_ram = False  # experts are in slots in RAM, not mapped
        self.stages: StageTracker | None = None
        self.process = os.getpid()
        self._ffi, self._lib = _native.load()
        self.source = Source(path, check_blobs=False)

    def open(self, isa: str | None, ram_bytes: int, ram_policy: Policy, read_ahead: str, ram_options: dict) -> None:
        """ram_bytes: of expert slots in RAM; 0: all experts are mapped. Raises ModelError."""
        ram = self._ffi.NULL
        self.has_ram = ram_bytes > 0 and self.source.kind != "dense"
        if self.has_ram:
            words = {name: self._ffi.new("char[]", value.encode()) for name, value in {"misses": "load", "read_ahead": read_ahead}.items()}
            ram = self._ffi.new("struct edgemoe_cache_options *", {"seed": True, "most_bytes": ram_bytes} | words | ram_policy.options() | ram_options)
            self.policies.append(ram_policy)
        self.handle = _native.opened(self._lib.edgemoe_model_open(self.source.handle, isa.encode() if isa else self._ffi.NULL, ram))

    def load(self, params):
        files = list(self.source.files)
        if self.source.kind != "dense" and not self.all_on_device:
            buffer_type = _native.number(self._lib.edgemoe_model_buffer_type(self.handle))
            patterns = [self._ffi.string(self._lib.edgemoe_expert_pattern())]
            if _offloads_dense(params.n_gpu_layers):
                patterns.append(self._ffi.string(self._lib.edgemoe_expert_bias_pattern()))
            elif not self.use_extra_bufts:
                patterns.append(self._ffi.string(self._lib.edgemoe_dense_pattern(self.handle)))
            overrides = [_BufferOverride(pattern, buffer_type) for pattern in patterns if pattern] + [_BufferOverride(None, None)]
            overrides = (_BufferOverride * len(overrides))(*overrides)
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
            ghost = _native.text(self._lib.edgemoe_model_ghost(self.handle))
            files += [ghost] if ghost else []
        model = _load_mapped(files, params, self.use_extra_bufts)
        if model and self._lib.edgemoe_model_loaded(self.handle) != 0:
            C.llama_model_free(model)
            raise ModelError(_native.last_error())
        return model

    def listening(self, params):
        """With our ear at the routers; further contexts stay deaf."""
        if self.tap is None:
            self.tap = self.source.kind != "dense" and not self.all_on_device
        ours = _for_sequences(params, self.n_seq_max)
        if self.tap:
            ours.cb_eval = type(params.cb_eval)(_native.address("edgemoe_model_eval"))
            ours.cb_eval_user_data = _native.number(self.handle)
        return ours

    def open_recorder(self, n_used: int, n_expert: int, n_embd: int, n_ubatch: int):
        handle = self._lib.edgemoe_recorder_open(self.handle, n_used, n_expert, n_embd, n_ubatch)
        if not handle:
            raise EdgemoeError(_native.last_error())
        return handle

    def fault(self) -> str:
        if os.getpid() != self.process:
            return "this process was forked from the one that opened the model; open the model after the fork"
        if not self.handle:
            return "the model is closed"
        for policy in self.policies:
            if policy.error:
                return str(policy.failure())
        return _native.text(self._lib.edgemoe_model_fault(self.handle))

    def failure(self) -> str:
        """What made the last computation fail, though another may succeed; empty when nothing is known of it."""
        return _native.text(self._lib.edgemoe_model_take_failure(self.handle)) if self.handle else ""

    def open_cache(self, device: str, n_slots: int, policy: Policy, misses: str, further: dict) -> bool:
        """False when the device has no room for so many slots. Raises ModelError."""
        device, misses = (self._ffi.new("char[]", name.encode()) for name in (device, misses))
        fields = {"seed": True, "device": device, "misses": misses, "n_slots": n_slots} | policy.options() | further
        self.policies.append(policy)
        options = self._ffi.new("struct edgemoe_cache_options *", fields)
        result = self._lib.edgemoe_model_open_cache(self.handle, options)
        if result < 0:
            raise ModelError(_native.last_error())
        return result == 0

    def begin_sequence(self) -> None:
        """A new text: policies forget what belongs to the last one."""
        if self.stages:
            self.stages.begin()
        if self.policies and self.handle:
            self._lib.edgemoe_model_begin_sequence(self.handle)

    def announce(self, batch) -> None:
        """What the policy may want to know of a llama_batch that is about to be computed."""
        if not self.handle:
            return
        tokens = batch.token[: batch.n_tokens] if batch.token else []
        stage = self.stages.before(tokens, _sequences_of(batch), batch.pos[: len(tokens)] if batch.pos else None) if self.stages else -1
        if self.policies and (self.stages or self._lib.edgemoe_model_wants_tokens(self.handle)):
            self._lib.edgemoe_model_announce(self.handle, self._ffi.new("int32_t[]", tokens), len(tokens), stage)

    def _read(self, function, struct: str, *arguments) -> dict:
        """What a getter of the library fills in, by name."""
        if not self.handle:
            raise ModelFault("the model is closed")
        found = self._ffi.new(f"struct {struct} *")
        function(self.handle, *arguments, found)
        return {name: getattr(found, name) for name, _ in self._ffi.typeof(f"struct {struct}").fields}

    def stats(self) -> dict[str, int]:
        return self._read(self._lib.edgemoe_model_get_stats, "edgemoe_stats")

    def cache_info(self) -> dict:
        info = self._read(self._lib.edgemoe_model_get_cache_info, "edgemoe_cache_info")
        return info | {"misses": _native.text(info["misses"])}

    def ram_cost(self, index: int) -> int:
        return self._lib.edgemoe_model_get_ram_cost(self.handle, index)

    def ram_info(self) -> dict:
        return self._read(self._lib.edgemoe_model_get_ram_info, "edgemoe_ram_info")

    def access_counts(self, tier: int, phase: int) -> list[dict[str, int]]:
        """Per layer."""
        return [self._read(self._lib.edgemoe_model_get_access_counts, "edgemoe_access_counts", tier, phase, i) for i in range(len(self.source.layers))]

    def uses(self, tier: int, index: int) -> np.ndarray:
        """int64 [n_expert]: tokens that used each; those of prompts too, where the policy hears them."""
        found = np.zeros(self.source.layers[index].n_expert, np.uint64)
        self._lib.edgemoe_model_get_uses(self.handle, tier, index, self._ffi.from_buffer("uint64_t[]", found))
        return found.astype(np.int64)

    def residents(self, tier: int, index: int) -> list[int]:
        experts = self._ffi.new("int32_t[]", self.source.layers[index].n_expert)
        return list(experts[0 : self._lib.edgemoe_model_get_residents(self.handle, tier, index, experts)])

    def wait_cache(self) -> None:
        self._lib.edgemoe_model_wait_cache(self.handle)

    def clear_cache(self) -> None:
        self._lib.edgemoe_model_clear_cache(self.handle)

    def stop_cache(self) -> None:
        self._lib.edgemoe_model_stop_cache(self.handle)

    def close(self) -> None:
        if self.handle:
            self._lib.edgemoe_model_close(self.handle)
            self.handle = None
        self.source.close()


@contextmanager
def _announced(loader: _Experts | _Plain):
    """While it lasts, this thread's next load goes through `loader`, and libllama's error lines are kept: they hold the reason of a failure."""
    reasons: list[str] = []

    @C.llama_log_callback
    def collect(level, line, user_data):
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            reasons.append(line.decode(errors="replace").strip())
        _logger.llama_log_callback(level, line, user_data)

    C.llama_log_set(collect, ctypes.c_void_p(0))
    _pending.loader = loader
    try:
        yield reasons
    finally:
        _pending.loader = None
        C.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))


@contextmanager
def _explained(path: str, reasons: list[str]):
    """Turns llama_cpp's "Failed to load" into the reason that libllama logged: its first error line, without the function's name."""
    try:
        yield
    except ValueError as e:
        if not str(e).startswith("Failed to"):
            raise
        reason = reasons[0].split(": ", 1)[-1] if reasons else "no reason given (verbose=True shows llama.cpp's log)"
        raise ModelError(f"{path}: llama.cpp cannot load it: {reason}") from None
    except jinja2.TemplateError as e:
        raise ModelError(f"{path}: its chat template is broken: {e}") from None


def _sequences_of(batch) -> list[int] | None:
    """Of each token the sequence, the first of those it belongs to; None: the batch does not say."""
    return [batch.seq_id[i][0] for i in range(batch.n_tokens)] if batch.seq_id else None


def _summed(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(c[name] for c in counts) for name in counts[0]}


class _GuardedContext(internals.LlamaContext):
    """Everything that is computed, for text or for embeddings, goes through decode and encode: the place to refuse what would be worthless."""

    listener = None  # with a method batch(llama_batch): a context manager around each batch

    def decode(self, batch) -> None:
        self.experts.announce(batch.batch)
        with self.listener.batch(batch.batch) if self.listener else nullcontext(), self._guarded():
            super().decode(batch)
        if self.experts.stages:
            self.experts.stages.after()

    def encode(self, batch) -> None:
        with self._guarded():
            super().encode(batch)

    @contextmanager
    def _guarded(self):
        self._raise_fault()
        try:
            with _interruptible():
                yield
        except RuntimeError:
            self._raise_fault()  # it says more than "llama_decode returned -3"
            failure = self.experts.failure()
            if failure:
                raise ModelFault(f"{self.path}: {failure}") from None
            raise
        self._raise_fault()

    def _raise_fault(self) -> None:
        fault = self.experts.fault()
        if fault:
            raise ModelFault(f"{self.path}: {fault}")


@contextmanager
def _interruptible():
    """Lets Ctrl-C end llama_decode between two nodes of its graph. Only where Ctrl-C means KeyboardInterrupt: a handler of the caller's own decides itself."""
    watching = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not watching:
        yield
        return
    ffi, lib = _native.load()
    lib.edgemoe_watch_interrupts(True)
    try:
        yield
        if lib.edgemoe_interrupted(ffi.NULL):
            raise KeyboardInterrupt
    except RuntimeError:
        if lib.edgemoe_interrupted(ffi.NULL):
            raise KeyboardInterrupt from None
        raise
    finally:
        lib.edgemoe_watch_interrupts(False)


class Llama(llama_cpp.Llama):
    """A llama_cpp.Llama, with the same constructor and calls. `model_path` is a GGUF (any shard of it) or an edgemoe package directory.

    Differences: `n_threads` and `n_threads_batch` default to the physical cores that this process may use; dense weights are always mapped
    (use_mmap=False is ignored). A dense model runs as in llama.cpp.

    exact: compute with ggml's own kernels only; the output is then bit-identical to plain llama.cpp's. By default edgemoe's kernels compute the experts,
        and the dense weights where those stay on the CPU: faster, and different only in the order in which products are added up.
    isa: the instruction set of edgemoe's kernels ("avx512", "avxvnni", "avx2"); by default the best that this CPU has.
    use_extra_bufts: let llama.cpp repack the dense weights at load, into private memory. By default only where edgemoe has no kernels for the CPU.
    slots, vram, device: expert slots per layer on a device; or what may be used there for everything, in bytes; and which device ("Vulkan0"). By default, with
        n_gpu_layers and a real GPU, as many as fit beside the rest; otherwise none. cache_plan has what came of it.
    misses: what becomes of experts that are in no slot: "cpu" computes them in place, "load" loads them first, "auto" does what is faster in the steps that run.
    policy: which experts stay, as in edgemoe.policies ("placement:every=32", "lru"); by default what policies.DEFAULT says.
    stages: where cues begin a stage of a reasoning text: "thinking" (between a model's thinking tags) or "everywhere". By default thinking where a policy goes by stages
        ("stage", "stage+lru"), and otherwise nowhere. stages() has what was found.
    stage_by: what begins a stage: "cues", "shift" (the experts in use change, which needs slots, and a threshold from `edgemoe calibrate`) or "both".
    n_seq_max: sequences that a batch may have tokens of, for callers that make batches of their own. With several, the default of ram_policy is another.
    tap: let recorders hear the routers. By default wherever edgemoe computes the experts; True also where a GPU that holds everything leaves them to llama.cpp.
    cache_options: further fields of edgemoe_cache_options: strict, most_inserts, seed, n_staging, inline_loads, most_block_bytes, most_bytes.
    ram: bytes of expert slots in RAM; experts that are in none are read from the disk. "mapped": all experts are mapped, and share the page cache. By default ("auto")
        mapped when they fit into what this process may use. ram_plan has what came of it.
    ram_policy, ram_options: the same as policy and cache_options, of the slots in RAM.
    heads: a file of learned heads, for the policies temporal, spatio-temporal and spatio; by default what edgemoe train-heads wrote for this model, or what is in its package.
        Heads that do not fit or are damaged cost a warning, and the default policies serve instead.
    read_ahead: of the slots in RAM: "on" reads what the next layer is likely to need before its router has chosen, "auto" does so while that makes steps faster, or "off".

    Raises ModelError when the model cannot be opened, and ModelFault from any call that computes when its results would be worthless.
    """

    def __init__(
        self,
        model_path: str | os.PathLike,
        *args,
        exact: bool = False,
        isa: str | None = None,
        use_extra_bufts: bool | None = None,
        slots: int | None = None,
        vram: int | None = None,
        device: str | None = None,
        misses: str = "auto",
        policy: str | None = None,
        cache_options: dict | None = None,
        ram: int | str | None = None,
        ram_policy: str | None = None,
        read_ahead: str = "auto",
        heads: str | os.PathLike | None = None,
        ram_options: dict | None = None,
        stages: str | None = None,
        stage_by: str = "cues",
        n_seq_max: int = 1,
        tap: bool | None = None,
        **kwargs,
    ):
        kwargs["n_threads"] = kwargs.get("n_threads") or machine.default_threads()
        kwargs["n_threads_batch"] = kwargs.get("n_threads_batch") or kwargs["n_threads"]
        path = os.fspath(model_path)
        if use_extra_bufts is None:
            use_extra_bufts = not exact and _native.best_isa() == "none"
        self._experts = _Experts(path, use_extra_bufts)
        default, default_in_ram = DEFAULT.get(misses, DEFAULT["auto"]), DEFAULT["load"] if n_seq_max == 1 else DEFAULT_SIDE_BY_SIDE
        (chosen, chosen_in_ram), warning = engine_heads.policies_for(self.source, heads, (policy or default, default), (ram_policy or default_in_ram, default_in_ram))
        if warning:
            warnings.warn(warning, stacklevel=2)
        self.cache_plan = plan_slots(
            self.source, slots, vram, device, kwargs.get("n_gpu_layers", 0), kwargs.get("n_ctx", 512), kwargs.get("n_ubatch", 512)
        )
        self._experts.all_on_device = self._fits_all_by_itself(slots)
        self.ram_plan = plan_ram(
            self.source, "mapped" if self._experts.all_on_device else ram, n_ctx=kwargs.get("n_ctx", 512), n_ubatch=kwargs.get("n_ubatch", 512),
            on_device_bytes=self.cache_plan.beside_bytes,
        )
        self._experts.open("none" if exact else isa, self.ram_plan.budget_bytes, chosen_in_ram, read_ahead, ram_options or {})
        # A software device computes on the cores that would load meanwhile, and prompts gain nothing by a detour through it. Mesa's (Debian 12) also damages its heap
        # when llama.cpp sends prompts through it while experts are loaded.
        self._on_software = any(d.name == self.cache_plan.device and d.is_software for d in devices())
        if self._on_software:
            kwargs.setdefault("op_offload", False)
        self._experts.tap, self._experts.n_seq_max = tap, n_seq_max
        with _announced(self._experts) as reasons, _explained(path, reasons):
            super().__init__(path, *args, **kwargs)
        if type(self.tokenizer_) is LlamaTokenizer:
            self.tokenizer_ = WholePieceTokenizer(self)
        self._guard_context()
        if self.cache_plan.n_slots and not self._experts.all_on_device:
            further = {"n_staging": 0 if misses == "cpu" else self.cache_plan.n_staging, "inline_loads": self._on_software} | (cache_options or {})
            self._open_cache(chosen, misses, further, may_shrink=slots is None)
        if stages or stage_by != "cues" or any(name_of(p or "") in (*BY_STAGES, "oracle") for p in (policy, ram_policy)):
            self._experts.stages = self._track_stages(stages or "thinking", stage_by)

    def _track_stages(self, where: str, by: str) -> StageTracker:
        """Raises ModelError."""
        if by not in STAGES_BY:
            raise ModelError(f"stage_by: found {by!r}, wanted one of {', '.join(STAGES_BY)}")
        found = cue_sets.find(self.source)
        shift = uses = None
        if by != "cues":
            if not self._has_slots:
                raise ModelError(f"{self.model_path}: stages by shift of the routing: all experts are mapped, and no slots count what is used; give slots or ram")
            if found is None or found.shift_threshold is None:
                raise ModelError(f"{self.model_path}: stages by shift of the routing: no threshold is known; `edgemoe calibrate` finds it")
            tier = ON_DEVICE if self._has_cache else IN_RAM
            n_expert = [layer.n_expert for layer in self.source.layers]
            if len(set(n_expert)) > 1:
                raise ModelError(f"{self.model_path}: stages by shift of the routing: layers of {min(n_expert)} to {max(n_expert)} experts, wanted as many in each")
            shift = ShiftDetector(len(n_expert), n_expert[0], ShiftOptions(threshold=found.shift_threshold))
            uses = lambda: np.stack([self._experts.uses(tier, i) for i in shift.layers])  # noqa: E731
        automaton = Automaton(found.cues) if found else None
        return StageTracker(lambda tokens: self.detokenize(tokens, special=True), self._stage_counters, automaton, where, by, shift, uses)

    def _fits_all_by_itself(self, slots: int | None) -> bool:
        """When every expert fits beside the dense weights, llama.cpp alone is fastest. A package's experts can only come through us."""
        plan = self.cache_plan
        return slots is None and plan.fits_all and plan.dense_bytes > 0 and self.source.kind == "stacked"

    def _open_cache(self, policy: Policy, misses: str, further: dict, may_shrink: bool) -> None:
        """A driver may have less room than it says: then fewer slots, unless their number was asked for."""
        n_slots, device = self.cache_plan.n_slots, self.cache_plan.device
        if device is None:
            raise ModelError(f"expert slots: {self.cache_plan.reason or 'there is no GPU'}")
        while n_slots and not self._experts.open_cache(device, n_slots, policy, misses, further):
            if not may_shrink:
                raise ModelError(_native.last_error())
            n_slots = n_slots * 3 // 4
        if n_slots != self.cache_plan.n_slots:
            self.cache_plan = self.cache_plan.with_fewer_slots(n_slots, f"{device} had no room for {self.cache_plan.n_slots} slots per layer")
        self._has_cache = n_slots > 0

    _has_cache = False
    on_progress = None  # called with (tokens done, tokens in all) before eval and after each of its batches

    def reset(self) -> None:
        self._experts.begin_sequence()
        super().reset()

    def eval(self, tokens) -> None:
        if self._ctx.listener:
            self._ctx.listener.evaluates(len(tokens))
        if not self.on_progress:
            super().eval(tokens)
            return
        self.on_progress(0, len(tokens))
        for first in range(0, len(tokens), self.n_batch):  # the batches in which it computes them anyway
            super().eval(tokens[first : first + self.n_batch])
            self.on_progress(min(first + self.n_batch, len(tokens)), len(tokens))

    @property
    def source(self) -> Source:
        """What was opened: kind, layers, bytes per expert."""
        return self._experts.source

    def expert_stats(self) -> dict[str, int]:
        """Counters since the model was opened: n_events, n_pairs (routed pairs), n_accesses (A: distinct experts per event), n_computed_on_cpu (C), n_on_device,
        n_refused (pairs that a device could not compute), n_fused (events computed as one fused step), bytes_accessed, compute_us. All 0 for a dense model.

        With expert slots in RAM also n_ram_accesses, n_ram_hits, n_ram_demand (D), ram_bytes_read (by D and P) and ram_stall_us (waiting for D), all of decoding;
        n_ram_proactive (P), n_ram_evicted and n_ram_failed of everything; ram_prompt_bytes_read. With slots on a device also, of decoding: n_decode_accesses (A), n_decode_hits, n_decode_demand (D), n_decode_computed (C), with A = hits + D + C; and of
        everything: n_proactive (P), n_evicted, n_unused (of these: came in as P, never used), n_failed (loads), bytes_loaded (host to device), stall_us (waiting for D)."""
        stats = self._experts.stats()
        if self._experts.has_ram:
            decode, prompt = (_summed(self._experts.access_counts(IN_RAM, phase)) for phase in (DECODE, PROMPT))
            stats |= {f"n_ram_{name}": decode[f"n_{name}"] for name in ("accesses", "hits", "demand")}
            stats |= {f"n_ram_{name}": decode[f"n_{name}"] + prompt[f"n_{name}"] for name in ("proactive", "evicted", "failed")}
            stats |= {"ram_bytes_read": decode["bytes_loaded"], "ram_stall_us": decode["stall_us"], "ram_prompt_bytes_read": prompt["bytes_loaded"]}
        if self._has_cache:
            decode, prompt = (_summed(self._experts.access_counts(ON_DEVICE, phase)) for phase in (DECODE, PROMPT))
            stats |= {f"n_decode_{name}": decode[f"n_{name}"] for name in ("accesses", "hits", "demand", "computed")}
            stats |= {name: decode[name] + prompt[name] for name in ("n_proactive", "n_evicted", "n_unused", "n_failed", "bytes_loaded", "stall_us")}
        return stats

    def expert_stats_by_layer(self) -> list[dict]:
        """The counters of expert slots per layer: {"layer", "residents", "decode": {...}, "prompt": {...}}; empty without slots."""
        if not self._has_cache:
            return []
        return self._by_layer(ON_DEVICE)

    def ram_stats_by_layer(self) -> list[dict]:
        """The same of expert slots in RAM, with slot_bytes: what one expert takes of the budget."""
        if not self._experts.has_ram:
            return []
        return [layer | {"slot_bytes": self._experts.ram_cost(i)} for i, layer in enumerate(self._by_layer(IN_RAM))]

    def _by_layer(self, tier: int) -> list[dict]:
        decode, prompt = self._experts.access_counts(tier, DECODE), self._experts.access_counts(tier, PROMPT)
        return [
            {"layer": layer.layer, "residents": self._experts.residents(tier, i), "decode": decode[i], "prompt": prompt[i]} for i, layer in enumerate(self.source.layers)
        ]

    def cache_info(self) -> dict:
        """bytes on the device, pinned (uploads go through pinned memory), misses (what is done with them now), cpu_rate and load_rate in bytes per second (0:
        not measured yet). Empty without slots."""
        return self._experts.cache_info() if self._has_cache else {}

    def ram_info(self) -> dict:
        """Of expert slots in RAM: budget, staging and filled in bytes, n_filled slots, direct (reads go past the page cache), bytes_read, n_reads, busy_us (some read was
        on its way) and disk_rate in bytes per second (0: nothing read yet). Empty when all experts are mapped."""
        if not self._experts.has_ram:
            return {}
        info = self._experts.ram_info()
        return info | {"disk_rate": 1e6 * info["bytes_read"] / info["busy_us"] if info["busy_us"] else 0.0}

    def stages(self, sequence: int = 0) -> list[Stage]:
        """Of the sequence's text since the last reset; empty where stages are not looked for."""
        return self._experts.stages.timeline(sequence) if self._experts.stages else []

    def on_stage(self, heard) -> None:
        """heard(Stage) is called when one has begun; None: no more."""
        if self._experts.stages:
            self._experts.stages.heard = heard

    def _stage_counters(self) -> tuple[int, int, int]:
        """Accesses, hits and loads that nobody waited for, of all slots there are; without slots of nothing."""
        stats = self.expert_stats()
        return tuple(sum(stats.get(name, 0) for name in names) for names in STAGE_COUNTERS)

    def wait_cache(self) -> None:
        """Returns when no expert is on its way to a slot."""
        if self._has_slots:
            self._experts.wait_cache()

    def clear_cache(self) -> None:
        """Empties all slots and forgets what their policies have learned."""
        if self._has_slots:
            self._experts.clear_cache()

    @property
    def _has_slots(self) -> bool:
        return self._has_cache or self._experts.has_ram

    def _guard_context(self) -> None:
        # The context that llama_cpp made becomes one that checks each batch; llama_cpp.Llama offers no place to hand in another class.
        self._ctx.__class__ = _GuardedContext
        self._ctx.experts = self._experts
        self._ctx.path = self.model_path
        C.llama_set_abort_callback(self._ctx.ctx, C.ggml_abort_callback(_native.address("edgemoe_interrupted")), ctypes.c_void_p(0))

    def close(self) -> None:
        experts = getattr(self, "_experts", None)
        if experts and os.getpid() != experts.process:
            # A forked child must not free what its parent's threads may have locked.
            self._forget_parent()
            return
        if experts and experts.handle and self._has_slots:
            experts.stop_cache()  # a load must not meet the end of the context that computes on the device
        if hasattr(self, "_stack"):
            super().close()
        if experts:
            experts.close()

    def _forget_parent(self) -> None:
        for owner in (getattr(self, "_model", None), getattr(self, "_ctx", None), getattr(self, "_batch", None)):
            if owner is not None:
                owner._exit_stack.pop_all()
        if hasattr(self, "_stack"):
            self._stack.pop_all()
