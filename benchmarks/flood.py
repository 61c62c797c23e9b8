"""One tenant floods, the others go on: their P99 against the one they have when all are throttled.

Four tenants share one engine, its scheduler connection and its worker connection, which is the
worst case: nothing but the sidecar's own turns keeps them apart. Both sides are the same but for
one throttle:
- The quiet three have the same arrivals on both sides, drawn once from a seed: an open loop with
  random gaps, `OFFERED` of an equal share each, behind a throttle at the equal share. Each request
  looks up and loads one of the tenant's stored prompts, in the same order.
- The fourth always has `FLOOD_DEPTH` requests to make, in a fixed order: loads from host memory
  and NVMe, and every `NEW_EVERY`th a prompt that is not stored, which it saves. On the *throttled*
  side an equal share of them is let in, on the *flooded* side all.
- An equal share is a quarter of what the sidecar does of this very mix, one request of each tenant
  in turn, `FLOOD_DEPTH` at once. It is measured anew right before each pair of sides, whose order
  changes from pair to pair, since what a shared machine can do moves within seconds. Nothing is on
  its way to the disk when a side begins.
A sample is one request of a quiet tenant, from when it was due to `LoadDone`, lookup included. One
that did not hit whole, or whose load failed, under the flood counts as one that never ended; on the
throttled side it is left out, so that the reference is not the longer for it. A pair whose fourth,
throttled, did not get its share does not count: the machine did less by then than it had just been
measured to do, and its reference would be a system that is overloaded.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import statistics
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random  # noqa: TID251 - seeded arrivals, no secret
from typing import Any, Final

import uvloop

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
FLOOD_NEW: Final = 250
"""Its new prompts, over and over: what the tiers hold of one has left before its turn."""
NEW_EVERY: Final = 3
OFFERED: Final = 0.5
"""Of an equal share, what a quiet tenant asks for. So the throttled side runs at five eighths of
what the sidecar can do. More of it would make a reference that queues by itself."""
KEPT_UP: Final = 0.95
"""Of its share, what the throttled fourth gets at least."""
SAMPLES_MIN: Final = 100
PAIRS_MAX: Final = 30
"""Of one round; more are a machine that is not fit for this."""
WARM_S: Final = 0.5
_CAPACITY_S: Final = 1.5
_SLICE_S: Final = 4.0
_STRIDE: Final = 5
"""From one stored prompt to the next: coprime to their number, so that each is asked for."""
_MS: Final = 1e3


class Broken(Exception):
    """There is no figure: quiet requests were not served, or the machine is not fit for this."""


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

    async def ask(self, prompt: Prompt) -> bool:
        """Open, load what hits, save what is missing and finds room, finish.

        Whether all of it was loaded.
        """
        name, verdict = await self.open(prompt)
        whole = verdict.tokens == TOKENS
        if verdict.tokens:
            number, answers = self._begin()
            self.worker.send(Load(name, number, 0, verdict.tokens))
            whole = isinstance(await answers.get(), LoadDone) and whole
            del self._transfers[number]
        if not whole and verdict.save:
            await self._save(name)
        self.scheduler.send(Finish(name))
        return whole

    async def _save(self, name: str) -> None:
        """In one go, what finds room."""
        number, answers = self._begin()
        self.worker.send(Save(name, number, TOKENS))
        slots = await answers.get()
        assert isinstance(slots, Slots)
        assert self.worker.staging is not None
        for slot in slots.slots:
            # The first bytes alone: what an engine's own copy costs is not asked here.
            self.worker.staging[slot.offset : slot.offset + 64] = bytes(range(64))
            self.worker.send(Filled(number, slot.offset, True))
        assert isinstance(await answers.get(), SaveDone)
        del self._transfers[number]

    def _begin(self) -> tuple[int, asyncio.Queue[SidecarFrame]]:
        self._number += 1
        answers = self._transfers[self._number] = asyncio.Queue()
        return self._number, answers


@dataclass(slots=True)
class Tenant:
    """One tenant's prompts, and what it asks for next."""

    stored: list[Prompt]
    new: list[Prompt]
    """One of these for every `NEW_EVERY` requests; none for a tenant that only loads."""
    asked: int = 0

    def next(self, engine: Engine) -> Coroutine[Any, Any, bool]:
        """Its next request, in an order that does not depend on time."""
        self.asked += 1
        if self.new and self.asked % NEW_EVERY == 0:
            return engine.ask(self.new[self.asked // NEW_EVERY % len(self.new)])
        return engine.ask(self.stored[self.asked * _STRIDE % len(self.stored)])


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a quiet tenant: when it is let in, in seconds from the side's start."""

    at_s: float
    tenant: int


def arrivals(random: Random, share: float, seconds: float) -> list[Arrival]:
    """What the quiet tenants ask for on either side, in the order of time.

    Each wants `OFFERED` of an equal share with random gaps, and has a throttle at the equal share
    before it, whose own delay is outside of what is measured.
    """
    found = []
    for tenant in QUIET:
        wanted = free = 0.0
        while (wanted := wanted + random.expovariate(OFFERED * share)) < seconds:
            free = max(wanted, free)
            found.append(Arrival(free, tenant))
            free += 1.0 / share
    return sorted(found, key=lambda one: (one.at_s, one.tenant))


@dataclass(slots=True)
class Side:
    """What a side brought: milliseconds of quiet requests that hit, and requests of the fourth."""

    samples: list[float] = field(default_factory=list)
    floods: int = 0
    missed: int = 0
    """Quiet requests that did not hit whole, or whose load failed."""
    seconds: float = 0.0

    @property
    def flood_rate(self) -> float:
        """Requests of the fourth, a second."""
        return self.floods / self.seconds


class House:
    """Four tenants on one engine."""

    def __init__(self, talk: Talk, engine: Engine, tenants: list[Tenant]) -> None:
        self._talk = talk
        self._engine = engine
        self._tenants = tenants

    def renew(self, tenants: list[Tenant]) -> None:
        """The same prompts with new grants, which live for minutes."""
        for mine, new in zip(self._tenants, tenants, strict=True):
            mine.stored, mine.new = new.stored, new.new

    async def store_all(self) -> None:
        """Save what is stored from the start."""
        for tenant in self._tenants:
            for prompt in tenant.stored:
                while not await self._engine.ask(prompt):
                    pass

    async def capacity(self, seconds: float) -> float:
        """Requests a second of the mix itself: one of each tenant in turn, as many at once as
        the flood has, once it has got going.
        """
        began = time.perf_counter() + WARM_S
        turns = itertools.cycle(range(len(self._tenants)))
        done = 0

        async def one_after_the_other() -> None:
            nonlocal done
            while time.perf_counter() < began + seconds:
                await self._tenants[next(turns)].next(self._engine)
                done += began <= time.perf_counter() < began + seconds

        async with asyncio.TaskGroup() as tasks:
            for _ in range(FLOOD_DEPTH):
                tasks.create_task(one_after_the_other())
        return done / seconds

    async def side(self, quiet: list[Arrival], share: float | None) -> Side:
        """Let the quiet requests in as they are due, beside the fourth tenant's: `share` of these
        a second, or all for None. What was due before the side had got going does not count.
        """
        side = Side()
        # What went before left saves on their way to the disk: neither side runs in their shadow.
        self._talk.ask("flush")
        began = time.perf_counter()
        over = asyncio.Event()
        throttle = None if share is None else Throttle(share)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(FLOOD_DEPTH):
                tasks.create_task(self._flood(side, over, began + WARM_S, throttle))
            async with asyncio.TaskGroup() as asked:
                for one in quiet:
                    await asyncio.sleep(max(0.0, began + one.at_s - time.perf_counter()))
                    counts = one.at_s >= WARM_S
                    asked.create_task(self._quiet(side, one.tenant, began + one.at_s, counts))
            over.set()
            side.seconds = time.perf_counter() - began - WARM_S
        return side

    async def _flood(
        self, side: Side, over: asyncio.Event, from_s: float, throttle: Throttle | None
    ) -> None:
        while not over.is_set():
            if throttle is not None:
                await throttle.let_in()
            if not over.is_set():
                await self._tenants[FLOOD].next(self._engine)
                side.floods += time.perf_counter() >= from_s and not over.is_set()

    async def _quiet(self, side: Side, tenant: int, due_s: float, counts: bool) -> None:
        ok = await self._tenants[tenant].next(self._engine)
        if counts and ok:
            side.samples.append((time.perf_counter() - due_s) * _MS)
        elif counts:
            side.missed += 1


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


@asynccontextmanager
async def house(talk: Talk) -> AsyncIterator[House]:
    """Connected, and everything stored."""
    address = address_of(talk, "engine-a", LARGE_PAGE_BYTES)
    path = Path(address.socket_path)
    worker = await Wire.connect(path, address.hello("worker"))
    scheduler = await Wire.connect(path, address.hello("scheduler"))
    engine = Engine(scheduler, worker)
    try:
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(engine.read_scheduler()),
                tasks.create_task(engine.read_worker()),
            ]
            made = House(talk, engine, granted(talk))
            await made.store_all()
            yield made
            for reader in readers:
                reader.cancel()
    finally:
        await scheduler.close()
        await worker.close()


def granted(talk: Talk) -> list[Tenant]:
    """The four, with grants for all that they ask for."""
    return [_tenant(talk, number) for number in (*QUIET, FLOOD)]


def _tenant(talk: Talk, number: int) -> Tenant:
    is_flood = number == FLOOD
    count = FLOOD_PROMPTS if is_flood else QUIET_PROMPTS
    first = 10**6 * (number + 1)
    prompts = [
        _prompt(talk, number, first + TOKENS * at)
        for at in range(count + (FLOOD_NEW if is_flood else 0))
    ]
    return Tenant(prompts[:count], prompts[count:])


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
        return uvloop.run(_measure(bench, talk))


async def _measure(bench: Bench, talk: Talk) -> list[Row]:
    p99s: list[tuple[float, float]] = []
    p50s: list[tuple[float, float]] = []
    taken: list[Pair] = []
    left_out = 0
    async with house(talk) as made:
        for number in bench.rounds("flood"):
            made.renew(granted(talk))
            gc.collect()
            gc.disable()  # our own side's collector is not what is measured
            try:
                pairs, tried = await _round(made, Random(number), bench.scale.lookups)
            finally:
                gc.enable()
            left_out += tried - len(pairs)
            taken += pairs
            p99s.append(both_sides(pairs, 0.99))
            p50s.append(both_sides(pairs, 0.5))
    samples = sum(len(pair.flooded.samples) for pair in taken)
    missed = sum(pair.flooded.missed for pair in taken)
    without = sum(pair.throttled.missed for pair in taken)
    note = (
        f"{samples} samples a side in all; an equal share is "
        f"{statistics.median(pair.share for pair in taken):.0f} requests/s, the flood took "
        f"{statistics.median(pair.flooded.flood_rate / pair.share for pair in taken):.1f} of "
        f"them; {left_out} of {len(taken) + left_out} pairs left out, where the throttled fourth "
        f"did not get its share; {missed} quiet requests were not served whole under the flood, "
        f"{without} without"
    )
    return [
        ratio("flood_p99_vs_equal_share", "ms", p99s, note=note),
        ratio("flood_p50_vs_equal_share", "ms", p50s, note=note),
    ]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides, one right after the other, with the same quiet arrivals."""

    share: float
    throttled: Side
    flooded: Side


def both_sides(pairs: Sequence[Pair], share: float) -> tuple[float, float]:
    """Milliseconds that `share` of the quiet requests took at most, flooded and throttled.

    `Broken` where that many were not served under the flood: such a one took without end.
    """
    flooded, throttled = [pair.flooded for pair in pairs], [pair.throttled for pair in pairs]
    missed = sum(side.missed for side in flooded)
    flood = [sample for side in flooded for sample in side.samples] + [math.inf] * missed
    value = percentile(flood, share)
    if math.isinf(value):
        raise Broken(f"{missed} of {len(flood)} quiet requests were not served under the flood")
    return value, percentile([sample for side in throttled for sample in side.samples], share)


async def _round(made: House, random: Random, samples: int) -> tuple[list[Pair], int]:
    """Pairs until each side has so many samples; and how many were tried."""
    pairs: list[Pair] = []
    for tried in range(1, PAIRS_MAX + 1):
        share = await made.capacity(_CAPACITY_S) / (len(QUIET) + 1)
        quiet = arrivals(random, share, WARM_S + _SLICE_S)
        if tried % 2:
            throttled, flooded = await made.side(quiet, share), await made.side(quiet, None)
        else:
            flooded, throttled = await made.side(quiet, None), await made.side(quiet, share)
        # So few samples are a test's, whose figures mean nothing.
        if samples < SAMPLES_MIN or throttled.flood_rate >= KEPT_UP * share:
            pairs.append(Pair(share, throttled, flooded))
        sides = ([p.throttled for p in pairs], [p.flooded for p in pairs])
        if min(sum(len(side.samples) for side in one) for one in sides) >= samples:
            return pairs, tried
    raise Broken(f"the throttled tenants did not get their shares in {PAIRS_MAX} pairs")


SUITE = Suite(
    name="flood",
    summary="the others' P99 while one tenant floods, against all throttled to an equal share",
    rows=("flood_p99_vs_equal_share", "flood_p50_vs_equal_share"),
    measure=measure,
)
