"""Sealing and opening: per-block key, AES-256-GCM segments, key commitment.

Rules (docs/format.md section 5):
- The key belongs to one sealing: HKDF over block id and a fresh 128-bit salt. So nonces may
  count segments, and two writers of one block id never share a (key, nonce).
- The AAD of a segment binds format version, identity fingerprint, KV format and layout, block
  id, rank, segment index, segment count and plaintext length.
- The commitment is compared in constant time before anything is opened: one ciphertext never
  opens under two keys.
- Plaintext goes straight into the caller's buffer. `decrypt_into` leaves plaintext there on a
  bad tag (ANCHORS), so the segment's output is wiped before the error leaves this module.
- Everything here is pure CPU work on memoryviews, without a lock: workers call it.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from storage.block import BlockContext
from storage.header import TAG_BYTES, VERSION, Header, segment_spans, write_frame
from storage.memory import wipe
from strongroom.canonical import encode_fields
from strongroom.derivation import BLOCK_SALT_BYTES, BlockKey, block_key
from strongroom.errors import Corrupt, Missing, Misuse

AAD_MAGIC = b"SRSG"
_FIELD_HEAD_BYTES: Final = 5
_LENGTH_AT: Final = -8
_INDEX_AT: Final = _LENGTH_AT - _FIELD_HEAD_BYTES - 4 - _FIELD_HEAD_BYTES - 4
"""Where a segment's length and its index stand in its AAD, counted from the end."""
_AAD: Final = struct.Struct("<4sH" + "BI32s" * 4 + "BII" * 3 + "BIQ")
_FIELD: Final = {tag: (tag, length) for tag, length in enumerate((32, 32, 32, 32, 4, 4, 4, 8), 1)}
_AAD_HEAD: Final = (AAD_MAGIC, VERSION, *_FIELD[1])
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


def segment_aad(context: BlockContext, index: int) -> bytes:
    """What segment `index` of a block is bound to (docs/format.md section 5.3)."""
    return encode_fields(
        AAD_MAGIC,
        VERSION,
        (
            (1, bytes.fromhex(context.namespace)),
            (2, context.format_digest),
            (3, context.layout_digest),
            (4, context.block),
            (5, struct.pack("<I", context.rank)),
            (6, struct.pack("<I", index)),
            (7, struct.pack("<I", len(context.segment_bytes))),
            (8, struct.pack("<Q", context.segment_bytes[index])),
        ),
    )


def _first_aad(context: BlockContext) -> bytes:
    """`segment_aad` of segment 0, written in one step: a restore needs it for every block."""
    return _AAD.pack(
        *_AAD_HEAD,
        bytes.fromhex(context.namespace),
        *_FIELD[2],
        context.format_digest,
        *_FIELD[3],
        context.layout_digest,
        *_FIELD[4],
        context.block,
        *_FIELD[5],
        context.rank,
        *_FIELD[6],
        0,
        *_FIELD[7],
        len(context.segment_bytes),
        *_FIELD[8],
        context.segment_bytes[0],
    )


class SegmentAads:
    """`segment_aad` of one block for one thread: only index and length are written anew."""

    def __init__(self, first: bytes) -> None:
        self._bytes = bytearray(first)
        self._index_at = len(first) + _INDEX_AT
        self._length_at = len(first) + _LENGTH_AT

    def of(self, index: int, length: int) -> bytearray:
        """The AAD of segment `index`, good until the next call."""
        _U32.pack_into(self._bytes, self._index_at, index)
        _U64.pack_into(self._bytes, self._length_at, length)
        return self._bytes


