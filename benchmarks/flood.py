"""One tenant floods, the others go on: their P99 against the one they have when all are throttled.

Four tenants restore through one engine, over one scheduler and one worker connection, which is
the worst case: nothing but the sidecar's own turns keeps them apart. What they want is the same
on both sides, which take turns, slice by slice: the quiet three ask with random gaps for
`UTILISATION` of an equal share of what the sidecar does when all four flood, and the fourth wants
`FLOOD_DEPTH` requests at a time, loads from host memory and NVMe, and saves.
- throttled: before each tenant stands a throttle of its own, which lets in a request each so
  often that the four together are what the sidecar can do;
- flood: nobody is throttled.
A sample is one request of a quiet tenant, from when it was wanted (so a wait in the throttle
counts) to `LoadDone`, its lookup included.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random  # noqa: TID251 - a seeded order of requests, no secret
from typing import Any, Final

from benchmarks.lookup import LARGE_PAGE_BYTES, TOKENS_PER_BLOCK, address_of, sidecar
from benchmarks.rows import Row, ratio
from benchmarks.scale import MIB
from benchmarks.suite import Bench, Suite
from benchmarks.talk import Talk
from benchmarks.wire import Prompt, percentile
from strongroom.blocks import pack_tokens
from strongroom.wire.frames import (
    Copied,
    Filled,
    Finish,
    Load,
    LoadDone,
    LoadFailed,
    Open,
    Part,
    Save,
    SaveDone,
    SidecarFrame,
    Slots,
    Verdict,
)
from tests.sidecar.harness import LAYERS, PAGE, Wire

QUIET: Final = (0, 1, 2)
FLOOD: Final = 3
FLOOD_DEPTH: Final = 64
BLOCKS: Final = 4
"""Of a prompt: 8 MiB of plaintext."""
TOKENS: Final = BLOCKS * TOKENS_PER_BLOCK
BLOCK_BYTES: Final = TOKENS_PER_BLOCK // PAGE * LARGE_PAGE_BYTES * LAYERS
QUIET_PROMPTS: Final = 4
FLOOD_PROMPTS: Final = 24
"""Of the fourth tenant, stored: more than its part of host memory, so that NVMe is read too."""
FLOOD_SAVED: Final = 200
"""Prompts that it saves over and over; what the tiers hold of them has left before its turn."""
SAVE_EVERY: Final = 3
UTILISATION: Final = 0.5
"""Of an equal share, what a quiet tenant asks for."""
_WARM_S: Final = 1.0
_CALIBRATION_S: Final = 3.0
_MS: Final = 1e3


class Broken(Exception):
    """A request that must hit did not."""


@dataclass(slots=True)
class Engine:
    """Both connections, and who waits for which frame."""

    scheduler: Wire
    worker: Wire
    _verdicts: dict[str, asyncio.Future[Verdict]] = field(default_factory=dict)
    _transfers: dict[int, asyncio.Queue[SidecarFrame]] = field(default_factory=dict)
    _number: int = 0

    async def read_scheduler(self) -> None:
        while True:
            match await self.scheduler.receive():
                case Verdict() as verdict:
                    self._verdicts.pop(verdict.request).set_result(verdict)
                case _:
                    pass

    async def read_worker(self) -> None:
        while True:
            match await self.worker.receive():
                case Part(load=number, offset=offset):
                    self.worker.send(Copied(number, offset))
                case (LoadDone(load=number) | LoadFailed(load=number)) as ended:
                    self._transfers[number].put_nowait(ended)
                case (Slots(save=number) | SaveDone(save=number)) as answer:
                    self._transfers[number].put_nowait(answer)
                case _:
                    pass

    async def open(self, prompt: Prompt) -> tuple[str, Verdict]:
        self._number += 1
        name = f"r{self._number}"
        future = self._verdicts[name] = asyncio.get_running_loop().create_future()
        self.scheduler.send(Open(name, prompt.grant, prompt.salt, prompt.packed, "none"))
        return name, await future

    async def load(self, prompt: Prompt) -> bool:
        """Open, load all that hits, finish; false when a load did not come whole."""
        name, verdict = await self.open(prompt)
        ok = True
        if verdict.tokens:
            number, answers = self._begin()
            self.worker.send(Load(name, number, 0, verdict.tokens))
            ok = isinstance(await answers.get(), LoadDone)
            del self._transfers[number]
        self.scheduler.send(Finish(name))
        return ok and verdict.tokens == TOKENS

    async def save(self, prompt: Prompt) -> int:
        """Open, save in one go what finds room, finish; blocks stored."""
        name, verdict = await self.open(prompt)
        stored = 0
        if verdict.save:
            number, answers = self._begin()
            self.worker.send(Save(name, number, TOKENS))
            slots = await answers.get()
            assert isinstance(slots, Slots)
            assert self.worker.staging is not None
            for slot in slots.slots:
                # The first bytes alone: what an engine's own copy costs is not asked here.
                self.worker.staging[slot.offset : slot.offset + 64] = bytes(range(64))
                self.worker.send(Filled(number, slot.offset, True))
            done = await answers.get()
            assert isinstance(done, SaveDone)
            stored = done.stored
            del self._transfers[number]
        self.scheduler.send(Finish(name))
        return stored

    def _begin(self) -> tuple[int, asyncio.Queue[SidecarFrame]]:
        self._number += 1
        answers = self._transfers[self._number] = asyncio.Queue()
        return self._number, answers


@dataclass(slots=True)
class Tenant:
    """One tenant's prompts, and what it asks for next."""

    stored: list[Prompt]
    saved: list[Prompt]
    """New ones; none for a tenant that only loads."""
    random: Random
    asked: int = 0

    def next(self, engine: Engine) -> Coroutine[Any, Any, bool]:
        self.asked += 1
        if self.saved and self.asked % SAVE_EVERY == 0:
            return _saved(engine, self.saved[self.asked // SAVE_EVERY % len(self.saved)])
        return engine.load(self.random.choice(self.stored))


async def _saved(engine: Engine, prompt: Prompt) -> bool:
    await engine.save(prompt)
    return True


@dataclass(slots=True)
class Slice:
    """What a while brought: milliseconds of quiet requests that hit, and requests of each."""

    began: float = 0.0
    samples: list[float] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0] * (len(QUIET) + 1))
    missed: int = 0
    seconds: float = 0.0


