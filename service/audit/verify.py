"""Is the chain whole? Recomputed from the rows, and held against heads that were signed.

What each attack on the database shows as:
- an edited event, or a reference taken from it: its hash is another;
- a deleted event: a seq is missing;
- reordered events: `prev` does not fit;
- events added or changed with all hashes made anew: a signed head has another root;
- a cut tail: fewer events than the counter or a signed head says. If the counter and the heads
  were cut as well, only a head that is kept elsewhere shows it: hand it in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.audit_heads import AuditHeadClaims, verify_head
from policy.signing import Verifier
from service.audit import merkle, store
from service.audit.models import AuditHead, AuditRow
from strongroom.errors import Refused

_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Intact:
    """`events` events chain, and every head fits. `root` is the tree's, hexadecimal."""

    events: int
    root: str
    heads: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The first thing that does not fit: at event `seq`, for `reason`."""

    seq: int
    reason: str


async def verify_chain(
    session: AsyncSession, verifier: Verifier, kept: AuditHeadClaims | None = None
) -> Intact | Broken:
    """Recompute chain and tree. `kept` is a head that was kept elsewhere."""
    try:
        heads = await _heads(session, verifier)
    except Refused:
        return Broken(0, "a stored head was not signed by this service")
    if kept is not None:
        heads.setdefault(kept.size, set()).add(kept.root)
    size, last = 0, ""
    peaks: tuple[bytes, ...] = ()
    while True:
        rows = (
            await session.scalars(
                select(AuditRow)
                .where(AuditRow.seq >= size)
                .order_by(AuditRow.seq)
                .limit(_PAGE)
                .execution_options(populate_existing=True)
            )
        ).all()
        if not rows:
            break
        references = await store.references_of(session, [row.seq for row in rows])
        for row in rows:
            if row.seq != size:
                return Broken(size, "an event is missing")
            event = store.event_of(row, references[row.seq])
            if row.prev != last:
                return Broken(size, "it does not follow the event before")
            try:
                digest = event.hash()
            except ValueError:
                return Broken(size, "its details cannot be read")
            if digest != row.hash:
                return Broken(size, "its content was changed")
            peaks = merkle.append(size, peaks, bytes.fromhex(digest)).peaks
            size, last = size + 1, digest
            if heads.pop(size, set()) - {merkle.fold(peaks).hex()}:
                return Broken(size - 1, "a signed head has another root")
    return await _end(session, size, last, peaks, heads)


async def _end(
    session: AsyncSession,
    size: int,
    last: str,
    peaks: tuple[bytes, ...],
    heads: dict[int, set[str]],
) -> Intact | Broken:
    counted, counted_hash, root = await store.counter(session)
    if counted > size or any(head > size for head in heads):
        return Broken(size, "the end was cut off")
    if (counted, counted_hash, root) != (size, last, merkle.fold(peaks)):
        return Broken(size, "the counter does not fit the events")
    signed = len((await session.scalars(select(AuditHead.size))).all())
    return Intact(size, root.hex(), signed)


async def _heads(session: AsyncSession, verifier: Verifier) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for jws in await session.scalars(select(AuditHead.jws)):
        claims = verify_head(jws, verifier)
        if claims.size:
            found.setdefault(claims.size, set()).add(claims.root)
    return found
