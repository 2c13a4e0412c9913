"""The command `edgemoe`. Each subcommand is a function of its parsed options that returns an exit code; heavy imports wait until one runs."""

from __future__ import annotations

import argparse
import json
import sys

from edgemoe import __version__, heads_options, joint_options, simulate_options, stage_options, train_options
from edgemoe.arguments import not_negative, positive, ram, size
from edgemoe.errors import EdgemoeError

EXAMPLES = """examples:
  edgemoe chat model.gguf                        talk to a model (GGUF, any shard of one, or a package)
  edgemoe run model.gguf -p "Why is the sky blue?"
  echo "Summarise: ..." | edgemoe run model.gguf -p -
  edgemoe inspect model.gguf                     what it is and where its bytes will go
  edgemoe plan model.gguf --vram 6G              how many experts would go onto the GPU, how many into RAM, and how fast that will be
  edgemoe verify model.gguf                      prove that the output is llama.cpp's
  edgemoe trace model.gguf --prompts questions.txt --out t.npz   record which experts are used
  edgemoe simulate t.npz                         what each cache policy would have done with that
  edgemoe tune model.gguf --trace t.npz          find the best one for your prompts, for chat and run to use
  edgemoe train-heads t.npz --model model.gguf   heads that foretell which experts come next
  edgemoe calibrate model.gguf --trace t.npz     find the words that part its reasoning into stages
  edgemoe doctor                                 is this machine set up well?
  edgemoe-convert model.gguf                     pack it: one file per expert
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edgemoe", description="Run Mixture-of-Experts models that are bigger than your GPU.", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"edgemoe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run, help: str, example: str, path: bool = True, of=commands) -> argparse.ArgumentParser:
        sub = of.add_parser(name, help=help, description=help, epilog=example if example.startswith("examples:") else f"example:\n  {example}", formatter_class=argparse.RawDescriptionHelpFormatter)
        if path:
            sub.add_argument("path", metavar="PATH", help="a GGUF, any shard of one, or a package directory")
        sub.add_argument("--json", action="store_true", help="print one JSON object for machines" if name != "chat" else "print one JSON object per reply")
        sub.set_defaults(run=run)
        return sub

    chat = command("chat", _chat, "talk to a model", "edgemoe chat model.gguf --ctx 8192")
    _add_model_options(chat)
    _add_live_option(chat)
    run = command("run", _run, "answer one prompt", 'edgemoe run model.gguf -p "Why is the sky blue?" -n 200')
    run.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="the prompt; - reads it from standard input")
    run.add_argument("--raw", action="store_true", help="continue TEXT as it stands, without the model's chat template")
    _add_model_options(run)
    _add_live_option(run)
    command("inspect", _inspect, "show what a model is and where its bytes will go", "edgemoe inspect model.gguf --json")
    plan = command("plan", _plan, "show how many experts would go onto the GPU and into RAM, without loading", "edgemoe plan model.gguf --vram 6G --ram 8G --ctx 8192")
    plan.add_argument("--ctx", type=positive, default=4096, metavar="N", help="context length in tokens (default %(default)s)")
    plan.add_argument("--gpu-layers", type=int, metavar="N", help="0: the dense layers stay on the CPU")
    _add_slot_options(plan)
    _add_ram_options(plan)
    verify = command(
        "verify", _verify, "compare edgemoe's output with plain llama.cpp's: bit by bit with llama.cpp's kernels, within a bound with its own; exit code 1 when it differs",
        "edgemoe verify model.edgemoe --against model.gguf",
    )
    verify.add_argument("--tokens", type=positive, default=64, metavar="N", help="decoded tokens to compare (default %(default)s)")
    verify.add_argument("-p", "--prompt", metavar="TEXT", help="prompt to compare on")
    verify.add_argument("--against", metavar="GGUF", help="for a package: the GGUF it was made from (default: its own experts, stacked again in memory)")
    verify.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: physical cores)")
    verify.add_argument("--exact", action="store_true", help="with llama.cpp's kernels only: bytes, routing and placement")
    verify.add_argument(
        "--bound", type=float, default=0.1, metavar="X",
        help="for edgemoe's kernels: largest rms difference that passes, in standard deviations of llama.cpp's logits (default %(default)s; they add up in another order, which "
        "with quantised weights makes 0.01 to 0.05, as llama.cpp's repacked kernels do)",
    )
    help = "record which experts a model uses; read such recordings of others; show them"
    examples = "edgemoe trace model.gguf --prompts questions.txt --out t.npz\n  edgemoe trace show t.npz"
    trace = commands.add_parser("trace", help=help, description=help, epilog=f"examples:\n  {examples}", formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = trace.add_subparsers(metavar="ACTION", required=True)
    record = command(
        "record", _trace_record, "answer prompts and record the routing of every token (`edgemoe trace PATH` is the same)",
        "edgemoe trace model.gguf --prompts questions.jsonl --limit 20 -n 200 --out t.npz", of=actions,
    )
    _add_record_options(record)
    imported = command(
        "import", _trace_import, "make a trace of somebody else's recording: .npz with ids, or CSV with token, layer, expert", "edgemoe trace import routing.csv --out t.npz --experts 128",
        path=False, of=actions,
    )
    _add_import_options(imported)
    show = command("show", _trace_show, "check a trace and say what is in it", "edgemoe trace show t.npz", path=False, of=actions)
    show.add_argument("trace", metavar="TRACE", help="a trace (.npz)")
    help = "write the stages of the reasoning into a trace: where cues stand in its text, or where its routing shifts"
    stage_options.add_annotate(command("annotate", _trace_annotate, help, stage_options.ANNOTATE, path=False, of=actions))
    simulate_options.add_commands(commands)
    train_options.add_train_heads(commands)
    heads_options.add_heads_commands(commands)
    joint_options.add_joint(commands)
    calibrated = command("calibrate", _calibrate, "find the cues that part this model's reasoning into stages", stage_options.CALIBRATE)
    stage_options.add_calibrate(calibrated)
    command("doctor", _doctor, "check this machine and its llama-cpp-python; each problem comes with its fix", "edgemoe doctor", path=False)
    return parser


def _add_slot_options(group) -> None:
    group.add_argument("--slots", type=not_negative, metavar="N", help="expert slots per layer on the device; 0: none (default: as many as fit)")
    group.add_argument("--vram", type=size, metavar="SIZE", help="budget on the device for everything, such as 6G or 512M (default: what is free)")
    group.add_argument("--device", metavar="NAME", help="device of the slots (default: the GPU with most memory free; a software device or the CPU only when named here)")


def _add_ram_options(group) -> None:
    group.add_argument(
        "--ram", type=ram, metavar="SIZE|auto|mapped",
        help="memory for experts, such as 8G; the others are read from disk when they are needed. mapped: all of them, shared with the page cache; auto (default): mapped when they "
        "fit, or else as much as is free",
    )
    group.add_argument("--no-probe", action="store_true", help="do not take the two seconds in which disk and memory are measured to say how fast it will be, when experts do not fit")


def _add_live_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--stages", nargs="?", const="thinking", choices=("thinking", "everywhere"),
        help="mark where a cue begins a new stage of the reasoning: between the model's thinking tags, or everywhere (--policy stage moves experts there)",
    )
    sub.add_argument(
        "--stage-by", choices=("cues", "shift", "both"), default="cues",
        help="what begins a stage: cues in the text, a shift of the routing (after edgemoe calibrate), or both (default %(default)s)",
    )
    sub.add_argument("--stats-live", action="store_true", help="while an answer comes, show tokens/s, hits and what is read from disk in the last line of the terminal")


def _add_model_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--ctx", type=positive, default=4096, metavar="N", help="context length in tokens (default %(default)s)")
    sub.add_argument("-n", "--max-tokens", type=positive, metavar="N", help="longest answer (default: until the context is full)")
    sub.add_argument("--system", default="", metavar="TEXT", help="system message")
    sub.add_argument("--temp", type=float, default=0.7, metavar="T", help="temperature, 0 is greedy (default %(default)s)")
    sub.add_argument("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling (default %(default)s)")
    sub.add_argument("--seed", type=int, metavar="N", help="make the answer repeatable")
    sub.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: the physical cores this process may use)")
    sub.add_argument(
        "--exact", "--no-repack", action="store_true",
        help="compute with llama.cpp's own kernels only, on weights as they lie: slower, bit-identical output (--no-repack: its name in the ablation of SAEM)",
    )
    sub.add_argument("--gpu-layers", type=int, metavar="N", help="layers whose dense part goes to the GPU (default: all when there is a GPU; -1 all, 0 none)")
    sub.add_argument("--chat-format", metavar="NAME", help="chat format for a model without a template, as in llama-cpp-python: chatml, llama-3, ...")
    sub.add_argument("--verbose", action="store_true", help="show llama.cpp's log")
    in_ram = sub.add_argument_group("experts in RAM")
    _add_ram_options(in_ram)
    in_ram.add_argument("--ram-policy", metavar="NAME[:key=value,...]", help="which experts stay in RAM when they do not all fit: as --policy (default: lrfu:lambda=0.1)")
    in_ram.add_argument(
        "--read-ahead", choices=("auto", "on", "off"), default="auto",
        help="read what the next layer is likely to need before its router has chosen; auto (default): while that makes steps faster",
    )
    sub.add_argument(
        "--heads", metavar="FILE", help="learned heads for --policy or --ram-policy temporal, spatio-temporal or spatio (default: what edgemoe train-heads wrote for this model)"
    )
    cache = sub.add_argument_group("experts on the GPU")
    _add_slot_options(cache)
    cache.add_argument(
        "--misses", choices=("cpu", "load", "auto"), default="auto",
        help="experts that are in no slot: compute them on the CPU, load them, or what is faster (default %(default)s)",
    )
    cache.add_argument(
        "--policy", metavar="NAME[:key=value,...]",
        help="which experts keep their slots: see `edgemoe policies`, or FILE.py:FUNCTION for a score function of yours (default: what edgemoe tune found, or else placement, or "
        "lrfu:lambda=0.1 with --misses load; the word default: not what it found)",
    )
    cache.add_argument("--strict", action="store_true", help="a miss takes another's slot only if it was used more often")
    cache.add_argument("--most-inserts", type=not_negative, default=0, metavar="N", help="most experts that a layer takes in after one step, of its misses (default: no limit)")
    cache.add_argument("--no-seed", action="store_true", help="prompts do not fill slots; only what is decoded does")


def _add_record_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--prompts", required=True, metavar="FILE", help="a prompt per line of text, or JSON lines with a field prompt, question or problem; - reads standard input")
    sub.add_argument("--out", required=True, metavar="TRACE", help="the trace to write (.npz)")
    sub.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    sub.add_argument("--full-probs", action="store_true", help="the router's probabilities of all experts, not only of those chosen")
    sub.add_argument("--hidden", action="store_true", help="also what the routers see: 2 bytes per token, layer and value of the model's width")
    sub.add_argument("--raw", action="store_true", help="continue the prompts as they stand, without the model's chat template")
    _add_model_options(sub)
    sub.set_defaults(temp=0.0)


def _add_import_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("recording", metavar="SRC", help="the recording (.npz or CSV)")
    sub.add_argument("--out", required=True, metavar="TRACE", help="the trace to write (.npz)")
    sub.add_argument("--experts", type=positive, metavar="N", help="routed experts per layer (default: the highest number in SRC, and one)")
    sub.add_argument("--expert-bytes", type=size, default=0, metavar="SIZE", help="bytes of one expert, for simulations that count bytes")
    sub.add_argument("--model-name", default="", metavar="NAME", help="name of the model (default: that of SRC)")
    sub.add_argument("--architecture", default="", metavar="NAME", help="its architecture as GGUF names it, such as qwen3moe")


def _trace_record(options) -> int:
    from edgemoe import trace_commands

    return trace_commands.record(options)


def _trace_import(options) -> int:
    from edgemoe import trace_commands

    return trace_commands.import_(options)


def _trace_show(options) -> int:
    from edgemoe import trace_commands

    return trace_commands.show(options)


def _trace_annotate(options) -> int:
    from edgemoe import stage_commands

    return stage_commands.annotate_(options)


def _calibrate(options) -> int:
    from edgemoe import stage_commands

    return stage_commands.calibrate_(options)


def _chat(options) -> int:
    from edgemoe import chat

    return chat.chat(options)


def _run(options) -> int:
    from edgemoe import chat

    return chat.run(options)


def _inspect(options) -> int:
    from edgemoe import plan
    from edgemoe.package import Source

    with Source(options.path) as source:
        print(json.dumps(plan.describe(source)) if options.json else plan.report(source))
    return 0


def _plan(options) -> int:
    from edgemoe.cache_plan import plan_cache
    from edgemoe.devices import devices
    from edgemoe.estimate import expected
    from edgemoe.package import Source
    from edgemoe.ram_plan import plan_ram

    with Source(options.path) as source:
        plan = plan_cache(
            source, devices(), n_ctx=options.ctx, slots=options.slots, vram=options.vram, device=options.device, dense_on_device=options.gpu_layers != 0
        )
        in_ram = plan_ram(source, options.ram, n_ctx=options.ctx, on_device_bytes=plan.beside_bytes)
        estimate = None if options.no_probe else expected(source, in_ram)
    if options.json:
        print(json.dumps({**plan.as_dict(), "ram": in_ram.as_dict(), "estimate": estimate and estimate.as_dict()}))
    else:
        print("\n".join([plan.report(), "", in_ram.report(), *([estimate.report()] if estimate else [])]))
    return 0


def _verify(options) -> int:
    from edgemoe import verify

    prompt = options.prompt or verify.PROMPT
    report = verify.verify(options.path, options.tokens, prompt, options.against, options.threads, options.bound, options.exact, progress=sys.stderr.isatty())
    print(json.dumps(report.as_dict()) if options.json else report.text())
    return 0 if report.ok else 1


def _doctor(options) -> int:
    from edgemoe import doctor

    return doctor.doctor(json=options.json)


TRACE_ACTIONS = ("record", "import", "show", "annotate", "-h", "--help")


def _with_action(argv: list[str]) -> list[str]:
    """`edgemoe trace PATH` means `edgemoe trace record PATH`."""
    if argv[:1] == ["trace"] and len(argv) > 1 and argv[1] not in TRACE_ACTIONS:
        return ["trace", "record", *argv[1:]]
    return argv


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(_with_action(sys.argv[1:] if argv is None else argv))
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (edgemoe ... | head). Python would complain once more when it flushes at exit.
        sys.stdout = None
        return 141
    except EdgemoeError as e:
        if getattr(options, "json", False):
            print(json.dumps({"error": str(e)}))
        print(f"edgemoe: error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
