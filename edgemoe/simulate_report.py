"""Simulated runs as a table for a terminal, as CSV and as JSON. Rows are those of simulate.summaries and lossy.summary."""

from __future__ import annotations

import csv
import io

from edgemoe.simulate import BELADY, BELADY_FREE, BESIDE, LRU, MOST_DECODE_TOKENS, Plan, Rates
from edgemoe.trace import Trace

REGIME_TEXT = {"load": "misses loaded", "cpu": "misses computed on the CPU"}
INTERVALS = ("hit_ci", "hit_minus_lru_ci", "load_mb_ci", "load_mb_minus_lru_ci")


def document(trace: Trace, plan: Plan, rates: Rates, rows: list[dict], lossy_rows: list[dict], train: list[str] = ()) -> dict:
    """Everything, for JSON."""
    return {
        "traces": trace.where.split(", "),
        "train": list(train),
        "model": trace.meta["model"],
        "n_layers": trace.n_layers,
        "n_expert": trace.n_expert,
        "n_used": trace.n_used,
        "bytes_per_expert": trace.meta["bytes_per_expert"],
        "n_sequences": len(trace.offsets) - 1,
        "n_tokens": rows[0]["n_tokens"] if rows else 0,
        "scope": "model" if plan.shared else "layer",
        "warm": plan.warm,
        "rates": {"link": rates.link, "cpu": rates.cpu, "device": rates.device},
        "runs": rows,
        "lossy": lossy_rows,
        "left_out": plan.left_out,
    }


def to_csv(rows: list[dict]) -> str:
    """A line per run; and one per sequence of it, where rows have them."""
    names = [n for n in rows[0] if n not in ("layers", "sequences")] if rows else []
    columns = ["sequence"]
    for name in names:
        columns += [f"{name}_low", f"{name}_high"] if name in INTERVALS else [name]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        flat = {"sequence": "all"}
        for name in names:
            flat |= dict(zip((f"{name}_low", f"{name}_high"), row[name] or ("", ""))) if name in INTERVALS else {name: row[name]}
        writer.writerow(flat)
        per = row.get("sequences", {})
        for s, values in enumerate(zip(*per.values())):
            writer.writerow({"sequence": s, **{k: row[k] for k in ("policy", "bound", "n_slots", "misses")}, **dict(zip(per, values))})
    return out.getvalue()


def _percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f}"


def _interval(row: dict, name: str, by: float, digits: int) -> str:
    found = row[name]
    return "" if found is None else f"[{by * found[0]:.{digits}f}, {by * found[1]:.{digits}f}]"


def _difference(row: dict) -> str:
    if row["policy"] == LRU or row["hit_minus_lru"] is None:
        return ""
    return f"{100 * row['hit_minus_lru']:+.1f} {_interval(row, 'hit_minus_lru_ci', 100, 1)}".rstrip()


def _gap(row: dict) -> str:
    shares = [_percent(row[name], 0) or "-" for name in ("gap_share", "gap_share_free")]
    return "" if row["policy"] in BESIDE or shares == ["-", "-"] else " / ".join(shares)


def _name(row: dict) -> str:
    return row["policy"] + (" *" if row["bound"] else " (reference)" if row["policy"] == LRU else "")


COLUMNS = [  # header, cell, aligned to the left
    ("policy", _name, True),
    ("hits / A", lambda r: f"{r['n_hits']}/{r['n_accesses']}", False),
    ("hit %", lambda r: _percent(r["hit"]), False),
    ("95 %", lambda r: _interval(r, "hit_ci", 100, 1), True),
    ("over LRU", _difference, True),
    ("adj %", lambda r: _percent(r["adjusted_hit"]), False),
    ("gap %", _gap, False),
    ("D", lambda r: str(r["n_demand"]), False),
    ("C", lambda r: str(r["n_computed"]), False),
    ("P", lambda r: str(r["n_proactive"]), False),
    ("unused", lambda r: str(r["n_unused"]), False),
    ("loads", lambda r: "" if r["load_experts"] is None else f"{r['load_experts']:.3f}", False),
    ("MB/token", lambda r: "" if r["load_mb"] is None else f"{r['load_mb']:.1f}", False),
    ("tokens/s", lambda r: "" if r["tokens_per_s"] is None else f"{r['tokens_per_s']:.1f}", False),
]
EMPTY = {"", "0"}  # a column of these is left out


def aligned(headers: list[str], cells: list[list[str]], left: list[bool]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(headers, *cells)]
    return ["  ".join(f"{c:<{w}}" if is_left else f"{c:>{w}}" for c, w, is_left in zip(line, widths, left)).rstrip() for line in [headers, *cells]]


