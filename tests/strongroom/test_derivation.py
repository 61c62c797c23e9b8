"""Conjunctive keys: RFC 5869, a second implementation, and what one missing secret does."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from strongroom.derivation import (
    block_key,
    engine_salt,
    hkdf_expand,
    hkdf_extract,
    namespace_keys,
    namespace_secret,
    salt_digest,
)
from strongroom.errors import Misuse
from strongroom.limits import ENGINE_SALT_CHARS_MAX

FINGERPRINT = bytes(range(32))
secrets_lists = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("ikm", "salt", "info", "length", "okm"),
    [
        # RFC 5869 appendix A.1 to A.3
        (
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            82,
            (
                "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac782"
                "7271cb41c65e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3"
                "434f1d87"
            ),
        ),
        (
            b"\x0b" * 22,
            b"",
            b"",
            42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_hkdf_is_rfc_5869(ikm: bytes, salt: bytes, info: bytes, length: int, okm: str) -> None:
    assert hkdf_expand(hkdf_extract(salt, ikm), info, length).hex() == okm


@given(st.binary(max_size=80), st.binary(max_size=80), st.integers(1, 200))
def test_hkdf_agrees_with_another_implementation(ikm: bytes, info: bytes, length: int) -> None:
    other = HKDF(hashes.SHA256(), length, None, info).derive(ikm)
    assert hkdf_expand(hkdf_extract(b"", ikm), info, length) == other


@given(secrets_lists, st.data())
def test_without_any_one_secret_the_namespace_cannot_be_derived(
    secrets: list[bytes], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(secrets) - 1))
    whole = namespace_secret(secrets, FINGERPRINT)
    guessed = [
        *secrets[:index],
        data.draw(st.binary(min_size=32, max_size=32)),
        *secrets[index + 1 :],
    ]
    assert (namespace_secret(guessed, FINGERPRINT) == whole) == (guessed == secrets)
    if len(secrets) > 1:
        without = secrets[:index] + secrets[index + 1 :]
        assert namespace_secret(without, FINGERPRINT) != whole


def test_another_fingerprint_with_the_same_secrets_is_another_secret() -> None:
    one = namespace_secret([b"a" * 32], FINGERPRINT)
    assert one != namespace_secret([b"a" * 32], bytes(32))


def test_another_format_finds_and_opens_nothing() -> None:
    secret = namespace_secret([b"a" * 32], FINGERPRINT)
    one, other = namespace_keys(secret, b"f" * 32), namespace_keys(secret, b"g" * 32)
    assert len({one.lookup, one.data, other.lookup, other.data, secret}) == 5


@given(st.binary(min_size=32, max_size=32))
def test_an_engine_salt_fits_the_engine(secret: bytes) -> None:
    salt = engine_salt(secret)
    assert len(salt) == 43 <= ENGINE_SALT_CHARS_MAX
    assert not set("@/\\+=") & set(salt)
    assert salt not in salt_digest(salt)


def test_every_writing_of_a_block_has_a_key_of_its_own() -> None:
    keys = {block_key(b"d" * 32, b"b" * 32, bytes([number]) * 16).key for number in range(50)}
    assert len(keys) == 50
    one = block_key(b"d" * 32, b"b" * 32, bytes(16))
    assert one.key != one.commitment


def test_keys_do_not_show_in_what_is_printed() -> None:
    block = block_key(b"d" * 32, b"b" * 32, bytes(16))
    names = namespace_keys(b"n" * 32, b"f" * 32)
    shown = f"{block} {block!r} {names} {names!r}"
    for secret in (block.key, block.commitment, names.lookup, names.data):
        # As hexadecimal, and as Python writes bytes.
        assert secret.hex() not in shown
        assert repr(secret) not in shown


@pytest.mark.parametrize(
    "call",
    [
        lambda: namespace_secret([], FINGERPRINT),
        lambda: namespace_secret([b"short"], FINGERPRINT),
        lambda: block_key(b"d" * 32, b"b" * 32, b"short"),
        lambda: hkdf_expand(b"p" * 32, b"", 0),
        lambda: hkdf_expand(b"p" * 32, b"", 255 * 32 + 1),
    ],
)
def test_impossible_inputs_are_misuse(call: object) -> None:
    assert callable(call)
    with pytest.raises(Misuse):
        call()
