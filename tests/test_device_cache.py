"""Expert slots on a device, against plain llama.cpp. ggml's CPU device stands in for a GPU: its arithmetic is llama.cpp's, so with exact=True every logit must be
bit-identical, wherever an expert was computed. test_vulkan_cache.py does the same with a bound on a Vulkan device, where one is at hand."""

import itertools
import threading

import numpy as np
import pytest
from conftest import SHARED
from llama_cpp import llama_cpp as C
from tiny_models import FAMILIES

import edgemoe
from edgemoe import engine
from edgemoe.errors import EdgemoeError, ModelError

N_EXPERT, N_USED = 16, 4  # of the tiny models
OPTIONS = dict(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=2, logits_all=True, verbose=False)
# Prompts and decoding in turn, in batches of several sizes: one token, drafts, a prompt.
BATCHES = [40, *[1] * 12, 5, 1, 8, 2, 1, 33, *[1] * 8]


def fed(n_vocab):
    rng = np.random.default_rng(7)
    return [rng.integers(0, n_vocab, n).tolist() for n in BATCHES]


def logits(llm, settle=False):
    for tokens in fed(llm.n_vocab()):
        llm.eval(tokens)
        if settle:
            llm.wait_cache()
    return llm.scores[: llm.n_tokens].copy()


@pytest.fixture(scope="module")
def expected(models):
    """expected(gguf): plain llama.cpp's logits, computed once."""
    known = {}

    def get(gguf):
        if gguf not in known:
            llm = engine.open_plain([str(gguf)], **OPTIONS)
            known[gguf] = logits(llm)
            llm.close()
        return known[gguf]

    return get


def run(path, n_slots, settle=False, **options):
    llm = edgemoe.Llama(path, slots=n_slots, device="CPU", **(dict(exact=True) | OPTIONS | options))
    found = logits(llm, settle)
    stats, layers = llm.expert_stats(), llm.expert_stats_by_layer()
    llm.close()
    return found, stats, layers


def check_counts(stats, layers, n_slots):
    """A = hits + D + C everywhere, and what came in minus what went is what is there."""
    for each, phase in itertools.product(layers, ("decode", "prompt")):
        c = each[phase]
        assert c["n_accesses"] == c["n_hits"] + c["n_demand"] + c["n_computed"]
    for each in layers:
        came = sum(each[p]["n_demand"] + each[p]["n_proactive"] - each[p]["n_evicted"] for p in ("decode", "prompt"))
        assert len(each["residents"]) <= min(n_slots, N_EXPERT) and came >= len(each["residents"])
    assert stats["n_on_device"] + stats["n_computed_on_cpu"] == stats["n_accesses"]
    assert stats["n_refused"] == 0


@pytest.mark.parametrize("misses, policy", [("cpu", "placement:every=4"), ("cpu", "lru"), ("load", "lru"), ("load", "placement:every=4"), ("auto", None)])
@pytest.mark.parametrize("n_slots", [1, N_USED - 1, N_USED, 9, N_EXPERT, N_EXPERT + 1])
def test_every_slot_count_and_mode_is_bit_identical(n_slots, misses, policy, models, expected):
    gguf = models("qwen3moe", "Q8_0")
    found, stats, layers = run(gguf, n_slots, misses=misses, policy=policy)
    np.testing.assert_array_equal(found, expected(gguf))
    check_counts(stats, layers, n_slots)
    # Not vacuous: experts came, and were used where they came to.
    assert stats["bytes_loaded"] > 0 and stats["n_on_device"] > 0
    if misses == "load" and N_USED <= n_slots < N_EXPERT:
        assert stats["n_decode_demand"] > 0
    if n_slots >= N_EXPERT:
        assert stats["n_evicted"] == 0


MODELS = [
    *[(family, "Q8_0", {}) for family in FAMILIES],
    ("gpt-oss", "MXFP4", {}),
    ("deepseek2", "Q4_K", {"down_type": "Q6_K"}),
    ("qwen3moe", "Q8_0", {"n_expert_used": 1}),
    ("qwen3moe", "F16", {"n_ff_exp": 96}),  # rows that are no multiple of 256 or 512
]


@pytest.mark.parametrize("family, expert_type, variant", MODELS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "default")
@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_families(family, expert_type, variant, misses, models, packages, expected):
    gguf = models(family, expert_type, **variant)
    for path in (gguf, packages(gguf)):
        found, stats, _ = run(path, 5, misses=misses)
        np.testing.assert_array_equal(found, expected(gguf), err_msg=str(path))
        assert stats["n_on_device"] > 0


@pytest.mark.parametrize("gguf", sorted((SHARED / "tiny_archs").glob("*.gguf")), ids=lambda p: p.stem)
def test_other_architectures(gguf, expected):
    found, stats, _ = run(gguf, 3, misses="load")
    np.testing.assert_array_equal(found, expected(gguf))
    # Where llama.cpp applies a scale per expert, a layer's graph comes in pieces, not as a block: the slots stay unused.
    assert (stats["n_on_device"] > 0) == (gguf.stem not in ("llama-moe", "qwen3moe-moe"))


