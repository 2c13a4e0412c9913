"""How many expert slots go onto a device: devices and a model that are made up, with sizes that add up by hand."""

import json
from dataclasses import dataclass, field

import pytest

from edgemoe.cache_plan import choose_device, plan_cache
from edgemoe.devices import Device
from edgemoe.errors import EdgemoeError
from edgemoe.machine import parse_bytes
from edgemoe.package import ExpertLayer, Projection

MIB, GIB = 1 << 20, 1 << 30

CPU = Device("CPU", "Some CPU", "cpu", 30 * GIB, 32 * GIB)
OURS = Device("edgemoe", "experts", "accel", 0, 0)
SOFTWARE = Device("Vulkan9", "llvmpipe (LLVM 15.0.6)", "gpu", 30 * GIB, 32 * GIB)
INTEGRATED = Device("Vulkan1", "Intel Graphics", "igpu", 16 * GIB, 16 * GIB)
SMALL = Device("Vulkan2", "NVIDIA T400", "gpu", 2 * GIB, 2 * GIB)
BIG = Device("Vulkan0", "NVIDIA GeForce RTX 4060", "gpu", 8 * GIB, 8 * GIB)


def layer(index=0, n_expert=32, bytes_per_expert=64 * MIB):
    shapes = {"gate": (256, 512), "up": (256, 512), "down": (512, 256)}
    projections = tuple(Projection(f"blk.{index}.ffn_{name}_exps.weight", "q4_0", *shape, 1) for name, shape in shapes.items())
    return ExpertLayer(index, n_expert, bytes_per_expert, projections)


METADATA = {
    "block_count": 2, "embedding_length": 256, "vocab_size": 1024, "expert_used_count": 4,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64,
}


@dataclass
class MadeUp:
    """Two layers of 32 experts with 64 MiB each: a slot is 128 MiB."""

    layers: list = field(default_factory=lambda: [layer(0), layer(1)])
    dense_bytes: int = 100 * MIB
    metadata: dict = field(default_factory=lambda: dict(METADATA))

    @property
    def expert_bytes(self):
        return sum(each.n_expert * each.bytes_per_expert for each in self.layers)

    def integer(self, key, fallback=-1):
        return self.metadata.get(key, fallback)


def with_metadata(**changes):
    """A MadeUp with other metadata; None takes a key out. "attention__key_length" stands for "attention.key_length"."""
    changed = METADATA | {key.replace("__", "."): value for key, value in changes.items()}
    return MadeUp(metadata={key: value for key, value in changed.items() if value is not None})


# With 4096 tokens of context and batches of 512 tokens.
KV = 4 * MIB  # 4096 tokens * 2 layers * 2 heads * (64 + 64) * 2 bytes
COMPUTE = 54 * MIB  # 512 tokens * (4 heads * 4096 scores + 2 masks of 4096 + (4 + 8) rows of 256) * 4 bytes
WORKSPACE = 16 * MIB  # 512 tokens * 4 experts * (256 in + 256 out + 3 * 512) * 4 bytes
MARGIN = 256 * MIB
NEEDED = 100 * MIB + KV + COMPUTE + WORKSPACE + MARGIN
SLOT = 128 * MIB


def plan(source=None, found=(CPU, BIG), n_ctx=4096, **options):
    return plan_cache(source or MadeUp(), list(found), n_ctx=n_ctx, **options)


def test_what_whole_slots_leave_over_is_for_prompts():
    # Both layers have experts of one shape: a staging slot is 64 MiB, half of a slot.
    p = plan(vram=NEEDED + 10 * SLOT + 100 * MIB)
    assert (p.n_slots, p.n_staging, p.staging_bytes, p.left_bytes) == (10, 1, 64 * MIB, 36 * MIB)
    assert plan(vram=GIB + 512 * MIB, slots=4).n_staging == (GIB + 512 * MIB - NEEDED - 4 * SLOT) // (64 * MIB) == 9
    assert plan(slots=4).n_staging == 16  # at most
    assert plan(slots=32).n_staging == 0  # nothing is missing


# --- the device


@pytest.mark.parametrize(
    "found, name",
    [
        ([CPU, INTEGRATED, SMALL, BIG, SOFTWARE], "Vulkan0"),  # of two discrete ones the one with more memory
        ([CPU, INTEGRATED, SMALL], "Vulkan2"),  # discrete, though the integrated one has more
        ([CPU, SOFTWARE, INTEGRATED], "Vulkan1"),
        ([CPU, SOFTWARE, OURS], None),
        ([], None),
    ],
)
def test_without_a_name_the_best_real_gpu(found, name):
    chosen = choose_device(found, None)
    assert (chosen.name if chosen else None) == name


