"""Rules, roles and decisions: typed at the door, decided at one revision, explained."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from policy.rules import LINK_DEPTH_MAX
from service.auth.tokens import Role
from strongroom.log import InvalidationKind
from tests.service.house import Service
from tests.service.test_tenancy import entries, revision


def rule(subject: str, resource: str, effect: str = "allow", action: str = "group:read") -> Any:
    return {"subject": subject, "action": action, "resource": resource, "effect": effect}


async def decide(service: Service, tenant: str, subject: str, group: str) -> dict[str, Any]:
    answer: dict[str, Any] = await service.operator.post(
        f"/v1/tenants/{tenant}/decisions",
        {"subject": subject, "action": "group:read", "resource": f"group:{group}"},
    )
    return answer


async def test_membership_allows_and_a_deny_wins_and_each_is_explained(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await service.subject(tenant, "alice", [group])
    await service.subject(tenant, "bob")
    member = await decide(service, tenant, "user:alice", group)
    assert (member["allowed"], member["rule"]) == (
        True,
        f"allow group:{group} group:read on group:{group}",
    )
    outsider = await decide(service, tenant, "user:bob", group)
    assert (outsider["allowed"], outsider["rule"]) == (False, None)
    rules = f"/v1/tenants/{tenant}/rules"
    added = await service.operator.post(rules, rule("user:alice", "group:*", "deny"))
    denied = await decide(service, tenant, "user:alice", group)
    assert (denied["allowed"], denied["rule"]) == (
        False,
        "deny user:alice group:read on group:*",
    )
    assert denied["revision"] == member["revision"] + 1
    await service.operator.delete(f"{rules}/{added['id']}")
    assert (await decide(service, tenant, "user:alice", group))["allowed"]


async def test_everyone_and_ones_own_private_group_are_readable_and_anothers_is_not(
    service: Service,
) -> None:
    tenant = await service.tenant()
    await service.subject(tenant, "alice")
    await service.subject(tenant, "bob")
    groups = (await service.operator.get(f"/v1/tenants/{tenant}/groups"))["items"]
    ids = {group["name"]: group["id"] for group in groups}
    allowed = {
        (name, who): (await decide(service, tenant, f"user:{who}", ids[name]))["allowed"]
        for name in ids
        for who in ("alice", "bob", "stranger")
    }
    assert {key for key, value in allowed.items() if value} == {
        ("everyone", "alice"),
        ("everyone", "bob"),
        ("private:alice", "alice"),
        ("private:bob", "bob"),
    }
    await service.operator.post(
        f"/v1/tenants/{tenant}/rules",
        rule("user:alice", f"group:{ids['private:alice']}", "deny"),
    )
    assert not (await decide(service, tenant, "user:alice", ids["private:alice"]))["allowed"]


async def test_roles_carry_rules_and_chains_of_them_are_bounded(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await service.subject(tenant, "alice")
    await service.operator.post(
        f"/v1/tenants/{tenant}/rules", rule("role:reader", f"group:{group}")
    )
    roles = f"/v1/tenants/{tenant}/roles"
    assigned = await service.operator.post(roles, {"subject": "user:alice", "role": "role:reader"})
    assert (await decide(service, tenant, "user:alice", group))["allowed"]
    again = await service.operator.ask(
        "POST", roles, {"subject": "user:alice", "role": "role:reader"}
    )
    assert again.status_code == 409
    cycle = await service.operator.ask(
        "POST", roles, {"subject": "role:reader", "role": "role:reader"}
    )
    assert cycle.status_code == 422
    for number in range(LINK_DEPTH_MAX - 1):
        await service.operator.post(
            roles, {"subject": f"role:r{number}", "role": f"role:r{number + 1}"}
        )
    deep = await service.operator.ask("POST", roles, {"subject": "role:reader", "role": "role:r0"})
    assert deep.status_code == 422, deep.text
    assert deep.json()["field"] == "links"
    before = await revision(service, tenant)
    await service.operator.delete(f"{roles}/{assigned['id']}")
    assert await revision(service, tenant) == before + 1
    assert not (await decide(service, tenant, "user:alice", group))["allowed"]


async def test_every_change_of_rules_kills_older_grants(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    rules = f"/v1/tenants/{tenant}/rules"
    added = await service.operator.post(rules, rule("role:r", f"group:{group}"))
    assert (
        await service.operator.ask("POST", rules, rule("role:r", f"group:{group}"))
    ).status_code == 409
    await service.operator.delete(f"{rules}/{added['id']}")
    told = [entry for entry in await entries(service) if entry.min_revision]
    assert [entry.kind for entry in told] == [InvalidationKind.TENANT_REVISION] * 2
    assert told[-1].min_revision == await revision(service, tenant)


async def test_a_rule_of_one_tenant_says_nothing_in_another(service: Service) -> None:
    mine, other = await service.tenant("mine"), await service.tenant("other")
    group = await service.group(other, "legal")
    await service.subject(mine, "alice")
    await service.subject(other, "alice")
    added = await service.operator.post(
        f"/v1/tenants/{mine}/rules", rule("user:alice", f"group:{group}")
    )
    assert (await decide(service, mine, "user:alice", group))["allowed"]
    assert not (await decide(service, other, "user:alice", group))["allowed"]
    admin = service.party("root", other, Role.TENANT_ADMIN)
    gone = await admin.ask("DELETE", f"/v1/tenants/{other}/rules/{added['id']}")
    assert gone.status_code == 404


async def test_a_removed_subjects_rules_do_not_wait_for_the_next_of_that_name(
    service: Service,
) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await service.subject(tenant, "alice")
    await service.operator.post(f"/v1/tenants/{tenant}/rules", rule("user:alice", f"group:{group}"))
    await service.operator.post(
        f"/v1/tenants/{tenant}/roles", {"subject": "user:alice", "role": "role:reader"}
    )
    await service.operator.delete(f"/v1/tenants/{tenant}/principals/alice")
    await service.subject(tenant, "alice")
    assert not (await decide(service, tenant, "user:alice", group))["allowed"]
    for path in ("rules", "roles"):
        assert (await service.operator.get(f"/v1/tenants/{tenant}/{path}"))["items"] == []


async def test_a_decision_older_than_what_was_seen_is_not_given(service: Service) -> None:
    tenant = await service.tenant()
    body = {**rule("user:alice", f"group:{tenant}"), "min_revision": 2}
    del body["effect"]
    path = f"/v1/tenants/{tenant}/decisions"
    ahead = await service.operator.ask("POST", path, body)
    assert (ahead.status_code, ahead.json()["limit"]) == (409, 1)
    await service.subject(tenant, "alice")
    assert (await service.operator.post(path, body))["revision"] == 2


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_what_casbin_would_misread_is_refused_at_the_door(service: Service) -> None:
    tenant = await service.tenant()
    path = f"/v1/tenants/{tenant}/rules"
    good = rule("user:alice", "group:*")
    bad = [
        {**good, "effect": "ALLOW"},
        {**good, "effect": "maybe"},
        {**good, "subject": "alice"},
        {**good, "subject": "user:a,b"},
        {**good, "subject": "user:a(b)"},
        {**good, "subject": "user:a]"},
        {**good, "subject": "user: a"},
        {**good, "subject": "user:a\n"},
        {**good, "subject": "group:legal"},
        {**good, "action": "group:write"},
        {**good, "resource": "*"},
        {**good, "resource": "tenant:*"},
        {**good, "resource": "group:a, b"},
    ]
    for body in bad:
        answer = await service.operator.ask("POST", path, body)
        assert answer.status_code == 422, body
        assert answer.json()["field"] in body, answer.text
    assert (await service.operator.get(path))["items"] == []
    assert (await service.operator.ask("POST", path, good)).status_code == 201


async def test_the_database_too_refuses_an_unknown_effect(service: Service) -> None:
    tenant = await service.tenant()
    await service.operator.post(f"/v1/tenants/{tenant}/rules", rule("user:a", "group:*"))
    with pytest.raises(IntegrityError):
        async with service.runtime.database.writers.begin() as session:
            await session.execute(text("UPDATE policy_rules SET effect = 'maybe'"))
