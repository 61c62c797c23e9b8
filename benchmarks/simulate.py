"""Replay request traces against tiers and an engine, and compare ways to decide on a hit.

A discrete-event simulation. What decides is the production code: `sidecar.appraisal` (cost model,
backlog, decision), `storage.admission`, and `storage.index` with its eviction. What is modelled:

- Link: one server that brings a block into the engine's staging (host restore: read, decrypt,
  copy); loads in flight take turns, a block each. Saves use it when no load wants it.
- Disk: the same for NVMe reads, before the link; write-behind uses it when nobody reads.
- Engine: continuous batching with chunked prefill. A step serves those waiting in order of
  arrival, those whose prefix is being brought keep their place and are passed over. A step takes
  a fixed time, a time a prompt token (more with a longer context), and one a decoding request.
- The engine keeps no prefix of its own: its pages are always needed for others.
- Once a second the engine reports, as the connector does; the sidecar knows nothing more.

Noise is drawn from (seed, what is done), not from the order in which it is done, so that all
policies meet the same noise.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from benchmarks.traces import PAGE_TOKENS, Request, Span, Trace
from sidecar.appraisal import AppraisalSettings, Appraiser
from sidecar.decision import Offer, Stored
from storage.admission import Admission, AdmissionSettings
from storage.block import BlockAddress
from storage.index import Index
from storage.lifecycle import Place
from storage.retention import BlockKind, Retention
from storage.stages import Candidate, Wanted
from storage.tiers.protocol import TierName
from strongroom.blocks import ROOT_PARENT, BlockId, Grid
from strongroom.identity import ComponentId, NamespaceId
from strongroom.wire.frames import Report

_NS: Final = 1e9
_GRID: Final = Grid(256, PAGE_TOKENS)
_ENGINE: Final = "simulated"
_REPORT_S: Final = 1.0
_WRITES_MAX: Final = 512
"""Blocks that may wait for the disk; more are not written (the queue is full)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds and sizes. Bandwidths are bytes a second; `token_bytes` is KV a token, all layers."""

    name: str
    link_bytes_s: float
    link_fixed_s: float
    disk_bytes_s: float
    disk_fixed_s: float
    write_bytes_s: float
    prefill_tokens_s: float
    step_s: float = 0.008
    decode_s: float = 0.00008
    context_s: float = 1.5e-9
    """More time a token of prompt for each token before it."""
    batch_tokens: int = 4096
    token_bytes: int = 131072
    host_bytes: int = 48 * 2**30
    nvme_bytes: int = 512 * 2**30
    noise: float = 0.15
    """Sigma of the log-normal noise on each block and step."""
    stall: float = 0.002
    """Share of disk reads that take 20 times as long."""
    slow_from_s: float = math.inf
    """From here on the disk is `slow_factor` times slower."""
    slow_factor: float = 10.0


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
    return sidecar.appraiser.choose(_ENGINE, request, offer).tokens


CHOICES: Final[Mapping[Policy, Choose]] = {
    Policy.RESTORE: choose_all,
    Policy.RECOMPUTE: choose_none,
    Policy.HICACHE: choose_by_threshold,
    Policy.OURS: choose_ours,
}


class Clock:
    """The simulated time, for everything that is handed a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> int:
        return int(self.now_s * _NS)


