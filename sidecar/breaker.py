"""The gate on caching itself: conditions that turn this sidecar to engine-only, and back.

    Armed ─condition met─▶ Tripped ─cooldown over─▶ Probation ─clean─▶ Armed
                              ▲                         └─ met again ─▶ Tripped, twice as long
                              └───────── an operator's clear leads to Armed ──────────▶

Rules (DESIGN section 9):
- Tripped means engine-only: verdicts stay positive, so that the engine's own prefix cache is
  used, with nothing to restore and nothing to save.
- Two conditions refuse instead: a cross-tenant hit and a read after deletion. What the engine has
  on its pages came the same way as what was caught, so the engine may not use that either; every
  request in flight is fenced.
- A performance trip is cleared by an operator, or by a clean probation after its cooldown; each
  trip again from probation doubles the cooldown, up to an hour.
- A security trip is cleared by an operator alone. It is in the state directory before anything
  else happens, so that a restart does not clear it; a record of trips that cannot be read trips
  them all.
- A trip keeps the events of its window: what led to it is still there when somebody looks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from sidecar.clocks import NS, Clocks
from sidecar.events import Event, EventKind, Events
from sidecar.measures import Count, Measure, Rise, Rule, Share, Streak
from sidecar.stance import Action
from sidecar.state import read_private, replace_file
from strongroom.errors import Conflict, Missing, Refused, Unavailable

_log = logging.getLogger(__name__)
EVIDENCE_MAX: Final = 256
COOLDOWN_S_MAX: Final = 3600.0
_FILE: Final = "trips.json"


class Condition(StrEnum):
    """What can trip."""

    RESTORE_SLOW = "restore_slow"
    """Restores that took longer than computing the same tokens would have. That more than one in
    twenty does is the same as: the restore's P95 is above recompute."""
    THRASH = "thrash"
    """Blocks wanted again right after they were evicted, of those stored."""
    PREFETCH_WASTE = "prefetch_waste"
    ENGINE_IDLE = "engine_idle"
    """Time without a step while requests waited for a load: its rise."""
    ERROR_STREAK = "error_streak"
    """Transfers that failed for no reason of policy, in a row."""
    CHECKSUM = "checksum_mismatch"
    CROSS_TENANT = "cross_tenant_hit"
    READABLE = "readable_after_deletion"


SECURITY: Final = frozenset({Condition.CHECKSUM, Condition.CROSS_TENANT, Condition.READABLE})
REFUSING: Final = frozenset({Condition.CROSS_TENANT, Condition.READABLE})

RULES: Final[Mapping[Condition, Rule]] = {
    Condition.RESTORE_SLOW: Share(threshold=0.05, minimum=100, window_s=60.0),
    Condition.THRASH: Share(threshold=0.5, minimum=200, window_s=60.0),
    Condition.PREFETCH_WASTE: Share(threshold=0.8, minimum=100, window_s=300.0),
    Condition.ENGINE_IDLE: Rise(threshold=0.2, minimum=5_000_000, window_s=30.0),
    Condition.ERROR_STREAK: Streak(threshold=20, window_s=60.0),
    Condition.CHECKSUM: Count(threshold=3, window_s=300.0),
    Condition.CROSS_TENANT: Count(threshold=1, window_s=3600.0),
    Condition.READABLE: Count(threshold=1, window_s=3600.0),
}


class Trip(msgspec.Struct, frozen=True):
    """Why and when a breaker tripped, and what led to it."""

    condition: Condition
    at: str
    reading: float
    threshold: float
    evidence: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Armed:
    """In order; watching."""


@dataclass(frozen=True, slots=True)
class Tripped:
    """Caching is off because of this."""

    trip: Trip
    since_ns: int
    cooldown_s: float


@dataclass(frozen=True, slots=True)
class Probation:
    """Caching is on again, on trial."""

    trip: Trip
    since_ns: int
    cooldown_s: float


