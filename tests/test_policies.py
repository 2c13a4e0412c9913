"""Every policy on a story that can be checked by hand, with tables by hand for those that learn; then what holds for all of them on any trace.

A story is a list of steps; a step has one set of experts per layer (or is that set, where there is one layer). Misses are computed in place unless a story says otherwise:
then A = hits + C, and what comes in comes as P. Where the public description of a policy leaves something open, a test whose name begins with test_reading pins down what
was read into it.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import edgemoe
from edgemoe import _native, policies
from edgemoe.errors import ModelFault
from edgemoe.policies import PolicyError
from edgemoe.replay import ABSENT, DECODE, FIELDS, PROMPT, Replay, replay

SHORT = dict(A="n_accesses", hits="n_hits", D="n_demand", C="n_computed", P="n_proactive", unused="n_unused")


def layers_of(step):
    return step if isinstance(step, (list, tuple)) else (step,)


def rows_of_steps(steps, n_tokens=(), stage=None, token_ids=None, probs=None):
    """The rows of a sequence. n_tokens: of each step, one by default; all tokens of a step use the same experts."""
    n_tokens = list(n_tokens) or [1] * len(steps)
    n_used = max(len(experts) for step in steps for experts in layers_of(step))
    ids = np.full((sum(n_tokens), len(layers_of(steps[0])), n_used), ABSENT, np.uint16)
    step_of = np.repeat(np.arange(len(steps), dtype=np.int32), n_tokens)
    for row, s in enumerate(step_of):
        for layer, experts in enumerate(layers_of(steps[s])):
            ids[row, layer, : len(experts)] = sorted(experts)
    rows = {"ids": ids, "step": step_of}
    for name, values, dtype in (("stage", stage, np.int32), ("token_ids", token_ids, np.int32), ("probs", probs, np.float32)):
        if values is not None:
            rows[name] = np.ascontiguousarray(np.asarray(values, dtype)[step_of])
    return rows


class Cache(Replay):
    def __init__(self, policy, n_slots, n_expert=4, n_layers=1, misses="cpu", learned=None, **options):
        learned = {name: np.asarray(table, np.float32) for name, table in (learned or {}).items()}
        super().__init__([n_expert] * n_layers, n_slots, policy, misses, learned=learned, **options)

    def play(self, steps, **arrays):
        """A whole sequence; the residents per layer after it, of a single layer as a set."""
        self.sequence(rows_of_steps(steps, **arrays))
        found = [set(self.residents(layer)) for layer in range(self.n_layers)]
        return found if self.n_layers > 1 else found[0]

    def count(self, *names, layer=None, phase=DECODE):
        counts = self.counts()[phase]
        counts = counts.sum(0) if layer is None else counts[layer]
        return [int(counts[FIELDS.index(SHORT[name])]) for name in names]


def after_each(steps, policy, n_slots, **options):
    """The residents of a single layer after every step: the story is told once for each of its beginnings."""
    return [Cache(policy, n_slots, **options).play(steps[: n + 1]) for n in range(len(steps))]


# --- by use: LFU, LRFU, frequency, Least-Stale ---

# 0 is popular, then 1 and 2 pass by once. With two slots LRU has dropped 0 when it returns; LFU has kept it.
POPULAR_THEN_SCAN = [{0}, {0}, {0}, {1}, {2}, {0}]


@pytest.mark.parametrize("policy, n_hits, last", [("lru", 2, {0, 2}), ("lfu", 3, {0, 2})])
def test_popular_then_scan(policy, n_hits, last):
    cache = Cache(policy, 2)
    assert cache.play(POPULAR_THEN_SCAN) == last
    assert cache.count("A", "hits", "D", "C") == [6, n_hits, 0, 6 - n_hits]
    assert cache.count("P", "unused") == ([4, 1] if policy == "lru" else [3, 1])   # 1 came and went; 0 had been used


def test_lfu_counts_what_is_absent():
    # 0 goes when it was used once, and returns: used twice, as 1, which is longer ago.
    assert after_each([{0}, {1}, {1}, {2}, {0}, {2}], "lfu", 2)[3:] == [{1, 2}, {0, 1}, {0, 2}]


def test_lfu_counts_events_and_not_tokens():
    # In one step three tokens use 0. 1 is used in two steps.
    assert Cache("lfu", 2).play([{0}, {1}, {1}, {2}], n_tokens=[3, 1, 1, 1]) == {1, 2}


@pytest.mark.parametrize("policy, last", [("lfu", {1, 2}), ("frequency", {0, 2})])
def test_a_new_sequence_starts_the_counts_of_lfu_over(policy, last):
    cache = Cache(policy, 2)
    cache.play([{0}, {0}, {0}, {1}])
    assert cache.play([{1}, {2}]) == last   # used 0 times and 1, or 3 times and 2


# When 2 comes, 0 is worth (1 + 2^-lambda) 2^(-2 lambda), and 1 is worth 2^-lambda: 0.85 and 0.71, or 0.375 and 0.5.
@pytest.mark.parametrize("decay, last", [(0, {0, 2}), (0.5, {0, 2}), (1, {1, 2}), (10, {1, 2})])
def test_lrfu_is_between_lfu_and_lru(decay, last):
    cache = Cache(f"lrfu:lambda={decay}", 2)
    assert cache.play([{0}, {0}, {1}, {2}]) == last
    assert cache.count("A", "hits", "C", "P", "unused") == [4, 1, 3, 3, 1 if last == {0, 2} else 0]


def test_reading_lrfu_time_is_tokens():
    # Three tokens in one step use 1: when 2 comes, four tokens have passed since 0: 1.71 * 0.25 against 0.71.
    assert Cache("lrfu", 2).play([{0}, {0}, {1}, {2}], n_tokens=[1, 1, 3, 1]) == {1, 2}


def test_reading_lrfu_several_tokens_of_an_event_are_one_use():
    # Were it three uses, 0 would be worth 3 * 0.35 and 1 only 0.71.
    assert Cache("lrfu", 2).play([{0}, {1}, {2}], n_tokens=[3, 2, 1]) == {1, 2}


@pytest.mark.parametrize("halve, last", [(4, {1, 2}), (32768, {0, 2})])
def test_frequency_halves_its_counts(halve, last):
    # After four accesses 0 has 2; after eight 0 has 1, 1 has 1 (3 halved) and 2 has none: 0 is the one not used for longest.
    cache = Cache(f"frequency:halve={halve}", 2)
    assert cache.play([{0}] * 4 + [{1}] * 3 + [{2}]) == last
    assert cache.count("A", "hits", "C", "P") == [8, 5, 3, 3]


def test_strict_frequency_asks_for_a_higher_count():
    assert after_each([{0}, {0}, {1}, {1}, {1}], "frequency:strict=1", 1) == [{0}, {0}, {0}, {0}, {1}]


@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_of_two_misses_the_better_comes_in_under_strict_frequency(misses):
    # 0, 1, 2, 3 are used 2, 4, 3, 3 times when 2 and 3 could both replace 0. Equal ones: the lower id is the first to go, and the last to come.
    cache = Cache("frequency:strict=1", 2, misses=misses)
    assert cache.play([{0, 1}, {0, 1}, {1}, {1}, {2, 3}, {2, 3}]) == {0, 1}
    assert cache.play([{2, 3}]) == {1, 3}
    assert cache.count("A", "hits") == [12, 4]


# --- Least-Stale ---

# The layers share two slots. Token 2 needs two experts in layer 0, for which all that token 1 left has to go.
SHARED_STORY = [({0}, {0}), ({1, 2}, {0})]


def test_least_stale_brings_back_what_the_next_layer_used():
    # Before layer 1 its expert 0 comes back in the place of 1, which is current too, but was used earlier; and before the next token 1 in the place of that.
    cache = Cache("least-stale:ahead=1", 1, n_layers=2, shared=True)
    assert cache.play(SHARED_STORY) == [{1, 2}, set()]
    assert cache.count("A", "hits", "C", "P", "unused") == [5, 1, 4, 6, 3]
    assert cache.count("A", "hits", layer=1) == [2, 1]


def test_least_stale_without_its_prefetcher_is_lru():
    for policy in ("least-stale:ahead=0", "lru"):
        cache = Cache(policy, 1, n_layers=2, shared=True)
        assert cache.play(SHARED_STORY) == [{2}, {0}]
        assert cache.count("A", "hits", "C", "P", "unused") == [5, 0, 5, 5, 3]


def test_least_stale_per_layer_has_nothing_to_bring_back():
    # A layer's own slots hold what it used last, as long as that fits in.
    cache = Cache("least-stale", 2, n_layers=4)
    cache.play([({0, 1},) * 4, ({1, 2},) * 4, ({3, 0},) * 4])
    assert cache.count("A", "hits", "C", "P", "unused") == [24, 4, 20, 20, 8]


def test_least_stale_wants_no_more_than_fits():
    # What is there is wanted too, and makes no place for the rest.
    cache = Cache("least-stale:ahead=1", 1, n_layers=2)
    assert cache.play([({0}, {0, 1})] * 2) == [{0}, {0}]
    assert cache.count("A", "hits", "C", "P", "unused", layer=1) == [4, 1, 3, 1, 0]


def test_reading_inserted_by_a_prompt_is_not_stale():
    # The prompt of a later pass brings 1 in. It is less stale than 0, which LRU would rather keep: that was used once, and 1 never.
    for policy, last in (("least-stale:ahead=0", {1, 2}), ("lru", {0, 2})):
        assert Cache(policy, 2).play([{0}, {1}, {2}], n_tokens=[1, 17, 1]) == last


# --- Belady ---

@pytest.mark.parametrize("policy, last, n_hits, n_proactive", [
    ("lru", {0, 1}, 1, 5),
    ("belady", {0, 1}, 2, 4),           # 2 takes the place of 1, which is needed last; 1 that of 2, which is not needed again
    ("belady:force=0", {0, 1}, 3, 2),   # 2 is not kept at all
])
def test_belady_knows_what_comes(policy, last, n_hits, n_proactive):
    cache = Cache(policy, 2)
    assert cache.play([{0}, {1}, {2}, {0}, {1}, {0}]) == last
    assert cache.count("A", "hits", "D", "C", "P") == [6, n_hits, 0, 6 - n_hits, n_proactive]


@pytest.mark.parametrize("misses", ["cpu", "load"])
@pytest.mark.parametrize("force, n_hits", [(1, 1), (0, 2)])
def test_reading_free_belady_need_not_keep_what_was_hit(force, n_hits, misses):
    # 0 is used for the last time beside 1, which comes again. A member of the event may go only where nothing is forced.
    cache = Cache(f"belady:force={force}", 1, misses=misses)
    cache.play([{0}, {0, 1}, {1}])
    assert cache.count("A", "hits") == [4, n_hits]


def test_belady_looks_at_layers_in_their_order():
    # One step needs 0 in both layers: layer 0 comes first, so of the two slots that both layers share, 1 of layer 0 takes that of layer 1.
    cache = Cache("belady", 1, n_layers=2, shared=True)
    assert cache.play([({0}, {0}), ({1}, {1}), ({0}, {0})])[0] == {0}
    assert cache.count("hits", layer=0) == [1]


def test_belady_knows_what_is_there_from_the_last_sequence():
    cache = Cache("belady", 2)
    cache.play([{0}, {1}])
    cache.play([{2}, {0}, {1}])
    assert cache.count("A", "hits") == [5, 1]   # 1 went, which is needed later than 0


def test_reading_belady_does_not_care_for_prompts():
    # Hit rates are those of decoding: 0 comes again in a prompt only.
    cache = Cache("belady:force=0", 1)
    cache.play([{0}, {1}, {0}, {1}], n_tokens=[1, 1, 17, 1])
    assert cache.count("A", "hits") == [3, 1]
    assert cache.count("A", "hits", phase=PROMPT) == [1, 0]


def test_steps_are_told_apart_where_layers_are_missing():
    # Step 0 has layer 0 only, step 1 layer 1 only, step 2 nobody at all. 2 takes the place of 1, which is not needed again.
    cache = Cache("belady", 2, n_layers=2)
    cache.play([({0}, set()), (set(), {0}), (set(), set()), ({1}, set()), ({2}, set()), ({0}, set())])
    assert cache.count("A", "hits", layer=0) == [4, 1]


# --- a set chosen now and then ---

@pytest.mark.parametrize("misses, counts", [("cpu", [7, 2, 0, 5, 3, 1]), ("load", [7, 2, 5, 0, 2, 0])])
def test_stage_takes_what_the_finished_stage_used_most(misses, counts):
    # 0 fills the empty slot. At the first boundary 1 has two tokens and 0 one, at the second it is the other way round.
    cache = Cache("stage", 1, misses=misses)
    assert cache.play([{0}, {1}, {1}, {1}, {0}, {0}, {0}], stage=[0, 0, 0, 1, 1, 1, 2]) == {0}
    assert cache.count("A", "hits", "D", "C", "P", "unused") == counts


def test_stage_counts_the_tokens_of_all_sequences_of_a_batch():
    assert Cache("stage", 1).play([{1}, {1}, {0}, {2}], n_tokens=[1, 1, 3, 1], stage=[0, 0, 0, 1]) == {0}


def test_stage_forgets_the_stage_in_which_a_sequence_ended():
    cache = Cache("stage", 1)
    cache.play([{0}, {0}, {0}], stage=[0, 0, 0])
    assert cache.play([{1}, {1}, {2}], stage=[0, 0, 1]) == {1}


def test_reading_a_prompt_is_a_stage():
    # 1 comes in after it, whatever the stage is called; what comes then is counted anew, so that the prompt's many tokens do not outweigh it.
    steps, how = [{0}, {1}, {0}, {0}, {2}], dict(n_tokens=[20, 20, 1, 1, 1], stage=[0, 0, 0, 0, 1])
    assert after_each_of("stage", [{0}, {0, 1}, {2}], n_tokens=[1, 20, 1], stage=[0, 0, 0]) == [{0}, {0}, {0}]
    assert Cache("stage", 1).play(steps, **how) == {0}
    assert Cache("stage", 1).play([{0}, {1}, {1}, {3}], n_tokens=[1, 20, 20, 1], stage=[0] * 4) == {1}


def after_each_of(policy, steps, n_slots=1, **arrays):
    return [Cache(policy, n_slots).play(steps[: n + 1], **{k: v[: n + 1] for k, v in arrays.items()}) for n in range(len(steps))]


def test_a_stage_that_is_too_long_is_parted():
    # After two tokens, after three more than a boundary of its own, and never without the parameter.
    steps = [{0}, {1}, {1}, {1}, {2}, {2}, {3}]
    assert after_each_of("stage:longest=3", steps, stage=[0] * 7) == [{0}, {0}, {0}, {1}, {1}, {1}, {2}]
    assert after_each_of("stage:longest=3", steps, stage=[0, 0, 1, 1, 1, 1, 1]) == [{0}, {0}, {0}, {0}, {0}, {1}, {1}]
    assert Cache("stage", 1).play(steps, stage=[0] * 7) == {0}


def test_the_most_valuable_come_first_and_a_limit_keeps_the_others_out():
    # Two layers with a slot each. The first would win 2 tokens, the second 1.
    steps = [({0}, {0}), ({0}, {0}), ({1}, {1}), ({1}, {1}), ({1}, {1}), ({1}, {2}), ({3}, {3})]
    stages = [0, 0, 0, 0, 0, 0, 1]
    assert Cache("stage", 1, n_layers=2).play(steps, stage=stages) == [{1}, {1}]
    limited = Cache("stage:most=1", 1, n_layers=2)
    assert limited.play(steps, stage=stages) == [{1}, {0}]
    assert limited.count("P") == [3]   # two into empty slots, and one


def test_stage_and_lru_between():
    # Between boundaries the one used last is in; at a boundary the one that the stage used most, and it is not the first to go then.
    steps = [{0}, {0}, {0}, {1}, {2}, {3}, {3}]
    stages = [0, 0, 0, 0, 1, 1, 1]
    assert after_each_of("stage+lru", steps, stage=stages) == [{0}, {0}, {0}, {1}, {2}, {3}, {3}]
    cache = Cache("stage+lru", 1)
    cache.play(steps, stage=stages)
    assert cache.count("hits", "P") == [3, 5]   # at the boundary 0 came back, for the place that 1 had just taken
    two = after_each_of("stage+lru", [{0}, {0}, {0}, {1}, {2}, {3}], 2, stage=[0, 0, 0, 0, 0, 1])
    assert two == [{0}, {0}, {0}, {0, 1}, {1, 2}, {0, 3}]


def test_an_oracle_that_was_told():
    # Stage 0 will use 1 most, stage 1 will use 2, of stage 2 nothing is known.
    cache = Cache("oracle", 1, learned={"coming": [[[1, 2, 0, 0]], [[0, 0, 3, 0]]]})
    assert cache.play([{0}, {1}, {1}, {2}, {2}], stage=[0, 0, 0, 1, 1]) == {2}
    assert cache.count("hits", "P") == [4, 2]
    assert cache.play([{0}, {1}, {3}], stage=[0, 0, 2]) == {1}
    with pytest.raises(PolicyError, match="made for another model"):
        Cache("oracle", 1, learned={"coming": [[[1, 2, 0]]]})


def test_reading_a_stage_that_is_not_known_is_no_boundary():
    # All that was counted since the last boundary is the first stage's.
    assert Cache("stage", 1).play([{0}, {1}, {1}, {2}], stage=[-1, -1, 0, 1]) == {1}


def test_oracle_has_what_the_coming_stage_uses_most():
    cache = Cache("oracle", 1)
    assert cache.play([{0}, {0}, {1}, {1}, {1}, {2}], stage=[0, 0, 0, 1, 1, 1]) == {1}
    assert cache.count("A", "hits", "D", "C", "P", "unused") == [6, 4, 0, 2, 2, 0]


def test_foresight_has_what_the_coming_steps_use_most():
    # Of the last window 2 and 0 are used once each: the one that was never used loses.
    cache = Cache("foresight:every=2", 1)
    assert cache.play([{0}, {0}, {1}, {1}, {2}, {0}]) == {0}
    assert cache.count("A", "hits", "D", "C", "P", "unused") == [6, 5, 0, 1, 3, 0]


def test_reading_foresight_counts_steps_and_not_tokens():
    # What a cache saves is accesses, and three tokens of one step are one of these.
    cache = Cache("foresight:every=3", 1)
    cache.play([{0}, {1}, {1}], n_tokens=[3, 1, 1])
    assert cache.count("A", "hits") == [3, 2]


@pytest.mark.parametrize("misses, demand_and_computed", [("cpu", [0, 2]), ("load", [2, 0])])
def test_static_has_what_training_used_most(misses, demand_and_computed):
    cache = Cache("static", 2, misses=misses, learned={"usage": [[3, 1, 2, 0]]})
    assert cache.play([{0}, {1}, {2}, {3}]) == {0, 2}
    assert cache.count("A", "hits", "P", "unused") == [4, 2, 2, 0]
    assert cache.count("D", "C") == demand_and_computed


def test_static_shared_by_all_layers():
    cache = Cache("static", 1, n_layers=2, shared=True, learned={"usage": [[9, 8, 0, 0], [1, 1, 1, 7]]})
    assert cache.play([({0}, {3}), ({1}, {3})]) == [{0, 1}, set()]
    assert cache.count("A", "hits") == [4, 2]


def test_placement_begins_early():
    # After three tokens, six more, and then every eight.
    steps = [{0}, {1}, {1}] + [{2}] * 4 + [{1}] * 2 + [{3}] * 8
    seen = after_each(steps, "placement:every=8,early=3,decay=0,bonus=0", 1)
    assert seen == [{0}] * 2 + [{1}] * 6 + [{2}] * 8 + [{3}]


def test_placement_begins_early_in_every_sequence():
    cache = Cache("placement:every=8,early=3,decay=0,bonus=0", 1)
    cache.play([{0}, {0}])
    assert cache.play([{1}, {1}, {1}]) == {1}   # three tokens later, not after the first


def test_placement_never_waits_longer_than_every():
    assert Cache("placement:every=2,early=9,decay=0,bonus=0", 1).play([{0}, {1}, {1}, {1}]) == {1}


def test_placement_shared_by_all_layers():
    # After two tokens 3 of layer 1 and 0 of layer 0 have two uses, all others one or none.
    cache = Cache("placement:every=2,decay=0,bonus=0", 1, n_layers=2, shared=True)
    assert cache.play([({0, 1}, {3}), ({0, 2}, {3})]) == [{0}, {3}]


# --- what the router says, and what is predicted from it ---

N = 4   # experts of the tables below


def always(expert, weight=1.0):
    """Of an affine prediction: this expert, whatever comes in. [N, N + 1]"""
    table = np.zeros((N, N + 1))
    table[expert, -1] = weight
    return table


def follows(by=0, weight=1.0):
    """Expert i + by, for expert i."""
    table = np.zeros((N, N + 1))
    table[(np.arange(N) + by) % N, np.arange(N)] = weight
    return table


def temporal(average=None, constant=None):
    """One layer: a weight on each expert's own moving average, or always this expert. [1, N, 2 N + 1]"""
    table = np.zeros((1, N, 2 * N + 1))
    if average is not None:
        table[0, np.arange(N), N + np.arange(N)] = average
    if constant is not None:
        table[0, constant, -1] = 1
    return table


