"""Regions: sealed, private, given back."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os

import pytest

from dpurt.errors import ConfigError
from dpurt.fabric import MemoryRegion
from dpurt.fabric.region import MemfdRegion, map_readonly


@pytest.fixture
def region():
    region = MemfdRegion(5, "test", 5000, huge_pages=False)
    yield region
    region.close()


def test_a_region_is_whole_zeroed_pages(region):
    assert isinstance(region, MemoryRegion)
    assert region.size == len(region.view) == 8192
    assert bytes(region.view) == bytes(8192)
    assert region.address % mmap.PAGESIZE == 0


def test_a_region_can_be_neither_shrunk_nor_grown_nor_opened_by_others(region):
    for size in (4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(region.fd).st_mode & 0o777 == 0o600


def test_a_readonly_descriptor_sees_writes_and_allows_none(region):
    fd = region.open_readonly()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, region.size)
        with map_readonly(fd, region.size) as seen:
            region.view[:5] = b"bytes"
            assert seen[:5] == b"bytes"
            with pytest.raises(TypeError):
                seen[0] = 1
    finally:
        os.close(fd)


def test_close_is_idempotent_and_returns_the_descriptor():
    region = MemfdRegion(1, "test", 4096, huge_pages=False)
    fd = region.fd
    assert region.close()
    assert region.close()
    assert region.is_closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"):
        _ = region.view


def test_close_with_a_view_held_leaves_that_view_alone():
    region = MemfdRegion(1, "test", 4096, huge_pages=False)
    held = region.view[10:20]
    assert not region.close()
    held[:] = b"0123456789"
    assert bytes(held) == b"0123456789"


def test_without_huge_pages_the_reason_is_kept_or_the_demand_fails():
    auto = MemfdRegion(1, "auto", 4096)
    if auto.has_huge_pages:
        assert auto.huge_pages_refused is None
        assert auto.size % auto.page_bytes == 0
    else:
        assert "huge pages" in str(auto.huge_pages_refused)
        with pytest.raises(ConfigError, match="huge pages required"):
            MemfdRegion(1, "insists", 4096, huge_pages=True)
    auto.close()


def test_memory_that_cannot_be_had_is_said_at_start_and_leaks_no_descriptor():
    gc.collect()  # what earlier tests left to it
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="cannot allocate"):
        MemfdRegion(1, "huge", 1 << 62, huge_pages=False)
    with pytest.raises(ValueError, match="size"):
        MemfdRegion(1, "empty", 0)
    assert os.listdir("/proc/self/fd") == before


def test_a_large_region_is_put_together_from_huge_pages_or_says_why_not():
    region = MemfdRegion(1, "large", (4 << 20) + 5000)
    assert bytes(region.view) == bytes(region.size)
    assert os.fstat(region.fd).st_blocks * 512 >= region.size
    assert region.has_huge_pages or region.collapse_refused or transparent_huge_pages() >= 4 << 20
    region.close()


def transparent_huge_pages():
    """Bytes of shared memory in them, in the whole machine."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemHugePages:"))
