"""The offloads under way, by stage: bounds, transitions and counts, without any waiting.

Rules:
- A handle is in one stage's room from `begin` until it ends, and leaves it in the very step in
  which it ends, whoever ended it; a batch leaves with its last member. So nothing that is over
  is ever left behind, and the bounds count only what is alive (`verify` says so, in tests).
- The fuller the rooms are, the higher the priority a block must have to be let in; at pressure
  1 none is. The same by the admission that was set: halved, documents stay out; at 0 all do.
- Who waits for the policy, and who goes into the next batch, is in turns by tenant and weight
  (`storage.fair_queue`): a flood's blocks stand before its own alone on their way to the disk.
- What is open is dirty: that is the duplicate guard, and what eviction steps over.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from storage.dirty import DirtyBlocks
from storage.ending import Cancelled, Cause, Completed, Failed, Outcome
from storage.fair import Weight, equal_weights
from storage.fair_queue import FairQueue
from storage.lifecycle import WeakReference
from storage.stages import Batched, Candidate, Committed, Gathered, Offload, Queued
from strongroom.clock import Clock
from strongroom.identity import ComponentId

_OVER: Final = 1.5
"""So far may tenants that come late go beyond the queue's bounds, all together."""
_EASY: Final = 0.5
"""Up to this pressure every priority is let in; from there the bar rises to 100 at 1."""
_BAR_MAX: Final = 75
"""The bar as admission nears 0. Half of it lies between documents and what was said before."""


class Trigger(StrEnum):
    """What closed a batch."""

    BLOCKS = "blocks"
    BYTES = "bytes"
    AGE = "age"
    END = "end"
    """The end of a request, with a slot idle."""
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


@dataclass(slots=True)
class _Held:
    blocks: int = 0
    nbytes: int = 0


_NOTHING: Final = _Held()


def _always(_: Mapping[ComponentId, int]) -> bool:
    return True


