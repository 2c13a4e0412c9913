"""How many expert slots go onto a device: decided before a model is loaded, shown by `edgemoe plan`.

    n_slots per layer = (budget - dense - KV cache - compute buffers - workspace - margin) / (one expert of every layer), at most n_expert

The budget is --vram, or the memory that the device has free. Everything before the division must be there in any case; it is estimated from the
header of the model, rather too high than too low. Three outcomes are no cache at all: no device; room for fewer slots than the experts that one token
uses, since each token would push out what the next one needs; and few big experts that do not all fit, which such a cache only makes slower. A number
of slots that was asked for is obeyed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from edgemoe.devices import Device
from edgemoe.errors import EdgemoeError
from edgemoe.machine import human_bytes
from edgemoe.package import ExpertLayer, Source

GPUS = ("gpu", "igpu")
FEW_EXPERTS = 16
MOST_STAGING = 16  # slots through which prompts stream experts, for all layers together
LEAST_MARGIN_BYTES = 256 << 20
UNKNOWN_N_VOCAB = 152064  # Qwen's padded vocabulary, one of the largest
F16_BYTES, F32_BYTES = 2, 4


@dataclass(frozen=True)
class CachePlan:
    """Sizes in bytes. n_slots counts per layer, 0 is off; `reason` says why it is 0 or not what was asked for, and is empty otherwise."""

    device: str | None  # "Vulkan0"; None: there is none, or the budget is a what-if
    description: str
    n_ctx: int
    n_slots: int
    n_expert: int  # of the layer that has most
    n_expert_used: int
    slot_bytes: int  # of one slot in all layers together
    cache_bytes: int  # of all slots; a layer with fewer experts than slots has as many slots as experts
    dense_bytes: int  # on the device, like kv_bytes and compute_bytes: 0 when the dense layers stay on the CPU
    kv_bytes: int
    compute_bytes: int  # llama.cpp's buffers
    workspace_bytes: int  # edgemoe's own buffers
    margin_bytes: int
    n_staging: int  # slots for prompts, out of what whole slots leave over
    staging_bytes: int
    budget_bytes: int
    free_bytes: int  # as the driver reports it; 0: unknown
    expert_bytes: int  # of the whole model
    reason: str

    @property
    def fits_all(self) -> bool:
        return 0 < self.n_expert <= self.n_slots

    @property
    def beside_bytes(self) -> int:
        """What of llama.cpp's is on the device, and so not in RAM."""
        return self.dense_bytes + self.kv_bytes + self.compute_bytes

    @property
    def left_bytes(self) -> int:
        """Negative: the slots that were asked for do not fit."""
        needed = self.beside_bytes + self.workspace_bytes + self.cache_bytes + self.margin_bytes + self.staging_bytes
        return self.budget_bytes - needed

    def with_fewer_slots(self, n_slots: int, reason: str) -> CachePlan:
        """For a driver that has less room than it says."""
        return replace(self, n_slots=n_slots, cache_bytes=min(self.cache_bytes, n_slots * self.slot_bytes), reason=reason)

    def as_dict(self) -> dict:
        return {**asdict(self), "fits_all": self.fits_all, "left_bytes": self.left_bytes}

    def report(self) -> str:
        """A table for humans."""
        free = f", {human_bytes(self.free_bytes)} free" if self.free_bytes else ""
        rows = [("device", f"{self._device()}{free}")]
        slots = f"of {human_bytes(self.expert_bytes)} experts: {self.n_slots} of {self.n_expert} per layer, {self.n_expert_used} used per token"
        sizes = [
            ("budget", self.budget_bytes, "MORE than is free" if self.budget_bytes > self.free_bytes > 0 else "for all that follows"),
            ("dense", self.dense_bytes, "layers without routed experts"),
            ("KV cache", self.kv_bytes, f"for {self.n_ctx} tokens"),
            ("compute", self.compute_bytes, "llama.cpp's buffers"),
            ("workspace", self.workspace_bytes, "edgemoe's buffers"),
            ("slots", self.cache_bytes, slots),
            ("staging", self.staging_bytes, f"{self.n_staging} slots through which prompts stream experts"),
            ("margin", self.margin_bytes, "kept free"),
            ("left over", self.left_bytes, "MORE than the budget is needed" if self.left_bytes < 0 else ""),
        ]
        if self.budget_bytes:
            rows += [(name, f"{human_bytes(size):>10}  {text}".rstrip()) for name, size, text in sizes]
        if self.reason:
            rows.append(("note" if self.n_slots else "no slots", self.reason))
        rows.append(("on the CPU", self._on_cpu()))
        return "\n".join(f"{name:<10} {text}" for name, text in rows)

    def line(self) -> str:
        """What is about to be put where, in one line."""
        if not self.n_slots:
            return f"no experts on a GPU: {self.reason}"
        note = f" ({self.reason})" if self.reason else ""
        return (
            f"{self._device()}: {self.n_slots} of {self.n_expert} expert slots per layer{note}, {human_bytes(self.cache_bytes)}; "
            f"dense {human_bytes(self.dense_bytes)}, KV cache {human_bytes(self.kv_bytes)}, buffers {human_bytes(self.compute_bytes + self.workspace_bytes)}; "
            f"budget {human_bytes(self.budget_bytes)}"
        )

    def _device(self) -> str:
        return f"{self.device} ({self.description})" if self.device else self.description

    def _on_cpu(self) -> str:
        parts = []
        if self.n_expert and not self.fits_all:
            parts.append(f"{'experts that are in no slot' if self.n_slots else 'all experts'} ({human_bytes(self.expert_bytes - self.cache_bytes)})")
        if not self.dense_bytes:
            parts.append("dense layers, KV cache")
        return ", ".join(parts) or "nothing but the token embedding"


