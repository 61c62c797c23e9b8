"""The way to NVMe under any order of events: every handle ends once and nothing is left behind."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage.ending import Cancelled, Completed, Failed
from storage.retention import Retention
from storage.stages import Committed, Offload, Unwanted, Wanted
from tests.storage.offload_rig import EIO, ENOSPC, MIB, Rig, rig
from tests.storage.support import context, namespace

BLOCKS = 12
ROOMS = 3
_numbers = st.integers(0, BLOCKS - 1)


class Pipeline(RuleBasedStateMachine):
    """Drives a real host tier, a real NVMe tier and the pipeline between them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="offload-"))
        self.ends: Counter[Offload] = Counter()
        self.handles: dict[Offload, None] = {}
        self.retired: set[int] = set()
        self.entered: AbstractAsyncContextManager[Rig] | None = None
        self.it = self.loop.run_until_complete(self._open())

    async def _open(self) -> Rig:
        self.entered = rig(
            self.folder / "nvme", host_bytes=MIB, slots=2, batch_blocks_max=3, queue_max=8,
            room_wait_s=0.001,
        )  # fmt: skip
        # The pipeline's task group belongs to the task that enters it: one task for all.
        self.commands: asyncio.Queue[asyncio.Event | None] = asyncio.Queue()
        ready: asyncio.Future[Rig] = self.loop.create_future()
        self.serving = self.loop.create_task(self._serve(ready))
        return await ready

    async def _serve(self, ready: asyncio.Future[Rig]) -> None:
        assert self.entered is not None
        async with self.entered as it:
            ready.set_result(it)
            await self.commands.get()

    def step(self, turns: int = 3) -> None:
        self.loop.run_until_complete(self.it.turns(turns))

    # Rules

    @rule(number=_numbers, priority=st.sampled_from([0, 35, 60, 100]))
    def offer(self, number: int, priority: int) -> None:
        async def go() -> Offload:
            wanted = context(number, room=number % ROOMS, tenant=1 + number % 2)
            resident = self.it.host.resident(wanted.address) or await self.it.put(wanted)
            return self.it.pipeline.offer(resident, Retention(priority))

        offload = self.loop.run_until_complete(go())
        if offload not in self.handles:
            self.handles[offload] = None
            self.loop.create_task(self._count(offload))

    async def _count(self, offload: Offload) -> None:
        await offload.wait()
        self.ends[offload] += 1

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        offload = data.draw(st.sampled_from(list(self.handles)))
        before, committed = offload.outcome, isinstance(offload.stage, Committed)
        cancelled = offload.cancel()
        assert cancelled is (before is None and not committed)
        if cancelled:
            assert offload.outcome == Cancelled()

    @rule(number=_numbers)
    def evict(self, number: int) -> None:
        address = context(number).address
        if address not in self.it.dirty:
            self.it.host.evict(address)

    @rule(number=_numbers)
    def drop(self, number: int) -> None:
        self.it.host.drop(context(number).address)

    @rule(number=_numbers)
    def drop_below(self, number: int) -> None:
        self.it.nvme.drop(context(number).address)

    @precondition(lambda self: len(self.retired) < ROOMS - 1)
    @rule(room=st.integers(0, ROOMS - 1))
    def retire(self, room: int) -> None:
        self.retired.add(room)
        self.it.residency.retire([namespace(room)])

    @rule(code=st.sampled_from([None, EIO, ENOSPC]))
    def fail_writes(self, code: int | None) -> None:
        self.it.disk.errors.append(code)

    @rule()
    def hold_disk(self) -> None:
        self.it.disk.hold()

    @rule()
    def let_disk_go(self) -> None:
        self.it.disk.let_go()

    @rule(wanted=st.booleans())
    def change_mind(self, wanted: bool) -> None:
        self.it.judge.answer = Wanted() if wanted else Unwanted("")

    @rule()
    def hold_judge(self) -> None:
        self.it.judge.hold()

    @rule()
    def let_judge_go(self) -> None:
        self.it.judge.let_go()

    @rule(factor=st.sampled_from([0.0, 0.3, 1.0]))
    def press(self, factor: float) -> None:
        self.it.pipeline.set_admission(factor)

    @rule(seconds=st.sampled_from([1.0, 10.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.it.clock.advance_s(seconds)

    @rule(turns=st.integers(1, 30))
    def run(self, turns: int) -> None:
        self.step(turns)

    @rule()
    def request_ends(self) -> None:
        self.it.pipeline.request_ended()

    @rule()
    def flush(self) -> None:
        self._let_all_go()
        self.loop.run_until_complete(self.it.verify_at_rest())

    # Invariants

    @invariant()
    def nothing_is_left_behind(self) -> None:
        self.it.verify()
        statistics = self.it.pipeline.statistics()
        assert statistics.pending <= 8
        ended = statistics.completed + statistics.there_before + statistics.cancelled
        assert ended + sum(statistics.failed.values()) + statistics.pending == len(self.handles)

    def teardown(self) -> None:
        async def end() -> None:
            await self.it.verify_at_rest()
            await self.commands.put(None)
            await self.serving
            await asyncio.sleep(0)

        try:
            self._let_all_go()
            self.loop.run_until_complete(end())
            assert all(self.ends[offload] == 1 for offload in self.handles)
            for offload in self.handles:
                match offload.outcome:
                    case Completed() | Cancelled() | Failed():
                        pass
                    case None:
                        raise AssertionError("a handle never ended")
        finally:
            self.loop.close()
            shutil.rmtree(self.folder)

    def _let_all_go(self) -> None:
        self.it.disk.let_go()
        self.it.judge.let_go()


TestPipeline = Pipeline.TestCase
TestPipeline.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
