"""Degradation in steps: each gauge has its ladder, and what stands on it says what is in force.

Rules (DESIGN sections 8 and 9):
- Host queue full: no new swap-outs from engines. Disk queue full, or a device that fails: less
  is admitted to the disk, then nothing. A host tier that cannot evict: no prefetch, then no
  swap-outs. An engine short of pages: stop prefetch, lower the longest cached context,
  recompute, engine-only.
- What an engine's pages say is in force for that engine alone (`Pressure.action`); what the
  node's own gauges say, for all.
- Up as soon as the value has stood on a higher rung for `rise_s`, to that rung at once; down one
  rung at a time, after the value has been `slack` below it for `rest_s`. So nothing flaps: a
  value that moves about one threshold changes nothing, and a round trip takes `rest_s` at least.
- Nobody has to come by: it steps down and comes back by itself, and each step is an event.
- A reading that is missing changes nothing; an engine that is gone stands on no ladder.

`advance` and `effects` are pure; `Pressure` remembers, applies and tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Protocol

from sidecar.clocks import NS
from sidecar.degrade.stance import Action
from sidecar.record.events import EventKind, Events
from strongroom.clock import Clock

PAUSED_BY: Final = "pressure"


class Gauge(StrEnum):
    """What is watched, each a share of its limit: 1.0 is full."""

    HOST_QUEUE = "host_queue"
    DISK_QUEUE = "disk_queue"
    HOST_TIER = "host_tier"
    """Bytes that cannot be evicted: pinned, or waiting to be written behind."""
    NVME_ERRORS = "nvme_errors"
    """Failed device operations a second, against ten."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Thresholds, rising. See the module for `slack`, `rise_s` and `rest_s`."""

    rungs: tuple[float, ...]
    slack: float
    rise_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """On which rung (0 is the ground), and since when a change is due."""

    rung: int = 0
    rising_ns: int | None = None
    falling_ns: int | None = None


def advance(ladder: Ladder, standing: Standing, value: float, now_ns: int) -> Standing:
    """Where one stands after `value` was read at `now_ns`."""
    wanted = sum(1 for rung in ladder.rungs if value >= rung)
    if wanted > standing.rung:
        since = now_ns if standing.rising_ns is None else standing.rising_ns
        if now_ns - since >= ladder.rise_s * NS:
            return Standing(wanted)
        return replace(standing, rising_ns=since, falling_ns=None)
    if standing.rung and value < ladder.rungs[standing.rung - 1] - ladder.slack:
        since = now_ns if standing.falling_ns is None else standing.falling_ns
        if now_ns - since >= ladder.rest_s * NS:
            return Standing(standing.rung - 1)
        return replace(standing, rising_ns=None, falling_ns=since)
    return Standing(standing.rung)


@dataclass(frozen=True, slots=True)
class Ladders:
    """The ladder of each gauge. The defaults are starting points, not measurements."""

    gauges: Mapping[Gauge, Ladder] = field(
        default_factory=lambda: {
            Gauge.HOST_QUEUE: Ladder((0.9,), slack=0.4, rise_s=0.0, rest_s=2.0),
            Gauge.DISK_QUEUE: Ladder((0.7, 0.9), slack=0.3, rise_s=0.0, rest_s=5.0),
            Gauge.HOST_TIER: Ladder((0.85, 0.95), slack=0.1, rise_s=1.0, rest_s=5.0),
            Gauge.NVME_ERRORS: Ladder((0.1, 0.5), slack=0.05, rise_s=0.0, rest_s=30.0),
        }
    )
    engine: Ladder = Ladder((0.9, 0.94, 0.97, 0.99), slack=0.04, rise_s=2.0, rest_s=10.0)
    """Pages in use, of all."""


@dataclass(frozen=True, slots=True)
class Readings:
    """One look at the gauges; what is not there was not read."""

    gauges: Mapping[Gauge, float]
    engines: Mapping[str, float]
    """Pages in use of all, by engine, of those that are connected and report."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What the standings amount to."""

    swap_outs_paused: bool = False
    disk_admission: float = 1.0
    """1 is usual, 0 admits nothing more to the disk."""
    prefetch_stopped: bool = False


_DISK_ADMISSION: Final = (1.0, 0.5, 0.0)
_ENGINE_ACTIONS: Final = (
    Action.NONE,
    Action.STOP_PREFETCH,
    Action.LIMIT_CONTEXT,
    Action.RECOMPUTE,
    Action.ENGINE_ONLY,
)


