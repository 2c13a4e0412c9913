"""The doctor must tell each kind of trouble from the others, and must outlive a llama.cpp that crashes."""

import importlib.metadata
import json
import resource
import sys

import pytest

from edgemoe import doctor, machine
from edgemoe.doctor import FAIL, OK, WARN

GOOD_STEPS = [
    ("begin", "import", None),
    ("result", "system", "CPU : AVX2 = 1 | OPENMP = 1 | "),
    ("result", "devices", [["CPU", "CPU", "Some CPU", 8 << 30, 16 << 30]]),
    ("result", "compute", [["Q4_0", "CPU"], ["Q4_0", "AMX"]]),
    ("begin", "native", None),
    ("result", "native", "avx2"),
]


def steps_until(step):
    return [*GOOD_STEPS[: [name for _, name, _ in GOOD_STEPS].index(step)], ("begin", step, None)]


@pytest.fixture
def probe_says(monkeypatch):
    """probe_says(steps, then) replaces the probe by a script that tells these steps and then runs `then`."""

    def replace(steps, then=""):
        lines = "\n".join(doctor.PROBE_MARK + json.dumps(step) for step in steps)
        program = f"print({lines!r}, flush=True)\n{then}"
        monkeypatch.setattr(doctor, "probe_command", lambda: [sys.executable, "-S", "-c", program])

    return replace


def dies_of(name):
    # No core file: the death is wanted.
    return f"import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), signal.{name})"


def by_name(checks, name):
    return next(check for check in checks if check.name == name)


def test_good_probe(probe_says):
    probe_says(GOOD_STEPS)
    probe = doctor.run_probe()
    assert doctor.check_compute(probe).status == OK
    assert doctor.check_compute(probe).text.endswith("Q4_0 in CPU; Q4_0 in AMX")
    assert [check.status for check in doctor.check_devices(probe)] == [OK]
    assert doctor.check_openmp(probe).status == OK
    assert doctor.check_native(probe).status == OK
    assert doctor.check_kernels(probe) == doctor.Check("kernels", OK, "avx2")


def test_a_cpu_without_kernels_is_told(probe_says):
    probe_says([("result", "native", "none")])
    check = doctor.check_kernels(doctor.run_probe())
    assert check.status == WARN and "none for this CPU" in check.text and check.fix


@pytest.mark.parametrize("signal_name", ["SIGSEGV", "SIGILL"])
def test_crash_in_amx_names_the_compiler_and_the_fix(probe_says, signal_name):
    probe_says([*steps_until("compute"), ("begin", "compute Q4_0 in AMX", None)], dies_of(signal_name))
    check = doctor.check_compute(doctor.run_probe())
    assert check.status == FAIL
    assert signal_name in check.text and "AMX" in check.text and "GCC" in check.text
    assert "-mno-amx-tile" in check.fix and "--no-cache-dir" in check.fix


@pytest.mark.parametrize("step, signal_name, told", [
    ("import", "SIGILL", "built for another CPU"),
    ("devices", "SIGSEGV", "GPU driver"),
    ("compute", "SIGBUS", "SIGBUS"),
])
def test_other_crashes(probe_says, step, signal_name, told):
    probe_says(steps_until(step), dies_of(signal_name))
    probe = doctor.run_probe()
    check = doctor.check_compute(probe)
    assert check.status == FAIL and told in check.text and f"'{step}'" in check.text and check.fix
    assert doctor.check_native(probe).status == WARN  # nothing is known about it


def test_crash_in_our_own_library(probe_says):
    probe_says(steps_until("native"), dies_of("SIGSEGV"))
    probe = doctor.run_probe()
    assert doctor.check_compute(probe).status == OK
    assert doctor.check_native(probe).status == FAIL
    assert "SIGSEGV" in doctor.check_native(probe).text


def test_native_library_that_does_not_load(probe_says):
    probe_says([*steps_until("native"), ("error", "native", "ImportError: no _native")])
    probe = doctor.run_probe()
    check = doctor.check_native(probe)
    assert (check.status, check.text, check.fix) == (FAIL, "ImportError: no _native", "pip install .")
    assert doctor.check_kernels(probe).status == WARN


def test_llama_cpp_that_does_not_import(probe_says):
    probe_says([*steps_until("import"), ("error", "import", "OSError: libgomp.so.1: not found")])
    checks = doctor.run_checks()
    assert by_name(checks, "compute").status == FAIL and "libgomp" in by_name(checks, "compute").text
    assert by_name(checks, "openmp").status == by_name(checks, "devices").status == WARN


def test_wrong_product(probe_says):
    probe_says([*steps_until("compute"), ("error", "compute", "ArithmeticError: Q4_0 in AMX: product is off by nan")])
    check = doctor.check_compute(doctor.run_probe())
    assert check.status == FAIL and "off by nan" in check.text


def test_probe_that_never_starts(probe_says):
    probe_says([], "raise SystemError('no luck')")
    check = doctor.check_compute(doctor.run_probe())
    assert check.status == FAIL and "exit code 1" in check.text and "no luck" in check.text


def test_probe_that_hangs(probe_says, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.5)
    probe_says(steps_until("devices"), "import time; time.sleep(60)")
    check = doctor.check_compute(doctor.run_probe())
    assert check.status == FAIL and "no answer from 'devices'" in check.text


