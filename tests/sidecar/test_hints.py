"""Hints over the socket: who may give them, what they move, and that nothing shows outside."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import grants
from policy.signing import Signer
from sidecar.degrade.conditions import Condition, Tripped
from sidecar.engines.hints import Allowance, HintCounts, HintLimits, Hints
from sidecar.prefetch.budget import Denial
from sidecar.prefetch.statistics import PrefetchStatistics
from storage.block import BlockAddress
from storage.header import MAGIC
from storage.tiers.protocol import TierName
from strongroom.blocks import pack_tokens
from strongroom.grant import EngineDigests, Operation
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind
from strongroom.wire.frames import (
    PROTOCOL_VERSION,
    Cancel,
    Failure,
    Finish,
    Greet,
    Hint,
    Load,
    Open,
    Part,
    Ping,
    Pong,
    SidecarFrame,
    Unhint,
)
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.control_plane import MODEL, TEMPLATE, TOKENIZER, Granted
from tests.sidecar.harness import ENGINE, MIB, RefusedHello, Wire, World, block_content, harness
from tests.sidecar.prefetch_support import GatedShelf, until
from tests.storage.support import FakeClock

GATEWAY = "gateway-1"
OTHER = "ab" * 32
BLOCKS = 5


@dataclass
class Apart:
    """`stored`, whose blocks are on NVMe alone, a gateway's token, and a gated prefetcher."""

    stored: Stored
    token: str
    shelf: GatedShelf
    addresses: list[BlockAddress]

    @property
    def world(self) -> World:
        return self.stored.world

    @property
    def scheduler(self) -> Wire:
        return self.stored.engine.scheduler

    @property
    def prefetch(self) -> PrefetchStatistics:
        return self.world.sidecar.statistics().prefetch

    def in_host(self) -> int:
        store = self.world.sidecar.store
        return sum(store.tier_of(address) is TierName.HOST for address in self.addresses)

    async def gateway(self, **changes: object) -> Wire:
        fields: dict[str, object] = {
            "version": PROTOCOL_VERSION,
            "name": GATEWAY,
            "token": self.token,
            "engine": ENGINE,
        }
        return await Wire.connect(
            self.world.socket_path,
            Greet(**(fields | changes)),  # type: ignore[arg-type]
        )

    async def quiet(self) -> None:
        await until(lambda: not self.prefetch.pending)

    def settled(self) -> bool:
        assert self.world.sidecar.prefetcher.faults() == ()
        return self.prefetch.pending_bytes == 0


@pytest.fixture
async def apart(stored: Stored) -> AsyncIterator[Apart]:
    async with set_apart(stored) as made:
        yield made


class set_apart:  # noqa: N801 - used as a context manager
    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    async def __aenter__(self) -> Apart:
        world = self._stored.world
        path = world.directory / "tokens" / f"{GATEWAY}.gateway"
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(32))
        store, prefetcher = world.sidecar.store, world.sidecar.prefetcher
        await store.flush()
        host = store._residency.host
        addresses = [row.resident.address for row in host._index.rows()]
        for address in addresses:
            assert host.evict(address)
        assert len(addresses) == BLOCKS
        self.shelf = GatedShelf(prefetcher._store)
        prefetcher._store = self.shelf
        return Apart(self._stored, path.read_text(), self.shelf, addresses)

    async def __aexit__(self, *_: object) -> None:
        for barrier in self.shelf.barriers.values():
            barrier.lifted.set()


def hint(granted: Granted, name: str = "h", start_in_ms: int = 0, **changes: object) -> Hint:
    fields: dict[str, object] = {
        "hint": name,
        "grant": granted.token,
        "salt": granted.salt,
        "tokens": pack_tokens(granted.prompt),
        "adapter": "none",
        "start_in_ms": start_in_ms,
    }
    return Hint(**(fields | changes))  # type: ignore[arg-type]


async def frames_before_pong(wire: Wire, number: int) -> list[SidecarFrame]:
    """Everything that came before the answer to a ping, leases apart."""
    wire.send(Ping(number))
    await wire.expect(Pong)
    found, wire.unread = wire.unread, []
    return [frame for frame in found if type(frame).__name__ != "Lease"]


