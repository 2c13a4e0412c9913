"""What holds for policies on any trace, and one learned policy against a brute force in NumPy, event by event.

Traces are random, with steps of several tokens, prompts (more than 16 tokens), stages, and experts that are absent: fewer than the others, or whole layers.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.policies import CHEATS, LEARNED, defaults
from edgemoe.replay import ABSENT, DECODE, FIELDS, PROMPT, Replay

# Bring in nothing but misses, and keep these where they may. What they learn does not matter here.
FORCED = ["lru", "lfu", "lrfu", "lrfu:lambda=0.1", "frequency:halve=20", "least-stale:ahead=0", "temporal"]
WITHOUT_PREFETCH = [*FORCED, "frequency:strict=1", "frequency:halve=20,strict=1"]
BELADYS = ["belady", "belady:force=0"]
ALL = [*WITHOUT_PREFETCH, *BELADYS, "placement:every=3,early=1", "stage", "stage:most=2,longest=5", "stage+lru", "oracle", "foresight:every=3", "static", "least-stale", "spatio-temporal:R=2", "spatio", "promoe",
       "mixtral-offloading", "st-moe", "step", "finemoe", "moe-infinity"]


def test_no_policy_is_forgotten():
    assert {policy.split(":")[0] for policy in ALL} == set(defaults())


@dataclass
class Story:
    n_layers: int
    n_expert: int
    n_used: int
    n_slots: int
    rows: dict
    learned: dict

    def replay(self, policy, misses="cpu", **options):
        return Replay([self.n_expert] * self.n_layers, options.pop("n_slots", self.n_slots), policy, misses,
                      learned={name: self.learned[name] for name in LEARNED.get(policy.split(":")[0], ())}, **options)

    def played(self, policy, misses="cpu", **options):
        cache = self.replay(policy, misses, **options)
        cache.sequence(self.rows)
        return cache

    def beginning(self, n_steps):
        """Rows of the first steps."""
        n = int(np.searchsorted(self.rows["step"], n_steps))
        return {name: np.ascontiguousarray(array[:n]) for name, array in self.rows.items()}

    def events(self):
        """(step, layer, set of experts, tokens) in their order."""
        for step in np.unique(self.rows["step"]):
            ids = self.rows["ids"][self.rows["step"] == step]
            for layer in range(self.n_layers):
                experts = set(ids[:, layer][ids[:, layer] != ABSENT].tolist())
                if experts:
                    yield int(step), layer, experts, int((ids[:, layer, 0] != ABSENT).sum())


@st.composite
def stories(draw, prompts=True, holes=True, fits=False, most_layers=3):
    """fits: no event needs more experts than a layer has slots."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_layers, n_expert = draw(st.integers(1, most_layers)), draw(st.integers(2, 7))
    n_used = draw(st.integers(1, min(3, n_expert)))
    n_slots = draw(st.integers(n_used if fits else 1, n_expert))
    n_steps = draw(st.integers(1, 14))
    sizes = rng.choice([1, 1, 1, 1, 1, 2, 3, 16, 17, 20], n_steps) if prompts else rng.choice([1, 1, 1, 2, 3, 16], n_steps)
    if fits:
        sizes = np.where(sizes <= 16, 1, sizes)
    n_rows = int(sizes.sum())
    # Few favourites, so that something is hit.
    weight = rng.exponential(1, (n_layers, n_expert)) ** 2 + 0.01
    probs = rng.exponential(weight, (n_rows, n_layers, n_expert)).astype(np.float32)
    probs /= probs.sum(2, keepdims=True)
    ids = np.argsort(-probs, 2, kind="stable")[:, :, :n_used].astype(np.uint16)
    if holes:
        for row, layer in zip(*np.nonzero(rng.random((n_rows, n_layers)) < 0.1)):
            ids[row, layer, rng.integers(0, n_used + 1) :] = ABSENT
    step = np.repeat(np.arange(n_steps), sizes).astype(np.int32)
    stage = np.sort(rng.integers(-1, 4, n_steps)).astype(np.int32)[step]
    rows = {"ids": ids, "step": step, "stage": stage, "token_ids": rng.integers(0, 4, n_rows).astype(np.int32), "probs": probs}

    def table(*shape):
        return rng.normal(0, 0.3, shape).astype(np.float32)

    L, E = n_layers, n_expert
    learned = {"usage": np.abs(table(L, E)), "follow": np.abs(table(L, E, E)), "temporal": table(L, E, 2 * E + 1), "spatial": table(3, L, E, E + 1), "maps": np.abs(table(4, L, E)),
               "map_tokens": np.arange(4, dtype=np.float32), "sequences": np.abs(table(3, L, E))}
    return Story(L, E, n_used, n_slots, rows, learned)


def check(n_examples=60):
    """The same examples in every run."""
    return settings(max_examples=n_examples, deadline=None, derandomize=True)


