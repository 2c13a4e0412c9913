"""Our declarations of ggml's internal structs against ggml's own, and the refusal of any other ggml."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from edgemoe import _native

ROOT = Path(__file__).parent.parent
HEADER_IN_SDIST = "vendor/llama.cpp/ggml/src/ggml-backend-impl.h"
STRUCTS = [
    "ggml_backend_buffer_type_i", "ggml_backend_buffer_type", "ggml_backend_buffer_i", "ggml_backend_buffer", "ggml_backend_i", "ggml_backend",
    "ggml_backend_device_i", "ggml_backend_device", "ggml_backend_reg_i", "ggml_backend_reg",
]  # fmt: skip


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """Folder with ggml-backend-impl.h of the pinned llama-cpp-python, which the wheel leaves out: from $EDGEMOE_GGML_SRC, the cache, or the sdist."""
    if folder := os.environ.get("EDGEMOE_GGML_SRC"):
        return Path(folder)
    cache = Path(os.environ.get("EDGEMOE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgemoe") / "ggml-0.25.3"
    if not (cache / "ggml-backend-impl.h").exists():
        download = tmp_path_factory.mktemp("sdist")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python", "-d", str(download), "llama-cpp-python==0.3.36"]
        got = subprocess.run(command, capture_output=True, text=True)
        archives = list(download.glob("*.tar.gz"))
        if not archives:
            pytest.skip(f"the source of llama-cpp-python 0.3.36 cannot be had: {got.stderr.strip()[-200:]}")
        with tarfile.open(archives[0]) as tar:
            member = next(m for m in tar if m.name.endswith(HEADER_IN_SDIST))
            cache.mkdir(parents=True, exist_ok=True)
            partial = cache / f"partial-{os.getpid()}"
            partial.write_bytes(tar.extractfile(member).read())
            partial.rename(cache / "ggml-backend-impl.h")
    return cache


def members(struct: str) -> list[str]:
    """Names of a struct's members, in the order of ggml_abi.h."""
    body = (ROOT / "native/src/ggml_abi.h").read_text().split(f"struct {struct} {{")[1].split("};")[0]
    names = []
    for line in filter(None, (line.strip() for line in body.splitlines())):
        names.append(line.split("(*")[1].split(")")[0] if "(*" in line else line.rstrip(";").split()[-1])
    return names


def program(abi: str) -> str:
    checks = []
    for struct in STRUCTS:
        checks.append(f'static_assert(sizeof(ours::{struct}) == sizeof(::{struct}), "{struct}");')
        for member in members(struct):
            checks.append(f'static_assert(offsetof(ours::{struct}, {member}) == offsetof(::{struct}, {member}), "{struct}.{member}");')
            # Functions take pointers to ggml's own opaque types in both, so their types must be the very same; structs inside structs are compared above.
            if struct.endswith("_i"):
                checks.append(f'static_assert(std::is_same<decltype(ours::{struct}::{member}), decltype(::{struct}::{member})>::value, "{struct}.{member}");')
    lines = ["#include <cstddef>", "#include <type_traits>", '#include "ggml-backend-impl.h"', "namespace ours {", f'#include "{abi}"', "}", *checks]
    lines.append('static_assert(EDGEMOE_GGML_API_VERSION == GGML_BACKEND_API_VERSION, "api version");')
    return "\n".join(lines) + "\n"


def compile_check(source: Path, original: Path) -> subprocess.CompletedProcess:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    include = Path(sysconfig.get_path("platlib")) / "include"
    return subprocess.run([compiler, "-std=c++17", "-fsyntax-only", f"-I{original}", f"-I{include}", str(source)], capture_output=True, text=True)


def test_structs_are_ggmls(original, tmp_path):
    source = tmp_path / "check.cpp"
    source.write_text(program(str(ROOT / "native/src/ggml_abi.h")))
    result = compile_check(source, original)
    assert result.returncode == 0, result.stderr[:2000]


def test_the_check_notices_two_swapped_members(original, tmp_path):
    header = (ROOT / "native/src/ggml_abi.h").read_text()
    swapped = header.replace("(*get_name)(ggml_backend_dev_t)", "(*tmp)").replace("(*get_description)(ggml_backend_dev_t)", "(*get_name)(ggml_backend_dev_t)")
    swapped = swapped.replace("(*tmp)", "(*get_description)(ggml_backend_dev_t)")
    assert swapped != header
    (tmp_path / "ggml_abi.h").write_text(swapped)
    source = tmp_path / "check.cpp"
    source.write_text(program(str(tmp_path / "ggml_abi.h")))
    assert "get_description" in compile_check(source, original).stderr


@pytest.mark.parametrize("api, version", [(1, "0.25.3"), (3, "0.25.3"), (2, "0.25.4")])
def test_another_ggml_is_refused_in_one_line(api, version):
    ffi, lib = _native.load()
    problem = _native.text(lib.edgemoe_check_ggml(api, version.encode()))
    assert f"found ggml {version} (backend API {api})" in problem and "llama-cpp-python==0.3.36" in problem and "\n" not in problem


def test_this_ggml_is_accepted():
    ffi, lib = _native.load()
    assert lib.edgemoe_check_ggml(2, b"0.25.3") == ffi.NULL
    assert lib.edgemoe_init() == 0


def test_without_llama_cpp_the_library_does_not_load(python):
    """It has no ggml of its own to fall back on, so it can never be bound to a second copy."""
    result = python("import ctypes, sys; ctypes.CDLL(sys.argv[1])", _native.LIBRARY, env={k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"})
    assert result.returncode != 0 and "libggml" in result.stderr
