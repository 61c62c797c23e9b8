"""What an invalidation does here, at once and afterwards.

`fence` runs without an `await`, right after the entry was recorded, so that no verdict and no
part can slip in between. It costs the same for a hundred blocks as for a million: keys are
dropped and namespaces retired by name; bytes are freed later by `reclaim`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from sidecar.control.client import ControlClient
from sidecar.control.gate import Gate
from sidecar.control.leases import KeyLeases
from sidecar.control.logstate import LogState
from sidecar.lookup.request import Request, Transfer
from sidecar.transfers.slots import Rooms
from storage.keyring import KeyRing
from storage.reclaim import Reclaimed
from storage.store import BlockStore
from strongroom.errors import Unavailable
from strongroom.identity import NamespaceId
from strongroom.log import InvalidationKind, LogEntry

LIVENESS_BATCH: int = 1000


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request of some engine, and how to tell that engine that it was fenced."""

    request: Request
    tell: Callable[[], None]


class LiveRequests:
    """Every request of every engine: what an invalidation walks over."""

    def __init__(self) -> None:
        self._sources: set[Callable[[], Iterable[LiveRequest]]] = set()

    def add(self, source: Callable[[], Iterable[LiveRequest]]) -> None:
        """An engine that knows its requests."""
        self._sources.add(source)

    def remove(self, source: Callable[[], Iterable[LiveRequest]]) -> None:
        self._sources.discard(source)

    def __iter__(self) -> Iterator[LiveRequest]:
        for source in tuple(self._sources):
            yield from source()


@dataclass(frozen=True, slots=True)
class Effect:
    """What a fence did. It is in force once every transfer in `stopped` has ended."""

    stopped: tuple[Transfer, ...] = ()
    namespaces: frozenset[NamespaceId] = frozenset()
    requests: int = 0

    @property
    def loads(self) -> int:
        return Counter(transfer.kind for transfer in self.stopped)["load"]

    @property
    def saves(self) -> int:
        return Counter(transfer.kind for transfer in self.stopped)["save"]

    async def quiet(self, timeout_s: float) -> None:
        """Return when no thread works on fenced staging; raises `Unavailable` at the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                for transfer in self.stopped:
                    await transfer.ended.wait()
        except TimeoutError as error:
            raise Unavailable("a fenced transfer has not ended") from error


def _nobody(_: Collection[NamespaceId]) -> None:
    """Nobody asked to be told."""


def _untold(_kind: str, _seq: int, _namespaces: int, _requests: int, _transfers: int) -> None:
    """Nobody asked to be told."""


class Invalidation:
    """Applies log entries to keys, requests and blocks."""

    def __init__(
        self,
        sidecar: str,
        log: LogState,
        gate: Gate,
        leases: KeyLeases,
        ring: KeyRing,
        store: BlockStore,
        requests: LiveRequests,
        rooms: Rooms,
    ) -> None:
        self._sidecar = sidecar
        self._log = log
        self._gate = gate
        self._leases = leases
        self._ring = ring
        self._store = store
        self._requests = requests
        self.alive: frozenset[NamespaceId] = frozenset()
        """Stored namespaces of which the service has said that they are alive."""
        self.gone: Callable[[Collection[NamespaceId]], None] = _nobody
        """Told which are not."""
        self.told: Callable[[str, int, int, int, int], None] = _untold
        """Told of what is in force: kind, seq, and how many namespaces, requests and transfers."""
        self._rooms = rooms

    def fence(self, entry: LogEntry) -> Effect:
        """Put `entry`, which the log state has recorded, into force."""
        if entry.kind is InvalidationKind.SIDECAR and entry.sidecar == self._sidecar:
            self._gate.shut("this sidecar was retired")
            return self.fence_everything()
        namespaces = self._leases.depending(entry.components)
        namespaces |= self._ring.drop_components(entry.components)
        self._store.retire(namespaces)
        self._leases.forget(namespaces)
        stopped, count = self._fence_requests(dead_only=True)
        self.told(entry.kind.value, entry.seq, len(namespaces), count, len(stopped))
        return Effect(stopped, namespaces, count)

    def fence_requests(self) -> None:
        """Fence every request, and tell their engines; keys and leases stay."""
        self._fence_requests(dead_only=False)

    def fence_everything(self) -> Effect:
        """Drop every key and fence every request: the log broke, or starts afresh."""
        self._gate.end_lease()
        namespaces = self._ring.namespaces()
        self._ring.drop_all()
        # What leases told counts no more: the service is asked about every stored namespace.
        self._leases.forget_all()
        stopped, count = self._fence_requests(dead_only=False)
        head = self._log.head
        seq = 0 if head is None else head.seq
        self.told("everything", seq, len(namespaces), count, len(stopped))
        return Effect(stopped, namespaces, count)

    async def ask_liveness(self, client: ControlClient, *, unknown_only: bool) -> int:
        """Retire the stored namespaces that the service says can never be leased again.

        `unknown_only`: those whose components are not known here, which no log entry names.
        """
        asked = self._store.namespaces()
        if unknown_only:
            asked -= self._leases.known()
        retired = 0
        names = sorted(asked)
        for start in range(0, len(names), LIVENESS_BATCH):
            batch = names[start : start + LIVENESS_BATCH]
            gone = await client.retired(batch)
            # Only what was asked about: an answer cannot retire anything else.
            dead = gone.intersection(batch)
            self.gone(dead)
            retired += self._store.retire(dead)
            self.alive = (self.alive | frozenset(batch)) - dead
        self.alive &= self._store.namespaces()
        return retired

    async def reclaim(self) -> Reclaimed:
        """Free the bytes of what was retired."""
        return await self._store.reclaim()

    async def staging_wiped(self, timeout_s: float) -> None:
        """Return when nothing is left in staging of what was given back by now.

        Raises `Unavailable` at the deadline.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._rooms.wiped()
        except TimeoutError as error:
            raise Unavailable("staging has not been wiped") from error

    def _fence_requests(self, *, dead_only: bool) -> tuple[tuple[Transfer, ...], int]:
        """Every one of them, also when one fails: that is raised when all the others are done."""
        stopped: list[Transfer] = []
        failed: list[Exception] = []
        count = 0
        for live in self._requests:
            request = live.request
            if request.is_fenced_off or request.grant is None:
                continue
            if dead_only and self._log.dead(request.grant) is None:
                continue
            in_use = request.is_open
            try:
                stopped.extend(request.fence_off())
                if in_use:
                    live.tell()
            except Exception as error:  # noqa: BLE001 - raised when the others are fenced
                failed.append(error)
            count += 1
        self._rooms.wipe_soon()
        if failed:
            raise ExceptionGroup("requests that could not be fenced in full", failed)
        return tuple(stopped), count
