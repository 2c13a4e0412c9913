"""Builds a package in `OUT.partial/` and moves it to its name as the last step.

Order: model.gguf and the blobs, then router.gguf, then the rename. Until router.gguf is there nothing opens the
folder as a package, and until the rename OUT is untouched.

A run that ended half-way is resumed without a journal: whatever lies in the folder is compared with the source
byte by byte and kept if it is right. So a torn blob, a changed source or a foreign file cannot survive, and the
source had to be read for the CRCs in any case.

Blobs are not synced one by one, which would cost more than all the rest. router.gguf and the folder are synced
before the rename; if power fails before the system has written the blobs out, files are missing or short, which
their sizes in router.gguf give away.
"""

import ctypes
import fcntl
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

from .errors import ConvertError
from .layout import router_pieces
from .pieces import Difference, compare, write
from .tasks import blob_tasks, model_tasks, run_tasks

OURS = re.compile(r"model\.gguf|router\.gguf|experts(/L\d{4,}(/E\d{4,}\.gguf)?)?")


def partial_path(out):
    return out.with_name(out.name + ".partial")


@contextmanager
def partial_folder(out, plan):
    """The folder to build in, locked against other runs and free of files that the plan does not have."""
    folder = partial_path(out)
    folder.mkdir(exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConvertError(f"{folder}: another edgemoe-convert is writing here") from None
        _remove_leftovers(folder, plan)
        _check_space(folder, plan)
        yield folder
    finally:
        os.close(fd)


def _remove_leftovers(folder, plan):
    """Delete what an earlier run left and this plan does not write. Refuses a folder with files of someone else."""
    wanted = {"model.gguf", *(str(task.path) for task in blob_tasks(plan))}
    stale = []
    for base, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(base, name)
            inside = str(path.relative_to(folder))
            if not OURS.fullmatch(inside) or path.is_symlink():
                raise ConvertError(f"{folder}: holds {inside}, which edgemoe-convert did not write; move it away")
            if name in files and inside not in wanted:
                stale.append(path)
    for path in stale:
        path.unlink()


def _check_space(folder, plan):
    """Raise ConvertError unless the disk has room for what is not there yet."""
    disk = os.statvfs(folder)
    sizes = [plan.model_bytes, sum(tensor.nbytes for tensor in plan.routers) + len(plan.ghost) + (1 << 20)]
    rounded = sum(-(-size // disk.f_frsize) for size in sizes)
    rounded += sum(layer.n_expert * -(-layer.blob_bytes // disk.f_frsize) for layer in plan.layers)
    there = sum(path.stat().st_blocks * 512 for path in folder.rglob("*.gguf"))
    need, free = rounded * disk.f_frsize - there, disk.f_bavail * disk.f_frsize
    if need > free:
        if not there:
            shutil.rmtree(folder)
        raise ConvertError(f"{folder.parent}: needs {need} bytes ({need / 1e9:.2f} GB) for the package, "
                           f"the disk has {free} bytes ({free / 1e9:.2f} GB) free")


def write_package(folder, plan, n_jobs, progress):
    """Write model.gguf and all blobs into `folder`. Returns (CRC-32 of every blob, number of blobs kept)."""
    for layer in plan.layers:
        (folder / layer.path(0)).parent.mkdir(parents=True, exist_ok=True)
    model = folder / "model.gguf"
    # What an earlier run left of model.gguf is checked in place; the rest of the file reads as zeros until written.
    resumed_model = model.exists()
    fd = os.open(model, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, plan.model_bytes)
    finally:
        os.close(fd)

    def settle(task):
        path = folder / task.path
        pieces = task.pieces()
        if resumed_model or task.is_blob and path.exists():
            try:
                return compare(path, task.at, pieces, plan.source, task.is_blob), True
            except Difference:
                pass
        return _write_task(path, task, pieces, plan.source), False

    blobs = blob_tasks(plan)
    results = run_tasks(model_tasks(plan) + blobs, settle, n_jobs, "converting", progress)[-len(blobs):]
    return [crc for crc, _ in results], sum(kept for _, kept in results)


def _write_task(path, task, pieces, source):
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if task.is_blob else 0)
    fd = os.open(path, flags, 0o666)
    try:
        return write(fd, task.at, pieces, source)
    finally:
        os.close(fd)


def write_router(folder, plan, crcs):
    """Write router.gguf, which completes the package, and sync it."""
    fd = os.open(folder / "router.gguf", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write(fd, 0, router_pieces(plan, crcs), plan.source)
        os.fsync(fd)
    finally:
        os.close(fd)
    _sync_folder(folder)


def publish(folder, out):
    """Give the finished folder its name. An older package there is replaced and deleted."""
    if os.path.lexists(out):
        _exchange(folder, out)
        _delete_package(folder)
    else:
        os.rename(folder, out)
    _sync_folder(out.parent)


def _delete_package(folder):
    # Without its sidecar it is no package any more, should the deletion be interrupted.
    (folder / "router.gguf").unlink()
    shutil.rmtree(folder)


def _exchange(folder, out):
    """Swap two folders at once where the system can, so that OUT exists at every moment."""
    AT_FDCWD, RENAME_EXCHANGE = -100, 2
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename and rename(AT_FDCWD, os.fsencode(folder), AT_FDCWD, os.fsencode(out), RENAME_EXCHANGE) == 0:
        return
    aside = out.with_name(out.name + ".old")
    os.rename(out, aside)
    os.rename(folder, out)
    os.rename(aside, folder)


def _sync_folder(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
