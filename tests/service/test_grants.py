"""Grants: who gets what, and that denied, absent and revoked look alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import func, select

from policy.grants import verify
from service.audit.models import AuditRow
from service.auth.tokens import Role
from service.grants import namespaces
from service.keys import components
from service.registry import store as registry
from service.settings import ServiceSettings
from strongroom.derivation import engine_salt, namespace_secret, salt_digest
from strongroom.grant import GrantClaims, Operation
from strongroom.identity import CacheIdentity, ComponentId, LabelSet
from tests.service.evidence import noted
from tests.service.house import Artefacts, Party, Service, digest, prompt, running

TOKENS = 100


class Scene:
    """A tenant with a document for one group, a subject in it, one outside, and a gateway."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def set_up(self) -> Scene:
        service = self.service
        self.tenant = await service.tenant()
        self.group = await service.group(self.tenant, "legal")
        self.alice = await service.subject(self.tenant, "alice", [self.group])
        self.bob = await service.subject(self.tenant, "bob")
        self.document = await service.document(self.tenant, "handbook.md", self.group)
        self.artefacts: Artefacts = await service.artefacts()
        self.gateway = service.party("gateway", "", Role.GATEWAY)
        return self

    def spans(self) -> list[dict[str, Any]]:
        return [
            {"end": 30, "group": "everyone"},
            {"end": 80, "document": self.document},
            {"end": TOKENS, "group": "private"},
        ]

    def body(self, **changes: Any) -> dict[str, Any]:
        return {**self.artefacts.body(), "spans": self.spans(), **prompt(TOKENS), **changes}

    async def grant(self, party: Party, **changes: Any) -> tuple[dict[str, Any], GrantClaims]:
        answer = await party.post("/v1/grants", self.body(**changes))
        return answer, self.claims(answer)

    def claims(self, answer: dict[str, Any]) -> GrantClaims:
        import time

        return verify(
            answer["grant"],
            self.service.runtime.verifier,
            now_s=int(time.time()),
            issuer=self.service.runtime.settings.issuer,
        )


@pytest.fixture
async def scene(service: Service) -> Scene:
    return await Scene(service).set_up()


async def audited(service: Service, kind: str) -> list[AuditRow]:
    async with service.runtime.sessions() as session:
        rows = await session.scalars(
            select(AuditRow).where(AuditRow.kind == kind).order_by(AuditRow.seq)
        )
        return list(rows.all())


async def test_a_member_gets_the_whole_prompt_and_an_outsider_up_to_the_document(
    scene: Scene,
) -> None:
    answer, claims = await scene.grant(scene.alice)
    assert answer["granted_tokens"] == TOKENS
    assert [span.end for span in claims.spans] == [30, 80, TOKENS]
    assert (claims.tenant, claims.sub) == (scene.tenant, "alice")
    assert claims.ops == (Operation.READ, Operation.WRITE)
    assert claims.exp - claims.iat <= 300
    answer, claims = await scene.grant(scene.bob)
    assert answer["granted_tokens"] == 30
    assert [span.end for span in claims.spans] == [30]


async def test_a_grants_namespaces_are_those_of_the_identities(scene: Scene) -> None:
    _, claims = await scene.grant(scene.alice)
    everyone = next(
        group["id"]
        for group in (await scene.service.operator.get(f"/v1/tenants/{scene.tenant}/groups"))[
            "items"
        ]
        if group["kind"] == "everyone"
    )
    identity = CacheIdentity(
        tenant=ComponentId(scene.tenant),
        model=ComponentId(scene.artefacts.model),
        adapter="none",
        tokenizer=ComponentId(scene.artefacts.tokenizer),
        template=ComponentId(scene.artefacts.template),
        policy=ComponentId(scene.artefacts.policy),
        labels=LabelSet(
            frozenset((ComponentId(scene.document),)),
            frozenset((ComponentId(everyone), ComponentId(scene.group))),
        ),
    )
    assert claims.spans[1].namespace == identity.namespace
    assert set(claims.components(1)) == set(identity.components())
    async with scene.service.runtime.sessions() as session:
        stored = await namespaces.components_of(session, identity.namespace)
        assert stored == identity.components()
        about = await namespaces.containing(session, ComponentId(scene.document))
    assert set(about) == {claims.spans[1].namespace, claims.spans[2].namespace}
    assert claims.engine.model == digest("model1")


