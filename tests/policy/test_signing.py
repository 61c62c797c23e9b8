"""Signatures: pinned algorithm, type and key; canonical base64url."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from policy.signing import (
    JWS_BYTES_MAX,
    Signer,
    Verifier,
    decode_base64url,
    encode_base64url,
    key_id,
)
from strongroom.control import Typ
from strongroom.errors import Misuse, Refused

SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(b"s" * 32))
OTHER = Signer(Ed25519PrivateKey.from_private_bytes(b"o" * 32))
TYPES = [value for name, value in vars(Typ).items() if name.isupper()]


@pytest.mark.parametrize("typ", TYPES)
def test_one_kind_of_message_never_passes_for_another(typ: str) -> None:
    verifier = Verifier({SIGNER.kid: SIGNER.public_key})
    token = SIGNER.sign(typ, b"payload")
    for expected in TYPES:
        if expected == typ:
            assert verifier.verify(expected, token) == b"payload"
        else:
            with pytest.raises(Refused):
                verifier.verify(expected, token)


def test_only_pinned_keys_verify() -> None:
    token = OTHER.sign(Typ.LOG, b"x")
    with pytest.raises(Refused):
        Verifier({SIGNER.kid: SIGNER.public_key}).verify(Typ.LOG, token)
    both = Verifier({SIGNER.kid: SIGNER.public_key, OTHER.kid: OTHER.public_key})
    assert both.verify(Typ.LOG, token) == b"x"


def test_a_key_id_that_is_not_its_keys_is_refused() -> None:
    with pytest.raises(Misuse):
        Verifier({SIGNER.kid: OTHER.public_key})
    assert key_id(SIGNER.public_key) == SIGNER.kid


def test_a_signer_shows_no_key() -> None:
    shown = repr(SIGNER)
    assert SIGNER.kid in shown
    assert (b"s" * 32).hex() not in shown
    assert "ssss" not in shown


@given(st.binary(max_size=64))
def test_base64url_comes_back(raw: bytes) -> None:
    assert decode_base64url(encode_base64url(raw), "x") == raw


@pytest.mark.parametrize("text", ["a", "AB", "AA==", "A+A/", "A A", "ä", "AA\n"])
def test_base64url_that_is_not_the_one_encoding_is_refused(text: str) -> None:
    with pytest.raises(Misuse) as caught:
        decode_base64url(text, "field")
    assert caught.value.field == "field"


@pytest.mark.parametrize(
    "header",
    [
        b'["alg"]',
        b'["alg","typ","kid"]',
        b'"alg"',
        b"null",
        b"1",
        b'{"alg":[],"typ":"t","kid":[1]}',
        b'{"alg":' + b"[" * 100_000,
        b'{"alg":"Ed25519","typ":"t","kid":{}}',
        b'{"alg":"Ed25519","typ":"t","kid":"0000000000000000"}',
        b'{"alg":"Ed25519","typ":"t","kid":"0000000000000000","crit":["b64"],"b64":false}',
    ],
    ids=lambda header: header[:24].decode(),
)
@pytest.mark.parametrize("signature", ["", "AAAA", "A" * 86])
def test_a_header_of_any_shape_is_refused_and_nothing_else(header: bytes, signature: str) -> None:
    verifier = Verifier({SIGNER.kid: SIGNER.public_key})
    with pytest.raises(Refused):
        verifier.verify("t", f"{encode_base64url(header)}.e30.{signature}")


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_any_json_for_a_header_is_refused(value: object) -> None:
    verifier = Verifier({SIGNER.kid: SIGNER.public_key})
    header = encode_base64url(json.dumps(value).encode())
    with pytest.raises(Refused):
        verifier.verify("t", f"{header}.e30.{'A' * 86}")


@pytest.mark.parametrize("length", [0, 95_999, 96_001, 500_000, 780_000])
def test_whatever_can_be_signed_verifies(length: int) -> None:
    verifier = Verifier({SIGNER.kid: SIGNER.public_key})
    assert verifier.verify(Typ.LOG, SIGNER.sign(Typ.LOG, b"x" * length)) == b"x" * length


def test_a_message_that_is_too_long_is_neither_signed_nor_verified() -> None:
    with pytest.raises(Misuse) as caught:
        SIGNER.sign(Typ.LOG, b"x" * JWS_BYTES_MAX)
    assert caught.value.limit == JWS_BYTES_MAX
    header = encode_base64url(
        json.dumps({"alg": "Ed25519", "typ": Typ.LOG, "kid": SIGNER.kid}).encode()
    )
    signing_input = f"{header}.{encode_base64url(b'x' * (JWS_BYTES_MAX * 3 // 4))}"
    key = Ed25519PrivateKey.from_private_bytes(b"s" * 32)
    signature = encode_base64url(key.sign(signing_input.encode()))
    with pytest.raises(Refused):
        Verifier({SIGNER.kid: SIGNER.public_key}).verify(Typ.LOG, f"{signing_input}.{signature}")
