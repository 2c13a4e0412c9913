"""The expert cache without a model: stories that can be checked by hand, random traces against the reference, and published counts on real routing.

Every story is told to both, so that the reference is held to them as well.
"""

from itertools import islice

import numpy as np
import pytest
from conftest import SHARED
from hypothesis import given, note, settings
from hypothesis import strategies as st
from residency_reference import Layer

from edgemoe import _native

FFI, LIB = _native.load()
FIELDS = ("events", "accesses", "hits", "demand", "computed", "proactive", "evicted", "failed")
PHASES = {"decode": LIB.EDGEMOE_DECODE, "prompt": LIB.EDGEMOE_PROMPT}


def open_replay(n_expert, n_slots, policy, misses="cpu", strict=False, most_inserts=0, seed=True, n_staging=0):
    """NULL when refused."""
    policy, misses = FFI.new("char[]", policy.encode()), FFI.new("char[]", misses.encode())
    options = FFI.new("struct edgemoe_cache_options *", {
        "n_slots": n_slots, "policy": policy, "misses": misses, "strict": strict, "most_inserts": most_inserts, "seed": seed, "n_staging": n_staging})
    return LIB.edgemoe_replay_open(FFI.new("uint32_t[]", [n_expert]), 1, options)


class Native:
    """The native cache, with the interface of the reference."""

    def __init__(self, n_expert, n_slots, policy="lru", every=None, decay=None, bonus=None, early=None, **options):
        values = [f"{key}={value}" for key, value in (("every", every), ("decay", decay), ("bonus", bonus), ("early", early)) if value is not None]
        self.handle = FFI.gc(open_replay(n_expert, n_slots, ":".join([policy, ",".join(values)] if values else [policy]), **options), LIB.edgemoe_replay_close)
        self.ids = FFI.new("int32_t[]", max(n_expert, 1))

    def call(self, function, experts, n_tokens_of, n_tokens):
        if function(self.handle, 0, FFI.new("int32_t[]", experts), FFI.new("int32_t[]", n_tokens_of), len(experts), n_tokens):
            raise ValueError(_native.last_error())

    def event(self, n_tokens_of, n_tokens=1):
        self.call(LIB.edgemoe_replay_event, sorted(n_tokens_of), [n_tokens_of[e] for e in sorted(n_tokens_of)], n_tokens)

    def hold(self, n_tokens_of, n_tokens=1):
        self.call(LIB.edgemoe_replay_hold, sorted(n_tokens_of), [n_tokens_of[e] for e in sorted(n_tokens_of)], n_tokens)

    def release(self):
        LIB.edgemoe_replay_release(self.handle)

    @property
    def residents(self):
        return set(self.ids[0:LIB.edgemoe_replay_get_residents(self.handle, 0, self.ids)])

    @property
    def counts(self):
        found = {}
        for name, phase in PHASES.items():
            c = FFI.new("struct edgemoe_access_counts *")
            LIB.edgemoe_replay_get_counts(self.handle, phase, 0, c)
            assert c.bytes_loaded == c.n_demand + c.n_proactive   # experts of a replay have one byte
            found[name] = {field: getattr(c, f"n_{field}") for field in FIELDS}
        return found


@pytest.fixture(params=[Native, Layer], ids=["native", "reference"])
def cache(request):
    return request.param


def play(cache, trace):
    """Events of one token each; the residents after every one."""
    seen = []
    for experts in trace:
        cache.event(dict.fromkeys(experts, 1))
        seen.append(set(cache.residents))
    return seen


def counted(cache, *fields, phase="decode"):
    return [cache.counts[phase][field] for field in fields]


# --- LRU ---

# Expert 0 is popular, then 1 and 2 pass by once: LRU has dropped 0 when it returns.
POPULAR_THEN_SCAN = [{0}, {0}, {0}, {1}, {2}, {0}]


@pytest.mark.parametrize("misses, loads", [("cpu", [0, 4, 4]), ("load", [4, 0, 0])])
def test_lru_on_popular_then_scan(misses, loads, cache):
    layer = cache(4, 2, misses=misses)
    assert play(layer, POPULAR_THEN_SCAN) == [{0}, {0}, {0}, {0, 1}, {1, 2}, {0, 2}]
    assert counted(layer, "events", "accesses", "hits", "evicted") == [6, 6, 2, 2]
    assert counted(layer, "demand", "computed", "proactive") == loads


