"""Models that must not open: each ends in a ModelError of one line that says where, found, wanted. Never a crash, never wrong text."""

import shutil
import struct

import numpy as np
import pytest
from tiny_models import rewritten, write_shards

import edgemoe as em
from edgemoe import verify


def refusal(path, **options) -> str:
    """The one line with which `path` is refused."""
    with pytest.raises(em.ModelError) as error:
        em.Llama(path, n_ctx=64, verbose=False, **options).close()
    line = str(error.value)
    assert "\n" not in line and line.strip() == line
    return line


@pytest.fixture
def copy_of(models, tmp_path):
    def copy(*arguments, name="model.gguf", **variant):
        return shutil.copy(models(*arguments, **variant), tmp_path / name)

    return copy


@pytest.fixture
def package(models, packages, tmp_path):
    return shutil.copytree(packages(models("qwen3moe", "Q8_0")), tmp_path / "model.edgemoe")


def test_no_such_file(tmp_path):
    assert refusal(tmp_path / "missing.gguf").endswith("missing.gguf: no such file or directory")


def test_empty_file(tmp_path):
    (tmp_path / "empty.gguf").touch()
    assert "empty.gguf: not a readable GGUF (0 bytes)" in refusal(tmp_path / "empty.gguf")


def test_not_a_gguf(tmp_path):
    (tmp_path / "text.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "not a readable GGUF" in refusal(tmp_path / "text.gguf")


def test_a_directory_that_is_no_package(tmp_path):
    assert "no router.gguf" in refusal(tmp_path)


def test_cut_by_a_kilobyte(copy_of):
    path = copy_of()
    size = path.stat().st_size
    with open(path, "r+b") as f:
        f.truncate(size - 1024)
    line = refusal(path)
    assert f"file has {size - 1024} bytes" in line and ("tensor blk." in line or "tensor output" in line)


@pytest.mark.parametrize("size", [3, 20, 100, 2000, 5000])
def test_cut_within_the_header(size, copy_of):
    path = copy_of()
    with open(path, "r+b") as f:
        f.truncate(size)
    assert f"not a readable GGUF ({size} bytes)" in refusal(path)


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_header_never_crashes(seed, copy_of, python):
    """Random bytes in the header either change nothing that matters or are refused in one line."""
    path = copy_of()
    rng = np.random.default_rng(seed)
    data = bytearray(path.read_bytes())
    end = data.find(b"output_norm.weight") + 100
    for _ in range(4):
        data[rng.integers(4, end)] = rng.integers(256)
    path.write_bytes(data)
    try:
        from edgemoe.package import Source

        Source(path).close()
    except em.ModelError as e:
        assert "\n" not in str(e)


def test_newer_gguf_version(copy_of):
    path = copy_of()
    with open(path, "r+b") as f:
        f.seek(4)
        f.write(struct.pack("<I", 99))
    assert "version" in refusal(path)


def test_f64_router_is_named(copy_of):
    line = refusal(copy_of(router_type="F64"))
    assert "blk.0.ffn_gate_inp.weight has type f64" in line


def without(missing):
    return lambda name, data: None if name == missing else (name, data)


def with_six_experts(wanted):
    return lambda name, data: (name, data[:6] if wanted(name) else data)


def test_a_missing_router_is_named(models, tmp_path):
    path = rewritten(models("qwen3moe", "F32"), tmp_path / "m.gguf", without("blk.1.ffn_gate_inp.weight"))
    assert "blk.1.ffn_gate_inp.weight" in refusal(path)


def test_a_missing_projection_is_named(models, tmp_path):
    path = rewritten(models("qwen3moe", "F32"), tmp_path / "m.gguf", without("blk.1.ffn_up_exps.weight"))
    assert "blk.1.ffn_up_exps.weight" in refusal(path)


def test_projections_that_disagree_on_the_number_of_experts(models, tmp_path):
    path = rewritten(models("qwen3moe", "F32"), tmp_path / "m.gguf", with_six_experts(lambda name: name == "blk.1.ffn_down_exps.weight"))
    line = refusal(path)
    assert "layer 1: blk.1.ffn_" in line and "blk.1.ffn_down_exps.weight has 6" in line and "has 16" in line


def test_layers_with_8_and_with_6_experts_are_refused_with_a_reason(models, tmp_path):
    path = rewritten(
        models("qwen3moe", "F32", n_expert=8), tmp_path / "m.gguf", with_six_experts(lambda name: name.startswith("blk.1.ffn_") and "_exps" in name)
    )
    assert "blk.1.ffn_" in refusal(path) and "shape" in refusal(path)


# --- shards ---


def test_missing_shard(models, tmp_path):
    shards = write_shards(models(), tmp_path, 3)
    shards[1].unlink()
    for given in (shards[0], shards[2]):
        assert "00002-of-00003.gguf: cannot be opened: No such file" in refusal(given)


def test_renamed_shard(models, tmp_path):
    shards = write_shards(models(), tmp_path, 3)
    renamed = shards[1].rename(tmp_path / "part2.gguf")
    assert "is part 2 of 3, but is not named NAME-00002-of-00003.gguf" in refusal(renamed)


def test_swapped_shards(models, tmp_path):
    shards = write_shards(models(), tmp_path, 3)
    spare = shards[1].rename(tmp_path / "spare")
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    assert "is part 3 of 3, wanted part 2 of 3" in refusal(shards[0])


def test_a_shard_of_another_model(models, tmp_path):
    ours = write_shards(models(), tmp_path, 3)
    other = write_shards(models("qwen3moe", "Q4_0", n_layer=3), tmp_path / "other", 3) if (tmp_path / "other").mkdir() is None else None
    shutil.copy(other[1], ours[1])
    line = refusal(ours[0])
    assert "tensors, wanted" in line or "duplicated" in line


@pytest.mark.parametrize("name", ["best-of-breed.gguf", "a-00001-of-00002.gguf", "spaced name ü.gguf"])
def test_names_mean_nothing_for_a_single_file(name, copy_of):
    path = copy_of(name=name)
    llm = em.Llama(path, n_ctx=64, verbose=False)
    llm.eval([1])
    llm.close()


def test_a_relative_path_and_a_trailing_slash(package, monkeypatch):
    monkeypatch.chdir(package.parent)
    for path in ("model.edgemoe", "model.edgemoe/", "./model.edgemoe"):
        em.Llama(path, n_ctx=64, verbose=False).close()


# --- packages ---


def blob(package, layer=1, expert=3):
    return package / f"experts/L{layer:04d}/E{expert:04d}.gguf"


@pytest.mark.parametrize("expert", [0, 3, 15])
def test_missing_blob(expert, package):
    blob(package, 1, expert).unlink()
    assert f"L0001/E{expert:04d}.gguf: cannot be opened" in refusal(package)


@pytest.mark.parametrize("expert", [0, 3])
@pytest.mark.parametrize("change", [-1, -4096, 1])
def test_blob_of_the_wrong_size(expert, change, package):
    path = blob(package, 1, expert)
    size = path.stat().st_size
    with open(path, "r+b") as f:
        f.truncate(max(size + change, 0))
    assert f"layer 1, expert {expert}: " in refusal(package) and f"wanted {size}" in refusal(package)


def test_swapped_blobs(package):
    a, b = blob(package, 1, 3), blob(package, 1, 4)
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    assert "layer 1, expert 3: " in refusal(package) and "holds layer 1, expert 4" in refusal(package)


def test_blobs_swapped_between_layers(package):
    for expert in (0, 5):
        a, b = blob(package, 0, expert), blob(package, 1, expert)
        data = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(data)
        assert f"layer 0, expert {expert}: " in refusal(package) and f"holds layer 1, expert {expert}" in refusal(package)
        b.write_bytes(a.read_bytes())
        a.write_bytes(data)


def test_a_blob_of_another_model(package, models, packages):
    other = packages(models("qwen3moe", "Q8_0", seed=1))
    for expert in (0, 3):
        kept = blob(package, 1, expert).read_bytes()
        shutil.copy(blob(other, 1, expert), blob(package, 1, expert))
        assert f"layer 1, expert {expert}" in refusal(package)
        blob(package, 1, expert).write_bytes(kept)


def test_a_blob_with_a_damaged_header(package):
    path = blob(package, 0, 2)
    data = bytearray(path.read_bytes())
    data[0:4] = b"XXXX"
    path.write_bytes(data)
    assert "E0002.gguf: not a readable GGUF" in refusal(package)


@pytest.mark.parametrize("name", ["model.gguf", "router.gguf"])
def test_package_files_cut_or_missing(name, package):
    path = package / name
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size - 64)
    assert name in refusal(package)
    path.unlink()
    assert name in refusal(package)


