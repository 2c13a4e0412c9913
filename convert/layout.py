"""The package as docs/formats.md lays it out: which tensor goes where, and the header of every file.

Nothing here writes into the package. A plan is made from the headers of the source alone, and the same source
always gives the same plan, so a package can be checked byte for byte at any later time.
"""

import hashlib
import os
import re
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from .errors import ConvertError
from .pieces import Piece, padded, tensor_piece

FORMAT_VERSION = 1
BLOB_ALIGNMENT = 64
GHOST_ALIGNMENT = 32
FINGERPRINT_TENSOR_BYTES = 4096
ROUTED = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.ffn_(gate|up|gate_up|down)_exps\.(weight|bias|scale)")
PROJECTIONS = ("gate", "up", "gate_up", "down")
ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias")
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class Layer:
    """A layer with routed experts. `tensors` are the stacked ones in blob order, expert being their last dimension."""

    index: int
    n_expert: int
    tensors: list
    header: bytes  # of the blob of expert 0
    expert_at: int  # where the expert's number lies in the header
    blob_bytes: int

    def path(self, expert):
        return Path("experts", f"L{self.index:04d}", f"E{expert:04d}.gguf")

    def pieces(self, expert):
        """The pieces of one expert's blob."""
        number = struct.pack("<I", expert)
        header = self.header[:self.expert_at] + number + self.header[self.expert_at + 4:]
        out = [Piece("header", len(header), header)]
        for tensor in self.tensors:
            nbytes = tensor.nbytes // self.n_expert
            out.append(Piece(tensor.name, nbytes, None, tensor.part, tensor.offset + expert * nbytes))
        return padded(out, BLOB_ALIGNMENT)


@dataclass(frozen=True)
class Plan:
    """Everything a package holds but the CRCs, which need the source's data."""

    source: object
    architecture: str
    fingerprint: str
    layers: list
    model: list  # pieces of model.gguf
    model_bytes: int
    ghost: bytes
    routers: list  # tensors copied into router.gguf

    @property
    def n_expert(self):
        return sum(layer.n_expert for layer in self.layers)

    @property
    def blob_bytes(self):
        return sum(layer.n_expert * layer.blob_bytes for layer in self.layers)


