"""Ed25519 JWS, one `typ` for each kind of message, through joserfc.

Rules: the algorithm is pinned (`Ed25519`, the name RFC 9864 gives to EdDSA over that curve);
the header's `typ` must be the expected one; the key is chosen by `kid` among pinned keys
only; and every failure is the same `Refused`, so that a caller learns nothing from which
check failed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import OKPKey

from strongroom.errors import Misuse, Refused

ALGORITHM = "Ed25519"
JWS_BYTES_MAX = 1024 * 1024
_HEADER_FIELDS = frozenset(("alg", "typ", "kid"))
_registry = jws.JWSRegistry(algorithms=[ALGORITHM])
# The library signs a payload of any length, and by itself verifies up to 96 KB only: a log entry
# that retires three thousand components would be signed and then stop every sidecar.
_registry.max_payload_length = JWS_BYTES_MAX


def encode_base64url(raw: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode_base64url(text: str, field: str) -> bytes:
    """The bytes of unpadded base64url, refusing what is not the one encoding of its bytes."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise Misuse(f"{field} is not base64url", field=field) from error
    if encode_base64url(raw) != text:
        raise Misuse(f"{field} is not canonical base64url", field=field)
    return raw


def key_id(public_key: bytes) -> str:
    """The `kid` of a raw Ed25519 public key: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:16]


class Signer:
    """Signs with one Ed25519 key. `repr` shows the key id only."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.public_key = private_key.public_key().public_bytes_raw()
        self.kid = key_id(self.public_key)
        self._key = OKPKey.import_key(private_key)

    def __repr__(self) -> str:
        return f"Signer(kid={self.kid!r})"

    def sign(self, typ: str, payload: bytes) -> str:
        """A compact JWS of type `typ` over `payload`.

        Raises `Misuse` for one that is longer than any `Verifier` accepts.
        """
        header = {"alg": ALGORITHM, "typ": typ, "kid": self.kid}
        token = jws.serialize_compact(header, payload, self._key, registry=_registry)
        if len(token) > JWS_BYTES_MAX:
            raise Misuse("the message is too large to be signed", field=typ, limit=JWS_BYTES_MAX)
        return token


class Verifier:
    """Verifies against pinned public keys, by key id."""

    def __init__(self, public_keys: Mapping[str, bytes]) -> None:
        self.public_keys = dict(public_keys)
        self._keys: dict[str, OKPKey] = {}
        for kid, raw in self.public_keys.items():
            if kid != key_id(raw):
                raise Misuse("a key id does not belong to its key", field="kid")
            self._keys[kid] = OKPKey.import_key(Ed25519PublicKey.from_public_bytes(raw))

    def verify(self, typ: str, token: str) -> bytes:
        """The payload of `token`, if it is a JWS of type `typ` by a pinned key.

        Raises `Refused`, with the same message whatever is wrong.
        """
        try:
            return self._verify(typ, token)
        except (JoseError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refused("the signature does not verify") from error

    def _verify(self, typ: str, token: str) -> bytes:
        if len(token) > JWS_BYTES_MAX:
            raise ValueError("token too long")
        signed = jws.extract_compact(token.encode(), registry=_registry)
        header: Any = signed.headers()
        # The library takes any JSON that contains "alg", even a list, for a header.
        if not isinstance(header, dict) or not set(header) <= _HEADER_FIELDS:
            raise ValueError("unexpected header")
        if header.get("typ") != typ:
            raise ValueError("unexpected header")
        if not jws.validate_compact(signed, self._keys[header["kid"]], registry=_registry):
            raise ValueError("the signature is another's")
        return signed.payload