NOTHING_TEMPORAL = np.zeros((2, N, 2 * N + 1))


@pytest.mark.parametrize("misses, loads", [("load", [4, 0, 0]), ("cpu", [0, 4, 4])])
def test_temporal_keeps_what_is_predicted(misses, loads):
    # 3 is predicted, always. The rest have a score only in the event that uses them. What was not asked for does not come: P = 0 where misses are loaded.
    cache = Cache("temporal", 2, misses=misses, learned={"temporal": temporal(constant=3)})
    assert cache.play([{3}, {0}, {1}, {2}, {3}]) == {2, 3}
    assert cache.count("A", "hits") == [5, 1] and cache.count("D", "C", "P") == loads


def test_temporal_goes_by_the_moving_average():
    # When 2 comes, the averages are 0.1 (0.9^3 + 0.9^2) of 0 and 0.09 of 1.
    assert Cache("temporal", 2, learned={"temporal": temporal(average=1)}).play([{0}, {0}, {1}, {2}]) == {0, 2}


def test_temporal_adds_what_the_router_says():
    # 0 has a probability of 0.3 in the event that needs 2, and 1 has 0.2 beside a prediction of nothing.
    probs = [[[1, 0, 0, 0]], [[0, 1, 0, 0]], [[0.3, 0.2, 0.5, 0]]]
    assert Cache("temporal", 2, learned={"temporal": temporal()}).play([{0}, {1}, {2}], probs=probs) == {0, 2}


