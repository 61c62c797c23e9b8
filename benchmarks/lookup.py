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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.rows import Row, absolute, folded, ratio
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
LOADED_PAUSE_S: Final = 0.002
"""Between two lookups under load: without it they themselves would take the cores from what is
restored, and it would no longer be both cores that restore."""
LOADED_TOKENS: Final = 32 * TOKENS_PER_BLOCK
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
        prompt = self.prompt()
        samples = []
        gc.collect()
        gc.disable()  # our own side's collector is not what is measured
        try:
            for number in range(count):
                seconds, verdict = self.scheduler.look_up(f"r{number}", prompt)
                if verdict.tokens != TOKENS:
                    raise AssertionError(f"a hit of {verdict.tokens} tokens, not {TOKENS}")
                samples.append(seconds * US)
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
    idle: list[list[float]] = []
    few: list[list[float]] = []
    loaded: list[list[float]] = []
    floors: list[float] = []
    speeds: list[float] = []
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
            floors.append(many_party.floor())
            idle.append(many_party.sample(scale.lookups))
            few.append(few_party.sample(scale.lookups))
            load.ask("go")
            loaded.append(many_party.sample(scale.lookups, LOADED_PAUSE_S))
            done = load.ask("pause")
            speeds.append(done["bytes"] / done["seconds"] / 1e9)
    return _rows(idle, few, loaded, floors, f"{resident} blocks resident", speeds)


def _rows(
    idle: list[list[float]],
    few: list[list[float]],
    loaded: list[list[float]],
    floors: list[float],
    resident: str,
    speeds: list[float],
) -> list[Row]:
    def at(rounds: list[list[float]], share: float) -> list[tuple[float, float]]:
        values = [percentile(samples, share) for samples in rounds]
        return list(zip(values, floors, strict=True))

    floor = "reference: one empty round trip and one hash over the same bytes"
    under = f"restoring {statistics.median(speeds):.1f} GB/s meanwhile, {resident}"
    scaling = [
        (percentile(ours, 0.5), percentile(reference, 0.5))
        for ours, reference in zip(idle, few, strict=True)
    ]
    worst = [(max(samples), floor) for samples, floor in zip(loaded, floors, strict=True)]
    return [
        absolute("lookup_32k_tokens_us_p50", "us", at(idle, 0.5), f"{resident}; {floor}"),
        absolute("lookup_32k_tokens_us_p99", "us", at(idle, 0.99), resident),
        absolute("lookup_32k_tokens_us_p50_loaded", "us", at(loaded, 0.5), under),
        absolute("lookup_32k_tokens_us_p99_loaded", "us", at(loaded, 0.99), under),
        folded(
            "lookup_32k_tokens_us_max_loaded",
            "us",
            [ours for ours, _ in worst],
            worst,
            note="the longest of each round: where a collector's pause would show",
        ),
        ratio("scaling", "us", scaling, note=f"{resident} against few"),
    ]


SUITE = Suite(
    name="lookup",
    summary="hashing and matching 32k tokens over the socket, idle, loaded, with a million blocks",
    rows=(
        "lookup_32k_tokens_us_p50",
        "lookup_32k_tokens_us_p99",
        "lookup_32k_tokens_us_p50_loaded",
        "lookup_32k_tokens_us_p99_loaded",
        "lookup_32k_tokens_us_max_loaded",
        "scaling",
    ),
    measure=measure,
)
