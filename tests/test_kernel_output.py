"""edgemoe's own kernels in whole models, against plain llama.cpp.

Both round activations alike and add up in another order, which differs by 1e-7. In a model that is F32 throughout nothing is rounded, and that difference stays
below STRICT: a wrong expert, stride or bias changes every logit. Where activations are rounded it flips a rounding now and then, each flip causes more, and in the
end the two differ by about as much as rounding makes either of them differ from the same weights in F32. So there a difference up to LOOSE passes, and
edgemoe must not be FARTHER times as far from F32 as llama.cpp. All are in standard deviations of the logits.
"""

from contextlib import closing

import numpy as np
import pytest
from conftest import SHARED
from gguf import GGUFReader
from gguf.quants import dequantize
from tiny_models import EXPERT_TYPES, FAMILIES, rewritten

import edgemoe
from edgemoe import engine

ISAS = ("avx512", "avxvnni", "avx2")
STRICT, LOOSE, FARTHER = 5e-5, 0.1, 1.25
N_PROMPT, N_DECODE = 40, 24
OPTIONS = dict(n_ctx=N_PROMPT + N_DECODE, n_batch=32, n_ubatch=32, n_threads=2, logits_all=True, verbose=False)
F32_KV = dict(type_k=0, type_v=0)


def open_ours(path, isa=None, **options):
    try:
        return edgemoe.Llama(path, isa=isa, **(OPTIONS | options))
    except edgemoe.ModelError as e:
        if "this CPU has no" in str(e):
            pytest.skip(str(e))
        raise


def logits(llm):
    """[N_PROMPT + N_DECODE, n_vocab] for random tokens: a prompt in two batches, then single steps."""
    tokens = np.random.default_rng(1).integers(0, llm.n_vocab(), N_PROMPT + N_DECODE).tolist()
    llm.reset()
    llm.eval(tokens[:N_PROMPT])
    for token in tokens[N_PROMPT:]:
        llm.eval([token])
    return llm.scores[: llm.n_tokens].copy()


@pytest.fixture(scope="module")
def plain_logits():
    """plain_logits(gguf, **options): llama.cpp's, computed once."""
    made = {}

    def get(gguf, **options):
        if gguf not in made:
            with closing(engine.open_plain([str(gguf)], **(OPTIONS | options))) as llm:
                made[gguf] = logits(llm)
            assert np.isfinite(made[gguf]).all() and made[gguf].std() > 0
        return made[gguf]

    return get


def rms(a, b):
    return np.sqrt(np.mean((a - b) ** 2)) / b.std()


STRUCTURES = {family: (family, {}) for family in FAMILIES} | {
    "top-1": ("qwen3moe", {"n_expert_used": 1}),
    "all experts used": ("qwen3moe", {"n_expert": 4, "n_expert_used": 4}),
    "tied embeddings": ("qwen3moe", {"tied": True}),
    "width 96": ("qwen3moe", {"n_ff_exp": 96}),
    "wide experts": ("qwen3moe", {"n_ff_exp": 544}),  # several pieces of work per projection, the last one short
    "no gate": ("llama", {"gated": False}),
    "no gate, shared expert": ("ernie4_5-moe", {"gated": False}),
    "first layer dense": ("ernie4_5-moe", {"n_layer": 4, "n_layer_dense_lead": 2}),
    "scales per expert": ("qwen3moe", {"expert_scale": True}),
}
NOT_FUSED = ("scales per expert",)  # their scales come from ggml, between products that are ours


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_f32_models_are_computed_alike(name, isa, models, packages, plain_logits):
    family, variant = STRUCTURES[name]
    gguf = models(family, "F32", dense_type="F32", **variant)
    expected = plain_logits(gguf, **F32_KV)
    for path in (gguf, packages(gguf)):
        with closing(open_ours(path, isa, **F32_KV)) as llm:
            difference, stats = np.abs(logits(llm) - expected).max() / expected.std(), llm.expert_stats()
            assert difference <= STRICT, path
            # Not vacuous: one event per layer and batch, each computed in one go.
            assert stats["n_events"] == len(llm.source.layers) * (2 + N_DECODE)
            assert stats["n_fused"] == (0 if name in NOT_FUSED else stats["n_events"])


TINY_ARCHS = sorted((SHARED / "tiny_archs").glob("*.gguf"))


@pytest.mark.skipif(not TINY_ARCHS, reason="the folder with tiny models of other architectures is not beside this checkout")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gguf", TINY_ARCHS, ids=lambda p: p.stem)
def test_other_architectures(gguf, isa, plain_logits):
    expected = plain_logits(gguf, **F32_KV)
    with closing(open_ours(gguf, isa, **F32_KV)) as llm:
        assert np.abs(logits(llm) - expected).max() <= STRICT * expected.std()
        stats, applies_scales = llm.expert_stats(), llm.source.architecture in ("llama", "qwen3moe")
        assert stats["n_events"] > 0 and stats["n_fused"] == (0 if applies_scales else stats["n_events"])


NO_KERNELS = ("Q2_K",)  # ggml computes such experts; the dense matrices are still ours


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("expert_type", [t for t in EXPERT_TYPES if t != "F32"])
def test_rounding_makes_no_more_difference_than_it_does_in_llama_cpp(expert_type, isa, models, plain_logits):
    gguf = models("qwen3moe", expert_type)
    in_f32 = gguf.with_suffix(".f32.gguf")
    if not in_f32.exists():
        types = {t.name: t.tensor_type for t in GGUFReader(gguf).tensors}
        rewritten(gguf, in_f32, lambda name, data: (name, dequantize(data, types[name]).astype(np.float32)))
    plain, unrounded = plain_logits(gguf), plain_logits(in_f32, **F32_KV)
    with closing(open_ours(gguf, isa)) as llm:
        ours, stats = logits(llm), llm.expert_stats()
    assert 0 < rms(ours, plain) <= LOOSE
    assert rms(ours, unrounded) <= FARTHER * rms(plain, unrounded)
    assert stats["n_fused"] == (0 if expert_type in NO_KERNELS else stats["n_events"]) and stats["n_events"] > 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family, expert_type", [("qwen3moe", "Q4_K"), ("deepseek2", "Q8_0")])
