"""Cache policies by name: what there is, what each has to learn first, and score functions in Python.

The policies themselves are native, and the same for engine and simulator. Here is what a caller writes: "lru", "lrfu:lambda=0.5", with what was learned
"promoe:fit=model.fit.npz", or a score function of one's own, "my_policies.py:popular":

    def popular(usage):
        "Keep what was used most, and of that what was used lately."
        return usage.count + 0.5 ** (usage.n_events - usage.last_event)

A score function gets a `Usage` after every event of a layer and returns a number per expert; the expert with the lowest goes when another comes. In a program,
`register` gives it a name.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from edgemoe import _native
from edgemoe.errors import EdgemoeError

# Which tables a policy must have been fitted with (edgemoe.fit makes them).
LEARNED = {
    "static": ("usage",),
    "temporal": ("temporal",),
    "spatio-temporal": ("temporal", "spatial"),
    "spatio": ("spatial",),
    "promoe": ("spatial",),
    "mixtral-offloading": ("spatial",),
    "st-moe": ("follow",),
    "step": ("spatial",),
    "finemoe": ("maps", "map_tokens"),
    "moe-infinity": ("sequences",),
}
USEFUL = {"oracle": ("coming",)}  # tables that a policy can do without; an engine's oracle has to be told
# What learned heads say, by the array of a trace that has it, serves these policies instead of a table.
HEADS = {"temporal": "head_t", "spatial": "head_s"}
BY_HEADS = ("temporal", "spatio-temporal", "spatio")
BY_STAGES = ("stage", "stage+lru")  # have to hear where a stage begins
CHEATS = ("belady", "oracle", "foresight")  # know the future: bounds, not policies; simulator only


# What an engine goes by when nothing else is asked for, by what becomes of misses. Where a miss is computed in place moving rarely is best; where it is loaded, what hits
# most: on recorded routing of three models, cold and warm, this one had more hits than LRU at every capacity (docs/results/policies.md).
DEFAULT = {"cpu": "placement", "auto": "placement", "load": "lrfu:lambda=0.1"}
# In RAM when several sequences are decoded side by side: a step of theirs uses so many experts that each is gone before it is needed again, unless a set stays (docs/results/stages.md).
DEFAULT_SIDE_BY_SIDE = "placement"


class PolicyError(EdgemoeError):
    """A policy that does not exist, lacks what it has to learn, or failed."""


@dataclass
class Usage:
    """What a score function may go by: one layer, after one of its events. Arrays are [n_expert], and the function's own."""

    layer: int
    n_events: int  # of the whole model, this one included
    last_event: np.ndarray  # uint64: number of the last event that used the expert, 0 for never
    count: np.ndarray  # uint64: tokens that used it
    probs: np.ndarray  # float32: the router's probabilities in this event, the mean over its tokens; of the chosen ones only where the others are not known


_registered: dict[str, object] = {}


def register(name: str):
    """Decorator: makes a score function known as a policy of this name, in this process."""

    def add(score):
        if name in names():
            raise PolicyError(f"policy {name}: edgemoe has one of this name")
        _registered[name] = score
        return score

    return add


@lru_cache(maxsize=None)
def defaults() -> dict[str, str]:
    """Every native policy with its parameters and their defaults: {"lrfu": "lrfu:lambda=0.5"}."""
    lines = _native.text(_native.load()[1].edgemoe_policies()).split()
    return {line.split(":")[0]: line for line in lines if line != "custom"}


def names() -> list[str]:
    return list(defaults())


def name_of(text: str) -> str:
    return text.split(":")[0]


