"""Sealing namespace secrets to one sidecar's key (HPKE, RFC 9180 base mode).

The `info` is the canonical JSON of `KeyLeaseInfo`, which binds sidecar, nonce, position,
expiry, namespaces and components: secrets sealed for one answer do not open in another. Base
mode proves no sender, so the answer is signed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from policy.signing import JWS_BYTES_MAX, Signer, encode_base64url
from service.keys.components import overwrite
from strongroom.canonical import canonical_json
from strongroom.control import KeyLeaseClaims, KeyLeaseInfo, Typ
from strongroom.errors import Misuse

SUITE: Final = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)


def seal(secrets: Sequence[bytes | bytearray], hpke_key: bytes, info: KeyLeaseInfo) -> str:
    """`secrets` back to back, for the holder of `hpke_key` and `info` alone; base64url."""
    plain = bytearray(b"".join(secrets))
    try:
        public = X25519PublicKey.from_public_bytes(hpke_key)
        return encode_base64url(SUITE.encrypt(plain, public, canonical_json(asdict(info))))
    finally:
        overwrite([plain])


def sign_lease(info: KeyLeaseInfo, sealed: str, signer: Signer) -> str:
    """The signed answer. Raises `Misuse` when it would be too large to be verified."""
    claims = KeyLeaseClaims(info=info, sealed=sealed)
    jws = signer.sign(Typ.KEY_LEASE, canonical_json(asdict(claims)))
    if len(jws) > JWS_BYTES_MAX:
        raise Misuse("the grant names too much for one lease", field="grant", limit=JWS_BYTES_MAX)
    return jws
