"""What `edgemoe tune` found for a model, for chat and run to use.

It lies with the user's settings, $XDG_CONFIG_HOME/edgemoe/tune/ (~/.config/edgemoe/tune/), and not beside the model, whose folder may be read-only, or shared by machines
that differ: FINGERPRINT.cpu.json or FINGERPRINT.load.json by what becomes of misses, and what the policy has learned in FINGERPRINT.cpu.npz. A GGUF and the package that was
made of it have one fingerprint.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from edgemoe import policies
from edgemoe.errors import EdgemoeError
from edgemoe.package import Source

FORMAT = 1


class RecommendationError(EdgemoeError):
    """A file of edgemoe tune that is damaged, of another version, or about another model."""


@dataclass(frozen=True)
class Recommendation:
    policy: str  # without fit=
    misses: str
    n_slots: int  # per layer, that it was found for
    n_expert: int
    n_layers: int
    fingerprint: str
    model: str
    date: str  # YYYY-MM-DD
    version: str  # of edgemoe
    tables: str = ""  # file beside, of what the policy has learned
    figures: dict | None = None  # of the policy on the held-out sequences
    heads: str = ""  # file of the learned heads that the policy goes by
    format: int = FORMAT


def folder(of: str = "tune") -> Path:
    """Of the user's settings, those that one command writes."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base, "edgemoe", of)


def path_of(mark: str, misses: str) -> Path:
    return folder() / f"{mark}.{misses}.json"


def write(found: Recommendation, save_tables=None) -> Path:
    """save_tables: writes what the policy has learned to a path. Files appear whole or not at all. Raises RecommendationError."""
    path = path_of(found.fingerprint, found.misses)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if save_tables:
            beside = path.with_name(f".{os.getpid()}.{found.tables}")
            save_tables(str(beside))
            os.replace(beside, path.with_name(found.tables))
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as e:
        raise RecommendationError(f"{e.filename or path}: {e.strerror}") from None
    return path


def find(source: Source, misses: str) -> Recommendation | None:
    """What is recommended for this model, or None. Raises RecommendationError."""
    if not source.layers or not any(folder().glob(f"*.{misses}.json")):
        return None  # most users never tune: no fingerprint is computed for them
    mark = source.package_fingerprint()
    path = path_of(mark, misses)
    if not mark or not path.exists():
        return None
    found = _read(path)
    _check(found, path, mark, source)
    return found


def policy_text(found: Recommendation) -> str:
    """The policy as edgemoe.Llama takes it."""
    if not found.tables:
        return found.policy
    return f"{found.policy}{',' if ':' in found.policy else ':'}fit={path_of(found.fingerprint, found.misses).with_name(found.tables)}"


def _read(path: Path) -> Recommendation:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise RecommendationError(f"{path}: found format {said.get('format') if isinstance(said, dict) else said!r}, wanted {FORMAT}")
        found = Recommendation(**said)
    except OSError as e:
        raise RecommendationError(f"{path}: {e.strerror}") from None
    except (ValueError, TypeError) as e:
        raise RecommendationError(f"{path}: not what edgemoe tune writes: {e}") from None
    kinds = {"policy": str, "misses": str, "tables": str, "heads": str, "date": str, "n_slots": int, "n_expert": int, "n_layers": int}
    for name, kind in kinds.items():
        if not isinstance(getattr(found, name), kind):
            raise RecommendationError(f"{path}: {name}: found {getattr(found, name)!r}, wanted {kind.__name__}")
    return found


def _check(found: Recommendation, path: Path, mark: str, source: Source) -> None:
    of_model = (mark, len(source.layers), max(layer.n_expert for layer in source.layers))
    if (found.fingerprint, found.n_layers, found.n_expert) != of_model:
        raise RecommendationError(f"{path}: is about another model")
    if os.path.basename(found.tables) != found.tables:
        raise RecommendationError(f"{path}: tables: found {found.tables!r}, wanted the name of a file beside it")
    if found.heads and not os.path.exists(found.heads):
        raise RecommendationError(f"{path}: {found.heads}: the learned heads are gone")
    try:
        policies.policy(policy_text(found), None, tuple(policies.HEADS.values()) if found.heads else ())
    except policies.PolicyError as e:
        raise RecommendationError(f"{path}: {e}") from None
