"""Appending audit events and reading the tree. The caller's session commits.

Batches are written at once, on PostgreSQL by COPY. What follows from an event and is asked for
later is found while it is appended: its category, and whether what was served was the tenant's own.

Locks: `append` takes the audit counter's row until commit, always after the log's counter row
and as the last thing that a change does, so that two changes never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.signing import Signer
from policy.transparency import leaf_hash
from service.audit import merkle, tree
from service.audit.events import AuditEvent, Category, Draft, category_of
from service.audit.models import THE_ROW, AuditCounter, AuditHead, AuditReference, AuditRow
from service.audit.signed import SignedHead
from service.db.base import Record
from service.db.session import SQLITE
from service.grants.models import Namespace
from service.log.chain import rfc3339
from strongroom.canonical import canonical_json
from strongroom.control import Typ
from strongroom.errors import Missing

NAMESPACE_CHARS: Final = 64
_IN_MAX: Final = 200
_COPY_MIN: Final = 64
"""Fewer rows are inserted: COPY has a price of its own."""


async def append(
    session: AsyncSession, drafts: Sequence[Draft], at: datetime
) -> tuple[AuditEvent, ...]:
    """Give `drafts` their places at the end of the chain and of the tree."""
    counter = await session.scalar(
        select(AuditCounter).with_for_update().execution_options(populate_existing=True)
    )
    if counter is None:
        counter = AuditCounter(id=THE_ROW, size=0, hash="", peaks="")
        session.add(counter)
    size, last, moment = counter.size, counter.hash, rfc3339(at)
    owners = await _owners(session, drafts)
    events: list[AuditEvent] = []
    rows: list[dict[str, Any]] = []
    references: list[dict[str, Any]] = []
    leaves: list[bytes] = []
    for draft in [*drafts, *_alarms(drafts, owners)]:
        event = AuditEvent(size + len(events), last, moment, draft)
        leaf = leaf_hash(event.payload())
        last = leaf.hex()
        row = _row(event, last)
        rows.append(row)
        references += _references(event, row, owners)
        leaves.append(leaf)
        events.append(event)
    await write(session, AuditRow, rows)
    await write(session, AuditReference, references)
    await tree.add(session, size, leaves)
    counter.size, counter.hash = size + len(events), last
    counter.peaks = b"".join(merkle.extend(size, tree.split(_raw(counter.peaks)), leaves)).hex()
    await session.flush()
    return tuple(events)


async def write(
    session: AsyncSession, record: type[Record], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Insert many rows at once: on PostgreSQL by COPY, in the session's own transaction."""
    if not rows:
        return
    if len(rows) < _COPY_MIN or session.get_bind().dialect.name == SQLITE:
        await session.execute(insert(record), list(rows))
        return
    names = list(rows[0])
    connection = await (await session.connection()).get_raw_connection()
    assert connection.driver_connection is not None
    await connection.driver_connection.copy_records_to_table(
        record.__tablename__, columns=names, records=[tuple(row.values()) for row in rows]
    )


async def _owners(session: AsyncSession, drafts: Iterable[Draft]) -> dict[str, str]:
    """The tenants of the namespaces that served accesses refer to."""
    wanted = sorted(
        {
            reference
            for draft in drafts
            if category_of(draft.kind, draft.outcome, draft.reason) is Category.SERVED
            for reference in draft.references
            if len(reference) == NAMESPACE_CHARS
        }
    )
    owners: dict[str, str] = {}
    for start in range(0, len(wanted), _IN_MAX):
        found = await session.execute(
            select(Namespace.id, Namespace.tenant).where(
                Namespace.id.in_(wanted[start : start + _IN_MAX])
            )
        )
        owners.update((namespace, tenant) for namespace, tenant in found)
    return owners


def _is_alien(draft: Draft, reference: str, owners: Mapping[str, str]) -> bool:
    return len(reference) == NAMESPACE_CHARS and owners.get(reference) != (draft.tenant or "")


def _alarms(drafts: Iterable[Draft], owners: Mapping[str, str]) -> list[Draft]:
    """One for each served access of what is not the tenant's own: in the chain it stays."""
    return [
        Draft(
            kind="alarm.cross_tenant_hit",
            actor_kind=draft.actor_kind,
            actor=draft.actor,
            tenant=draft.tenant,
            subject=draft.subject,
            target=draft.target,
            outcome="alarm",
            reason="not the tenant's own",
            references=alien,
            occurred_at=draft.occurred_at,
        )
        for draft in drafts
        if category_of(draft.kind, draft.outcome, draft.reason) is Category.SERVED
        and (alien := tuple(each for each in draft.references if _is_alien(draft, each, owners)))
    ]


def _row(event: AuditEvent, digest: str) -> dict[str, Any]:
    draft = event.draft
    return {
        "seq": event.seq,
        "at": event.at,
        "occurred_at": draft.occurred_at or event.at,
        "category": event.category.value,
        "kind": draft.kind,
        "actor_kind": str(draft.actor_kind),
        "actor": draft.actor,
        "tenant": draft.tenant,
        "subject": draft.subject,
        "target": draft.target,
        "outcome": draft.outcome,
        "reason": draft.reason,
        "details": draft.details,
        "prev": event.prev,
        "hash": digest,
    }


