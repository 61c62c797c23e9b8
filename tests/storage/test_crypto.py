"""Blocks over several threads: one bad segment leaves nothing of the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from storage.crypto import Cipher
from storage.envelope import Opener, Sealer
from storage.header import (
    HEADER_BYTES,
    TAG_BYTES,
    Header,
    read_header,
    record_bytes,
    segment_spans,
)
from storage.memory import aligned
from storage.workers import Workers, crypto_workers
from strongroom.errors import Corrupt
from tests.storage.support import KEYS, context, plaintext

WANTED = context(segments=(300_000,) * 8)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = crypto_workers(4, 64)
    yield made
    made.close()


async def test_a_block_is_split_over_every_thread_and_comes_back(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = workers.run

    async def counting(*jobs: Callable[[], None], always: bool = False) -> None:
        runs.append(len(jobs))
        await run(*jobs, always=always)

    monkeypatch.setattr(workers, "run", counting)
    cipher = Cipher(workers)
    record = aligned(record_bytes(WANTED.segment_bytes))
    header = await cipher.seal(WANTED, KEYS, plaintext(WANTED), record)
    out = memoryview(bytearray(WANTED.plaintext_bytes))
    assert await cipher.open(WANTED, KEYS, record, out) == header
    assert out == plaintext(WANTED)
    assert runs == [4, 4]


@pytest.mark.parametrize("bad", range(8))
async def test_one_bad_segment_wipes_what_every_thread_has_put_out(
    workers: Workers, bad: int
) -> None:
    cipher = Cipher(workers)
    record = aligned(record_bytes(WANTED.segment_bytes))
    await cipher.seal(WANTED, KEYS, plaintext(WANTED), record)
    record[list(segment_spans(WANTED.segment_bytes))[bad][1]] ^= 1
    out = memoryview(bytearray(b"\xaa" * WANTED.plaintext_bytes))
    with pytest.raises(Corrupt):
        await cipher.open(WANTED, KEYS, record, out)
    assert bytes(out) == bytes(len(out))


class Stopped:
    """Lets the crypto threads open segment after segment only as the test says.

    Segments are still taken by the threads in their own order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns = threading.Semaphore(0)
        plain = Opener.segments

        def segments(
            opener: Opener,
            indexes: Iterable[int],
            record: memoryview,
            plaintext: memoryview,
            opened: Callable[[int], None],
        ) -> None:
            def one_by_one() -> Iterator[int]:
                for index in indexes:
                    assert self._turns.acquire(timeout=20)
                    yield index

            plain(opener, one_by_one(), record, plaintext, opened)

        monkeypatch.setattr(Opener, "segments", segments)

    def let(self, segments: int) -> None:
        self._turns.release(segments)


LAYERED = context(segments=(1024 * 1024,) * 8)


async def sealed_layers(cipher: Cipher) -> memoryview:
    record = aligned(record_bytes(LAYERED.segment_bytes))
    await cipher.seal(LAYERED, KEYS, plaintext(LAYERED), record)
    return record


async def test_layers_are_told_in_order_while_the_others_are_closed_and_are_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = crypto_workers(1, 64)
    cipher = Cipher(one)
    record = await sealed_layers(cipher)
    wanted = plaintext(LAYERED)
    stopped = Stopped(monkeypatch)
    out = memoryview(bytearray(b"\xaa" * len(wanted)))
    told: list[int] = []
    news = asyncio.Event()

    def opened(count: int, header: Header) -> None:
        assert header.context == LAYERED
        told.append(count)
        edge = count * 1024 * 1024
        assert out[:edge] == wanted[:edge]
        assert bytes(out[edge + 1024 * 1024 :]) == b"\xaa" * len(out[edge + 1024 * 1024 :])
        news.set()

    async with asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(cipher.open(LAYERED, KEYS, record, out, opened))
        for layers in range(1, 8):
            stopped.let(1)
            async with asyncio.timeout(20):
                while told != list(range(1, layers + 1)):
                    news.clear()
                    await news.wait()
        assert not opening.done()
        stopped.let(1)
    assert told == list(range(1, 8)), "that all are good is said by the return"
    assert out == wanted
    one.close()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("bad", range(8))
