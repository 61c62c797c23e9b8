"""The second look at a release: with the first defence broken on purpose, it still stops it.

Each test breaks the key path the way a fault of ours could, and shows both halves: without the
second look the bytes go out, with it they do not, the breaker trips and everything is refused.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

import sidecar.transfers.load
from sidecar.clocks import Clocks
from sidecar.control.logstate import LogState
from sidecar.degrade.conditions import Condition
from sidecar.degrade.sentry import REMEMBERED_MAX, Sentry
from sidecar.degrade.stance import Action
from sidecar.lookup.request import ChainedBlock, Judged
from sidecar.record.events import EventKind, Events
from sidecar.record.reasons import Reason
from sidecar.revocation.invalidation import Effect, Invalidation
from sidecar.transfers.depot import Shard
from storage.block import BlockContext
from storage.envelope import Opener, aad_prefix
from storage.header import Header
from storage.keyring import KeyRing
from strongroom.derivation import NamespaceKeys, block_key
from strongroom.errors import StrongroomError
from strongroom.identity import ComponentId, NamespaceId
from strongroom.log import InvalidationKind, LogEntry
from strongroom.wire.frames import Layers, Load, LoadFailed, Part
from tests.sidecar.conftest import Stored
from tests.sidecar.control_plane import FakeControlPlane, Granted
from tests.sidecar.harness import ManualClock, World, block_content
from tests.sidecar.prefetch_support import until
from tests.sidecar.test_layers import OneByOne, turns

__all__ = ["turns"]


def break_the_key_path(monkeypatch: pytest.MonkeyPatch, theirs: Granted, ours: Granted) -> None:
    """`theirs` is looked up and opened under the keys, and as the blocks, of `ours`."""
    wrong = dict(zip(theirs.namespaces, ours.namespaces, strict=True))
    keys, context = KeyRing.keys, sidecar.transfers.load.block_context

    def crossed_keys(self: KeyRing, namespace: NamespaceId, digest: bytes) -> NamespaceKeys | None:
        return keys(self, wrong.get(namespace, namespace), digest)

    def crossed_context(judged: Judged, block: ChainedBlock, shard: Shard) -> BlockContext:
        found = context(judged, block, shard)
        namespace = wrong.get(found.namespace, found.namespace)
        return replace(found, tenant=ours.claims.tenant, namespace=namespace)

    monkeypatch.setattr(KeyRing, "keys", crossed_keys)
    monkeypatch.setattr(sidecar.transfers.load, "block_context", crossed_context)


def break_the_envelope(monkeypatch: pytest.MonkeyPatch, theirs: Granted, ours: Granted) -> None:
    """`theirs` is opened under the keys of `ours`, and no header is compared with what is asked."""
    wrong = dict(zip(theirs.namespaces, ours.namespaces, strict=True))
    keys = KeyRing.keys

    def crossed_keys(self: KeyRing, namespace: NamespaceId, digest: bytes) -> NamespaceKeys | None:
        return keys(self, wrong.get(namespace, namespace), digest)

    def begin(_: type[Opener], header: Header, expected: BlockContext, data_key: bytes) -> Opener:
        key = block_key(data_key, expected.block, header.salt)
        return Opener(header, key, aad_prefix(header.context))

    monkeypatch.setattr(KeyRing, "keys", crossed_keys)
    monkeypatch.setattr(Opener, "begin", classmethod(begin))


def break_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log entry is applied, and neither keys, blocks, requests nor grants hear of it."""

    def nothing(self: Invalidation, entry: LogEntry) -> Effect:
        return Effect()

    monkeypatch.setattr(Invalidation, "fence", nothing)
    monkeypatch.setattr(LogState, "dead", lambda *_: None)
    monkeypatch.setattr(LogState, "retired_components", lambda *_: False)


