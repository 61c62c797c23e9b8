"""What the sidecar puts on record about each access. Never tokens, keys, salts or plaintext."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Literal, Required, TypedDict, Unpack

from sidecar.clocks import Clocks
from sidecar.control.logstate import LogState
from sidecar.record.reasons import Reason
from sidecar.record.spool import Spool
from strongroom.control import SpoolEvent
from strongroom.errors import Unavailable
from strongroom.grant import GrantClaims
from strongroom.identity import NamespaceId

NOTES_MAX: Final = 256
"""Notes of one connection on their way: as many as the spool writes in one go."""

Kind = Literal["lookup", "hint", "load", "save", "denied", "fenced", "corrupt", "quota", "error"]
Outcome = Literal["hit", "miss", "refused", "stored", "failed"]


class Access(TypedDict, total=False):
    """What an event says beside its kind, outcome and reason."""

    engine: Required[str]
    request: Required[str]
    grant: Required[GrantClaims | None]
    tenant: str
    """Whose it is where no grant says it."""
    namespaces: Sequence[NamespaceId]
    tokens: int
    tier: str
    nbytes: int


class Audit:
    """Writes events into the spool, and counts them by kind, outcome and reason."""

    def __init__(self, spool: Spool, log: LogState, clocks: Clocks) -> None:
        self._spool = spool
        self._log = log
        self._clocks = clocks
        self.counts: Counter[tuple[str, str, str]] = Counter()

    async def record(
        self, kind: Kind, outcome: Outcome, reason: Reason, **access: Unpack[Access]
    ) -> None:
        """On record when this returns; raises `Unavailable` when it cannot be."""
        written = self.put(kind, outcome, reason, **access)
        if written is not None:
            await written

    def put(
        self, kind: Kind, outcome: Outcome, reason: Reason, **access: Unpack[Access]
    ) -> asyncio.Future[None] | None:
        """`record` without waiting: None when it is on record, else what to wait for."""
        self.counts[kind, outcome, reason] += 1
        head, grant = self._log.head, access["grant"]
        return self._spool.put(
            SpoolEvent(
                count=0,
                prev="",
                at=self._clocks.timestamp(),
                kind=kind,
                outcome=outcome,
                reason=reason.value,
                tenant=access.get("tenant", "") if grant is None else grant.tenant,
                subject="" if grant is None else grant.sub,
                request=access["request"],
                grant="" if grant is None else grant.jti,
                namespaces=list(dict.fromkeys(access.get("namespaces", ()))),
                tokens=access.get("tokens", 0),
                tier=access.get("tier", ""),
                bytes=access.get("nbytes", 0),
                epoch="" if head is None else head.epoch,
                seq=0 if head is None else head.seq,
                engine=access["engine"],
            )
        )

    async def note(
        self, kind: Kind, outcome: Outcome, reason: Reason, **access: Unpack[Access]
    ) -> None:
        """Record something that gives nothing to anybody: a failure to write it changes nothing
        for the engine, and the spool has counted and announced it.
        """
        with suppress(Unavailable):
            await self.record(kind, outcome, reason, **access)


class Notes:
    """What a connection puts on record while it goes on with others' frames.

    Nothing is left out. `NOTES_MAX` are on their way at most: then the connection waits for the
    oldest, as everybody does whose record has to be written before it is served.
    """

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._written: deque[asyncio.Future[None]] = deque()

    def put(
        self, kind: Kind, outcome: Outcome, reason: Reason, **access: Unpack[Access]
    ) -> Callable[[], Awaitable[None]] | None:
        """`Audit.note` without waiting: None, or what to wait for before the next one."""
        with suppress(Unavailable):
            written = self._audit.put(kind, outcome, reason, **access)
            if written is not None:
                written.add_done_callback(_hear)
                self._written.append(written)
        while self._written and self._written[0].done():
            self._written.popleft()
        return self._oldest if len(self._written) >= NOTES_MAX else None

    async def _oldest(self) -> None:
        await asyncio.wait([self._written[0]])


def _hear(written: asyncio.Future[None]) -> None:
    """Its failure changes nothing here: the spool has counted and announced it."""
    if not written.cancelled():
        written.exception()
