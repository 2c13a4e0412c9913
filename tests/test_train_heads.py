"""Training of learned heads: the loss by hand, its gradient against finite differences and PyTorch's, and a training that repeats itself, resumes and finds what is there."""

import json

import numpy as np
import pytest

from edgemoe import heads as heads_file
from edgemoe import train_heads as T
from edgemoe.coverage import coverage_loss, membership, through_softmax
from edgemoe.heads import MODES, softmax
from edgemoe.package import Source
from edgemoe.routers import Router, native_routers
from edgemoe.trace import DECODE, FORMAT, PROMPT, Trace

# --- the loss


@pytest.mark.parametrize("tau", [1e-4, 0.01, 0.3, 10])
@pytest.mark.parametrize("slots", [1, 3, 7])
def test_membership_adds_up_to_the_slots(slots, tau):
    rng = np.random.default_rng(0)
    for dtype, near in ((np.float64, 1e-9), (np.float32, 1e-3)):
        for scores in (rng.random((50, 8)), np.zeros((2, 8)), np.repeat([[0.0, 1.0]], 4, 1).reshape(1, 8), rng.choice([0.0, 1e-3, 1.0], (50, 8))):
            m = membership(scores.astype(dtype), slots, tau)
            assert m.dtype == dtype and np.abs(m.sum(1) - slots).max() < near * slots
            order = np.argsort(scores, 1)
            assert (np.diff(np.take_along_axis(m, order, 1), axis=1) >= 0).all()


def test_two_of_four_by_hand():
    # Scores 3 2 1 0, two slots: the threshold lies at 1.5 by symmetry, and m = sigmoid(+-1.5), sigmoid(+-0.5) at tau = 1.
    scores, demand = np.array([[3.0, 2, 1, 0]]), np.array([[1.0, 0, 1, 0]])
    a, b = 1 / (1 + np.exp(-1.5)), 1 / (1 + np.exp(-0.5))
    assert np.allclose(membership(scores, 2, 1.0), [[a, b, 1 - b, 1 - a]])
    assert np.allclose(coverage_loss(scores, demand, 2, 1.0)[0], 1 - (a + 1 - b) / 2)
    # A hard choice has 0 of the second expert that is needed.
    assert np.allclose(coverage_loss(scores, demand, 2, 1e-3)[0], 0.5)
    loss, gradient = coverage_loss(scores, np.zeros((1, 4)), 2, 1.0)
    assert loss == 0 and not gradient.any()


def numeric(f, x, step=1e-6):
    found = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        kept = x[i]
        x[i] = kept + step
        up = f()
        x[i] = kept - step
        found[i] = (up - f()) / (2 * step)
        x[i] = kept
    return found


@pytest.mark.parametrize("tau", [0.02, 0.1, 1])
def test_the_gradient_of_the_loss_is_that_of_finite_differences(tau):
    rng = np.random.default_rng(1)
    scores, demand = rng.random((3, 7)), (rng.random((3, 7)) < 0.4) * 1.0
    demand[2] = rng.random(7)  # shares, not only yes and no
    _, gradient = coverage_loss(scores, demand, 3, tau)
    assert np.allclose(gradient, numeric(lambda: coverage_loss(scores, demand, 3, tau)[0].sum(), scores), atol=1e-6, rtol=1e-4)
    assert np.abs(gradient).max() > 0.01 and np.allclose(gradient.sum(1), 0)


def test_the_gradient_through_a_softmax():
    rng = np.random.default_rng(2)
    z, weight = rng.normal(0, 1, (4, 5)), rng.normal(0, 1, (4, 5))
    found = through_softmax(softmax(z.copy()), weight)
    assert np.allclose(found, numeric(lambda: (softmax(z.copy()) * weight).sum(), z), atol=1e-7)


