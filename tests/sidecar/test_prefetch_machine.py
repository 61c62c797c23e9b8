"""Prefetches in any order of events: what is reserved is under way or unread, and nothing is left.

The shelf is a script: each block arrives, fails or is held up as the run says. What really moves
bytes is in `test_prefetch.py`; here it is the order of steps that is tried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.prefetch.patience import PatienceSettings, PrefetchPolicy
from sidecar.prefetch.prefetcher import Prefetch, Prefetcher
from sidecar.prefetch.settings import PrefetchSettings
from sidecar.prefetch.shelf import Onboarding
from sidecar.prefetch.waste import WasteSettings
from storage.block import BlockAddress
from storage.fence import Fence
from storage.lifecycle import Resident
from storage.tiers.protocol import TierName
from strongroom.errors import Unavailable
from tests.sidecar.prefetch_support import HandWait, turns
from tests.storage.support import FakeClock, block, component, namespace

BLOCKS = 8
BYTES = 4096
SECOND = 10**9


def address(number: int) -> BlockAddress:
    return BlockAddress(block(number), 0)


class Script:
    """Blocks on NVMe, and how many more of them may arrive."""

    def __init__(self) -> None:
        self.here: set[BlockAddress] = set()
        self.gone: set[BlockAddress] = set()
        self.failing = False
        self.leaving_slowly = False
        self.permits = asyncio.Semaphore(0)
        self.inside = 0

    def tier_of(self, wanted: BlockAddress) -> TierName | None:
        if wanted in self.here:
            return TierName.HOST
        return None if wanted in self.gone else TierName.NVME

    def waiting_on_nvme(self, wanted: BlockAddress) -> Resident | None:
        if self.tier_of(wanted) is not TierName.NVME:
            return None
        number = int.from_bytes(wanted.block, "big")
        tenant = number % 2 + 1
        return Resident(wanted, component(tenant), namespace(tenant), BYTES * (number + 1), 1)

    @asynccontextmanager
    async def onboard(
        self, addresses: Sequence[BlockAddress], fence: Fence
    ) -> AsyncIterator[Onboarding]:
        self.inside += 1
        try:
            yield _Arrivals(self, addresses, fence)
        finally:
            try:
                if self.leaving_slowly:
                    await asyncio.sleep(0)
            finally:  # also for who is cancelled a second time, as the real one
                self.inside -= 1


class _Arrivals:
    def __init__(self, script: Script, addresses: Sequence[BlockAddress], fence: Fence) -> None:
        self._script = script
        self._addresses = addresses
        self._fence = fence

    async def ready(self, index: int) -> None:
        await self._script.permits.acquire()
        self._fence.check()
        if self._script.failing or self._addresses[index] in self._script.gone:
            raise Unavailable("as the script says")
        self._script.here.add(self._addresses[index])


NUMBER = st.integers(0, BLOCKS - 1)
OWNER = st.integers(0, 4)
STEP = st.one_of(
    st.tuples(
        st.just("begin"), OWNER, st.lists(NUMBER, max_size=BLOCKS), st.none() | st.integers(0, 9)
    ),
    st.tuples(st.sampled_from(["stop", "fence", "load"]), OWNER),
    st.tuples(st.sampled_from(["read", "evict", "lose"]), NUMBER),
    st.tuples(st.just("permit"), st.integers(1, 6)),
    st.tuples(st.just("pass_time"), st.sampled_from([0.5, 3.0, 40.0])),
    st.tuples(st.sampled_from(["fail", "slow", "sweep", "pause", "resume"])),
    st.tuples(st.just("turns"), st.integers(1, 4)),
)


class Run:
    """One run of the prefetcher under a script."""

    def __init__(self, policy: PrefetchPolicy) -> None:
        self.clock = FakeClock()
        self.wait = HandWait(self.clock)
        self.script = Script()
        self.owned: dict[int, list[tuple[Prefetch, Fence]]] = {}
        self.prefetcher = Prefetcher(
            self.script,
            PrefetchSettings(
                total_bytes=20 * BYTES,
                tenant_bytes=12 * BYTES,
                chunk_bytes=8 * BYTES,
                pending_max=4,
                sweep_s=3600.0,
                read_s=3600.0,
                patience=PatienceSettings(policy),
                waste=WasteSettings(blocks_min=4, probe_blocks=2),
            ),
            self.clock,
            self.wait,
        )

    async def step(self, step: tuple[object, ...]) -> None:
        name, *arguments = step
        if name == "turns":
            await turns(*arguments)  # type: ignore[arg-type]
        else:
            getattr(self, str(name))(*arguments)

    def begin(self, owner: int, numbers: list[int], start_s: int | None) -> None:
        fence = Fence()
        made = self.prefetcher.begin(
            f"grant-{owner}",
            fence,
            [address(number) for number in numbers],
            None if start_s is None else start_s * SECOND,
        )
        if made is not None:
            self.owned.setdefault(owner, []).append((made, fence))

    def fence(self, owner: int) -> None:
        for _, fence in self.owned.get(owner, ()):
            fence.cut()

    def load(self, owner: int) -> None:
        self.prefetcher.load_begins(f"grant-{owner}", 512, self.clock() + SECOND)

    def read(self, number: int) -> None:
        tier = self.script.tier_of(address(number))
        if tier is not None:
            self.prefetcher.was_read(address(number), tier)

    def evict(self, number: int) -> None:
        self.script.here.discard(address(number))

    def lose(self, number: int) -> None:
        self.script.here.discard(address(number))
        self.script.gone.add(address(number))

    def permit(self, count: int) -> None:
        for _ in range(count):
            self.script.permits.release()

    def fail(self) -> None:
        self.script.failing = not self.script.failing

    def slow(self) -> None:
        self.script.leaving_slowly = not self.script.leaving_slowly

    def pause(self) -> None:
        self.prefetcher.pause("test")

    def resume(self) -> None:
        self.prefetcher.resume()

    def pass_time(self, seconds: float) -> None:
        self.wait.advance_s(seconds)

    def stop(self, owner: int) -> None:
        for made, _ in self.owned.pop(owner, ()):
            made.stop()

    def sweep(self) -> None:
        for _ in self.prefetcher.sweep():
            pass

    def check(self) -> None:
        assert self.prefetcher.faults() == ()
        found = self.prefetcher.statistics()
        assert found.leaked == 0
        assert found.pending_bytes <= 20 * BYTES
        assert all(used <= 12 * BYTES for used in found.by_tenant.values())
        # Bytes are under way only while a read is.
        assert self.script.inside or not found.on_its_way_bytes

    async def run(self, steps: list[tuple[object, ...]]) -> None:
        async with self.prefetcher.running():
            for step in steps:
                await self.step(step)
                self.check()
                await turns(2)
                self.check()
            for owner in tuple(self.owned):
                self.stop(owner)
            async with asyncio.timeout(20):
                while self.prefetcher.statistics().pending:
                    await asyncio.sleep(0)
            self.check()
            self.empty()
            # And it still works: whatever has happened, one more block is brought and read.
            self.prefetcher.resume()
            self.script.__init__()  # type: ignore[misc]
            self.script.permits.release()
            self.wait.advance_s(10**5)
            assert self.prefetcher.begin("last", Fence(), [address(0)]) is not None
            async with asyncio.timeout(20):
                while self.prefetcher.statistics().pending:
                    await asyncio.sleep(0)
            assert self.script.here == {address(0)}
            self.prefetcher.was_read(address(0), TierName.HOST)
            self.empty()

    def empty(self) -> None:
        found = self.prefetcher.statistics()
        assert (found.pending_bytes, found.on_its_way_bytes, dict(found.by_tenant)) == (0, 0, {})
        assert found.issued == found.completed + found.cancelled + found.failed
        assert found.completed == found.used + found.wasted
        assert (self.prefetcher._running, self.prefetcher._by_grant) == ({}, {})
        assert self.prefetcher._turns._value == 2
        assert self.script.inside == 0


@given(policy=st.sampled_from(list(PrefetchPolicy)), steps=st.lists(STEP, max_size=40))
@settings(max_examples=200, deadline=None)
def test_reserved_is_under_way_or_unread_in_any_order_of_events(
    policy: PrefetchPolicy, steps: list[tuple[object, ...]]
) -> None:
    async def run() -> None:
        await Run(policy).run(steps)

    asyncio.run(run())
