"""What policies learn from traces: on traces so small, or so regular, that the tables are known beforehand."""

import os

import numpy as np
import pytest

from edgemoe import fit
from edgemoe.errors import TraceError
from edgemoe.policies import PolicyError, load_learned
from edgemoe.replay import DECODE, FIELDS, replay
from edgemoe.trace import Trace

N = 4   # experts
ABSENT = 255
EVERYTHING = ["usage", "follow", "temporal", "spatial", "maps", "sequences"]


def trace_of(*sequences, phase=None, n_expert=N, **arrays):
    """A sequence is a list of tokens; a token has one list of experts per layer."""
    ids = np.array([token for sequence in sequences for token in sequence], np.uint8)
    meta = {"n_expert": n_expert}
    phase = np.ones(len(ids), np.uint8) if phase is None else np.array(phase, np.uint8)
    arrays = {"token_ids": np.arange(len(ids), dtype=np.int32)} | arrays
    return Trace(ids=ids, offsets=np.cumsum([0, *map(len, sequences)]), phase=phase, meta=meta, where="made.npz", **arrays)


def tokens(*layers):
    """One expert per token and layer: a list of experts for each layer."""
    return [[[e] for e in token] for token in zip(*layers)]


def one(traces, name):
    return fit.fit(traces, [name])[name]


# --- by hand ---

def test_usage_counts_tokens():
    trace = trace_of([[[0, 1], [3, ABSENT]], [[0, 2], [3, 1]], [[ABSENT, ABSENT], [1, 0]]])
    assert one(trace, "usage").tolist() == [[2, 1, 1, 0], [1, 2, 0, 2]]


def test_usage_adds_up_several_traces():
    a, b = trace_of(tokens([0, 1])), trace_of(tokens([1, 1, 3]))
    assert one([a, b], "usage").tolist() == [[1, 3, 0, 1]]


def test_follow_has_shares_of_the_next_layer_and_of_the_next_token():
    # Layer 0: 0 0 1, layer 1: 2 3 3. After 0 of layer 0 comes 2 or 3; after 2 of layer 1 the 0 of the next token, and after the first 3 its 1.
    table = one(trace_of(tokens([0, 0, 1], [2, 3, 3])), "follow")
    assert table[0].tolist() == [[0, 0, 0.5, 0.5], [0, 0, 0, 1], [0] * N, [0] * N]
    assert table[1].tolist() == [[0] * N, [0] * N, [1, 0, 0, 0], [0, 1, 0, 0]]


def test_nothing_follows_the_end_of_a_sequence():
    # From 0 to 1 and from 2 to 3 within sequences; from 1 to 2 there is none. An empty sequence between them is nobody's.
    for sequences in ((tokens([0, 1]), tokens([2, 3])), (tokens([0, 1]), [], tokens([2, 3]), [])):
        sequences = [np.array(s).reshape(-1, 1, 1).tolist() for s in sequences]
        table = one(trace_of(*sequences), "follow")[0]
        assert table.tolist() == [[0, 1, 0, 0], [0] * N, [0, 0, 0, 1], [0] * N]
    several = one([trace_of(tokens([0, 1])), trace_of(tokens([2, 3]))], "follow")[0]
    assert (several == table).all()


def test_prompts_are_left_out():
    trace = trace_of(tokens([3, 3, 0, 1]), tokens([3, 1, 2]), phase=[0, 0, 1, 1, 0, 1, 1])
    assert one(trace, "usage").tolist() == [[1, 2, 1, 0]]
    assert one(trace, "follow")[0].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0] * N, [0] * N]
    assert one(trace, "sequences").sum(0).tolist() == [[1, 2, 1, 0]]
    assert set(fit.fit(trace, ["maps"])["map_tokens"]) == {2, 3, 5, 6}


def test_a_trace_of_prompts_only_counts_as_a_whole():
    assert one(trace_of(tokens([3, 3, 0, 1]), phase=[0] * 4), "usage").tolist() == [[1, 1, 0, 2]]