async def judged(apart: Apart, count: int) -> None:
    """So many hints have come to their end, whatever it was."""
    counts = apart.world.sidecar.sessions.hints.counts
    await until(lambda: counts.begun + counts.denied + counts.dropped == count)
    await apart.quiet()


@pytest.mark.parametrize("sender", ["scheduler", "gateway"])
async def test_a_hint_brings_the_prompt_into_host_memory_and_the_load_uses_it(
    apart: Apart, sender: str
) -> None:
    wire = apart.scheduler if sender == "scheduler" else await apart.gateway()
    granted = apart.stored.grant()
    wire.send(hint(granted))
    await judged(apart, 1)
    assert apart.in_host() == BLOCKS
    assert await frames_before_pong(wire, 1) == []
    assert (apart.prefetch.completed, apart.prefetch.used) == (BLOCKS, 0)
    assert await apart.stored.hits("r", granted) == 288
    restored = await apart.stored.engine.load("r", 0, 288)
    assert restored.ok
    assert restored.blocks[64] == block_content(PROMPT, 64, 128)
    assert (apart.prefetch.used, apart.prefetch.wasted) == (BLOCKS, 0)
    assert apart.world.sidecar.store.statistics().hits == {TierName.HOST: BLOCKS}
    assert apart.settled()
    if sender == "gateway":
        await wire.close()


async def test_an_open_that_hits_nvme_brings_it_before_the_load(apart: Apart) -> None:
    assert await apart.stored.hits("r", apart.stored.grant()) == 288
    await until(lambda: apart.prefetch.completed == BLOCKS)
    assert (await apart.stored.engine.load("r", 0, 288)).ok
    assert (apart.prefetch.used, apart.prefetch.deadline_missed) == (BLOCKS, 0)
    assert apart.settled()


async def test_without_a_prefetch_nothing_counts_and_nothing_is_reserved(apart: Apart) -> None:
    apart.world.sidecar.prefetcher.pause("test")
    assert await apart.stored.hits("r", apart.stored.grant()) == 288
    assert (await apart.stored.engine.load("r", 0, 288)).ok
    assert (apart.prefetch.issued, apart.prefetch.used) == (0, 0)
    assert apart.prefetch.refused == {Denial.PAUSED: 1}
    assert apart.settled()


def digests(**changes: str) -> EngineDigests:
    return msgspec.structs.replace(EngineDigests(MODEL, "none", TOKENIZER, TEMPLATE), **changes)


async def wrong_hints(apart: Apart) -> dict[str, Hint]:
    """Each differs from a good hint in one way."""
    stored, world = apart.stored, apart.world
    good = stored.grant()
    stranger = Signer(Ed25519PrivateKey.generate())
    dead = stored.grant()
    world.control.append(InvalidationKind.SUBJECT, tenant=world.tenant.id, subject="bob")
    seq = world.control.append(InvalidationKind.SUBJECT, tenant=world.tenant.id, subject="eve").seq
    assert await world.sidecar.log.reach(world.control.epoch, seq, 20)
    eve = grants.mint(msgspec.structs.replace(dead.claims, sub="eve"), world.control.signer)
    return {
        "another tenant's": hint(world.control.grant(world.control.tenant(), PROMPT)),
        "signed by nobody": hint(good, grant=grants.mint(good.claims, stranger)),
        "no grant": hint(good, grant=""),
        "another engine's": hint(stored.grant(engine=digests(model=OTHER))),
        "another adapter": hint(good, adapter=OTHER),
        "another salt": hint(good, salt="other"),
        "another prompt": hint(good, tokens=pack_tokens([*PROMPT[:-1], 7])),
        "write alone": hint(stored.grant(ops=(Operation.WRITE,))),
        "another epoch": hint(stored.grant(epoch="another")),
        "revoked": hint(dead, grant=eve),
        "expired": hint(stored.grant(iat=1, exp=2)),
        "unprintable": hint(good, name="a\nb"),
        "far away": hint(good, start_in_ms=10**7),
        "beyond all numbers": hint(good, start_in_ms=2**62),
    }


