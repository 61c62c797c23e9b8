"""Serving leases by challenge, and key leases by grant (DESIGN section 6).

- A serving lease is asked for every third of its life. It runs from the moment the question was
  sent, and counts only once the log is applied up to the head that it names. Schedulers are
  told of each, after what its log fenced.
- A key lease brings the namespaces of one presented grant. It is dropped when a component of it
  was retired by the time it arrives, since the answer may have been made before.
- Two requests of one grant never have two key leases under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from sidecar.clocks import NS, Clocks
from sidecar.control.client import ControlClient, KeyLease, ServingLease
from sidecar.control.gate import Gate
from sidecar.control.logstate import LogBroken, LogState
from storage.keyring import KeyRing
from strongroom.errors import Refused, StrongroomError, Unavailable
from strongroom.grant import GrantClaims
from strongroom.identity import ComponentId, NamespaceId

_log = logging.getLogger(__name__)

_RETRY_S: Final = 0.25
_REFRESH_FRACTION: Final = 3
TRIMMED_FROM: Final = 10_000
"""So many namespaces are remembered without a look at what is stored."""
_KEPT_NS: Final = 3600 * NS


class LogKeeper(Protocol):
    """Who applies the log; `sidecar.revocation.follower.Follower`."""

    async def confirm(self, lease: ServingLease) -> None:
        """Apply the log up to the head that `lease` names, or raise."""


@dataclass(slots=True)
class ServingCounts:
    """How the challenges went."""

    renewed: int = 0
    failed: int = 0


class ServingLeases:
    """Keeps the gate open for as long as the control plane answers."""

    def __init__(
        self,
        client: ControlClient,
        log: LogState,
        follower: LogKeeper,
        gate: Gate,
        keys: KeyRing,
        tell: Callable[[], None],
    ) -> None:
        self._client = client
        self._log = log
        self._follower = follower
        self._gate = gate
        self._keys = keys
        self._tell = tell
        self.counts = ServingCounts()
        self.first = asyncio.Event()
        """Set once a lease was granted under a verified head."""

    async def run(self) -> None:
        """Renew until cancelled. A refusal or silence lets the lease run out: misses, no harm."""
        while True:
            try:
                pause_s = (await self.renew()) / 3
            except LogBroken as error:
                _log.warning("serving nothing until started afresh: %s", error.message)
                pause_s = 1.0
            except StrongroomError as error:
                self.counts.failed += 1
                _log.warning("no serving lease: %s", error.message)
                pause_s = _RETRY_S
            self._keys.namespaces()  # drops and overwrites what has run out
            await asyncio.sleep(pause_s)

    async def renew(self) -> float:
        """One challenge; returns the lease's length in seconds."""
        head = self._log.head
        lease = await self._client.serving_lease(
            head.epoch if head else "", head.seq if head else 0
        )
        await self._follower.confirm(lease)
        self._gate.extend(lease.deadline_ns)
        self._tell()
        self.counts.renewed += 1
        self.first.set()
        return lease.claims.lease_ms / 1000


@dataclass(slots=True)
class KeyCounts:
    """How key leases went."""

    leased: int = 0
    refused: int = 0
    dropped: int = 0


