"""Builders for the storage tests: contexts, keys, records, all from a seed."""

from __future__ import annotations

import random  # noqa: TID251 - a seeded generator, so that a failure repeats
from dataclasses import dataclass, field

from storage.block import BlockContext
from storage.envelope import Sealer
from storage.header import Header, record_bytes
from storage.memory import aligned
from strongroom.blocks import ROOT_PARENT, BlockId
from strongroom.derivation import NamespaceKeys, namespace_keys
from strongroom.identity import ComponentId, NamespaceId

KEYS = namespace_keys(b"s" * 32, b"f" * 32)
OTHER_KEYS = namespace_keys(b"o" * 32, b"f" * 32)
CANARY = b"CANARY-PLAINTEXT-NEVER-IN-A-FILE"


def component(number: int) -> ComponentId:
    return ComponentId(f"{number:032x}")


def namespace(number: int) -> NamespaceId:
    return NamespaceId(f"{number:064x}")


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(32, "big"))


def context(
    number: int = 1,
    *,
    parent: int | None = None,
    tenant: int = 1,
    room: int = 1,
    rank: int = 0,
    segments: tuple[int, ...] = (5000, 3000),
    layout: bytes = b"l" * 32,
) -> BlockContext:
    return BlockContext(
        tenant=component(tenant),
        namespace=namespace(room),
        block=block(number),
        parent=ROOT_PARENT if parent is None else block(parent),
        position=0,
        tokens=32,
        format_digest=b"f" * 32,
        layout_digest=layout,
        rank=rank,
        segment_bytes=segments,
    )


def plaintext(wanted: BlockContext) -> memoryview:
    """The block's content, told by its id; begins with the canary."""
    noise = random.Random(wanted.block).randbytes(wanted.plaintext_bytes)
    return memoryview(bytearray((CANARY + noise)[: wanted.plaintext_bytes]))


def sealed(
    wanted: BlockContext, keys: NamespaceKeys = KEYS, sequence: int = 1
) -> tuple[Header, memoryview]:
    record = aligned(record_bytes(wanted.segment_bytes))
    sealer = Sealer.begin(wanted, keys.data, sequence)
    sealer.segments(range(len(wanted.segment_bytes)), plaintext(wanted), record)
    sealer.finish(record)
    return sealer.header, record


@dataclass
class FakeClock:
    """A boot clock that moves when told."""

    now_ns: int = 10**9
    ticks: list[int] = field(default_factory=list)

    def __call__(self) -> int:
        return self.now_ns

    def advance_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
