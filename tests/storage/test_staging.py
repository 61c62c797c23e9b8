"""Staging, the arena, and the room in them."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.extents import Extents, rounded
from storage.memfd import MemoryFile, MemoryOptions, check_numa_node
from storage.memory import wipe
from storage.staging import Staging
from storage.tiers.host import HostTier
from strongroom.errors import Misuse


def test_a_released_slot_is_zeroed_before_it_is_handed_out_again() -> None:
    staging = Staging(16384)
    slot = staging.reserve(5000)
    assert slot is not None
    staging.view[slot.offset : slot.offset + 5000] = b"x" * 5000
    staging.release(slot)
    assert (staging.out_bytes, staging.unwiped_bytes) == (0, 8192)
    # What was used is nobody's until it was wiped.
    other = staging.reserve(5000)
    assert other is not None
    assert other.offset != slot.offset
    assert staging.reserve(1) is None
    used = staging.take_used()
    assert staging.reserve(1) is None
    for room in used:
        wipe(staging.bytes_of(room))
    staging.wiped(used)
    again = staging.reserve(5000)
    assert again == slot
    assert bytes(staging.view) == bytes(16384)
    staging.close()


def test_a_used_slot_is_reused_for_what_overwrites_it_and_keeps_nothing_behind_it() -> None:
    staging = Staging(65536)
    first, second = staging.reserve(8000), staging.reserve(8000)
    assert first is not None
    assert second is not None
    staging.view[:] = b"x" * 65536
    staging.release(first)
    staging.release(second)
    reused = staging.reuse(5000)
    assert reused is not None
    assert reused.offset == second.offset, "the latest, whose bytes are in the caches"
    room = bytes(staging.view[reused.offset : reused.offset + 8192])
    assert room == b"x" * 5000 + bytes(3192)
    other = staging.reuse(9000)
    assert other is not None
    assert other.offset not in {first.offset, second.offset}, "of another size"
    assert [slot.offset for slot in staging.take_used()] == [first.offset]
    staging.close()


def test_used_slots_are_taken_by_age_and_once() -> None:
    staging = Staging(65536)
    slots = [staging.reserve(4096) for _ in range(3)]
    for now, slot in enumerate(slots):
        assert slot is not None
        staging.release(slot, float(now))
    assert [slot.offset for slot in staging.take_used(1.0)] == [0, 4096]
    assert staging.take_used(1.0) == []
    assert [slot.offset for slot in staging.take_used()] == [8192]
    assert staging.unwiped_bytes == 0
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
    staging.wiped(staging.take_used())
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
    used = staging.reserve(4096)
    assert used is not None
    staging.view[used.offset : used.offset + 4] = b"used"
    staging.release(used)
    other = mmap.mmap(staging.fd, 16384)
    staging.close()
    assert other[:] == bytes(16384)
    other.close()


def test_memory_that_may_not_be_locked_is_used_all_the_same_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with caplog.at_level(logging.WARNING):
        file = MemoryFile("test", 64 * 1024 * 1024)
        file.settle()
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
from storage.tiers.host import HostTier
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


def test_a_memory_file_is_not_inherited_by_a_forked_child() -> None:
    file = MemoryFile("strongroom-dc", 8192)
    file.view[0] = 1
    assert "dc" in vm_flags("strongroom-dc")
    file.close()


def test_huge_pages_are_asked_for_and_the_log_says_where_there_are_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        file = MemoryFile("strongroom-hg", 4 * 1024 * 1024, MemoryOptions(lock=False))
    flags = vm_flags("strongroom-hg")
    assert file.huge == ("ht" in flags)
    assert file.huge or "hg" in flags
    assert file.huge != ("strongroom-hg: no huge pages from the pool" in caplog.text)
    file.close()
    small = MemoryFile("strongroom-hs", 8192)
    assert not small.huge
    assert "hg" not in vm_flags("strongroom-hs")
    small.close()
    without = MemoryFile("strongroom-hn", 4 * 1024 * 1024, MemoryOptions(huge_pages=False))
    assert not {"hg", "ht"} & set(vm_flags("strongroom-hn"))
    without.close()


@pytest.mark.parametrize(("mode", "said"), [("always [never]", 1), ("[always] never", 0)])
async def test_an_operator_is_told_once_at_start_that_there_are_no_huge_pages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    said: int,
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(mode)
    monkeypatch.setattr("storage.memfd._SHMEM_HUGE", setting)
    monkeypatch.setattr(MemoryFile, "_open_huge", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        tier = HostTier(4 * 1024 * 1024, time.monotonic_ns, pin_ns=1, lock_memory=False)
        for _ in range(2):  # connections, each with staging of its own
            Staging(4 * 1024 * 1024, MemoryOptions(lock=False)).close()
    await tier.close()
    assert caplog.text.count("no huge pages") == said


def resident_bytes(name: str) -> int:
    with open("/proc/self/smaps") as smaps:  # noqa: PTH123 - procfs
        text = smaps.read()
    part = text[text.index(f"memfd:{name}") :]
    return int(part[part.index("Rss:") :].split()[1]) * 1024


@pytest.mark.parametrize("lock", [True, False])
def test_a_settled_file_has_every_page_before_its_first_use(*, lock: bool) -> None:
    file = MemoryFile("strongroom-pf", 1024 * 1024, MemoryOptions(lock=lock, huge_pages=False))
    assert resident_bytes("strongroom-pf") == 0
    file.settle()
    assert resident_bytes("strongroom-pf") == 1024 * 1024
    assert not any(file.view)
    file.close()


def test_settling_ends_early_when_told() -> None:
    stop = threading.Event()
    stop.set()
    file = MemoryFile("strongroom-st", 1024 * 1024, MemoryOptions(huge_pages=False))
    file.settle(stop)
    assert resident_bytes("strongroom-st") == 0
    assert not file.locked
    file.close()


def test_a_numa_node_that_is_there_is_used_and_another_is_named() -> None:
    node = int(Path("/sys/devices/system/node/online").read_text().split("-")[0].split(",")[0])
    check_numa_node(node)
    file = MemoryFile("strongroom-nn", 65536, MemoryOptions(lock=False, numa_node=node))
    file.settle()
    with open("/proc/self/numa_maps") as maps:  # noqa: PTH123 - procfs
        (line,) = [line for line in maps if "strongroom-nn" in line]
    assert f"bind:{node}" in line
    file.close()
    with pytest.raises(Misuse, match="NUMA node 999 is not there; online: "):
        MemoryFile("strongroom-nn", 65536, MemoryOptions(numa_node=999))


@settings(deadline=None)  # the machine is shared
@given(data=st.data())
def test_room_is_never_given_twice_and_all_of_it_comes_back(
    data: st.DataObject,
) -> None:
    room = Extents(64 * 4096)
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


def test_room_that_is_free_already_is_not_taken_back() -> None:
    room = Extents(64 * 4096)
    offset = room.take(4096)
    assert offset is not None
    room.give_back(offset, 4096)
    with pytest.raises(ValueError, match="free already"):
        room.give_back(offset, 4096)


class Naive:
    """Best fit, the lowest among equals, over a map of every page."""

    def __init__(self, pages: int) -> None:
        self._free = [True] * pages

    def take(self, pages: int) -> int | None:
        runs, start = [], 0
        for at in range(len(self._free) + 1):
            if at == len(self._free) or not self._free[at]:
                if at - start >= pages:
                    runs.append((at - start, start))
                start = at + 1
        if not runs:
            return None
        _, first = min(runs)
        self._free[first : first + pages] = [False] * pages
        return first

    def give_back(self, first: int, pages: int) -> None:
        self._free[first : first + pages] = [True] * pages


@settings(deadline=None)  # the machine is shared
@given(data=st.data())
def test_room_is_the_best_fit_and_the_lowest_whatever_was_taken_and_given_back(
    data: st.DataObject,
) -> None:
    room, naive = Extents(48 * 4096), Naive(48)
    out: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 80))):
        if bool(out) and data.draw(st.booleans()):
            first = data.draw(st.sampled_from(sorted(out)))
            naive.give_back(first, out[first])
            room.give_back(first * 4096, out.pop(first) * 4096)
            continue
        pages = data.draw(st.integers(1, 12))
        first_page = naive.take(pages)
        taken = room.take(pages * 4096)
        assert taken == (None if first_page is None else first_page * 4096)
        if first_page is not None:
            out[first_page] = pages
    assert room.used_bytes == sum(out.values()) * 4096


def test_stale_entries_are_bounded_by_what_is_free() -> None:
    room = Extents(4096 * 1024)
    for _ in range(2000):
        first, second = room.take(4096), room.take(8192)
        assert first is not None
        assert second is not None
        room.give_back(first, 4096)
        room.give_back(second, 8192)
    entries = sum(len(starts.heap) for starts in room._starts.values())
    assert entries <= 64


def test_what_was_not_taken_so_is_not_taken_back() -> None:
    room = Extents(64 * 4096)
    offset = room.take(3 * 4096)
    assert offset is not None
    for wrong in ((offset + 4096, 4096), (offset, 4096), (offset + 3 * 4096, 4096)):
        with pytest.raises(ValueError, match="free already"):
            room.give_back(*wrong)
    room.give_back(offset, 3 * 4096)
