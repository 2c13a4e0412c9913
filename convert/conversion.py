"""From a stacked GGUF to a package: decides what has to be done and does it."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ConvertError
from .layout import make_plan
from .source import SHARD_NAME, open_source
from .verify import read_router, require_same_source, verify_package
from .writer import partial_folder, partial_path, publish, write_package, write_router

MAX_DEFAULT_JOBS = 4
MAX_JOBS = 64  # two buffers each: the memory stays bounded


@dataclass(frozen=True)
class Report:
    """What a run did. `status` is "converted", "up to date" or "verified" (an existing package was only checked)."""

    status: str
    source: str
    out: str
    architecture: str
    layers: int
    experts: int
    bytes_in: int
    bytes_out: int
    seconds: float
    bytes_per_second: float
    peak_rss_bytes: int
    fingerprint: str
    resumed_blobs: int
    verified: bool

    def as_dict(self):
        return asdict(self)


def convert(src, out=None, *, jobs=None, force=False, verify=False, progress=False):
    """Convert the stacked MoE GGUF `src` (any of its shards) into a package directory `out`.

    out: default is the name of `src` with `.edgemoe` for `.gguf` and shard suffix, beside it.
    jobs: threads, by default up to 4 of the processors that this process may use.
    force: replace a package that was made from another source.
    verify: re-read the result, byte for byte, before it gets its name; with an existing package and without
        `force`, only check that one.
    progress: draw a bar on stderr.

    Returns a Report. Raises ConvertError with one line for the user, or OSError from the disk; then `out` is as
    it was, and `out` + ".partial" holds what a next run can use.
    """
    started = time.monotonic()
    n_jobs = min(jobs or min(MAX_DEFAULT_JOBS, len(os.sched_getaffinity(0))), MAX_JOBS)
    with open_source(src) as source:
        out = _resolve_out(source, Path(src), out)
        plan = make_plan(source)
        kept = 0
        exists = os.path.lexists(out)
        if exists:
            read_router(out)
        if exists and not force:
            status = _check_existing(out, plan, n_jobs, verify, progress)
        else:
            kept = _build(out, plan, n_jobs, verify, progress)
            status = "converted"
        source.check_unchanged()
        return _report(status, Path(src), out, plan, kept, verify, started)


def _resolve_out(source, src, out):
    """The absolute path of the package. Refuses one whose replacement would delete the source."""
    if out is None:
        name = src.name
        shard = SHARD_NAME.fullmatch(name) if len(source.parts) > 1 else None
        stem = shard["stem"] if shard else name.removesuffix(".gguf")
        out = src.with_name(stem + ".edgemoe")
    out = Path(os.path.realpath(out))
    if not out.name:
        raise ConvertError(f"{out}: wanted the name of a new folder")
    if not out.parent.is_dir():
        raise ConvertError(f"{out.parent}: no such folder")
    for part in source.parts:
        for place in (Path(os.path.realpath(part.path)), Path(os.path.abspath(part.path))):
            if place.is_relative_to(out) or place.is_relative_to(partial_path(out)):
                raise ConvertError(f"{out}: the source {part.path} lies inside it, "
                                   "wanted another place for the package")
    return out


def _check_existing(out, plan, n_jobs, verify, progress):
    if verify:
        verify_package(out, plan, n_jobs, progress)
        return "verified"
    try:
        require_same_source(out, plan, n_jobs, progress)
    except ConvertError as err:
        raise ConvertError(f"{err} (the package exists and does not match this source; --force replaces it)") from None
    return "up to date"


def _build(out, plan, n_jobs, verify, progress):
    with partial_folder(out, plan) as folder:
        crcs, kept = write_package(folder, plan, n_jobs, progress)
        # A source that changed meanwhile gives blobs that do not belong together: do not let them have the name.
        plan.source.check_unchanged()
        write_router(folder, plan, crcs)
        if verify:
            verify_package(folder, plan, n_jobs, progress)
        publish(folder, out)
    return kept


def _report(status, src, out, plan, kept, verify, started):
    seconds = time.monotonic() - started
    bytes_out = plan.model_bytes + plan.blob_bytes + Path(out, "router.gguf").stat().st_size
    return Report(
        status=status, source=str(src), out=str(out), architecture=plan.architecture, layers=len(plan.layers),
        experts=plan.n_expert, bytes_in=plan.source.nbytes, bytes_out=bytes_out, seconds=round(seconds, 3),
        bytes_per_second=round(plan.source.nbytes / seconds), peak_rss_bytes=_peak_rss_bytes(),
        fingerprint=plan.fingerprint, resumed_blobs=kept, verified=verify)


def _peak_rss_bytes():
    # Not getrusage: its maximum is inherited from the process that started us.
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0
