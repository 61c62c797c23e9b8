"""Opens a store on a region directory in a fresh process, and says what that took.

    python -m benchmarks.recovery_process FOLDER NVME_BYTES

Prints JSON: seconds, blocks, bytes of resident memory gained, and objects that the garbage
collector gained. Memory is read after a collection, with the store open.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import uvloop

from benchmarks.small_records import REGION_BYTES
from storage.compose import MIB, StoreSettings, open_store

ARENA_BYTES = 16 * MIB
"""The host tier's, locked in memory as a whole."""


async def main(folder: Path, nvme_bytes: int) -> dict[str, float]:
    """Open, look, close."""
    # The first opening brings code and threads into memory: they are no block's.
    empty = folder.parent / f"{folder.name}-empty"
    async with open_store(_settings(empty, 4 * REGION_BYTES)):
        pass
    gc.collect()
    memory, objects = resident_bytes(), len(gc.get_objects())
    started = time.perf_counter()
    async with open_store(_settings(folder, nvme_bytes)) as store:
        seconds = time.perf_counter() - started
        gc.collect()
        return {
            "seconds": seconds,
            "blocks": sum(tier.blocks for tier in store.statistics().tiers),
            # A few records may fit into what was free already.
            "memory_bytes": max(1, resident_bytes() - memory - ARENA_BYTES),
            "objects": len(gc.get_objects()) - objects,
        }


def resident_bytes() -> int:
    """Memory of this process that is no file's."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _settings(folder: Path, nvme_bytes: int) -> StoreSettings:
    return StoreSettings(
        host_bytes=ARENA_BYTES, nvme_path=folder, nvme_bytes=nvme_bytes, region_bytes=REGION_BYTES
    )


if __name__ == "__main__":
    print(json.dumps(uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2])))))
