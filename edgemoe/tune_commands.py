"""The terminal side of `edgemoe tune`."""

from __future__ import annotations

import datetime
import json
import os
import shlex

from edgemoe import __version__, annotate, cue_sets, fit, heads, policies, recommendation, simulate, tune
from edgemoe.cache_plan import CachePlan, plan_cache
from edgemoe.devices import devices
from edgemoe.heads import Heads, HeadsError
from edgemoe.package import Source
from edgemoe.recommendation import Recommendation
from edgemoe.simulate import LRU, Rates
from edgemoe.simulate_commands import progress
from edgemoe.simulate_report import aligned
from edgemoe.stage import CUES, Automaton
from edgemoe.trace import Trace
from edgemoe.tune import Tuned, TuneError

N_SHOWN = 10
KEPT = ("n_tokens", "n_accesses", "n_hits", "n_demand", "n_computed", "n_proactive", "hit", "load_mb", "expert_ms", "saved_ms_ci")


def tune_(options) -> int:
    """`edgemoe tune`."""
    rates = Rates(options.link, options.cpu, options.device_rate)
    with Source(options.path) as source:
        plan = _plan(source, options)
        mark = source.package_fingerprint()
        parts = [simulate.load_trace(path) for path in options.trace]
        trace = simulate.joined(parts)
        tune.require_trace_of(source, trace, mark)
        found, note = _heads(options, source, mark, parts)
        if found:
            with progress(trace.n_tokens, "row") as done:
                trace = simulate.joined_with_heads(parts, found, done)
        trace = _with_stages(source, trace)
        asked = " ".join(options.policy).split() if options.policy else None
        with _bars() as bar:
            tuned = tune.tune(source, trace, plan.n_slots, options.misses, rates, asked, options.seed, bar, found)
        tuned.heads_note = tuned.heads_note or note
        written = None if options.dry_run else _write(tuned, plan, options, source, trace, mark, found)
    if options.json:
        print(json.dumps(_document(tuned, plan, options, written)))
    else:
        print(_text(tuned, plan, options, rates, written))
    return 0


def _heads(options, source: Source, mark: str, traces: list) -> tuple[Heads | None, str]:
    """Heads to try, or why there are none; those that were named must be good, others are left out by name. Raises HeadsError."""
    path = options.heads or heads.default_path(mark)
    if options.heads == "none" or not (options.heads or path.exists()):
        return None, ""
    try:
        found = heads.load(path)
        found.check_fits(source)
        for trace in traces:
            found.check_trace(trace)
        return found, ""
    except HeadsError as e:
        if options.heads:
            raise
        return None, f"learned heads are not tried: {e}"


class _bars:
    """A bar that begins when it is known how long it is."""

    def __enter__(self):
        return self

    def __call__(self, n: int):
        self.bar = progress(n)
        return self.bar.__enter__()

    def __exit__(self, *exc) -> None:
        if hasattr(self, "bar"):
            self.bar.__exit__(*exc)


def _plan(source: Source, options) -> CachePlan:
    """Raises TuneError where there is nothing to choose."""
    plan = plan_cache(source, devices(), n_ctx=options.ctx, slots=options.slots, vram=options.vram, device=options.device, dense_on_device=options.gpu_layers != 0)
    if options.slots and plan.device is None and source.layers:
        plan = plan.with_fewer_slots(min(options.slots, plan.n_expert), "there is no GPU here")
    if plan.fits_all:
        raise TuneError(f"{source.path}: all {plan.n_expert} experts of a layer fit: there is nothing to choose")
    if not plan.n_slots:
        raise TuneError(f"{source.path}: no slots: {plan.reason}; --vram or --slots says what they would be")
    return plan


def _with_stages(source: Source, trace: Trace) -> Trace:
    """Where the engine would find a stage in the text, if the trace has its text: so that the policies that go by stages can be tried."""
    if trace.stage is not None or "pieces" not in trace.meta:
        return trace
    found = cue_sets.find(source)
    return annotate.with_stages(trace, annotate.all_by_cues(trace, annotate.pieces_of(trace), Automaton(found.cues if found else CUES), "thinking"), {"by": "cues"})


