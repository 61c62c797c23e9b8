"""Bringing blocks from NVMe into host memory before a load asks for them.

Rules:
- Ciphertext moves, unchanged, for a grant that was judged good; nothing is decrypted, nothing
  becomes visible, no answer changes. The load that follows is judged and opened as ever.
- A prefetch is owned by a request or a hint and ends with it: cancelled, finished, fenced, or its
  connection gone. What it has brought and nobody read is then waste.
- It begins in a window before its expected start (`sidecar.prefetch.window`), in the order of the
  chain, a few at a time. What the budget refuses is left to the load: the part in front is
  useful alone, since a load reads in the same order.
- Places are bounded overall, for each tenant, and for hints, so that what starts far ahead keeps
  nobody's request from its prefetch.
- Every reservation is given back by the ledger (`sidecar.prefetch.ledger`) when its block settles.
  A block under way settles when `onboard` has been left, so that its room is free by then; each
  read has a time limit, and what is unread expires.
- Too much waste, or `pause`, stops what runs and refuses what comes; what lies in host memory
  already stays useful. It starts again by itself, or by `resume`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from sidecar.prefetch.budget import Budget, Denial, Denied
from sidecar.prefetch.ledger import Ending, Issued, Ledger
from sidecar.prefetch.patience import Patience, PrefetchPolicy, Wait, wait_until
from sidecar.prefetch.settings import PrefetchSettings
from sidecar.prefetch.shelf import Shelf
from sidecar.prefetch.statistics import PrefetchStatistics, picture
from sidecar.prefetch.waste_gates import WasteGates
from sidecar.prefetch.window import Window
from storage.block import BlockAddress
from storage.fence import Fence, Fenced
from storage.lifecycle import Resident
from storage.tiers.protocol import TierName
from strongroom.clock import Clock
from strongroom.errors import StrongroomError
from strongroom.identity import ComponentId

_log = logging.getLogger(__name__)
_PLAN_STEP = 64
_NOBODY = ComponentId("")


@dataclass(eq=False, slots=True)
class Prefetch:
    """What one request or hint has asked for. Made by `Prefetcher.begin`."""

    grant: str
    fence: Fence
    addresses: tuple[BlockAddress, ...]
    start_ns: int | None
    tenant: ComponentId
    _prefetcher: Prefetcher
    overtaken: bool = False
    """The load is here: nothing more is issued than what is under way."""
    reading: list[Issued] = field(default_factory=list)

    def stop(self) -> None:
        """Its owner has ended, or reads nothing any more. Repeatable."""
        self._prefetcher.stop(self)


class Prefetcher:
    """Every prefetch of a sidecar. Used on the event loop's thread, inside `running()`."""

    def __init__(
        self, store: Shelf, settings: PrefetchSettings, clock: Clock, wait: Wait | None = None
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._wait = wait or partial(wait_until, clock)
        self._waste = WasteGates(settings.waste, clock, self._halt_of)
        self._budget = Budget(settings.total_bytes, settings.tenant_bytes)
        self._ledger = Ledger(self._budget, self._waste, clock)
        self._window = Window(settings.window, clock)
        self._turns = asyncio.Semaphore(settings.readers)
        self._running: dict[Prefetch, asyncio.Task[None]] = {}
        self._by_grant: dict[str, set[Prefetch]] = {}
        self._pending: Counter[ComponentId] = Counter()
        self._hinted: Counter[ComponentId] = Counter()
        self._paused: dict[str, None] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Prefetches run while the block runs; leaving it ends them all."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            sweeping = tasks.create_task(self._sweep_always(), name="prefetch-sweep")
            try:
                yield
            finally:
                self._tasks = None
                sweeping.cancel()
                for task in tuple(self._running.values()):
                    task.cancel()

    def tell(self, told: Callable[[ComponentId, bool], None]) -> None:
        """Call `told` with each block that was used (True) or wasted: whose it was."""
        self._ledger.told = told

    # Who begins and ends prefetches

    def concerns(self, tier: TierName | None) -> bool:
        """Whether there is anything to bring, or to own, for who reads from `tier` and faster."""
        return tier is TierName.NVME or (tier is not None and len(self._ledger) > 0)

    def begin(
        self,
        grant: str,
        fence: Fence,
        addresses: Iterable[BlockAddress],
        start_in_ns: int | None = None,
        *,
        tenant: ComponentId = _NOBODY,
    ) -> Prefetch | None:
        """Bring what of `addresses` is on NVMe alone. Returns at once; None when it is refused.

        `grant` is the id of the grant that was judged; a load under it is told by it. Without
        `start_in_ns` the request is here already; with it, this is a hint.
        """
        denial = self._denial(start_in_ns, tenant)
        if denial is not None:
            self._ledger.counts.refuse(denial)
            return None
        assert self._tasks is not None
        start_ns = None if start_in_ns is None else self._clock() + max(0, start_in_ns)
        made = Prefetch(grant, fence, tuple(addresses), start_ns, tenant, self)
        task = self._tasks.create_task(self._run(made), name="prefetch")
        self._running[made] = task
        self._pending[tenant] += 1
        if start_ns is not None:
            self._hinted[tenant] += 1
        self._by_grant.setdefault(grant, set()).add(made)
        # Here and not in the task, which never runs if it is cancelled before its first step.
        task.add_done_callback(lambda _: self._over(made))
        return made

    def stop(self, prefetch: Prefetch) -> None:
        """Read no more for it, and count as waste what nobody else expects to read."""
        self._halt(prefetch)
        self._ledger.disown(prefetch)

    def pause(self, reason: str) -> None:
        """Stop what runs and refuse what comes until every reason is taken back."""
        self._paused[reason] = None
        self._halt_of(None)

    def resume(self, reason: str | None = None) -> None:
        """Take a reason back; without one, all of them."""
        if reason is None:
            self._paused.clear()
        else:
            self._paused.pop(reason, None)

    # What loads say

    def load_begins(self, grant: str, tokens: int, until_ns: int) -> Patience:
        """A load under `grant` is here, of so many tokens and with this deadline."""
        for prefetch in tuple(self._by_grant.get(grant, ())):
            # From here on the load reads ahead for itself: two readers of a block are one too many.
            patient = self._settings.patience.policy is not PrefetchPolicy.BEST_EFFORT
            if patient and prefetch.reading:
                prefetch.overtaken = True
                continue
            for block in prefetch.reading:
                self._ledger.wanted(block.address)
            self._halt(prefetch)
        patient_until_ns = self._settings.patience.until_ns(self._clock(), tokens, until_ns)
        return Patience(self._ledger, self._wait, patient_until_ns)

    def was_read(self, address: BlockAddress, tier: TierName) -> None:
        """A load has opened the block, which it found in `tier`."""
        self._ledger.was_read(address, tier)

    # What is going on

    def sweep(self) -> Iterable[None]:
        """Settle what was evicted, retired or has expired unread; in steps."""
        return self._ledger.sweep(self._in_host)

    def faults(self) -> tuple[str, ...]:
        """What does not add up; empty is the promise."""
        return self._ledger.faults()

    def statistics(self) -> PrefetchStatistics:
        """A frozen snapshot."""
        return picture(
            self._ledger,
            self._budget,
            self._waste,
            pending=len(self._running),
            bandwidth_bytes_s=self._window.bandwidth_bytes_s,
            paused=tuple(self._paused),
        )

    # One prefetch

    async def _run(self, prefetch: Prefetch) -> None:
        try:
            wanted, nbytes = await self._plan(prefetch)
            if not wanted:
                return
            if prefetch.start_ns is not None:
                begin_ns = self._window.begin_ns(prefetch.start_ns, nbytes)
                await self._wait(asyncio.Event(), begin_ns)
            async with self._turns:
                await self._bring_all(prefetch, wanted)
        except Exception:  # noqa: BLE001 - see below
            # A fault of ours in one prefetch must not end what is served.
            self._ledger.counts.crashed += 1
            _log.exception("a prefetch failed")
        finally:
            # Whatever happened: nothing stays reserved for a read that does not run.
            self._close_reading(prefetch, Ending.CANCELLED)

    async def _plan(self, prefetch: Prefetch) -> tuple[deque[BlockAddress], int]:
        """What is worth bringing, and its bytes; blocks that others brought are owned too."""
        wanted: deque[BlockAddress] = deque()
        nbytes = 0
        for count, address in enumerate(prefetch.addresses, start=1):
            brought = self._ledger.get(address)
            resident = self._store.waiting_on_nvme(address) if brought is None else None
            if brought is not None:
                self._ledger.own(prefetch, brought)
                wanted.append(address)
            elif resident is not None:
                wanted.append(address)
                nbytes += resident.nbytes
            if count % _PLAN_STEP == 0:
                await asyncio.sleep(0)
        return wanted, nbytes

    async def _bring_all(self, prefetch: Prefetch, wanted: deque[BlockAddress]) -> None:
        while wanted and not prefetch.overtaken:
            elsewhere = self._issue_chunk(prefetch, wanted)
            if prefetch.reading:
                if not await self._bring(prefetch):
                    return
            elif elsewhere is not None:
                # Another prefetch brings it, within the time limit of its own read.
                await elsewhere.watch().wait()

    def _issue_chunk(self, prefetch: Prefetch, wanted: deque[BlockAddress]) -> Issued | None:
        """Fill `reading`; the block on its way for somebody else that stands in front, if any."""
        chunk_bytes = 0
        while wanted and chunk_bytes < self._settings.chunk_bytes:
            known = self._ledger.get(wanted[0])
            if known is not None:
                self._ledger.own(prefetch, known)
                if not known.landed:
                    return known
                wanted.popleft()
                continue
            resident = self._store.waiting_on_nvme(wanted.popleft())
            if resident is None:
                continue  # a load was faster, or it is gone
            issued = self._issue(prefetch, resident)
            if isinstance(issued, Denied):
                wanted.clear()
                return None
            prefetch.reading.append(issued)
            chunk_bytes += issued.nbytes
        return None

    def _issue(self, prefetch: Prefetch, resident: Resident) -> Issued | Denied:
        expected_ns = max(self._clock(), prefetch.start_ns or 0)
        return self._ledger.issue(
            prefetch,
            resident,
            deadline_ns=prefetch.start_ns,
            expires_ns=expected_ns + self._settings.keep_ns,
        )

    async def _bring(self, prefetch: Prefetch) -> bool:
        """Read what is in `reading`; false when the rest of the chain is not worth it."""
        blocks, began_ns = tuple(prefetch.reading), self._clock()
        ending = Ending.CANCELLED
        try:
            async with (
                asyncio.timeout(self._settings.read_s),
                self._store.onboard([block.address for block in blocks], prefetch.fence) as moving,
            ):
                for index, block in enumerate(blocks):
                    await moving.ready(index)
                    self._ledger.landed(block)
        except Fenced:
            return False
        except (StrongroomError, TimeoutError):
            ending = Ending.FAILED
            return False
        finally:
            self._close_reading(prefetch, ending)
        self._window.measured(sum(block.nbytes for block in blocks), self._clock() - began_ns)
        return True

    def _close_reading(self, prefetch: Prefetch, ending: Ending) -> None:
        """No read of it runs any more: `onboard` was left, or never entered.

        Reading runs ahead of what was awaited, so some blocks may be there all the same.
        """
        for block in prefetch.reading:
            if self._in_host(block.address):
                self._ledger.landed(block)
            else:
                self._ledger.withdraw(block, ending)
        prefetch.reading.clear()

    # Inside

    def _denial(self, start_in_ns: int | None, tenant: ComponentId) -> Denial | None:
        if self._paused or self._tasks is None:
            return Denial.PAUSED
        if self._waste.stopped(tenant):
            return Denial.WASTE
        if len(self._running) >= self._settings.pending_max:
            return Denial.PENDING
        if self._pending[tenant] >= self._settings.tenant_pending_max:
            return Denial.TENANT_PENDING
        if start_in_ns is not None and (
            self._hinted[tenant] >= self._settings.tenant_hints_max
            or self._hinted.total() >= self._settings.hints_max
        ):
            # What waits for its start long before it leaves room for requests that are here.
            return Denial.TENANT_PENDING
        if start_in_ns is not None and start_in_ns > self._settings.horizon_ns:
            return Denial.LATE
        return None

    def _over(self, prefetch: Prefetch) -> None:
        self._running.pop(prefetch, None)
        self._pending -= Counter({prefetch.tenant: 1})
        if prefetch.start_ns is not None:
            self._hinted -= Counter({prefetch.tenant: 1})
        of_grant = self._by_grant.get(prefetch.grant)
        if of_grant is not None:
            of_grant.discard(prefetch)
            if not of_grant:
                del self._by_grant[prefetch.grant]

    def _halt(self, prefetch: Prefetch) -> None:
        task = self._running.get(prefetch)
        if task is not None:
            task.cancel()

    def _halt_of(self, tenant: ComponentId | None) -> None:
        """Stop what runs for a tenant; for None, everybody's."""
        for prefetch in tuple(self._running):
            if tenant is None or prefetch.tenant == tenant:
                self._halt(prefetch)

    def _in_host(self, address: BlockAddress) -> bool:
        return self._store.tier_of(address) is TierName.HOST

    async def _sweep_always(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_s)
            try:
                for _ in self.sweep():
                    await asyncio.sleep(0)
            except Exception:  # noqa: BLE001 - as in `_run`
                self._ledger.counts.crashed += 1
                _log.exception("a sweep failed")
