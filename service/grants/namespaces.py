"""Which namespaces exist and what they depend on. The caller's session commits."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.base import now
from service.db.insert import insert_missing
from service.grants.models import Namespace, NamespaceComponent
from strongroom.identity import CacheIdentity, ComponentId, NamespaceId


async def ensure(session: AsyncSession, identity: CacheIdentity) -> NamespaceId:
    """Record the namespace of `identity` unless it is known, and return its id."""
    namespace = identity.namespace
    if await session.get(Namespace, namespace) is not None:
        return namespace
    await insert_missing(
        session,
        Namespace,
        [{"id": namespace, "tenant": identity.tenant, "created_at": now()}],
    )
    await insert_missing(
        session,
        NamespaceComponent,
        [
            {"namespace": namespace, "component": component, "position": position}
            for position, component in enumerate(identity.components())
        ],
    )
    return namespace


async def components_of(session: AsyncSession, namespace: NamespaceId) -> tuple[ComponentId, ...]:
    """The components of `namespace` in canonical order; empty if it is not known."""
    rows = await session.scalars(
        select(NamespaceComponent.component)
        .where(NamespaceComponent.namespace == namespace)
        .order_by(NamespaceComponent.position)
    )
    return tuple(rows.all())


async def containing(session: AsyncSession, component: ComponentId) -> Sequence[NamespaceId]:
    """Every namespace that depends on `component`."""
    rows = await session.scalars(
        select(NamespaceComponent.namespace)
        .where(NamespaceComponent.component == component)
        .order_by(NamespaceComponent.namespace)
    )
    return rows.all()
