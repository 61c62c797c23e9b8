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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NewType, cast

from strongroom.errors import Misuse
from strongroom.limits import EXTRAS_BYTES_MAX, PROMPT_TOKENS_MAX, TOKEN_ID_MAX

BlockId = NewType("BlockId", bytes)
"""32 bytes."""

ROOT_PARENT: Final = BlockId(bytes(32))
TOKEN_BYTES: Final = 4
IdOf = Callable[[BlockId, int, int], BlockId]
"""The id of a prompt's block by its parent's id, its first token and its end."""
RunOf = Callable[[BlockId, range, int], list[BlockId]]
"""The ids of a prompt's blocks that follow one another, by the parent's id, the first token of
each, and the last one's end."""
_PLACE: Final = struct.Struct("<QI")
_WHOLE: Final = "<32sQI{tokens}s{tail}s"
"""What a whole block's id is a hash of, as one structure."""
_PIECE_BYTES: Final = 2044
"""Hashing 2048 bytes or more at once lets go of the interpreter."""
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


def prompt_digest(packed_tokens: bytes, *, in_pieces: bool = False) -> bytes:
    """SHA-256 over a prompt's packed token ids, with its own domain and count; 32 bytes.

    `in_pieces` keeps the interpreter and is a tenth slower: whoever lets go of it while other
    threads decrypt may wait for milliseconds to have it back.
    """
    digest = hashlib.sha256(_PROMPT_DOMAIN + struct.pack("<I", _count(packed_tokens)))
    update = digest.update
    if in_pieces:
        for at in range(0, len(packed_tokens), _PIECE_BYTES):
            update(packed_tokens[at : at + _PIECE_BYTES])
    else:
        update(packed_tokens)
    return digest.digest()


def block_id(
    lookup_key: bytes, parent: BlockId, position: int, packed_tokens: bytes, extras: bytes = b""
) -> BlockId:
    """The id of the block whose first token stands at `position`; see the module's rules."""
    if len(parent) != 32:
        raise Misuse("a block id has 32 bytes", field="parent", limit=32)
    if not 0 <= position <= PROMPT_TOKENS_MAX:
        raise Misuse("a block lies in a prompt", field="position", limit=PROMPT_TOKENS_MAX)
    count = _count(packed_tokens)
    digest = _keyed(lookup_key)
    digest.update(parent + _PLACE.pack(position, count) + packed_tokens + _tail(extras))
    return BlockId(digest.digest())


def ids_of(lookup_key: bytes, packed_tokens: bytes, extras: bytes = b"") -> IdOf:
    """`block_id` for many blocks of one prompt under one key: what they share is checked once.

    What is returned takes the parent's id and the block's first token and end, which lie in the
    prompt. It runs for every block of every lookup, hence the plain form.
    """
    if _count(packed_tokens) > PROMPT_TOKENS_MAX:
        raise Misuse("too many tokens", field="tokens", limit=PROMPT_TOKENS_MAX)
    fresh = _keyed(lookup_key).copy
    place = _PLACE.pack
    tail = _tail(extras)

    def id_of(parent: bytes, start: int, end: int) -> bytes:
        packed = packed_tokens[start * 4 : end * 4]
        digest = fresh()
        digest.update(parent + place(start, len(packed) // 4) + packed + tail)
        return digest.digest()

    return cast("IdOf", id_of)


def run_of(lookup_key: bytes, packed_tokens: bytes, extras: bytes, tokens_per_block: int) -> RunOf:
    """`ids_of` for blocks in a row, all but the last one whole: `starts` has that step.

    One packed message and one `update` a block: below 2048 bytes that keeps the interpreter,
    which other threads would take for as long as they like at each of a hundred blocks.
    """
    id_of = ids_of(lookup_key, packed_tokens, extras)
    fresh = _keyed(lookup_key).copy
    tail = _tail(extras)
    size = 4 * tokens_per_block
    pack = struct.Struct(_WHOLE.format(tokens=size, tail=len(tail))).pack

    def run(parent: bytes, starts: range, end: int) -> list[bytes]:
        ids: list[bytes] = []
        add = ids.append
        for start in starts[:-1]:
            at = 4 * start
            digest = fresh()
            digest.update(
                pack(parent, start, tokens_per_block, packed_tokens[at : at + size], tail)
            )
            parent = digest.digest()
            add(parent)
        add(id_of(cast("BlockId", parent), starts[-1], end))
        return ids

    return cast("RunOf", run)


def _keyed(lookup_key: bytes) -> hashlib.blake2b:
    if len(lookup_key) != 32:
        raise Misuse("a lookup key has 32 bytes", field="lookup_key", limit=32)
    return hashlib.blake2b(digest_size=32, key=lookup_key, person=_PERSON)


def _tail(extras: bytes) -> bytes:
    if len(extras) > EXTRAS_BYTES_MAX:
        raise Misuse("extras are too long", field="extras", limit=EXTRAS_BYTES_MAX)
    return struct.pack("<I", len(extras)) + extras


def _count(packed_tokens: bytes) -> int:
    # Another length would let the tail of the tokens pass for the length of the extras.
    if len(packed_tokens) % 4:
        raise Misuse("packed tokens have 4 bytes each", field="tokens", limit=4)
    return len(packed_tokens) // 4
