"""The native library, through cffi in ABI mode. The declarations are those of edgemoe.h, between its two marks.

The library has no search path of its own for ggml: it binds to the copy that llama_cpp has loaded, so llama_cpp comes first.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

from edgemoe.errors import EdgemoeError, ModelError

HERE = Path(__file__).parent
LIBRARY = HERE / ("libedgemoe.dylib" if sys.platform == "darwin" else "libedgemoe.so")
HEADER = HERE / "edgemoe.h"


def declarations(header: str) -> str:
    """The part of edgemoe.h that cffi reads."""
    return header.split("// --- cffi begin ---")[1].split("// --- cffi end ---")[0]


@lru_cache(maxsize=None)
def load():
    """(ffi, lib). Raises EdgemoeError when the library is missing or does not fit the installed llama-cpp-python."""
    if not LIBRARY.exists():
        raise EdgemoeError(f"{LIBRARY}: not built; run scripts/setup.sh, or pip install . in edgemoe's directory")
    try:
        import llama_cpp  # noqa: F401  (loads the ggml that we bind to)
    except (ImportError, OSError, RuntimeError) as e:
        raise EdgemoeError(f"llama-cpp-python cannot be loaded ({e}): pip install llama-cpp-python==0.3.36") from e
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(declarations(HEADER.read_text()))
    try:
        lib = ffi.dlopen(str(LIBRARY))
    except OSError as e:
        raise EdgemoeError(f"{LIBRARY} does not fit the installed llama-cpp-python ({e}); reinstall edgemoe") from e
    return ffi, lib


def best_isa() -> str:
    """The instruction set that edgemoe's kernels use on this CPU; "none" when there are no kernels for it."""
    return text(load()[1].edgemoe_best_isa())


def last_error() -> str:
    ffi, lib = load()
    return ffi.string(lib.edgemoe_last_error()).decode(errors="replace")


def text(pointer) -> str:
    """A C string, which is UTF-8 except where a file name is not."""
    ffi, _ = load()
    return ffi.string(pointer).decode(errors="surrogateescape") if pointer else ""


def opened(handle):
    """What a function of the library has opened. Raises ModelError when it has not."""
    if not handle:
        raise ModelError(last_error())
    return handle


def number(pointer) -> int:
    """A pointer as ctypes wants it."""
    return int(load()[0].cast("uintptr_t", pointer))


def address(function: str) -> int:
    """Where a function of the library lies, for handing it to llama_cpp as a callback."""
    ffi, lib = load()
    return number(ffi.addressof(lib, function))
