"""The terminal side of `edgemoe chat` and `edgemoe run`. Answers go to standard output; everything else goes to standard error."""

from __future__ import annotations

import json
import sys
import time
import warnings
from contextlib import contextmanager, suppress

from edgemoe import devices, live, plan, recommendation, tiers
from edgemoe.cache_plan import CachePlan
from edgemoe.engine import Llama, plan_slots
from edgemoe.errors import EdgemoeError
from edgemoe.estimate import Estimate, expected, speed
from edgemoe.package import Source
from edgemoe.ram_plan import plan_ram
from edgemoe.session import ContextFull, Reply, Session

HELP = """/help          this list
/clear         forget the conversation
/stats         what the replies so far cost
/stages        the stages of the last text, with --stages or --policy stage
/save FILE     write the conversation to FILE (JSON)
/exit          leave (Ctrl-D does too)
Ctrl-C stops an answer. \"\"\" on a line of its own begins and ends a text of several lines."""

WHY_STOPPED = {
    "length": "stopped at --max-tokens",
    "context": "stopped: the context is full; /clear starts again, --ctx N gives more",
    "interrupted": "stopped by Ctrl-C",
}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def open_model(options, **further) -> tuple[Llama, Estimate | None]:
    """Loads the model as the command line asks and says where it goes, and how fast it should be if experts come from the disk. `further`: of Llama's arguments."""
    named_gpu = any(d.name == options.device and d.type in ("gpu", "igpu") for d in devices.devices())
    gpu_layers = options.gpu_layers if options.gpu_layers is not None else (-1 if devices.has_gpu() or named_gpu else 0)
    with Source(options.path) as source:
        planned = plan_slots(source, options.slots, options.vram, options.device, gpu_layers, options.ctx)
        policy, heads = _policy(options, source, planned)
        in_ram = plan_ram(source, options.ram, n_ctx=options.ctx, on_device_bytes=planned.beside_bytes)
        if planned.device:
            note(planned.line())
        if options.ram or (source.layers and in_ram.room_bytes < source.expert_bytes):
            note(in_ram.line())
        estimate = None if options.no_probe else expected(source, in_ram)
    if estimate:
        note(estimate.line())
    start = time.perf_counter()
    with _warnings_noted():
        llm = Llama(
            options.path,
            exact=options.exact,
            slots=options.slots,
            vram=options.vram,
            device=options.device,
            misses=options.misses,
            policy=policy,
            heads=options.heads or heads,
            cache_options={"strict": options.strict, "most_inserts": options.most_inserts, "seed": not options.no_seed},
            n_ctx=options.ctx,
            n_threads=options.threads,
            n_gpu_layers=gpu_layers,
            chat_format=options.chat_format,
            verbose=options.verbose,
            **({"seed": options.seed} if options.seed is not None else {}),
            ram=in_ram.budget_bytes or "mapped",
            ram_policy=options.ram_policy,
            read_ahead=options.read_ahead,
            stages=getattr(options, "stages", None),
            stage_by=getattr(options, "stage_by", "cues"),
            **further,
        )
    note(plan.load_line(llm.source, time.perf_counter() - start, llm.cache_plan.n_slots > 0, llm.ram_plan))
    if llm.cache_plan != planned:
        note(llm.cache_plan.line())
    if llm.ram_info() and not llm.ram_info()["direct"]:
        note(f"{options.path}: its file system has no reads past the page cache (O_DIRECT): the page cache takes memory beside the budget")
    if llm.cache_plan.device != "CPU" and llm.cache_info() and not llm.cache_info()["pinned"]:
        note(f"{llm.cache_plan.device} offers no pinned memory (ulimit -l?): uploads take one copy more")
    return llm, estimate


@contextmanager
def _warnings_noted():
    """What edgemoe warns of, as one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for each in caught:
        note(str(each.message))


def _policy(options, source: Source, planned: CachePlan) -> tuple[str | None, str | None]:
    """The policy that was asked for, or else what edgemoe tune found for this model, with its file of learned heads; None: the engine's default."""
    if options.policy or not planned.n_slots or planned.fits_all:
        return (None if options.policy == "default" else options.policy), None
    try:
        found = recommendation.find(source, "load" if options.misses == "load" else "cpu")
    except recommendation.RecommendationError as e:
        note(f"edgemoe tune: {e}; the default policy is used")
        return None, None
    if found is None:
        return None, None
    other = f", which was for {found.n_slots} slots" if found.n_slots != planned.n_slots else ""
    note(f"policy {found.policy} from edgemoe tune of {found.date}{other} (--policy default ignores it)")
    return recommendation.policy_text(found), found.heads or None


