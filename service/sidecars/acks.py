"""What a sidecar says that it has done about the log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final

from sqlalchemy import case, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.sidecars.models import Sidecar
from strongroom.control import AckRequest
from strongroom.errors import Conflict, Misuse
from strongroom.log import LogHead


class AckState(StrEnum):
    """`fenced`: nothing retired is served any more. `reclaimed`: its bytes are free."""

    FENCED = "fenced"
    RECLAIMED = "reclaimed"


COUNT_MAX: Final = 2**62

Settle = Callable[[AsyncSession, str, AckRequest, int], Awaitable[None]]
"""Told of a checked acknowledgement, and the seq above which it is news, in its transaction."""


def check(ack: AckRequest) -> None:
    """Raise `Misuse` for what no acknowledgement can be."""
    counts = (ack.loads_fenced, ack.saves_fenced, ack.namespaces_dropped, ack.bytes_reclaimed)
    if not all(0 <= count <= COUNT_MAX for count in counts):
        raise Misuse("a count is negative or too large", field="counts", limit=COUNT_MAX)
    if ack.state not in list(AckState):
        raise Misuse("unknown state", field="state", limit="fenced, reclaimed")


async def acknowledge(
    session: AsyncSession, head: LogHead, sidecar: str, ack: AckRequest, settle: Settle
) -> None:
    """Record an acknowledgement, which was checked. It only moves forward; said again, it changes
    nothing.

    Raises `Conflict`, with nothing done, for another epoch and for entries that there are not.
    """
    if ack.epoch != head.epoch or not 0 <= ack.seq <= head.seq:
        raise Conflict("this acknowledges what the log does not have", field="seq", limit=head.seq)
    match AckState(ack.state):
        case AckState.FENCED:
            await _fenced(session, sidecar, ack)
            await settle(session, sidecar, ack, 0)
        case AckState.RECLAIMED:
            await settle(session, sidecar, ack, await _reclaimed(session, sidecar, ack))


async def _fenced(session: AsyncSession, sidecar: str, ack: AckRequest) -> None:
    await session.execute(
        update(Sidecar)
        .where(Sidecar.id == sidecar)
        .where((Sidecar.fenced_seq < ack.seq) | (Sidecar.epoch != ack.epoch))
        .values(
            epoch=ack.epoch,
            fenced_seq=ack.seq,
            applied_seq=ack.seq,
            reclaimed_seq=case((Sidecar.epoch == ack.epoch, Sidecar.reclaimed_seq), else_=0),
        )
        .execution_options(synchronize_session=False)
    )


async def _reclaimed(session: AsyncSession, sidecar: str, ack: AckRequest) -> int:
    """The seq up to which it had reclaimed before."""
    before = await session.scalar(
        select(Sidecar.reclaimed_seq).where(Sidecar.id == sidecar, Sidecar.epoch == ack.epoch)
    )
    await session.execute(
        update(Sidecar)
        .where(Sidecar.id == sidecar, Sidecar.reclaimed_seq < ack.seq)
        .values(reclaimed_seq=ack.seq)
        .execution_options(synchronize_session=False)
    )
    return before or 0
