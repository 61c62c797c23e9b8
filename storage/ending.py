"""How a transfer between tiers ends: exactly once, with its cause."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from storage.fence import Fenced
from strongroom.errors import (
    Corrupt,
    Missing,
    Overloaded,
    QuotaExceeded,
    StrongroomError,
    Unavailable,
)


class Cause(StrEnum):
    """Why a transfer failed. The block stays where it was, if it is still there."""

    REFUSED = "refused"
    """The admission policy did not want it."""
    POLICY_TIMEOUT = "policy_timeout"
    """The admission policy did not answer in time, which means no."""
    QUEUE_FULL = "queue_full"
    """The queue is so full that a block of this priority is not admitted."""
    GONE = "gone"
    """The writing was evicted, dropped or replaced."""
    RETIRED = "retired"
    """Its namespace was invalidated."""
    QUOTA = "quota"
    OVERLOADED = "overloaded"
    DEVICE = "device"
    CORRUPT = "corrupt"
    CLOSED = "closed"
    """The store was being closed already."""
    BROKEN = "broken"
    """A defect of ours: the error itself goes up to whoever runs the pipeline."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The block is in the lower tier; `stored` is false when it had been there before."""

    stored: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Given up before its commit point: nothing was written."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing new is in the lower tier."""

    cause: Cause


Outcome = Completed | Cancelled | Failed


def cause_of(error: StrongroomError) -> Cause:
    """What an error of a tier means for the transfer that met it."""
    match error:
        case QuotaExceeded():
            return Cause.QUOTA
        case Overloaded():
            return Cause.OVERLOADED
        case Fenced():
            return Cause.RETIRED
        case Missing():
            return Cause.GONE
        case Corrupt():
            return Cause.CORRUPT
        case Unavailable():
            return Cause.DEVICE
        case _:
            return Cause.BROKEN