async def test_a_whole_grants_salt_is_the_namespaces_and_any_others_is_used_once(
    scene: Scene,
) -> None:
    first, claims = await scene.grant(scene.alice)
    again, _ = await scene.grant(scene.alice)
    assert first["salt"] == again["salt"]
    assert claims.salt_digest == salt_digest(first["salt"])
    namespace = claims.spans[-1].namespace
    async with scene.service.runtime.sessions() as session:
        ids = await namespaces.components_of(session, namespace)
        secrets = await components.secrets(session, ids, noted())
    assert first["salt"] == engine_salt(namespace_secret(secrets, bytes.fromhex(namespace)))
    denied = [(await scene.grant(scene.bob))[0]["salt"] for _ in range(2)]
    assert len({*denied, first["salt"]}) == 3
    assert {len(salt) for salt in (*denied, first["salt"])} == {43}
    uncovered = [(await scene.grant(scene.alice, spans=scene.spans()[:2]))[0] for _ in range(2)]
    assert [answer["granted_tokens"] for answer in uncovered] == [80, 80]
    assert len({*denied, first["salt"], *(answer["salt"] for answer in uncovered)}) == 5


async def test_denied_unregistered_foreign_and_revoked_look_alike_outside(scene: Scene) -> None:
    service = scene.service
    other = await service.tenant("other")
    foreign_group = await service.group(other, "legal")
    foreign = await service.document(other, "secret.md", foreign_group)
    revoked = await service.document(scene.tenant, "old.md", scene.group)
    gone = await service.group(scene.tenant, "gone")
    await service.operator.delete(f"/v1/tenants/{scene.tenant}/groups/{gone}")
    bob = await service.operator.get(f"/v1/tenants/{scene.tenant}/principals/bob")
    await service.operator.post(
        "/v1/revocations",
        {
            "axis": "document_version",
            "target": revoked,
            "tenant": scene.tenant,
            "reason": "test",
        },
    )
    sources = {
        "denied": {"group": bob["private_group"]},
        "unregistered": {"document": "0" * 32},
        "foreign": {"document": foreign},
        "foreign group": {"group": foreign_group},
        "revoked": {"document": revoked},
        "removed group": {"group": gone},
    }
    shapes = set()
    for source in sources.values():
        spans = [{"end": 30, "group": "everyone"}, {"end": TOKENS, **source}]
        answer, claims = await scene.grant(scene.alice, spans=spans)
        assert answer["granted_tokens"] == 30
        assert set(answer) == {"grant", "salt", "granted_tokens", "expires_at", "revision"}
        lengths = tuple(len(str(answer[name])) for name in sorted(answer))
        shapes.add((lengths, claims.spans, claims.base))
    assert len(shapes) == 1
    reasons = {row.reason for row in await audited(service, "grant.denied")}
    assert {"unregistered", "no_rule"} <= reasons


async def test_a_version_without_its_secret_or_its_row_is_not_granted(scene: Scene) -> None:
    first = await scene.service.document(scene.tenant, "one.md", scene.group)
    second = await scene.service.document(scene.tenant, "two.md", scene.group)
    for version in (first, second):
        spans = [{"end": TOKENS, "document": version}]
        assert (await scene.grant(scene.alice, spans=spans))[0]["granted_tokens"] == TOKENS
    async with scene.service.runtime.database.writers.begin() as session:
        await components.destroy(session, [ComponentId(first)])
        await registry.remove_version(
            session, await registry.get_version(session, scene.tenant, second)
        )
    for version in (first, second):
        spans = [{"end": TOKENS, "document": version}]
        assert (await scene.grant(scene.alice, spans=spans))[0]["granted_tokens"] == 0
    reasons = [row.reason for row in await audited(scene.service, "grant.denied")]
    assert reasons == ["revoked", "unregistered"]


