"""Every block that prefetching has asked for, from its issue until it has settled.

    issue ─▶ on its way ─ landed ─▶ unread ─ a load reads it ─▶ used
                 │                     └─ evicted, retired, expired or disowned ─▶ wasted
                 └─ withdrawn: cancelled or failed

Rules:
- A block holds one reservation from its issue until it settles, whatever the way; `_settle` is
  the only place that gives one back. So reserved bytes are the bytes on their way plus the bytes
  that lie unread, at every moment, and nothing when everything has settled.
- A block is on its way once: who wants it too becomes another owner of it. One whose owners have
  all ended is wasted, for nobody is expected to read it any more.
- A block that had not landed when a load wanted it, or when its request was expected to start,
  has missed its deadline; that is counted once, and it may still be used.
- A load that read the block from its slower tier meanwhile had no use of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sidecar.prefetch.budget import Budget, Denial, Denied, Reservation
from sidecar.prefetch.waste_gates import Passed, WasteGates
from storage.block import BlockAddress
from storage.lifecycle import Resident
from storage.tiers.protocol import TierName
from strongroom.clock import Clock
from strongroom.identity import ComponentId

Owner = object
"""Whoever expects to read a block: compared by identity."""

_SWEEP_STEP = 256


class Ending(StrEnum):
    """How a block settled."""

    USED = "used"
    WASTED = "wasted"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)
class Moved:
    """How many, and how many bytes of records."""

    blocks: int = 0
    bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.blocks += 1
        self.bytes += nbytes


@dataclass(slots=True)
class LedgerCounts:
    """Since start."""

    issued: Moved = field(default_factory=Moved)
    completed: Moved = field(default_factory=Moved)
    used: Moved = field(default_factory=Moved)
    wasted: Moved = field(default_factory=Moved)
    cancelled: Moved = field(default_factory=Moved)
    failed: Moved = field(default_factory=Moved)
    deadline_missed: Moved = field(default_factory=Moved)
    refused: dict[Denial, Moved] = field(default_factory=dict)
    leaked: int = 0
    crashed: int = 0

    def refuse(self, reason: Denial, nbytes: int = 0) -> None:
        self.refused.setdefault(reason, Moved()).add(nbytes)

    def of(self, ending: Ending) -> Moved:
        match ending:
            case Ending.USED:
                return self.used
            case Ending.WASTED:
                return self.wasted
            case Ending.CANCELLED:
                return self.cancelled
            case Ending.FAILED:
                return self.failed


@dataclass(eq=False, slots=True)
class Issued:
    """One block under way or unread. Only the ledger changes it."""

    address: BlockAddress
    reservation: Reservation
    admitted: Passed
    deadline_ns: int | None
    expires_ns: int
    owners: set[Owner] = field(default_factory=set)
    landed: bool = False
    late: bool = False
    read_from: TierName | None = None
    """Where a load had it from while it was still on its way."""
    watchers: list[asyncio.Event] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.reservation.nbytes

    def watch(self) -> asyncio.Event:
        """An event of the caller's own, set when the block has landed or never will."""
        event = asyncio.Event()
        self.watchers.append(event)
        return event

    def tell(self) -> None:
        """It has landed, or never will."""
        for event in self.watchers:
            event.set()
        self.watchers.clear()


def _untold(_tenant: ComponentId, _used: bool) -> None:
    """Nobody asked."""