def test_temporal_goes_by_a_learned_head_where_there_is_one():
    # The table says 3, the head says 0. Both layers' rows have it; each row's is of the token before what it predicts.
    cache = Cache("temporal", 2, learned={"temporal": temporal(constant=3)})
    rows = rows_of_steps([{3}, {0}, {1}, {2}])
    rows["next"] = np.tile(np.float32([1, 0, 0, 0]), (4, 1, 1))
    cache.sequence(rows)
    assert set(cache.residents(0)) == {0, 2}


@pytest.mark.parametrize("policy, heads, missing", [
    ("temporal", ("head_t",), ""), ("spatio", ("head_s",), ""), ("spatio-temporal", ("head_t", "head_s"), ""),
    ("temporal", ("head_s",), "temporal"), ("spatio-temporal", ("head_t",), "spatial"), ("promoe", ("head_t", "head_s"), "spatial"),
])
def test_learned_heads_serve_instead_of_tables(policy, heads, missing):
    # Both heads say 0 in every row and layer. LRU has dropped 0 when it returns; who goes by a head keeps it, and who prefetches has it at its first use as well.
    said = np.tile(np.float32([1, 0, 0, 0]), (5, 2, 1))
    ids = np.array([[[e]] * 2 for e in (3, 0, 1, 2, 0)], np.uint8)
    trace = SimpleNamespace(ids=ids, offsets=np.array([0, 5]), n_expert=4, **{head: said for head in heads})
    if missing:
        with pytest.raises(PolicyError, match=re.escape(f"policy {policy}: it has to learn first ({missing})")):
            replay(trace, policy, 2)
        return
    hits = replay(trace, policy, 2).total()["n_hits"]
    without = replay(trace, "lru", 2).total()["n_hits"]
    assert (hits, without) == ({"temporal": 2, "spatio": 4, "spatio-temporal": 4}[policy], 0)


