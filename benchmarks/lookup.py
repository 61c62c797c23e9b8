"""Lookups of a 32k-token prompt over the real socket: idle, under load, and with more resident.

One sidecar has a million small blocks resident, another one a thousand; both are asked in turn.
A sample is one `Open`, with grant and 128 KiB of token ids, to its `Verdict` of 128 blocks.
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.rows import Pairs, Row, absolute, folded, ratio
from benchmarks.scale import MIB, TINY, Scale, cores
from benchmarks.suite import ROOT, Bench, Suite
from benchmarks.talk import Talk
from benchmarks.wire import Address, Prompt, Scheduler, Worker, percentile
from strongroom.blocks import pack_tokens
from tests.sidecar.harness import LAYERS, PAGE

TOKENS: Final = 32 * 1024
TOKENS_PER_BLOCK: Final = 256
SMALL_PAGE_BYTES: Final = 512
LARGE_PAGE_BYTES: Final = 64 * 1024
"""Of the engine that restores: blocks of 2 MiB."""
PAUSE_S: Final = 0.002
"""Between two lookups under load, about as an engine's steps lie apart. Without it the lookups
themselves take half of a core: a third of what is restored alone is left, with it two thirds."""
FRESH: Final = 200
"""Grants that are minted for the row in which none was seen before."""
LOADED_TOKENS: Final = 32 * TOKENS_PER_BLOCK
AT_ONCE: Final = 4
"""Loads of the engine that restores: two run, as many as the sidecar takes of one tenant, and the
others wait for their turn there, so that no thread waits for an engine."""
ALONE_LOADS: Final = 24
RESTORED_MIN: Final = 0.5
"""Of what is restored alone, what must be restored meanwhile for a row to be one under load."""
US: Final = 1e6


@contextmanager
def sidecar(folder: Path, blocks: int, **settings: Any) -> Iterator[Talk]:
    """A sidecar process with so many small blocks resident.

    Its socket lies elsewhere: a socket's path has at most 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="sr") as short:
        settings["socket_path"] = str(Path(short) / "run" / "s.sock")
        with _started(folder, blocks, settings) as talk:
            yield talk


@contextmanager
def _started(folder: Path, blocks: int, settings: dict[str, Any]) -> Iterator[Talk]:
    config = {
        "directory": str(folder),
        "blocks": blocks,
        "settings": {
            "tokens_per_block": TOKENS_PER_BLOCK,
            "staging_bytes": 64 * MIB,
            "host_bytes": 192 * MIB,
            "nvme_bytes": 512 * MIB,
            "region_bytes": 64 * MIB,
            "crypto_threads": cores(),
            "ship_interval_s": 1.0,
            # Lookups come faster here than any engine's requests: those that ended are let go
            # of soon, so that the limit on what one engine has open is not what is measured.
            "finished_linger_s": 1.0,
            "prompt_bytes_max": 1024 * MIB,
            **settings,
        },
    }
    command = [sys.executable, "-m", "benchmarks.sidecar_process", json.dumps(config)]
    folder.mkdir(parents=True)
    with Talk(command, folder / "sidecar.log", environment()) as talk:
        yield talk


