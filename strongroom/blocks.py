"""Where blocks begin and end, and the ids that chain them.

Rules (docs/format.md section 4):
- Blocks hold whole pages, at most `tokens_per_block` tokens, and start on the grid of their
  region. A region ends at the last whole page of its span; the grid starts anew there. The
  page that straddles a span's end belongs to the next region, whose labels it carries.
- Tokens after the last whole page are never stored.
- `id_i = BLAKE2b-256(key, parent ‖ position ‖ token count ‖ token ids ‖ extras)`, keyed with
  the lookup key in force, so that nobody without the key can compute or compare ids.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NewType

from strongroom.errors import Misuse
from strongroom.limits import EXTRAS_BYTES_MAX, PROMPT_TOKENS_MAX, TOKEN_ID_MAX

BlockId = NewType("BlockId", bytes)
"""32 bytes."""

ROOT_PARENT: Final = BlockId(bytes(32))
TOKEN_BYTES: Final = 4
_PLACE: Final = struct.Struct("<QI")
_PERSON: Final = b"strongroom/block"
_PROMPT_DOMAIN: Final = b"strongroom/prompt/v1"


@dataclass(frozen=True, slots=True)
class Extent:
    """Tokens `[start, end)` of a prompt that form one block, inside span `span`."""

    start: int
    end: int
    span: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Grid:
    """How a prompt is cut: block and page size, both in tokens."""

    tokens_per_block: int
    page_tokens: int

    def __post_init__(self) -> None:
        if self.page_tokens <= 0:
            raise Misuse("a page holds at least one token", field="page_tokens")
        if self.tokens_per_block <= 0 or self.tokens_per_block % self.page_tokens:
            raise Misuse(
                "a block must be a whole number of pages",
                field="tokens_per_block",
                limit=self.page_tokens,
            )

    def whole_pages(self, tokens: int) -> int:
        """The largest number of tokens up to `tokens` that fills whole pages."""
        return tokens - tokens % self.page_tokens

    def plan(self, span_ends: Sequence[int], tokens: int) -> tuple[Extent, ...]:
        """Cut the first `tokens` tokens of a prompt whose spans end at `span_ends`.

        Tokens beyond the last span belong to no span and are not stored.
        """
        size = self.tokens_per_block
        return tuple(
            Extent(start, min(start + size, stop), span)
            for span, first, stop in self.regions(span_ends, tokens)
            for start in range(first, stop, size)
        )

    def regions(self, span_ends: Sequence[int], tokens: int) -> Iterator[tuple[int, int, int]]:
        """The same cut by spans: span, first token and end of each region that holds a block.

        Regions follow one another; in each a block begins at every `tokens_per_block`th token.
        """
        start = 0
        for span, end in enumerate(span_ends):
            cut = self.whole_pages(min(end, tokens))
            if start < cut:
                yield span, start, cut
                start = cut

    def shorter(self, extent: Extent) -> Iterator[Extent]:
        """The shorter blocks that may stand where `extent` missed, longest first."""
        for end in range(extent.end - self.page_tokens, extent.start, -self.page_tokens):
            yield Extent(extent.start, end, extent.span)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian, back to back."""
    if len(token_ids) > PROMPT_TOKENS_MAX:
        raise Misuse("too many tokens", field="tokens", limit=PROMPT_TOKENS_MAX)
    if isinstance(token_ids, bytes | bytearray | memoryview):
        raise Misuse("token ids are integers, not bytes", field="tokens")
    try:
        packed = array.array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise Misuse(
            "token ids are integers from 0 to 2^32-1", field="tokens", limit=TOKEN_ID_MAX
        ) from error
    if packed.itemsize != 4:  # pragma: no cover - no supported platform has another width
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def prompt_digest(packed_tokens: bytes) -> bytes:
    """SHA-256 over a prompt's packed token ids, with its own domain and count; 32 bytes."""
    count = struct.pack("<I", _count(packed_tokens))
    return hashlib.sha256(_PROMPT_DOMAIN + count + packed_tokens).digest()


def block_id(
    lookup_key: bytes, parent: BlockId, position: int, packed_tokens: bytes, extras: bytes = b""
) -> BlockId:
    """The id of the block whose first token stands at `position`; see the module's rules."""
    if len(parent) != 32:
        raise Misuse("a block id has 32 bytes", field="parent", limit=32)
    if not 0 <= position <= PROMPT_TOKENS_MAX:
        raise Misuse("a block lies in a prompt", field="position", limit=PROMPT_TOKENS_MAX)
    count = _count(packed_tokens)
    return _Hasher(lookup_key, extras).of(parent, position, count, packed_tokens)


class PromptIds:
    """`block_id` for the blocks of one prompt under one key: what they share is checked once."""

    __slots__ = ("_hasher", "_tokens")

    def __init__(self, lookup_key: bytes, packed_tokens: bytes, extras: bytes = b"") -> None:
        if _count(packed_tokens) > PROMPT_TOKENS_MAX:
            raise Misuse("too many tokens", field="tokens", limit=PROMPT_TOKENS_MAX)
        self._hasher = _Hasher(lookup_key, extras)
        self._tokens = packed_tokens

    def of(self, parent: BlockId, start: int, end: int) -> BlockId:
        """The id of tokens `[start, end)`, which lie in the prompt, after the block `parent`."""
        packed = self._tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
        return self._hasher.of(parent, start, len(packed) // TOKEN_BYTES, packed)


class _Hasher:
    """One lookup key, and the extras of one prompt."""

    __slots__ = ("_keyed", "_tail")

    def __init__(self, lookup_key: bytes, extras: bytes) -> None:
        if len(extras) > EXTRAS_BYTES_MAX:
            raise Misuse("extras are too long", field="extras", limit=EXTRAS_BYTES_MAX)
        if len(lookup_key) != 32:
            raise Misuse("a lookup key has 32 bytes", field="lookup_key", limit=32)
        self._keyed = hashlib.blake2b(digest_size=32, key=lookup_key, person=_PERSON)
        self._tail = struct.pack("<I", len(extras)) + extras

    def of(self, parent: BlockId, position: int, count: int, packed: bytes) -> BlockId:
        digest = self._keyed.copy()
        digest.update(parent + _PLACE.pack(position, count) + packed + self._tail)
        return BlockId(digest.digest())


def _count(packed_tokens: bytes) -> int:
    # Another length would let the tail of the tokens pass for the length of the extras.
    if len(packed_tokens) % 4:
        raise Misuse("packed tokens have 4 bytes each", field="tokens", limit=4)
    return len(packed_tokens) // 4
