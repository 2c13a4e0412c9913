"""The options of `edgemoe train-heads`. What it does is in train_commands, which loads when it runs."""

from __future__ import annotations

import argparse

from edgemoe.arguments import not_negative, positive

TRAIN_HEADS = """examples:
  edgemoe trace model.gguf --prompts questions.txt --full-probs --hidden --out mine.npz
  edgemoe train-heads mine.npz --model model.gguf --slots 20                    where tune and the engine look for them
  edgemoe train-heads a.npz b.npz --model model.gguf --mode spatio-temporal --out st.gguf
  edgemoe simulate test.npz --heads st.gguf --policy "temporal spatio-temporal:R=15"   any number of slots, any R
  edgemoe tune model.gguf --trace mine.npz                                      uses heads only where they pay
"""


def above_zero(text: str) -> float:
    x = float(text)
    if not 0 < x < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: wanted a number above 0")
    return x


def share(text: str) -> float:
    x = float(text)
    if not 0 < x < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted a share between 0 and 1")
    return x


def add_train_heads(commands) -> None:
    help = "train heads that foretell which experts are needed next, on recorded traces of a model that stays as it is"
    sub = commands.add_parser("train-heads", help=help, description=help, epilog=TRAIN_HEADS, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub.add_argument("traces", nargs="+", metavar="TRACE", help="traces of this model with hidden states (edgemoe trace --full-probs --hidden)")
    sub.add_argument("--model", required=True, metavar="PATH", help="the model: a GGUF, any shard of one, or a package directory; heads start as its routers")
    sub.add_argument(
        "--mode", choices=("temporal", "spatio", "spatio-temporal"), default="temporal",
        help="foretell a layer's next event, that of the next layer, or both: the policies of these names use them (default %(default)s)",
    )
    sub.add_argument("--slots", type=positive, metavar="B", help="slots per layer to train for (default: two and a half times as many as a token uses)")
    sub.add_argument("--tau", type=above_zero, default=0.001, metavar="T", help="how soft the choice of B experts is, in units of probability (default %(default)s)")
    sub.add_argument("--out", metavar="FILE", help="the file of heads to write (default: where tune and the engine look, ~/.config/edgemoe/heads/FINGERPRINT.gguf)")
    sub.add_argument("--type", choices=("f16", "q8_0"), default="f16", help="of the weights in the file (default %(default)s)")
    group = sub.add_argument_group("training")
    group.add_argument("--epochs", type=positive, default=8, metavar="N", help="passes over the traces, at most (default %(default)s)")
    group.add_argument("--patience", type=positive, default=2, metavar="N", help="stop after so many without a better figure on held-out sequences (default %(default)s)")
    group.add_argument("--holdout", type=share, default=0.1, metavar="SHARE", help="of the sequences, held out to try the heads on (default %(default)s)")
    group.add_argument("--rate", type=above_zero, default=1e-3, metavar="X", help="of Adam (default %(default)s)")
    group.add_argument("--batch", type=positive, default=256, metavar="N", help="tokens of a step (default %(default)s)")
    group.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of what is held out and of the order (default %(default)s)")
    group.add_argument("--resume", action="store_true", help="go on where a training that was interrupted, or killed, has left its state beside --out")
    sub.add_argument("--json", action="store_true", help="print one JSON object for machines")
    sub.set_defaults(run=_train_heads)


def _train_heads(options) -> int:
    from edgemoe import train_commands

    return train_commands.train_heads_(options)
