"""The service's public keys over HTTP."""

from __future__ import annotations

from fastapi import APIRouter

from policy.signing import encode_base64url
from service.keys.schemas import PublicKey, PublicKeys
from service.runtime import RuntimeDep

router = APIRouter(prefix="/v1/keys", tags=["keys"])


@router.get("", summary="Public keys")
async def public_keys(runtime: RuntimeDep) -> PublicKeys:
    """The Ed25519 keys in force. Pin them: do not fetch them anew to verify with."""
    uses = ((runtime.verifier, "service"), (runtime.token_verifier, "token"))
    return PublicKeys(
        issuer=runtime.settings.issuer,
        keys=[
            PublicKey(kid=kid, key=encode_base64url(raw), use=use)
            for verifier, use in uses
            for kid, raw in verifier.public_keys.items()
        ],
    )
