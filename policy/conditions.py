"""Conditions of a rule: typed fields that must all hold, in a context that may not be known whole.

Rules:
- A condition has fields and no expressions: purposes, models, a time window with its zone, a
  highest sensitivity, and a sensitivity that must be exceeded. A field that is not set holds.
- What the context does not tell is neither true nor false. An allow applies only where its
  condition is certainly true, a deny wherever it is not certainly false: ignorance never widens.
- A window is of local wall-clock time on days of the week. One that ends before it begins goes
  over midnight and belongs to the day it began on.
- `until` is the next instant at which a window may open or close. It may be early, never late.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

import msgspec

from strongroom.canonical import canonical_json
from strongroom.errors import Misuse
from strongroom.identity import ComponentId, parse_component_id

PURPOSES_MAX: Final = 16
PURPOSE_CHARS_MAX: Final = 32
MODELS_MAX: Final = 8
CONDITION_CHARS_MAX: Final = 1024
"""Of its stored text: it is part of a unique index."""
_PURPOSE: Final = re.compile(r"[a-z][a-z0-9_-]*")
_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]")
_WEEK: Final = timedelta(days=7)


class Sensitivity(StrEnum):
    """How sensitive a document is, from the least on."""

    PUBLIC = "public"
    INTERNAL = "internal"
    CONFIDENTIAL = "confidential"
    RESTRICTED = "restricted"
    """Also of a document that nobody has classified."""

    @property
    def rank(self) -> int:
        """Its place from the least on."""
        return _RANKS[self]


_RANKS: Final[Mapping[Sensitivity, int]] = MappingProxyType(
    {level: rank for rank, level in enumerate(Sensitivity)}
)


class Day(StrEnum):
    """Days of the week, in the order of `datetime.weekday`."""

    MON = "mon"
    TUE = "tue"
    WED = "wed"
    THU = "thu"
    FRI = "fri"
    SAT = "sat"
    SUN = "sun"


_DAYS: Final = tuple(Day)


@dataclass(frozen=True, slots=True)
class Context:
    """What is known about the moment of a decision; None: not known."""

    purpose: str | None = None
    model: ComponentId | None = None
    sensitivity: Sensitivity | None = None
    """Of the document that is asked about."""
    at: datetime | None = None
    """With its zone."""


NOWHERE: Final = Context()
"""Nothing is known: only what is unconditional allows."""


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` to before `end`, local time `HH:MM` of `zone`, on `days` (none: every day)."""

    zone: str
    start: str
    end: str
    days: tuple[Day, ...] = ()

    def __post_init__(self) -> None:
        if self.zone not in _zones():
            raise Misuse("zone is not a time zone of the IANA database", field="zone")
        for name in ("start", "end"):
            if _CLOCK.fullmatch(getattr(self, name)) is None:
                raise Misuse(f"{name} must be HH:MM", field=name)
        if self.start == self.end:
            raise Misuse("a window that ends when it begins is none", field="end")
        if len(set(self.days)) != len(self.days) or not all(isinstance(d, Day) for d in self.days):
            raise Misuse("days are mon to sun, each once", field="days")
        object.__setattr__(self, "days", tuple(day for day in _DAYS if day in self.days))

    def __str__(self) -> str:
        days = ",".join(self.days) if self.days else "every day"
        return f"{days} {self.start}-{self.end} {self.zone}"

    def holds(self, at: datetime) -> bool:
        """Whether `at` is inside."""
        local = at.astimezone(_zone(self.zone))
        clock = f"{local.hour:02}:{local.minute:02}"
        if self.start < self.end:
            return self.start <= clock < self.end and self._on(local.weekday())
        if clock >= self.start:
            return self._on(local.weekday())
        return clock < self.end and self._on((local.weekday() - 1) % 7)

    def until(self, at: datetime) -> datetime:
        """The first instant after `at` at which `holds` may change; at most a week away."""
        zone, at = _zone(self.zone), at.astimezone(UTC)
        today = at.astimezone(zone).date()
        found = at + _WEEK
        for ahead in range(-1, 8):
            day = today + timedelta(days=ahead)
            for clock in (self.start, self.end):
                for fold in (0, 1):
                    wall = datetime.combine(day, time.fromisoformat(clock), zone)
                    instant = wall.replace(fold=fold).astimezone(UTC)
                    if at < instant < found:
                        found = instant
        return _clock_change(zone, at, found)

    def _on(self, weekday: int) -> bool:
        return not self.days or _DAYS[weekday] in self.days


