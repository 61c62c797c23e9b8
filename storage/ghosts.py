"""What has left a tier lately, in a table of a byte a cell: whether, and as which kind.

Direct-mapped by a hash of the key: a cell holds six bits of it and the kind, and a later ghost
takes the cell of an earlier one, so that ghosts fade by themselves. One absent key in 64 that
meets a full cell is taken for a ghost; what follows from that is a block in another queue.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

_WIDTH_MIN: Final = 1024
_CELLS_PER_BLOCK: Final = 2
_FULL: Final = 0x80


class Ghosts:
    """Remembers about as many blocks as are resident."""

    def __init__(self) -> None:
        self._cells = bytearray(_WIDTH_MIN)

    def put(self, key: bytes, *, proven: bool) -> None:
        """A block has left."""
        place, mark = self._place(key)
        self._cells[place] = mark | proven

    def pop(self, key: bytes) -> bool | None:
        """Whether it left as proven, and forget it; None when it is not known to have left."""
        place, mark = self._place(key)
        found = self._cells[place]
        if found & ~1 != mark:
            return None
        self._cells[place] = 0
        return bool(found & 1)

    def widen(self, blocks: int) -> None:
        """Be wide enough for so many resident blocks."""
        while len(self._cells) < _CELLS_PER_BLOCK * blocks:
            # The place is the low bits of the hash: each cell is now two, of equal content.
            self._cells += bytes(self._cells)

    def _place(self, key: bytes) -> tuple[int, int]:
        spread = crc32(key)
        return spread & (len(self._cells) - 1), _FULL | (spread >> 24) & 0x7E
