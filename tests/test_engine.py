"""edgemoe.Llama is a llama_cpp.Llama: the same calls give the same results, and exactly the same with llama.cpp's kernels."""

import inspect
import os
import subprocess
import sys

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader
from tiny_models import rewritten, tiny_model

import edgemoe as em
from edgemoe import engine, machine


@pytest.fixture(scope="module")
def both(models, packages):
    """(plain llama.cpp, edgemoe on a package) with the same model."""
    gguf = models("qwen3moe", "Q8_0")
    options = dict(n_ctx=256, n_threads=2, verbose=False)
    pair = engine.open_plain([str(gguf)], **options), em.Llama(packages(gguf), exact=True, **options)
    yield pair
    for llm in pair:
        llm.close()


def test_same_constructor():
    base = inspect.signature(llama_cpp.Llama.__init__).parameters
    ours = inspect.signature(em.Llama.__init__).parameters
    assert issubclass(em.Llama, llama_cpp.Llama)
    assert "model_path" in ours and "model_path" in base


def test_completion(both):
    plain, ours = (llm("The expert", max_tokens=24, temperature=0)["choices"][0]["text"] for llm in both)
    assert plain == ours and len(plain) > 0


def test_sampling_with_a_seed(both):
    plain, ours = (llm("The expert", max_tokens=24, temperature=1.0, seed=7)["choices"][0]["text"] for llm in both)
    assert plain == ours


def test_chat(both):
    plain, ours = (llm.create_chat_completion([{"role": "user", "content": "Hello world"}], max_tokens=16, temperature=0) for llm in both)
    assert plain["choices"] == ours["choices"] and plain["usage"] == ours["usage"]


def test_streaming(both):
    plain, ours = ([c["choices"][0]["text"] for c in llm("Wait", max_tokens=16, temperature=0, stream=True)] for llm in both)
    assert plain == ours and len(ours) > 1


def test_grammar(both):
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    answers = [llm("Is it?", max_tokens=8, temperature=0, grammar=grammar)["choices"][0]["text"] for llm in both]
    assert answers[0] == answers[1] and answers[1] in ("yes", "no")


def test_embeddings(models):
    gguf = models("qwen3moe", "Q8_0")
    options = dict(n_ctx=64, embedding=True, n_threads=2, verbose=False)
    plain, ours = engine.open_plain([str(gguf)], **options), em.Llama(gguf, exact=True, **options)
    np.testing.assert_array_equal(plain.embed("expert token"), ours.embed("expert token"))
    assert ours.expert_stats()["n_events"] > 0
    plain.close(), ours.close()


def test_several_sequences_at_once_through_embeddings(models):
    gguf = models("gpt-oss", "MXFP4")
    options = dict(n_ctx=64, embedding=True, n_threads=2, verbose=False)
    plain, ours = engine.open_plain([str(gguf)], **options), em.Llama(gguf, exact=True, **options)
    texts = ["expert", " token model", "Wait", "a"]
    for a, b in zip(plain.embed(texts), ours.embed(texts)):
        np.testing.assert_array_equal(a, b)
    plain.close(), ours.close()


def test_state_can_be_saved_and_restored(both):
    _, ours = both
    ours.reset()
    ours.eval([1, 2, 3, 4])
    state = ours.save_state()
    first = ours("The", max_tokens=8, temperature=0)["choices"][0]["text"]
    ours.load_state(state)
    assert ours.n_tokens == 4
    assert ours("The", max_tokens=8, temperature=0)["choices"][0]["text"] == first


def test_use_mmap_false_and_mlock_still_load(models, packages):
    for options in ({"use_mmap": False}, {"use_mlock": True}):
        llm = em.Llama(packages(models("qwen3moe", "Q8_0")), n_ctx=64, verbose=False, **options)
        llm.eval([1, 2])
        llm.close()


def test_kv_overrides_reach_llama_cpp(models):
    """Number of active experts, changed: half as many routed pairs."""
    pairs = []
    for n_used in (4, 2):
        llm = em.Llama(models("qwen3moe", "Q8_0"), n_ctx=64, verbose=False, kv_overrides={"qwen3moe.expert_used_count": n_used})
        llm.eval([1, 2, 3])
        pairs.append(llm.expert_stats()["n_pairs"])
        llm.close()
    assert pairs[0] == 2 * pairs[1] > 0