def total(cache, *names, phase=DECODE):
    counts = cache.counts()[phase].sum(0)
    found = [int(counts[FIELDS.index(f"n_{name}")]) for name in names]
    return found if len(names) > 1 else found[0]


def residents(cache):
    return [set(cache.residents(layer)) for layer in range(cache.n_layers)]


@pytest.mark.parametrize("misses", ["cpu", "load"])
@pytest.mark.parametrize("shared", [False, True], ids=["per-layer", "shared"])
@pytest.mark.parametrize("policy", ALL)
@check(25)
@given(stories())
def test_counts_add_up_and_slots_are_enough(policy, shared, misses, story):
    cache = story.played(policy, misses, shared=shared)
    events = list(story.events())
    for phase in (DECODE, PROMPT):
        of_phase = [experts for _, _, experts, n_tokens in events if (n_tokens > 16) == (phase == PROMPT)]
        n_events, n_accesses, n_hits, n_demand, n_computed = total(cache, "events", "accesses", "hits", "demand", "computed", phase=phase)
        assert (n_events, n_accesses) == (len(of_phase), sum(map(len, of_phase)))
        assert n_accesses == n_hits + n_demand + n_computed
        assert misses == "load" or n_demand == 0
    n_there = [len(experts) for experts in residents(cache)]
    assert sum(n_there) <= story.n_slots * story.n_layers and (shared or max(n_there) <= story.n_slots)


@pytest.mark.parametrize("shared", [False, True], ids=["per-layer", "shared"])
@pytest.mark.parametrize("policy", ALL)
@check(20)
@given(stories())
def test_the_same_trace_has_the_same_counts(policy, shared, story):
    first, again = story.played(policy, "load", shared=shared), story.played(policy, "load", shared=shared)
    assert (first.counts() == again.counts()).all() and residents(first) == residents(again)
    again.clear()
    assert residents(again) == [set()] * story.n_layers
    again.sequence(story.rows)
    assert (again.counts() == 2 * first.counts()).all() and residents(first) == residents(again)


@pytest.mark.parametrize("policy", [*WITHOUT_PREFETCH, "belady"])
@check(40)
@given(stories(prompts=False))
def test_no_member_of_an_event_goes_in_it(policy, story):
    cache, before, n_hits = story.replay(policy), [set()] * story.n_layers, 0
    for step in np.unique(story.rows["step"]).tolist():
        cache.clear()
        already = total(cache, "hits")
        cache.sequence(story.beginning(step + 1))
        after, events = residents(cache), {layer: experts for at, layer, experts, _ in story.events() if at == step}
        for layer, experts in events.items():
            if len(experts) <= story.n_slots and "strict" not in policy:
                assert experts <= after[layer]
            if policy != "belady":   # which sees another future in every beginning
                assert before[layer] & experts <= after[layer] <= before[layer] | experts
                n_hits += len(before[layer] & experts)
        assert policy == "belady" or total(cache, "hits") - already == n_hits
        before = after


# That free Belady is a bound: what is kept after an event is chosen from residents and event, whatever the policy, and those that are needed soonest make the most hits.
# Forced, everyone has to keep the event's members, and chooses among the rest; that only bounds others where members always fit in.
@pytest.mark.parametrize("shared", [False, True], ids=["per-layer", "shared"])
@pytest.mark.parametrize("misses", ["cpu", "load"])
@check(150)
@given(stories())
def test_no_policy_without_prefetch_hits_more_than_free_belady(misses, shared, story):
    most = total(story.played("belady:force=0", misses, shared=shared), "hits")
    for policy in [*WITHOUT_PREFETCH, "belady"]:
        assert total(story.played(policy, misses, shared=shared), "hits") <= most, policy


@pytest.mark.parametrize("shared", [False, True], ids=["per-layer", "shared"])
@check(150)
@given(stories(fits=True))
def test_no_policy_that_must_keep_its_event_hits_more_than_forced_belady(shared, story):
    most = total(story.played("belady", shared=shared), "hits")
    for policy in FORCED:
        assert total(story.played(policy, shared=shared), "hits") <= most, policy


def same(story, *policies, **options):
    """Whether they keep the same and count the same."""
    caches = [story.played(policy, **options) for policy in policies]
    for other in caches[1:]:
        assert residents(other) == residents(caches[0])
        assert (other.counts() == caches[0].counts()).all()


@pytest.mark.parametrize("misses", ["cpu", "load"])
@check()
@given(stories())
def test_policies_that_are_lru(misses, story):
    same(story, "lru", "lrfu:lambda=1000", misses=misses)


@pytest.mark.parametrize("shared", [False, True], ids=["per-layer", "shared"])
@check()
@given(stories(prompts=False))
def test_least_stale_without_its_prefetcher_is_lru(shared, story):
    same(story, "lru", "least-stale:ahead=0", shared=shared)