async def test_the_right_party_restores_and_nothing_is_detected(stored: Stored) -> None:
    granted = stored.grant()
    assert await stored.hits("again", granted) == 288
    restored = await stored.engine.load("again", 0, 288)
    assert restored.ok
    assert restored.blocks[0] == block_content(stored.prompt, 0, 64)
    sentry = stored.world.sidecar.watch.sentry
    assert (sentry.looks, sentry.crossed, sentry.deleted) == (5, 0, 0)
    assert stored.world.sidecar.watch.breakers.action is Action.NONE


async def test_a_load_that_a_tripped_breaker_refuses_is_on_record_as_that(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await stored.hits("r", stored.grant()) == 288
    breakers = stored.world.sidecar.watch.breakers
    # Otherwise the trip itself fences the request.
    monkeypatch.setattr(breakers, "_fence_all", lambda: None)
    breakers.note(Condition.READABLE, 1, 1)
    assert not (await stored.engine.load("r", 0, 64)).ok
    counts = stored.world.sidecar.audit.counts
    await until(lambda: counts["load", "failed", "breaker"] == 1)


@pytest.mark.parametrize("second_look", [True, False])
async def test_a_layer_of_another_tenants_block_is_not_released_before_its_part(
    stored: Stored, turns: OneByOne, monkeypatch: pytest.MonkeyPatch, second_look: bool
) -> None:
    world = stored.world
    theirs = world.control.grant(world.control.tenant(), stored.prompt)
    break_the_envelope(monkeypatch, theirs, stored.grant())
    if not second_look:
        monkeypatch.setattr(Sentry, "look", lambda *_: None)
    assert await stored.hits("theirs", theirs) == 288
    wire = stored.engine.workers[0]
    wire.send(Load("theirs", 1, 0, 64, True))
    turns.let(1)
    if not second_look:
        assert (await wire.expect(Layers)).layers == 1
        turns.let(1)
        assert (await wire.expect(Part)).start == 0
        return
    await until(lambda: world.sidecar.watch.sentry.crossed == 1)
    turns.let(1)
    await wire.expect(LoadFailed)
    assert not any(isinstance(frame, Layers | Part) for frame in wire.unread)
    assert world.sidecar.watch.breakers.action is Action.REFUSE


@pytest.mark.parametrize("second_look", [True, False])
async def test_a_cross_tenant_hit_is_stopped_although_the_key_path_let_it_through(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, second_look: bool
) -> None:
    world = stored.world
    theirs = world.control.grant(world.control.tenant(), stored.prompt)
    break_the_key_path(monkeypatch, theirs, stored.grant())
    if not second_look:
        monkeypatch.setattr(Sentry, "look", lambda *_: None)
    # The first defence is broken indeed: another tenant's blocks are hits.
    assert await stored.hits("theirs", theirs) == 288
    restored = await stored.engine.load("theirs", 0, 288)
    if not second_look:
        assert restored.blocks[0] == block_content(stored.prompt, 0, 64)
        return
    assert isinstance(restored.end, LoadFailed)
    assert restored.end.start == 0
    assert restored.blocks == {}
    await refuses_everybody(stored, Condition.CROSS_TENANT)


@pytest.mark.parametrize("second_look", [True, False])
async def test_a_read_after_deletion_is_stopped_although_nothing_was_fenced(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, second_look: bool
) -> None:
    world = stored.world
    break_the_fence(monkeypatch)
    if not second_look:
        monkeypatch.setattr(Sentry, "look", lambda *_: None)
    granted = stored.grant()
    assert await stored.hits("before", granted) == 288
    entry = world.control.revoke(world.tenant.everyone)
    await applied(world.control, world, entry)
    restored = await stored.engine.load("before", 0, 288)
    if not second_look:
        assert restored.ok
        assert restored.blocks[0] == block_content(stored.prompt, 0, 64)
        return
    assert isinstance(restored.end, LoadFailed)
    assert restored.blocks == {}
    await refuses_everybody(stored, Condition.READABLE)


async def refuses_everybody(stored: Stored, condition: Condition) -> None:
    """Tripped, kept, told; and everybody is refused until an operator clears it."""
    watch = stored.world.sidecar.watch
    assert watch.breakers.action is Action.REFUSE
    assert (stored.world.directory / "state" / "trips.json").exists()
    kinds = [event.kind for event in watch.events.after(0, 1000)]
    assert EventKind.DETECTED in kinds
    assert EventKind.BREAKER_TRIPPED in kinds
    assert stored.world.sidecar.audit.counts["load", "failed", Reason.BREAKER] == 1
    # A tenant that has nothing to do with it: not even its own pages on the engine.
    bystander = stored.world.control.tenant()
    for name in ("after", "later"):
        granted = stored.world.control.grant(bystander, stored.prompt)
        assert await stored.hits(name, granted) == -1
        watch.look()
    watch.breakers.clear(condition)
    granted = stored.world.control.grant(bystander, stored.prompt)
    assert await stored.hits("cleared", granted) == 0


async def applied(control: FakeControlPlane, world: World, entry: LogEntry) -> None:
    async with asyncio.timeout(20):
        assert await world.sidecar.log.reach(control.epoch, entry.seq, 20)


# The sentry alone


class Told:
    """Breakers that remember what they were told."""

    def __init__(self) -> None:
        self.noted: list[Condition] = []

    def check(self) -> None:
        return

    def note(self, condition: Condition, bad: float, cases: float) -> None:
        self.noted.append(condition)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def sentry(told: Told) -> Sentry:
    count = iter(range(1, 10**9))
    return Sentry(told, Events(lambda: next(count), Clocks(ManualClock())))


def entry(*components: ComponentId) -> LogEntry:
    return LogEntry(
        epoch="e", seq=1, prev="", at="", kind=InvalidationKind.COMPONENTS, components=components
    )


async def test_each_source_of_a_difference_is_seen_and_the_right_one_passes(
    stored: Stored, sentry: Sentry, told: Told
) -> None:
    grant = stored.grant().claims
    ours, namespace = grant.tenant, grant.spans[0].namespace
    sentry.look(grant, ours, namespace)
    other = stored.world.control.component()
    for tenant, found in ((other, namespace), (ours, NamespaceId("0" * 64))):
        with pytest.raises(StrongroomError):
            sentry.look(grant, tenant, found)
    assert told.noted == [Condition.CROSS_TENANT] * 2
    sentry.heard(entry(other))
    sentry.look(grant, ours, namespace)
    for dead in grant.components(0):
        alone = Sentry(told, sentry._events)
        alone.heard(entry(dead))
        with pytest.raises(StrongroomError):
            alone.look(grant, ours, namespace)
    sentry.gone([namespace])
    with pytest.raises(StrongroomError):
        sentry.look(grant, ours, namespace)
    assert set(told.noted[2:]) == {Condition.READABLE}


def test_what_it_remembers_is_bounded(sentry: Sentry) -> None:
    sentry.gone([NamespaceId(str(number)) for number in range(REMEMBERED_MAX + 5)])
    assert len(sentry._dead) == REMEMBERED_MAX


async def test_trips_of_an_earlier_life_refuse_from_the_first_request_on(tmp_path: Path) -> None:
    from tests.sidecar.harness import harness

    control = FakeControlPlane()
    prompt = list(range(1000, 1300))
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        await engine.compute_and_save("saved", world.control.grant(world.tenant, prompt))
        world.sidecar.watch.breakers.note(Condition.CROSS_TENANT, 1, 1)
        tenant = world.tenant
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        assert not (await engine.open("again", control.grant(tenant, prompt))).allowed
        world.sidecar.watch.breakers.clear(Condition.CROSS_TENANT)
        verdict = await engine.open("cleared", control.grant(tenant, prompt))
        assert (verdict.allowed, verdict.tokens) == (True, 288)
