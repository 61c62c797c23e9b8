"""A sidecar exchanges its keys while it serves: the new one is in force, the old one nobody's."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from policy.signing import encode_base64url
from service.auth.errors import Unauthenticated
from service.log.stream import stream
from service.sidecars import store
from service.sidecars.keylease import KeyLeaseDesk
from strongroom.control import KeyLeaseRequest
from strongroom.errors import Refused
from strongroom.identity import new_component_id
from strongroom.log import InvalidationKind
from tests.service.house import Service
from tests.service.sidecar_party import SidecarParty, enrolled
from tests.service.test_sidecars import World

PATHS = [
    ("POST", "/serving-lease", {"nonce": "n" * 16}),
    ("POST", "/liveness", {"namespaces": []}),
    ("POST", "/acks", {"epoch": "", "seq": 0, "state": "fenced"}),
    ("POST", "/residency", {"run": "0" * 32, "number": 0, "amounts": []}),
    ("POST", "/audit", {"spool": "s" * 16, "events": []}),
    ("GET", "/invalidations", None),
    ("GET", "/invalidations/stream", None),
]


async def changed(service: Service, party: SidecarParty) -> SidecarParty:
    """`party` with new keys in force."""
    follower = party.with_new_keys()
    answer = await party.send("POST", "/keys", party.key_change(follower))
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"kid": follower.signer.kid}
    return follower


async def test_the_new_key_serves_and_a_stolen_old_one_fails_at_once(service: Service) -> None:
    world = await World(service).build()
    old = await enrolled(service, world.tenant)
    granted = await world.grant(await service.artefacts())
    before, _ = old.open_lease(await old.key_lease(granted["grant"]))

    new = await changed(service, old)
    assert (await new.serving_lease()).sidecar == old.id
    lease = await new.key_lease(granted["grant"])
    after, secrets = new.open_lease(lease)
    assert after.info.namespaces == before.info.namespaces
    assert len(secrets) == len(after.info.namespaces)

    # Whoever has the old signing key gets nothing more, and the old HPKE key opens nothing new.
    refusals = [await old.send(method, path, body) for method, path, body in PATHS]
    refusals.append(await old.key_lease(granted["grant"]))
    refusals.append(await old.send("POST", "/keys", old.key_change(old.with_new_keys())))
    assert {answer.status_code for answer in refusals} == {401}
    assert len({answer.text for answer in refusals}) == 1
    from cryptography.exceptions import InvalidTag

    with pytest.raises((InvalidTag, ValueError)):
        old.open_lease(lease)

    shown = await service.operator.get(f"/v1/sidecars/{old.id}")
    assert shown["keys_changed_at"] is not None
    (event,) = (await service.operator.get("/v1/audit/events", kind="sidecar.keys_changed"))[
        "items"
    ]
    assert event["details"] == {"from": old.signer.kid, "to": new.signer.kid}


async def test_what_was_proven_before_the_change_is_not_carried_out_after_it(
    service: Service,
) -> None:
    world = await World(service).build()
    old = await enrolled(service, world.tenant)
    granted = await world.grant(await service.artefacts())
    async with service.runtime.sessions() as session:
        proven = await service.runtime.roster.find(old.id)
    assert proven is not None
    runtime = service.runtime
    desk = KeyLeaseDesk(
        changes=runtime.changes,
        signer=runtime.signer,
        verifier=runtime.verifier,
        issuer=runtime.settings.issuer,
        lease_ms=1000,
    )
    import time

    ask = KeyLeaseRequest(granted["grant"], "n" * 16)
    assert await desk.lease(proven, ask, int(time.time()))
    await changed(service, old)
    with pytest.raises(Refused):
        await desk.lease(proven, ask, int(time.time()))
    async with runtime.database.writers() as session, session.begin():
        with pytest.raises(Refused):
            await store.next_lease(session, proven, "", 0)
        with pytest.raises(Unauthenticated):
            await store.require_current(session, proven)


async def test_a_stream_that_the_old_key_opened_ends_before_it_tells_anything_new(
    service: Service,
) -> None:
    party = await enrolled(service)
    proven = await service.runtime.roster.find(party.id)
    assert proven is not None

    async def may_go_on() -> bool:
        async with service.runtime.sessions() as session:
            return await store.is_current(session, proven)

    head = await party.log()
    runtime = service.runtime
    told = stream(runtime.tail, head.epoch, head.head_seq, 30.0, may_go_on, 100)
    assert (await anext(told)).startswith(b":")
    waiting = asyncio.ensure_future(anext(told, None))  # noqa: TID251
    await retire(service)
    assert b"data:" in (await waiting or b"")
    waiting = asyncio.ensure_future(anext(told, None))  # noqa: TID251
    await changed(service, party)
    await retire(service)
    assert await waiting is None


async def retire(service: Service) -> None:
    from service.auth.actor import SYSTEM

    async with service.runtime.changes.begin(SYSTEM) as change:
        await change.invalidate(kind=InvalidationKind.COMPONENTS, components=[new_component_id()])


async def test_only_the_holder_of_both_keys_changes_them(service: Service) -> None:
    party, other = await enrolled(service, name="one"), await enrolled(service, name="two")
    follower, third = party.with_new_keys(), party.with_new_keys()
    good = party.key_change(follower)

    async def refused(body: dict[str, str], status: int, sender: SidecarParty = party) -> None:
        answer = await sender.send("POST", "/keys", body)
        assert answer.status_code == status, answer.text

    # Somebody else's key, a change of another sidecar, of other keys, after another key.
    await refused(good | {"possession": party.key_change(third)["possession"]}, 422)
    await refused(good | {"possession": "x"}, 422)
    await refused(good, 422, other)
    await refused(party.key_change(follower, sidecar=other.id), 422)
    await refused(good | {"hpke_key": party.key_change(third)["hpke_key"]}, 422)
    await refused(good | {"hpke_key": "A" * 43}, 422)
    await refused(good | {"signing_key": "AAAA"}, 422)
    await refused(party.key_change(follower, replaces="A" * 43), 409)
    # The new key alone is nobody's yet.
    await refused(good, 401, follower)
    # One of the two stays, or is another sidecar's.
    follower.hpke = party.hpke
    await refused(party.key_change(follower), 409)
    thief = party.with_new_keys()
    thief.signer = other.signer
    await refused(party.key_change(thief), 409)
    assert (await party.serving_lease()).sidecar == party.id


async def test_said_again_by_the_new_key_it_changes_nothing(service: Service) -> None:
    old = await enrolled(service)
    new = old.with_new_keys()
    ask = old.key_change(new)
    assert (await old.send("POST", "/keys", ask)).status_code == 200
    for _ in range(2):
        assert (await new.send("POST", "/keys", ask)).status_code == 200
    events = (await service.operator.get("/v1/audit/events", kind="sidecar.keys_changed"))["items"]
    assert len(events) == 1


async def test_a_key_that_was_a_sidecars_is_taken_for_none_again(service: Service) -> None:
    old = await enrolled(service)
    new = await changed(service, old)
    answer = await new.send("POST", "/keys", new.key_change(old))
    assert answer.status_code == 409
    token = (await service.operator.post("/v1/sidecars/join-tokens", {}))["join_token"]
    again = SidecarParty(service.http, "again")
    again.signer = old.signer
    assert (await again.enrol(token)).status_code == 409
    assert encode_base64url(old.signer.public_key) != encode_base64url(new.signer.public_key)


async def test_of_two_changes_at_once_one_is_made(service: Service) -> None:
    party = await enrolled(service)
    followers = [party.with_new_keys() for _ in range(5)]
    asks = [party.send("POST", "/keys", party.key_change(follower)) for follower in followers]
    answers: list[httpx.Response] = await asyncio.gather(*asks)
    assert [answer.status_code for answer in answers].count(200) == 1
    winner = followers[[answer.status_code for answer in answers].index(200)]
    assert (await winner.serving_lease()).sidecar == party.id
    losers: list[Any] = [each for each in followers if each is not winner]
    for loser in losers:
        assert (await loser.send("GET", "/invalidations")).status_code == 401


async def test_a_revoked_sidecar_changes_no_keys(service: Service) -> None:
    party = await enrolled(service)
    await service.operator.post(
        "/v1/revocations", {"axis": "sidecar", "target": party.id, "reason": "stolen"}
    )
    answer = await party.send("POST", "/keys", party.key_change(party.with_new_keys()))
    assert answer.status_code == 401
