"""The sidecar's own client against the service: both ends of `strongroom.control` agree."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from service.auth.actor import SYSTEM
from sidecar.clocks import Clocks
from sidecar.control.client import ControlClient, enrol
from sidecar.state import StateDirectory
from strongroom.control import AckRequest, IntakeRequest, SpoolEvent
from strongroom.derivation import engine_salt
from strongroom.errors import Refused
from strongroom.identity import NamespaceId, new_component_id
from strongroom.log import InvalidationKind
from tests.service.house import Service
from tests.service.test_log import listening
from tests.service.test_sidecars import World


async def client_of(service: Service, state: Path, *tenants: str) -> ControlClient:
    answer = await service.operator.post("/v1/sidecars/join-tokens", {"tenants": list(tenants)})
    directory = StateDirectory(state)
    state.mkdir(mode=0o700)
    keys = directory.keys()
    enrolled = await enrol(service.http, join_token=answer["join_token"], name="node", keys=keys)
    return ControlClient(service.http, enrolled, keys, Clocks())


async def test_every_call_of_the_sidecars_client_is_understood(
    service: Service, tmp_path: Path
) -> None:
    world = await World(service).build()
    client = await client_of(service, tmp_path / "sidecar", world.tenant)
    assert client.enrolled.tenants == [world.tenant]

    page = await client.log_page("", 0)
    lease = await client.serving_lease(page.epoch, page.head_seq)
    assert lease.claims.seq >= page.head_seq

    granted = await world.grant(await service.artefacts())
    keys = await client.key_lease(granted["grant"])
    assert engine_salt(bytes(keys.keys[-1].secret)) == granted["salt"]

    names = [key.namespace for key in keys.keys]
    assert await client.retired(names) == frozenset()
    await service.operator.post(
        "/v1/revocations",
        {"axis": "document_version", "target": world.document, "reason": "x", "wait": False},
    )
    assert await client.retired(names) == {NamespaceId(name) for name in names[1:]}

    page = await client.log_page(page.epoch, page.head_seq)
    await client.acknowledge(
        AckRequest(epoch=page.epoch, seq=page.head_seq, state="fenced", loads_fenced=1)
    )
    event = SpoolEvent(
        count=1, prev="", at=Clocks().timestamp(), kind="load", outcome="hit", tenant=world.tenant
    )
    spool = secrets.token_hex(16)
    assert await client.intake(IntakeRequest(spool=spool, events=[event])) == 2


async def test_a_sidecar_whose_grant_is_not_for_it_is_refused(
    service: Service, tmp_path: Path
) -> None:
    world = await World(service).build()
    other = await service.tenant("globex")
    right = await client_of(service, tmp_path / "right", world.tenant)
    wrong = await client_of(service, tmp_path / "wrong", other)
    granted = await world.grant(await service.artefacts())
    assert (await right.key_lease(granted["grant"])).keys
    with pytest.raises(Refused):
        await wrong.key_lease(granted["grant"])


async def test_the_sidecars_client_follows_the_stream(service: Service, tmp_path: Path) -> None:
    client = await client_of(service, tmp_path / "sidecar")
    page = await client.log_page("", 0)
    from sidecar.control.client import http_client

    async with listening(service) as url, http_client(url, 5.0) as http:
        follower = ControlClient(
            http, client.enrolled, StateDirectory(tmp_path / "sidecar").keys(), Clocks()
        )
        stream = follower.stream(page.epoch, page.head_seq, 5.0)
        async with service.runtime.changes.begin(SYSTEM) as change:
            entry = await change.invalidate(
                kind=InvalidationKind.COMPONENTS, components=[new_component_id()]
            )
        assert follower.verifier.verify("strongroom-log+jws", await anext(stream)) == (
            entry.payload()
        )
        await stream.aclose()
