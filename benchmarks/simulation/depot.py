"""The sidecar: tiers, link and disk are modelled, what decides is the production code.

- Link: one server that brings a block into the engine's staging (host restore: read, decrypt,
  copy); loads in flight take turns, a block each. Saves use it when no load wants it.
- Disk: the same for NVMe reads, before the link; write-behind uses it when nobody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from benchmarks.simulation.engine import Job
from benchmarks.simulation.events import Agenda, Clock, Noise, Server
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.tiers import Block, TierModel
from sidecar.cost.appraisal import AppraisalSettings, Appraiser
from sidecar.cost.decision import Offer, Stored
from storage.admission import Admission, AdmissionSettings
from storage.block import BlockAddress
from storage.retention import BlockKind, Retention
from storage.stages import Candidate, Wanted
from storage.tiers.protocol import TierName
from strongroom.identity import ComponentId

ENGINE: Final = "simulated"
_WRITES_MAX: Final = 512
"""Blocks that may wait for the disk; more are not written (the queue is full)."""


class Sidecar:
    """Tiers, link and disk, and the production parts that decide."""

    def __init__(
        self,
        machine: Machine,
        clock: Clock,
        agenda: Agenda,
        noise: Noise,
        settings: AppraisalSettings,
        *,
        select: bool,
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._agenda = agenda
        self._noise = noise
        self.appraiser = Appraiser(clock, settings)
        self.admission = Admission(
            clock,
            AdmissionSettings(),
            saved_s=self.appraiser.saved_seconds,
        )
        self._select = select
        self._uses: dict[BlockAddress, int] = {}
        self._restored: set[BlockAddress] = set()
        self.host = TierModel(clock, machine.host_bytes, lambda _: None)
        self.nvme = TierModel(clock, machine.nvme_bytes, self.admission.evicted)
        self._link = Server(agenda, clock)
        self._disk = Server(agenda, clock)
        self._writing: set[BlockAddress] = set()

    def offer(self, job: Job) -> Offer:
        """The stored prefix of a prompt."""
        hit = []
        for block in job.blocks:
            if block.address in self.host:
                tier = TierName.HOST
            elif block.address in self.nvme:
                tier = TierName.NVME
            else:
                break
            # The last token is computed in any case.
            if block.end >= job.request.prompt_tokens:
                break
            hit.append(Stored(block.end, tier, self._bytes(block)))
        return Offer(job.request.prompt_tokens, tuple(hit))

    def bring(self, job: Job, offer: Offer, tokens: int, done: Callable[[], None]) -> None:
        """Load the first `tokens`; each tier's blocks one after another."""
        wanted = [
            (block, stored.tier)
            for block, stored in zip(job.blocks, offer.hit, strict=False)
            if stored.end <= tokens
        ]
        queues = {
            tier: deque(block for block, where in wanted if where is tier)
            for tier in (TierName.HOST, TierName.NVME)
        }
        left = len(wanted)

        def ended(block: Block, tier: TierName, queue_s: float, service_s: float) -> None:
            nonlocal left
            left -= 1
            self.appraiser.cost.observe_restore(tier, self._bytes(block), queue_s, service_s)
            self.appraiser.backlog.moved(ENGINE, str(job.request.number), tier, self._bytes(block))
            self.admission.used(block.address)
            if tier is TierName.NVME:
                self.nvme.touch(block.address)
                self._restored.add(block.address)
            self._keep_in_host(job, block)
            if not left:
                self.appraiser.brought(ENGINE, str(job.request.number))
                done()

        def read(block: Block) -> None:
            self._disk.ask(
                job.request.number,
                self._disk_s(block),
                lambda queue_s, service_s: was_read(block, queue_s, service_s),
            )

        def was_read(block: Block, queue_s: float, service_s: float) -> None:
            self._link.ask(
                job.request.number,
                self._link_s(block),
                lambda more_q, more_s: ended(
                    block, TierName.NVME, queue_s + more_q, service_s + more_s
                ),
            )
            if queues[TierName.NVME]:
                read(queues[TierName.NVME].popleft())

        def open_next() -> None:
            if queues[TierName.HOST]:
                block = queues[TierName.HOST].popleft()
                self._link.ask(
                    job.request.number,
                    self._link_s(block),
                    lambda queue_s, service_s: opened(block, queue_s, service_s),
                )

        def opened(block: Block, queue_s: float, service_s: float) -> None:
            open_next()
            ended(block, TierName.HOST, queue_s, service_s)

        open_next()
        if queues[TierName.NVME]:
            read(queues[TierName.NVME].popleft())

    def save(self, job: Job) -> None:
        """What is not stored yet, sealed when the link has nothing better to do."""
        for block in job.blocks:
            if block.address in self.host:
                self.host.touch(block.address)
            elif block.address not in self.nvme:
                self._link.ask_behind(self._link_s(block), partial(self._saved, job, block))

    def preload(self, blocks: Sequence[Block], tenant: int) -> None:
        """As if it had been saved before."""
        for block in blocks:
            nbytes = self._bytes(block)
            self.host.insert(block.address, block.parent, tenant, nbytes, block.kind)
            self.nvme.insert(block.address, block.parent, tenant, nbytes, block.kind)

    def _saved(self, job: Job, block: Block) -> None:
        self._keep_in_host(job, block)
        if block.address in self.nvme or block.address in self._writing:
            return
        uses = self._uses[block.address] = self._uses.get(block.address, 0) + 1
        candidate = Candidate(
            block.address,
            ComponentId(f"{job.request.tenant:032x}"),
            self._bytes(block),
            Retention.of(BlockKind(block.kind)),
            uses,
        )
        if self._disk.waiting_background >= _WRITES_MAX:
            return
        if self._select and not isinstance(self.admission.decide(candidate), Wanted):
            return
        self._writing.add(block.address)
        factor = self._disk_factor()
        takes_s = self._bytes(block) / self._machine.write_bytes_s * factor
        self._disk.ask_behind(takes_s, lambda: self._written(job, block))

    def _written(self, job: Job, block: Block) -> None:
        self._writing.discard(block.address)
        self.admission.written(block.address, self._bytes(block))
        if block.address in self.host:
            self.nvme.insert(
                block.address, block.parent, job.request.tenant, self._bytes(block), block.kind
            )

    def _keep_in_host(self, job: Job, block: Block) -> None:
        self.host.insert(
            block.address, block.parent, job.request.tenant, self._bytes(block), block.kind
        )

    def _bytes(self, block: Block) -> int:
        return (block.end - block.start) * self._machine.token_bytes

    def _link_s(self, block: Block) -> float:
        machine = self._machine
        noise = self._noise.factor(machine.noise, 1, *_ints(block.address))
        return (machine.link_fixed_s + self._bytes(block) / machine.link_bytes_s) * noise

    def _disk_s(self, block: Block) -> float:
        machine = self._machine
        noise = self._noise.factor(machine.noise, 2, *_ints(block.address))
        if self._noise.uniform(4, *_ints(block.address)) < machine.stall:
            noise *= 20
        seconds = machine.disk_fixed_s + self._bytes(block) / machine.disk_bytes_s
        return seconds * noise * self._disk_factor()

    def _disk_factor(self) -> float:
        slow = self._clock.now_s >= self._machine.slow_from_s
        return self._machine.slow_factor if slow else 1.0


def _ints(address: BlockAddress) -> tuple[int]:
    return (int.from_bytes(address.block[:7], "little"),)