async def test_a_bad_tag_in_layer_k_is_told_by_nothing_beyond_it_and_everything_is_wiped(
    bad: int, threads: int
) -> None:
    pool = crypto_workers(threads, 64)
    cipher = Cipher(pool)
    record = await sealed_layers(cipher)
    record[list(segment_spans(LAYERED.segment_bytes))[bad][1]] ^= 1
    told: list[int] = []

    def opened(count: int, _: Header) -> None:
        told.append(count)

    out = memoryview(bytearray(b"\xaa" * LAYERED.plaintext_bytes))
    with pytest.raises(Corrupt):
        await cipher.open(LAYERED, KEYS, record, out, opened)
    assert told == sorted(set(told))
    assert max(told, default=0) <= bad
    said = len(told)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(told) == said, "nothing is told once it has failed"
    assert bytes(out) == bytes(len(out))
    pool.close()


async def test_after_a_bad_segment_nothing_is_left_for_the_other_threads(
    workers: Workers,
) -> None:
    record = await sealed_layers(Cipher(workers))
    record[HEADER_BYTES + 2 * (1024 * 1024 + TAG_BYTES)] ^= 1
    opener = Opener.begin(read_header(record), LAYERED, KEYS.data)
    out = memoryview(bytearray(LAYERED.plaintext_bytes))
    shared = iter(range(8))
    with pytest.raises(Corrupt):
        opener.segments(shared, record, out)
    assert list(shared) == []
    assert bytes(out) == bytes(len(out))
    sealer = Sealer.begin(LAYERED, KEYS.data, 1)
    shared = iter((0, 1, 99, 2))
    with pytest.raises(IndexError):
        sealer.segments(shared, plaintext(LAYERED), record)
    assert list(shared) == []


async def test_a_block_that_is_opened_wakes_the_loop_a_few_times_at_most(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = context(segments=(65536,) * 256)
    cipher = Cipher(workers)
    record = aligned(record_bytes(many.segment_bytes))
    await cipher.seal(many, KEYS, plaintext(many), record)
    wakes: list[object] = []
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe

    def counting(callback: Callable[[], None]) -> object:
        wakes.append(callback)
        return wake(callback)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    out = memoryview(bytearray(many.plaintext_bytes))
    await cipher.open(many, KEYS, record, out, lambda _, __: None)
    # Up to eight tells, some twice where two threads see the same step, and the end.
    assert 1 <= len(wakes) <= 8 * workers.threads + 1
    monkeypatch.undo()


async def test_an_opening_that_is_cancelled_ends_wiped_and_tells_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = crypto_workers(1, 64)
    cipher = Cipher(one)
    record = await sealed_layers(cipher)
    stopped = Stopped(monkeypatch)
    told: list[int] = []
    news = asyncio.Event()

    def opened(count: int, header: Header) -> None:
        assert header.context == LAYERED
        told.append(count)
        news.set()

    out = memoryview(bytearray(b"\xaa" * LAYERED.plaintext_bytes))
    async with asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(cipher.open(LAYERED, KEYS, record, out, opened))
        stopped.let(2)
        await news.wait()
        opening.cancel()
        await asyncio.sleep(0)
        assert not opening.done(), "the thread still writes"
        stopped.let(6)
    assert opening.cancelled()
    assert bytes(out) == bytes(len(out))
    said = list(told)
    await asyncio.sleep(0)
    assert told == said
    one.close()


async def test_sealings_are_numbered_on_from_what_a_restart_found(workers: Workers) -> None:
    cipher = Cipher(workers, last_sequence=41)
    record = aligned(record_bytes(WANTED.segment_bytes))
    assert (await cipher.seal(WANTED, KEYS, plaintext(WANTED), record)).sequence == 42
    assert (await cipher.seal(WANTED, KEYS, plaintext(WANTED), record)).sequence == 43


async def test_a_small_block_costs_one_thread(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = workers.run

    async def counting(*jobs: Callable[[], None], always: bool = False) -> None:
        runs.append(len(jobs))
        await run(*jobs, always=always)

    monkeypatch.setattr(workers, "run", counting)
    record = aligned(record_bytes(context().segment_bytes))
    await Cipher(workers).seal(context(), KEYS, plaintext(context()), record)
    assert runs == [1]
