"""The TinyLFU sketch and the ghosts: small, forgetful, and right often enough."""

from __future__ import annotations

import random  # noqa: TID251 - a seeded generator, so that a failure repeats
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.block import BlockAddress
from storage.compose import StoreSettings, open_store
from storage.fence import Fence
from storage.frequency import COUNT_MAX, Frequency
from storage.ghosts import Ghosts
from storage.stages import Candidate, Unwanted, Wanted
from tests.storage.support import KEYS, context, plaintext


def key(number: int) -> bytes:
    return context(number).address.pack()


def estimate(sketch: Frequency, number: int) -> int:
    """What the next use would be counted on top of."""
    a, b, c, d = sketch._places(key(number))
    first, second = sketch._rows
    return min(first[a] & 15, first[b] >> 4, second[c] & 15, second[d] >> 4)


@given(st.lists(st.integers(0, 30), max_size=120))
def test_an_estimate_is_never_too_low_before_the_first_halving(uses: list[int]) -> None:
    sketch = Frequency(width=64)
    for number in uses:
        sketch.count(key(number))
    for number in range(31):
        assert estimate(sketch, number) >= min(uses.count(number), COUNT_MAX)


def test_estimates_are_close_at_full_load() -> None:
    sketch = Frequency(width=4096)
    draw = random.Random(1)
    uses = {number: draw.randint(1, 4) for number in range(2000)}
    for number, count in uses.items():
        for _ in range(count):
            sketch.count(key(number))
    wrong = sum(estimate(sketch, number) != count for number, count in uses.items())
    assert wrong < 0.05 * len(uses)
    strangers = sum(estimate(sketch, number) > 0 for number in range(10_000, 12_000))
    assert strangers < 0.1 * 2000


def test_a_counter_stops_at_fifteen() -> None:
    sketch = Frequency()
    assert [sketch.count(key(1)) for _ in range(20)][-1] == COUNT_MAX


def test_what_was_often_used_is_forgotten_in_time() -> None:
    sketch = Frequency(width=64)
    for _ in range(COUNT_MAX):
        sketch.count(key(1))
    assert estimate(sketch, 1) == COUNT_MAX
    for number in range(10 * sketch.width):
        sketch.count(key(1000 + number % 8))
    assert estimate(sketch, 1) <= COUNT_MAX // 2
    for number in range(20 * sketch.width):
        sketch.count(key(1000 + number % 8))
    assert estimate(sketch, 1) <= COUNT_MAX // 8


def test_a_sketch_takes_two_bytes_a_counter_of_a_row() -> None:
    sketch = Frequency(width=1 << 16)
    assert sum(sys.getsizeof(row) for row in sketch._rows) < 2.01 * sketch.width


@pytest.mark.parametrize("proven", [True, False])
def test_a_ghost_is_known_once_and_by_its_kind(proven: bool) -> None:
    ghosts = Ghosts()
    assert ghosts.pop(key(1)) is None
    ghosts.put(key(1), proven=proven)
    assert ghosts.pop(key(1)) is proven
    assert ghosts.pop(key(1)) is None


def test_most_of_what_left_lately_is_known_and_few_strangers_are() -> None:
    ghosts = Ghosts()
    ghosts.widen(2000)
    for number in range(2000):
        ghosts.put(key(number), proven=bool(number % 2))
    strangers = sum(ghosts.pop(key(number)) is not None for number in range(50_000, 54_000))
    known = sum(ghosts.pop(key(number)) is bool(number % 2) for number in range(1000, 2000))
    assert known > 700
    assert strangers < 0.03 * 4000


def test_ghosts_that_widen_are_still_known() -> None:
    ghosts = Ghosts()
    for number in range(100):
        ghosts.put(key(number), proven=True)
    ghosts.widen(10_000)
    assert sum(ghosts.pop(key(number)) is True for number in range(100)) > 90


# Where it is used: candidates for NVMe are counted as they are saved


class Listening:
    """Wants everything, and notes what it was told of each candidate."""

    def __init__(self) -> None:
        self.uses: list[int] = []

    async def judge(self, candidate: Candidate) -> Wanted | Unwanted:
        self.uses.append(candidate.uses)
        return Wanted()

    def written(self, address: BlockAddress, nbytes: int) -> None:
        """Nothing to learn."""


async def test_a_block_that_left_and_is_saved_again_is_known_to_the_admission(
    tmp_path: Path,
) -> None:
    policy = Listening()
    settings = StoreSettings(
        host_bytes=4 * 1024 * 1024,
        nvme_path=tmp_path / "nvme",
        nvme_bytes=8 * 1024 * 1024,
        region_bytes=1024 * 1024,
        crypto_threads=1,
        disk_threads=1,
        write_behind_s=0.0,
        lock_memory=False,
    )
    async with open_store(settings, policy=policy) as store:
        for number in (1, 1, 2, 1):
            wanted = context(number)
            await store.save(wanted, KEYS, plaintext(wanted), Fence())
            await store.flush()
            store._residency.drop_everywhere(wanted.address)
    assert policy.uses == [1, 2, 1, 3]
