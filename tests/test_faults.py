"""What goes wrong while a model is open: files cut, forks, threads, leaks, Ctrl-C. Programs that may die run in a process of their own."""

import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import edgemoe as em

OPEN = """
import os, sys
import edgemoe
def open_model(path, **options):
    return edgemoe.Llama(path, **({"n_ctx": 256, "n_threads": 2, "verbose": False} | options))
"""

CUT = OPEN + """
from edgemoe import ModelFault
path, victim, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
other = open_model(sys.argv[4])
llm = open_model(path)
llm.eval([1, 2, 3])
os.truncate(victim, size)
for attempt in range(2):
    try:
        for step in range(64):
            llm.eval([step + 5])
        print("nothing noticed")
    except ModelFault as e:
        print("fault:", e)
other.eval([1, 2, 3])
print("other model works")
llm.close()
other.close()
"""


@pytest.mark.parametrize("part", ["experts", "everything"])
def test_gguf_cut_while_running(part, models, python, tmp_path):
    gguf = shutil.copy(models("qwen3moe", "F32", n_ff_exp=512), tmp_path / "cut.gguf")
    size = os.path.getsize(gguf) // 2 if part == "experts" else 8192
    result = python(CUT, gguf, gguf, size, models("llama", "Q8_0"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"fault: {gguf}: a file of the model was cut while the model was running") == 2
    assert "other model works" in result.stdout and "nothing noticed" not in result.stdout


@pytest.mark.parametrize("victim", ["model.gguf", "experts/L0001/E0003.gguf"])
def test_package_cut_while_running(victim, models, packages, python, tmp_path):
    # All experts are used in every step, so the cut one is touched.
    package = shutil.copytree(packages(models("qwen3moe", "F32", n_expert=4, n_ff_exp=512)), tmp_path / "cut.edgemoe")
    result = python(CUT, package, package / victim, 4096, models("llama", "Q8_0"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("was cut while the model was running") == 2
    assert "other model works" in result.stdout


def test_a_fork_is_refused_and_does_not_hang(models, python):
    result = python(
        OPEN
        + """
llm = open_model(sys.argv[1])
llm.eval([1, 2, 3])
pid = os.fork()
if pid == 0:
    try:
        llm.eval([4])
        print("computed", flush=True)
    except edgemoe.ModelFault as e:
        print("fault:", e, flush=True)
    sys.exit(0)  # an orderly exit: destructors run in the child too
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
llm.eval([4])
print("parent works")
""",
        models("qwen3moe", "Q8_0"),
    )
    assert result.returncode == 0, result.stderr
    assert "forked" in result.stdout and "computed" not in result.stdout
    assert "child ended with 0" in result.stdout and "parent works" in result.stdout


def greedy(llm, n=24):
    llm.reset()
    llm.eval([1, 2, 3, 4])
    tokens = []
    for _ in range(n):
        tokens.append(int(llm.scores[llm.n_tokens - 1].argmax()))
        llm.eval([tokens[-1]])
    return tokens


def test_two_models_and_two_contexts_at_once(models, packages):
    paths = [models("qwen3moe", "Q8_0"), packages(models("gpt-oss", "MXFP4")), models("qwen3moe", "Q8_0")]
    options = dict(n_ctx=128, n_threads=1, logits_all=True, verbose=False)
    alone = []
    for path in paths:
        llm = em.Llama(path, **options)
        alone.append(greedy(llm))
        llm.close()
    together = [em.Llama(path, **options) for path in paths]
    results = [None] * len(paths)
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, greedy(together[i]))) for i in range(len(paths))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for llm in together:
        llm.close()
    assert results == alone


def test_threads_are_set_per_context(models):
    path = models("qwen3moe", "Q8_0")
    one, two = (em.Llama(path, n_ctx=64, n_threads=n, verbose=False) for n in (1, 2))
    assert (one.n_threads, one.n_threads_batch, two.n_threads, two.n_threads_batch) == (1, 1, 2, 2)
    n_before = len(os.listdir("/proc/self/task"))
    one.eval([1])  # a single thread needs no helper
    assert len(os.listdir("/proc/self/task")) == n_before
    one.close(), two.close()


def test_everything_is_freed_at_close(models, packages, python):
    """Mappings, descriptors and memory after the 8th and after the 28th opening are the same."""
    # One malloc arena: how many glibc makes for short-lived threads is chance, and none of our business.
    result = python(
        OPEN
        + """
def usage():
    maps = open("/proc/self/maps").read()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return maps.count(".gguf"), len(os.listdir("/proc/self/fd")), int(status["VmSize"].split()[0]), int(status["VmRSS"].split()[0])
for i in range(28):
    for path in sys.argv[1:]:
        llm = open_model(path, n_threads=1)
        llm.eval([1, 2, 3])
        llm.close()
        del llm
    if i == 7:
        first = usage()
last = usage()
print(first, last)
assert last[0] == first[0] == 0, "mappings are left"
assert last[1] == first[1], "descriptors are left"
# 40 openings between the two: less than 200 KiB each. A forgotten KV cache or compute buffer would be several times that; the allocator takes its own steps, and glibc
# keeps up to 40 MiB of address space as stacks for the next threads, as many as happened to run at once.
assert last[2] - first[2] < 8000 + 40 * 1024 and last[3] - first[3] < 8000, "memory grew (KiB)"
""",
        models("qwen3moe", "Q8_0"),
        packages(models("qwen3moe", "Q8_0")),
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_failed_load_frees_everything_too(models, packages, python, tmp_path):
    broken = shutil.copytree(packages(models("qwen3moe", "Q8_0")), tmp_path / "broken.edgemoe")
    data = bytearray((broken / "model.gguf").read_bytes())
    data[data.find(b"attn_norm")] = ord("x")
    (broken / "model.gguf").write_bytes(data)
    result = python(
        OPEN
        + """
for i in range(5):
    try:
        open_model(sys.argv[1])
    except edgemoe.ModelError as e:
        print(e)
maps = open("/proc/self/maps").read()
assert maps.count(".gguf") == 0, maps
""",
        broken,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("llama.cpp cannot load it: ") == 5 and "attn_norm" in result.stdout


def test_the_ghost_costs_no_memory(models, packages, python):
    """libllama maps its second split with MAP_POPULATE; a hole would be filled with zero pages as big as all experts."""
    gguf = models("qwen3moe", "F32", n_expert=32, n_ff_exp=512)
    result = python(
        OPEN
        + """
def shared_memory():
    return sum(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("Shmem:")) * 1024
before = shared_memory()
peak = [0]
llm = open_model(sys.argv[1])
print(shared_memory() - before, llm.source.expert_bytes)
""",
        packages(gguf),
    )
    grown, expert_bytes = map(int, result.stdout.split())
    assert expert_bytes > 50e6 and grown < expert_bytes / 4


CTRL_C = OPEN + """
import time, threading, signal
llm = open_model(sys.argv[1], n_ctx=8192, n_batch=8192, n_threads=1)
def interrupt():
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
start = time.time()
try:
    llm.eval([7] * 8000)
    print("finished", time.time() - start)
except KeyboardInterrupt:
    print("interrupted")
llm.reset()
llm.eval([1, 2, 3])
print("works again", llm.n_tokens)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except KeyboardInterrupt:
    print("Python's handler is back")
"""


def test_ctrl_c_ends_a_long_prompt(models, python):
    result = python(CTRL_C, models("qwen3moe", "F32", n_ff_exp=512, n_layer=4))
    assert result.stdout.split("\n")[:3] == ["interrupted", "works again 3", "Python's handler is back"], result.stdout + result.stderr
    assert result.stderr == ""


def test_a_signal_handler_of_the_callers_own_is_left_alone(models, python):
    result = python(
        OPEN
        + """
import signal
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
llm = open_model(sys.argv[1])
os.kill(os.getpid(), signal.SIGINT)
llm.eval([1, 2, 3])
print(len(seen), llm.n_tokens)
""",
        models("qwen3moe", "Q8_0"),
    )
    assert result.stdout.split() == ["1", "3"], result.stderr


def test_exit_without_close(models, packages, python):
    result = python(OPEN + "llm = open_model(sys.argv[1]); llm.eval([1, 2, 3])", packages(models("qwen3moe", "Q8_0")))
    assert result.returncode == 0 and result.stderr == ""
