"""Certificates over HTTP."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Response

from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.scope import permitted
from service.certificates.issue import issue
from service.revocation import store
from service.revocation.routes import RevocationId, desk_of
from service.runtime import RuntimeDep

router = APIRouter(tags=["revocations"])

MEDIA_TYPE: Final = "application/jose"


@router.get(
    "/v1/revocations/{revocation}/certificate",
    summary="Get the certificate",
    response_class=Response,
    responses={200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def read_certificate(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.REVOCATION_READ))],
    revocation: RevocationId,
) -> Response:
    """A JWS, verified offline by `strongroom verify`. A conflict until it is in force."""
    async with runtime.sessions() as session:
        await store.get(session, revocation, actor.tenant)
    await desk_of(runtime).settle(revocation)
    async with runtime.changes.begin(actor) as change:
        row = await store.get(change.session, revocation, actor.tenant)
        certificate = await issue(change, row, runtime.settings.issuer, runtime.signer)
    return Response(certificate, media_type=MEDIA_TYPE)