# Layer 1 uses the expert after that of layer 0, and layer 0 the same as layer 1 for the token before.
CHAIN = [({0}, {1}), ({1}, {2}), ({2}, {3})]
# Predictions count double, so that they outweigh the router's probability of the last token, which is 1.
CHAINED = [[follows(1, 2.0), follows(0, 2.0)]]


@pytest.mark.parametrize("policy", ["spatio-temporal:R=1", "spatio:R=1"])
@pytest.mark.parametrize("misses, loads", [("cpu", [0, 1, 7]), ("load", [1, 0, 6])])
def test_a_perfect_prediction_of_the_next_layer(policy, misses, loads):
    # Only the first event of all is a miss. What comes in last is for a token that never comes.
    cache = Cache(policy, 1, n_layers=2, misses=misses, learned={"spatial": CHAINED, "temporal": NOTHING_TEMPORAL})
    assert cache.play(CHAIN) == [{3}, {3}]
    assert cache.count("A", "hits") == [6, 5] and cache.count("D", "C", "P") == loads
    assert cache.count("unused") == [1 if misses == "cpu" else 0]   # 0 of layer 0, which came in after its only use


def test_a_wrong_prediction_of_the_next_layer_is_charged():
    # 3 comes into layer 1, and out again; and into layer 0 in the place of 0.
    cache = Cache("spatio:R=1", 1, n_layers=2, learned={"spatial": [[always(3, 2.0)] * 2]})
    assert cache.play([({0}, {1})]) == [{3}, {1}]
    assert cache.count("A", "hits", "D", "C", "P", "unused") == [2, 0, 0, 2, 4, 2]


