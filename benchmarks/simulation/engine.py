"""The engine: continuous batching with chunked prefill, first come first served.

A step serves those waiting in order of arrival; those whose prefix is being brought keep their
place and are passed over. A step takes a fixed time, a time for each prompt token (more with a
longer context), and one for each request that decodes. The engine keeps no prefix of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.events import Agenda, Clock, Noise
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.tiers import Block
from benchmarks.traces import Request
from strongroom.wire.frames import Report


@dataclass(slots=True)
class Job:
    """A request in the engine."""

    request: Request
    blocks: tuple[Block, ...]
    arrived_s: float
    brought: int
    left: int
    """Tokens to compute."""
    place: int = 0
    """In order of arrival."""


class EngineModel:
    """Continuous batching: see the module's docstring."""

    def __init__(
        self,
        machine: Machine,
        clock: Clock,
        agenda: Agenda,
        noise: Noise,
        first_token: Callable[[Job], None],
        answered: Callable[[Job], None],
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._agenda = agenda
        self._noise = noise
        self._first_token = first_token
        self._answered = answered
        self._ready: list[tuple[int, Job]] = []
        self._loading = 0
        self._decoding: list[tuple[int, int, Job]] = []
        self._steps = 0
        self._stepping = False
        self._prefill_tokens = 0
        self._prefill_us = 0.0
        self._prefill_steps = 0

    def wait(self) -> None:
        """A request whose prefix is being brought."""
        self._loading += 1

    def arrive(self, job: Job, *, loaded: bool) -> None:
        """Everything that it needs is here."""
        self._loading -= loaded
        heapq.heappush(self._ready, (job.place, job))
        if not self._stepping:
            self._step()

    def report(self) -> Report:
        return Report(
            pages=1,
            free_pages=1,
            running=len(self._decoding),
            waiting=self._loading + len(self._ready),
            prefill_tokens=self._prefill_tokens,
            prefill_us=int(self._prefill_us),
            busy_us=0,
            idle_us=0,
            prefill_steps=self._prefill_steps,
        )

    def _step(self) -> None:
        machine = self._machine
        took: list[tuple[Job, int]] = []
        budget = machine.batch_tokens - len(self._decoding)
        compute_s = 0.0
        while self._ready and budget > 0:
            _, job = self._ready[0]
            part = min(job.left, budget)
            budget -= part
            context = job.request.prompt_tokens - job.left
            compute_s += part / machine.prefill_tokens_s + part * context * machine.context_s
            job.left -= part
            took.append((job, part))
            if job.left:
                break
            heapq.heappop(self._ready)
        if not took and not self._decoding:
            self._stepping = False
            return
        self._stepping = True
        noise = self._noise.factor(machine.noise / 3, 3, self._steps)
        takes_s = (machine.step_s + compute_s + len(self._decoding) * machine.decode_s) * noise
        steps = 1
        if not took:
            # Nothing but decoding: as many steps as nobody can change anything in.
            until = self._decoding[0][0] - self._steps
            free = (self._agenda.next_s - self._clock.now_s) / takes_s
            steps = max(1, min(until, int(min(free, 1e6)) + 1))
        self._agenda.after(takes_s * steps, lambda: self._stepped(took, takes_s, steps))

    def _stepped(self, took: list[tuple[Job, int]], takes_s: float, steps: int) -> None:
        self._steps += steps
        if took:
            self._prefill_tokens += sum(part for _, part in took)
            self._prefill_us += takes_s * 1e6
            self._prefill_steps += 1
        for job, _ in took:
            if not job.left:
                self._first_token(job)
                end = self._steps + max(job.request.output_tokens - 1, 0)
                heapq.heappush(self._decoding, (end, job.request.number, job))
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._answered(heapq.heappop(self._decoding)[2])
        self._step()
