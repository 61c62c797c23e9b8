"""Legal holds over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from sqlalchemy import select

from policy.permissions import Permission
from service.audit import export, holds
from service.audit.asking import STREAMS, FormatQuery, Reader, tenant_of
from service.audit.export import Format
from service.audit.models import AuditHold
from service.audit.schemas import HoldAnswer, HoldBody, HoldPage
from service.auth.actor import Actor
from service.auth.scope import permitted
from service.db.pages import read_page
from service.http_page import PagingDep
from service.runtime import RuntimeDep

router = APIRouter(prefix="/v1/audit/holds", tags=["audit"])
Holder = Annotated[Actor, Depends(permitted(Permission.AUDIT_HOLD))]
HoldId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.post("", status_code=HTTPStatus.CREATED, summary="Place a legal hold")
async def place_hold(runtime: RuntimeDep, actor: Holder, body: HoldBody) -> HoldAnswer:
    """What it covers is not purged while it stands. It stops no revocation."""
    tenant = tenant_of(actor, body.tenant)
    async with runtime.changes.begin(actor) as change:
        hold = await holds.place(change, tenant, body.since, body.until, body.reason)
    return HoldAnswer.model_validate(hold)


@router.get("", summary="List legal holds", response_model=HoldPage, responses=STREAMS)
async def list_holds(
    runtime: RuntimeDep,
    actor: Reader,
    paging: PagingDep,
    form: FormatQuery = Format.JSON,
    *,
    standing: Annotated[bool, Query(description="Only those that are not released.")] = False,
) -> HoldPage | Response:
    """Those that the caller may see, released or not."""
    statement = select(AuditHold)
    if actor.tenant is not None:
        statement = statement.where(AuditHold.tenant == actor.tenant)
    if standing:
        statement = statement.where(AuditHold.released_at.is_(None))
    async with runtime.sessions() as session:
        if form is not Format.JSON:
            rows = (await session.scalars(statement.order_by(AuditHold.id))).all()
            answers = [HoldAnswer.model_validate(row) for row in rows]
            return export.response(
                form, "holds", export.of_rows(form, HoldAnswer, export.once(answers))
            )
        page = await read_page(session, statement, AuditHold.id, paging)
    return HoldPage(
        items=[HoldAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.delete("/{hold}", summary="Release a legal hold")
async def release_hold(runtime: RuntimeDep, actor: Holder, hold: HoldId) -> HoldAnswer:
    """What it covered is purged by the next purge, if its retention is over."""
    async with runtime.changes.begin(actor) as change:
        released = await holds.release(change, hold, actor.tenant)
    return HoldAnswer.model_validate(released)