def test_only_a_higher_score_takes_a_place_ahead():
    # Predicted with 0.5, where the one that is there has the router's 1 of the last token.
    cache = Cache("spatio:R=4", 1, n_layers=2, learned={"spatial": [[always(3, 0.5)] * 2]})
    assert cache.play([({0}, {1}), ({0}, {1})]) == [{0}, {1}]
    # 3 fills the empty slot of layer 1 before its first event.
    assert cache.count("hits", "P", "unused", layer=0) == [1, 1, 0] and cache.count("hits", "P", "unused", layer=1) == [1, 2, 1]


def test_spatio_temporal_ahead_counts_the_temporal_prediction_too():
    # Before layer 1 its expert 0 has 0 from the router of the last token, and 3 from its own prediction: more than the 2 of the layer before for 3.
    table = NOTHING_TEMPORAL.copy()
    table[1, 0, -1] = 3
    cache = Cache("spatio-temporal:R=1", 1, n_layers=2, learned={"spatial": [[always(3, 2.0)] * 2], "temporal": table})
    assert cache.play([({0}, {1}), ({0}, {0})])[1] == {0}
    assert cache.count("hits", layer=1) == [1]


def test_a_shared_cache_goes_by_what_all_layers_are_worth_now():
    # Two slots for both layers. When 3 of layer 1 is predicted for token 2, 2 of layer 0 has just got 0.97, and 1 of layer 1 has 0.9: that one makes place, and nobody
    # has to be brought back.
    probs = [[[1, 0, 0, 0], [0.1, 0.9, 0, 0]]] + [[[0.01, 0.01, 0.97, 0.01], [0, 0, 0, 1]]] * 2
    cache = Cache("spatio:R=1", 1, n_layers=2, shared=True, learned={"spatial": [[always(3, 0.95), always(0, 0)]]})
    assert cache.play([({0}, {1}), ({2}, {3}), ({2}, {3})], probs=probs) == [{2}, {3}]
    assert cache.count("A", "hits", "C", "P") == [6, 3, 3, 5]


def identity(n_layers, n_ahead=1):
    return [[follows(0)] * n_layers for _ in range(n_ahead)]


def test_promoe_brings_the_same_three_layers_ahead():
    # Only layer 0 is not foreseen: predictions end with the token.
    cache = Cache("promoe", 1, n_layers=4, learned={"spatial": identity(4, 3)})
    assert cache.play([({0},) * 4, ({1},) * 4]) == [{1}] * 4
    assert cache.count("A", "hits", "D", "C", "P", "unused") == [8, 6, 0, 2, 8, 1]


def test_promoe_touches_what_it_predicts():
    # Token 3: layer 0 predicts 0 for layer 2, where it takes the place of 2; layer 1 predicts 1, which takes that of 3, for 0 is as good as used.
    cache = Cache("promoe", 2, n_layers=3, learned={"spatial": identity(3, 3)})
    assert cache.play([({2},) * 3, ({3},) * 3, ({0}, {1}, {0})])[2] == {0, 1}
    assert cache.count("A", "hits", layer=2) == [3, 3]


@pytest.mark.parametrize("k, n_hits", [(1, 1), (2, 2)])
def test_promoe_takes_the_best_k(k, n_hits):
    both = always(2, 0.6) + always(3, 0.4)
    cache = Cache(f"promoe:k={k}", 2, n_layers=2, learned={"spatial": [[both] * 2]})
    cache.play([({0}, {2, 3})])
    assert cache.count("A", "hits", layer=1) == [2, n_hits]


def test_promoe_reads_the_hidden_state_where_there_is_one():
    # The perceptron says 1 where the first value is positive, and 2 where the second is; the table says 0 and is not asked.
    mlp1 = np.zeros((1, 2, 2, 3))
    mlp1[..., 0, 0] = mlp1[..., 1, 1] = 1
    mlp2 = np.zeros((1, 2, N, 3))
    mlp2[..., 1, 0] = mlp2[..., 2, 1] = 1
    learned = {"spatial": [[always(0)] * 2], "mlp1": mlp1, "mlp2": mlp2}
    for hidden, n_hits in ((None, 0), ([[5, -5], [-5, 5]], 2), ([[5, -5, 0], [-5, 5, 0]], 0)):   # of another width: as without
        cache = Cache("promoe", 1, n_layers=2, learned=learned)
        rows = rows_of_steps([({0}, {1}), ({0}, {2})])
        if hidden:
            rows["hidden"] = np.ascontiguousarray(np.repeat(np.float32(hidden)[:, None], 2, 1))
        cache.sequence(rows)
        assert cache.count("A", "hits", layer=1) == [2, n_hits]


