"""Is a block worth a write? Expected benefit against write cost.

    benefit = chance of reuse x seconds that a restore saves over computing it anew
    cost    = seconds that the write takes from the disk

What may be written in a day is the tier's to bound (`storage.tiers.budget`), for all that it
writes; here is only chosen what is worth writing.

Rules:
- Candidates are counted where they are stored, on the save path: a lookup stops at the first
  miss and never sees what follows it (vllm 52022).
- The chance of reuse is learnt, for classes of retention priority and of uses so far, from a
  sample of the candidates: was it wanted again before it was forgotten? Refused candidates are
  followed as well, so that a wrong refusal is noticed.
- What is unknown is admitted. When thrash is seen (blocks that leave unused, or come back right
  after they left) the bar rises; every so many refusals one candidate is let in, so that the bar
  can fall again.
- Memory is bounded: a sample, a list of those of it that left lately, a few counters. What left
  and what came back is counted in the sample.
- Pure: memory and the clock that is handed in; nothing waits.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from storage.block import BlockAddress
from storage.stages import Candidate, Unwanted, Wanted
from strongroom.clock import Clock
from strongroom.identity import ComponentId

_NS: Final = 1e9
_USES_CLASSES: Final = 4
_PRIORITY_STEP: Final = 20
_OUTCOMES_MIN: Final = 8
_THRASH_SEEN_MIN: Final = 16

SavedSeconds = Callable[[int], float | None]
"""What restoring so many bytes from the tier saves over computing them; None when unknown."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What a write costs, and how much is remembered of what became of earlier ones."""

    write_bytes_per_s: float = 1e9
    """What the disk is taken to write; the cost of a write is the time that it takes."""
    write_weight: float = 0.05
    """What a second of writing in the background is worth, in seconds of a request's wait."""
    sample_every: int = 4
    sample_max: int = 8192
    left_max: int = 8192
    """Blocks that left lately and are remembered, to know one that comes back."""
    outcomes_max: int = 512
    """Outcomes a class keeps; beyond it the old ones fade."""
    thrash_tolerated: float = 0.7
    """Share of the blocks that may leave without having been used."""
    thrash_weight: float = 8.0
    thrash_fades_s: float = 300.0
    try_every: int = 32


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counters since start and gauges now."""

    admitted: int
    refused: Mapping[str, int]
    stored: int
    thrashed: int
    """Of the sample: how many were written, how many left unused or came back after they left."""
    came_back: int
    """Of these: how many were written again right after they had been evicted."""
    thrash_rate: float
    pressure: float


@dataclass(slots=True)
class _Outcomes:
    wanted: float = 0.0
    forgotten: float = 0.0

    def chance(self) -> float:
        """Of being wanted again; while too little is known, certain."""
        if self.wanted + self.forgotten < _OUTCOMES_MIN:
            return 1.0
        return (self.wanted + 1.0) / (self.wanted + self.forgotten + 2.0)

    def fade(self, limit: int) -> None:
        if self.wanted + self.forgotten > limit:
            self.wanted /= 2
            self.forgotten /= 2


@dataclass(slots=True)
class _Followed:
    kind: tuple[int, int]
    tenant: ComponentId
    used: bool = False


@dataclass(slots=True)
class _Counts:
    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    stored: int = 0
    thrashed: int = 0
    came_back: int = 0
    tried: int = 0


def unknown(_: int) -> None:
    """No cost model: what a restore saves is unknown."""
    return


def untold(_tenant: ComponentId, _came_back: bool) -> None:
    """Nobody asked."""


class Admission:
    """The policy that the offload pipeline asks. Used on the event loop's thread."""

    def __init__(
        self,
        clock: Clock,
        settings: AdmissionSettings | None = None,
        saved_s: SavedSeconds = unknown,
    ) -> None:
        self._clock = clock
        self._settings = settings or AdmissionSettings()
        self._saved_s = saved_s
        self._followed: OrderedDict[bytes, _Followed] = OrderedDict()
        self._outcomes: dict[tuple[int, int], _Outcomes] = {}
        self._left: OrderedDict[bytes, None] = OrderedDict()
        self._thrash = _Outcomes()
        self._thrash_ns = 0
        self._counts = _Counts()
        self._pressure = 1.0
        self.told: Callable[[ComponentId, bool], None] = untold
        """Called with each block of the sample that is written: whose, and whether it came back."""

    # Deciding

    async def judge(self, candidate: Candidate, /) -> Wanted | Unwanted:
        """See `decide`."""
        return self.decide(candidate)

    def decide(self, candidate: Candidate) -> Wanted | Unwanted:
        """Whether the block should be written; counts it as a candidate."""
        kind = _kind(candidate)
        self._follow(candidate, kind)
        refusal = self._refusal(candidate)
        if refusal is None:
            self._counts.admitted += 1
            return Wanted()
        self._counts.refused[refusal] += 1
        return Unwanted(refusal)

    def set_pressure(self, factor: float) -> None:
        """1.0 is normal; the lower, the higher the bar; at 0.0 nothing new is written."""
        self._pressure = min(max(factor, 0.0), 1.0)

    def chance(self, candidate: Candidate) -> float:
        """How likely the block is to be wanted again, by what became of its like."""
        return self._outcomes.get(_kind(candidate), _Outcomes()).chance()

    # Observing

    def written(self, address: BlockAddress, nbytes: int) -> None:
        """A write was done."""
        packed = address.pack()
        followed = self._followed.get(packed)
        came_back = packed in self._left
        if came_back:
            # It had left not long ago, and is here again.
            del self._left[packed]
            self._counts.came_back += 1
            self._thrashed()
        if followed is not None:
            self._counts.stored += 1
            self.told(followed.tenant, came_back)

    def used(self, address: BlockAddress) -> None:
        """A stored block was restored."""
        followed = self._followed.get(address.pack())
        if followed is not None and not followed.used:
            followed.used = True
            self._thrash.wanted += 1
            self._thrash.fade(self._settings.outcomes_max)
            self._settle(followed.kind, wanted=True)

    def evicted(self, address: BlockAddress) -> None:
        """A block left the tier to make room."""
        packed = address.pack()
        followed = self._followed.pop(packed, None)
        if followed is None:
            return
        if not followed.used:
            self._thrashed()
            self._settle(followed.kind, wanted=False)
        self._left[packed] = None
        if len(self._left) > self._settings.left_max:
            self._left.popitem(last=False)

    @property
    def thrash_rate(self) -> float:
        """Of the blocks whose use was decided lately: the share that left unused or came back.

        It fades with time: where nothing is admitted any more, nothing is learnt either.
        """
        seen = self._thrash.wanted + self._thrash.forgotten
        if seen < _THRASH_SEEN_MIN:
            return 0.0
        passed_s = (self._clock() - self._thrash_ns) / _NS
        fresh = math.exp(-passed_s / self._settings.thrash_fades_s)
        return self._thrash.forgotten / seen * fresh

    def statistics(self) -> AdmissionStatistics:
        """A frozen snapshot."""
        return AdmissionStatistics(
            admitted=self._counts.admitted,
            refused=dict(self._counts.refused),
            stored=self._counts.stored,
            thrashed=self._counts.thrashed,
            came_back=self._counts.came_back,
            thrash_rate=self.thrash_rate,
            pressure=self._pressure,
        )

    # Inside

    def _thrashed(self) -> None:
        self._counts.thrashed += 1
        self._thrash.forgotten += 1
        self._thrash.fade(self._settings.outcomes_max)
        self._thrash_ns = self._clock()

    def _refusal(self, candidate: Candidate) -> str | None:
        if not self._pressure:
            return "pressure"
        saved_s = self._saved_s(candidate.nbytes)
        if saved_s is None:
            return None
        chance = self.chance(candidate)
        cost_s = candidate.nbytes / self._settings.write_bytes_per_s * self._settings.write_weight
        if chance * saved_s >= cost_s * self._bar():
            return None
        self._counts.tried += 1
        if self._counts.tried % self._settings.try_every == 0:
            return None
        return "thrash" if chance * saved_s >= cost_s else "benefit"

    def _bar(self) -> float:
        """How many times its cost a write must be worth."""
        settings = self._settings
        over = max(0.0, self.thrash_rate - settings.thrash_tolerated)
        bar = 1.0 + settings.thrash_weight * over / (1.0 - settings.thrash_tolerated)
        return bar / max(self._pressure, 0.01)

    def _follow(self, candidate: Candidate, kind: tuple[int, int]) -> None:
        packed = candidate.address.pack()
        earlier = self._followed.pop(packed, None)
        if earlier is not None and not earlier.used:
            # It is computed and saved again: it was wanted, and was not here.
            self._settle(earlier.kind, wanted=True)
        if earlier is None and packed[0] % self._settings.sample_every:
            return
        self._followed[packed] = _Followed(kind, candidate.tenant)
        if len(self._followed) > self._settings.sample_max:
            _, oldest = self._followed.popitem(last=False)
            if not oldest.used:
                self._settle(oldest.kind, wanted=False)

    def _settle(self, kind: tuple[int, int], *, wanted: bool) -> None:
        outcomes = self._outcomes.setdefault(kind, _Outcomes())
        if wanted:
            outcomes.wanted += 1
        else:
            outcomes.forgotten += 1
        outcomes.fade(self._settings.outcomes_max)


def _kind(candidate: Candidate) -> tuple[int, int]:
    """Class of retention priority and of uses so far."""
    return candidate.retention.priority // _PRIORITY_STEP, _uses_class(candidate.uses)


def _uses_class(uses: int) -> int:
    """1, 2 to 3, 4 to 7, more."""
    return min(max(uses, 1).bit_length() - 1, _USES_CLASSES - 1)
