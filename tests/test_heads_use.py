"""Learned heads in the simulator and in edgemoe tune: what they say reaches the policies, and they are recommended only where they pay."""

import json
from dataclasses import replace

import numpy as np
import pytest

from edgemoe import heads as heads_file
from edgemoe import head_outputs, recommendation, simulate, tune
from edgemoe.heads import Heads, HeadsError, softmax
from edgemoe.package import Source
from edgemoe.recommendation import RecommendationError
from edgemoe.simulate import Rates, SimulationError
from edgemoe.trace import DECODE, FORMAT, Trace

N_SEQUENCES, LENGTH, SLOTS = 8, 40, 8


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "edgemoe"


@pytest.fixture(scope="module")
def model(models):
    return models("qwen3moe", "Q8_0")


@pytest.fixture
def source(model):
    with Source(model) as opened:
        yield opened


@pytest.fixture
def trace(source):
    """Experts at random, which nobody can foretell but from the hidden state: value e of it is 8 where the layer's next event uses expert e, value E + e where the next layer's
    does."""
    n_expert, n_layers, n_used, n_embd = source.layers[0].n_expert, len(source.layers), source.integer("expert_used_count"), source.integer("embedding_length")
    rng = np.random.default_rng(0)
    n = N_SEQUENCES * LENGTH
    ids = np.array([[rng.permutation(n_expert)[:n_used] for _ in range(n_layers)] for _ in range(n)], np.uint8)
    hidden = np.zeros((n, n_layers, n_embd), np.float16)
    for t in range(n):
        for layer in range(n_layers):
            if t + 1 < n:
                hidden[t, layer, ids[t + 1, layer]] = 8
            if layer + 1 < n_layers or t + 1 < n:
                hidden[t, layer, n_expert + ids[(t, layer + 1) if layer + 1 < n_layers else (t + 1, 0)].astype(int)] = 8
    meta = {
        "format": FORMAT, "model": "made up", "architecture": source.architecture, "fingerprint": source.package_fingerprint(), "n_expert": n_expert, "n_used": n_used,
        "layers": [layer.layer for layer in source.layers], "bytes_per_expert": [layer.bytes_per_expert for layer in source.layers], "n_embd": n_embd, "probs": "all",
        "probs_are": "softmax over all", "source": "", "recorded": {},
    }
    probs = np.full((n, n_layers, n_expert), 1 / n_expert, np.float16)
    offsets = np.arange(0, n + 1, LENGTH)
    return Trace(ids=ids, token_ids=np.arange(n, dtype=np.int32), offsets=offsets, phase=np.full(n, DECODE, np.uint8), probs=probs, hidden=hidden, meta=meta, where="made.npz")


def heads_for(source, mode="spatio-temporal", right=True, sequences=()):
    """right: they say what the hidden states of `trace` know; else something else."""
    n_expert, n_embd = source.layers[0].n_expert, source.integer("embedding_length")
    found = Heads(source.package_fingerprint(), [layer.layer for layer in source.layers], [n_expert] * len(source.layers), mode, SLOTS, 0.01, training={"sequences": list(sequences)}, where="h.gguf")
    for head, first in (("head_t", 0), ("head_s", n_expert)):
        if head in heads_file.MODES[mode]:
            weight = np.eye(n_expert, n_embd, first, dtype=np.float32)
            setattr(found, f"weights_{head[-1]}", [weight if right else -weight for _ in source.layers])
    found.check()
    return found


def rows_of(trace, asked, n_slots=SLOTS, misses="load"):
    plan = simulate.plan_runs(trace, asked, [n_slots], [misses])
    return {r["policy"]: r for r in simulate.summaries(trace, simulate.run_all(trace, plan, None))}


# --- the simulator


def test_outputs_are_the_heads_probabilities_in_float32(source, trace, monkeypatch):
    heads = heads_for(source)
    monkeypatch.setattr(head_outputs, "ROWS", 100)  # pieces that fit neither the rows nor the sequences
    pieces = []
    parts = [trace.select(range(3)), trace.select(range(3, N_SEQUENCES))]
    found = head_outputs.outputs(heads, parts, trace.n_expert, pieces.append)
    assert set(found) == {"head_t", "head_s"} and sum(pieces) == trace.n_tokens and len(pieces) > 3
    for head, first in (("head_t", 0), ("head_s", trace.n_expert)):
        wanted = softmax(trace.hidden[..., first : first + trace.n_expert].astype(np.float32))
        assert found[head].dtype == np.float32 and np.allclose(found[head], wanted, atol=1e-6)
    monkeypatch.setattr(head_outputs, "MOST_IN_MEMORY", 1000)
    on_disk = head_outputs.outputs(heads, parts, trace.n_expert)
    assert isinstance(on_disk["head_t"], np.memmap) and all((on_disk[head] == found[head]).all() for head in found)


