"""Backups: made while the service serves, verified, restored, and what a start makes of them.

Every restart here is a whole service that ends and another one that starts on what is left.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, text

from service.audit.models import AuditRow
from service.auth.tokens import Role
from service.backup import make, rows
from service.backup.manifest import MANIFEST, Manifest
from service.backup.restore import restore
from service.db.base import now
from service.db.session import Database, open_database
from service.keys import components, rotation
from service.keys.models import Component
from service.log import chain
from service.settings import ServiceSettings
from strongroom.errors import Conflict, Corrupt, Missing, Misuse, Unavailable
from strongroom.identity import ComponentId
from tests.service.evidence import new_signer
from tests.service.house import Service, running
from tests.service.test_grants import TOKENS, Scene
from tests.service.test_revocation import body

Wipe = Callable[[], Awaitable[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.fixture
def wipe(settings: ServiceSettings, dialect: str) -> Wipe:
    """The database is lost, with everything in it."""

    async def lose() -> None:
        if dialect == "sqlite":
            for path in settings.state_directory.glob("strongroom.db*"):
                path.unlink()
            return
        database = open_database(settings.database)
        async with database.engine.begin() as connection:
            await connection.execute(text("DROP SCHEMA public CASCADE"))
            await connection.execute(text("CREATE SCHEMA public"))
        await database.close()

    return lose


async def back_up(settings: ServiceSettings, folder: Path) -> Manifest:
    return await asyncio.to_thread(make.create, settings, folder)


async def put_back(settings: ServiceSettings, folder: Path) -> Manifest:
    return await asyncio.to_thread(restore, settings, folder, make.own_keys(settings)[1])


def verified(settings: ServiceSettings, folder: Path) -> Manifest:
    return make.verify(folder, make.own_keys(settings)[1])


async def every_row(database: Database) -> dict[str, list[Any]]:
    def work(connection: Connection) -> dict[str, list[Any]]:
        return {
            table.name: sorted((tuple(row) for row in connection.execute(select(table))), key=repr)
            for table in rows.tables_of(connection)
        }

    async with database.engine.connect() as connection:
        return await connection.run_sync(work)


async def journal(settings: ServiceSettings) -> bytes:
    return (settings.journal / "log.jws").read_bytes()


async def alarms(service: Service, kind: str) -> list[AuditRow]:
    async with service.runtime.sessions() as session:
        found = await session.scalars(select(AuditRow).where(AuditRow.kind == kind))
        return list(found.all())


async def alive(service: Service, component: str) -> bool:
    async with service.runtime.sessions() as session:
        return await components.alive(session, [ComponentId(component)])


async def test_a_restored_backup_has_every_row_and_serves_the_same_salts(
    settings: ServiceSettings, folder: Path, wipe: Wipe
) -> None:
    async with running(settings) as service:
        scene = await Scene(service).set_up()
        first, _ = await scene.grant(scene.alice)
        manifest = await back_up(settings, folder)
        before = await every_row(service.runtime.database)
    assert sum(len(found) for found in before.values()) > 30
    assert verified(settings, folder) == manifest
    await wipe()
    assert await put_back(settings, folder) == manifest
    database = open_database(settings.database)
    after = await every_row(database)
    await database.close()
    [word] = after.pop("restorations")
    before.pop("restorations")
    assert manifest.id in word
    assert after == before
    async with running(settings) as service:
        scene.service = service
        alice = service.party("alice", scene.tenant, Role.SUBJECT)
        again, _ = await scene.grant(alice)
        assert again["salt"] == first["salt"]


async def test_a_start_after_a_restore_begins_a_new_epoch_and_says_so_once(
    settings: ServiceSettings, folder: Path, wipe: Wipe
) -> None:
    async with running(settings) as service:
        scene = await Scene(service).set_up()
        old, _ = await scene.grant(scene.alice)
        await back_up(settings, folder)
    await wipe()
    await put_back(settings, folder)
    epochs = set()
    for _ in range(2):
        async with running(settings) as service:
            scene.service = service
            _, claims = await scene.grant(service.party("alice", scene.tenant, Role.SUBJECT))
            epochs.add(claims.epoch)
            [alarm] = await alarms(service, "backup.restored")
            assert alarm.outcome == "alarm"
    assert len(epochs) == 1
    assert scene.claims(old).epoch not in epochs


async def test_what_was_revoked_after_the_backup_is_destroyed_again(
    settings: ServiceSettings, folder: Path, wipe: Wipe
) -> None:
    async with running(settings) as service:
        scene = await Scene(service).set_up()
        kept = await service.document(scene.tenant, "kept", scene.group)
        await scene.grant(scene.alice)
        await back_up(settings, folder)
        await service.operator.post("/v1/revocations", body("document_version", scene.document))
    await wipe()
    await put_back(settings, folder)
    database = open_database(settings.database)
    async with database.readers() as session:
        row = await session.get_one(Component, ComponentId(scene.document))
        assert row.wrapped is not None, "the backup itself still has the wrapped secret"
    await database.close()
    async with running(settings) as service:
        assert not await alive(service, scene.document)
        assert await alive(service, kept)
        scene.service = service
        alice = service.party("alice", scene.tenant, Role.SUBJECT)
        answer, _ = await scene.grant(alice)
        assert answer["granted_tokens"] == 30, "up to the document that is gone"
        whole, _ = await scene.grant(
            alice,
            spans=[{"end": 30, "group": "everyone"}, {"end": TOKENS, "document": kept}],
        )
        assert whole["granted_tokens"] == TOKENS
        [replayed] = await alarms(service, "log.replayed")
        assert replayed.outcome == "alarm"
        # Its KEK version ends as after any revocation.
        runtime = service.runtime
        await rotation.rotate(runtime.database, runtime.changes, runtime.key_provider, scene.tenant)


@pytest.mark.parametrize("state", ["missing", "behind", "forked"])
async def test_a_restored_database_does_not_serve_beside_a_journal_that_does_not_go_on_from_it(
    settings: ServiceSettings, folder: Path, wipe: Wipe, state: str
) -> None:
    path = settings.journal / "log.jws"
    async with running(settings) as service:
        scene = await Scene(service).set_up()
        other = await service.document(scene.tenant, "other", scene.group)
        early = await journal(settings)
        await service.operator.post("/v1/revocations", body("document_version", other))
        await back_up(settings, folder)
        at_backup = await journal(settings)
        await service.operator.post("/v1/revocations", body("document_version", scene.document))
        newest = await journal(settings)
    assert early != at_backup != newest
    await wipe()
    await put_back(settings, folder)
    match state:
        case "missing":
            path.unlink()
        case "behind":
            path.write_bytes(early)
        case _:
            # Signed by the service itself, where the backup has another entry.
            lines = newest.splitlines(keepends=True)
            before = chain.parse(lines[-3].decode().strip())
            fork = chain.next_entry(
                chain.head_of(before), now(), before.kind, components=before.components
            )
            signed = chain.sign(fork, make.own_keys(settings)[0])
            path.write_bytes(b"".join(lines[:-2]) + signed.encode() + b"\n")
    for _ in range(2):
        with pytest.raises(Corrupt, match="journal"):
            async with running(settings):
                pass  # pragma: no cover - it does not start
    # With the newest journal it serves, and the secret is gone again.
    path.write_bytes(newest)
    async with running(settings) as service:
        assert not await alive(service, scene.document)
        assert await alive(service, scene.group)


async def test_a_journal_that_is_behind_a_restored_backup_is_accepted_in_so_many_words(
    settings: ServiceSettings, folder: Path, wipe: Wipe
) -> None:
    path = settings.journal / "log.jws"
    async with running(settings) as service:
        scene = await Scene(service).set_up()
        early = await journal(settings)
        await service.operator.post("/v1/revocations", body("document_version", scene.document))
        await back_up(settings, folder)
    await wipe()
    await put_back(settings, folder)
    path.write_bytes(early)
    accepting = settings.model_copy(update={"accept_lost_journal": True})
    async with running(accepting) as service:
        [alarm] = await alarms(service, "backup.restored")
        assert (alarm.outcome, alarm.reason) == ("alarm", "the journal was lost")
        assert not await alive(service, scene.document)
    async with running(settings):
        pass


async def test_a_backup_made_under_load_is_one_state(
    settings: ServiceSettings, folder: Path
) -> None:
    async with running(settings) as service:
        scene = await Scene(service).set_up()
        stop = asyncio.Event()
        written = 0

        async def write() -> None:
            nonlocal written
            while not stop.is_set():
                name = f"d{written}"
                version = await service.document(scene.tenant, name, scene.group)
                await service.operator.post(
                    "/v1/revocations", body("document_version", version) | {"wait": False}
                )
                written += 1

        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(write())
            while not written:
                await asyncio.sleep(0)
            for number in range(3):
                await back_up(settings, folder / str(number))
            stop.set()
            await writing
    positions = [verified(settings, folder / str(number)).position for number in range(3)]
    assert positions == sorted(positions)
    assert positions[-1] > 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "swapped", "foreign", "no_manifest"])
async def test_a_backup_that_is_not_what_was_made_is_refused(
    settings: ServiceSettings, folder: Path, wipe: Wipe, damage: str
) -> None:
    async with running(settings) as service:
        await service.tenant()
        first = await back_up(settings, folder)
        await service.tenant("globex")
        await back_up(settings, folder.with_name("second"))
    [path] = [each for each in folder.iterdir() if each.name != MANIFEST]
    content = bytearray(path.read_bytes())
    match damage:
        case "flipped":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:-1])
        case "swapped":
            shutil.copy(folder.with_name("second") / path.name, path)
        case "foreign":
            from service.backup.manifest import sign

            (folder / MANIFEST).write_text(sign(first, new_signer("thief")))
        case _:
            (folder / MANIFEST).unlink()
    with pytest.raises((Corrupt, Missing)):
        verified(settings, folder)
    await wipe()
    with pytest.raises((Corrupt, Missing)):
        await put_back(settings, folder)


async def test_nothing_is_restored_over_a_database_or_beside_a_running_service(
    settings: ServiceSettings, folder: Path, wipe: Wipe
) -> None:
    async with running(settings) as service:
        await service.tenant()
        await back_up(settings, folder)
        with pytest.raises(Conflict):
            await put_back(settings, folder)
        with pytest.raises(Conflict, match="not empty"):
            await back_up(settings, folder)
    with pytest.raises((Conflict, Misuse)):
        await put_back(settings, folder)
    await wipe()
    await put_back(settings, folder)


async def test_a_backup_of_the_other_kind_of_database_is_refused(
    settings: ServiceSettings, folder: Path, dialect: str, tmp_path: Path
) -> None:
    async with running(settings) as service:
        await service.tenant()
        await back_up(settings, folder)
    other = (
        "postgresql+asyncpg://nobody@/none?host=/nonexistent"
        if dialect == "sqlite"
        else f"sqlite+aiosqlite:///{tmp_path / 'other.db'}"
    )
    with pytest.raises(Misuse, match="this is a backup of"):
        await put_back(settings.model_copy(update={"database_url": other}), folder)


async def test_there_is_nothing_to_back_up_before_the_first_start(
    settings: ServiceSettings, folder: Path
) -> None:
    with pytest.raises(Unavailable, match="never started"):
        await back_up(settings, folder)


async def test_a_backup_is_its_owners_alone_and_holds_no_key(
    settings: ServiceSettings, folder: Path
) -> None:
    import base64

    async with running(settings) as service:
        await Scene(service).set_up()
        await back_up(settings, folder)
        async with service.runtime.sessions() as session:
            from tests.service.evidence import noted

            ids = list((await session.scalars(select(Component.id))).all())
            opened = await components.secrets(session, ids, noted())
    keys = [path.read_bytes() for path in settings.keys.iterdir()]
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        content = path.read_bytes()
        for secret in (*keys, *(bytes(each) for each in opened)):
            for form in (secret, secret.hex().encode(), base64.b64encode(secret)[:-2]):
                assert form not in content
