"""Simulated policies: figures that can be checked by hand, what is refused, what the command prints, and published counts on real routing."""

import csv
import json

import numpy as np
import pytest
from conftest import SHARED

from edgemoe import lossy, policies, policy_list, simulate
from edgemoe.simulate import Bootstrap, Outcome, Plan, Rates, Run, SimulationError
from edgemoe.trace import DECODE, FORMAT, PROMPT, Trace

MMLU_TEST = SHARED / "traces" / "gptoss20b" / "mmlu_test.npz"
MB = 10**6


def trace_of(sequences, n_expert=4, bytes_per_expert=MB, probs=None, **meta):
    """sequences: per sequence a list of tokens, per token a list of the layers' experts, or one list for a single layer."""
    tokens = [t if isinstance(t[0], (list, tuple)) else [t] for s in sequences for t in s]
    ids = np.array(tokens, np.uint8)
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    made = {
        "format": FORMAT, "model": "made up", "architecture": "", "fingerprint": "", "n_expert": n_expert, "n_used": ids.shape[2], "layers": list(range(ids.shape[1])),
        "bytes_per_expert": [bytes_per_expert] * ids.shape[1], "n_embd": 0, "probs": None if probs is None else "chosen",
    } | meta
    return Trace(
        ids=ids, token_ids=np.arange(len(ids), dtype=np.int32), offsets=offsets, phase=np.full(len(ids), DECODE, np.uint8),
        probs=None if probs is None else np.array(probs, np.float16).reshape(ids.shape), meta=made,
    )


def rows_by_policy(trace, asked, n_slots, misses="load", **how):
    plan = simulate.plan_runs(trace, asked, [n_slots], [misses], **how)
    rates = Rates(link=2 * MB, cpu=1 * MB)
    return {r["policy"]: r for r in simulate.summaries(trace, simulate.run_all(trace, plan), rates, per_sequence=True)}


# One expert per token, two slots. LRU misses 0, 1, 2, and 0 again, which 2 has pushed out; Belady drops 1, which never comes back.
STORY = [[[0], [1], [2], [0]]]
# Twice the same expert, then another, in a second sequence.
TWO = [*STORY, [[0], [0], [3]]]


def test_the_figures_of_a_story():
    rows = rows_by_policy(trace_of(STORY), ["lru"], 2)
    lru, belady = rows["lru"], rows["belady"]
    assert (lru["n_tokens"], lru["n_accesses"], lru["n_hits"], lru["n_demand"], lru["n_computed"], lru["n_proactive"]) == (4, 4, 0, 4, 0, 0)
    assert (belady["n_hits"], belady["n_demand"]) == (1, 3)
    assert belady["hit"] == 0.25 and belady["adjusted_hit"] == 0.25 and belady["hit_minus_lru"] == 0.25
    assert lru["load_mb"] == 1.0 and belady["load_mb"] == 0.75 and belady["load_experts"] == 0.75
    assert (lru["gap_share"], belady["gap_share"]) == (0.0, 1.0)
    assert belady["bound"] and not lru["bound"]
    assert lru["hit_ci"] is None  # one sequence says nothing about others
    assert lru["tokens_per_s"] == pytest.approx(2.0)  # a megabyte per token over 2 MB/s
    assert belady["expert_ms"] == pytest.approx(375.0)


def test_computed_misses_are_brought_in_and_charged():
    lru = rows_by_policy(trace_of(STORY), ["lru"], 2, "cpu")["lru"]
    assert (lru["n_hits"], lru["n_computed"], lru["n_demand"], lru["n_proactive"]) == (0, 4, 0, 4)
    assert lru["n_unused"] == 2  # 0 and 1 were evicted without a use since they came
    assert lru["load_mb"] == 1.0 and lru["adjusted_hit"] == 0.0
    # 4 MB computed and 4 MB read for the link out of the same memory at 1 MB/s; the link itself, 2 MB/s, is done meanwhile.
    assert lru["expert_ms"] == pytest.approx(2000.0)


