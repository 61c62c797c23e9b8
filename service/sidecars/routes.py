"""Sidecars over HTTP: `router` for what they ask themselves, `admin` for operators."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy import select

from policy.permissions import Permission
from service.auth.actor import Actor, ActorKind
from service.auth.scope import permitted
from service.db.pages import read_page
from service.http_headers import tell
from service.http_page import PagingDep
from service.log import store as log_store
from service.log.stream import must_restart, parse_event_id, stream
from service.log.tail import PAGE_ENTRIES
from service.runtime import Runtime, RuntimeDep
from service.sidecars import intake, liveness, store
from service.sidecars.caller import CallerDep
from service.sidecars.desk import STREAMS_MAX
from service.sidecars.enrolment import enrol
from service.sidecars.keylease import KeyLeaseDesk
from service.sidecars.models import Sidecar
from service.sidecars.rekey import change_keys
from service.sidecars.schemas import (
    JoinTokenAnswer,
    JoinTokenBody,
    SidecarAnswer,
    SidecarPage,
)
from service.sidecars.serving import grant_serving_lease
from service.sidecars.store import Enrolled
from strongroom.control import (
    SIDECAR_PREFIX,
    AckRequest,
    EnrolAnswer,
    EnrolRequest,
    IntakeAnswer,
    IntakeRequest,
    KeyChangeAnswer,
    KeyChangeRequest,
    KeyLeaseAnswer,
    KeyLeaseRequest,
    LivenessAnswer,
    LivenessRequest,
    LogPage,
    ServingLeaseAnswer,
    ServingLeaseRequest,
)
from strongroom.errors import Overloaded

router = APIRouter(tags=["sidecar"])
admin = APIRouter(prefix="/v1/sidecars", tags=["sidecars"])

SidecarId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Epoch = Annotated[str, Query(pattern="^([0-9a-f]{32})?$", description="Empty: the one in force.")]


@router.post("/v1/sidecars", status_code=HTTPStatus.CREATED, summary="Enrol a sidecar")
async def enrol_sidecar(request: Request, runtime: RuntimeDep, body: EnrolRequest) -> EnrolAnswer:
    """With a one-time join token; the answer holds the service keys to pin."""
    # A refusal is an audit event: nobody who has proven nothing may write too many.
    address = request.client.host if request.client is not None else ""
    tell(request, runtime.rates.address(address).headers())
    return await enrol(runtime.changes, runtime.verifier, runtime.settings.issuer, body)


@router.post(f"{SIDECAR_PREFIX}/keys", summary="Exchange the sidecar's keys")
async def exchange_keys(
    runtime: RuntimeDep, caller: CallerDep, body: KeyChangeRequest
) -> KeyChangeAnswer:
    """Both at once. The old ones are nobody's from the answer on."""
    return await change_keys(runtime.changes, caller, body)


@router.post(f"{SIDECAR_PREFIX}/serving-lease", summary="Ask whether to go on serving")
async def serving_lease(
    runtime: RuntimeDep, caller: CallerDep, body: ServingLeaseRequest
) -> ServingLeaseAnswer:
    """Signed: the nonce, where the log stands, and for how long."""
    return ServingLeaseAnswer(
        await grant_serving_lease(
            runtime.database,
            runtime.desk.expiry,
            runtime.signer,
            caller,
            body,
            runtime.changes.require_reached,
        )
    )


@router.post(f"{SIDECAR_PREFIX}/key-lease", summary="Lease the namespace keys of a grant")
async def key_lease(
    runtime: RuntimeDep, caller: CallerDep, body: KeyLeaseRequest
) -> KeyLeaseAnswer:
    """Sealed to the sidecar's key, and signed."""
    desk = KeyLeaseDesk(
        changes=runtime.changes,
        signer=runtime.signer,
        verifier=runtime.verifier,
        issuer=runtime.settings.issuer,
        lease_ms=int(runtime.settings.key_lease_s * 1000),
    )
    return KeyLeaseAnswer(await desk.lease(caller, body, int(time.time())))


@router.get(f"{SIDECAR_PREFIX}/invalidations", summary="Read the log in pages")
async def invalidations(
    runtime: RuntimeDep,
    caller: CallerDep,
    epoch: Epoch = "",
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
) -> LogPage:
    """The entries after a seq, in order.

    `restart`: start afresh; that epoch is over, or is ahead of ours, or the seq is too far behind.
    """
    del caller
    behind_max = runtime.settings.log_behind_max
    async with runtime.sessions() as session:
        head = await log_store.head(session)
        wanted = epoch or head.epoch
        if must_restart(head, wanted, after, behind_max):
            return LogPage(epoch=head.epoch, head_seq=head.seq, entries=[], restart=True)
        entries = await log_store.page(session, wanted, after, PAGE_ENTRIES)
    # The head may have been read before the last of the entries was committed.
    head_seq = max(head.seq, entries[-1].seq) if entries else head.seq
    return LogPage(epoch=head.epoch, head_seq=head_seq, entries=[entry.jws for entry in entries])


