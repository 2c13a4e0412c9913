"""Joint post-training: names and views in both directions, losses against NumPy's, logits against llama.cpp's, a training that learns, resumes and comes back as a GGUF."""

import json

import gguf
import numpy as np
import pytest
from tiny_models import FAMILIES as TINY
from tiny_models import random_tokens

from edgemoe import cli, joint_commands
from edgemoe import heads as heads_file
from edgemoe import train_heads as T
from edgemoe.convert.arrays import Arrays
from edgemoe.convert.errors import ConvertError
from edgemoe.convert.replace import replace_tensors
from edgemoe.coverage import coverage_loss
from edgemoe.joint import examples as X
from edgemoe.joint.checkpoint import export_checkpoint, places
from edgemoe.joint.families import FAMILIES, CheckpointError, Keys, config_of, parameter_groups
from edgemoe.joint.options import JointError, JointOptions
from edgemoe.package import Source

# Where llama.cpp keeps keys and values as float16 and adds in another order: rms of the difference over the standard deviation of the logits.
BOUND = 2e-3
KINDS = {"qwen3moe": {}, "gpt-oss": {}, "ernie4_5-moe": {"n_ff_shexp": 128}}  # a shared expert of two routed ones' width


def plain(models, family, **variant):
    return models(family, "F32", dense_type="F32", **KINDS[family], **variant)


# --- options, and what is not installed


@pytest.mark.parametrize("change, said", [({"mode": "spatio"}, "mode"), ({"train": "heads"}, "routers, experts, all"), ({"weight": -1}, "lambda"), ({"tau": 0}, "tau"), ({"steps": 0}, "steps")])
def test_options_are_refused_by_name(change, said):
    with pytest.raises(JointError, match=said):
        JointOptions(**change).check()


def test_rates_rise_and_fall():
    options = JointOptions(steps=110, warmup=10)
    shares = [options.rate_share(step) for step in range(110)]
    assert shares[0] == 0.1 and shares[9] == 1.0 and shares[10] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True) and 0.1 < shares[-1] < 0.11
    assert JointOptions(steps=110, warmup=10, schedule="constant").rate_share(109) == 1.0


def test_slots_are_two_and_a_half_times_what_a_token_uses():
    assert JointOptions().n_slots(128, 8) == 20
    assert JointOptions().n_slots(16, 8) == 15
    with pytest.raises(JointError, match="1 to 15"):
        JointOptions(slots=16).n_slots(16, 4)


def test_without_the_extra_a_line_says_what_to_install(monkeypatch, capsys, models, tmp_path):
    monkeypatch.setattr(joint_commands.importlib.util, "find_spec", lambda name: None)
    asked = ["train-joint", str(tmp_path), "--gguf", str(plain(models, "qwen3moe")), "--data", "x.jsonl", "--out", str(tmp_path / "out.gguf")]
    assert cli.main(asked) == 1
    assert capsys.readouterr().err == "edgemoe: error: train-joint needs torch and transformers and safetensors: pip install 'edgemoe[train]'\n"
    assert cli.main(["export-checkpoint", str(plain(models, "qwen3moe")), str(tmp_path / "hf")]) == 1
    assert "edgemoe[train]" in capsys.readouterr().err and not (tmp_path / "hf").exists()


# --- names


@pytest.mark.parametrize("family", KINDS)
def test_every_tensor_has_a_place_and_parts_fill_their_parameter(models, family):
    with Arrays(plain(models, family)) as file:
        shapes = {name: tensor.shape[::-1] for name, tensor in file.tensors.items()}
    whole = {}
    for number, (name, place) in enumerate(places(family, shapes, "x").items(), 1):
        array = whole.setdefault(place.parameter, np.zeros(place.shape(shapes[name]), int))
        view = place.view(array)
        assert view.shape == shapes[name]
        assert (view == 0).all(), "no element belongs to two tensors"
        view[...] = number
    assert all((array > 0).all() for array in whole.values())


