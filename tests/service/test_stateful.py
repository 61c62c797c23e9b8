"""Policy, revocation, grants and keys in any order, against a model that fits on a page.

hypothesis drives the whole service (`reference_model.Model` says what must come out):
- no allow that the model denies, and none denied that it allows;
- an old grant is dead for the service (no key lease) and for a sidecar's own log state exactly when
  the model says so;
- the log has no gap and no fork, whoever changed what, over restarts;
- no secret can be had after its destruction: not by asking, not from the row, and once its KEK
  version has ended not from what a thief copied before; what lives keeps its secret throughout.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select, text

from policy.grants import verify
from service.auth.tokens import Role
from service.backup import make
from service.backup.restore import restore
from service.db.migrate import upgrade_async
from service.db.session import open_database
from service.keys import components, rotation
from service.keys.models import Component
from service.keys.provider import Wrapped
from service.settings import ServiceSettings
from sidecar.control.logstate import LogState
from strongroom.errors import StrongroomError
from strongroom.grant import GrantClaims
from strongroom.identity import ComponentId
from strongroom.log import LogHead
from tests.service.conftest import PostgresServer
from tests.service.evidence import noted
from tests.service.house import Party, Service, digest, prompt, running
from tests.service.reference_model import PREFIX, WHOLE, Grant, Model, Standing, Tenant
from tests.service.sidecar_party import enrolled

T = TypeVar("T")
NAMES = st.sampled_from(["ann", "ben"])
TENANTS = st.sampled_from(["acme", "globex"])
NUMBERS = st.integers(0, 7)


class Host:
    """A service that is started, stopped, backed up and restored, from code that does not wait."""

    def __init__(self, url: str, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = folder
        self.settings = ServiceSettings(
            state_directory=folder,
            database_url=url,
            key_directory=folder / "keys",
            serving_lease_s=0.05,
        )
        self.service: Service
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def start(self) -> None:
        ready: asyncio.Future[Service] = self.loop.create_future()

        async def serve() -> None:
            try:
                async with running(self.settings) as service:
                    ready.set_result(service)
                    await self._stop.wait()
            except BaseException as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        self._stop.clear()
        self._task = self.loop.create_task(serve())
        self.service = await ready

    async def stop(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task

    async def lose_database(self) -> None:
        if self.settings.database.startswith("sqlite"):
            for path in self.folder.glob("strongroom.db*"):
                path.unlink()
            return
        database = open_database(self.settings.database)
        async with database.engine.begin() as connection:
            await connection.execute(text("DROP SCHEMA public CASCADE"))
            await connection.execute(text("CREATE SCHEMA public"))
        await database.close()


class ServiceMachine(RuleBasedStateMachine):
    """Rules draw small numbers and take what there is by them, so that shrinking is short."""

    template: ClassVar[Path]
    server: ClassVar[PostgresServer | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="srsm"))
        self.model = Model()
        self.log = LogState()
        self.claims: list[GrantClaims] = []
        self.secrets: dict[str, bytes] = {}
        """Of each component when it was first seen."""
        self.stolen: dict[str, tuple[str, Wrapped]] = {}
        """KEK and wrapped form of components, copied before they were destroyed."""
        self.backup: Standing | None = None
        self.backups = self.named = 0
        self.database = ""

    @initialize()
    def open(self) -> None:
        server = type(self).server
        if server is None:
            path = self.folder / "strongroom.db"
            shutil.copy(type(self).template, path)
            url = f"sqlite+aiosqlite:///{path}"
        else:
            self.database = asyncio.run(server.new_database())
            url = server.url(self.database)
        self.host = Host(url, self.folder)
        self.run(self._begin())

    async def _begin(self) -> None:
        await self.host.start()
        for revision in ("1", "2"):
            found = await self.service.artefacts(revision)
            self.model.standing.artefacts.append(found.body() | {"adapter": ""})
        self.party = await enrolled(self.service)
        await self._follow()
        for name in ("acme", "globex"):
            await self._create_tenant(name)

    def teardown(self) -> None:
        if hasattr(self, "host"):
            self.run(self.host.stop())
            self.host.loop.close()
        server = type(self).server
        if server is not None and self.database:
            asyncio.run(server.drop_database(self.database))
        shutil.rmtree(self.folder, ignore_errors=True)

    # What there is

    @property
    def service(self) -> Service:
        return self.host.service

    @property
    def operator(self) -> Party:
        return self.service.operator

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.host.run(work)

    def pick(self, things: Any, number: int) -> Any:
        found = sorted(things)
        return found[number % len(found)] if found else None

    def living(self, name: str) -> Tenant | None:
        return self.model.standing.tenants.get(name)

    def path(self, tenant: Tenant, rest: str) -> str:
        return f"/v1/tenants/{tenant.id}/{rest}"

    async def _create_tenant(self, name: str) -> None:
        self.named += 1
        made = Tenant(await self.service.tenant(f"{name}-{self.named}"))
        self.model.standing.tenants[name] = made
        made.groups.add(await self.service.group(made.id, "staff"))
        await self.service.subject(made.id, "ann")
        made.subjects["ann"] = set()
        await self._join(name, "ann", next(iter(made.groups)))
        await self._register(made, next(iter(made.groups)))
        # Without this few runs would have a grant that can die.
        await self._grant(name, name, "ann", 0, 0)

    async def _join(self, name: str, subject: str, group: str) -> None:
        tenant = self.model.tenant(name)
        body = {"group": group, "principal": subject}
        await self.operator.post(self.path(tenant, "memberships"), body)
        if group not in tenant.subjects[subject]:
            tenant.subjects[subject].add(group)
            self.model.authorization_changed(name)

    async def _register(self, tenant: Tenant, group: str) -> None:
        self.named += 1
        version = await self.service.document(tenant.id, f"doc-{self.named}", group)
        tenant.documents[version] = group

    # Registrations and the policy

    @rule(name=TENANTS)
    def register_tenant(self, name: str) -> None:
        if self.living(name) is None:
            self.run(self._create_tenant(name))

    @rule(name=TENANTS, number=NUMBERS)
    def register_document(self, name: str, number: int) -> None:
        tenant = self.living(name)
        if tenant is not None and tenant.groups:
            self.run(self._register(tenant, self.pick(tenant.groups, number)))

    @rule(name=TENANTS)
    def register_group(self, name: str) -> None:
        tenant = self.living(name)
        if tenant is not None and len(tenant.groups) < 3:
            self.named += 1
            tenant.groups.add(self.run(self.service.group(tenant.id, f"g{self.named}")))

    @rule(name=TENANTS, subject=NAMES)
    def register_subject(self, name: str, subject: str) -> None:
        tenant = self.living(name)
        if tenant is not None and subject not in tenant.subjects and not tenant.under_review:
            self.run(self.service.subject(tenant.id, subject))
            tenant.subjects[subject] = set()

    @rule(name=TENANTS, subject=NAMES, number=NUMBERS)
    def add_membership(self, name: str, subject: str, number: int) -> None:
        tenant = self.living(name)
        if tenant is not None and tenant.groups and subject in tenant.subjects:
            self.run(self._join(name, subject, self.pick(tenant.groups, number)))

    @rule(name=TENANTS, subject=NAMES, number=NUMBERS, effect=st.sampled_from(["allow", "deny"]))
    def add_rule(self, name: str, subject: str, number: int, effect: str) -> None:
        tenant = self.living(name)
        if tenant is None or not tenant.groups or subject not in tenant.subjects:
            return
        made = (subject, self.pick(tenant.groups, number), effect)
        if made in tenant.rules.values():
            return
        body = {
            "subject": f"user:{subject}",
            "action": "group:read",
            "resource": f"group:{made[1]}",
            "effect": effect,
        }
        answer = self.run(self.operator.post(self.path(tenant, "rules"), body))
        tenant.rules[answer["id"]] = made
        self.model.authorization_changed(name)

    @rule(name=TENANTS, number=NUMBERS)
    def remove_rule(self, name: str, number: int) -> None:
        tenant = self.living(name)
        if tenant is not None and tenant.rules:
            gone = self.pick(tenant.rules, number)
            self.run(self.operator.delete(self.path(tenant, f"rules/{gone}")))
            del tenant.rules[gone]
            self.model.authorization_changed(name)

    # Grants and leases

    @rule(name=TENANTS, other=TENANTS, subject=NAMES, number=NUMBERS, revision=st.integers(0, 1))
    def grant(self, name: str, other: str, subject: str, number: int, revision: int) -> None:
        self.run(self._grant(name, other, subject, number, revision))

    async def _grant(self, name: str, other: str, subject: str, number: int, revision: int) -> None:
        tenant, owner = self.living(name), self.living(other)
        if tenant is None or owner is None or not self.model.standing.artefacts:
            return
        version = self.pick(owner.documents, number)
        if version is None:
            return
        artefacts = self.model.standing.artefacts
        asked = {
            **artefacts[revision % len(artefacts)],
            "adapter": "none",
            "spans": [
                {"end": PREFIX, "group": "everyone"},
                {"end": 20, "document": version},
                {"end": WHOLE, "group": "private"},
            ],
            **prompt(WHOLE),
        }
        who = self.service.party(subject, tenant.id, Role.SUBJECT)
        response = await who.ask("POST", "/v1/grants", asked)
        if subject not in tenant.subjects and not tenant.under_review:
            assert not response.is_success, "a grant for a subject that there is not"
            return
        if not response.is_success:
            assert tenant.under_review, response.text
            return
        answer = response.json()
        expected = tenant.tokens(subject, version)
        assert answer["granted_tokens"] == expected, (answer["granted_tokens"], expected)
        claims = verify(
            answer["grant"],
            self.service.runtime.verifier,
            now_s=int(time.time()),
            issuer=self.service.runtime.settings.issuer,
        )
        parts = {part for at in range(len(claims.spans)) for part in claims.components(at)}
        assert not parts & self.model.destroyed
        if claims.spans:
            self.claims.append(claims)
            self.model.grants.append(
                Grant(answer["grant"], name, subject, frozenset(map(str, parts)))
            )

    @precondition(lambda self: self.model.grants)
    @rule(number=NUMBERS)
    def lease(self, number: int) -> None:
        grant = self.model.grants[-1 - number % len(self.model.grants)]
        response = self.run(self.party.key_lease(grant.token))
        assert response.status_code in {200, 403}, response.text
        if grant.dead is not None:
            assert response.is_success == (not grant.dead), response.text

    # Revocations

    async def _revoke(self, axis: str, target: str, **more: Any) -> list[str]:
        await self._steal()
        body = {"axis": axis, "target": target, "reason": "drawn", **more}
        answer = await self.operator.post("/v1/revocations", body)
        return list(answer["components"])

    @rule(name=TENANTS, number=NUMBERS)
    def revoke_document_version(self, name: str, number: int) -> None:
        tenant = self.living(name)
        if tenant is not None and tenant.documents:
            gone = self.pick(tenant.documents, number)
            assert self.run(self._revoke("document_version", gone)) == [gone]
            self.model.secrets_destroyed([gone])

    @rule(name=TENANTS, subject=NAMES, number=NUMBERS)
    def revoke_membership(self, name: str, subject: str, number: int) -> None:
        tenant = self.living(name)
        if tenant is not None and tenant.subjects.get(subject):
            group = self.pick(tenant.subjects[subject], number)
            self.run(self._revoke("membership", subject, tenant=tenant.id, group=group))
            tenant.subjects[subject].discard(group)
            self.model.authorization_changed(name)

    @rule(name=TENANTS, subject=NAMES)
    def revoke_subject(self, name: str, subject: str) -> None:
        tenant = self.living(name)
        if tenant is not None and subject in tenant.subjects:
            gone = self.run(self._revoke("subject", subject, tenant=tenant.id))
            self.model.subject_removed(name, subject)
            self.model.secrets_destroyed(gone)

    @rule(name=TENANTS, number=NUMBERS)
    def revoke_group(self, name: str, number: int) -> None:
        tenant = self.living(name)
        if tenant is not None and tenant.groups:
            gone = self.pick(tenant.groups, number)
            self.run(self._revoke("group", gone))
            self.model.group_removed(name, gone)

    @precondition(lambda self: len(self.model.standing.artefacts) > 1)
    @rule(axis=st.sampled_from(["model", "tokenizer", "template", "policy"]))
    def revoke_artefact(self, axis: str) -> None:
        gone = self.model.standing.artefacts[0][axis]
        assert self.run(self._revoke(axis, gone)) == [gone]
        self.model.secrets_destroyed([gone])

    @rule(name=TENANTS)
    def revoke_tenant(self, name: str) -> None:
        tenant = self.living(name)
        if tenant is not None:
            gone = self.run(self._revoke("tenant", tenant.id))
            del self.model.standing.tenants[name]
            self.model.secrets_destroyed(gone)

    # Keys, restarts, backups

    @rule(name=TENANTS)
    def rotate(self, name: str) -> None:
        tenant = self.living(name)
        if tenant is not None:
            self.run(self._rotate(tenant.id))

    async def _rotate(self, kek: str) -> None:
        await self._steal()
        runtime = self.service.runtime
        await rotation.rotate(runtime.database, runtime.changes, runtime.key_provider, kek)
        # A backup of before is of no use any more: it is wrapped under what has ended.
        self.backup = None
        for owner, (stolen_kek, wrapped) in self.stolen.items():
            if stolen_kek == kek:
                with pytest.raises(StrongroomError):
                    await runtime.key_provider.unwrap(kek, ComponentId(owner), wrapped)
        self.stolen = {each: held for each, held in self.stolen.items() if held[0] != kek}

    @rule()
    def restart(self) -> None:
        self.run(self.host.stop())
        self.run(self.host.start())
        self.party.http = self.service.http

    @rule()
    def back_up(self) -> None:
        self.backups += 1
        self.run(
            asyncio.to_thread(make.create, self.host.settings, self.folder / f"b{self.backups}")
        )
        self.backup = copy.deepcopy(self.model.standing)

    @precondition(lambda self: self.backup is not None)
    @rule()
    def restore(self) -> None:
        assert self.backup is not None
        self.run(self.host.stop())
        self.run(self.host.lose_database())
        own = make.own_keys(self.host.settings)[1]
        folder = self.folder / f"b{self.backups}"
        self.run(asyncio.to_thread(restore, self.host.settings, folder, own))
        self.run(self.host.start())
        self.party.http = self.service.http
        self.model.restored(copy.deepcopy(self.backup))
        self.log = LogState()

    # What holds after every step

    async def _steal(self) -> None:
        async with self.service.runtime.sessions() as session:
            for row in await session.scalars(
                select(Component).where(Component.wrapped.is_not(None))
            ):
                assert row.wrapped is not None
                self.stolen[row.id] = row.kek, Wrapped(row.kek_version, row.wrapped)

    async def _follow(self) -> None:
        """The sidecar's own rules for the log: a gap, a fork or a step back raises."""
        if self.log.head is None:
            page = await self.party.log()
            entries = await self.party.entries(max(0, page.head_seq - 1))
            last = entries[-1].hash() if entries else ""
            runtime = self.service.runtime
            async with runtime.sessions() as session:
                from service.log import store as log_store

                head = await log_store.head(session)
            assert (head.epoch, head.seq) == (page.epoch, page.head_seq)
            assert not entries or head.hash == last
            self.log.start(LogHead(head.epoch, head.seq, head.hash), 0)
        assert self.log.head is not None
        for entry in await self.party.entries(self.log.head.seq):
            assert entry.seq == self.log.head.seq + 1
            assert self.log.check_next(entry)
            self.log.apply(entry, 1)

    @invariant()
    def the_log_is_whole_and_kills_what_the_model_kills(self) -> None:
        if not hasattr(self, "party"):
            return
        self.run(self._follow())
        for grant, claims in zip(self.model.grants, self.claims, strict=True):
            if grant.dead is not None:
                assert (self.log.dead(claims) is not None) == grant.dead, (grant, claims)

    @invariant()
    def no_destroyed_secret_can_be_had_and_every_other_stays(self) -> None:
        if hasattr(self, "party"):
            self.run(self._look_at_secrets())

    async def _look_at_secrets(self) -> None:
        async with self.service.runtime.sessions() as session:
            rows = (await session.scalars(select(Component))).all()
            living = {str(row.id) for row in rows if row.wrapped is not None}
            assert not living & self.model.destroyed
            for gone in sorted(self.model.destroyed)[:3]:
                with pytest.raises(StrongroomError):
                    await components.secrets(session, [ComponentId(gone)], noted())
            ids = [ComponentId(each) for each in sorted(living)]
            opened = await components.secrets(session, ids, noted())
            for each, secret in zip(ids, opened, strict=True):
                assert (
                    self.secrets.setdefault(each, digest(secret.hex()).encode())
                    == digest(secret.hex()).encode()
                )


