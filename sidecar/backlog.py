"""What was promised and has not happened yet: bytes to restore, tokens to compute.

A verdict is a promise: the engine will load so many bytes and compute so many tokens. The next
decision queues behind what is outstanding.

Rules:
- A promise ends as its parts are moved, when its request ends, or at its deadline: nothing that
  an engine forgets to say can make a queue look long for ever.
- The tokens that an engine owes go down by what its reports count, and between two reports by
  its last rate. An engine that reports nobody waiting owes nothing.
- Times are nanoseconds of the clock that is handed in.
"""

from __future__ import annotations

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

Key = tuple[str, str]
"""Engine and request."""


@dataclass(slots=True)
class _Promise:
    deadline_ns: int
    restores: dict[TierName, int]
    compute_tokens: int


@dataclass(slots=True)
class _Debt:
    """What one engine owes."""

    tokens: float = 0.0
    loading: int = 0
    """Prompts whose prefix is being brought: they compute once it is there."""
    begun: int = 0
    """Prompts since the last report."""
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
        if debt.mean_tokens:
            debt.mean_tokens += (compute_tokens - debt.mean_tokens) * _MEAN_WEIGHT
        else:
            debt.mean_tokens = float(compute_tokens)
        wanted = {tier: nbytes for tier, nbytes in restores.items() if nbytes > 0}
        if not wanted:
            self._owe(debt, compute_tokens)
            return
        promise = _Promise(now + self._promise_ns, wanted, compute_tokens)
        self._promises[engine, request] = promise
        debt.loading += 1
        for tier, nbytes in wanted.items():
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

    def brought(self, engine: str, request: str) -> None:
        """The load has ended: what the prompt has left to compute is owed from now on."""
        if (engine, request) in self._promises:
            promise = self._drop((engine, request))
            debt = self._debts.get(engine)
            if debt is not None:
                self._owe(debt, promise.compute_tokens)

    def dropped(self, engine: str, request: str) -> None:
        """The request is over, or begins anew: what it has not loaded it never will."""
        if (engine, request) in self._promises:
            self._drop((engine, request))

    def reported(self, engine: str, report: Report) -> int:
        """Take the engine's report; returns how many of its prompts were begun since the last."""
        now = self._clock()
        debt = self._debts.setdefault(engine, _Debt(as_of_ns=now))
        earlier, debt.report = debt.report, report
        begun, debt.begun = debt.begun, 0
        done = 0 if earlier is None else max(report.prefill_tokens - earlier.prefill_tokens, 0)
        micros = 0 if earlier is None else report.prefill_us - earlier.prefill_us
        if done and micros > 0:
            debt.per_second = done / (micros / 1e6)
        # What was taken off by the clock was a guess at `done`.
        debt.tokens = max(debt.tokens + debt.settled - done, 0.0)
        debt.settled = 0.0
        debt.as_of_ns = now
        # Those who wait owe about what a prompt computes each: what is counted on top of that
        # is prompts that the engine found in its own cache, or gave up.
        debt.tokens = min(debt.tokens, max(report.waiting - debt.loading, 0) * debt.mean_tokens)
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

    def owed_tokens(self, engine: str) -> float:
        """Tokens that this engine has yet to compute for the prompts that it can compute now."""
        debt = self._debts.get(engine)
        if debt is None:
            return 0.0
        self._elapse(debt)
        return debt.tokens

    def _owe(self, debt: _Debt, tokens: int) -> None:
        self._elapse(debt)
        debt.tokens += tokens

    def _elapse(self, debt: _Debt) -> None:
        now = self._clock()
        if debt.per_second and debt.tokens:
            taken = min(debt.tokens, (now - debt.as_of_ns) / _NS * debt.per_second)
            debt.tokens -= taken
            debt.settled += taken
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
        return promise