@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_the_lower_id_of_one_event_goes_first(misses, cache):
    assert play(cache(8, 3, misses=misses), [{1, 4, 6}, {0}, {7}]) == [{1, 4, 6}, {0, 4, 6}, {0, 6, 7}]


@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_no_member_of_an_event_goes_in_it(misses, cache):
    # 2 was not used for longest. Replayed one by one, 0 would push it out just before it is needed.
    layer = cache(4, 2, misses=misses)
    assert play(layer, [{2}, {1}, {0, 2}])[-1] == {0, 2}
    assert counted(layer, "hits", "evicted") == [1, 1]


def test_strict_admission_asks_for_more_uses(cache):
    once, twice, three_times = play(cache(4, 1, strict=True), [{0}, {0}, {1}, {1}, {1}])[2:]
    assert (once, twice, three_times) == ({0}, {0}, {1})


def test_strict_admission_counts_tokens(cache):
    layer = cache(4, 1, strict=True)
    play(layer, [{0}, {0}])
    layer.event({1: 3}, 4)
    assert layer.residents == {1}


def test_the_cap_on_insertions_is_per_event(cache):
    # The empty slots of the first event are not subject to it.
    assert play(cache(8, 4, most_inserts=1), [{0, 1, 2, 3}, {4, 5}, {5, 6}]) == [{0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}]


# --- placement ---

def test_placement_moves_nothing_between_refreshes(cache):
    # Counts of the first four tokens: 1 and 3. Of the next four 3 and 1, with half the score so far 3.5 and 2.5.
    layer = cache(4, 1, policy="placement", every=4, decay=0.5, bonus=0, early=0)
    assert play(layer, [{0}, {1}, {1}, {1}]) == [{0}, {0}, {0}, {1}]
    assert play(layer, [{1}, {0}, {0}, {0}]) == [{1}, {1}, {1}, {0}]
    assert counted(layer, "hits", "computed", "proactive", "evicted", "demand") == [1, 7, 3, 2, 0]


def test_the_first_choices_of_placement_come_early(cache):
    # After 1 token, 2 and then 4 more, and from then on every 4: at 1, 3, 7, 11. Expert 1 is the best from the fourth token on.
    layer = cache(4, 1, policy="placement", every=4, decay=1, bonus=0, early=1)
    assert play(layer, [{0}, {0}, {0}, {1}, {1}, {1}, {1}, {2}, {2}, {2}, {2}]) == [{0}] * 6 + [{1}] * 5
    layer = cache(4, 1, policy="placement", every=4, decay=1, bonus=0, early=1)
    assert play(layer, [{0}, {1}, {1}, {2}, {2}, {2}, {2}]) == [{0}, {0}, {1}, {1}, {1}, {1}, {2}]


def test_placement_takes_the_most_used(cache):
    # 3 and 5 three times, 4 twice, the rest once.
    trace = [{0, 1, 2}, {3, 4}, {3, 5}, {3, 5}, {4, 5}]
    assert play(cache(8, 3, policy="placement", every=5, bonus=0, early=0), trace)[-2:] == [{0, 1, 2}, {3, 4, 5}]


@pytest.mark.parametrize("bonus, after", [(0, {1}), (2, {0})])
def test_only_a_higher_score_replaces(bonus, after, cache):
    layer = cache(4, 1, policy="placement", every=2, decay=0, bonus=bonus, early=0)
    assert play(layer, [{0}, {1}]) == [{0}, {0}]       # 1 and 1
    assert play(layer, [{1}, {1}]) == [{0}, after]     # 0 + bonus and 2


def test_an_expert_that_nobody_used_fills_no_slot(cache):
    layer = cache(4, 3, policy="placement", every=1)
    assert play(layer, [{2}, {2}, {2}]) == [{2}, {2}, {2}]
    assert counted(layer, "hits", "proactive") == [2, 1]


def test_placement_loads_on_demand_where_that_is_the_mode(cache):
    # The set is not for misses to change: 2 and 3 come for their event only, as far as there is room beside the slots.
    layer = cache(4, 2, policy="placement", misses="load", n_staging=1)
    assert play(layer, [{0}, {1}, {0}, {2}, {2, 3}]) == [{0}, {0, 1}, {0, 1}, {0, 1}, {0, 1}]
    assert counted(layer, "hits", "demand", "computed", "proactive") == [1, 4, 1, 0]