def test_gpt_oss_weaves_gate_and_up():
    layer = FAMILIES["gpt-oss"].layer
    both = np.arange(2 * 3 * 8).reshape(2, 3, 8)  # 2 experts, 3 inputs, 4 neurons
    assert layer["ffn_gate_exps.weight"].view(both)[1, 2].tolist() == both[1, :, 4].tolist()
    assert layer["ffn_up_exps.weight"].view(both)[1, 2].tolist() == both[1, :, 5].tolist()


def test_what_has_no_place_is_refused_by_name():
    with pytest.raises(CheckpointError, match="ffn_gate_up_exps.weight: has no place in Qwen3MoeForCausalLM"):
        places("qwen3moe", ["blk.0.ffn_gate_up_exps.weight"], "x.gguf")
    with pytest.raises(CheckpointError, match="'llama', wanted one of qwen3moe"):
        places("llama", [], "x.gguf")


def test_config_refuses_what_the_class_cannot_be():
    said = {"general.architecture": "ernie4_5-moe", "expert_feed_forward_length": 128, "expert_shared_feed_forward_length": 200, "expert_count": 16, "expert_used_count": 4}
    said |= {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "context_length": 64, "feed_forward_length": 256}
    keys = Keys(lambda key, default=None: said.get(key, said.get(key.removeprefix("ernie4_5-moe."), default)), "x.gguf")
    with pytest.raises(CheckpointError, match="shared expert of 200 neurons, wanted a multiple of the 128"):
        config_of(keys, 100, True)
    said["expert_shared_feed_forward_length"] = 256
    assert config_of(keys, 100, True)["moe_num_shared_experts"] == 2
    del said["block_count"]
    with pytest.raises(CheckpointError, match="ernie4_5-moe.block_count is missing"):
        config_of(keys, 100, True)


def test_parameters_belong_to_routers_experts_or_the_rest():
    group = {name: parameter_groups(FAMILIES["gpt-oss"], f"model.layers.3.{name}") for name in ("mlp.router.bias", "mlp.experts.down_proj_bias", "self_attn.sinks")}
    assert group == {"mlp.router.bias": "routers", "mlp.experts.down_proj_bias": "experts", "self_attn.sinks": "other"}
    assert parameter_groups(FAMILIES["ernie4_5-moe"], "model.layers.3.mlp.shared_experts.up_proj.weight") == "other"


# --- another GGUF


def test_replaced_tensors_are_new_and_all_others_the_same_bytes(models, tmp_path):
    source = models("qwen3moe", "Q4_K")
    router, experts = "blk.1.ffn_gate_inp.weight", "blk.0.ffn_down_exps.weight"
    new = {router: np.full((16, 256), 2.5, np.float32), experts: np.full((16, 256, 256), 0.5, np.float32)}
    types = replace_tensors(source, tmp_path / "out.gguf", {name: (lambda a=a: a) for name, a in new.items()}, {"edgemoe.note": "changed"})
    assert types == {router: ("F32", "F32"), experts: ("Q4_K", "F16")}
    before, after = (gguf.GGUFReader(path) for path in (source, tmp_path / "out.gguf"))
    assert [t.name for t in before.tensors] == [t.name for t in after.tensors]
    for a, b in zip(before.tensors, after.tensors):
        if a.name in new:
            assert (np.asarray(b.data, np.float32) == new[a.name]).all() and b.shape.tolist() == a.shape.tolist()
        else:
            assert b.tensor_type == a.tensor_type and np.array_equal(a.data, b.data), a.name
    assert after.fields["edgemoe.note"].contents() == "changed"
    changed = {"GGUF.kv_count", "edgemoe.note"}
    assert {k: f.contents() for k, f in before.fields.items() if k not in changed} == {k: f.contents() for k, f in after.fields.items() if k not in changed}
    with Source(source) as old, Source(tmp_path / "out.gguf") as now:
        assert old.package_fingerprint() != now.package_fingerprint()


