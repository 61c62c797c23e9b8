"""The tree as the database keeps it: tiles, and below the first the events' own hashes.

A node lies in its tile once the tile is complete. Until then a node of the events' own level is in
`audit_events`, and one of a higher tile's level is the root of the tile below it; so the right edge
of the tree needs no row of its own, and a proof in a tree of millions reads a few dozen rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sqlalchemy import and_, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.transparency import HASH_BYTES
from service.audit import merkle
from service.audit.merkle import TILE, TILE_LEVELS, Node
from service.audit.models import AuditRow, AuditTile
from strongroom.errors import Corrupt

TileKey = tuple[int, int]
"""Level and index of a tile."""
_IN_MAX: Final = 200


async def add(session: AsyncSession, size: int, leaves: Sequence[bytes]) -> None:
    """Write the tiles that become complete when `leaves` follow the first `size` events.

    The events themselves must be in the session's transaction already, or in `leaves`.
    """
    end = size + len(leaves)
    complete: list[tuple[int, bytes, bytes]] = []
    for index in range(size >> TILE_LEVELS, end >> TILE_LEVELS):
        begin = index << TILE_LEVELS
        hashes = list(leaves[max(begin - size, 0) : begin + TILE - size])
        if begin < size:
            hashes = [*await event_hashes(session, begin, size), *hashes]
        complete.append((index, b"".join(hashes), merkle.subtree(hashes)))
    await _write(session, 0, complete)


async def _write(
    session: AsyncSession, level: int, complete: Sequence[tuple[int, bytes, bytes]]
) -> None:
    if not complete:
        return
    await session.execute(
        insert(AuditTile),
        [
            {"level": level, "index": index, "hashes": hashes, "root": root}
            for index, hashes, root in complete
        ],
    )
    above = []
    for index, _, _ in complete:
        if index & (TILE - 1) == TILE - 1:
            roots = await _roots(session, level, index + 1 - TILE, index + 1)
            above.append((index >> TILE_LEVELS, b"".join(roots), merkle.subtree(roots)))
    await _write(session, level + 1, above)


async def event_hashes(session: AsyncSession, begin: int, end: int) -> list[bytes]:
    """The leaf hashes of events `[begin, end)`, from the events themselves."""
    rows = await session.execute(
        select(AuditRow.seq, AuditRow.hash)
        .where(AuditRow.seq >= begin, AuditRow.seq < end)
        .order_by(AuditRow.seq)
    )
    found = [(seq, bytes.fromhex(value)) for seq, value in rows]
    if [seq for seq, _ in found] != list(range(begin, end)):
        raise Corrupt("an event of the audit tree is gone")
    return [value for _, value in found]


async def tiles(
    session: AsyncSession, level: int, begin: int, end: int
) -> list[tuple[int, list[bytes], bytes]]:
    """The tiles `[begin, end)` of a level that there are: index, nodes, root."""
    rows = await session.execute(
        select(AuditTile.index, AuditTile.hashes, AuditTile.root)
        .where(AuditTile.level == level, AuditTile.index >= begin, AuditTile.index < end)
        .order_by(AuditTile.index)
    )
    return [(index, split(hashes), root) for index, hashes, root in rows]


async def hashes(session: AsyncSession, ranges: Sequence[merkle.Range]) -> list[bytes]:
    """The hash over each range of leaves. Raises `Corrupt` for one that is not there."""
    wanted = merkle.nodes_of(ranges)
    kept = await _tiles_of(session, {_tile(node) for node in wanted})
    nodes: dict[Node, bytes] = {}
    for node in wanted:
        level, index = _tile(node)
        begin, count = _place(node)
        tile = kept.get((level, index))
        if tile is not None:
            part = tile[begin & (TILE - 1) : (begin & (TILE - 1)) + count]
        elif level == 0:
            part = await event_hashes(session, begin, begin + count)
        else:
            part = await _roots(session, level - 1, begin, begin + count)
        nodes[node] = merkle.subtree(part)
    return merkle.hashes_of(ranges, nodes)


def _tile(node: Node) -> TileKey:
    """The tile in which a node lies, at or above its nodes' level."""
    begin, _ = _place(node)
    return node.level // TILE_LEVELS, begin >> TILE_LEVELS


def _place(node: Node) -> tuple[int, int]:
    """A node as a run of nodes of its tile's level: the first, and how many."""
    shift = node.level % TILE_LEVELS
    return node.index << shift, 1 << shift


async def _tiles_of(session: AsyncSession, keys: Iterable[TileKey]) -> dict[TileKey, list[bytes]]:
    wanted = sorted(keys)
    found: dict[TileKey, list[bytes]] = {}
    for start in range(0, len(wanted), _IN_MAX):
        rows = await session.execute(
            select(AuditTile.level, AuditTile.index, AuditTile.hashes).where(
                or_(
                    *(
                        and_(AuditTile.level == level, AuditTile.index == index)
                        for level, index in wanted[start : start + _IN_MAX]
                    )
                )
            )
        )
        found |= {(level, index): split(packed) for level, index, packed in rows}
    return found


async def _roots(session: AsyncSession, level: int, begin: int, end: int) -> list[bytes]:
    rows = await session.execute(
        select(AuditTile.index, AuditTile.root)
        .where(AuditTile.level == level, AuditTile.index >= begin, AuditTile.index < end)
        .order_by(AuditTile.index)
    )
    found = [(index, root) for index, root in rows]
    if [index for index, _ in found] != list(range(begin, end)):
        raise Corrupt("a tile of the audit tree is gone")
    return [root for _, root in found]


def split(packed: bytes) -> list[bytes]:
    """Hashes that lie back to back."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
