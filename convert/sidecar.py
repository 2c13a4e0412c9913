"""Learned heads in a package: keys and tensors of a heads file, byte for byte, in its router.gguf."""

import os
import struct
from contextlib import suppress
from pathlib import Path

from .errors import ConvertError
from .source import open_source
from .verify import read_router

OF_HEADS = (".head_t.", ".head_s.")
PREFIX = "edgemoe.heads."


def add_heads(package, path):
    """Put the heads of file `path` into the sidecar of `package`, in the place of any that are there. The sidecar is written beside and renamed. Returns its path.

    Whether the heads are of this model is for the caller to know. Raises ConvertError, or OSError from the disk."""
    part = read_router(package)
    with open_source(part.path) as old, open_source(path) as new:
        heads = new.parts[0]
        if not any(key.startswith(PREFIX) for key in heads.keys):
            raise ConvertError(f"{path}: has no keys of learned heads")
        records = [entry.record for key, entry in part.keys.items() if not key.startswith(PREFIX)]
        records += [entry.record for key, entry in heads.keys.items() if key.startswith(PREFIX)]
        tensors = [(tensor, old) for tensor in old.tensors if not _is_head(tensor)] + [(tensor, new) for tensor in new.tensors if _is_head(tensor)]
        beside = part.path.with_name(f".{part.path.name}.{os.getpid()}.part")
        try:
            with open(beside, "wb") as file:
                _write(file, records, tensors, part.alignment)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, part.path)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    return Path(part.path)


def _is_head(tensor):
    return any(kind in tensor.name for kind in OF_HEADS)


def _write(file, records, tensors, alignment):
    infos, offset = [], 0
    for tensor, _ in tensors:
        infos += [bytes(tensor.info), struct.pack("<Q", offset)]
        offset += -(-tensor.nbytes // alignment) * alignment
    header = b"".join([b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(records)), *map(bytes, records), *infos])
    file.write(header + bytes(-len(header) % alignment))
    for tensor, source in tensors:
        data = bytearray(tensor.nbytes)
        source.read_into(memoryview(data), tensor.part, tensor.offset)
        file.write(data + bytes(-tensor.nbytes % alignment))
