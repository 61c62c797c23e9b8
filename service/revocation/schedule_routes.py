"""Scheduled revocations over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from sqlalchemy import select

from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.scope import permitted
from service.db.pages import read_page
from service.http_page import PagingDep
from service.registry.idempotency import IdempotencyKey
from service.revocation import schedule
from service.revocation.ask import check_ask
from service.revocation.models import ScheduledRevocation, ScheduleState
from service.revocation.schemas import ScheduleBody, ScheduledAnswer, ScheduledPage
from service.runtime import RuntimeDep

router = APIRouter(prefix="/v1/scheduled-revocations", tags=["revocations"])

ScheduledId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Asker = Annotated[Actor, Depends(permitted(Permission.REVOCATION_CREATE))]
Reader = Annotated[Actor, Depends(permitted(Permission.REVOCATION_READ))]


@router.post("", status_code=HTTPStatus.CREATED, summary="Schedule a revocation")
async def schedule_revocation(
    runtime: RuntimeDep,
    actor: Asker,
    body: ScheduleBody,
    response: Response,
    key: IdempotencyKey = None,
) -> ScheduledAnswer:
    """Carried out at its time, once, under the same id, by the right of whoever asks."""
    ask = check_ask(actor, body.axis, body.target, body.tenant, body.group, body.reason)
    row = await runtime.revocations.desk.schedule(actor, ask, body.at, key)
    answer = ScheduledAnswer.of(row)
    runtime.revocations.ask()
    response.headers["Location"] = f"/v1/scheduled-revocations/{answer.id}"
    return answer


@router.get("", summary="List scheduled revocations")
async def list_scheduled_revocations(
    runtime: RuntimeDep,
    actor: Reader,
    paging: PagingDep,
    state: Annotated[ScheduleState | None, Query(description="Only those.")] = None,
) -> ScheduledPage:
    """Those that the caller may see, whatever became of them."""
    statement = select(ScheduledRevocation)
    if actor.tenant is not None:
        statement = statement.where(ScheduledRevocation.tenant == actor.tenant)
    if state is not None:
        statement = statement.where(ScheduledRevocation.state == state)
    async with runtime.sessions() as session:
        page = await read_page(session, statement, ScheduledRevocation.id, paging)
    return ScheduledPage(
        items=[ScheduledAnswer.of(row) for row in page.rows], next_cursor=page.next_cursor
    )


@router.get("/{scheduled}", summary="Read a scheduled revocation")
async def read_scheduled_revocation(
    runtime: RuntimeDep, actor: Reader, scheduled: ScheduledId
) -> ScheduledAnswer:
    """When it is due, or what became of it."""
    async with runtime.sessions() as session:
        return ScheduledAnswer.of(await schedule.get(session, scheduled, actor.tenant))


@router.delete("/{scheduled}", summary="Cancel a scheduled revocation")
async def cancel_scheduled_revocation(
    runtime: RuntimeDep, actor: Asker, scheduled: ScheduledId
) -> ScheduledAnswer:
    """A conflict once it was carried out, cancelled or has failed."""
    async with runtime.changes.begin(actor) as change:
        row = await schedule.cancel(change, scheduled, actor.tenant)
        return ScheduledAnswer.of(row)