def test_sequences_have_the_counts_of_each():
    table = one(trace_of(tokens([0, 0], [1, 2]), tokens([3], [3])), "sequences")
    assert sorted(table.tolist()) == [[[0, 0, 0, 1], [0, 0, 0, 1]], [[2, 0, 0, 0], [0, 1, 1, 0]]]


def test_no_more_sequences_than_are_wanted(monkeypatch):
    monkeypatch.setattr(fit, "N_SEQUENCES", 3)
    table = one(trace_of(*[tokens([i % N, i % N]) for i in range(8)]), "sequences")
    assert table.shape == (3, 1, N) and (table.sum(2) == 2).all()


def test_maps_are_probabilities_of_known_tokens():
    probs = np.array([[[0.75, 0.25]], [[0.5, 0.5]], [[0.625, 0.125]]], np.float16)
    trace = trace_of([[[0, 1]], [[2, 1]], [[3, 0]]], probs=probs, token_ids=np.array([7, 8, 9], np.int32))
    tables = fit.fit(trace, ["maps"])
    found = dict(zip(tables["map_tokens"].tolist(), tables["maps"][:, 0].tolist()))
    assert found == {7: [0.75, 0.25, 0, 0], 8: [0, 0.5, 0.5, 0], 9: [0.125, 0, 0, 0.625]}


def test_maps_that_say_the_same_go_first(monkeypatch):
    monkeypatch.setattr(fit, "N_MAPS", 3)
    tables = fit.fit(trace_of(tokens([0, 1, 0, 2, 0, 0])), ["maps"])
    assert tables["maps"].shape == (3, 1, N)
    assert sorted(tables["maps"].argmax(2).ravel().tolist()) == [0, 1, 2]


def test_without_probabilities_the_chosen_have_equal_shares():
    trace = trace_of([[[0, 1]], [[2, ABSENT]]])
    assert sorted(fit.fit(trace, ["maps"])["maps"][:, 0].tolist()) == [[0, 0, 1, 0], [0.5, 0.5, 0, 0]]


# --- planted rules ---

def predicted(table, x):
    return table[..., :-1] @ x + table[..., -1]


def random_tokens(n, seed=0, n_expert=N):
    return np.random.default_rng(seed).integers(0, n_expert, n)


def test_spatial_finds_what_the_layers_do():
    # Each layer permutes the one before, and the first layer of a token what the last layer of the token before had: layer 0 goes 0, 3, 2, 1, 0, ...
    first = [0]
    for _ in range(199):
        first.append((first[-1] + 3) % N)
    first = np.array(first)
    table = one(trace_of(tokens(first, (first + 1) % N, (first + 2) % N)), "spatial")
    assert table.shape == (fit.N_AHEAD, 3, N, N + 1)
    step = {0: 0, 1: 1, 2: 2}
    for layer in range(3):
        for ahead in (1, 2, 3):
            then = (step[(layer + ahead) % 3] - step[layer] + (3 if layer + ahead >= 3 else 0)) % N
            for e in range(N):
                np.testing.assert_allclose(predicted(table[ahead - 1, layer], np.eye(N)[e]), np.eye(N)[(e + then) % N], atol=0.01)


def test_predictions_add_up_to_one_for_any_number_of_experts():
    first = random_tokens(300)
    trace = trace_of([[[a, (a + 1) % N], [(a + 2) % N, (a + 3) % N]] for a in first.tolist()])
    y = predicted(one(trace, "spatial")[0, 0], np.array([0.5, 0.5, 0, 0]))
    np.testing.assert_allclose(y, [0, 0, 0.5, 0.5], atol=0.01)


