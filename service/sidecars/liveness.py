"""Which namespaces are retired for ever: asked in batches, after a sidecar's restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.grants.models import Namespace, NamespaceComponent
from service.keys.models import Component
from service.sidecars.store import Enrolled
from strongroom.errors import Misuse
from strongroom.identity import parse_namespace_id

BATCH_MAX: Final = 4096
_IN_MAX: Final = 500


async def retired(session: AsyncSession, sidecar: Enrolled, namespaces: Sequence[str]) -> list[str]:
    """Those of `namespaces` that lack a component's secret.

    A namespace that is not known here, or is another tenant's, is not among them: nothing is
    said about it.
    """
    if len(namespaces) > BATCH_MAX:
        raise Misuse("too many namespaces at once", field="namespaces", limit=BATCH_MAX)
    names = [parse_namespace_id(namespace, "namespaces") for namespace in namespaces]
    found: list[str] = []
    for start in range(0, len(names), _IN_MAX):
        rows = await session.execute(
            select(Namespace.id, Namespace.tenant)
            .join(NamespaceComponent, NamespaceComponent.namespace == Namespace.id)
            .join(Component, Component.id == NamespaceComponent.component)
            .where(Namespace.id.in_(names[start : start + _IN_MAX]), Component.wrapped.is_(None))
            .distinct()
        )
        found += [str(namespace) for namespace, tenant in rows if sidecar.may_lease(tenant)]
    return sorted(found)
