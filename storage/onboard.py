"""Onboarding: blocks that only NVMe has come into host memory, ahead of who opens them.

    Searched ─hold (in host already)──────────────────────────▶ Ready ─release─▶ Released
        └─stage─▶ Staged (host room, read under way) ─publish─▶ Ready
    any of them ─▶ Failed(cause)

Rules:
- Records move as they are: no key is needed and nothing is opened. A record that is not the block
  its index row names is not taken; whether it opens is for whoever opens it to find out.
- Reading ahead is bounded in blocks and bytes, counted from the block that is asked for.
- A block that fails, fails alone; what follows it in the chain is given up, for without its parent
  it could not be used. Blocks before it are not touched by that. A block for which there is no host
  room is the exception: whoever needs it reads it past the host tier, and the chain goes on.
- Every hold has a deadline. A watchdog releases what outlives it and counts it; a read that ends
  after its deadline is dropped.
- Fence and retired set are checked before a read and right before it is published, with no `await`
  between check and publication.
- Leaving the context, also by cancellation, returns when no thread writes into host room any more;
  what was not published gives its room back, and every hold is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from storage.block import BlockAddress
from storage.fence import Fence
from storage.header import HEADER_BYTES, Header, clear_placement, read_header
from storage.lifecycle import Reserved, Resident, weaken
from storage.residency import Copies, Residency
from storage.retention import Retention
from storage.tiers.nvme import NvmeTier
from storage.tiers.protocol import TierName
from strongroom.blocks import ROOT_PARENT
from strongroom.clock import Clock
from strongroom.errors import Corrupt, Missing, Overloaded, QuotaExceeded, StrongroomError

_WATCHES: Final = 4
"""A hold is released at most a fourth of its time after its deadline."""


@dataclass(frozen=True, slots=True)
class OnboardSettings:
    """How far reading runs ahead of the block that is asked for, and how long a hold lasts."""

    ahead_blocks: int = 8
    ahead_bytes: int = 128 * 1024 * 1024
    hold_ns: int = 30_000_000_000


@dataclass(frozen=True, slots=True)
class Searched:
    """Asked for; nothing was done yet."""

    address: BlockAddress


@dataclass(frozen=True, slots=True)
class Staged:
    """Host room is reserved, and the record is being read into it."""

    address: BlockAddress
    resident: Resident
    reserved: Reserved
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Ready:
    """In host memory and held there until `deadline_ns`; `tier` is where it came from."""

    address: BlockAddress
    tier: TierName
    nbytes: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Released:
    """It was ready, and is not held any more."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class Failed:
    """It did not come."""

    address: BlockAddress
    cause: StrongroomError


OnboardState = Searched | Staged | Ready | Released | Failed


@dataclass(frozen=True, slots=True)
class OnboardStatistics:
    """Counters since start; `held` and `reading` are now."""

    brought: int
    brought_bytes: int
    failed: int
    overdue: int
    """Holds that the watchdog released, and reads that ended after their deadline."""
    held: int
    reading: int


@dataclass(slots=True)
class _Counts:
    brought: int = 0
    brought_bytes: int = 0
    failed: int = 0
    overdue: int = 0


FailedToRead = Callable[[BlockAddress, Copies, StrongroomError], StrongroomError]
"""Counts a block that could not be read, drops it where it must be; returns what to raise."""