def test_policies_go_by_heads_in_the_simulator(source, trace):
    without = rows_of(trace, ["lru"])
    told = rows_of(simulate.joined_with_heads([trace], heads_for(source)), ["temporal", "spatio", "spatio-temporal:R=1", "spatio-temporal:R=4"])
    misled = rows_of(simulate.joined_with_heads([trace], heads_for(source, right=False)), ["temporal"])
    lru, temporal = without["lru"]["n_hits"], told["temporal"]["n_hits"]
    assert misled["temporal"]["n_hits"] < lru < temporal <= told["belady:force=0"]["n_hits"]
    # Four experts are used: whoever may bring four before each event has them all but at the beginning, whoever may bring one has more than who brings none.
    assert temporal < told["spatio-temporal:R=1"]["n_hits"] < told["spatio-temporal:R=4"]["n_hits"] >= 0.95 * told["lru"]["n_accesses"]
    assert told["temporal"]["n_proactive"] == 0 < told["spatio-temporal:R=1"]["n_proactive"]


def test_what_heads_do_not_fit_is_refused(source, trace):
    heads = heads_for(source)
    for change, message in (({"hidden": None}, "made.npz: has no hidden states"), ({"meta": {**trace.meta, "fingerprint": "0" * 32}}, "made.npz: was recorded from another model")):
        with pytest.raises(HeadsError, match=message):
            simulate.joined_with_heads([replace(trace, **change)], heads)
    seen = [mark[:12] for mark in trace.sequence_hashes()[2:4]]
    with pytest.raises(SimulationError, match="2 sequences of made.npz: h.gguf was trained on them"):
        simulate.require_not_learned(heads_for(source, sequences=seen), [trace])
    simulate.require_not_learned(heads_for(source, sequences=["0" * 12]), [trace])


def test_tables_that_heads_stand_in_for_are_not_fitted(trace):
    learned = simulate.learn([trace], ["temporal", "spatio-temporal", "static"], heads=("head_t", "head_s"))
    assert set(learned) == {"usage"}
    assert set(simulate.learn([trace], ["temporal", "promoe"], heads=("head_t",))) == {"spatial", "mlp1", "mlp2"}