def test_what_strict_admission_refuses_is_loaded_for_its_event_only(cache):
    layer = cache(4, 1, strict=True, misses="load", n_staging=1)
    assert play(layer, [{0}, {1}, {0}, {1}, {1}]) == [{0}, {0}, {0}, {0}, {1}]
    assert counted(layer, "hits", "demand", "computed", "evicted") == [1, 4, 0, 1]


# --- prompts ---

@pytest.mark.parametrize("n_tokens, after", [(16, {2, 3}), (17, {0, 1})])
@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_a_prompt_leaves_a_full_lru_cache_alone(misses, n_tokens, after, cache):
    layer = cache(4, 2, misses=misses)
    play(layer, [{0, 1}])
    layer.event({2: 16, 3: 9}, n_tokens)
    assert layer.residents == after
    assert counted(layer, "events", "accesses", phase="prompt") == ([1, 2] if n_tokens == 17 else [0, 0])
    assert counted(layer, "computed", "demand", "proactive", "evicted", phase="prompt") == ([2, 0, 0, 0] if n_tokens == 17 else [0, 0, 0, 0])


def test_being_used_by_a_prompt_is_not_recent(cache):
    layer = cache(4, 2)
    play(layer, [{0}, {1}])
    layer.event({0: 17}, 17)
    assert counted(layer, "hits", phase="prompt") == [1]
    assert play(layer, [{2}]) == [{1, 2}]


@pytest.mark.parametrize("policy", ["lru", "placement"])
@pytest.mark.parametrize("seed, after", [(True, {1, 3}), (False, set())])
def test_a_prompt_fills_empty_slots_with_the_most_used(seed, after, policy, cache):
    layer = cache(4, 2, policy=policy, seed=seed)
    layer.event({0: 5, 1: 9, 2: 5, 3: 17}, 17)
    assert layer.residents == after
    assert counted(layer, "proactive", phase="prompt") == [len(after)]


def test_of_equally_used_ones_the_lower_ids_fill_the_slots(cache):
    layer = cache(8, 3)
    layer.event({1: 4, 2: 5, 3: 4, 4: 4, 5: 4}, 17)
    assert layer.residents == {1, 2, 3}


@pytest.mark.parametrize("seed, after", [(True, {1}), (False, {0})])
def test_placement_learns_from_prompts(seed, after, cache):
    layer = cache(4, 1, policy="placement", seed=seed)
    play(layer, [{0}])
    layer.event({0: 10, 1: 30}, 40)
    assert layer.residents == after


def test_a_prompt_counts_as_much_as_the_tokens_between_two_choices(cache):
    # All 400 tokens used 0: that is worth the 4 of a choice, and 8 tokens of an answer outweigh it.
    layer = cache(4, 1, policy="placement", every=4, decay=1, bonus=0, early=0)
    layer.event({0: 400}, 400)
    assert play(layer, [{1}] * 8) == [{0}] * 7 + [{1}]


# --- sizes ---

# Two experts per event, of four in all.
BACK_AND_FORTH = [{0, 1}, {0, 1}, {2, 3}, {0, 1}]


@pytest.mark.parametrize("n_slots, n_hits, n_loads, after", [(0, 0, 0, set()), (1, 1, 3, {0}), (2, 2, 6, {0, 1}), (4, 4, 4, {0, 1, 2, 3}), (5, 4, 4, {0, 1, 2, 3})])
@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_any_number_of_slots(misses, n_slots, n_hits, n_loads, after, cache):
    layer = cache(4, n_slots, misses=misses)
    assert play(layer, BACK_AND_FORTH)[-1] == after
    # With fewer slots than an event needs, nothing is loaded on demand.
    n_demand = n_loads if misses == "load" and n_slots >= 2 else 0
    assert counted(layer, "accesses", "hits", "demand", "computed", "proactive") == [8, n_hits, n_demand, 8 - n_hits - n_demand, n_loads - n_demand]


def test_an_event_without_experts(cache):
    layer = cache(4, 2)
    assert play(layer, [{0}, set()]) == [{0}, {0}]
    assert counted(layer, "events", "accesses", "hits") == [2, 1, 0]


# --- events that overlap ---

