"""The options of `edgemoe trace annotate` and `edgemoe calibrate`. What they do is in stage_commands, which loads when one runs."""

from __future__ import annotations

import argparse

from edgemoe.arguments import not_negative, positive

CALIBRATE = """examples:
  edgemoe trace model.gguf --prompts my_questions.txt --out mine.npz
  edgemoe calibrate model.gguf --trace mine.npz
  edgemoe calibrate model.gguf --texts answers.jsonl --limit 50        the model reads the texts, which takes longer
"""
ANNOTATE = """edgemoe trace annotate t.npz --out staged.npz --min-stage 16
  edgemoe trace annotate staged.npz --random-like --seed 1 --out random.npz
  edgemoe simulate staged.npz --policy "lru stage oracle" """


def add_annotate(sub) -> None:
    sub.add_argument("trace", metavar="TRACE", help="a trace (.npz)")
    sub.add_argument("--out", required=True, metavar="OUT", help="the trace to write, with stages (.npz)")
    sub.add_argument("--cues", default="default", metavar="FILE|default|none", help="cues as JSON, kind -> list, or what edgemoe calibrate --out wrote (default: those that ship)")
    sub.add_argument("--where", choices=("thinking", "everywhere"), help="where cues count (default: in the thinking, or everywhere when no sequence has tags around it)")
    sub.add_argument("--min-stage", type=not_negative, default=0, metavar="N", help="fewest tokens of a stage: cues that come sooner do not count (default %(default)s)")
    sub.add_argument("--max-stage", type=positive, metavar="N", help="most tokens of a stage: a longer one is parted (default: as long as it is)")
    sub.add_argument("--pieces", metavar="FILE", help="JSON lines with the text of each token, a list called generated per sequence, for a trace that does not say")
    shift = sub.add_argument_group("shift of the routing")
    shift.add_argument("--shift", action="store_true", help="boundaries also where the experts in use change")
    add_quantile(shift)
    shift.add_argument("--shift-threshold", type=float, metavar="X", help="divergence in bits above which a stage ends, instead of a quantile of this trace's")
    control = sub.add_argument_group("boundaries to compare with").add_mutually_exclusive_group()
    control.add_argument("--every", type=positive, metavar="N", help="every N tokens")
    control.add_argument("--evenly-like", action="store_true", help="as many per sequence as TRACE has, at equal distances")
    control.add_argument("--random-like", action="store_true", help="as many per sequence as TRACE has, anywhere")
    sub.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of --random-like (default %(default)s)")


def add_quantile(group) -> None:
    group.add_argument("--shift-quantile", type=share, default=0.9, metavar="Q", help="of the trace's divergences, the threshold of the shift (default %(default)s)")


def share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted a number between 0 and 1")
    return value


def add_calibrate(sub) -> None:
    given = sub.add_mutually_exclusive_group(required=True)
    given.add_argument("--trace", nargs="+", metavar="T", help="traces of this model on your own prompts (edgemoe trace)")
    given.add_argument("--texts", metavar="FILE", help="texts that the model reads: JSON lines with a field text, full_response, response, answer or out; or one plain text; - reads standard input")
    sub.add_argument("--cues", metavar="FILE", help="further candidates as JSON, kind -> list (default: a list that ships); the default cues are always tried")
    sub.add_argument("--where", choices=("thinking", "everywhere"), help="where cues count (default: in the thinking, or everywhere when no text has tags around it)")
    sub.add_argument("--least-count", type=positive, default=3, metavar="N", help="a cue that is found less often is rare (default %(default)s)")
    sub.add_argument("--most-per-1000", type=float, default=10.0, metavar="X", help="a cue that is found more often in 1000 tokens is noise (default %(default)s)")
    sub.add_argument("--least-median", type=positive, default=16, metavar="N", help="a cue whose stages have a lower median of tokens is noise (default %(default)s)")
    sub.add_argument("--tolerance", type=float, default=0.05, metavar="X", help="a cue whose TCseq is lower by more than this than that of boundaries at chance places goes (default %(default)s)")
    add_quantile(sub)
    sub.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of the chance places (default %(default)s)")
    sub.add_argument("--limit", type=positive, metavar="N", help="only the first N texts")
    sub.add_argument("--ctx", type=positive, default=4096, metavar="N", help="for --texts: longest text in tokens (default %(default)s)")
    sub.add_argument("--threads", type=positive, metavar="N", help="for --texts: CPU threads (default: physical cores)")
    sub.add_argument("--out", metavar="FILE", help="write the set to FILE (default: the user's settings, where chat and run look)")
    sub.add_argument("--dry-run", action="store_true", help="only show the table")
