"""A restored tenant is granted nothing until an operator has reviewed who may do what in it."""

from __future__ import annotations

from typing import Any

from service.auth.tokens import Role
from service.settings import ServiceSettings
from tests.service.conftest import Copy
from tests.service.house import Party, Service, running
from tests.service.test_grants import TOKENS, Scene, audited

REASON = {"reason": "compared with the directory"}


async def granted(party: Party, scene: Scene) -> dict[str, Any]:
    answer, claims = await scene.grant(party)
    assert answer["granted_tokens"] == (claims.spans[-1].end if claims.spans else 0)
    return answer


def at(scene: Scene, service: Service) -> Scene:
    """The same tenant, seen by another start of the service."""
    again = Scene(service)
    again.__dict__ |= scene.__dict__ | {"service": service}
    return again


async def restored_scene(settings: ServiceSettings, backup: Copy) -> tuple[Scene, ServiceSettings]:
    """Alice may read by membership and carol by a rule; both lost it after the backup."""
    async with running(settings) as service:
        scene = await Scene(service).set_up()
        await service.subject(scene.tenant, "carol")
        rules = f"/v1/tenants/{scene.tenant}/rules"
        allowed = {"action": "group:read", "resource": f"group:{scene.group}", "effect": "allow"}
        rule = await service.operator.post(rules, {"subject": "user:carol", **allowed})
        carol = service.party("carol", scene.tenant, Role.SUBJECT)
        for party in (scene.alice, carol):
            assert (await granted(party, scene))["granted_tokens"] == TOKENS
        untouched = await service.tenant("globex")
        await service.subject(untouched, "dora")
    copied = settings.model_copy(update={"database_url": await backup(settings.database)})
    async with running(settings) as service:
        tenant = f"/v1/tenants/{scene.tenant}"
        await service.operator.delete(f"{tenant}/memberships/{scene.group}/alice")
        await service.operator.delete(f"{tenant}/rules/{rule['id']}")
        for name in ("alice", "carol"):
            party = service.party(name, scene.tenant, Role.SUBJECT)
            assert (await granted(party, at(scene, service)))["granted_tokens"] < TOKENS
    return scene, copied


async def test_what_was_taken_away_after_a_backup_does_not_come_back_with_it(
    settings: ServiceSettings, backup: Copy
) -> None:
    scene, copied = await restored_scene(settings, backup)
    async with running(copied) as service:
        again = at(scene, service)
        salts = set()
        for name in ("alice", "carol", "bob", "alice"):
            answer = await granted(service.party(name, scene.tenant, Role.SUBJECT), again)
            assert answer["granted_tokens"] == 0
            salts.add(answer["salt"])
        assert len(salts) == 4, "a salt that is used once"
        denied = await audited(service, "grant.denied")
        assert {row.reason for row in denied[-4:]} == {"review"}
        tenants = (await service.operator.get("/v1/tenants"))["items"]
        assert {tenant["name"]: tenant["review_required"] for tenant in tenants} == {
            "acme": True,
            "globex": False,
        }
        globex = next(tenant["id"] for tenant in tenants if tenant["name"] == "globex")
        dora = service.party("dora", globex, Role.SUBJECT)
        everyone = [{"end": TOKENS, "group": "everyone"}]
        answer, _ = await again.grant(dora, spans=everyone)
        assert answer["granted_tokens"] == TOKENS


async def test_an_operator_ends_the_review_and_nobody_else(
    settings: ServiceSettings, backup: Copy
) -> None:
    scene, copied = await restored_scene(settings, backup)
    path = f"/v1/tenants/{scene.tenant}/review"
    async with running(copied) as service:
        again = at(scene, service)
        admin = service.party("admin", scene.tenant, Role.TENANT_ADMIN)
        alice = service.party("alice", scene.tenant, Role.SUBJECT)
        for party in (admin, alice, service.party("watch", "", Role.AUDITOR)):
            assert (await party.ask("POST", path, REASON)).status_code == 403
        assert (await service.operator.ask("POST", path, {"reason": ""})).status_code == 422
        await admin.delete(f"/v1/tenants/{scene.tenant}/memberships/{scene.group}/alice")
        assert (await granted(alice, again))["granted_tokens"] == 0
        before = (await service.operator.get(f"/v1/tenants/{scene.tenant}"))["revision"]
        assert (await service.operator.post(path, REASON))["revision"] == before + 1
        assert 0 < (await granted(alice, again))["granted_tokens"] < TOKENS
        [reviewed] = await audited(service, "tenant.reviewed")
        assert (reviewed.tenant, reviewed.actor, reviewed.reason) == (
            scene.tenant,
            "root",
            REASON["reason"],
        )
        assert (await service.operator.ask("POST", path, REASON)).status_code == 409


async def test_a_denied_grant_and_one_under_review_look_alike(
    settings: ServiceSettings, backup: Copy
) -> None:
    scene, copied = await restored_scene(settings, backup)
    async with running(copied) as service:
        again = at(scene, service)
        document = [{"end": TOKENS, "document": scene.document}]
        bob = service.party("bob", scene.tenant, Role.SUBJECT)
        review, _ = await again.grant(bob, spans=document)
        await service.operator.post(f"/v1/tenants/{scene.tenant}/review", REASON)
        denied, _ = await again.grant(bob, spans=document)
    assert review.keys() == denied.keys()
    assert len(review["salt"]) == len(denied["salt"])
    assert review["granted_tokens"] == denied["granted_tokens"] == 0
