"""Checks a package against its source. Nothing is ever written here."""

import os
from pathlib import Path

from .errors import ConvertError
from .layout import FORMAT_VERSION, router_pieces
from .pieces import Difference, compare, crc_of, stream, tensor_piece
from .source import read_part
from .tasks import blob_tasks, model_tasks, run_tasks

# The source may have been renamed since, and a package is not worse for it.
NOT_COMPARED = ("edgemoe.source.name",)


def read_router(out):
    """The header of OUT's router.gguf as a Part. Raises ConvertError if OUT is not a package of our format version."""
    path = Path(out, "router.gguf")
    if not path.is_file():
        raise ConvertError(f"{out}: exists and is not an edgemoe package (it has no router.gguf); it is left alone")
    with open(path, "rb") as file:
        part = read_part(path, lambda offset, n: os.pread(file.fileno(), n, offset), path.stat().st_size)
    if part.value("general.architecture") != "edgemoe-router":
        raise ConvertError(f"{path}: general.architecture is {part.value('general.architecture')!r}, "
                           "wanted 'edgemoe-router'; it is left alone")
    if part.value("edgemoe.format_version") != FORMAT_VERSION:
        raise ConvertError(f"{path}: edgemoe.format_version is {part.value('edgemoe.format_version')}, "
                           f"wanted {FORMAT_VERSION}; it is left alone")
    return part


def verify_package(out, plan, n_jobs, progress):
    """Re-read a whole package: every byte of model.gguf and of every blob, and the keys and tensors of router.gguf.

    Raises ConvertError at the first difference, in the order of the layers: layer, expert, tensor, byte, found
    and wanted.
    """
    if read_router(out).value("edgemoe.fingerprint") != plan.fingerprint:
        # Every blob names the fingerprint, so all headers would differ: say where the sources do.
        require_same_source(out, plan, n_jobs, progress)

    def check(task):
        return _compare_task(out, task, plan.source)

    blobs = blob_tasks(plan)
    results = run_tasks(blobs + model_tasks(plan), check, n_jobs, "verifying", progress)
    _compare_router(out, plan, results[:len(blobs)])


def require_same_source(out, plan, n_jobs, progress):
    """Raise ConvertError, naming the first difference, unless package OUT was made from exactly this source.

    Reads the whole source, and of the package its sidecar, model.gguf and the sizes of the blobs.
    """
    found = read_router(out)
    wanted = _router_keys(plan, [0] * plan.n_expert)
    _compare_keys(found, wanted, NOT_COMPARED + ("edgemoe.fingerprint", "edgemoe.crc32", "edgemoe.source.bytes"))
    blobs = blob_tasks(plan)
    stored = dict(zip((task.path for task in blobs), found.value("edgemoe.crc32", [])))

    def check(task):
        if not task.is_blob:
            return _compare_task(out, task, plan.source)
        path = Path(out, task.path)
        nbytes = path.stat().st_size if path.is_file() else 0
        if nbytes != task.nbytes:
            raise ConvertError(f"{path}: {task.where}: found {nbytes} bytes, wanted {task.nbytes}")
        crc = crc_of(task.pieces(), plan.source)
        if crc != stored.get(task.path):
            raise ConvertError(f"{out}: {task.where}: the source's CRC-32 is {crc:08x}, "
                               f"the package has {stored.get(task.path, 0):08x}")
        return crc

    run_tasks(blobs + model_tasks(plan), check, n_jobs, "comparing", progress)
    _compare_keys(found, wanted, NOT_COMPARED + ("edgemoe.crc32",))


def _compare_task(out, task, source):
    path = Path(out, task.path)
    try:
        return compare(path, task.at, task.pieces(), source, task.is_blob)
    except Difference as difference:
        raise ConvertError(f"{path}: {task.where}: {difference}") from None


def _compare_router(out, plan, crcs):
    found = read_router(out)
    _compare_keys(found, _router_keys(plan, crcs), NOT_COMPARED)
    tensors = {tensor.name: tensor for tensor in found.tensors}
    ghost = tensors.get("edgemoe.ghost")
    with open(found.path, "rb") as file:
        if not ghost or os.pread(file.fileno(), ghost.nbytes, ghost.offset) != plan.ghost:
            raise ConvertError(f"{found.path}: tensor edgemoe.ghost is not the header that the source gives")
        for wanted in plan.routers:
            copy = tensors.get(wanted.name)
            if not copy or (copy.type, copy.shape) != (wanted.type, wanted.shape):
                raise ConvertError(f"{found.path}: tensor {wanted.name}: found {copy and copy.shape}, "
                                   f"wanted {wanted.shape} of type {wanted.type.name}")
            at = copy.offset
            for view, _ in stream([tensor_piece(wanted)], plan.source):
                if os.pread(file.fileno(), len(view), at) != view:
                    raise ConvertError(f"{found.path}: tensor {wanted.name}: differs from the source "
                                       f"after byte {at - copy.offset}")
                at += len(view)


def _router_keys(plan, crcs):
    pieces = router_pieces(plan, crcs)
    header, nbytes = pieces[0].data, sum(piece.nbytes for piece in pieces)
    return read_part("router.gguf", lambda offset, n: header[offset:offset + n], nbytes).keys


def _compare_keys(found, wanted, skipped):
    """Later tools may add keys; those of the converter must be as it writes them."""
    for key, entry in wanted.items():
        if key in skipped:
            continue
        values = found.value(key), entry.value()
        if values[0] == values[1]:
            continue
        where = f"{found.path}: {key}"
        if isinstance(values[0], list) and isinstance(values[1], list) and len(values[0]) == len(values[1]):
            index = next(i for i, pair in enumerate(zip(*values)) if pair[0] != pair[1])
            where, values = f"{where}[{index}]", (values[0][index], values[1][index])
        raise ConvertError(f"{where}: found {values[0]!r}, wanted {values[1]!r}")
