"""edgemoe-convert on small random models: the bytes arrive, broken input is named, a stopped run leaves no package.

Conversion never decodes a weight, so random bytes will do for every tensor type.
"""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import zlib
from math import prod
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, GGUFReader, GGUFValueType, GGUFWriter

from edgemoe.convert import ConvertError, convert
from edgemoe.convert.cli import main
from edgemoe.convert.layout import make_plan
from edgemoe.convert.source import open_source, read_part

N_IN, N_OUT = 64, 96  # expert slices are a multiple of no page, whatever their type


def nbytes_of(kind, shape):
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return prod(shape) // block * block_bytes


def add_tensor(writer, rng, name, kind, *shape):
    """Random bytes as a tensor of any type; `shape` in ggml order."""
    raw = rng.integers(0, 256, nbytes_of(kind, shape), dtype=np.uint8)
    rows = shape[:0:-1]
    writer.add_tensor(name, raw.reshape(*rows, raw.size // prod(rows)), raw_dtype=kind)


def moe_layer(index, n_expert=4, kind=T.Q4_0, fused=False, companions=False):
    """(name, type, shape) of the tensors of one layer, the way converters order them: down before gate."""
    p = f"blk.{index}."
    yield p + "attn_norm.weight", T.F32, (N_IN,)
    yield p + "ffn_gate_inp.weight", T.F32, (N_IN, n_expert)
    yield p + "ffn_down_exps.weight", kind, (N_OUT, N_IN, n_expert)
    wide = {"ffn_gate_up_exps": 2 * N_OUT} if fused else {"ffn_gate_exps": N_OUT, "ffn_up_exps": N_OUT}
    for name, n_out in wide.items():
        yield f"{p}{name}.weight", kind, (N_IN, n_out, n_expert)
    if companions:
        for name, n_out in {"ffn_down_exps": N_IN, **wide}.items():
            yield f"{p}{name}.scale", T.F32, (n_expert,)
            yield f"{p}{name}.bias", T.F32, (n_out, n_expert)
        yield p + "exp_probs_b.bias", T.F32, (n_expert,)


def dense_layer(index):
    yield f"blk.{index}.ffn_down.weight", T.F16, (N_OUT, N_IN)


# No output.weight: it is tied to the embedding.
OUTER = [("token_embd.weight", T.Q8_0, (N_IN, 50)), ("output_norm.weight", T.F32, (N_IN,))]


def write_model(path, *layers, seed=0, alignment=None, **split):
    """A GGUF of OUTER and the layers; returns its path (with shards, that of the first)."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "qwen3moe", **split)
    writer.add_name("a model")
    writer.add_block_count(len(layers))
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(50)])
    if alignment:
        writer.add_custom_alignment(alignment)
    for tensor in OUTER + [tensor for layer in layers for tensor in layer]:
        add_tensor(writer, rng, tensor[0], tensor[1], *tensor[2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(p for p in (path, Path(f"{path.with_suffix('')}-00001-of-00003.gguf")) if p.exists())


def tensor_bytes(reader):
    return {tensor.name: tensor.data.tobytes() for tensor in reader.tensors}


def source_bytes(paths):
    """{tensor name: bytes} as the gguf library reads them from all parts of a source."""
    return {name: data for path in paths for name, data in tensor_bytes(GGUFReader(path)).items()}


def stacked(tensors, part="weight"):
    return {name: data for name, data in tensors.items() if "_exps." in name and name.endswith(part)}


def tree(folder):
    """{relative path: bytes} of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_holds(out, paths):
    """The package gives back every tensor of the source, and its blobs hold nothing else."""
    wanted = source_bytes(paths)
    found = tensor_bytes(GGUFReader(out / "model.gguf"))
    weights = stacked(wanted)
    assert found == {name: data for name, data in wanted.items() if name not in weights}
    router = GGUFReader(out / "router.gguf")
    layers, counts, sizes, crcs = (router.fields[f"edgemoe.{key}"].contents()
                                   for key in ("layers", "expert_counts", "blob_bytes", "crc32"))
    joined = {}
    for layer, count, size in zip(layers, counts, sizes):
        assert len(list((out / f"experts/L{layer:04d}").iterdir())) == count
        for expert in range(count):
            path = out / f"experts/L{layer:04d}/E{expert:04d}.gguf"
            assert path.stat().st_size == size
            blob = GGUFReader(path)
            assert blob.fields["edgemoe.layer"].contents() == layer
            assert blob.fields["edgemoe.expert"].contents() == expert
            assert blob.fields["edgemoe.fingerprint"].contents() == router.fields["edgemoe.fingerprint"].contents()
            crc = 0
            for tensor in blob.tensors:
                assert tensor.data_offset % 64 == 0
                crc = zlib.crc32(tensor.data.tobytes(), crc)
                joined[tensor.name] = joined.get(tensor.name, b"") + tensor.data.tobytes()
            assert crc == crcs.pop(0)
    assert joined == {name: data for name, data in wanted.items() if "_exps." in name}
    assert crcs == []


MODELS = {
    "f32": [moe_layer(0, kind=T.F32)],
    "f16": [moe_layer(0, kind=T.F16)],
    "q8_0": [moe_layer(0, kind=T.Q8_0)],
    "q4_0": [moe_layer(0, kind=T.Q4_0)],
    "mxfp4 with biases and scales": [moe_layer(0, kind=T.MXFP4, companions=True)],
    "fused gate_up with biases": [moe_layer(0, fused=True, companions=True), moe_layer(1, fused=True, companions=True)],
    "first layer dense": [dense_layer(0), moe_layer(1), moe_layer(2)],
    "every second layer dense": [moe_layer(0), dense_layer(1), moe_layer(2), dense_layer(3)],
    "8 and 6 experts": [moe_layer(0, n_expert=8), moe_layer(1, n_expert=6)],
    "types differ by layer": [moe_layer(0, kind=T.Q8_0), moe_layer(1, kind=T.Q4_0)],
    "one expert, 300 experts": [moe_layer(0, n_expert=1), moe_layer(1, n_expert=300)],
}
MODELS = {name: [list(layer) for layer in layers] for name, layers in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_byte_arrives(tmp_path, name):
    src = write_model(tmp_path / "best-of-breed.gguf", *MODELS[name])
    report = convert(src)
    out = tmp_path / "best-of-breed.edgemoe"
    assert report.out == str(out) and report.status == "converted"
    assert_holds(out, [src])
    assert convert(src, verify=True).status == "verified"
    assert not (tmp_path / "best-of-breed.edgemoe.partial").exists()


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "m.gguf", dense_layer(0), moe_layer(3, companions=True), moe_layer(12))


def test_blob_is_what_the_gguf_library_writes(tmp_path, model):
    out = Path(convert(model).out)
    source = {tensor.name: tensor for tensor in GGUFReader(model).tensors}
    writer = GGUFWriter(tmp_path / "wanted.gguf", "edgemoe-expert")
    writer.add_custom_alignment(64)
    writer.add_uint32("edgemoe.format_version", 1)
    writer.add_string("edgemoe.fingerprint", GGUFReader(out / "router.gguf").fields["edgemoe.fingerprint"].contents())
    writer.add_uint32("edgemoe.layer", 3)
    writer.add_uint32("edgemoe.expert", 2)
    for projection in ("gate", "up", "down"):
        for part in ("weight", "bias", "scale"):
            tensor = source[f"blk.3.ffn_{projection}_exps.{part}"]
            data = np.atleast_1d(tensor.data[2])
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert (out / "experts/L0003/E0002.gguf").read_bytes() == (tmp_path / "wanted.gguf").read_bytes()


def test_headers_of_a_layer_differ_in_the_expert_number_only(model):
    out = Path(convert(model).out)
    blobs = [path.read_bytes() for path in sorted((out / "experts/L0003").iterdir())]
    headers = [bytearray(blob[:GGUFReader(out / "experts/L0003/E0000.gguf").data_offset]) for blob in blobs]
    place = headers[0].index(b"edgemoe.expert") + len("edgemoe.expert") + 4
    for number, header in enumerate(headers):
        assert int.from_bytes(header[place:place + 4], "little") == number
        header[place:place + 4] = bytes(4)
    assert all(header == headers[0] for header in headers)


def test_metadata_is_kept_in_order_even_what_the_library_would_drop(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_key_value("a.empty", "", GGUFValueType.STRING)
    writer.add_float32("nan", float("nan"))
    writer.add_uint16("split.no", 0)
    writer.add_key_value("small.numbers", [1, 2], GGUFValueType.ARRAY, GGUFValueType.INT8)
    writer.add_bool("z", True)
    for tensor in moe_layer(0):
        add_tensor(writer, np.random.default_rng(0), tensor[0], tensor[1], *tensor[2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFReader(Path(convert(path).out, "model.gguf")).fields
    wanted = GGUFReader(path).fields
    names = [name for name in wanted if not name.startswith(("GGUF.", "split."))]
    split = ["split.no", "split.count", "split.tensors.count"]
    assert [name for name in found if not name.startswith("GGUF.")] == names + split
    for name in names:
        assert [part.tobytes() for part in found[name].parts] == [part.tobytes() for part in wanted[name].parts]
    assert [found[name].contents() for name in split] == [0, 2, 5]


def test_odd_alignment_of_the_source_is_kept(tmp_path):
    src = write_model(tmp_path / "m.gguf", moe_layer(0), alignment=256)
    out = Path(convert(src).out)
    assert GGUFReader(out / "model.gguf").alignment == 256
    assert_holds(out, [src])


def test_ghost_with_a_hole_opens_as_the_stacked_experts(tmp_path, model):
    out = Path(convert(model).out)
    header = {t.name: t for t in GGUFReader(out / "router.gguf").tensors}["edgemoe.ghost"].data.tobytes()
    wanted = {t.name: t for t in GGUFReader(model).tensors}
    ghost = tmp_path / "ghost.gguf"
    weights = stacked(wanted)
    hole = sum(-(-tensor.n_bytes // 32) * 32 for tensor in weights.values())
    ghost.write_bytes(header)
    os.truncate(ghost, len(header) + hole)
    found = GGUFReader(ghost)
    assert {t.name: (t.tensor_type, t.shape.tolist()) for t in found.tensors} \
        == {name: (t.tensor_type, t.shape.tolist()) for name, t in weights.items()}
    assert found.data_offset == len(header)
    split = [found.fields[f"split.{key}"].contents() for key in ("no", "count", "tensors.count")]
    assert split == [1, 2, len(wanted)]
    assert found.fields["general.architecture"].contents() == "qwen3moe"


def test_sidecar_has_the_facts_and_the_routers(model):
    report = convert(model)
    router = GGUFReader(Path(report.out, "router.gguf"))
    value = {name: field.contents() for name, field in router.fields.items()}
    assert value["general.architecture"] == "edgemoe-router" and value["edgemoe.format_version"] == 1
    assert value["edgemoe.layers"] == [3, 12] and value["edgemoe.expert_counts"] == [4, 4]
    assert value["edgemoe.source.name"] == "m.gguf" and value["edgemoe.source.bytes"] == model.stat().st_size
    assert value["edgemoe.source.architecture"] == "qwen3moe"
    assert value["edgemoe.dense_bytes"] == Path(report.out, "model.gguf").stat().st_size
    assert value["edgemoe.fingerprint"] == report.fingerprint and len(report.fingerprint) == 32
    types = {"layers": "UINT32", "expert_counts": "UINT32", "blob_bytes": "UINT64", "crc32": "UINT32"}
    assert {name: router.fields[f"edgemoe.{name}"].types[-1].name for name in types} == types
    wanted = source_bytes([model])
    found = tensor_bytes(router)
    assert list(found) == ["edgemoe.ghost", "blk.3.ffn_gate_inp.weight", "blk.3.exp_probs_b.bias",
                           "blk.12.ffn_gate_inp.weight"]
    assert all(found[name] == wanted[name] for name in list(found)[1:])
    assert report.bytes_out == sum(path.stat().st_size for path in Path(report.out).rglob("*.gguf"))


def test_experts_by_other_names_stay_dense(tmp_path):
    names = ("blk.0.ffn_gate_exps.1", "blk.0.ffn_gate_shexp", "blk.0.ffn_gate_chexps", "experts.10.w1")
    others = [(name + ".weight", T.F16, (N_IN, N_OUT, 2)) for name in names]
    src = write_model(tmp_path / "m.gguf", [*moe_layer(0), *others])
    dense = tensor_bytes(GGUFReader(Path(convert(src).out, "model.gguf")))
    assert {name for name, *_ in others} < set(dense)


# Shards

@pytest.fixture
def shards(tmp_path):
    write_model(tmp_path / "big.gguf", moe_layer(0), moe_layer(1), split_max_tensors=5)
    return sorted(tmp_path.glob("big-*.gguf"))


def rename_all(paths, names):
    for path in paths:
        path.rename(path.with_suffix(".tmp"))
    for path, name in zip(paths, names):
        path.with_suffix(".tmp").rename(path.with_name(name))


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_stands_for_all(tmp_path, shards, given):
    assert len(shards) == 3
    report = convert(shards[given])
    assert report.out == str(tmp_path / "big.edgemoe")
    assert_holds(tmp_path / "big.edgemoe", shards)
    assert report.bytes_in == sum(path.stat().st_size for path in shards)


def test_split_no_decides_not_the_name(tmp_path, shards):
    straight = tree(Path(convert(shards[0]).out))
    rename_all(shards, [shards[i].name for i in (1, 2, 0)])
    swapped = tree(Path(convert(shards[0], tmp_path / "other.edgemoe").out))
    straight.pop("router.gguf"), swapped.pop("router.gguf")  # it has the file name
    assert straight == swapped


def test_first_part_without_tensors(tmp_path):
    path = write_model(tmp_path / "m.gguf", moe_layer(0), split_max_tensors=4, small_first_shard=True)
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert len(paths) == 3 and not GGUFReader(path).tensors
    assert_holds(Path(convert(paths[1]).out), paths)


def test_missing_and_foreign_shards_are_named(tmp_path, shards):
    third = shards[2].rename(tmp_path / "away")
    with pytest.raises(ConvertError, match=r"big-00003-of-00003.gguf: part 3 of 3 is missing"):
        convert(shards[0])
    shutil.copy(shards[1], shards[2])
    with pytest.raises(ConvertError, match=r"split.no is 1, as in big-00002-of-00003.gguf, wanted 2"):
        convert(shards[0])
    split_no = shards[2].read_bytes().index(b"split.no") + len("split.no") + 4
    flip(shards[2], split_no)
    with pytest.raises(ConvertError, match=r"big-00003-of-00003.gguf: split.no is 65, wanted less than split.count, 3"):
        convert(shards[2])
    third.rename(shards[2])
    renamed = shards[1].rename(tmp_path / "part2.gguf")
    with pytest.raises(ConvertError, match="part2.gguf: is part 2 of 3, wanted a name that ends in -00002-of-00003"):
        convert(renamed)
    assert not list(tmp_path.glob("*.edgemoe*"))


def test_a_shard_like_name_without_split_keys_is_one_file(tmp_path):
    src = write_model(tmp_path / "m-00001-of-00002.gguf", moe_layer(0))
    assert convert(src).out == str(tmp_path / "m-00001-of-00002.edgemoe")


# Bad input: one line, exit code 1, nothing written

def fails(capsys, *args, code=1):
    """Run the command, which must fail; returns its only line on stderr."""
    assert main([str(arg) for arg in args]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("edgemoe-convert: ")
    return captured.err


def cut_to(path, nbytes):
    os.truncate(path, nbytes)
    return path


BAD = {
    "cut by 1 KB": (lambda p: cut_to(p, p.stat().st_size - 1024),
                    r"tensor blk.12.ffn_\w+.weight: data ends at byte \d+, file has \d+"),
    "cut inside the header": (lambda p: cut_to(p, 300), r"header at byte \d+: .* the file has \d+ left"),
    "cut inside the magic": (lambda p: cut_to(p, 3), r"begins with b'GGU', wanted b'GGUF'"),
    "empty": (lambda p: cut_to(p, 0), r"begins with b'', wanted"),
    "LFS pointer": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), r"begins with b'vers'"),
    "big-endian": (lambda p: p.write_bytes(b"GGUF\0\0\0\3" + bytes(100)), r"big-endian"),
    "version 1": (lambda p: p.write_bytes(b"GGUF\1\0\0\0" + bytes(100)), r"version 1, wanted 2 or 3"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), r"is a folder, wanted a GGUF file"),
    "a pipe": (lambda p: (p.unlink(), os.mkfifo(p)), r"is not a regular file"),
    "missing": (lambda p: p.unlink(), r"No such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_source_is_one_line(tmp_path, model, capsys, name):
    spoil, message = BAD[name]
    spoil(model)
    assert re.search(message, fails(capsys, model))
    assert not list(tmp_path.glob("*.edgemoe*"))


def test_dense_model_needs_no_conversion(tmp_path, capsys):
    src = write_model(tmp_path / "m.gguf", dense_layer(0))
    assert "without routed experts; edgemoe runs it as is" in fails(capsys, src)


def test_experts_that_do_not_fit_together_are_refused(tmp_path, capsys):
    gate, down = ("blk.0.ffn_gate_exps.weight", T.F16, (8, 8, 4)), ("blk.0.ffn_down_exps.weight", T.F16, (8, 8, 3))
    src = write_model(tmp_path / "m.gguf", [gate, down])
    assert "blk.0.ffn_down_exps.weight: shape [8, 8, 3], wanted 4 experts" in fails(capsys, src)
    src = write_model(tmp_path / "n.gguf", [gate, ("blk.0.ffn_gate_exps.bias", T.F32, (9, 4))])
    assert "blk.0.ffn_gate_exps.bias: shape [9, 4], type F32, wanted shape [8, 4]" in fails(capsys, src)


def test_an_alignment_that_is_no_power_of_two(tmp_path, capsys):
    src = write_model(tmp_path / "m.gguf", moe_layer(0), alignment=64)
    data = src.read_bytes()
    place = data.index(b"general.alignment") + len("general.alignment") + 4
    src.write_bytes(data[:place] + b"\x30" + data[place + 1:])
    assert "general.alignment is 48, wanted a power of two" in fails(capsys, src)


def test_a_damaged_header_never_gives_a_traceback(model):
    header = model.read_bytes()[:3000]
    rng = np.random.default_rng(5)
    for _ in range(600):
        damaged = bytearray(header)
        for place in rng.integers(4, len(header), rng.integers(1, 4)):
            damaged[place] = rng.choice([0, 1, 127, 128, 255])
        try:
            read_part("x", lambda offset, n: bytes(damaged[offset:offset + n]), 1 << 30)
        except ConvertError:
            pass


def test_out_that_must_not_be_touched(tmp_path, model, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    assert "is not an edgemoe package" in fails(capsys, model, folder, "--force")
    assert "lies inside it" in fails(capsys, model, tmp_path, "--force")
    assert "no such folder" in fails(capsys, model, tmp_path / "no" / "where")
    partial = tmp_path / "m.edgemoe.partial"
    shutil.copytree(folder, partial)
    assert "holds thesis.txt, which edgemoe-convert did not write" in fails(capsys, model)
    assert tree(folder) == tree(partial) == {"thesis.txt": b"precious"}


def test_usage_errors_exit_with_2(model):
    for args in ([], ["--no-such-flag"], *([str(model), "--jobs", n] for n in ("0", "65", "x"))):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 2


# A package that is there already

def flip(path, offset):
    """Change one byte; returns (old, new)."""
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 0x40]))
    return old, old ^ 0x40


def place_in_source(model, name, expert, byte, n_expert=4):
    tensor = {t.name: t for t in GGUFReader(model).tensors}[name]
    return int(tensor.data_offset) + expert * (tensor.n_bytes // n_expert) + byte


def test_up_to_date(model, capsys):
    before = tree(Path(convert(model).out))
    assert main([str(model)]) == 0
    assert "up to date" in capsys.readouterr().out
    assert tree(model.with_suffix(".edgemoe")) == before


# Byte 1900 of expert 2 lies behind the first 4096 bytes of its tensor, so the fingerprint does not see it.
@pytest.mark.parametrize("expert, byte", [(0, 5), (2, 1900)])
def test_one_changed_byte_of_the_source_refuses(model, capsys, expert, byte):
    out = Path(convert(model).out)
    before = tree(out)
    flip(model, place_in_source(model, "blk.12.ffn_up_exps.weight", expert, byte))
    for args in ([], ["--verify"]):
        line = fails(capsys, model, *args)
        assert f"layer 12, expert {expert}: " in line
    assert tree(out) == before
    assert main([str(model), "--force", "--verify", "--quiet"]) == 0
    assert_holds(out, [model])
    assert not list(out.parent.glob("*.partial")) and not list(out.parent.glob("*.old"))


def test_a_source_that_grew_refuses(model, capsys):
    convert(model)
    with open(model, "ab") as file:
        file.write(bytes(32))
    assert "edgemoe.fingerprint: found " in fails(capsys, model)


def test_one_changed_dense_byte_of_the_source_refuses(tmp_path, capsys):
    src = write_model(tmp_path / "m.gguf", [*moe_layer(0), ("long.weight", T.F32, (2000,))])
    convert(src)
    tensor = {t.name: t for t in GGUFReader(src).tensors}["long.weight"]
    flip(src, int(tensor.data_offset) + 7000)
    assert "long.weight: byte 7000" in fails(capsys, src)


def tensor_place(path, index):
    return int(GGUFReader(path).tensors[index].data_offset)


def flip_blob(offset):
    """Change a byte of one blob, counted from the start of its data."""
    def change(out):
        path = out / "experts/L0012/E0002.gguf"
        return flip(path, int(GGUFReader(path).data_offset) + offset)
    return change


def flip_tensor(name, index):
    return lambda out: flip(out / name, tensor_place(out / name, index) + 9)


def flip_first_crc(out):
    key = b"edgemoe.crc32"
    values = len(key) + 4 + 4 + 8  # past the key: type, item type, count
    return flip(out / "router.gguf", (out / "router.gguf").read_bytes().index(key) + values)


@pytest.mark.parametrize("change, message", [
    (flip_blob(700), "experts/L0012/E0002.gguf: layer 12, expert 2: blk.12.ffn_gate_exps.weight: byte 700: "
                     "found {1:#04x}, wanted {0:#04x}"),
    (flip_blob(-1), "layer 12, expert 2: header: byte"),
    (lambda out: flip(out / "experts/L0012/E0002.gguf", 70), "layer 12, expert 2: header: byte 70"),
    (lambda out: os.truncate(out / "experts/L0003/E0001.gguf", 900), "layer 3, expert 1: found 900 bytes, wanted"),
    (lambda out: (out / "experts/L0003/E0003.gguf").unlink(), "layer 3, expert 3: the file is missing"),
    (flip_tensor("model.gguf", 0), "model.gguf: token_embd.weight: byte 9"),
    (flip_tensor("router.gguf", 1), "router.gguf: tensor blk.3.ffn_gate_inp.weight: differs"),
    (flip_tensor("router.gguf", 0), "edgemoe.ghost is not the header"),
    (flip_first_crc, "edgemoe.crc32[0]: found"),
])
def test_verify_names_the_first_difference(model, capsys, change, message):
    out = Path(convert(model).out)
    assert main([str(model), "--verify", "--quiet"]) == 0
    changed = change(out)
    assert message.format(*changed or ()) in fails(capsys, model, "--verify")


def test_two_conversions_are_byte_identical(tmp_path, model):
    first = convert(model, tmp_path / "a.edgemoe", jobs=1)
    second = convert(model, tmp_path / "b.edgemoe", jobs=4)
    assert tree(Path(first.out)) == tree(Path(second.out))


# Stopped runs

def command(*args):
    # Not `python -m`: from the checkout that would find the source tree, where convert/ is not inside edgemoe/.
    code = "import sys; del sys.path[0]; from edgemoe.convert.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, *map(str, args)]


@pytest.fixture(scope="module")
def many_blobs(tmp_path_factory):
    """512 blobs of 180 KB: enough time to be interrupted in."""
    layers = [[(f"blk.{i}.ffn_{p}_exps.weight", T.F16, (256, 120, 128)) for p in ("gate", "up", "down")]
              for i in range(4)]
    return write_model(tmp_path_factory.mktemp("many") / "m.gguf", *layers)


def stop_half_way(src, out, number):
    """Start a conversion and send it a signal once 40 blobs are there. Returns (exit code, stderr)."""
    partial = Path(f"{out}.partial")
    for _ in range(5):
        # A shell that runs the tests in the background has them ignore SIGINT.
        process = subprocess.Popen(command(src, out, "--jobs", 1), stderr=subprocess.PIPE, text=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        while process.poll() is None and not (partial / "experts/L0000/E0040.gguf").exists():
            time.sleep(0.0005)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        if not out.exists():
            return process.returncode, err
        shutil.rmtree(out)
    pytest.fail("the conversion was over each time before it could be stopped")


def test_killed_run_resumes_to_the_same_bytes(tmp_path, many_blobs):
    straight = convert(many_blobs, tmp_path / "straight.edgemoe")
    out = tmp_path / "killed.edgemoe"
    code, _ = stop_half_way(many_blobs, out, signal.SIGKILL)
    assert code == -signal.SIGKILL
    partial = tmp_path / "killed.edgemoe.partial"
    assert not (partial / "router.gguf").exists()
    # A torn blob, one with a wrong byte, and one of a layer that this model does not have.
    blobs = sorted(partial.glob("experts/*/*.gguf"))
    os.truncate(blobs[3], 5000)
    flip(blobs[5], 90000)
    (partial / "experts/L0099").mkdir()
    shutil.copy(blobs[0], partial / "experts/L0099/E0000.gguf")
    report = convert(many_blobs, out)
    assert len(blobs) - 3 <= report.resumed_blobs <= len(blobs) - 2  # the one being written may be torn as well
    assert tree(out) == tree(Path(straight.out))


def test_ctrl_c_is_one_line(tmp_path, many_blobs):
    code, err = stop_half_way(many_blobs, tmp_path / "o.edgemoe", signal.SIGINT)
    assert (code, err) == (130, "edgemoe-convert: stopped; what is finished is kept, run again to go on\n")
    assert 40 <= len(list((tmp_path / "o.edgemoe.partial").glob("experts/*/*.gguf"))) < 512


def test_source_changed_before_the_resume_starts_over(tmp_path, many_blobs):
    src = tmp_path / "m.gguf"
    shutil.copy(many_blobs, src)
    out = tmp_path / "m.edgemoe"
    stop_half_way(src, out, signal.SIGKILL)
    # The fingerprint is in the header of every blob.
    flip(src, place_in_source(src, "blk.0.ffn_gate_exps.weight", 0, 5))
    assert convert(src).resumed_blobs == 0
    assert_holds(out, [src])


def test_a_source_that_changes_meanwhile_gives_no_package(tmp_path, model, monkeypatch):
    from edgemoe.convert import conversion

    def change_then_plan(source):
        os.utime(model, ns=(1, 1))
        return make_plan(source)

    monkeypatch.setattr(conversion, "make_plan", change_then_plan)
    with pytest.raises(ConvertError, match="changed while it was read"):
        convert(model)
    assert not (tmp_path / "m.edgemoe").exists()


def test_second_writer_is_refused(tmp_path, model, capsys):
    partial = tmp_path / "m.edgemoe.partial"
    partial.mkdir()
    fd = os.open(partial, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert "another edgemoe-convert is writing here" in fails(capsys, model)
    os.close(fd)
    assert main([str(model), "--quiet"]) == 0


def test_write_error_is_one_line_and_resumable(tmp_path, many_blobs):
    """A limit on the size of a file stands for any error of the disk."""
    run = subprocess.run(command(many_blobs, tmp_path / "o.edgemoe"), capture_output=True, text=True,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == "edgemoe-convert: error: File too large; what is finished is kept, run again to go on\n"
    assert not (tmp_path / "o.edgemoe").exists()
    assert main([str(many_blobs), str(tmp_path / "o.edgemoe"), "--quiet", "--verify"]) == 0


@pytest.fixture
def tiny_disk(tmp_path):
    """mount(options): a tmpfs of its own, as only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
                              capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
        return folder

    if not shutil.which("mount"):
        pytest.skip("needs mount")
    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


def test_disk_too_small_is_found_before_writing(tiny_disk, many_blobs, capsys):
    disk = tiny_disk("size=20m")
    line = fails(capsys, many_blobs, disk / "o.edgemoe")
    assert "needs " in line and "the disk has 20971520 bytes (0.02 GB) free" in line
    assert list(disk.iterdir()) == []


def test_disk_that_fills_up_leaves_no_package(tiny_disk, many_blobs, capsys):
    # Free bytes are checked before; running out of inodes is as sudden as another program's big file.
    disk = tiny_disk("size=200m,nr_inodes=100")
    line = fails(capsys, many_blobs, disk / "o.edgemoe", "--jobs", 2)
    assert "No space left on device; what is finished is kept" in line
    assert [path.name for path in disk.iterdir()] == ["o.edgemoe.partial"]
    subprocess.run(["mount", "-o", "remount,size=200m,nr_inodes=5000", str(disk)], check=True)
    report = convert(many_blobs, disk / "o.edgemoe", verify=True)
    assert 80 < report.resumed_blobs < 100


def test_memory_stays_small_on_a_big_model(tmp_path):
    """A sparse source of 720 MB with 150k tokens under a limit of 600 MB on the whole address space."""
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_array("tokenizer.ggml.tokens", [f"token number {i}" for i in range(150_000)])
    shape = (64, 1024, 1408)  # numpy order; one expert's slice is larger than the copy buffer
    writer.add_tensor_info("blk.0.ffn_up_exps.weight", shape, np.dtype(np.float16), 2 * prod(shape))
    writer.add_tensor_info("token_embd.weight", (187_500, 1408), np.dtype(np.float16), 2 * 187_500 * 1408)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 2 * prod(shape) + 2 * 187_500 * 1408 + 64)
    assert path.stat().st_size > 700e6

    limit = 600 * 10**6
    run = subprocess.run(command(path, "--json"), capture_output=True, text=True,
                         env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    shutil.rmtree(tmp_path / "m.edgemoe", ignore_errors=True)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["bytes_in"] > 700e6 and 0 < report["peak_rss_bytes"] < 200e6


# What the command prints

def test_json_report(model, capsys):
    assert main([str(model), "--json", "--verify"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["status"] == "converted" and report["verified"] is True
    assert (report["architecture"], report["layers"], report["experts"]) == ("qwen3moe", 2, 8)
    assert report["bytes_in"] == model.stat().st_size and report["resumed_blobs"] == 0


def test_text_and_quiet(model, capsys):
    assert main([str(model)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "qwen3moe, 2 layers with routed experts, 8 experts in all\nwrote " in captured.out
    assert main([str(model), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_progress_bar_on_a_terminal(model):
    terminal, stderr = os.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 80, 0, 0))  # a bar needs room
    for flags, wanted in ([], True), (["--force", "--quiet"], False):
        subprocess.run(command(model, *flags), stderr=stderr, stdout=subprocess.DEVNULL, check=True)
        os.write(stderr, b"end\n")
        shown = b""
        while b"end" not in shown:
            shown += os.read(terminal, 65536)
        assert (b"converting" in shown and b"B/s" in shown) == wanted
    os.close(terminal)
    os.close(stderr)


def test_fingerprint_ignores_the_file_name(tmp_path, model):
    with open_source(model) as source:
        mark = make_plan(source).fingerprint
    with open_source(model.rename(tmp_path / "renamed.gguf")) as source:
        assert make_plan(source).fingerprint == mark
