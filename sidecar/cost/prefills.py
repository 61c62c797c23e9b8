"""What computing prompts costs one engine: a step costs something, and each token of it.

    seconds of a step = fixed + tokens x seconds a token

An engine batches: a step has its own cost, and that of the answers which are decoded in it, however
few prompt tokens are in it. Divided over the tokens, that cost made a token look 1.6 times as dear
as one more token is, and an engine with room look full: much was brought to spare next to nothing.

Rules:
- The two parts are told apart by a line through the reports, of seconds a token over steps a
  token, weighted by tokens; what does not vary is counted as the tokens' cost. An engine that does
  not count its steps has no fixed cost.
- Figures are by the class of what a prompt computes, since attention makes long ones dearer.
- Times are seconds; the time is handed in as nanoseconds of a clock that only grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from sidecar.cost.fading import Busy, Fading, Known, by_distance, nearest_last, size_class
from strongroom.wire.frames import Report

_NS: Final = 1e9
_REPORT_TOKENS_MAX: Final = 65536
"""Most tokens that one report counts for."""
_CLASSES: Final = range(4, 21)
_RIDGE: Final = 0.002
"""Variance of steps a token, over its squared mean, from which on the line is believed."""
_FIXED_SHARE_MAX: Final = 0.9


@dataclass(frozen=True, slots=True)
class StepCost:
    """`fixed_s`: what a step costs beside its tokens. `tokens`: in a step, on average of late."""

    fixed_s: float = 0.0
    tokens: float = 0.0


@dataclass(slots=True)
class _Class:
    """Prompts of one size: seconds a token, and steps a token as faded sums."""

    per_token: Fading
    weight: float = 0.0
    steps: float = 0.0


@dataclass(slots=True)
class _Line:
    """Faded sums over reports of x, steps a token, and y, seconds a token; weights are tokens."""

    window_s: float
    as_of_ns: int = 0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float, now_ns: int) -> None:
        keep = self.kept(now_ns)
        self.as_of_ns = now_ns
        self.weight = self.weight * keep + weight
        self.x = self.x * keep + weight * x
        self.y = self.y * keep + weight * y
        self.xx = self.xx * keep + weight * x * x
        self.xy = self.xy * keep + weight * x * y

    def kept(self, now_ns: int) -> float:
        return math.exp(-max(now_ns - self.as_of_ns, 0) / _NS / self.window_s)

    def cost(self) -> StepCost:
        if not self.weight or not self.x:
            return StepCost()
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x * mean_x
        covariance = self.xy / self.weight - mean_x * mean_y
        slope = covariance / (variance + _RIDGE * mean_x * mean_x)
        most = _FIXED_SHARE_MAX * mean_y / mean_x
        return StepCost(min(max(slope, 0.0), most), 1.0 / mean_x)


@dataclass(slots=True)
class EngineCosts:
    """What was seen of one engine."""

    half_window_s: float
    reports_min: int
    _classes: dict[int, _Class] = field(default_factory=dict)
    """By class, of those that were seen."""
    _reports: Fading = field(init=False)
    _line: _Line = field(init=False)
    _busy: Busy = field(default_factory=Busy)
    _step: StepCost = field(default_factory=StepCost)
    _earlier: Report | None = None

    def __post_init__(self) -> None:
        self._reports = Fading(self.half_window_s)
        self._line = _Line(self.half_window_s)

    def reported(self, report: Report, prompts: int, now_ns: int) -> None:
        """What changed since the last report; `prompts` were begun meanwhile.

        A counter that has stepped back is another life of the engine: its first report.
        """
        earlier, self._earlier = self._earlier, report
        tokens, micros = report.prefill_tokens, report.prefill_us
        steps = report.prefill_steps
        # Of the first one counts all that it has computed so far: better than nothing.
        follows = earlier is not None and report.prefill_tokens >= earlier.prefill_tokens
        if follows:
            assert earlier is not None
            tokens -= earlier.prefill_tokens
            micros -= earlier.prefill_us
            steps -= earlier.prefill_steps
        if tokens > 0 and micros > 0:
            self.add(tokens, micros / 1e6, max(prompts, 1), max(steps, 0), now_ns)
        if follows:
            computing_s = micros / 1e6 - max(steps, 0) * self._step.fixed_s
            self._busy.add(max(computing_s, 0.0), now_ns)

    def add(self, tokens: int, seconds: float, prompts: int, steps: int, now_ns: int) -> None:
        """It computed `tokens` of `prompts` prompts in `steps` steps, which took `seconds`."""
        each = size_class(tokens // prompts, _CLASSES)
        of_class = self._classes.get(each)
        if of_class is None:
            of_class = self._classes[each] = _Class(Fading(self.half_window_s))
        weight = min(tokens, _REPORT_TOKENS_MAX)
        of_class.per_token.add(seconds / tokens, now_ns, weight)
        keep = self._line.kept(now_ns)
        of_class.weight = of_class.weight * keep + weight
        of_class.steps = of_class.steps * keep + weight * steps / tokens
        if steps:
            self._line.add(steps / tokens, seconds / tokens, weight, now_ns)
            self._step = self._line.cost()
        self._reports.add(1.0, now_ns)

    def per_token(self, tokens: int, q: float, now_ns: int) -> Known | None:
        """Seconds that one more token takes, of a prompt that computes about `tokens`."""
        wanted = size_class(tokens, _CLASSES)
        if self._reports.count(now_ns) < self.reports_min:
            parts = {each: of_class.per_token for each, of_class in self._classes.items()}
            nearest = nearest_last(parts, wanted, _CLASSES, q)
            if nearest is None:
                return None
            each, last = nearest
            return Known(self._beside_steps(self._classes[each], last), stale=True)
        for each in by_distance(wanted, _CLASSES):
            of_class = self._classes.get(each)
            value = None if of_class is None else of_class.per_token.quantile(q, now_ns)
            if of_class is not None and value is not None:
                return Known(self._beside_steps(of_class, value), stale=False)
        return None

    def step(self) -> StepCost:
        """What a step costs beside its tokens, and how many it has."""
        return self._step

    def busy(self, now_ns: int) -> float:
        """The share of the last seconds that tokens of prompts took."""
        return self._busy.value(now_ns)

    def _beside_steps(self, of_class: _Class, seconds: float) -> float:
        """Seconds a token without their part of the steps' fixed cost."""
        if not of_class.weight:
            return seconds
        fixed_s = self._step.fixed_s * of_class.steps / of_class.weight
        return max(seconds - fixed_s, seconds * (1.0 - _FIXED_SHARE_MAX))