def _references(
    event: AuditEvent, row: Mapping[str, Any], owners: Mapping[str, str]
) -> list[dict[str, Any]]:
    served = row["category"] == Category.SERVED.value
    return [
        {
            "seq": event.seq,
            "reference": reference,
            "at": event.at,
            "occurred_at": row["occurred_at"],
            "category": row["category"],
            "alien": served and _is_alien(event.draft, reference, owners),
        }
        for reference in event.draft.references
    ]


def event_of(row: AuditRow, references: Iterable[str]) -> AuditEvent:
    """The event as its row says it; whether that is what was hashed is another question."""
    return AuditEvent(
        row.seq,
        row.prev,
        row.at,
        Draft(
            kind=row.kind,
            actor_kind=row.actor_kind,
            actor=row.actor,
            tenant=row.tenant,
            subject=row.subject,
            target=row.target,
            outcome=row.outcome,
            reason=row.reason,
            details=row.details,
            references=tuple(sorted(references)),
            occurred_at="" if row.occurred_at == row.at else row.occurred_at,
        ),
    )


async def references_of(session: AsyncSession, seqs: Sequence[int]) -> dict[int, list[str]]:
    """The references of each of the events `seqs`."""
    found: dict[int, list[str]] = {seq: [] for seq in seqs}
    for start in range(0, len(seqs), _IN_MAX):
        rows = await session.execute(
            select(AuditReference.seq, AuditReference.reference).where(
                AuditReference.seq.in_(seqs[start : start + _IN_MAX])
            )
        )
        for seq, reference in rows:
            found[seq].append(reference)
    return found


async def event(session: AsyncSession, seq: int) -> AuditEvent:
    """Event number `seq`; `Missing` if there is none."""
    row = await session.scalar(select(AuditRow).where(AuditRow.seq == seq))
    if row is None:
        raise Missing("there is no such audit event", field="seq")
    return event_of(row, (await references_of(session, [seq]))[seq])


async def counter(session: AsyncSession) -> tuple[int, str, bytes]:
    """The chain's length, its last hash, and the root of the tree."""
    row = (
        await session.execute(select(AuditCounter.size, AuditCounter.hash, AuditCounter.peaks))
    ).one_or_none()
    if row is None:
        return 0, "", merkle.fold(())
    return row.size, row.hash, merkle.fold(tree.split(_raw(row.peaks)))


async def sign_head(session: AsyncSession, signer: Signer, at: datetime) -> SignedHead:
    """Sign the tree as it is now, and keep the head. The same size is signed once."""
    size, last, root = await counter(session)
    known = await session.get(AuditHead, size)
    if known is not None:
        return SignedHead(known.size, known.root, known.at, known.jws)
    claims = {"size": size, "root": root.hex(), "hash": last, "at": rfc3339(at)}
    jws = signer.sign(Typ.AUDIT_HEAD, canonical_json(claims))
    session.add(AuditHead(size=size, root=root.hex(), at=rfc3339(at), jws=jws))
    await session.flush()
    return SignedHead(size, root.hex(), rfc3339(at), jws)


async def latest_head(session: AsyncSession) -> SignedHead | None:
    """The signed head of the largest tree; None before the first."""
    row = await session.scalar(select(AuditHead).order_by(AuditHead.size.desc()).limit(1))
    return None if row is None else SignedHead(row.size, row.root, row.at, row.jws)


async def heads_after(session: AsyncSession, size: int, limit: int) -> list[SignedHead]:
    """Signed heads of trees larger than `size`, the smallest first."""
    rows = await session.scalars(
        select(AuditHead).where(AuditHead.size > size).order_by(AuditHead.size).limit(limit)
    )
    return [SignedHead(row.size, row.root, row.at, row.jws) for row in rows]


async def leaf(session: AsyncSession, seq: int) -> bytes:
    """The leaf hash of event `seq`, purged or not."""
    return (await tree.hashes(session, ((seq, seq + 1),)))[0]


async def inclusion_proof(session: AsyncSession, seq: int, size: int) -> list[bytes]:
    """The proof that event `seq` is in the tree of `size` events."""
    return await tree.hashes(session, merkle.inclusion_ranges(seq, size))


async def consistency_proof(session: AsyncSession, old_size: int, size: int) -> list[bytes]:
    """The proof that the tree of `size` events continues the one of `old_size`."""
    return await tree.hashes(session, merkle.consistency_ranges(old_size, size))


async def root_at(session: AsyncSession, size: int) -> bytes:
    """The root that the stored tree had at `size`."""
    return (await tree.hashes(session, ((0, size),)))[0]


def _raw(peaks: str) -> bytes:
    return bytes.fromhex(peaks)