def _group(rows: list[dict], columns) -> list[str]:
    ordered = sorted(rows, key=lambda r: (-r["n_hits"], r["load_experts"] or 0))
    return aligned([c[0] for c in columns], [[c[1](r) for c in columns] for r in ordered], [c[2] for c in columns])


def table(trace: Trace, plan: Plan, rates: Rates, rows: list[dict], lossy_rows: list[dict]) -> str:
    lines = [_head(trace, plan)]
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["n_slots"], row["misses"]), []).append(row)
    for (n_slots, misses), members in groups.items():
        shown = [c for c in COLUMNS if not all(c[1](r) in EMPTY for r in members)]
        lines += ["", _title(n_slots, misses, trace, plan), *_group(members, shown)]
    if lossy_rows:
        lines += ["", *_lossy(lossy_rows)]
    return "\n".join([*lines, "", *_footnotes(trace, plan, rates, rows)])


def _head(trace: Trace, plan: Plan) -> str:
    sizes = trace.meta["bytes_per_expert"]
    each = f"{sum(sizes) / len(sizes) / 1e6:.2f} MB each" if all(sizes) else "size unknown"
    n = len(trace.offsets) - 1
    return (
        f"{trace.where}: {trace.meta['model']}, {trace.n_layers} layers of {trace.n_expert} experts, {trace.n_used} used, {each}; {n} sequence{'s' * (n != 1)}, "
        f"{'cache kept between them' if plan.warm else 'each from an empty cache'}"
    )


def _title(n_slots: int, misses: str, trace: Trace, plan: Plan) -> str:
    whose = f"{n_slots * trace.n_layers} of {trace.n_expert * trace.n_layers} slots for all layers together" if plan.shared else f"{n_slots} of {trace.n_expert} slots per layer"
    if n_slots < trace.n_used and not plan.shared:
        return f"{whose}, fewer than the {trace.n_used} experts a token uses: no demand loads, misses are computed"
    return f"{whose}, {REGIME_TEXT[misses]}"


def _lossy(rows: list[dict]) -> list[str]:
    columns = [
        ("changes the output", lambda r: r["policy"], True),
        ("slots", lambda r: str(r["n_slots"]), False),
        ("mass lost %", lambda r: _percent(r["mass_lost"]), False),
        ("outside / pairs", lambda r: f"{r['n_outside']}/{r['n_pairs']}", False),
        ("P", lambda r: str(r["n_proactive"]), False),
        ("P/token", lambda r: "" if r["changes_per_token"] is None else f"{r['changes_per_token']:.2f}", False),
        ("MB/token", lambda r: "" if r["load_mb"] is None else f"{r['load_mb']:.1f}", False),
    ]
    shown = aligned([c[0] for c in columns], [[c[1](r) for c in columns] for r in rows], [c[2] for c in columns])
    return [*shown, f"It hits always, by construction. Mass: of {rows[0]['mass_of']}, routed as without the sets."]


def _footnotes(trace: Trace, plan: Plan, rates: Rates, rows: list[dict]) -> list[str]:
    """Only what these rows call for."""
    notes = []
    if any(r["n_proactive"] for r in rows):
        notes.append("A = hits + D (demand loads) + C (computed on the CPU); P: proactive loads; unused: P that went without a use; adj = hits / (A + P)")
    else:
        notes.append("A = hits + D (demand loads) + C (computed on the CPU)")
    units = "MB/token: (D + P) * bytes; " if all(trace.meta["bytes_per_expert"]) else "sizes of experts are unknown (--expert-bytes), so there are no MB and no tokens/s; "
    notes.append(f"{units}loads: experts per token and layer")
    notes.append("* knows the future: a bound")
    if any(_gap(r) for r in rows):
        ahead = any(not r["bound"] and r["gap_share"] is not None and max(r["gap_share"], r["gap_share_free"] or 0) > 1 for r in rows)
        notes.append(f"gap: share of the way from lru to {BELADY} / {BELADY_FREE}" + (", which do not prefetch: who does can have more than 100 %" if ahead else ""))
    if any(r["hit_ci"] for r in rows):
        notes.append("95 %: bootstrap over sequences; over LRU: difference in points, paired")
    if any(r["tokens_per_s"] for r in rows):
        device = f"slots {rates.device / 1e9:g} GB/s" if rates.device else "slots no time"
        notes.append(f"tokens/s: predicted, experts only: link {rates.link / 1e9:g} GB/s, CPU {rates.cpu / 1e9:g} GB/s, {device}")
    if any(r["n_prompt_loads"] for r in rows):
        notes.append(f"prompts (steps of more than {MOST_DECODE_TOKENS} tokens) fill the cache and are not counted")
    reasons: dict[str, list[str]] = {}
    for policy, why in plan.left_out.items():
        reasons.setdefault(why, []).append(policy)
    notes += [f"left out, {why}: {', '.join(names)}" for why, names in reasons.items()]
    return notes