async def test_a_wrong_hint_moves_nothing_and_is_answered_like_a_good_one(apart: Apart) -> None:
    gateway = await apart.gateway()
    for sender in (gateway, apart.scheduler):
        for number, (name, wrong) in enumerate((await wrong_hints(apart)).items()):
            before = apart.world.sidecar.sessions.hints.counts.taken
            sender.send(wrong)
            await until(lambda: apart.world.sidecar.sessions.hints.counts.taken > before)  # noqa: B023
            assert await frames_before_pong(sender, number) == [], name
            await apart.quiet()
            assert (apart.in_host(), apart.prefetch.issued) == (0, 0), name
    gateway.send(hint(apart.stored.grant(), name="good"))
    await until(lambda: apart.in_host() == BLOCKS)
    assert await frames_before_pong(gateway, 99) == []
    await gateway.close()


async def test_a_verdict_is_the_same_with_and_without_a_hint(apart: Apart) -> None:
    verdicts = []
    for number, hinted in enumerate((False, True)):
        granted = apart.stored.grant()
        if hinted:
            apart.scheduler.send(hint(granted, name=f"h{number}"))
        verdicts.append(await apart.stored.engine.open(f"r{number}", granted))
    assert msgspec.structs.replace(verdicts[1], request="r0") == verdicts[0]
    other = apart.world.control.grant(apart.world.control.tenant(), PROMPT)
    apart.scheduler.send(hint(other, name="theirs"))
    assert await apart.stored.hits("theirs", other) == 0


async def test_a_hint_is_on_record_as_a_hint_and_a_denied_one_as_denied(apart: Apart) -> None:
    granted = apart.stored.grant()
    apart.scheduler.send(hint(granted))
    apart.scheduler.send(hint(granted, name="bad", salt="other"))
    await judged(apart, 2)
    counts = apart.world.sidecar.audit.counts
    assert counts["hint", "hit", ""] == 1
    assert counts["denied", "refused", "identity"] == 1
    assert apart.world.sidecar.statistics().hints.denied == 1


async def test_a_hint_without_a_whole_engine_moves_nothing(apart: Apart) -> None:
    gateway = await apart.gateway()
    strange = await apart.gateway(engine="never-seen")
    strange.send(hint(apart.stored.grant()))
    await judged(apart, 1)
    await apart.stored.engine.workers[0].close()
    (joined,) = apart.world.sidecar.sessions
    await until(lambda: not joined.workers)
    gateway.send(hint(apart.stored.grant()))
    await judged(apart, 2)
    assert (apart.in_host(), apart.prefetch.issued) == (0, 0)
    for wire in (gateway, strange):
        assert await frames_before_pong(wire, 1) == []
        await wire.close()


# Who may give hints


async def test_the_gateways_token_opens_its_session_and_no_other_does(apart: Apart) -> None:
    wire = await apart.gateway()
    assert wire.welcome is not None
    assert (wire.welcome.staging_bytes, wire.staging) == (0, None)
    scheduler = apart.scheduler.welcome
    assert scheduler is not None
    assert wire.welcome.session != scheduler.session
    await wire.close()
    told = set()
    for changes in (
        {"token": "wrong"},
        {"token": ""},
        {"token": apart.world.token},
        {"name": "unknown"},
        {"name": ENGINE},
        {"name": ENGINE, "token": apart.world.token},
        {"name": f"../tokens/{GATEWAY}"},
        {"engine": ""},
        {"engine": "../x"},
    ):
        with pytest.raises(RefusedHello) as caught:
            await apart.gateway(**changes)
        told.add(caught.value.frame)
    assert {frame.code for frame in told if isinstance(frame, Failure)} == {"refused"}
    assert len(told) == 1
    with pytest.raises(RefusedHello):
        await apart.gateway(version=2)
    # And a gateway's token opens no engine's session.
    for engine in (ENGINE, GATEWAY, f"{GATEWAY}.gateway"):
        with pytest.raises(RefusedHello):
            await apart.world.connect("scheduler", engine=engine, token=apart.token)


