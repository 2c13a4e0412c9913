"""What is shown while one waits: a bar while a long prompt is read, and a line of statistics below an answer that is coming.

The last row of the terminal is taken out of what scrolls, as apt does for its progress: the answer goes on above it, wherever its cursor is, and neither overwrites the other.
It is drawn after a piece of the answer, by the thread that printed this, at most MOST_PER_SECOND times a second.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from edgemoe.tiers import status

MOST_PER_SECOND = 5
WINDOW_SECONDS = 2.0  # that the figures are of
FEWEST_ROWS, FEWEST_COLUMNS = 4, 20

SAVE, RESTORE = "\0337", "\0338"  # the cursor, and whether the next character wraps
UP, ERASE_RIGHT, SCROLL_ALL = "\033[A", "\033[K", "\033[r"


@contextmanager
def prompt_bar(llm) -> Iterator[None]:
    """For prompts of more than one batch, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    bar = None

    def progress(done: int, total: int) -> None:
        nonlocal bar
        if total <= llm.n_batch:
            return
        bar = bar or tqdm(total=total, desc="reading the prompt", unit=" tokens", leave=False, file=sys.stderr)
        bar.update(done - bar.n)
        if done == total:
            bar.close()
            bar = None

    llm.on_progress = progress
    try:
        yield
    finally:
        llm.on_progress = None
        if bar:
            bar.close()


class StatusLine:
    """`size` gives (columns, rows). Between enter and exit nothing else may move the cursor to the last row. Enter when the cursor is in the first column."""

    def __init__(self, write: Callable[[str], None], size: Callable[[], tuple[int, int]]):
        self.write, self.size = write, size
        self.rows = 0  # of which the last is ours

    def __enter__(self) -> StatusLine:
        self.write("\n" + self._reserved() + UP)  # a cursor in the last row would be caught there
        return self

    def __exit__(self, *exc) -> None:
        self.write(f"{SAVE}{SCROLL_ALL}\033[{self.rows};1H{ERASE_RIGHT}{RESTORE}")

    def show(self, text: str) -> None:
        columns, rows = self.size()
        resized = self._reserved() if rows != self.rows else ""
        # The text before the erasing, and never into the last column: nothing flickers, nothing wraps.
        self.write(f"{resized}{SAVE}\033[{self.rows};1H{text[: columns - 1]}{ERASE_RIGHT}{RESTORE}")

    def _reserved(self) -> str:
        self.rows = self.size()[1]
        return f"{SAVE}\033[1;{self.rows - 1}r{RESTORE}"


@contextmanager
def watched(llm, wanted: bool) -> Iterator[Callable[[], None]]:
    """A function to call after each piece of an answer; it does nothing where no line is wanted or none can be shown."""
    if not wanted or not _on_terminal():
        yield lambda: None
        return
    with StatusLine(_write, lambda: tuple(os.get_terminal_size(sys.stderr.fileno()))) as line:
        line.show("reading the prompt")
        yield Meter(llm, line.show).update


class Meter:
    """Figures of the last WINDOW_SECONDS, or of the last piece where pieces come more slowly."""

    def __init__(self, llm, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self.llm, self.show, self.clock = llm, show, clock
        self.samples: deque[tuple[float, int, dict[str, int]]] = deque()

    def update(self) -> None:
        now = self.clock()
        if self.samples and now - self.samples[-1][0] < 1 / MOST_PER_SECOND:
            return
        self.samples.append((now, self.llm.n_tokens, self.llm.expert_stats()))
        if len(self.samples) == 1:
            return  # the prompt is over: from here on time counts
        while len(self.samples) > 2 and now - self.samples[0][0] > WINDOW_SECONDS:
            self.samples.popleft()
        (then, n_before, before), (_, n_after, after) = self.samples[0], self.samples[-1]
        self.show(status({key: n - before[key] for key, n in after.items()}, n_after - n_before, now - then))


def _on_terminal() -> bool:
    if not (sys.stdout.isatty() and sys.stderr.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        return False
    columns, rows = os.get_terminal_size(sys.stderr.fileno())
    return columns >= FEWEST_COLUMNS and rows >= FEWEST_ROWS


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
