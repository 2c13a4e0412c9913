"""The command as a user meets it: what it prints, where, and with which exit code."""

import json
import os
import shutil
import signal
import struct
import time

import pytest
from terminal import Terminal

STATISTICS = r"\[prompt \d+ tokens, [\d.]+ tok/s \| answer \d+ tokens, [\d.]+ tok/s \| experts \d+ accesses, .*\]"


def best_isa():
    from edgemoe import _native  # here: the commands are processes of their own

    return _native.best_isa()


@pytest.fixture(scope="module")
def talker(models):
    """A model with a chat template; its text is noise."""
    return models("qwen3moe", "Q8_0")


def test_help_has_examples(edgemoe):
    for command in ([], ["run"], ["chat"], ["inspect"], ["verify"], ["doctor"], ["trace"], ["trace", "record"], ["trace", "import"], ["trace", "show"]):
        result = edgemoe(*command, "--help")
        assert result.returncode == 0 and "example" in result.stdout


def test_usage_errors_are_2(edgemoe, talker):
    assert edgemoe("run", talker).returncode == 2
    assert edgemoe("fly").returncode == 2
    assert edgemoe("run", talker, "-p", "x", "--ctx", "0").returncode == 2


def test_a_missing_model_is_one_line(edgemoe):
    result = edgemoe("run", "missing.gguf", "-p", "Hello")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == "edgemoe: error: missing.gguf: no such file or directory\n"


def test_run_answers_on_stdout_and_explains_on_stderr(edgemoe, talker):
    result = edgemoe("run", talker, "-p", "Hello world", "-n", "12", "--temp", "0")
    assert result.returncode == 0, result.stderr
    lines = result.stderr.strip().splitlines()
    assert "qwen3moe, 2 layers of 16 experts" in lines[0] and "computed on the CPU where they lie" in lines[0]
    import re

    assert re.fullmatch(STATISTICS, lines[-1])
    assert len(result.stdout.strip()) > 0 and "tok/s" not in result.stdout


def test_run_reads_the_prompt_from_stdin_and_repeats_itself(edgemoe, talker):
    first = edgemoe("run", talker, "-p", "-", "-n", "12", "--seed", "3", input="Hello world")
    second = edgemoe("run", talker, "-p", "Hello world", "-n", "12", "--seed", "3")
    assert first.returncode == 0 and first.stdout == second.stdout


def test_run_exact_is_what_llama_cpp_writes(edgemoe, talker):
    from edgemoe import engine

    plain = engine.open_plain([str(talker)], n_ctx=256, n_threads=2, verbose=False)
    expected = plain("Hello world", max_tokens=24, temperature=0)["choices"][0]["text"]
    plain.close()
    result = edgemoe("run", talker, "--raw", "-p", "Hello world", "-n", "24", "--temp", "0", "--exact", "--json")
    assert json.loads(result.stdout)["text"] == expected


def test_run_json(edgemoe, talker):
    result = edgemoe("run", talker, "-p", "Hello", "-n", "8", "--json")
    reply = json.loads(result.stdout)
    assert reply["finish_reason"] in ("length", "stop") and reply["n_prompt"] > 0 and reply["experts"]["n_accesses"] > 0


def test_run_says_where_experts_lie_in_ram(edgemoe, talker):
    run = ("run", talker, "-p", "Hello", "-n", "4")
    assert "RAM" not in edgemoe(*run).stderr  # they fit: nothing to say
    assert edgemoe(*run, "--ram", "mapped").stderr.startswith("experts mapped in RAM, 3.2 MiB: asked for\n")
    lines = edgemoe(*run, "--ram", "2M").stderr.splitlines()
    assert lines[0].startswith("experts in RAM slots: 2.0 MiB for ") and lines[1].startswith("expected ") and "2.0 MiB of them at a time in RAM" in lines[2]
    assert not [line for line in edgemoe(*run, "--ram", "2M", "--no-probe").stderr.splitlines() if line.startswith("expected ")]
    refused = edgemoe(*run, "--ram", "0")
    assert (refused.returncode, refused.stderr) == (1, "edgemoe: error: --ram 0 bytes: the experts of one token take 816.0 KiB; wanted at least that\n")
    assert edgemoe(*run, "--ram", "much").returncode == 2


def test_run_an_empty_prompt(edgemoe, talker):
    result = edgemoe("run", talker, "-p", "-", input="  \n")
    assert result.returncode == 1 and "the prompt is empty" in result.stderr


