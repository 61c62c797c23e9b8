"""Versions of policies: imported whole or not, tested before they count, explained, rolled back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policy.documents import Form, PolicyDocument, read, write
from service.auth.tokens import Role
from strongroom.log import InvalidationKind
from tests.service.house import Party, Service
from tests.service.test_rules import decide, rule
from tests.service.test_tenancy import entries, revision


def path_of(tenant: str, what: str = "") -> str:
    return f"/v1/tenants/{tenant}/policy{what}"


async def tag(service: Service, tenant: str) -> str:
    answer = await service.operator.ask("GET", path_of(tenant))
    return str(answer.headers["ETag"])


async def put(
    service: Service, tenant: str, text: str, *, form: str = "yaml", by: Party | None = None
) -> Any:
    body = {"form": form, "document": text, "reason": "because"}
    headers = {"If-Match": await tag(service, tenant)}
    return await (by or service.operator).ask(
        "PUT", path_of(tenant, "/document"), body, headers=headers
    )


async def roll_back(service: Service, tenant: str, version: int) -> Any:
    headers = {"If-Match": await tag(service, tenant)}
    body = {"version": version, "reason": "back"}
    return await service.operator.ask("POST", path_of(tenant, "/rollback"), body, headers=headers)


def document(*rules: str, roles: str = "", tests: str = "") -> str:
    def listed(name: str, entries: list[str]) -> str:
        lines = "".join(f"\n  - {{{entry}}}" for entry in entries if entry)
        return f"{name}:{lines}" if lines else f"{name}: []"

    return "\n".join(
        [
            "strongroom_policy: 1",
            listed("rules", list(rules)),
            listed("roles", roles.split("|")),
            listed("tests", tests.split("|")),
        ]
    )


def reads(subject: str, group: str, effect: str = "allow", more: str = "") -> str:
    return (
        f'subject: "{subject}", action: "group:read", resource: "group:{group}",'
        f" effect: {effect}{more}"
    )


def case(name: str, subject: str, group: str, expect: str, more: str = "") -> str:
    return (
        f'name: {name}, subject: "{subject}", action: "group:read",'
        f' resource: "group:{group}", expect: {expect}{more}'
    )


async def test_an_imported_policy_counts_kills_grants_and_can_be_exported_again(
    service: Service,
) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await service.subject(tenant, "alice")
    await service.subject(tenant, "bob")
    before = await revision(service, tenant)
    text = document(
        reads("role:reader", group),
        roles='subject: "user:alice", role: "role:reader"',
        tests=case("alice reads", "user:alice", group, "allow"),
    )
    done = await put(service, tenant, text)
    assert done.status_code == 200, done.text
    assert done.json() == {"version": 1, "revision": before + 1, "changed": True}
    assert (await decide(service, tenant, "user:alice", group))["allowed"]
    assert not (await decide(service, tenant, "user:bob", group))["allowed"]
    told = [entry for entry in await entries(service) if entry.min_revision]
    assert [(entry.kind, entry.min_revision) for entry in told] == [
        (InvalidationKind.TENANT_REVISION, before + 1)
    ]
    for form in Form:
        exported = await service.operator.ask(
            "GET", path_of(tenant, "/document"), params={"form": form.value}
        )
        assert read(form, exported.text) == read(Form.YAML, text)
        assert exported.headers["ETag"] == done.headers["ETag"]
        again = await put(service, tenant, exported.text, form=form.value)
        assert again.json() == {"version": 1, "revision": before + 1, "changed": False}
    unchanged = await service.operator.ask(
        "GET", path_of(tenant, "/document"), headers={"If-None-Match": done.headers["ETag"]}
    )
    assert (unchanged.status_code, unchanged.content) == (304, b"")


async def test_a_document_is_refused_whole_with_every_line_that_is_wrong(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await put(service, tenant, document(reads("user:alice", group)))
    before = await revision(service, tenant)
    bad = document(reads("user:bob", group), reads("bob", group), reads("user:eve", group, "maybe"))
    refused = await put(service, tenant, bad)
    assert (refused.status_code, refused.json()["code"]) == (422, "policy_invalid")
    assert [(e["line"], e["field"]) for e in refused.json()["errors"]] == [
        (4, "subject"),
        (5, "effect"),
    ]
    assert await revision(service, tenant) == before
    rules = (await service.operator.get(f"/v1/tenants/{tenant}/rules"))["items"]
    assert [each["subject"] for each in rules] == ["user:alice"]


async def test_a_failing_test_case_refuses_import_edit_and_rollback_and_is_listed(
    service: Service,
) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await put(service, tenant, document(reads("user:eve", group)))
    guarded = document(
        reads("user:alice", group), tests=case("eve does not read", "user:eve", group, "deny")
    )
    assert (await put(service, tenant, guarded)).status_code == 200
    before = await revision(service, tenant)
    edit = await service.operator.ask(
        "POST", f"/v1/tenants/{tenant}/rules", rule("user:eve", "group:*")
    )
    wrong = document(
        reads("user:eve", group), tests=case("eve does not read", "user:eve", group, "deny")
    )
    for refused in (edit, await put(service, tenant, wrong), await roll_back(service, tenant, 1)):
        assert (refused.status_code, refused.json()["code"]) == (409, "policy_tests_failed")
        assert [(e["case"], e["expected"]) for e in refused.json()["errors"]] == [
            ("eve does not read", "deny")
        ]
        assert "user:eve" in refused.json()["errors"][0]["detail"]
    assert await revision(service, tenant) == before
    assert not (await decide(service, tenant, "user:eve", group))["allowed"]
    fine = await service.operator.ask(
        "POST", f"/v1/tenants/{tenant}/rules", rule("user:carol", "group:*")
    )
    assert fine.status_code == 201


async def test_test_cases_alone_change_nobodys_rights_and_have_to_pass(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await put(service, tenant, document(reads("user:alice", group)))
    before = await revision(service, tenant)

    def body(expect: str) -> dict[str, Any]:
        asked = {"subject": "user:alice", "action": "group:read", "resource": f"group:{group}"}
        return {"reason": "guard", "tests": [{"name": "a", **asked, "expect": expect}]}

    async def store(expect: str) -> Any:
        headers = {"If-Match": await tag(service, tenant)}
        return await service.operator.ask(
            "PUT", path_of(tenant, "/tests"), body(expect), headers=headers
        )

    assert (await store("deny")).status_code == 409
    stored = await store("allow")
    assert stored.json() == {"version": 2, "revision": before, "changed": True}
    assert [
        each["name"] for each in (await service.operator.get(path_of(tenant, "/tests")))["tests"]
    ] == ["a"]
    assert len([e for e in await entries(service) if e.min_revision]) == 1
    ran = await service.operator.post(path_of(tenant, "/tests/run"), {})
    assert (ran["tests"], ran["failures"]) == (1, [])


async def test_a_rollback_is_a_new_version_and_history_and_diff_tell_it(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await put(service, tenant, document(reads("user:alice", group)))
    await put(service, tenant, document(reads("user:bob", group)))
    before = await revision(service, tenant)
    done = await roll_back(service, tenant, 1)
    assert done.json() == {"version": 3, "revision": before + 1, "changed": True}
    assert (await decide(service, tenant, "user:alice", group))["allowed"]
    assert not (await decide(service, tenant, "user:bob", group))["allowed"]
    listed = await service.operator.get(path_of(tenant, "/versions"))
    told = [(v["number"], v["origin"], v["source"], v["author"]) for v in listed["items"]]
    assert told == [
        (3, "rolled_back", 1, "root"),
        (2, "imported", None, "root"),
        (1, "imported", None, "root"),
    ]
    page = await service.operator.get(path_of(tenant, "/versions"), limit=2)
    rest = await service.operator.get(
        path_of(tenant, "/versions"), limit=2, cursor=page["next_cursor"]
    )
    assert [v["number"] for v in page["items"] + rest["items"]] == [3, 2, 1]
    assert rest["next_cursor"] is None
    diff = await service.operator.get(path_of(tenant, "/diff"), **{"from": 2})
    assert diff["to_version"] == 3
    assert [(c["change"], c["kind"], c["text"]) for c in diff["changes"]] == [
        ("added", "rule", f"allow user:alice group:read on group:{group}"),
        ("removed", "rule", f"allow user:bob group:read on group:{group}"),
    ]
    nothing = await service.operator.get(path_of(tenant, "/diff"), **{"from": 1, "to": 3})
    assert nothing["changes"] == []
    assert (await roll_back(service, tenant, 9)).status_code == 404
    emptied = await roll_back(service, tenant, 0)
    assert emptied.json()["version"] == 4
    assert not (await decide(service, tenant, "user:alice", group))["allowed"]


async def test_a_whole_policy_is_changed_only_by_who_has_seen_the_newest(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    seen = await tag(service, tenant)
    body = {"form": "yaml", "document": document(reads("user:a", group)), "reason": "r"}
    blind = await service.operator.ask("PUT", path_of(tenant, "/document"), body)
    assert blind.status_code == 428
    await service.operator.post(f"/v1/tenants/{tenant}/rules", rule("user:b", "group:*"))
    for method, what, sent in (
        ("PUT", "/document", body),
        ("POST", "/rollback", {"version": 0, "reason": "r"}),
        ("PUT", "/tests", {"tests": [], "reason": "r"}),
    ):
        stale = await service.operator.ask(
            method, path_of(tenant, what), sent, headers={"If-Match": seen}
        )
        assert stale.status_code == 412, what
    edit = await service.operator.ask(
        "POST",
        f"/v1/tenants/{tenant}/rules",
        rule("user:c", "group:*"),
        headers={"If-Match": seen},
    )
    assert edit.status_code == 412
    assert [
        each["subject"]
        for each in (await service.operator.get(f"/v1/tenants/{tenant}/rules"))["items"]
    ] == ["user:b"]


async def test_of_two_imports_at_once_one_is_told_that_it_was_late(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    seen = await tag(service, tenant)

    async def attempt(name: str) -> int:
        text = document(reads(f"user:{name}", group))
        answer = await service.operator.ask(
            "PUT",
            path_of(tenant, "/document"),
            {"form": "yaml", "document": text, "reason": name},
            headers={"If-Match": seen},
        )
        return answer.status_code

    assert sorted(await asyncio.gather(attempt("a"), attempt("b"))) == [200, 412]
    assert (await service.operator.get(path_of(tenant)))["version"] == 1


async def test_edits_at_once_each_become_a_version(service: Service) -> None:
    tenant = await service.tenant()
    path = f"/v1/tenants/{tenant}/rules"
    made = await asyncio.gather(
        *(service.operator.ask("POST", path, rule(f"user:u{n}", "group:*")) for n in range(3))
    )
    assert [answer.status_code for answer in made] == [201] * 3
    policy = await service.operator.get(path_of(tenant))
    assert (policy["version"], policy["rules"]) == (3, 3)


async def test_a_dry_run_tells_who_gains_and_loses_and_changes_nothing(service: Service) -> None:
    tenant = await service.tenant()
    legal, sales = await service.group(tenant, "legal"), await service.group(tenant, "sales")
    for name in ("alice", "bob"):
        await service.subject(tenant, name)
    await put(service, tenant, document(reads("user:alice", legal)))
    before = await revision(service, tenant)
    window = ', window: {zone: UTC, start: "00:00", end: "23:59"}'
    proposal = document(
        reads("user:bob", legal),
        reads("user:bob", sales, more=", purposes: [support]"),
        reads("user:alice", sales, more=window),
        tests=case("alice keeps legal", "user:alice", legal, "allow"),
    )
    found = await service.operator.post(
        path_of(tenant, "/dry-run"), {"form": "yaml", "document": proposal}
    )
    gains = {(g["subject"], g["resource"]): g["conditional"] for g in found["gains"]}
    assert gains == {
        ("user:bob", f"group:{legal}"): False,
        ("user:bob", f"group:{sales}"): True,
        ("user:alice", f"group:{sales}"): True,
    }
    assert [(x["subject"], x["resource"]) for x in found["losses"]] == [
        ("user:alice", f"group:{legal}")
    ]
    (support,) = [
        g
        for g in found["gains"]
        if g["resource"] == f"group:{sales}" and g["subject"] == "user:bob"
    ]
    assert support["context"]["purpose"] == "support"
    assert found["complete"]
    assert [each["name"] for each in found["failures"]] == ["alice keeps legal"]
    assert found["invalidation"]["grants"] == "all of the tenant"
    assert found["invalidation"]["namespaces_abandoned"] == 0
    assert len(found["changes"]) == 5
    assert await revision(service, tenant) == before
    nothing = await service.operator.post(path_of(tenant, "/dry-run"), {})
    assert (nothing["gains"], nothing["losses"], nothing["changes"]) == ([], [], [])
    assert nothing["invalidation"]["grants"] == "none"


async def test_a_dry_run_counts_what_nobody_could_be_granted_any_more_and_says_what_it_cannot(
    service: Service,
) -> None:
    from tests.service.house import prompt

    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    alice = await service.subject(tenant, "alice")
    await put(service, tenant, document(reads("user:alice", group)))
    artefacts = await service.artefacts()
    ask = {**artefacts.body(), **prompt(64), "spans": [{"end": 64, "group": group}]}
    granted = await alice.post("/v1/grants", ask)
    assert granted["granted_tokens"] == 64
    found = await service.operator.post(path_of(tenant, "/dry-run"), {"rollback_to": 0})
    told = found["invalidation"]
    assert (told["namespaces"], told["namespaces_abandoned"], told["bytes"]) == (1, 1, None)
    assert "no sidecar has reported" in told["bytes_note"]


async def test_explain_tells_everything_to_who_may_read_rules_and_nothing_to_others(
    service: Service,
) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    alice = await service.subject(tenant, "alice", [group])
    await put(
        service,
        tenant,
        document(reads("user:alice", "*", "deny", ", sensitivity_above: internal")),
    )
    asked = {"subject": "user:alice", "action": "group:read", "resource": f"group:{group}"}
    level = {"context": {"sensitivity": "restricted"}}
    told = await service.operator.post(path_of(tenant, "/explain"), {**asked, **level})
    assert not told["allowed"]
    assert told["rule"] == "deny user:alice group:read on group:* above internal"
    assert f"group:{group}" in told["names"]
    assert {(each["through"], each["applies"]) for each in told["concerned"]} == {
        ("user:alice", True),
        (f"group:{group}", True),
    }
    public = {"context": {"sensitivity": "public"}}
    assert (await service.operator.post(path_of(tenant, "/explain"), {**asked, **public}))[
        "allowed"
    ]
    auditor = service.party("vera", tenant, Role.AUDITOR)
    assert (await auditor.ask("POST", path_of(tenant, "/explain"), asked)).status_code == 200
    gateway = service.party("gate", tenant, Role.GATEWAY)
    other = await service.tenant("other")
    stranger = service.party("eve", other, Role.TENANT_ADMIN)
    for party, status in ((alice, 403), (gateway, 403), (stranger, 404), (service.nobody, 401)):
        refused = await party.ask("POST", path_of(tenant, "/explain"), asked)
        assert refused.status_code == status
        assert group not in refused.text
    for method, what, body in (
        ("PUT", "/document", {"form": "yaml", "document": "x", "reason": "r"}),
        ("POST", "/rollback", {"version": 0, "reason": "r"}),
        ("POST", "/dry-run", {}),
    ):
        refused = await auditor.ask(method, path_of(tenant, what), body, headers={"If-Match": "*"})
        assert refused.status_code == 403, what


async def test_a_grant_from_before_any_new_path_is_dead_after_it(service: Service) -> None:
    """Import, rollback, and the edit of a rule: each raises what a living grant must have."""
    from tests.service.house import prompt

    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    alice = await service.subject(tenant, "alice")
    artefacts = await service.artefacts()
    ask = {**artefacts.body(), **prompt(64), "spans": [{"end": 64, "group": group}]}
    await put(service, tenant, document(reads("user:alice", group)))

    async def grant() -> int:
        return int((await alice.post("/v1/grants", ask))["revision"])

    async def demanded() -> int:
        return max(entry.min_revision for entry in await entries(service))

    for change in (
        lambda: put(service, tenant, document(reads("user:alice", group), reads("user:b", group))),
        lambda: roll_back(service, tenant, 1),
        lambda: service.operator.ask(
            "POST", f"/v1/tenants/{tenant}/rules", rule("user:c", "group:*")
        ),
    ):
        minted = await grant()
        assert minted >= await demanded()
        assert (await change()).is_success
        assert minted < await demanded()
        assert await grant() >= await demanded()


async def test_conditions_reach_the_grant_purpose_model_sensitivity_and_time(
    service: Service,
) -> None:
    from tests.service.house import digest, prompt

    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    alice = await service.subject(tenant, "alice")
    artefacts, others = await service.artefacts(), await service.artefacts("2")
    owner = await service.operator.post(f"/v1/tenants/{tenant}/documents", {"name": "d"})
    versions = {}
    for level in ("internal", "restricted"):
        made = await service.operator.post(
            f"/v1/tenants/{tenant}/documents/{owner['id']}/versions",
            {"content_digest": digest(level), "group": group, "sensitivity": level},
        )
        versions[level] = made["id"]
    condition = f", purposes: [support], models: [{artefacts.model}], sensitivity_max: internal"
    await put(service, tenant, document(reads("user:alice", group, more=condition)))

    async def granted(level: str, body: dict[str, str], **more: str) -> int:
        ask = {**body, **prompt(64), "spans": [{"end": 64, "document": versions[level]}], **more}
        return int((await alice.post("/v1/grants", ask))["granted_tokens"])

    assert await granted("internal", artefacts.body(), purpose="support") == 64
    assert await granted("internal", artefacts.body(), purpose="training") == 0
    assert await granted("internal", artefacts.body()) == 0
    assert await granted("restricted", artefacts.body(), purpose="support") == 0
    assert await granted("internal", others.body(), purpose="support") == 0


async def test_a_grant_never_outlives_a_time_window(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datetime as dt

    from service.grants import issue
    from tests.service.house import prompt

    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    alice = await service.subject(tenant, "alice")
    artefacts = await service.artefacts()
    window = ', window: {zone: UTC, start: "09:00", end: "17:00"}'
    await put(service, tenant, document(reads("user:alice", group, more=window)))
    day = dt.datetime.now(dt.UTC).replace(second=0, microsecond=0)
    ask = {**artefacts.body(), **prompt(64), "spans": [{"end": 64, "group": group}]}
    for hour, minute, tokens, life_s in ((12, 0, 64, 300), (16, 58, 64, 120), (17, 0, 0, 300)):
        at = day.replace(hour=hour, minute=minute)
        monkeypatch.setattr(issue, "now", lambda at=at: at)
        answer = await alice.post("/v1/grants", ask)
        ends = dt.datetime.fromisoformat(answer["expires_at"])
        assert (answer["granted_tokens"], (ends - at).total_seconds()) == (tokens, life_s)


async def test_a_removed_subjects_rules_leave_by_a_version_of_their_own(service: Service) -> None:
    tenant = await service.tenant()
    group = await service.group(tenant, "legal")
    await service.subject(tenant, "alice")
    guard = case("alice reads", "user:alice", group, "allow")
    await put(service, tenant, document(reads("user:alice", group), tests=guard))
    await service.operator.delete(f"/v1/tenants/{tenant}/principals/alice")
    listed = (await service.operator.get(path_of(tenant, "/versions")))["items"]
    assert [(v["origin"], v["removed"]) for v in listed] == [
        ("subject_removed", 1),
        ("imported", 0),
    ]
    assert not (await decide(service, tenant, "user:alice", group))["allowed"]
    assert listed[0]["revision"] == await revision(service, tenant)


async def test_an_empty_policy_is_exported_and_version_zero_is_nobodys(service: Service) -> None:
    tenant = await service.tenant()
    policy = await service.operator.get(path_of(tenant))
    assert (policy["version"], policy["rules"], policy["newest"]) == (0, 0, None)
    text = await service.operator.ask("GET", path_of(tenant, "/document"), params={"version": 0})
    assert text.text == write(Form.YAML, PolicyDocument())
    gone = await service.operator.ask("GET", path_of(tenant, "/versions/1"))
    assert gone.status_code == 404
