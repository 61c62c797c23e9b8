"""Artefacts, documents and versions over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from sqlalchemy import or_, select

from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.scope import Scoped, in_scope, permitted, scoped
from service.db.pages import read_page
from service.http_page import PagingDep
from service.keys import components
from service.registry import store
from service.registry.idempotency import IdempotencyKey, attempt
from service.registry.models import SHARED, Artefact, ArtefactKind, Document, DocumentVersion
from service.registry.schemas import (
    ArtefactAnswer,
    ArtefactBody,
    ArtefactPage,
    DocumentAnswer,
    DocumentBody,
    DocumentPage,
    UpgradeAnswer,
    UpgradeBody,
    VersionAnswer,
    VersionBody,
    VersionPage,
)
from service.runtime import RuntimeDep
from service.schemas import PATH_PATTERN
from service.tenancy import store as tenancy
from strongroom.errors import Missing
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind

artefacts = APIRouter(prefix="/v1/artefacts", tags=["registry"])
documents = APIRouter(prefix="/v1/tenants/{tenant}/documents", tags=["registry"])

ComponentPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Registrar = Annotated[Actor, Depends(permitted(Permission.ARTEFACT_WRITE))]
Browser = Annotated[Actor, Depends(permitted(Permission.ARTEFACT_READ))]
Reader = Annotated[Scoped, Depends(scoped(Permission.DOCUMENT_READ))]
Writer = Annotated[Scoped, Depends(scoped(Permission.DOCUMENT_WRITE))]


def _may_write(actor: Actor, scope: str) -> None:
    """Shared artefacts belong to the installation, so a tenant's own caller can't touch them."""
    if scope == SHARED:
        if actor.tenant is not None:
            raise Missing("there is no such artefact", field="artefact")
    else:
        in_scope(actor, scope)


@artefacts.post("", status_code=HTTPStatus.CREATED, summary="Register an artefact")
async def register_artefact(
    runtime: RuntimeDep, actor: Registrar, body: ArtefactBody, key: IdempotencyKey = None
) -> ArtefactAnswer:
    """A model, adapter, tokenizer, template or content policy, with a component of its own."""
    _may_write(actor, body.scope)
    once = attempt(key, actor, body.scope, "artefacts", body)
    async with runtime.changes.begin(actor) as change:
        if once is not None and (earlier := await once.earlier(change.session)) is not None:
            return ArtefactAnswer.model_validate_json(earlier)
        if body.scope != SHARED:
            await tenancy.get_tenant(change.session, body.scope)
        artefact = await store.register_artefact(
            change.session,
            kind=body.kind,
            scope=body.scope,
            name=body.name,
            revision=body.revision,
            digest=body.digest,
        )
        answer = ArtefactAnswer.model_validate(artefact)
        if once is not None:
            await once.remember(change.session, answer)
        await change.audit(
            "artefact.registered",
            tenant=None if body.scope == SHARED else body.scope,
            target=artefact.id,
            details={"kind": body.kind.value, "name": body.name, "revision": body.revision},
        )
    return answer


@artefacts.get("", summary="List artefacts")
async def list_artefacts(
    runtime: RuntimeDep,
    actor: Browser,
    paging: PagingDep,
    kind: Annotated[ArtefactKind | None, Query(description="Only of this kind.")] = None,
    name: Annotated[
        str | None, Query(max_length=128, pattern=PATH_PATTERN, description="Only this name.")
    ] = None,
) -> ArtefactPage:
    """The living artefacts that the caller may use."""
    statement = select(Artefact).where(Artefact.removed_at.is_(None))
    if actor.tenant is not None:
        statement = statement.where(or_(Artefact.scope == SHARED, Artefact.scope == actor.tenant))
    if kind is not None:
        statement = statement.where(Artefact.kind == kind)
    if name is not None:
        statement = statement.where(Artefact.name == name)
    async with runtime.sessions() as session:
        page = await read_page(session, statement, Artefact.id, paging)
    return ArtefactPage(
        items=[ArtefactAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@artefacts.get("/{artefact}", summary="Read an artefact")
async def read_artefact(
    runtime: RuntimeDep, actor: Browser, artefact: ComponentPath
) -> ArtefactAnswer:
    """An artefact, by id."""
    async with runtime.sessions() as session:
        found = await store.get_artefact(session, artefact, actor.tenant)
    return ArtefactAnswer.model_validate(found)


@artefacts.post(
    "/{artefact}/upgrade", status_code=HTTPStatus.CREATED, summary="Upgrade an artefact"
)
async def upgrade_artefact(
    runtime: RuntimeDep, actor: Registrar, artefact: ComponentPath, body: UpgradeBody
) -> UpgradeAnswer:
    """Register the new revision and destroy the old component, in one change."""
    async with runtime.changes.begin(actor) as change:
        old = await store.get_artefact(change.session, artefact, actor.tenant)
        _may_write(actor, old.scope)
        scope = old.scope  # the row is expired once it is removed
        new = await store.register_artefact(
            change.session,
            kind=old.kind,
            scope=scope,
            name=old.name,
            revision=body.revision,
            digest=body.digest,
        )
        await store.remove_artefact(change.session, old)
        destroyed = await components.destroy(change.session, [ComponentId(artefact)])
        tenant = None if scope == SHARED else scope
        await change.invalidate(
            kind=InvalidationKind.COMPONENTS, tenant=tenant, components=destroyed
        )
        await change.audit(
            "artefact.upgraded",
            tenant=tenant,
            target=artefact,
            details={"replaced_by": new.id, "revision": body.revision},
            references=(new.id,),
        )
    return UpgradeAnswer(**ArtefactAnswer.model_validate(new).model_dump(), replaced=artefact)


@documents.post("", status_code=HTTPStatus.CREATED, summary="Register a document")
async def register_document(
    runtime: RuntimeDep, scope: Writer, body: DocumentBody, key: IdempotencyKey = None
) -> DocumentAnswer:
    """A document without versions yet."""
    once = attempt(key, scope.actor, scope.tenant, "documents", body)
    async with runtime.changes.begin(scope.actor) as change:
        await tenancy.get_tenant(change.session, scope.tenant)
        if once is not None and (earlier := await once.earlier(change.session)) is not None:
            return DocumentAnswer.model_validate_json(earlier)
        document = await store.create_document(change.session, scope.tenant, body.name)
        answer = DocumentAnswer.model_validate(document)
        if once is not None:
            await once.remember(change.session, answer)
        await change.audit(
            "document.registered",
            tenant=scope.tenant,
            target=document.id,
            details={"name": body.name},
        )
    return answer


@documents.get("", summary="List documents")
async def list_documents(runtime: RuntimeDep, scope: Reader, paging: PagingDep) -> DocumentPage:
    """The living documents of a tenant."""
    statement = select(Document).where(
        Document.tenant == scope.tenant, Document.removed_at.is_(None)
    )
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        page = await read_page(session, statement, Document.id, paging)
    return DocumentPage(
        items=[DocumentAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@documents.get("/{document}", summary="Read a document")
async def read_document(
    runtime: RuntimeDep, scope: Reader, document: ComponentPath
) -> DocumentAnswer:
    """A document, by id."""
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        found = await store.get_document(session, scope.tenant, document)
    return DocumentAnswer.model_validate(found)


@documents.post(
    "/{document}/versions", status_code=HTTPStatus.CREATED, summary="Register a version"
)
async def register_version(
    runtime: RuntimeDep,
    scope: Writer,
    document: ComponentPath,
    body: VersionBody,
    key: IdempotencyKey = None,
) -> VersionAnswer:
    """Another text or access group of a document: another version, another component."""
    once = attempt(key, scope.actor, scope.tenant, f"documents/{document}", body)
    async with runtime.changes.begin(scope.actor) as change:
        await tenancy.get_tenant(change.session, scope.tenant)
        if once is not None and (earlier := await once.earlier(change.session)) is not None:
            return VersionAnswer.model_validate_json(earlier)
        found = await store.get_document(change.session, scope.tenant, document)
        version = await store.register_version(
            change.session,
            found,
            content_digest=body.content_digest,
            group=body.group,
            sensitivity=body.sensitivity,
        )
        answer = VersionAnswer.model_validate(version)
        if once is not None:
            await once.remember(change.session, answer)
        await change.audit(
            "document_version.registered",
            tenant=scope.tenant,
            target=version.id,
            details={"document": found.id},
            references=(found.id, version.group),
        )
    return answer


@documents.get("/{document}/versions", summary="List versions")
async def list_versions(
    runtime: RuntimeDep, scope: Reader, document: ComponentPath, paging: PagingDep
) -> VersionPage:
    """The living versions of a document."""
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        found = await store.get_document(session, scope.tenant, document)
        statement = select(DocumentVersion).where(
            DocumentVersion.document == found.id, DocumentVersion.removed_at.is_(None)
        )
        page = await read_page(session, statement, DocumentVersion.id, paging)
    return VersionPage(
        items=[VersionAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )
