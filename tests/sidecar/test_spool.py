"""The audit spool: on record before served, chained, durable, shipped once."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.record.spool import Spool, SpoolSettings, SpoolSync
from strongroom.canonical import canonical_json
from strongroom.control import SpoolEvent
from strongroom.errors import Unavailable
from strongroom.spool import FIRST_COUNT, event_hash, event_json, genesis
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.control_plane import FakeControlPlane
from tests.sidecar.harness import harness

GENESIS = "30fd1b6a2691530d0fb6e96640c68e49a6c4476d9abc633c0f3f3b82282e584a"
FIRST = "095b61ddcfcadaab3285a9da165cc863898ee66060b0f17c5196d0e2e7be8c2d"
SETTINGS = SpoolSettings(SpoolSync.WITHIN_SECOND, 1 << 20, 1 << 16)


def event(request: str = "r") -> SpoolEvent:
    return SpoolEvent(0, "", "2026-01-01T00:00:00.000000+00:00", "lookup", "hit", request=request)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """A disk that is full, for this process: writes beyond `nbytes` fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def written(directory: Path) -> list[SpoolEvent]:
    lines = []
    for path in sorted(directory.glob("*.jsonl")):
        lines += path.read_bytes().splitlines()[1:]
    return [msgspec.json.decode(line, type=SpoolEvent) for line in lines]


def test_the_chain_is_what_it_was_in_every_spool_written_before() -> None:
    """The service checks with the same two functions; these values are in files on nodes."""
    assert genesis("spool-000001") == GENESIS
    assert event_hash(replace(event("r1"), count=1, prev=GENESIS, namespaces=["b" * 64])) == FIRST
    assert genesis("spool-000002") != GENESIS


@given(
    st.lists(st.text(max_size=20), min_size=13, max_size=13),
    st.lists(st.integers(0, 2**63 - 1), min_size=4, max_size=4),
    st.lists(st.text(max_size=8), max_size=3),
)
def test_an_event_has_the_canonical_bytes_whatever_is_in_it(
    texts: list[str], numbers: list[int], namespaces: list[str]
) -> None:
    """The spool has an encoder of its own; the chain is over the bytes that the format says."""
    words, counts = iter(texts), iter(numbers)
    made = SpoolEvent(
        **{
            each.name: namespaces
            if each.name == "namespaces"
            else next(counts if each.type == "int" else words)
            for each in fields(SpoolEvent)
        }  # type: ignore[arg-type]
    )
    assert event_json(made, made.count, made.prev) == canonical_json(asdict(made))
    numbered = replace(made, count=7, prev="before")
    assert event_json(made, 7, "before") == canonical_json(asdict(numbered))


async def test_events_are_counted_and_chained(tmp_path: Path) -> None:
    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        await asyncio.gather(*(spool.record(event(str(number))) for number in range(50)))
        name = spool.spool
    events = written(tmp_path / "s")
    assert [each.count for each in events] == list(range(FIRST_COUNT, FIRST_COUNT + 50))
    previous = genesis(name)
    for each in events:
        assert each.prev == previous
        previous = event_hash(each)


async def test_a_record_is_in_the_file_when_record_returns(tmp_path: Path) -> None:
    for sync in SpoolSync:
        directory = tmp_path / sync.value
        async with Spool.opened(directory, replace(SETTINGS, sync=sync)) as spool:
            await spool.record(event("now"))
            assert [each.request for each in written(directory)] == ["now"]


async def test_a_record_does_not_wait_for_another_thread_nor_for_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.record.spool._SYNC_S", 0)
    real, syncing, go_on = os.fsync, threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        go_on.wait(20)
        real(descriptor)

    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        monkeypatch.setattr("os.fsync", slow)
        recording = spool.record(event("at once"))
        with pytest.raises(StopIteration):  # it has ended without waiting for anything
            recording.send(None)
        while not syncing.is_set():
            await asyncio.sleep(0)
        recording = spool.record(event("beside a sync"))
        with pytest.raises(StopIteration):
            recording.send(None)
        assert [each.request for each in written(tmp_path / "s")] == ["at once", "beside a sync"]
        go_on.set()
    events = written(tmp_path / "s")
    assert events[1].prev == event_hash(events[0])


async def test_after_two_writes_that_the_disk_made_wait_others_go_by_the_thread_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, now_s = os.write, [100.0]

    def slow(descriptor: int, line: bytes) -> int:
        now_s[0] += 0.006
        return real(descriptor, line)

    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        monkeypatch.setattr(spool, "_clock", lambda: now_s[0])
        with monkeypatch.context() as patched:
            patched.setattr("os.write", slow)
            # One alone may have waited for the interpreter.
            for name in ("slow", "slow too"):
                recording = spool.record(event(name))
                with pytest.raises(StopIteration):
                    recording.send(None)
        recording = spool.record(event("by the thread"))
        written_by_thread = recording.send(None)
        assert written_by_thread is not None
        assert [each.request for each in written(tmp_path / "s")] == ["slow", "slow too"]
        recording.close()
        now_s[0] += 1.0
        while spool.next_count < FIRST_COUNT + 3:
            await asyncio.sleep(0)
        recording = spool.record(event("at once again"))
        with pytest.raises(StopIteration):
            recording.send(None)
    requests = [each.request for each in written(tmp_path / "s")]
    assert requests == ["slow", "slow too", "by the thread", "at once again"]