class KeyLeases:
    """Brings namespace secrets into the key ring, and knows what each depends on.

    That is remembered for what is stored, and for an hour after a lease, since a save may still
    store it. The rest is forgotten each time that as many have come as were kept the last time.
    """

    def __init__(
        self,
        client: ControlClient,
        ring: KeyRing,
        log: LogState,
        clocks: Clocks,
        stored: Callable[[], Collection[NamespaceId]] | None = None,
    ) -> None:
        self._client = client
        self._ring = ring
        self._log = log
        self._clocks = clocks
        self._flights: dict[str, _Flight] = {}
        self._refresh_ns: dict[NamespaceId, int] = {}
        self._components: dict[NamespaceId, frozenset[ComponentId]] = {}
        self._stored = stored
        self._trim_at = TRIMMED_FROM
        self.counts = KeyCounts()

    async def ensure(self, token: str, grant: GrantClaims) -> None:
        """Have the keys of every namespace of `grant`, which was verified from `token`.

        Raises `Refused` or `Unavailable`; keys that are there already stay usable, and while
        all of them are there a renewal that fails is no error, unless the log ended the grant.
        """
        if not self.lacking(grant):
            return
        flight = self._flights.setdefault(grant.jti, _Flight())
        flight.waiting += 1
        try:
            async with flight.lock:
                if self.lacking(grant):
                    await self._lease(token, grant)
        except (Unavailable, Refused):
            # The keys are only due for renewal: they may still serve until their own end, as
            # they would a moment before they were due. A request outlives its grant, under
            # which the service leases no more; what ends it is the log.
            missing = not all(self._ring.holds(span.namespace) for span in grant.spans)
            if missing or self._log.dead(grant) is not None:
                raise
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                self._flights.pop(grant.jti, None)

    def depending(self, components: Iterable[ComponentId]) -> frozenset[NamespaceId]:
        """Namespaces ever leased here that depend on one of `components`."""
        wanted = frozenset(components)
        if not wanted:
            return frozenset()
        return frozenset(name for name, parts in self._components.items() if parts & wanted)

    def known(self) -> frozenset[NamespaceId]:
        """Namespaces whose components are known here."""
        return frozenset(self._components)

    def forget(self, namespaces: Iterable[NamespaceId]) -> None:
        """These are retired for ever."""
        for namespace in namespaces:
            self._components.pop(namespace, None)
            self._refresh_ns.pop(namespace, None)

    def forget_all(self) -> None:
        """What is known was told by another epoch, or under a log that broke."""
        self._components.clear()
        self._refresh_ns.clear()

    def _trim(self) -> None:
        if self._stored is not None:
            stored = self._stored()
            before_ns = self._clocks.boot() - _KEPT_NS
            self.forget(
                [
                    name
                    for name in self._components
                    if name not in stored
                    and not self._ring.holds(name)
                    and self._refresh_ns.get(name, 0) < before_ns
                ]
            )
        self._trim_at = max(TRIMMED_FROM, 2 * len(self._components))

    def lacking(self, grant: GrantClaims) -> bool:
        """Whether a key of `grant` is not here, or is due for renewal."""
        now = self._clocks.boot()
        return any(
            not self._ring.holds(span.namespace) or self._refresh_ns.get(span.namespace, 0) <= now
            for span in grant.spans
        )

    async def _lease(self, token: str, grant: GrantClaims) -> None:
        sent_ns = self._clocks.boot()
        try:
            lease = await self._client.key_lease(token)
        except Refused:
            self.counts.refused += 1
            raise
        try:
            self._check(lease, grant)
            refresh_ns = lease.expires_ns - (lease.expires_ns - sent_ns) // _REFRESH_FRACTION
            for key in lease.keys:
                components = frozenset(ComponentId(name) for name in key.components)
                self._ring.put(
                    key.namespace, bytes(key.secret), tuple(components), lease.expires_ns
                )
                self._components[key.namespace] = components
                self._refresh_ns[key.namespace] = refresh_ns
            self.counts.leased += 1
            if len(self._components) >= self._trim_at:
                self._trim()
        except Refused:
            self.counts.dropped += 1
            raise
        finally:
            for key in lease.keys:
                key.secret[:] = bytes(len(key.secret))

    def _check(self, lease: KeyLease, grant: GrantClaims) -> None:
        """The lease is for this grant alone, and nothing of it was retired meanwhile."""
        if self._log.head is None or lease.info.epoch != self._log.head.epoch:
            raise Refused("a key lease of another epoch")
        expected = {
            span.namespace: frozenset(grant.components(index))
            for index, span in enumerate(grant.spans)
        }
        if {key.namespace for key in lease.keys} != set(expected):
            raise Refused("a key lease for other namespaces")
        for key in lease.keys:
            components = frozenset(ComponentId(name) for name in key.components)
            if components != expected[key.namespace]:
                raise Refused("a key lease over other components")
            if self._log.retired_components(components):
                raise Refused("a component was retired while the lease was under way")


class _Flight:
    """One grant's key lease under way, and how many wait for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0