@lru_cache(maxsize=64)
def _spans(segment_bytes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """The blocks of one layout have few shapes."""
    return tuple(segment_spans(segment_bytes))


@dataclass(frozen=True, slots=True, repr=False)
class Sealer:
    """One sealing in progress. Segments may be sealed in any order, each once, by any thread."""

    header: Header
    _key: BlockKey
    _aad: bytes

    @classmethod
    def begin(cls, context: BlockContext, data_key: bytes, sequence: int) -> Sealer:
        """Draw a salt and derive the block's key."""
        salt = secrets.token_bytes(BLOCK_SALT_BYTES)
        key = block_key(data_key, context.block, salt)
        header = Header(context, salt, key.commitment, sequence)
        return cls(header, key, _first_aad(context))

    def segments(self, indexes: Iterable[int], plaintext: memoryview, record: memoryview) -> None:
        """Encrypt `indexes` of the block in `plaintext` into their places in `record`.

        Threads may share one iterator of indexes: each takes the next one that is left. After an
        error nothing is left for the others.
        """
        _check_buffers(self.header, plaintext, record)
        spans = _spans(self.header.context.segment_bytes)
        encrypt_into = AESGCM(self._key.key).encrypt_into
        aads = SegmentAads(self._aad)
        left = iter(indexes)
        try:
            for index in left:
                plain, sealed, size = spans[index]
                encrypt_into(
                    nonce(index),
                    plaintext[plain : plain + size],
                    aads.of(index, size),
                    record[sealed : sealed + size + TAG_BYTES],
                )
        except BaseException:
            _use_up(left)
            raise

    def finish(self, record: memoryview) -> None:
        """Frame the record: header, padding and tail. Last, so that a header means sealed."""
        write_frame(record, self.header)


@dataclass(frozen=True, slots=True, repr=False)
class Opener:
    """One opening in progress; made only when the header matches and the commitment holds."""

    header: Header
    _key: BlockKey
    _aad: bytes

    @classmethod
    def begin(cls, header: Header, expected: BlockContext, data_key: bytes) -> Opener:
        """Check `header` against what the caller expects.

        Raises `Corrupt`, or `Missing` where all but the layout is as expected: a layout that
        cannot be converted exactly is a miss, and nobody's damage.
        """
        if header.context != expected:
            relaid = replace(
                header.context,
                layout_digest=expected.layout_digest,
                segment_bytes=expected.segment_bytes,
            )
            if relaid == expected:
                raise Missing("resident in another layout")
            raise Corrupt("the record is another block's")
        key = block_key(data_key, expected.block, header.salt)
        if not hmac.compare_digest(key.commitment, header.commitment):
            raise Corrupt("the record was sealed under another key")
        return cls(header, key, _first_aad(header.context))

    def segments(
        self,
        indexes: Iterable[int],
        record: memoryview,
        plaintext: memoryview,
        opened: Callable[[int], None] | None = None,
    ) -> None:
        """Decrypt `indexes` into their places in `plaintext`; `opened` hears of each good one.

        Threads may share one iterator of indexes, as in `Sealer.segments`. Raises `Corrupt` on a
        bad tag; what this call had already put out is wiped, and nothing is left for the others.
        """
        _check_buffers(self.header, plaintext, record)
        spans = _spans(self.header.context.segment_bytes)
        decrypt_into = AESGCM(self._key.key).decrypt_into
        aads = SegmentAads(self._aad)
        left = iter(indexes)
        begun: list[int] = []
        try:
            for index in left:
                plain, sealed, size = spans[index]
                begun.append(index)
                decrypt_into(
                    nonce(index),
                    record[sealed : sealed + size + TAG_BYTES],
                    aads.of(index, size),
                    plaintext[plain : plain + size],
                )
                if opened is not None:
                    opened(index)
        except BaseException as error:
            _use_up(left)
            for index in begun:
                plain, _, size = spans[index]
                wipe(plaintext[plain : plain + size])
            if isinstance(error, InvalidTag):
                raise Corrupt("a segment does not open") from error
            raise


def nonce(index: int) -> bytes:
    """The 96-bit nonce of segment `index`: the index itself, big-endian."""
    return index.to_bytes(12, "big")


def _check_buffers(header: Header, plaintext: memoryview, record: memoryview) -> None:
    if len(plaintext) != header.context.plaintext_bytes:
        raise Misuse("staging is not the block's length", field="staging")
    if len(record) != header.record_bytes:
        raise Misuse("the buffer is not the record's length", field="record")


def _use_up(indexes: Iterator[int]) -> None:
    for _ in indexes:
        pass
