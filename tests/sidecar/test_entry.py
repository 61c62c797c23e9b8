"""The entry: uvloop, signals, an orderly stop; keys that run out are renewed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
import uvloop

from sidecar.clocks import Clocks
from sidecar.main import serve
from sidecar.settings import load_settings
from strongroom.errors import Refused
from strongroom.log import InvalidationKind
from strongroom.wire.frames import Finish
from tests.sidecar.conftest import PROMPT
from tests.sidecar.control_plane import FakeControlPlane
from tests.sidecar.harness import ManualClock, harness
from tests.sidecar.real_service import real_service


def test_the_whole_path_works_on_uvloop(tmp_path: Path) -> None:
    async def path() -> None:
        async with harness(tmp_path) as world:
            engine = await world.engine()
            granted = world.control.grant(world.tenant, PROMPT)
            assert await engine.compute_and_save("w", granted) == 5
            assert (await engine.open("r", granted)).tokens == 288
            assert (await engine.load("r", 0, 288)).ok

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(path())


async def test_a_signal_stops_it_in_good_order(tmp_path: Path) -> None:
    async with real_service(tmp_path) as service:
        token = await service.ask("POST", "/v1/sidecars/join-tokens", {"tenants": []})
        settings = load_settings(
            {},
            state_directory=tmp_path / "state",
            socket_path=tmp_path / "run" / "s.sock",
            engine_tokens=tmp_path,
            service_url=service.url,
            join_token=token["join_token"],
            host_bytes=1024 * 1024,
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(serve(settings))
            while (
                not settings.socket_path.exists()
                or not (settings.state_directory / "log.json").exists()
            ):
                assert not running.done()
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        assert not settings.socket_path.exists()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_key_lease_that_ran_out_is_renewed_for_a_request_that_lives(
    tmp_path: Path,
) -> None:
    boot = ManualClock()
    control = FakeControlPlane(lease_ms=200_000, key_lease_ms=60_000)
    async with harness(tmp_path, control, clocks=Clocks(boot)) as world:
        engine = await world.engine()
        granted = control.grant(world.tenant, PROMPT)
        await engine.open("w", granted)
        boot.advance(70)
        assert world.sidecar.ring.namespaces() == frozenset()
        assert await engine.save("w", PROMPT, 288) == 5
        await engine.open("r", granted)
        boot.advance(70)
        assert (await engine.load("r", 0, 288)).ok
        # Without the control plane a key that ran out stays out.
        boot.advance(50)
        control.away = True
        assert (await engine.load("r", 0, 288)).ok
        boot.advance(20)
        assert not (await engine.load("r", 0, 288)).ok
        assert await engine.save("w", PROMPT, 288) == 0
        engine.scheduler.send(Finish("r"))


async def test_a_request_that_outlives_its_grant_loads_for_as_long_as_its_keys_are_here(
    tmp_path: Path,
) -> None:
    """The service leases nothing under a grant that has run out."""
    boot = ManualClock()
    control = FakeControlPlane(lease_ms=200_000, key_lease_ms=60_000)
    async with harness(tmp_path, control, clocks=Clocks(boot)) as world:
        engine = await world.engine()
        granted = control.grant(world.tenant, PROMPT)
        await engine.compute_and_save("w", granted)
        assert (await engine.open("r", granted)).tokens == 288

        async def refused(sidecar: str, body: bytes) -> httpx.Response:
            return httpx.Response(403)

        control._key_lease = refused  # type: ignore[method-assign]
        boot.advance(50)
        assert (await engine.load("r", 0, 288)).ok
        assert world.sidecar.keys.counts.refused == 1
        # A grant that the log has ended is not kept alive by keys that others still use.
        await world.sidecar.keys.ensure(granted.token, granted.claims)
        entry = control.append(
            InvalidationKind.SUBJECT, tenant=world.tenant.id, subject=granted.claims.sub
        )
        assert await world.sidecar.log.reach(control.epoch, entry.seq, 20)
        with pytest.raises(Refused):
            await world.sidecar.keys.ensure(granted.token, granted.claims)
        fresh = control.grant(world.tenant, PROMPT)
        assert (await engine.open("fresh", fresh)).tokens == 288
        boot.advance(11)
        assert not (await engine.load("fresh", 0, 288)).ok
        with pytest.raises(Refused):
            await world.sidecar.keys.ensure(fresh.token, fresh.claims)


async def test_prompts_of_open_requests_are_bounded_in_memory(tmp_path: Path) -> None:
    async with harness(tmp_path, prompt_bytes_max=4096) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(700))
        assert (await engine.open("a", granted)).allowed
        assert not (await engine.open("b", granted)).allowed
        engine.scheduler.send(Finish("a"))
        small = world.control.grant(world.tenant, range(64))
        assert (await engine.open("c", small)).allowed


async def test_requests_that_have_finished_do_not_fill_the_limit_on_open_ones(
    tmp_path: Path,
) -> None:
    """Prompts of 2,800 bytes and room for 4,096: one is open at a time, one is kept."""
    async with harness(tmp_path, prompt_bytes_max=4096, requests_max=2) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(700))
        for number in range(6):
            assert (await engine.open(str(number), granted)).allowed
            engine.scheduler.send(Finish(str(number)))
        assert (await engine.open("last", granted)).allowed
        # What finished is kept for a late save, the oldest go first, and memory stays bounded.
        (joined,) = world.sidecar.sessions
        assert joined.requests.get("0") is None
        assert joined.requests.get("5") is not None
        assert joined.requests.finished_bytes <= 4096
        assert not (await engine.open("more", granted)).allowed


async def test_requests_that_have_finished_do_not_count_as_open(tmp_path: Path) -> None:
    async with harness(tmp_path, requests_max=2) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(64))
        for number in range(3):
            assert (await engine.open(str(number), granted)).allowed
            engine.scheduler.send(Finish(str(number)))
        assert (await engine.open("a", granted)).allowed
        assert (await engine.open("b", granted)).allowed
        assert not (await engine.open("c", granted)).allowed
