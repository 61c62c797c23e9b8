"""The connection, over a real socket to a sidecar of the tests."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strongroom.clock import boot_ns
from strongroom.connectors.client import LinkTimes, SidecarLink, map_staging, read_token
from strongroom.errors import Misuse, ProtocolViolation
from strongroom.wire.frames import (
    Digests,
    Finish,
    Hello,
    KVFormatFields,
    LayoutFields,
    Lease,
    Open,
    SidecarFrame,
    Verdict,
    Welcome,
)
from tests.connectors.sidecar_double import TOKEN, SidecarDouble

DIGESTS = Digests("0" * 64, "1" * 64, "2" * 64)
FORMAT = KVFormatFields("float32", "none", 2, 1, 64, "full", "rope-x")
LAYOUT = LayoutFields("vllm-cpu-packed", "vec", 32, (256, 256), 1, 0, 1, 0)
QUICK = LinkTimes(heartbeat_s=0.05, silence_s=0.5)


def hello(role: str = "scheduler", token: str = TOKEN) -> Hello:
    return Hello(1, "engine", role, token, DIGESTS, FORMAT, LAYOUT)


class Listener:
    """Keeps what the IO thread hands over, and lets a test wait for it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sessions: list[tuple[Welcome, int]] = []
        self.frames: list[SidecarFrame] = []
        """Without leases, which come on their own."""
        self.leases: list[Lease] = []
        self.ends = 0
        self.due_calls = 0
        self.staging: mmap.mmap | None = None
        self.fail_on_frame = False

    def opened(self, welcome: Welcome, staging: mmap.mmap | None) -> None:
        with self.changed:
            self.staging = staging
            self.sessions.append((welcome, 0 if staging is None else len(staging)))
            self.changed.notify_all()

    def received(self, frame: SidecarFrame) -> None:
        with self.changed:
            if isinstance(frame, Lease):
                self.leases.append(frame)
                return
            self.frames.append(frame)
            self.changed.notify_all()
        if self.fail_on_frame:
            raise RuntimeError("a bug in the receiver")

    def closed(self) -> None:
        with self.changed:
            self.ends += 1
            self.changed.notify_all()

    def due(self, now_ns: int) -> int | None:
        with self.changed:
            self.due_calls += 1
            self.changed.notify_all()
        return now_ns + 50_000_000

    def wait(self, ready: Callable[[], bool]) -> bool:
        with self.changed:
            return self.changed.wait_for(ready, 10)


@pytest.fixture
def sidecar(short_dir: Path) -> Iterator[SidecarDouble]:
    with SidecarDouble(short_dir / "s", staging_bytes=65536) as double:
        yield double


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def link(sidecar: SidecarDouble, listener: Listener) -> Iterator[SidecarLink]:
    link = SidecarLink(sidecar.path, hello, listener, times=QUICK)
    yield link
    link.close()


def open_frame(request: str = "1", grant: str = "good") -> Open:
    return Open(request, grant, "", bytes(400), "none")


def test_a_session_opens_and_frames_go_both_ways(link: SidecarLink, listener: Listener) -> None:
    assert link.generation == 0
    link.start()
    assert link.wait_open(10)
    assert link.generation == 1
    assert link.send(open_frame())
    assert listener.wait(lambda: bool(listener.frames))
    assert listener.frames == [Verdict("1", True, 0, True)]


def test_a_worker_gets_staging_that_both_ends_map(
    sidecar: SidecarDouble, listener: Listener
) -> None:
    link = SidecarLink(sidecar.path, lambda: hello("worker"), listener, times=QUICK)
    link.start()
    assert link.wait_open(10)
    assert listener.sessions[0][1] == 65536
    link.close()
    assert listener.ends == 1


def test_nothing_is_taken_while_the_sidecar_is_away(short_dir: Path, listener: Listener) -> None:
    link = SidecarLink(short_dir / "nobody", hello, listener, times=QUICK)
    assert not link.send(open_frame())
    link.start()
    assert not link.wait_open(0.05)
    assert not link.send(open_frame())
    assert listener.wait(lambda: listener.due_calls > 0), "deadlines are served all the same"
    link.close()
    assert listener.sessions == []


def test_a_restarted_sidecar_is_found_and_gets_no_frame_of_before(
    sidecar: SidecarDouble, link: SidecarLink, listener: Listener
) -> None:
    link.start()
    assert link.wait_open(10)
    sidecar.close()
    assert listener.wait(lambda: listener.ends == 1)
    assert link.generation == 0
    assert not link.send(Finish("lost"))
    sidecar.restart()
    assert listener.wait(lambda: len(listener.sessions) == 2)
    assert link.wait_open(10)
    assert link.generation == 2
    assert link.send(open_frame("2"))
    assert listener.wait(lambda: bool(listener.frames))
    assert not sidecar.seen(Finish)


def test_a_token_that_is_not_accepted_opens_no_session(
    sidecar: SidecarDouble, listener: Listener
) -> None:
    link = SidecarLink(sidecar.path, lambda: hello(token="wrong"), listener, times=QUICK)
    link.start()
    assert not link.wait_open(0.3)
    link.close()
    assert listener.sessions == []


def test_bytes_that_are_no_frame_end_the_session_and_it_is_opened_anew(
    sidecar: SidecarDouble, link: SidecarLink, listener: Listener
) -> None:
    sidecar.faults.garbage_verdict = True
    link.start()
    assert link.wait_open(10)
    link.send(open_frame())
    assert listener.wait(lambda: listener.ends == 1 and len(listener.sessions) == 2)
    assert listener.frames == []


def test_a_silent_sidecar_is_taken_for_gone(short_dir: Path, listener: Listener) -> None:
    """It accepts, and neither greets nor answers: as a stopped process does."""
    with SidecarDouble(short_dir / "s") as sidecar:
        sidecar._answer = lambda *_: None  # type: ignore[method-assign]
        link = SidecarLink(sidecar.path, hello, listener, times=QUICK)
        link.start()
        assert link.wait_open(10)
        assert listener.wait(lambda: listener.ends == 1)
        link.close()


def test_a_sidecar_that_answers_pings_is_not_silent(link: SidecarLink, listener: Listener) -> None:
    link.start()
    assert link.wait_open(10)
    until = boot_ns() + 1_200_000_000
    assert listener.wait(lambda: boot_ns() > until)
    assert listener.ends == 0


def test_an_error_in_the_receiver_ends_the_session_and_not_the_thread(
    link: SidecarLink, listener: Listener
) -> None:
    listener.fail_on_frame = True
    link.start()
    assert link.wait_open(10)
    link.send(open_frame())
    assert listener.wait(lambda: listener.ends == 1)
    assert link.alive
    listener.fail_on_frame = False
    assert listener.wait(lambda: len(listener.sessions) == 2)


def test_staging_shorter_than_announced_opens_no_session(
    sidecar: SidecarDouble, listener: Listener
) -> None:
    sidecar.faults.staging_bytes = 1 << 20
    link = SidecarLink(sidecar.path, lambda: hello("worker"), listener, times=QUICK)
    link.start()
    assert not link.wait_open(0.3)
    link.close()
    assert listener.sessions == []


def test_staging_that_may_shrink_is_refused() -> None:
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ProtocolViolation):
        map_staging(descriptor, 4096)
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, 4096)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert len(map_staging(sealed, 4096)) == 4096


def test_a_descriptor_that_is_no_memfd_is_refused(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(ProtocolViolation):
        map_staging(descriptor, 4096)


def test_a_frame_that_cannot_be_encoded_is_not_sent_and_hurts_nobody(
    link: SidecarLink, listener: Listener
) -> None:
    link.start()
    assert link.wait_open(10)
    assert not link.send(open_frame(grant="\ud800"))
    assert not link.send(Open("1", "good", "", bytes(9 * 1024 * 1024), "none"))
    assert link.send(open_frame("2"))
    assert listener.wait(lambda: bool(listener.frames))


def test_a_large_frame_arrives_whole(
    sidecar: SidecarDouble, link: SidecarLink, listener: Listener
) -> None:
    link.start()
    assert link.wait_open(10)
    for number in range(4):
        assert link.send(Open(str(number), "good", "", bytes(4_000_000), "none"))
    assert sidecar.wait_for(Open, 4)
    assert [len(frame.tokens) for frame in sidecar.seen(Open) if isinstance(frame, Open)] == [
        4_000_000
    ] * 4


def test_what_a_lost_session_did_not_read_is_not_sent_to_the_next(
    sidecar: SidecarDouble,
    link: SidecarLink,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, stalled = sidecar._answer, threading.Event()

    def stall(*arguments: Any) -> None:
        stalled.wait(10)
        answer(*arguments)

    monkeypatch.setattr(sidecar, "_answer", stall)
    link.start()
    assert link.wait_open(10)
    for number in range(4):
        link.send(Open(str(number), "good", "", bytes(4_000_000), "none"))
    sidecar.drop()
    assert listener.wait(lambda: len(listener.sessions) == 2)
    monkeypatch.setattr(sidecar, "_answer", answer)
    stalled.set()
    assert link.wait_open(10)
    assert link.send(open_frame("new"))
    assert listener.wait(lambda: Verdict("new", True, 0, True) in listener.frames)
    assert len(listener.sessions) == 2


def test_who_accepts_and_does_not_welcome_is_given_up_sooner_than_a_session(
    short_dir: Path, listener: Listener
) -> None:
    """As a sidecar that ends or starts does; the next attempt finds the one that serves."""
    with SidecarDouble(short_dir / "s") as sidecar:
        sidecar.faults.no_welcome = 1
        times = LinkTimes(heartbeat_s=0.05, silence_s=60, welcome_s=0.2)
        link = SidecarLink(sidecar.path, hello, listener, times=times)
        link.start()
        assert link.wait_open(5)
        assert len(sidecar.seen(Hello)) == 2
        link.close()


def test_a_sidecar_slow_to_welcome_is_waited_for_longer_at_each_attempt(
    short_dir: Path, listener: Listener
) -> None:
    with SidecarDouble(short_dir / "s") as sidecar:
        sidecar.faults.welcome_after_s = 0.5
        times = LinkTimes(heartbeat_s=0.05, silence_s=60, welcome_s=0.1)
        link = SidecarLink(sidecar.path, hello, listener, times=times)
        link.start()
        assert link.wait_open(10)
        assert len(sidecar.seen(Hello)) > 1
        link.close()


def test_staging_stays_out_of_the_engines_core_dumps() -> None:
    """The mark is of each mapping: the one the sidecar set on its own does not count here."""
    descriptor = os.memfd_create("undumped", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with map_staging(descriptor, 4096):
        entries = Path("/proc/self/smaps").read_text().split("memfd:undumped")[1:]
        flags = [entry.split("VmFlags:")[1].splitlines()[0].split() for entry in entries]
    assert len(flags) == 1
    assert "dd" in flags[0]


def test_staging_shorter_than_it_is_said_to_be_is_refused() -> None:
    descriptor = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ProtocolViolation):
        map_staging(descriptor, 8192)


def test_the_token_is_read_as_text_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert read_token(path) == "secret"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(Misuse):
        read_token(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(Misuse):
        read_token(path)
