"""Which block leaves next. Columns and intrusive lists over slot numbers; no object a block.

The order, from the outside in:
- **Tenant.** With `Shares`, the one furthest above its share pays, and nobody at or below its
  guarantee pays for another. A writer takes nothing from a tenant that is less far above its
  share than itself: who floods a tier displaces its own blocks, or is refused.
- **Priority**, the lowest first. A priority above the default ages: a point is lost for each
  `ageing_s` without a use, down to the default, so that everlasting 100s starve nobody. One with
  a duration is the default after it. Blocks above the default that hold more than
  `high_share_max` of their tenant's bytes pay before the others, so that they can't fill a tier.
- **Recency and frequency**, as ARC has it (Megiddo and Modha, FAST 2003). What is stored for the
  first time is *fresh*; what was used since, or comes back after it left, is *proven*; each kind
  leaves in the order of its last use. A fresh block leaves before a proven one that was used
  later; where the proven one is the older, the fresh ones' share of the room decides, which
  follows what comes back: a fresh block that left too early makes it more, a proven one less.
  ARC's ghost lists are a table of two bytes a block here.
- **Leaves only.** A child without its parent can never match. A parent that is met is parked
  outside its queue and comes back to the cold end when its last child has gone.
- Never one that is spared: that somebody holds, or that the caller cannot let go now. What stays
  so for long, a block on its way to another tier, is parked as parents are, so that a walk steps
  over it once and not every time.

A use is a few array writes. A victim costs O(1) amortised in blocks (each
step past a block is paid for by its use, its storing or its child), O(queues) of one tenant, and
O(tenants) once an iteration.

Slots are numbers that are used again; `generation` tells one use of a slot from the next. A
parent that goes before its children keeps its slot until they have gone.
"""

from __future__ import annotations

import array
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from storage.ghosts import Ghosts
from storage.retention import PRIORITY_DEFAULT, Retention
from storage.shares import Shares
from strongroom.clock import Clock
from strongroom.identity import ComponentId

NONE: Final = -1
"""No slot."""
_TICK_BITS: Final = 25
"""Times are kept in ticks of 2**25 ns, 34 ms: 32 bits last four years."""
_TICK_MAX: Final = 2**32 - 1
_SLOT_MASK: Final = 2**32 - 1
_FRESH_FIRST: Final = 0.5
"""Room of the fresh, in parts of the whole, before anything has come back."""


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """Policy of one tier."""

    ageing_s: float = 30.0
    """Time without a use that costs a priority above the default one point."""
    high_share_max: float = 0.5
    """Of a tenant's bytes, the most that priorities above the default protect."""


def _never(_: int) -> bool:
    return False


class _State(IntEnum):
    """Where a slot is."""

    FREE = 0
    FRESH = 1
    PROVEN = 2
    GONE = 3
    """Removed, but children still name it as their parent."""


class _Chain:
    """A list from cold to hot; `nbytes` counts what is parked outside as well."""

    __slots__ = ("head", "nbytes", "tail")

    def __init__(self) -> None:
        self.head = NONE
        self.tail = NONE
        self.nbytes = 0


class _Queue:
    """The blocks of one tenant at one priority."""

    __slots__ = ("fresh", "fresh_share", "level", "number", "proven", "returned", "tenant")

    def __init__(self, number: int, tenant: _Tenant, level: int) -> None:
        self.number = number
        self.tenant = tenant
        self.level = level
        self.fresh = _Chain()
        self.proven = _Chain()
        self.fresh_share = _FRESH_FIRST
        self.returned = (1.0, 1.0)
        """How many came back lately after they left as fresh, and as proven."""

    @property
    def nbytes(self) -> int:
        return self.fresh.nbytes + self.proven.nbytes

    def came_back(self, nbytes: int, *, as_proven: bool) -> None:
        """Learn from a block that left and is stored again (ARC's rule, in parts of the whole)."""
        fresh, proven = self.returned
        step = nbytes / max(self.nbytes, nbytes)
        if as_proven:
            self.fresh_share = max(0.0, self.fresh_share - step * max(1.0, fresh / proven))
            proven += 1.0
        else:
            self.fresh_share = min(1.0, self.fresh_share + step * max(1.0, proven / fresh))
            fresh += 1.0
        faded = 0.5 if (fresh + proven) * step > 1.0 else 1.0
        self.returned = (fresh * faded, proven * faded)


