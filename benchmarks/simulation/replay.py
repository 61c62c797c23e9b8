"""Replay one trace under one policy.

Ten times a second the engine reports, as the connector does; the sidecar knows nothing more. Noise
is drawn from (seed, what is done), not from the order in which it is done, so that all policies
meet the same noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from benchmarks.simulation.depot import ENGINE, Sidecar
from benchmarks.simulation.engine import EngineModel, Job
from benchmarks.simulation.events import Agenda, Clock, Noise
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.tiers import Prompts
from benchmarks.traces import Request, Trace
from sidecar.cost.appraisal import AppraisalSettings
from sidecar.cost.decision import Offer
from storage.tiers.protocol import TierName

_REPORT_S: Final = 0.1


class Policy(StrEnum):
    """How a hit is decided on."""

    RESTORE = "always_restore"
    RECOMPUTE = "always_recompute"
    HICACHE = "hicache_threshold"
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Times are seconds; `goodput` is requests within the SLO a second."""

    trace: str
    policy: str
    requests: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    goodput_per_s: float
    hit_share: float
    restored_share: float
    """Of all prompt tokens: stored, and brought."""
    decisions: Mapping[str, int] = field(default_factory=dict)


Choose = Callable[["Sidecar", str, Offer], int]
"""Tokens to bring, of an offer."""


def choose_all(_: Sidecar, __: str, offer: Offer) -> int:
    """Always restore."""
    return offer.hit[-1].end


def choose_none(_: Sidecar, __: str, ___: Offer) -> int:
    """Always recompute."""
    return 0


def choose_by_threshold(_: Sidecar, __: str, offer: Offer) -> int:
    """HiCache's: from host memory when it is 10 tokens or more, from storage when 256 or more.

    (`load_back_threshold` and `prefetch_threshold`, as they are by default.)
    """
    host = next(
        (number for number, block in enumerate(offer.hit) if block.tier is not TierName.HOST),
        len(offer.hit),
    )
    host_end = offer.hit[host - 1].end if host else 0
    whole = offer.hit[-1].end
    if whole - host_end >= 256:
        return whole
    return host_end if host_end >= 10 else 0


def choose_ours(sidecar: Sidecar, request: str, offer: Offer) -> int:
    """The production decision."""
    return sidecar.appraiser.choose(ENGINE, request, offer).tokens


CHOICES: Final[Mapping[Policy, Choose]] = {
    Policy.RESTORE: choose_all,
    Policy.RECOMPUTE: choose_none,
    Policy.HICACHE: choose_by_threshold,
    Policy.OURS: choose_ours,
}


def simulate(
    traces: Sequence[tuple[Trace, int]],
    machine: Machine,
    policy: Policy,
    *,
    slo_s: float,
    choose: Choose | None = None,
    settings: AppraisalSettings | None = None,
) -> Result:
    """Replay traces, each with a seed for its noise, under one policy; their times are pooled.

    One trace alone is a matter of luck: whether one long document had been written to NVMe before
    it left host memory moves the P95 of a thousand requests by a tenth.
    """
    chosen, settings = choose or CHOICES[policy], settings or AppraisalSettings()
    runs = [_Run(trace, machine, chosen, seed, settings) for trace, seed in traces]
    times = sorted(time for run in runs for time in run.ttft)
    decisions: Counter[str] = Counter()
    for run in runs:
        decisions.update(run.decisions())
    prompt_tokens = sum(run.prompt_tokens for run in runs)
    return Result(
        trace=traces[0][0].name,
        policy=policy.value,
        requests=len(times),
        ttft_p50_s=_at(times, 0.5),
        ttft_p95_s=_at(times, 0.95),
        ttft_p99_s=_at(times, 0.99),
        goodput_per_s=sum(time <= slo_s for time in times) / sum(run.took_s for run in runs),
        hit_share=sum(run.hit_tokens for run in runs) / prompt_tokens,
        restored_share=sum(run.brought_tokens for run in runs) / prompt_tokens,
        decisions=dict(decisions),
    )


class _Run:
    """One replay."""

    def __init__(
        self, trace: Trace, machine: Machine, choose: Choose, seed: int, settings: AppraisalSettings
    ) -> None:
        self._choose = choose
        self._clock = Clock()
        self._agenda = Agenda(self._clock)
        noise = Noise(seed)
        self._sidecar = Sidecar(
            machine, self._clock, self._agenda, noise, settings, select=choose is choose_ours
        )
        self._engine = EngineModel(
            machine, self._clock, self._agenda, noise, self._first_token, self._answered
        )
        self._prompts = Prompts()
        self._followers: dict[int, list[Request]] = {}
        self.ttft: list[float] = []
        self._arrived = self._ended = 0
        self.prompt_tokens = self.hit_tokens = self.brought_tokens = 0
        for spans in trace.stored:
            self._sidecar.preload(self._prompts.blocks(spans), 0)
        for request in trace.requests:
            if request.after is None:
                self._agenda.at(request.at_s, partial(self._arrive, request))
            else:
                self._followers.setdefault(request.after, []).append(request)
        self._agenda.at(_REPORT_S, self._report)
        self._agenda.run(lambda: self._ended == len(trace.requests))

    @property
    def took_s(self) -> float:
        return self._clock.now_s

    def decisions(self) -> Counter[str]:
        decided = self._sidecar.appraiser.statistics().decisions
        return Counter({f"{kind}:{why}": number for (kind, why), number in decided.items()})

    def _arrive(self, request: Request) -> None:
        blocks = self._prompts.blocks(request.spans)
        self._arrived += 1
        job = Job(request, blocks, self._clock.now_s, 0, request.prompt_tokens, self._arrived)
        offer = self._sidecar.offer(job)
        name = str(request.number)
        if offer.hit:
            job.brought = self._choose(self._sidecar, name, offer)
        else:
            self._sidecar.appraiser.choose(ENGINE, name, offer)
        job.left -= job.brought
        self.prompt_tokens += request.prompt_tokens
        self.hit_tokens += offer.hit[-1].end if offer.hit else 0
        self.brought_tokens += job.brought
        if job.brought:
            self._engine.wait()
            self._sidecar.bring(
                job, offer, job.brought, lambda: self._engine.arrive(job, loaded=True)
            )
        else:
            self._engine.arrive(job, loaded=False)

    def _first_token(self, job: Job) -> None:
        self.ttft.append(self._clock.now_s - job.arrived_s)
        self._sidecar.save(job)

    def _answered(self, job: Job) -> None:
        self._ended += 1
        self._sidecar.appraiser.dropped(ENGINE, str(job.request.number))
        for follower in self._followers.get(job.request.number, ()):
            self._agenda.after(follower.gap_s, partial(self._arrive, follower))

    def _report(self) -> None:
        self._sidecar.appraiser.observe_report(ENGINE, self._engine.report())
        self._agenda.after(_REPORT_S, self._report)


def _at(ordered: Sequence[float], q: float) -> float:
    """Nearest rank."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
