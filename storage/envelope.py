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
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from storage.block import BlockContext
from storage.header import TAG_BYTES, VERSION, Header, segment_spans, write_frame
from storage.memory import wipe
from strongroom.canonical import encode_fields
from strongroom.derivation import BLOCK_SALT_BYTES, BlockKey, block_key
from strongroom.errors import Corrupt, Missing, Misuse

AAD_MAGIC = b"SRSG"
_FIELD: Final = {tag: (tag, length) for tag, length in enumerate((32, 32, 32, 32, 4, 4, 4, 8), 1)}
"""Tag and length of each field of an AAD."""
_AAD_PREFIX: Final = struct.Struct("<4sH" + "BI32s" * 4 + "BII")
_AAD_REST: Final = struct.Struct("<BIIBIIBIQ")


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


def aad_prefix(context: BlockContext) -> bytes:
    """What the AADs of a block's segments begin with: all but index, count and length."""
    return _AAD_PREFIX.pack(
        AAD_MAGIC,
        VERSION,
        *_FIELD[1],
        bytes.fromhex(context.namespace),
        *_FIELD[2],
        context.format_digest,
        *_FIELD[3],
        context.layout_digest,
        *_FIELD[4],
        context.block,
        *_FIELD[5],
        context.rank,
    )


class Segment(NamedTuple):
    """What is the same for segment `index` of every block of one shape."""

    nonce: bytes
    plain: slice
    """Of the plaintext."""
    sealed: slice
    """Of the record, with the tag."""
    aad_rest: bytes
    """What follows `aad_prefix`."""


@lru_cache(maxsize=64)
def shape(segment_bytes: tuple[int, ...]) -> tuple[Segment, ...]:
    """The segments of a block of this shape: made once, since a model's blocks have few shapes and
    each step between two segments is a step in which a crypto thread does not decrypt.
    """
    count = len(segment_bytes)
    return tuple(
        Segment(
            nonce(index),
            slice(plain, plain + size),
            slice(sealed, sealed + size + TAG_BYTES),
            _AAD_REST.pack(*_FIELD[6], index, *_FIELD[7], count, *_FIELD[8], size),
        )
        for index, (plain, sealed, size) in enumerate(segment_spans(segment_bytes))
    )


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
        return cls(header, key, aad_prefix(context))

    def segments(self, indexes: Iterable[int], plaintext: memoryview, record: memoryview) -> None:
        """Encrypt `indexes` of the block in `plaintext` into their places in `record`.

        Threads may share one iterator of indexes: each takes the next one that is left. After an
        error nothing is left for the others.
        """
        _check_buffers(self.header, plaintext, record)
        segments = shape(self.header.context.segment_bytes)
        encrypt_into = AESGCM(self._key.key).encrypt_into
        prefix = self._aad
        left = iter(indexes)
        try:
            for index in left:
                number, plain, sealed, rest = segments[index]
                encrypt_into(number, plaintext[plain], prefix + rest, record[sealed])
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
        return cls(header, key, aad_prefix(header.context))

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
        segments = shape(self.header.context.segment_bytes)
        decrypt_into = AESGCM(self._key.key).decrypt_into
        prefix = self._aad
        left = iter(indexes)
        begun: list[slice] = []
        try:
            for index in left:
                number, plain, sealed, rest = segments[index]
                begun.append(plain)
                decrypt_into(number, record[sealed], prefix + rest, plaintext[plain])
                if opened is not None:
                    opened(index)
        except BaseException as error:
            _use_up(left)
            for plain in begun:
                wipe(plaintext[plain])
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