@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_mixtral_offloading_keeps_what_it_guesses_beside_the_cache(misses):
    # Layer 1 is guessed right, wrong, right. The wrong guess is charged and gone; the right ones are charged once.
    cache = Cache("mixtral-offloading:k=1", 1, n_layers=2, misses=misses, learned={"spatial": identity(2)})
    assert cache.play([({0}, {0}), ({1}, {0})])[1] == {0}
    assert cache.count("A", "hits", "D", "C", "P", "unused", layer=1) == [2, 2, 0, 0, 2, 0]
    cache.clear()
    assert cache.play([({0}, {0}), ({1}, {0}), ({2}, {2})])[1] == {2}
    assert cache.count("A", "hits", "D", "C", "P", "unused", layer=1) == [5, 5, 0, 0, 5, 1]
    assert cache.count("hits", "D" if misses == "load" else "P", layer=0) == [0, 5]


def test_mixtral_offloading_guesses_nothing_for_the_next_token():
    cache = Cache("mixtral-offloading", 4, n_layers=1, learned={"spatial": identity(1)})
    cache.play([{0}, {0}])
    assert cache.count("hits", "P") == [1, 1]


def test_a_guess_that_a_demand_load_overwrites_is_counted_as_unused():
    # One place beside the slots. Layer 1 guesses 3 and needs 1, which may not replace 0, for it was used less often.
    cache = Cache("mixtral-offloading:k=1", 1, n_layers=2, misses="load", n_staging=1, strict=True, learned={"spatial": [[always(3)] * 2]})
    assert cache.play([({0}, {0}), ({0}, {0}), ({0}, {1})])[1] == {0}
    assert cache.count("D", "C", layer=1) == [2, 0]
    # Guessed three times. The first time it made place for the guess after it; so did the second; the third gave way to 1.
    assert cache.count("P", "unused", layer=1) == [3, 3]


def test_st_moe_goes_by_what_followed():
    follow = np.zeros((2, N, N))
    follow[0, np.arange(N), (np.arange(N) + 1) % N] = follow[1, np.arange(N), np.arange(N)] = 1
    cache = Cache("st-moe", 1, n_layers=2, learned={"follow": follow})
    assert cache.play(CHAIN) == [{3}, {3}]
    assert cache.count("A", "hits", "D", "C", "P", "unused") == [6, 5, 0, 1, 7, 1]


@pytest.mark.parametrize("weight, n_hits", [(0.5, 2), (0.3, 0)])
def test_st_moe_weighs_what_the_layer_used_for_the_last_token(weight, n_hits):
    # 2 follows with 0.4. Layer 1 uses 1 all the time.
    follow = np.zeros((2, N, N))
    follow[0, :, 2] = 0.4
    follow[1, np.arange(N), 0] = 1
    cache = Cache(f"st-moe:weight={weight}", 1, n_layers=2, learned={"follow": follow})
    cache.play([({0}, {1})] * 3)
    assert cache.count("A", "hits", layer=1) == [3, n_hits]


def test_step_goes_by_the_layer_before_at_first():
    # Nothing has been averaged yet, so that half of a prediction is more than none.
    cache = Cache("step", 1, n_layers=2, learned={"spatial": identity(2)})
    cache.play([({2}, {2})])
    assert cache.count("A", "hits", layer=1) == [1, 1]


def test_step_comes_to_trust_the_average():
    # Layer 1 always uses 1; 2 is predicted with 0.4. Both are trusted 0.5 at first and 0.475 after the first token, when neither was right. The average of 1 is 0.1, 0.19, 0.271,
    # 0.344 after the following tokens, and its trust goes from 0.475 to 0.501 and 0.526, that of the prediction to 0.451 and 0.429. 0.19 * 0.501 is less than 0.4 * 0.451,
    # 0.271 * 0.526 is less than 0.4 * 0.429, and 0.344 * 0.550 is more than 0.4 * 0.407: the fifth token is the first hit.
    n_hits = []
    for n_tokens in range(1, 7):
        cache = Cache("step", 1, n_layers=2, learned={"spatial": [[always(2, 0.4), always(0)]]})
        cache.play([({0}, {1})] * n_tokens)
        n_hits += cache.count("hits", layer=1)
    assert n_hits == [0, 0, 0, 0, 1, 2]


# --- what was routed alike ---

def maps(*experts):
    """A map of four layers for each: this expert everywhere."""
    return np.eye(6)[list(experts)][:, None].repeat(4, 1)


@pytest.mark.parametrize("token, n_hits, n_proactive", [(7, 4, 4), (9, 1, 4)])
def test_finemoe_goes_by_the_token_and_then_by_the_layers_so_far(token, n_hits, n_proactive):
    # Token 7 is known: the first three layers have its expert before they ask. Of token 9 layer 0 tells which map it is, which is in time for layer 3.
    cache = Cache("finemoe", 4, n_expert=6, n_layers=4, learned={"maps": maps(0, 1), "map_tokens": [7, 8]})
    assert cache.play([({0},) * 4], token_ids=[token]) == [{0}] * 4
    assert cache.count("A", "hits", "C", "P", "unused") == [4, n_hits, 4 - n_hits, n_proactive, 0]


def test_finemoe_takes_tokens_that_are_not_known_for_nothing():
    cache = Cache("finemoe", 4, n_expert=6, n_layers=4, learned={"maps": maps(0, 1), "map_tokens": [-1, -1]})
    cache.play([({0},) * 4], token_ids=[-1])
    assert cache.count("A", "hits") == [4, 1]


def test_finemoe_loads_no_more_per_step_than_a_layer_holds():
    cache = Cache("finemoe", 2, n_expert=6, n_layers=4, learned={"maps": maps(0, 1), "map_tokens": [7, 8]})
    cache.play([({0},) * 4], token_ids=[7])
    assert cache.count("A", "hits") == [4, 2]