def test_spatial_reads_probabilities():
    # Layer 0 always uses 2. How likely 3 was tells whether layer 1 uses 0 or 1: in the mean, its share of 0 is that probability.
    rng = np.random.default_rng(1)
    p = rng.random(4000)
    probs = np.zeros((4000, 2, N), np.float16)
    probs[:, :, 2], probs[:, :, 3] = 1 - p[:, None], p[:, None]
    table = one(trace_of(tokens(np.full(4000, 2), rng.random(4000) > p), probs=probs), "spatial")[0, 0]
    for x in (0.1, 0.5, 0.9):
        np.testing.assert_allclose(predicted(table, [0, 0, 1 - x, x]), [x, 1 - x, 0, 0], atol=0.05)


def test_temporal_finds_what_the_next_token_does():
    # Each expert is followed by the next one.
    table = one(trace_of(tokens(np.arange(200) % N)), "temporal")
    assert table.shape == (1, N, 2 * N + 1)
    # Where it comes from, the token or the average, does not matter, as both tell: what is predicted along the sequence does.
    average = np.zeros(N)
    for t in range(40):
        now = np.eye(N)[t % N]
        average = 0.9 * average + 0.1 * now
        if t >= 10:
            np.testing.assert_allclose(predicted(table[0], np.concatenate([now, average])), np.eye(N)[(t + 1) % N], atol=0.05)


def test_temporal_does_not_learn_across_sequences():
    # 0 is followed by 1. Sequences end with 1 and begin with 0, which would say that 1 is followed by 0.
    table = one(trace_of(*[tokens([0, 1])] * 50), "temporal")
    np.testing.assert_allclose(predicted(table[0], np.concatenate([np.eye(N)[0], 0.1 * np.eye(N)[0]])), np.eye(N)[1], atol=0.01)


@pytest.mark.parametrize("lengths", [[1], [2, 1, 3], [0, 5, 0, 1], [700, 3, 300]])
def test_moving_average_as_in_a_loop(lengths):
    trace = trace_of(*[np.zeros((n, 1, 1), int).tolist() for n in [*lengths, 2]])
    x = np.random.default_rng(0).random((trace.n_tokens, 3), np.float32)
    expected = np.zeros_like(x, np.float64)
    for first, end in zip(trace.offsets, trace.offsets[1:]):
        average = np.zeros(3)
        for row in range(first, end):
            average = 0.9 * average + 0.1 * x[row]
            expected[row] = average
    np.testing.assert_allclose(fit._moving_average(fit._Rows([trace]), x), expected, atol=1e-6)


@pytest.mark.parametrize("n_rows", [1, 239, 240, 241, 5000])
@pytest.mark.parametrize("n_x, n_y", [(3, 5), (33, 33), (200, 100)])
def test_products_in_pieces(n_rows, n_x, n_y):
    rng = np.random.default_rng(0)
    x, y = rng.random((n_rows, n_x), np.float32), rng.random((n_rows, n_y), np.float32)
    for other in (x, y):
        np.testing.assert_allclose(fit._product(x, other), x.T.astype(np.float64) @ other, rtol=1e-5)


def test_perceptrons_learn_what_no_table_of_probabilities_can():
    # Layer 1 uses 0 where both values of the hidden state have the same sign, and 1 otherwise; layer 0 always uses 2.
    rng = np.random.default_rng(2)
    hidden = rng.normal(0, 3, (6000, 2, 2)).astype(np.float16)
    then = (np.sign(hidden[:, 0, 0]) != np.sign(hidden[:, 0, 1])).astype(int)
    tables = fit.fit(trace_of(tokens(np.full(6000, 2), then), hidden=hidden), ["spatial"])
    assert tables["mlp1"].shape == (fit.N_AHEAD, 2, fit.N_HIDDEN, 3) and tables["mlp2"].shape == (fit.N_AHEAD, 2, N, fit.N_HIDDEN + 1)
    x = hidden[:, 0].astype(np.float64).T
    y = predicted_by(tables["mlp1"][0, 0], tables["mlp2"][0, 0], x)
    error = ((y - np.eye(N)[then].T) ** 2).mean()
    assert error < 0.4 * 0.125   # that of the constant 1/2
    assert (y.argmax(0) == then).mean() > 0.9


