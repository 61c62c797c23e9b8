"""The residency catalogue over HTTP: `router` for people, `intake_router` for sidecars."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from policy.permissions import Permission
from service.auth.scope import Scoped, scoped
from service.residency import catalogue, intake
from service.residency.schemas import ResidencyAnswer
from service.runtime import RuntimeDep
from service.schemas import ComponentIdText
from service.sidecars import store
from service.sidecars.caller import CallerDep
from service.tenancy import store as tenancy
from strongroom.control import SIDECAR_PREFIX, ResidencyReceipt, ResidencyRequest
from strongroom.identity import ComponentId

router = APIRouter(prefix="/v1/tenants/{tenant}", tags=["sidecars"])
intake_router = APIRouter(tags=["sidecar"])


@router.get("/residency", summary="See what lies where")
async def read_residency(
    runtime: RuntimeDep,
    scope: Annotated[Scoped, Depends(scoped(Permission.SIDECAR_READ))],
    component: Annotated[
        ComponentIdText | None, Query(description="Only what depends on this component.")
    ] = None,
) -> ResidencyAnswer:
    """Which tier of which node holds how much of a tenant's: a hint, never proof."""
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        if component is None:
            found = await catalogue.of_tenant(session, scope.tenant)
        else:
            found = await catalogue.of_components(session, [ComponentId(component)], scope.tenant)
        return ResidencyAnswer.of(found, kept=await catalogue.is_kept(session))


@intake_router.post(f"{SIDECAR_PREFIX}/residency", summary="Report what lies where")
async def report_residency(
    runtime: RuntimeDep, caller: CallerDep, body: ResidencyRequest
) -> ResidencyReceipt:
    """Amounts that have changed since the report before."""
    async with runtime.database.writers() as session, session.begin():
        await store.require_current(session, caller)
        return ResidencyReceipt(restart=await intake.take(session, caller, body))
