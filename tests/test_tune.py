"""edgemoe tune: what it recommends, where it writes that, and that chat and run take it up from there or say why not."""

import json

import numpy as np
import pytest

from edgemoe import policies, recommendation, tune
from edgemoe.package import Source
from edgemoe.recommendation import Recommendation
from edgemoe.trace import DECODE, FORMAT, Trace
from edgemoe.tune import TuneError

N_SEQUENCES = 8


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    """The user's settings, in a folder of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "edgemoe" / "tune"


@pytest.fixture(scope="module")
def model(models):
    return models("qwen3moe", "Q8_0")


@pytest.fixture
def source(model):
    with Source(model) as opened:
        yield opened


def trace_for(source, sequences, fingerprint=""):
    """sequences: per sequence the experts of its tokens, [tokens, used]; all layers do the same."""
    n_layers, n_used = len(source.layers), source.integer("expert_used_count")
    ids = np.concatenate([np.repeat(np.array(s, np.uint8)[:, None], n_layers, 1) for s in sequences])
    meta = {
        "format": FORMAT, "model": "made up", "architecture": source.architecture, "fingerprint": fingerprint, "n_expert": source.layers[0].n_expert, "n_used": n_used,
        "layers": [layer.layer for layer in source.layers], "bytes_per_expert": [layer.bytes_per_expert for layer in source.layers], "n_embd": 0, "probs": None,
    }
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    return Trace(ids=ids, token_ids=np.arange(len(ids), dtype=np.int32), offsets=offsets, phase=np.full(len(ids), DECODE, np.uint8), meta=meta)


def popular_then_scans(source, n_sequences=N_SEQUENCES):
    """The same experts every third token, others in between, more than twice as many slots can hold: LRU never has them when they return, a fixed set always."""
    n_used, n_expert = source.integer("expert_used_count"), source.layers[0].n_expert
    rng = np.random.default_rng(0)
    others = np.arange(n_used, n_expert)
    return trace_for(source, [[list(range(n_used)) if t % 3 == 0 else rng.permutation(others)[:n_used].tolist() for t in range(60)] for _ in range(n_sequences)])


def at_random(source):
    n_used, n_expert = source.integer("expert_used_count"), source.layers[0].n_expert
    rng = np.random.default_rng(1)
    return trace_for(source, [[rng.permutation(n_expert)[:n_used].tolist() for _ in range(30)] for _ in range(N_SEQUENCES)])


def saved(trace, path):
    trace.save(path)
    return path


def slots(source):
    return 2 * source.integer("expert_used_count")


def test_halves_are_apart_and_repeat_themselves(source):
    trace = popular_then_scans(source)
    fit, test = tune.halves(trace, seed=0)
    hashes = [set(t.sequence_hashes()) for t in (fit, test)]
    assert len(hashes[0]) == len(hashes[1]) == 4 and not hashes[0] & hashes[1]
    assert [t.sequence_hashes() for t in tune.halves(trace, 0)] == [fit.sequence_hashes(), test.sequence_hashes()]
    assert tune.halves(trace, 1)[0].sequence_hashes() != fit.sequence_hashes()


def test_the_same_prompt_twice_is_one_sequence(source):
    trace = popular_then_scans(source)
    twice = trace.select([0, 1, 2, 0, 1, 2])
    twice.token_ids[:] = np.tile(twice.token_ids[: len(twice.token_ids) // 2], 2)
    with pytest.raises(TuneError, match="found 3 different sequences, wanted 4 or more"):
        tune.halves(twice, 0)


def test_the_better_policy_is_recommended(source):
    tuned = tune.tune(source, popular_then_scans(source), slots(source), "load", asked=["static", "lru", "lfu"])
    assert tuned.policy == "static" and not tuned.is_default and (tuned.n_fit, tuned.n_test) == (4, 4)
    best, lru = (next(r for r in tuned.rows if r["policy"] == p) for p in ("static", "lru"))
    assert best["n_hits"] > lru["n_hits"] and best["saved_ms_ci"][0] > 0 and lru["saved_ms_ci"] == (0.0, 0.0)
    assert [r["expert_ms"] for r in tuned.rows] == sorted(r["expert_ms"] for r in tuned.rows)
    assert not any(r["bound"] for r in tuned.rows)


def test_what_does_not_beat_lru_is_not_recommended(source):
    tuned = tune.tune(source, at_random(source), slots(source), "load", asked=["lfu", "lrfu:lambda=0.9"])
    assert tuned.policy == policies.DEFAULT["load"] and tuned.is_default and "nothing beats lru" in tuned.reason


def test_where_misses_are_computed_traffic_counts(source):
    """LFU has more hits than a placement that hardly moves; it reads as many experts for them as it misses."""
    tuned = tune.tune(source, popular_then_scans(source), slots(source), "cpu", asked=["lfu", "placement:every=16"])
    by_policy = {r["policy"]: r for r in tuned.rows}
    assert by_policy["lfu"]["load_mb"] > 10 * by_policy["placement:every=16"]["load_mb"]
    assert tuned.policy.startswith("placement")


def row(policy, ms, saved, over_default, mb=1.0):
    return {"policy": policy, "expert_ms": ms, "load_mb": mb, "saved_ms_ci": saved, "saved_over_default_ms_ci": over_default}


def test_the_choice():
    lru, placement = row("lru", 10.0, (0, 0), (-1, 0)), row("placement", 8.0, (1, 3), (0, 0))
    assert tune._choose([lru], "placement")[0] == "placement"
    assert tune._choose([placement, lru], "placement")[0] == "placement"
    fast, lean = row("a", 5.0, (4, 6), (2, 4), mb=9.0), row("b", 5.04, (4, 6), (2, 4), mb=2.0)
    assert tune._choose([fast, lean, placement, lru], "placement") == ("b", "least predicted time per token on held-out sequences, and least traffic of 2 that are within 1 %", False)
    by_chance = row("c", 4.0, (-1, 9), (1, 5))
    assert tune._choose([by_chance, fast, placement, lru], "placement")[0] == "a"
    no_better = row("d", 7.9, (1, 3), (-1, 1))
    assert tune._choose([no_better, placement, lru], "placement")[0] == "placement"
    assert tune._choose([row("e", 4.0, None, None), lru], "lru")[0] == "lru"  # one held-out sequence proves nothing


def test_policies_that_cheat_are_refused():
    with pytest.raises(TuneError, match="knows the future"):
        tune.candidates(["belady"])
    assert not {"belady", "oracle"} & set(tune.candidates(None))


def test_traces_of_another_model_are_refused(source):
    trace = popular_then_scans(source)
    tune.require_trace_of(source, trace, "abc")
    trace.meta["fingerprint"] = "0123456789"
    with pytest.raises(TuneError, match="recorded from another model"):
        tune.require_trace_of(source, trace, "abc")
    trace.meta["n_expert"] += 1
    with pytest.raises(TuneError, match="experts, .* used, wanted 2 layers"):
        tune.require_trace_of(source, trace, "")


# --- the file


def recommended(source, **changed):
    mark = source.package_fingerprint()
    facts = {"policy": "lfu", "misses": "cpu", "n_slots": 4, "n_expert": source.layers[0].n_expert, "n_layers": len(source.layers), "fingerprint": mark, "model": "m", "date": "2026-01-02", "version": "0"}
    return Recommendation(**(facts | changed))


def test_what_was_written_is_found_for_model_and_package(source, packages):
    assert recommendation.find(source, "cpu") is None
    path = recommendation.write(recommended(source))
    assert recommendation.find(source, "cpu") == recommended(source) and recommendation.find(source, "load") is None
    assert recommendation.policy_text(recommended(source)) == "lfu"
    with Source(packages(source.path)) as package:
        assert recommendation.find(package, "cpu").policy == "lfu"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_learned_tables_lie_beside(source, config):
    usage = np.random.default_rng(0).random((len(source.layers), source.layers[0].n_expert)).astype(np.float32)
    found = recommended(source, policy="static", tables="learned.npz")
    recommendation.write(found, lambda path: np.savez(open(path, "wb"), usage=usage))
    assert recommendation.policy_text(recommendation.find(source, "cpu")) == f"static:fit={config / 'learned.npz'}"
    (config / "learned.npz").write_bytes(b"no")
    with pytest.raises(recommendation.RecommendationError, match="cannot be read"):
        recommendation.find(source, "cpu")


@pytest.mark.parametrize("damage, said", [
    (lambda said: "{", "not what edgemoe tune writes"),
    (lambda said: "[]", "wanted 1"),
    (lambda said: json.dumps(said | {"format": 0}), "found format 0, wanted 1"),
    (lambda said: json.dumps(said | {"more": 1}), "not what edgemoe tune writes"),
    (lambda said: json.dumps(said | {"policy": 3}), "policy: found 3, wanted str"),
    (lambda said: json.dumps(said | {"policy": "fifo"}), "wanted one of"),
    (lambda said: json.dumps(said | {"n_expert": 3}), "is about another model"),
    (lambda said: json.dumps(said | {"tables": "../x.npz"}), "wanted the name of a file beside it"),
    (lambda said: json.dumps(said | {"policy": "static"}), "has to learn first"),
])
def test_damaged_files_say_where(source, damage, said):
    path = recommendation.write(recommended(source))
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(recommendation.RecommendationError, match=said) as error:
        recommendation.find(source, "cpu")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


# --- the commands


def test_tune_writes_and_run_takes_it_up(edgemoe, model, source, tmp_path, config):
    trace = saved(popular_then_scans(source), tmp_path / "mine.npz")
    n = str(slots(source))
    result = edgemoe("tune", model, "--trace", trace, "--slots", n, "--policy", "static lfu", "--misses", "load")
    assert result.returncode == 0, result.stderr
    (written,) = config.glob("*.load.json")
    assert "recommended: static" in result.stdout and str(written) in result.stdout and "lru (reference)" in result.stdout and "4 sequences to learn from, 4 others" in result.stdout

    run = ("run", model, "-p", "Hello", "-n", "2", "--threads", "1", "--device", "CPU", "--slots", n)
    assert f"policy static from edgemoe tune of {json.loads(written.read_text())['date']} (--policy default ignores it)" in edgemoe(*run, "--misses", "load").stderr
    for otherwise in (("--misses", "cpu"), ("--misses", "load", "--policy", "default"), ("--misses", "load", "--policy", "lru")):
        result = edgemoe(*run, *otherwise)
        assert result.returncode == 0 and "edgemoe tune" not in result.stderr, result.stderr

    written.write_text("{")
    result = edgemoe(*run, "--misses", "load")
    assert result.returncode == 0 and result.stderr.count("edgemoe tune: ") == 1 and "the default policy is used" in result.stderr


def test_tune_as_json_without_writing(edgemoe, model, source, tmp_path, config):
    trace = saved(at_random(source), tmp_path / "mine.npz")
    result = edgemoe("tune", model, "--trace", trace, "--slots", slots(source), "--policy", "lfu", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["policy"] == "placement" and said["is_default"] and said["written"] is None and said["n_slots"] == slots(source) and not config.exists()
    assert {r["policy"] for r in said["candidates"]} == {"lru", "placement", "lfu"}


def test_refusals_are_one_line(edgemoe, model, source, tmp_path):
    trace = saved(popular_then_scans(source), tmp_path / "mine.npz")
    few = saved(popular_then_scans(source, 3), tmp_path / "few.npz")
    for arguments, said in (
        (["--trace", trace, "--slots", source.layers[0].n_expert], "all 16 experts of a layer fit"),
        (["--trace", few, "--slots", "4"], "found 3 different sequences, wanted 4 or more"),
        (["--trace", tmp_path / "none.npz", "--slots", "4"], "No such file"),
        (["--trace", trace, "--slots", "4", "--policy", "belady"], "knows the future"),
        (["--trace", trace, "--vram", "0"], "no slots"),
    ):
        result = edgemoe("tune", model, *arguments)
        assert result.returncode == 1 and said in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_learned_policy_is_written_with_its_tables(edgemoe, model, source, tmp_path, config):
    """What is popular in one half of the trace is so in the other: `static` knows it before the first token."""
    trace = saved(popular_then_scans(source), tmp_path / "mine.npz")
    result = edgemoe("tune", model, "--trace", trace, "--slots", slots(source), "--misses", "load", "--policy", "static temporal")
    assert result.returncode == 0, result.stderr
    found = recommendation.find(source, "load")
    assert found.policy == "static" and f"recommended: {found.policy}" in result.stdout
    with np.load(config / found.tables) as tables:
        assert tables.files == ["usage"] and tables["usage"].shape == (len(source.layers), source.layers[0].n_expert)


def test_a_learned_policy_runs(edgemoe, model, source):
    usage = np.random.default_rng(0).random((len(source.layers), source.layers[0].n_expert)).astype(np.float32)
    recommendation.write(recommended(source, policy="static", tables="learned.npz"), lambda path: np.savez(open(path, "wb"), usage=usage))
    result = edgemoe("run", model, "-p", "Hello", "-n", "2", "--threads", "1", "--device", "CPU", "--slots", "6", "--misses", "cpu")
    assert result.returncode == 0 and "policy static from edgemoe tune of 2026-01-02, which was for 4 slots" in result.stderr, result.stderr


def test_a_trace_that_has_its_text_is_tried_with_stages(edgemoe, source, model, tmp_path):
    trace = popular_then_scans(source)
    pieces = {str(t): " so" for t in range(len(trace.ids))} | {"0": "<think>", "20": ". Wait", "21": ", no"}
    trace.meta["pieces"] = pieces
    trace.save(tmp_path / "t.npz")
    result = edgemoe("tune", model, "--trace", tmp_path / "t.npz", "--slots", "2", "--policy", "stage", "--dry-run", "--json")
    document = json.loads(result.stdout)
    assert {r["policy"] for r in document["candidates"]} >= {"stage", "lru"} and not document["left_out"]
    del trace.meta["pieces"]
    trace.save(tmp_path / "t.npz")
    document = json.loads(edgemoe("tune", model, "--trace", tmp_path / "t.npz", "--slots", "2", "--policy", "stage", "--dry-run", "--json").stdout)
    assert document["left_out"] == {"stage": "the traces have no stages"}