@dataclass
class Policy:
    """A policy as the library takes it. Must live as long as what was opened with it."""

    text: str  # as it was asked for
    native: str
    learned: dict[str, np.ndarray] = field(default_factory=dict)
    score: object = None
    heads: bool = False  # the events come with what learned heads say
    learned_heads: object = None  # in an engine: an engine_heads.NativeHeads that says it
    error: BaseException | None = None  # what a score function raised

    def options(self) -> dict:
        """The fields of edgemoe_cache_options that say which policy."""
        ffi, _ = _native.load()
        self._kept = [ffi.new("char[]", self.native.encode())]
        tables = ffi.new("struct edgemoe_table[]", max(1, len(self.learned)))
        for table, (name, array) in zip(tables, self.learned.items()):
            array = np.ascontiguousarray(array, np.float32)
            shape, name = ffi.new("uint64_t[]", list(array.shape)), ffi.new("char[]", name.encode())
            table.name, table.data, table.shape, table.n_dims = name, ffi.cast("const float *", ffi.from_buffer(array)), shape, array.ndim
            self._kept += [array, shape, name]
        self._kept.append(tables)
        found = {"policy": self._kept[0], "tables": tables, "n_tables": len(self.learned), "heads": self.heads}
        if self.learned_heads:
            found["learned_heads"] = self.learned_heads.handle
        if self.score:
            self._callback = ffi.callback("edgemoe_score_function", self._scored, onerror=self._failed)
            found["score"] = self._callback
        return found

    def _scored(self, user, layer, n_expert, n_events, last_use, n_uses, probs, score):
        ffi, _ = _native.load()

        def array(pointer, n_bytes, dtype):
            return np.frombuffer(ffi.buffer(pointer, n_expert * n_bytes), dtype).copy()  # the library's is overwritten by the next event

        if self.error:
            return  # whoever runs the events will hear of it when they are over
        result = self.score(Usage(layer, n_events, array(last_use, 8, np.uint64), array(n_uses, 8, np.uint64), array(probs, 4, np.float32)))
        result = np.asarray(result, np.float64)
        if result.shape != (n_expert,) or not np.isfinite(result).all():
            raise PolicyError(f"policy {self.text}: its score function returned {result.shape}, wanted {n_expert} finite numbers")
        np.frombuffer(ffi.buffer(score, n_expert * 8), np.float64)[:] = result

    def _failed(self, kind, error, trace):
        self.error = self.error or error

    def failure(self) -> BaseException:
        """What a score function has raised inside the library, which could not pass it on. Ctrl-C is itself."""
        if not isinstance(self.error, Exception):
            return self.error
        return self.error if isinstance(self.error, PolicyError) else PolicyError(f"policy {self.text}: {type(self.error).__name__}: {self.error}")


def heads_of(trace) -> tuple[str, ...]:
    """The arrays of learned heads that a trace has."""
    return tuple(name for name in HEADS.values() if getattr(trace, name, None) is not None)


def lacks(name: str, learned: dict | None, heads: tuple[str, ...] = ()) -> list[str]:
    """The tables that the policy of this name has to learn first."""
    by_heads = [table for table, head in HEADS.items() if head in heads and name in BY_HEADS]
    return [t for t in LEARNED.get(name, ()) if t not in (learned or {}) and t not in by_heads]


def policy(text: str, learned: dict[str, np.ndarray] | None = None, heads: tuple[str, ...] = ()) -> Policy:
    """Reads "name", "name:key=value,...", "name:fit=FILE.npz", or "FILE.py:function". `learned`: tables by name, instead of a file's. `heads`: those that every event comes
    with, of HEADS. Raises PolicyError."""
    name, _, rest = text.partition(":")
    if name.endswith(".py"):
        return Policy(text, "custom", score=_from_file(name, rest))
    if text in _registered:
        return Policy(text, "custom", score=_registered[text])
    if name not in defaults():
        raise PolicyError(f"policy {text}, wanted one of {', '.join([*names(), *_registered])}, or FILE.py:function")
    parameters = [p for p in rest.split(",") if p]
    files = [p[len("fit="):] for p in parameters if p.startswith("fit=")]
    native = ":".join(filter(None, [name, ",".join(p for p in parameters if not p.startswith("fit="))]))
    if files:
        learned = load_learned(files[0])
    needed = LEARNED.get(name, ()) + USEFUL.get(name, ())
    missing = lacks(name, learned, heads)
    if missing:
        raise PolicyError(f"policy {text}: it has to learn first ({', '.join(missing)}); simulate with --train, or add fit=FILE.npz, which --save-fit writes")
    # All that was learned: mlp1 and mlp2 are used where there are any.
    return Policy(text, native, {t: a for t, a in (learned or {}).items() if t in needed or (t.startswith("mlp") and "spatial" in needed)}, heads=bool(heads) and name in BY_HEADS)


def load_learned(path: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if file[name].dtype == np.float32}
    except (OSError, ValueError, EOFError) as e:
        raise PolicyError(f"{path}: cannot be read as what a policy has learned: {e}") from None


def _from_file(path: str, function: str):
    if not os.path.exists(path):
        raise PolicyError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location("edgemoe_policy_" + os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:  # whatever is wrong in a user's file
        raise PolicyError(f"{path}: {type(e).__name__}: {e}") from None
    score = getattr(module, function or "score", None)
    if not callable(score):
        raise PolicyError(f"{path}: no function {function or 'score'}")
    return score
