"""The fault-injecting wrapper does what its script says, once, and nothing else."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.faulty import Call, Fail, Faulty, Flip, Hold, Made, Short, Torn
from storage.memory import aligned

PAGES = 4
SIZE = PAGES * 4096


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(opened, b"o" * SIZE, 0)
    yield opened
    os.close(opened)


def page(fill: bytes, count: int = 1) -> memoryview:
    made = aligned(4096 * count)
    made[:] = fill * (4096 * count)
    return made


def content(fd: int) -> bytes:
    return os.pread(fd, SIZE, 0)


def test_what_is_not_spoilt_goes_through_and_is_counted(fd: int) -> None:
    faulty = Faulty()
    assert faulty.pwritev(fd, [page(b"n"), page(b"m")], 4096) == 8192
    into = [page(b"-"), page(b"-")]
    assert faulty.preadv(fd, into, 4096) == 8192
    assert [bytes(part[:1]) for part in into] == [b"n", b"m"]
    assert faulty.calls == [
        Made(Call.WRITE, fd, 4096, 8192, 2),
        Made(Call.READ, fd, 4096, 8192, 2),
    ]
    assert (faulty.count(Call.WRITE), faulty.count(Call.SYNC)) == (1, 0)


def test_a_script_skips_and_ends(fd: int) -> None:
    faulty = Faulty()
    faulty.script(Call.WRITE, Fail(errno.ENOSPC), skip=1, times=2)
    ends = []
    for _ in range(5):
        try:
            faulty.pwritev(fd, [page(b"n")], 0)
        except OSError as error:
            ends.append(error.errno)
        else:
            ends.append(None)
    assert ends == [None, errno.ENOSPC, errno.ENOSPC, None, None]


def test_it_applies_where_it_is_said_and_until_it_is_cleared(fd: int) -> None:
    faulty = Faulty()
    faulty.script(Call.READ, Fail(errno.EIO), times=None, where=lambda made: made.offset == 4096)
    for _ in range(3):
        assert faulty.preadv(fd, [page(b"-")], 0) == 4096
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            faulty.preadv(fd, [page(b"-")], 4096)
    faulty.clear()
    assert faulty.preadv(fd, [page(b"-")], 4096) == 4096


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8191, 8192])
def test_a_torn_write_reaches_the_file_to_the_byte(fd: int, nbytes: int) -> None:
    faulty = Faulty()
    faulty.script(Call.WRITE, Torn(nbytes))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        faulty.pwritev(fd, [page(b"n"), page(b"n")], 4096)
    assert content(fd) == b"o" * 4096 + b"n" * nbytes + b"o" * (SIZE - 4096 - nbytes)


def test_a_short_call_says_how_much_it_did(fd: int) -> None:
    faulty = Faulty()
    faulty.script(Call.WRITE, Short(8000))
    assert faulty.pwritev(fd, [page(b"n", 3)], 0) == 4096
    assert content(fd) == b"n" * 4096 + b"o" * (SIZE - 4096)
    into = [page(b"-"), page(b"-")]
    faulty.script(Call.READ, Short(4096))
    assert faulty.preadv(fd, into, 0) == 4096
    assert bytes(into[1]) == b"-" * 4096


def test_a_flip_changes_one_byte_of_what_passes_and_not_the_callers(fd: int) -> None:
    faulty = Faulty()
    data = [page(b"n"), page(b"n")]
    faulty.script(Call.WRITE, Flip(5000, 0x80))
    faulty.pwritev(fd, data, 0)
    assert content(fd)[:8192].count(b"n") == 8191
    assert content(fd)[5000] == ord("n") ^ 0x80
    assert bytes(data[1]) == b"n" * 4096
    into = [page(b"-"), page(b"-")]
    faulty.script(Call.READ, Flip(1))
    faulty.preadv(fd, into, 8192)
    assert into[0][1] == ord("o") ^ 1
    assert content(fd)[8193] == ord("o"), "the file itself is whole"


def test_a_held_call_waits_until_it_is_let_go(fd: int) -> None:
    faulty = Faulty()
    slow = Hold()
    faulty.script(Call.SYNC, slow)
    thread = threading.Thread(target=faulty.sync, args=(fd,))
    thread.start()
    assert slow.entered.wait(10)
    assert thread.is_alive()
    faulty.sync(fd)  # another call passes meanwhile
    slow.let_go.set()
    thread.join(10)
    assert not thread.is_alive()


def test_free_space_is_the_file_systems_unless_it_is_said(tmp_path: Path) -> None:
    faulty = Faulty()
    assert faulty.free_bytes(tmp_path) > 0
    faulty.free = 17
    assert faulty.free_bytes(tmp_path) == 17


def test_allocating_fails_as_told(fd: int) -> None:
    faulty = Faulty()
    faulty.script(Call.ALLOCATE, Fail(errno.ENOSPC))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        faulty.allocate(fd, SIZE)
    faulty.allocate(fd, SIZE)
