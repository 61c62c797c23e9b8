"""The daily report: what has to be nothing, what was denied, and what is still open."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

from sqlalchemy import Boolean, func, literal_column, select, union
from sqlalchemy.ext.asyncio import AsyncSession

from service.audit import holds, questions, store
from service.audit.events import Category
from service.audit.models import AuditReference, AuditRow
from service.audit.questions import Filter
from service.audit.schemas import DenialAnswer, HeadAnswer, ReportAnswer, UnacknowledgedAnswer
from service.grants.models import NamespaceComponent
from service.log import store as log_store
from service.log.chain import rfc3339
from service.log.models import LogComponent, LogRow
from service.revocation.models import Axis, Revocation
from service.sidecars.models import Sidecar

_SERVED = literal_column("audit_references.category = 'served'", Boolean())


async def report_of(session: AsyncSession, day: date, tenant: str | None) -> ReportAnswer:
    """One day (UTC), of one tenant or (None) of all. What concerns the installation as a whole is
    in the report of all only.
    """
    begin = datetime.combine(day, time(), UTC)
    wanted = Filter(tenant=tenant, since=begin, until=begin + timedelta(days=1))
    denials = [
        DenialAnswer.model_validate(each) for each in await questions.denials(session, wanted)
    ]
    standing = await holds.standing(session)
    head = await store.latest_head(session) if tenant is None else None
    return ReportAnswer(
        day=day.isoformat(),
        tenant=tenant,
        cross_tenant_hits=await _cross_tenant(session, wanted),
        accesses_after_revocation=await _after_revocation(session, wanted),
        denied=sum(each.count for each in denials),
        denials=denials,
        alarms=await _count(session, wanted, Category.ALARM),
        holds=sum(tenant is None or hold.tenant in (None, tenant) for hold in standing),
        oldest_unacknowledged=await _unacknowledged(session) if tenant is None else None,
        tree_size=(await store.counter(session))[0] if tenant is None else None,
        last_head=None
        if head is None
        else HeadAnswer(size=head.size, root=head.root, at=head.at, jws=head.jws),
    )


async def _count(session: AsyncSession, wanted: Filter, category: Category) -> int:
    found = await session.scalar(
        select(func.count())
        .select_from(AuditRow)
        .where(questions.is_category(category), *wanted.where())
    )
    return found or 0


async def _cross_tenant(session: AsyncSession, wanted: Filter) -> int:
    [alien] = questions.cross_tenant().statements
    found = (
        alien.join(
            AuditRow, (AuditRow.seq == AuditReference.seq) & (AuditRow.at == AuditReference.at)
        )
        .where(*wanted.where())
        .distinct()
        .subquery()
    )
    return await session.scalar(select(func.count()).select_from(found)) or 0


async def _after_revocation(session: AsyncSession, wanted: Filter) -> int:
    """Served accesses of the day that depended on a component after the revocation that destroyed
    it was in force, and those of a sidecar after its own.
    """
    assert wanted.since is not None
    assert wanted.until is not None
    in_force = func.coalesce(Revocation.effective_at, Revocation.committed_at)
    through = (
        select(AuditReference.seq)
        .select_from(Revocation)
        .join(LogRow, (LogRow.epoch == Revocation.epoch) & (LogRow.seq == Revocation.seq))
        .join(LogComponent, LogComponent.position == LogRow.position)
        .join(NamespaceComponent, NamespaceComponent.component == LogComponent.component)
        .join(AuditReference, AuditReference.reference == NamespaceComponent.namespace)
        .where(
            _SERVED,
            AuditReference.occurred_at > in_force,
            AuditReference.occurred_at >= rfc3339(wanted.since),
            AuditReference.occurred_at < rfc3339(wanted.until),
        )
    )
    if wanted.tenant is not None:
        through = through.join(
            AuditRow, (AuditRow.seq == AuditReference.seq) & (AuditRow.at == AuditReference.at)
        ).where(AuditRow.tenant == wanted.tenant)
    by_sidecar = (
        select(AuditRow.seq)
        .join(Sidecar, Sidecar.id == AuditRow.actor)
        .join(
            Revocation,
            (Revocation.axis == Axis.SIDECAR) & Revocation.target.contains(Sidecar.id),
        )
        .where(
            Sidecar.revoked_at.is_not(None),
            questions.is_category(Category.SERVED),
            AuditRow.occurred_at > in_force,
            *wanted.where(),
        )
    )
    found = union(through, by_sidecar).subquery()
    return await session.scalar(select(func.count()).select_from(found)) or 0


async def _unacknowledged(session: AsyncSession) -> UnacknowledgedAnswer | None:
    """The oldest entry that a live sidecar has not fenced. A new epoch is unacknowledged whole."""
    head = await log_store.head(session)
    behind = (
        await session.execute(
            select(Sidecar.id, Sidecar.epoch, Sidecar.fenced_seq).where(
                Sidecar.revoked_at.is_(None)
            )
        )
    ).all()
    reached = min(
        ((fenced if epoch == head.epoch else 0, sidecar) for sidecar, epoch, fenced in behind),
        default=(head.seq, ""),
    )
    if reached[0] >= head.seq:
        return None
    row = await session.scalar(
        select(LogRow)
        .where(LogRow.epoch == head.epoch, LogRow.seq > reached[0])
        .order_by(LogRow.seq)
        .limit(1)
    )
    if row is None:
        return None
    return UnacknowledgedAnswer(
        epoch=row.epoch, seq=row.seq, at=row.at, kind=row.kind.value, sidecar=reached[1]
    )
