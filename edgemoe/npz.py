"""NumPy's .npz for arrays that may be larger than memory: entries are stored uncompressed on multiples of 64 bytes, so that they can be mapped, and a file appears
whole or not at all."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from edgemoe.errors import TraceError


def read(path: Path, names: Container[str], unchecked: Container[str] = ()) -> dict[str, np.ndarray]:
    """Those of its arrays that are called for, mapped where they lie uncompressed, else copied. All but the `unchecked` are compared with their checksum."""
    try:
        with open(path, "rb") as f, zipfile.ZipFile(f) as z:
            members = [m for m in z.infolist() if m.filename.endswith(".npy")]
            return {m.filename[:-4]: _read_array(path, f, z, m, m.filename[:-4] not in unchecked) for m in members if m.filename[:-4] in names}
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror or e}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, RuntimeError) as e:
        raise TraceError(f"{path}: not an .npz, or cut off: {e}") from None


def _read_array(path: Path, f, z: zipfile.ZipFile, member: zipfile.ZipInfo, checked: bool) -> np.ndarray:
    name = member.filename[:-4]
    try:
        if member.compress_type != zipfile.ZIP_STORED:
            with z.open(member) as entry:
                return np.lib.format.read_array(entry, allow_pickle=False)
        f.seek(member.header_offset)
        local = f.read(30)
        start = member.header_offset + 30 + sum(struct.unpack("<2H", local[26:30]))
        if start + member.file_size > os.fstat(f.fileno()).st_size:
            raise TraceError(f"{path}: {name}: cut off")
        if checked and member.file_size:
            whole = np.memmap(path, np.uint8, "r", start, member.file_size)
            if zlib.crc32(whole) != member.CRC:
                raise TraceError(f"{path}: {name}: damaged: its checksum differs")
        f.seek(start)
        shape, fortran, dtype = _read_header(f)
        n_bytes = dtype.itemsize * int(np.prod(shape, dtype=object))
        at = f.tell()
        if fortran and not dtype.hasobject:
            f.seek(start)
            return np.ascontiguousarray(np.lib.format.read_array(f, allow_pickle=False))
        if dtype.hasobject or at + n_bytes != start + member.file_size:
            raise ValueError(f"found {dtype} {list(shape)} in {start + member.file_size - at} bytes, wanted {n_bytes}")
        if not n_bytes or not shape:
            return np.frombuffer(f.read(n_bytes), dtype).reshape(shape)
        return np.memmap(path, dtype, "r", at, shape)
    except ValueError as e:
        raise e if isinstance(e, TraceError) else TraceError(f"{path}: {name}: {e}") from None


def publish(path: Path, arrays: dict[str, tuple[np.dtype, tuple, Iterable[bytes]]]) -> None:
    """Writes arrays, each given as type, shape and its bytes in pieces. Same input, same bytes. Raises TraceError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as f, zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as z:
            for name, (dtype, shape, chunks) in arrays.items():
                entry = zipfile.ZipInfo(f"{name}.npy")
                entry.extra = _padding(f.tell() + 30 + len(entry.filename) + ZIP64_EXTRA)
                with z.open(entry, "w", force_zip64=True) as out:
                    np.lib.format.write_array_header_1_0(out, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
                    for chunk in chunks:
                        out.write(chunk)
        os.replace(beside, path)
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


ZIP64_EXTRA = 20  # bytes that zipfile adds to the extra field of a local header


def _read_header(f) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(f)
        return (np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0)(f)
    except Exception as e:  # numpy's parser takes it for Python text, and fails in as many ways as Python does
        raise ValueError(f"its header is damaged: {str(e).splitlines()[0] if str(e) else type(e).__name__}") from None


def _padding(at: int) -> bytes:
    """An extra field that moves what begins at `at` to a multiple of 64 bytes."""
    n = -(at + 4) % 64
    return struct.pack("<2H", 0xD935, n) + bytes(n)  # the number that zipalign uses for the same purpose