@pytest.mark.parametrize("device", [CPU, SOFTWARE, SMALL])
def test_by_name_any_device_will_do(device):
    assert choose_device([CPU, BIG, SMALL, SOFTWARE, OURS], device.name) is device


@pytest.mark.parametrize("name", ["Vulkan7", "vulkan0", "edgemoe", ""])
def test_an_unknown_name_says_what_there_is(name):
    with pytest.raises(EdgemoeError) as error:
        choose_device([BIG, CPU, OURS], name)
    assert str(error.value) == f"device {name}: wanted one of Vulkan0 (NVIDIA GeForce RTX 4060), CPU"


# --- the budget


def test_what_the_budget_is_spent_on():
    p = plan(vram=NEEDED + 10 * SLOT + MIB)
    assert (p.dense_bytes, p.kv_bytes, p.compute_bytes, p.workspace_bytes, p.margin_bytes) == (100 * MIB, KV, COMPUTE, WORKSPACE, MARGIN)
    assert (p.n_slots, p.slot_bytes, p.cache_bytes, p.left_bytes) == (10, SLOT, 10 * SLOT, MIB)
    assert (p.device, p.n_ctx, p.n_expert, p.n_expert_used, p.expert_bytes, p.reason, p.fits_all) == ("Vulkan0", 4096, 32, 4, 4 * GIB, "", False)


@pytest.mark.parametrize(
    "n_slots, reason",
    [(-1, "room for 0 slots per layer, a token uses 4: off"), (3, "room for 3 slots per layer, a token uses 4: off"), (4, ""), (31, ""), (32, "")],
)
def test_as_many_slots_as_fit(n_slots, reason):
    exact = plan(vram=NEEDED + n_slots * SLOT)
    assert (exact.n_slots, exact.reason, exact.fits_all) == (0 if reason else n_slots, reason, n_slots == 32)
    assert plan(vram=NEEDED + n_slots * SLOT - 1).n_slots in (0, n_slots - 1)


def test_never_more_slots_than_experts():
    p = plan(vram=100 * GIB)
    assert p.n_slots == 32 and p.cache_bytes == p.expert_bytes and p.fits_all and p.reason == ""
    assert p.margin_bytes == 5 * GIB  # 5 %


def test_the_budget_is_the_free_memory():
    p = plan(found=[SMALL, CPU])
    assert p.budget_bytes == 2 * GIB and p.n_slots == 12  # (2048 - 430) / 128
    assert plan(found=[SMALL, CPU], vram=GIB).n_slots == 4  # (1024 - 430) / 128


def test_a_longer_context_takes_slots_away():
    # 16384 tokens: 16 MiB of KV cache, and 512 * ((4 + 2) * 16384 + 3072) * 4 bytes = 198 MiB of buffers.
    p = plan(found=[SMALL, CPU], n_ctx=16384)
    assert (p.kv_bytes, p.compute_bytes, p.n_slots) == (16 * MIB, 198 * MIB, 11)  # (2048 - 586) / 128
    assert plan(n_ctx=4000).n_ctx == 4096  # llama.cpp rounds up to 256


def test_dense_layers_on_the_cpu_leave_room():
    p = plan(found=[SMALL, CPU], dense_on_device=False)
    assert (p.dense_bytes, p.kv_bytes, p.compute_bytes) == (0, 0, 0) and p.n_slots == 13  # (2048 - 272) / 128
    assert plan(found=[CPU], device="CPU").dense_bytes == 0  # they are there anyway


def test_a_driver_that_does_not_tell_free_memory():
    silent = Device("Vulkan0", "Old GPU", "gpu", 0, 0)
    p = plan(found=[silent])
    assert p.n_slots == 0 and p.reason == "Vulkan0 does not tell how much memory is free; --vram sets a budget"
    assert plan(found=[silent], vram=2 * GIB).n_slots == 12
    assert plan(vram=0).reason == "the budget is 0 bytes"


# --- slots that were asked for


@pytest.mark.parametrize(
    "slots, n_slots, reason",
    [
        (0, 0, "slots are off"),
        (1, 1, "fewer slots than the 4 experts a token uses: misses are never loaded on demand"),
        (3, 3, "fewer slots than the 4 experts a token uses: misses are never loaded on demand"),
        (4, 4, ""),
        (32, 32, ""),
        (33, 32, "33 slots were asked for, a layer has 32 experts"),
    ],
)
def test_slots_asked_for_are_obeyed(slots, n_slots, reason):
    p = plan(slots=slots)
    assert (p.n_slots, p.cache_bytes, p.reason) == (n_slots, n_slots * SLOT, reason)


def test_asking_for_too_much_shows():
    p = plan(slots=32, vram=GIB)
    assert p.n_slots == 32 and p.left_bytes == GIB - NEEDED - 4 * GIB and "MORE than the budget" in p.report()
    assert plan(slots=2, warn_working_set=False).reason == ""


