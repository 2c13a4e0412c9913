"""Expert slots on a Vulkan device. Its arithmetic is not the CPU's, so logits are compared within a bound: 0.1 standard deviations rms, or, where llama.cpp's own logits
on this device differ from those on the CPU by more than a third of that (small random models route by a hair), three times what these do. Where there is no GPU, a build with Vulkan
(scripts/setup.sh --vulkan) and GGML_VK_VISIBLE_DEVICES=0 run these tests on Mesa's llvmpipe; else they are skipped."""

import numpy as np
import pytest
from tiny_models import FAMILIES

import edgemoe
from edgemoe import engine
from edgemoe.devices import devices

BOUND = 0.1  # rms, standard deviations of the logits: that of edgemoe verify
OPTIONS = dict(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=2, logits_all=True, verbose=False)
BATCHES = [40, *[1] * 12, 5, 1, 8, 2, 1, 33, *[1] * 8]


@pytest.fixture(scope="module")
def device():
    found = [d.name for d in devices() if d.name.startswith("Vulkan")]
    if not found:
        pytest.skip("no Vulkan device in this build of llama-cpp-python")
    return found[0]


def logits(llm):
    rng = np.random.default_rng(7)
    for n in BATCHES:
        llm.eval(rng.integers(0, llm.n_vocab(), n).tolist())
    return llm.scores[: llm.n_tokens].copy()


def plain_logits(gguf, **options):
    llm = engine.open_plain([str(gguf)], **(OPTIONS | options))
    found = logits(llm)
    llm.close()
    return found


def with_slots(gguf, device, n_slots, **options):
    llm = edgemoe.Llama(gguf, slots=n_slots, device=device, **(OPTIONS | options))
    found, stats = logits(llm), llm.expert_stats()
    llm.close()
    assert stats["n_refused"] == 0 and stats["n_on_device"] > 0
    assert stats["n_decode_accesses"] == stats["n_decode_hits"] + stats["n_decode_demand"] + stats["n_decode_computed"]
    return found


def rms(found, expected):
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, device, models):
    gguf = models(family, "Q8_0")
    expected = plain_logits(gguf)
    bound = max(BOUND, 3 * rms(plain_logits(gguf, n_gpu_layers=-1), expected))
    for misses in ("cpu", "load"):
        assert rms(with_slots(gguf, device, 5, misses=misses), expected) < bound


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "llama4"])
def test_all_experts_and_dense_layers_on_the_device_are_llama_cpp_on_the_device(family, device, models):
    gguf = models(family, "Q8_0")
    own = plain_logits(gguf, n_gpu_layers=-1)
    llm = edgemoe.Llama(gguf, slots=16, device=device, misses="load", n_gpu_layers=-1, **OPTIONS)
    logits(llm)  # fills the slots
    llm.wait_cache()
    before = llm.expert_stats()
    llm.reset()
    found, after = logits(llm), llm.expert_stats()
    llm.close()
    assert after["n_computed_on_cpu"] == before["n_computed_on_cpu"]
    assert rms(found, own) < 5e-3  # pairs of a prompt are sorted in another way


@pytest.mark.parametrize("expert_type", ["Q4_0", "Q4_K", "Q6_K", "MXFP4", "F16", "BF16", "IQ4_XS"])
def test_types(expert_type, device, models):
    gguf = models("gpt-oss" if expert_type == "MXFP4" else "qwen3moe", expert_type)
    assert rms(with_slots(gguf, device, 5, misses="load"), plain_logits(gguf)) < BOUND


@pytest.mark.parametrize("n_slots", [1, 3, 4, 9, 16])
def test_slot_counts(n_slots, device, models):
    gguf = models("qwen3moe", "Q8_0")
    assert rms(with_slots(gguf, device, n_slots, misses="load", exact=True), plain_logits(gguf)) < BOUND


@pytest.mark.parametrize("variant", [{"n_ff_exp": 96}, {"n_ff_exp": 160}, {"n_embd": 320}], ids=str)
def test_rows_that_kernels_read_past(variant, device, models):
    # Not yet filled slots hold NaN: what a kernel reads beside an expert must not reach its result.
    gguf = models("qwen3moe", "Q8_0", **variant)
    found = with_slots(gguf, device, 5, misses="load", cache_options={"poison": True})
    assert np.isfinite(found).all() and rms(found, plain_logits(gguf)) < BOUND


def test_dense_layers_on_the_device_as_well(device, models):
    gguf = models("qwen3moe", "Q8_0")
    found = with_slots(gguf, device, 6, misses="auto", n_gpu_layers=-1)
    assert rms(found, plain_logits(gguf)) < BOUND


def test_slots_in_several_tensors(device, models):
    gguf = models("qwen3moe", "Q8_0")
    size = max(p.bytes for p in edgemoe.Source(gguf).layers[0].projections)
    assert rms(with_slots(gguf, device, 9, misses="load", cache_options={"most_block_bytes": 2 * size}), plain_logits(gguf)) < BOUND


@pytest.mark.parametrize("n_slots, misses, n_batch", [(4, "cpu", 1), (8, "load", 4), (16, "auto", 1)])
def test_greedy_text_of_the_demo_model(n_slots, misses, n_batch, device, small_demo):
    """Along plain llama.cpp's own 200 tokens, fed in batches of n_batch: the same choice wherever the first leads by 0.3 standard deviations (rounding decides nearer ones)."""
    options = dict(n_ctx=256, n_threads=2, verbose=False, logits_all=True)
    plain = engine.open_plain([str(small_demo)], **options)
    tokens = plain.tokenize(b"The lighthouse keeper counted the ships that passed in the night.")
    plain.eval(tokens)
    for _ in range(200):
        plain.eval([int(plain.scores[plain.n_tokens - 1].argmax())])
    text = plain.input_ids[: plain.n_tokens].tolist()
    expected = plain.scores[len(tokens) - 1 : plain.n_tokens - 1].copy()
    plain.close()
    llm = edgemoe.Llama(small_demo, slots=n_slots, device=device, misses=misses, **options)
    llm.eval(tokens)
    for i in range(len(tokens), len(text), n_batch):
        llm.eval(text[i : i + n_batch])
    found = llm.scores[len(tokens) - 1 : llm.n_tokens - 1].copy()
    assert llm.expert_stats()["n_on_device"] > 0
    llm.close()
    top = np.sort(expected, axis=1)
    clear = (top[:, -1] - top[:, -2]) / expected.std() >= 0.3
    assert (found.argmax(1) == expected.argmax(1))[clear].all() and clear.sum() > 100
    assert rms(found, expected) < BOUND