def choose_device(found: list[Device], name: str | None) -> Device | None:
    """The device called `name`; without a name the GPU with most memory free, a discrete one before an integrated one, never a software device, or None.

    Raises EdgemoeError for a name that is not there. edgemoe's own device, and others of its type, cannot hold slots.
    """
    if name is None:
        gpus = [d for d in found if d.type in GPUS and not d.is_software]
        return max(gpus, key=lambda d: (d.type == "gpu", d.free), default=None)
    fitting = [d for d in found if d.type != "accel"]
    for device in fitting:
        if device.name == name:
            return device
    wanted = ", ".join(d.name if d.type == "cpu" else f"{d.name} ({d.description})" for d in fitting)
    raise EdgemoeError(f"device {name}: wanted one of {wanted}")


def plan_cache(
    source: Source,
    found_devices: list[Device],
    *,
    n_ctx: int,
    slots: int | None = None,
    vram: int | None = None,
    device: str | None = None,
    dense_on_device: bool = True,
    n_ubatch: int = 512,
    warn_working_set: bool = True,
) -> CachePlan:
    """`slots` None: as many as fit. `vram`, in bytes, where no device is chosen plans for a GPU that is not here. `warn_working_set` False: no reason is given
    for fewer slots than a token uses. Raises EdgemoeError for a device that is not there; too little memory is a plan without slots that says why.
    """
    chosen = choose_device(found_devices, device)
    n_ctx = padded(n_ctx or source.integer("context_length", 4096))
    n_ubatch = min(n_ubatch, n_ctx)
    # llama.cpp puts nothing onto a device of type "cpu" that is not there already.
    offloads = dense_on_device and (chosen.type in GPUS if chosen else vram is not None)
    budget = vram if vram is not None else chosen.free if chosen else 0
    n_used = max(source.integer("expert_used_count", 1), 1) if source.layers else 0
    needs = {
        # An upper bound: the token embedding, which is in it, stays in RAM.
        "dense_bytes": source.dense_bytes if offloads else 0,
        "kv_bytes": kv_bytes(source, n_ctx) if offloads else 0,
        "compute_bytes": compute_bytes(source, n_ctx, n_ubatch, n_used) if offloads else 0,
        "workspace_bytes": max((_workspace_bytes(layer, n_ubatch * n_used) for layer in source.layers), default=0),
        "margin_bytes": max(LEAST_MARGIN_BYTES, budget // 20),
    }
    n_expert = max((layer.n_expert for layer in source.layers), default=0)
    slot_bytes = sum(layer.bytes_per_expert for layer in source.layers)
    if not source.layers:
        n_slots, reason = 0, "a dense model has no routed experts"
    elif chosen is None and vram is None:
        n_slots, reason = 0, "no GPU"
    elif slots is not None:
        n_slots, reason = _slots_asked_for(slots, n_expert, n_used, warn_working_set)
    elif not budget:
        n_slots, reason = 0, "the budget is 0 bytes" if vram == 0 else f"{chosen.name} does not tell how much memory is free; --vram sets a budget"
    else:
        n_slots, reason = _slots_that_fit((budget - sum(needs.values())) // slot_bytes, n_expert, n_used)
    cache_bytes = sum(min(n_slots, layer.n_expert) * layer.bytes_per_expert for layer in source.layers)
    n_staging, one_staging_slot = 0, _largest_of_each_shape(source)
    if 0 < n_slots < n_expert:
        n_staging = min(MOST_STAGING, max(budget - sum(needs.values()) - cache_bytes, 0) // one_staging_slot)
    return CachePlan(
        device=chosen.name if chosen else None,
        description=chosen.description if chosen else f"a GPU with {human_bytes(budget)}" if vram is not None else "none",
        n_ctx=n_ctx,
        n_slots=n_slots,
        n_expert=n_expert,
        n_expert_used=n_used,
        slot_bytes=slot_bytes,
        cache_bytes=cache_bytes,
        n_staging=n_staging,
        staging_bytes=n_staging * one_staging_slot,
        budget_bytes=budget,
        free_bytes=chosen.free if chosen else 0,
        expert_bytes=source.expert_bytes,
        reason=reason,
        **needs,
    )


def _largest_of_each_shape(source: Source) -> int:
    """Bytes of one staging slot: layers whose experts have one shape share it."""
    return sum({tuple((p.type, p.n_in, p.n_out) for p in layer.projections): layer.bytes_per_expert for layer in source.layers}.values())


def _slots_asked_for(slots: int, n_expert: int, n_used: int, warn_working_set: bool) -> tuple[int, str]:
    if slots == 0:
        return 0, "slots are off"
    if slots > n_expert:
        return n_expert, f"{slots} slots were asked for, a layer has {n_expert} experts"
    if slots < n_used and warn_working_set:
        return slots, f"fewer slots than the {n_used} experts a token uses: misses are never loaded on demand"
    return slots, ""


def _slots_that_fit(room: int, n_expert: int, n_used: int) -> tuple[int, str]:
    if room >= n_expert:
        return n_expert, ""
    if room < n_used:
        return 0, f"room for {max(room, 0)} slots per layer, a token uses {n_used}: off"
    if n_expert < FEW_EXPERTS:
        return 0, f"few big experts, {n_expert} per layer with room for {room}: a cache that does not hold all makes such a model slower"
    return room, ""


def padded(n_ctx: int) -> int:
    """As llama_context does."""
    return -(-n_ctx // 256) * 256


def kv_bytes(source: Source, n_ctx: int) -> int:
    """llama.cpp's KV cache in f16. Every layer counts, whatever window it attends to: llama_cpp keeps the whole context (swa_full)."""
    n_layer = source.integer("block_count", 0)
    n_head = max(source.integer("attention.head_count", 1), 1)
    rank = source.integer("attention.kv_lora_rank", 0)
    if rank > 0 and source.integer("attention.key_length_mla", 0) > 0:
        # MLA: one compressed row serves as key and as value. Files from before key_length_mla keep ordinary keys and values.
        row = rank + source.integer("rope.dimension_count", 64)
    else:
        head = source.integer("embedding_length", 0) // n_head
        # An array with a number for each layer reads as if it was not there: all heads are an upper bound then.
        n_head_kv = source.integer("attention.head_count_kv", n_head)
        row = n_head_kv * (source.integer("attention.key_length", head) + source.integer("attention.value_length", head))
    # Hybrids (qwen3next): one layer in `interval` attends, the others keep a state of one size, in f32.
    n_attending = n_layer // max(source.integer("full_attention_interval", 1), 1)
    state = (n_layer - n_attending) * source.integer("ssm.inner_size", 0) * source.integer("ssm.state_size", 0) * F32_BYTES
    return n_attending * n_ctx * row * F16_BYTES + state


def compute_bytes(source: Source, n_ctx: int, n_ubatch: int, n_used: int) -> int:
    """llama.cpp reserves for a full batch that attends to a full context and wants all logits.

    The largest tensor is either the attention scores (without flash attention, which is llama_cpp's default) or the logits, and never both are alive. Beside it
    there are two attention masks (a model with sliding windows has both), and some rows per token: the residual, query, key and value, and the outputs of the
    experts that the token uses. For six small models on a CPU it was 0.1 to 26 % more than llama.cpp reserved, with their vocabulary known or outweighed.
    """
    n_vocab = source.integer("vocab_size", UNKNOWN_N_VOCAB)
    n_head = source.integer("attention.head_count", 1)
    n_embd = source.integer("embedding_length", 0)
    return n_ubatch * (max(n_vocab, n_head * n_ctx) + 2 * n_ctx + (n_used + 8) * n_embd) * F32_BYTES


def _workspace_bytes(layer: ExpertLayer, n_pairs: int) -> int:
    """Input and output of every routed pair of a batch, and what lies between up, gate, activation and down."""
    down = next((p for p in layer.projections if "ffn_down" in p.name), layer.projections[-1])
    n_in = max(p.n_in for p in layer.projections if p is not down or len(layer.projections) == 1)
    return n_pairs * (n_in + down.n_out + 3 * down.n_in) * F32_BYTES
