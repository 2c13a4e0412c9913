"""What the engine counts while it runs is what a simulation of the recorded run counts: policy by policy, for both ways with misses."""

import numpy as np
import pytest

import edgemoe
from edgemoe import replay
from edgemoe.fit import fit
from edgemoe.policies import CHEATS, LEARNED, names
from edgemoe.replay import FIELDS, Replay, rows_of

PROMPTS = ["The three primary colours are red, yellow and", "Water boils at a hundred degrees because", "1, 2, 3, 4,"]
N_DECODED = 24
N_SLOTS, N_STAGING = 6, 2


def run(model, path, policy, misses, learned=None):
    """The trace of an engine with slots on the CPU device, and its counters per layer: int64 [2, layers, fields]."""
    options = {"inline_loads": True, "n_staging": N_STAGING}
    llm = edgemoe.Llama(str(model), n_ctx=256, verbose=False, slots=N_SLOTS, device="CPU", policy=policy, misses=misses, cache_options=options)
    with edgemoe.Recorder(llm, path, full_probs=True) as recorder:
        for prompt in PROMPTS:
            with recorder.sequence():
                llm.eval(llm.tokenize(prompt.encode()))
                for _ in range(N_DECODED):
                    llm.eval([int(np.argmax(llm._scores[-1]))])
    counts = np.array([[[layer[phase][name] for name in FIELDS] for layer in llm.expert_stats_by_layer()] for phase in ("decode", "prompt")])
    llm.close()
    return edgemoe.Trace.load(path), counts


def simulated(trace, policy, misses):
    """The cache stays from one sequence to the next, as in an engine."""
    cache = Replay([trace.n_expert] * trace.n_layers, N_SLOTS, policy, misses, n_staging=N_STAGING)
    for s in range(trace.n_sequences):
        cache.sequence(rows_of(trace, s))
    return cache.counts()


@pytest.fixture(scope="module")
def learned(small_demo, tmp_path_factory):
    """A file with all that policies learn, from a run of the same model."""
    folder = tmp_path_factory.mktemp("learned")
    trace, _ = run(small_demo, folder / "train.npz", "lru", "cpu")
    edgemoe.fit.save(folder / "fit.npz", fit(trace, {table for tables in LEARNED.values() for table in tables}))
    return folder / "fit.npz"


@pytest.mark.parametrize("misses", ["cpu", "load"])
@pytest.mark.parametrize("policy", [name for name in names() if name not in CHEATS] + ["frequency:strict=1", "placement:every=4,early=1", "stage:longest=5,most=20", "stage+lru:longest=5", "lrfu:lambda=0.1"])
def test_engine_and_simulator_count_the_same(policy, misses, small_demo, learned, tmp_path):
    if policy in LEARNED:
        policy = f"{policy}:fit={learned}"
    trace, counted = run(small_demo, tmp_path / "t.npz", policy, misses)
    expected = simulated(trace, policy, misses)
    for i, name in enumerate(FIELDS):
        assert counted[:, :, i].tolist() == expected[:, :, i].tolist(), name
    decode = dict(zip(FIELDS, counted[0].sum(0)))
    assert decode["n_events"] == trace.n_layers * len(PROMPTS) * N_DECODED + prompt_events(trace)
    assert decode["n_hits"] > 0
    assert decode["n_demand"] + decode["n_computed"] > 0


def prompt_events(trace):
    """Short prompts, and the last layer of long ones, are events of decoding: they have few tokens."""
    n = 0
    for s in range(trace.n_sequences):
        rows = rows_of(trace, s)
        for step in np.unique(rows["step"]):
            ids = rows["ids"][rows["step"] == step]
            if len(ids) > 1:
                tokens = (ids[:, :, 0] != replay.ABSENT).sum(0)
                n += int(((tokens > 0) & (tokens <= 16)).sum())
    return n