async def test_nothing_after_the_first_denied_span_is_granted(scene: Scene) -> None:
    spans = [{"end": 50, "document": scene.document}, {"end": TOKENS, "group": "everyone"}]
    answer, claims = await scene.grant(scene.bob, spans=spans)
    assert answer["granted_tokens"] == 0
    assert claims.spans == ()
    whole, _ = await scene.grant(scene.alice, spans=spans)
    assert whole["granted_tokens"] == TOKENS


async def test_a_deny_rule_wins_over_membership_until_it_is_removed(scene: Scene) -> None:
    rule = await scene.service.operator.post(
        f"/v1/tenants/{scene.tenant}/rules",
        {
            "subject": "user:alice",
            "action": "group:read",
            "resource": f"group:{scene.group}",
            "effect": "deny",
        },
    )
    denied, _ = await scene.grant(scene.alice)
    assert denied["granted_tokens"] == 30
    await scene.service.operator.delete(f"/v1/tenants/{scene.tenant}/rules/{rule['id']}")
    allowed, _ = await scene.grant(scene.alice)
    assert allowed["granted_tokens"] == TOKENS
    assert allowed["revision"] == denied["revision"] + 1


async def test_a_gateway_brings_the_subjects_token(scene: Scene) -> None:
    def token(party: Party) -> dict[str, str]:
        return {"Strongroom_Subject_Token": str(party.token)}

    answer = await scene.gateway.post("/v1/grants", scene.body(), **token(scene.alice))
    assert scene.claims(answer).sub == "alice"
    alone = await scene.gateway.ask("POST", "/v1/grants", scene.body())
    assert (alone.status_code, alone.json()["field"]) == (422, "subject")
    for wrong in (scene.gateway, scene.service.operator):
        refused = await scene.gateway.ask(
            "POST",
            "/v1/grants",
            scene.body(),
            headers={"Strongroom-Subject-Token": str(wrong.token)},
        )
        assert refused.status_code == 401
    elsewhere = scene.service.party("gateway", await scene.service.tenant("other"), Role.GATEWAY)
    foreign = await elsewhere.ask(
        "POST",
        "/v1/grants",
        scene.body(),
        headers={"Strongroom-Subject-Token": str(scene.alice.token)},
    )
    assert foreign.status_code == 404


async def test_naming_a_subject_needs_act_as_in_that_tenant(scene: Scene) -> None:
    named = scene.body(tenant=scene.tenant, subject="alice")
    refused = await scene.gateway.ask("POST", "/v1/grants", named)
    unknown = await scene.gateway.ask(
        "POST", "/v1/grants", scene.body(tenant="0" * 32, subject="alice")
    )
    assert refused.status_code == 403
    assert (unknown.status_code, unknown.text) == (403, refused.text)
    await scene.service.operator.post(
        f"/v1/tenants/{scene.tenant}/rules",
        {
            "subject": "role:gateway",
            "action": "grant:act_as",
            "resource": "grant:alice",
            "effect": "allow",
        },
    )
    answer = await scene.gateway.post("/v1/grants", named)
    assert scene.claims(answer).sub == "alice"
    bob = await scene.gateway.ask(
        "POST", "/v1/grants", scene.body(tenant=scene.tenant, subject="bob")
    )
    assert bob.status_code == 403
    by_bob = await scene.bob.ask("POST", "/v1/grants", named)
    assert by_bob.status_code == 403
    admin = scene.service.party("root", scene.tenant, Role.TENANT_ADMIN)
    assert scene.claims(await admin.post("/v1/grants", named)).sub == "alice"
    other = scene.service.party("root", await scene.service.tenant("b"), Role.TENANT_ADMIN)
    assert (await other.ask("POST", "/v1/grants", named)).status_code == 404


async def test_the_tenant_comes_from_the_credential_and_not_from_the_body(scene: Scene) -> None:
    other = await scene.service.tenant("other")
    eve = await scene.service.subject(other, "alice")
    answer, claims = await scene.grant(eve)
    assert claims.tenant == other
    assert answer["granted_tokens"] == 30
    named = await eve.ask("POST", "/v1/grants", scene.body(tenant=scene.tenant, subject="alice"))
    assert named.status_code == 403


