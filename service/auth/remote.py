"""Tokens of an identity provider: verified, then turned into what they mean here.

Rules:
- The provider is the one whose `issuer` the token names; algorithm, type and key are held
  against that provider's settings alone, and `iss` is looked at again once it is verified.
- `exp` and `iat` have to be there; `nbf` counts where it is. ID tokens are for a login at some
  client, not for an API: what carries their claims is refused.
- No binding fits, or the bindings that fit name different tenants: refused. Several that fit
  in one tenant add up.
- Whatever is wrong, the answer is the same `Unauthenticated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec
from joserfc import jws
from joserfc._rfc7515.model import JWSAlgModel
from joserfc.errors import JoseError

from policy.signing import decode_base64url
from service.auth.errors import Unauthenticated
from service.auth.keysets import KeySet
from service.auth.providers import (
    Algorithm,
    ClaimBinding,
    KubernetesProvider,
    OidcProvider,
    Provider,
    ServiceAccountBinding,
)
from service.auth.tokens import Role, TokenClaims, check_roles
from strongroom.errors import Misuse
from strongroom.limits import NAME_CHARS_MAX

TOKEN_CHARS_MAX: Final = 16 * 1024
_KID_CHARS_MAX: Final = 256
_HEADER_BYTES_MAX: Final = 8 * 1024
"""Some providers send their certificates along."""
_ED25519: Final = "Ed25519"
_ID_TOKEN: Final = frozenset(("nonce", "at_hash", "c_hash"))
_ACCOUNT: Final = "system:serviceaccount:"
_INSTANT_MAX: Final = 2**53
_UNREADABLE: Final = (JoseError, ValueError, msgspec.DecodeError, Misuse, RecursionError)
_decoder: Final = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class RemoteIssuer:
    """One provider and its keys."""

    provider: Provider
    keys: KeySet

    async def verify(self, token: str, *, now_s: int) -> TokenClaims:
        """What a valid token of this provider means here. Raises `Unauthenticated`.

        Raises `Unavailable` while the provider's keys cannot be had.
        """
        try:
            registry = _registry_of(self.provider.algorithms)
            signed = jws.extract_compact(token.encode(), registry=registry)
            key = await self.keys.find(*self._named_key(signed.headers()))
            if key is None or not jws.validate_compact(signed, key, registry=registry):
                raise Unauthenticated("the token is not valid")
            return self._meaning(_decoder.decode(signed.payload), now_s)
        except (*_UNREADABLE, KeyError, TypeError) as error:
            raise Unauthenticated("the token is not valid") from error

    def _named_key(self, header: Any) -> tuple[str, Algorithm]:
        """The `kid` and the pinned algorithm of a header."""
        # The library takes any JSON that contains "alg", even a list, for a header.
        if not isinstance(header, dict):
            raise Unauthenticated("the token is not valid")
        named, kid = header.get("alg"), header.get("kid")
        algorithm = next(
            (
                pinned
                for pinned in self.provider.algorithms
                if named == pinned or (pinned is Algorithm.EDDSA and named == _ED25519)
            ),
            None,
        )
        if (
            algorithm is None
            or not isinstance(kid, str)
            or not 0 < len(kid) <= _KID_CHARS_MAX
            or "crit" in header
            or _short_type(header.get("typ", "")) not in self.provider.types
        ):
            raise Unauthenticated("the token is not valid")
        return kid, algorithm

    def _meaning(self, claims: Mapping[str, Any], now_s: int) -> TokenClaims:
        provider = self.provider
        if claims.get("iss") != provider.issuer or provider.audience not in _texts(claims["aud"]):
            raise Misuse("the token is for another service", field="aud")
        issued_s, expires_s = _instant(claims["iat"]), _instant(claims["exp"])
        starts_s = max(issued_s, _instant(claims.get("nbf", issued_s)))
        if not 0 < expires_s - issued_s <= provider.life_s_max:
            raise Misuse("the token's life is out of bounds", field="exp")
        if not starts_s - provider.skew_s <= now_s < expires_s + provider.skew_s:
            raise Misuse("the token is not of this time", field="exp")
        subject, tenant, roles = _bound(provider, claims)
        check_roles(roles, tenant)
        if not 0 < len(subject) <= NAME_CHARS_MAX:
            raise Misuse("nobody is named", field="sub")
        return TokenClaims(
            iss=provider.issuer,
            aud=provider.audience,
            sub=subject,
            tenant=tenant,
            roles=roles,
            iat=issued_s,
            exp=expires_s,
            jti=str(claims.get("jti") or "-")[:NAME_CHARS_MAX],
        )


Bound = tuple[str, str, tuple[Role, ...]]
"""Subject, tenant (empty: the installation), roles."""


def _bound(provider: Provider, claims: Mapping[str, Any]) -> Bound:
    match provider:
        case OidcProvider():
            return _bound_by_claims(provider, claims)
        case KubernetesProvider():
            return _bound_by_account(provider, claims)


def _bound_by_claims(provider: OidcProvider, claims: Mapping[str, Any]) -> Bound:
    if _ID_TOKEN & set(claims):
        raise Misuse("an ID token is not for an API", field="typ")
    subject = claims[provider.subject_claim]
    if not isinstance(subject, str):
        raise Misuse("nobody is named", field="sub")
    fitting = [each for each in provider.bindings if each.value in _texts(claims.get(each.claim))]
    return subject, *_together(
        [(binding.roles, _tenant_of(provider, binding, claims)) for binding in fitting]
    )


def _tenant_of(provider: OidcProvider, binding: ClaimBinding, claims: Mapping[str, Any]) -> str:
    if binding.tenant_claim is None:
        return binding.tenant or ""
    said = claims[binding.tenant_claim]
    # One tenant, said once: a list of them would leave the choice to us.
    if not isinstance(said, str) or not said:
        raise Misuse("no tenant is named", field=binding.tenant_claim)
    return provider.tenants[said] if provider.tenants else said


def _bound_by_account(provider: KubernetesProvider, claims: Mapping[str, Any]) -> Bound:
    about = claims["kubernetes.io"]
    namespace, account = about["namespace"], about["serviceaccount"]["name"]
    subject = claims["sub"]
    if subject != f"{_ACCOUNT}{namespace}:{account}":
        raise Misuse("the token names two accounts", field="sub")
    fitting: list[ServiceAccountBinding] = [
        each
        for each in provider.bindings
        if (each.namespace, each.service_account) == (namespace, account)
    ]
    return subject, *_together([(binding.roles, binding.tenant or "") for binding in fitting])


def _together(bound: list[tuple[tuple[Role, ...], str]]) -> tuple[str, tuple[Role, ...]]:
    """The one tenant of all, and their roles. Raises `Misuse` for none, or for two tenants."""
    tenants = {tenant for _, tenant in bound}
    if len(tenants) != 1:
        raise Misuse("nothing here is for this token", field="sub")
    held = {role for roles, _ in bound for role in roles}
    return tenants.pop(), tuple(role for role in Role if role in held)


def header_of(token: str) -> dict[str, Any]:
    """A token's header, of which nothing is verified. Raises `Unauthenticated`."""
    return _part(token, 0)


