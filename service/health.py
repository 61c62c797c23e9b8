"""Whether the process lives, and whether it may be sent requests. The only open routes."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import ConfigDict

from service.db.migrate import check_revision
from service.runtime import RuntimeDep
from service.schemas import Answer

router = APIRouter(tags=["health"])


class HealthAnswer(Answer):
    """It does."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})

    status: str = "ok"


@router.get("/healthz", summary="Liveness")
async def healthz() -> HealthAnswer:
    """The process answers."""
    return HealthAnswer()


@router.get("/readyz", summary="Readiness")
async def readyz(runtime: RuntimeDep) -> HealthAnswer:
    """The database answers, is migrated, and opens with the keys that are here."""
    await runtime.database.ping()
    await check_revision(runtime.database, running=True)
    await runtime.key_check.require_open()
    return HealthAnswer()
