"""Host -> NVMe: blocks that were saved are written behind, ciphertext unchanged.

    offer ─▶ policy ─▶ precondition ─▶ batch ─▶ upgrade = commit ─▶ execute ─▶ end

Rules:
- Every stage is bounded. The fuller the queue, the higher the priority a block must have to be
  let in (admission falls); from full on none is. A policy that does not answer in time has said
  no. A batch is closed by number, bytes, age, the end of a request, or `drained`.
- Until the upgrade a block is held by a weak reference alone: it may be evicted or dropped, and
  its handle may be cancelled at no cost, in every stage. What has ended leaves its stage at
  once, a batch that has none left too: nothing is left behind that had to be swept up.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from storage.dirty import DirtyBlocks
from storage.ending import Cancelled, Cause, Completed, Failed, Outcome, cause_of
from storage.fence import Fenced
from storage.header import Header, read_header
from storage.lifecycle import Admit, Resident, WeakReference, weaken
from storage.residency import Residency
from storage.retention import Retention
from storage.stages import Batched, Candidate, Committed, Gathered, Offload, Queued
from storage.tiers.nvme import NvmeTier
from strongroom.clock import Clock
from strongroom.errors import Missing, StrongroomError

_log = logging.getLogger(__name__)

_TURN = 64
"""Policy answers in a row before others may run."""
_EASY = 0.5
"""Up to this pressure every priority is admitted; from there the bar rises to 100 at 1."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The policy's yes."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """The policy's no, and why."""

    reason: str


class Policy(Protocol):
    """Is this block worth a write?"""

    async def judge(self, candidate: Candidate, /) -> Wanted | Unwanted: ...


class WriteAll:
    """The policy of a store that was given none."""

    async def judge(self, _: Candidate, /) -> Wanted | Unwanted:
        return Wanted()


