"""Learned heads in an engine: not a bit of the output changes, the counters are those of a simulation that reads what the heads say, and heads that do not fit are refused."""

import shutil
import warnings

import numpy as np
import pytest
from test_ram_cache import PROMPT, least_ram, logits, open_model
from tiny_models import FAMILIES

import edgemoe as em
from edgemoe import heads as heads_file
from edgemoe.convert import convert
from edgemoe.engine_heads import NativeHeads
from edgemoe.heads import Heads, HeadsError
from edgemoe.package import Source
from edgemoe.policies import PolicyError
from edgemoe.replay import DECODE, FIELDS, Replay, rows_of

POLICIES = ["temporal", "spatio-temporal", "spatio-temporal:R=3", "spatio"]
N_DECODED, N_SLOTS, N_STAGING = 14, 6, 2


def random_heads(path, mode="spatio-temporal", seed=0, biases=True):
    """Heads that say something: sharp, and not the same for any two layers."""
    with Source(path) as source:
        mark, layers, n_embd = source.package_fingerprint(), source.layers, source.integer("embedding_length")
    random, counts = np.random.default_rng(seed), [layer.n_expert for layer in layers]

    def column(there):
        return [random.standard_normal((n, n_embd), dtype=np.float32) * np.float32(2 * n_embd**-0.5) for n in counts] if there else None

    def bias(there):
        return [random.standard_normal(n, dtype=np.float32) for n in counts] if there and biases else None

    t, s = mode != "spatio", mode != "temporal"
    return Heads(mark, [layer.layer for layer in layers], counts, mode, min(4, min(counts)), 0.1, column(t), column(s), bias(t), bias(s))


@pytest.fixture
def heads_of(tmp_path):
    """heads_of(model, dtype="f16", **options of random_heads): path of a file of heads."""

    def make(path, dtype="f16", name="heads.gguf", **options):
        heads_file.save(tmp_path / name, random_heads(path, **options), dtype)
        return tmp_path / name

    return make


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


# --- what the library makes of heads


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_the_library_says_what_numpy_says(dtype, models, heads_of):
    heads = heads_file.load(heads_of(models(), dtype))
    native = NativeHeads(heads)
    hidden = np.random.default_rng(1).standard_normal((5, heads.n_embd)).astype(np.float16)
    bound = 1e-3 if dtype == "f16" else 2e-2  # rounding to float16; with Q8_0 the input is rounded to 8 bits, too, as ggml does
    for head in ("head_t", "head_s"):
        for layer in range(heads.n_layers):
            found, wanted = native.probs(head, layer, hidden), heads.probs(head, layer, hidden)
            np.testing.assert_allclose(found, wanted, atol=bound)
            np.testing.assert_array_equal(found, found.astype(np.float16))
            np.testing.assert_array_equal(found[2:3], native.probs(head, layer, hidden[2:3]))  # a row does not depend on its neighbours


def test_packing_again_gives_the_bytes_of_the_file(models, heads_of):
    from edgemoe.convert.arrays import Arrays, packed

    for dtype, kind in heads_file.TYPES.items():
        path = heads_of(models(), dtype)
        heads = heads_file.load(path)
        assert heads.dtype == dtype
        with Arrays(path) as file:
            for i, layer in enumerate(heads.layers):
                assert packed(heads.weights_t[i], kind).tobytes() == bytes(file.raw(f"blk.{layer}.head_t.weight"))


def test_an_input_that_is_no_number_says_nothing(models, heads_of):
    native = NativeHeads(heads_file.load(heads_of(models())))
    hidden = np.zeros((2, native.heads.n_embd), np.float32)
    hidden[0, 3] = np.nan
    found = native.probs("head_t", 0, hidden)
    assert not found[0].any() and found[1].sum() == pytest.approx(1, abs=1e-2)


