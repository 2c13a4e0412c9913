"""The terminal side of `edgemoe trace annotate` and `edgemoe calibrate`. Notes go to standard error, results to standard output."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from edgemoe import __version__, annotate, calibrate, cue_sets, simulate, tune
from edgemoe.arguments import read_text
from edgemoe.chat import note
from edgemoe.cue_sets import CueSet
from edgemoe.engine import Llama
from edgemoe.errors import TraceError
from edgemoe.package import Source
from edgemoe.record import Recorder
from edgemoe.routing_shift import ShiftOptions
from edgemoe.simulate_commands import progress
from edgemoe.simulate_report import aligned
from edgemoe.stage import CUES, Automaton, CueError, read_cues
from edgemoe.trace import Trace

TEXT_FIELDS = ("text", "full_response", "response", "answer", "out")  # of a JSON line, the first that is there


# --- trace annotate


def annotate_(options) -> int:
    """`edgemoe trace annotate`."""
    trace = Trace.load(options.trace)
    marks, how = _marks(trace, options)
    staged = annotate.with_stages(trace, marks, how)
    staged.save(options.out)
    report = _report(staged, marks, how) | {"trace": options.out}
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(_text(report))
    return 0


def _marks(trace: Trace, options) -> tuple[list[list[annotate.Mark]], dict]:
    if options.every:
        return annotate.every(trace, options.every), {"by": "every", "every": options.every}
    if options.evenly_like:
        return annotate.evenly_like(trace), {"by": "evenly", "like": trace.meta.get("annotated")}
    if options.random_like:
        return annotate.random_like(trace, options.seed), {"by": "random", "seed": options.seed, "like": trace.meta.get("annotated")}
    how = {"by": [], "min_stage": options.min_stage}
    found: list[list[annotate.Mark]] = [[] for _ in range(trace.n_sequences)]
    if options.cues != "none":
        pieces = annotate.pieces_of(trace, annotate.read_pieces(options.pieces) if options.pieces else None)
        where = options.where or annotate.where_of(pieces)
        automaton = Automaton(CUES if options.cues == "default" else read_cues(options.cues))
        found = [annotate.by_cues(s, p, automaton, where, options.min_stage) for s, p in zip(trace.sequences(), pieces)]
        how |= {"by": ["cues"], "where": where, "cues": options.cues if options.cues == "default" else os.path.basename(options.cues)}
    elif not options.shift:
        raise CueError("--cues none: wanted --shift too, or there are no boundaries")
    if options.shift:
        threshold = options.shift_threshold if options.shift_threshold is not None else annotate.shift_threshold(trace, options.shift_quantile)
        shift = ShiftOptions(threshold=threshold, min_stage=max(ShiftOptions.min_stage, options.min_stage))
        found = [[*marks, *annotate.by_shift(s, trace.n_expert, shift)] for s, marks in zip(trace.sequences(), found)]
        how |= {"by": [*how["by"], "shift"], "shift_threshold": round(threshold, 6)}
    found = [annotate.merged(marks, options.min_stage) for marks in found]
    if options.max_stage:
        found = [annotate.filled(s, marks, options.max_stage) for s, marks in zip(trace.sequences(), found)]
        how["max_stage"] = options.max_stage
    return found, how


def _report(staged: Trace, marks: list[list[annotate.Mark]], how: dict) -> dict:
    n = annotate.n_dominant_of(staged)
    coherence, lengths, by_kind = [], [], {}
    for s, found in zip(staged.sequences(), marks):
        rows = [m.row for m in found]
        coherence += annotate.tcseq(annotate.stage_counts(s, rows, staged.n_expert), n).tolist()
        lengths += np.diff([annotate.first_decoded(s), *rows, len(s.ids)]).tolist()
        for m in found:
            cues = by_kind.setdefault(m.kind, {})
            cues[m.cue] = cues.get(m.cue, 0) + 1
    n_tokens = sum(lengths)
    return {
        "how": how,
        "n_sequences": staged.n_sequences,
        "n_tokens": n_tokens,
        "n_boundaries": len(coherence),
        "per_1000_tokens": 1000 * len(coherence) / n_tokens if n_tokens else 0.0,
        "median_stage": float(np.median(lengths)) if lengths else None,
        "tcseq": float(np.mean(coherence)) if coherence else None,
        "n_dominant": n,
        "cues": {kind: dict(sorted(cues.items(), key=lambda item: -item[1])) for kind, cues in by_kind.items()},
    }


def _text(r: dict) -> str:
    by = r["how"]["by"]
    lines = [
        f"{r['trace']}: {r['n_boundaries']} boundaries in {r['n_tokens']} tokens of {r['n_sequences']} sequences, by {by if isinstance(by, str) else ' and '.join(by)}",
        f"  {r['per_1000_tokens']:.2f} per 1000 tokens; median stage {r['median_stage']:.0f} tokens" if r["median_stage"] is not None else "  no tokens",
    ]
    if r["tcseq"] is not None:
        lines.append(f"  TCseq {r['tcseq']:.3f} ({r['n_dominant']} dominant experts per layer, {r['n_boundaries']} boundaries)")
    lines += [f"  {kind:<13}" + ", ".join(f"{cue} {n}" for cue, n in cues.items()) for kind, cues in r["cues"].items()]
    return "\n".join(lines)


# --- calibrate


def calibrate_(options) -> int:
    """`edgemoe calibrate`."""
    wanted = calibrate.candidates(read_cues(options.cues) if options.cues else None)
    limits = calibrate.Limits(options.least_count, options.most_per_1000, options.least_median, options.tolerance)
    with Source(options.path) as source:
        mark = source.package_fingerprint()
        if not mark and not options.out and not options.dry_run:
            raise CueError(f"{source.path}: has no fingerprint to keep the result under; --out FILE keeps it, --dry-run shows it")
        if options.trace:
            trace = simulate.joined([simulate.load_trace(path) for path in options.trace])
            pieces = [p for path in options.trace for p in annotate.pieces_of(simulate.load_trace(path))]
            tune.require_trace_of(source, trace, mark)
            found = _calibrated(trace, pieces, wanted, limits, options)
        else:
            with tempfile.TemporaryDirectory(prefix="edgemoe.") as folder:
                trace = _read_by_model(options, os.path.join(folder, "texts.npz"))
                found = _calibrated(trace, annotate.pieces_of(trace), wanted, limits, options)
    written = None if options.dry_run else str(cue_sets.write(_as_set(found, mark, trace, options), Path(options.out) if options.out else None))
    if options.json:
        print(json.dumps(asdict(found) | {"written": written}, ensure_ascii=False))
    else:
        print(_table(found, written, options.out))
    return 0


def _calibrated(trace: Trace, pieces: list[list[str]], wanted, limits: calibrate.Limits, options) -> calibrate.Calibrated:
    return calibrate.calibrate(trace, pieces, wanted, options.where or annotate.where_of(pieces), limits, options.shift_quantile, options.seed)


def read_texts(path: str, limit: int | None) -> list[str]:
    """JSON lines with a text each (a field of TEXT_FIELDS), or one plain text. Raises TraceError."""
    said = read_text(path)
    if not said.strip():
        raise TraceError(f"{path}: found no text")
    if not said.lstrip().startswith("{"):
        return [said]
    found = []
    for number, line in enumerate(said.splitlines(), 1):
        if not line.strip() or len(found) == limit:
            continue
        try:
            each = json.loads(line)
        except ValueError as e:
            raise TraceError(f"{path}: line {number}: not JSON: {e}") from None
        texts = [each[f] for f in TEXT_FIELDS if isinstance(each, dict) and isinstance(each.get(f), str) and each[f].strip()]
        if not texts:
            raise TraceError(f"{path}: line {number}: wanted an object with a text called {' or '.join(TEXT_FIELDS)}")
        found.append(texts[0])
    return found


def _read_by_model(options, path: str) -> Trace:
    """The routing of texts that the model reads as prompts. Each is cut at the context's end."""
    texts = read_texts(options.texts, options.limit)
    llm = Llama(options.path, n_ctx=options.ctx, n_threads=options.threads, slots=0, n_gpu_layers=0, tap=True, verbose=False)
    n_cut = 0
    with Recorder(llm, path, source=os.path.basename(options.texts)) as recorder, progress(len(texts), "text") as done:
        for number, text in enumerate(texts, 1):
            tokens = llm.tokenize(text.encode("utf-8", "replace"), special=True)
            n_cut += len(tokens) > options.ctx
            with recorder.sequence(text=number):
                llm.eval(tokens[: options.ctx])
            done()
        recorder.finish()
    llm.close()
    if n_cut:
        note(f"{n_cut} of {len(texts)} texts are cut after {options.ctx} tokens (--ctx)")
    return Trace.load(path)


