"""Hints: a request is on its way; bring what it may read nearer.

Rules:
- A hint comes from an engine's scheduler, or from a gateway, which is no engine: it greets with a
  token of its own, may send `Hint` and `Unhint`, and nothing else.
- A hint is judged like an `Open`, with the same checks in the same order, and put on record as a
  hint. Whatever comes of it, nothing is answered; the `Open` that follows is judged again in
  full. All that a hint can do is move ciphertext from NVMe into host memory.
- A hint is fenced like a request. It ends with `Unhint`, with its connection, when its request is
  long overdue, or when another of the same name takes its place.
- Hints never make an `Open` wait, nor fill the audit spool: beyond so many in a second, at once,
  or alive, a hint is dropped unlooked at, and counted; so is one while the spool is crowded, and
  one that starts later than any grant lives. One of which no prefetch comes is forgotten.
- What may be asked for is counted for a name, an engine's or a gateway's, over all its sessions:
  who connects anew begins with what was left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from sidecar.clocks import NS
from sidecar.degrade.stance import Stance, unrestricted
from sidecar.engines.holdings import Holdings
from sidecar.engines.opens import Names, Steps
from sidecar.lookup.judge import EngineFacts, Judge
from sidecar.lookup.request import (
    Cancelled,
    Denied,
    FencedOff,
    Finished,
    Judged,
    Opened,
    Prompt,
    Request,
)
from sidecar.prefetch.prefetcher import Prefetcher
from sidecar.revocation.invalidation import LiveRequest, LiveRequests
from storage.block import BlockAddress
from storage.fair import Weight, equal_weights
from storage.lately import Lately
from strongroom.clock import Clock
from strongroom.errors import ProtocolViolation
from strongroom.identity import ComponentId
from strongroom.limits import REQUEST_ID_CHARS_MAX
from strongroom.wire.frames import Hint, Open

_MS = 1_000_000
_NO_PROMPT = Prompt(b"", b"", "")

Facts = Callable[[], EngineFacts | None]
"""What the engine is at this moment; None while it is not connected."""


@dataclass(frozen=True, slots=True)
class HintLimits:
    """See `SidecarSettings`."""

    alive_max: int
    judged_max: int
    """Of one name, at once."""
    per_s: int
    """Of one name; so many may also come in one go."""
    overdue_ns: int
    """A hint is forgotten so long after its expected start."""
    horizon_ns: int
    """A start further away is no start."""


@dataclass(slots=True)
class HintCounts:
    """Since start."""

    taken: int = 0
    dropped: int = 0
    """Too many, or no such engine."""
    denied: int = 0
    begun: int = 0
    """A prefetch was planned."""


class Allowance:
    """What one engine, or one gateway over all its sessions, may still ask for.

    All of it is shared by tenant: what may be alive or judged at once is held by parts, and who
    comes when a second's hints are used up finds its part of the next second's.
    """

    def __init__(self, limits: HintLimits, clock: Clock, weight: Weight = equal_weights) -> None:
        self._per_s = limits.per_s
        self._clock = clock
        self._left = float(limits.per_s)
        self._counted_ns = clock()
        self._lately = Lately(weight, newcomer=True)
        self._alive = Holdings(limits.alive_max, weight)
        self._judging = Holdings(limits.judged_max, weight)

    def take(self, tenant: ComponentId | None) -> bool:
        """Whether one more hint of `tenant` may be looked at now, which is then alive and being
        judged. Asking costs one of the second's.
        """
        now_ns, per_s = self._clock(), self._per_s
        regained = max(0, now_ns - self._counted_ns) * per_s / NS
        self._left = min(per_s, self._left + regained)
        self._counted_ns = now_ns
        self._lately.fade(min(1.0, regained / per_s))
        if self._left < 1 and (self._left < 1 - per_s or self._lately.is_ahead(tenant)):
            return False
        self._left -= 1
        self._lately.count(tenant, 1)
        if not self._alive.take(tenant):
            return False
        if not self._judging.take(tenant):
            self._alive.give_back(tenant)
            return False
        return True

    @property
    def alive(self) -> int:
        """Hints that are alive."""
        return self._alive.total

    def judged(self, tenant: ComponentId | None) -> None:
        """One that was taken has been judged."""
        self._judging.give_back(tenant)

    def ended(self, tenant: ComponentId | None) -> None:
        """One that was taken is not alive any more."""
        self._alive.give_back(tenant)


def _never() -> bool:
    """There is always room."""
    return False


@dataclass(frozen=True, slots=True)
class HintDesk:
    """What the hints of every connection share."""

    judge: Judge
    steps: Steps
    names: Names
    prefetcher: Prefetcher
    live: LiveRequests
    clock: Clock
    limits: HintLimits
    stance: Callable[[str, str], Stance] = unrestricted
    """What is in force for an engine and a tenant now."""
    crowded: Callable[[], bool] = _never
    """Whether the audit spool has better uses for its room."""
    counts: HintCounts = field(default_factory=HintCounts)
    weight: Weight = equal_weights

    def allowance(self) -> Allowance:
        """For one more engine or gateway."""
        return Allowance(self.limits, self.clock, self.weight)


@dataclass(frozen=True, slots=True)
class _Hinted:
    request: Request
    forget_ns: int
    tenant: ComponentId | None
    """Whom its grant names."""


class Hints:
    """The hints of one connection. Leave with `close`."""

    def __init__(self, desk: HintDesk, facts: Facts, allowance: Allowance) -> None:
        self._desk = desk
        self._facts = facts
        self._alive: dict[str, _Hinted] = {}
        self._allowance = allowance
        desk.live.add(self._live)

    def __len__(self) -> int:
        return len(self._alive)

    def take(self, frame: Hint, tasks: asyncio.TaskGroup) -> None:
        """Judge the hint as a task of its connection; never waits."""
        if not 0 < len(frame.hint) <= REQUEST_ID_CHARS_MAX:
            raise ProtocolViolation(
                "a hint's name is empty or too long", field="hint", limit=REQUEST_ID_CHARS_MAX
            )
        desk, now = self._desk, self._desk.clock()
        desk.counts.taken += 1
        self._forget_overdue(now)
        self.drop(frame.hint)
        limits, start_ns = desk.limits, max(0, frame.start_in_ms) * _MS
        tenant = desk.names.tenant(frame.grant)
        if (
            not frame.hint.isprintable()
            or start_ns > limits.horizon_ns
            or desk.crowded()
            or not self._allowance.take(tenant)
        ):
            desk.counts.dropped += 1
            return
        request = Request(frame.hint)
        self._alive[frame.hint] = _Hinted(request, now + start_ns + limits.overdue_ns, tenant)
        judging = tasks.create_task(
            self._judge(request, frame, now + start_ns, tenant), name="hint"
        )
        judging.add_done_callback(lambda _: self._allowance.judged(tenant))

    def drop(self, name: str) -> None:
        """The request will not come."""
        hinted = self._alive.pop(name, None)
        if hinted is not None:
            self._allowance.ended(hinted.tenant)
            hinted.request.cancel(self._desk.clock())

    def close(self) -> None:
        """The connection is over, and so is every hint that it gave."""
        for name in tuple(self._alive):
            self.drop(name)
        self._desk.live.remove(self._live)

    async def _judge(
        self, request: Request, frame: Hint, start_ns: int, tenant: ComponentId | None
    ) -> None:
        desk = self._desk
        await desk.steps.begin(tenant, len(frame.tokens))
        facts = self._facts()
        if facts is None:
            desk.counts.dropped += 1
            self._forget(request)
            return
        opened = Open(
            frame.hint, frame.grant, frame.salt, frame.tokens, frame.adapter, frame.extras
        )
        await desk.judge.judge(request, opened, facts, kind="hint")
        match request.state:
            case Judged() as judged:
                # What is kept of a hint is what a fence needs.
                request.state = replace(judged, prompt=_NO_PROMPT)
                self._begin(request, judged, facts, start_ns)
            case Denied():
                desk.counts.denied += 1
                self._forget(request)
            case Opened() | Finished() | Cancelled() | FencedOff():
                self._forget(request)

    def _begin(self, request: Request, judged: Judged, facts: EngineFacts, start_ns: int) -> None:
        desk = self._desk
        if desk.stance(facts.engine, judged.grant.tenant).prefetches:
            request.prefetch = desk.prefetcher.begin(
                judged.grant.jti,
                request.fence,
                addresses_of(judged, facts),
                start_in_ns=max(0, start_ns - desk.clock()),
                tenant=judged.grant.tenant,
            )
        if request.prefetch is None:
            self._forget(request)
        else:
            desk.counts.begun += 1

    def _forget(self, request: Request) -> None:
        found = self._alive.get(request.name)
        if found is not None and found.request is request:
            del self._alive[request.name]
            self._allowance.ended(found.tenant)

    def _forget_overdue(self, now_ns: int) -> None:
        for name, hinted in tuple(self._alive.items()):
            if hinted.forget_ns > now_ns:
                continue
            self.drop(name)

    def _live(self) -> Iterable[LiveRequest]:
        """For an invalidation; nobody is told that a hint was fenced."""
        for hinted in tuple(self._alive.values()):
            yield LiveRequest(hinted.request, _tell_nobody)


def addresses_of(judged: Judged, facts: EngineFacts) -> list[BlockAddress]:
    """Every rank's shard of what was hit, in the order in which a load reads."""
    return [BlockAddress(block, rank) for block in judged.hit.ids for rank in facts.ranks]


def _tell_nobody() -> None:
    """No engine knows of the hint."""
