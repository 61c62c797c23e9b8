"""Whether prefetching is worth its reads: the share of brought bytes that nobody read.

    Flowing ─ ratio above the limit ─▶ CoolingDown ─ time is over ─▶ Probing ─ clean ─▶ Flowing
                                            ▲                           │
                                            └───── wasted again: twice as long ─┘

Rules:
- The ratio is wasted / (used + wasted), in bytes, over a sliding window of time; it says nothing
  before `blocks_min` blocks have settled.
- While it cools down nothing is admitted. Then a few blocks are admitted as a probe; when all of
  them have settled within the limit, prefetching flows again, with an empty window.
- Where several share a gate, each has an `owner`, of whom no more than `Parts` says counts: its
  wasted bytes are at most so large a part of what has settled, and so many blocks of it are out in
  a probe at a time.
- A probe block that never arrives is no verdict: its place in the probe is given back, so that a
  cancelled probe can never keep prefetching stopped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from strongroom.clock import Clock

_COOLED_MAX = 32
"""However often the probe fails, the pause grows to this many times its first length."""


@dataclass(frozen=True, slots=True)
class WasteSettings:
    """`limit` is a share from 0 to 1; times are nanoseconds."""

    limit: float = 0.5
    window_ns: int = 60_000_000_000
    blocks_min: int = 32
    cool_down_ns: int = 30_000_000_000
    probe_blocks: int = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """What one of several owners counts for at most."""

    wasted: float = 1.0
    """Of the bytes that have settled."""
    probe_out: int | None = None
    """Of a probe's blocks, at a time; None is no bound."""


_ALONE = Parts()


@dataclass(frozen=True, slots=True)
class Flowing:
    """Everything is admitted."""


@dataclass(frozen=True, slots=True)
class CoolingDown:
    """Nothing is admitted before `until_ns`."""

    until_ns: int
    paused_ns: int


@dataclass(frozen=True, slots=True)
class Probing:
    """A few blocks are admitted: `out` have not settled yet."""

    number: int
    out: int
    used_bytes: int
    wasted_bytes: int
    settled: int
    paused_ns: int


WasteState = Flowing | CoolingDown | Probing


@dataclass(frozen=True, slots=True)
class Admitted:
    """Goes with a block until it has settled. `probe` is 0 for one that is no part of a probe."""

    probe: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class _Settled:
    at_ns: int
    owner: str
    used_bytes: int
    wasted_bytes: int


