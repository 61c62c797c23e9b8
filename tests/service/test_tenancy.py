"""Tenants, principals, groups and memberships: scope, revisions, and what a removal destroys."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from policy.permissions import Permission
from service.auth.actor import Actor, ActorKind
from service.auth.scope import in_scope
from service.auth.tokens import Role
from service.keys import components
from service.keys.models import Component
from service.log import chain
from service.log import store as log_store
from strongroom.errors import Missing
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry
from tests.service.house import Party, Service


async def entries(service: Service) -> list[LogEntry]:
    async with service.runtime.sessions() as session:
        stored = await log_store.all_after(session, 0, 1000)
    return [chain.read(each.jws, service.runtime.verifier) for each in stored]


async def alive(service: Service, component: str) -> bool:
    async with service.runtime.sessions() as session:
        return await components.alive(session, [ComponentId(component)])


async def revision(service: Service, tenant: str) -> int:
    return int((await service.operator.get(f"/v1/tenants/{tenant}"))["revision"])


async def test_a_tenant_comes_with_its_own_key_and_an_everyone_group(service: Service) -> None:
    tenant = await service.tenant()
    groups = await service.operator.get(f"/v1/tenants/{tenant}/groups")
    assert [(group["name"], group["kind"]) for group in groups["items"]] == [
        ("everyone", "everyone")
    ]
    async with service.runtime.sessions() as session:
        rows = (await session.scalars(select(Component))).all()
    assert {row.kek for row in rows} == {tenant}


async def test_a_name_is_taken_once_and_free_again_after_removal(service: Service) -> None:
    tenant = await service.tenant()
    assert (await service.operator.ask("POST", "/v1/tenants", {"name": "acme"})).status_code == 409
    for kind, path in (("alice", "principals"), ("legal", "groups")):
        where = f"/v1/tenants/{tenant}/{path}"
        first = await service.operator.post(where, {"name": kind})
        assert (await service.operator.ask("POST", where, {"name": kind})).status_code == 409
        gone = kind if path == "principals" else first["id"]
        await service.operator.delete(f"{where}/{gone}")
        again = await service.operator.post(where, {"name": kind})
        assert again["id"] != first["id"]
    assert await service.tenant("other") != tenant


async def test_a_principal_removed_takes_its_private_groups_secret_along(
    service: Service,
) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await service.subject(tenant, "alice", [group])
    await service.subject(tenant, "bob", [group])
    alice, bob = [
        await service.operator.get(f"/v1/tenants/{tenant}/principals/{name}")
        for name in ("alice", "bob")
    ]
    before = await revision(service, tenant)
    assert await alive(service, alice["private_group"])
    answer = await service.operator.delete(f"/v1/tenants/{tenant}/principals/alice")
    assert answer["revision"] == before + 1 == await revision(service, tenant)
    assert not await alive(service, alice["private_group"])
    assert await alive(service, bob["private_group"])
    entry = (await entries(service))[-1]
    assert (entry.kind, entry.tenant, entry.subject) == (
        InvalidationKind.SUBJECT,
        tenant,
        "alice",
    )
    assert entry.components == (alice["private_group"],)
    members = await service.operator.get(f"/v1/tenants/{tenant}/memberships", group=group)
    assert [member["principal"] for member in members["items"]] == ["bob"]
    gone = await service.operator.ask("GET", f"/v1/tenants/{tenant}/principals/alice")
    assert gone.status_code == 404


async def test_a_membership_bumps_the_revision_and_kills_older_grants(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await service.subject(tenant, "alice")
    before = await revision(service, tenant)
    body = {"group": group, "principal": "alice"}
    added = await service.operator.post(f"/v1/tenants/{tenant}/memberships", body)
    same = await service.operator.post(f"/v1/tenants/{tenant}/memberships", body)
    assert added["revision"] == same["revision"] == before + 1
    removed = await service.operator.delete(f"/v1/tenants/{tenant}/memberships/{group}/alice")
    assert removed["revision"] == before + 2
    missing = await service.operator.ask(
        "DELETE", f"/v1/tenants/{tenant}/memberships/{group}/alice"
    )
    assert missing.status_code == 404
    told = [entry for entry in await entries(service) if entry.min_revision]
    assert [entry.kind for entry in told] == [InvalidationKind.TENANT_REVISION] * 2
    assert [entry.min_revision for entry in told] == [before + 1, before + 2]


async def test_only_a_named_group_takes_members_or_is_removed(service: Service) -> None:
    tenant = await service.tenant()
    await service.subject(tenant, "alice")
    groups = (await service.operator.get(f"/v1/tenants/{tenant}/groups"))["items"]
    assert {group["kind"] for group in groups} == {"everyone", "private"}
    for group in groups:
        body = {"group": group["id"], "principal": "alice"}
        added = await service.operator.ask("POST", f"/v1/tenants/{tenant}/memberships", body)
        removed = await service.operator.ask("DELETE", f"/v1/tenants/{tenant}/groups/{group['id']}")
        assert (added.status_code, removed.status_code) == (409, 409)


async def test_a_group_removed_is_destroyed_in_the_entry_that_says_so(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await service.operator.delete(f"/v1/tenants/{tenant}/groups/{group}")
    entry = (await entries(service))[-1]
    assert (entry.components, entry.min_revision) == ((group,), await revision(service, tenant))
    assert not await alive(service, group)


async def test_another_tenant_looks_like_none_at_all(service: Service) -> None:
    mine, other = await service.tenant("mine"), await service.tenant("other")
    admin = service.party("root", mine, Role.TENANT_ADMIN)
    for path in ("", "/principals", "/groups", "/rules", "/roles", "/documents"):
        assert (await admin.ask("GET", f"/v1/tenants/{mine}{path}")).status_code == 200
        theirs = await admin.ask("GET", f"/v1/tenants/{other}{path}")
        nobodys = await admin.ask("GET", f"/v1/tenants/{'0' * 32}{path}")
        assert (theirs.status_code, theirs.text) == (404, nobodys.text)
    for path, body in (
        ("principals", {"name": "eve"}),
        ("groups", {"name": "eve"}),
        ("documents", {"name": "eve"}),
    ):
        theirs = await admin.ask("POST", f"/v1/tenants/{other}/{path}", body)
        nobodys = await admin.ask("POST", f"/v1/tenants/{'0' * 32}/{path}", body)
        assert (theirs.status_code, theirs.text) == (404, nobodys.text)
        assert (await admin.ask("POST", f"/v1/tenants/{mine}/{path}", body)).status_code == 201
    assert [each["id"] for each in (await admin.get("/v1/tenants"))["items"]] == [mine]


def test_scope_is_one_helper() -> None:
    tenant = ComponentId("a" * 32)
    operator = Actor(ActorKind.OPERATOR, "root")
    admin = Actor(ActorKind.TENANT_ADMIN, "root", tenant)
    assert in_scope(operator, tenant).tenant == tenant
    assert in_scope(admin, tenant).tenant == tenant
    with pytest.raises(Missing):
        in_scope(admin, "b" * 32)


async def test_listings_go_on_from_an_opaque_cursor(service: Service) -> None:
    tenant = await service.tenant()
    names = {f"user{number}" for number in range(7)}
    for name in names:
        await service.operator.post(f"/v1/tenants/{tenant}/principals", {"name": name})
    seen: list[str] = []
    cursor: dict[str, Any] = {}
    while True:
        page = await service.operator.get(f"/v1/tenants/{tenant}/principals", limit=3, **cursor)
        seen.extend(item["name"] for item in page["items"])
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert sorted(seen) == sorted(names)
    for wrong in ("x", "AAAA", "A" * 65, "=" * 8, page["items"][0]["id"]):
        answer = await service.operator.ask(
            "GET", f"/v1/tenants/{tenant}/principals", params={"cursor": wrong}
        )
        assert (answer.status_code, answer.json()["field"]) == (422, "cursor")


async def test_a_revision_is_bumped_once_for_each_of_many_changes_at_once(
    service: Service,
) -> None:
    import asyncio

    tenant = await service.tenant()
    before = await revision(service, tenant)
    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(
                service.operator.post(f"/v1/tenants/{tenant}/principals", {"name": f"user{number}"})
            )
    assert await revision(service, tenant) == before + 8


async def test_a_tenant_admin_issues_tokens_for_its_own_tenant_alone(service: Service) -> None:
    mine, other = await service.tenant("mine"), await service.tenant("other")
    await service.subject(mine, "alice")
    await service.subject(other, "alice")
    admin = service.party("root", mine, Role.TENANT_ADMIN)

    async def issue(**body: Any) -> int:
        given = {"subject": "alice", "roles": ["subject"], **body}
        return (await admin.ask("POST", "/v1/tokens", given)).status_code

    assert await issue(tenant=mine) == 201
    assert await issue(tenant=other) == 404
    assert await issue(tenant=mine, subject="nobody") == 404
    assert await issue(roles=["gateway"]) == 403
    assert await issue(tenant=mine, roles=["operator"]) == 403
    assert Permission.TOKEN_ISSUE.value == "token:issue"


async def test_nobody_issues_a_token_that_allows_what_its_own_does_not(service: Service) -> None:
    tenant = await service.tenant()
    await service.subject(tenant, "alice")
    admin = service.party("admin", tenant, Role.TENANT_ADMIN)

    async def status(party: Party, *roles: str) -> int:
        given = {"subject": "alice", "tenant": tenant, "roles": list(roles)}
        return (await party.ask("POST", "/v1/tokens", given)).status_code

    # An auditor reads the log and the sidecars, which a tenant's administrator does not.
    assert await status(admin, "auditor") == 403
    assert await status(admin, "tenant_admin", "auditor") == 403
    assert await status(service.operator, "auditor") == 201
    for roles in (("subject",), ("gateway",), ("tenant_admin",), ("subject", "gateway")):
        assert await status(admin, *roles) == 201
    both = service.party("both", tenant, Role.TENANT_ADMIN, Role.AUDITOR)
    assert await status(both, "auditor") == 201
