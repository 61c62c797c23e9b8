"""What an acknowledgement says about the revocations that it covers.

`create_app` hands these to the sidecars' desk: sidecars know nothing of revocations.
"""

from __future__ import annotations

from sqlalchemy import Select, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.base import now
from service.log.chain import rfc3339
from service.revocation.models import Revocation, RevocationSidecar, SidecarState
from service.sidecars.acks import AckState
from strongroom.control import AckRequest


async def settle(session: AsyncSession, sidecar: str, ack: AckRequest, above: int) -> None:
    """Record `ack`, which `sidecar` gave for entries after seq `above` in its state."""
    covered = RevocationSidecar.revocation.in_(_covered(ack, above))
    statement = update(RevocationSidecar).where(RevocationSidecar.sidecar == sidecar, covered)
    match AckState(ack.state):
        case AckState.FENCED:
            statement = statement.where(RevocationSidecar.state == SidecarState.PENDING).values(
                state=SidecarState.FENCED,
                at=rfc3339(now()),
                loads_fenced=ack.loads_fenced,
                saves_fenced=ack.saves_fenced,
                namespaces_dropped=ack.namespaces_dropped,
            )
        case AckState.RECLAIMED:
            statement = statement.values(bytes_reclaimed=ack.bytes_reclaimed)
    await session.execute(statement.execution_options(synchronize_session=False))


def _covered(ack: AckRequest, above: int) -> Select[str]:
    return select(Revocation.id).where(
        Revocation.epoch == ack.epoch, Revocation.seq <= ack.seq, Revocation.seq > above
    )
