"""Blocks over several threads: one bad segment leaves nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from storage.crypto import Cipher
from storage.header import record_bytes, segment_spans
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