def test_scales_per_expert_are_computed_on_the_cpu(models, expected):
    gguf = models("qwen3moe", "Q8_0", expert_scale=True)
    found, stats, _ = run(gguf, 8)
    np.testing.assert_array_equal(found, expected(gguf))
    assert stats["n_on_device"] == 0


def test_slots_in_several_tensors(models, expected):
    gguf = models("qwen3moe", "Q8_0")
    bytes_of_projection = max(p.bytes for p in edgemoe.Source(gguf).layers[0].projections)
    found, stats, layers = run(gguf, 9, misses="load", cache_options={"most_block_bytes": 2 * bytes_of_projection})
    np.testing.assert_array_equal(found, expected(gguf))
    check_counts(stats, layers, 9)
    assert stats["n_decode_hits"] > 0


@pytest.mark.parametrize("fail_every", [1, 2, 3])
@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_failed_uploads_are_computed_on_the_cpu_and_counted(fail_every, misses, models, expected):
    gguf = models("qwen3moe", "Q8_0")
    found, stats, layers = run(gguf, 8, misses=misses, policy="lru", cache_options={"fail_every": fail_every})
    np.testing.assert_array_equal(found, expected(gguf))
    assert stats["n_failed"] > 0
    if fail_every == 1:
        assert stats["n_on_device"] == 0 and stats["n_decode_hits"] == 0


def test_nothing_is_read_beside_the_experts_that_are_there(models, expected):
    gguf = models("qwen3moe", "F16", n_ff_exp=96)
    found, _, _ = run(gguf, 8, misses="load", cache_options={"poison": True})
    np.testing.assert_array_equal(found, expected(gguf))


def test_our_kernels_beside_a_device_stay_within_the_bound(models):
    gguf = models("qwen3moe", "Q4_0")
    plain = engine.open_plain([str(gguf)], **OPTIONS)
    expected = logits(plain)
    plain.close()
    found, stats, _ = run(gguf, 8, misses="cpu", exact=False)
    assert stats["n_on_device"] > 0 and stats["n_computed_on_cpu"] > 0
    rms = np.sqrt(np.mean((found - expected) ** 2)) / expected.std()
    assert 0 < rms < 0.1


def test_strict_admission_and_insertion_cap(models, expected):
    gguf = models("qwen3moe", "Q8_0")
    _, free, _ = run(gguf, 6, settle=True, misses="cpu", policy="lru")
    for further in ({"strict": True}, {"most_inserts": 1}):
        found, stats, layers = run(gguf, 6, settle=True, misses="cpu", policy="lru", cache_options=further)
        np.testing.assert_array_equal(found, expected(gguf))
        assert 0 < stats["n_proactive"] < free["n_proactive"]


def test_a_prompt_does_not_flush_what_decoding_uses(models):
    gguf = models("qwen3moe", "Q8_0")
    llm = edgemoe.Llama(gguf, slots=6, device="CPU", exact=True, misses="load", **OPTIONS)
    rng = np.random.default_rng(1)
    for token in rng.integers(0, llm.n_vocab(), 50).tolist():
        llm.eval([token])
    before = [each["residents"] for each in llm.expert_stats_by_layer()]
    llm.eval(rng.integers(0, llm.n_vocab(), 64).tolist())
    llm.wait_cache()
    assert [each["residents"] for each in llm.expert_stats_by_layer()] == before
    assert sum(each["prompt"]["n_hits"] for each in llm.expert_stats_by_layer()) > 0
    llm.close()


def test_a_prompt_seeds_an_empty_cache_unless_told_not_to(models):
    gguf = models("qwen3moe", "Q8_0")
    for seed in (True, False):
        llm = edgemoe.Llama(gguf, slots=6, device="CPU", cache_options={"seed": seed}, **OPTIONS)
        llm.eval(np.random.default_rng(1).integers(0, llm.n_vocab(), 64).tolist())
        llm.wait_cache()
        assert all(len(each["residents"]) == (6 if seed else 0) for each in llm.expert_stats_by_layer())
        llm.close()


def test_clear_cache(models, expected):
    gguf = models("qwen3moe", "Q8_0")
    llm = edgemoe.Llama(gguf, slots=6, device="CPU", exact=True, **OPTIONS)
    np.testing.assert_array_equal(logits(llm), expected(gguf))
    llm.clear_cache()
    assert all(each["residents"] == [] for each in llm.expert_stats_by_layer())
    llm.reset()
    np.testing.assert_array_equal(logits(llm), expected(gguf))
    llm.close()