async def test_a_removed_subject_gets_nothing_and_a_new_one_of_that_name_other_namespaces(
    scene: Scene,
) -> None:
    service = scene.service
    _, before = await scene.grant(scene.alice)
    await service.operator.delete(f"/v1/tenants/{scene.tenant}/principals/alice")
    gone = await scene.alice.ask("POST", "/v1/grants", scene.body())
    never = await service.party("nobody", scene.tenant, Role.SUBJECT).ask(
        "POST", "/v1/grants", scene.body()
    )
    assert (gone.status_code, gone.text) == (404, never.text)
    again = await service.subject(scene.tenant, "alice", [scene.group])
    _, after = await scene.grant(again)
    assert after.spans[1].namespace == before.spans[1].namespace
    assert after.spans[2].namespace != before.spans[2].namespace


async def test_an_old_token_does_not_speak_for_a_new_principal_of_that_name(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    earlier = time.time() - 100
    with monkeypatch.context() as patched:
        patched.setattr("service.auth.issuer.time.time", lambda: earlier)
        old = scene.service.party("alice", scene.tenant, Role.SUBJECT)
    refused = await old.ask("POST", "/v1/grants", scene.body())
    assert (refused.status_code, refused.json()["field"]) == (404, "principal")
    assert (await scene.grant(scene.alice))[0]["granted_tokens"] == TOKENS


@pytest.mark.parametrize("axis", ["model", "adapter", "tokenizer", "template", "policy"])
async def test_an_artefact_that_is_unknown_foreign_or_upgraded_is_not_there(
    scene: Scene, axis: str
) -> None:
    service = scene.service
    other = await service.tenant("other")
    theirs = await service.operator.post(
        "/v1/artefacts",
        {"kind": axis, "name": "n", "revision": "1", "digest": digest("n"), "scope": other},
    )
    old = await service.operator.post(
        "/v1/artefacts", {"kind": axis, "name": "n", "revision": "1", "digest": digest("n")}
    )
    accepted, _ = await scene.grant(scene.alice, **{axis: old["id"]})
    assert accepted["granted_tokens"] == TOKENS
    await service.operator.post(
        f"/v1/artefacts/{old['id']}/upgrade", {"revision": "2", "digest": digest("2")}
    )
    answers = set()
    another_axis = scene.artefacts.model if axis != "model" else scene.artefacts.policy
    for value in ("0" * 32, theirs["id"], old["id"], scene.document, another_axis):
        answer = await scene.alice.ask("POST", "/v1/grants", scene.body(**{axis: value}))
        answers.add((answer.status_code, answer.text))
    assert len(answers) == 1
    ((status, text),) = answers
    assert status == 404
    assert f'"field":"{axis}"' in text


IMPOSSIBLE: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt_tokens": 0}, "prompt_tokens"),
    ({"prompt_tokens": 1_000_001}, "prompt_tokens"),
    ({"prompt_tokens": "100"}, "prompt_tokens"),
    ({"prompt_tokens": 99}, "spans[2].end"),
    ({"spans": [{"end": 0, "group": "everyone"}]}, "spans.0.end"),
    (
        {"spans": [{"end": 9, "group": "everyone"}, {"end": 9, "group": "private"}]},
        "spans[1].end",
    ),
    ({"spans": [{"end": 9, "group": "all"}]}, None),
    ({"spans": [{"end": 9}]}, "spans.0"),
    ({"spans": [{"end": 9, "group": "everyone", "document": "0" * 32}]}, "spans.0"),
    ({"spans": [{"end": n + 1, "group": "everyone"} for n in range(1025)]}, "spans"),
    ({"prompt_digest": "00"}, "prompt_digest"),
    ({"operations": []}, "operations"),
    ({"operations": ["erase"]}, "operations.0"),
    ({"adapter": "None"}, None),
    ({"model": "none"}, "model"),
    ({"tenant": "0" * 32}, "body"),
    ({"min_revision": -1}, "min_revision"),
    ({"salt": "known"}, "salt"),
]


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_what_no_grant_can_be_is_named(scene: Scene) -> None:
    for changes, field in IMPOSSIBLE:
        answer = await scene.alice.ask("POST", "/v1/grants", scene.body(**changes))
        assert answer.status_code == 422, (changes, answer.text)
        assert field in {None, answer.json()["field"]}, (changes, answer.text)