def test_the_command_takes_heads(source, trace, edgemoe, tmp_path):
    trace.save(tmp_path / "t.npz")
    heads_file.save(tmp_path / "h.gguf", heads_for(source))
    done = edgemoe("simulate", "t.npz", "--heads", "h.gguf", "--policy", "temporal spatio-temporal:R=1|4 promoe", "--capacity", SLOTS, "--misses", "load", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    wanted = rows_of(simulate.joined_with_heads([trace], heads_for(source)), ["temporal", "spatio-temporal:R=1", "spatio-temporal:R=4"])
    assert {r["policy"]: r["n_hits"] for r in said["runs"]} == {p: r["n_hits"] for p, r in wanted.items()}
    assert said["heads"] == "h.gguf" and said["left_out"] == {"promoe": "needs --train"}
    without = edgemoe("simulate", "t.npz", "--policy", "temporal", "--capacity", SLOTS, "--json")
    assert json.loads(without.stdout)["left_out"] == {"temporal": "needs --train or --heads"}
    (tmp_path / "h.gguf").write_bytes((tmp_path / "h.gguf").read_bytes()[:-64])
    done = edgemoe("simulate", "t.npz", "--heads", "h.gguf")
    assert done.returncode == 1 and "h.gguf: tensor" in done.stderr and done.stderr.count("\n") == 1


# --- tune


def test_heads_that_pay_are_recommended(source, trace):
    heads = heads_for(source)
    tuned = tune.tune(source, simulate.joined_with_heads([trace], heads), SLOTS, "load", asked=["temporal", "lfu"], heads=heads)
    assert (tuned.policy, tuned.heads, tuned.tables, tuned.is_default) == ("temporal", True, {}, False)
    row = next(r for r in tuned.rows if r["heads"])
    others = [r for r in tuned.rows if not r["heads"]]
    assert row["expert_ms"] < min(r["expert_ms"] for r in others) and "temporal" in {r["policy"] for r in others}  # with a table, beside it
    assert row["saved_by_heads_ms"] == pytest.approx(min(r["expert_ms"] for r in others) - row["expert_ms"]) and row["saved_by_heads_ms_ci"][0] > 0
    assert tuned.heads_note.startswith("learned heads: temporal saves +")


def test_heads_that_do_not_pay_are_not(source, trace):
    heads = heads_for(source, right=False)
    tuned = tune.tune(source, simulate.joined_with_heads([trace], heads), SLOTS, "load", asked=["temporal", "lfu"], heads=heads)
    assert not tuned.heads and tuned.heads_note.startswith("learned heads: temporal saves -")


def test_hits_that_are_bought_with_traffic_do_not_pay(source, trace):
    """Right foretelling, and nearly no miss: but every expert comes over the same link, and nothing goes on meanwhile."""
    heads = heads_for(source, "spatio")
    tuned = tune.tune(source, simulate.joined_with_heads([trace], heads), SLOTS, "load", asked=["spatio:R=4"], heads=heads)
    row = next(r for r in tuned.rows if r["heads"])
    assert row["hit"] > 0.9 and not tuned.heads and row["saved_by_heads_ms_ci"][0] <= 0
    busy = tune.tune(source, simulate.joined_with_heads([trace], heads), SLOTS, "load", Rates(device=1e9), ["spatio:R=4"], heads=heads)
    assert busy.heads and busy.policy == "spatio:R=4"


def test_heads_are_tried_on_what_they_have_not_seen(source, trace):
    marks = [mark[:12] for mark in trace.sequence_hashes()]
    heads = heads_for(source, sequences=marks[:6])
    tuned = tune.tune(source, simulate.joined_with_heads([trace], heads), SLOTS, "load", asked=["temporal"], heads=heads)
    assert (tuned.n_fit, tuned.n_test) == (6, 2) and any(r["heads"] for r in tuned.rows)
    assert set(tune.parted(trace, 0, heads.trained_on(trace))[0]) == set(range(6))
    heads = heads_for(source, sequences=marks[:7])
    tuned = tune.tune(source, simulate.joined_with_heads([trace], heads), SLOTS, "load", asked=["temporal"], heads=heads)
    assert (tuned.n_fit, tuned.n_test) == (4, 4) and not tuned.heads and "h.gguf: was trained on these sequences" in tuned.heads_note
    assert not any(r["heads"] for r in tuned.rows)


def test_a_trace_s_own_outputs_do_not_help(source, trace):
    with_heads = simulate.joined_with_heads([trace], heads_for(source))
    tuned = tune.tune(source, with_heads, SLOTS, "load", asked=["temporal"])
    assert not any(r["heads"] for r in tuned.rows) and not tuned.heads and not tuned.heads_note


def test_the_command_finds_heads_and_writes_what_it_recommends(source, trace, edgemoe, model, tmp_path, config):
    trace.save(tmp_path / "t.npz")
    path = heads_file.default_path(source.package_fingerprint())
    path.parent.mkdir(parents=True)
    heads_file.save(path, heads_for(source))
    arguments = ["tune", model, "--trace", "t.npz", "--slots", SLOTS, "--misses", "load", "--policy", "temporal"]
    done = edgemoe(*arguments)
    assert done.returncode == 0 and "recommended: temporal with learned heads" in done.stdout and "temporal (recommended, heads)" in done.stdout, done.stderr
    found = recommendation.find(source, "load")
    assert (found.policy, found.heads, found.tables) == ("temporal", str(path), "")

    said = json.loads(edgemoe(*arguments, "--heads", "none", "--json", "--dry-run").stdout)
    assert not said["heads"] and not said["heads_note"] and not any(r["heads"] for r in said["candidates"])

    damaged = bytearray(path.read_bytes())
    damaged[-40] ^= 1
    path.write_bytes(damaged)
    done = edgemoe(*arguments, "--dry-run")
    assert done.returncode == 0 and f"learned heads are not tried: {path}: damaged" in done.stdout and "with learned heads" not in done.stdout
    done = edgemoe(*arguments, "--heads", path)
    assert done.returncode == 1 and "damaged" in done.stderr and done.stderr.count("\n") == 1

    path.unlink()
    with pytest.raises(RecommendationError, match="the learned heads are gone"):
        recommendation.find(source, "load")


def test_heads_of_another_model_are_left_out_by_name(source, trace, edgemoe, model, models, tmp_path):
    trace.save(tmp_path / "t.npz")
    with Source(models("olmoe", "Q8_0")) as other:
        heads_file.save(tmp_path / "h.gguf", heads_for(other))
    done = edgemoe("tune", model, "--trace", "t.npz", "--slots", SLOTS, "--policy", "lfu", "--heads", "h.gguf")
    assert done.returncode == 1 and "h.gguf: are heads of another model" in done.stderr