class Throttle:
    """Lets in one request after the other, `rate` a second at most."""

    def __init__(self, rate: float) -> None:
        self._gap_s = 1.0 / rate
        self._next = 0.0

    async def let_in(self) -> None:
        now = time.perf_counter()
        mine = max(now, self._next)
        self._next = mine + self._gap_s
        if mine > now:
            await asyncio.sleep(mine - now)


class House:
    """Four tenants on one engine."""

    def __init__(self, engine: Engine, tenants: list[Tenant]) -> None:
        self._engine = engine
        self._tenants = tenants

    async def store_all(self) -> None:
        """Save what is stored from the start."""
        for tenant in self._tenants:
            for prompt in tenant.stored:
                stored = 0
                while stored < BLOCKS:
                    more = await self._engine.save(prompt)
                    if not more:
                        break
                    stored += more

    async def all_flood(self, seconds: float) -> float:
        """Requests a second when every tenant asks without limit, once it has got going."""
        cut = Slice(began=time.perf_counter() + _WARM_S)
        until = cut.began + seconds
        free = Throttle(math.inf)
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._tenants)):
                for _ in range(FLOOD_DEPTH // len(self._tenants)):
                    tasks.create_task(self._flood(number, lambda: _over(until), cut, free))
        return sum(cut.done) / seconds

    async def side(self, share: float, samples: int, *, throttled: bool) -> Slice:
        """Until there are so many samples. `share` is an equal share in requests a second.

        What began before the side had got going does not count.
        """
        cut = Slice(began=time.perf_counter() + _WARM_S)
        over = asyncio.Event()
        throttles = [Throttle(share if throttled else math.inf) for _ in self._tenants]
        async with asyncio.TaskGroup() as tasks:
            for _ in range(FLOOD_DEPTH):
                tasks.create_task(self._flood(FLOOD, over.is_set, cut, throttles[FLOOD]))
            for number in QUIET:
                pace = self._paced(number, UTILISATION * share, samples, throttles[number], cut)
                tasks.create_task(_then(pace, over))
        cut.seconds = time.perf_counter() - cut.began
        return cut

    async def _flood(
        self, number: int, over: Callable[[], bool], cut: Slice, throttle: Throttle
    ) -> None:
        while not over():
            await throttle.let_in()
            if not over():
                await self._one(number, cut)

    async def _paced(
        self, number: int, rate: float, samples: int, throttle: Throttle, cut: Slice
    ) -> None:
        tenant = self._tenants[number]
        due = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            while len(cut.samples) < samples:
                due += tenant.random.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.create_task(self._one(number, cut, throttle))

    async def _one(self, number: int, cut: Slice, throttle: Throttle | None = None) -> None:
        began = time.perf_counter()
        if throttle is not None:
            await throttle.let_in()
        ok = await self._tenants[number].next(self._engine)
        if began < cut.began:
            return
        cut.done[number] += 1
        if number != FLOOD and ok:
            cut.samples.append((time.perf_counter() - began) * _MS)
        elif number != FLOOD:
            cut.missed += 1


async def _then(first: Coroutine[Any, Any, None], event: asyncio.Event) -> None:
    await first
    event.set()


def _over(until: float) -> bool:
    return time.perf_counter() >= until


@asynccontextmanager
async def house(talk: Talk) -> AsyncIterator[House]:
    """Connected, and everything stored."""
    address = address_of(talk, "engine-a", LARGE_PAGE_BYTES)
    path = Path(address.socket_path)
    worker = await Wire.connect(path, address.hello("worker"))
    scheduler = await Wire.connect(path, address.hello("scheduler"))
    engine = Engine(scheduler, worker)
    tenants = [_tenant(talk, number) for number in (*QUIET, FLOOD)]
    try:
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(engine.read_scheduler()),
                tasks.create_task(engine.read_worker()),
            ]
            made = House(engine, tenants)
            await made.store_all()
            yield made
            for reader in readers:
                reader.cancel()
    finally:
        await scheduler.close()
        await worker.close()