class Onboard:
    """Every onboarding of one store. Used on the event loop's thread."""

    def __init__(
        self,
        residency: Residency,
        clock: Clock,
        failed: FailedToRead,
        settings: OnboardSettings | None = None,
    ) -> None:
        self.residency = residency
        self.clock = clock
        self.failed = failed
        self.settings = settings or OnboardSettings()
        self.counts = _Counts()
        self._open: set[Onboarding] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, addresses: Sequence[BlockAddress], fence: Fence) -> Onboarding:
        """An async context manager; `addresses` are one chain, parents first."""
        return Onboarding(self, tuple(addresses), fence)

    def enter(self, onboarding: Onboarding) -> None:
        self._open.add(onboarding)
        self._watch_later()

    def leave(self, onboarding: Onboarding) -> None:
        self._open.discard(onboarding)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def watch(self) -> None:
        """Release every hold that has outlived its deadline."""
        now_ns = self.clock()
        for onboarding in tuple(self._open):
            self.counts.overdue += onboarding.release_overdue(now_ns)

    def statistics(self) -> OnboardStatistics:
        """A frozen snapshot."""
        counts = self.counts
        states = [state for onboarding in self._open for state in onboarding.states]
        return OnboardStatistics(
            brought=counts.brought,
            brought_bytes=counts.brought_bytes,
            failed=counts.failed,
            overdue=counts.overdue,
            held=sum(isinstance(state, Ready) for state in states),
            reading=sum(isinstance(state, Staged) for state in states),
        )

    def _watch_later(self) -> None:
        if self._timer is None:
            every_s = self.settings.hold_ns / 1e9 / _WATCHES
            self._timer = asyncio.get_running_loop().call_later(every_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.watch()
        if self._open:
            self._watch_later()


class Onboarding:
    """One chain on its way; made by `BlockStore.onboard`."""

    def __init__(self, owner: Onboard, addresses: tuple[BlockAddress, ...], fence: Fence) -> None:
        self._owner = owner
        self._residency = owner.residency
        self._fence = fence
        self._states: list[OnboardState] = [Searched(address) for address in addresses]
        self._holds: dict[int, ExitStack] = {}
        self._asked = 0
        self._begun = 0
        self._news = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._reads: set[asyncio.Task[None]] = set()

    @property
    def states(self) -> tuple[OnboardState, ...]:
        """What each block has come to."""
        return tuple(self._states)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._owner.enter(self)
        self._read_ahead()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for task in tuple(self._reads):
                task.cancel()
            # Without the error: reads are waited for, also when whoever reads was cancelled.
            await self._tasks.__aexit__(None, None, None)
        finally:
            for index in range(len(self._states)):
                self._give_up(index)
                self.release(index)
            self._owner.leave(self)

    async def ready(self, index: int) -> Ready:
        """Block `index`, once it is in host memory; asked for in rising order.

        Raises what kept it from getting there; `Missing` for one that was given up.
        """
        self._asked = max(self._asked, index)
        self._read_ahead()
        while True:
            match self._states[index]:
                case Ready() as ready:
                    return ready
                case Released(ready):
                    return ready
                case Failed(cause=cause):
                    raise cause
                case Searched() | Staged():
                    self._news.clear()
                    await self._news.wait()

    def release(self, index: int) -> None:
        """Whoever asked has what it needs. Repeatable."""
        hold = self._holds.pop(index, None)
        if hold is not None:
            hold.close()
        state = self._states[index]
        if isinstance(state, Ready):
            self._states[index] = Released(state)

    def release_overdue(self, now_ns: int) -> int:
        """Release the holds whose deadline is over; how many."""
        overdue = [
            index
            for index, state in enumerate(self._states)
            if isinstance(state, Ready) and state.deadline_ns <= now_ns
        ]
        for index in overdue:
            self.release(index)
        return len(overdue)

    def _read_ahead(self) -> None:
        """Begin what the window allows. It is refilled by halves, so that reads come together."""
        settings, states = self._owner.settings, self._states
        if self._begun > self._asked + settings.ahead_blocks // 2:
            return
        begun: list[int] = []
        staged = [state for state in states[self._asked : self._begun] if isinstance(state, Staged)]
        ahead = sum(state.resident.nbytes for state in staged)
        while self._begun < min(len(states), self._asked + settings.ahead_blocks):
            index = self._begun
            nbytes = self._wanted_bytes(index)
            if ahead + nbytes > settings.ahead_bytes and index > self._asked:
                break
            if isinstance(states[index], Searched) and not self._begin(index):
                break  # no room now: it is tried again when it is asked for
            ahead += nbytes
            self._begun += 1
            if isinstance(states[index], Staged):
                begun.append(index)
        if begun and self._residency.nvme is not None:
            task = self._tasks.create_task(self._read(self._residency.nvme, begun), name="onboard")
            self._reads.add(task)
            task.add_done_callback(self._reads.discard)

    def _wanted_bytes(self, index: int) -> int:
        state = self._states[index]
        if not isinstance(state, Searched):
            return 0
        waiting = self._residency.waiting_on_nvme(state.address)
        return 0 if waiting is None else waiting.nbytes

    def _begin(self, index: int) -> bool:
        """Hold the block where it is in host; else reserve room for reading it.

        False, with nothing done, where there is no room and nobody asks for the block yet.
        """
        address = _address(self._states[index])
        residency = self._residency
        try:
            here = residency.host.resident(address)
            resident = here
            if here is None and residency.nvme is not None:
                resident = residency.nvme.resident(address)
            if resident is None:
                raise self._failed(address, Missing("not resident"))
            residency.check(resident.namespace, self._fence)
            if here is not None:
                self._hold(index, here, TierName.HOST)
                return True
            parent = _address(self._states[index - 1]).block if index else ROOT_PARENT
            reserved = residency.host.reserve(
                address, parent, resident.tenant, resident.namespace, resident.nbytes
            )
        except (Overloaded, QuotaExceeded) as error:
            if index > self._asked:
                return False
            self._fail(index, error)
            return True
        except StrongroomError as error:
            self._fail(index, error)
            return True
        deadline_ns = self._owner.clock() + self._owner.settings.hold_ns
        self._states[index] = Staged(address, resident, reserved, deadline_ns)
        return True

    async def _read(self, nvme: NvmeTier, indexes: list[int]) -> None:
        """Read what is staged; each block is settled as its bytes are there."""
        host = self._residency.host
        views = []
        wanted: list[tuple[BlockAddress, memoryview]] = []
        for index in indexes:
            state = self._states[index]
            assert isinstance(state, Staged)
            views.append(host.buffer(state.reserved))
            wanted.append((state.address, views[-1]))

        def done(number: int, error: StrongroomError | None) -> None:
            self._settle(indexes[number], views[number], error)

        try:
            await nvme.read_many(wanted, done)
        except StrongroomError as error:
            for number in range(len(indexes)):
                done(number, error)
        finally:
            # What a cancellation left unsettled: no thread writes there any more.
            for index, view in zip(indexes, views, strict=True):
                view.release()
                self._give_up(index)
            self._news.set()

    def _give_up(self, index: int) -> None:
        """Give back the room of a block that nothing is read into any more, or ever was.

        A task that is cancelled before its first step never gets to its own `finally`.
        """
        state = self._states[index]
        if isinstance(state, Staged):
            self._residency.host.abandon(state.reserved)
            self._states[index] = Failed(state.address, Missing("given up"))

    def _settle(self, index: int, record: memoryview, error: StrongroomError | None) -> None:
        """Publish what was read, or give its room back. Nothing is awaited in here."""
        state = self._states[index]
        if not isinstance(state, Staged):
            return
        host = self._residency.host
        try:
            if error is not None:
                raise self._failed(state.address, error, state.resident)
            if self._owner.clock() >= state.deadline_ns:
                self._owner.counts.overdue += 1
                raise Overloaded("read too late")
            header = self._header(state, record)
            self._residency.check(state.resident.namespace, self._fence)
        except StrongroomError as cause:
            host.abandon(state.reserved)
            self._fail(index, cause)
            return
        # The disk's own stamp stays on the disk.
        clear_placement(record)
        resident = host.resident(state.address)
        if resident is not None:
            host.abandon(state.reserved)
        else:
            nvme = self._residency.nvme
            resident = host.publish(
                host.seal(state.reserved, header),
                _admit_any,
                Retention() if nvme is None else nvme.retention_of(state.address),
            )
        self._owner.counts.brought += 1
        self._owner.counts.brought_bytes += resident.nbytes
        self._hold(index, resident, TierName.NVME)

    def _header(self, state: Staged, record: memoryview) -> Header:
        """The record's header, if the record is what the index says. Raises `Corrupt`."""
        try:
            header = read_header(memoryview(bytes(record[:HEADER_BYTES])))
        except Corrupt as error:
            raise self._failed(state.address, error, state.resident) from error
        found, resident = header.context, state.resident
        named = (state.address, resident.tenant, resident.namespace, resident.nbytes)
        if (found.address, found.tenant, found.namespace, header.record_bytes) != named:
            wrong = Corrupt("the record is another block's")
            raise self._failed(state.address, wrong, state.resident)
        return header

    def _failed(
        self, address: BlockAddress, error: StrongroomError, read: Resident | None = None
    ) -> StrongroomError:
        """`read` is the writing on NVMe that was read: no other one is dropped for it."""
        nvme = None if read is None else weaken(read)
        return self._owner.failed(address, Copies(None, nvme), error)

    def _hold(self, index: int, resident: Resident, tier: TierName) -> None:
        stack = ExitStack()
        stack.enter_context(self._residency.host.upgrade(weaken(resident)))
        self._holds[index] = stack
        deadline_ns = self._owner.clock() + self._owner.settings.hold_ns
        self._states[index] = Ready(resident.address, tier, resident.nbytes, deadline_ns)
        self._news.set()

    def _fail(self, index: int, cause: StrongroomError) -> None:
        """This block alone failed; those behind it that nobody has begun are given up.

        Not so where there was no room for it: it may be read past the host tier, and there may be
        room for those behind it once they are asked for.
        """
        self._owner.counts.failed += 1
        self._states[index] = Failed(_address(self._states[index]), cause)
        self._news.set()
        if isinstance(cause, Overloaded | QuotaExceeded):
            return
        for later in range(index + 1, len(self._states)):
            state = self._states[later]
            if isinstance(state, Searched):
                gone = Missing("a block before it in the chain did not come")
                self._states[later] = Failed(state.address, gone)
        self._news.set()


def _address(state: OnboardState) -> BlockAddress:
    match state:
        case Released(ready):
            return ready.address
        case Searched(address) | Staged(address=address) | Ready(address=address):
            return address
        case Failed(address=address):
            return address


def _admit_any() -> None:
    """Nothing awaited since the check: there is nothing to check again."""