def environment() -> dict[str, str]:
    """What our own child processes see."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True, slots=True)
class Party:
    """One engine's connections to one sidecar, with a stored prompt."""

    talk: Talk
    scheduler: Scheduler
    worker: Worker
    packed: bytes

    @classmethod
    def join(cls, talk: Talk, stack: ExitStack) -> Party:
        """Connect, and save the prompt."""
        address = address_of(talk, "engine-a", SMALL_PAGE_BYTES)
        worker = stack.enter_context(Worker(address))
        scheduler = stack.enter_context(Scheduler(address))
        party = cls(talk, scheduler, worker, pack_tokens(range(TOKENS)))
        block_bytes = TOKENS_PER_BLOCK // PAGE * SMALL_PAGE_BYTES * LAYERS
        scheduler.look_up("save", party.prompt())
        worker.save("save", TOKENS, bytes(block_bytes))
        return party

    def prompt(self) -> Prompt:
        """The prompt with a grant of its own: grants are short-lived."""
        granted = self.talk.ask("grant", first=0, count=TOKENS)
        return Prompt(self.packed, granted["token"], granted["salt"])

    def sample(self, count: int, pause_s: float = 0.0) -> list[float]:
        """Microseconds of so many lookups, each that long after the one before."""
        return self._sample([self.prompt()] * count, pause_s)

    def sample_fresh(self, count: int) -> list[float]:
        """The same, each with a grant that the sidecar has not seen."""
        return self._sample([self.prompt() for _ in range(count)])

    def _sample(self, prompts: Sequence[Prompt], pause_s: float = 0.0) -> list[float]:
        samples = []
        gc.collect()
        gc.disable()  # our own side's collector is not what is measured
        try:
            for number, prompt in enumerate(prompts):
                seconds, verdict = self.scheduler.look_up(f"r{number}", prompt)
                if verdict.tokens != TOKENS:
                    raise AssertionError(f"a hit of {verdict.tokens} tokens, not {TOKENS}")
                samples.append(seconds * US)
                if pause_s:
                    time.sleep(pause_s)
        finally:
            gc.enable()
        return samples

    def floor(self) -> float:
        """Microseconds of one empty round trip and one hash over the same bytes."""
        trips = statistics.median(self.scheduler.ping(number) for number in range(20))
        started = time.perf_counter()
        hashlib.blake2b(self.packed, digest_size=32, key=bytes(32)).digest()
        return (trips + time.perf_counter() - started) * US


def address_of(talk: Talk, engine: str, page_bytes: int) -> Address:
    """Where to connect as this engine."""
    where = talk.ask("where")
    return Address(where["socket"], engine, where["tokens"][engine], page_bytes)


@contextmanager
def restorer(talk: Talk, folder: Path, scale: Scale) -> Iterator[Talk]:
    """A second engine, which restores while it is told to."""
    tokens = LOADED_TOKENS if scale.name != TINY.name else 4 * TOKENS_PER_BLOCK
    first = 10**6
    granted = talk.ask("grant", first=first, count=tokens)
    config = {
        "address": asdict(address_of(talk, "engine-b", LARGE_PAGE_BYTES)),
        "prompt": [first, tokens],
        "grant": granted["token"],
        "salt": granted["salt"],
        "block_bytes": TOKENS_PER_BLOCK // PAGE * LARGE_PAGE_BYTES * LAYERS,
    }
    command = [sys.executable, "-m", "benchmarks.restorer", json.dumps(config)]
    with Talk(command, folder / "restorer.log", environment()) as load:
        yield load


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    scale = bench.scale
    seen = _Seen()
    with bench.folder("lookup") as folder, ExitStack() as stack:
        bench.say(f"lookup: making {scale.records} resident blocks")
        talks = [
            stack.enter_context(sidecar(folder / name, blocks))
            for name, blocks in (("many", scale.records), ("few", scale.records_few))
        ]
        many_party, few_party = (Party.join(talk, stack) for talk in talks)
        resident = talks[0].ask("resident")["blocks"]
        bench.say("lookup: saving what is restored meanwhile")
        load = stack.enter_context(restorer(talks[0], folder, scale))
        many_party.sample(10)
        few_party.sample(10)
        for _ in bench.rounds("lookup"):
            seen.floors.append(many_party.floor())
            seen.idle.append(many_party.sample(scale.lookups))
            seen.fresh.append(many_party.sample_fresh(min(scale.lookups, FRESH)))
            seen.few.append(few_party.sample(scale.lookups))
            loads = ALONE_LOADS if scale.name != TINY.name else 2
            alone = speed(load.ask("alone", loads=loads, at_once=AT_ONCE))
            for at_once, pause_s, under in (
                (AT_ONCE, PAUSE_S, seen.loaded),
                (AT_ONCE, 0.0, seen.without_pause),
                (1, 0.0, seen.one_load),
            ):
                load.ask("go", at_once=at_once)
                samples = many_party.sample(scale.lookups, pause_s)
                under.append(Loaded(samples, speed(load.ask("pause")), alone))
    return _rows(seen, f"{resident} blocks resident")


def speed(done: Mapping[str, float]) -> float:
    """GB/s of what the engine that restores says."""
    return done["bytes"] / done["seconds"] / 1e9


