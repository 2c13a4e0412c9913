"""Recording from running models: what the trace says is what was computed, and recording changes nothing."""

import fcntl
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
import time

import gguf
import numpy as np
import pytest
from conftest import SHARED
from terminal import Terminal
from test_engine import dense_model
from tiny_models import FAMILIES

import edgemoe
from edgemoe.devices import devices
from edgemoe.errors import EdgemoeError, TraceError
from edgemoe.trace import Trace

N_PROMPT, N_UBATCH, N_DECODE = 40, 16, 6
OPTIONS = dict(n_ctx=256, n_batch=64, n_ubatch=N_UBATCH, n_threads=2, verbose=False)
GATING = {"qwen3moe": "softmax", "gpt-oss": "softmax", "llama": "softmax", "olmoe": "softmax", "deepseek2": "sigmoid", "deepseek2-fused": "sigmoid",
          "ernie4_5-moe": "softmax", "llama4": "sigmoid"}  # fmt: skip


def feed(llm, seed=5):
    """A prompt and some decoded tokens; the logits of each step."""
    rng = np.random.default_rng(seed)
    rows = []
    for n in [N_PROMPT, *[1] * N_DECODE]:
        llm.eval(rng.integers(0, llm.n_vocab(), n).tolist())
        rows.append(np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy())
    return np.stack(rows)


def recorded(path, out, seeds=(5,), llama=(), **options):
    """(trace, counters, logits) of one sequence for each seed."""
    llm = edgemoe.Llama(path, **(OPTIONS | dict(llama)))
    before = llm.expert_stats()
    with edgemoe.Recorder(llm, out, **options) as recorder:
        logits = []
        for seed in seeds:
            with recorder.sequence(seed=seed):
                logits.append(feed(llm, seed))
    stats = {name: n - before[name] for name, n in llm.expert_stats().items()}
    llm.close()
    return Trace.load(out), stats, np.stack(logits)


def tensors(path):
    return {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}


def n_accesses(trace):
    """Distinct experts per layer and step, summed."""
    total = 0
    for step in np.unique(trace.step):
        rows = trace.ids[trace.step == step]
        total += sum(len(np.setdiff1d(rows[:, layer], [trace.absent])) for layer in range(trace.n_layers))
    return total


def check_counters(trace, stats):
    assert stats["n_pairs"] == (trace.ids != trace.absent).sum()
    assert stats["n_accesses"] == n_accesses(trace)