@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_a_miss_is_computed_while_all_slots_are_held(misses, cache):
    layer = cache(4, 2, misses=misses)
    play(layer, [{0, 1}])
    layer.hold({0: 1, 1: 1})
    assert play(layer, [{2}, {2, 3}]) == [{0, 1}, {0, 1}]
    assert counted(layer, "computed", "evicted") == [3 + 2 * (misses == "cpu"), 0]
    layer.release()
    assert layer.residents == {0, 1}
    assert counted(layer, "accesses", "hits") == [7, 2]
    assert play(layer, [{2}]) == [{1, 2}]


@pytest.mark.parametrize("misses", ["cpu", "load"])
def test_a_held_expert_stays_and_another_goes(misses, cache):
    layer = cache(4, 2, misses=misses)
    play(layer, [{0}, {1}])
    layer.hold({0: 1})
    layer.hold({0: 1})
    assert play(layer, [{2}, {3}]) == [{0, 2}, {0, 3}]
    layer.release()
    assert play(layer, [{1}]) == [{1, 3}]   # it was last used when its events began


# --- what is refused, in one line ---

@pytest.mark.parametrize("policy, wanted", [
    ("", "wanted one of lru, lfu, "), ("LRU", "wanted one of"), ("placement,every=3", "wanted one of"),
    ("lru:every=3", "every=3, wanted none"), ("lru:", "wanted none"),
    ("placement:", "wanted bonus=, decay=, early=, every="), ("placement:often=3", "often=3, wanted bonus=, decay=, early=, every="), ("placement:every=3,", "wanted bonus="),
    ("placement:every", "parameter every, wanted bonus="), ("placement:every=", "every=, wanted a number"),
    ("placement:every=3x", "every=3x, wanted a number"), ("placement:decay=0.5,every=two", "every=two, wanted a number"),
    ("placement:every=0", "wanted a number from 1 to 1e+09"), ("placement:every=-4", "wanted a number from 1"), ("placement:every=nan", "wanted"), ("placement:every=inf", "wanted"),
    ("placement:every=1e300", "wanted"), ("placement:decay=1.01", "wanted a number from 0 to 1"), ("placement:decay=-0.5", "wanted a number from 0"), ("placement:decay=nan", "wanted"),
    ("placement:bonus=nan", "wanted"), ("placement:bonus=inf", "wanted"),
    ("static", "wanted a table usage"), ("promoe", "wanted a table spatial"), ("custom", "wanted a score function"),
])
def test_bad_policies(policy, wanted):
    assert open_replay(4, 2, policy) == FFI.NULL
    message = _native.last_error()
    assert message.startswith(f"policy {policy}") and wanted in message and "\n" not in message


def test_a_bad_mode_for_misses():
    assert open_replay(4, 2, "lru", misses="gpu") == FFI.NULL
    assert _native.last_error() == "misses: gpu, wanted cpu, load or auto"


@pytest.mark.parametrize("experts, place", [([-1], 0), ([4], 0), ([0, 4], 1), ([1, 1], 1), ([2, 1], 1), ([0, 2, 1], 2), ([2**31 - 1], 0), ([-2**31], 0)])
@pytest.mark.parametrize("function", ["event", "hold"])
def test_bad_events(function, experts, place):
    layer = Native(4, 2)
    with pytest.raises(ValueError) as error:
        layer.call(getattr(LIB, f"edgemoe_replay_{function}"), experts, [1] * len(experts), 1)
    assert str(error.value) == f"event: expert {experts[place]} at place {place}, wanted distinct ones below 4 in ascending order"
    layer.release()
    assert counted(layer, "events", "accesses") == [0, 0] and layer.residents == set()


# --- random traces ---

# Scores are sums of these times small numbers: exact, so that no rounding decides between equal ones.
PLACEMENTS = st.fixed_dictionaries({"policy": st.just("placement"), "every": st.sampled_from([1, 2, 3, 4, 8, 32]), "decay": st.sampled_from([0, 0.25, 0.5])},
                                   optional={"bonus": st.sampled_from([0, 0.5, 1, 3]), "early": st.sampled_from([0, 1, 3, 100])})
LRUS = st.fixed_dictionaries({"policy": st.just("lru"), "strict": st.booleans(), "most_inserts": st.sampled_from([0, 0, 1, 2])})


@st.composite
def caches(draw):
    n_expert = draw(st.integers(1, 8))
    n_slots = draw(st.integers(1, n_expert) | st.integers(0, n_expert + 1))   # all, none and more than all are seldom interesting
    return {"n_expert": n_expert, "n_slots": n_slots, **draw(LRUS | PLACEMENTS), "misses": draw(st.sampled_from(["cpu", "load"])), "seed": draw(st.booleans()),
            "n_staging": draw(st.sampled_from([0, 1, 2]))}