@dataclass(frozen=True, slots=True)
class Condition:
    """Every field that is set must hold."""

    purposes: tuple[str, ...] = ()
    """Any of these; none: any purpose."""
    models: tuple[ComponentId, ...] = ()
    """Any of these model revisions; none: any model."""
    window: Window | None = None
    sensitivity_max: Sensitivity | None = None
    """Documents of this sensitivity or less."""
    sensitivity_above: Sensitivity | None = None
    """Documents that are more sensitive than this: what a deny is good for."""

    def __post_init__(self) -> None:
        if len(self.purposes) > PURPOSES_MAX:
            raise Misuse("too many purposes", field="purposes", limit=PURPOSES_MAX)
        for purpose in self.purposes:
            check_purpose(purpose)
        if len(self.models) > MODELS_MAX:
            raise Misuse("too many models", field="models", limit=MODELS_MAX)
        models = {parse_component_id(model, "models") for model in self.models}
        object.__setattr__(self, "purposes", tuple(sorted(set(self.purposes))))
        object.__setattr__(self, "models", tuple(sorted(models)))
        low, high = self.sensitivity_above, self.sensitivity_max
        if low is not None and high is not None and low.rank >= high.rank:
            raise Misuse("no document is both", field="sensitivity_above")

    def __bool__(self) -> bool:
        return self != ALWAYS

    def __str__(self) -> str:
        parts = []
        if self.purposes:
            parts.append(f"for {' or '.join(self.purposes)}")
        if self.models:
            parts.append(f"with model {' or '.join(self.models)}")
        if self.window is not None:
            parts.append(f"in {self.window}")
        if self.sensitivity_max is not None:
            parts.append(f"up to {self.sensitivity_max}")
        if self.sensitivity_above is not None:
            parts.append(f"above {self.sensitivity_above}")
        return ", ".join(parts)

    def timeless(self, context: Context) -> bool | None:
        """Whether all but the window holds; None: that is not known."""
        return _all(
            _in(context.purpose, self.purposes),
            _in(context.model, self.models),
            _at_most(context.sensitivity, self.sensitivity_max),
            _above(context.sensitivity, self.sensitivity_above),
        )

    def holds(self, context: Context) -> bool | None:
        """Whether it is true in `context`; None: that is not known."""
        timely: bool | None = True
        if self.window is not None:
            timely = None if context.at is None else self.window.holds(context.at)
        return _all(self.timeless(context), timely)


ALWAYS: Final = Condition()


def check_purpose(purpose: str) -> None:
    """Raise `Misuse` unless `purpose` is a word of the small character set."""
    if len(purpose) > PURPOSE_CHARS_MAX or _PURPOSE.fullmatch(purpose) is None:
        raise Misuse(
            "a purpose is a word of a-z, 0-9, - and _", field="purposes", limit=PURPOSE_CHARS_MAX
        )


class _Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    zone: str
    start: str
    end: str
    days: tuple[Day, ...] = ()


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    purposes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    window: _Window | None = None
    sensitivity_max: Sensitivity | None = None
    sensitivity_above: Sensitivity | None = None


_decoder: Final = msgspec.json.Decoder(_Stored, strict=True)


def fields_of(condition: Condition) -> dict[str, object]:
    """The fields that are set, as plain values: for JSON and YAML."""
    window = condition.window
    stored = _Stored(
        condition.purposes,
        condition.models,
        None if window is None else _Window(window.zone, window.start, window.end, window.days),
        condition.sensitivity_max,
        condition.sensitivity_above,
    )
    plain: dict[str, object] = msgspec.to_builtins(stored)
    return plain


def encode_condition(condition: Condition) -> str:
    """The one text of a condition; empty for one that always holds."""
    if not condition:
        return ""
    text = canonical_json(fields_of(condition)).decode()
    if len(text) > CONDITION_CHARS_MAX:
        raise Misuse("the condition is too long", field="condition", limit=CONDITION_CHARS_MAX)
    return text


@lru_cache(maxsize=4096)
def decode_condition(text: str) -> Condition:
    """The condition of a stored text. Raises `Misuse` for what is none."""
    if not text:
        return ALWAYS
    try:
        stored = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Misuse("a condition cannot be read", field="condition") from error
    return _condition(stored)


def parse_condition(fields: Mapping[str, object]) -> Condition:
    """The condition of plain values. Raises `Misuse`, saying what is wrong with which field."""
    try:
        stored = msgspec.convert(fields, _Stored, strict=True)
    except msgspec.ValidationError as error:
        # The library's message may repeat what was given: only the place in it is told.
        place = str(error).rpartition("$.")[2].rstrip("`") if "$." in str(error) else "a field"
        raise Misuse(
            f"{place} of the condition is not known or wrong", field="condition"
        ) from error
    return _condition(stored)


def _condition(stored: _Stored) -> Condition:
    window = stored.window
    return Condition(
        stored.purposes,
        tuple(ComponentId(model) for model in stored.models),
        None if window is None else Window(window.zone, window.start, window.end, window.days),
        stored.sensitivity_max,
        stored.sensitivity_above,
    )


def _all(*parts: bool | None) -> bool | None:
    """False if one is, else unknown if one is."""
    if any(part is False for part in parts):
        return False
    return None if any(part is None for part in parts) else True


def _in(value: str | None, allowed: tuple[str, ...]) -> bool | None:
    if not allowed:
        return True
    return None if value is None else value in allowed


def _at_most(value: Sensitivity | None, bound: Sensitivity | None) -> bool | None:
    if bound is None:
        return True
    return None if value is None else value.rank <= bound.rank


def _above(value: Sensitivity | None, bound: Sensitivity | None) -> bool | None:
    if bound is None:
        return True
    return None if value is None else value.rank > bound.rank


def _clock_change(zone: ZoneInfo, after: datetime, before: datetime) -> datetime:
    """The instant in between at which the zone's clock is put forward or back, or `before`."""

    def offset(at: datetime) -> timedelta | None:
        return at.astimezone(zone).utcoffset()

    low, high = after, before
    if offset(low) == offset(high):
        return before
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        if offset(middle) == offset(after):
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)  # a zone changes at a whole second


@lru_cache(maxsize=1)
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


@lru_cache(maxsize=1024)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