class _Tenant:
    """A tenant's queues, by priority; forgotten with its last block."""

    __slots__ = ("blocks", "name", "queues")

    def __init__(self, name: ComponentId) -> None:
        self.name = name
        self.blocks = 0
        self.queues: dict[int, _Queue] = {}

    def is_high_full(self, share_max: float) -> bool:
        high = sum(queue.nbytes for queue in self.queues.values() if queue.level > PRIORITY_DEFAULT)
        return high > 0 and high > share_max * sum(queue.nbytes for queue in self.queues.values())


class Eviction:
    """Uses and order of the blocks of one tier."""

    def __init__(
        self,
        clock: Clock,
        shares: Shares | None,
        settings: EvictionSettings,
    ) -> None:
        self._clock = clock
        self._shares = shares
        self._settings = settings
        self._ageing_ticks = max(1, int(settings.ageing_s * 1e9) >> _TICK_BITS)
        self._ghosts = Ghosts()
        self._state = bytearray()
        self._linked = bytearray()
        self._timed = bytearray()
        """Whether its priority runs out."""
        self._generation = array.array("I")
        self._queue = array.array("I")
        self._cold = array.array("i")
        """The neighbour on the cold side; in a free slot the next free one."""
        self._hot = array.array("i")
        self._parent = array.array("i")
        self._children = array.array("I")
        self._used_at = array.array("I")
        """When it was used last, in ticks, for ageing."""
        self._use = array.array("I")
        """Which use of all that was, for the order; it wraps around."""
        self._uses = 0
        self._nbytes = array.array("Q")
        self._free = NONE
        self._count = 0
        self._queues: list[_Queue | None] = []
        self._free_queues: list[int] = []
        self._tenants: dict[ComponentId, _Tenant] = {}
        self._due: dict[int, array.array[int]] = {}
        """Stamps of blocks whose priority runs out, by the tick when it does."""
        self._due_ticks: list[int] = []
        self._is_parked: Callable[[int], bool] = _never

    def park_while(self, is_parked: Callable[[int], bool]) -> None:
        """A block for which this is true when it is met waits outside its queue for `unpark`."""
        self._is_parked = is_parked

    def unpark(self, slot: int) -> None:
        """It may leave again: back to the cold end, where it was met."""
        if not self._linked[slot] and not self._children[slot]:
            self._link_cold(self._chain(slot), slot)

    # Blocks

    @property
    def slots(self) -> int:
        """Slots that there are, in use or not."""
        return len(self._state)

    def is_here(self, slot: int) -> bool:
        """Whether the slot holds a block."""
        return self._state[slot] in {_State.FRESH, _State.PROVEN}

    def stamp(self, slot: int) -> int:
        """Tells this block of the slot from any other; never 0."""
        return self._generation[slot] << 32 | slot

    def slot_of(self, stamp: int) -> int:
        """The slot that a block with this stamp is in, or was."""
        return stamp & _SLOT_MASK

    def is_stamped(self, slot: int, stamp: int) -> bool:
        """Whether the block with this stamp is in the slot."""
        return self.stamp(slot) == stamp and self.is_here(slot)

    def nbytes(self, slot: int) -> int:
        """The block's size."""
        return self._nbytes[slot]

    def tenant(self, slot: int) -> ComponentId:
        """Whose block it is."""
        return self._queue_at(slot).tenant.name

    def parent(self, slot: int) -> int:
        """The slot of the block's parent, or `NONE`."""
        return self._parent[slot]

    def children(self, slot: int) -> int:
        """How many resident blocks name it as their parent."""
        return self._children[slot]

    def rank(self, slot: int) -> tuple[bool, int, bool, int]:
        """Where a block stands among its tenant's: the least leaves first, as in `victims`."""
        queue = self._queue_at(slot)
        is_high = queue.level > PRIORITY_DEFAULT
        is_cheap = is_high and queue.tenant.is_high_full(self._settings.high_share_max)
        fresh_pay = queue.fresh.nbytes >= queue.fresh_share * queue.nbytes
        is_kept = fresh_pay and self._state[slot] == _State.PROVEN
        return not is_cheap, self._aged(queue.level, slot, self._now()), is_kept, -self._age(slot)

    def retention(self, slot: int) -> Retention:
        """How a copy of the block in another tier is kept: its priority, unless that runs out."""
        level = self._queue_at(slot).level
        return Retention() if self._timed[slot] else Retention(level)

    def add(
        self, key: bytes, parent: int, tenant: ComponentId, nbytes: int, retention: Retention
    ) -> int:
        """Take a block in, as used now; its slot. `parent` is a slot or `NONE`."""
        slot = self._take_slot()
        queue = self._queue_of(tenant, retention.priority)
        left_as = self._ghosts.pop(key)
        known = left_as is not None
        if left_as is not None:
            queue.came_back(nbytes, as_proven=left_as)
        self._state[slot] = _State.PROVEN if known else _State.FRESH
        self._queue[slot] = queue.number
        queue.tenant.blocks += 1
        self._parent[slot] = parent
        self._children[slot] = 0
        now = self._used(slot)
        self._nbytes[slot] = nbytes
        if parent != NONE:
            self._children[parent] += 1
        chain = queue.proven if known else queue.fresh
        chain.nbytes += nbytes
        self._link_hot(chain, slot)
        self._timed[slot] = retention.duration_s is not None
        if retention.duration_s is not None and retention.priority != PRIORITY_DEFAULT:
            self._remember(now + (int(retention.duration_s * 1e9) >> _TICK_BITS) + 1, slot)
        self._count += 1
        self._ghosts.widen(self._count)
        return slot

    def touch(self, slot: int) -> None:
        """Count a use."""
        self._used(slot)
        queue = self._queue_at(slot)
        proven = queue.proven
        if self._state[slot] == _State.FRESH:
            if self._linked[slot]:
                self._unlink(queue.fresh, slot)
            self._state[slot] = _State.PROVEN
            queue.fresh.nbytes -= self._nbytes[slot]
            proven.nbytes += self._nbytes[slot]
        elif proven.tail == slot:
            return
        elif self._linked[slot]:
            self._unlink(proven, slot)
        self._link_hot(proven, slot)

    def remove(self, slot: int, key: bytes) -> None:
        """The block has gone."""
        self._ghosts.put(key, proven=self._state[slot] == _State.PROVEN)
        chain = self._chain(slot)
        chain.nbytes -= self._nbytes[slot]
        if self._linked[slot]:
            self._unlink(chain, slot)
        tenant = self._queue_at(slot).tenant
        tenant.blocks -= 1
        if not tenant.blocks:
            self._forget(tenant)
        self._count -= 1
        parent = self._parent[slot]
        if parent != NONE:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._without_children(parent)
        if self._children[slot]:
            self._state[slot] = _State.GONE
        else:
            self._give_back_slot(slot)

    # Order

    def victims(
        self,
        spared: Callable[[int], bool],
        tenant: ComponentId | None = None,
        writer: ComponentId | None = None,
    ) -> Iterator[int]:
        """Slots of blocks that may leave, in order; never one for which `spared(slot)`.

        `tenant` looks at that one's blocks alone; `writer` is for whom room is made, and pays
        with its own blocks also below its guarantee. What was given counts as given up,
        whether the caller removes it at once or later, and is not given again.
        """
        self._lapse()
        aside: list[int] = []
        try:
            for slot in self._in_order(spared, tenant, writer, aside):
                stamp = self.stamp(slot)
                yield slot
                if self.is_stamped(slot, stamp) and self._linked[slot]:
                    self._set_aside(slot, aside)
        finally:
            for stamp in reversed(aside):
                slot = stamp & _SLOT_MASK
                if self.is_stamped(slot, stamp) and not self._linked[slot]:
                    self._link_cold(self._chain(slot), slot)

    def _in_order(
        self,
        spared: Callable[[int], bool],
        tenant: ComponentId | None,
        writer: ComponentId | None,
        aside: list[int],
    ) -> Iterator[int]:
        if tenant is not None:
            one = self._tenants.get(tenant)
            choices = [] if one is None else [one]
        else:
            choices = list(self._tenants.values())
        if tenant is not None or self._shares is None:
            while (slot := self._coldest(choices, spared, aside)) != NONE:
                yield slot
            return

        def next_of(number: int) -> int:
            return self._coldest([choices[number]], spared, aside)

        names = [one.name for one in choices]
        yield from self.by_excess(self._shares, names, next_of, writer)

    def by_excess(
        self,
        shares: Shares,
        names: Sequence[ComponentId],
        next_of: Callable[[int], int],
        writer: ComponentId | None,
    ) -> Iterator[int]:
        """Slots of these tenants' blocks in the order in which tenants pay for a writer.

        `next_of(number)` is the slot that this tenant gives up next, or `NONE`.
        """
        given_up: Counter[ComponentId] = Counter()
        # In a tie the writer pays: then two tenants in balance stay in balance.
        payers = [
            (-shares.excess(name), name != writer, number) for number, name in enumerate(names)
        ]
        heapq.heapify(payers)
        while payers:
            _, others, number = payers[0]
            name = names[number]
            present = (-shares.excess(name, given_up[name]), others, number)
            if present > payers[0]:
                heapq.heapreplace(payers, present)
                continue
            least = 0.0 if writer is None else max(0.0, shares.excess(writer, given_up[writer]))
            slot = NONE
            if not others or -present[0] > least:
                slot = next_of(number)
            if slot == NONE or (
                others and not shares.may_lose(name, self._nbytes[slot] + given_up[name])
            ):
                heapq.heappop(payers)
                continue
            stamp, nbytes = self.stamp(slot), self._nbytes[slot]
            yield slot
            if self.is_stamped(slot, stamp):
                given_up[name] += nbytes

    def _coldest(
        self, choices: list[_Tenant], spared: Callable[[int], bool], aside: list[int]
    ) -> int:
        """The block that leaves first among these tenants' blocks."""
        best, best_slot = (0, 0, 0), NONE
        now = self._now()
        for tenant in choices:
            # Above their cap, high priorities pay first; where none of theirs can, the rest does.
            high_full = tenant.is_high_full(self._settings.high_share_max)
            for only_high in (True, False) if high_full else (False,):
                found = False
                for queue in tenant.queues.values():
                    if only_high and queue.level <= PRIORITY_DEFAULT:
                        continue
                    slot = self._cold_end(queue, spared, aside)
                    if slot == NONE:
                        continue
                    found = True
                    rank = (self._aged(queue.level, slot, now), -self._age(slot), queue.level)
                    if best_slot == NONE or rank < best:
                        best, best_slot = rank, slot
                if found:
                    break
        return best_slot

    def _aged(self, level: int, slot: int, now: int) -> int:
        if level <= PRIORITY_DEFAULT:
            return level
        idle = max(0, now - self._used_at[slot])
        return max(PRIORITY_DEFAULT, level - idle // self._ageing_ticks)

    def _cold_end(self, queue: _Queue, spared: Callable[[int], bool], aside: list[int]) -> int:
        """The block of a queue that leaves first; it stays where it is."""
        fresh = self._leaf(queue.fresh, spared, aside)
        proven = self._leaf(queue.proven, spared, aside)
        if NONE in {fresh, proven}:
            return max(fresh, proven)
        if self._age(fresh) > self._age(proven):
            return fresh
        return fresh if queue.fresh.nbytes >= queue.fresh_share * queue.nbytes else proven

    def _leaf(self, chain: _Chain, spared: Callable[[int], bool], aside: list[int]) -> int:
        """The coldest block of a chain that may leave."""
        while (slot := chain.head) != NONE:
            if self._children[slot] or self._is_parked(slot):
                self._unlink(chain, slot)  # parked
            elif spared(slot):
                self._set_aside(slot, aside)
            else:
                break
        return slot

    def _set_aside(self, slot: int, aside: list[int]) -> None:
        self._unlink(self._chain(slot), slot)
        aside.append(self.stamp(slot))

    # Durations

    def _remember(self, tick: int, slot: int) -> None:
        stamps = self._due.get(tick)
        if stamps is None:
            stamps = self._due[tick] = array.array("Q")
            heapq.heappush(self._due_ticks, tick)
        stamps.append(self.stamp(slot))

    def _lapse(self) -> None:
        """Bring blocks whose duration is over to the default priority."""
        now = self._now()
        while self._due_ticks and self._due_ticks[0] <= now:
            for stamp in self._due.pop(heapq.heappop(self._due_ticks)):
                slot = stamp & _SLOT_MASK
                if self.is_stamped(slot, stamp):
                    self._move(slot, PRIORITY_DEFAULT)

    def _move(self, slot: int, level: int) -> None:
        old = self._chain(slot)
        linked = self._linked[slot]
        if linked:
            self._unlink(old, slot)
        old.nbytes -= self._nbytes[slot]
        queue = self._queue_of(self.tenant(slot), level)
        self._queue[slot] = queue.number
        chain = self._chain(slot)
        chain.nbytes += self._nbytes[slot]
        if not linked:
            return
        if chain.head != NONE and self._age(slot) < self._age(chain.head):
            self._link_hot(chain, slot)
        else:
            self._link_cold(chain, slot)

    # Slots and lists

    def _used(self, slot: int) -> int:
        self._uses = (self._uses + 1) & _SLOT_MASK
        self._use[slot] = self._uses
        self._used_at[slot] = now = self._now()
        return now

    def _age(self, slot: int) -> int:
        """How many uses of any block ago it was used."""
        return (self._uses - self._use[slot]) & _SLOT_MASK

    def _now(self) -> int:
        return min(self._clock() >> _TICK_BITS, _TICK_MAX)

    def _queue_of(self, name: ComponentId, level: int) -> _Queue:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name)
        queue = tenant.queues.get(level)
        if queue is None:
            if not self._free_queues:
                self._free_queues.append(len(self._queues))
                self._queues.append(None)
            queue = tenant.queues[level] = _Queue(self._free_queues.pop(), tenant, level)
            self._queues[queue.number] = queue
        return queue

    def _queue_at(self, slot: int) -> _Queue:
        queue = self._queues[self._queue[slot]]
        assert queue is not None
        return queue

    def _forget(self, tenant: _Tenant) -> None:
        """Who was here once costs no walk anything; a slot without a block names no queue."""
        del self._tenants[tenant.name]
        for queue in tenant.queues.values():
            self._queues[queue.number] = None
            self._free_queues.append(queue.number)

    def _chain(self, slot: int) -> _Chain:
        queue = self._queue_at(slot)
        return queue.fresh if self._state[slot] == _State.FRESH else queue.proven

    def _without_children(self, parent: int) -> None:
        if self._state[parent] == _State.GONE:
            self._give_back_slot(parent)
        elif not self._linked[parent]:
            self._link_cold(self._chain(parent), parent)

    def _take_slot(self) -> int:
        slot = self._free
        if slot == NONE:
            slot = len(self._state)
            for flags in (self._state, self._linked, self._timed):
                flags.append(0)
            for column in (self._generation, self._queue, self._children, self._used_at, self._use):
                column.append(0)
            for neighbour in (self._cold, self._hot, self._parent):
                neighbour.append(NONE)
            self._nbytes.append(0)
        else:
            self._free = self._cold[slot]
        self._generation[slot] = (self._generation[slot] + 1) & _TICK_MAX or 1
        return slot

    def _give_back_slot(self, slot: int) -> None:
        self._state[slot] = _State.FREE
        self._cold[slot] = self._free
        self._free = slot

    def _link_hot(self, chain: _Chain, slot: int) -> None:
        self._cold[slot], self._hot[slot] = chain.tail, NONE
        if chain.tail == NONE:
            chain.head = slot
        else:
            self._hot[chain.tail] = slot
        chain.tail = slot
        self._linked[slot] = 1

    def _link_cold(self, chain: _Chain, slot: int) -> None:
        self._cold[slot], self._hot[slot] = NONE, chain.head
        if chain.head == NONE:
            chain.tail = slot
        else:
            self._cold[chain.head] = slot
        chain.head = slot
        self._linked[slot] = 1

    def _unlink(self, chain: _Chain, slot: int) -> None:
        cold, hot = self._cold[slot], self._hot[slot]
        if cold == NONE:
            chain.head = hot
        else:
            self._hot[cold] = hot
        if hot == NONE:
            chain.tail = cold
        else:
            self._cold[hot] = cold
        self._linked[slot] = 0