async def test_a_gateways_token_file_that_others_can_read_opens_nothing(apart: Apart) -> None:
    path = apart.world.directory / "tokens" / f"{GATEWAY}.gateway"
    path.chmod(0o640)
    with pytest.raises(RefusedHello):
        await apart.gateway()
    path.chmod(0o600)
    await (await apart.gateway()).close()


@pytest.mark.parametrize(
    "frame",
    [
        Open("r", "", "", b"", "none"),
        Load("r", 1, 0, 64),
        Cancel("r"),
        Finish("r"),
        Greet(PROTOCOL_VERSION, GATEWAY, "", ENGINE),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_a_gateway_may_do_nothing_but_hint(
    apart: Apart, frame: Open | Load | Cancel | Finish | Greet
) -> None:
    assert await apart.stored.hits("r", apart.stored.grant()) == 288
    wire = await apart.gateway()
    wire.send(frame)
    assert (await wire.expect(Failure)).code == "protocol"
    with pytest.raises(asyncio.IncompleteReadError):
        await wire.receive()
    await wire.close()
    assert (await apart.stored.engine.load("r", 0, 64)).ok


@pytest.mark.parametrize("name", ["", "x" * 257])
async def test_a_hint_without_a_name_breaks_the_protocol(apart: Apart, name: str) -> None:
    wire = await apart.gateway()
    wire.send(hint(apart.stored.grant(), name=name))
    assert (await wire.expect(Failure)).field == "hint"
    await wire.close()


async def test_a_worker_gives_no_hints(apart: Apart) -> None:
    wire = apart.stored.engine.workers[0]
    wire.send(hint(apart.stored.grant()))
    assert (await wire.expect(Failure)).code == "protocol"


# How it ends


@pytest.mark.parametrize("how", ["unhint", "same name", "connection"])
async def test_a_hint_that_is_taken_back_stops_and_reserves_nothing(apart: Apart, how: str) -> None:
    gateway = await apart.gateway()
    barrier = apart.shelf.at("before 2")
    gateway.send(hint(apart.stored.grant()))
    await barrier.arrived.wait()
    assert apart.prefetch.on_its_way_bytes > 0
    match how:
        case "unhint":
            gateway.send(Unhint("other"))
            gateway.send(Unhint("h"))
        case "same name":
            gateway.send(hint(apart.stored.grant(), salt="other"))
        case _:
            await gateway.close()
    await apart.quiet()
    await until(lambda: apart.prefetch.wasted == apart.prefetch.completed)
    assert apart.prefetch.completed >= 2
    assert apart.prefetch.completed + apart.prefetch.cancelled == BLOCKS
    assert apart.settled()
    await gateway.close()


@pytest.mark.parametrize("how", ["cancel", "finish", "same name", "scheduler gone"])
async def test_a_request_that_ends_stops_its_prefetch(apart: Apart, how: str) -> None:
    barrier = apart.shelf.at("before 2")
    assert await apart.stored.hits("r", apart.stored.grant()) == 288
    await barrier.arrived.wait()
    match how:
        case "cancel":
            apart.scheduler.send(Cancel("r"))
        case "finish":
            apart.scheduler.send(Finish("r"))
        case "same name":
            await apart.stored.hits("r", apart.stored.grant(), salt="other")
        case _:
            await apart.scheduler.close()
    await apart.quiet()
    assert apart.prefetch.completed >= 2
    assert apart.prefetch.completed + apart.prefetch.cancelled == BLOCKS
    assert apart.prefetch.wasted == apart.prefetch.completed
    assert apart.settled()


def by_component(world: World) -> int:
    return world.control.revoke(world.tenant.everyone).seq


def by_subject(world: World) -> int:
    return world.control.append(
        InvalidationKind.SUBJECT, tenant=world.tenant.id, subject="alice"
    ).seq


def of_somebody_else(world: World) -> int:
    other = world.control.tenant()
    return world.control.revoke(other.everyone).seq


PLACES = ["enter", "before 0", "after 0", "before 3", "after 4", "leave"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["hint", "open"])
async def test_a_revocation_at_any_await_stops_it_and_waits_for_nothing(
    apart: Apart, place: str, what: str
) -> None:
    world, barrier = apart.world, apart.shelf.at(place)
    if what == "hint":
        apart.scheduler.send(hint(apart.stored.grant()))
    else:
        assert await apart.stored.hits("r", apart.stored.grant()) == 288
    await barrier.arrived.wait()
    await until_applied(world, of_somebody_else(world))
    assert apart.prefetch.pending == 1
    seq = by_subject(world)
    # The barrier is still down: neither the fence nor its acknowledgement waits for it.
    await world.control.until_acked("fenced", seq)
    await apart.quiet()
    brought = apart.in_host()
    assert not brought or place != "enter"
    assert apart.settled()


async def test_a_revoked_namespace_is_nowhere_after_a_hint_for_it(apart: Apart) -> None:
    world, barrier = apart.world, apart.shelf.at("before 2")
    granted = apart.stored.grant()
    apart.scheduler.send(hint(granted))
    await barrier.arrived.wait()
    seq = by_component(world)
    await world.control.until_acked("reclaimed", seq)
    barrier.lifted.set()
    await apart.quiet()
    assert apart.in_host() == 0
    assert not world.sidecar.store.namespaces()
    assert await apart.stored.hits("again", granted) == -1
    assert apart.settled()


async def test_a_revocation_while_a_hint_is_judged_lets_nothing_move(apart: Apart) -> None:
    world = apart.world
    world.sidecar.ring.drop_all()
    hold = world.control.before_key_lease = asyncio.Event()
    apart.scheduler.send(hint(apart.stored.grant()))
    await world.control.key_lease_waiting.wait()
    await until_applied(world, by_subject(world))
    hold.set()
    await judged(apart, 0)
    await until(lambda: not apart.world.sidecar.sessions.hints.prefetcher.statistics().pending)
    assert (apart.in_host(), apart.prefetch.issued) == (0, 0)


async def until_applied(world: World, seq: int) -> None:
    assert await world.sidecar.log.reach(world.control.epoch, seq, 20)


# Bounds


async def test_too_many_hints_at_once_are_dropped_and_opens_go_on(tmp_path: Path) -> None:
    async with harness(tmp_path, hints_judged_max=1, hints_max=2) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == BLOCKS
        async with set_apart(Stored(world, engine, PROMPT)) as apart:
            counts = world.sidecar.sessions.hints.counts
            world.sidecar.ring.drop_all()
            hold = world.control.before_key_lease = asyncio.Event()
            for number in range(3):
                apart.scheduler.send(hint(granted, name=f"h{number}"))
            await world.control.key_lease_waiting.wait()
            await until(lambda: counts.dropped == 2)
            assert (await engine.open("denied", granted, salt="other")).allowed is False
            hold.set()
            world.control.before_key_lease = None
            await judged(apart, 3)
            assert counts.begun == 1
            apart.scheduler.send(hint(granted, name="second"))
            await judged(apart, 4)
            apart.scheduler.send(hint(granted, name="third"))
            await judged(apart, 5)
            assert (counts.begun, counts.dropped) == (2, 3)


async def test_more_hints_in_a_second_than_allowed_are_dropped_unlooked_at(apart: Apart) -> None:
    (joined,) = apart.world.sidecar.sessions
    clock = FakeClock()
    desk = apart.world.sidecar.sessions.hints
    few = replace(
        desk, clock=clock, counts=HintCounts(), limits=replace(desk.limits, per_s=3, judged_max=99)
    )
    hints = Hints(few, joined.facts, few.allowance())
    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            hints.take(hint(apart.stored.grant(), name=f"h{number}"), tasks)
        assert few.counts.dropped == 2
        clock.advance_s(0.5)
        for number in range(3):
            hints.take(hint(apart.stored.grant(), name=f"later{number}"), tasks)
        assert few.counts.dropped == 4
        clock.advance_s(10)
        for number in range(4):
            hints.take(hint(apart.stored.grant(), name=f"last{number}"), tasks)
        assert few.counts.dropped == 5
    hints.close()
    assert few.counts.begun == 7
    assert apart.world.sidecar.audit.counts["hint", "hit", ""] == 7
    await apart.quiet()


@pytest.mark.parametrize("limit", ["per_s", "alive_max", "judged_max"])
def test_a_flood_of_hints_leaves_the_others_their_part(limit: str) -> None:
    """Four at a time, in a second or at once: the flood has four, and another still finds two."""
    limits = HintLimits(alive_max=99, judged_max=99, per_s=99, overdue_ns=10**10, horizon_ns=10**12)
    clock = FakeClock()
    allowance = Allowance(replace(limits, **{limit: 4}), clock)
    flood, quiet = ComponentId("f" * 32), ComponentId("a" * 32)
    assert [allowance.take(flood) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [allowance.take(quiet) for _ in range(2)] == [True] * 2
    assert allowance.take(flood) is False
    assert allowance.alive == 6
    if limit == "per_s":
        clock.advance_s(10)
    for tenant in (flood, flood, flood, flood, quiet, quiet):
        allowance.judged(tenant)
        allowance.ended(tenant)
    assert allowance.alive == 0
    assert [allowance.take(flood) for _ in range(5)] == [True] * 4 + [False]


async def test_the_hints_of_a_tenant_are_counted_for_the_tenant_that_their_grants_name(
    apart: Apart,
) -> None:
    (joined,) = apart.world.sidecar.sessions
    desk = apart.world.sidecar.sessions.hints
    few = replace(
        desk, clock=FakeClock(), counts=HintCounts(), limits=replace(desk.limits, per_s=4)
    )
    hints = Hints(few, joined.facts, few.allowance())
    quiet = apart.world.control.grant(apart.world.control.tenant(), PROMPT)
    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            hints.take(hint(apart.stored.grant(), name=f"f{number}"), tasks)
        assert few.counts.dropped == 2
        hints.take(hint(quiet, name="q"), tasks)
        assert few.counts.dropped == 2, "somebody else's is looked at"
    hints.close()
    assert few.allowance().alive == 0
    await apart.quiet()


async def test_a_hint_keeps_no_prompt(apart: Apart) -> None:
    apart.scheduler.send(hint(apart.stored.grant()))
    await judged(apart, 1)
    (joined,) = apart.world.sidecar.sessions
    assert joined.scheduler is not None
    (hinted,) = joined.scheduler._hints._alive.values()
    assert hinted.request.prompt is not None
    assert hinted.request.prompt.tokens == b""
    assert hinted.request.prompt.grant == ""


# Policies, with a real load


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
async def test_a_load_meets_a_prefetch_under_way_as_the_policy_says(
    tmp_path: Path, policy: str
) -> None:
    async with harness(tmp_path, prefetch_policy=policy, prefetch_timeout_base_s=0.01) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == BLOCKS
        async with set_apart(Stored(world, engine, PROMPT)) as apart:
            barrier = apart.shelf.at("before 1")
            assert (await engine.open("r", granted)).tokens == 288
            await barrier.arrived.wait()
            wire = engine.workers[0]
            wire.send(Load("r", 2, 64, 288))
            if policy == "wait_complete":
                await until(lambda: apart.prefetch.deadline_missed == 1)
                assert await frames_before_pong(wire, 1) == []
                barrier.lifted.set()
            found = [await wire.expect(Part) for _ in range(4)]
            assert [part.start for part in found] == [64, 128, 192, 256]
            assert apart.prefetch.used or policy != "wait_complete"
            barrier.lifted.set()
            await apart.quiet()
            found_counts = apart.prefetch
            if policy == "best_effort":
                assert found_counts.completed + found_counts.cancelled == BLOCKS
            else:
                assert (found_counts.completed, found_counts.cancelled) == (BLOCKS, 0)
            if policy == "wait_complete":
                assert found_counts.used == 4
            assert found_counts.deadline_missed >= 1
            assert apart.world.sidecar.prefetcher.faults() == ()


async def test_a_load_that_waits_for_a_prefetch_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    async with harness(tmp_path, prefetch_policy="wait_complete") as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == BLOCKS
        async with set_apart(Stored(world, engine, PROMPT)) as apart:
            barrier = apart.shelf.at("before 0")
            gateway = await apart.gateway()
            gateway.send(hint(apart.stored.grant(sub="bob")))  # it goes on
            await barrier.arrived.wait()
            assert (await engine.open("r", granted)).tokens == 288
            engine.workers[0].send(Load("r", 1, 0, 64))
            await until(lambda: apart.prefetch.deadline_missed == 1)
            seq = by_subject(world)
            async with asyncio.timeout(20):
                await world.control.until_acked("fenced", seq)
            await gateway.close()
            await apart.quiet()
            assert apart.settled()


async def test_far_hints_of_one_tenant_leave_others_their_prefetch(tmp_path: Path) -> None:
    async with harness(tmp_path, prefetch_pending_max=16, hints_judged_max=64) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == BLOCKS
        async with set_apart(Stored(world, engine, PROMPT)) as apart:
            gateway = await apart.gateway()
            for number in range(32):
                gateway.send(hint(granted, name=f"far-{number}", start_in_ms=290_000))
            await until(lambda: sum(apart.prefetch.refused.values()) == 30)
            denied = dict(apart.prefetch.refused)
            assert denied == {Denial.TENANT_PENDING: 30}
            assert apart.prefetch.pending == 2
            # The tenant's own request is not refused for its hints' sake, nor is anybody else's.
            assert (await engine.open("r", granted)).tokens == 288
            await until(lambda: apart.prefetch.issued > 0)
            assert world.sidecar.server._gateways._allowances[GATEWAY].alive == 2
            await gateway.close()
            await apart.quiet()


async def test_a_hint_that_starts_after_any_grants_end_is_dropped_and_not_kept(
    apart: Apart,
) -> None:
    apart.scheduler.send(hint(apart.stored.grant(), start_in_ms=2**62))
    await judged(apart, 1)
    assert apart.world.sidecar.sessions.hints.counts.dropped == 1
    (joined,) = apart.world.sidecar.sessions
    assert joined.scheduler is not None
    assert len(joined.scheduler._hints) == 0


async def test_a_hint_of_which_no_prefetch_comes_is_not_kept(apart: Apart) -> None:
    apart.world.sidecar.prefetcher.pause("a test")
    apart.scheduler.send(hint(apart.stored.grant()))
    await until(lambda: apart.prefetch.refused.get(Denial.PAUSED) == 1)
    (joined,) = apart.world.sidecar.sessions
    assert joined.scheduler is not None
    assert len(joined.scheduler._hints) == 0


async def test_a_hint_is_dropped_while_the_spool_is_crowded(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = apart.world.sidecar.spool
    records = spool.next_count
    crowded = replace(spool._settings, bytes_max=spool.size_bytes * 2)
    with monkeypatch.context() as full:
        full.setattr(spool, "_settings", crowded)
        apart.scheduler.send(hint(apart.stored.grant(), name="one"))
        await judged(apart, 1)
        assert apart.world.sidecar.sessions.hints.counts.dropped == 1
        assert spool.next_count == records
    apart.scheduler.send(hint(apart.stored.grant(), name="two"))
    await judged(apart, 2)
    assert apart.world.sidecar.sessions.hints.counts.begun == 1


# Gateways and their sessions


async def test_one_gateway_does_not_shut_out_engines_and_its_newest_session_counts(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, connections_max=16) as world:
        token = secrets.token_urlsafe(32)
        for name in (GATEWAY, "gateway-2"):
            path = world.directory / "tokens" / f"{name}.gateway"
            path.touch(mode=0o600)
            path.write_text(token)

        async def greet(name: str, engine: str) -> Wire:
            hello = Greet(PROTOCOL_VERSION, name, token, engine)
            return await Wire.connect(world.socket_path, hello)  # type: ignore[arg-type]

        first = await greet(GATEWAY, ENGINE)
        for _ in range(40):
            newer = await greet(GATEWAY, ENGINE)
            assert (await first.expect(Failure)).code == "conflict"
            await first.close()
            first = newer
        others = [await greet(GATEWAY, "another")]
        # Two of four places: the rest is left to other gateways.
        with pytest.raises(RefusedHello):
            await greet(GATEWAY, "a-third")
        others += [await greet("gateway-2", ENGINE), await greet("gateway-2", "another")]
        engine = await world.engine()
        assert (await engine.open("r", world.control.grant(world.tenant, PROMPT))).allowed
        for wire in (first, *others):
            await wire.close()
        await until(lambda: not world.sidecar.server._gateways._open)
        await (await greet(GATEWAY, "a-third")).close()


async def test_what_a_gateway_may_ask_for_is_counted_over_all_its_sessions(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, hints_max=2) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == BLOCKS
        async with set_apart(Stored(world, engine, PROMPT)) as apart:
            counts = world.sidecar.sessions.hints.counts
            one, two = await apart.gateway(), await apart.gateway(engine="another")
            for number in range(2):
                one.send(hint(granted, name=f"h{number}", start_in_ms=60_000))
            await until(lambda: counts.begun == 2)
            two.send(hint(granted, name="h9", start_in_ms=60_000))
            await until(lambda: counts.dropped == 1)
            await one.close()
            await until(lambda: not apart.prefetch.pending)
            apart.scheduler.send(hint(granted, name="mine", start_in_ms=60_000))
            # An engine's allowance is its own.
            await until(lambda: counts.begun == 3)
            await two.close()


async def test_damage_that_a_prefetch_finds_is_on_record_and_trips_as_damage_that_a_load_finds(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        prompts = [[number] * 64 for number in range(4)]
        for number, prompt in enumerate(prompts):
            granted = world.control.grant(world.tenant, prompt)
            assert await engine.compute_and_save(f"saved-{number}", granted) == 1
        store = world.sidecar.store
        await store.flush()
        for row in list(store._residency.host._index.rows()):
            assert store._residency.host.evict(row.resident.address)
        assert damage_records(world.directory / "nvme") == len(prompts)
        seen = store.statistics().quarantined
        for number, prompt in enumerate(prompts[:3]):
            verdict = await engine.open(f"b{number}", world.control.grant(world.tenant, prompt))
            assert verdict.tokens == 64
            await until(lambda: not world.sidecar.statistics().prefetch.pending)
        assert store.statistics().quarantined == seen + 3
        counts = world.sidecar.audit.counts
        await until(lambda: counts["corrupt", "failed", "integrity"] == 3)
        assert isinstance(world.sidecar.watch.breakers.states()[Condition.CHECKSUM], Tripped)


def damage_records(folder: Path) -> int:
    """Flip a bit of every record's header under `folder`; how many those were."""
    damaged = 0
    for path in folder.rglob("*"):
        if not path.is_file() or path.stat().st_size < MIB:
            continue
        raw = bytearray(path.read_bytes())
        at = raw.find(MAGIC)
        while at >= 0:
            raw[at + 100] ^= 1
            damaged += 1
            at = raw.find(MAGIC, at + 4096)
        with path.open("r+b") as file:
            file.write(raw)
    return damaged


async def test_what_an_engine_may_ask_for_is_counted_over_all_its_connections(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as world:
        sessions = world.sidecar.sessions
        desk, counts = sessions.hints, sessions.hints.counts
        # A second that does not end.
        one = replace(desk, clock=FakeClock(), limits=replace(desk.limits, per_s=1))
        sessions._hints[ENGINE] = one.allowance()
        granted = world.control.grant(world.tenant, PROMPT)
        for number in range(3):
            engine = await world.engine()
            engine.scheduler.send(hint(granted, name=f"h{number}"))
            await frames_before_pong(engine.scheduler, 1)
            # No connection of it is left, and it is forgotten.
            await engine.close()
            world.engines.remove(engine)
            await until(lambda: len(sessions) == 0)
        assert (counts.taken, counts.dropped) == (3, 2)
