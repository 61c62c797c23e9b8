"""Breakers: conditions that turn caching off, for those whom they are about, and on again.

Rules (DESIGN section 9):
- Tripped means engine-only: verdicts stay positive, so that the engine's own prefix cache is
  used, with nothing to restore and nothing to save.
- A condition of speed or faults is measured and trips for one engine or one tenant (`SCOPES`):
  whoever is slow, broken or wasteful turns caching off for itself and for nobody else. Those of
  security trip for the whole node. No engine and no client can make a security condition true.
- Two conditions refuse instead: a cross-tenant hit and a read after deletion. What the engine has
  on its pages came the same way as what was caught, so the engine may not use that either; every
  request in flight is fenced.
- A performance trip is cleared by an operator, or by a clean probation after its cooldown; each
  trip again from probation doubles the cooldown, up to an hour.
- A security trip is cleared by an operator alone. It is in the state directory, and what it
  fences is fenced, before anything else happens, so that a restart does not clear it; a record of
  trips that cannot be read trips them all.
- A trip keeps the events of its window: what led to it is still there when somebody looks.
"""

from __future__ import annotations

import logging
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from sidecar.clocks import NS, Clocks
from sidecar.degrade.conditions import (
    REFUSING,
    RULES,
    SCOPES,
    SECURITY,
    Armed,
    BreakerState,
    Condition,
    Probation,
    Scope,
    Trip,
    Tripped,
)
from sidecar.degrade.measures import Measure, Rule
from sidecar.degrade.stance import Action
from sidecar.record.events import EventKind, Events
from strongroom.errors import Conflict, Missing, Refused, Unavailable
from strongroom.private_files import read_private, replace_file