def probabilities(logits, gating):
    if gating == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def selection(probs, bias, recipe):
    """What llama.cpp takes the largest of: DeepSeek-V3's groups, those with the best two experts, keep theirs."""
    scores = probs + bias
    if recipe.n_expert_groups:
        groups = scores.reshape(len(scores), recipe.n_expert_groups, -1)
        best = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argsort(-best, axis=1)[:, : recipe.n_group_used]
        mask = np.full(best.shape, -np.inf)
        np.put_along_axis(mask, kept, 0, axis=1)
        scores = (groups + mask[:, :, None]).reshape(scores.shape)
    return scores


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, models, packages, tmp_path):
    gguf_path, recipe = models(family, "Q8_0"), FAMILIES[family]
    t, stats, _ = recorded(gguf_path, tmp_path / "t.npz", full_probs=True, hidden=True)
    weights = tensors(gguf_path)
    check_counters(t, stats)
    n = N_PROMPT + N_DECODE
    assert t.n_tokens == n and t.n_used == recipe.n_expert_used and t.n_expert == recipe.n_expert and t.hidden.shape == (n, t.n_layers, recipe.n_embd)
    assert t.phase.tolist() == [0] * N_PROMPT + [1] * N_DECODE
    assert t.step.tolist() == [0] * 16 + [1] * 16 + [2] * 8 + [3 + i for i in range(N_DECODE)]
    assert t.meta["layers"] == [layer.layer for layer in edgemoe.Source(gguf_path).layers]
    for i, layer in enumerate(t.meta["layers"]):
        there = t.ids[:, i, 0] != t.absent
        # llama.cpp leaves out of the last layer what nobody wants to have; of gpt-oss it does so behind the experts only.
        whole = layer < recipe.n_layer - 1 or family == "gpt-oss"
        expected = [whole or row >= N_PROMPT - 1 for row in range(n)]
        assert there.tolist() == expected
        ids, probs, hidden = t.ids[there, i], t.probs[there, i].astype(np.float32), t.hidden[there, i].astype(np.float32)
        assert not t.hidden[~there, i].any() and not t.probs[~there, i].any()
        logits = hidden @ weights[f"blk.{layer}.ffn_gate_inp.weight"].T + weights.get(f"blk.{layer}.ffn_gate_inp.bias", 0)
        np.testing.assert_allclose(probabilities(logits, GATING[family]), probs, atol=5e-3)
        scores = selection(probs, weights.get(f"blk.{layer}.exp_probs_b.bias", 0), recipe)
        best = -np.sort(-scores, axis=1)[:, : t.n_used]
        np.testing.assert_allclose(np.sort(np.take_along_axis(scores, ids.astype(int), 1)), np.sort(best), atol=1e-3)
        assert (np.diff(np.take_along_axis(probs, ids.astype(int), 1), axis=1) <= 1e-3).all()
    # The package has the same fingerprint and the same routing; the probabilities of the chosen are those among all.
    u, _, _ = recorded(packages(gguf_path), tmp_path / "u.npz")
    np.testing.assert_array_equal(u.ids, t.ids)
    assert u.meta["fingerprint"] == t.meta["fingerprint"] != "" and u.sequence_hashes() == t.sequence_hashes()
    there = t.ids[:, :, 0] != t.absent
    among_all = np.take_along_axis(t.probs.astype(np.float32), np.minimum(t.ids, t.n_expert - 1).astype(int), 2)[there]
    chosen = u.probs.astype(np.float32)[there]
    if family == "gpt-oss":
        assert u.meta["probs_are"].startswith("softmax over the chosen") and t.meta["probs_are"].startswith("softmax over all (the model takes it over the chosen)")
        among_all = among_all / among_all.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chosen, among_all, atol=2e-3)


@pytest.mark.parametrize("path", sorted((SHARED / "tiny_archs").glob("*.gguf")), ids=lambda p: p.stem)
def test_other_architectures(path, tmp_path):
    t, stats, _ = recorded(path, tmp_path / "t.npz", full_probs=True, hidden=True)
    check_counters(t, stats)