class WasteGate:
    """Admits blocks and hears what became of them. Used on the event loop's thread."""

    def __init__(
        self,
        settings: WasteSettings,
        clock: Clock,
        tripped: Callable[[], None] = lambda: None,
        parts: Parts = _ALONE,
    ) -> None:
        """`tripped` is called, once a trip, when nothing is admitted any more."""
        self._settings = settings
        self._clock = clock
        self._tripped = tripped
        self._parts = parts
        self._window: deque[_Settled] = deque()
        self._used_bytes = 0
        self._wasted_bytes = 0
        self._wasted_by: Counter[str] = Counter()
        self._probe_wasted_by: Counter[str] = Counter()
        self._probe_out: Counter[str] = Counter()
        self._state: WasteState = Flowing()
        self._probes = 0
        self.trips = 0

    @property
    def state(self) -> WasteState:
        """The state now; a cool-down that is over has become a probe."""
        match self._state:
            case CoolingDown(until_ns, paused_ns) if self._clock() >= until_ns:
                self._probes += 1
                self._state = Probing(self._probes, 0, 0, 0, 0, paused_ns)
                self._probe_wasted_by.clear()
                self._probe_out.clear()
            case Flowing() | CoolingDown() | Probing():
                pass
        return self._state

    @property
    def ratio(self) -> float:
        """Wasted over settled bytes in the window; 0 when nothing has settled."""
        self._forget_old()
        settled = self._used_bytes + self._wasted_bytes
        return self._counted(self._wasted_by, settled) / settled if settled else 0.0

    def _counted(self, wasted_by: Counter[str], settled: int) -> float:
        """Wasted bytes, of each owner its part at most."""
        most = self._parts.wasted * settled
        return sum(min(nbytes, most) for nbytes in wasted_by.values())

    def admit(self, owner: str = "") -> Admitted | None:
        """Whether one more block may be issued now."""
        match self.state:
            case Flowing():
                return Admitted(0, owner)
            case CoolingDown():
                return None
            case Probing() as probing:
                if probing.out + probing.settled >= self._settings.probe_blocks:
                    return None
                most = self._parts.probe_out
                if most is not None and self._probe_out[owner] >= most:
                    return None
                self._probe_out[owner] += 1
                self._state = _changed(probing, out=1)
                return Admitted(probing.number, owner)

    def used(self, admitted: Admitted, nbytes: int) -> None:
        """A load has read the block."""
        self._settle(admitted, nbytes, 0)

    def wasted(self, admitted: Admitted, nbytes: int) -> None:
        """The block is gone, or was given up, unread."""
        self._settle(admitted, 0, nbytes)

    def withdrawn(self, admitted: Admitted) -> None:
        """The block never arrived: it says nothing about waste."""
        match self.state:
            case Probing() as probing if probing.number == admitted.probe:
                self._probe_out[admitted.owner] -= 1
                self._state = _changed(probing, out=-1)
            case Flowing() | CoolingDown() | Probing():
                pass

    def _settle(self, admitted: Admitted, used_bytes: int, wasted_bytes: int) -> None:
        owner = admitted.owner
        self._window.append(_Settled(self._clock(), owner, used_bytes, wasted_bytes))
        self._used_bytes += used_bytes
        self._wasted_bytes += wasted_bytes
        self._wasted_by[owner] += wasted_bytes
        match self.state:
            case Flowing():
                self._judge_window()
            case Probing() as probing if probing.number == admitted.probe:
                self._probe_out[owner] -= 1
                self._probe_wasted_by[owner] += wasted_bytes
                self._judge_probe(_changed(probing, -1, used_bytes, wasted_bytes))
            case CoolingDown() | Probing():
                pass

    def _judge_window(self) -> None:
        self._forget_old()
        if len(self._window) < self._settings.blocks_min:
            return
        settled, limit = self._used_bytes + self._wasted_bytes, self._settings.limit
        # The first says no more than the second, and costs nothing.
        if self._wasted_bytes > limit * settled and self.ratio > limit:
            self._cool_down(self._settings.cool_down_ns)

    def _judge_probe(self, probing: Probing) -> None:
        self._state = probing
        if probing.settled < self._settings.probe_blocks:
            return
        moved = probing.used_bytes + probing.wasted_bytes
        if self._counted(self._probe_wasted_by, moved) > self._settings.limit * moved:
            longest_ns = self._settings.cool_down_ns * _COOLED_MAX
            self._cool_down(min(2 * probing.paused_ns, longest_ns))
            return
        self._clear()
        self._state = Flowing()

    def _cool_down(self, paused_ns: int) -> None:
        self.trips += 1
        self._clear()
        self._state = CoolingDown(self._clock() + paused_ns, paused_ns)
        self._tripped()

    def _clear(self) -> None:
        self._window.clear()
        self._wasted_by.clear()
        self._used_bytes = self._wasted_bytes = 0

    def _forget_old(self) -> None:
        before_ns = self._clock() - self._settings.window_ns
        while self._window and self._window[0].at_ns < before_ns:
            old = self._window.popleft()
            self._used_bytes -= old.used_bytes
            self._wasted_bytes -= old.wasted_bytes
            self._wasted_by[old.owner] -= old.wasted_bytes
            if not self._wasted_by[old.owner]:
                del self._wasted_by[old.owner]


def _changed(
    probing: Probing, out: int, used_bytes: int | None = None, wasted_bytes: int = 0
) -> Probing:
    settled = used_bytes is not None
    return Probing(
        number=probing.number,
        out=probing.out + out,
        used_bytes=probing.used_bytes + (used_bytes or 0),
        wasted_bytes=probing.wasted_bytes + wasted_bytes,
        settled=probing.settled + (1 if settled else 0),
        paused_ns=probing.paused_ns,
    )
