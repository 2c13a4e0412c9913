"""Where a model's experts lie in RAM: mapped in place, or in a pool of slots beside the disk. Decided before a model is loaded, shown by `edgemoe plan`.

    room for experts = usable memory - dense - KV cache - compute buffers - margin

"mapped" is memory that the experts share with the page cache: best when they all fit. When they do not, the kernel throws out whatever it likes, dense weights too, and the
machine crawls; a pool under a budget keeps what is used most and reads the rest past the page cache. It is to hold what one token uses, if need be at the cost of the margin
and of buffers that llama.cpp reserves and seldom fills. A budget that was asked for is obeyed, or refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from edgemoe import machine
from edgemoe.cache_plan import compute_bytes, kv_bytes, padded
from edgemoe.errors import EdgemoeError
from edgemoe.machine import human_bytes, parse_bytes
from edgemoe.package import ExpertLayer, Source

LEAST_MARGIN_BYTES = 128 << 20
PAGE_BYTES = 4096


@dataclass(frozen=True)
class RamPlan:
    """Sizes in bytes. Slots are those of all layers together, which share the pool. `reason` says why it is this mode."""

    mode: str  # "mapped" or "slots"
    budget_bytes: int  # what experts may take; 0 when they are mapped
    n_slots: int  # experts that the budget holds, about; 0 when they are mapped
    n_experts: int
    expert_bytes: int  # of the whole model, like dense_bytes
    dense_bytes: int
    kv_bytes: int
    compute_bytes: int  # llama.cpp's buffers
    on_device_bytes: int  # of the three before: not in RAM
    margin_bytes: int
    usable_bytes: int
    token_bytes: int  # experts that one token uses
    reason: str

    @property
    def room_bytes(self) -> int:
        """For experts, beside everything else; negative: not even the rest fits."""
        return self.usable_bytes - self.beside_bytes - self.margin_bytes

    @property
    def beside_bytes(self) -> int:
        """What is in RAM beside experts."""
        return max(self.dense_bytes + self.kv_bytes + self.compute_bytes - self.on_device_bytes, 0)

    @property
    def share(self) -> float:
        """Of the experts that are in RAM."""
        return self.n_slots / self.n_experts if self.mode == "slots" else 1.0

    def as_dict(self) -> dict:
        return {**asdict(self), "room_bytes": self.room_bytes}

    def line(self) -> str:
        """Where experts are about to lie in RAM, in one line."""
        if self.mode == "mapped":
            return f"experts mapped in RAM, {human_bytes(self.expert_bytes)}: {self.reason}"
        return (
            f"experts in RAM slots: {human_bytes(self.budget_bytes)} for {self.n_slots} of {self.n_experts}, all are {human_bytes(self.expert_bytes)}, "
            f"the others are read from disk: {self.reason}; beside them {human_bytes(self.beside_bytes)} dense, KV cache and buffers"
        )

    def report(self) -> str:
        """A table for humans."""
        rows = [("in RAM", f"{self.mode}: {self.reason}")]
        sizes = [
            ("usable", self.usable_bytes, "memory that this process may still fill"),
            ("dense", self.dense_bytes, "layers without routed experts"),
            ("KV cache", self.kv_bytes, ""),
            ("compute", self.compute_bytes, "llama.cpp's buffers"),
            ("on device", -self.on_device_bytes, "of these three"),
            ("margin", self.margin_bytes, "kept free"),
            ("room", self.room_bytes, f"for {human_bytes(self.expert_bytes)} of experts"),
            ("RAM slots", self.budget_bytes, f"hold {self.n_slots} of {self.n_experts} experts"),
            ("per token", self.token_bytes, "of experts are used"),
        ]
        if self.n_experts:
            rows += [(name, f"{human_bytes(size):>10}  {text}".rstrip()) for name, size, text in sizes if size]
        return "\n".join(f"{name:<10} {text}" for name, text in rows)


def slot_bytes(layer: ExpertLayer) -> int:
    """What an expert of this layer takes in RAM: whole pages, and one more for each projection, whose bytes may begin anywhere in a page of the file."""
    return -(-layer.bytes_per_expert // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES * len(layer.projections)


def plan_ram(source: Source, ram: int | str | None, *, n_ctx: int, n_ubatch: int = 512, memory: machine.Memory | None = None, on_device_bytes: int = 0) -> RamPlan:
    """`ram`: bytes for experts (a number, or text such as "6G"), "mapped", or "auto" (None is the same). `memory` None: this machine's now. `on_device_bytes`: of the
    dense weights, the KV cache and the buffers, what lies on a device. Raises EdgemoeError for a size that does not hold the experts of one token, and for other text.
    """
    usable = (memory or machine.memory()).usable
    n_ctx = padded(n_ctx or source.integer("context_length", 4096))
    n_used = max(source.integer("expert_used_count", 1), 1) if source.layers else 0
    facts = {
        "n_experts": sum(layer.n_expert for layer in source.layers),
        "expert_bytes": source.expert_bytes,
        "dense_bytes": source.dense_bytes,
        "kv_bytes": kv_bytes(source, n_ctx),
        "compute_bytes": compute_bytes(source, n_ctx, min(n_ubatch, n_ctx), n_used),
        "on_device_bytes": on_device_bytes,
        "margin_bytes": max(LEAST_MARGIN_BYTES, usable // 20),
        "usable_bytes": usable,
        "token_bytes": sum(min(n_used, layer.n_expert) * layer.bytes_per_expert for layer in source.layers),
    }

    def mapped(reason: str) -> RamPlan:
        return RamPlan("mapped", 0, 0, reason=reason, **facts)

    def slots(budget: int, reason: str) -> RamPlan:
        return RamPlan("slots", budget, _slots_within(budget, source.layers), reason=reason, **facts)

    asked = _asked(ram)
    if not source.layers:
        return mapped("a dense model has no routed experts")
    if asked == "mapped":
        return mapped("asked for")
    token, room = facts["token_bytes"], mapped("").room_bytes
    if asked != "auto":
        if asked < token:
            raise EdgemoeError(f"--ram {human_bytes(asked)}: the experts of one token take {human_bytes(token)}; wanted at least that")
        more = f", MORE than the {human_bytes(max(room, 0))} that are left for experts" if min(asked, facts["expert_bytes"]) > room else ""
        return slots(min(asked, sum(layer.n_expert * slot_bytes(layer) for layer in source.layers)), f"asked for{more}")
    if facts["expert_bytes"] <= room:
        return mapped(f"they fit into the {human_bytes(room)} that are left for experts")
    if room >= token:
        return slots(room, "they do not all fit")
    least = token + facts["dense_bytes"] + facts["kv_bytes"]
    if usable + on_device_bytes >= least:
        return slots(token, f"room for {human_bytes(max(room, 0))}, but the experts of one token take {human_bytes(token)}: the margin is gone")
    return mapped(f"the experts of one token with all that is beside them take {human_bytes(least)}: a pool needs at least that, so they are read through the page cache")


def _asked(ram: int | str | None) -> int | str:
    """Bytes, "auto" or "mapped"."""
    if ram is None or ram in ("auto", "mapped"):
        return ram or "auto"
    try:
        return ram if isinstance(ram, int) else parse_bytes(ram)
    except ValueError:
        raise EdgemoeError(f"--ram {ram}: wanted auto, mapped or a size such as 6G") from None


def _slots_within(budget: int, layers: list[ExpertLayer]) -> int:
    """One pool for all layers, which counts bytes: about as many experts of each as there are of them."""
    n = sum(layer.n_expert for layer in layers)
    return min(budget * n // sum(layer.n_expert * slot_bytes(layer) for layer in layers), n)
