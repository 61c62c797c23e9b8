"""The questions of compliance, asked of the chain. Every one is scoped by tenant, here.

An access is an event of a sidecar (`access.*`), a key lease or a grant; a sidecar's events
name namespaces, and namespaces name what they depend on, so that who used a document's KV is
found whatever prompts it was part of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import ColumnElement, Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.audit import store
from service.audit.events import AuditEvent
from service.audit.models import AuditReference, AuditRow
from service.grants.models import Namespace, NamespaceComponent
from service.keys.models import Component
from service.log.chain import rfc3339
from service.registry.models import DocumentVersion
from service.revocation.models import Axis, Revocation
from strongroom.errors import Missing
from strongroom.identity import ComponentId

ACCESS_PREFIX: Final = "access."
KEY_LEASED: Final = "key.leased"
GRANT_ISSUED: Final = "grant.issued"
DENIED: Final = ("denied", "refused")
SERVED: Final = ("hit", "stored", "ok")
_PERMISSION_REASONS: Final = ("permission", "identity", "revoked", "lease", "expired", "prompt")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events. Fields that are None say nothing; times are when it happened."""

    tenant: str | None = None
    kind: str | None = None
    """Exactly this kind; ending in a dot, every kind that begins so; or a sidecar's word for
    one of its own, such as `load`."""
    actor: str | None = None
    subject: str | None = None
    target: str | None = None
    outcome: str | None = None
    reason: str | None = None
    reference: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def where(self) -> list[ColumnElement[bool]]:
        """The conditions."""
        conditions: list[ColumnElement[bool]] = []
        for name in ("tenant", "actor", "subject", "target", "outcome", "reason"):
            value = getattr(self, name)
            if value is not None:
                conditions.append(getattr(AuditRow, name) == value)
        if self.kind is not None:
            conditions.append(
                AuditRow.kind.startswith(self.kind, autoescape=True)
                if self.kind.endswith(".")
                else AuditRow.kind.in_((self.kind, ACCESS_PREFIX + self.kind))
            )
        if self.reference is not None:
            conditions.append(_refers_to(select(AuditReference.seq), [self.reference]))
        if self.since is not None:
            conditions.append(AuditRow.occurred_at >= rfc3339(self.since))
        if self.until is not None:
            conditions.append(AuditRow.occurred_at < rfc3339(self.until))
        return conditions


@dataclass(frozen=True, slots=True)
class Found:
    """Some events, and the seq to go on after if there are more."""

    events: tuple[AuditEvent, ...]
    last_seq: int | None


@dataclass(frozen=True, slots=True)
class Derived:
    """A namespace that depends on a document, and what of it is retired."""

    namespace: str
    document_versions: tuple[ComponentId, ...]
    created_at: datetime
    retired: bool
    retired_components: tuple[ComponentId, ...]
    retired_at: datetime | None


@dataclass(frozen=True, slots=True)
class Denials:
    """How often something was denied for one reason."""

    kind: str
    reason: str
    count: int


async def events(
    session: AsyncSession,
    conditions: Sequence[ColumnElement[bool]],
    after: int | None,
    limit: int,
    *,
    newest_first: bool = False,
) -> Found:
    """Up to `limit` events for which every condition holds, in the order of the chain."""
    order = AuditRow.seq.desc() if newest_first else AuditRow.seq.asc()
    statement = select(AuditRow).where(*conditions).order_by(order).limit(limit + 1)
    if after is not None:
        statement = statement.where(AuditRow.seq < after if newest_first else AuditRow.seq > after)
    rows = (await session.scalars(statement)).all()
    more, rows = len(rows) > limit, rows[:limit]
    references = await store.references_of(session, [row.seq for row in rows])
    found = tuple(store.event_of(row, references[row.seq]) for row in rows)
    return Found(found, rows[-1].seq if more else None)


def accesses() -> ColumnElement[bool]:
    """Events that are an access, or what allows one."""
    return or_(
        AuditRow.kind.startswith(ACCESS_PREFIX, autoescape=True),
        AuditRow.kind.in_((KEY_LEASED, GRANT_ISSUED)),
    )


async def versions_of(
    session: AsyncSession, document: str, tenant: str | None
) -> Sequence[ComponentId]:
    """The versions, living and removed, that `document` (or one version's id) stands for.

    Raises `Missing` for one that `tenant` does not have.
    """
    statement = select(DocumentVersion.id).where(
        or_(DocumentVersion.document == document, DocumentVersion.id == document)
    )
    if tenant is not None:
        statement = statement.where(DocumentVersion.tenant == tenant)
    versions = (await session.scalars(statement.order_by(DocumentVersion.id))).all()
    if not versions:
        raise Missing("there is no such document", field="document")
    return versions


def about(components: Sequence[str]) -> ColumnElement[bool]:
    """Events that refer to one of `components`, or to a namespace that depends on one."""
    namespaces = select(NamespaceComponent.namespace).where(
        NamespaceComponent.component.in_(components)
    )
    return or_(
        _refers_to(select(AuditReference.seq), components),
        AuditRow.seq.in_(
            select(AuditReference.seq).where(AuditReference.reference.in_(namespaces))
        ),
    )


