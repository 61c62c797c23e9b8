"""On whose behalf a grant is asked for.

Rules:
- A subject's own token speaks for itself, and names nobody else.
- A gateway brings the subject's token beside its own, in `Strongroom-Subject-Token`.
- Naming a tenant and a subject without that token needs `grant:act_as` in that tenant: by the
  caller's role, or, for a gateway, by a rule of that tenant for `role:gateway`.
- A token that is older than the principal of that name belongs to an earlier one: removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from policy.permissions import Permission
from service.auth.actor import Actor, ActorKind
from service.auth.errors import Forbidden, Unauthenticated
from service.auth.scope import in_scope, require
from service.auth.tokens import Role, TokenClaims
from strongroom.errors import Misuse
from strongroom.identity import ComponentId

GATEWAY: Final = "role:gateway"


@dataclass(frozen=True, slots=True)
class OnBehalf:
    """A tenant's subject, proven by a token issued at `proven_s`, or named."""

    tenant: ComponentId
    subject: str
    proven_s: int | None
    """None: named without a token, under `grant:act_as`."""
    act_as: str | None = None
    """The party to which the tenant's rules must allow `grant:act_as`; None if nothing is due."""


def resolve(
    caller: TokenClaims,
    subject_token: TokenClaims | None,
    named: tuple[str, str] | None,
) -> OnBehalf:
    """Who the grant is for. Raises `Misuse`, `Unauthenticated`, `Forbidden` or `Missing`."""
    actor: Actor = caller.actor()
    require(actor, Permission.GRANT_CREATE)
    if subject_token is not None and named is not None:
        raise Misuse("a subject is proven or named, and not both", field="subject")
    if actor.kind is ActorKind.SUBJECT:
        if subject_token is not None or named is not None:
            raise Forbidden("a subject asks for itself", field="subject")
        return OnBehalf(ComponentId(caller.tenant), caller.sub, caller.iat)
    if subject_token is not None:
        if Role.SUBJECT not in subject_token.roles:
            raise Unauthenticated("the token is not valid", field="Strongroom-Subject-Token")
        scope = in_scope(actor, subject_token.tenant)
        return OnBehalf(scope.tenant, subject_token.sub, subject_token.iat)
    if named is None:
        raise Misuse("whose prompt is it? bring the subject's token", field="subject")
    tenant, subject = named
    by_rule = actor.kind is ActorKind.GATEWAY
    if not by_rule:
        require(actor, Permission.GRANT_ACT_AS)
    scope = in_scope(actor, tenant)
    return OnBehalf(scope.tenant, subject, None, GATEWAY if by_rule else None)