WAYS = [dict(), dict(full_probs=True), dict(hidden=True), dict(full_probs=True, hidden=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_recording_changes_no_logit(family, models, tmp_path):
    gguf_path = models(family, "Q8_0")
    for llama in (dict(), dict(exact=True), dict(exact=True, slots=5, device="CPU", misses="load")):
        llm = edgemoe.Llama(gguf_path, tap=False, **(OPTIONS | llama))
        expected = feed(llm)
        llm.close()
        for options in WAYS:
            t, stats, found = recorded(gguf_path, tmp_path / "t.npz", llama=llama, **options)
            np.testing.assert_array_equal(found[0], expected)
            check_counters(t, stats)
            if "slots" in llama:
                assert stats["n_on_device"] > 0


@pytest.mark.parametrize("llama", [dict(slots=0), dict(slots=6), dict(vram=2**31, tap=True)], ids=["experts on the CPU", "slots", "everything on the device"])
@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_routers_on_a_gpu(family, llama, models, tmp_path):
    """llama.cpp computes the routers on a Vulkan device, whose rounding is another one: a few experts may differ."""
    found = [d.name for d in devices() if d.name.startswith("Vulkan")]
    if not found:
        pytest.skip("no Vulkan device in this build of llama-cpp-python")
    gguf_path = models(family, "Q8_0")
    for options in WAYS:
        expected, _, _ = recorded(gguf_path, tmp_path / "t.npz", **options)
        t, stats, _ = recorded(gguf_path, tmp_path / "u.npz", llama=dict(n_gpu_layers=-1, device=found[0]) | llama, **options)
        assert (t.ids == expected.ids).mean() > 0.9 and (t.step == expected.step).all()
        assert np.median(np.abs(t.probs.astype(np.float32) - expected.probs)) < 0.02
        if t.hidden is not None:
            assert np.median(np.abs(t.hidden.astype(np.float32) - expected.hidden)) < 0.1
        if "vram" not in llama:
            check_counters(t, stats)


def test_every_row_is_there_when_all_logits_are_wanted(models, tmp_path):
    t, stats, _ = recorded(models("qwen3moe", "Q8_0"), tmp_path / "t.npz", llama=dict(logits_all=True))
    assert (t.ids != t.absent).all()
    check_counters(t, stats)


def test_sequences_start_afresh(models, tmp_path):
    t, stats, logits = recorded(models("qwen3moe", "Q8_0"), tmp_path / "t.npz", seeds=(5, 6, 5))
    check_counters(t, stats)
    assert t.offsets.tolist() == [0, 46, 92, 138] and t.meta["sequences"] == [{"seed": 5}, {"seed": 6}, {"seed": 5}]
    first, second, third = t.sequence_hashes()
    assert first == third != second
    np.testing.assert_array_equal(logits[0], logits[2])
    assert t.step.tolist() == sorted(t.step) and t.step[-1] == 3 * 9 - 1


def test_phases_of_a_conversation(models, tmp_path):
    llm = edgemoe.Llama(models("qwen3moe", "Q8_0"), **OPTIONS)
    with edgemoe.Recorder(llm, tmp_path / "t.npz") as recorder:
        llm.eval([1, 2, 3])  # outside of a sequence: not recorded
        with recorder.sequence():
            llm.eval([1])  # a prompt of one token
            llm.eval([2])
            llm.eval([3, 4, 5])  # what the user says next
            llm.eval([6])
        with recorder.sequence():
            pass  # nothing was computed: no sequence
    llm.eval([7])
    llm.close()
    t = Trace.load(tmp_path / "t.npz")
    assert t.phase.tolist() == [0, 1, 0, 0, 0, 1] and t.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and t.step.tolist() == [0, 1, 2, 2, 2, 3] and t.n_sequences == 1


def test_only_complete_sequences_are_kept(models, tmp_path):
    llm = edgemoe.Llama(models("qwen3moe", "Q8_0"), **OPTIONS)
    with pytest.raises(KeyboardInterrupt), edgemoe.Recorder(llm, tmp_path / "t.npz", hidden=True) as recorder:
        with recorder.sequence():
            llm.eval([1, 2, 3])
        with pytest.raises(ZeroDivisionError), recorder.sequence():
            llm.eval([1, 2, 3, 4])
            1 / 0
        with recorder.sequence():
            llm.eval([9, 8])
        with recorder.sequence():
            llm.eval([4, 4])
            raise KeyboardInterrupt
    assert Trace.load(tmp_path / "t.npz").token_ids.tolist() == [1, 2, 3, 9, 8]
    with pytest.raises(ZeroDivisionError), edgemoe.Recorder(llm, tmp_path / "u.npz") as recorder:
        with recorder.sequence():
            llm.eval([1, 2, 3])
        1 / 0
    with pytest.raises(TraceError, match="no sequence was recorded"), edgemoe.Recorder(llm, tmp_path / "u.npz"):
        llm.eval([1])
    assert os.listdir(tmp_path) == ["t.npz"]
    llm.close()


def test_what_cannot_be_recorded(models, tmp_path):
    llm = edgemoe.Llama(models("qwen3moe", "Q8_0"), tap=False, **OPTIONS)
    with pytest.raises(EdgemoeError, match="open the model with tap=True"):
        edgemoe.Recorder(llm, tmp_path / "t.npz")
    llm.close()
    llm = edgemoe.Llama(dense_model(tmp_path), **OPTIONS)
    with pytest.raises(EdgemoeError, match="a dense model has no routing to record"):
        edgemoe.Recorder(llm, tmp_path / "t.npz")
    llm.close()
    llm = edgemoe.Llama(models("qwen3moe", "Q8_0"), **OPTIONS)
    with pytest.raises(TraceError, match="No such file"):
        edgemoe.Recorder(llm, tmp_path / "missing" / "t.npz")
    with edgemoe.Recorder(llm, tmp_path / "t.npz") as recorder:
        with pytest.raises(EdgemoeError, match="is being recorded already"):
            edgemoe.Recorder(llm, tmp_path / "u.npz")
        with recorder.sequence():
            llm.eval([1, 2])
    with edgemoe.Recorder(llm, tmp_path / "u.npz") as recorder, recorder.sequence():
        llm.eval([1, 2])
    assert Trace.load(tmp_path / "t.npz").sequence_hashes() == Trace.load(tmp_path / "u.npz").sequence_hashes()
    llm.close()


PROMPTS = "Hello world\n\nThe model of the expert\nAnother way\n"


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    return "prompts.txt"


def test_the_command(edgemoe, models, prompts, tmp_path):
    talker = models("qwen3moe", "Q8_0")
    result = edgemoe("trace", talker, "--prompts", prompts, "--out", "t.npz", "-n", "8", "--hidden", "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    t = Trace.load(tmp_path / "t.npz")
    assert said["n_tokens"] == t.n_tokens and said["n_sequences"] == 3 and not said["interrupted"] and said["bytes"] == (tmp_path / "t.npz").stat().st_size
    assert [s["name"] for s in t.meta["sequences"]] == PROMPTS.split("\n")[0:1] + PROMPTS.split("\n")[2:4]
    assert t.meta["source"] == "prompts.txt" and t.meta["recorded"]["options"]["temp"] == 0.0
    again = edgemoe("trace", "record", talker, "--prompts", prompts, "--out", "u.npz", "-n", "8", "--hidden", "--limit", "2", "--slots", "4", "--device", "CPU", "--exact")
    assert again.returncode == 0, again.stderr
    u = Trace.load(tmp_path / "u.npz")
    assert u.n_sequences == 2 and f"{u.n_tokens} tokens in 2 sequences" in again.stdout and u.meta["recorded"]["options"]["slots"] == 4
    assert sorted(os.listdir(tmp_path)) == ["prompts.txt", "t.npz", "u.npz"]
    # The same command writes the same bytes.
    assert edgemoe("trace", talker, "--prompts", prompts, "--out", "v.npz", "-n", "8", "--hidden").returncode == 0
    assert (tmp_path / "v.npz").read_bytes() == (tmp_path / "t.npz").read_bytes()


def test_the_command_answers_as_run_does(edgemoe, models, tmp_path):
    talker = models("qwen3moe", "Q8_0")
    result = edgemoe("trace", talker, "--prompts", "-", "--raw", "--out", "t.npz", "-n", "12", input="Hello world")
    assert result.returncode == 0, result.stderr
    t = Trace.load(tmp_path / "t.npz")
    llm = edgemoe_llama(talker)
    prompt = llm.tokenize(b"Hello world")
    llm("Hello world", max_tokens=12, temperature=0)
    assert t.token_ids.tolist() == llm.input_ids[: llm.n_tokens].tolist() and t.phase.tolist() == [0] * len(prompt) + [1] * (llm.n_tokens - len(prompt))
    llm.close()


def edgemoe_llama(path):
    return edgemoe.Llama(path, n_ctx=256, verbose=False)


def test_prompt_files(edgemoe, models, tmp_path):
    talker = models("qwen3moe", "Q8_0")
    for name in ("prompt", "question", "problem"):
        (tmp_path / "p.jsonl").write_text(json.dumps({"answer": "x", name: "Hello\nworld"}) + "\n" + json.dumps({name: "token"}) + "\n")
        result = edgemoe("trace", talker, "--prompts", "p.jsonl", "--out", "t.npz", "-n", "2", "--json")
        assert json.loads(result.stdout)["n_sequences"] == 2
    for content, said in (
        ('{"prompt": "a"}\nb\n', "p.jsonl: line 2: not JSON as the first line is"),
        ('{"text": "a"}\n', "p.jsonl: line 1: found text, wanted an object with a text called prompt or question or problem"),
        ("\n \n", "p.jsonl: found no prompts"),
    ):
        (tmp_path / "p.jsonl").write_text(content)
        result = edgemoe("trace", talker, "--prompts", "p.jsonl", "--out", "u.npz")
        assert result.returncode == 1 and result.stderr.startswith(f"edgemoe: error: {said}") and result.stderr.count("\n") == 1
    result = edgemoe("trace", talker, "--prompts", "missing.txt", "--out", "u.npz")
    assert result.stderr == "edgemoe: error: missing.txt: No such file or directory\n"
    (tmp_path / "p.jsonl").write_text("a\n")
    for out in ("nowhere/t.npz", "."):
        result = edgemoe("trace", talker, "--prompts", "p.jsonl", "--out", out)
        assert result.returncode == 1 and out in result.stderr and result.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl", "t.npz"]


def test_a_prompt_that_does_not_fit_is_left_out_and_said(edgemoe, models, tmp_path):
    (tmp_path / "p.txt").write_text("Hello\n" + "token " * 300 + "\nworld\n")
    result = edgemoe("trace", models("qwen3moe", "Q8_0"), "--prompts", "p.txt", "--out", "t.npz", "-n", "4", "--ctx", "128", "--json")
    said = json.loads(result.stdout)
    assert result.returncode == 0 and said["n_sequences"] == 2 and said["n_too_long"] == 1 and "prompt 2 is left out" in result.stderr
    assert [s["prompt"] for s in Trace.load(tmp_path / "t.npz").meta["sequences"]] == [1, 3]


def start(models, tmp_path, *more):
    (tmp_path / "p.txt").write_text("Hello\n" * 1000)
    talker = models("qwen3moe", "Q8_0")
    terminal = Terminal("trace", talker, "--prompts", tmp_path / "p.txt", "--out", tmp_path / "t.npz", "-n", "40", *more, cwd=tmp_path)
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))  # without a width there is no progress bar
    return terminal


def test_ctrl_c_writes_what_is_complete(models, tmp_path):
    terminal = start(models, tmp_path, "--hidden")
    terminal.wait_for(r"\d\d/1000 .*tokens/s")
    terminal.type("\x03")
    said = terminal.wait_for(r"of 1000 prompts that were complete are in .*t.npz")
    assert "stopped by Ctrl-C" in said
    assert terminal.close() == 130
    t = Trace.load(tmp_path / "t.npz")
    assert 10 <= t.n_sequences < 1000 and len({len(s.ids) for s in t.sequences()}) == 1  # all the same prompt: all whole
    assert sorted(os.listdir(tmp_path)) == ["p.txt", "t.npz"]


def test_ctrl_c_before_a_prompt_is_complete(models, tmp_path):
    terminal = start(models, tmp_path, "-n", "100000", "--ctx", "4096")
    terminal.wait_for(r"0/1000 .*[1-9]\d* tokens")
    terminal.type("\x03")
    terminal.wait_for("stopped by Ctrl-C before a prompt was complete: .*t.npz is not written")
    assert terminal.close() == 130
    assert os.listdir(tmp_path) == ["p.txt"]


def test_a_full_disk_ends_it_in_one_line(edgemoe, models, tmp_path):
    (tmp_path / "p.txt").write_text("Hello\n" * 40)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))  # noqa: E731
    command = [sys.executable, "-m", "edgemoe.cli", "trace", models("qwen3moe", "Q8_0"), "--prompts", "p.txt", "--out", "t.npz", "--hidden", "-n", "40"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limit)
    assert result.returncode == 1 and result.stdout == "" and result.stderr.splitlines()[1:] == ["edgemoe: error: t.npz: File too large"]
    assert os.listdir(tmp_path) == ["p.txt"]


def test_fewer_experts_per_token_than_the_model_says(models, tmp_path):
    t, stats, _ = recorded(models("qwen3moe", "Q8_0"), tmp_path / "t.npz", llama=dict(kv_overrides={"qwen3moe.expert_used_count": 2}))
    assert t.n_used == 2
    check_counters(t, stats)


def test_killed_leaves_nothing_that_opens(models, tmp_path):
    (tmp_path / "p.txt").write_text("Hello\n" * 1000)
    command = [sys.executable, "-m", "edgemoe.cli", "trace", models("qwen3moe", "Q8_0"), "--prompts", "p.txt", "--out", "t.npz", "--hidden", "-n", "40"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".t.npz.*.part/hidden")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "t.npz").exists()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            with pytest.raises(TraceError):
                Trace.load(path)
