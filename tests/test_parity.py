"""Same output: with exact=True the logits of every family and expert type are bit-identical to plain llama.cpp's, from the GGUF and from a package, with all experts mapped
and with a few of them in RAM and the others on the disk.

Random weights make this strict: one wrong byte, expert or stride changes every logit, while text would look as random as before.
"""

from itertools import product

import numpy as np
import pytest
from conftest import SHARED
from tiny_models import EXPERT_TYPES, FAMILIES, write_shards

import edgemoe
from edgemoe import engine
from edgemoe.package import Source
from edgemoe.ram_plan import slot_bytes

N_PROMPT, N_DECODE = 40, 64
N_FROM_DISK = 12  # decoded tokens


def logits(llm, forced=None, n_decode=N_DECODE):
    """[N_PROMPT + n_decode, n_vocab] for a random prompt in two batches and greedy (or forced) single steps, and the tokens fed."""
    tokens = np.random.default_rng(1).integers(0, llm.n_vocab(), N_PROMPT).tolist()
    llm.eval(tokens)
    fed = []
    for i in range(n_decode):
        fed.append(forced[i] if forced else int(llm.scores[llm.n_tokens - 1].argmax()))
        llm.eval([fed[-1]])
    return llm.scores[: llm.n_tokens].copy(), fed


def least_ram(path):
    """Bytes for the experts of one token and for those on their way through, in whole pages."""
    with Source(path) as source:
        n_used = source.integer("expert_used_count", 1)
        n_slots = 2 + sum(min(n_used, layer.n_expert) for layer in source.layers)
        return n_slots * max(slot_bytes(layer) for layer in source.layers)


def check(gguf, paths):
    options = dict(n_ctx=N_PROMPT + N_DECODE, n_batch=32, n_ubatch=32, n_threads=2, logits_all=True, verbose=False)
    llm = engine.open_plain([str(gguf)], **options)
    expected, tokens = logits(llm)
    llm.close()
    assert np.isfinite(expected).all() and expected.std() > 0
    for path, ram in product(paths, ("mapped", least_ram(paths[0]))):
        n_decode = N_DECODE if ram == "mapped" else N_FROM_DISK
        with_experts = edgemoe.Llama(path, exact=True, ram=ram, **options)
        found, _ = logits(with_experts, tokens, n_decode)
        stats, info = with_experts.expert_stats(), with_experts.ram_info()
        with_experts.close()
        np.testing.assert_array_equal(found, expected[: len(found)], err_msg=f"{path}, {ram}")
        # Not vacuous: our device did the work. One event per layer and batch (40 tokens are two batches).
        n_layers = len(with_experts.source.layers)
        assert n_layers > 0 and stats["n_events"] == n_layers * (2 + n_decode)
        if info:
            n_experts = sum(layer.n_expert for layer in with_experts.source.layers)
            assert info["filled"] <= info["budget"] <= ram and stats["n_ram_accesses"] > 0
            assert stats["n_ram_evicted"] > 0 or info["n_filled"] == n_experts


@pytest.mark.parametrize("expert_type", EXPERT_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_types(family, expert_type, models, packages):
    gguf = models(family, expert_type)
    check(gguf, [gguf, packages(gguf)])


VARIANTS = {
    "top-1": ("qwen3moe", "Q8_0", {"n_expert_used": 1}),
    "all experts used": ("qwen3moe", "Q8_0", {"n_expert": 4, "n_expert_used": 4}),
    "tied embeddings": ("qwen3moe", "Q8_0", {"tied": True}),
    "width 96": ("qwen3moe", "F16", {"n_ff_exp": 96}),
    "page-sized experts": ("qwen3moe", "Q4_0", {"n_ff_exp": 2048}),
    "scales per expert": ("qwen3moe", "Q8_0", {"expert_scale": True}),
    "no tokenizer": ("qwen3moe", "Q8_0", {"tokenizer": "none"}),
    "first layer dense": ("ernie4_5-moe", "Q8_0", {"n_layer": 3, "n_layer_dense_lead": 1}),
    "sigmoid, groups, bias, scale 2.5": ("deepseek2", "Q4_K", {}),
    "mixed types": ("qwen3moe", "Q4_K", {"down_type": "Q6_K"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, models, packages):
    family, expert_type, variant = VARIANTS[name]
    gguf = models(family, expert_type, **variant)
    check(gguf, [gguf, packages(gguf)])


def test_shards_given_any_of_them(models, packages, tmp_path):
    gguf = models("qwen3moe", "Q8_0")
    shards = write_shards(gguf, tmp_path, 3)
    check(gguf, [shards[0], shards[1], packages(shards[2])])


def test_first_shard_without_tensors(models, tmp_path):
    gguf = models("qwen3moe", "Q8_0")
    check(gguf, [write_shards(gguf, tmp_path, 3, first_without_tensors=True)[0]])


TINY_ARCHS = sorted((SHARED / "tiny_archs").glob("*.gguf"))


@pytest.mark.skipif(not TINY_ARCHS, reason="the folder with tiny models of other architectures is not beside this checkout")
@pytest.mark.parametrize("gguf", TINY_ARCHS, ids=lambda p: p.stem)
def test_other_architectures(gguf, packages):
    check(gguf, [gguf, packages(gguf)])
