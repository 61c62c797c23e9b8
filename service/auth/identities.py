"""Whose bearer tokens are believed: our own issuer's, and those of configured providers.

Our own tokens have a `typ` of their own (`Typ.TOKEN`), which no provider's may have: so the two
kinds never pass for one another, whatever either says in its claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policy.signing import Verifier
from service.auth.errors import Unauthenticated
from service.auth.keysets import KeySet
from service.auth.providers import Provider
from service.auth.remote import RemoteIssuer, header_of, issuer_of
from service.auth.tokens import TokenClaims, TokenRules, verify_token
from strongroom.clock import Clock
from strongroom.control import Typ


@dataclass(frozen=True, slots=True)
class Identities:
    """Reads bearer tokens. `close` ends the connections to providers."""

    verifier: Verifier
    """Of our own issuer."""
    rules: TokenRules
    remote: Mapping[str, RemoteIssuer]
    """By `iss`."""

    async def read(self, token: str, *, now_s: int) -> TokenClaims:
        """The claims of a valid token. Raises `Unauthenticated`, whatever is wrong.

        Raises `Unavailable` while the keys of the token's provider cannot be had.
        """
        if not self.remote or header_of(token).get("typ") == Typ.TOKEN:
            return verify_token(token, self.verifier, self.rules, now_s=now_s)
        issuer = self.remote.get(issuer_of(token))
        if issuer is None:
            raise Unauthenticated("the token is not valid")
        return await issuer.verify(token, now_s=now_s)

    async def close(self) -> None:
        """Close every connection."""
        for issuer in self.remote.values():
            await issuer.keys.close()


def open_identities(
    verifier: Verifier, rules: TokenRules, providers: Sequence[Provider], clock: Clock
) -> Identities:
    """Nothing is fetched before a token asks for it."""
    remote = {
        provider.issuer: RemoteIssuer(provider, KeySet(provider, clock)) for provider in providers
    }
    return Identities(verifier, rules, remote)
