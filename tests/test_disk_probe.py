"""The probe reads only what is there; the estimate is arithmetic on made-up rates. Nothing here depends on how fast a machine is."""

import errno
import os
from types import SimpleNamespace

import pytest
from test_cache_plan import GIB, MIB, layer
from test_ram_plan import plan

from edgemoe import disk_probe
from edgemoe.disk_probe import PAGE_BYTES, Rates, files_of, piece_bytes, read_files, read_memory
from edgemoe.errors import ModelError
from edgemoe.estimate import HITS, estimate, expected, expected_hit, speed


@pytest.fixture
def seen(monkeypatch):
    """Every read: (size of the file, offset, bytes wanted, bytes got)."""
    reads, preadv = [], os.preadv

    def spy(descriptor, buffers, offset):
        got = preadv(descriptor, buffers, offset)
        reads.append((os.fstat(descriptor).st_size, offset, len(buffers[0]), got))
        return got

    monkeypatch.setattr(os, "preadv", spy)
    return reads


def file(path, n_bytes):
    path.write_bytes(b"x" * n_bytes)
    return path


def test_reads_stay_inside_the_files(seen, tmp_path):
    files = [file(tmp_path / f"{n}", n) for n in (PAGE_BYTES, 10 * PAGE_BYTES + 1, 1_000_003)]
    for paths in (files, *([f] for f in files)):
        rate, direct = read_files(paths, 3 * PAGE_BYTES + 5, 0.02)
        assert rate > 0
    assert {size for size, *_ in seen} == {f.stat().st_size for f in files}
    for size, offset, wanted, got in seen:
        assert offset % PAGE_BYTES == 0 and offset + wanted <= size and got == wanted
        assert wanted % PAGE_BYTES == 0 or not direct
    assert max(wanted for _, _, wanted, _ in seen) == 4 * PAGE_BYTES


def test_without_direct_reads_through_the_page_cache(monkeypatch, seen, tmp_path):
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *rest: _refuse(path) if flags & os.O_DIRECT else real(path, flags, *rest))
    rate, direct = read_files([file(tmp_path / "m", 50_000)], 10_000, 0.02)
    assert rate > 0 and not direct and all(offset + wanted <= 50_000 for _, offset, wanted, _ in seen)


def _refuse(path):
    raise OSError(errno.EINVAL, "Invalid argument", path)


def test_a_file_shorter_than_a_page(seen, tmp_path):
    rate, direct = read_files([file(tmp_path / "m", 100)], 10_000, 0.02)
    assert rate > 0 and not direct and {(offset, got) for _, offset, _, got in seen} == {(0, 100)}


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ModelError, match="missing: No such file"):
        read_files([tmp_path / "missing"], 10_000, 0.02)
    with pytest.raises(ModelError, match="empty: too short to be read"):
        read_files([file(tmp_path / "empty", 0)], 10_000, 0.02)


def test_no_file_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    read_files([file(tmp_path / "m", 50_000)], 10_000, 0.02)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_read_at_once(tmp_path):
    stacked = SimpleNamespace(kind="stacked", files=["a.gguf", "b.gguf"], layers=[layer(bytes_per_expert=3 * MIB), layer(bytes_per_expert=6 * MIB)])
    assert piece_bytes(stacked) == MIB * 3 // 2 and [f.name for f in files_of(stacked)] == ["a.gguf", "b.gguf"]
    package = SimpleNamespace(kind="package", path=tmp_path, files=["dense.gguf"], layers=stacked.layers)
    for expert in range(100):
        blob = tmp_path / "experts" / "L0000" / f"E{expert:04}.gguf"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.touch()
    assert piece_bytes(package) == MIB * 9 // 2
    assert len(files_of(package)) == disk_probe.MOST_FILES and files_of(package) == files_of(package)


def test_memory_is_read(monkeypatch):
    monkeypatch.setattr(disk_probe, "MEMORY_BYTES", 8 << 20)
    assert read_memory(0.01) > 0


# --- the estimate: 1 GiB of 4, 15 of 64 experts; a token uses 512 MiB of experts and 100 MiB of dense weights


def test_hits_between_the_measured_points():
    assert expected_hit(0) == 0 and expected_hit(1) == 1
    assert expected_hit(0.375) == pytest.approx((0.600 + 0.898) / 2)
    assert all(hit >= share for share, hit in HITS)  # never worse than random
    hits = [expected_hit(n / 200) for n in range(201)]
    assert hits == sorted(hits)


def test_a_slow_disk_is_what_binds():
    e = estimate(plan(), Rates(64 * MIB, 10 * GIB, True))
    hit = expected_hit(15 / 64)
    assert e.hit == hit and e.miss_bytes == pytest.approx((1 - hit) * 512 * MIB)
    assert e.disk_s == pytest.approx((1 - hit) * 8) and e.compute_s == pytest.approx(0.612 * 1000 / 1024 / 10, rel=0.001)
    # One after the other: 612 MiB at 10 GiB/s, and the disk.
    assert 1 / e.tokens_per_s == pytest.approx(e.disk_s + 612 / 10240) and e.bound == "disk-bound"
    assert 1 / e.random_tokens_per_s == pytest.approx(8 * (1 - 15 / 64) + 612 / 10240)
    assert "disk-bound" in e.line() and "disk-bound" in e.report() and "random" in e.line()


def test_a_fast_disk_is_not():
    e = estimate(plan(), Rates(1000 * GIB, GIB, True))
    assert e.bound == "memory-bound" and 1 / e.tokens_per_s == pytest.approx(e.compute_s, rel=0.002) and e.random_tokens_per_s == pytest.approx(e.tokens_per_s, rel=0.002)


@pytest.mark.parametrize("n, text", [(0.04567, "0.046"), (0.5, "0.5"), (9.96, "10"), (99.4, "99"), (99.6, "100"), (1234.5, "1234")])
def test_a_speed_has_two_digits(n, text):
    assert speed(n) == f"{text} tok/s"


def test_nothing_is_measured_where_nothing_is_read():
    assert expected(None, plan("mapped")) is None


def test_the_line_says_how_the_disk_was_read():
    assert Rates(GIB, 2 * GIB, True).line() == "disk 1.0 GiB/s (past the page cache), memory 2.0 GiB/s"
    assert "this file system has no direct reads" in Rates(GIB, GIB, False).line()
