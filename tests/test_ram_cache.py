"""Experts in RAM and on the disk: the same bits as when all are mapped, within the budget, counted as a simulation counts them; and what disks and users do to it.

That every family gives llama.cpp's logits from the disk is tested in test_parity.py.
"""

import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_parity import least_ram

import edgemoe as em
from edgemoe.errors import EdgemoeError, ModelFault
from edgemoe.ram_plan import plan_ram, slot_bytes
from edgemoe.replay import DECODE, FIELDS, Replay, rows_of

PROMPT = list(range(3, 43))
N_DECODED = 16


def open_model(path, **options):
    return em.Llama(str(path), **({"n_ctx": 256, "n_threads": 2, "verbose": False, "logits_all": True} | options))


def logits(llm):
    """[tokens, n_vocab] of a prompt and of some single steps."""
    llm.reset()
    llm.eval(PROMPT)
    for token in range(50, 50 + N_DECODED):
        llm.eval([token])
    return llm.scores[: llm.n_tokens].copy()


@pytest.fixture(scope="module")
def expected(models):
    """expected(path, **options): logits with all experts mapped, computed once."""
    made = {}

    def get(path, **options):
        key = (path, *sorted(options.items()))
        if key not in made:
            llm = open_model(path, ram="mapped", **options)
            made[key] = logits(llm)
            llm.close()
        return made[key]

    return get


def check(llm, wanted):
    for again in range(2):
        np.testing.assert_array_equal(logits(llm), wanted)
    stats, info = llm.expert_stats(), llm.ram_info()
    assert info["filled"] <= info["budget"]
    assert stats["n_ram_accesses"] == stats["n_ram_hits"] + stats["n_ram_demand"] > 0
    return stats


KINDS = {"kernels": {}, "llama.cpp's kernels": {"exact": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True], ids=["GGUF", "package"])
@pytest.mark.parametrize(
    "variant",
    [
        ("qwen3moe", "Q4_K", {"down_type": "Q6_K"}), ("gpt-oss", "MXFP4", {}), ("deepseek2", "Q8_0", {}), ("qwen3moe", "Q8_0", {"expert_scale": True}),
        ("qwen3moe", "F32", {"n_ff_exp": 512}), ("deepseek2", "F32", {"n_ff_exp": 512, "fused_gate_up": True}),  # so big that they come in two parts
    ],
    ids=lambda v: "-".join(map(str, (v[0], v[1], *v[2]))),
)
def test_the_same_bits_as_mapped(variant, packed, kind, models, packages, expected):
    family, type_, further = variant
    gguf = models(family, type_, **further)
    wanted = expected(gguf, **KINDS[kind])
    llm = open_model(packages(gguf) if packed else gguf, ram=least_ram(gguf), **KINDS[kind])
    stats = check(llm, wanted)
    assert stats["n_ram_evicted"] > 0 and stats["n_ram_hits"] > 0
    llm.close()


@pytest.mark.parametrize("policy", ["lru", "lfu", "placement:every=4", "least-stale"])
def test_any_policy_and_the_same_bits(policy, models, expected):
    gguf = models("qwen3moe", "Q4_K")
    llm = open_model(gguf, ram=least_ram(gguf), ram_policy=policy)
    check(llm, expected(gguf))
    llm.close()


def test_no_policy_that_knows_the_future(models):
    gguf = models("qwen3moe", "Q4_K")
    with pytest.raises(EdgemoeError, match="policy belady knows the future"):
        open_model(gguf, ram=least_ram(gguf), ram_policy="belady")


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "deepseek2", "ernie4_5-moe"])
def test_reading_ahead_changes_counts_and_no_bits(family, models, packages, expected):
    gguf = models(family, "Q8_0", n_layer=4)
    for path in (gguf, packages(gguf)):
        llm = open_model(path, ram=least_ram(gguf), read_ahead="on")
        stats = check(llm, expected(gguf))
        assert stats["n_ram_proactive"] > 0
        llm.close()


def test_read_ahead_is_a_word(models):
    with pytest.raises(EdgemoeError, match="read ahead: maybe, wanted off, on or auto"):
        open_model(models("qwen3moe", "Q4_K"), ram=1 << 30, read_ahead="maybe")


