"""A real vLLM beside a real sidecar: grants are judged, blocks are encrypted, tiers are real.

The control plane is the sidecar tests' fake one, which signs, derives and seals for real.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.degrade.conditions import Condition
from sidecar.degrade.stance import Action
from sidecar.engines.connection import Connection
from storage import crypto
from storage.tiers.protocol import TierName
from strongroom.connectors.digests import measure
from strongroom.grant import EngineDigests
from strongroom.wire.frames import Layers, Report, SidecarFrame
from tests.connectors.engine_process import ENGINE_PYTHON, EngineProcess, make_tiny_model
from tests.connectors.test_vllm_e2e import TINY, prompt
from tests.sidecar.control_plane import FakeControlPlane, Granted, Tenant
from tests.sidecar.harness import ENGINE, MIB, World, harness

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not ENGINE_PYTHON.exists(), reason="no engine environment (make setup-engine)"
    ),
]

SIZES: dict[str, Any] = {
    "tokens_per_block": 256, "staging_bytes": 16 * MIB, "host_bytes": 64 * MIB,
    "nvme_bytes": 64 * MIB, "region_bytes": 8 * MIB,
}  # fmt: skip


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sr") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def tiny(home: Path) -> Path:
    return make_tiny_model(home / "tiny", home)


class Party:
    """Asks for grants and generates, in an engine process beside this one."""

    def __init__(self, engine: EngineProcess, control: FakeControlPlane, model: Path) -> None:
        self.engine = engine
        self.control = control
        measured = measure(model)
        self.digests = EngineDigests(measured.model, "none", measured.tokenizer, measured.template)

    async def start(self, world: World, model: Path) -> None:
        extra = {
            "socket": str(world.socket_path), "token_file": str(world.token_path),
            "layers": True,
            "engine": ENGINE, "lookup_deadline_s": 5.0, "heartbeat_s": 0.2,
        }  # fmt: skip
        await self.tell("start", model=str(model), extra=extra, **TINY)

    async def tell(self, command: str, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.engine.ask, command, **arguments)

    def grant(self, tenant: Tenant, tokens: list[int], **changes: Any) -> Granted:
        return self.control.grant(tenant, tokens, **{"engine": self.digests, **changes})

    async def generate(
        self, tokens: list[int], granted: Granted | None, salt: str | None = None
    ) -> tuple[int, list[int]]:
        """Cached tokens and the output."""
        request = {
            "tokens": tokens,
            "grant": granted.token if granted else None,
            "salt": salt or (granted.salt if granted else None),
        }
        answer = await self.tell("generate", requests=[request])
        return answer["cached"][0], answer["outputs"][0]

    async def forget(self) -> None:
        """The engine's own prefix cache is empty after this."""
        assert (await self.tell("drain"))["left"] == 0
        assert (await self.tell("reset"))["done"]


def in_host(world: World) -> int:
    """Blocks in the host tier."""
    tiers = world.sidecar.store.statistics().tiers
    return next(tier.blocks for tier in tiers if tier.name == TierName.HOST)


async def stored(world: World, blocks: int) -> None:
    """Wait until the host tier holds this many blocks."""
    async with asyncio.timeout(20):
        while in_host(world) < blocks:
            await asyncio.sleep(0.02)


