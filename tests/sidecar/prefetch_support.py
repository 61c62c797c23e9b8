"""A real store with blocks on NVMe alone, a shelf with barriers before it, and a clock by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from sidecar.prefetch.prefetcher import Prefetcher
from sidecar.prefetch.settings import PrefetchSettings
from sidecar.prefetch.shelf import Onboarding, Shelf
from storage.block import BlockAddress
from storage.compose import StoreSettings, open_store
from storage.fence import Fence
from storage.lifecycle import Resident
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from tests.storage.support import KEYS, FakeClock, context, plaintext

MIB = 1024 * 1024
RECORD = 16 * 1024
"""Bytes of a record of `segments`."""
SEGMENTS = (5000, 4000)


class Barrier:
    """Holds whoever arrives until it is lifted."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.lifted = asyncio.Event()

    async def __call__(self) -> None:
        self.arrived.set()
        await self.lifted.wait()


class GatedShelf:
    """The real shelf; `barriers` are met on entering, before and after each block, on leaving."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.barriers: dict[str, Barrier] = {}
        self.faulty: set[BlockAddress] = set()
        self.moved: list[BlockAddress] = []
        """What was asked to be brought, in order."""

    def at(self, place: str) -> Barrier:
        """`enter`, `before 0`, `after 0`, ..., `leave`."""
        return self.barriers.setdefault(place, Barrier())

    async def meet(self, place: str) -> None:
        barrier = self.barriers.get(place)
        if barrier is not None:
            await barrier()

    def tier_of(self, address: BlockAddress) -> TierName | None:
        return self._shelf.tier_of(address)

    def waiting_on_nvme(self, address: BlockAddress) -> Resident | None:
        if address in self.faulty:
            raise RuntimeError("as a bug would")
        return self._shelf.waiting_on_nvme(address)

    @asynccontextmanager
    async def onboard(
        self, addresses: Sequence[BlockAddress], fence: Fence
    ) -> AsyncIterator[Onboarding]:
        await self.meet("enter")
        async with self._shelf.onboard(addresses, fence) as onboarding:
            yield _Gated(self, onboarding, addresses)
            await self.meet("leave")


class _Gated:
    def __init__(
        self, shelf: GatedShelf, onboarding: Onboarding, addresses: Sequence[BlockAddress]
    ) -> None:
        self._shelf = shelf
        self._onboarding = onboarding
        self._addresses = addresses

    async def ready(self, index: int) -> None:
        await self._shelf.meet(f"before {index}")
        self._shelf.moved.append(self._addresses[index])
        await self._onboarding.ready(index)
        await self._shelf.meet(f"after {index}")


class HandWait:
    """`Wait` on a clock that tests move: who waits is woken when its time has come."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._waiting: list[tuple[int, asyncio.Event]] = []

    async def __call__(self, event: asyncio.Event, until_ns: int) -> None:
        if event.is_set() or self._clock() >= until_ns:
            return
        self._waiting.append((until_ns, event))
        await event.wait()

    @property
    def until_ns(self) -> list[int]:
        """Until when somebody waits."""
        return [until_ns for until_ns, event in self._waiting if not event.is_set()]

    def advance_s(self, seconds: float) -> None:
        self._clock.advance_s(seconds)
        for until_ns, event in self._waiting:
            if until_ns <= self._clock():
                event.set()


class Scene:
    """What a test of the prefetcher alone needs."""

    def __init__(self, store: BlockStore, settings: PrefetchSettings) -> None:
        self.store = store
        self.clock = FakeClock()
        self.wait = HandWait(self.clock)
        self.shelf = GatedShelf(store)
        self.prefetcher = Prefetcher(self.shelf, settings, self.clock, self.wait)
        self.fence = Fence()

    async def on_nvme(self, *numbers: int, tenant: int = 1, room: int = 1) -> list[BlockAddress]:
        """Blocks that only NVMe has."""
        made = []
        for number in numbers:
            wanted = context(number, tenant=tenant, room=room, segments=SEGMENTS)
            await self.store.save(wanted, KEYS, plaintext(wanted), Fence())
            made.append(wanted.address)
        await self.store.flush()
        for address in made:
            push_out(self.store, address)
            assert self.store.tier_of(address) is TierName.NVME
        return made

    async def quiet(self) -> None:
        """No prefetch is planned or under way any more."""
        await until(lambda: not self.prefetcher.statistics().pending)

    def sweep(self) -> None:
        for _ in self.prefetcher.sweep():
            pass

    def settled(self) -> bool:
        """Everything adds up, and nothing is reserved or under way."""
        assert self.prefetcher.faults() == ()
        found = self.prefetcher.statistics()
        return (found.pending, found.pending_bytes, found.on_its_way_bytes) == (0, 0, 0)


def push_out(store: BlockStore, address: BlockAddress) -> None:
    """Evict a block from host memory."""
    assert store._residency.host.evict(address)


async def until(holds: Callable[[], bool]) -> None:
    """What another task or thread does has no event of its own to wait for."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Let everything run that can run."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def scene(directory: Path, **changes: object) -> AsyncIterator[Scene]:
    """A prefetcher over a real store in `directory`."""
    # A read that hangs is given up in the one test that is about it: nowhere else may it help out.
    fields: dict[str, object] = {
        "total_bytes": MIB,
        "tenant_bytes": MIB,
        "sweep_s": 3600.0,
        "read_s": 3600.0,
    }
    settings = PrefetchSettings(**(fields | changes))  # type: ignore[arg-type]
    stored = StoreSettings(
        host_bytes=4 * MIB,
        nvme_path=directory / "nvme",
        nvme_bytes=8 * MIB,
        region_bytes=MIB,
        crypto_threads=1,
        write_behind_s=0.001,
        lock_memory=False,
    )
    async with open_store(stored) as store:
        made = Scene(store, settings)
        async with made.prefetcher.running():
            yield made
