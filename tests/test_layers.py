"""A file imports only lower ones. The order is written down here once, lowest first; files on one line know nothing of each other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PYTHON = [
    {"errors", "machine"},
    {"_native", "npz", "arguments", "stage", "routing_shift", "coverage", "resumable"},
    {"trace", "package", "devices", "tokenizer", "probe", "policies", "tiers"},
    {"cache_plan", "disk_probe", "trace_import", "replay", "lossy", "recommendation", "fit", "annotate"},
    {"heads", "routers"},
    {"head_outputs", "engine_heads"},
    {"simulate", "policy_list", "ram_plan", "cue_sets", "calibrate", "stage_tracker"},
    {"simulate_report", "simulate_plots", "tune", "estimate", "train_heads"},
    {"simulate_commands", "train_commands", "heads_commands", "joint_commands"},
    {"tune_commands"},
    {"plan", "engine"},
    {"session", "verify", "doctor", "record", "live"},
    {"chat"},
    {"trace_commands", "stage_commands"},
    {"simulate_options", "stage_options", "train_options", "heads_options"},
    {"joint_options"},
    {"cli"},
]
JOINT = [{"options", "families", "examples", "losses"}, {"checkpoint", "tap"}, {"train", "back"}]  # edgemoe/joint: below joint_commands, which alone imports it
WITHOUT_TORCH = {"options", "families", "examples", "checkpoint"}
CONVERT = [{"errors"}, {"source"}, {"pieces", "arrays"}, {"layout", "replace"}, {"tasks"}, {"verify"}, {"writer", "sidecar"}, {"conversion"}, {"cli"}]
KERNELS = ["kernels/" + name for name in ("kernels", "blocks", "activation", "x86_blocks", "kernel_table", "avx2_blocks", "avx2_tile", "avx2_kernels", "avx2", "avxvnni", "avx512_blocks", "avx512_tile", "avx512")]
POLICIES = ["policies/" + name for name in ("parameters", "kinds", "use", "chosen_set", "placement", "stage", "foresight", "prediction", "similar", "policies")]
TIER = ["residency", "policy", *POLICIES, "loader", "miss_choice", "tier", "simulation"]
NATIVE = [
    "file", "gguf_file", "source", "expert_memory", "store", *KERNELS, *TIER, "router_ahead", "ram_cache", "device_slots", "device_cache", "weights", "elementwise", "expert_block",
    "device_runner", "products", "heads", "head_feed", "graph_plan",
    "executor", "backend", "router_tap", "recorder", "router_feed", "api",
]


def imports(path: Path) -> set[str]:
    """Module names that a file imports anywhere, also inside functions; "edgemoe.x" for "from edgemoe import x"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            found |= {f"{prefix}.{alias.name}" if not node.module or prefix == "edgemoe" else prefix for alias in node.names}
    return found


def check_order(folder: Path, layers: list[set[str]], prefixes: tuple[str, ...]):
    level = {name: i for i, names in enumerate(layers) for name in names}
    files = {p.stem: p for p in folder.glob("*.py") if p.stem != "__init__"}
    assert set(files) == set(level), "every file has its place in the order"
    for name, path in files.items():
        for module in imports(path):
            for prefix in prefixes:
                target = module.removeprefix(prefix).split(".")[0]
                if module.startswith(prefix) and target in level:
                    assert level[target] < level[name], f"{path.name} imports {target}, which is not below it"


def test_python_imports_point_downwards():
    check_order(ROOT / "edgemoe", PYTHON, ("edgemoe.",))


def test_joint_is_an_island_of_its_own():
    folder = ROOT / "edgemoe" / "joint"
    check_order(folder, JOINT, ("edgemoe.joint.",))
    below = set().union(*PYTHON[: next(i for i, names in enumerate(PYTHON) if "joint_commands" in names)])
    for path in folder.glob("*.py"):
        ours = {m.removeprefix("edgemoe.").split(".")[0] for m in imports(path) if m.startswith("edgemoe.")}
        assert ours <= below | {"joint", "convert", "__version__"}, path.name
        assert path.stem not in WITHOUT_TORCH or not imports(path) & {"torch", "transformers", "safetensors"}, f"{path.name} does without PyTorch"
    users = {p.stem for p in (ROOT / "edgemoe").glob("*.py") if any(m.startswith("edgemoe.joint") and not m.startswith("edgemoe.joint_") for m in imports(p))}
    assert users == {"joint_commands"}


def test_convert_imports_point_downwards_and_stay_inside():
    check_order(ROOT / "convert", CONVERT, (".",))
    for path in (ROOT / "convert").glob("*.py"):
        assert not any(m.startswith("edgemoe") for m in imports(path)), f"{path.name} reaches out of convert/"


def test_only_convert_writes_gguf():
    for path in (ROOT / "edgemoe").rglob("*.py"):
        assert "GGUFWriter" not in path.read_text(), path.name


def native_sources() -> dict[Path, str]:
    """Every file, and its name as other files include it, without suffix."""
    folder = ROOT / "native" / "src"
    return {path: str(path.relative_to(folder).with_suffix("")) for path in sorted(folder.rglob("*.*"))}


def test_native_includes_point_downwards():
    sources = native_sources()
    assert set(sources.values()) == {*NATIVE, "ggml_abi"}
    for path, name in sources.items():
        for header in re.findall(r'#include "(?:\.\./)?([\w/]+)\.h"', path.read_text()):
            folder = name.partition("/")[0]
            header = header if header in NATIVE or not f"{folder}/{header}" in NATIVE else f"{folder}/{header}"
            # kernels.cpp is above the rest of its folder: it holds the table that kernels.h promises.
            if header in NATIVE and header != name and name != "kernels/kernels":
                assert NATIVE.index(header) < NATIVE.index(name), f"{path.name} includes {header}.h, which is not below it"


def test_kernels_know_nothing_else_of_ours():
    for path, name in native_sources().items():
        if name in KERNELS:
            headers = re.findall(r'#include "(\w+)\.h"', path.read_text())
            assert all(f"kernels/{header}" in KERNELS or header == "ggml" for header in headers), path.name


@pytest.mark.parametrize("name", TIER)
def test_decisions_know_nothing_of_ggml_or_files(name):
    for path, its_name in native_sources().items():
        if its_name == name:
            headers = re.findall(r'#include "([\w./-]+)\.h"', path.read_text())
            assert all(header.removeprefix("../") in TIER or f"policies/{header}" in POLICIES for header in headers), path.name
            assert name in ("loader", "tier") or not re.search(r"#include <(mutex|thread|atomic|condition_variable)>", path.read_text()), path.name


def test_only_backend_knows_the_internal_structs():
    users = [p.name for p in native_sources() if '"ggml_abi.h"' in p.read_text()]
    assert users == ["backend.cpp"]


@pytest.mark.parametrize("name", ["file", "gguf_file"])
def test_lowest_files_know_no_backend(name):
    for suffix in (".h", ".cpp"):
        assert "ggml-backend" not in (ROOT / "native" / "src" / (name + suffix)).read_text()
