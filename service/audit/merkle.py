"""A Merkle tree that only grows, kept as its complete subtrees (RFC 9162 section 2.1).

A node is named (level, index): it covers leaves `[index << level, (index + 1) << level)`, and
exists once all of them do, after which it never changes. So appending a leaf writes one or two
nodes on average, and a root or a proof of any size reads O(log n) of them. Everything here is
pure: the functions say which nodes they need, and the caller reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from policy.transparency import EMPTY_ROOT, node_hash
from strongroom.errors import Corrupt, Misuse


@dataclass(frozen=True, slots=True)
class Node:
    """A complete subtree of 2^level leaves."""

    level: int
    index: int


@dataclass(frozen=True, slots=True)
class Grown:
    """The tree's peaks after a leaf was appended, and the nodes that became complete."""

    peaks: tuple[bytes, ...]
    completed: tuple[tuple[Node, bytes], ...]


def append(size: int, peaks: Sequence[bytes], leaf: bytes) -> Grown:
    """Append `leaf` to a tree of `size` leaves whose complete subtrees hash to `peaks`."""
    if len(peaks) != size.bit_count():
        raise Corrupt("the audit tree's peaks do not fit its size")
    rest = list(peaks)
    completed = [(Node(0, size), leaf)]
    running, level, index = leaf, 0, size
    while index & 1:
        running = node_hash(rest.pop(), running)
        level, index = level + 1, index >> 1
        completed.append((Node(level, index), running))
    return Grown((*rest, running), tuple(completed))


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
