"""What an ask names, found in the database: the one place where that is looked up.

A preview, a schedule and the revocation itself find it here, so that none of them tells more,
or takes more, than the others. Raises `Missing`, always the same one, for what is not there, what
is not the caller's, and what was revoked already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.auth.actor import Actor
from service.keys.models import Component
from service.registry import store as registry
from service.registry.models import SHARED, Artefact, Document, DocumentVersion
from service.revocation.ask import Ask, nothing_there
from service.revocation.models import Axis
from service.sidecars import store as sidecars
from service.sidecars.models import Sidecar
from service.tenancy import store as tenancy
from service.tenancy.models import Group, GroupKind, Membership, Principal, Tenant
from strongroom.errors import Conflict, Missing
from strongroom.identity import ComponentId


@dataclass(frozen=True, slots=True)
class SubjectTarget:
    """A subject, with the group that is its own."""

    principal: Principal


@dataclass(frozen=True, slots=True)
class MembershipTarget:
    """One subject's place in one group."""

    principal: Principal
    group: Group


@dataclass(frozen=True, slots=True)
class GroupTarget:
    """A named group."""

    group: Group


@dataclass(frozen=True, slots=True)
class DocumentTarget:
    """A document with its living versions."""

    document: Document
    versions: tuple[DocumentVersion, ...]


@dataclass(frozen=True, slots=True)
class VersionTarget:
    """One version of a document."""

    version: DocumentVersion


@dataclass(frozen=True, slots=True)
class ArtefactTarget:
    """One revision of a model, adapter, tokenizer, template or policy."""

    artefact: Artefact


@dataclass(frozen=True, slots=True)
class TenantTarget:
    """A tenant, with every component of its that lives: its own first."""

    tenant: Tenant
    owned: tuple[ComponentId, ...]


@dataclass(frozen=True, slots=True)
class SidecarTarget:
    """A sidecar that is live."""

    sidecar: Sidecar


Target = (
    SubjectTarget
    | MembershipTarget
    | GroupTarget
    | DocumentTarget
    | VersionTarget
    | ArtefactTarget
    | TenantTarget
    | SidecarTarget
)


async def find(session: AsyncSession, actor: Actor, ask: Ask) -> Target:
    """What `ask` names, if `actor` may revoke it."""
    try:
        return await _find(session, actor, ask)
    except Missing as error:
        raise nothing_there() from error


def tenant_of(target: Target) -> ComponentId | None:
    """Whose it is; None: no single tenant's."""
    match target:
        case SubjectTarget(principal):
            return principal.tenant
        case MembershipTarget(_, group) | GroupTarget(group):
            return group.tenant
        case DocumentTarget(document, _):
            return document.tenant
        case VersionTarget(version):
            return version.tenant
        case ArtefactTarget(artefact):
            return None if artefact.scope == SHARED else ComponentId(artefact.scope)
        case TenantTarget(tenant, _):
            return tenant.id
        case SidecarTarget():
            return None
        case _:
            assert_never(target)


def components_of(target: Target) -> tuple[ComponentId, ...]:
    """The components whose secrets go with it; one may be gone already."""
    match target:
        case SubjectTarget(principal):
            return (principal.private_group,)
        case GroupTarget(group):
            return (group.id,)
        case DocumentTarget(_, versions):
            return tuple(version.id for version in versions)
        case VersionTarget(version):
            return (version.id,)
        case ArtefactTarget(artefact):
            return (artefact.id,)
        case TenantTarget(_, owned):
            return owned
        case MembershipTarget() | SidecarTarget():
            return ()
        case _:
            assert_never(target)


async def _find(session: AsyncSession, actor: Actor, ask: Ask) -> Target:
    tenant = ask.tenant if ask.tenant is not None else await _owner(session, ask)
    match ask.axis:
        case Axis.SUBJECT:
            return SubjectTarget(await tenancy.get_principal(session, tenant or "", ask.target))
        case Axis.MEMBERSHIP:
            principal = await tenancy.get_principal(session, tenant or "", ask.target)
            group = await tenancy.get_group(session, tenant or "", ask.group or "")
            if await session.get(Membership, (group.id, principal.id)) is None:
                raise nothing_there()
            return MembershipTarget(principal, group)
        case Axis.GROUP:
            group = await tenancy.get_group(session, tenant or "", ask.target)
            if group.kind is not GroupKind.NAMED:
                raise Conflict("this group goes with its owner: revoke the subject or the tenant")
            return GroupTarget(group)
        case Axis.DOCUMENT:
            document = await registry.get_document(session, tenant or "", ask.target)
            versions = await registry.living_versions(session, document)
            return DocumentTarget(document, tuple(versions))
        case Axis.DOCUMENT_VERSION:
            return VersionTarget(await registry.get_version(session, tenant or "", ask.target))
        case Axis.MODEL | Axis.ADAPTER | Axis.TOKENIZER | Axis.TEMPLATE | Axis.POLICY:
            return ArtefactTarget(await _artefact(session, actor, ask))
        case Axis.TENANT:
            found = await tenancy.get_tenant(session, ask.target)
            return TenantTarget(found, tuple(await _owned(session, found.id)))
        case Axis.SIDECAR:
            sidecar = await sidecars.get(session, ask.target)
            if sidecar.revoked_at is not None:
                raise nothing_there()
            return SidecarTarget(sidecar)
        case _:
            assert_never(ask.axis)


async def _owner(session: AsyncSession, ask: Ask) -> str | None:
    """The tenant of what is named by an id alone, which only an operator may leave open."""
    match ask.axis:
        case Axis.MEMBERSHIP | Axis.GROUP:
            wanted = ask.group or ask.target
            return await session.scalar(select(Group.tenant).where(Group.id == wanted))
        case Axis.DOCUMENT:
            return await session.scalar(select(Document.tenant).where(Document.id == ask.target))
        case Axis.DOCUMENT_VERSION:
            return await session.scalar(
                select(DocumentVersion.tenant).where(DocumentVersion.id == ask.target)
            )
        case _:
            return None


async def _artefact(session: AsyncSession, actor: Actor, ask: Ask) -> Artefact:
    artefact = await registry.get_artefact(session, ask.target, None)
    mine = actor.tenant is None or actor.tenant == artefact.scope
    if artefact.kind.value != ask.axis.value or not mine:
        raise nothing_there()
    return artefact


async def _owned(session: AsyncSession, tenant: ComponentId) -> Sequence[ComponentId]:
    """The tenant's own component is in every namespace of the tenant: naming it retires them
    all, however many others there are.
    """
    rows = await session.scalars(
        select(Component.id).where(
            Component.tenant == tenant, Component.wrapped.is_not(None), Component.id != tenant
        )
    )
    return [tenant, *rows]