async def test_a_slow_write_between_quick_ones_sends_nobody_to_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, waits_s = [100.0], itertools.cycle([0.006, 0.0])
    real = os.write

    def sometimes_slow(descriptor: int, line: bytes) -> int:
        now_s[0] += next(waits_s)
        return real(descriptor, line)

    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        monkeypatch.setattr(spool, "_clock", lambda: now_s[0])
        monkeypatch.setattr("os.write", sometimes_slow)
        for number in range(6):
            recording = spool.record(event(str(number)))
            with pytest.raises(StopIteration):
                recording.send(None)


async def test_synced_before_serving_a_record_waits_for_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go_on = os.fsync, threading.Event()

    def slow(descriptor: int) -> None:
        go_on.wait(20)
        real(descriptor)

    settings = replace(SETTINGS, sync=SpoolSync.BEFORE_SERVING)
    async with Spool.opened(tmp_path / "s", settings) as spool:
        monkeypatch.setattr("os.fsync", slow)
        async with asyncio.TaskGroup() as tasks:
            recording = tasks.create_task(spool.record(event()))
            while not written(tmp_path / "s"):
                await asyncio.sleep(0)
            assert not recording.done()
            go_on.set()


async def test_a_line_that_can_neither_be_written_nor_cut_off_ends_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written line that cannot be taken back: nothing may follow it in that file."""

    def failing(_: int, __: int) -> None:
        raise OSError(errno.EIO, "failed")

    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        await spool.record(event("before"))
        with monkeypatch.context() as patched, file_size_limit(spool.size_bytes + 10):
            patched.setattr("os.ftruncate", failing)
            with pytest.raises(Unavailable):
                await spool.record(event("lost"))
        torn = min((tmp_path / "s").glob("*.jsonl")).read_bytes()
        await spool.record(event("after"))
        first, second = sorted((tmp_path / "s").glob("*.jsonl"))
        assert first.read_bytes() == torn
        assert b"after" in second.read_bytes()
        assert spool.next_count == FIRST_COUNT + 2


async def test_the_chain_goes_on_over_restarts_and_segments(tmp_path: Path) -> None:
    settings = replace(SETTINGS, segment_bytes=1)
    for _ in range(3):
        async with Spool.opened(tmp_path / "s", settings) as spool:
            await spool.record(event())
            await spool.record(event())
            assert spool.statistics().pending == spool.next_count - FIRST_COUNT
    events = written(tmp_path / "s")
    assert [each.count for each in events] == list(range(FIRST_COUNT, FIRST_COUNT + 6))
    assert len(list((tmp_path / "s").glob("*.jsonl"))) > 3


async def test_a_torn_last_line_is_cut_off_and_the_spool_goes_on(tmp_path: Path) -> None:
    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        await spool.record(event("kept"))
        name = spool.spool
    (path,) = (tmp_path / "s").glob("*.jsonl")
    path.write_bytes(path.read_bytes() + b'{"count": 2, "torn')
    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        assert spool.spool == name
        await spool.record(event("next"))
    assert [each.request for each in written(tmp_path / "s")] == ["kept", "next"]


@pytest.mark.parametrize("damage", ["changed", "removed", "reordered"])
async def test_any_other_damage_sets_the_spool_aside_and_begins_another(
    tmp_path: Path, damage: str
) -> None:
    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        for number in range(4):
            await spool.record(event(str(number)))
        name = spool.spool
    (path,) = (tmp_path / "s").glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    match damage:
        case "changed":
            lines[2] = lines[2].replace(b'"hit"', b'"mis"')
        case "removed":
            del lines[2]
        case _:
            lines[2], lines[3] = lines[3], lines[2]
    path.write_bytes(b"".join(lines))
    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        assert spool.spool != name
        assert spool.next_count == FIRST_COUNT
    assert list((tmp_path / "s").glob("damaged-*/*.jsonl"))


async def test_a_disk_that_fills_up_blocks_and_recovers_without_a_gap(tmp_path: Path) -> None:
    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        await spool.record(event("before"))
        with file_size_limit(spool.size_bytes + 10):
            with pytest.raises(Unavailable):
                await spool.record(event("lost"))
            assert spool.statistics().blocked
        await spool.record(event("after"))
        assert not spool.statistics().blocked
    assert [each.request for each in written(tmp_path / "s")] == ["before", "after"]


async def test_nothing_is_served_while_no_record_can_be_written(stored: Stored) -> None:
    world = stored.world
    assert await stored.hits("before", stored.grant()) == 288
    with file_size_limit(world.sidecar.spool._segments[-1].size):
        assert await stored.hits("blocked", stored.grant()) == -1
        assert not (await stored.engine.load("before", 0, 288)).ok
    assert await stored.hits("after", stored.grant()) == 288
    assert (await stored.engine.load("after", 0, 288)).ok


async def test_a_spool_that_the_service_does_not_take_blocks_serving_when_full(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, spool_bytes_max=4096) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert (await engine.open("good", granted)).allowed
        world.control._intake = lambda body: httpx.Response(503)  # type: ignore[method-assign]
        number = 0
        while (await engine.open(f"r{number}", granted)).allowed:
            number += 1
        assert 0 < number < 40


async def test_the_service_gets_every_event_once_and_in_order_over_restarts(
    tmp_path: Path,
) -> None:
    control = FakeControlPlane()
    tenant = control.tenant()
    for life in range(3):
        async with harness(tmp_path, control, spool_segment_bytes=4096) as world:
            engine = await world.engine()
            for number in range(10):
                await engine.open(f"{life}-{number}", control.grant(tenant, PROMPT))
    async with harness(tmp_path, control, spool_segment_bytes=4096) as world:
        while world.sidecar.spool.statistics().pending:
            await control.news.wait()
        name = world.sidecar.spool.spool
        assert len(list(world.sidecar.spool._directory.glob("*.jsonl"))) <= 2
    assert [each.count for each in control.events] == list(
        range(FIRST_COUNT, FIRST_COUNT + len(control.events))
    )
    assert len(control.events) >= 30
    assert control.events[0].prev == genesis(name)
    for before, after in zip(control.events, control.events[1:], strict=False):
        assert after.prev == event_hash(before)


async def test_a_record_that_comes_while_a_failed_segment_is_given_up_goes_into_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fails at a sync, and a record arrives before the file is closed."""
    monkeypatch.setattr("sidecar.record.spool._SYNC_S", 0)
    go_on = threading.Event()
    real, failures = os.fsync, [OSError(errno.EIO, "failed")]

    def failing(descriptor: int) -> None:
        if failures:
            spool._executor.submit(go_on.wait, 10)  # what the spool does next waits
            raise failures.pop()
        real(descriptor)

    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        monkeypatch.setattr("os.fsync", failing)
        await spool.record(event("before"))
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            while not spool.statistics().blocked:
                await asyncio.sleep(0)
            tasks.create_task(spool.record(event("meanwhile")))
            for _ in range(20):
                await asyncio.sleep(0)
            go_on.set()
        assert spool.statistics().write_failures == 1
        assert not spool.statistics().blocked
        assert len(spool._segments) == 2
    assert [each.request for each in written(tmp_path / "s")] == ["before", "meanwhile"]


async def test_an_event_that_cannot_be_written_down_is_refused_alone(tmp_path: Path) -> None:
    async with Spool.opened(tmp_path / "s", SETTINGS) as spool:
        with pytest.raises(Unavailable):
            await spool.record(event("\ud800"))  # no text of any encoding
        await spool.record(event("next"))
        assert spool.statistics().write_failures == 1
    assert [each.request for each in written(tmp_path / "s")] == ["next"]


async def test_a_segment_that_cannot_be_read_delays_the_shipping_alone(stored: Stored) -> None:
    world, plane = stored.world, stored.world.control
    path = world.sidecar.spool._segments[0].path
    path.rename(path.with_suffix(".aside"))
    await stored.hits("unread", stored.grant())
    async with asyncio.timeout(20):
        while not world.sidecar.shipper.failures:
            await asyncio.sleep(0.01)
        assert await stored.hits("served", stored.grant()) == 288
        path.with_suffix(".aside").rename(path)
        while world.sidecar.spool.statistics().pending:
            await asyncio.sleep(0.01)
    assert {"unread", "served"} <= {each.request for each in plane.events}


async def test_a_segment_that_cannot_be_removed_still_counts(tmp_path: Path) -> None:
    settings = replace(SETTINGS, segment_bytes=1)
    async with Spool.opened(tmp_path / "s", settings) as spool:
        for number in range(4):
            await spool.record(event(str(number)))
        path, size = spool._segments[0].path, spool.size_bytes
        path.rename(path.with_suffix(".aside"))
        path.mkdir()
        with pytest.raises(OSError, match="directory"):
            await spool.release(spool.next_count)
        assert spool.size_bytes == size
        path.rmdir()
        path.with_suffix(".aside").rename(path)
        await spool.release(spool.next_count)
        assert spool.size_bytes < size
        assert len(list((tmp_path / "s").glob("*.jsonl"))) == 1
