"""The blocks of prompts, and the tiers that hold them: the production index and its eviction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.simulation.events import Clock
from benchmarks.traces import PAGE_TOKENS, Span
from storage.block import BlockAddress
from storage.index import Index
from storage.lifecycle import Place
from storage.retention import BlockKind, Retention
from strongroom.blocks import ROOT_PARENT, BlockId, Grid
from strongroom.identity import ComponentId, NamespaceId

_GRID: Final = Grid(256, PAGE_TOKENS)


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
            Retention.of(BlockKind(kind)),
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
