"""Counters of expert_stats() by tier, in words: slots on a device are filled from RAM, RAM from the disk. A tier that is not there has no accesses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """A = hits + what was missing. Of the device P, evicted, failed, bytes and waiting include prompts; everything else is decoding."""

    name: str
    source: str  # where its loads come from
    n_accesses: int
    n_hits: int
    n_demand: int
    n_proactive: int
    n_evicted: int
    n_failed: int
    n_bytes: int
    stall_us: int

    def hits(self) -> str:
        return f"{self.name} {self.n_hits} of {self.n_accesses} ({self.n_hits / self.n_accesses:.0%})"


DEVICE_KEYS = ("n_decode_accesses", "n_decode_hits", "n_decode_demand", "n_proactive", "n_evicted", "n_failed", "bytes_loaded", "stall_us")
RAM_KEYS = ("n_ram_accesses", "n_ram_hits", "n_ram_demand", "n_ram_proactive", "n_ram_evicted", "n_ram_failed", "ram_bytes_read", "ram_stall_us")
TIERS = (("slots", "RAM", DEVICE_KEYS), ("RAM", "disk", RAM_KEYS))


def tiers(counts: dict[str, int]) -> list[Tier]:
    """Those that were accessed; `counts` are those of expert_stats(), or differences of them."""
    found = [Tier(name, source, *(counts.get(key, 0) for key in keys)) for name, source, keys in TIERS]
    return [tier for tier in found if tier.n_accesses]


def table(counts: dict[str, int], n_tokens: int) -> list[str]:
    """A line for each tier and its link. `n_tokens` were decoded."""
    found = tiers(counts)
    if not found:
        return []
    lines = [f"{'tier':<14} {'A':>9} {'hits':>9} {'hit %':>6} {'D':>8} {'P':>8} {'evicted':>8} {'failed':>7} {'MB loaded':>10} {'MB/token':>9} {'s waited':>9}"]
    for t in found:
        mb = t.n_bytes / 1e6
        lines.append(
            f"{f'{t.name} <- {t.source}':<14} {t.n_accesses:>9} {t.n_hits:>9} {100 * t.n_hits / t.n_accesses:>6.1f} {t.n_demand:>8} {t.n_proactive:>8} {t.n_evicted:>8} {t.n_failed:>7} "
            f"{mb:>10.1f} {mb / max(n_tokens, 1):>9.1f} {t.stall_us / 1e6:>9.2f}"
        )
    return lines


def status(counts: dict[str, int], n_tokens: int, seconds: float) -> str:
    """The last moments in one line: differences of counters, and the tokens that came meanwhile."""
    found = tiers(counts)
    parts = [f"{n_tokens / seconds:.1f} tok/s", *(t.hits() for t in found)]
    for t in found:
        if t.source == "disk":
            parts.append(f"disk {t.n_bytes / 1e6 / seconds:.0f} MB/s, {t.n_bytes / 1e6 / max(n_tokens, 1):.1f} MB/token")
    if found:
        parts.append(f"waited {sum(t.stall_us for t in found) / 1e6 / seconds:.0%}")
    return " | ".join(parts)