def test_two_models_share_a_device(models, expected):
    a, b = models("qwen3moe", "Q8_0"), models("qwen3moe", "Q4_0")
    first = edgemoe.Llama(a, slots=6, device="CPU", exact=True, misses="load", **OPTIONS)
    second = edgemoe.Llama(b, slots=3, device="CPU", exact=True, misses="load", **OPTIONS)
    for left, right in zip(fed(first.n_vocab()), fed(second.n_vocab())):
        first.eval(left)
        second.eval(right)
    np.testing.assert_array_equal(first.scores[: first.n_tokens], expected(a))
    np.testing.assert_array_equal(second.scores[: second.n_tokens], expected(b))
    first.close()
    second.close()


def test_zero_slots_are_no_cache(models, expected):
    gguf = models("qwen3moe", "Q8_0")
    found, stats, layers = run(gguf, 0)
    np.testing.assert_array_equal(found, expected(gguf))
    assert "n_decode_hits" not in stats and layers == [] and stats["n_on_device"] == 0


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(device="Vulkan9"), "Vulkan9"),
        (dict(policy="magic"), "policy magic, wanted one of lru, lfu, "),
        (dict(policy="belady"), "policy belady knows the future, which only a simulation does"),
        (dict(policy="promoe"), "policy promoe: it has to learn first (spatial)"),
        (dict(policy="no_such.py:f"), "no_such.py: no such file"),
        (dict(policy="lru:x=1"), "parameter x=1, wanted none"),
        (dict(policy="placement:every=no"), "every=no, wanted a number"),
        (dict(misses="never"), "misses: never, wanted cpu, load or auto"),
    ],
)
def test_bad_wishes_are_one_line(options, said, models):
    with pytest.raises(EdgemoeError) as error:
        edgemoe.Llama(models("qwen3moe", "Q8_0"), **(dict(slots=4, device="CPU") | OPTIONS | options))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_device_with_less_room_than_it_says(models, expected):
    gguf = models("qwen3moe", "Q8_0")
    with edgemoe.Source(gguf) as source:
        slot_bytes = sum(layer.bytes_per_expert for layer in source.layers)
    room = {"most_bytes": 7 * slot_bytes, "n_staging": 2}
    with pytest.raises(ModelError, match="CPU has no room for 12 expert slots per layer"):
        run(gguf, 12, cache_options=room)
    # Where the number was ours, not the user's, there are fewer slots and a word about it.
    llm = edgemoe.Llama(gguf, vram=2**31, device="CPU", exact=True, cache_options=room, **OPTIONS)
    assert 0 < llm.cache_plan.n_slots <= 7 and "had no room" in llm.cache_plan.reason
    np.testing.assert_array_equal(logits(llm), expected(gguf))
    llm.close()


CANCEL = """
import os, signal, sys, threading, time
import numpy as np
import edgemoe
llm = edgemoe.Llama(sys.argv[1], slots=5, device="CPU", exact=True, misses="load", n_ctx=8192, n_batch=8192, n_threads=1, verbose=False)
llm.eval([5]); llm.eval([6])
def interrupt():
    time.sleep(0.7)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    llm.eval([7] * 8000)
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
def decode():
    llm.reset()
    out = []
    for token in range(20, 40):
        llm.eval([token])
        out.append(np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy())
    return np.stack(out)
first = decode()
layers = llm.expert_stats_by_layer()
llm.clear_cache()
print(np.array_equal(first, decode()), all(c["decode"]["n_accesses"] == c["decode"]["n_hits"] + c["decode"]["n_demand"] + c["decode"]["n_computed"] for c in layers))
llm.close()
"""


def test_a_prompt_that_is_cancelled_leaves_the_slots_usable(models, python):
    result = python(CANCEL, models("qwen3moe", "F32", n_ff_exp=512, n_layer=4))
    assert result.stdout.split() == ["interrupted", "True", "True"], result.stdout + result.stderr


def test_two_contexts_of_one_model_share_its_slots(models, expected):
    """Two threads decode the same tokens, each in a context of its own; slots are few, so each evicts what the other wants."""
    gguf = models("qwen3moe", "Q8_0")
    llm = edgemoe.Llama(gguf, slots=5, device="CPU", exact=True, misses="load", **OPTIONS)
    second = C.llama_init_from_model(llm._model.model, llm.context_params)
    batches = fed(llm.n_vocab())
    rows = {}

    def decode(name, context):
        found = []
        for tokens in batches:
            array = (C.llama_token * len(tokens))(*tokens)  # a batch only points to it
            assert C.llama_decode(context, C.llama_batch_get_one(array, len(tokens))) == 0
            found.append(np.ctypeslib.as_array(C.llama_get_logits_ith(context, -1), shape=(llm.n_vocab(),)).copy())
        rows[name] = np.stack(found)

    threads = [threading.Thread(target=decode, args=each) for each in (("first", llm.ctx), ("second", second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    C.llama_free(second)
    last_of_each = np.cumsum(BATCHES) - 1
    for name in ("first", "second"):
        np.testing.assert_array_equal(rows[name], expected(gguf)[last_of_each], err_msg=name)
    check_counts(llm.expert_stats(), llm.expert_stats_by_layer(), 5)
    llm.close()
