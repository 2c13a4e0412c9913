"""Which cache policy is best for one user's own text on one model, with as many slots as fit.

The sequences of the trace are parted by chance into two halves: from one, policies learn; on the other they are tried, the cache being kept from one sequence to the next as
in a chat. Best is the least predicted time per token (simulate.seconds), which weighs hits against traffic; among those within 1 % of it, the least traffic. What is not
better than LRU and than the default beyond chance, by the bootstrap interval of the difference, is not recommended: then it is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from edgemoe import policies, simulate
from edgemoe.errors import EdgemoeError
from edgemoe.package import Source
from edgemoe.simulate import LRU, Bootstrap, Figures, Rates
from edgemoe.trace import Trace

LEAST_SEQUENCES = 4
AS_GOOD = 1.01


class TuneError(EdgemoeError):
    """A trace that cannot say what is best for this model."""


def require_trace_of(source: Source, trace: Trace, mark: str) -> None:
    """mark: the model's fingerprint. Raises TuneError for a trace of another model."""
    wanted = (len(source.layers), max(layer.n_expert for layer in source.layers), source.integer("expert_used_count", trace.n_used))
    found = (trace.n_layers, trace.n_expert, trace.n_used)
    if found != wanted:
        says = ["{} layers of {} experts, {} used".format(*shape) for shape in (found, wanted)]
        raise TuneError(f"{trace.where}: found {says[0]}, wanted {says[1]} as in {source.path}")
    if trace.meta["fingerprint"] and mark and trace.meta["fingerprint"] != mark:
        raise TuneError(f"{trace.where}: was recorded from another model: found fingerprint {trace.meta['fingerprint'][:8]}, wanted {mark[:8]} of {source.path}")


def halves(trace: Trace, seed: int) -> tuple[Trace, Trace]:
    """Fit and held-out half, of sequences that differ. Raises TuneError when there are too few."""
    distinct = list(dict(zip(reversed(trace.sequence_hashes()), reversed(range(len(trace.offsets) - 1)))).values())
    if len(distinct) < LEAST_SEQUENCES:
        raise TuneError(f"{trace.where}: found {len(distinct)} different sequence{'s' * (len(distinct) != 1)}, wanted {LEAST_SEQUENCES} or more: one half is to learn from, the other to try on")
    order = np.random.default_rng(seed).permutation(sorted(distinct))
    middle = len(order) // 2
    return trace.select(sorted(order[:middle].tolist())), trace.select(sorted(order[middle:].tolist()))


@dataclass
class Tuned:
    policy: str
    is_default: bool
    reason: str
    rows: list[dict]  # simulate.summary of every candidate on the held-out half, with saved_ms_ci: time per token less than LRU's; the best first
    n_fit: int
    n_test: int
    tables: dict[str, np.ndarray]  # what the policy has learned
    left_out: dict[str, str]


def candidates(asked: list[str] | None) -> list[str]:
    wanted = simulate.read_policies(asked or ["sweep"])
    cheating = [p for p in asked or [] if policies.name_of(p) in policies.CHEATS]
    if cheating:
        raise TuneError(f"policy {cheating[0]}: it knows the future, no engine can run it")
    return [p for p in wanted if policies.name_of(p) not in policies.CHEATS]


def tune(
    source: Source, trace: Trace, n_slots: int, misses: str, rates: Rates = Rates(), asked: list[str] | None = None, seed: int = 0,
    progress: Callable[[int], Callable[[], None] | None] = lambda n: None,
) -> Tuned:
    """trace: as require_trace_of wants it. progress: gets the number of steps and returns what is called after each. Raises TuneError, PolicyError."""
    # An engine has no learned heads: what the trace has of them must not help.
    trace = replace(trace, head_t=None, head_s=None, meta={**trace.meta, "bytes_per_expert": [layer.bytes_per_expert for layer in source.layers]})
    fit, test = halves(trace, seed)
    default = policies.DEFAULT[misses]
    wanted = list(dict.fromkeys([default, *candidates(asked)]))
    learned = simulate.learn([fit], wanted)
    plan = simulate.plan_runs(test, wanted, [n_slots], [misses], learned, warm=True)
    outcomes = simulate.run_all(test, plan, learned, progress(len(plan.runs) * (len(test.offsets) - 1)))
    by_policy = {f.outcome.run.policy: f for f in simulate.figures_of(test, outcomes, rates)}
    if not by_policy[LRU].n_tokens.sum():
        raise TuneError(f"{trace.where}: no decoded tokens in the held-out half")
    boot = Bootstrap(len(test.offsets) - 1, seed)
    rows = [_row(f, by_policy, boot, default) for p, f in by_policy.items() if not f.outcome.bound]
    rows.sort(key=lambda r: (r["expert_ms"], r["load_mb"]))
    policy, reason = _choose(rows, default)
    tables = policies.policy(policy, learned).learned if policies.name_of(policy) in policies.LEARNED and "fit=" not in policy else {}
    return Tuned(policy, policy == default, reason, rows, len(fit.offsets) - 1, len(test.offsets) - 1, tables, plan.left_out)


def _row(f: Figures, by_policy: dict[str, Figures], boot: Bootstrap, default: str) -> dict:
    row = simulate.summary(f, {p: by_policy[p] for p in simulate.BESIDE}, boot)
    for name, other in (("saved_ms_ci", by_policy[LRU]), ("saved_over_default_ms_ci", by_policy[default])):
        row[name] = boot.interval(lambda total, other=other: 1e3 * (other.time(total) - f.time(total)))
    return row


def _choose(rows: list[dict], default: str) -> tuple[str, str]:
    """Policy and why. rows: the best first."""
    better = [r for r in rows if r["saved_ms_ci"] and r["saved_ms_ci"][0] > 0]
    if not better:
        return default, f"nothing beats {LRU} on held-out sequences beyond chance"
    better = [r for r in better if r["policy"] != default and r["saved_over_default_ms_ci"][0] > 0]
    if not better:
        return default, "nothing beats it on held-out sequences beyond chance"
    near = [r for r in better if r["expert_ms"] <= AS_GOOD * better[0]["expert_ms"]]
    best = min(near, key=lambda r: (r["load_mb"], r["expert_ms"]))
    return best["policy"], "least predicted time per token on held-out sequences" + (f", and least traffic of {len(near)} that are within 1 %" if len(near) > 1 else "")