class Agenda:
    """What happens when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when_s, self._number, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self._clock.now_s + delay_s, action)

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def run(self, until: Callable[[], bool]) -> None:
        while self._heap and not until():
            self._clock.now_s, _, action = heapq.heappop(self._heap)
            action()


class Noise:
    """The same draw for the same thing, whatever the order."""

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(8, "little")

    def uniform(self, *what: int) -> float:
        raw = b"".join(each.to_bytes(8, "little", signed=True) for each in what)
        digest = hashlib.blake2b(raw, digest_size=8, key=self._key).digest()
        return (int.from_bytes(digest, "little") + 0.5) / 2**64

    def factor(self, sigma: float, *what: int) -> float:
        """Log-normal with mean 1."""
        if not sigma:
            return 1.0
        u, v = self.uniform(*what, 1), self.uniform(*what, 2)
        normal = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
        return math.exp(sigma * normal - sigma * sigma / 2)


class Server:
    """One at a time; jobs of the foreground take turns by owner, the background gets the rest."""

    def __init__(self, agenda: Agenda, clock: Clock) -> None:
        self._agenda = agenda
        self._clock = clock
        self._turns: OrderedDict[int, deque[tuple[float, float, Callable[[float, float], None]]]]
        self._turns = OrderedDict()
        self._background: deque[tuple[float, Callable[[], None]]] = deque()
        self._busy = False

    @property
    def waiting_background(self) -> int:
        return len(self._background)

    def ask(self, owner: int, takes_s: float, done: Callable[[float, float], None]) -> None:
        """`done(queue_s, service_s)` when it was served."""
        self._turns.setdefault(owner, deque()).append((self._clock.now_s, takes_s, done))
        self._next()

    def ask_behind(self, takes_s: float, done: Callable[[], None]) -> None:
        self._background.append((takes_s, done))
        self._next()

    def _next(self) -> None:
        if self._busy:
            return
        if self._turns:
            owner, jobs = next(iter(self._turns.items()))
            asked_s, takes_s, done = jobs.popleft()
            self._turns.move_to_end(owner)
            if not jobs:
                del self._turns[owner]
            queue_s = self._clock.now_s - asked_s
            self._start(takes_s, lambda: done(queue_s, takes_s))
        elif self._background:
            takes_s, behind = self._background.popleft()
            self._start(takes_s, behind)

    def _start(self, takes_s: float, then: Callable[[], None]) -> None:
        self._busy = True

        def end() -> None:
            self._busy = False
            then()
            self._next()

        self._agenda.after(takes_s, end)


class TierModel:
    """The blocks of one tier, by the production index and its eviction."""

    def __init__(
        self, clock: Clock, capacity_bytes: int, on_evict: Callable[[BlockAddress], None]
    ) -> None:
        self._index = Index(clock)
        self._capacity = capacity_bytes
        self._used = 0
        self._on_evict = on_evict

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._index

    def touch(self, address: BlockAddress) -> None:
        self._index.touch(address)

    def insert(
        self, address: BlockAddress, parent: BlockId, tenant: int, nbytes: int, kind: str
    ) -> bool:
        if address in self._index:
            self._index.touch(address)
            return True
        if nbytes > self._capacity:
            return False
        while self._used + nbytes > self._capacity:
            keep = BlockAddress(parent, address.rank)
            victim = next(iter(self._index.victims(keep=keep)), None)
            if victim is None:
                return False
            self._used -= self._index.remove(victim).place.nbytes
            self._on_evict(victim)
        self._index.insert(
            address,
            parent,
            ComponentId(f"{tenant:032x}"),
            NamespaceId(f"{tenant:064x}"),
            Place(0, nbytes),
        )
        self._used += nbytes
        return True


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a prompt."""

    address: BlockAddress
    parent: BlockId
    start: int
    end: int
    kind: str


