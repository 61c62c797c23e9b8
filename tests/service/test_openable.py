"""A database and a key directory that do not belong together: not ready, and told what to do."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from service.keys import rotation
from service.keys.provider import INSTALLATION
from service.settings import ServiceSettings
from strongroom.errors import Missing
from tests.service.conftest import Copy
from tests.service.house import Service, running
from tests.service.test_registry import MODEL


async def readiness(service: Service) -> tuple[int, dict[str, str]]:
    answer = await service.nobody.ask("GET", "/readyz")
    return answer.status_code, answer.json()


async def rotated_after_backup(
    settings: ServiceSettings, backup: Copy
) -> tuple[ServiceSettings, str, dict[Path, bytes]]:
    """A copy from before a rotation; a component that lives in it; the key files of that time."""
    async with running(settings) as service:
        made = await service.operator.post("/v1/artefacts", MODEL)
        await service.tenant()
        files = {path: path.read_bytes() for path in settings.keys.glob("kek-*.key")}
    copied = settings.model_copy(update={"database_url": await backup(settings.database)})
    async with running(settings) as service:
        runtime = service.runtime
        await rotation.rotate(runtime.database, runtime.changes, runtime.key_provider, INSTALLATION)
        assert (await readiness(service))[0] == 200
    return copied, made["id"], files


async def test_a_backup_older_than_a_rotation_is_not_ready_until_the_key_is_put_back(
    settings: ServiceSettings, backup: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    copied, _, files = await rotated_after_backup(settings, backup)
    async with running(copied) as service:
        assert "version 1 of key-encryption key installation does not open 1 living" in caplog.text
        status, problem = await readiness(service)
        assert (status, problem["field"]) == (503, "key_directory")
        assert "put back the 1 key-encryption key versions" in problem["detail"]
        assert (await service.nobody.ask("GET", "/healthz")).status_code == 200
        for path, key in files.items():
            path.write_bytes(key)
            path.chmod(0o600)
        assert (await readiness(service))[0] == 200


async def test_what_cannot_be_opened_may_be_revoked_instead(
    settings: ServiceSettings, backup: Copy
) -> None:
    copied, model, _ = await rotated_after_backup(settings, backup)
    async with running(copied) as service:
        assert (await readiness(service))[0] == 503
        asked = {"axis": "model", "target": model, "reason": "its key is gone", "wait": False}
        await service.operator.post("/v1/revocations", asked)
        assert (await readiness(service))[0] == 200


async def test_a_new_key_directory_beside_an_old_database_is_not_ready(
    settings: ServiceSettings,
) -> None:
    async with running(settings) as service:
        await service.operator.post("/v1/artefacts", MODEL)
        await service.tenant()
    # The same signing keys and a fresh installation KEK, which is version 1 as the old one was.
    for path in settings.keys.glob("kek-*.key"):
        path.unlink()
    async with running(settings) as service:
        status, problem = await readiness(service)
        assert status == 503
        assert "the 2 key-encryption key versions" in problem["detail"]


async def test_a_key_that_does_not_open_is_not_rotated_and_holds_up_no_other(
    settings: ServiceSettings,
) -> None:
    async with running(settings) as service:
        model = await service.operator.post("/v1/artefacts", MODEL)
        tenant = await service.tenant()
        group = await service.group(tenant, "staff")
    (settings.keys / f"kek-{tenant}-v1.key").unlink()
    async with running(settings) as service:
        runtime = service.runtime
        for axis, target in (("model", model["id"]), ("group", group)):
            asked = {"axis": axis, "target": target, "reason": "r", "wait": False}
            await service.operator.post("/v1/revocations", asked)
        with pytest.raises(Missing, match="not rotated"):
            await rotation.rotate_due(
                runtime.database, runtime.changes, runtime.key_provider, timedelta(0)
            )
    # The tenant's key comes first. No version was made of it, and the other was rotated.
    kept = {path.name for path in settings.keys.glob("kek-*.key")}
    assert kept == {"kek-installation-v2.key"}
