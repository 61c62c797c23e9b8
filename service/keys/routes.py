"""Keys over HTTP: the public ones, rotations of the others, and the log of their use.

No secret, wrapped form or key is in any answer.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from pydantic import AwareDatetime
from sqlalchemy import select

from policy.permissions import Permission
from policy.signing import encode_base64url
from service.auth.actor import Actor
from service.auth.errors import Forbidden
from service.auth.scope import in_scope, permitted
from service.db.pages import read_page
from service.http_page import PagingDep
from service.keys import rotation
from service.keys.models import KekRotation, KeyUse, Purpose
from service.keys.schemas import (
    KeyStatus,
    KeyUseAnswer,
    KeyUsePage,
    PublicKey,
    PublicKeys,
    RotationAnswer,
    RotationBody,
    RotationPage,
)
from service.keys.uses import UseFilter
from service.runtime import Runtime, RuntimeDep
from strongroom.errors import Missing

router = APIRouter(prefix="/v1/keys", tags=["keys"])

Reader = Annotated[Actor, Depends(permitted(Permission.KEY_READ))]


async def _installation(actor: Reader) -> Actor:
    """The keys as a whole are not for one tenant's callers."""
    if actor.tenant is not None:
        raise Forbidden("the keys as a whole belong to the installation", field="tenant")
    return actor


Keeper = Annotated[Actor, Depends(_installation)]
Rotator = Annotated[Actor, Depends(permitted(Permission.KEY_ROTATE))]
Id = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
IdQuery = Annotated[str | None, Query(pattern="^[0-9a-f]{32}$")]
Kek = Annotated[
    str | None,
    Query(pattern="^(installation|[0-9a-f]{32})$", description="A tenant's id or `installation`."),
]


@router.get("", summary="Public keys")
async def public_keys(runtime: RuntimeDep) -> PublicKeys:
    """The Ed25519 keys in force. Pin them: do not fetch them anew to verify with."""
    uses = ((runtime.verifier, "service"), (runtime.token_verifier, "token"))
    return PublicKeys(
        issuer=runtime.settings.issuer,
        keys=[
            PublicKey(kid=kid, key=encode_base64url(raw), use=use)
            for verifier, use in uses
            for kid, raw in verifier.public_keys.items()
        ],
    )


@router.get("/status", summary="Key status")
async def key_status(runtime: RuntimeDep, keeper: Keeper) -> KeyStatus:
    """Which provider keeps the key-encryption keys, and whether erasures are final in time."""
    del keeper
    async with runtime.sessions() as session:
        begun = select(KekRotation.kek).where(KekRotation.finished_at.is_(None))
        rotating = (await session.scalars(begun.order_by(KekRotation.kek))).all()
    return KeyStatus(
        provider=runtime.key_provider.kind,
        erasure_final_s=runtime.settings.erasure_final_s,
        rotating=list(rotating),
        overdue=list(await runtime.key_schedule.overdue()),
    )


@router.post("/rotations", status_code=HTTPStatus.ACCEPTED, summary="Rotate a key-encryption key")
async def rotate(runtime: RuntimeDep, actor: Rotator, body: RotationBody) -> RotationAnswer:
    """Begins a rotation, or gives the one under way. It goes on by itself, also after a restart."""
    begun = await rotation.begin(runtime.changes, runtime.key_provider, body.kek, actor)
    runtime.key_schedule.ask()
    return await _standing(runtime, begun, None)


@router.get("/rotations", summary="List rotations")
async def list_rotations(
    runtime: RuntimeDep, actor: Reader, paging: PagingDep, kek: Kek = None
) -> RotationPage:
    """Those of the caller's tenant, or of every key-encryption key."""
    statement = select(KekRotation)
    wanted = actor.tenant if kek is None else kek
    if actor.tenant is not None and wanted is not None:
        wanted = in_scope(actor, wanted).tenant
    if wanted is not None:
        statement = statement.where(KekRotation.kek == wanted)
    async with runtime.sessions() as session:
        page = await read_page(session, statement, KekRotation.id, paging)
        standings = [await rotation.standing(session, row) for row in page.rows]
    return RotationPage(
        items=[RotationAnswer.of(each) for each in standings], next_cursor=page.next_cursor
    )


@router.get("/rotations/{rotation}", summary="Get a rotation")
async def read_rotation(
    runtime: RuntimeDep, actor: Reader, wanted: Annotated[Id, Path(alias="rotation")]
) -> RotationAnswer:
    """How far it is."""
    return await _standing(runtime, wanted, actor.tenant)


@router.get("/uses", summary="Read the key-use log")
async def key_uses(
    runtime: RuntimeDep,
    actor: Reader,
    paging: PagingDep,
    tenant: IdQuery = None,
    component: IdQuery = None,
    kek: Kek = None,
    purpose: Purpose | None = None,
    actor_id: Annotated[str | None, Query(alias="actor", max_length=256)] = None,
    since: Annotated[AwareDatetime | None, Query(description="From this moment on.")] = None,
    until: Annotated[AwareDatetime | None, Query(description="Before this moment.")] = None,
) -> KeyUsePage:
    """Who unwrapped which component's secret, under which version, for what; oldest first."""
    wanted = UseFilter(
        tenant=actor.tenant if tenant is None else in_scope(actor, tenant).tenant,
        component=component,
        kek=kek,
        purpose=purpose,
        actor=actor_id,
        since=since,
        until=until,
    )
    async with runtime.sessions() as session:
        page = await read_page(session, wanted.select(), KeyUse.id, paging)
    return KeyUsePage(
        items=[KeyUseAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


async def _standing(runtime: Runtime, wanted: str, tenant: str | None) -> RotationAnswer:
    async with runtime.sessions() as session:
        row = await session.get(KekRotation, wanted)
        if row is None or (tenant is not None and row.kek != tenant):
            raise Missing("there is no such rotation", field="rotation")
        return RotationAnswer.of(await rotation.standing(session, row))