def test_wrong_heads_are_refused_by_the_library_too(models, heads_of):
    heads = heads_file.load(heads_of(models("qwen3moe", "Q4_K"), mode="temporal"))
    with pytest.raises(HeadsError, match="found none"):
        NativeHeads(heads).probs("head_s", 0, np.zeros((1, heads.n_embd)))
    heads.mode, heads.weights_t = "temporal", [w[:, :100] for w in heads.weights_t]
    heads.dtype = "q8_0"
    with pytest.raises(HeadsError, match="100 values cannot be Q8_0"):
        NativeHeads(heads)


# --- parity


@pytest.mark.parametrize("exact", [False, True], ids=["kernels", "llama.cpp's kernels"])
@pytest.mark.parametrize("policy", POLICIES)
def test_not_a_bit_changes(policy, exact, models, heads_of):
    gguf = models("qwen3moe", "Q4_K", n_layer=3)
    heads = heads_of(gguf)
    llm = open_model(gguf, ram="mapped", exact=exact)
    wanted = logits(llm)
    llm.close()
    tiers = [{"ram": least_ram(gguf), "ram_policy": policy}]
    if exact:  # a device adds up in llama.cpp's order
        tiers += [{"ram": "mapped", "slots": N_SLOTS, "device": "CPU", "misses": misses, "policy": policy} for misses in ("cpu", "load")]
        tiers += [{"ram": least_ram(gguf), "ram_policy": policy, "slots": 3, "device": "CPU", "misses": "cpu", "policy": policy}]
    for tier in tiers:
        llm = open_model(gguf, heads=heads, exact=exact, **tier)
        for _ in range(2):
            np.testing.assert_array_equal(logits(llm), wanted, err_msg=str(tier))
        stats = llm.expert_stats()
        assert stats.get("n_ram_hits", 1) > 0 and stats.get("n_decode_accesses", 1) > 0
        llm.close()


# --- engine and simulator


def recorded(llm, path, prompts=2):
    with em.Recorder(llm, path, full_probs=True, hidden=True) as recorder:
        for s in range(prompts):
            with recorder.sequence():
                llm.eval(PROMPT[s:])
                llm.eval([7, 8, 9 + s])  # several tokens that count as decoding: the mean over them
                for _ in range(N_DECODED):
                    llm.eval([int(np.argmax(llm._scores[-1]))])
    return em.Trace.load(path)


def simulated(trace, policy, said, **cache):
    """said(head, layer, hidden): what heads say. Counts int64 [2, layers, fields]."""
    arrays = {head: np.stack([said(head, i, trace.hidden[:, i]) for i in range(trace.n_layers)], 1) for head in ("head_t", "head_s")}
    chosen = em.policies.policy(policy, None, tuple(arrays))
    replay = Replay([trace.n_expert] * trace.n_layers, policy=chosen, **cache)
    for s in range(trace.n_sequences):
        first, end = trace.offsets[s], trace.offsets[s + 1]
        replay.sequence(rows_of(trace, s) | {"next": np.ascontiguousarray(arrays["head_t"][first:end]), "successor": np.ascontiguousarray(arrays["head_s"][first:end])})
    return replay.counts()


def counted(layers):
    return np.array([[[layer[phase][name] for name in FIELDS] for layer in layers] for phase in ("decode", "prompt")])


# Of every family: whether the experts' input is the router's, or weighed as llama4 does it, biases of routers, sigmoid and softmax.
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_on_a_device_count_as_simulated(family, models, heads_of, tmp_path):
    gguf = models(family, "Q8_0", n_layer=4)
    for dtype, policy, misses in [("f16", "spatio-temporal:R=3", "load"), ("q8_0", "temporal", "cpu"), ("q8_0", "spatio", "load")]:
        heads = heads_of(gguf, dtype)
        llm = open_model(
            gguf, slots=4, device="CPU", policy=policy, misses=misses, heads=heads, logits_all=False, cache_options={"inline_loads": True, "n_staging": N_STAGING}
        )
        trace = recorded(llm, tmp_path / "t.npz")
        found = counted(llm.expert_stats_by_layer())
        llm.close()
        native = NativeHeads(heads_file.load(heads))
        wanted = simulated(trace, policy, native.probs, n_slots=4, misses=misses, n_staging=N_STAGING)
        np.testing.assert_array_equal(found, wanted, err_msg=f"{dtype}, {policy}")
        assert found[DECODE, :, FIELDS.index("n_hits")].sum() > 0


