"""A Merkle tree that only grows (RFC 9162 section 2.1), and its tiles.

A node is named (level, index): it covers leaves `[index << level, (index + 1) << level)`, and
exists once all of them do, after which it never changes. Nodes are kept in tiles: tile (level,
index) holds the 256 nodes of tree level `8 * level` from `256 * index` on, once all are complete;
what lies between two such levels is computed. So 256 leaves write one tile, and a root or a proof
of any size reads O(log n) of them. Everything here is pure: the functions say which nodes they
need, and the caller reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from policy.transparency import EMPTY_ROOT, node_hash
from strongroom.errors import Corrupt, Misuse


@dataclass(frozen=True, slots=True)
class Node:
    """A complete subtree of 2^level leaves."""

    level: int
    index: int


TILE_LEVELS: Final = 8
TILE: Final = 1 << TILE_LEVELS
"""Nodes in one tile."""


def extend(size: int, peaks: Sequence[bytes], leaves: Sequence[bytes]) -> list[bytes]:
    """The peaks once `leaves` follow the `size` leaves whose complete subtrees hash to `peaks`.

    Peaks are the complete subtrees, largest and leftmost first.
    """
    if len(peaks) != size.bit_count():
        raise Corrupt("the audit tree's peaks do not fit its size")
    rest = list(peaks)
    at, end = 0, len(leaves)
    while at < end:
        # A whole tile is hashed level by level, which is several times as fast.
        whole = not (size + at) & (TILE - 1) and end - at >= TILE
        running = subtree(leaves[at : at + TILE]) if whole else leaves[at]
        index = (size + at) >> TILE_LEVELS if whole else size + at
        at += TILE if whole else 1
        while index & 1:
            running = node_hash(rest.pop(), running)
            index >>= 1
        rest.append(running)
    return rest


def subtree(nodes: Sequence[bytes]) -> bytes:
    """The root over a power of two of nodes of one level."""
    sha256 = hashlib.sha256
    while len(nodes) > 1:
        nodes = [
            sha256(b"\x01" + left + right).digest()
            for left, right in zip(nodes[::2], nodes[1::2], strict=True)
        ]
    return nodes[0]


def fold(peaks: Sequence[bytes]) -> bytes:
    """The root over complete subtrees, largest and leftmost first."""
    if not peaks:
        return EMPTY_ROOT
    running = peaks[-1]
    for peak in reversed(peaks[:-1]):
        running = node_hash(peak, running)
    return running


def cover(start: int, end: int) -> tuple[Node, ...]:
    """The complete subtrees that make up leaves `[start, end)`, largest first."""
    nodes = []
    while start < end:
        level = (end - start).bit_length() - 1
        if start & ((1 << level) - 1):
            raise Misuse("a range of leaves must be aligned to its size", field="start")
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return tuple(nodes)


Range = tuple[int, int]


def inclusion_ranges(index: int, size: int) -> tuple[Range, ...]:
    """The leaf ranges whose hashes prove leaf `index`; RFC 9162 section 2.1.3.1."""
    if not 0 <= index < size:
        raise Misuse("no such leaf in a tree of this size", field="index", limit=size)
    path: list[Range] = []
    start, end = 0, size
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            path.append((middle, end))
            end = middle
        else:
            path.append((start, middle))
            start = middle
    return tuple(reversed(path))


def consistency_ranges(old_size: int, size: int) -> tuple[Range, ...]:
    """The leaf ranges that prove that `size` continues `old_size`; RFC 9162 section 2.1.4.1."""
    if not 0 <= old_size <= size:
        raise Misuse("the older tree is not smaller", field="old_size", limit=size)
    if old_size in (0, size):
        return ()
    path: list[Range] = []
    start, end, whole = 0, size, True
    while old_size != end:
        middle = start + _split(end - start)
        if old_size <= middle:
            path.append((middle, end))
            end = middle
        else:
            path.append((start, middle))
            start, whole = middle, False
    if not whole:
        path.append((start, end))
    return tuple(reversed(path))


def nodes_of(ranges: Iterable[Range]) -> frozenset[Node]:
    """Every node that `hashes_of` needs."""
    return frozenset(node for start, end in ranges for node in cover(start, end))


def hashes_of(ranges: Iterable[Range], nodes: Mapping[Node, bytes]) -> list[bytes]:
    """The hash of each range, from the nodes that cover it."""
    try:
        return [fold([nodes[node] for node in cover(start, end)]) for start, end in ranges]
    except KeyError as error:
        raise Corrupt("a node of the audit tree is gone") from error


def _split(leaves: int) -> int:
    """The largest power of two below `leaves`."""
    return 1 << ((leaves - 1).bit_length() - 1)
