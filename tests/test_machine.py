"""Facts about machines, read from made-up /proc and /sys trees that are small enough to check by hand."""

import os
import subprocess
import sys

import pytest

from edgemoe import machine

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
V1_OWN = "4:memory:/app\n1:cpu,cpuacct:/app\n"
NO_LIMIT_V1 = "9223372036854771712\n"


@pytest.fixture
def tree(tmp_path):
    """write({path: text}) -> the root of a tree with these files."""

    def write(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def meminfo(total=16, available=12):
    return {"proc/meminfo": f"MemTotal: {total << 20} kB\nMemFree: 1 kB\nMemAvailable: {available << 20} kB\n"}


def v2(files, own="/user.slice/app.scope"):
    return {
        "proc/self/cgroup": f"0::{own}\n",
        "proc/self/mountinfo": V2_MOUNT,
        **{f"sys/fs/cgroup/{path}": text for path, text in files.items()},
    }


def v1(files):
    return {
        "proc/self/cgroup": V1_OWN,
        "proc/self/mountinfo": V1_MOUNTS,
        **{f"sys/fs/cgroup/{path}": text for path, text in files.items()},
    }


def cores(*siblings):
    """Topology files: cores("0,2", "1") has CPU 0 and 2 on one core and CPU 1 on another."""
    files = {}
    for group in siblings:
        for cpu in group.split(","):
            files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = group + "\n"
    return files


QUOTAS = [
    ("nothing mounted", {}, None),
    ("v2 without limit", v2({"user.slice/app.scope/cpu.max": "max 100000\n"}), None),
    ("v2, 150 %", v2({"user.slice/app.scope/cpu.max": "150000 100000\n"}), 1.5),
    ("v2, on an ancestor", v2({"user.slice/cpu.max": "50000 100000\n", "user.slice/app.scope/cpu.max": "max 100000\n"}), 0.5),
    ("v2, the smallest counts", v2({"user.slice/cpu.max": "400000 100000\n", "user.slice/app.scope/cpu.max": "2000 1000\n"}), 2.0),
    ("v2, a cgroup of somebody else", v2({"system.slice/cpu.max": "50000 100000\n"}), None),
    ("v1 without limit", v1({"cpu,cpuacct/app/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/app/cpu.cfs_period_us": "100000\n"}), None),
    ("v1, 150 %", v1({"cpu,cpuacct/app/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/app/cpu.cfs_period_us": "100000\n"}), 1.5),
    ("v1, on an ancestor", v1({"cpu,cpuacct/cpu.cfs_quota_us": "25000\n", "cpu,cpuacct/cpu.cfs_period_us": "50000\n"}), 0.5),
    ("unreadable", v2({"user.slice/app.scope/cpu.max": "what?\n"}), None),
]


@pytest.mark.parametrize("files, quota", [row[1:] for row in QUOTAS], ids=[row[0] for row in QUOTAS])
def test_cpu_quota(tree, files, quota):
    assert machine.cpu_quota(tree(files)) == quota


def test_container_that_sees_the_path_on_the_host(tree):
    # Without a cgroup namespace the path is the host's, and the mount shows only what lies below it.
    root = tree({
        "proc/self/cgroup": "0::/docker/4f2a\n",
        "proc/self/mountinfo": V2_MOUNT.replace(" / /sys", " /docker/4f2a /sys"),
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
    })
    assert machine.cpu_quota(root) == 1.5


def test_path_outside_of_what_is_mounted(tree):
    assert machine.cpu_quota(tree(v2({"cpu.max": "150000 100000\n"}, own="/../../other"))) == 1.5


def test_two_hyper_threads_are_one_core(tree):
    root = tree(cores("0,2", "1,3"))
    assert machine.physical_cores(root, {0, 1, 2, 3}) == 2
    assert machine.physical_cores(root, {0, 2}) == 1  # taskset to both halves of one core


def test_unknown_topology_counts_cpus(tree):
    assert machine.physical_cores(tree({}), {0, 1, 2}) == 3


@pytest.mark.parametrize("cpu_max, n", [("max 100000", 4), ("150000 100000", 2), ("100000 100000", 1), ("20000 100000", 1), ("900000 100000", 4)])
def test_default_threads_are_cores_within_the_quota(tree, cpu_max, n):
    root = tree({**cores("0,4", "1,5", "2,6", "3,7"), **v2({"user.slice/cpu.max": cpu_max})})
    assert machine.default_threads(root, set(range(8))) == n


def test_memory_without_cgroups(tree):
    memory = machine.memory(tree(meminfo()))
    assert memory == machine.Memory(total=16 * GIB, available=12 * GIB, limit=None, usable=12 * GIB)


def test_memory_limit_v2_leaves_what_is_not_in_use(tree):
    # 4 GiB allowed; 3 are charged, but 2 of them are pages of a mapped file, which the kernel drops when it must.
    root = tree({**meminfo(), **v2({
        "user.slice/app.scope/memory.max": f"{4 * GIB}\n",
        "user.slice/app.scope/memory.current": f"{3 * GIB}\n",
        "user.slice/app.scope/memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
    })})
    memory = machine.memory(root)
    assert (memory.limit, memory.usable) == (4 * GIB, 3 * GIB)


def test_memory_limit_v2_smallest_of_ancestors(tree):
    root = tree({**meminfo(), **v2({
        "user.slice/memory.max": f"{2 * GIB}\n",
        "user.slice/app.scope/memory.max": "max\n",
        "user.slice/app.scope/memory.high": f"{3 * GIB}\n",
    })})
    memory = machine.memory(root)
    assert (memory.limit, memory.usable) == (2 * GIB, 2 * GIB)


def test_memory_limit_v1(tree):
    root = tree({**meminfo(), **v1({
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "memory/app/memory.limit_in_bytes": f"{6 * GIB}\n",
        "memory/app/memory.usage_in_bytes": f"{5 * GIB}\n",
        # The group's own figures leave out its children; the limit does not.
        "memory/app/memory.stat": f"inactive_file 0\nactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
    })})
    memory = machine.memory(root)
    assert (memory.limit, memory.usable) == (6 * GIB, 3 * GIB)


def test_memory_limit_above_the_machine_is_none(tree):
    memory = machine.memory(tree({**meminfo(), **v1({"memory/app/memory.limit_in_bytes": NO_LIMIT_V1})}))
    assert (memory.limit, memory.usable) == (None, 12 * GIB)


def test_old_kernel_without_mem_available(tree):
    root = tree({"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 20 kB\nCached: 300 kB\nSwapTotal: 50 kB\nSwapFree: 40 kB\n"})
    memory = machine.memory(root)
    assert (memory.available, memory.swap_total, memory.swap_free) == (420 * 1024, 50 * 1024, 40 * 1024)


def test_memory_without_proc(tree):
    memory = machine.memory(tree({}))
    assert 0 < memory.usable <= memory.total


X86 = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: sse2 avx2 amx_tile\n\nprocessor\t: 1\nmodel name\t: other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve\n\nHardware\t: Some Board\n"


@pytest.mark.parametrize("cpuinfo, name, flags", [
    (X86, "Some CPU @ 2 GHz", {"sse2", "avx2", "amx_tile"}),
    (ARM, "Some Board", {"fp", "asimd", "sve"}),
])
def test_cpu(tree, cpuinfo, name, flags):
    root = tree({"proc/cpuinfo": cpuinfo})
    assert machine.cpu_name(root) == name
    assert machine.cpu_flags(root) == flags


def test_cpu_without_proc(tree):
    assert machine.cpu_name(tree({}))
    assert machine.cpu_flags(tree({})) == frozenset()


def test_build_jobs_have_a_gibibyte_each(tree, monkeypatch):
    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    assert machine.build_jobs(tree(meminfo(available=3))) == 3
    assert machine.build_jobs(tree(meminfo(available=0))) == 1
    assert machine.build_jobs(tree({**meminfo(), **v2({"user.slice/cpu.max": "150000 100000"})})) == 2


def test_disk_free_where_nothing_is_yet(tmp_path):
    here, deep = machine.disk_free(tmp_path), machine.disk_free(tmp_path / "not" / "made" / "yet")
    assert deep > 0 and abs(deep - here) < GIB  # others write to the disk meanwhile


@pytest.mark.parametrize("n, text", [
    (0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (154 << 20, "154.0 MiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5.0 TiB"),
])
def test_human_bytes(n, text):
    assert machine.human_bytes(n) == text


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_affinity_is_respected():
    # In a process of its own: this one keeps all its CPUs. As with `taskset -c N`.
    program = (
        "import os, runpy, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "m = runpy.run_path(sys.argv[1]); print(m['usable_cpus'](), m['physical_cores'](), m['default_threads']())"
    )
    out = subprocess.run([sys.executable, "-c", program, machine.__file__], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["1", "1", "1"]


def test_this_machine():
    assert 1 <= machine.default_threads() <= machine.physical_cores() <= machine.usable_cpus()
    assert 0 < machine.memory().usable <= machine.memory().total