def test_unknown_format_version(package):
    path = package / "router.gguf"
    data = bytearray(path.read_bytes())
    at = data.find(b"edgemoe.format_version") + len("edgemoe.format_version") + 4
    data[at : at + 4] = struct.pack("<I", 2)
    path.write_bytes(data)
    assert "format version 2, wanted 1" in refusal(package)


def test_the_sidecar_of_another_package(package, models, packages):
    other = packages(models("qwen3moe", "Q8_0", seed=1))
    shutil.copy(other / "router.gguf", package / "router.gguf")
    assert "fingerprint" in refusal(package)


def test_an_unfinished_package_does_not_open(package):
    (package / "router.gguf").unlink()
    assert "interrupted conversion" in refusal(package)


def test_a_conversion_that_was_stopped_just_before_its_end_does_not_open(package):
    assert "unfinished conversion" in refusal(package.rename(package.parent / "model.edgemoe.partial"))


def test_broken_chat_template(models):
    assert "chat template is broken" in refusal(models("qwen3moe", "Q8_0", chat_template="{% for %}"))


def test_nan_in_one_expert_is_not_hidden(models, tmp_path):
    """Weights are the user's: NaN comes out as plain llama.cpp would give it, and verify does not call it equal."""
    def poison(name, data):
        if name == "blk.1.ffn_down_exps.weight":
            data[:, 0, 0] = np.nan
        return name, data

    path = rewritten(models("qwen3moe", "F32"), tmp_path / "nan.gguf", poison)
    llm = em.Llama(path, n_ctx=64, logits_all=True, verbose=False)
    llm.eval([1, 2, 3])
    assert np.isnan(llm.scores[2]).any()
    llm.close()
    for exact in (True, False):
        report = verify.verify(str(path), n_tokens=2, exact=exact)
        assert not report.ok and report.exact.max_difference == (report.exact if exact else report.kernels).rms_difference == float("inf")
