"""Serving leases by challenge (DESIGN section 6, "Leases are pulled, not inferred").

The answer says where the log stands, read under a lock that no entry can be committed past.
So a lease that is granted after a revocation's commit counts only once that revocation is
applied, and one that was granted before has run out within a whole lease (`expiry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from policy.signing import Signer
from service.db.session import Database
from service.log import store as log_store
from service.sidecars import store
from service.sidecars.expiry import LeaseExpiry
from service.sidecars.store import Enrolled
from strongroom.canonical import canonical_json
from strongroom.control import ServingLeaseClaims, ServingLeaseRequest, Typ
from strongroom.errors import Misuse

NONCE_CHARS: Final = range(16, 129)
_DRIFT: Final = 500
"""A lease is shorter by one part in this many than what the service waits for, because the
sidecar's clock may run slower than ours."""


async def grant_serving_lease(
    database: Database,
    expiry: LeaseExpiry,
    signer: Signer,
    sidecar: Enrolled,
    request: ServingLeaseRequest,
    require_reached: Callable[[int], None],
) -> str:
    """The signed `ServingLeaseClaims`.

    `require_reached` raises for a log that ends before what was journalled: `service.changes`.
    """
    if len(request.nonce) not in NONCE_CHARS:
        raise Misuse("a nonce has 16 to 128 characters", field="nonce", limit=128)
    async with database.writers() as session, session.begin():
        head, position = await log_store.shared_head(session)
        require_reached(position)
        applied = request.seq if request.epoch == head.epoch else 0
        number = await store.next_lease(
            session, sidecar, head.epoch, max(0, min(applied, head.seq))
        )
        expiry.granted(sidecar.id, number)
    lease_ms = expiry.lease_ns // 1_000_000
    claims = ServingLeaseClaims(
        sidecar=sidecar.id,
        nonce=request.nonce,
        epoch=head.epoch,
        seq=head.seq,
        hash=head.hash,
        lease_ms=max(1, lease_ms + -lease_ms // _DRIFT),
    )
    return signer.sign(Typ.SERVING_LEASE, canonical_json(asdict(claims)))
