"""Joining neighbours: records that lie back to back go out, or come in, in one system call.

Small records are joined up to a length; a record beyond that length is cut into pieces of it, so
that several threads move it at once. A piece never holds a part of one record and something of
another, so that what failed can be told by record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from storage.tiers.regions import PARTS_MAX, Region


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of one record: `number` is the caller's name for it."""

    number: int
    region: Region
    offset: int
    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(slots=True)
class Piece:
    """One system call."""

    region: Region
    offset: int
    nbytes: int = 0
    parts: list[memoryview] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    is_cut: bool = False
    """It holds a part of one record, and of no other."""

    def joins(self, span: Span, bytes_max: int) -> bool:
        """Whether `span` lies right behind and there is room for it."""
        return (
            not self.is_cut
            and span.region is self.region
            and span.offset == self.offset + self.nbytes
            and self.nbytes + span.nbytes <= bytes_max
            and len(self.parts) + len(span.parts) <= PARTS_MAX
        )

    def add(self, span: Span) -> None:
        self.nbytes += span.nbytes
        self.parts += span.parts
        self.spans.append(span)


def coalesce(spans: Iterable[Span], bytes_max: int) -> list[Piece]:
    """Pieces of at most `bytes_max` bytes, in the order of `spans`."""
    pieces: list[Piece] = []
    for span in spans:
        if span.nbytes > bytes_max:
            pieces += _cut(span, bytes_max)
            continue
        if not pieces or not pieces[-1].joins(span, bytes_max):
            pieces.append(Piece(span.region, span.offset))
        pieces[-1].add(span)
    return pieces


def _cut(span: Span, bytes_max: int) -> Iterator[Piece]:
    offset = span.offset
    for parts in _slices(span.parts, bytes_max):
        nbytes = sum(len(part) for part in parts)
        yield Piece(span.region, offset, nbytes, parts, [span], is_cut=True)
        offset += nbytes


def _slices(parts: Sequence[memoryview], bytes_max: int) -> Iterator[list[memoryview]]:
    room = bytes_max
    piece: list[memoryview] = []
    for part in parts:
        rest = part
        while len(rest):
            piece.append(rest[:room])
            taken = min(room, len(rest))
            rest = rest[taken:]
            room -= taken
            if not room:
                yield piece
                piece, room = [], bytes_max
    if piece:
        yield piece