@pytest.mark.parametrize(
    "name, array, said", [("blk.9.nothing", np.zeros(1, np.float32), "has no tensor blk.9.nothing"), ("blk.0.ffn_gate_inp.weight", np.zeros((16, 8), np.float32), r"\[16, 8\], wanted \[16, 256\]")]
)
def test_a_replacement_that_does_not_fit_leaves_nothing_behind(models, tmp_path, name, array, said):
    with pytest.raises(ConvertError, match=said):
        replace_tensors(models(), tmp_path / "out.gguf", {name: lambda: array})
    assert not list(tmp_path.iterdir())


def test_a_model_does_not_replace_itself(tmp_path, models):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(models().read_bytes())
    with pytest.raises(ConvertError, match="is the source itself"):
        replace_tensors(copy, copy, {})


# --- examples


def questions(n, path):
    path.write_text("".join(json.dumps({"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}: the sum of {i} and {i}."}) + "\n" for i in range(n)))
    return path


def test_questions_are_context_and_answers_count(models, tmp_path):
    vocabulary = X.Vocabulary(models())
    found = X.read_examples([questions(3, tmp_path / "q.jsonl")], vocabulary, 500)
    text = vocabulary.model.detokenize(found[2].tokens, special=True).decode()
    assert text == "<|im_start|>user\nWhat is 2 and 2?<|im_end|>\n<|im_start|>assistant\nIt is 4: the sum of 2 and 2.<|im_end|>"
    assert vocabulary.model.detokenize(found[2].tokens[found[2].start :], special=True).decode() == "It is 4: the sum of 2 and 2.<|im_end|>"
    longest = len(found[2].tokens) - 10
    cut = X.read_examples([tmp_path / "q.jsonl"], vocabulary, longest)
    assert len(cut) == 3 and cut[2].tokens == found[2].tokens[:longest]
    (tmp_path / "t.txt").write_text("the model\n\nof the world\n")
    assert [e.start for e in X.read_examples([tmp_path / "t.txt"], vocabulary, 60)] == [1, 1]


def test_bad_lines_are_named(models, tmp_path):
    vocabulary = X.Vocabulary(models())
    for line, said in (("{", "line 2: not JSON"), ('{"question": "x"}', "line 2: wanted question or problem"), ("[1]", "line 2: wanted")):
        path = tmp_path / "bad.jsonl"
        path.write_text('{"problem": "a", "solution": "the world of"}\n' + line + "\n")
        with pytest.raises(X.ExamplesError, match=said):
            X.read_examples([path], vocabulary, 100)
    with pytest.raises(X.ExamplesError, match="nothing to learn from within 5 tokens"):
        X.read_examples([questions(2, tmp_path / "q.jsonl")], vocabulary, 5)


def made(lengths, start=1, marks=None):
    return [X.Example([i % 250] * n, start, str(marks[i] if marks else i)) for i, n in enumerate(lengths)]


