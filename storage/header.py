"""The record: one sealed block as it lies in every tier (docs/format.md section 5).

    [ header, 4096 bytes | segment 0 ‖ tag | segment 1 ‖ tag | ... | zeros | tail, 64 bytes ]

Rules:
- A record is a whole number of 4096-byte pages, so that it goes from arena to disk and back
  as it is. Ciphertext segments lie back to back; their offsets follow from the segment table.
- Header bytes 0-3967 belong to the record and never change once it is sealed. Bytes
  3968-4095 say where on a disk the record was put (`Placement`) and are zero elsewhere.
- Checksums find accidents, no more. What is true is decided by the key commitment and GCM
  (`storage.envelope`); the header's fields are compared with the caller's context first.
- The tail repeats the header's checksum: a header without its tail is a torn write.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from storage.block import BlockContext
from storage.memory import pages
from strongroom.blocks import BlockId
from strongroom.errors import Corrupt, Misuse
from strongroom.identity import ComponentId, NamespaceId
from strongroom.limits import SEGMENT_BYTES_MAX, SEGMENTS_MAX

VERSION: Final = 1
HEADER_BYTES: Final = 4096
TAG_BYTES: Final = 16
TAIL_BYTES: Final = 64
MAGIC: Final = b"SRBLOCK\0"
GONE_MAGIC: Final = b"SRGONE\0\0"
PRIORITY_MAX: Final = 100

_TAIL_MAGIC: Final = b"SRTAIL\0\0"
_PLACE_MAGIC: Final = b"SRPLACE\0"
_FIXED = struct.Struct("<8sHHIQQQ16s32s32s32sQII32s32s16s32s")
_TABLE_AT: Final = 280
_CHECKSUM_AT: Final = 3936
_PLACE_AT: Final = 3968
_PLACE = struct.Struct("<8s16sIIQQQ")
_PLACE_CHECKSUM_AT: Final = _PLACE_AT + 96
_TAIL = struct.Struct("<8sQ16x32s")
_BLANK: Final = bytes(HEADER_BYTES)
_GONE = struct.Struct("<8sHHIQ")
_RANK = struct.Struct("<I")


class Fault(StrEnum):
    """Why bytes are not a record that may be used."""

    BLANK = "blank"
    GONE = "gone"
    """A record that was removed; its length is still good."""
    MAGIC = "magic"
    FUTURE = "future"
    CORRUPT = "corrupt"
    TORN = "torn"
    FOREIGN = "foreign"
    STALE = "stale"


class BadRecord(Corrupt):
    """Bytes that were to be a record are not one; `fault` says why."""

    code = "corrupt"

    def __init__(self, fault: Fault, message: str, *, record_bytes: int = 0) -> None:
        super().__init__(message)
        self.fault = fault
        self.record_bytes = record_bytes
        """The record's length where it can still be believed, else 0."""


@dataclass(frozen=True, slots=True)
class Header:
    """One sealing of one block."""

    context: BlockContext
    salt: bytes
    commitment: bytes
    sequence: int
    """Rises with every sealing in one store; of two records of a block the higher counts."""

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.context.segment_bytes)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where on a disk a record was put: a record that is found elsewhere is not taken."""

    store: bytes
    """16 bytes, drawn when the directory was made."""
    region: int
    generation: int
    offset: int
    order: int
    """Rises with every write of one store."""
    priority: int | None = None
    """The block's retention priority; None where the default holds."""


@lru_cache(maxsize=64)
def record_bytes(segment_bytes: tuple[int, ...]) -> int:
    """The length of the record of a block with these plaintext segments; whole pages."""
    body = sum(segment_bytes) + TAG_BYTES * len(segment_bytes)
    return pages(HEADER_BYTES + body + TAIL_BYTES)