def test_adjusted_hit_charges_what_was_brought_in():
    rows = rows_by_policy(trace_of(TWO), ["lru"], 2, "cpu")["lru"]
    assert (rows["n_hits"], rows["n_accesses"], rows["n_proactive"]) == (1, 7, 6)
    assert rows["hit"] == pytest.approx(1 / 7) and rows["adjusted_hit"] == pytest.approx(1 / 13)


def test_layers_and_sequences_add_up_to_the_total():
    trace = trace_of([[[[0], [1]], [[0], [2]]], [[[3], [1]], [[3], [1]], [[2], [1]]]])
    row = rows_by_policy(trace, ["lfu"], 1)["lfu"]
    assert row["sequences"]["n_tokens"] == [2, 3] and row["n_tokens"] == 5
    for name in ("n_accesses", "n_hits", "n_demand"):
        assert sum(row["sequences"][name]) == row[name]
    assert row["layers"]["accesses"] == [5, 5] and sum(row["layers"]["hits"]) == row["n_hits"] == 4
    assert row["load_experts"] == row["n_demand"] / (5 * 2)


def test_layers_of_different_size_are_weighed():
    trace = trace_of([[[[0], [1]], [[0], [2]]]], bytes_per_expert=0)
    trace.meta["bytes_per_expert"] = [MB, 3 * MB]
    assert rows_by_policy(trace, [], 1)["lru"]["load_mb"] == (1 + 3 + 3) / 2


def test_unknown_sizes_leave_experts_per_token():
    row = rows_by_policy(trace_of(STORY, bytes_per_expert=0), [], 2)["lru"]
    assert row["load_mb"] is None and row["tokens_per_s"] is None and row["load_experts"] == 1.0


def test_a_cache_kept_warm_and_a_cold_one():
    again = trace_of([[[0], [1]], [[0], [1]]])
    assert rows_by_policy(again, [], 2)["lru"]["n_hits"] == 0
    assert rows_by_policy(again, [], 2, warm=True)["lru"]["n_hits"] == 2


def test_one_capacity_for_all_layers():
    # Layer 1 uses one expert, layer 0 three in turn: of four slots together it can have three.
    trace = trace_of([[[[e % 3], [0]] for e in range(9)]])
    assert rows_by_policy(trace, [], 2)["lru"]["n_hits"] == 8
    assert rows_by_policy(trace, [], 2, shared=True)["lru"]["n_hits"] == 8 + 6


def test_prompts_fill_the_cache_and_are_not_counted():
    trace = trace_of([[[0]] * 20 + [[0], [1]]])
    trace.phase[:20] = PROMPT
    row = rows_by_policy(trace, [], 2)["lru"]
    assert (row["n_tokens"], row["n_accesses"], row["n_hits"], row["n_demand"]) == (2, 2, 1, 1) and row["n_prompt_loads"] >= 1


def test_gap_share():
    assert simulate.gap_share(15, 10, 20) == 0.5 and simulate.gap_share(25, 10, 20) == 1.5
    assert simulate.gap_share(10, 10, 10) is None


def test_time_waits_for_demand_and_for_what_the_link_has_no_spare_time_for():
    rates = Rates(link=10.0, cpu=5.0, device=20.0)
    loads = {"hits": 40.0, "demand": 20.0, "computed": 0.0, "proactive": 0.0}
    assert simulate.seconds(loads, rates) == pytest.approx(60 / 20 + 20 / 10)
    assert simulate.seconds(loads | {"proactive": 20.0}, rates) == pytest.approx(5.0)  # 2 s on the link within 3 s of computing
    assert simulate.seconds(loads | {"proactive": 50.0}, rates) == pytest.approx(5.0 + 2.0)
    beside = {"hits": 40.0, "demand": 0.0, "computed": 10.0, "proactive": 0.0}
    assert simulate.seconds(beside, rates) == pytest.approx(2.0)  # both at the same time
    assert simulate.seconds(beside | {"proactive": 10.0}, rates) == pytest.approx(4.0)


