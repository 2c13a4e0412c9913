"""A file to be written is a list of pieces that lie one behind the other: bytes we have, or a range of a source file.

Writing a file, comparing one with what it should be, and taking the CRC of a range of the source are the same
walk over its pieces, through one reused buffer per thread.
"""

import os
import threading
import zlib
from typing import NamedTuple

import numpy as np

from .source import read_exact

# Fits the processor's cache between reading, the CRC and writing. Writes of 1 MiB cost the kernel a quarter more
# (it looks for larger pieces of free memory); much smaller ones make the threads wait for each other.
BUFFER_BYTES = 256 << 10
_local = threading.local()


class Piece(NamedTuple):
    """`nbytes` of a file: `data`, or where that is None the bytes at `offset` of source file `part`."""

    label: str
    nbytes: int
    data: bytes = None
    part: int = 0
    offset: int = 0


class Difference(Exception):
    """A file is not what it should be. The message says where, found and wanted."""


def tensor_piece(tensor):
    return Piece(tensor.name, tensor.nbytes, None, tensor.part, tensor.offset)


def padded(pieces, alignment):
    """The pieces, each followed by the zeros that make it end on a multiple of `alignment`."""
    out = []
    for piece in pieces:
        out.append(piece)
        gap = -piece.nbytes % alignment
        if gap:
            out.append(Piece("padding", gap, bytes(gap)))
    return out


def cut(pieces, limit):
    """Split a file into runs of at most `limit` bytes. Yields (place in the file, pieces, bytes)."""
    at, run, fill = 0, [], 0
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            n = min(piece.nbytes - done, limit - fill)
            data = None if piece.data is None else piece.data[done:done + n]
            run.append(Piece(piece.label, n, data, piece.part, piece.offset + done))
            done += n
            fill += n
            if fill == limit:
                yield at, run, fill
                at, run, fill = at + fill, [], 0
    if run:
        yield at, run, fill


def stream(pieces, source):
    """Yield (bytes, CRC-32) for the file that `pieces` describe, buffer by buffer; the view is reused.

    The CRC covers the bytes so far that come from the source, without headers and padding.
    """
    buffer = memoryview(_buffer("stream"))
    fill, crc = 0, 0
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            if fill == BUFFER_BYTES:
                yield buffer, crc
                fill = 0
            n = min(piece.nbytes - done, BUFFER_BYTES - fill)
            view = buffer[fill:fill + n]
            if piece.data is None:
                source.read_into(view, piece.part, piece.offset + done)
                crc = zlib.crc32(view, crc)
            else:
                view[:] = piece.data[done:done + n]
            done += n
            fill += n
    yield buffer[:fill], crc


def crc_of(pieces, source):
    """CRC-32 of the source bytes in `pieces`."""
    crc = 0
    for _, crc in stream(pieces, source):
        pass
    return crc


def write(fd, at, pieces, source):
    """Write the pieces at byte `at` of an open file; returns the CRC-32 of their source bytes."""
    crc = 0
    for view, crc in stream(pieces, source):
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], at + done)
        at += len(view)
    return crc


def compare(path, at, pieces, source, whole=True):
    """Compare file `path` from byte `at` with the pieces; returns the CRC-32 of their source bytes.

    `whole`: the file must end where the pieces end. Raises Difference at the first byte that differs, and for a
    missing file or one of another size.
    """
    start, crc = at, 0
    wanted_bytes = at + sum(piece.nbytes for piece in pieces)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Difference("the file is missing") from None
    try:
        found_bytes = os.fstat(fd).st_size
        if found_bytes < wanted_bytes or whole and found_bytes > wanted_bytes:
            raise Difference(f"found {found_bytes} bytes, wanted {wanted_bytes}")
        for wanted, crc in stream(pieces, source):
            found = memoryview(_buffer("compare"))[:len(wanted)]
            read_exact(fd, found, at, path)
            unequal = np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8)
            if unequal.any():
                place = int(unequal.argmax())
                raise Difference(_describe(pieces, at - start + place, found[place], wanted[place]))
            at += len(wanted)
    finally:
        os.close(fd)
    return crc


def _describe(pieces, offset, found, wanted):
    for piece in pieces:
        if offset < piece.nbytes:
            return f"{piece.label}: byte {offset}: found {found:#04x}, wanted {wanted:#04x}"
        offset -= piece.nbytes
    raise AssertionError("offset beyond the pieces")


def _buffer(name):
    if not hasattr(_local, name):
        setattr(_local, name, bytearray(BUFFER_BYTES))
    return getattr(_local, name)
