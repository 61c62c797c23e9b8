"""The embedded token issuer: for installations without an identity provider of their own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from policy.signing import Signer
from service.auth.signing_keys import TOKEN_KEY, load_signer
from service.auth.tokens import TOKEN_AUDIENCE, Role, TokenClaims, TokenRules, mint_token
from service.settings import ServiceSettings

BOOTSTRAP_LIFE_S: Final = 3600


@dataclass(frozen=True, slots=True)
class Issuer:
    """Mints tokens for `rules` with the issuer's own key."""

    signer: Signer
    rules: TokenRules

    def issue(self, subject: str, tenant: str, roles: Collection[Role], life_s: int) -> str:
        """A token from now on for `life_s` seconds. Raises `Misuse` for an impossible one."""
        issued_s = int(time.time())
        claims = TokenClaims(
            iss=self.rules.issuer,
            aud=TOKEN_AUDIENCE,
            sub=subject,
            tenant=tenant,
            roles=tuple(role for role in Role if role in roles),
            iat=issued_s,
            exp=issued_s + life_s,
            jti=secrets.token_hex(16),
        )
        return mint_token(claims, self.signer, self.rules)


def token_rules(settings: ServiceSettings) -> TokenRules:
    """What this installation holds tokens against."""
    return TokenRules(settings.issuer, settings.token_life_s_max, settings.token_skew_s)


def open_issuer(settings: ServiceSettings) -> Issuer:
    """The issuer of this installation, its key read from the key directory."""
    return Issuer(load_signer(settings.keys, TOKEN_KEY), token_rules(settings))


def bootstrap_operator_token(
    settings: ServiceSettings, *, name: str = "bootstrap", life_s: int = BOOTSTRAP_LIFE_S
) -> str:
    """An operator's token, for whoever may read the key directory."""
    life_s = min(life_s, settings.token_life_s_max)
    return open_issuer(settings).issue(name, "", (Role.OPERATOR,), life_s)