def drawn(mode, n=6, n_expert=7, n_embd=5):
    rng = np.random.default_rng(3)
    weights = {}
    for head in MODES[mode]:
        weights |= {f"{head}.weight": rng.normal(0, 1, (n_expert, n_embd)), f"{head}.bias": rng.normal(0, 1, n_expert)}
    hidden = {head: rng.normal(0, 1, (n, n_embd)) for head in MODES[mode]}
    return weights, softmax(rng.normal(0, 1, (n, n_expert))), hidden, (rng.random((n, n_expert)) < 0.3) * 1.0


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_all_weights_are_those_of_finite_differences(mode):
    weights, *data = drawn(mode)
    _, gradients = T.loss_and_gradients(mode, weights, *data, 3, 0.05)
    assert set(gradients) == set(weights)
    for name, w in weights.items():
        wanted = numeric(lambda: T.loss_and_gradients(mode, weights, *data, 3, 0.05)[0], w)
        assert np.abs(wanted).max() > 1e-3 and np.allclose(gradients[name], wanted, atol=1e-6, rtol=1e-3), name


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_pytorchs(mode):
    torch = pytest.importorskip("torch")
    weights, native, hidden, demand = drawn(mode)
    loss, gradients = T.loss_and_gradients(mode, weights, native, hidden, demand, 3, 0.05)
    w = {name: torch.tensor(a, requires_grad=True) for name, a in weights.items()}
    native, demand, hidden = torch.tensor(native), torch.tensor(demand), {head: torch.tensor(h) for head, h in hidden.items()}
    probs = {head: torch.softmax(hidden[head] @ w[f"{head}.weight"].T + w[f"{head}.bias"], 1) for head in hidden}

    def uncovered(scores):
        # The threshold by bisection, and one step of Newton's method, through which PyTorch finds how it moves with the scores.
        low, high = scores.detach().min(1).values - 5, scores.detach().max(1).values + 5
        for _ in range(80):
            middle = (low + high) / 2
            more = torch.sigmoid((scores.detach() - middle[:, None]) / 0.05).sum(1) > 3
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        m = torch.sigmoid((scores - low[:, None]) / 0.05)
        theta = low + (m.sum(1) - 3) / (m * (1 - m)).sum(1).detach() * 0.05
        m = torch.sigmoid((scores - theta[:, None]) / 0.05)
        return (1 - (m * demand).sum(1) / demand.sum(1).clamp(min=1)).mul(demand.sum(1) > 0).mean()

    stages = [["head_t"], ["head_t", "head_s"]] if mode == "spatio-temporal" else [list(MODES[mode])]
    wanted = sum(uncovered(native + sum(probs[head] for head in used)) for used in stages) / len(stages)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-9)
    for name in weights:
        assert np.allclose(gradients[name], w[name].grad.numpy(), atol=1e-9, rtol=1e-6), name


# --- training on a made-up model: the hidden state says the experts to come, but not through the native routers

N_LAYERS, N_EXPERT, N_EMBD, MARK = 3, 8, 12, "f" * 32


def made(n_sequences=8, length=60, n_prompt=4, seed=0, probs="all", gating="softmax over all"):
    """Two experts of eight, a hidden value for each: the native router reads values 0 to 3 as it likes; what comes next for the layer lies in the last 8."""
    rng = np.random.default_rng(seed)
    routers = [Router(rng.normal(0, 1, (N_EXPERT, N_EMBD)).astype(np.float32) * (np.arange(N_EMBD) < 4)) for _ in range(N_LAYERS)]
    ids, hidden, native = [], [], []
    for _ in range(n_sequences):
        chosen = np.array([[rng.permutation(N_EXPERT)[:2] for _ in range(N_LAYERS)] for _ in range(length)])
        h = rng.normal(0, 1, (length, N_LAYERS, N_EMBD))
        h[..., 4:] = 0
        for t in range(length - 1):
            for layer in range(N_LAYERS):
                h[t, layer, 4 + chosen[t + 1, layer]] = 3
        ids.append(chosen)
        hidden.append(h)
    ids, hidden = np.concatenate(ids).astype(np.uint8), np.concatenate(hidden).astype(np.float16)
    all_probs = np.stack([softmax(r.logits(hidden[:, layer])) for layer, r in enumerate(routers)], 1)
    kept = {"all": all_probs, "chosen": np.take_along_axis(all_probs, ids.astype(np.int64), 2), None: None}[probs]
    meta = {
        "format": FORMAT, "model": "made up", "architecture": "qwen3moe", "fingerprint": MARK, "n_expert": N_EXPERT, "n_used": 2, "layers": list(range(N_LAYERS)),
        "bytes_per_expert": [1] * N_LAYERS, "n_embd": N_EMBD, "probs": probs, "probs_are": f"{gating}, of every expert", "source": "made.txt",
    }
    phase = np.tile(np.where(np.arange(length) < n_prompt, PROMPT, DECODE).astype(np.uint8), n_sequences)
    arrays = {"probs": None if kept is None else kept.astype(np.float16), "hidden": hidden}
    trace = Trace(ids=ids, token_ids=np.arange(len(ids), dtype=np.int32), offsets=np.arange(0, len(ids) + 1, length), phase=phase, meta=meta, where="made.npz", **arrays)
    return trace, routers