class Batch:
    """A closed batch; a member leaves when it is committed or ends."""

    __slots__ = ("members", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.members: dict[Offload, None] = {}


class Offloads:
    """Everything under way. `changed` is called after each end and each transition."""

    def __init__(
        self,
        dirty: DirtyBlocks,
        clock: Clock,
        settings: OffloadSettings,
        changed: Callable[[], None],
        weight: Weight = equal_weights,
        leave_guarantees: Callable[[Mapping[ComponentId, int]], bool] = _always,
    ) -> None:
        """`leave_guarantees` says whether the host tier's guarantees allow so many bytes of each
        tenant that can't be evicted.
        """
        self.queued: FairQueue[Offload] = FairQueue(weight)
        self.judging: dict[Offload, None] = {}
        self.gathered: FairQueue[Offload] = FairQueue(weight)
        self.batches: dict[int, Batch] = {}
        """Closed, and not in a slot's hands yet."""
        self._committed: dict[Offload, None] = {}
        self._open: dict[WeakReference, Offload] = {}
        self._dirty = dirty
        self._clock = clock
        self._settings = settings
        self._changed = changed
        self._weight = weight
        self._leave_guarantees = leave_guarantees
        self._held: dict[ComponentId, _Held] = {}
        """What each tenant has under way."""
        self._in_hand: dict[int, Batch] = {}
        self._moved_ns = clock()
        """When a write ended last, or the first one began."""
        self._bytes = 0
        self._gathered_bytes = 0
        self._admission = 1.0
        self._numbers = itertools.count(1)
        self._completed = 0
        self._there_before = 0
        self._cancelled = 0
        self._failed: Counter[Cause] = Counter()
        self._triggers: Counter[Trigger] = Counter()
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> tuple[Offload, ...]:
        """Every handle that has not ended, the oldest first."""
        return tuple(self._open.values())

    def find(self, reference: WeakReference) -> Offload | None:
        """The open handle of this writing."""
        return self._open.get(reference)

    # Being let in

    def admits(self, candidate: Candidate) -> bool:
        """Whether such a block may come in now."""
        pressure = self._pressure_of(candidate.tenant, candidate.nbytes)
        if pressure >= 1.0 or not self._admission:
            return False
        stuck = Counter({name: held.nbytes for name, held in self._held.items()})
        stuck[candidate.tenant] += candidate.nbytes
        if not self._leave_guarantees(stuck):
            return False
        bar = max((pressure - _EASY) / (1.0 - _EASY) * 100, (1.0 - self._admission) * _BAR_MAX)
        return candidate.retention.priority >= bar

    def set_admission(self, factor: float) -> None:
        """Let less in: 1 is normal, at 0 nothing new is let in."""
        self._admission = min(max(factor, 0.0), 1.0)

    # Transitions

    def begin(self, queued: Queued) -> Offload:
        """A new handle, waiting for the policy."""
        offload = Offload(queued, self._on_end)
        self._open[queued.reference] = offload
        self._dirty.add(offload.address)
        self._bytes += offload.nbytes
        held = self._held.setdefault(queued.candidate.tenant, _Held())
        held.blocks += 1
        held.nbytes += offload.nbytes
        self.queued.add(offload, queued.candidate.tenant, offload.nbytes)
        self._changed()
        return offload

    def next_to_judge(self) -> Offload:
        """The one whose tenant's turn it is, of those that the policy has not been asked about."""
        offload = self.queued.take()
        self.judging[offload] = None
        return offload

    def gather(self, offload: Offload) -> None:
        """The policy wants it and the precondition is met."""
        del self.judging[offload]
        offload.stage = Gathered(offload.queued)
        self.gathered.add(offload, offload.queued.candidate.tenant, offload.nbytes)
        self._gathered_bytes += offload.nbytes
        self._changed()

    def full(self) -> Trigger | None:
        """Whether what is gathered fills a batch."""
        if len(self.gathered) >= self._settings.batch_blocks_max:
            return Trigger.BLOCKS
        if self._gathered_bytes >= self._settings.batch_bytes_max:
            return Trigger.BYTES
        return None

    def age_left_s(self) -> float:
        """Until the oldest gathered block is due."""
        since_ns = min(offload.queued.since_ns for offload in self.gathered.oldest())
        return self._settings.batch_age_s - (self._clock() - since_ns) / 1e9

    def close_batch(self, trigger: Trigger) -> None:
        """Make a batch of what was gathered, in turns by tenant; one block at least."""
        batch = Batch(next(self._numbers))
        nbytes = 0
        while self.gathered:
            nbytes += self.gathered.first().nbytes
            full = len(batch.members) >= self._settings.batch_blocks_max
            if batch.members and (full or nbytes > self._settings.batch_bytes_max):
                break
            offload = self.gathered.take()
            self._gathered_bytes -= offload.nbytes
            offload.stage = Batched(offload.queued, batch.number)
            batch.members[offload] = None
        self.batches[batch.number] = batch
        self._triggers[trigger] += 1
        self._sizes[1 << (len(batch.members) - 1).bit_length()] += 1
        self._changed()

    def take_batch(self) -> Batch:
        """The oldest closed batch, for a slot that `lets_go` of it."""
        batch = self.batches.pop(next(iter(self.batches)))
        self._in_hand[batch.number] = batch
        self._changed()
        return batch

    def let_go(self, batch: Batch) -> None:
        """A slot has ended every member of its batch."""
        del self._in_hand[batch.number]
        self._changed()

    @property
    def busy_slots(self) -> int:
        return len(self._in_hand)

    def commit(self, offload: Offload, batch: Batch) -> None:
        """It is pinned: from here on it completes or fails."""
        del batch.members[offload]
        offload.stage = Committed(offload.queued, batch.number)
        if not self._committed:
            self._moved_ns = self._clock()
        self._committed[offload] = None

    def _on_end(self, offload: Offload, outcome: Outcome) -> None:
        match offload.stage:
            case Queued():
                self.queued.discard(offload)
                self.judging.pop(offload, None)
            case Gathered():
                self.gathered.discard(offload)
                self._gathered_bytes -= offload.nbytes
            case Batched(batch=number):
                batch = self.batches.get(number) or self._in_hand[number]
                del batch.members[offload]
                if not batch.members:
                    self.batches.pop(number, None)
            case Committed():
                del self._committed[offload]
                self._moved_ns = self._clock()
        del self._open[offload.queued.reference]
        self._dirty.remove(offload.address)
        self._bytes -= offload.nbytes
        tenant = offload.queued.candidate.tenant
        held = self._held[tenant]
        held.blocks -= 1
        held.nbytes -= offload.nbytes
        if not held.blocks:
            del self._held[tenant]
        match outcome:
            case Completed(stored=stored):
                self._completed += stored
                self._there_before += not stored
            case Cancelled():
                self._cancelled += 1
            case Failed(cause=cause):
                self._failed[cause] += 1
        self._changed()

    # What is here

    def stands_still(self) -> bool:
        """Whether writes are under way, and none has ended for as long as a save would wait."""
        waited_ns = self._clock() - self._moved_ns
        return bool(self._committed) and waited_ns >= self._settings.room_wait_s * 1e9

    @property
    def pressure(self) -> float:
        """How full it is, from 0; from 1 on nothing is let in."""
        return self._pressure_with(0)

    def statistics(self) -> OffloadStatistics:
        """A frozen snapshot."""
        first = next(iter(self._open.values()), None)
        age_ns = 0 if first is None else self._clock() - first.queued.since_ns
        return OffloadStatistics(
            completed=self._completed,
            there_before=self._there_before,
            cancelled=self._cancelled,
            failed=dict(self._failed),
            queued=len(self.queued) + len(self.judging),
            gathered=len(self.gathered),
            batched=sum(len(batch.members) for batch in self.batches.values()),
            committed=len(self._committed),
            pending_bytes=self._bytes,
            oldest_s=max(age_ns, 0) / 1e9,
            pressure=self.pressure,
            batches=dict(self._triggers),
            batch_sizes=dict(self._sizes),
        )

    def verify(self) -> None:
        """Raise `AssertionError` when something was left behind: for tests, between any steps."""
        closed = (*self.batches.values(), *self._in_hand.values())
        members = [
            *self.queued,
            *self.judging,
            *self.gathered,
            *(offload for batch in closed for offload in batch.members),
            *self._committed,
        ]
        assert len(set(members)) == len(members), "a handle is in one stage"
        assert set(members) == set(self._open.values()), "every open handle is in a stage"
        assert all(offload.outcome is None for offload in members), "what ended has left"
        assert all(batch.members for batch in self.batches.values()), "no closed batch is empty"
        assert self._bytes == sum(offload.nbytes for offload in members)
        assert self._gathered_bytes == sum(offload.nbytes for offload in self.gathered)
        assert len(self._dirty) == len(members), "what is dirty is under way"
        assert all(offload.address in self._dirty for offload in members)
        by_tenant = Counter(offload.queued.candidate.tenant for offload in members)
        assert by_tenant == {name: held.blocks for name, held in self._held.items()}
        assert self._bytes == sum(held.nbytes for held in self._held.values())
        assert {o for o in members if isinstance(o.stage, Committed)} == set(self._committed)

    def _pressure_with(self, nbytes: int) -> float:
        settings = self._settings
        return max(
            len(self._open) / settings.queue_max, (self._bytes + nbytes) / settings.queue_bytes_max
        )

    def _pressure_of(self, tenant: ComponentId, nbytes: int) -> float:
        """How full the queue is for a tenant: its part is split off by weight among those that
        have something under way, so that a flood fills its own part and nobody else's.

        Whoever comes when all is taken finds its part all the same, up to `_OVER` in all.
        """
        if self._pressure_with(nbytes) >= _OVER:
            return 1.0
        settings = self._settings
        weights = {name: self._weight(name) for name in (*self._held, tenant)}
        part = weights[tenant] / sum(weights.values())
        held = self._held.get(tenant, _NOTHING)
        return max(
            held.blocks / (part * settings.queue_max),
            (held.nbytes + nbytes) / (part * settings.queue_bytes_max),
        )