def _as_set(found: calibrate.Calibrated, mark: str, trace: Trace, options) -> CueSet:
    figures = {name: getattr(found, name) for name in ("n_tokens", "n_sequences", "n_stages", "n_dominant", "median_length", "tcseq", "tcseq_chance")}
    threshold = found.shift_threshold if np.isfinite(found.shift_threshold) else None
    rows = [asdict(r) for r in found.rows if r.count]
    return CueSet(found.cues, mark, trace.meta["model"], datetime.date.today().isoformat(), __version__, threshold, options.shift_quantile, rows, figures)


def _table(found: calibrate.Calibrated, written: str | None, elsewhere: str | None) -> str:
    shown = [r for r in found.rows if r.count]
    cells = [[r.cue, r.kind, str(r.count), f"{r.per_1000:.2f}", f"{r.median_length:.0f}", f"{r.tcseq:.3f}", r.fate] for r in shown]
    lines = aligned(["cue", "kind", "count", "per 1000", "median stage", "TCseq", ""], cells, [True, True, False, False, False, False, True])
    lines.append(f"{len(found.rows) - len(shown)} of {len(found.rows)} candidates were not found")
    if found.tcseq is None:
        lines.append("no cue is left: the text has no stages that these candidates tell")
    else:
        lines.append(
            f"{found.n_stages} stages in {found.n_tokens} tokens of {found.n_sequences} sequences, median {found.median_length:.0f} tokens; TCseq {found.tcseq:.3f}, "
            f"at chance places {found.tcseq_chance:.3f} ({found.n_dominant} dominant experts per layer)"
        )
    if written:
        lines.append(f"written to {written}" + (f"\nedgemoe trace annotate TRACE --cues {written} --out OUT uses it" if elsewhere else ""))
    return "\n".join(lines)