def profile(examples: int, steps: int) -> settings:
    """The same examples every time: a failure is a change of ours, never of the draw."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def test_the_service_does_what_the_model_says_on_sqlite(sqlite_template: Path) -> None:
    if not sqlite_template.exists():
        asyncio.run(upgrade_async(f"sqlite+aiosqlite:///{sqlite_template}"))

    class OnSqlite(ServiceMachine):
        template = sqlite_template

    run_state_machine_as_test(OnSqlite, settings=profile(8, 25))


def test_the_service_does_what_the_model_says_on_postgresql(
    postgres_server: PostgresServer,
) -> None:
    class OnPostgres(ServiceMachine):
        server = postgres_server

    run_state_machine_as_test(OnPostgres, settings=profile(4, 20))


def test_one_story_told_by_the_same_rules(sqlite_template: Path) -> None:
    """What draws seldom reach: a grant that dies by a membership, and a restore."""
    if not sqlite_template.exists():
        asyncio.run(upgrade_async(f"sqlite+aiosqlite:///{sqlite_template}"))

    class OnSqlite(ServiceMachine):
        template = sqlite_template

    machine = OnSqlite()
    try:
        machine.open()
        machine.lease(0)
        machine.revoke_membership("globex", "ann", 0)
        assert [grant.dead for grant in machine.model.grants] == [False, True]
        machine.the_log_is_whole_and_kills_what_the_model_kills()
        machine.lease(0)
        machine.back_up()
        machine.revoke_document_version("acme", 0)
        machine.restore()
        machine.no_destroyed_secret_can_be_had_and_every_other_stays()
        machine.rotate("acme")
    finally:
        machine.teardown()
