"""The options of `edgemoe heads`. What it does is in heads_commands, which loads when it runs."""

from __future__ import annotations

import argparse

EXAMPLES = """examples:
  edgemoe heads show heads.gguf                  what they are and how well they did
  edgemoe heads add heads.gguf model.edgemoe     into the package, where chat and run find them
"""


def add_heads_commands(commands) -> None:
    help = "show a file of learned heads; put it into a package"
    heads = commands.add_parser("heads", help=help, description=help, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = heads.add_subparsers(metavar="ACTION", required=True)

    def action(name: str, help: str, example: str, run) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=help, description=help, epilog=f"example:\n  {example}", formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.add_argument("--json", action="store_true", help="print one JSON object for machines")
        sub.set_defaults(run=run)
        return sub

    shown = action("show", "say what is in a file of heads, or in a package that has some", "edgemoe heads show heads.gguf", _show)
    shown.add_argument("path", metavar="FILE", help="a file of heads, or a package directory")
    added = action("add", "put heads into the sidecar of a package, in the place of any that are there", "edgemoe heads add heads.gguf model.edgemoe", _add)
    added.add_argument("file", metavar="FILE", help="a file of heads, of the model that the package was made from")
    added.add_argument("package", metavar="PACKAGE", help="a package directory")


def _show(options) -> int:
    from edgemoe import heads_commands

    return heads_commands.show(options)


def _add(options) -> int:
    from edgemoe import heads_commands

    return heads_commands.add(options)
