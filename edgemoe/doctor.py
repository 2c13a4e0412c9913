"""`edgemoe doctor`: what is wrong with this installation or machine, and the command that mends it.

Whatever can crash runs in one child process (edgemoe.probe). The parent never loads a native library, and so it always lives to report.
"""

import dataclasses
import importlib.metadata
import json as json_text
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from edgemoe import machine
from edgemoe.devices import SOFTWARE
from edgemoe.probe import PROBE_MARK

OK, WARN, FAIL = "OK", "WARN", "FAIL"
COLOURS = {OK: "\033[32m", WARN: "\033[33m", FAIL: "\033[31m"}

WANTED_LLAMA = "0.3.36"
WANTED_PYTHON = (3, 10)
PROBE_SECONDS = 8
MAP_COUNT = 65530  # the kernel's own default
LOW_DISK_BYTES = 2 << 30
LOW_MEMORY_BYTES = 1 << 30

AMX_OFF = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
FIX_NATIVE = "pip install ."
FIX_LLAMA = f"pip install 'llama-cpp-python=={WANTED_LLAMA}', or scripts/setup.sh in a checkout of edgemoe"
# --no-cache-dir: pip keeps the wheels it builds by version alone and would put back the one that crashes.
_REBUILD = f"pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python llama-cpp-python=={WANTED_LLAMA}"
FIX_AMX = f"CFLAGS='{AMX_OFF}' CXXFLAGS='{AMX_OFF}' {_REBUILD}"
FIX_REBUILD = f"rebuild it on this machine: {_REBUILD}"


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    status: str  # OK, WARN or FAIL
    text: str
    fix: str = ""