def make_plan(source):
    """Plan the package of an open Source.

    Raises ConvertError for a model without routed experts and for expert tensors that do not belong together.
    """
    first = source.parts[0]
    architecture = first.value("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ConvertError(f"{first.path}: general.architecture is {architecture!r}, wanted the name of a model type")
    stacks = _find_stacks(source)
    if not stacks:
        raise ConvertError(f"{first.path}: a {architecture} model without routed experts; "
                           "edgemoe runs it as is, there is nothing to convert")
    mark = fingerprint(source)
    layers = [_layer(source, index, stacks[index], mark) for index in sorted(stacks)]
    weights = {tensors[kind, "weight"].name for tensors in stacks.values() for kind in PROJECTIONS
               if (kind, "weight") in tensors}
    dense = [tensor for tensor in source.tensors if tensor.name not in weights]
    routed = [tensor for tensor in source.tensors if tensor.name in weights]
    model = _model_pieces(source, dense)
    names = {tensor.name: tensor for tensor in source.tensors}
    copied = (f"blk.{layer.index}.{name}" for layer in layers for name in ROUTERS)
    return Plan(source, architecture, mark, layers, model, sum(piece.nbytes for piece in model),
                _ghost(architecture, routed, len(source.tensors)), [names[name] for name in copied if name in names])


def _find_stacks(source):
    """{layer: {(projection, part): tensor}} of the layers that have a routed expert weight."""
    stacks = {}
    for tensor in source.tensors:
        match = ROUTED.fullmatch(tensor.name)
        # A two-dimensional tensor of this name holds no experts: it stays a dense tensor.
        if match and (match[3] != "weight" or len(tensor.shape) == 3):
            stacks.setdefault(int(match[1]), {})[match[2], match[3]] = tensor
    return {index: found for index, found in stacks.items() if any(part == "weight" for _, part in found)}


def _layer(source, index, stack, mark):
    tensors = []
    for kind in PROJECTIONS:
        weight = stack.get((kind, "weight"))
        if weight:
            n_in, n_out, n_expert = weight.shape
            tensors.append(weight)
            wanted = {"bias": (n_out, n_expert), "scale": (n_expert,)}
            tensors += [_companion(source, stack[kind, part], shape) for part, shape in wanted.items()
                        if (kind, part) in stack]
    n_expert = tensors[0].shape[-1]
    for tensor in tensors:
        if tensor.shape[-1] != n_expert or not tensor.nbytes:
            raise ConvertError(f"{source.parts[tensor.part].path}: tensor {tensor.name}: shape {list(tensor.shape)}, "
                               f"wanted {n_expert} experts as in {tensors[0].name}")
    header, expert_at = _blob_header(index, tensors, mark)
    blob_bytes = len(header) + sum(_round_up(tensor.nbytes // n_expert, BLOB_ALIGNMENT) for tensor in tensors)
    return Layer(index, n_expert, tensors, header, expert_at, blob_bytes)


def _companion(source, tensor, shape):
    # A scale is one value per expert, so its type may not be made of blocks.
    if tensor.shape != shape or tensor.nbytes % shape[-1]:
        raise ConvertError(f"{source.parts[tensor.part].path}: tensor {tensor.name}: shape {list(tensor.shape)}, "
                           f"type {tensor.type.name}, wanted shape {list(shape)}")
    return tensor


def fingerprint(source):
    """BLAKE2b, 32 hex digits, over size, header and the first bytes of every tensor of every part."""
    digest = hashlib.blake2b(digest_size=16)
    for number, part in enumerate(source.parts):
        digest.update(struct.pack("<Q", part.nbytes))
        ranges = [(0, min(part.data_start, part.nbytes))]
        ranges += [(tensor.offset, min(tensor.nbytes, FINGERPRINT_TENSOR_BYTES)) for tensor in part.tensors]
        for offset, nbytes in ranges:
            data = bytearray(nbytes)
            source.read_into(memoryview(data), number, offset)
            digest.update(data)
    return digest.hexdigest()


def _blob_header(index, tensors, mark):
    """The header of expert 0's blob, and where the expert's number lies in it."""
    writer = GGUFWriter(None, "edgemoe-expert")
    writer.add_custom_alignment(BLOB_ALIGNMENT)
    writer.add_uint32("edgemoe.format_version", FORMAT_VERSION)
    writer.add_string("edgemoe.fingerprint", mark)
    writer.add_uint32("edgemoe.layer", index)
    writer.add_uint32("edgemoe.expert", 0)
    for tensor in tensors:
        # The scale of an expert is one value: a tensor keeps at least one dimension.
        _add_info(writer, tensor, tensor.shape[:-1] or (1,), tensor.nbytes // tensor.shape[-1])
    header = _header_bytes(writer, BLOB_ALIGNMENT)
    key = b"edgemoe.expert"
    value_type_bytes = 4
    return header, header.index(key) + len(key) + value_type_bytes


def _ghost(architecture, routed, n_tensors):
    """Header of the second split that libllama is shown: the infos of the stacked expert weights."""
    writer = GGUFWriter(None, architecture)
    for key, value in zip(SPLIT_KEYS, (1, 2, n_tensors)):
        (writer.add_int32 if key == SPLIT_KEYS[2] else writer.add_uint16)(key, value)
    for tensor in routed:
        _add_info(writer, tensor, tensor.shape, tensor.nbytes)
    return _header_bytes(writer, GHOST_ALIGNMENT)


def router_pieces(plan, crcs):
    """The pieces of router.gguf. `crcs`: CRC-32 of every blob, layer by layer."""
    u32, u64, array = GGUFValueType.UINT32, GGUFValueType.UINT64, GGUFValueType.ARRAY
    writer = GGUFWriter(None, "edgemoe-router")
    writer.add_uint32("edgemoe.format_version", FORMAT_VERSION)
    writer.add_string("edgemoe.fingerprint", plan.fingerprint)
    writer.add_string("edgemoe.source.name", os.fsencode(plan.source.parts[0].path.name).decode("utf-8", "replace"))
    writer.add_uint64("edgemoe.source.bytes", plan.source.nbytes)
    writer.add_string("edgemoe.source.architecture", plan.architecture)
    writer.add_key_value("edgemoe.layers", [layer.index for layer in plan.layers], array, u32)
    writer.add_key_value("edgemoe.expert_counts", [layer.n_expert for layer in plan.layers], array, u32)
    writer.add_key_value("edgemoe.blob_bytes", [layer.blob_bytes for layer in plan.layers], array, u64)
    writer.add_uint64("edgemoe.dense_bytes", plan.model_bytes)
    writer.add_key_value("edgemoe.crc32", crcs, array, u32)
    writer.add_tensor_info("edgemoe.ghost", (len(plan.ghost),), np.dtype(np.int8), len(plan.ghost))
    for tensor in plan.routers:
        _add_info(writer, tensor, tensor.shape, tensor.nbytes)
    header = _header_bytes(writer, writer.data_alignment)
    ghost = Piece("edgemoe.ghost", len(plan.ghost), plan.ghost)
    pieces = [Piece("header", len(header), header), ghost, *map(tensor_piece, plan.routers)]
    return padded(pieces, writer.data_alignment)


def _add_info(writer, tensor, shape, nbytes):
    # The library reverses shapes. It takes uint8 for packed bytes and would scale the shape; any other type will do.
    writer.add_tensor_info(tensor.name, shape[::-1], np.dtype(np.float32), nbytes, raw_dtype=tensor.type)


def _header_bytes(writer, alignment):
    """What the gguf library writes before the data, with the padding up to it."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-") as folder:
        path = Path(folder, "header.gguf")
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % alignment)


def _model_pieces(source, dense):
    """The pieces of model.gguf.

    Its metadata is copied as bytes: the gguf library would drop empty strings and arrays, and would need the
    whole vocabulary as Python objects.
    """
    first = source.parts[0]
    records = [entry.record for key, entry in first.keys.items() if not key.startswith("split.")]
    values = zip(SPLIT_KEYS, (GGUFValueType.UINT16, GGUFValueType.UINT16, GGUFValueType.INT32),
                 ("<H", "<H", "<i"), (0, 2, len(source.tensors)))
    records += [struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + struct.pack(form, value)
                for key, kind, form, value in values]
    infos, offset = [], 0
    for tensor in dense:
        infos += [tensor.info, struct.pack("<Q", offset)]
        offset += _round_up(tensor.nbytes, first.alignment)
    header = b"".join([b"GGUF", struct.pack("<IQQ", 3, len(dense), len(records)), *records, *infos])
    return padded([Piece("header", len(header), header), *map(tensor_piece, dense)], first.alignment)


def _round_up(n, multiple):
    return -(-n // multiple) * multiple
