"""The cases: kinds of load on kinds of machine, each drawn from ranges by a seed.

The tuning set and the judged set have the same kinds and ranges, and nothing else in common: each
is drawn by a seed of its own, and its traces have seeds of their own. What was seen once is used up
for judging: then the judged set is drawn anew (`JUDGED_SEED`), committed, and run once.

Machines are the fitted one, scaled: engines of other speeds, a disk that is or becomes slow, a
link that is shared by many. `saturated_*` is the matrix of llm-d-router pull request 2833: prompt
length and clients, with stored prefixes, where always loading collapses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random  # noqa: TID251 - seeded cases, no secret
from typing import Final

from benchmarks.simulation.fit import Fit
from benchmarks.simulation.machine import Machine
from benchmarks.traces import Agents, Chat, Rag, Saturated, Trace, Workload

GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Scaled:
    """The fitted machine with an engine that computes `tokens_s` prompt tokens a second.

    From `slow_from_s` on the disk takes `disk_times` as long; the engine has 1/`link_times` of
    the link.
    """

    tokens_s: float
    host_gib: int = 48
    disk_times: float = 1.0
    slow_from_s: float = 0.0
    link_times: float = 1.0

    def machine(self, fit: Fit) -> Machine:
        return replace(
            fit.machine("scaled", self.tokens_s),
            host_bytes=self.host_gib * GIB,
            slow_from_s=self.slow_from_s,
            slow_factor=self.disk_times,
            link_bytes_s=fit.host.bytes_s / self.link_times,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on a machine, with the time to first token that is promised.

    Each seed is a trace of its own, with its own noise; the times of all are pooled.
    """

    name: str
    workload: Workload
    scaled: Scaled
    slo_s: float
    seeds: tuple[int, ...]

    def traces(self) -> list[tuple[Trace, int]]:
        return [(self.workload.trace(self.name, seed), seed) for seed in self.seeds]

    def machine(self, fit: Fit) -> Machine:
        return self.scaled.machine(fit)


Setup = tuple[Workload, Scaled, float]
"""A workload, a machine, and the SLO in seconds."""


def _chat(draw: Random) -> Chat:
    return Chat(
        sessions=180,
        sessions_per_s=draw.uniform(0.3, 0.6),
        turns_mean=draw.uniform(4.0, 5.0),
        user_tokens=draw.uniform(270, 330),
        answer_tokens=draw.uniform(320, 370),
        attachment_tokens=draw.uniform(4500, 6500),
        system_tokens=16 * draw.randint(72, 112),
        gap_s=draw.uniform(28, 45),
        burst=draw.uniform(1.6, 2.6),
        tenants=draw.randint(3, 5),
    )


def _rag(draw: Random, per_s: float, warm: int = 0) -> Rag:
    return Rag(
        requests=800,
        requests_per_s=per_s,
        documents=draw.randint(1200, 2400),
        zipf=draw.uniform(0.95, 1.05),
        document_tokens=draw.uniform(3200, 3800),
        question_tokens=draw.uniform(60, 80),
        answer_tokens=draw.uniform(55, 80),
        system_tokens=16 * draw.randint(24, 44),
        burst=draw.uniform(1.3, 2.3),
        warm=warm,
    )


def _agents(draw: Random) -> Agents:
    return Agents(
        sessions=32,
        sessions_per_s=draw.uniform(0.03, 0.06),
        turns_mean=draw.uniform(12, 21),
        turn_tokens=draw.uniform(1500, 2500),
        answer_tokens=draw.uniform(250, 320),
        tools_tokens=256 * draw.randint(22, 28),
        tool_s=draw.uniform(4, 9),
        tool_spread=draw.uniform(1.2, 1.5),
        burst=draw.uniform(1.4, 2.0),
    )


def _on(
    workload: Workload, load: float, host_gib: int, disk_times: float = 1.0, slow_from_s: float = 0
) -> Setup:
    """A machine whose engine takes `load` of the time to compute every prompt in full."""
    requests = workload.trace("", 0).requests
    tokens = sum(request.prompt_tokens for request in requests)
    context_s = sum(request.prompt_tokens**2 for request in requests) * 1.5e-9 / 2
    span_s = max(request.at_s for request in requests)
    tokens_s = round(tokens / max(span_s * load - context_s, 0.3 * span_s * load))
    slo_s = round(0.3 + 5 * tokens / len(requests) / tokens_s, 2)
    return workload, Scaled(tokens_s, host_gib, disk_times, slow_from_s), slo_s


