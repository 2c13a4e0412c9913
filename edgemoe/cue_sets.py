"""What `edgemoe calibrate` found for a model: cues, the threshold of the routing shift, and what they were chosen by.

It lies with the user's settings, $XDG_CONFIG_HOME/edgemoe/cues/FINGERPRINT.json, for the reasons that recommendation gives, and because a GGUF has no sidecar. A GGUF and the
package that was made of it have one fingerprint.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edgemoe.package import Source
from edgemoe.recommendation import folder
from edgemoe.stage import CueError, checked_cues

FORMAT = 1


@dataclass(frozen=True)
class CueSet:
    cues: dict[str, tuple[str, ...]]  # kind: cues
    fingerprint: str
    model: str
    date: str  # YYYY-MM-DD
    version: str  # of edgemoe
    shift_threshold: float | None = None  # bits; None: not known
    shift_quantile: float | None = None
    table: list[dict] = field(default_factory=list)  # a row per candidate, as calibrate.Row
    figures: dict = field(default_factory=dict)
    format: int = FORMAT


def path_of(mark: str) -> Path:
    return folder("cues") / f"{mark}.json"


def write(found: CueSet, path: Path | None = None) -> Path:
    """path: elsewhere than where `find` looks. The file appears whole or not at all. Raises CueError."""
    path = path or path_of(found.fingerprint)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(asdict(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as e:
        raise CueError(f"{e.filename or path}: {e.strerror}") from None
    return path


def find(source: Source) -> CueSet | None:
    """What was found for this model, or None. Raises CueError."""
    if not source.layers or not any(folder("cues").glob("*.json")):
        return None  # most users never calibrate: no fingerprint is computed for them
    mark = source.package_fingerprint()
    path = path_of(mark)
    if not mark or not path.exists():
        return None
    found = read(path)
    if found.fingerprint != mark:
        raise CueError(f"{path}: is about another model")
    return found


def read(path: Path) -> CueSet:
    """Raises CueError."""
    try:
        said = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise CueError(f"{path}: found format {said.get('format') if isinstance(said, dict) else said!r}, wanted {FORMAT}")
        found = CueSet(**{**said, "cues": checked_cues(said["cues"], str(path))})
    except OSError as e:
        raise CueError(f"{path}: {e.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise CueError(f"{path}: not what edgemoe calibrate writes: {e}") from None
    if not isinstance(found.shift_threshold, (int, float, type(None))):
        raise CueError(f"{path}: shift_threshold: found {found.shift_threshold!r}, wanted a number or null")
    return found