def test_run_without_a_template_says_what_to_do(edgemoe, models):
    bare = models("qwen3moe", "Q8_0", chat_template=None)
    result = edgemoe("run", bare, "-p", "Hello")
    assert result.returncode == 1 and "no chat template" in result.stderr and "--raw" in result.stderr
    assert edgemoe("run", bare, "-p", "Hello", "--raw", "-n", "4").returncode == 0
    assert edgemoe("run", bare, "-p", "Hello", "--chat-format", "chatml", "-n", "4").returncode == 0


@pytest.mark.parametrize(
    "template, complaint",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "failed"),
        ("{% set m = messages[::-1][:1] %}{{ strftime_now('%Y') }} {{ m[0]['content'] }}", None),
    ],
)
def test_templates(template, complaint, edgemoe, models):
    result = edgemoe("run", models("qwen3moe", "Q8_0", chat_template=template), "-p", "Hello", "-n", "4")
    if complaint is None:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode == 1 and "chat template" in result.stderr and complaint in result.stderr
        assert "Traceback" not in result.stderr


def test_a_prompt_longer_than_the_context(edgemoe, talker):
    result = edgemoe("run", talker, "-p", "expert " * 300, "--ctx", "512")
    assert result.returncode == 1 and "the context is full: the text so far has 9" in result.stderr and "holds 512" in result.stderr


def test_an_answer_that_fills_the_context_says_so(edgemoe, models):
    # A vocabulary whose end token never wins: the template's only end is the context's.
    endless = models("qwen3moe", "Q8_0", seed=2)
    result = edgemoe("run", endless, "--raw", "-p", "expert", "--ctx", "256", "--temp", "0")
    assert result.returncode == 0 and "[stopped: the context is full" in result.stderr, result.stderr


def test_text_is_never_broken_utf8(edgemoe, talker):
    """Random weights write random bytes, half characters too: what comes out is valid UTF-8, whatever the locale."""
    for seed in range(4):
        result = edgemoe("run", talker, "-p", "你好 🙂", "-n", "60", "--temp", "1.5", "--seed", str(seed), env=os.environ | {"LANG": "C", "PYTHONUTF8": "0"})
        assert result.returncode == 0, result.stderr


def test_inspect(edgemoe, talker, packages):
    text = edgemoe("inspect", talker).stdout
    assert "architecture qwen3moe" in text and "16 each, 4 used per token" in text and "q8_0" in text
    facts = json.loads(edgemoe("inspect", packages(talker), "--json").stdout)
    assert facts["kind"] == "package" and facts["n_expert"] == 16 and facts["n_expert_used"] == 4 and len(facts["fingerprint"]) == 32


def test_verify_finds_no_difference(edgemoe, talker, packages):
    for arguments in ([talker], [packages(talker)], [packages(talker), "--against", talker]):
        result = edgemoe("verify", *arguments, "--tokens", "8", "--json")
        report = json.loads(result.stdout)
        assert result.returncode == 0 and report["ok"], result.stderr
        assert report["exact"] == {"isa": "none", "max_difference": 0, "rms_difference": 0, "first_difference": None, "n_greedy_equal": 8}
        assert report["n_tokens"] == 8 and report["plain_decode_rate"] > 0 and report["edgemoe_decode_rate"] > 0
        if (isa := best_isa()) != "none":
            assert report["kernels"]["isa"] == isa and 0 < report["kernels"]["rms_difference"] < report["bound"] == 0.1


def test_verify_exact_leaves_the_kernels_out(edgemoe, talker):
    report = json.loads(edgemoe("verify", talker, "--tokens", "4", "--exact", "--json").stdout)
    assert report["ok"] and report["kernels"] is None and report["edgemoe_decode_rate"] > 0
    assert "bit-identical" in edgemoe("verify", talker, "--tokens", "4", "--exact").stdout


def test_verify_holds_the_kernels_to_the_bound(edgemoe, talker):
    if best_isa() == "none":
        pytest.skip("this CPU has none of the instruction sets")
    result = edgemoe("verify", talker, "--tokens", "4", "--bound", "1e-9")
    assert result.returncode == 1 and "exact    logits bit-identical" in result.stdout and "(bound 1e-09)" in result.stdout and "FAILED" in result.stdout


def test_verify_without_a_tokenizer_uses_random_tokens(edgemoe, models):
    report = json.loads(edgemoe("verify", models("qwen3moe", "Q8_0", tokenizer="none"), "--tokens", "4", "--json").stdout)
    assert report["ok"] and report["n_prompt"] == 32


