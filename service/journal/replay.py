"""Doing again what a restored database has forgotten.

- Components are destroyed again; a tenant's with everything that is the tenant's.
- A subject that was retired with its private group is removed again, with its rules. One that
  was retired alone had lost a membership, and loses all of them: which one is not in the log.
- A tenant's revision is brought up to the one that the log demands, and beyond.
- A sidecar that was revoked is revoked again.
- A new epoch begins, so that every grant and every position of the old one is dead.

Which memberships, rules and roles were changed after the backup was taken is not in the log
either: the restored ones may allow what was taken away since. So in every tenant of which the
log says that they were changed nothing is granted (`Tenant.review_required`) until an operator
has looked at them and says so. An alarm names these tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import delete, select, update

from service.changes import Change
from service.db.base import now
from service.keys import components
from service.keys.models import Component
from service.registry.models import Artefact, DocumentVersion
from service.rules import store as rules
from service.sidecars.models import Sidecar
from service.tenancy import store as tenancy
from service.tenancy.models import Group, Membership, Tenant
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry

_IN_MAX: Final = 500
_BEHIND: Final = "the database was behind the journal"


async def replay(change: Change, entries: Sequence[LogEntry]) -> None:
    """Apply `entries` to the restored database, and begin a new epoch."""
    destroyed: list[ComponentId] = []
    reviewed: set[str] = set()
    for entry in entries:
        destroyed += await destroy_again(change, entry.components)
        match entry.kind:
            case InvalidationKind.SUBJECT:
                if not await _retire_subject(change, entry):
                    reviewed |= await _require_review(change, entry)
            case InvalidationKind.TENANT_REVISION:
                await change.session.execute(
                    update(Tenant)
                    .where(Tenant.id == entry.tenant, Tenant.revision < entry.min_revision)
                    .values(revision=entry.min_revision)
                )
                reviewed |= await _require_review(change, entry)
            case InvalidationKind.SIDECAR:
                await _revoke_sidecar(change, entry.sidecar)
            case InvalidationKind.COMPONENTS | InvalidationKind.EPOCH:
                pass
    tenants = sorted({entry.tenant for entry in entries if entry.tenant})
    for tenant in tenants:
        if await change.session.get(Tenant, tenant) is not None:
            await tenancy.bump_revision(change.session, ComponentId(tenant))
    began = await change.begin_epoch()
    change.secrets_destroyed = True
    await change.audit(
        "log.replayed",
        outcome="alarm",
        reason=_BEHIND,
        details={
            "entries": len(entries),
            "from_epoch": entries[0].epoch,
            "from_seq": entries[0].seq,
            "components_destroyed": len(destroyed),
            "tenants": tenants,
            "tenants_to_review": sorted(reviewed),
            "epoch": began.epoch,
        },
        references=destroyed,
    )


async def destroy_again(change: Change, ids: Sequence[ComponentId]) -> list[ComponentId]:
    """Destroy `ids`, and what belongs to those that are tenants; mark their rows as removed."""
    session = change.session
    owned = list(ids)
    for start in range(0, len(ids), _IN_MAX):
        part = ids[start : start + _IN_MAX]
        owned += (
            await session.scalars(select(Component.id).where(Component.tenant.in_(part)))
        ).all()
    every = list(dict.fromkeys(owned))
    destroyed = []
    moment = now()
    for start in range(0, len(every), _IN_MAX):
        part = every[start : start + _IN_MAX]
        destroyed += await components.destroy(session, part)
        for record in (Tenant, Group, Artefact, DocumentVersion):
            await session.execute(
                update(record)
                .where(record.id.in_(part), record.removed_at.is_(None))
                .values(removed_at=moment)
                .execution_options(synchronize_session=False)
            )
    return destroyed


async def _require_review(change: Change, entry: LogEntry) -> set[str]:
    """Grant nothing in the entry's tenant; returns it, unless it is gone anyway."""
    marked = await tenancy.require_review(change.session, entry.tenant, entry.epoch, _BEHIND)
    return {entry.tenant} if marked else set()


async def _retire_subject(change: Change, entry: LogEntry) -> bool:
    """Whether all that the entry did is done again; False: it may have removed a membership."""
    session = change.session
    principal = await tenancy.find_principal(session, entry.tenant, entry.subject)
    if principal is not None and principal.private_group not in entry.components:
        await session.execute(delete(Membership).where(Membership.principal == principal.id))
        return False
    owned = [f"user:{entry.subject}"]
    if principal is not None:
        owned.append(f"group:{await tenancy.remove_principal(session, principal)}")
    if await session.get(Tenant, entry.tenant) is not None:
        tenant = ComponentId(entry.tenant)
        revision = await tenancy.bump_revision(session, tenant)
        await rules.remove_subjects(change, tenant, owned, revision, _BEHIND)
    return True


async def _revoke_sidecar(change: Change, sidecar: str) -> None:
    await change.session.execute(
        update(Sidecar)
        .where(Sidecar.id == sidecar, Sidecar.revoked_at.is_(None))
        .values(revoked_at=now())
    )