def open_session(options, **further) -> Session:
    """`further`: of Llama's arguments."""
    llm, estimate = open_model(options, **further)
    return Session(llm, system=options.system, expected=estimate, temperature=options.temp, top_p=options.top_p, max_tokens=options.max_tokens, seed=options.seed)


def run(options) -> int:
    """`edgemoe run`: one prompt, one answer, one line of statistics."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise EdgemoeError("the prompt is empty")
    session = open_session(options)
    pieces = session.complete(prompt) if options.raw else session.say(prompt)
    reply = _show(session, pieces, options)
    if options.json:
        print(json.dumps(reply.as_dict(), ensure_ascii=False))
    session.llm.close()
    return 130 if reply.finish_reason == "interrupted" else 0


def chat(options) -> int:
    """`edgemoe chat`: until /exit or the end of the input."""
    session = open_session(options)
    session.require_template()
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() a line editor, without the terminal's limit of 4096 bytes per line)

        note("/help lists the commands")
    while True:
        try:
            text = _read(interactive)
        except EOFError:
            break
        except KeyboardInterrupt:
            note("\n(/exit leaves)")
            continue
        if text.startswith("/"):
            if not _command(session, text):
                break
        elif text.strip():
            _answer(session, text, options)
    session.llm.close()
    return 0


def _answer(session: Session, text: str, options) -> None:
    try:
        reply = _show(session, session.say(text), options)
    except ContextFull as e:
        note(f"{e}. /clear starts again, --ctx N gives more.")
        return
    except KeyboardInterrupt:
        note("[stopped before the answer began]")
        return
    if options.json:
        print(json.dumps(reply.as_dict(), ensure_ascii=False), flush=True)


def _show(session: Session, pieces, options) -> Reply:
    """Prints an answer as it comes, then why it stopped and what it cost."""
    session.llm.on_stage(None if options.json or not getattr(options, "stages", None) else _mark_stage)
    try:
        with live.prompt_bar(session.llm), live.watched(session.llm, options.stats_live) as update:
            _print_pieces(pieces, options.json, update)
    except KeyboardInterrupt:
        # It came while we were printing: the answer learns of it where it waits, and closes its books.
        with suppress(StopIteration):
            pieces.throw(KeyboardInterrupt)
    reply = session.replies[-1]
    if not options.json:
        print(flush=True)
    if reply.finish_reason in WHY_STOPPED:
        note(f"[{WHY_STOPPED[reply.finish_reason]}]")
    note(f"[{reply.line()}]")
    if reply.experts.get("n_decode_accesses") and session.llm.cache_info()["misses"] == "off":
        note(f"[the slots are left alone: computing everything on the CPU was faster than with {session.llm.cache_plan.device}; --misses cpu uses them all the same]")
    return reply


def _mark_stage(stage) -> None:
    note(f"\n| stage {stage.number}: {stage.name}" + (f", {stage.moved} experts moved" if stage.moved else ""))


def _print_pieces(pieces, quiet: bool, update) -> None:
    for piece in pieces:
        if not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()
        update()


def _read(interactive: bool) -> str:
    """One message: a line, or what stands between two lines of triple quotes."""
    line = input("> " if interactive else "")
    if line.strip() != '"""':
        return line
    lines = []
    while (line := input("... " if interactive else "")).strip() != '"""':
        lines.append(line)
    return "\n".join(lines)


def _command(session: Session, text: str) -> bool:
    """False ends the chat."""
    name, _, argument = text.strip().partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/help":
        note(HELP)
    elif name == "/clear":
        session.clear()
        note("(forgotten)")
    elif name == "/stats":
        note(_statistics(session))
    elif name == "/stages":
        note(_stage_table(session.llm))
    elif name == "/save":
        _save(session, argument.strip())
    else:
        note(f"{name}: no such command; /help lists them")
    return True