def test_a_layer_with_fewer_experts_has_fewer_slots():
    p = plan(MadeUp(layers=[layer(0, n_expert=32), layer(1, n_expert=16)]), slots=20)
    assert (p.n_expert, p.slot_bytes, p.cache_bytes) == (32, SLOT, (20 + 16) * 64 * MIB)


def test_fewer_slots_than_planned():
    p = plan(slots=32).with_fewer_slots(24, "no room")
    assert (p.n_slots, p.cache_bytes, p.reason, p.fits_all) == (24, 24 * SLOT, "no room", False)


# --- when there is nothing to gain


def few_big_experts():
    return MadeUp(layers=[layer(0, n_expert=8, bytes_per_expert=256 * MIB), layer(1, n_expert=8, bytes_per_expert=256 * MIB)])


def test_few_big_experts_want_all_or_nothing():
    slot = 512 * MIB
    p = plan(few_big_experts(), vram=NEEDED + 7 * slot)
    assert p.n_slots == 0 and p.reason == "few big experts, 8 per layer with room for 7: a cache that does not hold all makes such a model slower"
    assert plan(few_big_experts(), vram=NEEDED + 8 * slot).n_slots == 8
    assert plan(few_big_experts(), slots=5).n_slots == 5  # asked for


def test_no_gpu():
    for options in ({}, {"slots": 8}):
        p = plan(found=[CPU, SOFTWARE, OURS], **options)
        assert (p.device, p.n_slots, p.reason, p.dense_bytes) == (None, 0, "no GPU", 0)
    assert p.line() == "no experts on a GPU: no GPU"


def test_what_if_there_was_a_gpu():
    p = plan(found=[CPU, SOFTWARE], vram=2 * GIB)
    assert (p.device, p.n_slots, p.dense_bytes) == (None, 12, 100 * MIB)
    assert plan(found=[CPU], vram=2 * GIB, slots=6).n_slots == 6
    assert p.report().startswith("device     a GPU with 2.0 GiB\n")


def test_a_dense_model():
    p = plan(MadeUp(layers=[]), slots=8)
    assert (p.n_slots, p.n_expert, p.cache_bytes, p.workspace_bytes, p.fits_all) == (0, 0, 0, 0, False)
    assert p.reason == "a dense model has no routed experts"
    assert "no slots   a dense model" in p.report()


# --- estimates from the metadata


@pytest.mark.parametrize(
    "changes, per_token",
    [
        ({}, 2 * 2 * 128),
        ({"attention__head_count_kv": None}, 2 * 4 * 128),  # one per head; so reads an array of one number for each layer
        ({"attention__key_length": None, "attention__value_length": None}, 2 * 2 * 128),  # 256 / 4 heads
        ({"attention__key_length": 192}, 2 * 2 * 256),
        # MLA: one row of rank + rope, as llama.cpp keeps it for files that name the uncompressed length too.
        ({"attention__kv_lora_rank": 96, "attention__key_length_mla": 64, "rope__dimension_count": 32}, 2 * 128),
        ({"attention__kv_lora_rank": 96, "rope__dimension_count": 32}, 2 * 2 * 128),
        ({"block_count": 8, "full_attention_interval": 4}, 2 * 2 * 128),  # two of eight layers attend
    ],
)
def test_kv_cache(changes, per_token):
    assert plan(with_metadata(**changes)).kv_bytes == 4096 * per_token * 2


def test_recurrent_layers_keep_a_state():
    hybrid = with_metadata(block_count=8, full_attention_interval=4, ssm__inner_size=512, ssm__state_size=128)
    assert plan(hybrid).kv_bytes == KV + 6 * 512 * 128 * 4


def test_a_header_without_any_key_is_no_error():
    p = plan(MadeUp(metadata={}))
    assert p.kv_bytes == 0 and p.compute_bytes > 512 * 152064 * 4 and p.n_expert_used == 1 and p.n_slots == 32