async def test_a_prompt_without_spans_gets_an_empty_grant(scene: Scene) -> None:
    answer, claims = await scene.grant(scene.alice, spans=[])
    assert (answer["granted_tokens"], claims.spans) == (0, ())


async def test_a_client_never_gets_an_answer_older_than_it_has_seen(scene: Scene) -> None:
    answer, _ = await scene.grant(scene.alice)
    seen = answer["revision"]
    same, _ = await scene.grant(scene.alice, min_revision=seen)
    assert same["revision"] == seen
    ahead = await scene.alice.ask("POST", "/v1/grants", scene.body(min_revision=seen + 1))
    assert (ahead.status_code, ahead.json()["field"]) == (409, "min_revision")


async def test_a_grant_states_the_log_and_revision_of_its_snapshot(scene: Scene) -> None:
    _, before = await scene.grant(scene.alice)
    await scene.service.operator.delete(
        f"/v1/tenants/{scene.tenant}/memberships/{scene.group}/alice"
    )
    answer, after = await scene.grant(scene.alice)
    assert answer["granted_tokens"] == 30
    assert (after.epoch, after.seq) == (before.epoch, before.seq + 1)
    assert after.revision == before.revision + 1


async def test_every_grant_and_every_denial_is_audited(scene: Scene) -> None:
    await scene.grant(scene.alice)
    await scene.grant(scene.bob)
    issued = await audited(scene.service, "grant.issued")
    denied = await audited(scene.service, "grant.denied")
    assert [(row.subject, row.outcome) for row in issued] == [
        ("alice", "granted"),
        ("bob", "partial"),
    ]
    assert [(row.subject, row.target, row.reason) for row in denied] == [
        ("bob", scene.document, "no_rule")
    ]


async def test_a_grant_that_cannot_be_audited_is_not_given(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom.errors import Unavailable

    async def refuse(*args: Any) -> Any:
        raise Unavailable("no audit")

    monkeypatch.setattr("service.changes.audit_store.append", refuse)
    answer = await scene.alice.ask("POST", "/v1/grants", scene.body())
    assert answer.status_code == 503
    assert "grant" not in answer.json()


async def test_grants_at_once_do_not_disturb_each_other(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(scene.grant(scene.alice)) for _ in range(12)]
    salts = {task.result()[0]["salt"] for task in asked}
    assert len(salts) == 1
    async with scene.service.runtime.sessions() as session:
        count = await session.scalar(
            select(func.count()).select_from(AuditRow).where(AuditRow.kind == "grant.issued")
        )
    assert count == 12


async def test_no_answer_log_or_row_holds_a_salt_or_a_secret(
    scene: Scene, settings: ServiceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    answer, claims = await scene.grant(scene.alice)
    async with scene.service.runtime.sessions() as session:
        ids = claims.components(2)
        opened = await components.secrets(session, ids, noted())
        rows = (await session.scalars(select(AuditRow))).all()
    told = " ".join(row.details + row.target + row.reason for row in rows) + caplog.text
    needles = [answer["salt"], answer["grant"], *(secret.hex() for secret in opened)]
    assert not [needle for needle in needles if needle in told]
    assert answer["salt"] not in answer["grant"]
    root = settings.state_directory
    files = [path for path in root.rglob("*") if path.is_file() and "keys" not in path.parts]
    for path in files:
        content = path.read_bytes()
        assert not any(bytes(secret) in content for secret in opened), path
        assert answer["salt"].encode() not in content, path


async def test_the_same_tenant_and_salt_after_a_restart(settings: ServiceSettings) -> None:
    async with running(settings) as service:
        scene = await Scene(service).set_up()
        first, _ = await scene.grant(scene.alice)
    async with running(settings) as service:
        scene.service = service
        alice = service.party("alice", scene.tenant, Role.SUBJECT)
        again, _ = await scene.grant(alice)
    assert first["salt"] == again["salt"]