def test_verify_finds_a_wrong_expert(edgemoe, talker, packages, tmp_path):
    """One weight of one expert changed: exit code 1, and the difference is shown."""
    broken = shutil.copytree(packages(talker), tmp_path / "broken.edgemoe")
    for expert in range(16):
        path = broken / f"experts/L0001/E{expert:04d}.gguf"
        data = bytearray(path.read_bytes())
        data[-34:-32] = struct.pack("<e", 1.0)  # the scale of the last Q8_0 block
        path.write_bytes(data)
    result = edgemoe("verify", broken, "--against", talker, "--tokens", "8")
    assert result.returncode == 1 and "FAILED" in result.stdout and "max logit difference" in result.stdout


def test_doctor_runs(edgemoe):
    checks = json.loads(edgemoe("doctor", "--json").stdout)
    assert len(checks) > 5


def test_a_closed_pipe_is_no_error(talker, tmp_path):
    import subprocess
    import sys

    code = f"{sys.executable} -m edgemoe.cli inspect '{talker}' --json | head -c 1"
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "Traceback" not in result.stderr and "BrokenPipe" not in result.stderr


# --- chat on a terminal ---


@pytest.fixture
def chat(talker, tmp_path):
    terminals = []

    def start(*options, model=talker):
        terminals.append(Terminal("chat", model, "--temp", "0", *options, cwd=tmp_path))
        terminals[-1].wait_for("/help lists the commands")
        terminals[-1].wait_for("> ")
        return terminals[-1]

    yield start
    for t in terminals:
        t.process.kill()


def test_chat_answers_and_leaves(chat):
    t = chat("-n", "8")
    t.type("Hello world\n")
    t.wait_for(STATISTICS)
    t.type("/stats\n")
    assert "routed pairs" in t.wait_for("computed on the CPU, .* s\r?\n")
    t.type("/exit\n")
    assert t.close() == 0


def test_chat_remembers_and_clears(chat, tmp_path):
    t = chat("-n", "6")
    t.type("Hello\n")
    t.wait_for(STATISTICS)
    t.type("Wait\n")
    # The second turn reads only what is new, not the whole chat again.
    second = t.wait_for(STATISTICS)
    assert int(second.rsplit("[prompt ", 1)[1].split()[0]) < 25
    t.type("/save chat.json\n")
    t.wait_for("saved 4 messages")
    assert [m["role"] for m in json.loads((tmp_path / "chat.json").read_text())["messages"]] == ["user", "assistant"] * 2
    t.type("/clear\n")
    t.wait_for("forgotten")
    t.type("/save chat.json\n")
    t.wait_for("saved 0 messages")
    t.type("/save /no/such/folder/x\n")
    t.wait_for("No such file or directory")
    t.type("/what\n")
    t.wait_for("no such command")
    t.type("/help\n")
    t.wait_for("Ctrl-C stops an answer")
    t.press("\x04")
    assert t.close() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(chat, models):
    t = chat("--ctx", "8192", "--temp", "1", "--seed", "1", model=models("qwen3moe", "F32", n_ff_exp=512, n_layer=4))
    t.type("Hello\n")
    t.wait_for(r"Hello\r?\n")
    t.wait_for(r"\S")  # the answer has begun
    t.process.send_signal(signal.SIGINT)
    assert "Exception" not in t.wait_for("stopped by Ctrl-C")
    t.wait_for("> ")
    time.sleep(0.5)  # a signal between two reads of the line editor waits for the next key
    t.process.send_signal(signal.SIGINT)  # at the prompt it does nothing but say how to leave
    t.wait_for("/exit leaves")
    t.type("/exit\n")
    assert t.close() == 0


def test_ctrl_c_in_a_long_prompt(chat, models):
    t = chat("--ctx", "8192", "--threads", "1", model=models("qwen3moe", "F32", n_ff_exp=512, n_layer=4))
    t.type("expert token model " * 1500 + "\n")
    time.sleep(1.5)  # reading so many tokens takes several seconds
    t.process.send_signal(signal.SIGINT)
    t.wait_for("stopped by Ctrl-C")
    t.type("/exit\n")
    assert t.close() == 0


def test_a_long_line_and_a_full_context(chat):
    t = chat("-n", "4", "--ctx", "512")
    t.type("expert " * 1500 + "\n")
    t.wait_for("the context is full: the text so far has \\d{4} tokens, the context holds 512")
    t.type("Hello\n")
    t.wait_for(STATISTICS)
    t.type("/exit\n")
    assert t.close() == 0


def test_chat_takes_piped_input(edgemoe, talker):
    result = edgemoe("chat", talker, "-n", "4", "--json", input='Hello\n"""\ntwo\nlines\n"""\n')
    replies = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0 and len(replies) == 2 and all(r["n_answer"] >= 0 for r in replies)
