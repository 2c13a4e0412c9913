"""A GGUF with other values in some of its tensors: everything else is copied, byte for byte and in its order."""

import os
import struct
from contextlib import suppress
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .arrays import packed
from .errors import ConvertError
from .pieces import BUFFER_BYTES
from .source import open_source

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
STRING = 8  # GGUF's number for a string value
PLAIN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")  # what the gguf library can write
INSTEAD = "F16"


def type_instead(type_name):
    """The type that a tensor of this type is written in: its own where the gguf library can round to it, else F16."""
    return type_name if type_name in PLAIN else INSTEAD


def replace_tensors(src, out, arrays, notes=None, progress=None):
    """Writes `out`, the model `src` (any of its shards; `out` is one file) with new values.

    arrays: {tensor name: a function without arguments that returns float32 in the shape of NumPy}; each is called once, when its turn comes. notes: {key: text} that are added to the
    metadata, or replace what is there. progress: called with the bytes of each tensor. Written beside `out` and renamed.

    Returns {tensor name: (type before, type now)} of what was replaced. Raises ConvertError; OSError from the disk.
    """
    out = Path(out)
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    with open_source(src) as source:
        unknown = sorted(set(arrays) - {tensor.name for tensor in source.tensors})
        if unknown:
            raise ConvertError(f"{source.parts[0].path}: has no tensor {unknown[0]} to replace")
        if any(os.path.exists(out) and os.path.samefile(part.path, out) for part in source.parts):
            raise ConvertError(f"{out}: is the source itself")
        kinds = {tensor.name: type_instead(tensor.type.name) if tensor.name in arrays else tensor.type.name for tensor in source.tensors}
        try:
            with open(beside, "wb") as file:
                _write(file, source, kinds, arrays, notes or {}, progress or (lambda n: None))
                file.flush()
                os.fsync(file.fileno())
            source.check_unchanged()
            os.replace(beside, out)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
        return {tensor.name: (tensor.type.name, kinds[tensor.name]) for tensor in source.tensors if tensor.name in arrays}


def _write(file, source, kinds, arrays, notes, progress):
    first = source.parts[0]
    records = [bytes(key.record) for name, key in first.keys.items() if name not in SPLIT_KEYS and name not in notes]
    records += [_text(key) + struct.pack("<I", STRING) + _text(value) for key, value in notes.items()]
    alignment = first.alignment
    infos, at, sizes = [], 0, {}
    for tensor in source.tensors:
        kind = GGMLQuantizationType[kinds[tensor.name]]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        sizes[tensor.name] = prod(tensor.shape) // block * block_bytes
        infos.append(tensor.info[:-4] + struct.pack("<IQ", kind, at))
        at += -(-sizes[tensor.name] // alignment) * alignment
    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(infos), len(records)))
    for part in (*records, *infos):
        file.write(part)
    _pad(file, alignment)
    for tensor in source.tensors:
        if tensor.name in arrays:
            _put(file, tensor, arrays[tensor.name](), kinds[tensor.name])
        else:
            _copy(file, source, tensor)
        _pad(file, alignment)
        progress(sizes[tensor.name])


def _text(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pad(file, alignment):
    file.write(bytes(-file.tell() % alignment))


def _put(file, tensor, array, kind):
    if array.shape != tensor.shape[::-1]:
        raise ConvertError(f"tensor {tensor.name}: found new values of shape {list(array.shape)}, wanted {list(tensor.shape[::-1])}")
    file.write(packed(array, kind).tobytes())


def _copy(file, source, tensor):
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for at in range(0, tensor.nbytes, BUFFER_BYTES):
        view = buffer[:min(BUFFER_BYTES, tensor.nbytes - at)]
        source.read_into(view, tensor.part, tensor.offset + at)
        file.write(view)