def test_a_question_is_on_one_side_and_batches_have_every_example_once():
    found = made([5] * 20, marks=[i // 2 for i in range(20)])
    fit, out = X.parted(found, 0.2, 0)
    assert len(out) == 4 and not {e.mark for e in fit} & {e.mark for e in out}
    examples = made(np.random.default_rng(0).integers(4, 60, 50).tolist())
    parts = X.batches(examples, 128, 7, 0)
    assert sorted(i for part in parts for i in part) == list(range(50))
    assert parts == X.batches(examples, 128, 7, 0) != X.batches(examples, 128, 7, 1)
    assert sum(sum(len(examples[i].tokens) for i in part) >= 128 for part in parts) >= len(parts) - 1
    for part in parts:
        micro = X.micro_batches(part, examples, 100)
        assert sorted(i for m in micro for i in m) == sorted(part)
        assert all(len(m) == 1 or len(m) * max(len(examples[i].tokens) for i in m) <= 100 for m in micro)


# --- with PyTorch


@pytest.fixture(scope="module")
def torch():
    found = pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgemoe[train]'")
    pytest.importorskip("transformers", minversion="5", reason="needs transformers 5: pip install 'edgemoe[train]'")
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'edgemoe[train]'")
    found.set_num_threads(1)
    return found


@pytest.mark.parametrize("tau", [0.01, 0.3])
def test_loss_and_gradient_are_those_of_numpy(torch, tau):
    from edgemoe.joint import losses

    rng = np.random.default_rng(0)
    scores, demand = rng.dirichlet(np.ones(9), 40) * 2, rng.dirichlet(np.ones(9), 40) * (rng.random((40, 9)) < 0.4)
    wanted, gradient = coverage_loss(scores, demand, 3, tau)
    s, y = torch.tensor(scores, requires_grad=True), torch.tensor(demand, requires_grad=True)
    found = losses.coverage_loss(s, y, 3, tau)
    found.sum().backward()
    assert np.abs(found.detach().numpy() - wanted).max() < 1e-9
    assert np.abs(s.grad.numpy() - gradient).max() < 1e-7 * np.abs(gradient).max()
    # Demand can move, too: it is the next token's router.
    rows = demand.sum(1) > 0.1
    for j in range(3):
        step = np.zeros_like(demand)
        step[:, j] = 1e-6
        slope = (coverage_loss(scores, demand + step, 3, tau)[0] - coverage_loss(scores, np.maximum(demand - step, 0), 3, tau)[0]) / np.where(demand[:, j] > 0, 2e-6, 1e-6)
        assert np.abs(y.grad.numpy()[:, j] - slope)[rows].max() < 1e-3


@pytest.mark.parametrize("mode", ["temporal", "spatio-temporal"])
def test_heads_loss_is_that_of_train_heads(torch, mode):
    """A sequence of 6 tokens, 3 layers, 8 experts; demand as in a trace. Value, and gradient of the middle layer's head_t and the one before's head_s, as edgemoe train-heads has them."""
    from edgemoe.joint.losses import joint_loss

    rng, n, n_layers, n_expert, width = np.random.default_rng(1), 6, 3, 8, 5
    hidden = rng.standard_normal((n, n_layers, width))
    native = rng.dirichlet(np.ones(n_expert), (n, n_layers))
    demand = (rng.random((n, n_layers, n_expert)) < 0.3).astype(float)
    demand[..., 0] = 1
    names = [f"{head}.{part}" for head in heads_file.MODES[mode] for part in ("weight", "bias")]
    weights = {name: rng.standard_normal((n_layers, n_expert, width) if name.endswith("weight") else (n_layers, n_expert)) for name in names}
    w = {name: torch.tensor(a, requires_grad=True) for name, a in weights.items()}
    said = {head: torch.softmax(torch.einsum("nld,led->nle", torch.tensor(hidden), w[f"{head}.weight"]) + w[f"{head}.bias"], -1) for head in heads_file.MODES[mode]}
    loss = joint_loss(mode, torch.tensor(native), torch.tensor(demand), said, 3, 0.05)
    assert loss.shape == (n - 1, n_layers)
    for layer in range(n_layers):
        before = layer - 1 if layer else n_layers - 1
        mine = {name: a[layer if name.startswith("head_t") else before] for name, a in weights.items()}
        inputs = {"head_t": hidden[:-1, layer], "head_s": hidden[1:, before] if layer else hidden[:-1, before]}
        wanted, gradients = T.loss_and_gradients(mode, mine, native[:-1, layer], inputs, demand[1:, layer], 3, 0.05)
        assert abs(float(loss[:, layer].detach().mean()) - wanted) < 1e-9
        for tensor in w.values():
            tensor.grad = None
        loss[:, layer].mean().backward(retain_graph=True)
        for name, g in gradients.items():
            found = w[name].grad.numpy()[layer if name.startswith("head_t") else before]
            assert np.abs(found - g).max() < 1e-8, name


def llama_logits(path, tokens):
    from llama_cpp import Llama

    llm = Llama(str(path), n_ctx=128, logits_all=True, verbose=False, n_threads=1, n_gpu_layers=0)
    llm.eval(tokens)
    found = np.array(llm.scores[: len(tokens)], np.float32)
    llm.close()
    return found


def torch_logits(torch, model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def apart(a, b):
    """Of the token in the middle: two experts that a router finds equally good may change places at another one, which is right in both."""
    return np.median(np.sqrt(((a - b) ** 2).mean(1))) / b.std()


@pytest.fixture(scope="module")
def checkpoint(torch, models, tmp_path_factory):
    """checkpoint(family): (GGUF, its checkpoint folder), made once."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}

    def get(family):
        if family not in found:
            found[family] = (plain(models, family), export_checkpoint(plain(models, family), folder / family))
        return found[family]

    return get


@pytest.mark.parametrize("family", KINDS)
def test_a_checkpoint_computes_what_llama_cpp_does(torch, checkpoint, family):
    from edgemoe.joint.train import load_model

    path, folder = checkpoint(family)
    tokens = random_tokens(300, 48)
    found, wanted = torch_logits(torch, load_model(folder), tokens), llama_logits(path, tokens)
    assert apart(found, wanted) < BOUND
    assert apart(np.roll(found, 1, 0), wanted) > 100 * BOUND  # the bound can fail
    with pytest.raises(CheckpointError, match="exists"):
        export_checkpoint(path, folder)


@pytest.mark.parametrize("family", KINDS)
def test_the_tap_hears_what_the_engine_records(torch, checkpoint, family, tmp_path):
    import edgemoe
    from edgemoe.joint.tap import RouterTap
    from edgemoe.joint.train import load_model

    path, folder = checkpoint(family)
    tokens = random_tokens(300, 12)
    llm = edgemoe.Llama(str(path), n_ctx=64, n_threads=1, n_gpu_layers=0, verbose=False)
    with edgemoe.Recorder(llm, tmp_path / "t.npz", full_probs=True, hidden=True) as recorder, recorder.sequence():
        for token in tokens:
            llm.eval([token])
    llm.close()
    trace = edgemoe.Trace.load(tmp_path / "t.npz")
    model = load_model(folder)
    tap = RouterTap(model)
    torch_logits(torch, model, tokens)
    heard = tap.take()
    assert tap.layers == trace.meta["layers"]
    assert np.abs(heard.probs.numpy() - trace.probs).max() < 5e-3 and np.abs(heard.hidden.numpy() - trace.hidden).max() < 2e-2
    assert (np.sort(heard.chosen.numpy(), 2) == np.sort(trace.ids, 2)).mean() > 0.98
    demand = heard.demand().numpy()
    assert ((demand > 0).sum(2) == trace.n_used).all() and (np.take_along_axis(demand, trace.ids.astype(int), 2) > 0).mean() > 0.98


# --- training


SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "num_experts_per_tok": 2, "max_position_embeddings": 128}


def random_model(torch, family, seed=0):
    import transformers

    torch.manual_seed(seed)
    if family == "qwen3moe":
        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=16, intermediate_size=32, norm_topk_prob=True, initializer_range=0.3)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.GptOssConfig(**SIZES, num_local_experts=8, intermediate_size=16, sliding_window=16, initializer_range=0.3, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        model = transformers.GptOssForCausalLM(config)
    return model.float().eval()


def patterns(n=24):
    """Sequences that walk through the vocabulary in steps of their own: something that can be learned."""
    rng = np.random.default_rng(3)
    return [X.Example([int(x) for x in (rng.integers(64) + (1 + i % 3) * np.arange(rng.integers(14, 22))) % 64], 2, str(i)) for i in range(n)]


SHORT = {"slots": 4, "tau": 0.03, "batch_tokens": 120, "micro_tokens": 80, "steps": 24, "warmup": 2, "rate": 5e-3, "head_rate": 1e-2, "holdout": 0.2}


@pytest.mark.parametrize("family, mode", [("qwen3moe", "spatio-temporal"), ("gpt-oss", "temporal")])
def test_joint_training_lowers_the_heads_loss_more_than_the_control(torch, family, mode):
    from edgemoe.joint.train import prepare, train

    last = {}
    for weight in (0.0, 2.0):
        joint = prepare(random_model(torch, family), JointOptions(mode=mode, weight=weight, train="all", **SHORT))
        train(joint, patterns())
        assert joint.step == 24 and len(joint.history) == 24
        assert joint.held_out[1]["lm"] < joint.held_out[0]["lm"]  # both learn the language
        last[weight] = joint.held_out
    assert last[0.0][0] == last[2.0][0]  # the same start
    assert last[2.0][1]["heads"] < 0.9 * last[0.0][1]["heads"]


def test_in_the_control_the_model_hears_of_the_language_alone(torch):
    from edgemoe.joint.train import losses, prepare

    gradients = {}
    for weight in (0.0, 1.0):
        joint = prepare(random_model(torch, "qwen3moe"), JointOptions(mode="temporal", weight=weight, **SHORT))
        lm, n, heads, n_heads = losses(joint, patterns()[:3])
        assert joint.trained == [f"model.layers.{i}.mlp.gate.weight" for i in range(2)]
        router = joint.tap.routers[0].weight
        language, = torch.autograd.grad(lm, router, retain_graph=True)
        (lm + heads).backward()
        assert joint.heads.head_t["weight"].grad.abs().max() > 0
        gradients[weight] = (language, router.grad)
    assert torch.allclose(*gradients[0.0]) and not torch.allclose(*gradients[1.0])
    assert torch.allclose(gradients[0.0][0], gradients[1.0][0])


def test_heads_start_as_the_routers(torch):
    from edgemoe.joint.tap import CacheHeads, RouterTap

    model = random_model(torch, "gpt-oss")
    with torch.no_grad():
        for p in model.model.layers[1].mlp.router.parameters():
            p.add_(1)
    heads = CacheHeads(RouterTap(model), "spatio-temporal")
    first, second = (layer.mlp.router for layer in model.model.layers)
    assert torch.equal(heads.head_t["weight"][1], second.weight) and torch.equal(heads.head_t["bias"][0], first.bias)
    assert torch.equal(heads.head_s["weight"][0], second.weight) and torch.equal(heads.head_s["bias"][1], first.bias)


def test_stopped_and_resumed_is_as_if_it_had_not_been(torch, tmp_path):
    from edgemoe.joint.train import prepare, train

    def fresh(**change):
        return prepare(random_model(torch, "qwen3moe"), JointOptions(mode="temporal", **{**SHORT, "steps": 8, **change}))

    whole = fresh()
    train(whole, patterns())
    state = tmp_path / "state.pt"

    def stop(step):
        if step.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(fresh(), patterns(), state, progress=stop)
    with pytest.raises(JointError, match="other options"):
        train(fresh(rate=1e-3), patterns(), state, resume=True)
    resumed = fresh()
    train(resumed, patterns(), state, resume=True)
    assert resumed.history == whole.history and resumed.held_out == whole.held_out and not state.exists()
    for a, b in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(a, b)
    state.write_bytes(b"nothing")
    with pytest.raises(JointError, match="cannot be read"):
        train(fresh(), patterns(), state, resume=True)


# --- back


@pytest.mark.parametrize("family", KINDS)
def test_back_without_training_gives_the_same_logits(torch, checkpoint, family, tmp_path):
    from edgemoe.joint.back import array_of, replace_parameters
    from edgemoe.joint.train import load_model

    path, folder = checkpoint(family)
    parameters = {name: (lambda p=p: array_of(p)) for name, p in load_model(folder).named_parameters() if "e_score_correction_bias" not in name or TINY[family].selection_bias}
    types = replace_parameters(path, tmp_path / "back.gguf", parameters, {})
    assert len(types) >= 20 and all(a == b == "F32" for a, b in types.values())
    tokens = random_tokens(300, 24)
    assert np.array_equal(llama_logits(tmp_path / "back.gguf", tokens), llama_logits(path, tokens))


def test_quantised_weights_come_back_within_rounding(torch, models, tmp_path):
    from edgemoe.joint.back import array_of, replace_parameters
    from edgemoe.joint.train import load_model

    path = models("qwen3moe", "Q4_1")
    model = load_model(export_checkpoint(path, tmp_path / "hf"))
    types = replace_parameters(path, tmp_path / "back.gguf", {name: (lambda p=p: array_of(p)) for name, p in model.named_parameters()}, {})
    assert {b for _, b in types.values()} == {"F32", "Q8_0", "Q4_1"}
    tokens = random_tokens(300, 24)
    assert apart(llama_logits(tmp_path / "back.gguf", tokens), llama_logits(path, tokens)) < 0.05


@pytest.mark.parametrize("family", KINDS)
def test_command_trains_and_the_gguf_computes_what_the_trained_model_does(torch, checkpoint, family, tmp_path, capsys):
    from edgemoe.joint.train import load_model

    path, folder = checkpoint(family)
    data, out, heads = questions(12, tmp_path / "q.jsonl"), tmp_path / "joint.gguf", tmp_path / "heads.gguf"
    asked = ["train-joint", str(folder), "--gguf", str(path), "--data", str(data), "--out", str(out), "--heads", str(heads), "--mode", "spatio-temporal", "--lambda", "1"]
    asked += ["--steps", "3", "--warmup", "1", "--batch-tokens", "200", "--rate", "0.01", "--train", "experts", "--holdout", "0.2", "--threads", "1", "--json"]
    assert cli.main(asked) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["how"] == "joint" and said["steps"] == 3 and [row["step"] for row in said["held_out"]] == [0, 3]
    assert {name.split(".", 2)[2] for name in said["types"]} >= {"ffn_gate_inp.weight", "ffn_up_exps.weight"} and not any("attn" in name for name in said["types"])
    found = heads_file.load(heads)
    assert found.fingerprint == said["fingerprint"] and found.training["steps"] == 3 and found.mode == "spatio-temporal"
    with Source(out) as source:
        found.check_fits(source)
    with Source(path) as source, pytest.raises(heads_file.HeadsError, match="of another model"):
        found.check_fits(source)
    # The trained GGUF as a checkpoint again: PyTorch and llama.cpp agree on it, and it is not what it was.
    tokens = random_tokens(300, 24)
    after = llama_logits(out, tokens)
    assert apart(torch_logits(torch, load_model(export_checkpoint(out, tmp_path / "again")), tokens), after) < BOUND
    assert apart(llama_logits(path, tokens), after) > 10 * BOUND


def test_command_refuses_before_it_trains(torch, checkpoint, models, tmp_path, capsys):
    path, folder = checkpoint("qwen3moe")
    data = questions(4, tmp_path / "q.jsonl")

    def refused(folder, gguf, out):
        assert cli.main(["train-joint", str(folder), "--gguf", str(gguf), "--data", str(data), "--out", str(out), "--steps", "1"]) == 1
        return capsys.readouterr().err

    assert "no config.json" in refused(tmp_path, path, tmp_path / "o.gguf")
    assert "as in the checkpoint" in refused(folder, models("qwen3moe", "F32", dense_type="F32", n_expert=8), tmp_path / "o.gguf")
    assert "no folder" in refused(folder, path, tmp_path / "none" / "o.gguf")
    (tmp_path / "o.gguf.state.pt").write_bytes(b"x")
    assert "--resume goes on" in refused(folder, path, tmp_path / "o.gguf")
