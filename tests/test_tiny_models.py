"""The generator of tiny models, against plain llama.cpp: what other tests build on must itself be sound."""

import hashlib

import gguf
import numpy as np
import pytest
from llama_cpp import Llama

from tiny_models import (
    EXPERT_TYPES, FAMILIES, expert_bytes, is_moe_layer, random_tokens, tiny_model, vocabulary, write_shards,
)

# One token per way to go wrong: merged words, bytes without a merge, two-byte, three-byte and four-byte characters.
TEXT = "Hello world, the na\u00efve caf\u00e9: \u4f60\u597d \U0001f999! <think>Wait</think>"
N_TOKENS = 24


def load(path, **options):
    return Llama(str(path), n_ctx=128, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, **options)


def logits_of(path, tokens):
    """(tokens, vocabulary) logits of plain llama.cpp."""
    model = load(path)
    model.eval(tokens)
    logits = model.scores[: len(tokens)].copy()
    model.close()
    return logits


def assert_alive(logits):
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 10
    # Each position must differ from the one before: a stuck or skipped layer shows here.
    assert (np.abs(np.diff(logits, axis=0)).max(axis=1) > 0.1).all()


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(len(vocabulary()[0]), N_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_loads_and_computes(tmp_path, family, tokens):
    path = tiny_model(tmp_path / "m.gguf", family)
    assert path.stat().st_size < 8e6
    assert_alive(logits_of(path, tokens))


@pytest.mark.parametrize("expert_type", EXPERT_TYPES)
def test_expert_type_loads_and_computes(tmp_path, expert_type, tokens):
    path = tiny_model(tmp_path / "m.gguf", expert_type=expert_type)
    assert path.stat().st_size < 8e6
    experts = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up_exps.weight")
    assert experts.tensor_type.name == expert_type
    assert experts.n_bytes == 16 * expert_bytes(expert_type, EXPERT_TYPES[expert_type], 256)
    flat = np.asarray(experts.data).view(np.uint8).reshape(16, -1)
    assert len({expert.tobytes() for expert in flat}) == 16, "two experts are the same"
    assert_alive(logits_of(path, tokens))


VARIANTS = {
    "top-1": ("qwen3moe", "Q4_0", dict(n_expert_used=1)),
    "all experts used": ("qwen3moe", "Q4_0", dict(n_expert_used=16)),
    "width 96 F16": ("llama", "F16", dict(n_ff_exp=96)),
    "width 96 F32": ("qwen3moe", "F32", dict(n_ff_exp=96, n_expert=8)),
    "width 96 Q8_0": ("gpt-oss", "Q8_0", dict(n_ff_exp=96)),
    "tied": ("qwen3moe", "Q4_0", dict(tied=True)),
    "down of another type": ("qwen3moe", "Q4_K", dict(down_type="Q6_K")),
    "expert scales": ("qwen3moe", "Q4_0", dict(expert_scale=True)),
    "no gate": ("ernie4_5-moe", "Q4_0", dict(gated=False)),
    "page-aligned file": ("qwen3moe", "Q4_K", dict(alignment=4096)),
    "200 experts": ("olmoe", "Q4_0", dict(n_expert=200, n_expert_used=23, n_ff_exp=32)),
    "mxfp4 with biases": ("gpt-oss", "MXFP4", dict()),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_loads_and_computes(tmp_path, variant, tokens):
    family, expert_type, options = VARIANTS[variant]
    path = tiny_model(tmp_path / "m.gguf", family, expert_type, **options)
    assert_alive(logits_of(path, tokens))


def test_expert_scales_are_applied(tmp_path, tokens):
    plain = logits_of(tiny_model(tmp_path / "a.gguf"), tokens)
    scaled = logits_of(tiny_model(tmp_path / "b.gguf", expert_scale=True), tokens)
    assert np.abs(plain - scaled).max() > 0.1


def test_deterministic_and_seeded(tmp_path):
    a, b = (tiny_model(tmp_path / f"{n}.gguf", "gpt-oss", "Q4_K").read_bytes() for n in "ab")
    assert hashlib.sha256(a).digest() == hashlib.sha256(b).digest()
    assert tiny_model(tmp_path / "c.gguf", "gpt-oss", "Q4_K", seed=1).read_bytes() != a


def test_variants_share_the_tensors_they_do_not_name(tmp_path):
    tied = gguf.GGUFReader(tiny_model(tmp_path / "tied.gguf", n_expert_used=1))
    plain = {t.name: t for t in gguf.GGUFReader(tiny_model(tmp_path / "plain.gguf")).tensors}
    assert all(np.array_equal(t.data, plain[t.name].data) for t in tied.tensors)


def test_page_multiples_and_others_are_both_there():
    n_whole = sum(expert_bytes(kind, width, 256) % 4096 == 0 for kind, width in EXPERT_TYPES.items())
    assert 3 <= n_whole <= len(EXPERT_TYPES) - 3
    assert expert_bytes("Q4_K", 256, 256) == 9 * 4096
    assert expert_bytes("Q4_0", 128, 256) == 18432


def test_dense_layers_lie_where_the_recipe_says(tmp_path):
    for family, moe_layers in (("llama4", [1, 3]), ("deepseek2", [1, 2]), ("qwen3moe", [0, 1])):
        names = {t.name for t in gguf.GGUFReader(tiny_model(tmp_path / f"{family}.gguf", family)).tensors}
        n_layer = FAMILIES[family].n_layer
        assert [i for i in range(n_layer) if f"blk.{i}.ffn_gate_inp.weight" in names] == moe_layers
        assert [i for i in range(n_layer) if is_moe_layer(FAMILIES[family], i)] == moe_layers


def test_impossible_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gpt-oss: llama.cpp wants output.weight"):
        tiny_model(tmp_path / "m.gguf", "gpt-oss", tied=True)
    with pytest.raises(ValueError, match="Q4_K: a row of 96 is not a multiple of its block of 256"):
        tiny_model(tmp_path / "m.gguf", "qwen3moe", "Q4_K", n_ff_exp=96)


# --- tokenizer and template

@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    model = load(tiny_model(tmp_path_factory.mktemp("chat") / "m.gguf"))
    yield model
    model.close()


def test_text_round_trips(chat_model):
    ids = chat_model.tokenize(TEXT.encode(), add_bos=False, special=True)
    assert chat_model.detokenize(ids, special=True).decode() == TEXT
    pieces = [chat_model.detokenize([i], special=True) for i in ids]
    assert b" the" in pieces and b" world" in pieces and b"<think>" in pieces


def test_an_emoji_spans_several_tokens(chat_model):
    ids = chat_model.tokenize("\U0001f999".encode(), add_bos=False)
    assert [chat_model.detokenize([i]) for i in ids] == [b"\xf0\x9f", b"\xa6", b"\x99"]


def test_chat_template(chat_model, tmp_path):
    assert "<|im_start|>" in chat_model.metadata["tokenizer.chat_template"]
    assert chat_model.detokenize([chat_model.token_eos()], special=True) == b"<|im_end|>"
    answer = chat_model.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0)
    assert answer["usage"]["completion_tokens"] >= 1
    silent = load(tiny_model(tmp_path / "m.gguf", chat_template=None))
    assert "tokenizer.chat_template" not in silent.metadata
    silent.close()


def test_without_a_tokenizer(tmp_path, tokens):
    path = tiny_model(tmp_path / "m.gguf", tokenizer="none")
    model = load(path)
    assert model.n_vocab() == len(vocabulary()[0])
    model.eval(tokens)
    assert_alive(model.scores[: len(tokens)])
    model.close()


# --- shards

@pytest.mark.parametrize("first_without_tensors", [False, True])
def test_shards_compute_the_same(tmp_path, tokens, first_without_tensors):
    whole = tiny_model(tmp_path / "whole.gguf")
    shards = write_shards(whole, tmp_path / "parts", 3, name="best-of-breed",
                          first_without_tensors=first_without_tensors)
    assert [s.name for s in shards] == [f"best-of-breed-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    n_tensors = [len(gguf.GGUFReader(s).tensors) for s in shards]
    assert sum(n_tensors) == len(gguf.GGUFReader(whole).tensors)
    assert (n_tensors[0] == 0) == first_without_tensors and all(n_tensors[1:])
    assert np.array_equal(logits_of(shards[0], tokens), logits_of(whole, tokens))


def test_random_tokens():
    ids = random_tokens(50, 200, seed=3)
    assert ids == random_tokens(50, 200, seed=3) != random_tokens(50, 200, seed=4)
    assert set(ids) <= set(range(50)) and len(set(ids)) > 40


def test_only_one_libggml_is_loaded(tmp_path):
    """Quantising must not pull in a second copy of libggml-base beside the one that llama.cpp uses."""
    tiny_model(tmp_path / "m.gguf", expert_type="Q4_K")
    try:
        maps = open("/proc/self/maps").read().splitlines()
    except OSError:
        pytest.skip("/proc/self/maps is only there on Linux")
    assert len({line.split()[-1] for line in maps if "libggml-base" in line}) == 1