def effects(gauges: Mapping[Gauge, int]) -> Effects:
    """What is in force for everybody when the gauges stand on these rungs."""
    disk = max(gauges.get(Gauge.DISK_QUEUE, 0), gauges.get(Gauge.NVME_ERRORS, 0))
    tier = gauges.get(Gauge.HOST_TIER, 0)
    return Effects(
        swap_outs_paused=gauges.get(Gauge.HOST_QUEUE, 0) >= 1 or tier >= 2,
        disk_admission=_DISK_ADMISSION[min(disk, len(_DISK_ADMISSION) - 1)],
        prefetch_stopped=tier >= 1,
    )


class Levers(Protocol):
    """What the steps act on. Each is called only when its value changes."""

    def pause_prefetch(self, reason: str) -> None: ...

    def resume_prefetch(self, reason: str) -> None: ...

    def admit_to_disk(self, factor: float) -> None: ...


class Tap(Protocol):
    """Prefetching, that can be paused for a reason."""

    def pause(self, reason: str) -> None: ...

    def resume(self, reason: str | None = None) -> None: ...


class DiskDoor(Protocol):
    """What is let onto the disk."""

    def set_disk_admission(self, factor: float) -> None: ...


class Weighing(Protocol):
    """What weighs each block before it is let there."""

    def set_pressure(self, factor: float) -> None: ...


@dataclass(frozen=True, slots=True)
class SidecarLevers:
    """The levers of a sidecar."""

    prefetch: Tap
    disk: DiskDoor
    admission: Weighing

    def pause_prefetch(self, reason: str) -> None:
        self.prefetch.pause(reason)

    def resume_prefetch(self, reason: str) -> None:
        self.prefetch.resume(reason)

    def admit_to_disk(self, factor: float) -> None:
        self.disk.set_disk_admission(factor)
        self.admission.set_pressure(factor)


class Pressure:
    """The standings of one sidecar."""

    def __init__(self, ladders: Ladders, levers: Levers, events: Events, clock: Clock) -> None:
        self._ladders = ladders
        self._levers = levers
        self._events = events
        self._clock = clock
        self._gauges: dict[Gauge, Standing] = {}
        self._engines: dict[str, Standing] = {}
        self._effects = Effects()
        self.steps = 0

    def observe(self, readings: Readings) -> Effects:
        """Take a look at the gauges into account; acts and tells where something changed."""
        now = self._clock()
        for gauge, value in readings.gauges.items():
            before = self._gauges.get(gauge, Standing())
            after = advance(self._ladders.gauges[gauge], before, value, now)
            self._gauges[gauge] = after
            self._tell(gauge.value, "", before.rung, after.rung, value)
        for engine in self._engines.keys() - readings.engines.keys():
            del self._engines[engine]
        for engine, value in readings.engines.items():
            before = self._engines.get(engine, Standing())
            after = advance(self._ladders.engine, before, value, now)
            self._engines[engine] = after
            self._tell("engine_pages", engine, before.rung, after.rung, value)
        self._apply(effects(self.rungs()))
        return self._effects

    @property
    def effects(self) -> Effects:
        """What is in force now."""
        return self._effects

    @property
    def calm(self) -> bool:
        """No engine stands on its ladder."""
        return not any(standing.rung for standing in self._engines.values())

    def action(self, engine: str) -> Action:
        """The step for one engine."""
        return _ENGINE_ACTIONS[self._engines.get(engine, Standing()).rung]

    def rungs(self) -> Mapping[Gauge, int]:
        """Where each gauge stands."""
        return {gauge: self._gauges.get(gauge, Standing()).rung for gauge in Gauge}

    def engine_rungs(self) -> Mapping[str, int]:
        """Where each engine's pages stand."""
        return {engine: standing.rung for engine, standing in self._engines.items()}

    def _tell(self, subject: str, engine: str, before: int, after: int, value: float) -> None:
        if before == after:
            return
        self.steps += 1
        self._events.emit(
            EventKind.PRESSURE,
            subject=subject,
            engine=engine,
            numbers={"value": round(value, 4), "from": before, "to": after},
        )

    def _apply(self, wanted: Effects) -> None:
        before, self._effects = self._effects, wanted
        if wanted.prefetch_stopped != before.prefetch_stopped:
            if wanted.prefetch_stopped:
                self._levers.pause_prefetch(PAUSED_BY)
            else:
                self._levers.resume_prefetch(PAUSED_BY)
            self._tell_action("prefetch_stopped", float(wanted.prefetch_stopped))
        if wanted.disk_admission != before.disk_admission:
            self._levers.admit_to_disk(wanted.disk_admission)
            self._tell_action("disk_admission", wanted.disk_admission)
        if wanted.swap_outs_paused != before.swap_outs_paused:
            self._tell_action("swap_outs_paused", float(wanted.swap_outs_paused))

    def _tell_action(self, subject: str, value: float) -> None:
        self._events.emit(EventKind.ACTION, subject=subject, numbers={"value": value})