def test_loading_a_plain_model_elsewhere_is_not_touched(models, both):
    """The hook in llama_cpp changes only loads that edgemoe announced."""
    llm = llama_cpp.Llama(str(models("qwen3moe", "Q8_0")), n_ctx=64, verbose=False)
    before = both[1].expert_stats()
    llm.eval([1, 2, 3])
    assert both[1].expert_stats() == before
    llm.close()


def test_default_threads(models):
    llm = em.Llama(models("qwen3moe", "Q8_0"), n_ctx=64, verbose=False)
    assert llm.n_threads == llm.n_threads_batch == machine.default_threads()
    llm.close()


def test_closing_twice(models):
    llm = em.Llama(models("qwen3moe", "Q8_0"), n_ctx=64, verbose=False)
    llm.eval([1])
    llm.close()
    llm.close()
    with pytest.raises(em.ModelFault, match="the model is closed"):
        llm.expert_stats()


def test_use_after_close_is_an_error_and_no_crash(models, python):
    result = python(
        "import edgemoe, sys; llm = edgemoe.Llama(sys.argv[1], n_ctx=64, verbose=False); ctx = llm._ctx; llm.close()\n"
        "try: ctx.decode(llm._batch)\n"
        "except edgemoe.ModelFault as e: print(e)",
        models("qwen3moe", "Q8_0"),
    )
    assert result.returncode == 0 and "the model is closed" in result.stdout, result.stderr


def test_source_describes_the_model(models, packages):
    gguf = models("deepseek2", "Q4_K")
    for path, kind in ((gguf, "stacked"), (packages(gguf), "package")):
        with em.Source(path) as source:
            assert (source.kind, source.architecture) == (kind, "deepseek2")
            assert [layer.layer for layer in source.layers] == [1, 2]
            assert {layer.n_expert for layer in source.layers} == {16}
            assert source.expert_bytes == sum(layer.n_expert * layer.bytes_per_expert for layer in source.layers)
            assert source.integer("expert_used_count") == 4


def test_both_sources_read_the_same_bytes(models, packages):
    gguf = models("gpt-oss", "MXFP4")
    with em.Source(gguf) as stacked, em.Source(packages(gguf)) as package:
        for layer in range(len(stacked.layers)):
            for p in range(len(stacked.layers[layer].projections)):
                for expert in (0, 7, 15):
                    data = stacked.read(layer, p, expert)
                    assert data == package.read(layer, p, expert) and len(data) == stacked.layers[layer].projections[p].bytes


def test_reading_outside_is_refused(models):
    with em.Source(models()) as source:
        source.layers[0].projections
        with pytest.raises(em.ModelError, match="expert 16, wanted less than 16"):
            source.read(0, 0, 16)


def dense_model(tmp_path):
    """A llama without experts: the first expert of each layer of a tiny MoE becomes its FFN."""

    def change(name, data):
        if "_exps" in name:
            return name.replace("_exps", ""), data[0]
        return None if "ffn_gate_inp" in name else (name, data)

    moe = tiny_model(tmp_path / "moe.gguf", "llama", "Q8_0")
    return rewritten(moe, tmp_path / "dense.gguf", change, keep=lambda key: "expert" not in key)


def test_a_dense_model_runs_and_says_so(tmp_path, edgemoe):
    path = dense_model(tmp_path)
    n_ff = next(int(t.shape[1]) for t in GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    llm = em.Llama(path, n_ctx=64, n_threads=2, logits_all=True, verbose=False, kv_overrides={"llama.feed_forward_length": n_ff})
    plain = engine.open_plain([str(path)], n_ctx=64, n_threads=2, logits_all=True, verbose=False, kv_overrides={"llama.feed_forward_length": n_ff})
    for m in (llm, plain):
        m.eval([1, 2, 3])
    np.testing.assert_array_equal(llm.scores[:3], plain.scores[:3])
    assert llm.source.kind == "dense" and llm.expert_stats()["n_events"] == 0
    llm.close(), plain.close()
    assert "There is nothing to manage" in edgemoe("inspect", path).stdout


def test_import_is_light():
    """edgemoe --help must not load llama.cpp."""
    code = "import edgemoe.cli, sys; print('llama_cpp' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=os.environ)
    assert out.stdout.split() == ["False", "False"]
