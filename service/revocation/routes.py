"""Revocations over HTTP."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Query, Response
from sqlalchemy import select

from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.scope import permitted
from service.db.pages import read_page
from service.http_page import PagingDep
from service.registry.idempotency import IdempotencyKey
from service.revocation import store
from service.revocation.ask import check_ask
from service.revocation.desk import RevocationDesk
from service.revocation.models import Revocation
from service.revocation.schemas import (
    AskBody,
    PreviewAnswer,
    RevocationAnswer,
    RevocationBody,
    RevocationPage,
    RevocationSummary,
)
from service.runtime import Runtime, RuntimeDep

router = APIRouter(prefix="/v1/revocations", tags=["revocations"])

RevocationId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Reader = Annotated[Actor, Depends(permitted(Permission.REVOCATION_READ))]


WAIT_S_MAX: Final = 60.0


def desk_of(runtime: Runtime) -> RevocationDesk:
    """The desk that revokes with this runtime."""
    return runtime.revocations.desk


@router.post(
    "",
    summary="Revoke",
    responses={202: {"description": "Committed; not yet in force.", "model": RevocationAnswer}},
)
async def revoke(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.REVOCATION_CREATE))],
    body: RevocationBody,
    response: Response,
    key: IdempotencyKey = None,
) -> RevocationAnswer:
    """Retire a subject, a membership, a group, a document, a version, an artefact, a tenant or
    a sidecar. What it destroys stays destroyed.

    Answered once no sidecar can serve it any more, which is within one serving lease; at
    `deadline_s` at the latest, and with `wait` false as soon as it is committed and journalled.
    A legal hold keeps audit records; it stops no revocation.
    """
    desk = desk_of(runtime)
    ask = check_ask(actor, body.axis, body.target, body.tenant, body.group, body.reason)
    revocation = await desk.revoke(actor, ask, key)
    runtime.revocations.ask()
    if body.wait:
        await desk.wait(revocation, body.deadline_s)
    answer = await _answer(runtime, revocation, actor)
    response.headers["Location"] = f"/v1/revocations/{revocation}"
    if answer.in_force_at is None:
        response.status_code = HTTPStatus.ACCEPTED
    return answer


@router.post("/preview", summary="Preview a revocation")
async def preview_revocation(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.REVOCATION_CREATE))],
    body: AskBody,
) -> PreviewAnswer:
    """What revoking this would take now. Nothing is changed."""
    ask = check_ask(actor, body.axis, body.target, body.tenant, body.group, body.reason)
    return PreviewAnswer.of(ask, await desk_of(runtime).preview(actor, ask))


@router.get("", summary="List revocations")
async def list_revocations(runtime: RuntimeDep, actor: Reader, paging: PagingDep) -> RevocationPage:
    """Those that the caller may see."""
    statement = select(Revocation)
    if actor.tenant is not None:
        statement = statement.where(Revocation.tenant == actor.tenant)
    async with runtime.sessions() as session:
        page = await read_page(session, statement, Revocation.id, paging)
    return RevocationPage(
        items=[
            RevocationSummary(
                id=row.id,
                axis=row.axis,
                tenant=row.tenant,
                target=json.loads(row.target),
                reason=row.reason,
                committed_at=row.committed_at,
                in_force_at=row.effective_at,
            )
            for row in page.rows
        ],
        next_cursor=page.next_cursor,
    )


@router.get("/{revocation}", summary="Read a revocation")
async def read_revocation(
    runtime: RuntimeDep,
    actor: Reader,
    revocation: RevocationId,
    wait_s: Annotated[
        float, Query(ge=0, le=WAIT_S_MAX, description="Wait so long for it to be in force.")
    ] = 0.0,
) -> RevocationAnswer:
    """Where each sidecar stands, and whether the erasure is final."""
    if wait_s:
        async with runtime.sessions() as session:
            await store.get(session, revocation, actor.tenant)
        await desk_of(runtime).wait(revocation, wait_s)
    return await _answer(runtime, revocation, actor)


async def _answer(runtime: Runtime, revocation: str, actor: Actor) -> RevocationAnswer:
    async with runtime.sessions() as session:
        await store.get(session, revocation, actor.tenant)
    await desk_of(runtime).settle(revocation)
    async with runtime.sessions() as session:
        row = await store.get(session, revocation, actor.tenant)
        return RevocationAnswer.of(
            row, await store.erased(session, row), await store.standings(session, revocation)
        )
