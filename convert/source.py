"""Reads the headers of a stacked GGUF, one file or shards, and serves bytes of its tensors.

Tensor data is never mapped: mapped pages count as our memory, and a file that is cut while we run would kill
the process. Everything goes through pread, and every length is checked against the file before it is used.
"""

import os
import re
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from .errors import ConvertError

# A tokenizer of 250k tokens takes about 15 MB. The header is held in memory, so a file cannot ask for more.
MAX_HEADER_BYTES = 256 << 20
READ_AHEAD_BYTES = 1 << 20
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class KeyValue:
    """One metadata entry. `record` is the whole entry as it lies in the file; the value begins at `value_at` in it."""

    key: str
    type: GGUFValueType
    record: memoryview
    value_at: int

    def value(self):
        """The entry as int, float, bool, str or a list of them."""
        if self.type is not GGUFValueType.ARRAY:
            return _value(self.type, self.record, self.value_at)[0]
        item_type, count = struct.unpack_from("<IQ", self.record, self.value_at)
        if item_type in SCALARS:
            return list(struct.unpack_from(f"<{count}{SCALARS[item_type]}", self.record, self.value_at + 12))
        items, at = [], self.value_at + 12
        for _ in range(count):
            item, at = _value(item_type, self.record, at)
            items.append(item)
        return items


def _value(kind, record, at):
    if kind == GGUFValueType.STRING:
        end = at + 8 + struct.unpack_from("<Q", record, at)[0]
        return str(record[at + 8:end], "utf-8", "replace"), end
    form = "<" + SCALARS[kind]
    return struct.unpack_from(form, record, at)[0], at + struct.calcsize(form)


@dataclass(frozen=True)
class Tensor:
    """One tensor: `shape` in ggml order, `offset` counted in bytes from the start of file `part`."""

    name: str
    type: GGMLQuantizationType
    shape: tuple
    part: int
    offset: int
    nbytes: int
    info: bytes  # its entry in the header, without the offset at the end


@dataclass(frozen=True)
class Part:
    """The header of one GGUF file. Its data section starts at `data_start`; a file without tensors may end before."""

    path: Path
    number: int  # its split.no, 0 for a model that is not split
    nbytes: int
    keys: dict
    tensors: list
    alignment: int
    data_start: int

    def value(self, key, default=None):
        return self.keys[key].value() if key in self.keys else default


class Source:
    """The open files of a model in split order. `read_into` may be called from any number of threads."""

    def __init__(self, parts, fds):
        self.parts = parts
        self.tensors = [tensor for part in parts for tensor in part.tensors]
        self.nbytes = sum(part.nbytes for part in parts)
        self._fds = fds
        self._opened_as = self._state()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for fd in self._fds:
            os.close(fd)

    def read_into(self, view, part, offset):
        """Fill `view` with the bytes of file `part` from `offset`. Raises ConvertError where the file ends early."""
        read_exact(self._fds[part], view, offset, self.parts[part].path)

    def check_unchanged(self):
        """Raise ConvertError if a source file was written to since it was opened."""
        for part, before, now in zip(self.parts, self._opened_as, self._state()):
            if before != now:
                raise ConvertError(f"{part.path}: changed while it was read; run again when nothing writes to it")

    def _state(self):
        return [(info.st_size, info.st_mtime_ns) for info in map(os.fstat, self._fds)]


def read_exact(fd, view, offset, path):
    """Fill `view` from `offset` of `fd`. Raises ConvertError where the file ends early; `path` is for the message."""
    done = os.preadv(fd, [view], offset)
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise ConvertError(f"{path}: ends at byte {offset + done}, wanted {len(view) - done} bytes more")
        done += n