class Ledger:
    """Used on the event loop's thread; no step awaits."""

    def __init__(self, budget: Budget, waste: WasteGates, clock: Clock) -> None:
        self._budget = budget
        self._waste = waste
        self._clock = clock
        self._blocks: dict[BlockAddress, Issued] = {}
        self._owned: dict[Owner, set[Issued]] = {}
        self.counts = LedgerCounts()
        self.told: Callable[[ComponentId, bool], None] = _untold
        """Called with each block that was used (True) or wasted: whose it was."""

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, address: BlockAddress) -> Issued | None:
        """The block, while it is on its way or unread."""
        return self._blocks.get(address)

    def issue(
        self, owner: Owner, resident: Resident, *, deadline_ns: int | None, expires_ns: int
    ) -> Issued | Denied:
        """Reserve room for a block that is not in the ledger, and count it as issued."""
        assert resident.address not in self._blocks
        reserved = self._budget.reserve(resident.tenant, resident.nbytes)
        if isinstance(reserved, Denied):
            self.counts.refuse(reserved.reason, resident.nbytes)
            return reserved
        admitted = self._waste.admit(resident.tenant)
        if admitted is None:
            self._budget.release(reserved)
            self.counts.refuse(Denial.WASTE, resident.nbytes)
            return Denied(Denial.WASTE)
        block = Issued(resident.address, reserved, admitted, deadline_ns, expires_ns)
        self._blocks[resident.address] = block
        self.own(owner, block)
        self.counts.issued.add(resident.nbytes)
        return block

    def landed(self, block: Issued) -> None:
        """It is in the faster tier now."""
        if self._blocks.get(block.address) is not block or block.landed:
            return
        self._check_deadline(block)
        block.landed = True
        block.tell()
        self.counts.completed.add(block.nbytes)
        if block.read_from is not None:
            used = block.read_from is TierName.HOST
            self._settle(block, Ending.USED if used else Ending.WASTED)
        elif not block.owners:
            self._settle(block, Ending.WASTED)

    def withdraw(self, block: Issued, ending: Ending) -> None:
        """It was on its way and will not come; nothing happens to one that has landed."""
        if self._blocks.get(block.address) is block and not block.landed:
            self._check_deadline(block)
            self._settle(block, ending)

    def wanted(self, address: BlockAddress) -> Issued | None:
        """A load wants the block now: what is still on its way has missed its deadline."""
        block = self._blocks.get(address)
        if block is None or block.landed:
            return None
        self._miss(block)
        return block

    def was_read(self, address: BlockAddress, tier: TierName) -> None:
        """A load has read the block from `tier`."""
        block = self._blocks.get(address)
        if block is None:
            return
        if not block.landed:
            block.read_from = tier
            return
        self._settle(block, Ending.USED if tier is TierName.HOST else Ending.WASTED)

    def own(self, owner: Owner, block: Issued) -> None:
        """One more that expects to read it."""
        if self._blocks.get(block.address) is block:
            block.owners.add(owner)
            self._owned.setdefault(owner, set()).add(block)

    def disown(self, owner: Owner) -> None:
        """`owner` will read nothing any more."""
        for block in self._owned.pop(owner, ()):
            block.owners.discard(owner)
            if not block.owners and block.landed:
                self._settle(block, Ending.WASTED)

    def sweep(self, in_host: Callable[[BlockAddress], bool]) -> Iterator[None]:
        """Settle what is gone or has expired unread, and take back what leaked.

        Gives way after every few blocks, and looks at what is there when it goes on.
        """
        for count, block in enumerate(tuple(self._blocks.values()), start=1):
            still = block.landed and self._blocks.get(block.address) is block
            if still and (block.expires_ns <= self._clock() or not in_host(block.address)):
                self._settle(block, Ending.WASTED)
            if count % _SWEEP_STEP == 0:
                yield
        if len(self._budget) != len(self._blocks):
            wanted = [block.reservation for block in self._blocks.values()]
            self.counts.leaked += self._budget.reconcile(wanted)

    @property
    def on_its_way_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values() if not block.landed)

    @property
    def unread_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values() if block.landed)

    def by_tenant(self) -> Mapping[ComponentId, int]:
        """Bytes on their way and unread, by tenant."""
        totals: dict[ComponentId, int] = {}
        for block in self._blocks.values():
            tenant = block.reservation.tenant
            totals[tenant] = totals.get(tenant, 0) + block.nbytes
        return totals

    def faults(self) -> tuple[str, ...]:
        """What does not add up; empty is the promise."""
        found = list(self._budget.faults())
        if dict(self.by_tenant()) != dict(self._budget.used()):
            found.append("reserved bytes are not the bytes on their way and unread")
        counts = self.counts
        on_its_way = sum(1 for block in self._blocks.values() if not block.landed)
        unread = len(self._blocks) - on_its_way
        left = counts.completed.blocks + counts.cancelled.blocks + counts.failed.blocks
        if counts.issued.blocks != on_its_way + left:
            found.append("issued is not on its way, completed, cancelled and failed")
        if counts.completed.blocks != unread + counts.used.blocks + counts.wasted.blocks:
            found.append("completed is not unread, used and wasted")
        if any(block.landed and not block.owners for block in self._blocks.values()):
            found.append("an unread block belongs to nobody")
        owned = {block for blocks in self._owned.values() for block in blocks}
        if owned != {block for block in self._blocks.values() if block.owners}:
            found.append("an owner of a block that is not there, or the reverse")
        return tuple(found)

    def _settle(self, block: Issued, ending: Ending) -> None:
        """The one place where a block leaves and its reservation is given back."""
        del self._blocks[block.address]
        for owner in block.owners:
            owned = self._owned.get(owner)
            if owned is not None:
                owned.discard(block)
                if not owned:
                    del self._owned[owner]
        self._budget.release(block.reservation)
        self.counts.of(ending).add(block.nbytes)
        block.tell()
        match ending:
            case Ending.USED:
                self._waste.used(block.admitted, block.nbytes)
                self.told(block.reservation.tenant, True)
            case Ending.WASTED:
                self._waste.wasted(block.admitted, block.nbytes)
                self.told(block.reservation.tenant, False)
            case Ending.CANCELLED | Ending.FAILED:
                self._waste.withdrawn(block.admitted)

    def _check_deadline(self, block: Issued) -> None:
        if block.deadline_ns is not None and self._clock() > block.deadline_ns:
            self._miss(block)

    def _miss(self, block: Issued) -> None:
        if not block.late:
            block.late = True
            self.counts.deadline_missed.add(block.nbytes)