def actions(random, n_expert):
    """Without end: "event" or "hold" with how many tokens use each expert and how many there are, or "release"."""
    most_used = random.randint(1, n_expert)
    while True:
        action = random.choices(["event", "hold", "release"], [12, 1, 2])[0]
        n_tokens = random.choice([1, 1, 1, 1, 2, 3, 16, 17, 40])
        used = random.sample(range(n_expert), random.randint(0, most_used))
        # Few different numbers of tokens: equal ones are what goes wrong.
        n_tokens_of = {e: random.choice([1, (n_tokens + 1) // 2, n_tokens]) for e in used}
        yield (action,) if action == "release" else (action, n_tokens_of, n_tokens)


# The same examples in every run. The trace comes from a seed, and not event by event from hypothesis, which would be much slower; of one that fails it finds a
# short beginning.
@settings(max_examples=1000, deadline=None, derandomize=True)
@given(caches(), st.randoms(use_true_random=True), st.integers(1, 60))
def test_any_trace_as_the_reference(cache, random, n_actions):
    native, reference = Native(**cache), Layer(**cache)
    for action, *event in islice(actions(random, cache["n_expert"]), n_actions):
        note(f"{action} {event}")
        getattr(native, action)(*event)
        getattr(reference, action)(*event)
        check(native, reference)
    native.release()
    reference.release()
    check(native, reference)


def check(native, reference):
    assert native.residents == reference.residents
    assert len(native.residents) <= reference.n_slots
    counts = native.counts
    if not reference.n_staging:
        assert sum(c["demand"] + c["proactive"] - c["evicted"] for c in counts.values()) == len(native.residents)
    if reference.held:
        return   # an event is counted when it ends
    for phase, count in counts.items():
        assert count == {field: reference.counts[phase][field] for field in FIELDS}
        assert count["accesses"] == count["hits"] + count["demand"] + count["computed"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 8), st.lists(st.frozensets(st.integers(0, 7), max_size=2), max_size=40))
def test_lru_keeps_the_same_however_misses_come_in(n_slots, trace):
    in_place, loading = Native(8, n_slots, misses="cpu"), Native(8, n_slots, misses="load")
    assert play(in_place, trace) == play(loading, trace)
    assert counted(in_place, "hits", "computed", "proactive", "evicted") == counted(loading, "hits", "demand", "demand", "evicted")


# --- real routing ---

TRACE = SHARED / "traces" / "gptoss20b" / "mmlu_test.npz"


@pytest.fixture(scope="module")
def gpt_oss():
    """(ids int32 [layers, tokens, 4] ascending, offsets of the sequences)"""
    if not TRACE.exists():
        pytest.skip(f"{TRACE}: not there")
    with np.load(TRACE) as file:
        return np.ascontiguousarray(np.sort(file["ids"], -1).transpose(1, 0, 2), np.int32), file["offsets"].tolist()


def replayed(trace, n_sequences, n_slots, policy, misses):
    """Totals over layers and sequences, each of which begins with an empty cache."""
    ids, offsets = trace
    n_layers, n_all, k = ids.shape
    pointer, ones, event = FFI.cast("int32_t *", FFI.from_buffer(ids)), FFI.new("int32_t[]", [1] * k), LIB.edgemoe_replay_event
    totals = dict.fromkeys(FIELDS, 0)
    for layer in range(n_layers):
        for first, end in zip(offsets[:n_sequences], offsets[1:]):
            cache = Native(32, n_slots, policy, misses=misses)
            for at in range((layer * n_all + first) * k, (layer * n_all + end) * k, k):
                event(cache.handle, 0, pointer + at, ones, k, 1)
            for field, n in cache.counts["decode"].items():
                totals[field] += n
    return totals


@pytest.mark.parametrize("n_slots, n_demand", [(5, 3_010_701), (8, 2_098_087), (16, 650_300)])
def test_lru_on_gpt_oss_as_published(n_slots, n_demand, gpt_oss):
    """The counts of shared/DATA.md."""
    totals = replayed(gpt_oss, 201, n_slots, "lru", "load")
    assert (totals["accesses"], totals["demand"], totals["computed"]) == (5_857_920, n_demand, 0)
