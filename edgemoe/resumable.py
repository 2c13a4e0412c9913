"""Trainings that can be interrupted: their state lies beside what they write, and --resume goes on with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgemoe.errors import EdgemoeError


def state_beside(out: Path, suffix: str, resume: bool, *further: Path) -> Path:
    """Where the state goes. Before an hour's work: all outputs can be written, and no state would be lost. further: outputs beside `out`. Raises EdgemoeError."""
    for path in (out, *further):
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise EdgemoeError(f"{path}: {'is a folder' if path.is_dir() else f'no folder {path.parent} that can be written to'}")
    state = out.with_name(f"{out.name}.state.{suffix}")
    if state.exists() and not resume:
        raise EdgemoeError(f"{state}: is the state of a training that was interrupted: --resume goes on with it; remove it to begin anew")
    return state


@contextmanager
def saying_where(state: Path) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: {state} has the state, the same command with --resume goes on", file=sys.stderr)
        raise
