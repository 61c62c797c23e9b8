"""Who may ask for what: authentication, permissions and tenant scope, each written once.

Rules:
- No valid bearer token: `Unauthenticated`, before anything else is looked at.
- No role with the permission: `Forbidden`, whatever the request names.
- Another tenant's: the very error that a tenant which does not exist gives.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Path, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from policy.permissions import Permission
from service.auth.actor import Actor
from service.auth.errors import Forbidden, Unauthenticated
from service.auth.roles import permissions_of
from service.auth.tokens import TokenClaims
from service.http_headers import tell
from service.runtime import Runtime, RuntimeDep
from strongroom.errors import Missing
from strongroom.identity import ComponentId

_bearer: Final = HTTPBearer(
    auto_error=False,
    scheme_name="bearer",
    bearerFormat="JWT",
    description="A token of the embedded issuer (`strongroom token`, or `POST /v1/tokens`), or of "
    "a configured identity provider.",
)


async def read_token(runtime: Runtime, token: str) -> TokenClaims:
    """The claims of a bearer token. Raises `Unauthenticated`."""
    return await runtime.identities.read(token, now_s=int(time.time()))


async def current_claims(
    request: Request,
    runtime: RuntimeDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
) -> TokenClaims:
    """What the bearer's token says. Raises `Unauthenticated`, and `TooMany` past a limit."""
    if credentials is None:
        raise Unauthenticated("a bearer token is needed")
    claims = await read_token(runtime, credentials.credentials)
    tell(request, runtime.rates.principal(claims.tenant or None, claims.sub).headers())
    return claims


async def current_actor(claims: Annotated[TokenClaims, Depends(current_claims)]) -> Actor:
    """Who calls."""
    return claims.actor()


ActorDep = Annotated[Actor, Depends(current_actor)]
TenantId = Annotated[
    str,
    Path(
        alias="tenant",
        pattern="^[0-9a-f]{32}$",
        examples=["0123456789abcdef0123456789abcdef"],
    ),
]


@dataclass(frozen=True, slots=True)
class Scoped:
    """A caller who may act in `tenant`, if that tenant exists."""

    actor: Actor
    tenant: ComponentId


def require(actor: Actor, permission: Permission) -> None:
    """Raise `Forbidden` unless a role of `actor` has `permission`."""
    if permission not in permissions_of(actor):
        raise Forbidden(f"this needs the permission {permission.value}", field="authorization")


def in_scope(actor: Actor, tenant: str) -> Scoped:
    """The one place where tenant scope is applied. Raises `Missing`."""
    if actor.tenant is not None and actor.tenant != tenant:
        raise Missing("there is no such tenant", field="tenant")
    return Scoped(actor, ComponentId(tenant))


def permitted(permission: Permission) -> Callable[[Actor], Awaitable[Actor]]:
    """A dependency: a caller with `permission`, whatever tenant it belongs to."""

    async def dependency(actor: ActorDep) -> Actor:
        require(actor, permission)
        return actor

    return dependency


def scoped(permission: Permission) -> Callable[[Actor, str], Awaitable[Scoped]]:
    """A dependency: a caller with `permission` in the tenant that the path names."""

    async def dependency(actor: ActorDep, tenant: TenantId) -> Scoped:
        require(actor, permission)
        return in_scope(actor, tenant)

    return dependency