@pytest.mark.parametrize("shared", [False, True], ids=["per-layer", "shared"])
@pytest.mark.parametrize("misses", ["cpu", "load"])
@check()
@given(stories())
def test_policies_that_are_lfu(misses, shared, story):
    same(story, "lfu", "lrfu:lambda=0", "frequency:halve=1e15", misses=misses, shared=shared)


@pytest.mark.parametrize("misses", ["cpu", "load"])
@pytest.mark.parametrize("policy", ALL)
@check(15)
@given(stories())
def test_where_everything_fits_in_only_first_uses_miss(policy, misses, story):
    cache = story.played(policy, misses, n_slots=story.n_expert)
    missed, evicted = sum(total(cache, "demand", "computed")), total(cache, "evicted")
    n_first = len({(layer, e) for _, layer, experts, _ in story.events() for e in experts})
    prefetches = policy not in [*WITHOUT_PREFETCH, *BELADYS]
    has_prompts = total(cache, "events", phase=PROMPT) > 0
    assert evicted == 0 and (missed <= n_first if prefetches or has_prompts else missed == n_first)


@pytest.mark.parametrize("shared", [False, True], ids=["per-layer", "shared"])
@pytest.mark.parametrize("policy", [*WITHOUT_PREFETCH, *BELADYS])
@check(40)
@given(stories())
def test_what_is_kept_does_not_depend_on_how_misses_come(policy, shared, story):
    in_place, loading = story.played(policy, "cpu", shared=shared), story.played(policy, "load", shared=shared)
    assert residents(in_place) == residents(loading)
    assert total(in_place, "hits", "evicted") == total(loading, "hits", "evicted")


# --- the Spatio-Temporal Router in NumPy ---

def key(score, last_use, expert):
    return score, last_use, expert


def spatio_temporal(story, budget):
    """Hits of each event, and the residents of its layer when it is over; one token per step, every layer in every step. What is predicted after the last layer is for the
    next token."""
    L, E, B = story.n_layers, story.n_expert, story.n_slots
    inside = [set() for _ in range(L)]
    score, last_use, average = np.zeros((L, E)), np.zeros((L, E), int), np.zeros((L, E), np.float32)
    n_events = 0
    for row in range(len(story.rows["ids"])):
        for layer in range(L):
            probs, event = story.rows["probs"][row, layer], sorted(story.rows["ids"][row, layer].tolist())
            hits = inside[layer] & set(event)
            n_events += 1
            last_use[layer, event] = n_events
            average[layer] = np.float32(0.9) * average[layer] + np.float32(0.1) * probs
            score[layer] = probs + story.learned["temporal"][layer] @ np.concatenate([probs, average[layer], [1]])
            # update, by the router and the temporal prediction of this token
            for expert in event:
                if expert in inside[layer]:
                    continue
                if len(inside[layer]) == B:
                    others = [key(score[layer, e], last_use[layer, e], e) for e in inside[layer] - set(event)]
                    if not others:
                        continue
                    inside[layer].remove(min(others)[2])
                inside[layer].add(expert)
            yield hits, set(inside[layer])
            # refine the next layer, with the spatial prediction on top
            then = (layer + 1) % L
            ahead = score[then] + story.learned["spatial"][0, layer] @ np.append(probs, 1)
            for _, _, expert in sorted((key(ahead[e], last_use[then, e], e) for e in range(E)), reverse=True)[:budget]:
                if expert in inside[then]:
                    continue
                if len(inside[then]) < B:
                    if ahead[expert] > 0:
                        inside[then].add(expert)
                    continue
                lowest = min(key(ahead[e], last_use[then, e], e) for e in inside[then])
                if ahead[expert] > lowest[0]:
                    inside[then].remove(lowest[2])
                    inside[then].add(expert)


@pytest.mark.parametrize("budget", [1, 2, 5])
@check(100)
@given(stories(prompts=False, holes=False))
def test_spatio_temporal_as_in_numpy(budget, story):
    # One token per step.
    story.rows["step"] = np.arange(len(story.rows["ids"]), dtype=np.int32)
    n = min(12, len(story.rows["ids"]))
    expected = list(spatio_temporal(story, budget))
    cache, n_hits = story.replay(f"spatio-temporal:R={budget}"), 0
    for row in range(n):
        cache.clear()
        before = cache.counts()[DECODE]
        cache.sequence(story.beginning(row + 1))
        of_row = expected[row * story.n_layers : (row + 1) * story.n_layers]
        so_far = expected[: (row + 1) * story.n_layers]
        hits = (cache.counts()[DECODE] - before)[:, FIELDS.index("n_hits")].tolist()
        assert hits == [sum(len(h) for h, _ in so_far[layer :: story.n_layers]) for layer in range(story.n_layers)]
        # The first layer has been refined for the next token already.
        assert residents(cache)[1:] == [inside for _, inside in of_row[1:]]
