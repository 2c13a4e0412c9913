"""The options of `edgemoe simulate`, `policies` and `tune`. What they do is in simulate_commands and tune_commands, which load when one runs."""

from __future__ import annotations

import argparse

from edgemoe.arguments import not_negative, positive, rate, size

SIMULATE = """examples:
  edgemoe trace model.gguf --prompts questions.txt --out mine.npz
  edgemoe simulate mine.npz                                        every policy at three capacities, in both regimes
  edgemoe simulate mine.npz --capacity 8,16 --policy lru --policy "lfu placement:every=16|32|64" --misses cpu
  edgemoe simulate test.npz --train train.npz --policy sweep --plot pictures --json all.json
  edgemoe simulate test.npz --train train.npz --policy temporal --save-fit        writes train.fit.npz; then: edgemoe chat model.gguf --policy temporal:fit=train.fit.npz
  edgemoe simulate test.npz --heads heads.gguf --policy "temporal spatio-temporal:R=4|8|15"
  edgemoe simulate mine.npz --policy my_policies.py:popular        a score function of your own
"""
TUNE = """examples:
  edgemoe trace model.gguf --prompts my_questions.txt --out mine.npz
  edgemoe tune model.gguf --trace mine.npz                         for the slots that fit now; chat and run then use what it found
  edgemoe tune model.gguf --trace mine.npz --vram 6G --ctx 8192
  edgemoe chat model.gguf --policy default                         without it
"""


def _command(commands, name: str, help: str, examples: str, run) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=help, description=help, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub.set_defaults(run=run)
    return sub


def add_commands(commands) -> None:
    _add_simulate(_command(commands, "simulate", "what cache policies would have done on recorded routing", SIMULATE, _simulate))
    listed = _command(commands, "policies", "list the cache policies: what each is, its parameters, where it comes from", "example:\n  edgemoe policies --json", _policies)
    listed.add_argument("--json", action="store_true", help="print one JSON object for machines")
    _add_tune(_command(commands, "tune", "find the cache policy that is best on your own trace, for chat and run to use", TUNE, _tune))


def _add_rates(group) -> None:
    group.add_argument("--link", type=rate, default=16e9, metavar="RATE", help="how fast experts are loaded (default 16GB/s)")
    group.add_argument("--cpu", type=rate, default=12e9, metavar="RATE", help="how fast the CPU computes experts, in bytes of their weights (default 12GB/s)")
    group.add_argument("--device-rate", type=rate, metavar="RATE", help="how fast slots are computed (default: so fast that it takes no time)")


def _add_simulate(sub) -> None:
    sub.add_argument("traces", nargs="+", metavar="TRACE", help="a trace (edgemoe trace), or a recording of somebody else's (.npz with ids, or CSV); several are taken as one")
    sub.add_argument("--train", nargs="+", default=[], metavar="TRACE", help="traces to learn from, for policies that have to; refused when a sequence is in TRACE too")
    sub.add_argument(
        "--heads", metavar="FILE",
        help="learned heads (edgemoe train-heads) for temporal, spatio-temporal and spatio; TRACE must have hidden states; refused when the heads were trained on a sequence of TRACE",
    )
    sub.add_argument("--save-fit", nargs="?", const="", metavar="FILE", help="keep what was learned, for --policy NAME:fit=FILE here and in chat and run (default: beside the first training trace, NAME.fit.npz)")
    sub.add_argument(
        "--policy", action="append", metavar="NAME[:key=value,...]",
        help="all (default), sweep (several settings of each), or names separated by spaces; key=1|2 tries each; may be given again; lru and belady always run beside",
    )
    sub.add_argument("--capacity", default="12.5%,25%,50%", metavar="LIST", help="slots per layer, as numbers or shares of the experts (default %(default)s)")
    sub.add_argument("--misses", choices=("load", "cpu", "both"), default="both", help="misses are loaded (RAM over a disk), computed on the CPU (beside a GPU), or both in turn (default)")
    sub.add_argument("--scope", choices=("layer", "model"), default="layer", help="each layer has its slots, or all layers have the same number together (default %(default)s)")
    sub.add_argument("--warm", action="store_true", help="keep the cache from one sequence to the next (default: each starts with empty slots)")
    sub.add_argument("--sequences", type=positive, metavar="N", help="only the first N sequences")
    sub.add_argument("--expert-bytes", type=size, default=0, metavar="SIZE", help="bytes of one expert, where the trace does not say")
    sub.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of the confidence intervals (default %(default)s)")
    predicted = sub.add_argument_group("predicted tokens/s, experts only")
    _add_rates(predicted)
    out = sub.add_argument_group("output (default: a table)")
    out.add_argument("--json", nargs="?", const="-", metavar="FILE", help="everything as one JSON object, to FILE or standard output")
    out.add_argument("--csv", nargs="?", const="-", metavar="FILE", help="a line per run, to FILE or standard output")
    out.add_argument("--per-sequence", action="store_true", help="counts of each sequence too, in JSON and CSV")
    out.add_argument("--plot", metavar="DIR", help="pictures (.png) into DIR; needs matplotlib: pip install 'edgemoe[plot]'")


def _add_tune(sub) -> None:
    sub.add_argument("path", metavar="PATH", help="a GGUF, any shard of one, or a package directory")
    sub.add_argument("--trace", required=True, nargs="+", metavar="T", help="traces of this model on your own prompts (edgemoe trace); at least 4 sequences")
    sub.add_argument("--slots", type=positive, metavar="N", help="expert slots per layer (default: as many as fit)")
    sub.add_argument("--vram", type=size, metavar="SIZE", help="budget on the device for everything, such as 6G (default: what is free)")
    sub.add_argument("--device", metavar="NAME", help="device of the slots (default: the GPU with most memory free)")
    sub.add_argument("--ctx", type=positive, default=4096, metavar="N", help="context length in tokens (default %(default)s)")
    sub.add_argument("--gpu-layers", type=int, metavar="N", help="0: the dense layers stay on the CPU")
    sub.add_argument("--misses", choices=("cpu", "load"), default="cpu", help="what becomes of experts that are in no slot (default %(default)s)")
    sub.add_argument("--policy", action="append", metavar="NAME[:key=value,...]", help="candidates (default: sweep, without those that cheat)")
    sub.add_argument(
        "--heads", metavar="FILE", help="learned heads to try as well, on sequences that they were not trained on (default: those of this model that edgemoe train-heads wrote; none: without)"
    )
    sub.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of the two halves and the confidence intervals (default %(default)s)")
    sub.add_argument("--dry-run", action="store_true", help="only show what would be recommended")
    sub.add_argument("--json", action="store_true", help="print one JSON object for machines")
    _add_rates(sub.add_argument_group("predicted time per token, experts only"))


def _simulate(options) -> int:
    from edgemoe import simulate_commands

    return simulate_commands.simulate_(options)


def _policies(options) -> int:
    from edgemoe import simulate_commands

    return simulate_commands.policies_(options)


def _tune(options) -> int:
    from edgemoe import tune_commands

    return tune_commands.tune_(options)