BreakerState = Armed | Tripped | Probation


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Seconds; `rules` may replace some of `RULES`."""

    cooldown_s: float = 60.0
    probation_s: float = 120.0
    rules: Mapping[Condition, Rule] = field(default_factory=lambda: RULES)


class Breakers:
    """All conditions of one sidecar. Used on the event loop alone."""

    def __init__(
        self,
        directory: Path,
        settings: BreakerSettings,
        events: Events,
        clocks: Clocks,
        fence_all: Callable[[], None],
    ) -> None:
        self._path = directory / _FILE
        self._settings = settings
        self._events = events
        self._clocks = clocks
        self._fence_all = fence_all
        self._measures = {
            condition: Measure(settings.rules.get(condition, RULES[condition]))
            for condition in Condition
        }
        self._states: dict[Condition, BreakerState] = {
            condition: Armed() for condition in Condition
        }
        self._action = Action.NONE
        self._unsaved = False
        self.trips = 0
        for trip in self._stored():
            self._states[trip.condition] = Tripped(trip, clocks.boot(), 0.0)
        self._judge_action()

    @property
    def action(self) -> Action:
        """`none`, `engine_only` or `refuse`."""
        return self._action

    def states(self) -> Mapping[Condition, BreakerState]:
        """Each breaker's state."""
        return dict(self._states)

    def reading(self, condition: Condition) -> float | None:
        """What is measured now; None while there is too little."""
        return self._measures[condition].reading(self._clocks.boot())

    def threshold(self, condition: Condition) -> float:
        """What it is compared with."""
        return self._measures[condition].rule.threshold

    def check(self) -> None:
        """Right before bytes are released: raises `Unavailable` while a trip refuses them.

        Under engine-only a load that was judged before may end: only its speed was at fault, or
        the blocks that did not open, and each of them is a miss by itself.
        """
        if self._action is Action.REFUSE:
            raise Unavailable("a breaker refuses every release")

    def note(self, condition: Condition, bad: float, cases: float) -> None:
        """Count cases; trips at once where that is due."""
        if cases <= 0 and bad <= 0:
            return
        now = self._clocks.boot()
        if isinstance(self._states[condition], Tripped):
            return  # it is off: what still ends was begun before
        measure = self._measures[condition]
        measure.add(bad, cases, now)
        reading = measure.trips(now)
        if reading is not None:
            self._trip(condition, reading, now)

    def tick(self) -> None:
        """Let time do its part: cooldown, probation, and a record that could not be written."""
        now = self._clocks.boot()
        for condition, state in tuple(self._states.items()):
            if condition in SECURITY:
                continue
            match state:
                case Tripped(trip, since_ns, cooldown_s):
                    if now - since_ns >= cooldown_s * NS:
                        self._states[condition] = Probation(trip, now, cooldown_s)
                        self._events.emit(EventKind.BREAKER_PROBATION, subject=condition.value)
                case Probation(_, since_ns, _):
                    if now - since_ns >= self._settings.probation_s * NS:
                        self._states[condition] = Armed()
                        self._events.emit(
                            EventKind.BREAKER_CLEARED, subject=condition.value, reason="probation"
                        )
                case Armed():
                    pass
        self._judge_action()
        if self._unsaved:
            self._save()

    def clear(self, name: str) -> None:
        """An operator has looked into it.

        Raises `Missing` for a name that is none, `Conflict` when it is armed, and `Unavailable`,
        with nothing changed, when the record of security trips cannot be written.
        """
        try:
            condition = Condition(name)
        except ValueError as error:
            raise Missing("there is no such breaker", field="name") from error
        before = self._states[condition]
        if isinstance(before, Armed):
            raise Conflict("this breaker has not tripped", field="name")
        self._states[condition] = Armed()
        if condition in SECURITY and not self._save():
            self._states[condition] = before
            raise Unavailable("the record of trips cannot be written")
        self._measures[condition].clear()
        self._events.emit(EventKind.BREAKER_CLEARED, subject=condition.value, reason="operator")
        _log.warning("breaker %s was cleared by an operator", condition)
        self._judge_action()

    def _trip(self, condition: Condition, reading: float, now: int) -> None:
        measure = self._measures[condition]
        before = self._states[condition]
        cooldown_s = self._settings.cooldown_s
        if isinstance(before, Probation):
            cooldown_s = min(2 * before.cooldown_s, COOLDOWN_S_MAX)
        trip = Trip(
            condition,
            self._clocks.timestamp(),
            reading,
            measure.rule.threshold,
            self._events.window(measure.rule.window_s, EVIDENCE_MAX),
        )
        self._states[condition] = Tripped(trip, now, cooldown_s)
        self.trips += 1
        self._judge_action()
        if condition in SECURITY:
            self._save()
        measure.clear()
        self._events.emit(
            EventKind.BREAKER_TRIPPED,
            subject=condition.value,
            numbers={"reading": reading, "threshold": trip.threshold, "cooldown_s": cooldown_s},
        )
        _log.error("breaker %s tripped: %.4g against %.4g", condition, reading, trip.threshold)
        if condition in REFUSING:
            self._fence_all()

    def _judge_action(self) -> None:
        tripped = {c for c, state in self._states.items() if isinstance(state, Tripped)}
        if tripped & REFUSING:
            action = Action.REFUSE
        else:
            action = Action.ENGINE_ONLY if tripped else Action.NONE
        if action is not self._action:
            self._action = action
            self._events.emit(EventKind.ACTION, subject="breakers", reason=action.value)

    def _save(self) -> bool:
        """Write which security breakers are tripped. What fails is tried again at each tick."""
        kept = [
            state.trip
            for condition, state in self._states.items()
            if condition in SECURITY and isinstance(state, Tripped)
        ]
        try:
            replace_file(self._path, msgspec.json.encode(kept))
        except OSError as error:
            _log.error("the record of security trips cannot be written: %s", error.strerror)
            self._unsaved = True
        else:
            self._unsaved = False
        return not self._unsaved

    def _stored(self) -> list[Trip]:
        """Security trips of earlier lives; all of them where that cannot be known."""
        if not self._path.exists():
            return []
        try:
            trips = msgspec.json.decode(read_private(self._path), type=list[Trip])
        except (msgspec.DecodeError, OSError) as error:
            _log.error("the record of trips cannot be read, so every one counts: %s", error)
            at = self._clocks.timestamp()
            return [
                Trip(condition, at, 0.0, 0.0) for condition in Condition if condition in SECURITY
            ]
        return [trip for trip in trips if trip.condition in SECURITY]


class Crossed(Refused):
    """A block of another tenant or namespace was about to be released. It was not."""

    code = "crossed"


class Deleted(Refused):
    """A block of something deleted was about to be released. It was not."""

    code = "deleted"
