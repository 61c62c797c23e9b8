"""What makes KV bytes compatible, and how they lie.

`KVFormat` is what the numbers mean: it enters the derivation of the lookup and data keys, so
that another format finds nothing. `Layout` is how the same numbers lie in memory: it is bound
into every block's header and AAD, and a layout that cannot be converted exactly is a miss.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from strongroom.canonical import encode_fields
from strongroom.errors import Misuse
from strongroom.limits import NAME_CHARS_MAX, SEGMENTS_MAX

FORMAT_MAGIC: Final = b"SRKF"
LAYOUT_MAGIC: Final = b"SRKL"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class KVFormat:
    """dtype, quantization and scales, layers, KV heads, head size, attention kind, rope."""

    dtype: str
    quantization: str
    layers: int
    kv_heads: int
    head_size: int
    attention: str
    rope: str

    def __post_init__(self) -> None:
        for name in ("dtype", "quantization", "attention", "rope"):
            _check_text(getattr(self, name), name)
        for name in ("layers", "kv_heads", "head_size"):
            _check_count(getattr(self, name), name)
        if self.layers > SEGMENTS_MAX:
            raise Misuse("too many layers", field="layers", limit=SEGMENTS_MAX)

    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes (docs/format.md section 3); 32 bytes."""
        return hashlib.sha256(
            encode_fields(
                FORMAT_MAGIC,
                VERSION,
                (
                    (1, self.dtype.encode()),
                    (2, self.quantization.encode()),
                    (3, struct.pack("<I", self.layers)),
                    (4, struct.pack("<I", self.kv_heads)),
                    (5, struct.pack("<I", self.head_size)),
                    (6, self.attention.encode()),
                    (7, self.rope.encode()),
                ),
            )
        ).digest()


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel shape, rank, page size and the order of bytes inside a page.

    `page_bytes` holds, for each layer, the bytes of one page; a block of n pages has one
    segment a layer, of n x page_bytes[layer] bytes.
    """

    order: str
    isa: str
    page_tokens: int
    page_bytes: tuple[int, ...]
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int

    def __post_init__(self) -> None:
        for name in ("order", "isa"):
            _check_text(getattr(self, name), name)
        _check_count(self.page_tokens, "page_tokens")
        if not 0 < len(self.page_bytes) <= SEGMENTS_MAX:
            raise Misuse("no layers or too many", field="page_bytes", limit=SEGMENTS_MAX)
        for size in self.page_bytes:
            _check_count(size, "page_bytes")
        for axis in ("tp", "pp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            _check_count(size, f"{axis}_size")
            if not 0 <= rank < size:
                raise Misuse(
                    f"{axis}_rank must be below {axis}_size", field=f"{axis}_rank", limit=size
                )

    @property
    def rank(self) -> int:
        """This shard's number among the pipeline x tensor parallel ranks."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def segment_bytes(self, tokens: int) -> tuple[int, ...]:
        """The segment length of each layer for a block of `tokens` tokens (whole pages)."""
        if tokens <= 0 or tokens % self.page_tokens:
            raise Misuse("a block holds whole pages", field="tokens", limit=self.page_tokens)
        pages = tokens // self.page_tokens
        return tuple(pages * size for size in self.page_bytes)

    def block_bytes(self, tokens: int) -> int:
        """Plaintext bytes of a block of `tokens` tokens, all layers."""
        return sum(self.segment_bytes(tokens))

    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes (docs/format.md section 3); 32 bytes."""
        shape = struct.pack("<IIII", self.tp_size, self.tp_rank, self.pp_size, self.pp_rank)
        return hashlib.sha256(
            encode_fields(
                LAYOUT_MAGIC,
                VERSION,
                (
                    (1, self.order.encode()),
                    (2, self.isa.encode()),
                    (3, struct.pack("<I", self.page_tokens)),
                    (4, struct.pack(f"<{len(self.page_bytes)}Q", *self.page_bytes)),
                    (5, shape),
                ),
            )
        ).digest()


def _check_text(value: str, field: str) -> None:
    if not 0 < len(value) <= NAME_CHARS_MAX:
        raise Misuse(f"{field} is empty or too long", field=field, limit=NAME_CHARS_MAX)


def _check_count(value: int, field: str) -> None:
    if not 0 < value < 2**32:
        raise Misuse(f"{field} must be from 1 to 2^32-1", field=field, limit=2**32 - 1)
