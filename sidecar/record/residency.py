"""Tells the service how much of which namespace lies on this node, behind everything else.

Rules:
- There is no queue: a round compares what is resident with what was said, and says what differs.
  Whatever happened to a namespace between two rounds is one amount.
- A round looks at a bounded number of namespaces at once and lets others run in between. No
  lookup, load, save or eviction waits for it, or knows of it.
- A report that was not answered is said again, as it was and under its number, before anything
  else: one that was taken after all, or comes late, is passed over there.
- It is a hint: nothing on this node, and nothing that is served, depends on its arrival.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from storage.index import Footprint
from storage.tiers.protocol import TierName
from strongroom.control import RESIDENCY_ROWS_MAX, ResidencyAmount, ResidencyRequest
from strongroom.errors import StrongroomError, Unavailable
from strongroom.identity import NamespaceId

_log = logging.getLogger(__name__)
_STEP: Final = 256
_RETRY_FACTOR_MAX: Final = 16

Footprints = Callable[[int], Iterator[tuple[TierName, list[Footprint]]]]
_Key = tuple[TierName, NamespaceId]
_Amount = tuple[int, int]


class Client(Protocol):
    """Whom it is told to; `sidecar.control.client.ControlClient`."""

    async def residency(self, report: ResidencyRequest) -> bool:
        """True: begin anew."""
        ...


class ResidencyReporter:
    """`run` until cancelled. Memory: what was said, so one entry a namespace and tier."""

    def __init__(self, footprints: Footprints, client: Client, interval_s: float) -> None:
        self._footprints = footprints
        self._client = client
        self._interval_s = interval_s
        self._said: dict[_Key, _Amount] = {}
        self._unanswered: ResidencyRequest | None = None
        self._begin()
        self.reports = 0
        self.failures = 0

    async def run(self) -> None:
        """A round every interval; after failures ever later."""
        factor = 1
        while True:
            try:
                await self.round()
                factor = 1
            except StrongroomError as error:
                self.failures += 1
                if not isinstance(error, Unavailable):
                    self._begin()
                factor = min(2 * factor, _RETRY_FACTOR_MAX)
                _log.info("the residency catalogue was not told: %s", error.message)
            await asyncio.sleep(factor * self._interval_s)

    async def round(self) -> None:
        """Say everything that differs from what was said. One report at least: a sign of life."""
        if not await self._tell_all():
            self._begin()
            await self._tell_all()

    async def _tell_all(self) -> bool:
        """False where the service wants to hear everything anew."""
        if self._unanswered is not None and not await self._send(self._unanswered):
            return False
        gone = set(self._said)
        changed: dict[_Key, _Amount] = {}
        for tier, footprints in self._footprints(_STEP):
            for each in footprints:
                key, amount = (tier, each.namespace), (each.blocks, each.nbytes)
                gone.discard(key)
                if self._said.get(key) != amount:
                    changed[key] = amount
            if len(changed) > RESIDENCY_ROWS_MAX - _STEP:
                if not await self._tell(changed):
                    return False
                changed = {}
            # Not under a lock, and not in one go: the loop has others to serve.
            await asyncio.sleep(0)
        for key in gone:
            changed[key] = (0, 0)
            if len(changed) == RESIDENCY_ROWS_MAX:
                if not await self._tell(changed):
                    return False
                changed = {}
        return await self._tell(changed)

    async def _tell(self, changed: dict[_Key, _Amount]) -> bool:
        amounts = [
            ResidencyAmount(namespace, tier.value, blocks, nbytes)
            for (tier, namespace), (blocks, nbytes) in changed.items()
        ]
        return await self._send(ResidencyRequest(self._run, self._number, amounts))

    async def _send(self, report: ResidencyRequest) -> bool:
        self._unanswered = report
        if await self._client.residency(report):
            return False
        self._unanswered = None
        self._number = report.number + 1
        self.reports += 1
        for each in report.amounts:
            key = TierName(each.tier), NamespaceId(each.namespace)
            if each.blocks:
                self._said[key] = each.blocks, each.bytes
            else:
                self._said.pop(key, None)
        return True

    def _begin(self) -> None:
        self._run, self._number = secrets.token_hex(16), 0
        self._unanswered = None
        self._said.clear()
