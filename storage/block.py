"""What a caller says of a block: where it is looked up, and all that its envelope binds."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from strongroom.blocks import BlockId
from strongroom.errors import Misuse
from strongroom.identity import ComponentId, NamespaceId, parse_component_id, parse_namespace_id
from strongroom.limits import SEGMENT_BYTES_MAX, SEGMENTS_MAX

_RANK: Final = struct.Struct("<I")


def pack_rank(rank: int) -> bytes:
    """What follows a block's id in the packed address of its shard on this rank."""
    return _RANK.pack(rank)


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """One rank's shard of one block."""

    block: BlockId
    rank: int

    def pack(self) -> bytes:
        """The address as 36 bytes: block id, then rank as u32 little-endian."""
        return self.block + _RANK.pack(self.rank)  # and no call: a load packs several times

    @classmethod
    def unpack(cls, packed: bytes) -> BlockAddress:
        """The address that `pack` made these 36 bytes of."""
        return cls(BlockId(packed[:-4]), _RANK.unpack(packed[-4:])[0])


@dataclass(frozen=True, slots=True)
class BlockContext:
    """Everything that a block's header carries and its AAD binds, except keys and salt.

    `segment_bytes` holds the plaintext length of each layer, in order. Raises `Misuse` for a
    width, a count or an id that docs/format.md section 5 does not allow.
    """

    tenant: ComponentId
    namespace: NamespaceId
    block: BlockId
    parent: BlockId
    position: int
    tokens: int
    format_digest: bytes
    layout_digest: bytes
    rank: int
    segment_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        parse_component_id(self.tenant, "tenant")
        parse_namespace_id(self.namespace, "namespace")
        for name in ("block", "parent", "format_digest", "layout_digest"):
            if len(getattr(self, name)) != 32:
                raise Misuse(f"{name} has 32 bytes", field=name, limit=32)
        if not 0 <= self.position < 2**64:
            raise Misuse("position is a u64", field="position", limit=2**64 - 1)
        if not 0 < self.tokens < 2**32:
            raise Misuse("a block holds at least one token", field="tokens", limit=2**32 - 1)
        if not 0 <= self.rank < 2**32:
            raise Misuse("rank is a u32", field="rank", limit=2**32 - 1)
        _check_segments(self.segment_bytes)

    @property
    def address(self) -> BlockAddress:
        return BlockAddress(self.block, self.rank)

    @property
    def plaintext_bytes(self) -> int:
        """Bytes of all segments together: the length of the block in staging."""
        return sum(self.segment_bytes)


@lru_cache(maxsize=64)
def _check_segments(segment_bytes: tuple[int, ...]) -> None:
    """Once for each shape: the blocks of one layout have few."""
    if not 0 < len(segment_bytes) <= SEGMENTS_MAX:
        raise Misuse("no segments or too many", field="segment_bytes", limit=SEGMENTS_MAX)
    for size in segment_bytes:
        if not 0 < size <= SEGMENT_BYTES_MAX:
            raise Misuse(
                "a segment is empty or too large",
                field="segment_bytes",
                limit=SEGMENT_BYTES_MAX,
            )