@pytest.mark.parametrize("policy", ["temporal", "spatio-temporal:R=3"])
def test_slots_in_ram_count_as_simulated(policy, small_demo, heads_of, tmp_path):
    heads = heads_of(small_demo)
    # Loads one after the other, none ahead of the router: nothing depends on time.
    llm = em.Llama(str(small_demo), n_ctx=256, verbose=False, ram=60_000_000, ram_policy=policy, heads=heads, read_ahead="off", ram_options={"inline_loads": True})
    trace = recorded(llm, tmp_path / "t.npz")
    layers, budget = llm.ram_stats_by_layer(), llm.ram_info()["budget"]
    llm.close()
    cache = {"costs": [layer["slot_bytes"] for layer in layers], "budget": budget}
    loaded = heads_file.load(heads)
    found, wanted = counted(layers), simulated(trace, policy, NativeHeads(loaded).probs, **cache)
    np.testing.assert_array_equal(found, wanted)
    assert found[DECODE, :, FIELDS.index("n_evicted")].sum() > 0
    assert (found[DECODE, :, FIELDS.index("n_proactive")].sum() > 0) == (policy != "temporal")
    # In float32 all along, as the simulator computes: the last bit of a probability decides now and then which of two experts goes.
    near = simulated(trace, policy, loaded.probs, **cache)
    hits = FIELDS.index("n_hits")
    assert abs(near[DECODE, :, hits].sum() - found[DECODE, :, hits].sum()) <= 0.02 * found[DECODE, :, hits].sum()


# --- found, refused, missing


