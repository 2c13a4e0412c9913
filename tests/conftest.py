"""Shared fixtures. Tests run against the installed edgemoe, never against the source tree: its native library is built at installation."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "scripts")]

import make_demo_model as demo  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

SHARED = TESTS.parent.parent / "shared"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """models(family, type, **variant): path of that tiny model, made once per session."""
    folder = tmp_path_factory.mktemp("tiny")
    made = {}

    def get(family="qwen3moe", expert_type="Q4_0", **variant):
        key = (family, expert_type, *sorted(variant.items()))
        if key not in made:
            made[key] = tiny_model(folder / f"{len(made):03d}-{family}-{expert_type}.gguf", family, expert_type, **variant)
        return made[key]

    return get


@pytest.fixture(scope="session")
def packages(models, tmp_path_factory):
    """packages(gguf): the package converted from it, made once per session."""
    from edgemoe.convert import convert

    folder = tmp_path_factory.mktemp("packages")
    made = {}

    def get(source):
        if source not in made:
            made[source] = folder / f"{len(made):03d}-{Path(source).stem}.edgemoe"
            convert(source, made[source])
        return made[source]

    return get


@pytest.fixture(scope="session")
def small_demo():
    """models/demo-small.gguf: 16 experts, 4 used. Built if it is not there."""
    try:
        return demo.ensure_small_demo()
    except demo.DemoError as error:
        pytest.skip(str(error))


def hear_ctrl_c():
    """In a child: a shell that runs the tests in the background has them, and all that they start, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def edgemoe(tmp_path):
    """edgemoe("run", path, ...): the command in a process of its own; a CompletedProcess with text output."""

    def run(*arguments, timeout=120, **options):
        command = [sys.executable, "-m", "edgemoe.cli", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=tmp_path, preexec_fn=hear_ctrl_c, **options)

    return run


@pytest.fixture
def python(tmp_path):
    """python(code, *arguments): a Python program in a process of its own, for what may kill or leak."""

    def run(code, *arguments, timeout=120, **options):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=tmp_path, preexec_fn=hear_ctrl_c, **options)

    return run
