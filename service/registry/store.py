"""Registering and finding artefacts, documents and versions. The caller's session commits.

Only registration makes components. Removing marks the row; the caller destroys the component
in the same change, because both must be one entry of the log.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from policy.conditions import Sensitivity
from service.db.base import now
from service.keys import components
from service.registry.models import SHARED, Artefact, ArtefactKind, Document, DocumentVersion
from service.tenancy import store as tenancy
from strongroom.errors import Conflict, Missing
from strongroom.identity import ComponentId, ComponentKind


async def register_artefact(
    session: AsyncSession,
    *,
    kind: ArtefactKind,
    scope: str,
    name: str,
    revision: str,
    digest: str,
) -> Artefact:
    """A new artefact with its component. Raises `Conflict`, with the id, if it is there."""
    existing = await session.scalar(
        select(Artefact.id).where(
            Artefact.scope == scope,
            Artefact.kind == kind,
            Artefact.name == name,
            Artefact.revision == revision,
            Artefact.removed_at.is_(None),
        )
    )
    if existing is not None:
        raise Conflict(
            f"this revision is registered already: {existing}", field="revision", limit=existing
        )
    tenant = None if scope == SHARED else ComponentId(scope)
    component = await components.register(session, kind.component, tenant)
    artefact = Artefact(
        id=component,
        kind=kind,
        scope=scope,
        name=name,
        revision=revision,
        digest=digest,
        created_at=now(),
    )
    session.add(artefact)
    await _flush(session, "revision")
    return artefact


async def get_artefact(
    session: AsyncSession, artefact: str, tenant: ComponentId | None
) -> Artefact:
    """A living artefact that `tenant` may use; None sees every one. Raises `Missing`."""
    statement = select(Artefact).where(Artefact.id == artefact, Artefact.removed_at.is_(None))
    if tenant is not None:
        statement = statement.where(or_(Artefact.scope == SHARED, Artefact.scope == tenant))
    found: Artefact | None = await session.scalar(statement)
    if found is None:
        raise Missing("there is no such artefact", field="artefact")
    return found


async def remove_artefact(session: AsyncSession, artefact: Artefact) -> None:
    """Mark an artefact as removed; the caller destroys its component."""
    artefact.removed_at = now()
    await session.flush()


async def create_document(session: AsyncSession, tenant: ComponentId, name: str) -> Document:
    """A new document without versions. Raises `Conflict`, with the id, if it is there."""
    existing = await session.scalar(
        select(Document.id).where(
            Document.tenant == tenant, Document.name == name, Document.removed_at.is_(None)
        )
    )
    if existing is not None:
        raise Conflict(f"a document has this name: {existing}", field="name", limit=existing)
    document = Document(id=secrets.token_hex(16), tenant=tenant, name=name, created_at=now())
    session.add(document)
    await _flush(session, "name")
    return document


async def get_document(session: AsyncSession, tenant: str, document: str) -> Document:
    """A living document of this tenant. Raises `Missing`."""
    found: Document | None = await session.scalar(
        select(Document).where(
            Document.id == document, Document.tenant == tenant, Document.removed_at.is_(None)
        )
    )
    if found is None:
        raise Missing("there is no such document", field="document")
    return found


async def register_version(
    session: AsyncSession,
    document: Document,
    *,
    content_digest: str,
    group: str,
    sensitivity: Sensitivity = Sensitivity.RESTRICTED,
) -> DocumentVersion:
    """A new version of `document`, readable by `group`. Raises `Conflict` if it is there."""
    owner = await tenancy.get_group(session, document.tenant, group)
    existing = await session.scalar(
        select(DocumentVersion.id).where(
            DocumentVersion.document == document.id,
            DocumentVersion.content_digest == content_digest,
            DocumentVersion.group == owner.id,
            DocumentVersion.removed_at.is_(None),
        )
    )
    if existing is not None:
        raise Conflict(
            f"this version is registered already: {existing}",
            field="content_digest",
            limit=existing,
        )
    component = await components.register(session, ComponentKind.DOCUMENT_VERSION, document.tenant)
    version = DocumentVersion(
        id=component,
        document=document.id,
        tenant=document.tenant,
        group=owner.id,
        content_digest=content_digest,
        sensitivity=sensitivity,
        created_at=now(),
    )
    session.add(version)
    await _flush(session, "content_digest")
    return version


async def get_version(session: AsyncSession, tenant: str, version: str) -> DocumentVersion:
    """A living document version of this tenant. Raises `Missing`."""
    found: DocumentVersion | None = await session.scalar(
        select(DocumentVersion).where(
            DocumentVersion.id == version,
            DocumentVersion.tenant == tenant,
            DocumentVersion.removed_at.is_(None),
        )
    )
    if found is None:
        raise Missing("there is no such document version", field="version")
    return found


async def find_versions(
    session: AsyncSession, tenant: str, versions: Collection[str]
) -> Mapping[str, DocumentVersion]:
    """Those of `versions` that live in this tenant, by id."""
    rows = await session.scalars(
        select(DocumentVersion).where(
            DocumentVersion.id.in_(versions),
            DocumentVersion.tenant == tenant,
            DocumentVersion.removed_at.is_(None),
        )
    )
    return {str(row.id): row for row in rows}


async def living_versions(session: AsyncSession, document: Document) -> Sequence[DocumentVersion]:
    """Every living version of a document."""
    rows = await session.scalars(
        select(DocumentVersion)
        .where(DocumentVersion.document == document.id, DocumentVersion.removed_at.is_(None))
        .order_by(DocumentVersion.created_at, DocumentVersion.id)
    )
    return rows.all()


async def remove_version(session: AsyncSession, version: DocumentVersion) -> None:
    """Mark a version as removed; the caller destroys its component."""
    version.removed_at = now()
    await session.flush()


async def remove_document(session: AsyncSession, document: Document) -> Sequence[DocumentVersion]:
    """Mark a document and its versions as removed; the caller destroys the components."""
    versions = await living_versions(session, document)
    moment = now()
    for version in versions:
        version.removed_at = moment
    document.removed_at = moment
    await session.flush()
    return versions


async def _flush(session: AsyncSession, field: str) -> None:
    try:
        await session.flush()
    except IntegrityError as error:
        # Two registrations of one natural key at once: the unique index decides.
        raise Conflict(f"this {field} was registered just now", field=field) from error
