"""The terminal side of `edgemoe trace`: record, import, show. Notes and progress go to standard error, results to standard output."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from edgemoe import __version__
from edgemoe.arguments import read_text
from edgemoe.chat import note, open_session
from edgemoe.errors import TraceError
from edgemoe.record import Recorder
from edgemoe.session import ContextFull, Session
from edgemoe.trace import PROMPT, Trace
from edgemoe.trace_import import Facts, import_trace

FIELDS = ("prompt", "question", "problem")  # of a JSON line, the first that is there
KEPT = ("temp", "top_p", "seed", "max_tokens", "ctx", "system", "raw", "limit", "exact", "slots", "vram", "device", "ram", "misses", "policy", "gpu_layers", "chat_format", "threads")
LONGEST_NAME = 80  # of what a trace keeps of a prompt


def read_prompts(path: str, limit: int | None) -> list[str]:
    """Raises TraceError. Lines of JSON are objects with one of FIELDS; a file whose first line is no object is text."""
    lines = read_text(path).splitlines()
    numbered = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise TraceError(f"{path}: found no prompts")
    in_json = numbered[0][1].startswith("{")
    return [_prompt(path, n, line) if in_json else line for n, line in numbered[:limit]]


def _prompt(path: str, number: int, line: str) -> str:
    try:
        said = json.loads(line)
    except ValueError as e:
        raise TraceError(f"{path}: line {number}: not JSON as the first line is: {e}") from None
    found = [said[f] for f in FIELDS if isinstance(said, dict) and isinstance(said.get(f), str) and said[f].strip()]
    if not found:
        what = ", ".join(said) if isinstance(said, dict) else f"{line[:40]!r}"
        raise TraceError(f"{path}: line {number}: found {what}, wanted an object with a text called {' or '.join(FIELDS)}")
    return found[0]


def record(options) -> int:
    """`edgemoe trace PATH`: every prompt is a sequence of its own."""
    prompts = read_prompts(options.prompts, options.limit)
    _require_writable(options.out)
    session = open_session(options, tap=True)
    llm = session.llm
    if not options.raw:
        session.require_template()
    kept = {name: value for name in KEPT if (value := getattr(options, name)) not in (None, "") and value is not False}
    start, too_long = time.perf_counter(), []
    stopped = False
    with Recorder(llm, options.out, full_probs=options.full_probs, hidden=options.hidden, source=os.path.basename(options.prompts), options=kept) as recorder:
        try:
            with tqdm(total=len(prompts), unit="prompt", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar:
                for number, prompt in enumerate(prompts, 1):
                    try:
                        _answer(session, prompt, options.raw, number, recorder, bar, start)
                    except ContextFull as e:
                        too_long.append(number)
                        bar.clear()
                        note(f"prompt {number} is left out: {e} (--ctx)")
                    bar.update()
        except KeyboardInterrupt:
            stopped = True
        if stopped and not recorder.n_sequences:
            note(f"stopped by Ctrl-C before a prompt was complete: {options.out} is not written")
            raise KeyboardInterrupt
        recorder.finish()
        report = {
            "trace": options.out,
            "n_tokens": recorder.n_tokens,
            "n_sequences": recorder.n_sequences,
            "n_prompts": len(prompts),
            "n_too_long": len(too_long),
            "interrupted": stopped,
            "bytes": os.path.getsize(options.out),
            "seconds": round(time.perf_counter() - start, 3),
        }
    llm.close()
    if stopped:
        note(f"stopped by Ctrl-C: the {report['n_sequences']} of {len(prompts)} prompts that were complete are in {options.out}")
    if options.json:
        print(json.dumps(report))
    else:
        print(
            f"{options.out}: {report['n_tokens']} tokens in {report['n_sequences']} sequences, {report['bytes'] / 1e6:.1f} MB; "
            f"{report['n_tokens'] / report['seconds']:.1f} tokens/s, prompts and answers together"
        )
    return 130 if stopped else 0


def _require_writable(path: str) -> None:
    """Before the model is loaded and not after an hour."""
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise TraceError(f"{path}: {'is a folder' if Path(path).is_dir() else f'no folder {folder} that can be written to'}")


def _answer(session: Session, prompt: str, raw: bool, number: int, recorder: Recorder, bar, start: float) -> None:
    session.clear()
    with recorder.sequence(name=prompt[:LONGEST_NAME], prompt=number):
        for _ in session.complete(prompt) if raw else session.say(prompt):
            bar.set_postfix_str(f"{recorder.n_tokens} tokens, {recorder.n_tokens / (time.perf_counter() - start):.1f} tokens/s")
        if session.replies[-1].finish_reason == "interrupted":
            raise KeyboardInterrupt  # the session took it for the end of an answer; an answer cut anywhere is no sequence


def import_(options) -> int:
    """`edgemoe trace import`."""
    facts = Facts(options.model_name, options.architecture, options.experts, options.expert_bytes, __version__)
    trace = import_trace(options.recording, facts)
    trace.save(options.out)
    _print(Trace.load(options.out), options.json)
    return 0


def show(options) -> int:
    """`edgemoe trace show`: loading checks it."""
    _print(Trace.load(options.trace), options.json)
    return 0


def describe(trace: Trace) -> dict:
    """What is in a trace, in numbers."""
    n_prompt = int((trace.phase == PROMPT).sum())
    n_absent = int((trace.ids[:, :, 0] == trace.absent).sum())
    used = [len(np.setdiff1d(np.unique(trace.ids[:, layer]), [trace.absent])) for layer in range(trace.n_layers)]
    return {
        "trace": trace.where,
        **{name: trace.meta[name] for name in ("model", "architecture", "fingerprint", "n_expert", "n_used", "layers", "bytes_per_expert", "n_embd", "recorded", "source")},
        "n_sequences": trace.n_sequences,
        "n_tokens": trace.n_tokens,
        "n_prompt": n_prompt,
        "n_decode": trace.n_tokens - n_prompt,
        "n_steps": trace.n_tokens if trace.step is None else len(np.unique(trace.step)),
        "n_absent": n_absent,
        "n_used_anywhere": used,
        "probs": trace.meta["probs"],
        "probs_are": trace.meta.get("probs_are", ""),
        "hidden": trace.hidden is not None,
        "stages": trace.meta.get("stages", {}) if trace.stage is not None else None,
        "token_ids": bool((trace.token_ids >= 0).any()),
    }


def _span(numbers) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _print(trace: Trace, as_json: bool) -> None:
    d = describe(trace)
    if as_json:
        print(json.dumps(d))
        return
    sizes = sorted(set(d["bytes_per_expert"]))
    bytes_ = "size unknown" if not any(sizes) else " to ".join(f"{s / 1e6:.2f} MB" for s in (sizes if len(sizes) < 2 else (sizes[0], sizes[-1])))
    layers = d["layers"]
    lengths = np.diff(trace.offsets)
    used = d["n_used_anywhere"]
    rows = [
        ("model", " ".join(filter(None, (d["model"], d["architecture"] and f"({d['architecture']})", d["fingerprint"][:8])))),
        ("experts", f"{len(layers)} layers ({layers[0]} to {layers[-1]}) of {d['n_expert']}, {d['n_used']} used per token, each {bytes_}"),
        ("tokens", f"{d['n_tokens']} in {d['n_sequences']} sequence{'s' * (d['n_sequences'] != 1)}" + (f" of {_span(lengths)}" if len(lengths) else "")),
        ("phases", f"{d['n_prompt']} prompt, {d['n_decode']} decode, in {d['n_steps']} steps" + ("" if trace.step is not None else " (not recorded: each row its own)")),
        ("absent", f"{d['n_absent']} of {d['n_tokens'] * len(layers)} (token, layer) rows" if d["n_absent"] else "nothing"),
        ("used", f"{_span(used)} of {d['n_expert']} experts in each layer"),
        ("probs", f"{d['probs']}: {d['probs_are']}" if d["probs"] else "none"),
        ("hidden", f"{d['n_embd']} values per token and layer" if d["hidden"] else "none"),
        ("stages", "none" if d["stages"] is None else ", ".join(f"{n} {name}" for n, name in d["stages"].items()) or "numbers without names"),
        ("token ids", "yes" if d["token_ids"] else "unknown"),
        ("recorded", f"{d['recorded'].get('how')} {d['recorded'].get('version', '')}, from {d['source'] or 'unknown'}"),
    ]
    print(d["trace"])
    for name, value in rows:
        print(f"  {name:<10}{value}")
