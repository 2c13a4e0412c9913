"""Where experts lie in RAM: a model and a machine that are made up, with sizes that add up by hand."""

import json
from dataclasses import replace

import pytest
from test_cache_plan import COMPUTE, GIB, KV, MIB, MadeUp, layer, with_metadata

from edgemoe.errors import EdgemoeError
from edgemoe.machine import Memory
from edgemoe.plan import load_line
from edgemoe.ram_plan import PAGE_BYTES, plan_ram, slot_bytes

# Two layers of 32 experts with 64 MiB each are 4 GiB; a token uses four of each, 512 MiB.
DENSE, EXPERTS, TOKEN, MARGIN = 100 * MIB, 4 * GIB, 512 * MIB, 128 * MIB
BESIDE = DENSE + KV + COMPUTE
SLOT = 64 * MIB + 3 * PAGE_BYTES
TIGHT = BESIDE + MARGIN  # nothing is left for experts


def plan(ram=None, usable=TIGHT + GIB, source=None, **options):
    memory = Memory(total=64 * GIB, available=usable, limit=None, usable=usable)
    return plan_ram(source or MadeUp(), ram, n_ctx=options.pop("n_ctx", 4096), memory=memory, **options)


def test_experts_that_fit_are_mapped():
    enough = next(u for u in range((BESIDE + EXPERTS) // 19 * 20, 1 << 60) if u - u // 20 - BESIDE == EXPERTS)   # of so much the margin is 5 %
    for ram in (None, "auto"):
        p = plan(ram, usable=enough)
        assert (p.mode, p.budget_bytes, p.n_slots, p.share) == ("mapped", 0, 0, 1.0) and p.room_bytes == EXPERTS
        assert plan(ram, usable=enough - 1).mode == "slots"
    assert p.reason == "they fit into the 4.0 GiB that are left for experts"


def test_experts_that_do_not_fit_get_what_is_left():
    p = plan(usable=TIGHT + GIB)
    assert (p.mode, p.budget_bytes, p.room_bytes, p.n_slots, p.n_experts) == ("slots", GIB, GIB, GIB // SLOT, 64)
    assert (p.dense_bytes, p.kv_bytes, p.compute_bytes, p.margin_bytes, p.expert_bytes, p.token_bytes) == (DENSE, KV, COMPUTE, MARGIN, EXPERTS, TOKEN)
    assert p.share == 15 / 64


def test_the_margin_is_5_percent_of_much():
    p = plan(usable=10 * GIB, source=MadeUp(layers=[layer(i) for i in range(8)]))
    assert p.margin_bytes == GIB // 2 and p.budget_bytes == 10 * GIB - BESIDE - GIB // 2


def test_a_pool_holds_one_token_at_the_cost_of_the_margin():
    assert plan(usable=TIGHT + TOKEN).reason == "they do not all fit"
    p = plan(usable=TIGHT + TOKEN - MIB)
    assert (p.mode, p.budget_bytes) == ("slots", TOKEN) and p.reason == "room for 511.0 MiB, but the experts of one token take 512.0 MiB: the margin is gone"
    assert plan(usable=DENSE + KV + TOKEN).budget_bytes == TOKEN
    p = plan(usable=DENSE + KV + TOKEN - 1)
    assert p.mode == "mapped" and "a pool needs at least that" in p.reason


@pytest.mark.parametrize("ram, budget", [(TOKEN, TOKEN), ("2G", 2 * GIB), (EXPERTS, EXPERTS), (1 << 50, 64 * SLOT)])
def test_a_size_is_obeyed(ram, budget):
    p = plan(ram, usable=100 * GIB)  # where all would fit
    assert (p.mode, p.budget_bytes, p.n_slots, p.reason) == ("slots", budget, budget // SLOT, "asked for")


def test_a_size_that_is_not_there_is_obeyed_and_said():
    p = plan(2 * GIB, usable=TIGHT + GIB)
    assert p.budget_bytes == 2 * GIB and p.reason == "asked for, MORE than the 1.0 GiB that are left for experts"
    assert plan("100G", usable=TIGHT + GIB).reason == p.reason  # 4 GiB of it are meant


@pytest.mark.parametrize("ram", [0, 1, TOKEN - 1, "80M"])
def test_a_size_below_one_token_is_refused(ram):
    with pytest.raises(EdgemoeError, match=r"^--ram .*: the experts of one token take 512.0 MiB; wanted at least that$"):
        plan(ram)


@pytest.mark.parametrize("ram", ["", "6X", "slots", "-1G"])
def test_other_words_are_refused(ram):
    with pytest.raises(EdgemoeError, match=f"^--ram {ram}: wanted auto, mapped or a size such as 6G$"):
        plan(ram)


def test_mapped_is_mapped_whatever_fits():
    p = plan("mapped", usable=TIGHT + GIB)
    assert (p.mode, p.reason, p.budget_bytes) == ("mapped", "asked for", 0)


@pytest.mark.parametrize("ram", [None, "auto", "mapped", 0, "1G"])
def test_a_dense_model_is_mapped(ram):
    p = plan(ram, source=MadeUp(layers=[]), usable=MIB)
    assert (p.mode, p.reason, p.token_bytes) == ("mapped", "a dense model has no routed experts", 0)
    assert p.report() == "in RAM     mapped: a dense model has no routed experts"


def test_a_device_takes_load_off_ram():
    p = plan(on_device_bytes=BESIDE)
    assert p.room_bytes == TIGHT + GIB - MARGIN and p.budget_bytes == GIB + BESIDE
    assert plan(on_device_bytes=2 * BESIDE).room_bytes == p.room_bytes


def test_a_longer_context_takes_room():
    assert plan().budget_bytes - plan(n_ctx=16384).budget_bytes == 3 * KV + 144 * MIB  # of buffers: see test_cache_plan
    assert plan(n_ubatch=64).compute_bytes == COMPUTE // 8


def test_experts_of_two_sizes_share_one_pool():
    # 32 experts of 64 MiB and 32 of 32 MiB: 48 MiB on average, and the pages beside them.
    source = MadeUp(layers=[layer(0), layer(1, bytes_per_expert=32 * MIB)])
    assert plan(960 * MIB, source=source).n_slots == 19
    assert plan(3 * GIB + MIB, source=source).n_slots == 64


def test_a_slot_is_whole_pages_and_one_for_each_projection():
    assert slot_bytes(layer(bytes_per_expert=1)) == slot_bytes(layer(bytes_per_expert=4096)) == 4 * 4096
    assert slot_bytes(layer(bytes_per_expert=4097)) == 5 * 4096


def test_a_layer_with_fewer_experts_than_a_token_uses():
    assert plan(source=MadeUp(layers=[layer(0, n_expert=2)])).token_bytes == 2 * 64 * MIB
    assert plan(source=with_metadata(expert_used_count=None)).token_bytes == 2 * 64 * MIB  # at least one


@pytest.mark.parametrize("usable", range(0, 6 * GIB, 512 * MIB))
def test_more_memory_never_means_fewer_experts(usable):
    now, more = plan(usable=usable), plan(usable=usable + 512 * MIB)
    beside = DENSE + KV if "margin is gone" in now.reason else now.beside_bytes + now.margin_bytes
    assert now.mode == "mapped" or now.budget_bytes + beside <= usable
    if now.mode == more.mode == "slots":
        assert more.n_slots >= now.n_slots and 0 < now.n_slots < now.n_experts


def test_lines_and_tables():
    p = plan()
    assert p.line() == (
        "experts in RAM slots: 1.0 GiB for 15 of 64, all are 4.0 GiB, the others are read from disk: they do not all fit; "
        "beside them 158.0 MiB dense, KV cache and buffers"
    )
    assert [row[:10].strip() for row in p.report().splitlines()] == ["in RAM", "usable", "dense", "KV cache", "compute", "margin", "room", "RAM slots", "per token"]
    assert plan("mapped").line() == "experts mapped in RAM, 4.0 GiB: asked for"
    assert json.loads(json.dumps(p.as_dict()))["room_bytes"] == GIB


def test_the_load_line_says_what_is_on_disk():
    source = MadeUp()
    source.path, source.architecture = "m.gguf", "qwen3moe"
    assert "4.0 GiB, 1.0 GiB of them at a time in RAM, computed on the CPU, the others on disk, 100.0 MiB dense" in load_line(source, 1.0, ram=plan())
    assert "4.0 GiB, computed on the CPU where they lie" in load_line(source, 1.0, ram=replace(plan(), mode="mapped"))


# --- the command; the tiny model has 3.2 MiB of experts, 816 KiB for a token


def test_the_command(edgemoe, models):
    tiny = models("qwen3moe", "Q8_0")
    facts = json.loads(edgemoe("plan", tiny, "--json").stdout)
    assert facts["ram"]["mode"] == "mapped" and facts["estimate"] is None  # nothing is measured where nothing is read
    facts = json.loads(edgemoe("plan", tiny, "--ram", "2M", "--no-probe", "--json").stdout)
    assert (facts["ram"]["mode"], facts["ram"]["budget_bytes"], facts["estimate"]) == ("slots", 2 * MIB, None)
    refused = edgemoe("plan", tiny, "--ram", "100K")
    assert (refused.returncode, refused.stderr) == (1, "edgemoe: error: --ram 100.0 KiB: the experts of one token take 816.0 KiB; wanted at least that\n")
    assert edgemoe("plan", tiny, "--ram", "2X").returncode == 2


@pytest.mark.parametrize("kind", ["stacked", "package"])
def test_the_command_measures(kind, edgemoe, models, packages):
    tiny = models("qwen3moe", "Q8_0")
    result = edgemoe("plan", packages(tiny) if kind == "package" else tiny, "--ram", "2M")
    assert "tok/s, " in result.stdout and "bound: " in result.stdout and "at worst " in result.stdout, result.stderr
