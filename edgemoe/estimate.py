"""How fast a model will be whose experts are partly on the disk: expected before it is loaded.

    time per token = (dense + experts) / memory rate + missing experts / disk rate

A layer's missing experts are asked for when its router has chosen, and little is left to be computed meanwhile: on two cores the sum is what was measured, not the longer
of the two. Prompts and a GPU are left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from edgemoe.disk_probe import Rates, probe
from edgemoe.machine import human_bytes
from edgemoe.package import Source
from edgemoe.ram_plan import RamPlan

# Share of the experts that fit -> share of the accesses that hit. LRU, one pool for all layers, kept from text to text: `edgemoe simulate T --policy lru --misses load --scope
# model --warm` over nine recordings of three models: gpt-oss-20b answering MMLU (4), DeepSeek-V2-Lite reading law, summaries, translations and intents (4), Qwen3-30B-A3B (1).
# The median; from the lowest to the highest it is 27 to 58 % at an eighth, 47 to 83, 72 to 96, 89 to 99 %. Nothing was measured below: in most of these models the experts of one
# token are a tenth or an eighth of all, and less than that is no pool.
HITS = ((0.0, 0.0), (0.125, 0.431), (0.25, 0.600), (0.5, 0.898), (0.75, 0.971), (1.0, 1.0))
BASIS = "for text like what was recorded of other models"


@dataclass(frozen=True)
class Estimate:
    """Decoding, per token. bound: "disk-bound" or "memory-bound", whatever takes longer."""

    hit: float  # share of a token's experts that are found in RAM
    miss_bytes: float
    disk_s: float
    compute_s: float
    tokens_per_s: float
    random_tokens_per_s: float  # if routing was random: then no policy hits more than the share that fits
    bound: str
    rates: Rates

    def as_dict(self) -> dict:
        return asdict(self)

    def line(self) -> str:
        return (
            f"expected {speed(self.tokens_per_s)}, {self.bound}: {self.hit:.0%} of the experts found in RAM, {human_bytes(self.miss_bytes)} per token from disk "
            f"({BASIS}; {speed(self.random_tokens_per_s)} if routing was random)"
        )

    def report(self) -> str:
        """A table for humans."""
        rows = [
            ("measured", self.rates.line()),
            ("from disk", f"{human_bytes(self.miss_bytes):>10}  per token expected: {self.hit:.0%} of the experts found in RAM, {BASIS}"),
            ("expected", f"{speed(self.tokens_per_s)}, {self.bound}: {1e3 * self.disk_s:.0f} ms of disk, {1e3 * self.compute_s:.0f} ms of computing per token"),
            ("at worst", f"{speed(self.random_tokens_per_s)}, with random routing"),
        ]
        return "\n".join(f"{name:<10} {text}" for name, text in rows)


def speed(tokens_per_s: float) -> str:
    """0.4567 -> '0.46 tok/s': no more digits than are meant."""
    return f"{tokens_per_s:.2g} tok/s" if tokens_per_s < 99.5 else f"{tokens_per_s:.0f} tok/s"


def expected_hit(share: float) -> float:
    """Of a pool that holds this share (0 to 1) of all experts."""
    return float(np.interp(share, *zip(*HITS)))


def estimate(plan: RamPlan, rates: Rates) -> Estimate:
    """Of a plan that has slots; rates above 0."""
    hit = expected_hit(plan.share)
    expert_s, dense_s = plan.token_bytes / rates.memory_bytes_per_s, plan.dense_bytes / rates.memory_bytes_per_s

    def disk_s(hit: float) -> float:
        return (1 - hit) * plan.token_bytes / rates.disk_bytes_per_s

    return Estimate(
        hit=hit,
        miss_bytes=(1 - hit) * plan.token_bytes,
        disk_s=disk_s(hit),
        compute_s=expert_s + dense_s,
        tokens_per_s=1 / (dense_s + expert_s + disk_s(hit)),
        random_tokens_per_s=1 / (dense_s + expert_s + disk_s(plan.share)),
        bound="disk-bound" if disk_s(hit) > expert_s + dense_s else "memory-bound",
        rates=rates,
    )


def expected(source: Source, plan: RamPlan) -> Estimate | None:
    """Measures for two seconds when experts will be read from disk; None otherwise. Raises ModelError."""
    return estimate(plan, probe(source)) if plan.mode == "slots" else None