def _write(tuned: Tuned, plan: CachePlan, options, source: Source, trace, mark: str, found: Heads | None) -> str | None:
    if not mark:
        raise TuneError(f"{source.path}: has no fingerprint to keep the result under; --dry-run shows it")
    row = next(r for r in tuned.rows if (r["policy"], r["heads"]) == (tuned.policy, tuned.heads))
    recommended = Recommendation(
        policy=tuned.policy, misses=options.misses, n_slots=plan.n_slots, n_expert=plan.n_expert, n_layers=len(source.layers), fingerprint=mark, model=trace.meta["model"],
        date=datetime.date.today().isoformat(), version=__version__, tables=f"{mark}.{options.misses}.npz" if tuned.tables else "", figures={k: row[k] for k in KEPT},
        heads=os.path.abspath(found.where) if tuned.heads else "",
    )
    return str(recommendation.write(recommended, (lambda path: fit.save(path, tuned.tables)) if tuned.tables else None))


def _document(tuned: Tuned, plan: CachePlan, options, written: str | None) -> dict:
    return {
        "policy": tuned.policy, "is_default": tuned.is_default, "reason": tuned.reason, "misses": options.misses, "n_slots": plan.n_slots, "n_expert": plan.n_expert,
        "n_fit": tuned.n_fit, "n_test": tuned.n_test, "candidates": [{k: v for k, v in r.items() if k != "layers"} for r in tuned.rows], "left_out": tuned.left_out, "heads": tuned.heads, "heads_note": tuned.heads_note,
        "written": written,
    }


def _text(tuned: Tuned, plan: CachePlan, options, rates: Rates, written: str | None) -> str:
    default = policies.DEFAULT[options.misses]
    shown = [r for i, r in enumerate(tuned.rows) if i < N_SHOWN or r["heads"] or r["policy"] in (LRU, default, tuned.policy)]
    fate = "computed on the CPU" if options.misses == "cpu" else "loaded"
    lines = [
        f"{plan.n_slots} of {plan.n_expert} slots per layer, misses {fate}; {tuned.n_fit} sequences to learn from, {tuned.n_test} others to try on ({tuned.rows[0]['n_tokens']} tokens)",
        *_table(shown, tuned, default),
        f"{len(tuned.rows)} candidates; ms/token: predicted, experts only, link {rates.link / 1e9:g} GB/s, CPU {rates.cpu / 1e9:g} GB/s (--link, --cpu); 95 %: of what is saved over {LRU}",
    ]
    by_reason: dict[str, list[str]] = {}
    for policy, why in tuned.left_out.items():
        by_reason.setdefault(why, []).append(policy)
    lines += [f"left out, {why}: {', '.join(names)}" for why, names in by_reason.items()]
    lines += [tuned.heads_note] if tuned.heads_note else []
    lines += ["", f"recommended: {tuned.policy}{', the default' if tuned.is_default else ' with learned heads' if tuned.heads else ''} ({tuned.reason})"]
    if written:
        command = shlex.join(["edgemoe", "chat", options.path, *(["--slots", str(options.slots)] if options.slots else []), *(["--misses", "load"] if options.misses == "load" else [])])
        lines.append(f"written to {written}\n{command} uses it; --policy default does not")
    return "\n".join(lines)


def _table(rows: list[dict], tuned: Tuned, default: str) -> list[str]:
    def notes(r: dict) -> str:
        said = (("recommended", (r["policy"], r["heads"]) == (tuned.policy, tuned.heads)), ("reference", r["policy"] == LRU), ("default", r["policy"] == default), ("heads", r["heads"]))
        found = ", ".join(note for note, there in said if there)
        return f" ({found})" if found else ""

    cells = [
        [
            r["policy"] + notes(r),
            f"{r['n_hits']}/{r['n_accesses']}",
            f"{100 * r['hit']:.1f}",
            f"{r['load_mb']:.2f}",
            f"{r['expert_ms']:.2f}",
            "[{:+.2f}, {:+.2f}]".format(*r["saved_ms_ci"]) if r["saved_ms_ci"] and r["policy"] != LRU else "",
        ]
        for r in rows
    ]
    return aligned(["policy", "hits / A", "hit %", "MB/token", "ms/token", "95 %"], cells, [True, False, False, False, False, True])