class Prompts:
    """Spans into chained blocks; the same prefix gives the same blocks."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int, int, int], BlockId] = {}

    def blocks(self, spans: Sequence[Span]) -> tuple[Block, ...]:
        ends, total = [], 0
        for span in spans:
            total += span.tokens
            ends.append(total)
        blocks = []
        parent = ROOT_PARENT
        for extent in _GRID.plan(ends, total):
            stream = spans[extent.span].stream
            key = (parent, stream, extent.start, extent.end)
            block = self._known.get(key)
            if block is None:
                raw = parent + b"".join(n.to_bytes(8, "little") for n in key[1:])
                block = self._known[key] = BlockId(hashlib.blake2b(raw, digest_size=32).digest())
            kind = spans[extent.span].kind
            blocks.append(Block(BlockAddress(block, 0), parent, extent.start, extent.end, kind))
            parent = block
        return tuple(blocks)


@dataclass(slots=True)
class _Job:
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
        first_token: Callable[[_Job], None],
        answered: Callable[[_Job], None],
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._agenda = agenda
        self._noise = noise
        self._first_token = first_token
        self._answered = answered
        self._ready: list[tuple[int, _Job]] = []
        self._loading = 0
        self._decoding: list[tuple[int, int, _Job]] = []
        self._steps = 0
        self._stepping = False
        self._prefill_tokens = 0
        self._prefill_us = 0.0

    def wait(self) -> None:
        """A request whose prefix is being brought."""
        self._loading += 1

    def arrive(self, job: _Job, *, loaded: bool) -> None:
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
        )

    def _step(self) -> None:
        machine = self._machine
        took: list[tuple[_Job, int]] = []
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

    def _stepped(self, took: list[tuple[_Job, int]], takes_s: float, steps: int) -> None:
        self._steps += steps
        if took:
            self._prefill_tokens += sum(part for _, part in took)
            self._prefill_us += takes_s * 1e6
        for job, _ in took:
            if not job.left:
                self._first_token(job)
                end = self._steps + max(job.request.output_tokens - 1, 0)
                heapq.heappush(self._decoding, (end, job.request.number, job))
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._answered(heapq.heappop(self._decoding)[2])
        self._step()


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
        self.nvme = TierModel(clock, machine.nvme_bytes, self._left_nvme)
        self._link = Server(agenda, clock)
        self._disk = Server(agenda, clock)
        self._writing: set[BlockAddress] = set()

    def offer(self, job: _Job) -> Offer:
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

    def bring(self, job: _Job, offer: Offer, tokens: int, done: Callable[[], None]) -> None:
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
            self.appraiser.backlog.moved(_ENGINE, str(job.request.number), tier, self._bytes(block))
            self.admission.used(block.address)
            if tier is TierName.NVME:
                self.nvme.touch(block.address)
                self._restored.add(block.address)
            self._keep_in_host(job, block)
            if not left:
                self.appraiser.brought(_ENGINE, str(job.request.number))
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

    def save(self, job: _Job) -> None:
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

    def _saved(self, job: _Job, block: Block) -> None:
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

    def _written(self, job: _Job, block: Block) -> None:
        self._writing.discard(block.address)
        self.admission.written(block.address, self._bytes(block))
        if block.address in self.host:
            self.nvme.insert(
                block.address, block.parent, job.request.tenant, self._bytes(block), block.kind
            )

    def _keep_in_host(self, job: _Job, block: Block) -> None:
        self.host.insert(
            block.address, block.parent, job.request.tenant, self._bytes(block), block.kind
        )

    def _left_nvme(self, address: BlockAddress) -> None:
        used = address in self._restored
        self._restored.discard(address)
        self.admission.evicted(address, used=used)

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


def simulate(
    trace: Trace,
    machine: Machine,
    policy: Policy,
    *,
    slo_s: float,
    seed: int = 1,
    choose: Choose | None = None,
    settings: AppraisalSettings | None = None,
) -> Result:
    """Replay one trace under one policy."""
    run = _Run(trace, machine, choose or CHOICES[policy], seed, settings or AppraisalSettings())
    return run.result(policy.value, slo_s)


class _Run:
    """One replay."""

    def __init__(
        self, trace: Trace, machine: Machine, choose: Choose, seed: int, settings: AppraisalSettings
    ) -> None:
        self._trace = trace
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
        self._ttft: list[float] = []
        self._arrived = self._ended = 0
        self._prompt_tokens = self._hit_tokens = self._brought_tokens = 0
        for spans in trace.stored:
            self._sidecar.preload(self._prompts.blocks(spans), 0)
        for request in trace.requests:
            if request.after is None:
                self._agenda.at(request.at_s, partial(self._arrive, request))
            else:
                self._followers.setdefault(request.after, []).append(request)
        self._agenda.at(_REPORT_S, self._report)
        self._agenda.run(lambda: self._ended == len(trace.requests))

    def result(self, policy: str, slo_s: float) -> Result:
        times = sorted(self._ttft)
        within = sum(1 for time in times if time <= slo_s)
        decided = self._sidecar.appraiser.statistics().decisions
        return Result(
            trace=self._trace.name,
            policy=policy,
            requests=len(times),
            ttft_p50_s=_at(times, 0.5),
            ttft_p95_s=_at(times, 0.95),
            ttft_p99_s=_at(times, 0.99),
            goodput_per_s=within / self._clock.now_s,
            hit_share=self._hit_tokens / self._prompt_tokens,
            restored_share=self._brought_tokens / self._prompt_tokens,
            decisions={f"{kind}:{why}": number for (kind, why), number in decided.items()},
        )

    def _arrive(self, request: Request) -> None:
        blocks = self._prompts.blocks(request.spans)
        self._arrived += 1
        job = _Job(request, blocks, self._clock.now_s, 0, request.prompt_tokens, self._arrived)
        offer = self._sidecar.offer(job)
        name = str(request.number)
        if offer.hit:
            job.brought = self._choose(self._sidecar, name, offer)
        else:
            self._sidecar.appraiser.choose(_ENGINE, name, offer)
        job.left -= job.brought
        self._prompt_tokens += request.prompt_tokens
        self._hit_tokens += offer.hit[-1].end if offer.hit else 0
        self._brought_tokens += job.brought
        if job.brought:
            self._engine.wait()
            self._sidecar.bring(
                job, offer, job.brought, lambda: self._engine.arrive(job, loaded=True)
            )
        else:
            self._engine.arrive(job, loaded=False)

    def _first_token(self, job: _Job) -> None:
        self._ttft.append(self._clock.now_s - job.arrived_s)
        self._sidecar.save(job)

    def _answered(self, job: _Job) -> None:
        self._ended += 1
        for follower in self._followers.get(job.request.number, ()):
            self._agenda.after(follower.gap_s, partial(self._arrive, follower))

    def _report(self) -> None:
        self._sidecar.appraiser.observe_report(_ENGINE, self._engine.report())
        self._agenda.after(_REPORT_S, self._report)


def _at(ordered: Sequence[float], q: float) -> float:
    """Nearest rank."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
