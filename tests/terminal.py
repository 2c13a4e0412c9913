"""A program on a terminal of its own, for tests that type and read as a person would."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress


def _own_terminal() -> None:
    """In the child: its standard input becomes its controlling terminal, and Ctrl-C is heard even if whoever started the tests ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    def __init__(self, *arguments, term: str = "dumb", size: tuple[int, int] | None = None, **options):
        """`size`: (columns, rows)."""
        self.master, slave = pty.openpty()
        environment = os.environ | {"TERM": term, "COLUMNS": "200"}
        if size:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", size[1], size[0], 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgemoe.cli", *map(str, arguments)],
            stdin=slave, stdout=slave, stderr=slave, close_fds=True, start_new_session=True, env=environment, preexec_fn=_own_terminal, **options,
        )  # fmt: skip
        os.close(slave)
        os.set_blocking(self.master, False)
        self.text = ""

    def type(self, text: str) -> None:
        # In small pieces, reading the echo in between: a terminal that nobody reads blocks both sides.
        data = text.encode()
        while data:
            readable, writable, _ = select.select([self.master], [self.master], [], 60)
            if readable:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            if writable:
                with suppress(BlockingIOError):
                    data = data[os.write(self.master, data[:256]) :]
            assert readable or writable, f"the program does not read; on screen:\n{self.text}"

    def wait_for(self, pattern: str, timeout: float = 60) -> str:
        """Reads until `pattern` (a regular expression) appears; returns what came up to its end and forgets that."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.text)):
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"{pattern!r} did not come; on screen:\n{self.text}")
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the program ended before {pattern!r}; on screen:\n{self.text}") from None
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def press(self, key: str) -> None:
        """A key for the line editor: waits for its prompt, and for the editor to have taken the terminal over."""
        self.wait_for("> ")
        time.sleep(0.5)
        self.type(key)

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self.master)