def test_small_pieces_and_short_reads(models, packages, expected):
    gguf = models("qwen3moe", "F32", n_ff_exp=512)
    for path in (gguf, packages(gguf)):
        llm = open_model(path, ram=least_ram(gguf), ram_options={"most_read": 4096})
        check(llm, expected(gguf))
        llm.close()


def test_a_prompt_passes_through_and_leaves_the_working_set(models):
    """512 tokens use every expert; what decoding had in RAM before, it has there afterwards."""
    gguf = models("qwen3moe", "Q4_K")
    llm = open_model(gguf, n_ctx=1024, n_batch=512, ram=least_ram(gguf), ram_policy="lru")
    for token in range(60):
        llm.eval([token % 7])
    before = [layer["residents"] for layer in llm.ram_stats_by_layer()]
    llm.eval([int(t) for t in np.random.default_rng(1).integers(0, llm.n_vocab(), 512)])
    after = [layer["residents"] for layer in llm.ram_stats_by_layer()]
    assert before == after and any(before)
    prompt = [layer["prompt"] for layer in llm.ram_stats_by_layer()]
    assert all(c["n_accesses"] == c["n_hits"] + c["n_demand"] for c in prompt)
    assert sum(c["n_demand"] for c in prompt[:-1]) > 0   # the last layer computes the last token only
    llm.close()


def test_an_empty_pool_keeps_what_a_prompt_reads(models):
    gguf = models("qwen3moe", "Q4_K")
    llm = open_model(gguf, ram=1 << 30)
    llm.eval(PROMPT)
    read = llm.ram_info()["n_reads"]
    assert llm.ram_info()["n_filled"] == read > 0
    llm.eval(PROMPT)
    assert llm.ram_info()["n_reads"] <= sum(layer.n_expert for layer in llm.source.layers)   # nothing twice
    llm.close()


def test_the_engine_counts_what_a_simulation_counts(small_demo, tmp_path):
    ram = 60_000_000
    for policy in ("lru", "lrfu:lambda=0.1", "lfu"):
        llm = em.Llama(str(small_demo), n_ctx=256, verbose=False, ram=ram, ram_policy=policy, read_ahead="off")   # a guess depends on time
        with em.Recorder(llm, tmp_path / "t.npz", full_probs=True) as recorder:
            for prompt in ("The three primary colours are red, yellow and", "Water boils at a hundred degrees because", "1, 2, 3, 4,"):
                with recorder.sequence():
                    llm.eval(llm.tokenize(prompt.encode()))
                    for _ in range(24):
                        llm.eval([int(np.argmax(llm._scores[-1]))])
        layers, budget = llm.ram_stats_by_layer(), llm.ram_info()["budget"]
        llm.close()
        trace = em.Trace.load(tmp_path / "t.npz")
        cache = Replay([trace.n_expert] * trace.n_layers, policy=policy, costs=[layer["slot_bytes"] for layer in layers], budget=budget)
        for s in range(trace.n_sequences):
            cache.sequence(rows_of(trace, s))
        for p, phase in enumerate(("decode", "prompt")):
            for i, name in enumerate(FIELDS):
                assert [layer[phase][name] for layer in layers] == cache.counts()[p, :, i].tolist(), (policy, phase, name)
        decode = dict(zip(FIELDS, cache.counts()[DECODE].sum(0)))
        assert decode["n_evicted"] > 0 and decode["n_hits"] > decode["n_demand"] > 0