OPTIONS = T.Options(slots=3, tau=0.05, epochs=3, rate=0.05, batch=32, holdout=0.25)


def with_(**changes):
    return T.Options(**{**OPTIONS.__dict__, **changes})


@pytest.fixture(scope="module")
def data():
    return made()


def test_a_head_learns_what_the_routers_do_not_say(data):
    trace, routers = data
    said = T.train([trace], routers, OPTIONS).training
    first, last = said["held_out"][0], said["held_out"][said["best_epoch"]]
    assert said["best_epoch"] > 0 and last["n_accesses"] == first["n_accesses"] == said["lru"]["n_accesses"] >= 2 * 2 * 3 * 56
    # What is used next was used by chance 3/8 of the times before; a miss can be kept only from what is there, so that even a perfect head is far from 1.
    assert last["n_hits"] > 1.2 * first["n_hits"] and last["n_hits"] > 1.2 * said["lru"]["n_hits"]
    losses = [row["loss"] for row in said["held_out"][1:]]
    assert losses[-1] < 0.5 * losses[0] and said["n_rows"] == 6 * 55 and said["n_sequences"] == 6 and said["n_held_out"] == 2


def test_spatial_heads_look_at_the_layer_before_and_wrap_around():
    # Here the hidden state of a layer says what the next layer uses, that of the last one what the first uses for the next token.
    trace, routers = made()
    hidden = np.array(trace.hidden)
    hidden[..., 4:] = 0
    for t in range(trace.n_tokens - 1):
        for layer in range(N_LAYERS):
            to = (t, layer + 1) if layer + 1 < N_LAYERS else (t + 1, 0)
            hidden[t, layer, 4 + trace.ids[to].astype(int)] = 3
    trace.hidden = hidden
    heads = T.train([trace], routers, with_(mode="spatio", epochs=4))
    rows = np.flatnonzero(trace.phase == DECODE)[:-1]
    for layer in range(N_LAYERS):
        best = np.argsort(-heads.probs("head_s", layer, hidden[rows, layer]), 1)[:, :2]
        to = trace.ids[rows, layer + 1] if layer + 1 < N_LAYERS else trace.ids[rows + 1, 0]
        same = (np.sort(best, 1) == np.sort(to, 1)).all(1)
        if layer + 1 == N_LAYERS:
            same = same[trace.phase[rows + 1] == DECODE]  # not from one sequence to the next
        assert same.mean() > 0.9, layer


def test_training_starts_as_the_native_routers(data):
    trace, routers = data
    weights = T.start(routers, "spatio-temporal")
    for layer in range(N_LAYERS):
        assert (weights["head_t.weight"][layer] == routers[layer].weight).all()
        assert (weights["head_s.weight"][layer] == routers[(layer + 1) % N_LAYERS].weight).all()
        assert not weights["head_t.bias"][layer].any()
    with_bias = [Router(r.weight, np.arange(N_EXPERT, dtype=np.float32)) for r in routers]
    assert T.start(with_bias, "temporal")["head_t.bias"][1].tolist() == list(range(N_EXPERT))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_writes_the_same_bytes(data, mode, tmp_path):
    trace, routers = data
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        heads_file.save(tmp_path / name, T.train([trace], routers, with_(mode=mode, epochs=1, seed=seed)))
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_parts_of_a_trace_are_as_good_as_one(data):
    trace, routers = data
    parts = [trace.select(range(3)), trace.select(range(3, 8))]
    whole, several = T.train([trace], routers, with_(epochs=1)), T.train(parts, routers, with_(epochs=1))
    assert all((a == b).all() for a, b in zip(whole.weights_t, several.weights_t))


def test_blocks_hold_every_row_once_and_fit_into_memory(data, monkeypatch):
    trace, routers = data
    monkeypatch.setattr(T, "BLOCK_BYTES", 128 * 24)  # two runs of 64 rows of 12 values
    rows = T.Rows([trace], [(0, s) for s in range(8)], routers)
    blocks = list(rows.blocks(np.random.default_rng(0), 24))
    assert sorted(np.concatenate(blocks)) == list(range(8 * 55)) and max(map(len, blocks)) == 128 and len(blocks) == 4
    assert (np.diff(np.concatenate([b[:1] for b in blocks])) < 0).any()  # not in the trace's order
    T.train([trace], routers, with_(epochs=1))


