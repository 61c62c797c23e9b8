"""What happens to requests, blocks and namespaces, as operational events (DESIGN section 10).

Whoever does it says so in one call. Rules:
- One event a step of a request, never one a block: a load of a thousand blocks costs three.
- Evictions are many, and nobody waits for one of them: they are told as one event a tier for each
  look of the watch.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.record.events import EventKind, Events
from sidecar.record.reasons import Reason
from storage.tiers.protocol import TierName, TierStatistics

_ENGINE = "engine"


class Journal:
    """One a sidecar. Used on the event loop's thread."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._evictions: dict[TierName, int] = {}

    def request_started(self, engine: str, request: str, model: str, tokens: int) -> None:
        """An engine has named a prompt of so many tokens. Whose it is shows in what follows."""
        self._events.emit(
            EventKind.REQUEST_START, engine=engine, request=request, model=model, tokens=tokens
        )

    def denied(
        self, engine: str, request: str, tenant: str, reason: Reason, seconds: float
    ) -> None:
        """The verdict was negative; `reason` is the layer that missed."""
        self._events.emit(
            EventKind.PREFIX_MISS,
            reason=reason.value,
            engine=engine,
            request=request,
            tenant=tenant,
            service_us=int(seconds * 1e6),
        )

    def load_began(
        self, engine: str, request: str, tenant: str, tier: str, tokens: int, seconds: float
    ) -> None:
        """A load is on record and starts, `seconds` after it was asked for."""
        self._events.emit(
            EventKind.SWAP_IN_START,
            engine=engine,
            request=request,
            tenant=tenant,
            tier_from=tier,
            tier_to=_ENGINE,
            tokens=tokens,
            queue_us=int(seconds * 1e6),
        )

    def accepted(self, engine: str, request: str, tenant: str, tokens: int, nbytes: int) -> None:
        """The engine has copied every part of a load."""
        self._events.emit(
            EventKind.ENGINE_ACCEPTED,
            engine=engine,
            request=request,
            tenant=tenant,
            tier_to=_ENGINE,
            tokens=tokens,
            nbytes=nbytes,
        )

    def save_began(
        self, engine: str, request: str, tenant: str, blocks: int, nbytes: int, seconds: float
    ) -> None:
        """Room for so many blocks is reserved, and the engine may fill it."""
        self._events.emit(
            EventKind.BLOCK_RESERVED,
            engine=engine,
            request=request,
            tenant=tenant,
            tier_to=TierName.HOST.value,
            nbytes=nbytes,
            numbers={"blocks": blocks},
        )
        self._events.emit(
            EventKind.SWAP_OUT_START,
            engine=engine,
            request=request,
            tenant=tenant,
            tier_from=_ENGINE,
            tier_to=TierName.HOST.value,
            nbytes=nbytes,
            queue_us=int(seconds * 1e6),
        )

    def invalidated(self, kind: str, seq: int, namespaces: int, requests: int, moving: int) -> None:
        """An entry of the log is in force here: `moving` transfers were stopped."""
        self._events.emit(
            EventKind.INVALIDATION,
            subject=kind,
            numbers={
                "seq": seq,
                "namespaces": namespaces,
                "requests": requests,
                "transfers": moving,
            },
        )

    def look(self, tiers: Iterable[TierStatistics]) -> None:
        """What has left each tier since the last look."""
        for tier in tiers:
            blocks = tier.evictions - self._evictions.get(tier.name, 0)
            self._evictions[tier.name] = tier.evictions
            if blocks > 0:
                self._events.emit(
                    EventKind.EVICTION, tier_from=tier.name.value, numbers={"blocks": blocks}
                )