def segment_spans(segment_bytes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """For each segment: offset in the plaintext, offset in the record, plaintext length."""
    plain = 0
    sealed = HEADER_BYTES
    for size in segment_bytes:
        yield plain, sealed, size
        plain += size
        sealed += size + TAG_BYTES


def write_frame(record: memoryview, header: Header) -> None:
    """Write header, padding and tail around the segments of `record`; placement stays zero."""
    context = header.context
    if len(record) != header.record_bytes:
        raise Misuse("the buffer is not the record's length", field="record")
    head = bytearray(HEADER_BYTES)
    _FIXED.pack_into(
        head,
        0,
        MAGIC,
        VERSION,
        0,
        len(context.segment_bytes),
        header.record_bytes,
        context.plaintext_bytes,
        header.sequence,
        bytes.fromhex(context.tenant),
        bytes.fromhex(context.namespace),
        context.block,
        context.parent,
        context.position,
        context.tokens,
        context.rank,
        context.format_digest,
        context.layout_digest,
        header.salt,
        header.commitment,
    )
    struct.pack_into(f"<{len(context.segment_bytes)}I", head, _TABLE_AT, *context.segment_bytes)
    checksum = hashlib.sha256(memoryview(head)[:_CHECKSUM_AT]).digest()
    head[_CHECKSUM_AT : _CHECKSUM_AT + 32] = checksum
    record[:HEADER_BYTES] = head
    body = sum(context.segment_bytes) + TAG_BYTES * len(context.segment_bytes)
    padding = record[HEADER_BYTES + body : -TAIL_BYTES]
    padding[:] = bytes(len(padding))
    record[-TAIL_BYTES:] = _TAIL.pack(_TAIL_MAGIC, header.sequence, checksum)


def read_header(block: memoryview) -> Header:
    """The header in the first 4096 bytes of `block`; raises `BadRecord`."""
    if len(block) < HEADER_BYTES:
        raise BadRecord(Fault.TORN, "cut short inside the header")
    head = block[:HEADER_BYTES]
    _check_kind(head)
    if hashlib.sha256(head[:_CHECKSUM_AT]).digest() != head[_CHECKSUM_AT:_PLACE_AT]:
        raise BadRecord(Fault.CORRUPT, "the header's checksum does not match")
    fields = _FIXED.unpack_from(head)
    count, length, plaintext = fields[3:6]
    if not 0 < count <= SEGMENTS_MAX or fields[2]:
        raise BadRecord(Fault.CORRUPT, "flags or segment count out of range")
    shape = _shape(bytes(head[_TABLE_AT : _TABLE_AT + 4 * count]))
    try:
        context = BlockContext(
            tenant=ComponentId(fields[7].hex()),
            namespace=NamespaceId(fields[8].hex()),
            block=BlockId(fields[9]),
            parent=BlockId(fields[10]),
            position=fields[11],
            tokens=fields[12],
            rank=fields[13],
            format_digest=fields[14],
            layout_digest=fields[15],
            segment_bytes=shape.segment_bytes,
        )
    except Misuse as error:
        raise BadRecord(Fault.CORRUPT, "a header field is out of range") from error
    if shape.record_bytes != length or shape.plaintext_bytes != plaintext:
        raise BadRecord(Fault.CORRUPT, "the header's lengths contradict its segment table")
    return Header(context, salt=fields[16], commitment=fields[17], sequence=fields[6])


class _Shape(NamedTuple):
    """What a segment table says."""

    segment_bytes: tuple[int, ...]
    record_bytes: int
    plaintext_bytes: int


@lru_cache(maxsize=64)
def _shape(table: bytes) -> _Shape:
    """The blocks of one layout have few tables, and these are long."""
    sizes = struct.unpack(f"<{len(table) // 4}I", table)
    return _Shape(sizes, record_bytes(sizes), sum(sizes))


class Facts(NamedTuple):
    """What recovery keeps of a header: a tuple, since a million of them are read at a start."""

    address: bytes
    """The block's address, packed."""
    parent: bytes
    tenant: bytes
    namespace: bytes
    record_bytes: int
    sequence: int
    checksum: bytes


def read_facts(block: memoryview) -> Facts:
    """As `read_header`, with the same refusals, a third of its time and less in the answer."""
    head = block[:HEADER_BYTES]
    _check_kind(head)
    checksum = hashlib.sha256(head[:_CHECKSUM_AT]).digest()
    if checksum != head[_CHECKSUM_AT:_PLACE_AT]:
        raise BadRecord(Fault.CORRUPT, "the header's checksum does not match")
    fields = _FIXED.unpack_from(head)
    count = fields[3]
    if not 0 < count <= SEGMENTS_MAX or fields[2]:
        raise BadRecord(Fault.CORRUPT, "flags or segment count out of range")
    sizes = struct.unpack_from(f"<{count}I", head, _TABLE_AT)
    if not fields[12] or min(sizes) == 0 or max(sizes) > SEGMENT_BYTES_MAX:
        raise BadRecord(Fault.CORRUPT, "a header field is out of range")
    plaintext = sum(sizes)
    length = pages(HEADER_BYTES + plaintext + TAG_BYTES * count + TAIL_BYTES)
    if fields[4] != length or fields[5] != plaintext:
        raise BadRecord(Fault.CORRUPT, "the header's lengths contradict its segment table")
    address = fields[9] + _RANK.pack(fields[13])
    return Facts(address, fields[10], fields[7], fields[8], length, fields[6], checksum)


def check_tail(facts: Facts, tail: memoryview) -> None:
    """Raise `BadRecord(TORN)` unless `tail` (64 bytes) ends the record that `facts` are of."""
    magic, sequence, checksum = _TAIL.unpack(tail)
    if magic != _TAIL_MAGIC or sequence != facts.sequence or checksum != facts.checksum:
        raise BadRecord(Fault.TORN, "the record's tail is missing")


def write_placement(head: memoryview, placement: Placement) -> None:
    """Fill the placement area of a header block that is about to be written to a disk."""
    head[_PLACE_AT:HEADER_BYTES] = bytes(HEADER_BYTES - _PLACE_AT)
    _PLACE.pack_into(
        head,
        _PLACE_AT,
        _PLACE_MAGIC,
        placement.store,
        placement.region,
        0 if placement.priority is None else placement.priority + 1,
        placement.generation,
        placement.offset,
        placement.order,
    )
    head[_PLACE_CHECKSUM_AT:HEADER_BYTES] = _placement_checksum(head)


def clear_placement(record: memoryview) -> None:
    """Make a record that was read from a disk what it was before: placement all zeros."""
    record[_PLACE_AT:HEADER_BYTES] = bytes(HEADER_BYTES - _PLACE_AT)


def read_placement(head: memoryview) -> Placement:
    """The placement of a header block; raises `BadRecord`."""
    if head[_PLACE_CHECKSUM_AT:HEADER_BYTES] != _placement_checksum(head):
        raise BadRecord(Fault.CORRUPT, "the placement's checksum does not match")
    magic, store, region, kept, generation, offset, order = _PLACE.unpack_from(head, _PLACE_AT)
    if magic != _PLACE_MAGIC or kept > PRIORITY_MAX + 1:
        raise BadRecord(Fault.CORRUPT, "not a placement")
    return Placement(store, region, generation, offset, order, kept - 1 if kept else None)


def gone_block(length: int) -> bytes:
    """A header block that says: a record of `length` bytes was removed here."""
    head = bytearray(HEADER_BYTES)
    _GONE.pack_into(head, 0, GONE_MAGIC, VERSION, 0, 0, length)
    head[_CHECKSUM_AT:_PLACE_AT] = hashlib.sha256(memoryview(head)[:_CHECKSUM_AT]).digest()
    return bytes(head)


def _check_kind(head: memoryview) -> None:
    magic = bytes(head[:8])
    if magic == GONE_MAGIC:
        checksum = hashlib.sha256(head[:_CHECKSUM_AT]).digest()
        length = _GONE.unpack_from(head)[4]
        believed = length if checksum == head[_CHECKSUM_AT:_PLACE_AT] else 0
        raise BadRecord(Fault.GONE, "the record was removed", record_bytes=believed)
    if magic != MAGIC:
        blank = head == _BLANK
        raise BadRecord(Fault.BLANK if blank else Fault.MAGIC, "no record starts here")
    version = int.from_bytes(head[8:10], "little")
    if version > VERSION:
        raise BadRecord(Fault.FUTURE, f"record format {version} is newer than {VERSION}")
    if version != VERSION:
        raise BadRecord(Fault.CORRUPT, f"there is no record format {version}")


def _placement_checksum(head: memoryview) -> bytes:
    digest = hashlib.sha256(head[_CHECKSUM_AT:_PLACE_AT])
    digest.update(head[_PLACE_AT:_PLACE_CHECKSUM_AT])
    return digest.digest()