def test_bootstrap_repeats_itself_and_pairs_differences():
    rng = np.random.default_rng(3)
    a = rng.integers(50, 100, 40)
    total = np.full(40, 100)

    def hit(sums):
        return sums(a) / sums(total)

    first, second = Bootstrap(40, seed=1).interval(hit), Bootstrap(40, seed=1).interval(hit)
    assert first == second != Bootstrap(40, seed=2).interval(hit)
    assert first[0] < a.sum() / total.sum() < first[1] and first[1] - first[0] < 0.15
    shifted = a + 1  # one hit more in every sequence: the difference does not vary at all
    assert Bootstrap(40).interval(lambda s: s(shifted) / s(total) - s(a) / s(total)) == pytest.approx((0.01, 0.01))
    assert Bootstrap(1).interval(hit) is None
    assert Bootstrap(40).interval(lambda s: s(a) / s(np.zeros(40))) is None


def test_capacities():
    assert simulate.read_capacities("12.5%,25%,8, 16", 32) == [4, 8, 16]
    assert simulate.read_capacities("0.1%,100%", 32) == [1, 32]
    for wrong, said in (("0", "wanted 1 to 32"), ("33", "wanted 1 to 32"), ("101%", "wanted 1 to 32"), ("0%", "wanted 1 to 32"), ("x", "wanted slots per layer"), ("1.5", "wanted slots"), ("", "wanted slots")):
        with pytest.raises(SimulationError, match=said):
            simulate.read_capacities(wrong, 32)


def test_policies_are_spread_and_asked_for_once():
    assert simulate.expanded("placement:every=16|32,decay=0|1") == [f"placement:every={e},decay={d}" for e in (16, 32) for d in (0, 1)]
    assert simulate.expanded("lru") == ["lru"] and simulate.expanded("my.py:score") == ["my.py:score"] and simulate.expanded("static:fit=a|b.npz") == ["static:fit=a|b.npz"]
    assert simulate.read_policies(["lru", "all", "lru"]) == policies.names()
    assert set(map(policies.name_of, simulate.read_policies(["sweep"]))) == set(policies.names())
    plan = simulate.plan_runs(trace_of(STORY), simulate.read_policies(["all"]), [1, 2])
    assert [r.policy for r in plan.runs if (r.n_slots, r.misses) == (2, "cpu")][:3] == ["lru", "belady", "belady:force=0"]
    assert plan.left_out["temporal"] == "needs --train or --heads" and plan.left_out["static"] == "needs --train" and plan.left_out["stage"] == "the traces have no stages"
    with pytest.raises(policies.PolicyError, match="wanted one of"):
        simulate.plan_runs(trace_of(STORY), ["fifo"], [1])


def test_threads_change_nothing():
    rng = np.random.default_rng(0)
    trace = trace_of([[[int(e)] for e in rng.integers(0, 8, 50)] for _ in range(5)], n_expert=8)
    plan = simulate.plan_runs(trace, ["lfu", "placement:every=4"], [2, 3])
    one, four = (simulate.run_all(trace, plan, n_threads=n) for n in (1, 4))
    assert [o.run for o in one] == plan.runs and all((a.counts == b.counts).all() for a, b in zip(one, four))


def test_a_score_function_that_fails_ends_the_simulation(tmp_path):
    (tmp_path / "mine.py").write_text("def score(usage):\n    raise RuntimeError('no idea')\n")
    trace = trace_of(STORY)
    with pytest.raises(policies.PolicyError, match="RuntimeError: no idea"):
        simulate.run_all(trace, simulate.plan_runs(trace, [f"{tmp_path}/mine.py"], [2]))


def test_joined_traces_keep_sequences_and_steps_apart():
    first, second = trace_of(STORY), trace_of([[[1], [1]]])
    second.step = np.array([0, 0], np.int32)
    both = simulate.joined([first, second])
    assert both.offsets.tolist() == [0, 4, 6] and both.step.tolist() == [0, 1, 2, 3, 4, 4] and both.probs is None
    both.check()
    with pytest.raises(SimulationError, match="found 1 layers of 5 experts"):
        simulate.joined([first, trace_of(STORY, n_expert=5)])


def test_training_on_the_test_is_refused():
    test, train = trace_of(TWO), trace_of([[[2], [2]], *STORY])
    train.token_ids[2:] = test.token_ids[:4]
    test.where, train.where = "test.npz", "train.npz"
    with pytest.raises(SimulationError, match=r"1 sequence is in both train.npz \(--train\) and test.npz"):
        simulate.require_apart([train], [test])
    simulate.require_apart([train.select([0])], [test])