async def test_the_right_party_restores_and_every_other_computes(
    home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny model's blocks are far smaller than what is worth a word for each layer.
    monkeypatch.setattr(crypto, "_TELL_BYTES_MIN", 1)
    monkeypatch.setattr(crypto, "_SPLIT_BYTES_MIN", 1)
    early: list[SidecarFrame] = []
    send = Connection.send

    def heard(connection: Connection, frame: SidecarFrame) -> None:
        early.extend([frame] if isinstance(frame, Layers) else [])
        send(connection, frame)

    monkeypatch.setattr(Connection, "send", heard)
    control = FakeControlPlane()
    directory = home / "one"
    directory.mkdir()
    with EngineProcess(home) as engine:
        party = Party(engine, control, tiny)
        tokens = prompt(501)
        async with harness(directory, control, **SIZES) as world:
            await party.start(world, tiny)
            ours, theirs = world.tenant, control.tenant()
            cold = await party.generate(tokens, party.grant(ours, tokens))
            assert cold[0] == 0
            await stored(world, 3)
            await party.forget()
            assert await party.generate(tokens, party.grant(ours, tokens)) == (672, cold[1])

            # The engine's own prefix cache holds these pages now, under the namespace's salt.
            good = party.grant(ours, tokens)
            assert await party.generate(tokens, None, salt=good.salt) == (0, cold[1])
            foreign = party.grant(theirs, tokens)
            assert await party.generate(tokens, foreign, salt=good.salt) == (0, cold[1])
            assert await party.generate(tokens, foreign) == (0, cold[1])
            other = prompt(502)
            replayed = party.grant(ours, other)
            assert (await party.generate(tokens, replayed, salt=good.salt))[0] == 0
            upgraded = party.grant(
                ours, tokens, engine=EngineDigests("0" * 64, *["none", "0" * 64, "0" * 64])
            )
            assert (await party.generate(tokens, upgraded))[0] == 0
            assert (await party.generate(tokens, party.grant(ours, tokens)))[0] == 672

        # The sidecar is gone, and the engine stays: then another one finds the NVMe tier.
        assert (await party.generate(tokens, party.grant(ours, tokens)))[0] == 0
        async with harness(directory, control, **SIZES) as world:
            assert (await party.tell("connected"))["open"]
            await party.forget()
            assert in_host(world) == 0
            assert await party.generate(tokens, party.grant(ours, tokens)) == (672, cold[1])

            granted = party.grant(ours, tokens)
            entry = control.revoke(ours.everyone)
            await asyncio.wait_for(control.until_acked("fenced", entry.seq), 20)
            assert await party.generate(tokens, granted) == (0, cold[1])
            await party.forget()
            assert await party.generate(tokens, granted) == (0, cold[1])
        # The outputs above came through layers that were copied before their blocks were whole.
        assert early


async def test_a_sidecar_cut_off_from_the_service_takes_the_local_cache_with_its_lease(
    home: Path, tiny: Path
) -> None:
    control = FakeControlPlane(lease_ms=2000)
    directory = home / "cut"
    directory.mkdir()
    tokens = prompt(503)
    with EngineProcess(home) as engine:
        party = Party(engine, control, tiny)
        async with harness(directory, control, **SIZES) as world:
            await party.start(world, tiny)
            granted = party.grant(world.tenant, tokens)
            _, output = await party.generate(tokens, granted)
            # The pages are in the engine's own prefix cache from here on.
            assert await party.generate(tokens, granted) == (672, output)
            control.away = True
            await leased(world, running=False)
            assert await party.generate(tokens, granted) == (0, output)
            control.away = False
            await leased(world, running=True)
            assert await party.generate(tokens, granted) == (672, output)


async def leased(world: World, *, running: bool) -> None:
    """Wait until the sidecar has a lease, or has none."""
    async with asyncio.timeout(20):
        while world.sidecar.gate.state().open is not running:
            await asyncio.sleep(0.02)


async def test_breakers_leave_the_engine_its_own_cache_or_take_that_too(
    home: Path, tiny: Path
) -> None:
    directory = home / "gate"
    directory.mkdir()
    control = FakeControlPlane()
    tokens, other = prompt(504), prompt(505)
    with EngineProcess(home) as engine:
        party = Party(engine, control, tiny)
        async with harness(directory, control, watch_interval_s=0.05, **SIZES) as world:
            await party.start(world, tiny)
            watch = world.sidecar.watch
            _, output = await party.generate(tokens, party.grant(world.tenant, tokens))
            await stored(world, 3)

            report = await reported(world)
            assert report.pages > report.free_pages // 2 > 0
            assert 0 < report.prefill_us <= report.busy_us
            assert report.prefill_tokens >= len(tokens)

            watch.breakers.note(Condition.CHECKSUM, 3, 3)
            assert watch.breakers.action is Action.ENGINE_ONLY
            # The engine's own pages may be used; nothing is restored and nothing is saved.
            assert (await party.generate(tokens, party.grant(world.tenant, tokens)))[0] == 672
            await party.forget()
            granted = party.grant(world.tenant, tokens)
            assert await party.generate(tokens, granted) == (0, output)
            before = in_host(world)
            await party.generate(other, party.grant(world.tenant, other))
            assert in_host(world) == before
            watch.breakers.clear(Condition.CHECKSUM)
            await party.forget()
            assert await party.generate(tokens, granted) == (672, output)

            watch.breakers.note(Condition.CROSS_TENANT, 1, 1)
            # Not even the pages that the engine has.
            assert await party.generate(tokens, party.grant(world.tenant, tokens)) == (0, output)
            watch.breakers.clear(Condition.CROSS_TENANT)
            assert await party.generate(tokens, party.grant(world.tenant, tokens)) == (672, output)


async def reported(world: World) -> Report:
    """The engine's report, once it speaks of a prompt."""
    async with asyncio.timeout(20):
        while True:
            latest = world.sidecar.watch.reports.latest().get(ENGINE)
            if latest is not None and latest.report.prefill_tokens:
                return latest.report
            await asyncio.sleep(0.02)
