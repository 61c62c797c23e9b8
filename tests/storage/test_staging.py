"""Staging, the arena, and the room in them."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import resource
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.extents import Extents, rounded
from storage.memfd import MemoryFile
from storage.slabs import Slabs, size_class
from storage.staging import Staging


def test_a_released_slot_is_zeroed_before_it_is_handed_out_again() -> None:
    staging = Staging(16384)
    slot = staging.reserve(5000)
    assert slot is not None
    staging.view[slot.offset : slot.offset + 5000] = b"x" * 5000
    staging.release(slot)
    assert bytes(staging.view) == bytes(16384)
    assert staging.used_bytes == 0
    staging.close()


def test_slots_are_page_aligned_and_end_where_there_is_no_room() -> None:
    staging = Staging(16384)
    first, second = staging.reserve(1), staging.reserve(8192)
    assert first is not None
    assert second is not None
    assert (first.offset % 4096, second.offset % 4096) == (0, 0)
    assert staging.reserve(8192) is None
    staging.release(first)
    staging.release(second)
    assert staging.reserve(16384) is not None
    staging.close()


def test_a_slot_is_released_once() -> None:
    staging = Staging(16384)
    slot = staging.reserve(1)
    assert slot is not None
    staging.release(slot)
    with pytest.raises(ValueError, match="not out"):
        staging.release(slot)
    staging.close()


def test_the_engine_that_maps_staging_can_neither_shrink_nor_grow_it() -> None:
    staging = Staging(16384)
    seals = fcntl.fcntl(staging.fd, fcntl.F_GET_SEALS)
    assert seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) == seals != 0
    for size in (0, 32768):
        with pytest.raises(PermissionError):
            os.ftruncate(staging.fd, size)
    other = mmap.mmap(staging.fd, 16384)
    other[:4] = b"save"
    assert bytes(staging.view[:4]) == b"save"
    other.close()
    staging.close()


def test_closing_zeroes_what_is_still_out() -> None:
    staging = Staging(16384)
    slot = staging.reserve(4096)
    assert slot is not None
    staging.view[slot.offset : slot.offset + 4] = b"left"
    other = mmap.mmap(staging.fd, 16384)
    staging.close()
    assert other[:] == bytes(16384)
    other.close()


def test_memory_that_may_not_be_locked_is_used_all_the_same_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with caplog.at_level(logging.WARNING):
        file = MemoryFile("test", 64 * 1024 * 1024, lock=True)
    assert file.locked != ("not locked" in caplog.text)
    file.view[:4] = b"fine"
    file.close()
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_MEMLOCK)


def vm_flags(name: str) -> list[str]:
    with open("/proc/self/smaps") as smaps:  # noqa: PTH123 - procfs
        text = smaps.read()
    part = text[text.index(f"memfd:{name}") :]
    return part[part.index("VmFlags:") :].splitlines()[0].split()


def test_staging_is_locked_in_memory_where_that_is_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        staging = Staging(16384)
    assert staging.locked == ("lo" in vm_flags("strongroom-staging"))
    assert staging.locked != ("strongroom-staging: 16384 bytes are not locked" in caplog.text)
    staging.close()


def test_staging_that_may_not_be_locked_works_all_the_same_and_the_log_says_so() -> None:
    """In a process of its own, without the capability or the limit to lock anything."""
    code = """
import logging, resource
logging.basicConfig(format="%(levelname)s %(message)s")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
import ctypes
class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
class Data(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.capset(ctypes.byref(Header(0x20080522, 0)), (Data * 2)()) == 0
from storage.staging import Staging
staging = Staging(16384)
slot = staging.reserve(4)
staging.bytes_of(slot)[:] = b"fine"
print(staging.locked, bytes(staging.view[:4]))
staging.release(slot)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False b'fine'\n"
    assert "WARNING strongroom-staging: 16384 bytes are not locked in memory" in done.stderr


def test_the_arena_is_left_out_of_core_dumps() -> None:
    file = MemoryFile("strongroom-dd", 8192)
    file.view[0] = 1
    assert "dd" in vm_flags("strongroom-dd")
    file.close()


@pytest.mark.parametrize("make", [Extents, Slabs])
@settings(deadline=None)  # the machine is shared
@given(data=st.data())
def test_room_is_never_given_twice_and_all_of_it_comes_back(
    make: type[Extents | Slabs], data: st.DataObject
) -> None:
    room = make(64 * 4096)
    out: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        if bool(out) and data.draw(st.booleans()):
            offset = data.draw(st.sampled_from(sorted(out)))
            room.give_back(offset, out.pop(offset))
            continue
        length = data.draw(st.integers(1, 20 * 4096))
        taken = room.take(length)
        if taken is None:
            continue
        assert taken % 4096 == 0
        assert 0 <= taken <= room.capacity - length
        for other, size in out.items():
            assert taken + rounded(length) <= other or other + rounded(size) <= taken
        out[taken] = length
    for offset, length in out.items():
        room.give_back(offset, length)
    assert room.used_bytes == 0
    assert room.take(64 * 4096) == 0


@pytest.mark.parametrize("make", [Extents, Slabs])
def test_room_that_is_free_already_is_not_taken_back(make: type[Extents | Slabs]) -> None:
    room = make(64 * 4096)
    offset = room.take(4096)
    assert offset is not None
    room.give_back(offset, 4096)
    with pytest.raises(ValueError, match="free already"):
        room.give_back(offset, 4096)


@settings(deadline=None)  # the machine is shared
@given(st.integers(1, 2**34))
def test_a_size_class_wastes_at_most_an_eighth(length: int) -> None:
    assert length <= size_class(length) <= max(rounded(length), length * 9 // 8 + 1)
    assert size_class(size_class(length)) == size_class(length)
    assert size_class(length) % 4096 == 0
