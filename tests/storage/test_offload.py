"""The way from host memory to NVMe: stages, cancellation, batches, backpressure, faults."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage.ending import Cancelled, Cause, Completed, Failed, Outcome
from storage.header import record_bytes
from storage.offloads import Trigger
from storage.retention import BlockKind, Retention
from storage.stages import Batched, Candidate, Committed, Gathered, Offload, Queued, Unwanted
from strongroom.errors import Unavailable
from tests.storage.offload_rig import EIO, ENOSPC, MIB, Rig, rig
from tests.storage.support import component, context, namespace

RECORD = record_bytes(context().segment_bytes)
STORED, THERE = Completed(stored=True), Completed(stored=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
async def one(folder: Path) -> AsyncIterator[Rig]:
    """Batches of one block, one slot."""
    async with rig(folder, slots=1, batch_blocks_max=1) as made:
        yield made


async def outcome(offload: Offload) -> Outcome:
    async with asyncio.timeout(10):
        return await offload.wait()


# The main road


async def test_a_block_goes_down_unchanged_and_its_handle_says_so(folder: Path) -> None:
    async with rig(folder) as it:
        offload = await it.offer(context())
        await it.verify_at_rest()
        assert await outcome(offload) == STORED
        address = context().address
        async with it.host.hold(address) as host, it.nvme.hold(address) as disk:
            # All but the placement, which is the disk's own (format.md section 5).
            assert host[:3968] == disk[:3968]
            assert host[4096:] == disk[4096:]
        assert it.judge.told == [address]


async def test_a_block_that_is_there_already_is_not_written_again(folder: Path) -> None:
    async with rig(folder) as it:
        await it.offer(context())
        await it.verify_at_rest()
        writes = it.disk.writes
        resident = it.host.resident(context().address)
        assert resident is not None
        assert await outcome(it.pipeline.offer(resident, Retention())) == THERE
        assert it.disk.writes == writes
        assert it.pipeline.statistics().there_before == 1


async def test_the_policy_is_asked_once_a_block_with_what_it_may_know(folder: Path) -> None:
    async with rig(folder) as it:
        await it.offer(context(1), priority=60)
        await it.verify_at_rest()
        (asked,) = it.judge.asked
        assert isinstance(asked, Candidate)
        assert (asked.tenant, asked.retention, asked.uses) == (component(1), Retention(60), 1)
        assert asked.nbytes == it.host.statistics().used_bytes


# The policy


async def test_what_the_policy_refuses_stays_in_host_memory_and_may_be_evicted(
    folder: Path,
) -> None:
    async with rig(folder) as it:
        it.judge.answer = Unwanted("not worth it")
        offload = await it.offer(context())
        await it.verify_at_rest()
        assert await outcome(offload) == Failed(Cause.REFUSED)
        assert context().address not in it.dirty
        assert it.host.evict(context().address)
        assert it.disk.writes == 0


async def test_a_policy_that_does_not_answer_in_time_has_said_no(folder: Path) -> None:
    async with rig(folder, policy_timeout_s=0.01) as it:
        it.judge.hold()
        offload = await it.offer(context())
        assert await outcome(offload) == Failed(Cause.POLICY_TIMEOUT)
        it.judge.let_go()
        later = await it.offer(context(2))
        await it.verify_at_rest()
        assert await outcome(later) == STORED


async def test_a_policy_that_fails_has_said_no(folder: Path) -> None:
    async with rig(folder) as it:
        it.judge.error = Unavailable("it cannot tell")
        offload = await it.offer(context())
        assert await outcome(offload) == Failed(Cause.REFUSED)


async def test_a_defect_ends_every_handle_and_is_not_swallowed(folder: Path) -> None:
    handles: list[Offload] = []
    with pytest.RaisesGroup(pytest.RaisesGroup(ZeroDivisionError)):
        async with rig(folder, policy_slots=1) as it:
            it.judge.hold()
            it.judge.error = ZeroDivisionError()
            handles.extend([await it.offer(context(n)) for n in range(3)])
            await it.turns()
            it.judge.let_go()
            await asyncio.Event().wait()
    assert [handle.outcome for handle in handles] == [Failed(Cause.BROKEN)] * 3


# Cancelling


@pytest.mark.parametrize("stage", ["queued", "judging", "gathered", "batched"])
async def test_cancelling_before_the_commit_is_free_in_every_stage(
    folder: Path, stage: str
) -> None:
    sizes = {"batch_blocks_max": 1} if stage == "batched" else {}
    async with rig(folder, slots=1, policy_slots=1, **sizes) as it:
        if stage in {"queued", "judging"}:
            it.judge.hold()
        if stage == "batched":
            it.disk.hold()
        if stage in {"queued", "batched"}:
            await it.offer(context(8))  # in the policy's, or in the slot's hands
        if stage == "batched":
            await it.disk.held_write()
        offload = await it.offer(context(1))
        await it.turns()
        expected = {"gathered": Gathered, "batched": Batched}.get(stage, Queued)
        assert isinstance(offload.stage, expected)
        assert offload.cancel()
        it.verify()
        assert context(1).address not in it.dirty
        assert not offload.cancel(), "it had ended"
        it.judge.let_go()
        it.disk.let_go()
        await it.verify_at_rest()
        assert offload.outcome == Cancelled()
        assert context(1).address not in it.nvme
        assert it.pipeline.statistics().cancelled == 1
        again = it.pipeline.offer(await it.put(context(1)), Retention())
        await it.verify_at_rest()
        assert again.outcome == STORED


async def test_after_the_commit_it_completes_and_says_so(one: Rig) -> None:
    one.disk.hold()
    offload = await one.offer(context())
    await one.disk.held_write()
    assert isinstance(offload.stage, Committed)
    assert not offload.cancel()
    assert offload.outcome is None
    one.disk.let_go()
    assert await outcome(offload) == STORED


async def test_one_member_cancelled_after_batching_leaves_the_others_alone(folder: Path) -> None:
    async with rig(folder, slots=1, batch_blocks_max=3) as it:
        it.disk.hold()
        first = [await it.offer(context(n)) for n in range(3)]
        await it.disk.held_write()
        second = [await it.offer(context(n)) for n in range(3, 6)]
        await it.turns()
        assert [type(offload.stage) for offload in second] == [Batched] * 3
        assert second[1].cancel()
        it.disk.let_go()
        await it.verify_at_rest()
        assert [offload.outcome for offload in first] == [STORED] * 3
        assert [offload.outcome for offload in second] == [STORED, Cancelled(), STORED]


# The peers' faults


@pytest.mark.parametrize("together", [1, 2])
async def test_a_write_error_marks_exactly_the_transfers_of_that_write_failed(
    folder: Path, together: int, caplog: pytest.LogCaptureFixture
) -> None:
    """KVBM: an allocation error never marks the transfer failed."""
    async with rig(folder, slots=1, batch_blocks_max=together) as it:
        it.disk.errors.extend([None, EIO, None, ENOSPC])
        with caplog.at_level(logging.WARNING):
            offloads = [await it.offer(context(n)) for n in range(4 * together)]
            await it.verify_at_rest()
        ends = [offload.outcome for offload in offloads]
        written = [STORED, Failed(Cause.DEVICE), STORED, Failed(Cause.OVERLOADED)]
        assert ends == [end for end in written for _ in range(together)]
        assert "stays in host memory" in caplog.text
        for number, end in enumerate(ends):
            assert (context(number).address in it.nvme) is (end == STORED)
            assert it.host.evict(context(number).address), "a failed block is dirty no more"


async def test_one_record_that_is_refused_fails_alone_in_its_batch(folder: Path) -> None:
    async with rig(folder, slots=1, batch_blocks_max=3) as it:
        it.nvme.set_quota(component(2), RECORD - 1)
        offloads = [await it.offer(context(n, tenant=1 + n % 2)) for n in range(3)]
        await it.verify_at_rest()
        ends = [offload.outcome for offload in offloads]
        assert ends == [STORED, Failed(Cause.QUOTA), STORED]


async def test_a_batch_whose_blocks_have_all_vanished_ends(folder: Path) -> None:
    """KVBM: a batch whose blocks were all evicted never ends."""
    async with rig(folder, slots=1, batch_blocks_max=3) as it:
        it.disk.hold()
        held = await it.offer(context(9))
        it.pipeline.request_ended()
        await it.disk.held_write()
        offloads = [await it.offer(context(n)) for n in range(3)]
        await it.turns()
        assert [type(offload.stage) for offload in offloads] == [Batched] * 3
        for number in range(3):
            it.host.drop(context(number).address)
        it.disk.let_go()
        assert await outcome(held) == STORED
        for offload in offloads:
            assert await outcome(offload) == Failed(Cause.GONE)
        await it.verify_at_rest()


async def test_a_batch_cancelled_to_the_last_block_is_gone_at_once(one: Rig) -> None:
    one.disk.hold()
    await one.offer(context(9))
    await one.disk.held_write()
    offload = await one.offer(context(1))
    await one.turns()
    assert one.pipeline.statistics().batched == 1
    assert offload.cancel()
    assert one.pipeline._offloads.batches == {}


async def test_the_duplicate_guard_is_held_until_the_copy_is_done(one: Rig) -> None:
    """KVBM: the duplicate guard is dropped before the copy."""
    one.disk.hold()
    offload = await one.offer(context())
    await one.disk.held_write()
    resident = one.host.resident(context().address)
    assert resident is not None
    assert one.pipeline.offer(resident, Retention()) is offload
    assert context().address in one.dirty, "eviction still steps over it"
    one.disk.let_go()
    await one.verify_at_rest()
    assert one.disk.writes == 1
    assert context().address not in one.dirty


async def test_a_block_written_anew_while_its_copy_is_under_way_is_copied_anew(one: Rig) -> None:
    one.disk.hold()
    old = await one.offer(context())
    await one.disk.held_write()
    one.host.drop(context().address)
    new = await one.offer(context())
    one.verify()
    one.disk.let_go()
    await one.verify_at_rest()
    assert old.outcome == Failed(Cause.GONE), "what is gone is not published"
    assert new.outcome == STORED


async def test_the_way_down_pins_for_the_copy_alone(one: Rig) -> None:
    one.disk.hold()
    offload = await one.offer(context(1))
    waiting = await one.offer(context(2))
    await one.disk.held_write()
    assert one.host.statistics().pinned == 1
    assert waiting.outcome is None
    one.disk.let_go()
    await one.verify_at_rest()
    assert offload.outcome == waiting.outcome == STORED


# Batches


async def test_a_batch_is_closed_by_its_number_of_blocks(folder: Path) -> None:
    async with rig(folder, batch_blocks_max=2) as it:
        offloads = [await it.offer(context(n)) for n in range(4)]
        for offload in offloads:
            assert await outcome(offload) == STORED
        assert it.pipeline.statistics().batches == {Trigger.BLOCKS: 2}
        assert it.pipeline.statistics().batch_sizes == {2: 2}


async def test_a_batch_is_closed_by_its_bytes(folder: Path) -> None:
    async with rig(folder, batch_bytes_max=2 * RECORD) as it:
        offloads = [await it.offer(context(n)) for n in range(2)]
        for offload in offloads:
            assert await outcome(offload) == STORED
        assert it.pipeline.statistics().batches[Trigger.BYTES] >= 1


async def test_a_batch_is_closed_by_the_age_of_its_oldest_block(folder: Path) -> None:
    async with rig(folder, batch_age_s=5.0) as it:
        offload = await it.offer(context(1))
        await it.turns()
        assert offload.outcome is None
        it.clock.advance_s(6)
        await it.offer(context(2))
        assert await outcome(offload) == STORED
        assert it.pipeline.statistics().batches == {Trigger.AGE: 1}


async def test_a_batch_comes_of_age_with_nothing_else_happening(folder: Path) -> None:
    async with rig(folder, batch_age_s=0.002) as it:
        it.clock.advance_s(0)
        offload = await it.offer(context(1))
        it.clock.advance_s(1)
        assert await outcome(offload) == STORED


async def test_the_end_of_a_request_closes_the_batch_when_a_slot_is_idle(folder: Path) -> None:
    async with rig(folder, slots=1) as it:
        it.disk.hold()
        first = await it.offer(context(1))
        it.pipeline.request_ended()
        await it.disk.held_write()
        second = await it.offer(context(2))
        it.pipeline.request_ended()
        await it.turns()
        assert isinstance(second.stage, Gathered), "no slot is idle: it may still fill up"
        it.disk.let_go()
        assert await outcome(first) == await outcome(second) == STORED
        assert it.pipeline.statistics().batches == {Trigger.END: 2}


async def test_drained_does_not_wait_for_what_comes_after_it(folder: Path) -> None:
    async with rig(folder, slots=1) as it:
        it.disk.hold()
        await it.offer(context(1))
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(it.pipeline.drained())
            await it.disk.held_write()
            it.judge.hold()
            late = await it.offer(context(2))
            it.disk.let_go()
            async with asyncio.timeout(10):
                await draining
            assert late.outcome is None
            it.judge.let_go()


async def test_closing_writes_what_was_let_in_and_refuses_what_comes_later(folder: Path) -> None:
    async with rig(folder) as it:
        offload = await it.offer(context(1))
        it.pipeline.close()
        late = await it.offer(context(2))
        assert late.outcome == Failed(Cause.CLOSED)
        assert await outcome(offload) == STORED


# Backpressure


async def test_the_fuller_the_queue_the_higher_the_priority_that_is_let_in(folder: Path) -> None:
    async with rig(folder, queue_max=10) as it:
        it.judge.hold()
        usual = [await it.offer(context(n)) for n in range(8)]
        assert [offload.outcome for offload in usual] == [None] * 7 + [Failed(Cause.QUEUE_FULL)]
        system = [await it.offer(context(n), priority=65) for n in range(10, 13)]
        assert [offload.outcome for offload in system] == [None, None, Failed(Cause.QUEUE_FULL)]
        top = [await it.offer(context(n), priority=100) for n in range(20, 23)]
        assert [offload.outcome for offload in top] == [None] + [Failed(Cause.QUEUE_FULL)] * 2
        statistics = it.pipeline.statistics()
        assert (statistics.pressure, statistics.pending) == (1.0, 10)
        assert statistics.failed == {Cause.QUEUE_FULL: 4}
        it.verify()
        it.judge.let_go()
        await it.verify_at_rest()
        assert it.pipeline.statistics().completed == 10
        assert (await it.offer(context(7))).outcome is None, "there is room again"


async def test_bytes_on_the_way_are_bounded_too(folder: Path) -> None:
    async with rig(folder, queue_bytes_max=100_000) as it:
        it.judge.hold()
        offloads = [await it.offer(context(n), priority=100) for n in range(20)]
        assert 0 < it.pipeline.statistics().pending_bytes < 100_000
        assert offloads[-1].outcome == Failed(Cause.QUEUE_FULL)


async def test_admission_turned_down_lets_only_what_matters_in_and_comes_back(
    folder: Path,
) -> None:
    async with rig(folder) as it:
        it.pipeline.set_admission(0.25)
        assert (await it.offer(context(1))).outcome == Failed(Cause.QUEUE_FULL)
        assert (await it.offer(context(2), priority=60)).outcome is None
        it.pipeline.set_admission(0.0)
        assert (await it.offer(context(3), priority=100)).outcome == Failed(Cause.QUEUE_FULL)
        it.pipeline.set_admission(1.0)
        assert (await it.offer(context(4))).outcome is None


async def test_half_admission_keeps_documents_out_and_lets_what_was_said_in(folder: Path) -> None:
    kinds = (BlockKind.DOCUMENT, BlockKind.HISTORY)
    document, history = (Retention.of(kind).priority for kind in kinds)
    async with rig(folder) as it:
        it.pipeline.set_admission(0.5)
        out = await it.offer(context(1), priority=document)
        assert out.outcome == Failed(Cause.QUEUE_FULL)
        assert (await it.offer(context(2), priority=history)).outcome is None


async def test_a_save_waits_for_the_queue_and_then_does_without(folder: Path) -> None:
    async with rig(folder, queue_max=1, room_wait_s=0.01) as it:
        it.judge.hold()
        await it.offer(context(1))
        candidate = Candidate(context(2).address, component(1), 10, Retention(), 1)
        assert not await it.pipeline.room(candidate)
        it.judge.let_go()
        await it.verify_at_rest()
        assert await it.pipeline.room(candidate)


async def test_a_disk_that_stands_still_is_not_waited_for_twice(folder: Path) -> None:
    async with rig(folder, queue_max=1, room_wait_s=20.0) as it:
        it.disk.hold()
        await it.offer(context(1))
        candidate = Candidate(context(2).address, component(1), 10, Retention(), 1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(it.pipeline.room(candidate))
            await it.disk.held_write()
            await it.turns()
            assert not first.done(), "the disk has only just been asked"
            it.clock.advance_s(20)
            async with asyncio.timeout(10):
                assert not await it.pipeline.room(candidate)
            it.disk.let_go()
            assert await first, "it moves again, and whoever waited goes on"
        await it.verify_at_rest()
        it.disk.hold()
        await it.offer(context(3))
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(it.pipeline.room(candidate))
            await it.disk.held_write()
            it.disk.let_go()
            assert await second, "a disk that moves is waited for"


async def test_waiting_for_room_hurries_the_batch_that_is_filling(folder: Path) -> None:
    async with rig(folder, queue_max=1, room_wait_s=20.0) as it:
        await it.offer(context(1))
        candidate = Candidate(context(2).address, component(1), 10, Retention(), 1)
        async with asyncio.timeout(10):
            assert await it.pipeline.room(candidate)


async def test_the_age_of_the_oldest_block_is_told(folder: Path) -> None:
    async with rig(folder) as it:
        assert it.pipeline.statistics().oldest_s == 0
        await it.offer(context(1))
        it.clock.advance_s(3)
        await it.offer(context(2))
        assert it.pipeline.statistics().oldest_s == 3


# Eviction and revocation


async def test_eviction_steps_over_what_is_on_its_way_and_takes_the_rest(folder: Path) -> None:
    async with rig(folder, host_bytes=MIB) as it:
        dirty = [await it.offer(context(n)) for n in range(10)]
        clean = [await it.put(context(n)) for n in range(100, 200)]
        assert all(context(n).address in it.host for n in range(10))
        assert sum(resident.address in it.host for resident in clean) < len(clean)
        await it.verify_at_rest()
        assert [offload.outcome for offload in dirty] == [STORED] * 10


@pytest.mark.parametrize("stage", ["queued", "gathered", "batched", "committed"])
async def test_what_is_retired_on_its_way_is_not_written_in_any_stage(
    folder: Path, stage: str
) -> None:
    sizes = {"queued": 2, "gathered": 3, "batched": 1, "committed": 2}
    theirs, ours = context(1, room=1), context(2, tenant=2, room=2)
    async with rig(folder, slots=1, batch_blocks_max=sizes[stage]) as it:
        if stage == "queued":
            it.judge.hold()
        if stage in {"batched", "committed"}:
            it.disk.hold()
        if stage == "batched":
            await it.offer(context(9, tenant=3, room=3))
            await it.disk.held_write()
        offload = await it.offer(theirs)
        other = await it.offer(ours)
        if stage == "committed":
            await it.disk.held_write()
        await it.turns()
        it.residency.retire([namespace(1)])
        it.disk.let_go()
        it.judge.let_go()
        await it.verify_at_rest()
        assert offload.outcome == Failed(Cause.RETIRED)
        assert other.outcome == STORED
        assert theirs.address not in it.nvme
        assert ours.address in it.nvme