def test_finemoe_evicts_by_map_and_visits():
    # Since they came in, 0 was used once and 1 twice; the map has 0.9 and 0.3. Both are dearer than one that came in just now.
    cache = Cache("finemoe", 2, learned={"maps": [[[0.9, 0.3, 0.1, 0.1]]], "map_tokens": [7]})
    assert cache.play([{0}, {0}, {1}, {1}, {1}, {2}]) == {0, 2}
    assert cache.play([{3}]) == {0, 3}


def test_finemoe_counts_visits_anew_when_an_expert_returns():
    # 0 had many visits before it went (1 is worth more by the map); back again it has none, and goes before 1.
    cache = Cache("finemoe", 2, learned={"maps": [[[0.1, 0.9, 0.1, 0.1]]], "map_tokens": [7]})
    assert cache.play([{0}, {0}, {0}, {1}, {1}, {2}, {0}, {3}]) == {1, 3}


def test_finemoe_knows_after_clear_what_it_knew_at_first():
    first, again = (Cache("finemoe", 4, n_expert=6, n_layers=4, learned={"maps": maps(0, 1) + maps(2, 2) / 8, "map_tokens": [7, 8]}) for _ in range(2))
    again.play([({0, 2},) * 4], token_ids=[7])
    before = again.counts()
    again.clear()
    for cache in (first, again):
        cache.play([({0},) * 4], token_ids=[7])
    assert (again.counts() - before == first.counts()).all()


def test_moe_infinity_goes_by_the_sequence_that_is_most_alike():
    # After token 1 the second stored sequence is nearer: it used 0 in layer 0 as well, and then 1 in layer 1.
    sequences = np.zeros((2, 2, N))
    sequences[0, 0, 3] = sequences[0, 1, 3] = 9
    sequences[1, 0, 0] = sequences[1, 1, 1] = 5
    cache = Cache("moe-infinity", 1, n_layers=2, learned={"sequences": sequences})
    assert cache.play([({0}, {2}), ({0}, {1})]) == [{0}, {1}]
    assert cache.count("A", "hits", "C", "P", "unused", layer=1) == [2, 1, 1, 2, 1]


def test_moe_infinity_brings_as_many_as_were_used():
    # 1 and 3 come together: what comes first is not the first to make place.
    sequences = np.zeros((1, 2, N))
    sequences[0, 0, [0, 2]] = 5
    sequences[0, 1, [1, 3]] = 5, 4
    cache = Cache("moe-infinity", 2, n_layers=2, learned={"sequences": sequences})
    assert cache.play([({0, 2}, {0, 2}), ({0, 2}, {1, 3})]) == [{0, 2}, {1, 3}]
    assert cache.count("A", "hits", layer=1) == [4, 2]


def test_moe_infinity_prefers_near_layers():
    # Counts of 4 in layer 1 and 5 in layer 2, times 3/4 and 2/4.
    sequences = np.zeros((1, 3, N))
    sequences[0, 0, 0], sequences[0, 1, 1], sequences[0, 2, 2] = 5, 4, 5
    cache = Cache("moe-infinity", 1, n_layers=3, learned={"sequences": sequences})
    cache.play([({0}, {3}, {3}), ({0}, {1}, {1})])
    assert [cache.count("hits", layer=layer)[0] for layer in range(3)] == [1, 1, 0]
    assert cache.count("P", layer=2) == [3]   # 3; after layer 1 the 2; and 1


def test_moe_infinity_evicts_the_fewest_visits():
    cache = Cache("moe-infinity", 2, learned={"sequences": np.zeros((1, 1, N))})
    assert cache.play([{0}, {0}, {1}, {2}]) == {0, 2}
    assert cache.play([{2}, {1}]) == {1, 2}   # of this sequence, in which 0 was not used


# --- a score function in Python ---

def most_used(usage):
    return usage.count


@pytest.fixture
def registered():
    known = dict(policies._registered)
    yield
    policies._registered.clear()
    policies._registered.update(known)


def test_a_score_function_by_name(registered):
    policies.register("most-used")(most_used)
    cache = Cache("most-used", 2)
    assert cache.play(POPULAR_THEN_SCAN) == {0, 2}
    assert cache.count("A", "hits", "C", "P") == [6, 3, 3, 3]


def test_what_a_score_function_sees(registered):
    seen = []

    @policies.register("looking")
    def looking(usage):
        seen.append((usage.layer, usage.n_events, usage.last_event.tolist(), usage.count.tolist(), usage.probs.tolist()))
        usage.count[:] = 99   # its own copy
        return -np.arange(3.0)

    cache = Cache("looking", 1, n_expert=3, n_layers=2)
    # A prompt is not asked about.
    assert cache.play([({0, 1}, {2}), ({2}, {0}), ({1}, {1})], n_tokens=[2, 20, 1]) == [{1}, {1}]
    assert seen == [
        (0, 1, [1, 1, 0], [2, 2, 0], [0.5, 0.5, 0]), (1, 2, [0, 0, 2], [0, 0, 2], [0, 0, 1]),
        (0, 3, [1, 3, 0], [2, 3, 0], [0, 1, 0]), (1, 4, [0, 4, 2], [0, 1, 2], [0, 1, 0]),
    ]


@pytest.mark.parametrize("score, message", [
    (lambda usage: 1 / 0, "ZeroDivisionError: division by zero"),
    (lambda usage: [1.0], "its score function returned (1,), wanted 4 finite numbers"),
    (lambda usage: [np.nan] * 4, "its score function returned (4,), wanted 4 finite numbers"),
    (lambda usage: "high", "ValueError: could not convert string to float: 'high'"),
    (lambda usage: None, "its score function returned (), wanted 4 finite numbers"),
])
def test_a_score_function_that_fails(score, message, registered):
    calls = []
    policies.register("failing")(lambda usage: calls.append(1) or score(usage))
    cache = Cache("failing", 2)
    for _ in range(2):
        with pytest.raises(PolicyError) as error:
            cache.play(POPULAR_THEN_SCAN)
        assert str(error.value) == f"policy failing: {message}"
    assert len(calls) == 1   # its scores are worthless from then on


def test_ctrl_c_in_a_score_function_is_ctrl_c(registered):
    @policies.register("interrupted")
    def interrupted(usage):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Cache("interrupted", 2).play(POPULAR_THEN_SCAN)


