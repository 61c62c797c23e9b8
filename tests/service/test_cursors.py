"""A cursor goes on in the listing that gave it out, and in no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from policy.signing import decode_base64url, encode_base64url
from service.auth.tokens import Role
from tests.service.house import Party, Service


@dataclass(frozen=True, slots=True)
class TwoTenants:
    acme: str
    globex: str
    cursor: str
    """Of the operator, in acme's principals, after the first."""


async def build(service: Service) -> TwoTenants:
    ids = [await service.tenant(name) for name in ("acme", "globex")]
    for tenant in ids:
        for name in ("alice", "bob", "carol"):
            await service.operator.post(f"/v1/tenants/{tenant}/principals", {"name": name})
    page = await service.operator.get(f"/v1/tenants/{ids[0]}/principals", limit=1)
    return TwoTenants(ids[0], ids[1], page["next_cursor"])


async def go_on(party: Party, path: str, cursor: str, **filters: Any) -> httpx.Response:
    return await party.ask("GET", path, params={"cursor": cursor, **filters})


async def test_a_cursor_of_another_tenant_path_or_filter_is_refused_alike(
    service: Service,
) -> None:
    world = await build(service)
    principals = f"/v1/tenants/{world.acme}/principals"
    # The right party, also with another page size, goes on.
    for size in (1, 50):
        assert (await go_on(service.operator, principals, world.cursor, limit=size)).is_success
    # Whoever belongs to the tenant sees another listing than the operator, who belongs to none.
    admin = service.party("admin", world.acme, Role.TENANT_ADMIN)
    own = (await admin.get(principals, limit=1))["next_cursor"]
    assert (await go_on(admin, principals, own)).is_success
    raw = decode_base64url(world.cursor, "cursor")
    wrong = [
        await go_on(admin, principals, world.cursor),
        await go_on(service.operator, principals, own),
        await go_on(service.operator, f"/v1/tenants/{world.globex}/principals", world.cursor),
        await go_on(service.operator, f"/v1/tenants/{world.acme}/groups", world.cursor),
        await go_on(service.operator, principals, world.cursor, kind="x"),
        await go_on(service.operator, principals, encode_base64url(raw[:-1] + b"\x00")),
        await go_on(service.operator, principals, encode_base64url(raw[:17] + raw[17:] + b"\x00")),
    ]
    assert {answer.status_code for answer in wrong} == {422}
    assert len({answer.text for answer in wrong}) == 1


async def test_a_cursor_is_bound_to_every_filter_of_an_audit_listing(service: Service) -> None:
    world = await build(service)
    path = "/v1/audit/events"
    page = await service.operator.get(path, limit=1, tenant=world.acme)
    cursor = page["next_cursor"]
    assert (await go_on(service.operator, path, cursor, tenant=world.acme)).is_success
    for filters in (
        {},
        {"tenant": world.globex},
        {"tenant": world.acme, "subject": "alice"},
        {"tenant": world.acme, "order": "desc"},
    ):
        answer = await go_on(service.operator, path, cursor, **filters)
        assert (answer.status_code, answer.json()["field"]) == (422, "cursor"), filters


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_cursor_that_nobody_gave_out_is_refused(service: Service) -> None:
    world = await build(service)
    path = f"/v1/tenants/{world.acme}/principals"
    for wrong in ("x", "AAAA", "A" * 257, "=" * 8, "0" * 32, encode_base64url(bytes(40))):
        answer = await go_on(service.operator, path, wrong)
        assert (answer.status_code, answer.json()["field"]) == (422, "cursor")
