"""What was promised and has not happened yet: bytes to restore, tokens to compute.

A verdict is a promise: the engine will load so many bytes and compute so many tokens. The next
decision queues behind what is outstanding.

Rules:
- A promise ends as its parts are moved, when its request ends, or at its deadline: nothing that
  an engine forgets to say can make a queue look long for ever.
- The tokens that an engine owes are kept by prompt, in order of arrival, since it serves them in
  that order. They go down by what its reports count, and between two reports by its last rate.
- Of prompts that were not begun, as many count as the engine reports waiting, the youngest: the
  others it has found in its own cache, or given up. Those since the last report count in any case.
- Times are nanoseconds of the clock that is handed in.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from storage.tiers.protocol import TierName
from strongroom.clock import Clock
from strongroom.wire.frames import Report

_NS: Final = 1e9
_MEAN_WEIGHT: Final = 0.05
"""Weight of the newest prompt in the running mean of what a prompt computes."""
_ARRIVALS_S: Final = 20.0
"""Over how long arrivals are averaged."""

Key = tuple[str, str]
"""Engine and request."""


class Arrivals:
    """How many arrive a second, of late: an exponential average."""

    __slots__ = ("_as_of_ns", "_count")

    def __init__(self) -> None:
        self._as_of_ns = 0
        self._count = 0.0

    def add(self, now_ns: int) -> None:
        """One more has arrived."""
        self._count = self._count * self._kept(now_ns) + 1.0
        self._as_of_ns = max(now_ns, self._as_of_ns)

    def per_second(self, now_ns: int) -> float:
        """Fades while nobody arrives."""
        return self._count * self._kept(now_ns) / _ARRIVALS_S

    def _kept(self, now_ns: int) -> float:
        return math.exp(-max(now_ns - self._as_of_ns, 0) / _NS / _ARRIVALS_S)


@dataclass(slots=True)
class _Promise:
    deadline_ns: int
    restores: dict[TierName, int]
    compute_tokens: int
    loads_ended: int = 0


@dataclass(slots=True)
class _Debt:
    """What one engine owes."""

    prompts: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """What each prompt that can be computed now has left by the last report, the oldest first."""
    tokens: float = 0.0
    """Their sum."""
    begun_prompt: str | None = None
    """The oldest one, when a part of it was computed."""
    loading: int = 0
    """Prompts whose prefix is being brought: they compute once it is there."""
    loading_tokens: int = 0
    """What these will compute then."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    begun: int = 0
    """Prompts since the last report."""
    owed_since: int = 0
    """Of these, those that can be computed: the engine planned its last step without them."""
    mean_tokens: float = 0.0
    as_of_ns: int = 0
    per_second: float = 0.0
    report: Report | None = None
    settled: float = field(default=0.0)
    """Tokens that time has already taken off since the last report."""