class Budget:
    """LRU of experts that cost different amounts, as plainly as it can be said."""

    def __init__(self, costs, budget):
        self.costs, self.budget, self.last_use, self.residents, self.now = costs, budget, {}, [], 0

    def spent(self):
        return sum(self.costs[layer] for layer, _ in self.residents)

    def event(self, layer, experts):
        """Returns hits and misses."""
        self.now += 1
        keys = [(layer, e) for e in experts]
        hits = [k for k in keys if k in self.residents]
        for k in keys:
            self.last_use[k] = self.now
        for k in keys:
            if k in self.residents:
                continue
            while self.spent() + self.costs[layer] > self.budget:
                others = [r for r in self.residents if r not in keys]
                if not others:
                    break
                self.residents.remove(min(others, key=lambda r: (self.last_use[r], r)))
            else:
                self.residents.append(k)
        return len(hits), len(keys) - len(hits)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_budget_of_bytes(data):
    """Layers with big and small experts: never more than the budget, and the hits and residents of an LRU that counts bytes."""
    n_layers, n_expert = data.draw(st.integers(1, 3)), 6
    costs = [data.draw(st.integers(1, 4)) for _ in range(n_layers)]
    budget = data.draw(st.integers(max(costs), sum(costs) * n_expert))
    cache, plain = Replay([n_expert] * n_layers, policy="lru", costs=costs, budget=budget), Budget(costs, budget)
    hits = misses = 0
    for _ in range(data.draw(st.integers(1, 12))):
        ids = np.array([[sorted(data.draw(st.permutations(range(n_expert)))[:2]) for _ in range(n_layers)]], np.uint16)
        cache.sequence({"ids": ids, "step": np.zeros(1, np.int32)})
        for layer in range(n_layers):
            more_hits, more_misses = plain.event(layer, ids[0, layer].tolist())
            hits, misses = hits + more_hits, misses + more_misses
    counts = dict(zip(FIELDS, cache.counts()[DECODE].sum(0)))
    residents = sorted((layer, e) for layer in range(n_layers) for e in cache.residents(layer))
    assert sum(costs[layer] for layer, _ in residents) <= budget
    assert (counts["n_hits"], counts["n_demand"]) == (hits, misses) and residents == sorted(plain.residents)


# --- with slots on a device, too ---


@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_beneath_slots_on_a_device(misses, models, expected):
    """A device miss is served from RAM, a RAM miss from the disk, in one event. The device is the CPU, so the bits must be the same."""
    gguf = models("qwen3moe", "Q4_K")
    llm = open_model(gguf, exact=True, ram=least_ram(gguf), device="CPU", slots=4, misses=misses)
    for _ in range(2):
        np.testing.assert_array_equal(logits(llm), expected(gguf, exact=True))
    stats, ram = llm.expert_stats(), [layer[phase] for layer in llm.ram_stats_by_layer() for phase in ("decode", "prompt")]
    assert stats["n_decode_hits"] > 0
    if misses == "cpu":
        assert sum(c["n_hits"] for c in ram) > 0 and sum(c["n_demand"] for c in ram) > 0
    else:
        assert llm.ram_info()["n_reads"] > sum(c["n_demand"] for c in ram)   # some went to the device without a slot in RAM
    llm.close()


@pytest.mark.parametrize("slots, misses", [(4, "cpu"), (6, "load")])
def test_beneath_slots_on_a_device_with_kernels(slots, misses, small_demo):
    """What is on the device is the same whether experts are mapped or in RAM and on the disk, when each load is done at once; then so are the bits."""
    def run(ram):
        llm = open_model(small_demo, ram=ram, device="CPU", slots=slots, misses=misses, cache_options={"inline_loads": True})
        tokens = llm.tokenize(b"The sky is blue because the light of the sun is scattered by the air, and")
        llm.eval(tokens[:8])
        for token in tokens[8:]:
            llm.eval([token])
        assert ram == "mapped" or llm.ram_info()["n_reads"] > 0
        found = llm.scores[: llm.n_tokens].copy()
        llm.close()
        return found

    np.testing.assert_array_equal(run(40_000_000), run("mapped"))


# --- faults ---


@pytest.mark.parametrize("packed", [False, True], ids=["GGUF", "package"])
def test_a_read_that_fails_ends_its_request_only(packed, models, packages, expected):
    gguf = models("qwen3moe", "Q4_K")
    llm = open_model(packages(gguf) if packed else gguf, ram=least_ram(gguf), ram_options={"fail_every": 211})
    n_failed = 0
    for _ in range(12):
        try:
            np.testing.assert_array_equal(logits(llm), expected(gguf))
        except ModelFault as e:
            n_failed += 1
            assert "cannot be read" in str(e) and "\n" not in str(e)
    assert 0 < n_failed < 12 and llm.expert_stats()["n_ram_failed"] >= n_failed
    llm.close()


