"""Which cache policy is best for one user's own text on one model, with as many slots as fit.

The sequences of the trace are parted by chance into two halves: from one, policies learn; on the other they are tried, the cache being kept from one sequence to the next as
in a chat. Learned heads are tried beside, in place of what temporal, spatio-temporal and spatio would learn, on sequences that the heads were not trained on; they are left out of
the choice unless they save time, traffic included, over the best policy without them, beyond chance. Best is the least predicted time per token (simulate.seconds), which weighs
hits against traffic; among those within 1 % of it, the least traffic. What is not better than LRU and than the default beyond chance, by the bootstrap interval of the
difference, is not recommended: then it is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from edgemoe import policies, simulate
from edgemoe.errors import EdgemoeError
from edgemoe.heads import MODES, Heads
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
    fit, test = parted(trace, seed)
    return trace.select(fit), trace.select(test)


def parted(trace: Trace, seed: int, learned: Iterable[int] = ()) -> tuple[list[int], list[int]]:
    """Sequences to learn from and to try on. learned: those that something was trained on, which are not to be tried on. Raises TuneError when there are too few."""
    distinct = list(dict(zip(reversed(trace.sequence_hashes()), reversed(range(len(trace.offsets) - 1)))).values())
    if len(distinct) < LEAST_SEQUENCES:
        raise TuneError(f"{trace.where}: found {len(distinct)} different sequence{'s' * (len(distinct) != 1)}, wanted {LEAST_SEQUENCES} or more: one half is to learn from, the other to try on")
    order = np.random.default_rng(seed).permutation(sorted(distinct)).tolist()
    learned = set(learned)
    order = [s for s in order if s in learned] + [s for s in order if s not in learned]
    middle = max(len(order) // 2, sum(s in learned for s in order))
    return sorted(order[:middle]), sorted(order[middle:])


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
    heads: bool = False  # the policy goes by learned heads
    heads_note: str = ""  # what became of them, or why they were not tried


def candidates(asked: list[str] | None) -> list[str]:
    wanted = simulate.read_policies(asked or ["sweep"])
    cheating = [p for p in asked or [] if policies.name_of(p) in policies.CHEATS]
    if cheating:
        raise TuneError(f"policy {cheating[0]}: it knows the future, no engine can run it")
    return [p for p in wanted if policies.name_of(p) not in policies.CHEATS]


def tune(
    source: Source, trace: Trace, n_slots: int, misses: str, rates: Rates = Rates(), asked: list[str] | None = None, seed: int = 0,
    progress: Callable[[int], Callable[[], None] | None] = lambda n: None, heads: Heads | None = None,
) -> Tuned:
    """trace: as require_trace_of wants it. progress: gets the number of steps and returns what is called after each. heads: whose outputs the trace has. Raises TuneError,
    PolicyError."""
    trace = replace(trace, meta={**trace.meta, "bytes_per_expert": [layer.bytes_per_expert for layer in source.layers]})
    # What a trace may have brought of heads is nothing that an engine has.
    without = replace(trace, head_t=None, head_s=None)
    rows_fit, rows_test = parted(trace, seed, heads.trained_on(trace) if heads else ())
    note = ""
    if len(rows_test) < LEAST_SEQUENCES // 2:
        rows_fit, rows_test = parted(trace, seed)
        heads, note = None, f"{heads.where}: was trained on these sequences, and none are left to try it on"
    fit, test = without.select(rows_fit), without.select(rows_test)
    default = policies.DEFAULT[misses]
    wanted = list(dict.fromkeys([default, *candidates(asked)]))
    learned = simulate.learn([fit], wanted)
    plan = simulate.plan_runs(test, wanted, [n_slots], [misses], learned, warm=True)
    by_heads = [p for p in wanted if policies.name_of(p) in policies.BY_HEADS and "fit=" not in p and not policies.lacks(policies.name_of(p), None, MODES[heads.mode])] if heads else []
    done = progress((len(plan.runs) + len(by_heads)) * (len(test.offsets) - 1))
    by_policy = {f.outcome.run.policy: f for f in simulate.figures_of(test, simulate.run_all(test, plan, learned, done), rates)}
    if not by_policy[LRU].n_tokens.sum():
        raise TuneError(f"{trace.where}: no decoded tokens in the held-out half")
    boot = Bootstrap(len(test.offsets) - 1, seed)
    rows = [_row(f, by_policy, boot, default) for p, f in by_policy.items() if not f.outcome.bound]
    if by_heads:
        heard = trace.select(rows_test)
        runs = replace(plan, runs=[simulate.Run(p, n_slots, misses) for p in by_heads])
        best = by_policy[min(rows, key=lambda r: (r["expert_ms"], r["load_mb"]))["policy"]]
        tried = [_row(f, by_policy, boot, default, best) for f in simulate.figures_of(heard, simulate.run_all(heard, runs, {}, done), rates)]
        note = _gain(min(tried, key=lambda r: (r["expert_ms"], r["load_mb"])), best.outcome.run.policy)
        rows += tried
    rows.sort(key=lambda r: (r["expert_ms"], r["load_mb"]))
    policy, reason, with_heads = _choose(rows, default)
    learns = policies.name_of(policy) in policies.LEARNED and "fit=" not in policy and not with_heads
    tables = policies.policy(policy, learned).learned if learns else {}
    return Tuned(policy, policy == default, reason, rows, len(rows_fit), len(rows_test), tables, plan.left_out, with_heads, note)


def _row(f: Figures, by_policy: dict[str, Figures], boot: Bootstrap, default: str, best: Figures | None = None) -> dict:
    """best: of the policies without heads, when this one goes by heads."""
    row = {**simulate.summary(f, {p: by_policy[p] for p in simulate.BESIDE}, boot), "heads": best is not None}
    others = {"saved_ms_ci": by_policy[LRU], "saved_over_default_ms_ci": by_policy[default]} | ({"saved_by_heads_ms_ci": best} if best else {})
    for name, other in others.items():
        row[name] = boot.interval(lambda total, other=other: 1e3 * (other.time(total) - f.time(total)))
    if best:
        row["saved_by_heads_ms"] = float(1e3 * (best.time() - f.time()))
    return row


def _gain(row: dict, best: str) -> str:
    found = row["saved_by_heads_ms_ci"]
    interval = " [{:+.2f}, {:+.2f}]".format(*found) if found else ""
    return f"learned heads: {row['policy']} saves {row['saved_by_heads_ms']:+.2f}{interval} ms/token over {best}, the best without"


def _choose(rows: list[dict], default: str) -> tuple[str, str, bool]:
    """Policy, why, and whether it goes by learned heads. rows: the best first."""
    rows = [r for r in rows if not r.get("heads") or (r["saved_by_heads_ms_ci"] and r["saved_by_heads_ms_ci"][0] > 0)]
    better = [r for r in rows if r["saved_ms_ci"] and r["saved_ms_ci"][0] > 0]
    if not better:
        return default, f"nothing beats {LRU} on held-out sequences beyond chance", False
    better = [r for r in better if r["policy"] != default and r["saved_over_default_ms_ci"][0] > 0]
    if not better:
        return default, "nothing beats it on held-out sequences beyond chance", False
    near = [r for r in better if r["expert_ms"] <= AS_GOOD * better[0]["expert_ms"]]
    best = min(near, key=lambda r: (r["load_mb"], r["expert_ms"]))
    return best["policy"], "least predicted time per token on held-out sequences" + (f", and least traffic of {len(near)} that are within 1 %" if len(near) > 1 else ""), bool(best.get("heads"))
