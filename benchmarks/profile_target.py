"""What is profiled: one path, over and over, for some seconds.

python -m benchmarks.profile_target save|restore|disk SECONDS FOLDER
"""

from __future__ import annotations

import select
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.blocks import BlockSet, namespace, settled
from benchmarks.host import host_settings
from benchmarks.lmcache import disk_settings
from benchmarks.scale import FULL, cores
from storage.compose import open_store


async def save(block_set: BlockSet, going: Callable[[], bool], _: Path) -> None:
    """Seal the set as new blocks, and make room again."""
    async with open_store(host_settings(FULL, cores(), 3)) as store:
        room = 100
        await settled()
        ready()
        while going():
            room += 1
            await block_set.moved_to(room).save(store)
            store.retire([namespace(room)])
            await store.reclaim()


async def restore(block_set: BlockSet, going: Callable[[], bool], _: Path) -> None:
    """Open the set from the host tier."""
    async with open_store(host_settings(FULL, cores(), 2)) as store:
        await block_set.save(store)
        await settled()
        ready()
        while going():
            await block_set.restore(store)


async def disk(block_set: BlockSet, going: Callable[[], bool], folder: Path) -> None:
    """Open two sets in turn from the disk: the host tier has room for one, so each is read anew."""
    settings = disk_settings(FULL, folder, 2)
    sets = (block_set, block_set.moved_to(2))
    async with open_store(settings) as store:
        for each in sets:
            await each.save(store)
        await store.flush()
    async with open_store(replace(settings, host_bytes=FULL.set_bytes * 5 // 4)) as store:
        await settled()
        ready()
        while going():
            for each in sets:
                await each.restore(store)


TARGETS: dict[str, Callable[[BlockSet, Callable[[], bool], Path], Awaitable[None]]] = {
    "save": save,
    "restore": restore,
    "disk": disk,
}


def ready() -> None:
    """From here on it is the path itself."""
    print("ready", flush=True)


def going() -> bool:
    """Whether to go on."""
    return not select.select([sys.stdin], [], [], 0)[0]


async def main(what: str, folder: Path) -> None:
    """Run one target."""
    await TARGETS[what](BlockSet.make(FULL), going, folder)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], Path(sys.argv[2])))