class _Header:
    """Walks a GGUF header. `data` holds the file from its start as far as was needed, plus some read-ahead."""

    def __init__(self, read, nbytes, path):
        self.read, self.nbytes, self.path = read, nbytes, path
        self.data = bytearray()
        self.at = 0

    def need(self, n, what):
        """Make the next n bytes available at `self.at`."""
        end = self.at + n
        if end > self.nbytes:
            raise self.error(f"{what} needs {n} bytes, the file has {max(0, self.nbytes - self.at)} left")
        if end > MAX_HEADER_BYTES:
            raise self.error(f"{what} ends at byte {end}, wanted a header of at most {MAX_HEADER_BYTES} bytes")
        while end > len(self.data):
            want = min(max(end - len(self.data), READ_AHEAD_BYTES), self.nbytes - len(self.data))
            piece = self.read(len(self.data), want)
            if not piece:
                raise self.error(f"{what}: the file ends at byte {len(self.data)}")
            self.data += piece

    def number(self, form, what):
        size = struct.calcsize("<" + form)
        self.need(size, what)
        value, = struct.unpack_from("<" + form, self.data, self.at)
        self.at += size
        return value

    def text(self, what):
        n = self.number("Q", f"length of {what}")
        self.need(n, what)
        raw = bytes(self.data[self.at:self.at + n])
        try:
            value = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is {raw[:40]!r}, wanted UTF-8") from None
        self.at += n
        return value

    def skip(self, n, what):
        self.need(n, what)
        self.at += n

    def skip_strings(self, count, what):
        # Runs once per token of the vocabulary, so it checks bounds only where it leaves what has been read.
        length = struct.Struct("<Q").unpack_from
        data, at = self.data, self.at
        for _ in range(count):
            try:
                at += 8 + length(data, at)[0]
            except (struct.error, OverflowError):
                self.at = at
                self.need(8, what)
                at += 8 + length(data, at)[0]
        self.at = at
        self.need(0, what)

    def error(self, text):
        return ConvertError(f"{self.path}: header at byte {self.at}: {text}")


