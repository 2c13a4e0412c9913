"""Traces through the cache without a model: the engine's own residency and policies, with loads that take no time.

The rules of counting: an event is one layer in one step, with the set of experts that its tokens need. What is in a slot when it begins is a hit. A (accesses) = hits + D
(demand loads) + C (computed on the CPU); P (proactive loads) is what the policy brought in without being asked, used or not. `misses` says what becomes of the rest: "load"
is a cache that computes only what it holds, as RAM over disk does; "cpu" computes misses where they lie, as a GPU beside a CPU can. Events of more than 16 tokens are
prompts: they fill the cache and are counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgemoe import _native
from edgemoe.policies import Policy, PolicyError, heads_of, policy as read_policy

FIELDS = ("n_events", "n_accesses", "n_hits", "n_demand", "n_computed", "n_proactive", "n_evicted", "n_unused")
DECODE, PROMPT = 0, 1
ABSENT = np.uint16(0xFFFF)
MOST_PROMPT_ROWS = 512  # of a recording that does not say how its prompts were cut


class Replay:
    """One cache. n_expert: per layer. n_slots: per layer, or of all layers together with shared=True (then n_slots times the layers). costs, budget: slots of all layers
    together within a budget of bytes, of which an expert takes as many as its layer says; every miss is loaded, as where experts are in RAM and on the disk.

    Raises PolicyError."""

    def __init__(
        self, n_expert: list[int], n_slots: int = 0, policy: str | Policy = "lru", misses: str = "load", shared: bool = False, learned=None, costs: list[int] = (), budget: int = 0,
        **options,
    ):
        self._ffi, self._lib = _native.load()
        self.policy = policy if isinstance(policy, Policy) else read_policy(policy, learned)
        self.n_layers = len(n_expert)
        misses_text = self._ffi.new("char[]", misses.encode())
        # Misses that are not to stay need a place for as long as their event lasts.
        fields = {"n_slots": n_slots, "misses": misses_text, "shared": shared, "seed": True, "n_staging": max(n_expert), **options, **self.policy.options()}
        if costs:
            costs = self._ffi.new("uint64_t[]", list(costs))
            fields |= {"shared": True, "costs": costs, "most_bytes": budget}
        handle = self._lib.edgemoe_replay_open(self._ffi.new("uint32_t[]", n_expert), self.n_layers, self._ffi.new("struct edgemoe_cache_options *", fields))
        if not handle:
            raise PolicyError(_native.last_error())
        self._handle = self._ffi.gc(handle, self._lib.edgemoe_replay_close)

    def sequence(self, rows: dict) -> None:
        """Replays one sequence: the arrays of edgemoe_rows by name, as `rows_of` makes them. Raises PolicyError."""
        struct = self._ffi.new("struct edgemoe_rows *")
        struct.n_rows, _, struct.n_used = rows["ids"].shape
        if rows.get("hidden") is not None:
            struct.n_embd = rows["hidden"].shape[-1]
        for name, array in rows.items():
            if array is not None and len(array):
                setattr(struct, name, self._ffi.from_buffer(f"{_C_TYPES[array.dtype]}[]", array))
        if self._lib.edgemoe_replay_sequence(self._handle, struct):
            raise PolicyError(_native.last_error())
        if self.policy.error:
            raise self.policy.failure()

    def clear(self) -> None:
        """Empty slots, nothing learned since it was opened. Counters stay."""
        self._lib.edgemoe_replay_clear(self._handle)

    def counts(self) -> np.ndarray:
        """int64 [2, layers, fields]: decoding and prompts."""
        found = np.zeros((2, self.n_layers, len(FIELDS)), np.int64)
        counts = self._ffi.new("struct edgemoe_access_counts *")
        for phase in (DECODE, PROMPT):
            for layer in range(self.n_layers):
                self._lib.edgemoe_replay_get_counts(self._handle, phase, layer, counts)
                found[phase, layer] = [getattr(counts, name) for name in FIELDS]
        return found

    def residents(self, layer: int) -> list[int]:
        experts = self._ffi.new("int32_t[]", 1 << 16)
        return list(experts[0 : self._lib.edgemoe_replay_get_residents(self._handle, layer, experts)])


_C_TYPES = {np.dtype(np.uint16): "uint16_t", np.dtype(np.int32): "int32_t", np.dtype(np.float32): "float"}


def rows_of(trace, sequence: int, with_hidden: bool = False) -> dict:
    """The arrays of one sequence of a trace, as the library takes them."""
    first, end = int(trace.offsets[sequence]), int(trace.offsets[sequence + 1])

    def part(name, dtype):
        array = getattr(trace, name, None)
        return None if array is None else np.ascontiguousarray(array[first:end], dtype)

    ids = trace.ids[first:end]
    absent = np.iinfo(ids.dtype).max
    ids = np.where(ids == absent, ABSENT, ids.astype(np.uint16)) if absent < 0xFFFF else np.ascontiguousarray(ids, np.uint16)
    rows = {"ids": ids, "stage": part("stage", np.int32), "token_ids": part("token_ids", np.int32), "next": part("head_t", np.float32), "successor": part("head_s", np.float32)}
    probs = part("probs", np.float32)
    if probs is not None:
        rows["chosen_probs" if probs.shape[-1] == ids.shape[-1] else "probs"] = probs
    if with_hidden:
        rows["hidden"] = part("hidden", np.float32)
    rows["step"] = part("step", np.int32)
    phase = part("phase", np.int32)
    if rows["step"] is None and phase is not None and (phase == 0).any():
        # Decoded rows are steps of their own; those of a prompt go together.
        place = np.arange(len(phase))
        starts = (phase == 1) | (np.diff(phase, prepend=1) != 0) | (place % MOST_PROMPT_ROWS == 0)
        rows["step"] = np.cumsum(starts).astype(np.int32)
    return rows


@dataclass
class Replayed:
    """counts: int64 [sequences, 2 (decoding, prompts), layers, fields of FIELDS]."""

    policy: str
    n_slots: int
    misses: str
    shared: bool
    counts: np.ndarray

    def per_sequence(self, phase: int = DECODE) -> dict[str, np.ndarray]:
        """Sums over the layers: int64 [sequences] by field."""
        return dict(zip(FIELDS, self.counts[:, phase].sum(1).T))

    def per_layer(self, phase: int = DECODE) -> dict[str, np.ndarray]:
        return dict(zip(FIELDS, self.counts[:, phase].sum(0).T))

    def total(self, phase: int = DECODE) -> dict[str, int]:
        return {name: int(n.sum()) for name, n in self.per_sequence(phase).items()}


def replay(trace, policy: str, n_slots: int, misses: str = "load", *, shared: bool = False, warm: bool = False, learned=None, rows=None, done=None, **options) -> Replayed:
    """Every sequence of a trace through one cache, which is emptied before each unless `warm`.

    rows: an iterable of what `rows_of` makes, to save its work over several calls. done: called after each sequence. options: further fields of
    edgemoe_cache_options, such as strict and most_inserts. Raises PolicyError."""
    chosen = read_policy(policy, learned, heads_of(trace))
    cache = Replay([trace.n_expert] * trace.ids.shape[1], n_slots, chosen, misses, shared, **options)
    counts, before = [], cache.counts()
    with_hidden = "mlp1" in chosen.learned
    for each in rows if rows is not None else (rows_of(trace, s, with_hidden) for s in range(len(trace.offsets) - 1)):
        if not warm:
            cache.clear()
        cache.sequence(each)
        now = cache.counts()
        counts.append(now - before)
        before = now
        if done:
            done()
    return Replayed(policy, n_slots, misses, shared, np.array(counts))
