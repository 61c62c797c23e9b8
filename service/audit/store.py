"""Appending audit events and reading the tree. The caller's session commits.

Locks: `append` takes the audit counter's row until commit, always after the log's counter row
and as the last thing that a change does, so that two changes never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from policy.signing import Signer
from policy.transparency import HASH_BYTES
from service.audit import merkle
from service.audit.events import AuditEvent, Draft
from service.audit.models import (
    THE_ROW,
    AuditCounter,
    AuditHead,
    AuditNode,
    AuditReference,
    AuditRow,
)
from service.audit.signed import SignedHead
from service.log.chain import rfc3339
from strongroom.canonical import canonical_json
from strongroom.control import Typ
from strongroom.errors import Missing

_IN_MAX = 200


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
    peaks = _unpack(counter.peaks)
    events = []
    for draft in drafts:
        event = AuditEvent(counter.size, counter.hash, rfc3339(at), draft)
        digest = event.hash()
        grown = merkle.append(counter.size, peaks, bytes.fromhex(digest))
        peaks = grown.peaks
        session.add(_row(event, digest))
        session.add_all(
            AuditNode(level=node.level, index=node.index, hash=value.hex())
            for node, value in grown.completed
            if node.level
        )
        counter.size, counter.hash = counter.size + 1, digest
        events.append(event)
    counter.peaks = b"".join(peaks).hex()
    await session.flush()
    session.add_all(
        AuditReference(seq=event.seq, reference=reference)
        for event in events
        for reference in event.draft.references
    )
    await session.flush()
    return tuple(events)


def _row(event: AuditEvent, digest: str) -> AuditRow:
    draft = event.draft
    return AuditRow(
        seq=event.seq,
        at=event.at,
        occurred_at=draft.occurred_at or event.at,
        kind=draft.kind,
        actor_kind=draft.actor_kind,
        actor=draft.actor,
        tenant=draft.tenant,
        subject=draft.subject,
        target=draft.target,
        outcome=draft.outcome,
        reason=draft.reason,
        details=draft.details,
        prev=event.prev,
        hash=digest,
    )


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
    row = await session.get(AuditRow, seq)
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
    return row.size, row.hash, merkle.fold(_unpack(row.peaks))


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


async def inclusion_proof(session: AsyncSession, seq: int, size: int) -> list[bytes]:
    """The proof that event `seq` is in the tree of `size` events."""
    return await _hashes(session, merkle.inclusion_ranges(seq, size))


async def consistency_proof(session: AsyncSession, old_size: int, size: int) -> list[bytes]:
    """The proof that the tree of `size` events continues the one of `old_size`."""
    return await _hashes(session, merkle.consistency_ranges(old_size, size))


async def root_at(session: AsyncSession, size: int) -> bytes:
    """The root that the stored tree had at `size`."""
    return (await _hashes(session, ((0, size),)))[0]


async def _hashes(session: AsyncSession, ranges: Sequence[merkle.Range]) -> list[bytes]:
    wanted = merkle.nodes_of(ranges)
    nodes: dict[merkle.Node, bytes] = {}
    leaves = [node.index for node in wanted if node.level == 0]
    if leaves:
        rows = await session.execute(
            select(AuditRow.seq, AuditRow.hash).where(AuditRow.seq.in_(leaves))
        )
        nodes |= {merkle.Node(0, seq): bytes.fromhex(value) for seq, value in rows}
    inner = [(node.level, node.index) for node in wanted if node.level]
    if inner:
        found = await session.execute(
            select(AuditNode.level, AuditNode.index, AuditNode.hash).where(
                tuple_(AuditNode.level, AuditNode.index).in_(inner)
            )
        )
        nodes |= {merkle.Node(level, i): bytes.fromhex(value) for level, i, value in found}
    return merkle.hashes_of(ranges, nodes)


def _unpack(peaks: str) -> tuple[bytes, ...]:
    raw = bytes.fromhex(peaks)
    return tuple(raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES))