def issuer_of(token: str) -> str:
    """Whose a token says it is; nothing about it is verified. Raises `Unauthenticated`."""
    issuer = _part(token, 1).get("iss")
    return issuer if isinstance(issuer, str) else ""


def _part(token: str, number: int) -> dict[str, Any]:
    if len(token) > TOKEN_CHARS_MAX:
        raise Unauthenticated("the token is not valid")
    try:
        # A token of more or fewer parts is no compact JWS, and fails to unpack.
        header, payload, _ = token.split(".")
        return _decoder.decode(decode_base64url((header, payload)[number], "token"))
    except _UNREADABLE as error:
        raise Unauthenticated("the token is not valid") from error


class _Pinned(jws.JWSRegistry):
    """Only what is pinned. Members that say where a key is, such as `jku`, are left unread."""

    max_header_length = _HEADER_BYTES_MAX

    def get_alg(self, name: str) -> JWSAlgModel:
        # The library warns of "EdDSA", the name that nearly every provider still writes. Our keys
        # are of Ed25519 alone, so that the two names mean the same here.
        return super().get_alg(_ED25519 if name == Algorithm.EDDSA else name)


@cache
def _registry_of(algorithms: tuple[Algorithm, ...]) -> jws.JWSRegistry:
    names = [_ED25519 if each is Algorithm.EDDSA else each.value for each in algorithms]
    return _Pinned(algorithms=names, strict_check_header=False)


def _short_type(typ: object) -> object:
    """RFC 7515 4.1.9: `application/` may be left out, and case says nothing."""
    if not isinstance(typ, str):
        return None
    short = typ.lower().removeprefix("application/")
    return "JWT" if short == "jwt" else short


def _texts(value: object) -> tuple[str, ...]:
    """A claim that is one text, or a list of them."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(each for each in value if isinstance(each, str))
    return ()


def _instant(value: object) -> int:
    """Whole seconds of a NumericDate."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Misuse("no instant", field="exp")
    if not 0 <= value <= _INSTANT_MAX:  # also not a NaN
        raise Misuse("no instant", field="exp")
    return int(value)