def _statistics(session: Session) -> str:
    lines = [f"{i + 1:>3}  {reply.line()}" for i, reply in enumerate(session.replies)]
    total = session.llm.expert_stats()
    lines.append(f"context: {session.llm.n_tokens} of {session.llm.n_ctx()} tokens")
    if total["n_accesses"]:
        lines.append(
            f"experts: {total['n_events']} events, {total['n_pairs']} routed pairs, A = {total['n_accesses']} accesses, C = {total['n_computed_on_cpu']} computed on the CPU, "
            f"{total['bytes_accessed'] / 1e9:.2f} GB read, {total['compute_us'] / 1e6:.2f} s"
        )
    lines += _ram_lines(session, total)
    lines += _slot_table(session.llm)
    return "\n".join(lines)


def _ram_lines(session: Session, total: dict[str, int]) -> list[str]:
    """What was expected and what came of it; then both tiers side by side. Empty where RAM holds all experts."""
    info = session.llm.ram_info() if total.get("n_ram_accesses") else {}
    if not info:
        return []
    n_tokens, seconds = (sum(getattr(reply, name) for reply in session.replies) for name in ("n_answer", "answer_s"))
    rate = f"{info['disk_rate'] / 1e6:.0f} MB/s" if info["disk_rate"] else "not measured yet"
    lines = [
        f"RAM: {info['n_filled']} experts in slots, {info['filled'] / 1e6:.0f} MB of {info['budget'] / 1e6:.0f} MB, and {info['staging'] / 1e6:.0f} MB for prompts; "
        f"disk {rate}, {'past' if info['direct'] else 'through'} the page cache; prompts read {total['ram_prompt_bytes_read'] / 1e6:.0f} MB"
    ]
    if session.expected and seconds:
        lines.insert(0, f"expected {speed(session.expected.tokens_per_s)} ({session.expected.bound}), measured {speed(n_tokens / seconds)} over {n_tokens} tokens")
    return lines + tiers.table(total, n_tokens)


def _stage_table(llm: Llama) -> str:
    stages = llm.stages()
    if not stages:
        return "stages are not looked for: --stages, or --policy stage"
    lines = [f"{'stage':>5} {'at token':>8} {'tokens':>7} {'hit %':>6} {'moved':>6}  begins with"]
    for s in stages:
        hit = f"{100 * s.hits / s.accesses:.1f}" if s.accesses else "-"
        lines.append(f"{s.number:>5} {s.token:>8} {s.n_tokens:>7} {hit:>6} {s.moved:>6}  {s.name}")
    return "\n".join(lines)


def _slot_table(llm: Llama) -> list[str]:
    """What the slots did in decoding, per layer; empty without slots."""
    layers = llm.expert_stats_by_layer()
    if not layers:
        return []
    info = llm.cache_info()
    lines = [
        f"slots: {llm.cache_plan.n_slots} per layer on {llm.cache_plan.device}, {info['bytes'] / 1e6:.0f} MB; misses: {info['misses']}; "
        f"CPU {info['cpu_rate'] / 1e9:.1f} GB/s, loads {info['load_rate'] / 1e9:.1f} GB/s (0: not measured yet)",
        f"{'layer':>7} {'A':>9} {'hits':>9} {'hit %':>6} {'D':>8} {'P':>8} {'C':>9} {'evicted':>8} {'MB loaded':>10}",
    ]
    for each in layers:
        d, p = each["decode"], each["prompt"]
        hit = 100 * d["n_hits"] / d["n_accesses"] if d["n_accesses"] else 0.0
        lines.append(
            f"{each['layer']:>7} {d['n_accesses']:>9} {d['n_hits']:>9} {hit:>6.1f} {d['n_demand']:>8} {d['n_proactive'] + p['n_proactive']:>8} {d['n_computed']:>9} "
            f"{d['n_evicted'] + p['n_evicted']:>8} {(d['bytes_loaded'] + p['bytes_loaded']) / 1e6:>10.1f}"
        )
    return lines


def _save(session: Session, path: str) -> None:
    if not path:
        note("/save wants a file name")
        return
    try:
        with open(path, "w", encoding="utf-8") as f:
            json.dump({"model": session.llm.model_path, "messages": session.messages}, f, ensure_ascii=False, indent=1)
    except OSError as e:
        note(f"{path}: {e.strerror}")
    else:
        note(f"(saved {len(session.messages)} messages to {path})")