def _refers_to(references: Select[int], wanted: Sequence[str]) -> ColumnElement[bool]:
    return AuditRow.seq.in_(references.where(AuditReference.reference.in_(wanted)))


async def derived(
    session: AsyncSession, versions: Sequence[ComponentId], after: str | None, limit: int
) -> tuple[list[Derived], str | None]:
    """The namespaces that depend on one of `versions`, and whether each is retired."""
    statement = (
        select(Namespace)
        .where(
            Namespace.id.in_(
                select(NamespaceComponent.namespace).where(
                    NamespaceComponent.component.in_(versions)
                )
            )
        )
        .order_by(Namespace.id)
        .limit(limit + 1)
    )
    if after is not None:
        statement = statement.where(Namespace.id > after)
    rows = (await session.scalars(statement)).all()
    more, rows = len(rows) > limit, rows[:limit]
    parts = await session.execute(
        select(NamespaceComponent.namespace, Component.id, Component.destroyed_at)
        .join(Component, Component.id == NamespaceComponent.component)
        .where(NamespaceComponent.namespace.in_([row.id for row in rows]))
        .order_by(NamespaceComponent.position)
    )
    components: dict[str, list[tuple[ComponentId, datetime | None]]] = {row.id: [] for row in rows}
    for namespace, component, destroyed_at in parts:
        components[namespace].append((component, destroyed_at))
    wanted = set(versions)
    answers = []
    for row in rows:
        gone = [(c, at) for c, at in components[row.id] if at is not None]
        answers.append(
            Derived(
                namespace=row.id,
                document_versions=tuple(c for c, _ in components[row.id] if c in wanted),
                created_at=row.created_at,
                retired=bool(gone),
                retired_components=tuple(c for c, _ in gone),
                retired_at=min((at for _, at in gone), default=None),
            )
        )
    return answers, rows[-1].id if more else None


def after_revocation(revocation: Revocation) -> list[ColumnElement[bool]]:
    """Accesses that were served though they depended on what was revoked: always none.

    Counted from when the revocation was in force; before that from its commit.
    """
    since = revocation.effective_at or revocation.committed_at
    conditions = [
        AuditRow.occurred_at > since,
        AuditRow.kind.startswith(ACCESS_PREFIX, autoescape=True),
        AuditRow.outcome.in_(SERVED),
    ]
    packed = revocation.components
    destroyed = [packed[at : at + 32] for at in range(0, len(packed), 32)]
    if revocation.axis is Axis.TENANT:
        return [*conditions, AuditRow.tenant == revocation.tenant]
    if revocation.axis is Axis.SIDECAR:
        return [*conditions, AuditRow.actor == _value(revocation, "sidecar")]
    if revocation.axis is Axis.SUBJECT:
        return [
            *conditions,
            AuditRow.tenant == revocation.tenant,
            or_(AuditRow.subject == _value(revocation, "subject"), about(destroyed)),
        ]
    if revocation.axis is Axis.MEMBERSHIP:
        return [
            *conditions,
            AuditRow.tenant == revocation.tenant,
            AuditRow.subject == _value(revocation, "subject"),
            about([_value(revocation, "group")]),
        ]
    return [*conditions, about(destroyed)]


async def denials(
    session: AsyncSession, conditions: Sequence[ColumnElement[bool]]
) -> list[Denials]:
    """Denials by kind and reason, the most frequent first."""
    denied = or_(
        AuditRow.outcome.in_(DENIED),
        and_(
            AuditRow.kind.startswith(ACCESS_PREFIX, autoescape=True),
            AuditRow.outcome == "miss",
            AuditRow.reason.in_(_PERMISSION_REASONS),
        ),
    )
    rows = await session.execute(
        select(AuditRow.kind, AuditRow.reason, func.count())
        .where(denied, *conditions)
        .group_by(AuditRow.kind, AuditRow.reason)
        .order_by(func.count().desc(), AuditRow.kind, AuditRow.reason)
    )
    return [Denials(kind, reason, count) for kind, reason, count in rows]


def cross_tenant() -> list[ColumnElement[bool]]:
    """Served accesses of a namespace that is another tenant's, or nobody's: always none."""
    mine = (
        select(Namespace.id)
        .where(Namespace.id == AuditReference.reference, Namespace.tenant == AuditRow.tenant)
        .correlate(AuditReference, AuditRow)
        .exists()
    )
    foreign = (
        select(AuditReference.seq)
        .where(
            AuditReference.seq == AuditRow.seq,
            func.length(AuditReference.reference) == 64,
            ~mine,
        )
        .correlate(AuditRow)
        .exists()
    )
    return [
        AuditRow.kind.startswith(ACCESS_PREFIX, autoescape=True),
        AuditRow.outcome.in_(SERVED),
        foreign,
    ]


def _value(revocation: Revocation, name: str) -> str:
    return str(json.loads(revocation.target)[name])
