"""A rotation that is killed goes on; one under way disturbs nobody; every provider is rotated."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from cli.environment import child_environment
from policy.certificates import Finality, verify
from service.auth.actor import SYSTEM
from service.keys import components, finality, rotation
from service.keys.models import Component, KekRotation, KekVersion
from service.keys.provider import INSTALLATION, KeyProvider, Wrapped
from service.keys.schedule import KeySchedule
from service.settings import KeyProviderKind, ServiceSettings
from strongroom.errors import Missing, Unavailable
from strongroom.identity import ComponentId, ComponentKind
from strongroom.private_files import replace_file
from tests.service.evidence import noted
from tests.service.house import Service, running
from tests.service.kms_server import ACCESS_KEY, REGION, SECRET_KEY, KmsServer, kms_server
from tests.service.test_registry import MODEL
from tests.service.test_revocation import body
from tests.service.transit_server import TransitServer, transit_server

ROOT = Path(__file__).parents[2]
COUNT = 45


async def fill(service: Service, count: int = COUNT) -> list[ComponentId]:
    async with service.runtime.database.writers.begin() as session:
        return [await components.register(session, ComponentKind.MODEL, None) for _ in range(count)]


async def secrets_of(service: Service, ids: list[ComponentId]) -> list[bytes]:
    async with service.runtime.sessions() as session:
        return [bytes(each) for each in await components.secrets(session, ids, noted())]


async def versions_of(service: Service, ids: list[ComponentId]) -> set[int]:
    async with service.runtime.sessions() as session:
        found = select(Component.kek_version).where(Component.id.in_(ids))
        return set((await session.scalars(found)).all())


@pytest.mark.parametrize(
    "where", ["begun", "in_the_middle", "before_destruction", "after_destruction"]
)
async def test_a_rotation_killed_anywhere_is_ended_by_the_next_process(
    settings: ServiceSettings, tmp_path: Path, where: str
) -> None:
    async with running(settings) as service:
        ids = await fill(service)
        gone = await fill(service, 1)
        before = await secrets_of(service, ids)
        async with service.runtime.database.writers.begin() as session:
            await components.destroy(session, gone)
    given = tmp_path / "settings.json"
    given.write_text(settings.model_dump_json())
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.service.rotation_process", str(given), where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=child_environment(),
    )
    with process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"here\n"
        process.kill()
    async with running(settings) as service:
        # Nothing is lost, at whatever point it ended.
        assert await secrets_of(service, ids) == before
        seen = await versions_of(service, ids)
        expected = {"begun": {1}, "in_the_middle": {1, 2}}.get(where, {2})
        assert seen == expected
        [standing] = (await service.operator.get("/v1/keys/rotations"))["items"]
        left = {"begun": COUNT, "in_the_middle": COUNT - 30}.get(where, 0)
        assert (standing["state"], standing["components_left"]) == ("running", left)
        assert standing["components_total"] == COUNT
        assert list(await service.runtime.key_schedule.round()) == [INSTALLATION]
        assert await secrets_of(service, ids) == before
        assert await versions_of(service, ids) == {2}
        [standing] = (await service.operator.get("/v1/keys/rotations"))["items"]
        assert (standing["state"], standing["components_left"]) == ("done", 0)
        async with service.runtime.sessions() as session:
            assert await finality.final_at(session, gone) is not None
    assert {path.name for path in settings.keys.glob("kek-installation-*")} == {
        "kek-installation-v2.key"
    }


class Gate:
    """A provider that waits before it rewraps, for a test to do something meanwhile."""

    def __init__(self, provider: KeyProvider) -> None:
        self._provider = provider
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    async def rewrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> Wrapped:
        again = await self._provider.rewrap(kek, owner, wrapped)
        self.reached.set()
        await self.go_on.wait()
        return again


async def test_serving_goes_on_and_what_is_destroyed_meanwhile_stays_destroyed(
    service: Service,
) -> None:
    runtime = service.runtime
    ids = await fill(service, 3)
    gate: Any = Gate(runtime.key_provider)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        rotating = tasks.create_task(
            rotation.rotate(runtime.database, runtime.changes, gate, INSTALLATION)
        )
        await gate.reached.wait()
        # Its secret is rewrapped already, and not yet put in the place of the old form.
        async with runtime.database.writers.begin() as session:
            await components.destroy(session, ids[:1])
        fresh = await service.operator.post("/v1/artefacts", MODEL)
        assert len(await secrets_of(service, ids[1:])) == 2
        gate.go_on.set()
        await rotating
    async with runtime.sessions() as session:
        assert not await components.alive(session, ids[:1])
        assert await components.alive(session, [*ids[1:], ComponentId(fresh["id"])])
        assert await finality.final_at(session, ids[:1]) is not None
    assert len(await secrets_of(service, [*ids[1:], ComponentId(fresh["id"])])) == 3
    assert await versions_of(service, [ComponentId(fresh["id"])]) == {2}


async def test_a_registration_that_wrapped_before_a_rotation_began_is_not_lost(
    service: Service,
) -> None:
    """Its row comes after the old version was retired: it is wrapped again, under the new one."""
    runtime = service.runtime
    await fill(service, 1)
    provider = runtime.key_provider
    old = await provider.wrap(INSTALLATION, ComponentId("0" * 32), bytearray(32))
    await rotation.begin(runtime.changes, provider, INSTALLATION, SYSTEM)

    class Late:
        wraps = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(provider, name)

        async def wrap(self, kek: str, owner: ComponentId, secret: bytearray) -> Wrapped:
            self.wraps += 1
            return old if self.wraps == 1 else await provider.wrap(kek, owner, secret)

    late: Any = Late()
    async with runtime.database.writers.begin() as session:
        session.info["strongroom.key_provider"] = late
        made = await components.register(session, ComponentKind.MODEL, None)
    assert late.wraps == 2
    await runtime.key_schedule.round()
    assert len(await secrets_of(service, [made])) == 1
    assert await versions_of(service, [made]) == {2}


async def test_a_grant_whose_snapshot_is_older_than_the_rotations_end_is_given(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.grants import decide
    from tests.service.test_grants import Scene

    scene = await Scene(service).set_up()
    first, _ = await scene.grant(scene.alice)
    runtime = service.runtime
    salted = decide._salt
    rotated: list[bool] = []

    async def late(*given: Any) -> str:
        if not rotated:
            # The snapshot stands: the rotation ends between its first read and the unwrapping.
            rotated.append(True)
            if runtime.database.dialect == "postgresql":
                for kek in (INSTALLATION, scene.tenant):
                    await rotation.rotate(
                        runtime.database, runtime.changes, runtime.key_provider, kek
                    )
        return await salted(*given)

    monkeypatch.setattr(decide, "_salt", late)
    again, _ = await scene.grant(scene.alice)
    assert rotated
    assert again["salt"] == first["salt"]


async def test_a_failed_rotation_says_so_and_destroys_nothing(
    service: Service, settings: ServiceSettings
) -> None:
    runtime = service.runtime
    ids = await fill(service, 2)

    class Away:
        def __getattr__(self, name: str) -> Any:
            return getattr(runtime.key_provider, name)

        async def rewrap(self, kek: str, owner: ComponentId, wrapped: Wrapped) -> Wrapped:
            raise Unavailable("the key service is away")

    away: Any = Away()
    with pytest.raises(Unavailable):
        await rotation.rotate(runtime.database, runtime.changes, away, INSTALLATION)
    [standing] = (await service.operator.get("/v1/keys/rotations"))["items"]
    assert (standing["state"], standing["failure"]) == ("running", "unavailable")
    assert len(await secrets_of(service, ids)) == 2
    assert (settings.keys / "kek-installation-v1.key").exists()
    await runtime.key_schedule.round()
    [standing] = (await service.operator.get("/v1/keys/rotations"))["items"]
    assert (standing["state"], standing["failure"]) == ("done", "")


async def test_an_older_version_that_still_lives_keeps_an_erasure_pending(
    service: Service,
) -> None:
    """A form under an older version may lie in a backup: its own version alone says nothing."""
    [gone] = await fill(service, 1)
    moment = datetime.now(UTC)
    async with service.runtime.database.writers.begin() as session:
        (await session.get_one(Component, gone)).kek_version = 2
        session.add(KekVersion(kek=INSTALLATION, version=2, created_at=moment, destroyed_at=moment))
        await components.destroy(session, [gone])
    async with service.runtime.sessions() as session:
        assert await finality.final_at(session, [gone]) is None
        assert list(await finality.due(session, datetime.now(UTC))) == [INSTALLATION]


async def test_two_rotations_at_once_do_no_harm(service: Service) -> None:
    runtime = service.runtime
    ids = await fill(service, 30)
    before = await secrets_of(service, ids)
    parts = (runtime.database, runtime.changes, runtime.key_provider, INSTALLATION)
    await asyncio.gather(rotation.rotate(*parts), rotation.rotate(*parts))
    assert await secrets_of(service, ids) == before
    async with runtime.sessions() as session:
        assert len((await session.scalars(select(KekRotation))).all()) in {1, 2}


async def test_every_erasure_is_final_within_its_deadline_and_the_certificate_says_so(
    service: Service,
) -> None:
    from tests.service.test_certificates import certificate_of

    world, text = await certificate_of(service)
    runtime = service.runtime
    before = verify(text, runtime.verifier).claims
    assert before.final.state is Finality.PENDING
    promised = timedelta(seconds=runtime.settings.erasure_final_s)
    moment = datetime.now(UTC)

    def schedule(later: timedelta) -> KeySchedule:
        return KeySchedule(
            runtime.database,
            runtime.changes,
            runtime.key_provider,
            erasure_final_s=promised.total_seconds(),
            check_s=60,
            uses_kept_s=3600 * 24,
            clock=lambda: moment + later,
        )

    # Not yet at two fifths of the time that was promised; at three fifths it is done.
    assert list(await schedule(promised * 0.4).round()) == []
    assert list(await schedule(promised * 1.1).overdue()) == [world.tenant]
    assert list(await schedule(promised * 0.6).round()) == [world.tenant]
    assert list(await schedule(promised * 1.1).overdue()) == []
    response = await service.operator.ask("GET", f"/v1/revocations/{before.id}/certificate")
    after = verify(response.text, runtime.verifier).claims
    assert after.final.state is Finality.FINAL
    assert before.committed_at < after.final.at <= after.issued_at
    # The one issued before still verifies, and still says what was true then.
    assert verify(text, runtime.verifier).claims.final.state is Finality.PENDING


async def test_an_erasure_past_its_deadline_is_said(
    service: Service, settings: ServiceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.service.test_certificates import certificate_of

    world, _ = await certificate_of(service)
    (settings.keys / f"kek-{world.tenant}-v1.key").rename(settings.keys.parent / "kept.key")
    runtime = service.runtime
    runtime.key_provider._ciphers.clear()  # type: ignore[attr-defined]
    late = KeySchedule(
        runtime.database,
        runtime.changes,
        runtime.key_provider,
        erasure_final_s=10,
        check_s=60,
        uses_kept_s=3600,
        clock=lambda: datetime.now(UTC) + timedelta(seconds=20),
    )
    with pytest.raises(Missing):
        await late.round()
    assert f"key-encryption key {world.tenant} are not final in time" in caplog.text


# Every provider, in the whole service


@pytest.fixture
def vault() -> Iterator[TransitServer]:
    with transit_server() as server:
        yield server


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[KmsServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with kms_server() as server:
        yield server


@pytest.fixture(params=["vault_transit", "aws_kms"])
def elsewhere(
    request: pytest.FixtureRequest, settings: ServiceSettings, tmp_path: Path
) -> ServiceSettings:
    if request.param == "aws_kms":
        kms: KmsServer = request.getfixturevalue("kms")
        update: dict[str, Any] = {"kms_region": REGION, "kms_endpoint": kms.url}
    else:
        vault: TransitServer = request.getfixturevalue("vault")
        token_file = tmp_path / "vault.token"
        replace_file(token_file, next(iter(vault.tokens)).encode())
        update = {"vault_address": vault.url, "vault_token_file": token_file}
    return settings.model_copy(update={**update, "key_provider": KeyProviderKind(request.param)})


async def test_the_whole_service_runs_over_another_provider(elsewhere: ServiceSettings) -> None:
    from tests.service.test_grants import Scene

    async with running(elsewhere) as service:
        scene = await Scene(service).set_up()
        first, _ = await scene.grant(scene.alice)
        answer = await service.operator.post(
            "/v1/revocations",
            body("document_version", await service.document(scene.tenant, "another", scene.group)),
        )
        assert answer["final"]["state"] == "pending"
        for kek in (INSTALLATION, scene.tenant):
            await rotation.rotate(
                service.runtime.database, service.runtime.changes, service.runtime.key_provider, kek
            )
        later = await service.operator.get(f"/v1/revocations/{answer['id']}")
        assert later["final"]["state"] == "final"
        assert (await service.operator.get("/v1/keys/status"))["provider"] == str(
            elsewhere.key_provider
        )
    # A restart finds everything where it was; no key file but the signing keys is here.
    async with running(elsewhere) as service:
        scene.service = service
        from service.auth.tokens import Role

        alice = service.party("alice", scene.tenant, Role.SUBJECT)
        again, _ = await scene.grant(alice)
        assert again["salt"] == first["salt"]
    assert not list(elsewhere.keys.glob("kek-*"))


async def test_a_key_service_that_is_away_stops_the_start_and_refuses_in_between(
    elsewhere: ServiceSettings, request: pytest.FixtureRequest
) -> None:
    from tests.service.test_grants import Scene

    async with running(elsewhere) as service:
        scene = await Scene(service).set_up()
        if elsewhere.key_provider is KeyProviderKind.AWS_KMS:
            request.getfixturevalue("kms").fault = "KMSInternalException"
        else:
            request.getfixturevalue("vault").sealed = True
        response = await scene.alice.ask("POST", "/v1/grants", scene.body())
        assert response.status_code == 503
        assert json.loads(response.content)["code"] == "unavailable"
    with pytest.raises(Unavailable):
        async with running(elsewhere):
            pass  # pragma: no cover - it does not start


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"key_provider": "vault_transit"}, "vault_token_file"),
        (
            {
                "key_provider": "vault_transit",
                "vault_token_file": "t",
                "vault_address": "http://vault.example:8200",
            },
            "vault_address",
        ),
        (
            {
                "key_provider": "vault_transit",
                "vault_token_file": "t",
                "vault_address": "https://user:pw@vault.example",
            },
            "vault_address",
        ),
        ({"key_provider": "aws_kms"}, "kms_region"),
        (
            {
                "key_provider": "aws_kms",
                "kms_region": "eu-central-1",
                "kms_endpoint": "http://kms.example",
            },
            "kms_endpoint",
        ),
    ],
)
def test_a_provider_that_lacks_something_names_it(
    given: dict[str, str], field: str, tmp_path: Path
) -> None:
    from service.keys.chosen import open_provider
    from service.settings import read_settings
    from strongroom.errors import Misuse

    with pytest.raises(Misuse) as refusal:
        open_provider(read_settings({}, state_directory=tmp_path, **given))
    assert refusal.value.field == field