def doctor(json=False):
    """Print all checks; the exit code is 1 if any of them failed."""
    checks = run_checks()
    if json:
        print(json_text.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        print_checks(checks, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    return int(any(check.status == FAIL for check in checks))


def print_checks(checks, colour=False):
    width = max(len(check.name) for check in checks)
    for check in checks:
        status = f"{check.status:<4}"
        if colour:
            status = f"{COLOURS[check.status]}{status}\033[0m"
        print(f"{status}  {check.name:<{width}}  {check.text}")
        if check.fix:
            print(f"      {'':<{width}}  fix: {check.fix}")


def run_checks():
    """All checks as a list of `Check`, in the order in which a reader would mend them. Takes about two seconds."""
    probe = run_probe()
    return [
        check_python(),
        check_llama_version(),
        check_compute(probe),
        *check_devices(probe),
        check_openmp(probe),
        check_native(probe),
        check_kernels(probe),
        check_threads(),
        check_memory(),
        check_swap(),
        *check_disk(),
        check_locked_memory(),
        check_map_count(),
    ]


def check_python():
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= WANTED_PYTHON:
        return Check("python", OK, f"{found} ({sys.executable})")
    wanted = ".".join(map(str, WANTED_PYTHON))
    return Check("python", FAIL, f"found {found}, wanted {wanted} or newer", f"install Python {wanted} or newer")


def check_llama_version():
    try:
        found = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return Check("llama-cpp-python", FAIL, f"not installed, wanted {WANTED_LLAMA}", FIX_LLAMA)
    if found != WANTED_LLAMA:
        return Check("llama-cpp-python", FAIL, f"found {found}, wanted {WANTED_LLAMA}", FIX_LLAMA)
    return Check("llama-cpp-python", OK, found)


def check_compute(probe):
    """Do llama.cpp's matrix products work here, in every layout that it would choose for weights?"""
    for step, fix in (("import", FIX_LLAMA), ("compute", FIX_REBUILD)):
        if step in probe.errors:
            return Check("compute", FAIL, f"{step}: {probe.errors[step]}", fix)
    if "compute" in probe.results:
        layouts = {}
        for weight_type, layout in probe.results["compute"]:
            layouts.setdefault(layout, []).append(weight_type)
        text = "; ".join(f"{', '.join(types)} in {layout}" for layout, types in layouts.items())
        return Check("compute", OK, f"matrix products are right for {text}")
    if probe.timed_out:
        fix = "run it again on a quiet machine"
        return Check("compute", FAIL, f"no answer from '{probe.last}' within {PROBE_SECONDS} s", fix)
    died = f"the probe died at '{probe.last}' with {probe.died_of}"
    # Whether the wrong tile configuration ends in SIGSEGV or in SIGILL depends on what the compiler left of it.
    if probe.last.startswith("compute") and "AMX" in probe.last:
        return Check("compute", FAIL, f"{died}: GCC 12 miscompiles ggml's AMX code", FIX_AMX)
    if probe.died_of == "SIGILL":
        return Check("compute", FAIL, f"{died}: this llama-cpp-python was built for another CPU", FIX_REBUILD)
    if probe.last == "devices":
        return Check("compute", FAIL, f"{died}: a GPU driver crashed", "update or remove that driver")
    return Check("compute", FAIL, f"{died}. {probe.said}".rstrip(), FIX_REBUILD)


def check_devices(probe):
    """One check per device that ggml knows."""
    if "devices" not in probe.results:
        return [not_tried("devices", "devices", probe)]
    checks = []
    for name, kind, description, free, total in probe.results["devices"]:
        text = f"{name} ({kind}): {description}"
        if kind in ("GPU", "IGPU"):
            text += f", {machine.human_bytes(free)} of {machine.human_bytes(total)} free"
        if any(word in description.lower() for word in SOFTWARE):
            fix = "install the Vulkan driver of your GPU; without a GPU nothing is to be done"
            checks.append(Check("device", WARN, text + "; computes on the CPU, so it is never picked unasked", fix))
        else:
            checks.append(Check("device", OK, text))
    return checks or [Check("devices", FAIL, "ggml knows no device, not even the CPU", FIX_REBUILD)]


def check_openmp(probe):
    if "system" not in probe.results:
        return not_tried("openmp", "system", probe)
    if "OPENMP = 1" in probe.results["system"]:
        return Check("openmp", OK, "llama.cpp was built with OpenMP")
    fix = f"install libomp (it comes with GCC), then {_REBUILD}"
    return Check("openmp", WARN, "llama.cpp was built without OpenMP: it makes its threads anew for every graph", fix)


def check_native(probe):
    if "native" in probe.results:
        return Check("native library", OK, "loads beside llama.cpp")
    if "native" in probe.errors:
        return Check("native library", FAIL, probe.errors["native"], FIX_NATIVE)
    if probe.last == "native":
        how = probe.died_of or f"no answer within {PROBE_SECONDS} s"
        return Check("native library", FAIL, f"loading it ended with {how}", FIX_NATIVE)
    return not_tried("native library", "native", probe)


def check_kernels(probe):
    """Which of edgemoe's own kernels this CPU gets."""
    if "native" not in probe.results:
        return Check("kernels", WARN, "not known: the native library does not load", "mend the failure above first")
    isa = probe.results["native"]
    if isa == "none":
        text = "none for this CPU (they need AVX2, FMA and F16C): llama.cpp's own compute everything"
        return Check("kernels", WARN, text, "in a virtual machine, give it the host's CPU (-cpu host); otherwise nothing is to be done")
    return Check("kernels", OK, isa)


def not_tried(name, step, probe):
    if step in probe.errors:
        return Check(name, FAIL, probe.errors[step], FIX_REBUILD)
    return Check(name, WARN, f"not tried: the probe ended at '{probe.last}'", "mend the failure above first")


def check_threads():
    quota = machine.cpu_quota()
    text = f"{machine.default_threads()} by default: {machine.usable_cpus()} CPUs in the affinity"
    text += f", {machine.physical_cores()} physical cores, "
    text += "no CPU quota" if quota is None else f"CPU quota {100 * quota:.0f} %"
    if quota is not None and quota < 1:
        return Check("threads", WARN, text, "raise the CPU quota of this container or service to 100 % or more")
    return Check("threads", OK, f"{text}; {machine.cpu_name()}")


def check_memory():
    memory = machine.memory()
    limit = "no cgroup limit" if memory.limit is None else f"cgroup limit {machine.human_bytes(memory.limit)}"
    text = f"{machine.human_bytes(memory.usable)} usable of {machine.human_bytes(memory.total)}"
    text += f" ({machine.human_bytes(memory.available)} available, {limit})"
    if memory.usable < LOW_MEMORY_BYTES:
        return Check("memory", WARN, text, "close other programs, or raise the memory limit of this container")
    return Check("memory", OK, text)


def check_swap():
    memory = machine.memory()
    if not memory.swap_total:
        return Check("swap", OK, "none")
    free, total = machine.human_bytes(memory.swap_free), machine.human_bytes(memory.swap_total)
    return Check("swap", OK, f"{free} of {total} free")


def cache_dir():
    """Where scripts/setup.sh keeps the wheels it built."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EDGEMOE_CACHE") or Path(base, "edgemoe"))


def check_disk():
    checks = []
    for name, path in (("disk (here)", Path.cwd()), ("disk (cache)", cache_dir())):
        free = machine.disk_free(path)
        text = f"{machine.human_bytes(free)} free in {path}"
        if free < LOW_DISK_BYTES:
            checks.append(Check(name, WARN, text, f"free {machine.human_bytes(LOW_DISK_BYTES)} or more for a model"))
        else:
            checks.append(Check(name, OK, text))
    return checks


def check_locked_memory():
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", OK, "unlimited")
    # Only pinning a model (mlock) needs it, so a low limit alone is no defect.
    word = "unlimited" if hard == resource.RLIM_INFINITY else machine.human_bytes(hard)
    return Check("locked memory", OK, f"{machine.human_bytes(soft)} (ulimit -l; can be raised to {word})")


def check_map_count(path="/proc/sys/vm/max_map_count"):
    try:
        found = int(Path(path).read_text())
    except (OSError, ValueError):
        return Check("max_map_count", OK, "not limited on this system")
    if found < MAP_COUNT:
        text = f"found {found}, wanted {MAP_COUNT}: every expert of a package is a mapping of its own"
        return Check("max_map_count", WARN, text, f"sudo sysctl vm.max_map_count={MAP_COUNT}")
    return Check("max_map_count", OK, str(found))


@dataclasses.dataclass
class Probe:
    """What the child process told before it ended."""

    results: dict  # step -> its result
    errors: dict  # step -> the text of its exception
    last: str  # the step that it named last
    died_of: str = ""  # "SIGSEGV", "exit code 3"; empty if it ended well
    said: str = ""  # its last line on stderr
    timed_out: bool = False


def probe_command():
    # The child searches modules exactly where this process does, so it finds the same edgemoe and the same llama_cpp.
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from edgemoe import probe; probe.probe()"]


def run_probe():
    timed_out = False
    try:
        child = subprocess.run(probe_command(), capture_output=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL)
        out, err, code = child.stdout, child.stderr, child.returncode
    except subprocess.TimeoutExpired as expired:
        out, err, code, timed_out = expired.stdout or b"", expired.stderr or b"", 0, True
    probe = Probe({}, {}, "start", timed_out=timed_out)
    for line in out.decode(errors="replace").splitlines():
        if not line.startswith(PROBE_MARK):
            continue  # a library that prints
        event, step, value = json_text.loads(line[len(PROBE_MARK) :])
        if event == "begin":
            probe.last = step
        else:
            {"result": probe.results, "error": probe.errors}[event][step] = value
    probe.said = (err.decode(errors="replace").strip().splitlines() or [""])[-1]
    if code < 0:
        probe.died_of = signal.Signals(-code).name
    elif code > 0:
        probe.died_of = f"exit code {code}"
    return probe
