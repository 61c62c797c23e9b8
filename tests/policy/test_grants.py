"""Grants: the right one verifies, everything else is the same refusal."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from policy.grants import mint, verify
from policy.signing import Signer, Verifier
from strongroom.control import Typ
from strongroom.errors import Misuse, Refused
from strongroom.grant import GRANT_AUDIENCE, EngineDigests, GrantClaims, GrantedSpan, Operation
from strongroom.identity import ComponentId, NamespaceId
from strongroom.limits import GRANT_BYTES_MAX, GRANT_LIFE_S_MAX, LABELS_MAX, SPANS_MAX

NOW = 1_800_000_000
SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(b"s" * 32))
OTHER = Signer(Ed25519PrivateKey.from_private_bytes(b"o" * 32))
VERIFIER = Verifier({SIGNER.kid: SIGNER.public_key})
DIGEST = "d" * 64


def component(number: int) -> ComponentId:
    return ComponentId(f"{number:032x}")


CLAIMS = GrantClaims(
    iss="strongroom",
    aud=GRANT_AUDIENCE,
    jti="j1",
    tenant=component(1),
    sub="alice",
    iat=NOW,
    exp=NOW + 60,
    ops=(Operation.READ, Operation.WRITE),
    base=tuple(component(number) for number in (1, 2, 3, 4, 5)),
    spans=(
        GrantedSpan(100, NamespaceId("a" * 64), (component(6),)),
        GrantedSpan(180, NamespaceId("b" * 64), (component(7), component(8))),
    ),
    prompt_tokens=200,
    prompt_digest=DIGEST,
    engine=EngineDigests(DIGEST, "none", DIGEST, DIGEST),
    salt_digest=DIGEST,
    revision=3,
    epoch="e1",
    seq=9,
)


def change(**values: Any) -> GrantClaims:
    return msgspec.structs.replace(CLAIMS, **values)


def signed(payload: Any, typ: str = Typ.GRANT, signer: Signer = SIGNER) -> str:
    raw = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return signer.sign(typ, raw)


def check(token: str, now_s: int = NOW, issuer: str = "strongroom") -> GrantClaims:
    return verify(token, VERIFIER, now_s=now_s, issuer=issuer)


def test_a_minted_grant_verifies_to_the_same_claims() -> None:
    assert check(mint(CLAIMS, SIGNER)) == CLAIMS


def test_a_grant_with_as_many_spans_and_labels_as_there_may_be_verifies() -> None:
    spans = tuple(
        GrantedSpan(number + 1, NamespaceId(f"{number:064x}"), (component(100 + number),))
        for number in range(SPANS_MAX)
    )
    claims = change(spans=spans, prompt_tokens=SPANS_MAX)
    assert check(mint(claims, SIGNER)) == claims


def test_components_accumulate_along_the_spans() -> None:
    assert CLAIMS.components(0) == tuple(component(number) for number in (1, 2, 3, 4, 5, 6))
    assert CLAIMS.components(1) == tuple(component(number) for number in range(1, 9))


@pytest.mark.parametrize(
    "now_s", [NOW - 31, NOW + 60, NOW + 3600], ids=["not yet", "just expired", "long expired"]
)
def test_a_grant_out_of_its_time_is_refused(now_s: int) -> None:
    token = mint(CLAIMS, SIGNER)
    with pytest.raises(Refused):
        check(token, now_s)
    assert check(token, NOW + 59) == CLAIMS


REFUSED: dict[str, str] = {
    "foreign key": signed(CLAIMS, signer=OTHER),
    "another type": signed(CLAIMS, typ=Typ.TOKEN),
    "another issuer": signed(change(iss="elsewhere")),
    "another audience": signed(change(aud="strongroom-service")),
    "life too long": signed(change(exp=NOW + GRANT_LIFE_S_MAX + 1)),
    "life negative": signed(change(exp=NOW - 1, iat=NOW)),
    "spans out of order": signed(change(spans=(CLAIMS.spans[1], CLAIMS.spans[0]))),
    "span beyond the prompt": signed(change(prompt_tokens=150)),
    "no tokens": signed(change(spans=(), prompt_tokens=0)),
    "base without the tenant": signed(change(base=CLAIMS.base[1:] + CLAIMS.base[:1])),
    "an adapter digest without its component": signed(
        change(engine=EngineDigests(DIGEST, DIGEST, DIGEST, DIGEST))
    ),
    "an adapter component without its digest": signed(
        change(base=tuple(component(number) for number in (1, 2, 9, 3, 4, 5)))
    ),
    "digest no digest": signed(change(prompt_digest="D" * 64)),
    "namespace no namespace": signed(change(spans=(GrantedSpan(5, NamespaceId("x"), ()),))),
    "component no component": signed(
        change(spans=(GrantedSpan(5, NamespaceId("a" * 64), (ComponentId("*"),)),))
    ),
    "subject empty": signed(change(sub="")),
    "sequence negative": signed(change(seq=-1)),
    "not JSON": signed(b"\xff\xfe"),
    "JSON of another shape": signed(b'{"sub":"alice"}'),
    "a number for a text": signed(
        msgspec.json.encode(CLAIMS).replace(b'"sub":"alice"', b'"sub":1')
    ),
    "nested very deep": signed(b"[" * 100_000),
    "too large": signed(b" " * (GRANT_BYTES_MAX + 1)),
    "a text for a number": signed(msgspec.json.encode(CLAIMS).replace(b'"seq":9', b'"seq":"9"')),
    "valid but for its size": signed(msgspec.json.encode(CLAIMS) + b" " * GRANT_BYTES_MAX),
    "too many labels": signed(
        change(
            spans=(
                GrantedSpan(
                    5,
                    NamespaceId("a" * 64),
                    tuple(component(number) for number in range(LABELS_MAX + 1)),
                ),
            )
        )
    ),
    "empty": "",
    "not a token": "a.b.c",
    "two parts": "a.b",
    "not ASCII": "ä.ö.ü",
}


@pytest.mark.parametrize("token", REFUSED.values(), ids=REFUSED.keys())
def test_whatever_is_wrong_the_refusal_is_the_same(token: str) -> None:
    with pytest.raises(Refused) as caught:
        check(token)
    assert type(caught.value) is Refused
    assert (caught.value.message, caught.value.field, caught.value.limit) == (
        "the grant is not valid",
        None,
        None,
    )


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def test_an_unsigned_token_is_refused() -> None:
    header = b64(json.dumps({"alg": "none", "typ": Typ.GRANT, "kid": SIGNER.kid}).encode())
    for signature in ("", mint(CLAIMS, SIGNER).split(".")[2]):
        with pytest.raises(Refused):
            check(f"{header}.{b64(msgspec.json.encode(CLAIMS))}.{signature}")


def test_the_public_key_used_as_a_shared_secret_is_refused() -> None:
    import hashlib
    import hmac

    header = b64(json.dumps({"alg": "HS256", "typ": Typ.GRANT, "kid": SIGNER.kid}).encode())
    signing_input = f"{header}.{b64(msgspec.json.encode(CLAIMS))}"
    mac = hmac.new(SIGNER.public_key, signing_input.encode(), hashlib.sha256).digest()
    with pytest.raises(Refused):
        check(f"{signing_input}.{b64(mac)}")


def test_a_key_brought_along_in_the_header_is_not_believed() -> None:
    payload = b64(msgspec.json.encode(CLAIMS))
    header = {"alg": "Ed25519", "typ": Typ.GRANT, "kid": OTHER.kid}
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": b64(OTHER.public_key)}
    for extra in ({"jwk": jwk}, {"kid": SIGNER.kid, "jwk": jwk}):
        encoded = b64(json.dumps(header | extra).encode())
        key = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
        signature = b64(key.sign(f"{encoded}.{payload}".encode()))
        with pytest.raises(Refused):
            check(f"{encoded}.{payload}.{signature}")


@pytest.mark.parametrize(
    "extra",
    [
        {"jku": "https://elsewhere.example/keys"},
        {"crit": ["exp"], "exp": NOW},
        {"b64": True},
        {"cty": "JWT"},
        {"zip": "DEF"},
    ],
    ids=str,
)
def test_our_own_signature_under_a_header_with_more_in_it_is_refused(extra: dict[str, Any]) -> None:
    payload = b64(msgspec.json.encode(CLAIMS))
    key = Ed25519PrivateKey.from_private_bytes(b"s" * 32)
    for header, good in (({}, True), (extra, False)):
        whole = {"alg": "Ed25519", "typ": Typ.GRANT, "kid": SIGNER.kid} | header
        encoded = b64(json.dumps(whole).encode())
        token = f"{encoded}.{payload}.{b64(key.sign(f'{encoded}.{payload}'.encode()))}"
        if good:
            assert check(token) == CLAIMS
        else:
            with pytest.raises(Refused):
                check(token)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_refused(place: int, flip: int) -> None:
    token = bytearray(mint(CLAIMS, SIGNER).encode())
    token[place % len(token)] ^= flip
    with pytest.raises(Refused):
        check(token.decode("latin-1"))


@given(st.text(max_size=200))
def test_verify_raises_nothing_but_refused(token: str) -> None:
    with pytest.raises(Refused):
        check(token)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"exp": NOW + GRANT_LIFE_S_MAX + 1}, "exp"),
        ({"prompt_tokens": 150}, "spans[1].end"),
        ({"salt_digest": ""}, "salt_digest"),
    ],
)
def test_minting_an_impossible_grant_is_misuse_by_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(Misuse) as caught:
        mint(change(**values), SIGNER)
    assert caught.value.field == field
