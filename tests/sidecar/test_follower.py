"""Following the log: fail closed on gaps and forks, after restarts, without a lease."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy.signing import Signer
from sidecar.clocks import Clocks
from sidecar.control.logstate import LogBroken
from strongroom.control import Typ
from strongroom.errors import LeaseExpired, Refused, Unavailable
from strongroom.log import InvalidationKind, LogEntry, LogHead
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.control_plane import FakeControlPlane
from tests.sidecar.harness import ManualClock, World, harness

KIND = InvalidationKind


async def applied(world: World, seq: int) -> None:
    assert await world.sidecar.log.reach(world.control.epoch, seq, 20)


def next_entry(control: FakeControlPlane, **changes: object) -> LogEntry:
    made = LogEntry(
        epoch=control.epoch,
        seq=control.head.seq + 1,
        prev=control.head.hash,
        at="t",
        kind=KIND.COMPONENTS,
        components=(control.component(),),
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("changes", [{"seq": 9}, {"prev": "0" * 64}], ids=["gap", "fork"])
async def test_a_gap_or_fork_in_the_stream_stops_all_serving(
    stored: Stored, changes: dict[str, object]
) -> None:
    world = stored.world
    good = next_entry(world.control)
    world.control.push(good)
    await applied(world, good.seq)
    assert await stored.hits("before", stored.grant()) == 288
    with pytest.raises(LogBroken):
        await world.sidecar.follower.take(
            world.control.signer.sign(Typ.LOG, next_entry(world.control, **changes).payload())
        )
    assert await stored.hits("after", stored.grant()) == -1
    assert not (await stored.engine.load("before", 0, 288)).ok
    assert world.sidecar.ring.namespaces() == frozenset()
    with pytest.raises(LogBroken):
        await world.sidecar.serving.renew()
    assert await stored.hits("still", stored.grant()) == -1


async def test_an_entry_of_another_signer_or_type_is_not_an_entry(stored: Stored) -> None:
    world = stored.world
    entry = next_entry(world.control)
    stranger = Signer(Ed25519PrivateKey.generate())
    spaced = entry.payload() + b" "
    for token in (
        stranger.sign(Typ.LOG, entry.payload()),
        world.control.signer.sign(Typ.GRANT, entry.payload()),
        world.control.signer.sign(Typ.LOG, spaced),
        world.control.signer.sign(Typ.LOG, b"{}"),
        "not a jws",
    ):
        with pytest.raises(Refused):
            await world.sidecar.follower.take(token)
    assert await stored.hits("good", stored.grant()) == 288


async def test_the_lease_pulls_what_a_held_up_stream_does_not_bring(stored: Stored) -> None:
    world = stored.world
    old = stored.grant()
    assert await stored.hits("before", old) == 288
    world.control.stream_held = True
    world.control.revoke(world.tenant.everyone)
    await world.sidecar.serving.renew()
    assert world.sidecar.log.head == world.control.head
    assert await stored.hits("after", old) == -1


async def test_grants_from_before_a_sidecars_start_are_dead(tmp_path: Path) -> None:
    control = FakeControlPlane()
    tenant = control.tenant()
    early = control.grant(tenant, PROMPT)
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        assert (await engine.open("known", early)).allowed
        control.revoke(control.component())
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        assert not (await engine.open("early", early)).allowed
        assert (await engine.open("late", control.grant(tenant, PROMPT))).allowed


async def test_nothing_is_served_before_the_first_verified_head(tmp_path: Path) -> None:
    control = FakeControlPlane()
    tenant = control.tenant()
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        assert (await engine.open("a", control.grant(tenant, PROMPT))).allowed
    control.away = True
    async with harness(tmp_path, control, wait=False) as world:
        engine = await world.engine()
        assert not (await engine.open("a", control.grant(tenant, PROMPT))).allowed
        control.away = False
        async with asyncio.timeout(20):
            await world.sidecar.serving_begun()
        assert (await engine.open("b", control.grant(tenant, PROMPT))).allowed


async def test_a_log_that_stepped_back_over_a_restart_serves_nothing_until_afresh(
    tmp_path: Path,
) -> None:
    control = FakeControlPlane()
    tenant = control.tenant()
    async with harness(tmp_path, control) as world:
        restored_from = (list(control.entries), control.head)
        await applied(world, control.revoke(control.component()).seq)
    control.entries, control.head = restored_from
    async with harness(tmp_path, control, wait=False) as world:
        engine = await world.engine()
        with pytest.raises(LogBroken):
            await world.sidecar.serving.renew()
        assert not (await engine.open("a", control.grant(tenant, PROMPT))).allowed
    async with harness(tmp_path, control, start_afresh=True) as world:
        engine = await world.engine()
        assert (await engine.open("a", control.grant(tenant, PROMPT))).allowed


async def test_a_fork_over_a_restart_serves_nothing(tmp_path: Path) -> None:
    control = FakeControlPlane()
    async with harness(tmp_path, control) as world:
        before = (list(control.entries), control.head)
        await applied(world, control.revoke(control.component()).seq)
    control.entries, control.head = before
    control.revoke(control.component())
    control.revoke(control.component())
    async with harness(tmp_path, control, wait=False) as world:
        with pytest.raises(LogBroken):
            await world.sidecar.serving.renew()
        with pytest.raises(Unavailable):
            world.sidecar.gate.require()


async def test_a_sidecar_continues_from_where_an_earlier_life_stood(tmp_path: Path) -> None:
    control = FakeControlPlane()
    async with harness(tmp_path, control):
        pass
    for _ in range(250):
        control.revoke(control.component())
    async with harness(tmp_path, control) as world:
        assert world.sidecar.log.head == control.head
        assert world.sidecar.follower.counts.entries >= 250


async def test_a_new_epoch_starts_afresh(stored: Stored) -> None:
    world = stored.world
    old = stored.grant()
    assert await stored.hits("before", old) == 288
    world.control.renew_epoch()
    await world.sidecar.serving.renew()
    assert await stored.hits("old", old) == -1
    assert not (await stored.engine.load("before", 0, 288)).ok
    assert await stored.hits("new", stored.grant()) == 288


async def test_after_a_new_epoch_the_service_is_asked_about_every_stored_namespace(
    stored: Stored,
) -> None:
    """What was destroyed before the new epoch is in no entry of its log."""
    world, control = stored.world, stored.world.control
    kept = control.component()
    other = control.grant(world.tenant, PROMPT, [(300, (), (kept,))])
    await stored.engine.compute_and_save("other", other)
    before = world.sidecar.store.namespaces()
    assert len(before) == 2
    del control.secrets[world.tenant.everyone]
    control.renew_epoch()
    await world.sidecar.serving.renew()
    async with asyncio.timeout(20):
        await control.until_acked("reclaimed", control.head.seq)
    assert world.sidecar.store.namespaces() == frozenset(other.namespaces)
    again = control.grant(world.tenant, PROMPT, [(300, (), (kept,))])
    assert await stored.hits("again", again) == 288


async def test_no_lease_no_service_and_the_wall_clock_cannot_help(tmp_path: Path) -> None:
    boot, wall = ManualClock(), [time.time()]
    async with harness(tmp_path, clocks=Clocks(boot, lambda: wall[0])) as world:
        engine = await world.engine()
        granted = world.control.grant(
            world.tenant, PROMPT, iat=int(wall[0]), exp=int(wall[0]) + 300
        )
        await engine.compute_and_save("saved", granted)
        world.control.away = True
        boot.advance(4.9)
        assert (await engine.open("within", granted)).tokens == 288
        boot.advance(0.2)
        wall[0] -= 3600
        assert not (await engine.open("after", granted)).allowed
        assert not (await engine.load("within", 0, 288)).ok
        with pytest.raises(LeaseExpired):
            world.sidecar.gate.require()
        world.control.away = False
        await world.sidecar.serving.renew()
        assert (await engine.open("again", granted)).allowed


async def test_a_lease_runs_from_when_the_question_was_sent(tmp_path: Path) -> None:
    boot = ManualClock()

    class Slow(FakeControlPlane):
        async def handle_async_request(self, request):  # type: ignore[no-untyped-def]
            answer = await super().handle_async_request(request)
            if request.url.path.endswith("/serving-lease"):
                boot.advance(3)  # the answer is three seconds on its way
            return answer

    async with harness(tmp_path, Slow(), clocks=Clocks(boot)) as world:
        asked = boot.now_ns
        await world.sidecar.serving.renew()
        assert world.sidecar.gate.deadline_ns == asked + 5 * 10**9


async def test_an_answer_to_another_question_is_no_lease(world: World) -> None:
    plane = world.control
    answers: list[httpx.Response] = []
    original = plane._serving_lease

    def replayed(sidecar: str, body: bytes) -> httpx.Response:
        answers.append(original(sidecar, body))
        return httpx.Response(200, content=answers[0].content)

    plane._serving_lease = replayed  # type: ignore[method-assign]
    await world.sidecar.serving.renew()
    with pytest.raises(Refused):
        await world.sidecar.serving.renew()


async def test_a_head_that_contradicts_the_chain_breaks_the_log(world: World) -> None:
    world.control.head = LogHead(world.control.epoch, world.control.head.seq, "0" * 64)
    with pytest.raises(LogBroken):
        await world.sidecar.serving.renew()
    with pytest.raises(Unavailable):
        world.sidecar.gate.require()


async def test_a_retired_sidecar_serves_nothing_for_the_rest_of_its_life(stored: Stored) -> None:
    world = stored.world
    mine = world.sidecar.enrolled.sidecar
    other = world.control.append(KIND.SIDECAR, sidecar="another")
    await applied(world, other.seq)
    assert await stored.hits("before", stored.grant()) == 288
    await applied(world, world.control.append(KIND.SIDECAR, sidecar=mine).seq)
    assert await stored.hits("after", stored.grant()) == -1
    await world.sidecar.serving.renew()
    assert await stored.hits("still", stored.grant()) == -1