def predicted_by(w1, w2, x):
    return w2[:, :-1] @ np.maximum(w1[:, :-1] @ x + w1[:, -1:], 0) + w2[:, -1:]


def test_perceptrons_only_where_there_are_hidden_states():
    assert set(fit.fit(trace_of(tokens([0, 1, 2])), ["spatial"])) == {"spatial"}


def test_the_same_tables_every_time():
    trace = trace_of(*[tokens(random_tokens(50, s), random_tokens(50, s + 1)) for s in range(9)])
    first, again = fit.fit(trace, EVERYTHING), fit.fit(trace, EVERYTHING)
    assert all((first[name] == again[name]).all() for name in first)


# --- from fit to policy ---

CYCLE = np.arange(60) % N
CHAIN = trace_of(tokens(CYCLE, (CYCLE + 1) % N))


def test_what_was_saved_is_what_is_loaded(tmp_path):
    tables, path = fit.fit(CHAIN, EVERYTHING), tmp_path / "chain.fit.npz"
    fit.save(path, tables)
    loaded = load_learned(path)
    assert set(loaded) == {"usage", "follow", "temporal", "spatial", "maps", "map_tokens", "sequences"}
    assert all(loaded[name].dtype == np.float32 and (loaded[name] == tables[name]).all() for name in tables)
    assert os.listdir(tmp_path) == ["chain.fit.npz"]


@pytest.mark.parametrize("policy, n_hits", [("spatio", 119), ("st-moe", 119), ("promoe", 60), ("mixtral-offloading:k=1", 60), ("lru", 0)])
def test_learned_policies_foresee_a_chain(policy, n_hits, tmp_path):
    # Every layer says what the next one uses, and the last layer what the next token does: all but the very first event hit. Two of the policies stop at the end of a token.
    path = tmp_path / "chain.fit.npz"
    fit.save(path, fit.fit(CHAIN, ["spatial", "follow"]))
    counts = replay(CHAIN, policy if policy == "lru" else f"{policy}{',' if ':' in policy else ':'}fit={path}", 2).counts[0, DECODE].sum(0)
    assert counts[[FIELDS.index("n_accesses"), FIELDS.index("n_hits")]].tolist() == [120, n_hits]


@pytest.mark.parametrize("content", [None, b"", b"not an archive"])
def test_files_that_hold_nothing_learned(content, tmp_path):
    path = tmp_path / "broken.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PolicyError) as error:
        load_learned(path)
    assert str(error.value).startswith(f"{path}: cannot be read as what a policy has learned: ") and "\n" not in str(error.value)


def test_tables_cannot_be_saved_into_a_missing_folder(tmp_path):
    with pytest.raises(TraceError, match="No such file or directory$"):
        fit.save(tmp_path / "missing" / "a.npz", {"usage": np.zeros((1, N))})


# --- what is refused, in one line ---

def test_traces_of_different_models():
    a, b = trace_of(tokens([0, 1])), trace_of(tokens([0, 1], [1, 2]))
    with pytest.raises(TraceError) as error:
        fit.fit([a, b], ["usage"])
    assert str(error.value) == "made.npz: 2 layers of 4 experts, 1 used; made.npz has 1 of 4, 1 used"


def test_hidden_states_of_different_models():
    a, b = (trace_of(tokens([0, 1]), hidden=np.zeros((2, 1, n), np.float16)) for n in (8, 16))
    with pytest.raises(TraceError, match="^made.npz: hidden states of 8 and of 16 values; they are of different models$"):
        fit.fit([a, b], ["usage"])


@pytest.mark.parametrize("sequences", [[], [tokens([0])]])
def test_too_few_tokens(sequences):
    trace = trace_of(*sequences) if sequences else Trace(np.zeros((0, 1, 1), np.uint8), np.zeros(0, np.int32), np.array([0]), np.zeros(0, np.uint8), {"n_expert": N}, where="made.npz")
    with pytest.raises(TraceError, match=f"^made.npz: {len(sequences)} tokens to learn from, wanted more$"):
        fit.fit(trace, ["usage"])
