"""How often a block was asked for lately, in two bytes a block, also of blocks that are gone.

A count-min sketch as TinyLFU has it (Einziger, Friedman and Manes, 2017): four rows of 4-bit
counters; a use raises the lowest of a block's four, and their minimum is the estimate. Every
10 x width increments all counters are halved, so that what was hot once does not stay hot.

Two rows share a byte: the low half is one's, the high half the other's. The width is a power of
two; an estimate is never too low before the first halving, and at most 15.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

COUNT_MAX: Final = 15
WIDTH_MIN: Final = 4096
_SAMPLE_FACTOR: Final = 10
_HALVED: Final = bytes((byte >> 1) & 0x77 for byte in range(256))
_MULTIPLIERS: Final = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
_SPREAD_BITS: Final = 32


class Frequency:
    """Counts uses of keys, which are bytes that nobody else can choose (keyed block ids)."""

    def __init__(self, width: int = WIDTH_MIN) -> None:
        self._width = 1 << max(4, (width - 1).bit_length())
        self._rows = (bytearray(self._width), bytearray(self._width))
        self._increments = 0

    @property
    def width(self) -> int:
        """Counters in a row."""
        return self._width

    def count(self, key: bytes) -> int:
        """Count a use; the estimate after it."""
        a, b, c, d = self._places(key)
        first, second = self._rows
        one, two = first[a] & 15, first[b] >> 4
        three, four = second[c] & 15, second[d] >> 4
        lowest = min(one, two, three, four)
        if lowest < COUNT_MAX:
            # Conservative update: counters that other keys have raised higher stay.
            first[a] += one == lowest
            first[b] += (two == lowest) << 4
            second[c] += three == lowest
            second[d] += (four == lowest) << 4
            lowest += 1
        self._increments += 1
        if self._increments >= _SAMPLE_FACTOR * self._width:
            self._halve()
        return lowest

    def _places(self, key: bytes) -> tuple[int, int, int, int]:
        spread = crc32(key)
        mask = self._width - 1
        one, two, three, four = _MULTIPLIERS
        # The high bits of each product: two keys that share one place share no other by that.
        return (
            _mix(spread, one) & mask,
            _mix(spread, two) & mask,
            _mix(spread, three) & mask,
            _mix(spread, four) & mask,
        )

    def _halve(self) -> None:
        first, second = self._rows
        self._rows = (first.translate(_HALVED), second.translate(_HALVED))
        self._increments //= 2


def _mix(spread: int, multiplier: int) -> int:
    product = spread * multiplier
    return (product >> _SPREAD_BITS) ^ (product & 0xFFFFFFFF) >> 7
