"""Conjunctive keys: every component's secret goes in, so that destroying one destroys all.

    namespace_secret = HKDF-SHA256(ikm = concat(len ‖ secret_c, canonical order), salt = empty,
                                   info = "strongroom/v1" ‖ fingerprint)
    lookup, data key = HKDF-Expand(namespace_secret, "strongroom/v1/lookup|data" ‖ format digest)
    engine salt      = HKDF-Expand(namespace_secret, "strongroom/v1/salt"), base64url
    block key ‖ commitment = HKDF-Expand(data key, "strongroom/v1/block" ‖ block id ‖ salt, 64)

HKDF is RFC 5869 over the standard library's HMAC, since this package may not import a
cryptography library; the tests hold it against the RFC's vectors and another implementation.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from strongroom.errors import Misuse

SECRET_BYTES: Final = 32
BLOCK_SALT_BYTES: Final = 16
_HASH_BYTES: Final = 32
_INFO: Final = b"strongroom/v1"


def hkdf_extract(salt: bytes, ikm: bytes) -> bytes:
    """RFC 5869 section 2.2 with SHA-256."""
    return hmac.digest(salt or bytes(_HASH_BYTES), ikm, hashlib.sha256)


def hkdf_expand(prk: bytes, info: bytes, length: int = _HASH_BYTES) -> bytes:
    """RFC 5869 section 2.3 with SHA-256; `length` is at most 255 x 32 bytes."""
    if not 0 < length <= 255 * _HASH_BYTES:
        raise Misuse("HKDF yields 1 to 8160 bytes", field="length", limit=255 * _HASH_BYTES)
    output = b""
    block = b""
    counter = 1
    while len(output) < length:
        block = hmac.digest(prk, block + info + bytes((counter,)), hashlib.sha256)
        output += block
        counter += 1
    return output[:length]


def namespace_secret(component_secrets: Sequence[bytes | bytearray], fingerprint: bytes) -> bytes:
    """The namespace's root secret, from its components' secrets in canonical order."""
    if not component_secrets:
        raise Misuse("a namespace has at least one component", field="components")
    ikm = bytearray()
    for secret in component_secrets:
        if len(secret) != SECRET_BYTES:
            raise Misuse("a component secret has 32 bytes", field="secret", limit=SECRET_BYTES)
        ikm += struct.pack("<I", len(secret))
        ikm += secret
    return hkdf_expand(hkdf_extract(b"", bytes(ikm)), _INFO + fingerprint)


def engine_salt(secret: bytes) -> str:
    """The `cache_salt` of this namespace: 43 characters of base64url, no padding."""
    raw = hkdf_expand(secret, _INFO + b"/salt")
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def salt_digest(salt: str) -> str:
    """What a grant says of its salt: SHA-256 in hexadecimal, which does not reveal it."""
    return hashlib.sha256(b"strongroom/salt/v1" + salt.encode()).hexdigest()


@dataclass(frozen=True, slots=True, repr=False)
class NamespaceKeys:
    """A namespace's keys for one KV format."""

    lookup: bytes
    data: bytes


def namespace_keys(secret: bytes, format_digest: bytes) -> NamespaceKeys:
    """Derive lookup and data key; another KV format gets keys that find and open nothing."""
    return NamespaceKeys(
        lookup=hkdf_expand(secret, _INFO + b"/lookup" + format_digest),
        data=hkdf_expand(secret, _INFO + b"/data" + format_digest),
    )


@dataclass(frozen=True, slots=True, repr=False)
class BlockKey:
    """One block's AES-256-GCM key, and the value that commits to it."""

    key: bytes
    commitment: bytes


def block_key(data_key: bytes, block: bytes, salt: bytes) -> BlockKey:
    """The key of one writing of one block: `salt` is fresh, so no (key, nonce) repeats."""
    if len(salt) != BLOCK_SALT_BYTES:
        raise Misuse("a block salt has 16 bytes", field="salt", limit=BLOCK_SALT_BYTES)
    okm = hkdf_expand(data_key, _INFO + b"/block" + block + salt, 64)
    return BlockKey(okm[:32], okm[32:])