@router.get(
    f"{SIDECAR_PREFIX}/invalidations/stream",
    summary="Follow the log",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def follow(
    runtime: RuntimeDep,
    caller: CallerDep,
    epoch: Epoch = "",
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=64)] = None,
) -> StreamingResponse:
    """Server-sent events: `id: epoch:seq`, `data: JWS`; resumed by `Last-Event-ID`."""
    after = 0
    if last_event_id:
        epoch, after = parse_event_id(last_event_id)
    if runtime.desk.streams.locked():
        raise Overloaded("too many streams are open", limit=STREAMS_MAX)
    return StreamingResponse(
        _bounded(runtime, caller, epoch, after),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _bounded(
    runtime: Runtime, caller: Enrolled, epoch: str, after: int
) -> AsyncIterator[bytes]:
    followers = runtime.desk.followers
    mine = object()

    async def may_go_on() -> bool:
        # A sidecar has one stream: one that it lost unnoticed ends when it opens the next.
        return followers.get(caller.id) is mine and await runtime.roster.is_current(caller)

    async with runtime.desk.streams:
        followers[caller.id] = mine
        try:
            async for event in stream(
                runtime.tail,
                epoch,
                after,
                runtime.settings.stream_heartbeat_s,
                may_go_on,
                runtime.settings.log_behind_max,
            ):
                yield event
        finally:
            if followers.get(caller.id) is mine:
                del followers[caller.id]


@router.post(
    f"{SIDECAR_PREFIX}/acks",
    status_code=HTTPStatus.NO_CONTENT,
    summary="Acknowledge the log",
)
async def acknowledge(runtime: RuntimeDep, caller: CallerDep, body: AckRequest) -> None:
    """Up to a seq, everything retired is fenced, or reclaimed."""
    await runtime.ack_batches.take(caller, body)


@router.post(f"{SIDECAR_PREFIX}/liveness", summary="Ask which namespaces are retired")
async def ask_liveness(
    runtime: RuntimeDep, caller: CallerDep, body: LivenessRequest
) -> LivenessAnswer:
    """Those that can never be leased again."""
    async with runtime.sessions() as session:
        await store.require_current(session, caller)
        return LivenessAnswer(await liveness.retired(session, caller, body.namespaces))


@router.post(f"{SIDECAR_PREFIX}/audit", summary="Hand over audit events")
async def take_audit(runtime: RuntimeDep, caller: CallerDep, body: IntakeRequest) -> IntakeAnswer:
    """A run of the spool, in order. Each event is taken once."""
    async with runtime.changes.begin(Actor(ActorKind.SIDECAR, caller.id)) as change:
        await store.require_current(change.session, caller)
        next_count = await intake.take(change, caller, body)
    return IntakeAnswer(next_count)


@admin.post("/join-tokens", status_code=HTTPStatus.CREATED, summary="Create a join token")
async def create_join_token(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.SIDECAR_WRITE))],
    body: JoinTokenBody,
) -> JoinTokenAnswer:
    """It enrols one sidecar, for the tenants named, within its life."""
    life_s = body.life_s or runtime.settings.join_token_life_s
    tenants = list(dict.fromkeys(body.tenants))
    async with runtime.changes.begin(actor) as change:
        token, row = await store.create_join_token(change.session, tenants, life_s)
        await change.audit(
            "sidecar.join_token_created",
            target=row.digest,
            details={
                "name": body.name or "",
                "every_tenant": row.every_tenant,
                "life_s": int(life_s),
            },
            references=tenants,
        )
    return JoinTokenAnswer(join_token=token, tenants=tenants, expires_at=row.expires_at)


@admin.get("", summary="List sidecars")
async def list_sidecars(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.SIDECAR_READ))],
    paging: PagingDep,
) -> SidecarPage:
    """Live and revoked ones. A caller of one tenant sees those that may serve it."""
    statement = select(Sidecar)
    if actor.tenant is not None:
        statement = store.serving(statement, actor.tenant)
    async with runtime.sessions() as session:
        page = await read_page(session, statement, Sidecar.id, paging)
        items = [await _answer(runtime, row, actor) for row in page.rows]
    return SidecarPage(items=items, next_cursor=page.next_cursor)


@admin.get("/{sidecar}", summary="Read a sidecar")
async def read_sidecar(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.SIDECAR_READ))],
    sidecar: SidecarId,
) -> SidecarAnswer:
    """A sidecar and how far it has applied the log."""
    async with runtime.sessions() as session:
        row = await store.get(session, sidecar, actor.tenant)
    return await _answer(runtime, row, actor)


async def _answer(runtime: Runtime, row: Sidecar, actor: Actor) -> SidecarAnswer:
    async with runtime.sessions() as session:
        tenants = await store.tenants_of(session, row.id)
    if actor.tenant is not None:
        tenants = [tenant for tenant in tenants if tenant == actor.tenant]
    return SidecarAnswer.of(row, tenants)
