"""The options of `edgemoe train-joint` and `edgemoe export-checkpoint`. What they do is in joint_commands, which loads when one runs."""

from __future__ import annotations

import argparse

from edgemoe.arguments import not_negative, positive
from edgemoe.train_options import above_zero, share

TRAIN = """examples:
  edgemoe export-checkpoint models/demo-small.gguf demo-hf                      a GGUF as a checkpoint for PyTorch
  edgemoe train-joint demo-hf --gguf models/demo-small.gguf --data questions.jsonl --lambda 0.3 --out joint.gguf
  edgemoe train-joint demo-hf --gguf models/demo-small.gguf --data questions.jsonl --lambda 0 --out control.gguf     the language alone: same data, same steps
  edgemoe train-joint qwen3-hf --gguf qwen3-f16.gguf --data questions.jsonl --mode spatio-temporal --train all --rate 1e-5 --device cuda --dtype bfloat16 --out joint.gguf
  edgemoe train-joint ... --resume                                              go on with a training that was stopped
"""
EXPORT = """example:
  edgemoe export-checkpoint models/demo-small.gguf demo-hf
"""


def not_below_zero(text: str) -> float:
    x = float(text)
    if not 0 <= x < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: wanted a number, 0 or more")
    return x


def add_joint(commands) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    help = "post-train a model together with its cache heads, so that its experts are easier to foretell (needs PyTorch: pip install 'edgemoe[train]')"
    sub = commands.add_parser("train-joint", help=help, description=help, epilog=TRAIN, formatter_class=raw)
    sub.add_argument("checkpoint", metavar="DIR", help="a checkpoint directory for transformers: Qwen3-MoE, Qwen2-MoE, ERNIE 4.5-MoE (the demo) or gpt-oss")
    sub.add_argument("--gguf", required=True, metavar="PATH", help="the same model as a GGUF: its tokenizer cuts the texts, and the trained tensors replace its own in --out")
    sub.add_argument("--data", required=True, nargs="+", metavar="FILE", help="JSON lines with question (or problem) and answer (or solution), or with text; or plain text, one a line")
    sub.add_argument("--out", required=True, metavar="GGUF", help="the trained model to write")
    sub.add_argument("--heads", metavar="FILE", help="its file of heads (default: where tune and the engine look, ~/.config/edgemoe/heads/FINGERPRINT.gguf)")
    sub.add_argument("--type", choices=("f16", "q8_0"), default="f16", help="of the weights in the file of heads (default %(default)s)")
    sub.add_argument("--mode", choices=("temporal", "spatio-temporal"), default="temporal", help="which heads (default %(default)s)")
    sub.add_argument("--lambda", dest="weight", type=not_below_zero, default=0.3, metavar="X", help="weight of the heads' loss beside the language's; 0: the model hears of the language alone (default %(default)s)")
    sub.add_argument("--train", choices=("routers", "experts", "all"), default="routers", help="what changes beside the heads: routers, routers and routed experts, or everything (default %(default)s)")
    sub.add_argument("--slots", type=positive, default=0, metavar="B", help="slots per layer to train for (default: two and a half times as many as a token uses)")
    sub.add_argument("--tau", type=above_zero, default=0.01, metavar="T", help="how soft the choice of B experts is, in units of probability (default %(default)s)")
    group = sub.add_argument_group("training")
    group.add_argument("--steps", type=positive, default=200, metavar="N", help="default %(default)s")
    group.add_argument("--batch-tokens", type=positive, default=4096, metavar="N", help="tokens of a step, at least (default %(default)s)")
    group.add_argument("--micro-tokens", type=positive, default=4096, metavar="N", help="tokens that are computed together: memory (default %(default)s)")
    group.add_argument("--context", type=positive, default=1024, metavar="N", help="longest example; what is longer is cut off (default %(default)s)")
    group.add_argument("--rate", type=above_zero, default=1e-4, metavar="X", help="of AdamW for the model (default %(default)s)")
    group.add_argument("--head-rate", type=above_zero, default=1e-3, metavar="X", help="of AdamW for the heads (default %(default)s)")
    group.add_argument("--warmup", type=not_negative, default=10, metavar="N", help="steps in which the rates rise (default %(default)s)")
    group.add_argument("--schedule", choices=("cosine", "constant"), default="cosine", help="of the rates after that; cosine ends at a tenth (default %(default)s)")
    group.add_argument("--weight-decay", type=not_below_zero, default=0.0, metavar="X", help="of AdamW for the model (default %(default)s)")
    group.add_argument("--clip", type=not_below_zero, default=1.0, metavar="X", help="largest norm of the model's gradient; 0: any (default %(default)s)")
    group.add_argument("--holdout", type=share, default=0.05, metavar="SHARE", help="of the questions, held out to measure the losses on (default %(default)s)")
    group.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of what is held out and of the order (default %(default)s)")
    group.add_argument("--save-every", type=positive, default=50, metavar="N", help="steps after which the state is kept beside --out (default %(default)s)")
    group.add_argument("--resume", action="store_true", help="go on where a training that was interrupted, or killed, has left its state")
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: PyTorch's own)")
    group.add_argument("--device", default="cpu", metavar="NAME", help="of PyTorch, such as cuda (default %(default)s)")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model's weights in training (default %(default)s)")
    sub.add_argument("--json", action="store_true", help="print one JSON object for machines")
    sub.set_defaults(run=_train_joint)

    help = "write a GGUF as a checkpoint directory for transformers (float32), to post-train it"
    sub = commands.add_parser("export-checkpoint", help=help, description=help, epilog=EXPORT, formatter_class=raw)
    sub.add_argument("path", metavar="PATH", help="a GGUF, or any shard of one")
    sub.add_argument("folder", metavar="DIR", help="the new folder")
    sub.add_argument("--json", action="store_true", help="print one JSON object for machines")
    sub.set_defaults(run=_export)


def _train_joint(options) -> int:
    from edgemoe import joint_commands

    return joint_commands.train_joint(options)


def _export(options) -> int:
    from edgemoe import joint_commands

    return joint_commands.export(options)