# --- policies that change the output


def test_a_set_that_captures_too_little_is_changed():
    # Experts 0 and 1, then 2 and 3 for good, one layer, two slots, no averaging. The first token fills the set, the third changes it.
    trace = trace_of([[[0, 1], [1, 0], [2, 3], [2, 3]]], probs=[[0.5, 0.5]] * 4)
    found = lossy.simulate(trace, "temporally-extended:window=1,threshold=0.5", 2)
    assert found.n_tokens.tolist() == [4] and found.n_proactive.tolist() == [4]
    assert found.mass_lost.tolist() == [2.0] and found.n_outside.tolist() == [4]  # all of the first and the third
    slow = lossy.simulate(trace, "temporally-extended:window=4,threshold=0.4", 2)
    assert slow.n_proactive.tolist() == [2] and slow.mass_lost.tolist() == [3.0]  # half of what was averaged still lies in the set


def test_sequences_side_by_side_are_as_one_after_the_other():
    rng = np.random.default_rng(1)
    trace = trace_of([[rng.permutation(6)[:2].tolist() for _ in range(n)] for n in (5, 9, 3)], n_expert=6, probs=rng.random((17, 1, 2)))
    together = lossy.simulate(trace, lossy.NAME, 2)
    alone = [lossy.simulate(trace.select([s]), lossy.NAME, 2) for s in range(3)]
    assert together.n_proactive.tolist() == [a.n_proactive[0] for a in alone]
    assert together.mass_lost == pytest.approx([a.mass_lost[0] for a in alone])
    assert lossy.simulate(trace, lossy.NAME, 6).n_outside.sum() < together.n_outside.sum()


@pytest.mark.parametrize("wrong", ["window=0", "window=1.5", "threshold=0", "threshold=2", "size=3", "window"])
def test_wrong_settings_of_a_lossy_policy(wrong):
    with pytest.raises(simulate.EdgemoeError, match="wanted"):
        lossy.read(f"temporally-extended:{wrong}")


# --- the command


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "two.npz"
    trace_of(TWO).save(path)
    return path


def test_the_table(edgemoe, two):
    result = edgemoe("simulate", two, "--capacity", "2")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert "2 of 4 slots per layer, misses loaded" in text and "2 of 4 slots per layer, misses computed on the CPU" in text
    assert "lru (reference)" in text and "belady *" in text and "1/7" in text and "2/7" in text
    assert "left out, needs --train: static" in text and "experts only: link 16 GB/s, CPU 12 GB/s" in text
    assert result.stderr == ""


