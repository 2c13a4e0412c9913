"""A GGUF of a few keys and arrays that fit into memory: written in one go, and read as arrays of float32."""

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import QuantError, dequantize, quantize

from .errors import ConvertError
from .source import open_source

KINDS = {"u32": GGUFValueType.UINT32, "f32": GGUFValueType.FLOAT32, "string": GGUFValueType.STRING}


def packed(array, type_name):
    """The array as it lies in a file of this ggml type, in the order of NumPy. Raises ConvertError where rows do not divide into the type's blocks."""
    try:
        data = quantize(np.ascontiguousarray(array, np.float32), GGMLQuantizationType[type_name])
    except (QuantError, ValueError) as e:
        raise ConvertError(f"rows of {array.shape[-1]} values cannot be {type_name}: {e}") from None
    return np.ascontiguousarray(data)


def write_arrays(path, architecture, keys, tensors):
    """keys: (name, kind of KINDS, or that with [] for a list, value); tensors: (name, ggml type, array of `packed`). Same input, same bytes. Raises OSError."""
    writer = GGUFWriter(path, architecture)
    for name, kind, value in keys:
        inner = KINDS[kind.removesuffix("[]")]
        kinds = (GGUFValueType.ARRAY, inner) if kind.endswith("[]") else (inner,)
        writer.add_key_value(name, value, *kinds)
    for name, type_name, data in tensors:
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[type_name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


class Arrays:
    """An open GGUF, of which parts are read as arrays. Raises ConvertError for what is none, is cut, or points outside of itself."""

    def __init__(self, path):
        self._opened = open_source(path)
        self.tensors = {tensor.name: tensor for tensor in self._opened.tensors}  # in the file's order

    def value(self, key, default=None):
        return self._opened.parts[0].value(key, default)

    def raw(self, name):
        """The bytes of a tensor."""
        tensor = self.tensors[name]
        data = bytearray(tensor.nbytes)
        self._opened.read_into(memoryview(data), tensor.part, tensor.offset)
        return data

    def array(self, name, raw=None):
        """A tensor as float32, dimensions in the order of NumPy: the reverse of ggml's."""
        tensor = self.tensors[name]
        data = np.frombuffer(self.raw(name) if raw is None else raw, np.uint8)
        shape = tensor.shape[::-1]
        plain = {"F32": np.float32, "F16": np.float16}.get(tensor.type.name)
        if plain:
            return data.view(plain).reshape(shape).astype(np.float32)
        try:
            return dequantize(data.reshape(*shape[:-1], -1), tensor.type).reshape(shape)
        except (NotImplementedError, QuantError) as e:
            raise ConvertError(f"{self._opened.parts[tensor.part].path}: tensor {name}: {tensor.type.name} cannot be read: {e}") from None

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self._opened.__exit__(*what)
