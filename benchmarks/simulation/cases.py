"""The cases that are judged, and those that thresholds were tuned on: other seeds and parameters.

Machines are the fitted one, scaled: engines of other speeds, a disk that is or becomes slow, a
link that is shared by many. `saturated_*` is the matrix of llm-d-router pull request 2833: prompt
length and clients, with stored prefixes, where always loading collapses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """A workload on a machine, with the time to first token that is promised."""

    name: str
    workload: Workload
    scaled: Scaled
    slo_s: float
    seed: int

    def trace(self) -> Trace:
        return self.workload.trace(self.name, self.seed)

    def machine(self, fit: Fit) -> Machine:
        return self.scaled.machine(fit)


def _shared(tokens_s: float, link_times: float) -> Scaled:
    """A link that many share, and host memory that holds everything."""
    return Scaled(tokens_s, host_gib=256, link_times=link_times)


JUDGED = (
    Case(
        "chat",
        Chat(220, 0.5, 5.2, 340.0, 380.0, 5200.0, 2048, 30.0, 3.0, 6),
        Scaled(14_000, 40),
        2.0,
        1001,
    ),
    Case(
        "rag",
        Rag(1000, 2.2, 3000, 0.95, 3300.0, 2, 96.0, 80.0, 768, 2.5),
        Scaled(25_000, 20),
        1.0,
        1002,
    ),
    Case(
        "agents",
        Agents(40, 0.08, 17.0, 1900.0, 260.0, 7168, 8.0, 1.5, 2.0, 2),
        Scaled(20_000),
        2.0,
        1003,
    ),
    Case(
        "slow_disk",
        Chat(180, 0.3, 4.8, 320.0, 360.0, 5600.0, 1024, 45.0, 2.5, 3),
        Scaled(14_000, 10, 8.0),
        2.0,
        1004,
    ),
    Case(
        "disk_becomes_slow",
        Rag(800, 1.8, 1500, 1.0, 3500.0, 2, 80.0, 60.0, 512, 2.0),
        Scaled(24_000, 12, 12.0, slow_from_s=120.0),
        1.0,
        1005,
    ),
    Case(
        "idle_engine",
        Rag(500, 0.4, 2500, 0.9, 3600.0, 2, 64.0, 50.0, 256, 1.2, warm=700),
        Scaled(80_000, 6),
        0.4,
        1006,
    ),
    Case(
        "busy_engine",
        Rag(900, 1.5, 1800, 1.05, 3400.0, 2, 64.0, 90.0, 512, 1.8),
        Scaled(11_000, 200),
        2.0,
        1007,
    ),
    Case(
        "saturated_1k_c64",
        Saturated(64, 20, 1024, 128, 140.0, 0.4, 8.0),
        _shared(32_000, 7.0),
        0.5,
        1008,
    ),
    Case(
        "saturated_2k_c64",
        Saturated(64, 14, 2048, 160, 150.0, 1.5, 10.0),
        _shared(36_000, 7.0),
        0.75,
        1009,
    ),
    Case(
        "saturated_4k_c32",
        Saturated(32, 20, 4096, 160, 120.0, 2.2, 8.0),
        _shared(40_000, 7.0),
        1.0,
        1010,
    ),
    Case(
        "saturated_8k_c32",
        Saturated(32, 16, 8192, 192, 120.0, 3.0, 8.0),
        _shared(55_000, 7.0),
        1.0,
        1011,
    ),
    Case(
        "saturated_8k_c64",
        Saturated(64, 12, 8192, 192, 130.0, 5.0, 12.0),
        _shared(60_000, 7.0),
        1.5,
        1012,
    ),
)

TUNING = (
    Case("chat", Chat(sessions_per_s=0.6), Scaled(12_000), 2.0, 1),
    Case("rag", Rag(), Scaled(22_000, 24), 1.0, 1),
    Case("agents", Agents(sessions_per_s=0.09), Scaled(22_000), 2.0, 1),
    Case("slow_disk", Chat(200, 0.3), Scaled(12_000, 12, 7.0), 2.0, 1),
    Case("disk_becomes_slow", Rag(900), Scaled(22_000, 12, 15.0, 150.0), 1.0, 1),
    Case("idle_engine", Rag(600, 0.5, warm=600), Scaled(60_000, 8), 0.5, 1),
    Case("busy_engine", Rag(900, 1.8), Scaled(12_000, 200), 2.0, 1),
    Case("saturated_1k_c64", Saturated(prompt_tokens=1024, gap_s=0.5), _shared(3e4, 6), 0.5, 1),
    Case("saturated_4k_c32", Saturated(32, 20, 4096, gap_s=2.0), _shared(4e4, 6), 1.0, 1),
    Case("saturated_8k_c64", Saturated(), _shared(6e4, 6), 1.0, 1),
)
