"""Certificates over HTTP."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Response

from policy.certificate_forms import CertificateForm, written
from policy.certificate_page import POLICY
from policy.certificates import verify
from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.scope import permitted
from service.certificates.issue import issue
from service.revocation import store
from service.revocation.routes import RevocationId, desk_of
from service.runtime import RuntimeDep

router = APIRouter(tags=["revocations"])

_JSON: Final = CertificateForm.JSON
MEDIA_TYPES: Final = {
    CertificateForm.JWS: "application/jose",
    CertificateForm.JSON: "application/json",
    CertificateForm.HTML: "text/html",
}


@router.get(
    "/v1/revocations/{revocation}/certificate",
    summary="Get the certificate",
    response_class=Response,
    responses={
        200: {
            "content": {
                media_type: {"schema": {"type": "object" if form is _JSON else "string"}}
                for form, media_type in MEDIA_TYPES.items()
            }
        }
    },
)
async def read_certificate(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.REVOCATION_READ))],
    revocation: RevocationId,
    form: Annotated[
        CertificateForm,
        Query(description="The signed JWS alone, with what it says in JSON, or a page to print."),
    ] = CertificateForm.JWS,
) -> Response:
    """Verified offline by `strongroom verify`, in each form. A conflict until it is in force."""
    async with runtime.sessions() as session:
        await store.get(session, revocation, actor.tenant)
    await desk_of(runtime).settle(revocation)
    async with runtime.changes.begin(actor) as change:
        row = await store.get(change.session, revocation, actor.tenant)
        certificate = await issue(change, row, runtime.settings.issuer, runtime.signer)
    text = written(certificate, verify(certificate, runtime.verifier), form)
    headers = {"Content-Security-Policy": POLICY} if form is CertificateForm.HTML else None
    return Response(text, media_type=MEDIA_TYPES[form], headers=headers)
