"""Revocation at every point at which a load gives way to others, from host memory and from NVMe."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from storage.tiers.protocol import TierName
from strongroom.wire.frames import Copied, Layers, Load, LoadDone, LoadFailed, Part, SidecarFrame
from tests.sidecar.conftest import PROMPT
from tests.sidecar.harness import World, harness
from tests.steps import Steps

WORDS = ("WorkerSession._load", "LoadTransfer", "Onboarding", "Reader", "in_flight_at_most")


@pytest.mark.parametrize("tier", [TierName.HOST, TierName.NVME])
async def test_a_load_revoked_at_any_await_releases_nothing_afterwards(
    tmp_path: Path, tier: TierName
) -> None:
    async with harness(tmp_path, cost_model=False) as world:
        engine = await world.engine()
        grant = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", grant) == 5
        await world.sidecar.store.flush()
        reached = 0
        for at in itertools.count():
            if tier is TierName.NVME:
                host = world.sidecar.store._host
                for row in list(host._index.rows()):
                    host.drop(row.resident.address)
            if not await _revoked_at(world, at):
                break
            reached += 1
        assert reached >= 8, "a load gives way more often than this"
        assert world.sidecar.statistics().staging_used_bytes == 0
        # The right party, afterwards: nothing was lost to the revocations.
        assert (await engine.open("right", world.control.grant(world.tenant, PROMPT))).tokens == 288
        assert (await engine.load("right", 0, 288)).ok


async def _revoked_at(world: World, at: int) -> bool:
    """One load, fenced off at suspension `at`; false when there was none."""
    engine = world.engines[0]
    wire = engine.workers[0]
    name, number = f"r{at}", 1000 + at
    assert (await engine.open(name, world.control.grant(world.tenant, PROMPT))).tokens == 288
    (joined,) = world.sidecar.sessions
    session = joined.workers[0]
    request = joined.requests.get(name)
    assert request is not None
    late: list[SidecarFrame] = []
    send = session.connection.send

    def watched(frame: SidecarFrame) -> None:
        if steps.acted and isinstance(frame, Part | Layers):
            late.append(frame)
        send(frame)

    def act() -> None:
        request.fence_off()

    steps = Steps(WORDS, at, act)
    with pytest.MonkeyPatch.context() as patch, steps.installed():
        patch.setattr(session.connection, "send", watched)
        steps.arm()
        wire.send(Load(name, number, 0, 288))
        end: LoadDone | LoadFailed | None = None
        while end is None:
            match await wire.receive():
                case Part(load=load, offset=offset):
                    wire.send(Copied(load, offset))
                case (LoadDone(load=load) | LoadFailed(load=load)) as frame if load == number:
                    end = frame
                case _:
                    pass
        acted = steps.acted
    assert not late, "a part was released after the revocation"
    await session.slots.wiped()
    if acted and isinstance(end, LoadFailed):
        assert end.start == 0, "none of its parts may be used"
        assert wire.staging is not None
        assert not any(wire.staging[:])
    return acted
