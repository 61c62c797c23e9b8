"""What the keys' routes take and give."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, StringConstraints

from service.keys.models import Purpose
from service.keys.rotation import Standing
from service.schemas import Answer, Body


class PublicKey(Answer):
    """One Ed25519 public key: raw 32 bytes, base64url."""

    kid: str
    key: str
    use: str
    """`service` (grants, leases, log, certificates) or `token`."""


class PublicKeys(Answer):
    """The keys with which what this service signs is verified."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "issuer": "strongroom",
                    "keys": [
                        {
                            "kid": "56475aa75463474c",
                            "key": "A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg",
                            "use": "service",
                        }
                    ],
                }
            ]
        }
    )

    issuer: str
    keys: list[PublicKey]


_ID = "0123456789abcdef0123456789abcdef"
_AT = "2026-01-31T12:00:00Z"


class RotationBody(Body):
    """Which key-encryption key is to be rotated."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"kek": "installation"}]})

    kek: Annotated[str, StringConstraints(pattern=r"^(installation|[0-9a-f]{32})$")]
    """A tenant's id, or `installation` for what belongs to no tenant."""


class RotationAnswer(Answer):
    """Where a rotation stands."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _ID,
                    "kek": "installation",
                    "state": "running",
                    "target": 2,
                    "components_total": 1000,
                    "components_left": 400,
                    "asked_by": "operator:root",
                    "started_at": _AT,
                    "finished_at": None,
                    "failure": "",
                }
            ]
        }
    )

    id: str
    kek: str
    state: Literal["running", "done"]
    target: int
    """Versions below it end with the rotation."""
    components_total: int
    """Living components that it began with."""
    components_left: int
    """Those that still wait to be rewrapped."""
    asked_by: str
    started_at: datetime
    finished_at: datetime | None
    failure: str
    """The code of what stopped it last; it is tried again."""

    @classmethod
    def of(cls, standing: Standing) -> RotationAnswer:
        """From its row and the count."""
        row = standing.rotation
        return cls(
            id=row.id,
            kek=row.kek,
            state="running" if row.finished_at is None else "done",
            target=row.target,
            components_total=row.components_total,
            components_left=standing.components_left,
            asked_by=row.asked_by,
            started_at=row.started_at,
            finished_at=row.finished_at,
            failure=row.failure,
        )


class RotationPage(Answer):
    """Some rotations, and the cursor that goes on."""

    items: list[RotationAnswer]
    next_cursor: str | None = None


class KeyUseAnswer(Answer):
    """One component's secret, unwrapped once. It holds no secret."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _ID,
                    "at": _AT,
                    "component": _ID,
                    "kek": _ID,
                    "kek_version": 1,
                    "tenant": _ID,
                    "purpose": "key_lease",
                    "actor_kind": "sidecar",
                    "actor": _ID,
                    "reference": _ID,
                }
            ]
        }
    )

    id: str
    at: datetime
    component: str
    """Empty: every living one under that version, in a rotation."""
    kek: str
    kek_version: int
    tenant: str | None
    """For whom; None: for the installation."""
    purpose: Purpose
    actor_kind: str
    actor: str
    reference: str
    """The grant's or the rotation's id."""


class KeyUsePage(Answer):
    """Some entries, oldest first, and the cursor that goes on."""

    items: list[KeyUseAnswer]
    next_cursor: str | None = None


class KeyStatus(Answer):
    """The key-encryption keys as a whole."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "provider": "file_ring",
                    "erasure_final_s": 86400.0,
                    "rotating": [],
                    "overdue": [],
                }
            ]
        }
    )

    provider: str
    erasure_final_s: float
    rotating: list[str]
    """KEKs with a rotation under way."""
    overdue: list[str]
    """KEKs under which an erasure is not final in time."""