def test_json_and_csv_have_the_same_figures(edgemoe, two, tmp_path):
    result = edgemoe("simulate", two, "--capacity", "1,2", "--misses", "load", "--policy", "lfu lru", "--csv", tmp_path / "x.csv", "--per-sequence", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["n_sequences"] == 2 and document["n_tokens"] == 7 and document["scope"] == "layer" and document["left_out"] == {}
    assert [(r["policy"], r["n_slots"]) for r in document["runs"]] == [(p, n) for n in (1, 2) for p in ("lru", "belady", "belady:force=0", "lfu")]
    lines = list(csv.DictReader(open(tmp_path / "x.csv")))
    totals = [line for line in lines if line["sequence"] == "all"]
    assert len(lines) == 8 * 3 and len(totals) == 8
    for line, row in zip(totals, document["runs"]):
        assert int(line["n_hits"]) == row["n_hits"] and float(line["load_mb"]) == row["load_mb"]
        assert (float(line["hit_ci_low"]), float(line["hit_ci_high"])) == tuple(row["hit_ci"])


def test_a_trace_of_nothing_but_a_prompt(edgemoe, tmp_path):
    trace = trace_of([[[0]] * 20])
    trace.phase[:] = PROMPT
    trace.step = np.zeros(20, np.int32)
    trace.save(tmp_path / "t.npz")
    result = edgemoe("simulate", tmp_path / "t.npz", "--capacity", "2", "--policy", "lru")
    assert result.returncode == 0 and "0/0" in result.stdout, result.stderr
    row = json.loads(edgemoe("simulate", tmp_path / "t.npz", "--capacity", "2", "--policy", "lru", "--json").stdout)["runs"][0]
    assert row["hit"] is None and row["load_mb"] is None and row["hit_ci"] is None


def test_fewer_slots_than_a_token_uses(edgemoe, tmp_path):
    trace_of([[[0, 1], [1, 2]]]).save(tmp_path / "t.npz")
    result = edgemoe("simulate", tmp_path / "t.npz", "--capacity", "1", "--misses", "load", "--policy", "lru")
    assert result.returncode == 0 and "fewer than the 2 experts a token uses: no demand loads" in result.stdout


def test_a_recording_of_somebody_else_is_read_as_it_is(edgemoe, tmp_path):
    np.savez(tmp_path / "theirs.npz", ids=np.array([[[0]], [[1]], [[0]]], np.uint8), offsets=np.array([0, 3]))
    result = edgemoe("simulate", tmp_path / "theirs.npz", "--capacity", "2", "--policy", "lru")
    assert result.returncode == 0 and "sizes of experts are unknown (--expert-bytes)" in result.stdout
    result = edgemoe("simulate", tmp_path / "theirs.npz", "--capacity", "2", "--policy", "lru", "--expert-bytes", "1M", "--sequences", "9")
    assert "MB/token" in result.stdout and "1/3" in result.stdout


@pytest.mark.parametrize("arguments, said", [
    (["--capacity", "0"], "capacity 0: wanted 1 to 4 slots, a layer has 4 experts"),
    (["--capacity", "5"], "capacity 5: wanted 1 to 4 slots, a layer has 4 experts"),
    (["--capacity", "half"], "capacity half: wanted slots per layer such as 8, or a share of the experts such as 12.5%"),
    (["--policy", "fifo"], "policy fifo, wanted one of"),
    (["--policy", "temporally-extended"], "has no probabilities"),
    (["--policy", "lrfu:lambda=-1"], "lambda"),
    (["--policy", "nothing.py"], "nothing.py: no such file"),
    (["--train", "missing.npz"], "missing.npz: No such file or directory"),
    (["--save-fit"], "--save-fit: wanted --train"),
    (["--csv", "nowhere/x.csv"], "--csv nowhere/x.csv: no folder nowhere"),
    (["--json", "other.npz"], "wanted a file to write"),
    (["--json", "-", "--csv", "-"], "only one of them can go to standard output"),
])
def test_refusals_are_one_line(edgemoe, two, arguments, said):
    result = edgemoe("simulate", two, *arguments)
    assert result.returncode == 1 and said in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("edgemoe: error: ")


def test_policies_learn_from_other_sequences(edgemoe, two, tmp_path):
    """Experts 2 and 3 are what the training text uses: `static` has them from the first token on."""
    trace_of([[[2], [3], [2]]]).save(tmp_path / "train.npz")
    result = edgemoe("simulate", two, "--train", tmp_path / "train.npz", "--capacity", "2", "--misses", "cpu", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    rows = {r["policy"]: r for r in document["runs"]}
    by_stages = set(policies.BY_STAGES)
    assert set(document["left_out"]) == by_stages and set(rows) == set(policies.names()) - by_stages | {"belady:force=0"}
    assert (rows["static"]["n_hits"], rows["static"]["n_computed"]) == (2, 5)


def test_what_was_learned_can_be_kept(edgemoe, two, tmp_path):
    trace_of([[[2], [3], [2]]]).save(tmp_path / "train.npz")
    arguments = ("simulate", two, "--capacity", "2", "--misses", "cpu", "--json")
    learned = edgemoe(*arguments, "--train", tmp_path / "train.npz", "--policy", "static", "--save-fit")
    assert learned.returncode == 0 and str(tmp_path / "train.fit.npz") in learned.stderr, learned.stderr
    kept = edgemoe(*arguments, "--policy", f"static:fit={tmp_path / 'train.fit.npz'}")
    assert kept.returncode == 0, kept.stderr
    hits = [[r["n_hits"] for r in json.loads(result.stdout)["runs"] if r["policy"].startswith("static")] for result in (learned, kept)]
    assert hits == [[2], [2]]


def test_training_on_the_test_is_refused_by_the_command(edgemoe, two):
    result = edgemoe("simulate", two, "--train", two)
    assert result.returncode == 1 and "2 sequences are in both" in result.stderr and result.stderr.count("\n") == 1


def test_every_policy_is_explained(edgemoe):
    listed = json.loads(edgemoe("policies", "--json").stdout)["policies"]
    assert [p["name"] for p in listed] == [*policies.names(), lossy.NAME]
    for p in listed:
        assert p["about"] and p["source"] and all(v["about"] for v in p["parameters"].values()), p["name"]
    text = edgemoe("policies").stdout
    assert all(f"{p['name']} " in text for p in listed) and "needs training" in text and max(map(len, text.splitlines())) <= 140
    assert set(policy_list.ABOUT) == {p["name"] for p in listed}


# --- pictures


def test_pictures(edgemoe, tmp_path):
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    trace_of([[[rng.permutation(6)[:2].tolist()] * 2 for _ in range(20)] for _ in range(3)], n_expert=6).save(tmp_path / "t.npz")
    result = edgemoe("simulate", tmp_path / "t.npz", "--capacity", "2,3", "--policy", "lru placement:every=2|8", "--plot", tmp_path / "pictures", "--sequences", "2")
    assert result.returncode == 0, result.stderr
    expected = {f"{kind}-{misses}.png" for misses in ("load", "cpu") for kind in ("capacity", "frontier-002", "frontier-003", "layers-002", "layers-003")} | {"concentration.png"}
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == expected
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "pictures").iterdir())