def test_rows_without_all_probabilities_get_them_from_the_routers():
    trace, routers = made()
    wanted = T.Rows([trace], [(0, 1)], routers).native(np.arange(55), 1)
    for probs, gating in (("chosen", "softmax over all"), ("chosen", "softmax over the chosen")):
        chosen, _ = made(probs=probs, gating=gating)
        assert np.allclose(T.Rows([chosen], [(0, 1)], routers).native(np.arange(55), 1), wanted, atol=1e-3)
    sigmoid, _ = made(probs="chosen", gating="sigmoid")
    z = routers[1].logits(sigmoid.hidden[sigmoid.offsets[1] + 4 : sigmoid.offsets[2] - 1, 1])
    assert np.allclose(T.Rows([sigmoid], [(0, 1)], routers).native(np.arange(55), 1), 1 / (1 + np.exp(-z)))


class Stop(Exception):
    pass


def stopped_after(n, kind):
    def progress(step):
        progress.n += 1
        if progress.n > n:
            raise kind

    progress.n = 0
    return progress


@pytest.mark.parametrize("kind, n", [(KeyboardInterrupt, 2), (KeyboardInterrupt, 6), (Stop, 5), (Stop, 9)])
def test_a_training_that_was_stopped_goes_on_to_the_same_bytes(data, tmp_path, kind, n):
    """Ctrl-C writes the state; a kill, here an exception that nobody catches, leaves the last one that was written."""
    trace, routers = data
    options, state = with_(mode="spatio-temporal"), tmp_path / "state.npz"
    heads_file.save(tmp_path / "whole", T.train([trace], routers, options))
    with pytest.raises(kind):
        T.train([trace], routers, options, state, progress=stopped_after(n, kind), save_every=2)
    assert state.exists()
    steps = []
    heads_file.save(tmp_path / "resumed", T.train([trace], routers, options, state, resume=True, progress=steps.append))
    assert not state.exists() and (tmp_path / "whole").read_bytes() == (tmp_path / "resumed").read_bytes()
    assert len(steps) < 1 + 3 * (N_LAYERS + 1)


def test_a_state_of_something_else_is_refused(data, tmp_path):
    trace, routers = data
    state = tmp_path / "state.npz"
    with pytest.raises(KeyboardInterrupt):
        T.train([trace], routers, OPTIONS, state, progress=stopped_after(3, KeyboardInterrupt))
    for changed in (with_(seed=1), with_(tau=0.1)):
        with pytest.raises(T.TrainingError, match="state.npz: is the state of a training with other options or traces"):
            T.train([trace], routers, changed, state, resume=True)
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(T.TrainingError, match="state.npz: cannot be read as the state of a training"):
        T.train([trace], routers, OPTIONS, state, resume=True)


def test_it_stops_when_held_out_sequences_gain_nothing(data):
    trace, routers = data
    said = T.train([trace], routers, with_(rate=1e-9, epochs=9, patience=2)).training
    assert len(said["held_out"]) == 3 and said["best_epoch"] == 0


def test_the_same_text_twice_is_on_one_side():
    trace, _ = made(n_sequences=4)
    twice = trace.select([0, 1, 2, 3, 0, 1, 2, 3])
    fit, held_out = T.parted([twice, trace], 0.5, 0)
    assert {s % 4 for _, s in fit}.isdisjoint({s % 4 for _, s in held_out}) and len(fit) == len(held_out) == 6


def test_what_cannot_be_trained_from_is_named(data):
    trace, routers = data
    no_probs, _ = made(probs=None, gating="")
    without = Trace(**{**trace.__dict__, "hidden": None, "where": "other.npz"})
    for traces, options, message in (
        ([trace, without], OPTIONS, "other.npz: has no hidden states"),
        ([no_probs], OPTIONS, "does not say how the model makes them: record it with --full-probs"),
        ([trace], with_(slots=8), "slots 8, wanted 1 to 7"),
        ([trace], with_(batch=1000), "found 330 decoded tokens .* wanted a batch of 1000"),
        ([trace.select([0])], OPTIONS, "found 1 different sequence, wanted 2 or more"),
    ):
        with pytest.raises(T.TrainingError, match=message):
            T.train(traces, routers, options)
    with pytest.raises(T.TrainingError, match="found 3 layers of 12 values, wanted 2 of 12"):
        T.train([trace], routers[:2], OPTIONS)


