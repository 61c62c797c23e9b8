"""Host -> NVMe: blocks that were saved are written behind, ciphertext unchanged.

    offer ─▶ policy ─▶ precondition ─▶ batch ─▶ upgrade = commit ─▶ execute ─▶ end

Rules:
- Every stage is bounded (`storage.offloads`). A policy that does not answer in time has said
  no. A batch is closed by number, bytes, age, the end of a request, or `drained`.
- Until the upgrade a block is held by a weak reference alone: it may be dropped or retired, and
  its handle may be cancelled at no cost, in every stage, also after batching.
- The upgrade looks at everything once more, with no `await` before the pin: cancelled, retired,
  gone, already there. The tier asks again right before the block becomes visible there.
- A handle ends by its own write's result; an error of one write fails no other. The duplicate
  guard, which is also what eviction asks, is held until the copy is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator

from storage.dirty import DirtyBlocks
from storage.ending import Cause, Completed, Failed, Outcome, cause_of
from storage.fence import Fenced
from storage.header import Header, read_header
from storage.lifecycle import Admit, Resident, weaken
from storage.offloads import Batch, Offloads, OffloadSettings, OffloadStatistics, Trigger
from storage.residency import Residency
from storage.retention import Retention
from storage.stages import Candidate, Offload, Policy, Queued, Unwanted, Wanted
from storage.tiers.nvme import NvmeTier
from strongroom.clock import Clock
from strongroom.errors import Missing, StrongroomError

_log = logging.getLogger(__name__)

_TURN = 64
"""Policy answers in a row before others may run."""

_Write = tuple[Header, memoryview, Admit]


class OffloadPipeline:
    """`run` is its one task; `close` lets that end when everything offered has ended."""

    def __init__(
        self,
        residency: Residency,
        nvme: NvmeTier,
        dirty: DirtyBlocks,
        policy: Policy,
        clock: Clock,
        settings: OffloadSettings,
    ) -> None:
        self._residency = residency
        self._nvme = nvme
        self._policy = policy
        self._clock = clock
        self._settings = settings
        self._news = asyncio.Event()
        host = residency.host
        self._offloads = Offloads(
            dirty, clock, settings, self._news.set, host.weight, host.leave_guarantees
        )
        self._request_ended = False
        self._hurried = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._offloads)

    # Callers

    def offer(self, resident: Resident, retention: Retention, uses: int = 1) -> Offload:
        """Offer a block that is in host memory. Never waits; the handle may have ended already.

        Offering a writing again that is under way gives the handle that there is.
        """
        reference = weaken(resident)
        known = self._offloads.find(reference)
        if known is not None:
            return known
        candidate = Candidate(resident.address, resident.tenant, resident.nbytes, retention, uses)
        admitted = self._offloads.admits(candidate)
        offload = self._offloads.begin(
            Queued(reference, resident.namespace, candidate, self._clock())
        )
        if self._closed:
            offload.end(Failed(Cause.CLOSED))
        elif resident.address in self._nvme:
            offload.end(Completed(stored=False))
        elif not admitted:
            offload.end(Failed(Cause.QUEUE_FULL))
        return offload

    def admits(self, candidate: Candidate) -> bool:
        """Whether such a block would be let in now."""
        return self._offloads.admits(candidate)

    async def room(self, candidate: Candidate) -> bool:
        """Wait until such a block would be let in; false when it has to do without."""
        return await self.patience(lambda: self._offloads.admits(candidate))

    async def patience(self, ready: Callable[[], bool]) -> bool:
        """Wait, with the pipeline in a hurry, for what its progress may bring; bounded.

        A disk that has ended no write for as long as that is not waited for again, until it does.
        """
        if ready():
            return True
        if self._offloads.stands_still():
            return False
        with self._hurry(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.room_wait_s):
                while len(self._offloads) and not self._closed:
                    self._news.clear()
                    await self._news.wait()
                    if ready():
                        return True
        return False

    def request_ended(self) -> None:
        """Nothing more comes of a request: with a slot idle there is nothing to wait for."""
        self._request_ended = True
        self._news.set()

    def set_admission(self, factor: float) -> None:
        """Let less in: 1 is normal, at 0 nothing new is let in."""
        self._offloads.set_admission(factor)

    async def drained(self) -> None:
        """Return when all that was under way at the call has ended; batches do not fill up."""
        with self._hurry():
            for offload in self._offloads.open():
                await offload.wait()

    def close(self) -> None:
        """No more is let in; `run` ends when it is through."""
        self._closed = True
        self._news.set()

    def statistics(self) -> OffloadStatistics:
        """A frozen snapshot."""
        return self._offloads.statistics()

    def verify(self) -> None:
        """Raise `AssertionError` when something was left behind: for tests, between any steps."""
        self._offloads.verify()

    # Stages

    async def run(self) -> None:
        """Until closed and through. When it breaks off, everything under way has failed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._settings.policy_slots):
                    tasks.create_task(self._judge_all(), name="offload-policy")
                tasks.create_task(self._gather_all(), name="offload-batch")
                for _ in range(self._settings.slots):
                    tasks.create_task(self._write_all(), name="offload-write")
        finally:
            self._closed = True
            for offload in self._offloads.open():
                offload.end(Failed(Cause.BROKEN))

    async def _judge_all(self) -> None:
        offloads = self._offloads
        for turn in itertools.count(1):
            await self._until(lambda: offloads.queued or self._closed)
            if not offloads.queued:
                return
            offload = offloads.next_to_judge()
            ended: Outcome | None = await self._judge(offload.queued.candidate)
            if offload.outcome is not None:
                continue
            ended = ended or self._unmet(offload.queued)
            if ended is not None:
                offload.end(ended)
                continue
            offloads.gather(offload)
            if turn % _TURN == 0:
                await asyncio.sleep(0)

    async def _judge(self, candidate: Candidate) -> Failed | None:
        try:
            async with asyncio.timeout(self._settings.policy_timeout_s):
                verdict = await self._policy.judge(candidate)
        except TimeoutError:
            return Failed(Cause.POLICY_TIMEOUT)
        except StrongroomError:
            return Failed(Cause.REFUSED)
        match verdict:
            case Wanted():
                return None
            case Unwanted():
                return Failed(Cause.REFUSED)

    def _unmet(self, queued: Queued) -> Completed | Failed | None:
        """Why there is nothing to write: asked before a batch, and again at the commit."""
        address = queued.reference.address
        if queued.namespace in self._residency.retired:
            return Failed(Cause.RETIRED)
        if address in self._nvme:
            return Completed(stored=False)
        resident = self._residency.host.resident(address)
        if resident is None or resident.stamp != queued.reference.stamp:
            return Failed(Cause.GONE)
        return None

    async def _gather_all(self) -> None:
        offloads = self._offloads
        while True:
            trigger = await self._due()
            if trigger is None:
                return
            offloads.close_batch(trigger)
            await self._until(lambda: len(offloads.batches) < self._settings.slots)

    async def _due(self) -> Trigger | None:
        """What closes the next batch; None when none will come."""
        offloads = self._offloads
        while True:
            if not offloads.gathered:
                if not offloads.queued and not offloads.judging:
                    self._request_ended = False
                    if self._closed:
                        return None
                self._news.clear()
                await self._news.wait()
                continue
            trigger = self._trigger()
            if trigger is not None:
                return trigger
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(offloads.age_left_s() + 0.001):
                    await self._news.wait()

    def _trigger(self) -> Trigger | None:
        full = self._offloads.full()
        if full is not None:
            return full
        if self._hurried or self._closed:
            return Trigger.FLUSH
        if self._request_ended and self._offloads.busy_slots < self._settings.slots:
            return Trigger.END
        return Trigger.AGE if self._offloads.age_left_s() <= 0 else None

    async def _write_all(self) -> None:
        offloads = self._offloads
        while True:
            await self._until(lambda: offloads.batches or self._no_more_batches())
            if not offloads.batches:
                return
            batch = offloads.take_batch()
            try:
                await self._write(batch)
            finally:
                offloads.let_go(batch)

    def _no_more_batches(self) -> bool:
        offloads = self._offloads
        return self._closed and not (offloads.queued or offloads.judging or offloads.gathered)

    async def _write(self, batch: Batch) -> None:
        """Commit what is still wanted, write it, and end every member by its own result."""
        committed: list[Offload] = []
        writes: list[_Write] = []
        failures: Counter[Cause] = Counter()

        try:
            with contextlib.ExitStack() as pins:
                for offload in tuple(batch.members):
                    write = self._upgrade(offload, batch, pins)
                    if write is not None:
                        committed.append(offload)
                        writes.append(write)
                answers = await self._nvme.put_many(
                    writes, [offload.queued.candidate.retention for offload in committed]
                )
            for offload, answer in zip(committed, answers, strict=True):
                match answer:
                    case Resident():
                        offload.end(Completed(stored=True))
                        self._policy.written(offload.address, offload.nbytes)
                    case StrongroomError():
                        cause = cause_of(answer)
                        failures[cause] += 1
                        offload.end(Failed(cause))
        except StrongroomError as error:
            # Before any record of it was looked at: the whole batch has this one cause.
            failures[cause_of(error)] += len(committed)
            for offload in committed:
                offload.end(Failed(cause_of(error)))
        finally:
            for offload in (*batch.members, *committed):
                offload.end(Failed(Cause.BROKEN))
        for cause, count in failures.items():
            if cause not in {Cause.GONE, Cause.RETIRED}:
                _log.warning("%d blocks: each stays in host memory only (%s)", count, cause)

    def _upgrade(self, offload: Offload, batch: Batch, pins: contextlib.ExitStack) -> _Write | None:
        """The commit point: from a weak reference to a pin, or the block's end."""
        queued = offload.queued
        unmet = self._unmet(queued)
        if unmet is not None:
            offload.end(unmet)
            return None
        try:
            record = pins.enter_context(self._residency.host.upgrade(queued.reference))
            header = read_header(record)
        except StrongroomError as error:
            offload.end(Failed(cause_of(error)))
            return None
        self._offloads.commit(offload, batch)

        def admit() -> None:
            unmet = self._unmet(queued)
            if isinstance(unmet, Failed):
                raise Fenced("retired") if unmet.cause is Cause.RETIRED else Missing("dropped")

        return header, record, admit

    # Inside

    @contextlib.contextmanager
    def _hurry(self) -> Iterator[None]:
        self._hurried += 1
        self._news.set()
        try:
            yield
        finally:
            self._hurried -= 1

    async def _until(self, ready: Callable[[], object]) -> None:
        while not ready():
            self._news.clear()
            await self._news.wait()