def test_the_front_is_what_no_other_beats():
    from edgemoe import simulate_plots

    assert simulate_plots.front([(3.0, 0.5), (1.0, 0.4), (2.0, 0.3), (3.0, 0.6), (4.0, 0.6)]) == [1, 3]
    shares = simulate_plots.concentration(trace_of([[[0], [0], [1], [0]]]))
    assert shares.tolist() == [[0.75, 1.0, 1.0, 1.0]]


def test_without_matplotlib_the_command_says_how_to_get_it(edgemoe, two, tmp_path, monkeypatch):
    (tmp_path / "hide" / "matplotlib").mkdir(parents=True)
    (tmp_path / "hide" / "matplotlib" / "__init__.py").write_text("raise ImportError\n")
    import os

    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path / "hide"), os.environ.get("PYTHONPATH"))))}
    result = edgemoe("simulate", two, "--plot", tmp_path / "p", env=env)
    assert result.returncode == 1 and result.stderr == "edgemoe: error: pictures need matplotlib: pip install 'edgemoe[plot]'\n"


# --- real routing

needs_shared = pytest.mark.skipif(not MMLU_TEST.exists(), reason="no recordings beside the project")


@needs_shared
def test_published_counts_of_lru_and_belady(edgemoe):
    common = ("simulate", MMLU_TEST, "--misses", "load", "--policy", "lru", "--json")
    document = json.loads(edgemoe(*common, "--capacity", "5,8,16", timeout=600).stdout)
    lru = {r["n_slots"]: r for r in document["runs"] if r["policy"] == "lru"}
    assert {n: (r["n_accesses"], r["n_demand"]) for n, r in lru.items()} == {5: (5857920, 3010701), 8: (5857920, 2098087), 16: (5857920, 650300)}
    assert document["n_tokens"] == 61020 and document["n_sequences"] == 201
    document = json.loads(edgemoe(*common, "--capacity", "5", "--sequences", "20").stdout)
    belady = next(r for r in document["runs"] if r["policy"] == "belady:force=0")
    assert belady["n_demand"] == 225019 and round(belady["hit"], 3) == 0.663


@needs_shared
def test_training_and_test_recordings_share_no_sequence():
    folder = MMLU_TEST.parent
    simulate.require_apart([simulate.load_trace(str(folder / f"{n}.npz")) for n in ("mmlu_dev", "mmlu_validation", "mmlu_pro_validation")], [simulate.load_trace(str(MMLU_TEST))])