def _usual_chat(draw: Random) -> Setup:
    return _on(_chat(draw), draw.uniform(0.8, 1.3), draw.randint(36, 56))


def _usual_rag(draw: Random) -> Setup:
    return _on(_rag(draw, draw.uniform(1.5, 2.5)), draw.uniform(0.5, 0.9), draw.randint(16, 32))


def _usual_agents(draw: Random) -> Setup:
    return _on(_agents(draw), draw.uniform(0.8, 1.3), draw.randint(30, 50))


def _slow_disk(draw: Random) -> Setup:
    return _on(_chat(draw), draw.uniform(0.5, 0.8), draw.randint(10, 18), draw.uniform(5, 9))


def _disk_becomes_slow(draw: Random) -> Setup:
    rag = _rag(draw, draw.uniform(1.4, 2.0))
    return _on(
        rag,
        draw.uniform(0.4, 0.7),
        draw.randint(10, 18),
        draw.uniform(8, 12),
        draw.uniform(80, 140),
    )


def _idle_engine(draw: Random) -> Setup:
    rag = _rag(draw, draw.uniform(0.35, 0.6), warm=draw.randint(400, 800))
    return _on(rag, draw.uniform(0.04, 0.1), draw.randint(6, 10))


def _busy_engine(draw: Random) -> Setup:
    return _on(_rag(draw, draw.uniform(1.4, 2.0)), draw.uniform(0.85, 1.1), draw.randint(150, 200))


def _overloaded(draw: Random) -> Setup:
    return _on(_chat(draw), draw.uniform(1.7, 2.3), draw.randint(10, 16))


def _saturated(tokens: int, clients: int, draw: Random) -> Setup:
    tokens_s = draw.uniform(30_000, 60_000)
    # An answer takes about 1.7 s; what is left of a client's round is its pause.
    gap_s = max(clients * tokens / tokens_s / draw.uniform(0.7, 1.2) - 1.7, 0.3)
    workload = Saturated(
        clients=clients,
        rounds=1024 // clients,
        prompt_tokens=tokens,
        fresh_tokens=16 * draw.randint(8, 12),
        answer_tokens=draw.uniform(110, 140),
        gap_s=gap_s,
        ramp_s=draw.uniform(7, 12),
    )
    machine = Scaled(tokens_s, host_gib=256, link_times=draw.uniform(5, 8.5))
    return workload, machine, round(0.2 + 12 * tokens / tokens_s, 2)


KINDS: Final[Mapping[str, Callable[[Random], Setup]]] = {
    "chat": _usual_chat,
    "rag": _usual_rag,
    "agents": _usual_agents,
    "slow_disk": _slow_disk,
    "disk_becomes_slow": _disk_becomes_slow,
    "idle_engine": _idle_engine,
    "busy_engine": _busy_engine,
    "overloaded": _overloaded,
    **{
        f"saturated_{tokens // 1024}k_c{clients}": partial(_saturated, tokens, clients)
        for tokens, clients in product((1024, 2048, 4096, 8192), (32, 64))
    },
}


def drawn(seed: int, variants: int, traces: int) -> Iterator[Case]:
    """Every kind `variants` times, each with so many traces, by one seed."""
    seeds = iter(range(seed * 100_000, (seed + 1) * 100_000))
    for kind, setup in KINDS.items():
        draw = Random(f"{seed} {kind}")
        for variant in range(variants):
            workload, scaled, slo_s = setup(draw)
            name = kind if variants == 1 else f"{kind}_{'abcdefgh'[variant]}"
            yield Case(name, workload, scaled, slo_s, tuple(next(seeds) for _ in range(traces)))


TUNING_SEED: Final = 1
JUDGED_SEED: Final = 20261201
"""Drawn anew whenever the set before was run: docs/adr/0007 says what came of it."""
TUNING: Final = tuple(drawn(TUNING_SEED, variants=3, traces=4))
JUDGED: Final = tuple(drawn(JUDGED_SEED, variants=1, traces=5))