def test_package_blob_replaced_while_running(models, packages, tmp_path):
    """Another file under the name is noticed, by the request that needs it; put back, the model goes on."""
    package = Path(shutil.copytree(packages(models("qwen3moe", "Q4_K")), tmp_path / "p.edgemoe"))
    llm = open_model(package, ram=least_ram(package))
    before = logits(llm)
    blobs = sorted((package / "experts/L0001").iterdir())
    for blob in blobs:
        shutil.copy(blob, blob.with_suffix(".new"))
        os.rename(blob, blob.with_suffix(".old"))
        os.rename(blob.with_suffix(".new"), blob)
    with pytest.raises(ModelFault, match=r"E\d+.gguf: was changed or replaced while the model was running"):
        logits(llm)
    for blob in blobs:
        os.rename(blob.with_suffix(".old"), blob)
    np.testing.assert_array_equal(logits(llm), before)
    os.rename(package / "experts/L0000", package / "experts/gone")
    with pytest.raises(ModelFault, match="L0000/E\\d+.gguf: cannot be opened: No such file"):
        logits(llm)
    llm.close()


def test_gguf_cut_while_running(models, tmp_path):
    gguf = shutil.copy(models("qwen3moe", "F32", n_ff_exp=512), tmp_path / "m.gguf")
    llm = open_model(gguf, ram=least_ram(gguf))
    os.truncate(gguf, os.path.getsize(gguf) * 2 // 3)
    with pytest.raises(ModelFault, match="m.gguf: was changed or replaced while|was cut while"):
        logits(llm)
    llm.close()


def test_budgets_that_do_not_do(models, edgemoe):
    gguf = models("qwen3moe", "Q4_K")
    with em.package.Source(gguf) as source:
        token = plan_ram(source, None, n_ctx=256).token_bytes
    for ram in (0, token - 1):
        with pytest.raises(EdgemoeError, match="the experts of one token take .*wanted at least that"):
            open_model(gguf, ram=ram)
    result = edgemoe("run", gguf, "-p", "x", "--ram", "1k")
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "--ram 1.0 KiB: the experts of one token take" in result.stderr


LIMITED = """
import resource, sys
import numpy as np
import edgemoe
what, value = getattr(resource, sys.argv[1]), int(sys.argv[2])
resource.setrlimit(what, (value, value))
llm = edgemoe.Llama(sys.argv[3], n_ctx=256, n_threads=2, verbose=False, ram=int(sys.argv[4]))
llm.eval(list(range(3, 43)))
for token in range(20):
    llm.eval([token])
print("reads", llm.ram_info()["n_reads"])
"""


@pytest.mark.parametrize("limit, value", [("RLIMIT_NOFILE", 64), ("RLIMIT_MEMLOCK", 65536)])
def test_small_limits(limit, value, models, packages, python):
    gguf = models("qwen3moe", "Q4_K")
    result = python(LIMITED, limit, value, packages(gguf), least_ram(gguf))
    assert result.returncode == 0 and int(result.stdout.split()[1]) > 50, result.stderr


def test_memory_as_a_file_system(models, packages, expected):
    """Whether or not tmpfs has direct reads (kernels differ), the bits are the same."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    gguf = models("qwen3moe", "Q4_K")
    folder = Path(f"/dev/shm/edgemoe-test-{os.getpid()}")
    try:
        package = shutil.copytree(packages(gguf), folder / "p.edgemoe")
        llm = open_model(package, ram=least_ram(gguf))
        check(llm, expected(gguf))
        assert isinstance(llm.ram_info()["direct"], bool)
        llm.close()
    finally:
        shutil.rmtree(folder)


WITHOUT_DIRECT_READS = """
mount -t ramfs none "$1" && cp -r "$2" "$1/p.edgemoe" && exec "$3" -c '
import sys
import edgemoe
llm = edgemoe.Llama(sys.argv[1], n_ctx=256, n_threads=2, verbose=False, logits_all=True, exact=True, ram=int(sys.argv[2]))
llm.eval(list(range(3, 43)))
for token in range(20):
    llm.eval([token])
print(llm.ram_info()["direct"], llm.ram_info()["n_reads"], llm.scores[59].sum())
' "$1/p.edgemoe" "$4"
"""


def test_a_file_system_without_direct_reads(models, packages, tmp_path):
    """ramfs has none: the reads go through the page cache, and the logits are the same."""
    gguf, folder = models("qwen3moe", "Q4_K"), tmp_path / "ramfs"
    folder.mkdir()
    command = ["unshare", "-m", "sh", "-c", WITHOUT_DIRECT_READS, "sh", folder, packages(gguf), sys.executable, str(least_ram(gguf))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    if "permitted" in result.stderr or "denied" in result.stderr or "unshare" in result.stderr:
        pytest.skip("this user may not mount a file system")
    assert result.returncode == 0, result.stderr
    direct, n_reads, total = result.stdout.split()
    llm = open_model(gguf, exact=True)
    llm.eval(list(range(3, 43)))
    for token in range(20):
        llm.eval([token])
    assert direct == "False" and int(n_reads) > 50 and float(total) == llm.scores[59].sum() != 0
    llm.close()


ENDLESS = """
import sys
import edgemoe
llm = edgemoe.Llama(sys.argv[1], n_ctx=256, n_threads=2, verbose=False, ram=int(sys.argv[2]))
print("begun", flush=True)
while True:
    llm.reset()
    llm.eval(list(range(3, 203)))
"""


def test_two_processes_and_one_is_killed_while_it_reads(models, packages, expected, tmp_path):
    gguf = models("qwen3moe", "Q4_K")
    package = packages(gguf)
    with subprocess.Popen([sys.executable, "-c", ENDLESS, package, str(least_ram(gguf))], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as other:
        assert other.stdout.readline() == "begun\n"
        llm = open_model(package, ram=least_ram(gguf))
        np.testing.assert_array_equal(logits(llm), expected(gguf))
        other.kill()
    check(llm, expected(gguf))
    llm.close()


def test_two_models_and_two_threads(models, packages, expected):
    """Two on one package, each with its slots, at the same time; closed while the other goes on."""
    gguf = models("qwen3moe", "Q4_K")
    package, wanted, found = packages(gguf), expected(gguf), {}
    both = [open_model(package, ram=least_ram(gguf)) for _ in range(2)]
    threads = [threading.Thread(target=lambda i=i: found.update({i: [logits(both[i]) for _ in range(3)]})) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(2):
        for each in found[i]:
            np.testing.assert_array_equal(each, wanted)
    both[0].close()
    np.testing.assert_array_equal(logits(both[1]), wanted)
    both[1].close()


def test_two_contexts_of_one_model(models, expected):
    """They share slots and staging slots, and may want more at a time than there are."""
    gguf = models("qwen3moe", "Q4_K")
    llm = open_model(gguf, ram=least_ram(gguf))
    other = em.engine.internals.LlamaContext(model=llm._model, params=llm.context_params, verbose=False)
    errors = []

    def work():
        batch = em.engine.internals.LlamaBatch(n_tokens=64, embd=0, n_seq_max=1, verbose=False)
        try:
            for _ in range(60):
                other.kv_cache_clear()
                batch.set_batch(PROMPT, 0, False)
                other.decode(batch)
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(6):
        np.testing.assert_array_equal(logits(llm), expected(gguf))
    thread.join()
    assert not errors
    other.close()
    llm.close()


CGROUP = Path("/sys/fs/cgroup/memory")
BOUND = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import edgemoe
llm = edgemoe.Llama(sys.argv[2], n_ctx=256, n_threads=2, verbose=False, ram=int(sys.argv[3]))
most = 0
for step in range(120):
    llm.eval([(step * 7919) % 4000])
    if step % 10 == 0:
        fields = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
        most = max(most, sum(int(v.split()[0]) << 10 for v in fields.values()))
        if llm.n_tokens > 200:
            llm.reset()
plan = llm.ram_plan
print(most, plan.budget_bytes + plan.dense_bytes + plan.kv_bytes, llm.expert_stats()["n_ram_evicted"])
"""


def test_memory_stays_within_the_budget(small_demo, python, tmp_path):
    """Anonymous and mapped memory under a cgroup limit: budget, dense weights, KV cache and 300 MB at most."""
    group = CGROUP / f"edgemoe-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(500 << 20))
    except OSError:
        pytest.skip("no memory cgroup that this user may write")
    try:
        result = python(BOUND, group, small_demo, 30_000_000)
    finally:
        group.rmdir()
    assert result.returncode == 0, result.stderr
    most, planned, n_evicted = map(int, result.stdout.split())
    assert most <= planned + (300 << 20) and n_evicted > 0


def test_address_space_is_not_memory(models):
    """A pool costs what is in it, not what it may hold."""
    gguf = models("qwen3moe", "Q4_K")
    llm = open_model(gguf, ram=1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    llm.eval([1])
    assert llm.ram_info()["filled"] < 8 * 3 * max(slot_bytes(layer) for layer in llm.source.layers)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    llm.close()
