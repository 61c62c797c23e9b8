"""Bearer tokens: Ed25519 JWTs of type `Typ.TOKEN` that say who calls.

Rules:
- Every claim is required and typed; `aud` is this service; life is bounded by the settings.
- `operator` belongs to the installation, so its tenant is empty. `tenant_admin` and `subject`
  belong to one tenant. `auditor` and `gateway` may be either.
- Whatever is wrong, the answer is the same `Unauthenticated`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from policy.signing import Signer, Verifier
from service.auth.actor import Actor, ActorKind
from service.auth.errors import Unauthenticated
from strongroom.control import Typ
from strongroom.errors import Misuse, Refused
from strongroom.identity import ComponentId, parse_component_id
from strongroom.limits import NAME_CHARS_MAX

TOKEN_AUDIENCE: Final = "strongroom-service"  # noqa: S105 - a name, no secret


class Role(StrEnum):
    """What a token's bearer is, strongest first."""

    OPERATOR = "operator"
    TENANT_ADMIN = "tenant_admin"
    AUDITOR = "auditor"
    GATEWAY = "gateway"
    SUBJECT = "subject"


_NO_TENANT: Final = frozenset((Role.OPERATOR,))
_ONE_TENANT: Final = frozenset((Role.TENANT_ADMIN, Role.SUBJECT))

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]


class TokenClaims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The payload of a token. Times are whole seconds since the Unix epoch."""

    iss: Name
    aud: str
    sub: Name
    tenant: str
    roles: tuple[Role, ...]
    iat: int
    exp: int
    jti: Name

    def actor(self) -> Actor:
        """The party that this token proves."""
        strongest = next(role for role in Role if role in self.roles)
        return Actor(
            kind=ActorKind(strongest.value),
            id=self.sub,
            tenant=ComponentId(self.tenant) if self.tenant else None,
            roles=frozenset(role.value for role in self.roles),
        )


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token is held against. Seconds."""

    issuer: str
    life_s_max: int
    skew_s: int


_decoder = msgspec.json.Decoder(TokenClaims, strict=True)
_encoder = msgspec.json.Encoder(order="deterministic")


def check_claims(claims: TokenClaims, rules: TokenRules) -> None:
    """Raise `Misuse` for claims that no token may carry."""
    if claims.iss != rules.issuer or claims.aud != TOKEN_AUDIENCE:
        raise Misuse("the token is for another service", field="aud")
    if not 0 < claims.exp - claims.iat <= rules.life_s_max:
        raise Misuse("the token's life is out of bounds", field="exp", limit=rules.life_s_max)
    check_roles(claims.roles, claims.tenant)


def check_roles(roles: Collection[Role], tenant: str) -> None:
    """Raise `Misuse` for roles that nobody can have in `tenant` (empty: the installation)."""
    if not roles:
        raise Misuse("a token has at least one role", field="roles")
    if tenant:
        parse_component_id(tenant, "tenant")
        if _NO_TENANT & set(roles):
            raise Misuse("an operator belongs to no tenant", field="tenant")
    elif _ONE_TENANT & set(roles):
        raise Misuse("this role belongs to one tenant", field="tenant")


def mint_token(claims: TokenClaims, signer: Signer, rules: TokenRules) -> str:
    """Sign `claims`. Raises `Misuse` for claims that `verify_token` would not accept."""
    check_claims(claims, rules)
    return signer.sign(Typ.TOKEN, _encoder.encode(claims))


def verify_token(token: str, verifier: Verifier, rules: TokenRules, *, now_s: int) -> TokenClaims:
    """The claims of a valid token. Raises `Unauthenticated`, whatever is wrong."""
    try:
        claims = _decoder.decode(verifier.verify(Typ.TOKEN, token))
        check_claims(claims, rules)
    except (Refused, Misuse, msgspec.DecodeError, UnicodeError) as error:
        raise Unauthenticated("the token is not valid") from error
    if not claims.iat - rules.skew_s <= now_s < claims.exp:
        raise Unauthenticated("the token is not valid")
    return claims
