"""Bearer tokens: what verifies, and that everything else is one and the same refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy.signing import Signer, Verifier
from service.auth.actor import ActorKind
from service.auth.errors import Unauthenticated
from service.auth.issuer import bootstrap_operator_token, open_issuer
from service.auth.signing_keys import own_verifier
from service.auth.tokens import (
    TOKEN_AUDIENCE,
    Role,
    TokenClaims,
    TokenRules,
    mint_token,
    verify_token,
)
from service.settings import ServiceSettings
from strongroom.control import Typ
from strongroom.errors import Misuse

NOW = 1_800_000_000
TENANT = "a" * 32
RULES = TokenRules("strongroom", 3600, 30)


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer(Ed25519PrivateKey.generate())


@pytest.fixture(scope="module")
def verifier(signer: Signer) -> Verifier:
    return own_verifier(signer)


def claims(**values: object) -> TokenClaims:
    given: dict[str, object] = {
        "iss": "strongroom",
        "aud": TOKEN_AUDIENCE,
        "sub": "alice",
        "tenant": TENANT,
        "roles": (Role.SUBJECT,),
        "iat": NOW,
        "exp": NOW + 600,
        "jti": "1",
        **values,
    }
    return TokenClaims(**given)  # type: ignore[arg-type]


def test_a_good_token_proves_its_bearer(signer: Signer, verifier: Verifier) -> None:
    token = mint_token(claims(), signer, RULES)
    actor = verify_token(token, verifier, RULES, now_s=NOW + 1).actor()
    assert (actor.kind, actor.id, actor.tenant) == (ActorKind.SUBJECT, "alice", TENANT)


@pytest.mark.parametrize("now_s", [NOW - 31, NOW + 600, NOW + 10_000])
def test_a_token_before_or_after_its_time_is_refused(
    signer: Signer, verifier: Verifier, now_s: int
) -> None:
    token = mint_token(claims(), signer, RULES)
    with pytest.raises(Unauthenticated):
        verify_token(token, verifier, RULES, now_s=now_s)


@pytest.mark.parametrize(
    "values",
    [
        {"iss": "someone"},
        {"aud": "strongroom-sidecar"},
        {"exp": NOW},
        {"exp": NOW + 3601},
        {"roles": ()},
        {"tenant": ""},
        {"tenant": "A" * 32},
        {"roles": (Role.OPERATOR,)},
        {"roles": (Role.OPERATOR, Role.SUBJECT)},
        {"roles": (Role.TENANT_ADMIN,), "tenant": ""},
    ],
)
def test_impossible_claims_are_neither_minted_nor_believed(
    signer: Signer, verifier: Verifier, values: dict[str, object]
) -> None:
    with pytest.raises(Misuse):
        mint_token(claims(**values), signer, RULES)
    forged = signer.sign(Typ.TOKEN, msgspec.json.encode(claims(**values)))
    with pytest.raises(Unauthenticated):
        verify_token(forged, verifier, RULES, now_s=NOW)


def test_a_token_by_another_key_of_another_type_or_tampered_is_refused(
    signer: Signer, verifier: Verifier
) -> None:
    good = mint_token(claims(), signer, RULES)
    stranger = mint_token(claims(), Signer(Ed25519PrivateKey.generate()), RULES)
    grant = signer.sign(Typ.GRANT, msgspec.json.encode(claims()))
    head, body, tail = good.split(".")
    tampered = f"{head}.{body[:-4]}AAAA.{tail}"
    extra = signer.sign(
        Typ.TOKEN, msgspec.json.encode({**msgspec.to_builtins(claims()), "admin": True})
    )
    for token in (stranger, grant, tampered, extra, "", "..", "a.b.c", good + "x", "\ud800"):
        with pytest.raises(Unauthenticated) as refusal:
            verify_token(token, verifier, RULES, now_s=NOW)
        assert refusal.value.message == "the token is not valid"


def test_the_bootstrap_token_is_an_operators(tmp_path: Path) -> None:
    settings = ServiceSettings(state_directory=tmp_path)
    token = bootstrap_operator_token(settings)
    issuer = open_issuer(settings)
    import time

    seen = verify_token(token, own_verifier(issuer.signer), issuer.rules, now_s=int(time.time()))
    assert seen.roles == (Role.OPERATOR,)
    assert not seen.tenant
    assert dataclasses.asdict(issuer.rules)["life_s_max"] >= seen.exp - seen.iat
