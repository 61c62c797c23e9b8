"""No destroyed secret stays in SQLite's write-ahead log, whatever came between."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from sqlalchemy import select

from service.db.session import Database
from service.keys import components
from service.keys.models import Component
from service.settings import ServiceSettings
from strongroom.identity import ComponentId, ComponentKind
from strongroom.log import InvalidationKind
from tests.service.evidence import SYSTEM, Evidence, start
from tests.service.house import running

pytestmark = pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)

CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from service.db.session import Database
from service.keys.models import Component
from service.settings import ServiceSettings
from tests.service.house import digest, running

async def main():
    state = Path(sys.argv[1])
    async with running(ServiceSettings(state_directory=state)) as service:
        body = {"kind": "model", "name": "m", "revision": "1", "digest": digest("m")}
        made = await service.operator.post("/v1/artefacts", {**body, "scope": "shared"})
        async with service.runtime.sessions() as session:
            row = await session.get_one(Component, made["id"])
        print(made["id"], row.wrapped.hex(), flush=True)
        async def killed(self):
            os.kill(os.getpid(), signal.SIGKILL)
        Database.truncate_wal = killed
        asked = {"axis": "model", "target": made["id"], "reason": "r", "wait": False}
        await service.operator.post("/v1/revocations", asked)

asyncio.run(main())
"""


def holders(directory: Path, wrapped: bytes) -> list[str]:
    return [path.name for path in directory.glob("strongroom.db*") if wrapped in path.read_bytes()]


async def make(evidence: Evidence) -> tuple[ComponentId, bytes]:
    async with evidence.changes.begin(SYSTEM) as change:
        component = await components.register(change.session, ComponentKind.MODEL, None)
    async with evidence.database.readers() as session:
        wrapped = await session.scalar(select(Component.wrapped).where(Component.id == component))
    assert wrapped
    return component, wrapped


async def destroy(evidence: Evidence, component: ComponentId) -> None:
    async with evidence.changes.begin(SYSTEM) as change:
        await components.destroy(change.session, [component])
        await change.invalidate(kind=InvalidationKind.COMPONENTS, components=[component])


async def busy(self: Database) -> bool:
    return False


async def test_a_secret_destroyed_by_a_process_that_was_killed_before_the_cut_is_gone_at_start(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        str(tmp_path),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await child.communicate()
    assert child.returncode == -signal.SIGKILL
    component, wrapped = told.decode().split()
    assert "strongroom.db-wal" in holders(tmp_path, bytes.fromhex(wrapped))
    async with running(settings) as service:
        assert holders(tmp_path, bytes.fromhex(wrapped)) == []
        async with service.runtime.sessions() as session:
            row = await session.get_one(Component, ComponentId(component))
        assert row.wrapped is None


async def test_a_start_cuts_what_the_process_before_has_left(
    database: Database, settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.auth.signing_keys import SERVICE_KEY, load_signer

    signer = load_signer(settings.keys, SERVICE_KEY)
    evidence = await start(database, settings.journal / "log.jws", signer)
    component, wrapped = await make(evidence)
    monkeypatch.setattr(Database, "truncate_wal", busy)
    await destroy(evidence, component)
    monkeypatch.undo()
    assert holders(tmp_path, wrapped)
    await evidence.journal.close()
    # `database` stays open, so that it is not its closing which empties the log.
    async with running(settings):
        assert holders(tmp_path, wrapped) == []


async def test_a_secret_destroyed_without_a_log_entry_is_cut_out_as_well(
    database: Database, tmp_path: Path
) -> None:
    evidence = await start(database, tmp_path / "journal" / "log.jws")
    component, wrapped = await make(evidence)
    assert holders(tmp_path, wrapped)
    async with evidence.changes.begin(SYSTEM) as change:
        await components.destroy(change.session, [component])
        change.secrets_destroyed = True
    assert holders(tmp_path, wrapped) == []
    await evidence.journal.close()


async def test_a_log_that_was_in_use_is_cut_by_the_rotations_round(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate, cut, calls = Database.truncate_wal, asyncio.Event(), 0

    async def busy_at_first(self: Database) -> bool:
        nonlocal calls
        calls += 1
        if calls <= 2:  # the beginning of the log, and the start's own
            return False
        done = await truncate(self)
        cut.set()
        return done

    often = settings.model_copy(update={"rotation_check_s": 0.01})
    monkeypatch.setattr(Database, "truncate_wal", busy_at_first)
    async with running(often):
        await asyncio.wait_for(cut.wait(), 10)
        assert (tmp_path / "strongroom.db-wal").stat().st_size == 0
    assert calls == 3


async def test_a_secret_destroyed_while_the_log_is_being_cut_needs_another_cut(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = await start(database, tmp_path / "journal" / "log.jws")
    component, wrapped = await make(evidence)
    begun, go, calls = asyncio.Event(), asyncio.Event(), 0
    truncate = Database.truncate_wal

    async def slow_then_busy(self: Database) -> bool:
        nonlocal calls
        calls += 1
        if calls > 1:
            return False
        done = await truncate(self)
        begun.set()
        await go.wait()
        return done

    other, _ = await make(evidence)
    monkeypatch.setattr(Database, "truncate_wal", slow_then_busy)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(destroy(evidence, other))
        await begun.wait()
        await destroy(evidence, component)
        go.set()
    monkeypatch.undo()
    assert holders(tmp_path, wrapped)
    assert await evidence.changes.cut_wal()
    assert holders(tmp_path, wrapped) == []
    await evidence.journal.close()


async def test_a_log_that_cannot_be_cut_is_no_error_of_the_change(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evidence = await start(database, tmp_path / "journal" / "log.jws")
    component, wrapped = await make(evidence)
    async with database.engine.connect() as reader:
        await reader.exec_driver_sql("PRAGMA busy_timeout = 0")
        await reader.exec_driver_sql("SELECT count(*) FROM components")
        raw = (await reader.get_raw_connection()).driver_connection
        assert raw is not None
        async with database.engine.connect() as writer:
            await writer.exec_driver_sql("PRAGMA busy_timeout = 0")
        await destroy(evidence, component)
        assert "cut out later" in caplog.text
    assert await evidence.changes.cut_wal()
    assert holders(tmp_path, wrapped) == []
    await evidence.journal.close()
