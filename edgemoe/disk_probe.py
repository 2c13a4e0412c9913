"""How fast this machine reads: the model's own files from the disk, and memory. Two seconds, for an estimate before the start.

Reads are as the RAM tier makes them: pieces as large as what it reads at once, anywhere in the files, past the page cache (O_DIRECT), some at a time. Where a file system
refuses that (tmpfs), they go through the page cache, from which each piece is dropped first.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgemoe.errors import ModelError
from edgemoe.machine import default_threads, human_bytes, memory
from edgemoe.package import Source

N_READERS = 4
MEMORY_SECONDS = 0.3
MEMORY_BYTES = 512 << 20  # more than caches hold
MOST_FILES = 64  # that are open at once
PAGE_BYTES = 4096  # O_DIRECT wants offset, length and address to be multiples of the disk's block, which is no larger


@dataclass(frozen=True)
class Rates:
    """Bytes per second."""

    disk_bytes_per_s: float
    memory_bytes_per_s: float
    direct: bool  # the disk was read past the page cache

    def line(self) -> str:
        how = "past the page cache" if self.direct else "through the page cache: this file system has no direct reads"
        return f"disk {human_bytes(self.disk_bytes_per_s)}/s ({how}), memory {human_bytes(self.memory_bytes_per_s)}/s"


def probe(source: Source, seconds: float = 2.0) -> Rates:
    """Takes about `seconds`. Raises ModelError when a file cannot be read."""
    memory_rate = read_memory(min(MEMORY_SECONDS, seconds))
    disk_rate, direct = read_files(files_of(source), piece_bytes(source), max(seconds - MEMORY_SECONDS, 0.1))
    return Rates(disk_rate, memory_rate, direct)


def files_of(source: Source) -> list[Path]:
    """Where experts lie: the blobs of a package, some of them if there are many, or the files of a GGUF."""
    if source.kind != "package":
        return [Path(f) for f in source.files]
    blobs = sorted(Path(source.path, "experts").glob("*/*.gguf"))
    return random.Random(0).sample(blobs, min(MOST_FILES, len(blobs)))


def piece_bytes(source: Source) -> int:
    """What is read at once: a whole expert of a package, one projection of an expert of a GGUF; the mean over the layers."""
    sizes = [layer.bytes_per_expert / (1 if source.kind == "package" else len(layer.projections)) for layer in source.layers]
    return max(int(sum(sizes) / len(sizes)), PAGE_BYTES)


def read_files(paths: list[Path], n_bytes: int, seconds: float) -> tuple[float, bool]:
    """(bytes per second, whether past the page cache). Raises ModelError."""
    for direct in (True, False):
        opened: list[_File] = []
        try:
            for path in paths:
                opened.append(_File(path, direct))  # one by one: those before a failure are closed
            return _rate(opened, n_bytes, seconds), direct
        except OSError as e:
            if not direct:
                raise ModelError(f"{e.filename or paths[0]}: {e.strerror}") from None
        finally:
            for f in opened:
                os.close(f.descriptor)


class _File:
    def __init__(self, path: Path, direct: bool):
        if direct and not hasattr(os, "O_DIRECT"):
            raise OSError(0, "no direct reads on this system", str(path))
        self.direct = direct
        self.descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        size = os.fstat(self.descriptor).st_size
        self.n_bytes = size // PAGE_BYTES * PAGE_BYTES if direct else size  # direct reads leave out the last part of a page

    def read(self, buffer: memoryview, offset: int) -> int:
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)
        return os.preadv(self.descriptor, [buffer], offset)


def _rate(files: list[_File], n_bytes: int, seconds: float) -> float:
    """Of N_READERS that read pieces at random until the time is over. Raises OSError."""
    files = [f for f in files if f.n_bytes]
    if not files:
        raise OSError(0, "too short to be read")
    n_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
    files[0].read(memoryview(mmap.mmap(-1, PAGE_BYTES)), 0)  # some file systems open for direct reads what they then refuse to read
    start = time.perf_counter()

    def reader(seed: int) -> int:
        choice, done = random.Random(seed), 0
        buffer = memoryview(mmap.mmap(-1, n_bytes))  # begins at a page
        while True:
            file = choice.choices(files, [f.n_bytes for f in files])[0]
            length = min(n_bytes, file.n_bytes)
            done += file.read(buffer[:length], choice.randrange(0, file.n_bytes - length + 1, PAGE_BYTES))
            if time.perf_counter() - start >= seconds:
                return done

    with ThreadPoolExecutor(N_READERS) as pool:
        done = sum(pool.map(reader, range(N_READERS)))
    return done / (time.perf_counter() - start)


def read_memory(seconds: float) -> float:
    """Bytes per second that as many threads as compute by default read together."""
    n_threads = default_threads()
    numbers = np.ones(min(MEMORY_BYTES, memory().usable // 4) // 8 + n_threads, np.uint64)
    start = time.perf_counter()
    n_passes = [0] * n_threads

    def reader(i: int, part: np.ndarray) -> None:
        while not n_passes[i] or time.perf_counter() - start < seconds:
            part.max()
            n_passes[i] += 1

    threads = [threading.Thread(target=reader, args=each) for each in enumerate(np.array_split(numbers, n_threads))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(n_passes) * numbers.nbytes / n_threads / (time.perf_counter() - start)
