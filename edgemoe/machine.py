"""Facts about this machine. Reading them changes nothing; a fact that cannot be read is None, empty or a cautious guess.

Only the standard library is used, and nothing of edgemoe: scripts/setup.sh runs this file before anything is installed.
`root` is the place where /proc and /sys are looked up; tests point it at a made-up tree.
"""

import math
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 writes "no limit" as the largest multiple of the page size that fits in 63 bits.
NO_LIMIT = 1 << 60
BYTES_PER_BUILD_JOB = 1 << 30
UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}  # bits to shift by


@dataclass(frozen=True)
class Memory:
    """All in bytes."""

    total: int
    available: int  # what the machine could hand out now without swapping
    limit: int | None  # the smallest cgroup limit above this process, if there is any
    usable: int  # what this process may still fill: available, and not past any cgroup limit
    swap_total: int = 0
    swap_free: int = 0


def human_bytes(n):
    """1610612736 -> '1.5 GiB'."""
    n = float(n)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} bytes" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def parse_bytes(text):
    """'6G', '6GiB', '6 gb' -> 6442450944: units are powers of 1024, a bare number is bytes. ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b?)", text.strip().lower(), re.ASCII)
    if not match:
        raise ValueError(f"{text}: wanted a size such as 6G or 512M")
    return int(float(match[1]) * (1 << UNITS[match[2] or ""]))


def affinity():
    """The numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cpus():
    """How many logical CPUs this process may run on."""
    return len(affinity())


def physical_cores(root="/", cpus=None):
    """How many cores lie under `cpus` (numbers; default: this process's affinity). Two hyper-threads are one core."""
    cpus = affinity() if cpus is None else cpus
    return max(1, len({_core_of(root, cpu) for cpu in cpus}))


def _core_of(root, cpu):
    topology = Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology")
    for name in ("core_cpus_list", "thread_siblings_list"):  # the older kernel's name last
        siblings = _read(topology / name)
        if siblings:
            return siblings
    return cpu


def cpu_quota(root="/"):
    """CPU time per time that the cgroups grant: 1.5 for a quota of 150 %, None without a quota."""
    quotas = []
    for directory in _cgroup_dirs(root, "cpu"):
        fields = (_read(directory / "cpu.max") or "").split()  # v2: "150000 100000" or "max 100000"
        if not fields:
            fields = [_read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")]
        quota, period = (_number(field) for field in (fields + [None])[:2])
        if quota and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def default_threads(root="/", cpus=None):
    """Threads that compute: one per physical core of the affinity, but no more than the quota can keep running.

    A thread beyond the quota spins while its group is throttled, and everyone waits for it.
    """
    quota = cpu_quota(root)
    n = physical_cores(root, cpus)
    return n if quota is None else max(1, min(n, math.ceil(quota)))


def memory(root="/"):
    """Total, available and allowed memory, as `Memory`."""
    info = {}
    for line in (_read(Path(root, "proc/meminfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if value.split():
            info[key] = (_number(value.split()[0]) or 0) * 1024
    if info.get("MemTotal"):
        total = info["MemTotal"]
        free = info.get("MemFree", 0) + info.get("Buffers", 0) + info.get("Cached", 0)
        available = info.get("MemAvailable", free)  # older than Linux 3.14
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available = total // 2  # macOS tells no such figure through sysconf
    limits = [
        (limit, max(0, limit - _memory_in_use(directory)))
        for directory in _cgroup_dirs(root, "memory")
        for limit in _memory_limits(directory)
        if limit < min(total, NO_LIMIT)
    ]
    return Memory(
        total=total,
        available=available,
        limit=min((limit for limit, _ in limits), default=None),
        usable=min([available] + [left for _, left in limits]),
        swap_total=info.get("SwapTotal", 0),
        swap_free=info.get("SwapFree", 0),
    )


def _memory_limits(directory):
    # memory.high kills nobody, but past it the kernel slows the process to a crawl: a limit all the same.
    values = [_number(_read(directory / name)) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    return [value for value in values if value is not None]


def _memory_in_use(directory):
    """Bytes charged to a cgroup that cannot be dropped. Pages of files (a mapped model) are dropped first."""
    used = _number(_read(directory / "memory.current"))
    if used is None:
        used = _number(_read(directory / "memory.usage_in_bytes")) or 0
    stat = dict(line.split()[:2] for line in (_read(directory / "memory.stat") or "").splitlines() if " " in line)
    # v1 keeps the sums over all descendants, which is what a limit counts, under total_*.
    prefix = "total_" if "total_inactive_file" in stat else ""
    for name in ("inactive_file", "active_file"):
        used -= _number(stat.get(prefix + name)) or 0
    return max(0, used)


def build_jobs(root="/"):
    """Compilers to run at once: the CPUs that this process gets, and about 1 GiB of memory each."""
    n = min(usable_cpus(), math.ceil(cpu_quota(root) or usable_cpus()))
    return max(1, min(n, memory(root).usable // BYTES_PER_BUILD_JOB))


def disk_free(path):
    """Bytes that this user may still write where `path` is, or would be."""
    path = Path(path).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def cpu_flags(root="/"):
    """The instruction sets the kernel reports ('avx2', 'amx_tile', ...); empty where it reports none."""
    return frozenset((_cpuinfo(root, "flags", "Features") or "").split())


def cpu_name(root="/"):
    return _cpuinfo(root, "model name", "Model", "Hardware") or platform.processor() or platform.machine() or "unknown"


def _cpuinfo(root, *keys):
    found = {}
    for line in (_read(Path(root, "proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return next((found[key] for key in keys if found.get(key)), None)


def _cgroup_dirs(root, controller):
    """This process's cgroup and all its ancestors, as directories that may hold `controller`'s files.

    Both versions can be mounted at once, each with some of the controllers; a file that is not there does not limit.
    """
    own = {}  # controller name, or "" for v2 -> the path of this process's cgroup
    for line in (_read(Path(root, "proc/self/cgroup")) or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        own.update((name, path) for name in names.split(","))
    dirs = []
    for line in (_read(Path(root, "proc/self/mountinfo")) or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        name = {"cgroup2": "", "cgroup": controller}.get(kind[0])
        if name not in own or (name and name not in kind[2].split(",")):
            continue
        mounted, mount_point = (_unescape(field) for field in fields[3:5])
        dirs += _upwards(Path(root, mount_point.lstrip("/")), mounted, own[name])
    return dirs


def _upwards(top, mounted, path):
    """Directories from cgroup `path` up to `top`, where the cgroup `mounted` is mounted."""
    # In a container without a cgroup namespace both are paths on the host. With one, `path` may point
    # out of what is mounted ("/../x"); then only the top is visible.
    relative = os.path.relpath(path, mounted)
    if relative.startswith(".."):
        relative = "."
    directory = top / relative
    return [directory, *list(directory.parents)[: len(directory.parts) - len(top.parts)]]


def _unescape(field):
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _read(path):
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(text):
    try:
        return int(text)
    except (TypeError, ValueError):
        return None