def test_a_name_that_is_taken():
    with pytest.raises(PolicyError, match="^policy lru: edgemoe has one of this name$"):
        policies.register("lru")(most_used)


# --- the example of docs/policies.md, word for word ---

DOCS = (Path(__file__).parent.parent / "docs" / "policies.md").read_text()


@pytest.fixture
def example(tmp_path):
    """FILE.py:function."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert len(code.splitlines()) <= 10
    path = tmp_path / code.split()[1].rstrip(":")
    path.write_text(code)
    return f"{path}:likely"


def test_docs_list_every_policy():
    for text in policies.defaults().values():
        assert f"`{text}`" in DOCS


def test_the_example_in_the_simulator(example):
    # Nobody's last use is long ago: it is the moving average, which is 0.1, 0.09 and 0.15 of 1, 0 and 2 when 3 comes.
    cache = Cache(example, 3)
    assert cache.play([{0}, {2}, {2}, {1}, {3}]) == {1, 2, 3}
    assert cache.count("A", "hits", "C", "P") == [5, 1, 4, 4]


OPTIONS = dict(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, logits_all=True, verbose=False)
TEXT = [*range(20, 40), *range(30, 45)]   # a prompt, then token by token


def logits(llm):
    llm.eval(TEXT[:20])
    for token in TEXT[20:]:
        llm.eval([token])
    return llm.scores[: llm.n_tokens].copy()


@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_the_example_in_the_engine(example, misses, models):
    found = []
    for options in (dict(slots=5, device="CPU", misses=misses, policy=example), {}):
        llm = edgemoe.Llama(str(models("qwen3moe", "Q8_0")), exact=True, **options, **OPTIONS)
        found.append(logits(llm))
        stats = llm.expert_stats()
        llm.close()
        if options:
            assert stats["n_decode_hits"] > 0 and stats["n_evicted"] > 0
            assert stats["n_decode_accesses"] == stats["n_decode_hits"] + stats["n_decode_demand"] + stats["n_decode_computed"]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("body, message", [
    ("return 1 / 0", "ZeroDivisionError: division by zero"),
    ("return usage.count[:-1]", "its score function returned (15,), wanted 16 finite numbers"),
])
def test_a_score_function_that_fails_in_the_engine(body, message, models, tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(f"def score(usage):\n    {body}\n")
    gguf = models("qwen3moe", "Q8_0")
    llm = edgemoe.Llama(str(gguf), slots=5, device="CPU", policy=str(path), **OPTIONS)
    for _ in range(2):   # from the first decoded token on
        with pytest.raises(ModelFault) as error:
            logits(llm)
        assert str(error.value) == f"{gguf}: policy {path}: {message}"
    llm.close()


@pytest.mark.parametrize("text, wanted", [
    (None, "no such file"), ("def other(usage): pass", "no function score"), ("score = 3", "no function score"), ("1 / 0", "ZeroDivisionError: division by zero"), ("def", "SyntaxError: "),
])
def test_files_without_a_score_function(text, wanted, tmp_path):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PolicyError) as error:
        policies.policy(str(path))
    assert str(error.value).startswith(f"{path}: {wanted}") and "\n" not in str(error.value)


# --- what is refused, in one line ---

ZEROS = {"usage": (2, N), "follow": (2, N, N), "temporal": (2, N, 2 * N + 1), "spatial": (3, 2, N, N + 1), "maps": (5, 2, N), "map_tokens": (5,), "sequences": (5, 2, N)}


@pytest.mark.parametrize("policy", policies.LEARNED)
def test_policies_that_have_learned_nothing(policy):
    with pytest.raises(PolicyError, match=f"^policy {policy}: it has to learn first"):
        Cache(policy, 2, n_layers=2)


@pytest.mark.parametrize("policy, name", [(policy, name) for policy, names in policies.LEARNED.items() for name in names])
def test_tables_of_another_model(policy, name):
    learned = {name: np.zeros(shape) for name, shape in ZEROS.items()}
    Cache(policy, 2, n_layers=2, learned=learned).play([({0}, {1})])
    shape = ZEROS[name]
    for other in ((*shape[:-1], shape[-1] + 1), (*shape, 1), *(((*shape[:-2], shape[-2] + 1, shape[-1]),) if len(shape) > 1 else ())):
        with pytest.raises(PolicyError) as error:
            Cache(policy, 2, n_layers=2, learned=learned | {name: np.zeros(other)})
        assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tables_with_values_that_are_no_numbers(value):
    usage = np.ones((2, N))
    usage[1, 2] = value
    with pytest.raises(PolicyError, match="^table usage: value 6 is not a finite number$"):
        Cache("static", 2, n_layers=2, learned={"usage": usage})


def test_a_sequence_with_an_expert_that_its_layer_does_not_have():
    for policy in ("lru", *policies.CHEATS):
        cache = Cache(policy, 2)
        with pytest.raises(PolicyError, match="^row 1, layer 0: expert 4, wanted less than 4$"):
            cache.play([{0}, {4}])
        assert cache.play([{0}, {1}]) == {0, 1}


def test_probabilities_where_layers_have_different_sizes():
    rows = rows_of_steps([({0}, {1})], probs=[[[0.25] * 4] * 2])
    with pytest.raises(PolicyError, match="^rows: probabilities of 4 experts per layer; layer 1 has 5$"):
        Replay([4, 5], 2, "lru").sequence(rows)


@pytest.mark.parametrize("policy", [p for p in policies.LEARNED if p != "static"])
def test_layers_of_different_sizes_cannot_have_learned(policy):
    learned = {name: np.zeros(shape, np.float32) for name, shape in ZEROS.items()}
    with pytest.raises(PolicyError, match="layer 1 has 5 experts, wanted 4 as in the first"):
        Replay([4, 5], 2, policy, learned=learned)


@pytest.mark.parametrize("policy", policies.CHEATS)
def test_policies_that_know_the_future_need_a_sequence(policy):
    ffi, lib = _native.load()
    cache = Cache(policy, 2)
    assert lib.edgemoe_replay_event(cache._handle, 0, ffi.new("int32_t[]", [0]), ffi.new("int32_t[]", [1]), 1, 1) == -1
    assert _native.last_error().endswith("know the future, which only a simulation does") or _native.last_error().endswith("knows the future, which only a simulation does")
