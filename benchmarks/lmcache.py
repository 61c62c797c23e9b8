"""Against LMCache: its plaintext host tier, and its encrypted disk tier, cold and warm."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from benchmarks import fio
from benchmarks.blocks import BlockSet, settled
from benchmarks.host import host_settings
from benchmarks.rows import Row, folded, ratio
from benchmarks.scale import Scale, cores
from benchmarks.suite import ROOT, Bench, Suite
from benchmarks.talk import Talk
from storage.compose import MIB, StoreSettings, open_store
from storage.store import BlockStore
from storage.tiers.limits import NvmeLimits
from storage.tiers.protocol import TierName

PYTHON: Final = ROOT / "build" / "peers" / "lmcache" / "bin" / "python"
DRIVER: Final = Path(__file__).parent / "peers" / "lmcache_driver.py"
DEPTH: Final = NvmeLimits().queue_depth
_PASSES: Final = 4
NEAR_THE_DISK: Final = 0.85
"""Of what fio reads: that near, a peer that reads from memory may be faster."""


def lacks() -> str:
    """How to install the peer, where it is not."""
    return "" if PYTHON.exists() else "LMCache is not installed: make peers"


@asynccontextmanager
async def peer(folder: Path) -> AsyncIterator[Talk]:
    """LMCache in a process of its own."""
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "LMCACHE_DISABLE_BANNER": "1",
        "PYTHONHASHSEED": "0",
    }
    with Talk([str(PYTHON), str(DRIVER)], folder / "lmcache.log", env) as talk:
        yield talk


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    return uvloop.run(_measure(bench))


async def _measure(bench: Bench) -> list[Row]:
    bench.say("LMCache: making the sets")
    block_set = BlockSet.make(bench.scale)
    with bench.folder("lmcache") as folder:
        async with peer(folder) as talk:
            size = bench.scale.block_bytes
            count = len(block_set.contexts)
            talk.ask("host", size=size, count=count)
            rows = await _host(bench, block_set, talk)
            talk.ask("disk", size=size, count=count, folder=str(folder / "peer"), workers=cores())
            return rows + await _disk(bench, block_set, talk, folder)


async def _host(bench: Bench, block_set: BlockSet, talk: Talk) -> list[Row]:
    async with open_store(host_settings(bench.scale, cores(), 2)) as store:
        await block_set.save(store)
        await settled()
        await block_set.restore(store)
        pairs = [
            await _host_round(block_set, store, talk) for _ in bench.rounds("LMCache LocalCPU")
        ]
    return [
        ratio(
            "host_restore_vs_lmcache_plain",
            "GB/s",
            pairs,
            note="the peer with one copying thread or all, whichever was faster",
        )
    ]


async def _host_round(block_set: BlockSet, store: BlockStore, talk: Talk) -> tuple[float, float]:
    """Ours, and the peer with one thread and with all, in turn, several short passes of each.

    The set is blanked before ours: by then the peer's threads, which spin for a while after their
    work, have given up the cores.
    """
    ours: list[float] = []
    theirs: dict[int, list[float]] = {threads: [] for threads in {1, cores()}}
    for _ in range(_PASSES):
        block_set.blank()
        ours.append(await block_set.restore(store))
        block_set.check()
        for threads, speeds in theirs.items():
            speeds.append(_get(block_set, talk, threads))
    return statistics.harmonic_mean(ours), max(
        statistics.harmonic_mean(speeds) for speeds in theirs.values()
    )


def _get(block_set: BlockSet, talk: Talk, threads: int) -> float:
    answer = talk.ask("host_get", threads=threads)
    return _speed(block_set, answer)


def _speed(block_set: BlockSet, answer: dict[str, object]) -> float:
    if answer["verified"] is not True:
        raise AssertionError("the peer did not give back what it was given")
    seconds = answer["seconds"]
    assert isinstance(seconds, float)
    return block_set.nbytes / seconds / 1e9


def disk_settings(scale: Scale, folder: Path, sets: int = 1) -> StoreSettings:
    """A store with both tiers, each with room for `sets` working sets."""
    return replace(
        host_settings(scale, cores(), sets),
        nvme_path=folder / "nvme",
        nvme_bytes=(sets + 1) * scale.set_bytes + 3 * scale.region_bytes + 64 * MIB,
        region_bytes=scale.region_bytes,
    )


async def _disk(bench: Bench, block_set: BlockSet, talk: Talk, folder: Path) -> list[Row]:
    settings = disk_settings(bench.scale, folder)
    async with open_store(settings) as store:
        await block_set.save(store)
        await store.flush()
    cold: list[tuple[float, float]] = []
    warm: list[tuple[float, float]] = []
    limits: list[float] = []
    dropped = True
    with fio.laid_out(folder, block_set.nbytes, bench.scale.block_bytes) as file:
        for _ in bench.rounds("LMCache fs_native + AES-256-GCM"):
            ours = await _restore_cold(settings, block_set)
            answer = talk.ask("disk_load", cold=True)
            dropped = dropped and bool(answer["dropped"])
            cold.append((ours, _speed(block_set, answer)))
            warm.append((ours, _speed(block_set, talk.ask("disk_load", cold=False))))
            limits.append(file.read(DEPTH).gbytes_per_s)
    limit = statistics.median(limits)
    ours = statistics.median(ours for ours, _ in cold)
    how = "page cache dropped whole" if dropped else "page cache dropped by file only"
    return [
        ratio("disk_restore_vs_lmcache_encrypted", "GB/s", cold, note=f"peer cold: {how}"),
        folded(
            "disk_restore_vs_lmcache_encrypted_warm",
            "GB/s",
            [ours / theirs for ours, theirs in warm],
            warm,
            excused=ours >= NEAR_THE_DISK * limit,
            note=f"peer from page cache, ours from the disk, where {file.how} reads "
            f"{limit:.2f} GB/s: ours is {ours / limit:.2f} of that",
        ),
    ]


async def _restore_cold(settings: StoreSettings, block_set: BlockSet) -> float:
    """Restore from the disk: the store is opened anew, so that its host tier is empty."""
    block_set.blank()
    async with open_store(settings) as store:
        await settled()
        if {store.tier_of(context.address) for context in block_set.contexts} != {TierName.NVME}:
            raise AssertionError("not everything is to come from the disk")
        speed = await block_set.restore(store)
    block_set.check()
    return speed


SUITE = Suite(
    name="lmcache",
    summary="host and disk restore against LMCache 0.5.6, plaintext and encrypted",
    rows=(
        "host_restore_vs_lmcache_plain",
        "disk_restore_vs_lmcache_encrypted",
        "disk_restore_vs_lmcache_encrypted_warm",
    ),
    measure=measure,
    lacks=lacks,
)
