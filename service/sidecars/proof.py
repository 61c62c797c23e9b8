"""A sidecar's proof of possession: one signed statement for one call.

`Authorization: Sidecar <JWS>` covers method, request target, body digest, a nonce and the
time. Whatever is wrong, the answer is the same `Unauthenticated`.

A nonce is remembered for as long as its statement could be in its time, in this process. A
statement replayed to another process of the service gains nothing: leases are sealed to the
sidecar's key or bound to the question's nonce, acknowledgements only move forward, and intake
takes each event once.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import msgspec

from policy.signing import Verifier, decode_base64url, key_id
from service.auth.errors import Unauthenticated
from strongroom.clock import Clock
from strongroom.control import ProofClaims, Typ
from strongroom.errors import Misuse, Overloaded, Refused

SCHEME: Final = "Sidecar"
PROOF_SKEW_S: Final = 30
"""How far a sidecar's wall clock may be off."""
NONCES_MAX: Final = 65_536
"""Of one sidecar within `_KEEP_NS`: about a thousand calls a second."""
_NONCE_CHARS: Final = range(16, 129)
_KEEP_NS: Final = 2 * (PROOF_SKEW_S + 1) * 1_000_000_000
_decoder = msgspec.json.Decoder(ProofClaims, strict=True)


@dataclass(frozen=True, slots=True)
class Call:
    """What a proof has to be about. `target` is path and query as they were sent."""

    method: str
    target: str
    body: bytes


class NonceCache:
    """Nonces that were used; used from the event loop only."""

    def __init__(self, clock: Clock, nonces_max: int = NONCES_MAX) -> None:
        self._clock = clock
        self._nonces_max = nonces_max
        self._taken: dict[str, OrderedDict[str, int]] = {}

    def take(self, sidecar: str, nonce: str) -> None:
        """Use up `nonce`, or raise `Unauthenticated` if it was used before.

        Only for a proof that has been verified: nobody else can fill a sidecar's memory.
        """
        now_ns = self._clock()
        taken = self._taken.setdefault(sidecar, OrderedDict())
        while taken and next(iter(taken.values())) < now_ns - _KEEP_NS:
            taken.popitem(last=False)
        if nonce in taken:
            raise Unauthenticated("the proof is not valid")
        if len(taken) >= self._nonces_max:
            raise Overloaded("too many calls of one sidecar", limit=self._nonces_max)
        taken[nonce] = now_ns


def proof_of(authorization: str | None) -> str:
    """The JWS of an Authorization header of this scheme."""
    scheme, _, proof = (authorization or "").partition(" ")
    if scheme != SCHEME or not proof:
        raise Unauthenticated("a sidecar's proof is needed")
    return proof


def claimed_sidecar(proof: str) -> str:
    """Whose proof this claims to be; nothing about it has been verified yet."""
    try:
        _, payload, _ = proof.split(".")
        return _decoder.decode(decode_base64url(payload, "proof")).sidecar
    except (ValueError, Misuse, msgspec.DecodeError, UnicodeError) as error:
        raise Unauthenticated("the proof is not valid") from error


def check_proof(
    proof: str, signing_key: bytes, sidecar: str, call: Call, now_s: int, nonces: NonceCache
) -> None:
    """Raise `Unauthenticated` unless `sidecar` made `proof` for `call`, now, for the first time."""
    try:
        verifier = Verifier({key_id(signing_key): signing_key})
        claims = _decoder.decode(verifier.verify(Typ.PROOF, proof))
    except (Refused, msgspec.DecodeError, UnicodeError) as error:
        raise Unauthenticated("the proof is not valid") from error
    digest = hashlib.sha256(call.body).hexdigest()
    if not (
        claims.sidecar == sidecar
        and claims.method == call.method
        and claims.path == call.target
        and hmac.compare_digest(claims.body_sha256, digest)
        and len(claims.nonce) in _NONCE_CHARS
        and abs(claims.iat - now_s) <= PROOF_SKEW_S
    ):
        raise Unauthenticated("the proof is not valid")
    nonces.take(sidecar, claims.nonce)
