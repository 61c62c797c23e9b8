"""Rotation of key-encryption keys, and when an erasure is final."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from service.keys import components, finality, rotation
from service.keys.models import Component
from service.keys.provider import INSTALLATION
from strongroom.identity import ComponentId
from tests.service.evidence import noted
from tests.service.house import Service
from tests.service.test_registry import MODEL


async def secret(service: Service, component: str) -> bytes:
    async with service.runtime.sessions() as session:
        return bytes((await components.secrets(session, [ComponentId(component)], noted()))[0])


async def final(service: Service, *ids: str) -> bool:
    async with service.runtime.sessions() as session:
        moment = await finality.final_at(session, [ComponentId(each) for each in ids])
    return moment is not None


async def test_rotation_keeps_what_lives_and_ends_what_was_destroyed(
    service: Service, key_directory: Path
) -> None:
    runtime = service.runtime
    old = await service.operator.post("/v1/artefacts", MODEL)
    other = await service.operator.post("/v1/artefacts", {**MODEL, "name": "other"})
    before = await secret(service, other["id"])
    async with runtime.sessions() as session:
        copied = (await session.get_one(Component, ComponentId(old["id"]))).wrapped
        version = (await session.get_one(Component, ComponentId(old["id"]))).kek_version
    await service.operator.post(
        f"/v1/artefacts/{old['id']}/upgrade", {"revision": "r2", "digest": MODEL["digest"]}
    )
    assert not await final(service, old["id"])
    hour = timedelta(hours=1)
    keep = await rotation.rotate_due(runtime.database, runtime.changes, runtime.key_provider, hour)
    assert list(keep) == []
    done = await rotation.rotate_due(
        runtime.database, runtime.changes, runtime.key_provider, timedelta(0)
    )
    assert list(done) == [INSTALLATION]
    assert await secret(service, other["id"]) == before
    assert await final(service, old["id"])
    assert not await final(service, old["id"], other["id"])
    assert copied is not None
    assert not (key_directory / f"kek-installation-v{version}.key").exists()
    again = await rotation.rotate_due(
        runtime.database, runtime.changes, runtime.key_provider, timedelta(0)
    )
    assert list(again) == []
    new = await service.operator.post("/v1/artefacts", {**MODEL, "name": "third"})
    assert len(await secret(service, new["id"])) == 32


async def test_a_rotation_stopped_before_the_keys_were_destroyed_is_due_again(
    service: Service,
) -> None:
    runtime = service.runtime
    old = await service.operator.post("/v1/artefacts", MODEL)
    await service.operator.post(
        f"/v1/artefacts/{old['id']}/upgrade", {"revision": "r2", "digest": MODEL["digest"]}
    )

    class Stopped(Exception):
        pass

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(runtime.key_provider, name)

        async def destroy(self, kek: str, version: int) -> None:
            raise Stopped

    with pytest.raises(Stopped):
        await rotation.rotate(runtime.database, runtime.changes, Failing(), INSTALLATION)  # type: ignore[arg-type]
    assert not await final(service, old["id"])
    done = await rotation.rotate_due(
        runtime.database, runtime.changes, runtime.key_provider, timedelta(0)
    )
    assert list(done) == [INSTALLATION]
    assert await final(service, old["id"])


async def test_a_tenants_key_ends_with_its_last_component(
    service: Service, key_directory: Path
) -> None:
    tenant = await service.tenant()
    runtime = service.runtime
    async with runtime.database.writers.begin() as session:
        ids = (await session.scalars(select(Component.id).where(Component.kek == tenant))).all()
        await components.destroy(session, ids)
    await rotation.rotate(runtime.database, runtime.changes, runtime.key_provider, tenant)
    assert not list(key_directory.glob(f"kek-{tenant}-*"))
    assert await final(service, *ids)
