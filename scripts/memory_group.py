"""A process in a control group of its own with a memory limit, started from a cold page cache and watched from outside. Linux, control groups version 1 or 2.

The process enters its group before its program starts, so that every page it touches is charged there: its own memory, and pages of files that nobody else has in memory. Whoever
reads a file first pays for its pages; that is why a limit means nothing while the model is still in the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgemoe import machine

SAMPLE_S = 0.05
REMOVE_S = 5  # a group is busy for a moment after its last process has ended
LIBC = ctypes.CDLL(None, use_errno=True)
COLUMNS = ("at", "anon", "file", "shmem", "group")  # of a sample: time.monotonic(), then bytes; `group` is what counts against the limit, page cache included
STATUS = ("RssAnon:", "RssFile:", "RssShmem:")
ENTER = 'echo $$ > "$0" && exec "$@"'  # a shell, because an error of Python's preexec_fn does not say why
_numbers = itertools.count()


@dataclass(frozen=True)
class Version:
    """Names of a group's files. Without a limit on swap, the kernel would swap instead of keeping the limit."""

    limit: str
    swap: str
    usage: str
    kills: str


VERSIONS = (
    Version("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    Version("memory.max", "memory.swap.max", "memory.current", "memory.events"),
)


@dataclass(frozen=True)
class MemoryGroup:
    directory: Path
    version: Version

    def limit(self, n_bytes: int) -> None:
        (self.directory / self.version.limit).write_text(str(n_bytes))
        swap = self.directory / self.version.swap
        if swap.exists():
            swap.write_text("0" if self.version.swap == "memory.swap.max" else str(n_bytes))  # version 1 counts memory and swap together

    def usage(self) -> int:
        return int((self.directory / self.version.usage).read_text())

    def n_killed(self) -> int:
        """Processes that the limit ended."""
        counts = dict(line.split() for line in (self.directory / self.version.kills).read_text().splitlines())
        return int(counts.get("oom_kill", 0))


@contextmanager
def memory_group(limit: int | None):
    """A new group, removed at the end; `limit` in bytes, None for none. Processes in it must have ended by then. Raises OSError with the reason where none can be made."""
    group = _new_group()
    try:
        if limit is not None:
            group.limit(limit)
        yield group
    finally:
        _remove(group.directory)


def _new_group() -> MemoryGroup:
    """Below this process's own group, or below the nearest ancestor whose children may have limits."""
    reasons = []
    for parent in machine._cgroup_dirs("/", "memory"):
        directory = parent / f"edgemoe-{os.getpid()}-{next(_numbers)}"
        try:
            directory.mkdir()
        except OSError as e:
            reasons.append(f"{parent}: {e.strerror}")
            continue
        version = next((v for v in VERSIONS if os.access(directory / v.limit, os.W_OK)), None)
        if version:
            return MemoryGroup(directory, version)
        directory.rmdir()
        reasons.append(f"{parent}: memory is not among its children's controllers")
    hint = "as root, or below systemd's user manager: systemd-run --user --scope COMMAND"
    raise OSError(errno.EACCES, f"no control group with a memory limit can be made ({'; '.join(reasons) or 'none is mounted'}); {hint}")


def _remove(directory: Path) -> None:
    end = time.monotonic() + REMOVE_S
    while True:
        try:
            return directory.rmdir()
        except OSError as e:
            if e.errno != errno.EBUSY or time.monotonic() > end:
                raise
            time.sleep(0.05)


@contextmanager
def started(group: MemoryGroup, command: list[str], **streams):
    """The process, killed at the end if it has not ended by then."""
    process = subprocess.Popen(["sh", "-c", ENTER, str(group.directory / "cgroup.procs"), *command], **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def watch(process: subprocess.Popen, group: MemoryGroup) -> list[tuple]:
    """Samples until the process ends, as COLUMNS says."""
    samples = []
    while process.poll() is None:
        parts = _resident(process.pid)
        if parts:
            samples.append((time.monotonic(), *parts, group.usage()))
        time.sleep(SAMPLE_S)
    return samples


def _resident(pid: int) -> tuple[int, ...]:
    """Bytes of STATUS; empty for a process that is about to go."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split()[:2] for line in lines if line.startswith(STATUS))
    return tuple(1024 * int(found[name]) for name in STATUS) if found else ()


def drop_cached(files: list[Path]) -> dict:
    """Files out of the page cache: by name, and all that is in it where that leaves more than a hundredth and this user may. {"bytes", "left_bytes", "how"}."""
    os.sync()  # dirty pages stay
    for file in files:
        with open(file, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    total, left, how = sum(f.stat().st_size for f in files), sum(map(cached_bytes, files)), "fadvise"
    if left > total / 100:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
            left, how = sum(map(cached_bytes, files)), "fadvise and drop_caches"
        except OSError as e:
            how = f"fadvise; drop_caches: {e.strerror}"
    return {"bytes": total, "left_bytes": left, "how": how}


def cached_bytes(file: Path) -> int:
    """How much of a file is in the page cache."""
    with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        present = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        first = ctypes.c_char.from_buffer(mapped)
        failed = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), present.ctypes.data_as(ctypes.c_void_p))
        del first  # the mapping cannot be closed while somebody points into it
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    return int((present & 1).sum()) * mmap.PAGESIZE


@contextmanager
def read_ahead(file: Path, kb: int | None):
    """Sets how far the kernel reads ahead on the file's disk, for everybody, and puts it back at the end; None leaves it. Yields what holds meanwhile, in KiB (None: unknown)."""
    device = os.stat(file).st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    before = setting.read_text() if setting.exists() else None
    if kb is None:
        yield before and int(before)
        return
    setting.write_text(str(kb))
    try:
        yield kb
    finally:
        setting.write_text(before)


def direct_read_rate(file: Path, size: int, n_threads: int, seconds: float = 1.0) -> float:
    """Bytes per second of reads of `size` bytes (rounded up to pages) at random places of a file, past the page cache."""
    from concurrent.futures import ThreadPoolExecutor

    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    n_places = (os.fstat(descriptor).st_size - size) // mmap.PAGESIZE
    end = time.monotonic() + seconds

    def read(seed: int) -> int:
        random, n_read = np.random.default_rng(seed), 0
        with mmap.mmap(-1, size) as buffer:
            while time.monotonic() < end:
                n_read += os.preadv(descriptor, [buffer], int(random.integers(n_places)) * mmap.PAGESIZE)
        return n_read

    try:
        start = time.monotonic()
        with ThreadPoolExecutor(n_threads) as pool:
            n_bytes = sum(pool.map(read, range(n_threads)))
        return n_bytes / (time.monotonic() - start)
    finally:
        os.close(descriptor)