def first_used(gguf, **options):
    """The policy in RAM that a model was opened with, whether it goes by heads, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = open_model(gguf, ram=least_ram(gguf), **options)
    policy = llm._experts.policies[0]
    found = logits(llm)
    llm.close()
    return policy.text, policy.learned_heads is not None, [str(w.message) for w in caught if "heads" in str(w.message)], found


def damaged(path, kind):
    data = bytearray(path.read_bytes())
    if kind == "cut":
        data = data[:-1000]
    elif kind == "one bit":
        data[-1000] ^= 4
    elif kind == "no GGUF":
        data = bytearray(b"GG" * 100)
    elif kind == "newer format":
        at = data.index(b"edgemoe.heads.format_version") + len(b"edgemoe.heads.format_version") + 4
        data[at] = 9
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["cut", "one bit", "no GGUF", "newer format", "another model"])
def test_heads_that_cannot_be_used_are_refused_by_name(kind, models, heads_of):
    gguf = models("qwen3moe", "Q4_K")
    heads = heads_of(models("olmoe", "Q4_0")) if kind == "another model" else damaged(heads_of(gguf), kind)
    policy, by_heads, said, found = first_used(gguf, ram_policy="temporal", heads=heads)
    assert (policy, by_heads) == (em.policies.DEFAULT["load"], False)
    assert len(said) == 1 and said[0].startswith(str(heads)) and "\n" not in said[0] and f"policy {policy} is used instead of temporal" in said[0]
    llm = open_model(gguf, ram="mapped")
    np.testing.assert_array_equal(found, logits(llm))
    llm.close()


def test_no_heads_is_an_error_that_says_how_to_get_them(models, heads_of, tmp_path):
    gguf = models("qwen3moe", "Q4_K")
    with pytest.raises(PolicyError, match="policy temporal: it goes by learned heads, and there are none for this model: edgemoe train-heads"):
        open_model(gguf, ram=least_ram(gguf), ram_policy="temporal")
    with pytest.raises(HeadsError, match="nowhere.gguf: no such file"):
        open_model(gguf, ram=least_ram(gguf), ram_policy="temporal", heads=tmp_path / "nowhere.gguf")
    with pytest.raises(PolicyError, match="has heads of mode temporal"):
        open_model(gguf, ram=least_ram(gguf), ram_policy="spatio-temporal", heads=heads_of(gguf, mode="temporal"))


def test_heads_that_nobody_goes_by_are_named(models, heads_of):
    gguf = models("qwen3moe", "Q4_K")
    _, _, said, _ = first_used(gguf, ram_policy="lru", heads=heads_of(gguf))
    assert len(said) == 1 and "not used" in said[0]


def test_heads_are_found_where_training_puts_them_and_in_a_package(models, packages, heads_of, settings, edgemoe, tmp_path):
    gguf = models("qwen3moe", "Q4_K")
    heads = heads_of(gguf)
    package = tmp_path / "p.edgemoe"
    shutil.copytree(packages(gguf), package)
    before = {p: p.stat().st_size for p in package.rglob("*") if p.is_file() and p.name != "router.gguf"}
    for _ in range(2):  # the second time in the place of the first
        result = edgemoe("heads", "add", heads, package)
        assert result.returncode == 0, result.stderr
    assert {p: p.stat().st_size for p in package.rglob("*") if p.is_file() and p.name != "router.gguf"} == before
    in_package, in_file = heads_file.load(package / "router.gguf"), heads_file.load(heads)
    for head in ("weights_t", "weights_s", "biases_t", "biases_s"):
        for a, b in zip(getattr(in_package, head), getattr(in_file, head)):
            np.testing.assert_array_equal(a, b)
    assert convert(gguf, package, verify=True).status == "verified"  # the sidecar is still what the converter wrote, and more
    assert edgemoe("heads", "show", package).stdout.startswith("heads     spatio-temporal")
    policy, by_heads, said, _ = first_used(package, ram_policy="temporal")
    assert (policy, by_heads, said) == ("temporal", True, [])
    # The user's own are preferred, also for the GGUF that the package was made of.
    place = heads_file.default_path(in_file.fingerprint)
    place.parent.mkdir(parents=True)
    shutil.copy(heads_of(gguf, mode="temporal", name="own.gguf"), place)
    assert first_used(gguf, ram_policy="temporal")[:3] == ("temporal", True, [])
    with pytest.raises(PolicyError, match=str(place)):
        open_model(package, ram=least_ram(gguf), ram_policy="spatio")


def test_heads_of_another_model_do_not_come_into_a_package(models, packages, heads_of, edgemoe, tmp_path):
    gguf = models("qwen3moe", "Q4_K")
    package = tmp_path / "p.edgemoe"
    shutil.copytree(packages(gguf), package)
    sidecar = (package / "router.gguf").read_bytes()
    result = edgemoe("heads", "add", heads_of(models("olmoe", "Q4_0")), package)
    assert result.returncode == 1 and "are heads of another model" in result.stderr and len(result.stderr.splitlines()) == 1
    result = edgemoe("heads", "add", damaged(heads_of(gguf), "one bit"), package)
    assert result.returncode == 1 and "damaged" in result.stderr
    assert (package / "router.gguf").read_bytes() == sidecar
    result = edgemoe("heads", "add", heads_of(gguf), gguf)
    assert result.returncode == 1 and "wanted a package directory" in result.stderr


def test_the_command_line_takes_heads(models, heads_of, edgemoe):
    gguf = models("qwen3moe", "Q4_K")
    arguments = ("run", gguf, "-p", "Hello", "-n", "4", "--temp", "0", "--ram", str(least_ram(gguf)), "--ram-policy", "temporal", "--no-probe")
    answers = {}
    for name, heads in (("heads", heads_of(gguf)), ("damaged", damaged(heads_of(gguf, name="d.gguf"), "cut"))):
        result = edgemoe(*arguments, "--heads", heads)
        assert result.returncode == 0, result.stderr
        answers[name] = result.stdout
        assert ("is used instead of temporal" in result.stderr) == (name == "damaged")
    assert answers["heads"] == answers["damaged"]
    result = edgemoe(*arguments)
    assert result.returncode == 1 and "edgemoe train-heads" in result.stderr
