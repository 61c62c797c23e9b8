"""The watch: looks at the gauges once a second, and says what is in force.

It joins what is separate: readings go to `Pressure` and `Breakers`; their answers become one
`Stance` an engine, which the judge consults; transfers tell how they ended. Rules:
- What is in force is the heavier of pressure's action and the breakers'.
- The look costs memory reads, and one system call; nothing waits for it.
- A look that fails is logged and changes nothing: the watch never ends the sidecar, and what
  was in force stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sidecar.clocks import Clocks
from sidecar.degrade.breaker import Breakers
from sidecar.degrade.conditions import Armed, BreakerState, Condition
from sidecar.degrade.gauges import Gauges
from sidecar.degrade.latency import Latency, LatencyStatistics
from sidecar.degrade.pressure import Effects, Gauge, Pressure, Readings
from sidecar.degrade.reports import Reported, Reports
from sidecar.degrade.sentry import Sentry
from sidecar.degrade.stance import UNRESTRICTED, Action, Stance
from sidecar.record.events import EventKind, Events
from sidecar.record.journal import Journal
from sidecar.record.reasons import Reason
from storage.tiers.protocol import TierName
from strongroom.wire.frames import Report

_log = logging.getLogger(__name__)

_FAULTS = frozenset({Reason.EXPIRED, Reason.INTEGRITY})
"""Ends of a transfer that are a fault of the engine or of ours, and no policy, revocation,
cancellation or bound. They count for the engine whose transfer it was, and for no other."""
_PAID_MAX_US = 30e6
"""Computing that loads saved and that is set against time spent waiting for loads, at most."""
_ERRORS_FULL_S = 10.0
"""Failed device operations a second that read as 1.0."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counters since start whose differences count."""

    io_errors: int = 0


def _unknown(_engine: str, _tokens: int) -> None:
    """Nobody has measured it."""


def _nothing_promised(_engine: str, _request: str) -> None:
    """Nobody has decided on it by its speed."""


def _nothing(*_: object) -> None:
    """Nobody asked to be told."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What the watch reads; each is memory only."""

    gauges: Callable[[], Gauges]
    tally: Callable[[], Tally]
    pending_write_bytes: Callable[[], int]
    recompute_s: Callable[[str, int], float | None] = _unknown
    """How long an engine takes to compute so many tokens; None while it is not known."""
    promised_s: Callable[[str, str], float | None] = _nothing_promised
    """What a request's load on an engine was to take less than; None where nothing was said."""
    reported: Callable[[str, Report], object] = _nothing
    """Told of every report that can be true."""
    gone: Callable[[str], None] = _nothing
    """Told of every engine whose scheduler left."""


@dataclass(slots=True)
class TransferCounts:
    """Since start."""

    loads: int = 0
    loads_failed: int = 0
    saves: int = 0
    saves_refused: int = 0
    tokens_restored: int = 0


@dataclass(frozen=True, slots=True)
class BreakerView:
    """One breaker: `armed`, `tripped` or `probation`."""

    condition: Condition
    state: str
    reading: float | None
    threshold: float
    at: str
    """When it tripped; empty while armed."""
    evidence: int
    """Events kept of the window before it."""
    tripped_for: tuple[str, ...] = ()
    """Engines or tenants; one empty name where that is the node."""


@dataclass(frozen=True, slots=True)
class WatchStatistics:
    """What the watch saw and what is in force now."""

    rungs: Mapping[Gauge, int]
    engine_rungs: Mapping[str, int]
    effects: Effects
    steps: int
    actions: Mapping[str, Action]
    """By engine that reports."""
    action: Action
    """The heaviest in force anywhere."""
    breakers: tuple[BreakerView, ...]
    trips: int
    looks: int
    crossed: int
    deleted: int
    loads: int
    loads_failed: int
    saves: int
    saves_refused: int
    tokens_restored: int
    lookup: LatencyStatistics
    restore: Mapping[str, LatencyStatistics]
    last_event: int


@dataclass(slots=True)
class _Past:
    tally: Tally
    at_ns: int


@dataclass(slots=True)
class _Paid:
    """What the loads of one engine saved it of computing; a request once between two reports."""

    us: float = 0.0
    requests: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """See `SidecarSettings`."""

    interval_s: float = 1.0
    limit_tokens: int = 4096
    """What `limit_context` lowers the longest cached context to."""
    report_stale_s: float = 10.0
    """A report older than this says nothing any more."""


@dataclass(slots=True)
class Latencies:
    """Seconds, as the sidecar sees them."""

    lookup: Latency = field(default_factory=Latency)
    restore: dict[str, Latency] = field(default_factory=dict)
    """Of whole loads, by the slowest tier that they read from."""