def _tenant(talk: Talk, number: int) -> Tenant:
    is_flood = number == FLOOD
    count = FLOOD_PROMPTS if is_flood else QUIET_PROMPTS
    first = 10**6 * (number + 1)
    prompts = [
        _prompt(talk, number, first + TOKENS * at)
        for at in range(count + (FLOOD_SAVED if is_flood else 0))
    ]
    return Tenant(prompts[:count], prompts[count:], Random(number))


def _prompt(talk: Talk, tenant: int, first: int) -> Prompt:
    granted = talk.ask("grant", first=first, count=TOKENS, tenant=tenant)
    return Prompt(pack_tokens(range(first, first + TOKENS)), granted["token"], granted["salt"])


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    with bench.folder("flood") as folder, ExitStack() as stack:
        talk = stack.enter_context(
            sidecar(
                folder / "sidecar",
                0,
                # Every hit is restored and every save written: what is asked is whose turn it is.
                cost_model=False,
                admission=False,
                # What the flood loads over and over stays beside what it saves.
                nvme_bytes=1536 * MIB,
            )
        )
        return asyncio.run(_measure(bench, talk))


async def _measure(bench: Bench, talk: Talk) -> list[Row]:
    pairs: list[tuple[float, float]] = []
    medians: list[tuple[float, float]] = []
    taken = [0, 0]
    missed = [0, 0]
    floods: list[float] = []
    shares: list[float] = []
    samples = bench.scale.lookups
    async with house(talk) as made:
        for _ in bench.rounds("flood"):
            share = await made.all_flood(_CALIBRATION_S) / (len(QUIET) + 1)
            shares.append(share)
            calm, flood = Slice(), Slice()
            for part in range(_SLICES):
                wanted = math.ceil(samples * (part + 1) / _SLICES)
                for cut, throttled in ((calm, True), (flood, False)):
                    more = await made.side(share, wanted - len(cut.samples), throttled=throttled)
                    cut.samples += more.samples
                    cut.missed += more.missed
                    if not throttled:
                        floods.append(more.done[FLOOD] / more.seconds / share)
            pairs.append((percentile(flood.samples, 0.99), percentile(calm.samples, 0.99)))
            medians.append((percentile(flood.samples, 0.5), percentile(calm.samples, 0.5)))
            for side, cut in enumerate((calm, flood)):
                taken[side] += len(cut.samples)
                missed[side] += cut.missed
    if missed[1] > missed[0] + taken[1] // 100:
        raise Broken(f"{missed[1]} quiet requests missed under the flood, {missed[0]} without")
    share_said = f"shares of {statistics.median(shares):.0f} requests/s"
    note = (
        f"{taken[1]} samples against {taken[0]}; {share_said}, the flood "
        f"took {statistics.median(floods):.1f} of them"
    )
    return [
        ratio("flood_p99_vs_equal_share", "ms", pairs, note=note),
        ratio("flood_p50_vs_equal_share", "ms", medians, note=note),
    ]


_SLICES: Final = 2

SUITE = Suite(
    name="flood",
    summary="the others' P99 while one tenant floods, against all throttled to an equal share",
    rows=("flood_p99_vs_equal_share", "flood_p50_vs_equal_share"),
    measure=measure,
)
