"""Tokens of the embedded issuer over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import ConfigDict, Field

from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.errors import Forbidden
from service.auth.roles import permissions_of, permissions_with
from service.auth.scope import in_scope, permitted
from service.auth.tokens import Role
from service.runtime import RuntimeDep
from service.schemas import Answer, Body, ComponentIdText, Name
from service.tenancy import store as tenancy

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])

_ID = "0123456789abcdef0123456789abcdef"
_LIFE_S = 3600


class TokenBody(Body):
    """A token to be issued."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"subject": "alice", "tenant": _ID, "roles": ["subject"]}]}
    )

    subject: Name
    tenant: ComponentIdText | None = None
    """None: the installation's own; only operators may issue such tokens."""
    roles: Annotated[list[Role], Field(min_length=1, max_length=len(Role))]
    life_s: Annotated[int, Field(ge=1, le=30 * 24 * 3600, strict=True)] = _LIFE_S


class TokenAnswer(Answer):
    """A bearer token, shown this once."""

    token: str
    life_s: int


@router.post("", status_code=HTTPStatus.CREATED, summary="Issue a token")
async def issue_token(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.TOKEN_ISSUE))],
    body: TokenBody,
) -> TokenAnswer:
    """A token for a party of this installation or of one tenant.

    A subject must be a living principal. Nobody issues a token that allows what its own does not.
    """
    if actor.tenant is not None and (body.tenant is None or Role.OPERATOR in body.roles):
        raise Forbidden("only an operator issues tokens of the installation", field="tenant")
    if not permissions_with(body.roles) <= permissions_of(actor):
        raise Forbidden("these roles allow what the caller may not", field="roles")
    async with runtime.changes.begin(actor) as change:
        if body.tenant is not None:
            scope = in_scope(actor, body.tenant)
            await tenancy.get_tenant(change.session, scope.tenant)
            if Role.SUBJECT in body.roles:
                await tenancy.get_principal(change.session, scope.tenant, body.subject)
        token = runtime.issuer.issue(body.subject, body.tenant or "", body.roles, body.life_s)
        await change.audit(
            "token.issued",
            tenant=body.tenant,
            subject=body.subject,
            details={"roles": [role.value for role in body.roles], "life_s": body.life_s},
        )
    return TokenAnswer(token=token, life_s=body.life_s)