class Watch:
    """One a sidecar. `attach` names its sources once they are built."""

    def __init__(
        self,
        settings: WatchSettings,
        events: Events,
        breakers: Breakers,
        pressure: Pressure,
        sentry: Sentry,
        clocks: Clocks,
    ) -> None:
        self.settings = settings
        self.events = events
        self.breakers = breakers
        self.pressure = pressure
        self.sentry = sentry
        self.journal = Journal(events)
        self.reports = Reports(clocks.boot)
        self.latencies = Latencies()
        self.counts = TransferCounts()
        self._clocks = clocks
        self._sources: Sources | None = None
        self._past: _Past | None = None
        self._told: dict[str, Action] = {}
        self._paid: dict[str, _Paid] = {}

    def attach(self, sources: Sources) -> None:
        """Look at these from now on."""
        self._sources = sources

    # What is in force

    def stance(self, engine: str, tenant: str = "") -> Stance:
        """For the judge, prefetches and transfers: of one engine, for one tenant."""
        if self.breakers.calm and self.pressure.calm:
            return UNRESTRICTED
        ours, theirs = self.breakers.action_for(engine, tenant), self.pressure.action(engine)
        return Stance.of(max(ours, theirs, key=_weight), self.settings.limit_tokens)

    def may_swap_out(self, engine: str, tenant: str = "") -> bool:
        """Whether an engine may hand in new blocks of a tenant now."""
        return not self.pressure.effects.swap_outs_paused and self.stance(engine, tenant).saves

    # What others tell

    def reported(self, engine: str, report: Report) -> None:
        """A `Report` arrived. Raises `ProtocolViolation` for one that cannot be true."""
        new = self.reports.take(engine, report)
        paid = self._paid.setdefault(engine, _Paid())
        worth_it = min(paid.us, new.idle_us)
        paid.us -= worth_it
        paid.requests.clear()
        idle_us, all_us = new.idle_us - worth_it, new.idle_us + new.busy_us
        self.breakers.note(Condition.ENGINE_IDLE, idle_us, all_us, engine)
        if self._sources is not None:
            self._sources.reported(engine, report)

    def prefetched(self, tenant: str, *, used: bool) -> None:
        """A block that was brought ahead for a tenant was used, or will not be."""
        self.breakers.note(Condition.PREFETCH_WASTE, not used, 1, tenant)

    def written(self, tenant: str, *, came_back: bool) -> None:
        """A block was written to disk; `came_back`: it had been evicted from there just before."""
        self.breakers.note(Condition.THRASH, came_back, 1, tenant)

    def damaged(self, tenant: str, nbytes: int) -> None:
        """A record did not open: whoever found it, a load or what reads ahead."""
        self.events.emit(
            EventKind.DETECTED,
            subject=Condition.CHECKSUM.value,
            tenant=tenant,
            nbytes=nbytes,
        )
        self.breakers.note(Condition.CHECKSUM, 1, 1)

    def engine_gone(self, engine: str) -> None:
        """Its scheduler left: it stands on no ladder any more."""
        self.reports.forget(engine)
        self._told.pop(engine, None)
        self._paid.pop(engine, None)
        self.events.emit(EventKind.ENGINE_GONE, engine=engine)
        if self._sources is not None:
            self._sources.gone(engine)

    def judged(
        self,
        engine: str,
        request: str,
        tenant: str,
        missed: Reason,
        *,
        tokens: int,
        seconds: float,
    ) -> None:
        """A positive verdict was given: `tokens` of it may be restored, and `missed` is why no
        more may.
        """
        self.latencies.lookup.add(seconds)
        action = self.stance(engine, tenant).action
        self.events.emit(
            EventKind.PREFIX_HIT if tokens else EventKind.PREFIX_MISS,
            subject="" if action is Action.NONE else action.value,
            reason=missed.value,
            engine=engine,
            request=request,
            tenant=tenant,
            tokens=tokens,
            service_us=int(seconds * 1e6),
        )

    def load_ended(
        self,
        engine: str,
        request: str,
        tenant: str,
        reason: Reason,
        *,
        tier: str,
        tokens: int,
        nbytes: int,
        seconds: float,
    ) -> None:
        """A load came to its end; `seconds` since it was asked for."""
        good = reason is Reason.NONE
        self.counts.loads += good
        self.counts.loads_failed += not good
        if good:
            self.counts.tokens_restored += tokens
            self.latencies.restore.setdefault(tier, Latency()).add(seconds)
            self._compare(engine, request, tokens, seconds)
        self.events.emit(
            EventKind.SWAP_IN_DONE if good else EventKind.SWAP_IN_FAILED,
            reason=reason.value,
            engine=engine,
            request=request,
            tenant=tenant,
            tier_from=tier,
            tier_to="engine",
            tokens=tokens,
            nbytes=nbytes,
            service_us=int(seconds * 1e6),
        )
        self._streak(engine, reason)

    def save_ended(
        self, engine: str, request: str, tenant: str, reason: Reason, *, blocks: int, nbytes: int
    ) -> None:
        """A save came to its end: `blocks` were stored."""
        self.counts.saves += blocks
        self.counts.saves_refused += reason is not Reason.NONE
        if blocks or reason is not Reason.NONE:
            self.events.emit(
                EventKind.SWAP_OUT_DONE if blocks else EventKind.SWAP_OUT_REFUSED,
                reason=reason.value,
                engine=engine,
                request=request,
                tenant=tenant,
                tier_from="engine",
                tier_to=TierName.HOST.value,
                nbytes=nbytes,
                numbers={"blocks": blocks},
            )
        self._streak(engine, reason)

    def statistics(self) -> WatchStatistics:
        """A frozen snapshot."""
        actions = {engine: self.stance(engine).action for engine in self.reports.latest()}
        return WatchStatistics(
            rungs=self.pressure.rungs(),
            engine_rungs=self.pressure.engine_rungs(),
            effects=self.pressure.effects,
            steps=self.pressure.steps,
            actions=actions,
            action=max((self.breakers.action, *actions.values()), key=_weight),
            breakers=tuple(
                self._view(name, state) for name, state in self.breakers.states().items()
            ),
            trips=self.breakers.trips,
            looks=self.sentry.looks,
            crossed=self.sentry.crossed,
            deleted=self.sentry.deleted,
            loads=self.counts.loads,
            loads_failed=self.counts.loads_failed,
            saves=self.counts.saves,
            saves_refused=self.counts.saves_refused,
            tokens_restored=self.counts.tokens_restored,
            lookup=self.latencies.lookup.statistics(),
            restore={tier: found.statistics() for tier, found in self.latencies.restore.items()},
            last_event=self.events.last,
        )

    def _view(self, condition: Condition, state: BreakerState) -> BreakerView:
        trip = None if isinstance(state, Armed) else state.trip
        return BreakerView(
            condition=condition,
            state=type(state).__name__.lower(),
            reading=self.breakers.reading(condition),
            threshold=self.breakers.threshold(condition),
            at="" if trip is None else trip.at,
            evidence=0 if trip is None else len(trip.evidence),
            tripped_for=self.breakers.tripped_for(condition),
        )

    # The look

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # noqa: BLE001 - see above: it never ends the sidecar
                _log.exception("a look at the gauges failed")
            await asyncio.sleep(self.settings.interval_s)

    def look(self) -> None:
        """Take everything into account, at once."""
        if self._sources is None:
            return
        gauges, tally = self._sources.gauges(), self._sources.tally()
        now = self._clocks.boot()
        past, self._past = self._past, _Past(tally, now)
        errors_s = 0.0
        if past is not None:
            errors_s = self._differences(past, tally, now)
        self.journal.look(gauges.tiers)
        self.pressure.observe(self._readings(gauges, errors_s, now))
        self.breakers.tick()
        for engine in gauges.engines:
            self._tell_action(engine)

    def _differences(self, past: _Past, tally: Tally, now: int) -> float:
        errors = tally.io_errors - past.tally.io_errors
        if errors > 0:
            self.events.emit(
                EventKind.TIER_ERROR, tier_from=TierName.NVME.value, numbers={"errors": errors}
            )
        return errors / max((now - past.at_ns) / 1e9, 1e-3)

    def _readings(self, gauges: Gauges, errors_s: float, now: int) -> Readings:
        values: dict[Gauge, float] = {Gauge.NVME_ERRORS: errors_s / _ERRORS_FULL_S}
        for queue in gauges.queues:
            if queue.limit and "crypto" in queue.name:
                values[Gauge.HOST_QUEUE] = queue.depth / queue.limit
            elif queue.limit and "disk" in queue.name:
                values[Gauge.DISK_QUEUE] = queue.depth / queue.limit
        host = gauges.tier(TierName.HOST)
        if host is not None and host.capacity_bytes and self._sources is not None:
            stuck = host.pinned_bytes + self._sources.pending_write_bytes()
            values[Gauge.HOST_TIER] = stuck / host.capacity_bytes
        oldest = now - int(self.settings.report_stale_s * 1e9)
        engines = {
            engine: used
            for engine, reported in gauges.engines.items()
            if (used := _used(reported)) is not None and reported.at_ns >= oldest
        }
        return Readings(values, engines)

    def _tell_action(self, engine: str) -> None:
        action = self.stance(engine).action
        if self._told.get(engine, Action.NONE) is not action:
            self._told[engine] = action
            self.events.emit(EventKind.ACTION, subject="engine", engine=engine, reason=action.value)

    def _compare(self, engine: str, request: str, tokens: int, seconds: float) -> None:
        if self._sources is None or not tokens:
            return
        promised_s = self._sources.promised_s(engine, request)
        if promised_s is not None:
            self.breakers.note(Condition.RESTORE_SLOW, seconds > promised_s, 1, engine)
        recompute_s = self._sources.recompute_s(engine, tokens)
        paid = self._paid.setdefault(engine, _Paid())
        if recompute_s is not None and request not in paid.requests:
            paid.requests.add(request)
            paid.us = min(paid.us + recompute_s * 1e6, _PAID_MAX_US)

    def _streak(self, engine: str, reason: Reason) -> None:
        if reason in _FAULTS:
            self.breakers.note(Condition.ERROR_STREAK, 1, 1, engine)
        elif reason is Reason.NONE:
            self.breakers.note(Condition.ERROR_STREAK, 0, 1, engine)


def _weight(action: Action) -> int:
    return action.weight


def _used(reported: Reported) -> float | None:
    return reported.pages_used