def read_part(path, read, nbytes):
    """Parse the header of one GGUF file of `nbytes` bytes; `read(offset, n)` returns up to n bytes from offset.

    Raises ConvertError, with the place in the file, for anything that is not little-endian GGUF 2 or 3 or that
    points outside the file.
    """
    header = _Header(read, nbytes, path)
    n_tensors, n_keys = _preamble(header)
    spans = _keys(header, n_keys)
    infos = [_tensor_info(header) for _ in range(n_tensors)]
    end = header.at
    data = memoryview(bytes(header.data))
    keys = {key: KeyValue(key, kind, data[start:stop], value_at - start) for key, kind, start, value_at, stop in spans}

    alignment = keys["general.alignment"].value() if "general.alignment" in keys else 32
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ConvertError(f"{path}: general.alignment is {alignment!r}, wanted a power of two up to {MAX_ALIGNMENT}")
    data_start = -(-end // alignment) * alignment
    number = _split_number(path, keys)
    tensors = [_place(path, number, info, data_start, alignment, nbytes, data) for info in infos]
    _refuse_twins(path, tensors)
    return Part(Path(path), number, nbytes, keys, tensors, alignment, data_start)


def _split_number(path, keys):
    found = [keys[key].value() if key in keys else 0 for key in ("split.no", "split.count")]
    if not all(type(value) is int for value in found):
        raise ConvertError(f"{path}: split.no and split.count are {found[0]!r} and {found[1]!r}, wanted whole numbers")
    return found[0] if found[1] > 1 else 0


def _preamble(header):
    header.need(min(4, header.nbytes), "magic")
    magic = bytes(header.data[:4])
    if magic != b"GGUF":
        raise ConvertError(f"{header.path}: not a GGUF file: begins with {magic!r}, wanted b'GGUF'")
    header.at = 4
    version = header.number("I", "version")
    if version and version & 0xFFFF == 0:
        raise ConvertError(f"{header.path}: big-endian GGUF (version {version:#010x}), wanted little-endian")
    if version not in (2, 3):
        raise ConvertError(f"{header.path}: GGUF version {version}, wanted 2 or 3")
    return header.number("Q", "tensor count"), header.number("Q", "key count")


def _keys(header, count):
    """Spans of the metadata entries: (key, type, start, start of the value, end)."""
    spans, seen = [], set()
    for index in range(count):
        start = header.at
        key = header.text(f"key {index}")
        if key in seen:
            raise header.error(f"key {key} occurs twice")
        seen.add(key)
        kind = header.number("I", f"type of {key}")
        value_at = header.at
        _skip_value(header, kind, key)
        spans.append((key, GGUFValueType(kind), start, value_at, header.at))
    return spans


def _skip_value(header, kind, key):
    if kind in SCALARS:
        header.skip(struct.calcsize("<" + SCALARS[kind]), key)
    elif kind == GGUFValueType.STRING:
        header.skip_strings(1, key)
    elif kind == GGUFValueType.ARRAY:
        item = header.number("I", f"item type of {key}")
        count = header.number("Q", f"length of {key}")
        if item == GGUFValueType.STRING:
            header.skip_strings(count, key)
        elif item in SCALARS:
            header.skip(count * struct.calcsize("<" + SCALARS[item]), key)
        else:
            raise header.error(f"{key} is an array of type {item}, wanted numbers or strings")
    else:
        raise header.error(f"{key} has type {kind}, wanted a type of GGUF 3")


def _tensor_info(header):
    start = header.at
    name = header.text("tensor name")
    n_dims = header.number("I", f"dimensions of {name}")
    if n_dims > MAX_DIMS:
        raise header.error(f"tensor {name} has {n_dims} dimensions, wanted at most {MAX_DIMS}")
    shape = tuple(header.number("Q", f"shape of {name}") for _ in range(n_dims))
    kind = header.number("I", f"type of {name}")
    stop = header.at
    return name, kind, shape, header.number("Q", f"offset of {name}"), start, stop


def _place(path, number, info, data_start, alignment, file_bytes, data):
    """The Tensor of a header entry, once its data is known to lie inside the file."""
    name, kind, shape, offset, start, stop = info
    where = f"{path}: tensor {name}"
    try:
        kind = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ConvertError(f"{where}: type {kind} is unknown to this version of the gguf library") from None
    row = shape[0] if shape else 1
    if row % block:
        raise ConvertError(f"{where}: rows of {row} values, wanted a multiple of {block} for {kind.name}")
    if offset % alignment:
        raise ConvertError(f"{where}: data at offset {offset}, wanted a multiple of {alignment}")
    nbytes = prod(shape) // block * block_bytes
    begin = data_start + offset
    if begin + nbytes > file_bytes:
        raise ConvertError(f"{where}: data ends at byte {begin + nbytes}, file has {file_bytes} bytes")
    return Tensor(name, kind, shape, number, begin, nbytes, bytes(data[start:stop]))


def _refuse_twins(path, tensors):
    seen = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ConvertError(f"{path}: tensor {tensor.name} occurs twice")
        seen.add(tensor.name)


def open_source(path):
    """Open the model that `path` is or belongs to, given any of its shards.

    Returns a Source with all parts in the order of their `split.no`. Raises ConvertError for a file that is not
    what it must be and for shards that are missing or do not belong together.
    """
    opened = []
    try:
        first = _open_part(Path(path), opened)
        count = first.value("split.count", 1)
        if count not in (0, 1):
            _open_shards(first, count, opened)
        # Names only locate the files: `split.no` decides their order.
        opened.sort(key=lambda pair: pair[0].number)
        parts = [part for part, _ in opened]
        _refuse_twins(parts[0].path, [tensor for part in parts for tensor in part.tensors])
        return Source(parts, [fd for _, fd in opened])
    except BaseException:
        for _, fd in opened:
            os.close(fd)
        raise


def _open_part(path, opened):
    # Look before opening: open() on a pipe would wait for a writer.
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            found = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise ConvertError(f"{path}: is {found}, wanted a GGUF file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as err:
        raise ConvertError(f"{path}: {err.strerror}") from None
    try:
        part = read_part(path, lambda offset, n: os.pread(fd, n, offset), os.fstat(fd).st_size)
    except BaseException:
        os.close(fd)
        raise
    opened.append((part, fd))
    return part


def _open_shards(first, count, opened):
    """Add the other parts of a split model to `opened`, which holds `first`."""
    name = SHARD_NAME.fullmatch(first.path.name)
    if not name or int(name["count"]) != count:
        raise ConvertError(f"{first.path}: is part {first.number + 1} of {count}, "
                           f"wanted a name that ends in -{first.number + 1:05d}-of-{count:05d}.gguf to find the others")
    if first.number >= count:
        raise ConvertError(f"{first.path}: split.no is {first.number}, wanted less than split.count, {count}")
    by_number = {first.number: first.path}
    for number in range(count):
        path = first.path.with_name(f"{name['stem']}-{number + 1:05d}-of-{count:05d}.gguf")
        if path == first.path:
            continue
        if not path.exists():
            raise ConvertError(f"{path}: part {number + 1} of {count} is missing")
        part = _open_part(path, opened)
        if part.value("split.count") != count:
            raise ConvertError(f"{path}: split.count is {part.value('split.count')}, wanted {count}")
        if part.number in by_number or part.number not in range(count):
            other = by_number.get(part.number)
            taken = f", as in {other.name}" if other else ""
            raise ConvertError(f"{path}: split.no is {part.number}{taken}, wanted {number}")
        by_number[part.number] = path
    n_tensors = sum(len(part.tensors) for part, _ in opened)
    for part, _ in opened:
        wanted = part.value("split.tensors.count", n_tensors)
        if wanted != n_tensors:
            raise ConvertError(f"{part.path}: split.tensors.count is {wanted}, the parts have {n_tensors} tensors")
