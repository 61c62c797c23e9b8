"""Which sidecar calls: a dependency that checks its proof against the bytes that came in."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.openapi.models import APIKey, APIKeyIn
from fastapi.security.base import SecurityBase

from service.auth.errors import Unauthenticated
from service.http_headers import tell
from service.runtime import RuntimeDep
from service.sidecars.proof import Call, check_proof, claimed_sidecar, proof_of
from service.sidecars.store import Enrolled


class _ProofScheme(SecurityBase):
    """Shows the scheme in the OpenAPI document; `calling_sidecar` does the work."""

    def __init__(self) -> None:
        self.model = APIKey(
            **{"in": APIKeyIn.header},
            name="Authorization",
            description="`Sidecar <JWS>`: the sidecar's signature over this very call.",
        )
        self.scheme_name = "sidecar"

    async def __call__(self, request: Request) -> str | None:
        return request.headers.get("authorization")


_scheme = _ProofScheme()


async def calling_sidecar(
    request: Request,
    runtime: RuntimeDep,
    authorization: Annotated[str | None, Depends(_scheme)],
) -> Enrolled:
    """The live sidecar that proved this call. Raises `Unauthenticated`."""
    proof = proof_of(authorization)
    sidecar = await runtime.roster.find(claimed_sidecar(proof)[:32])
    if sidecar is None:
        raise Unauthenticated("the proof is not valid")
    call = Call(request.method, request_target(request.scope), await request.body())
    check_proof(proof, sidecar.signing_key, sidecar.id, call, int(time.time()), runtime.desk.nonces)
    tell(request, runtime.rates.sidecar(sidecar.id).headers())
    return sidecar


def request_target(scope: Any) -> str:
    """Path and query as they were sent."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return (raw + (b"?" + query if query else b"")).decode("latin-1")


CallerDep = Annotated[Enrolled, Depends(calling_sidecar)]
