"""What the sidecar puts on record about each access. Never tokens, keys, salts or plaintext."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from sidecar.clocks import Clocks
from sidecar.control.logstate import LogState
from sidecar.record.reasons import Reason
from sidecar.record.spool import Spool
from strongroom.control import SpoolEvent
from strongroom.errors import Unavailable
from strongroom.grant import GrantClaims
from strongroom.identity import NamespaceId

Kind = Literal["lookup", "hint", "load", "save", "denied", "fenced", "corrupt", "quota", "error"]
Outcome = Literal["hit", "miss", "refused", "stored", "failed"]


class Audit:
    """Writes events into the spool, and counts them by kind, outcome and reason."""

    def __init__(self, spool: Spool, log: LogState, clocks: Clocks) -> None:
        self._spool = spool
        self._log = log
        self._clocks = clocks
        self.counts: Counter[tuple[str, str, str]] = Counter()

    async def record(
        self,
        kind: Kind,
        outcome: Outcome,
        reason: Reason,
        *,
        engine: str,
        request: str,
        grant: GrantClaims | None,
        tenant: str = "",
        namespaces: Sequence[NamespaceId] = (),
        tokens: int = 0,
        tier: str = "",
        nbytes: int = 0,
    ) -> None:
        """On record when this returns; raises `Unavailable` when it cannot be.

        `tenant` is whose it is where no grant says it.
        """
        self.counts[kind, outcome, reason] += 1
        head = self._log.head
        await self._spool.record(
            SpoolEvent(
                count=0,
                prev="",
                at=self._clocks.timestamp(),
                kind=kind,
                outcome=outcome,
                reason=reason.value,
                tenant=tenant if grant is None else grant.tenant,
                subject="" if grant is None else grant.sub,
                request=request,
                grant="" if grant is None else grant.jti,
                namespaces=list(dict.fromkeys(namespaces)),
                tokens=tokens,
                tier=tier,
                bytes=nbytes,
                epoch="" if head is None else head.epoch,
                seq=0 if head is None else head.seq,
                engine=engine,
            )
        )

    async def note(
        self,
        kind: Kind,
        outcome: Outcome,
        reason: Reason,
        *,
        engine: str,
        request: str,
        grant: GrantClaims | None,
        tenant: str = "",
        namespaces: Sequence[NamespaceId] = (),
        tokens: int = 0,
        tier: str = "",
        nbytes: int = 0,
    ) -> None:
        """Record something that gives nothing to anybody: a failure to write it changes nothing
        for the engine, and the spool has counted and announced it.
        """
        try:
            await self.record(
                kind,
                outcome,
                reason,
                engine=engine,
                request=request,
                grant=grant,
                tenant=tenant,
                namespaces=namespaces,
                tokens=tokens,
                tier=tier,
                nbytes=nbytes,
            )
        except Unavailable:
            return
