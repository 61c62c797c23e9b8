"""Is the log whole? Recomputed from the rows, page by page, and held against signed heads.

What each attack on the database shows as:
- an edited event, or a reference taken from it: its hash is another;
- a deleted event: a seq is missing, and no purge that is itself in the chain says so;
- reordered events: `prev` does not fit;
- events added or changed with all hashes made anew: a signed head has another root;
- a cut tail: fewer events than the counter or a signed head says. If the counter and the heads
  were cut as well, only a head that is kept elsewhere shows it: hand it in;
- a fork (two logs that share a beginning): a head of the other one has another root.

Of purged events the leaf hashes are left, in the tiles: the tree over them is recomputed, and the
events that are left are checked to follow them. Memory holds one page and the heads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from sqlalchemy import String, select, type_coerce
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from policy.audit_heads import AuditHeadClaims, verify_head
from policy.signing import Verifier
from policy.transparency import leaf_hash
from service.audit import merkle, store, tree
from service.audit.events import category_of, encode_event, encode_references
from service.audit.merkle import TILE, TILE_LEVELS
from service.audit.models import AuditHead, AuditReference, AuditRow
from strongroom.errors import Refused

PURGED: Final = "audit.purged"
_PAGE: Final = 32 * TILE
_Reference = list[str]
"""A reference, and of its event: at, occurred_at, category."""
_COLUMNS: Final = (
    AuditRow.seq,
    AuditRow.at,
    AuditRow.occurred_at,
    # As plain text: millions of rows pass through here.
    type_coerce(AuditRow.category, String),
    AuditRow.kind,
    AuditRow.actor_kind,
    AuditRow.actor,
    AuditRow.tenant,
    AuditRow.subject,
    AuditRow.target,
    AuditRow.outcome,
    AuditRow.reason,
    AuditRow.details,
    AuditRow.prev,
    AuditRow.hash,
)


@dataclass(frozen=True, slots=True)
class Intact:
    """`events` events chain, and every head fits. `root` is the tree's, hexadecimal."""

    events: int
    root: str
    heads: int
    purged: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The first thing that does not fit: at event `seq`, for `reason`."""

    seq: int
    reason: str


Progress = Callable[[int, int], None]
"""Told how many events of how many are verified."""


async def verify_chain(
    session: AsyncSession,
    verifier: Verifier,
    kept: Iterable[AuditHeadClaims] = (),
    progress: Progress = lambda _done, _of: None,
) -> Intact | Broken:
    """Recompute chain and tree. `kept` are heads that were kept elsewhere.

    The session should see one state of the database throughout.
    """
    try:
        heads = await _heads(session, verifier)
    except Refused:
        return Broken(0, "a stored head was not signed by this service")
    signed = len(heads)
    for head in kept:
        if head.size:
            heads.setdefault(head.size, set()).add(head.root)
    total, _, _ = await store.counter(session)
    walk = _Walk(sorted(heads.items(), reverse=True))
    page = await _page(session, 0)
    while page.rows and walk.broken is None:
        async with asyncio.TaskGroup() as tasks:
            # Hashing a page takes tens of milliseconds: in a thread, while the next one is read.
            following = tasks.create_task(_page(session, page.rows[-1].seq + 1))
            ahead = await asyncio.to_thread(walk.take, page, 0)
        while ahead < len(page.rows) and walk.broken is None:
            if page.rows[ahead].seq < walk.size:
                walk.broken = Broken(page.rows[ahead].seq, "an event is there twice")
                break
            await _cross(session, walk, page.rows[ahead].seq)
            ahead = await asyncio.to_thread(walk.take, page, ahead)
        await _check_tiles(session, walk)
        progress(walk.size, total)
        page = following.result()
    if walk.broken is None:
        # What was purged last, with nothing kept after it, has its hashes still.
        await _cross(session, walk, total, to_end=True)
    return walk.broken or await _end(session, walk, signed)


@dataclass(slots=True)
class _Walk:
    """Where the verification stands: `size` events are checked."""

    heads: list[tuple[int, set[str]]]
    """By size, the smallest last."""
    size: int = 0
    last: str = ""
    peaks: list[bytes] = field(default_factory=list)
    broken: Broken | None = None
    hole: int = -1
    """The highest seq whose event is gone."""
    first_hole: int = -1
    purged: int = 0
    purged_before: int = 0
    declared: int = 0
    """What the purges in the chain say: up to where, and how many."""
    pending: list[bytes] = field(default_factory=list)
    """Leaves of tiles that are not compared yet."""
    pending_from: int = 0

    def take(self, page: _Page, begin: int) -> int:
        """Check the events of a page from `begin` on that follow one another; returns where it
        stopped.
        """
        leaves: list[bytes] = []
        size, last, references = self.size, self.last, page.references
        # Taken apart at once and in this order: `_COLUMNS`.
        for (
            seq, at, occurred_at, category, kind, actor_kind, actor, tenant, subject, target,
            outcome, reason, details, prev, digest,
        ) in islice(page.rows, begin, None):  # fmt: skip
            if seq != size:
                break
            if prev != last:
                self.broken = Broken(size, "it does not follow the event before")
                break
            if category_of(kind, outcome, reason) != category:
                self.broken = Broken(size, "its category does not fit its content")
                break
            about = references.get(size, ())
            leaf = leaf_hash(
                encode_event(
                    actor=actor,
                    actor_kind=actor_kind,
                    at=at,
                    details=details,
                    kind=kind,
                    occurred_at="" if occurred_at == at else occurred_at,
                    outcome=outcome,
                    prev=prev,
                    reason=reason,
                    references=encode_references([each[0] for each in about]),
                    seq=seq,
                    subject=subject,
                    target=target,
                    tenant=tenant or "",
                )
            )
            last = leaf.hex()
            if last != digest:
                self.broken = Broken(size, "its content was changed")
                break
            repeated = [at, occurred_at, category]
            if any(each[1:] != repeated for each in about):
                # It would hide the event from the questions.
                self.broken = Broken(size, "a reference repeats its event wrongly")
                break
            if kind == PURGED:
                before, events = _purge(details)
                self.purged_before = max(self.purged_before, before)
                self.declared += events
            leaves.append(leaf)
            size += 1
        self.grow(leaves)
        return begin + len(leaves)

    def grow(self, leaves: list[bytes]) -> None:
        """Let the tree grow, and hold it against every head on the way."""
        at = 0
        while at < len(leaves):
            stop = len(leaves)
            if self.heads and self.heads[-1][0] - self.size < stop - at:
                stop = at + self.heads[-1][0] - self.size
            part = leaves[at:stop]
            self.peaks = merkle.extend(self.size, self.peaks, part)
            self.size += len(part)
            at = stop
            if self.heads and self.heads[-1][0] == self.size:
                _, roots = self.heads.pop()
                if roots - {merkle.fold(self.peaks).hex()} and self.broken is None:
                    self.broken = Broken(self.size - 1, "a signed head has another root")
        if leaves:
            self.last = leaves[-1].hex()
            self.pending += leaves


def _purge(details: str) -> tuple[int, int]:
    """Before which event, and how many, a purge says that it took."""
    try:
        said = json.loads(details)
        return int(said["before"]), int(said["events"])
    except (ValueError, KeyError, TypeError):
        return 0, 0


async def _cross(session: AsyncSession, walk: _Walk, end: int, *, to_end: bool = False) -> None:
    """Cross a hole up to event `end` on the leaf hashes that a purge left."""
    hole = walk.size
    while walk.size < end and walk.broken is None:
        first = walk.size >> TILE_LEVELS
        found = await tree.tiles(session, 0, first, min(first + 64, (end >> TILE_LEVELS) + 1))
        if not found or found[0][0] != first:
            break
        for index, hashes, _ in found:
            begin = index << TILE_LEVELS
            if begin > walk.size:
                break
            part = hashes[walk.size - begin : end - begin]
            walk.purged += len(part)
            walk.grow(part)
        await _check_tiles(session, walk)
    if walk.size > hole:
        walk.hole = walk.size - 1
        walk.first_hole = hole if walk.first_hole < 0 else walk.first_hole
    if walk.size < end and walk.broken is None and not to_end:
        walk.broken = Broken(walk.size, "an event is missing")


async def _check_tiles(session: AsyncSession, walk: _Walk) -> None:
    """Compare the tiles that proofs are read from with what the events say."""
    while len(walk.pending) >= TILE and walk.broken is None:
        count = len(walk.pending) >> TILE_LEVELS
        first = walk.pending_from >> TILE_LEVELS
        stored = {
            index: (hashes, root)
            for index, hashes, root in await tree.tiles(session, 0, first, first + count)
        }
        for index in range(first, first + count):
            at = (index - first) << TILE_LEVELS
            leaves = walk.pending[at : at + TILE]
            hashes, root = stored.get(index, ([], b""))
            if hashes != leaves or root != merkle.subtree(leaves):
                walk.broken = Broken(index << TILE_LEVELS, "a tile of the tree was changed")
                return
        del walk.pending[: count << TILE_LEVELS]
        walk.pending_from += count << TILE_LEVELS


@dataclass(frozen=True, slots=True)
class _Page:
    """Some events in the order of the chain, and their references."""

    rows: Sequence[Any]
    references: dict[int, list[_Reference]]


async def _page(session: AsyncSession, first: int) -> _Page:
    connection = await session.connection()
    result = await connection.execute(
        select(*_COLUMNS).where(AuditRow.seq >= first).order_by(AuditRow.seq).limit(_PAGE)
    )
    rows = result.all()
    references = await _references(connection, rows[0].seq, rows[-1].seq) if rows else {}
    return _Page(rows, references)


async def _references(
    connection: AsyncConnection, first: int, last: int
) -> dict[int, list[_Reference]]:
    rows = await connection.execute(
        select(
            AuditReference.seq,
            AuditReference.reference,
            AuditReference.at,
            AuditReference.occurred_at,
            type_coerce(AuditReference.category, String),
        )
        .where(AuditReference.seq >= first, AuditReference.seq <= last)
        .order_by(AuditReference.seq)
    )
    found: dict[int, list[_Reference]] = {}
    for seq, *reference in rows:
        known = found.get(seq)
        if known is None:
            found[seq] = [reference]
        else:
            known.append(reference)
            known.sort()
    return found


async def _end(session: AsyncSession, walk: _Walk, signed: int) -> Intact | Broken:
    counted, counted_hash, root = await store.counter(session)
    if walk.hole >= walk.purged_before or walk.purged != walk.declared:
        return Broken(max(walk.first_hole, 0), "an event is missing")
    if counted > walk.size or walk.heads:
        return Broken(walk.size, "the end was cut off")
    if (counted, counted_hash, root) != (walk.size, walk.last, merkle.fold(walk.peaks)):
        return Broken(walk.size, "the counter does not fit the events")
    return Intact(walk.size, root.hex(), signed, walk.purged)


async def _heads(session: AsyncSession, verifier: Verifier) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for jws in await session.scalars(select(AuditHead.jws)):
        claims = verify_head(jws, verifier)
        if claims.size:
            found.setdefault(claims.size, set()).add(claims.root)
    return found