class Trigger(StrEnum):
    """What closed a batch."""

    BLOCKS = "blocks"
    BYTES = "bytes"
    AGE = "age"
    END = "end"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Bounds of the pipeline; `_bytes` are record bytes."""

    queue_max: int = 4096
    """Blocks in all stages together."""
    queue_bytes_max: int = 512 * 1024 * 1024
    """Their bytes: what a slow disk may keep from being evicted."""
    batch_blocks_max: int = 64
    batch_bytes_max: int = 32 * 1024 * 1024
    batch_age_s: float = 0.5
    policy_timeout_s: float = 0.05
    policy_slots: int = 4
    slots: int = 2
    """Batches written at once; as many closed ones may wait."""
    room_wait_s: float = 1.0
    """How long a save waits for the queue before its block stays in host memory only."""


@dataclass(frozen=True, slots=True)
class OffloadStatistics:
    """Counters since start and gauges now."""

    completed: int
    there_before: int
    cancelled: int
    failed: Mapping[Cause, int]
    queued: int
    gathered: int
    batched: int
    committed: int
    pending_bytes: int
    oldest_s: float
    pressure: float
    batches: Mapping[Trigger, int]
    batch_sizes: Mapping[int, int]
    """Batches by their number of blocks, rounded up to a power of two."""

    @property
    def pending(self) -> int:
        """Blocks in all stages."""
        return self.queued + self.gathered + self.batched + self.committed


_Write = tuple[Header, memoryview, Admit]


async def _write_each(
    nvme: NvmeTier, writes: Sequence[_Write], done: Callable[[int, StrongroomError | None], None]
) -> None:
    """Write record after record; `done` is told of each as it ends."""
    for number, (header, record, admit) in enumerate(writes):
        try:
            await nvme.put(header, record, admit)
        except StrongroomError as error:
            done(number, error)
        else:
            done(number, None)


class _Batch:
    """Members leave when they end; `number` names it in its members' stage."""

    __slots__ = ("members", "number")

    def __init__(self, number: int, members: dict[Offload, None]) -> None:
        self.number = number
        self.members = members


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
        self._dirty = dirty
        self._policy = policy
        self._clock = clock
        self._settings = settings
        self._open: dict[WeakReference, Offload] = {}
        """The duplicate guard: one writing is on its way once."""
        self._bytes = 0
        self._queued: dict[Offload, None] = {}
        self._judging: dict[Offload, None] = {}
        self._gathered: dict[Offload, None] = {}
        self._gathered_bytes = 0
        self._batches: dict[int, _Batch] = {}
        self._committed: dict[Offload, None] = {}
        self._numbers = itertools.count(1)
        self._busy_slots = 0
        self._request_ended = False
        self._hurried = 0
        self._admission = 1.0
        self._closed = False
        self._news = asyncio.Event()
        self._progress = asyncio.Event()
        self._completed = 0
        self._there_before = 0
        self._cancelled = 0
        self._failed: Counter[Cause] = Counter()
        self._triggers: Counter[Trigger] = Counter()
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    # Callers

    def offer(self, resident: Resident, retention: Retention, uses: int = 1) -> Offload:
        """Offer a block that is in host memory. Never waits; the handle may have ended already.

        Offering a writing again that is under way gives the handle that there is.
        """
        reference = weaken(resident)
        known = self._open.get(reference)
        if known is not None:
            return known
        candidate = Candidate(resident.address, resident.tenant, resident.nbytes, retention, uses)
        queued = Queued(reference, resident.namespace, candidate, self._clock())
        offload = Offload(queued, self._on_end)
        admitted = self._admits(candidate)
        self._open[reference] = offload
        self._dirty.add(offload.address)
        self._bytes += offload.nbytes
        self._queued[offload] = None
        if self._closed:
            offload.end(Failed(Cause.CLOSED))
        elif resident.address in self._nvme:
            offload.end(Completed(stored=False))
        elif not admitted:
            offload.end(Failed(Cause.QUEUE_FULL))
        self._news.set()
        return offload

    async def room(self, candidate: Candidate) -> bool:
        """Wait until such a block would be let in; false when it has to do without."""
        return await self.patience(lambda: self._admits(candidate))

    async def patience(self, ready: Callable[[], bool]) -> bool:
        """Wait, with the pipeline in a hurry, for what its progress may bring; bounded."""
        with self._hurry(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.room_wait_s):
                while not ready():
                    if not self._open:
                        return False
                    self._progress.clear()
                    await self._progress.wait()
        return ready()

    def request_ended(self) -> None:
        """Nothing more comes of a request: with a slot idle there is nothing to wait for."""
        self._request_ended = True
        self._news.set()

    def set_admission(self, factor: float) -> None:
        """Let less in: 1 is normal, at 0 nothing new is admitted."""
        self._admission = min(max(factor, 0.0), 1.0)

    async def drained(self) -> None:
        """Return when all that was under way at the call has ended; batches do not fill up."""
        with self._hurry():
            for offload in tuple(self._open.values()):
                await offload.wait()

    def close(self) -> None:
        """No more is let in; `run` ends when it is through."""
        self._closed = True
        self._news.set()

    def statistics(self) -> OffloadStatistics:
        """A frozen snapshot."""
        first = next(iter(self._open.values()), None)
        age_ns = 0 if first is None else self._clock() - first.queued.since_ns
        return OffloadStatistics(
            completed=self._completed,
            there_before=self._there_before,
            cancelled=self._cancelled,
            failed=dict(self._failed),
            queued=len(self._queued) + len(self._judging),
            gathered=len(self._gathered),
            batched=sum(len(batch.members) for batch in self._batches.values()),
            committed=len(self._committed),
            pending_bytes=self._bytes,
            oldest_s=max(age_ns, 0) / 1e9,
            pressure=self.pressure,
            batches=dict(self._triggers),
            batch_sizes=dict(self._sizes),
        )

    @property
    def pressure(self) -> float:
        """How full the queue is, from 0; from 1 on nothing is let in."""
        return self._pressure_with(0)

    def verify(self) -> None:
        """Raise `AssertionError` when something was left behind: for tests, between any steps."""
        members = [
            *self._queued,
            *self._judging,
            *self._gathered,
            *(offload for batch in self._batches.values() for offload in batch.members),
            *self._committed,
        ]
        assert len(set(members)) == len(members), "a handle is in one stage"
        assert set(members) == set(self._open.values()), "every open handle is in a stage"
        assert all(offload.outcome is None for offload in members), "what ended has left"
        assert all(batch.members for batch in self._batches.values()), "no batch is empty"
        assert self._bytes == sum(offload.nbytes for offload in members)
        assert self._gathered_bytes == sum(offload.nbytes for offload in self._gathered)
        assert len(self._dirty) == len(members), "what is dirty is under way"
        assert all(offload.address in self._dirty for offload in members)
        for offload in members:
            assert isinstance(offload.stage, Committed) is (offload in self._committed)

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
            for offload in tuple(self._open.values()):
                offload.end(Failed(Cause.BROKEN))

    async def _judge_all(self) -> None:
        for turn in itertools.count(1):
            await self._until(lambda: self._queued or self._closed)
            if not self._queued:
                return
            offload = next(iter(self._queued))
            del self._queued[offload]
            self._judging[offload] = None
            ended: Outcome | None = await self._judge(offload.queued.candidate)
            if offload.outcome is not None:
                continue
            ended = ended or self._unmet(offload.queued)
            if ended is not None:
                offload.end(ended)
                continue
            del self._judging[offload]
            offload.stage = Gathered(offload.queued)
            self._gathered[offload] = None
            self._gathered_bytes += offload.nbytes
            self._news.set()
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
        while True:
            trigger = await self._due()
            if trigger is None:
                return
            self._close_batch(trigger)
            await self._until(lambda: len(self._batches) < self._settings.slots)

    async def _due(self) -> Trigger | None:
        """What closes the next batch; None when none will come."""
        while True:
            if not self._gathered:
                if not self._queued and not self._judging:
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
                async with asyncio.timeout(self._age_left_s() + 0.001):
                    await self._news.wait()

    def _trigger(self) -> Trigger | None:
        settings = self._settings
        if len(self._gathered) >= settings.batch_blocks_max:
            return Trigger.BLOCKS
        if self._gathered_bytes >= settings.batch_bytes_max:
            return Trigger.BYTES
        if self._hurried or self._closed:
            return Trigger.FLUSH
        if self._request_ended and self._busy_slots < settings.slots:
            return Trigger.END
        return Trigger.AGE if self._age_left_s() <= 0 else None

    def _age_left_s(self) -> float:
        first = next(iter(self._gathered))
        age_ns = self._clock() - first.queued.since_ns
        return self._settings.batch_age_s - age_ns / 1e9

    def _close_batch(self, trigger: Trigger) -> None:
        batch = _Batch(next(self._numbers), {})
        nbytes = 0
        for offload in tuple(self._gathered):
            nbytes += offload.nbytes
            full = len(batch.members) >= self._settings.batch_blocks_max
            if batch.members and (full or nbytes > self._settings.batch_bytes_max):
                break
            del self._gathered[offload]
            self._gathered_bytes -= offload.nbytes
            offload.stage = Batched(offload.queued, batch.number)
            batch.members[offload] = None
        self._batches[batch.number] = batch
        self._triggers[trigger] += 1
        self._sizes[1 << (len(batch.members) - 1).bit_length()] += 1
        self._news.set()

    async def _write_all(self) -> None:
        while True:
            await self._until(lambda: self._batches or self._no_more_batches())
            if not self._batches:
                return
            batch = self._batches.pop(next(iter(self._batches)))
            self._busy_slots += 1
            try:
                await self._write(batch)
            finally:
                self._busy_slots -= 1
                self._news.set()

    def _no_more_batches(self) -> bool:
        return self._closed and not (self._queued or self._judging or self._gathered)

    async def _write(self, batch: _Batch) -> None:
        """Commit what is still wanted, write it, and end every member by its own result."""
        committed: list[Offload] = []
        writes: list[_Write] = []
        failures: Counter[Cause] = Counter()

        def done(number: int, error: StrongroomError | None) -> None:
            if error is None:
                committed[number].end(Completed(stored=True))
                return
            cause = cause_of(error)
            failures[cause] += 1
            committed[number].end(Failed(cause))

        try:
            with contextlib.ExitStack() as pins:
                for offload in tuple(batch.members):
                    write = self._upgrade(offload, batch, pins)
                    if write is not None:
                        committed.append(offload)
                        writes.append(write)
                await _write_each(self._nvme, writes, done)
        finally:
            for offload in (*batch.members, *committed):
                offload.end(Failed(Cause.BROKEN))
        for cause, count in failures.items():
            if cause not in {Cause.GONE, Cause.RETIRED}:
                _log.warning("%d blocks: each stays in host memory only (%s)", count, cause)

    def _upgrade(
        self, offload: Offload, batch: _Batch, pins: contextlib.ExitStack
    ) -> _Write | None:
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
        del batch.members[offload]
        offload.stage = Committed(queued, batch.number)
        self._committed[offload] = None

        def admit() -> None:
            unmet = self._unmet(queued)
            if isinstance(unmet, Failed):
                raise Fenced("retired") if unmet.cause is Cause.RETIRED else Missing("dropped")

        return header, record, admit

    # Inside

    def _admits(self, candidate: Candidate) -> bool:
        pressure = max(self._pressure_with(candidate.nbytes), 1.0 - self._admission)
        if pressure >= 1.0:
            return False
        return candidate.retention.priority >= (pressure - _EASY) / (1.0 - _EASY) * 100

    def _pressure_with(self, nbytes: int) -> float:
        settings = self._settings
        return max(
            len(self._open) / settings.queue_max, (self._bytes + nbytes) / settings.queue_bytes_max
        )

    def _on_end(self, offload: Offload, outcome: Outcome) -> None:
        match offload.stage:
            case Queued():
                self._queued.pop(offload, None)
                self._judging.pop(offload, None)
            case Gathered():
                del self._gathered[offload]
                self._gathered_bytes -= offload.nbytes
            case Batched(batch=number):
                self._leave_batch(offload, number)
            case Committed():
                del self._committed[offload]
        del self._open[offload.queued.reference]
        self._dirty.remove(offload.address)
        self._bytes -= offload.nbytes
        match outcome:
            case Completed(stored=stored):
                self._completed += stored
                self._there_before += not stored
            case Cancelled():
                self._cancelled += 1
            case Failed(cause=cause):
                self._failed[cause] += 1
        self._progress.set()
        self._news.set()

    def _leave_batch(self, offload: Offload, number: int) -> None:
        batch = self._batches.get(number)
        if batch is None:
            return  # a slot has it in hand
        del batch.members[offload]
        if not batch.members:
            del self._batches[number]

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