def test_buffers_of_a_large_vocabulary_and_of_small_batches():
    # Logits instead of scores: 512 tokens * (100000 + 2 * 4096 + 3072) * 4 bytes.
    assert plan(with_metadata(vocab_size=100000)).compute_bytes == 512 * 111264 * 4
    p = plan(n_ubatch=64)
    assert (p.compute_bytes, p.workspace_bytes) == (COMPUTE // 8, WORKSPACE // 8)


# --- what is shown


def test_the_report_has_a_line_for_each():
    lines = plan(found=[SMALL, CPU]).report().splitlines()
    names = [line[:10].strip() for line in lines]
    assert names == ["device", "budget", "dense", "KV cache", "compute", "workspace", "slots", "staging", "margin", "left over", "on the CPU"]
    assert lines[0] == "device     Vulkan2 (NVIDIA T400), 2.0 GiB free"
    assert lines[6] == "slots         1.5 GiB  of 4.0 GiB experts: 12 of 32 per layer, 4 used per token"
    assert lines[-1] == "on the CPU experts that are in no slot (2.5 GiB)"
    assert "MORE than is free" in plan(found=[SMALL], vram=3 * GIB).report()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"vram": 8 * GIB}, "nothing but the token embedding"),
        ({"vram": 100}, "all experts (4.0 GiB)"),
        ({"vram": GIB, "dense_on_device": False}, "experts that are in no slot (3.4 GiB), dense layers, KV cache"),
    ],
)
def test_what_is_left_to_the_cpu(options, text):
    assert plan(**options).report().splitlines()[-1] == f"on the CPU {text}"


def test_the_line_before_loading():
    assert plan(found=[SMALL]).line() == (
        "Vulkan2 (NVIDIA T400): 12 of 32 expert slots per layer, 1.5 GiB; dense 100.0 MiB, KV cache 4.0 MiB, buffers 70.0 MiB; budget 2.0 GiB"
    )
    assert plan(vram=GIB - GIB // 4).line() == "no experts on a GPU: room for 2 slots per layer, a token uses 4: off"
    assert "per layer (fewer slots than" in plan(slots=2).line()


# --- sizes


@pytest.mark.parametrize(
    "text, n",
    [
        ("6G", 6 * GIB), ("6GiB", 6 * GIB), ("6 gb", 6 * GIB), ("512M", 512 * MIB), ("1.5g", 3 * GIB // 2), ("64k", 65536), ("1T", 1024 * GIB),
        ("12345", 12345), ("0", 0),
    ],
)
def test_parse_bytes(text, n):
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["", "G", "-1G", "6X", "6iB", "1.G", "1e9", "inf", "nan", "6GG", "6G 1", "six"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="wanted a size such as 6G or 512M"):
        parse_bytes(text)


# --- the command; machines differ in their devices, --vram gives them all the same budget


def test_the_command_on_a_tiny_model(edgemoe, models):
    tiny = models("qwen3moe", "Q8_0")
    result = edgemoe("plan", tiny, "--vram", "2G", "--json")
    facts = json.loads(result.stdout)
    assert result.returncode == 0 and facts["budget_bytes"] == 2 * GIB and facts["n_ctx"] == 4096
    assert (facts["n_slots"], facts["n_expert"], facts["n_expert_used"], facts["fits_all"]) == (16, 16, 4, True)
    assert facts["kv_bytes"] == KV and facts["dense_bytes"] > 0  # the tiny models have the shape of METADATA
    text = edgemoe("plan", tiny, "--vram", "2G", "--slots", "6", "--ctx", "256", "--gpu-layers", "0").stdout
    assert "6 of 16 per layer, 4 used per token" in text and "on the CPU experts that are in no slot" in text and ", dense layers, KV cache\n" in text
    assert "room for 0 slots per layer, a token uses 4: off" in edgemoe("plan", tiny, "--vram", "300M").stdout


def test_the_command_on_the_cpu_by_name(edgemoe, models):
    facts = json.loads(edgemoe("plan", models("qwen3moe", "Q8_0"), "--device", "CPU", "--slots", "4", "--json").stdout)
    assert (facts["device"], facts["n_slots"], facts["dense_bytes"], facts["reason"]) == ("CPU", 4, 0, "")


def test_the_command_on_a_model_with_mla(edgemoe, models):
    facts = json.loads(edgemoe("plan", models("deepseek2", "Q8_0"), "--vram", "2G", "--json").stdout)
    assert facts["kv_bytes"] == 4096 * 3 * (64 + 32) * 2 and facts["fits_all"]  # three layers of MLA: rank 64 and rope 32


def test_errors_of_the_command(edgemoe, models):
    tiny = models("qwen3moe", "Q8_0")
    bad_size = edgemoe("plan", tiny, "--vram", "6X")
    assert bad_size.returncode == 2 and "6X: wanted a size such as 6G or 512M" in bad_size.stderr
    bad_slots = edgemoe("run", tiny, "-p", "x", "--slots", "-1")
    assert bad_slots.returncode == 2 and "-1: wanted 0 or more" in bad_slots.stderr
    assert edgemoe("run", tiny, "-p", "x", "--misses", "never").returncode == 2
    bad_device = edgemoe("plan", tiny, "--device", "Nowhere0")
    assert bad_device.returncode == 1 and bad_device.stderr.startswith("edgemoe: error: device Nowhere0: wanted one of ") and "CPU" in bad_device.stderr
    assert "example" in edgemoe("plan", "--help").stdout