_log = logging.getLogger(__name__)
EVIDENCE_MAX: Final = 256
COOLDOWN_S_MAX: Final = 3600.0
ABOUT_MAX: Final = 1024
"""Breakers of engines and tenants that are kept; beyond it the one noted longest ago goes."""
_FILE: Final = "trips.json"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Seconds; `rules` may replace some of `RULES`."""

    cooldown_s: float = 60.0
    probation_s: float = 120.0
    rules: Mapping[Condition, Rule] = field(default_factory=lambda: RULES)


@dataclass(slots=True)
class _Breaker:
    """One condition of one engine, tenant or node."""

    measure: Measure
    state: BreakerState = field(default_factory=Armed)


_Key = tuple[Condition, str]


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
        self._node = {
            (condition, ""): self._made(condition)
            for condition, scope in SCOPES.items()
            if scope is Scope.NODE
        }
        self._others: OrderedDict[_Key, _Breaker] = OrderedDict()
        self._in_force: dict[tuple[Scope, str], Action] = {}
        self._unsaved = False
        self.trips = 0
        for trip in self._stored():
            self._node[trip.condition, ""].state = Tripped(trip, clocks.boot(), 0.0)
        self._judge_action()

    @property
    def action(self) -> Action:
        """The heaviest in force for anybody: `none`, `engine_only` or `refuse`."""
        return max(self._in_force.values(), key=_weight, default=Action.NONE)

    @property
    def calm(self) -> bool:
        """Nothing is in force for anybody."""
        return not self._in_force

    def action_for(self, engine: str, tenant: str = "") -> Action:
        """What is in force for a request of `tenant` on `engine`."""
        if not self._in_force:
            return Action.NONE
        keys = ((Scope.NODE, ""), (Scope.ENGINE, engine), (Scope.TENANT, tenant))
        return max((self._in_force.get(key, Action.NONE) for key in keys), key=_weight)

    def __len__(self) -> int:
        """How many are kept, of whomever."""
        return len(self._node) + len(self._others)

    def states(self) -> Mapping[Condition, BreakerState]:
        """Each condition's state; of several engines or tenants the worst, and then the latest."""
        found: dict[Condition, BreakerState] = {condition: Armed() for condition in Condition}
        for (condition, _), breaker in self._all().items():
            if _rank(breaker.state) >= _rank(found[condition]):
                found[condition] = breaker.state
        return found

    def tripped_for(self, condition: Condition) -> tuple[str, ...]:
        """Engines or tenants for whom it is tripped; one empty name where that is the node."""
        return tuple(
            about
            for (of, about), breaker in self._all().items()
            if of is condition and isinstance(breaker.state, Tripped)
        )

    def reading(self, condition: Condition) -> float | None:
        """What is measured now, the worst of all; None while there is too little."""
        now = self._clocks.boot()
        readings = (
            breaker.measure.reading(now)
            for (of, _), breaker in self._all().items()
            if of is condition
        )
        return max((reading for reading in readings if reading is not None), default=None)

    def threshold(self, condition: Condition) -> float:
        """What it is compared with."""
        return self._rule(condition).threshold

    def check(self) -> None:
        """Right before bytes are released: raises `Halted` while a trip refuses them.

        Under engine-only a load that was judged before may end: only its speed was at fault, or
        the blocks that did not open, and each of them is a miss by itself.
        """
        if self._in_force.get((Scope.NODE, "")) is Action.REFUSE:
            raise Halted("a breaker refuses every release")

    def note(self, condition: Condition, bad: float, cases: float, about: str = "") -> None:
        """Count cases of `about`, an engine or a tenant; trips at once where that is due."""
        if cases <= 0 and bad <= 0:
            return
        now = self._clocks.boot()
        key = (condition, "" if SCOPES[condition] is Scope.NODE else about)
        breaker = self._of(key)
        if isinstance(breaker.state, Tripped):
            return  # it is off: what still ends was begun before
        breaker.measure.add(bad, cases, now)
        reading = breaker.measure.trips(now)
        if reading is not None:
            self._trip(key, breaker, reading, now)

    def tick(self) -> None:
        """Let time do its part: cooldown, probation, and a record that could not be written."""
        now = self._clocks.boot()
        changed: list[tuple[_Key, EventKind]] = []
        for key, breaker in self._others.items():
            match breaker.state:
                case Tripped(trip, since_ns, cooldown_s):
                    if now - since_ns >= cooldown_s * NS:
                        breaker.state = Probation(trip, now, cooldown_s)
                        changed.append((key, EventKind.BREAKER_PROBATION))
                case Probation(_, since_ns, _):
                    if now - since_ns >= self._settings.probation_s * NS:
                        breaker.state = Armed()
                        changed.append((key, EventKind.BREAKER_CLEARED))
                case Armed():
                    pass
        self._judge_action()
        if self._unsaved:
            self._save()
        for key, kind in changed:
            reason = "probation" if kind is EventKind.BREAKER_CLEARED else ""
            self._tell(kind, key, reason)

    def clear(self, name: str) -> None:
        """An operator has looked into it: it is armed again, for whomever it had tripped.

        Raises `Missing` for a name that is none, `Conflict` when it is armed, and `Unavailable`,
        with nothing changed, when the record of security trips cannot be written.
        """
        try:
            condition = Condition(name)
        except ValueError as error:
            raise Missing("there is no such breaker", field="name") from error
        before = {
            key: breaker.state
            for key, breaker in self._all().items()
            if key[0] is condition and not isinstance(breaker.state, Armed)
        }
        if not before:
            raise Conflict("this breaker has not tripped", field="name")
        for key in before:
            self._all()[key].state = Armed()
        if condition in SECURITY and not self._save():
            for key, state in before.items():
                self._all()[key].state = state
            raise Unavailable("the record of trips cannot be written")
        for key in before:
            self._all()[key].measure.clear()
            self._tell(EventKind.BREAKER_CLEARED, key, "operator")
        _log.warning("breaker %s was cleared by an operator", condition)
        self._judge_action()

    def _trip(self, key: _Key, breaker: _Breaker, reading: float, now: int) -> None:
        condition, about = key
        before = breaker.state
        cooldown_s = self._settings.cooldown_s
        if isinstance(before, Probation):
            cooldown_s = min(2 * before.cooldown_s, COOLDOWN_S_MAX)
        rule = breaker.measure.rule
        trip = Trip(
            condition,
            self._clocks.timestamp(),
            reading,
            rule.threshold,
            self._events.window(rule.window_s, EVIDENCE_MAX),
            about,
        )
        breaker.state = Tripped(trip, now, cooldown_s)
        breaker.measure.clear()
        self.trips += 1
        # In force, on record and fenced first: telling of it can fail, this must not for that.
        changed = self._changed_actions()
        if condition in SECURITY:
            self._save()
        if condition in REFUSING:
            self._fence_all()
        _log.error("breaker %s tripped: %.4g against %.4g", condition, reading, trip.threshold)
        self._tell_actions(changed)
        numbers = {"reading": reading, "threshold": trip.threshold, "cooldown_s": cooldown_s}
        self._tell(EventKind.BREAKER_TRIPPED, key, numbers=numbers)

    def _judge_action(self) -> None:
        self._tell_actions(self._changed_actions())

    def _changed_actions(self) -> dict[tuple[Scope, str], Action]:
        """Put into force what the states say; returns what is new by it."""
        before, self._in_force = self._in_force, {}
        for (condition, about), breaker in self._all().items():
            if isinstance(breaker.state, Tripped):
                action = Action.REFUSE if condition in REFUSING else Action.ENGINE_ONLY
                key = (SCOPES[condition], about)
                self._in_force[key] = max(action, self._in_force.get(key, action), key=_weight)
        changed = {key: self._in_force.get(key, Action.NONE) for key in before | self._in_force}
        return {key: now for key, now in changed.items() if now is not before.get(key, Action.NONE)}

    def _tell_actions(self, changed: Mapping[tuple[Scope, str], Action]) -> None:
        for (scope, about), action in changed.items():
            self._events.emit(
                EventKind.ACTION,
                subject="breakers",
                reason=action.value,
                engine=about if scope is Scope.ENGINE else "",
                tenant=about if scope is Scope.TENANT else "",
            )

    def _tell(
        self,
        kind: EventKind,
        key: _Key,
        reason: str = "",
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        condition, about = key
        scope = SCOPES[condition]
        self._events.emit(
            kind,
            subject=condition.value,
            reason=reason,
            engine=about if scope is Scope.ENGINE else "",
            tenant=about if scope is Scope.TENANT else "",
            numbers=numbers or {},
        )

    def _rule(self, condition: Condition) -> Rule:
        return self._settings.rules.get(condition, RULES[condition])

    def _made(self, condition: Condition) -> _Breaker:
        return _Breaker(Measure(self._rule(condition)))

    def _all(self) -> Mapping[_Key, _Breaker]:
        return ChainMap(self._others, self._node)

    def _of(self, key: _Key) -> _Breaker:
        found = self._node.get(key) or self._others.get(key)
        if found is None:
            if len(self._others) >= ABOUT_MAX:
                oldest = next(iter(self._others))
                quiet = (k for k, b in self._others.items() if isinstance(b.state, Armed))
                del self._others[next(quiet, oldest)]
            found = self._others[key] = self._made(key[0])
        if key in self._others:
            self._others.move_to_end(key)
        return found

    def _save(self) -> bool:
        """Write which security breakers are tripped. What fails is tried again at each tick."""
        kept = [
            breaker.state.trip
            for (condition, _), breaker in self._node.items()
            if condition in SECURITY and isinstance(breaker.state, Tripped)
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


class Halted(Unavailable):
    """A tripped breaker refuses every release."""

    code = "halted"


def _weight(action: Action) -> int:
    return action.weight


def _rank(state: BreakerState) -> int:
    return 0 if isinstance(state, Armed) else 1 if isinstance(state, Probation) else 2
