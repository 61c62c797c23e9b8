"""A tenant at its cap on NVMe: its own blocks make way for its new ones, and nobody else's do."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random  # noqa: TID251 - a seeded order of writes, no secret

import pytest

from storage.retention import Retention
from strongroom.errors import QuotaExceeded
from tests.storage.nvme_support import admit, check_balance, check_empties
from tests.storage.support import FakeClock, component, context, sealed
from tests.storage.test_recovery import RECORD, body, opened, put


async def test_new_blocks_take_the_place_of_the_tenants_own_and_of_nobody_elses(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, regions=12) as tier:
        others = [context(100 + number, tenant=2, room=2) for number in range(6)]
        for one in others:
            await put(tier, one)
        tier.set_quota(component(1), 4 * RECORD)
        for number in range(1, 21):
            await put(tier, context(number), sequence=number)
            assert tier.used()[component(1)] <= 4 * RECORD
            assert context(number).address in tier, "the newest is there"
        assert [context(number).address in tier for number in range(1, 21)] == [False] * 16 + [
            True
        ] * 4
        assert all(one.address in tier for one in others)
        assert tier.statistics().quota_refusals == 0
        assert tier.statistics().evictions == 16
        check_balance(tier)
    async with opened(tmp_path, regions=12) as tier:
        assert tier.used() == {component(1): 4 * RECORD, component(2): 6 * RECORD}
        for one in others:
            await body(tier, one)
        check_empties(tier)


async def test_of_its_own_the_least_worth_goes_first_and_never_the_new_ones_parent(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as tier:
        tier.set_quota(component(1), 3 * RECORD)
        await put(tier, context(1))
        await put(tier, context(2))
        await put(tier, context(3))
        tier.touch(context(1).address)
        # The child of 2, which is the coldest by now and is needed in a moment.
        await put(tier, context(4, parent=2))
        assert [context(n).address in tier for n in (1, 2, 3, 4)] == [True, True, False, True]


async def test_what_can_not_be_made_room_for_is_refused_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        tier.set_quota(component(1), 2 * RECORD)
        await put(tier, context(1))
        with pytest.raises(QuotaExceeded):
            await put(tier, context(2, segments=(4 * RECORD,)))
        assert context(1).address in tier, "nothing leaves for what never fits"
        assert tier.refused() == {component(1): 1}
        # A parent and its child: the parent of what is written, and what hangs on it, stay.
        tier.set_quota(component(1), RECORD)
        with pytest.raises(QuotaExceeded):
            await put(tier, context(3, parent=1))
        assert context(1).address in tier
        assert tier.refused() == {component(1): 2}


async def test_above_a_lowered_cap_a_write_displaces_twice_its_size_at_most(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as tier:
        for number in range(1, 9):
            await put(tier, context(number))
        tier.set_quota(component(1), 2 * RECORD)
        used = []
        for number in range(9, 17):
            await put(tier, context(number))
            used.append(tier.used()[component(1)] // RECORD)
        assert used == [7, 6, 5, 4, 3, 2, 2, 2]


@pytest.mark.parametrize("seed", range(3))
async def test_no_cap_is_exceeded_and_who_has_none_loses_nothing_in_any_order(
    tmp_path: Path, seed: int
) -> None:
    """A model: the tier is large enough for all, so that only caps make anything leave."""
    chance = Random(seed)
    caps = {1: 3, 2: 5}
    stored: dict[int, list[int]] = {1: [], 2: [], 3: []}
    clock = FakeClock()
    async with opened(tmp_path, regions=24, clock=clock) as tier:
        for tenant, records in caps.items():
            tier.set_quota(component(tenant), records * RECORD)
        for number in range(1, 121):
            clock.advance_s(1)
            tenant = chance.choice((1, 1, 2, 3)) if number < 100 else chance.choice((1, 2))
            wanted = context(number, tenant=tenant, room=tenant)
            retention = Retention(chance.choice((35, 35, 60)))
            with contextlib.suppress(QuotaExceeded):
                await tier.put(*sealed(wanted, sequence=number + 1), admit, retention)
                stored[tenant].append(number)
            for capped, records in caps.items():
                assert tier.used().get(component(capped), 0) <= records * RECORD
        assert tier.statistics().quota_refusals == 0
        for number in stored[3]:
            assert context(number, tenant=3, room=3).address in tier
        for tenant, records in caps.items():
            here = [
                number
                for number in stored[tenant]
                if context(number, tenant=tenant, room=tenant).address in tier
            ]
            assert len(here) == records
            assert stored[tenant][-1] in here, "what was written last is there"
        check_balance(tier)