@dataclass(frozen=True, slots=True)
class Loaded:
    """One round under load: microseconds of every lookup, and GB/s restored meanwhile and alone."""

    samples: list[float]
    speed: float
    alone: float


def share_of(rounds: Sequence[Loaded]) -> float:
    """Of what is restored alone, what was restored meanwhile."""
    return statistics.median(one.speed / one.alone for one in rounds)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of each round: microseconds of every lookup, idle and loaded."""

    floors: list[float] = field(default_factory=list)
    idle: list[list[float]] = field(default_factory=list)
    fresh: list[list[float]] = field(default_factory=list)
    few: list[list[float]] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)
    without_pause: list[Loaded] = field(default_factory=list)
    one_load: list[Loaded] = field(default_factory=list)


def _rows(seen: _Seen, resident: str) -> list[Row]:
    def at(rounds: Sequence[list[float]], share: float) -> list[tuple[float, float]]:
        values = [percentile(samples, share) for samples in rounds]
        return list(zip(values, seen.floors, strict=True))

    def loaded(name: str, rounds: Sequence[Loaded], share: float, how: str) -> Row:
        pairs = at([one.samples for one in rounds], share)
        return under_load(name, pairs, rounds, f"{how}, {resident}")

    floor = "reference: one empty round trip and one hash over the same bytes"
    without, several = "one after another", f"{AT_ONCE} loads at once"
    pause = f"{PAUSE_S * 1000:.0f} ms between two"
    scaling = [
        (percentile(ours, 0.5), percentile(reference, 0.5))
        for ours, reference in zip(seen.idle, seen.few, strict=True)
    ]
    worst = [(max(one.samples), floor) for one, floor in zip(seen.loaded, seen.floors, strict=True)]
    fresh = f"each with a grant that was not seen before; {resident}"
    name = "lookup_32k_tokens_us_p99_loaded"
    return [
        absolute("lookup_32k_tokens_us_p50", "us", at(seen.idle, 0.5), f"{resident}; {floor}"),
        absolute("lookup_32k_tokens_us_p99", "us", at(seen.idle, 0.99), resident),
        absolute("lookup_32k_tokens_us_p50_fresh_grant", "us", at(seen.fresh, 0.5), fresh),
        loaded("lookup_32k_tokens_us_p50_loaded", seen.loaded, 0.5, f"{pause} beside {several}"),
        loaded(name, seen.loaded, 0.99, f"{pause} beside {several}"),
        loaded(f"{name}_without_pause", seen.without_pause, 0.99, f"{without} beside {several}"),
        loaded(f"{name}_one_load", seen.one_load, 0.99, f"{without} beside one load at a time"),
        folded(
            "lookup_32k_tokens_us_max_loaded",
            "us",
            [ours for ours, _ in worst],
            worst,
            note="the longest of each round: where a collector's pause would show",
        ),
        ratio("scaling", "us", scaling, note=f"{resident} against few"),
    ]


def under_load(name: str, pairs: Pairs, rounds: Sequence[Loaded], how: str) -> Row:
    """A row under load, which says how much of one it was. One that has a bound does not reach it
    where too little was restored meanwhile: that would be no row under load.
    """
    speed, share = statistics.median(one.speed for one in rounds), share_of(rounds)
    note = f"{how}; {speed:.1f} GB/s restored meanwhile, {share:.0%} of what is restored alone"
    row = absolute(name, "us", pairs, note)
    if row.bound is None or share >= RESTORED_MIN:
        return row
    return replace(row, ok=False, note=f"{note}: too little for a row under load")


SUITE = Suite(
    name="lookup",
    summary="hashing and matching 32k tokens over the socket, idle, loaded, with a million blocks",
    rows=(
        "lookup_32k_tokens_us_p50",
        "lookup_32k_tokens_us_p99",
        "lookup_32k_tokens_us_p50_fresh_grant",
        "lookup_32k_tokens_us_p50_loaded",
        "lookup_32k_tokens_us_p99_loaded",
        "lookup_32k_tokens_us_p99_loaded_without_pause",
        "lookup_32k_tokens_us_p99_loaded_one_load",
        "lookup_32k_tokens_us_max_loaded",
        "scaling",
    ),
    measure=measure,
)