def test_threads_container_and_repetition_change_nothing(family, expert_type, isa, models, packages):
    gguf = models(family, expert_type)
    with closing(open_ours(gguf, isa)) as llm:
        expected = logits(llm)
        np.testing.assert_array_equal(logits(llm), expected)
    for path, n_threads in ((gguf, 1), (packages(gguf), 2)):
        with closing(open_ours(path, isa, n_threads=n_threads)) as llm:
            np.testing.assert_array_equal(logits(llm), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_logits_of_the_last_token_only(isa, models, plain_logits):
    """llama.cpp then drops the other tokens inside the last layer: of the first two micro-batches all, so that its experts have nothing to do."""
    gguf = models("deepseek2", "F32", dense_type="F32")
    expected = plain_logits(gguf, **F32_KV)
    with closing(open_ours(gguf, isa, logits_all=False, n_batch=N_PROMPT, n_ubatch=16, **F32_KV)) as llm:
        llm.eval(np.random.default_rng(1).integers(0, llm.n_vocab(), N_PROMPT).tolist())
        last = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),))
        assert np.abs(last - expected[N_PROMPT - 1]).max() <= STRICT * expected.std()


@pytest.mark.parametrize("isa", ISAS)
def test_embeddings_of_several_texts_at_once(isa, models):
    gguf = models("gpt-oss", "F32", dense_type="F32")
    options = OPTIONS | F32_KV | {"embedding": True, "logits_all": False}
    texts = ["expert", " token model", "Wait", "a"]
    with closing(engine.open_plain([str(gguf)], **options)) as plain, closing(open_ours(gguf, isa, **options)) as ours:
        for expected, found in zip(plain.embed(texts), ours.embed(texts)):
            assert np.abs(np.subtract(found, expected)).max() <= STRICT * np.std(expected)
        assert ours.expert_stats()["n_fused"] > 0


N_TEXT = 200
CLEAR_LEAD = 0.3


@pytest.fixture(scope="module")
def demo_text(small_demo):
    """(prompt, the tokens that llama.cpp continues it with, its logits [N_TEXT, n_vocab] for these)."""
    with closing(engine.open_plain([str(small_demo)], n_ctx=256, n_threads=2, verbose=False)) as llm:
        prompt = llm.tokenize(b"The lighthouse keeper counted the ships that passed in the night.")
        return prompt, *continued(llm, prompt, None)


def continued(llm, prompt, forced):
    llm.eval(prompt)
    tokens, seen = [], []
    for i in range(N_TEXT):
        seen.append(np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy())
        tokens.append(forced[i] if forced else int(seen[-1].argmax()))
        llm.eval([tokens[-1]])
    return tokens, np.array(seen)


@pytest.mark.parametrize("isa", ISAS)
def test_the_demo_model_chooses_the_same_tokens(isa, small_demo, demo_text):
    """Word by word along llama.cpp's text: the same choice wherever that one leads clearly."""
    prompt, tokens, expected = demo_text
    with closing(open_ours(small_demo, isa, n_ctx=256, logits_all=False)) as llm:
        _, found = continued(llm, prompt, tokens)
    top = np.sort(expected, axis=1)[:, -2:]
    lead = (top[:, 1] - top[:, 0]) / expected.std()
    same = found.argmax(axis=1) == tokens
    assert rms(found, expected) <= LOOSE
    assert same[lead >= CLEAR_LEAD].all() and (lead >= CLEAR_LEAD).sum() > N_TEXT // 2
    assert same.sum() >= 0.95 * N_TEXT


def test_an_unknown_instruction_set_is_refused(models):
    with pytest.raises(edgemoe.ModelError, match="instruction set mmx, wanted avx2, avxvnni or avx512"):
        open_ours(models(), "mmx")


COUNT_THREADS = """
import os, sys
from edgemoe import engine
path, kind, n_threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = dict(n_ctx=64, n_threads=n_threads, n_threads_batch=n_threads, verbose=False)
llm = engine.open_plain([path], **options) if kind == "plain" else engine.Llama(path, **options)
before = len(os.listdir("/proc/self/task"))
llm.eval(list(range(20)))
llm.eval([7])
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_kernels_start_no_thread_of_their_own(n_threads, python, models):
    """They run on ggml's pool: as many threads come up as for llama.cpp alone, and never more than were asked for."""
    gguf = models("qwen3moe", "Q4_K")
    plain, ours = (int(python(COUNT_THREADS, gguf, kind, n_threads).stdout) for kind in ("plain", "edgemoe"))
    assert ours == plain <= n_threads - 1


PEAK_MEMORY = """
import resource, sys
from edgemoe import engine
llm = engine.Llama(sys.argv[1], n_ctx=256, n_batch=256, n_threads=2, verbose=False)
for n in range(int(sys.argv[2]), 160):
    llm.reset()
    llm.eval(list(range(n)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def test_prompts_of_every_length_need_no_more_memory_than_the_longest(python, models):
    gguf = models("qwen3moe", "Q8_0", n_ff_exp=2048)
    growing, longest = (int(python(PEAK_MEMORY, gguf, first).stdout) for first in (16, 159))
    assert growing - longest < 60, "MB"
