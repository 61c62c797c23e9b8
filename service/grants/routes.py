"""Grants over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Header

from policy.permissions import Permission
from service.auth.scope import current_claims, permitted, read_token
from service.auth.tokens import TokenClaims
from service.grants.issue import issue
from service.grants.schemas import GrantAnswer, GrantBody
from service.grants.subject import resolve
from service.runtime import RuntimeDep

router = APIRouter(prefix="/v1/grants", tags=["grants"])


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    summary="Ask for a grant",
    # Before the body is looked at: whoever may not ask is not told what is wrong with it.
    dependencies=[Depends(permitted(Permission.GRANT_CREATE))],
)
async def create_grant(
    runtime: RuntimeDep,
    caller: Annotated[TokenClaims, Depends(current_claims)],
    body: GrantBody,
    subject_token: Annotated[
        str | None,
        Header(
            alias="Strongroom-Subject-Token",
            max_length=8192,
            description="The token of the user on whose behalf a gateway asks.",
        ),
    ] = None,
) -> GrantAnswer:
    """A signed capability for this prompt, up to the first span that is denied.

    A span that is denied and one that is not registered look alike; so do an artefact of
    another tenant and one that does not exist.
    """
    claims = None if subject_token is None else await read_token(runtime, subject_token)
    named = None
    if body.tenant is not None and body.subject is not None:
        named = (body.tenant, body.subject)
    who = resolve(caller, claims, named)
    return await issue(runtime, caller.actor(), body, who)
