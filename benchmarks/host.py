"""Host tier: saving and restoring against bare AES-GCM and a plain copy of the same set."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import uvloop

from benchmarks.bare import BareSet
from benchmarks.blocks import BlockSet, namespace, settled
from benchmarks.rows import Row, ratio
from benchmarks.scale import Scale, cores
from benchmarks.suite import Bench, Suite
from storage.compose import MIB, StoreSettings, open_store
from storage.store import BlockStore

_PASSES = 6
_SMALL_PASSES = 32
"""One small set is too quick to time once: what counts is how fast it goes on."""


Side = Callable[[], Awaitable[float] | float]
"""One pass of one side; GB/s."""


def host_settings(scale: Scale, threads: int, sets: int = 1) -> StoreSettings:
    """A store without a disk, with room for `sets` working sets."""
    return StoreSettings(
        host_bytes=sets * scale.set_bytes * 3 // 2 + 64 * MIB,
        crypto_threads=threads,
    )


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    return uvloop.run(_measure(bench))


async def _measure(bench: Bench) -> list[Row]:
    scale = bench.scale
    restores: list[tuple[float, float]] = []
    copies: list[tuple[float, float]] = []
    saves: list[tuple[float, float]] = []
    small: list[tuple[float, float]] = []
    bare_small: list[tuple[float, float]] = []
    bench.say("host: making the sets")
    whole = BlockSet.make(scale)
    few = BlockSet.make(scale, scale.small_set_bytes, room=2)
    async with AsyncExitStack() as stack:
        bare = stack.enter_context(BareSet(scale.set_bytes, scale.segment_bytes, cores()))
        cached = stack.enter_context(BareSet(scale.small_set_bytes, scale.segment_bytes, 2))
        one, two, every = [
            await stack.enter_async_context(open_store(host_settings(scale, threads, sets)))
            for threads, sets in ((1, 3), (2, 1), (cores(), 2))
        ]
        for store, block_set in ((one, whole), (one, few), (two, few), (every, whole)):
            await block_set.save(store)
        await settled()
        await _warm_up(whole, one)

        rooms = itertools.count(100)  # a namespace that was retired takes no block any more

        async def saved() -> float:
            return await _save_once(whole, one, next(rooms))

        for _ in bench.rounds("host"):
            saves.append(await in_turn(saved, bare.encrypt))
            whole.blank()
            restores.append(await in_turn(lambda: whole.restore(one), bare.decrypt))
            whole.check()
            copies.append(await in_turn(lambda: whole.restore(every), bare.copy))
            whole.check()
            few.blank()
            small.append(
                await in_turn(
                    lambda: few.restore(two, _SMALL_PASSES), lambda: few.restore(one, _SMALL_PASSES)
                )
            )
            few.check()
            bare_small.append(
                await in_turn(
                    lambda: cached.decrypt(2, _SMALL_PASSES),
                    lambda: cached.decrypt(1, _SMALL_PASSES),
                )
            )
    gain = statistics.median(two / one for two, one in bare_small)
    return [
        ratio("host_restore_vs_gcm", "GB/s", restores),
        ratio("host_restore_vs_memcpy", "GB/s", copies),
        ratio(
            "host_restore_small_set_2_threads",
            "GB/s",
            small,
            note=f"bare decrypt_into gains {gain:.2f} from a second thread in the same rounds",
        ),
        ratio("host_save_vs_gcm", "GB/s", saves),
    ]


async def in_turn(ours: Side, reference: Side) -> tuple[float, float]:
    """One round: both sides in turn, several short passes of each, and who begins changes.

    Other users of the same memory, beyond this machine's own, slow it by half for tenths of a
    second at a time: in one long pass each, one side has the luck. Speeds are those of all the
    passes together.
    """
    speeds: tuple[list[float], list[float]] = ([], [])
    for number in range(_PASSES):
        for side in (0, 1) if number % 2 else (1, 0):
            speed = (ours, reference)[side]()
            speeds[side].append(speed if isinstance(speed, float) else await speed)
    return statistics.harmonic_mean(speeds[0]), statistics.harmonic_mean(speeds[1])


async def _warm_up(whole: BlockSet, store: BlockStore) -> None:
    """Touch the room that saves will use: a page's first touch is the kernel's time, not ours."""
    await _save_once(whole, store, 99)
    await _save_once(whole, store, 98)


async def _save_once(whole: BlockSet, store: BlockStore, room: int) -> float:
    """Save the set as new blocks and take them away again, outside the clock."""
    speed = await whole.moved_to(room).save(store)
    store.retire([namespace(room)])
    await store.reclaim()
    return speed


SUITE = Suite(
    name="host",
    summary="host tier to staging and back, against bare AES-GCM and a plain copy",
    rows=(
        "host_restore_vs_gcm",
        "host_restore_vs_memcpy",
        "host_restore_small_set_2_threads",
        "host_save_vs_gcm",
    ),
    measure=measure,
)
