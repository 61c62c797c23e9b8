"""The questions of compliance, asked of the chain. Every one is scoped by tenant, here.

An access is an event of a sidecar (`access.*`), a key lease or a grant; a sidecar's events
name namespaces, and namespaces name what they depend on, so that who used a document's KV is
found whatever prompts it was part of. Each question is a `Search`, which `search` pages through.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Boolean, ColumnElement, Select, func, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.audit.events import ACCESS_PREFIX, GRANT_ISSUED, KEY_LEASED, Category
from service.audit.models import AuditReference, AuditRow
from service.audit.search import Candidates, Referring, Search, Selected
from service.grants.models import Namespace, NamespaceComponent
from service.keys.models import Component
from service.log.chain import rfc3339
from service.log.models import LogComponent, LogRow
from service.registry.models import DocumentVersion
from service.revocation.models import Axis, Revocation
from strongroom.errors import Missing
from strongroom.identity import ComponentId

_INDEXED: Final = (Category.DENIED, Category.KEY, Category.ALARM)
"""Categories with an index of their own, whose condition has to be a constant."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events. Fields that are None say nothing; times are when it happened."""

    tenant: str | None = None
    category: Category | None = None
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

    def search(self, candidates: Candidates | None = None) -> Search:
        """What fits, among `candidates` if they are given."""
        if self.reference is not None and candidates is None:
            candidates = Referring((self.reference,))
        elif self.reference is not None:
            refers = select(AuditReference.seq).where(AuditReference.reference == self.reference)
            return Search((*self.where(), AuditRow.seq.in_(refers)), candidates)
        return Search(tuple(self.where()), candidates)

    def where(self) -> list[ColumnElement[bool]]:
        """The conditions, but for the reference."""
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
        if self.category is not None or self.outcome == "alarm":
            conditions.append(is_category(self.category or Category.ALARM))
        if self.since is not None:
            conditions.append(AuditRow.occurred_at >= rfc3339(self.since))
        if self.until is not None:
            conditions.append(AuditRow.occurred_at < rfc3339(self.until))
        return conditions


@dataclass(frozen=True, slots=True)
class Derived:
    """A namespace that depends on a document, and what of it is retired."""

    namespace: str
    document_versions: tuple[ComponentId, ...]
    created_at: datetime
    retired: bool
    retired_components: tuple[ComponentId, ...]
    retired_at: datetime | None
    revocations: tuple[str, ...]
    """Those that retired it: their certificates are the proof that it is gone."""


@dataclass(frozen=True, slots=True)
class Denials:
    """How often something was denied for one reason."""

    kind: str
    reason: str
    count: int


def is_category(category: Category) -> ColumnElement[bool]:
    """Events of one category. A constant, where a partial index has to be recognised."""
    if category in _INDEXED:
        return literal_column(f"audit_events.category = '{category.value}'", Boolean())
    return AuditRow.category == category


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


async def depending_on(
    session: AsyncSession, ids: Sequence[str], category: Category | None = None
) -> Referring:
    """Events about components or namespaces, or about a namespace that depends on one of them."""
    namespaces = await session.scalars(
        select(NamespaceComponent.namespace)
        .where(NamespaceComponent.component.in_(ids))
        .distinct()
        .order_by(NamespaceComponent.namespace)
    )
    return Referring((*ids, *namespaces), category)


def served_through(components: Sequence[str], since: str) -> Selected:
    """Served accesses after a moment of what depends on one of `components`.

    As a rule there are none, so they are not looked up in order but all at once.
    """
    dead = select(NamespaceComponent.namespace).where(NamespaceComponent.component.in_(components))
    served = select(AuditReference.seq, AuditReference.at, AuditReference.occurred_at).where(
        literal_column("audit_references.category = 'served'", Boolean()),
        AuditReference.occurred_at > since,
    )
    return Selected(
        (
            served.where(AuditReference.reference.in_(dead)),
            served.where(AuditReference.reference.in_(components)),
        )
    )


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
    by = await _retired_by(session, {c for each in components.values() for c, at in each if at})
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
                revocations=tuple(sorted({by[c] for c, _ in gone if c in by})),
            )
        )
    return answers, rows[-1].id if more else None


async def _retired_by(
    session: AsyncSession, components: Iterable[ComponentId]
) -> dict[ComponentId, str]:
    """The revocation that retired each component, where one did."""
    rows = await session.execute(
        select(LogComponent.component, Revocation.id)
        .join(LogRow, LogRow.position == LogComponent.position)
        .join(Revocation, (Revocation.epoch == LogRow.epoch) & (Revocation.seq == LogRow.seq))
        .where(LogComponent.component.in_(list(components)))
    )
    return {row.component: row.id for row in rows}


def after_revocation(revocation: Revocation) -> Search:
    """Accesses that were served though they depended on what was revoked: always none.

    Counted from when the revocation was in force; before that from its commit.
    """
    since = revocation.effective_at or revocation.committed_at
    served = (AuditRow.occurred_at > since, is_category(Category.SERVED))
    packed = revocation.components
    destroyed = [packed[at : at + 32] for at in range(0, len(packed), 32)]
    through = served_through(destroyed, since)
    own = AuditRow.tenant == revocation.tenant
    match revocation.axis:
        case Axis.TENANT:
            return Search((*served, own))
        case Axis.SIDECAR:
            return Search((*served, AuditRow.actor == _value(revocation, "sidecar")))
        case Axis.SUBJECT:
            by_subject = select(AuditRow.seq, AuditRow.at, AuditRow.occurred_at).where(
                *served, own, AuditRow.subject == _value(revocation, "subject")
            )
            return Search((*served, own), Selected((by_subject, *through.statements)))
        case Axis.MEMBERSHIP:
            subject = AuditRow.subject == _value(revocation, "subject")
            group = served_through([_value(revocation, "group")], since)
            return Search((*served, own, subject), group)
        case (
            Axis.GROUP
            | Axis.DOCUMENT
            | Axis.DOCUMENT_VERSION
            | Axis.MODEL
            | Axis.ADAPTER
            | Axis.TOKENIZER
            | Axis.TEMPLATE
            | Axis.POLICY
        ):
            return Search(served, through)


async def denials(session: AsyncSession, wanted: Filter) -> list[Denials]:
    """Denials by kind and reason, the most frequent first."""
    rows = await session.execute(denials_statement(wanted))
    return [Denials(*row) for row in rows]


def denials_statement(wanted: Filter) -> Select[str, str, int]:
    """Counted in an index of denied events alone."""
    conditions = wanted.where()
    if wanted.reference is not None:
        refers = select(AuditReference.seq).where(AuditReference.reference == wanted.reference)
        conditions.append(AuditRow.seq.in_(refers))
    return (
        select(AuditRow.kind, AuditRow.reason, func.count())
        .where(is_category(Category.DENIED), *conditions)
        .group_by(AuditRow.kind, AuditRow.reason)
        .order_by(func.count().desc(), AuditRow.kind, AuditRow.reason)
    )


def cross_tenant() -> Selected:
    """Served accesses of a namespace that is another tenant's, or nobody's: always none."""
    alien = select(AuditReference.seq, AuditReference.at, AuditReference.occurred_at)
    return Selected((alien.where(literal_column("audit_references.alien", Boolean())),))


def _value(revocation: Revocation, name: str) -> str:
    return str(json.loads(revocation.target)[name])
