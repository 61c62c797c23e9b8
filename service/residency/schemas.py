"""What is seen of the residency catalogue."""

from __future__ import annotations

from datetime import datetime

from service.residency.catalogue import Resident
from service.residency.models import Tier
from service.schemas import Answer


class PlaceAnswer(Answer):
    """One tier of one node, and what it holds."""

    sidecar: str
    tier: Tier
    namespaces: int
    blocks: int
    bytes: int
    reported_at: datetime


class ResidencyAnswer(Answer):
    """What lies where, as sidecars said last: a hint, never proof."""

    kept: bool
    """False: no sidecar ever reported, and the numbers say nothing."""
    namespaces: int
    """Different ones: one that lies in two places counts once."""
    blocks: int
    bytes: int
    oldest_report_at: datetime | None
    places: list[PlaceAnswer]

    @classmethod
    def of(cls, resident: Resident, *, kept: bool) -> ResidencyAnswer:
        """From what the catalogue says."""
        return cls(
            kept=kept,
            namespaces=resident.namespaces,
            blocks=resident.blocks,
            bytes=resident.bytes,
            oldest_report_at=resident.oldest_report_at,
            places=[PlaceAnswer.model_validate(place) for place in resident.places],
        )
