"""Types of command-line options: text in, value out, or a message that says what was wanted; and the text of a file that one names."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from edgemoe.errors import TraceError
from edgemoe.machine import parse_bytes

RATE_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def positive(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{n}: wanted 1 or more")
    return n


def not_negative(text: str) -> int:
    n = int(text)
    if n < 0:
        raise argparse.ArgumentTypeError(f"{n}: wanted 0 or more")
    return n


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def ram(text: str) -> int | str:
    if text in ("auto", "mapped"):
        return text
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: wanted auto, mapped or a size such as 6G") from None


def rate(text: str) -> float:
    """'16GB/s', '16G', '900 MB/s' -> bytes per second. As on data sheets, G is 10^9 and Gi is 2^30."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)(?:b(?:/s)?|/s)?", text.strip().lower(), re.ASCII)
    if not match or match[2] not in RATE_UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: wanted a rate above 0 such as 16GB/s")
    return float(match[1]) * RATE_UNITS[match[2]]


def read_text(path: str) -> str:
    """UTF-8; - is standard input. Raises TraceError."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise TraceError(f"{path}: not UTF-8 at byte {e.start}") from None
