"""A set of blocks for a store: what is saved, restored, and compared with what was saved."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from benchmarks.bare import memory_file
from benchmarks.scale import Scale
from storage.block import BlockContext
from storage.fence import Fence
from storage.header import record_bytes
from storage.onboard import Onboarding
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from strongroom.blocks import ROOT_PARENT, BlockId
from strongroom.derivation import NamespaceKeys, namespace_keys
from strongroom.errors import Overloaded
from strongroom.identity import ComponentId, NamespaceId

TENANT: Final = ComponentId("1" * 32)
KEYS: Final[NamespaceKeys] = namespace_keys(b"s" * 32, b"f" * 32)
TOKENS: Final = 256
AT_ONCE: Final = 2
"""Blocks that one load of the sidecar opens at a time."""


def namespace(number: int) -> NamespaceId:
    """A namespace's id, the same for the same number."""
    return NamespaceId(f"{number:064x}")


def chain(count: int, segment_bytes: tuple[int, ...], room: int = 1) -> list[BlockContext]:
    """`count` blocks, each the next one's parent, in namespace number `room`."""
    ids = [ROOT_PARENT, *(_block(room, number) for number in range(1, count + 1))]
    return [
        BlockContext(
            tenant=TENANT,
            namespace=namespace(room),
            block=ids[number],
            parent=ids[number - 1],
            position=(number - 1) * TOKENS,
            tokens=TOKENS,
            format_digest=b"f" * 32,
            layout_digest=b"l" * 32,
            rank=0,
            segment_bytes=segment_bytes,
        )
        for number in range(1, count + 1)
    ]


@dataclass(frozen=True, slots=True)
class BlockSet:
    """`set_bytes` of plaintext, block after block, in staging memory and beside it as it was."""

    contexts: Sequence[BlockContext]
    staging: memoryview
    original: memoryview

    @classmethod
    def make(cls, scale: Scale, set_bytes: int | None = None, room: int = 1) -> BlockSet:
        """A set of whole blocks; a set that is smaller than a block is one block of that size."""
        wanted = scale.set_bytes if set_bytes is None else set_bytes
        block_bytes = min(wanted, scale.block_bytes)
        segments = (scale.segment_bytes,) * (block_bytes // scale.segment_bytes)
        contexts = chain(wanted // block_bytes, segments, room)
        staging = memory_file(len(contexts) * block_bytes).view[: len(contexts) * block_bytes]
        return cls(contexts, staging, memoryview(bytes(staging)))

    @property
    def nbytes(self) -> int:
        return len(self.staging)

    @property
    def record_bytes(self) -> int:
        """Bytes of every record together, as a tier holds them."""
        return sum(record_bytes(context.segment_bytes) for context in self.contexts)

    def moved_to(self, room: int) -> BlockSet:
        """The same bytes as blocks of another namespace."""
        contexts = chain(len(self.contexts), self.contexts[0].segment_bytes, room)
        return BlockSet(contexts, self.staging, self.original)

    def part(self, number: int) -> memoryview:
        """The plaintext of one block."""
        size = self.contexts[0].plaintext_bytes
        return self.staging[number * size : (number + 1) * size]

    def blank(self) -> None:
        """Overwrite staging, so that what is read next was restored."""
        self.staging[:] = bytes(self.nbytes)

    def check(self) -> None:
        """Raise unless staging holds what was saved."""
        if self.staging != self.original:
            raise AssertionError("what was restored is not what was saved")

    async def save(self, store: BlockStore) -> float:
        """Save all, one after the other; GB/s."""
        fence = Fence()
        started = time.perf_counter()
        for number, context in enumerate(self.contexts):
            await store.save(context, KEYS, self.part(number), fence)
        return self._speed(started)

    async def restore(self, store: BlockStore, passes: int = 1) -> float:
        """Restore all as the sidecar's loads do: two blocks at once, read ahead; GB/s.

        `passes` times from the host tier without a stop, for a set too small to be timed once.
        """
        fence = Fence()
        addresses = [context.address for context in self.contexts]
        started = time.perf_counter()
        if store.slowest_tier(addresses) is TierName.NVME:
            async with store.onboard(addresses, fence) as onboarding:
                await self._open_all(store, fence, onboarding)
        else:
            await self._open_all(store, fence, None, passes)
        return passes * self._speed(started)

    async def _open_all(
        self, store: BlockStore, fence: Fence, onboarding: Onboarding | None, passes: int = 1
    ) -> None:
        waiting = iter(list(enumerate(self.contexts)) * passes)

        async def opener() -> None:
            for number, context in waiting:
                if onboarding is not None:
                    # Without host room it is read into a buffer instead, as a load does.
                    with suppress(Overloaded):
                        await onboarding.ready(number)
                await store.load(context, KEYS, self.part(number), fence)
                if onboarding is not None:
                    onboarding.release(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(opener())

    def _speed(self, started: float) -> float:
        return self.nbytes / (time.perf_counter() - started) / 1e9


async def settled() -> None:
    """Return when the stores' arenas are locked and touched, which goes on beside the first use."""
    for thread in threading.enumerate():
        if thread.name == "strongroom-settle":
            await asyncio.to_thread(thread.join)


def _block(room: int, number: int) -> BlockId:
    return BlockId(room.to_bytes(16, "big") + number.to_bytes(16, "big"))