# --- with a model


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_probabilities_of_the_native_router_are_llama_cpps(models, tmp_path, family):
    """Softmax, softmax with a bias of the logits, and sigmoid; a trace of the chosen gets the same from hidden states as one of all has."""
    import edgemoe

    model = models(family, "Q8_0")
    llm = edgemoe.Llama(str(model), n_ctx=64, verbose=False, n_threads=1)
    with edgemoe.Recorder(llm, tmp_path / "t.npz", full_probs=True, hidden=True) as recorder, recorder.sequence():
        llm("Hello world", max_tokens=12, temperature=1.0, seed=1)
    llm.close()
    trace = Trace.load(tmp_path / "t.npz")
    with Source(model) as source:
        routers = native_routers(source)
    rows = T.Rows([trace], [(0, 0)], routers)
    which = np.arange(len(rows))
    wanted = [rows.native(which, layer) for layer in range(trace.n_layers)]
    trace.meta["probs"] = "chosen"
    found = [rows.native(which, layer) for layer in range(trace.n_layers)]
    assert len(which) >= 5 and np.abs(np.array(found) - np.array(wanted)).max() < 2e-3


def test_routers_of_a_package_are_those_of_its_model(models, packages):
    model = models("gpt-oss", "Q8_0")
    found = []
    for path in (model, packages(model)):
        with Source(path) as source:
            found.append(native_routers(source))
    for a, b in zip(*found, strict=True):
        assert (a.weight == b.weight).all() and (a.bias == b.bias).all() and a.weight.dtype == np.float32


@pytest.fixture(scope="module")
def recorded(models, tmp_path_factory):
    """A trace of a tiny model, with what it says of the model; its tokens are noise."""
    path = tmp_path_factory.mktemp("recorded") / "t.npz"
    with Source(models("qwen3moe", "Q8_0")) as source:
        n_embd, n_used = source.integer("embedding_length"), source.integer("expert_used_count")
        n_expert, n_layers, mark = source.layers[0].n_expert, len(source.layers), source.package_fingerprint()
    rng = np.random.default_rng(0)
    n = 4 * 40
    ids = np.array([[rng.permutation(n_expert)[:n_used] for _ in range(n_layers)] for _ in range(n)], np.uint8)
    meta = {
        "format": FORMAT, "model": "tiny", "architecture": "qwen3moe", "fingerprint": mark, "n_expert": n_expert, "n_used": n_used, "layers": list(range(n_layers)),
        "bytes_per_expert": [1] * n_layers, "n_embd": n_embd, "probs": "all", "probs_are": "softmax over all", "source": "noise.txt", "recorded": {},
    }
    arrays = {"probs": softmax(rng.normal(0, 1, (n, n_layers, n_expert))).astype(np.float16), "hidden": rng.normal(0, 1, (n, n_layers, n_embd)).astype(np.float16)}
    phase = np.full(n, DECODE, np.uint8)
    Trace(ids=ids, token_ids=np.arange(n, dtype=np.int32), offsets=np.arange(0, n + 1, 40), phase=phase, meta=meta, **arrays).save(path)
    return path


def test_the_command_writes_heads_of_the_model(models, recorded, edgemoe, tmp_path):
    model = models("qwen3moe", "Q8_0")
    arguments = ["train-heads", recorded, "--model", model, "--mode", "spatio-temporal", "--epochs", 1, "--batch", 16, "--holdout", "0.25", "--out", "h.gguf", "--type", "q8_0"]
    done = edgemoe(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["heads"] == "h.gguf" and said["slots"] == 10 and said["n_held_out"] == 1 and len(said["held_out"]) == 2
    found = heads_file.load(tmp_path / "h.gguf")
    with Source(model) as source:
        found.check_fits(source)
    assert found.training["options"]["mode"] == "spatio-temporal" and found.training["traces"] == [{"name": "t.npz", "source": "noise.txt", "n_sequences": 4}]
    table = edgemoe(*arguments)
    assert table.returncode == 0 and "after epoch 1" in table.stdout and "h.gguf: " in table.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.gguf"]


def test_the_command_refuses_by_name(models, recorded, edgemoe, tmp_path):
    (tmp_path / "h.gguf.state.npz").write_bytes(b"")
    for arguments, message in (
        (["--model", models("olmoe", "Q8_0")], "was recorded from another model"),
        (["--model", models("qwen3moe", "Q8_0"), "--out", "h.gguf"], "h.gguf.state.npz: is the state of a training that was interrupted: --resume goes on"),
        (["--model", models("qwen3moe", "Q8_0"), "--out", "none/h.gguf"], "no folder none that can be written to"),
        (["--model", models("qwen3moe", "Q8_0"), "--slots", 16, "--out", "x.gguf"], "slots 16, wanted 1 to 15"),
    ):
        done = edgemoe("train-heads", recorded, *arguments)
        assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
