"""The cases that are judged, and those that thresholds were tuned on: other seeds and parameters.

Machines are the fitted one, scaled: engines of other speeds, a disk that is or becomes slow, a
link that is shared by many. `saturated_*` is the matrix of llm-d-router pull request 2833: prompt
length and clients, with stored prefixes, where always loading collapses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, product
from random import Random  # noqa: TID251 - seeded cases, no secret

from benchmarks.simulation.fit import Fit
from benchmarks.simulation.machine import Machine
from benchmarks.traces import Agents, Chat, Rag, Saturated, Trace, Workload

GIB = 2**30


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


def _shared(tokens_s: float, link_times: float) -> Scaled:
    """A link that many share, and host memory that holds everything."""
    return Scaled(tokens_s, host_gib=256, link_times=link_times)


def _tuning() -> Iterator[Case]:
    """Broad on purpose: every workload from an idle engine to one that gets twice what it can
    compute, fast and slow disks and links, small and large host memory.
    """
    draw = Random(20261129)
    seeds = count(1)
    for kind in ("chat", "rag", "agents"):
        for load in (0.3, 0.7, 1.2, 2.0):
            for disk_times in (1.0, draw.choice((3.0, 8.0))):
                workload = _drawn(kind, draw)
                link_times, host_gib = draw.choice((1.0, 3.0, 8.0)), draw.choice((6, 16, 48))
                tokens_s, slo_s = _speed(workload, load)
                name = f"{kind}_{load}_disk{disk_times:.0f}_link{link_times:.0f}_host{host_gib}"
                scaled = Scaled(tokens_s, host_gib, disk_times, link_times=link_times)
                yield Case(name, workload, scaled, slo_s, tuple(islice(seeds, 3)))
    for tokens, clients in product((1024, 4096, 8192), (32, 64)):
        link_times, tokens_s = draw.choice((3.0, 8.0)), draw.choice((2e4, 4e4, 6e4))
        saturated = Saturated(
            clients, 640 // clients, tokens, 144, 130.0, draw.choice((0.3, 1.0)) * tokens / 2048
        )
        yield Case(
            f"saturated_{tokens // 1024}k_c{clients}_link{link_times:.0f}_{tokens_s / 1000:.0f}k",
            saturated,
            _shared(tokens_s, link_times),
            round(0.2 + 12 * tokens / tokens_s, 2),
            tuple(islice(seeds, 3)),
        )
    yield Case(
        "disk_becomes_slow",
        Rag(700, documents=1500),
        Scaled(24_000, 12, 12.0, 100.0),
        1.0,
        tuple(islice(seeds, 3)),
    )


def _drawn(kind: str, draw: Random) -> Workload:
    match kind:
        case "chat":
            return Chat(
                160,
                draw.choice((0.3, 0.6)),
                attachment_tokens=draw.choice((4000.0, 6500.0)),
                gap_s=draw.choice((20.0, 40.0)),
                burst=draw.choice((1.5, 3.0)),
            )
        case "rag":
            return Rag(
                700,
                draw.choice((1.5, 2.5)),
                documents=draw.choice((800, 2500)),
                zipf=draw.choice((0.95, 1.05)),
                burst=draw.choice((1.2, 2.5)),
                warm=draw.choice((0, 400)),
            )
        case _:
            return Agents(
                30,
                draw.choice((0.02, 0.04)),
                turn_tokens=draw.choice((1500.0, 2200.0)),
                tool_s=draw.choice((4.0, 9.0)),
                burst=draw.choice((1.5, 2.0)),
            )


def _speed(workload: Workload, load: float) -> tuple[float, float]:
    """Tokens a second with which computing everything takes `load` of the time, and an SLO."""
    requests = workload.trace("", 0).requests
    tokens = sum(request.prompt_tokens for request in requests)
    context_s = sum(request.prompt_tokens**2 for request in requests) * 1.5e-9 / 2
    span_s = max(request.at_s for request in requests)
    tokens_s = tokens / max(span_s * load - context_s, 0.3 * span_s * load)
    return round(tokens_s), round(0.3 + 5 * tokens / len(requests) / tokens_s, 2)


TUNING = tuple(_tuning())

JUDGED = (
    Case(
        "chat",
        Chat(190, 0.45, 4.9, 310.0, 360.0, 5600.0, 1792, 32.0, 2.2, 5),
        Scaled(15_000, 44),
        2.0,
        (3101, 3102, 3103),
    ),
    Case(
        "rag",
        Rag(900, 2.0, 2200, 1.0, 3500.0, 2, 72.0, 70.0, 640, 2.2),
        Scaled(26_000, 24),
        1.0,
        (3201, 3202, 3203),
    ),
    Case(
        "agents",
        Agents(32, 0.05, 16.0, 1800.0, 270.0, 6656, 7.0, 1.4, 1.8, 3),
        Scaled(21_000, 40),
        2.0,
        (3301, 3302, 3303),
    ),
    Case(
        "slow_disk",
        Chat(150, 0.28, 4.7, 330.0, 350.0, 5200.0, 1280, 42.0, 2.2, 4),
        Scaled(15_000, 14, 7.0),
        2.0,
        (3401, 3402, 3403),
    ),
    Case(
        "disk_becomes_slow",
        Rag(700, 1.7, 1300, 1.0, 3300.0, 2, 72.0, 64.0, 640, 1.8),
        Scaled(25_000, 14, 10.0, slow_from_s=110.0),
        1.0,
        (3501, 3502, 3503),
    ),
    Case(
        "idle_engine",
        Rag(500, 0.45, 2300, 0.95, 3500.0, 2, 72.0, 55.0, 384, 1.3, warm=650),
        Scaled(75_000, 7),
        0.4,
        (3601, 3602, 3603),
    ),
    Case(
        "busy_engine",
        Rag(800, 1.6, 1600, 1.0, 3300.0, 2, 72.0, 80.0, 448, 1.6),
        Scaled(12_500, 180),
        2.0,
        (3701, 3702, 3703),
    ),
    Case(
        "overloaded",
        Chat(170, 0.5, 4.6, 320.0, 340.0, 6000.0, 1408, 30.0, 2.0, 4),
        Scaled(9_000, 12),
        3.0,
        (3801, 3802, 3803),
    ),
    Case(
        "saturated_1k_c64",
        Saturated(64, 12, 1024, 128, 135.0, 0.45, 8.0),
        _shared(33_000, 6.5),
        0.5,
        (3901, 3902, 3903),
    ),
    Case(
        "saturated_2k_c32",
        Saturated(32, 20, 2048, 144, 130.0, 0.8, 8.0),
        _shared(35_000, 7.5),
        0.75,
        (4001, 4002, 4003),
    ),
    Case(
        "saturated_4k_c64",
        Saturated(64, 10, 4096, 160, 130.0, 3.0, 9.0),
        _shared(42_000, 6.5),
        1.0,
        (4101, 4102, 4103),
    ),
    Case(
        "saturated_8k_c32",
        Saturated(32, 16, 8192, 176, 125.0, 3.2, 9.0),
        _shared(52_000, 7.5),
        1.0,
        (4201, 4202, 4203),
    ),
    Case(
        "saturated_8k_c64",
        Saturated(64, 10, 8192, 176, 130.0, 5.5, 11.0),
        _shared(58_000, 7.5),
        1.5,
        (4301, 4302, 4303),
    ),
)