class Backlog:
    """Used on the event loop's thread."""

    def __init__(self, clock: Clock, *, promise_s: float = 30.0, promises_max: int = 65536) -> None:
        self._clock = clock
        self._promise_ns = int(promise_s * _NS)
        self._promises_max = promises_max
        self._promises: OrderedDict[Key, _Promise] = OrderedDict()
        self._restoring: dict[TierName, int] = {}
        self._loads: dict[TierName, Arrivals] = {}
        self._debts: dict[str, _Debt] = {}

    def promise(
        self, engine: str, request: str, restores: Mapping[TierName, int], compute_tokens: int
    ) -> None:
        """The verdict: bytes that will be loaded from each tier, tokens that will be computed."""
        now = self._clock()
        self._expire(now)
        self.dropped(engine, request)
        debt = self._debts.setdefault(engine, _Debt(as_of_ns=now))
        debt.begun += 1
        debt.arrivals.add(now)
        if debt.mean_tokens:
            debt.mean_tokens += (compute_tokens - debt.mean_tokens) * _MEAN_WEIGHT
        else:
            debt.mean_tokens = float(compute_tokens)
        wanted = {tier: nbytes for tier, nbytes in restores.items() if nbytes > 0}
        if not wanted:
            self._owe(debt, request, compute_tokens)
            return
        promise = _Promise(now + self._promise_ns, wanted, compute_tokens)
        self._promises[engine, request] = promise
        debt.loading += 1
        debt.loading_tokens += compute_tokens
        for tier, nbytes in wanted.items():
            self._loads.setdefault(tier, Arrivals()).add(now)
            self._restoring[tier] = self._restoring.get(tier, 0) + nbytes
        if len(self._promises) > self._promises_max:
            self._drop(next(iter(self._promises)))

    def moved(self, engine: str, request: str, tier: TierName, nbytes: int) -> None:
        """A part of what was promised has been brought."""
        promise = self._promises.get((engine, request))
        if promise is None:
            return
        # A block may have changed its tier since the verdict.
        for each in (tier, *promise.restores):
            taken = min(nbytes, promise.restores.get(each, 0))
            if taken:
                promise.restores[each] -= taken
                self._restoring[each] -= taken
                nbytes -= taken

    def brought(self, engine: str, request: str, ranks: int = 1) -> None:
        """A rank's load has ended. With the last of `ranks`, what the prompt has left to compute is
        owed from now on.
        """
        promise = self._promises.get((engine, request))
        if promise is not None:
            promise.loads_ended += 1
            if promise.loads_ended < ranks:
                return
            self._drop((engine, request))
            debt = self._debts.get(engine)
            if debt is not None:
                self._owe(debt, request, promise.compute_tokens)

    def dropped(self, engine: str, request: str) -> None:
        """The request is over, or begins anew: what it has not loaded or computed it never will."""
        if (engine, request) in self._promises:
            self._drop((engine, request))
        debt = self._debts.get(engine)
        if debt is not None and request in debt.prompts:
            self._settle(debt, request)

    def reported(self, engine: str, report: Report) -> int:
        """Take the engine's report; returns how many of its prompts were begun since the last."""
        now = self._clock()
        debt = self._debts.setdefault(engine, _Debt(as_of_ns=now))
        earlier, debt.report = debt.report, report
        begun, debt.begun = debt.begun, 0
        # The first one counts whole: what was owed is gone, and the rate is known at once.
        done = report.prefill_tokens - (0 if earlier is None else earlier.prefill_tokens)
        done = max(done, 0)
        micros = report.prefill_us - (0 if earlier is None else earlier.prefill_us)
        if done and micros > 0:
            debt.per_second = done / (micros / 1e6)
        # What was taken off by the clock was a guess at `done`.
        debt.settled = 0.0
        debt.as_of_ns = now
        left = float(done)
        while left > 0 and debt.prompts:
            oldest, owed = next(iter(debt.prompts.items()))
            if owed > left:
                debt.prompts[oldest] = owed - left
                debt.tokens -= left
                debt.begun_prompt = oldest
                break
            self._settle(debt, oldest)
            left -= owed
        kept = max(report.waiting - debt.loading, debt.owed_since)
        debt.owed_since = 0
        if report.running and debt.begun_prompt is not None:
            kept += 1
        while len(debt.prompts) > kept:
            self._settle(debt, next(iter(debt.prompts)))
        return begun

    def forget(self, engine: str) -> None:
        """The engine has left."""
        for key in [key for key in self._promises if key[0] == engine]:
            self._drop(key)
        self._debts.pop(engine, None)

    def restoring_bytes(self, tier: TierName) -> int:
        """Bytes of this tier that are promised and not brought."""
        self._expire(self._clock())
        return self._restoring.get(tier, 0)

    def loads(self, tier: TierName) -> tuple[int, ...]:
        """Bytes of this tier that each load in flight has left, ascending."""
        self._expire(self._clock())
        return tuple(
            sorted(
                left for each in self._promises.values() if (left := each.restores.get(tier, 0)) > 0
            )
        )

    def owed_tokens(self, engine: str) -> float:
        """Tokens that this engine has yet to compute for the prompts that it can compute now."""
        debt = self._debts.get(engine)
        if debt is None:
            return 0.0
        self._elapse(debt)
        return max(debt.tokens - debt.settled, 0.0)

    def loading_tokens(self, engine: str) -> int:
        """Tokens that this engine will compute for the prompts whose prefix is being brought."""
        debt = self._debts.get(engine)
        return 0 if debt is None else debt.loading_tokens

    def prompts_per_second(self, engine: str) -> float:
        """How many prompts reach this engine."""
        debt = self._debts.get(engine)
        return 0.0 if debt is None else debt.arrivals.per_second(self._clock())

    def loads_per_second(self, tier: TierName) -> float:
        """How many prompts want something of this tier."""
        loads = self._loads.get(tier)
        return 0.0 if loads is None else loads.per_second(self._clock())

    def _owe(self, debt: _Debt, request: str, tokens: int) -> None:
        self._elapse(debt)
        if request in debt.prompts:
            self._settle(debt, request)
        debt.prompts[request] = float(tokens)
        debt.tokens += tokens
        debt.owed_since += 1
        if len(debt.prompts) > self._promises_max:
            self._settle(debt, next(iter(debt.prompts)))

    def _settle(self, debt: _Debt, request: str) -> None:
        debt.tokens -= debt.prompts.pop(request)
        if debt.begun_prompt == request:
            debt.begun_prompt = None
        if not debt.prompts:
            debt.tokens = 0.0  # no rounding is left over

    def _elapse(self, debt: _Debt) -> None:
        now = self._clock()
        if debt.per_second:
            passed_s = (now - debt.as_of_ns) / _NS
            debt.settled = min(debt.settled + passed_s * debt.per_second, debt.tokens)
        debt.as_of_ns = now

    def mean_tokens(self, engine: str) -> float:
        """What a prompt of this engine computes, on average of late."""
        debt = self._debts.get(engine)
        return 0.0 if debt is None else debt.mean_tokens

    def _expire(self, now_ns: int) -> None:
        while self._promises:
            key, promise = next(iter(self._promises.items()))
            if promise.deadline_ns > now_ns:
                return
            self._drop(key)

    def _drop(self, key: Key) -> _Promise:
        promise = self._promises.pop(key)
        for tier, nbytes in promise.restores.items():
            self._restoring[tier] -= nbytes
        debt = self._debts.get(key[0])
        if debt is not None:
            debt.loading -= 1
            debt.loading_tokens -= promise.compute_tokens
        return promise