def test_noise_on_stdout_is_skipped(probe_says):
    probe_says(GOOD_STEPS, "print('a driver says hello'); print('[1, 2]'); print('17')")
    assert doctor.check_compute(doctor.run_probe()).status == OK


def test_software_gpu_is_never_silent(probe_says):
    steps = [("result", "devices", [["Vulkan0", "GPU", "llvmpipe (LLVM 15.0.6, 256 bits)", 1 << 30, 2 << 30]])]
    probe_says(steps)
    [check] = doctor.check_devices(doctor.run_probe())
    assert check.status == WARN and "never picked" in check.text


def test_missing_openmp(probe_says):
    probe_says([("result", "system", "CPU : AVX2 = 1 | ")])
    assert doctor.check_openmp(doctor.run_probe()).status == WARN


def test_wrong_llama_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.1")
    check = doctor.check_llama_version()
    assert check.status == FAIL
    assert check.text == f"found 0.2.1, wanted {doctor.WANTED_LLAMA}" and doctor.WANTED_LLAMA in check.fix


def test_missing_llama(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doctor.check_llama_version().status == FAIL


def test_wanted_llama_is_the_pinned_one():
    try:
        requirements = importlib.metadata.requires("edgemoe")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("edgemoe is not installed")
    assert f"llama-cpp-python=={doctor.WANTED_LLAMA}" in [requirement.replace(" ", "") for requirement in requirements]


def test_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1, "final", 0))
    check = doctor.check_python()
    assert (check.status, check.text) == (FAIL, "found 3.9.1, wanted 3.10 or newer")


def test_low_disk(monkeypatch):
    monkeypatch.setattr(machine, "disk_free", lambda path: 100 << 20)
    checks = doctor.check_disk()
    assert [check.status for check in checks] == [WARN, WARN]
    assert "100.0 MiB free" in checks[0].text and checks[0].fix


@pytest.mark.parametrize("environment, folder", [
    ({"EDGEMOE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
    ({"XDG_CACHE_HOME": "/b"}, "/b/edgemoe"),
    ({"HOME": "/c"}, "/c/.cache/edgemoe"),
])
def test_cache_dir_is_that_of_setup(monkeypatch, environment, folder):
    for name in ("EDGEMOE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(doctor.cache_dir()) == folder


def test_low_memory(monkeypatch):
    memory = machine.Memory(total=8 << 30, available=4 << 30, limit=512 << 20, usable=256 << 20)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    check = doctor.check_memory()
    assert check.status == WARN
    assert check.text == "256.0 MiB usable of 8.0 GiB (4.0 GiB available, cgroup limit 512.0 MiB)"


@pytest.mark.parametrize("quota, status", [(None, OK), (1.5, OK), (0.5, WARN)])
def test_cpu_quota(monkeypatch, quota, status):
    monkeypatch.setattr(machine, "cpu_quota", lambda root="/": quota)
    assert doctor.check_threads().status == status


@pytest.mark.parametrize("text, status", [("65530\n", OK), ("1048576\n", OK), ("1000\n", WARN), ("?\n", OK)])
def test_map_count(tmp_path, text, status):
    (tmp_path / "max_map_count").write_text(text)
    check = doctor.check_map_count(tmp_path / "max_map_count")
    assert check.status == status and bool(check.fix) == (status == WARN)


@pytest.mark.parametrize("limits, text", [
    ((65536, 65536), "64.0 KiB (ulimit -l; can be raised to 64.0 KiB)"),
    ((65536, resource.RLIM_INFINITY), "64.0 KiB (ulimit -l; can be raised to unlimited)"),
    ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "unlimited"),
])
def test_locked_memory(monkeypatch, limits, text):
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    assert doctor.check_locked_memory().text == text


def test_json_is_a_list_of_checks(probe_says, capsys):
    probe_says(GOOD_STEPS)
    doctor.doctor(json=True)
    checks = json.loads(capsys.readouterr().out)
    assert all(set(check) == {"name", "status", "text", "fix"} for check in checks)
    assert all(check["status"] in (OK, WARN, FAIL) for check in checks)
    assert by_name([doctor.Check(**check) for check in checks], "compute").status == OK


@pytest.mark.parametrize("statuses, code", [([OK, WARN], 0), ([OK, FAIL, WARN], 1)])
def test_exit_code_and_lines(monkeypatch, capsys, statuses, code):
    checks = [doctor.Check(f"n{i}", status, "text", "" if status == OK else "mend it") for i, status in enumerate(statuses)]
    monkeypatch.setattr(doctor, "run_checks", lambda: checks)
    assert doctor.doctor() == code
    out = capsys.readouterr().out
    assert out.startswith("OK    n0  text\n") and "          fix: mend it\n" in out
    assert "\033" not in out  # no colour: this is not a terminal


def test_real_probe_computes_here():
    """No stand-in: llama.cpp's kernels on this CPU, checked against numpy."""
    pytest.importorskip("llama_cpp")
    check = doctor.check_compute(doctor.run_probe())
    assert check.status == OK, f"{check.text}; fix: {check.fix}"
    assert "Q4_0" in check.text and "Q4_K" in check.text
