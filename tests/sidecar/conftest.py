"""A running sidecar with one stored prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sidecar.control_plane import Granted
from tests.sidecar.harness import Engine, World, harness

PROMPT = list(range(1000, 1300))


@dataclass
class Stored:
    """`prompt` was saved by `engine`; `granted` is another good grant for it."""

    world: World
    engine: Engine
    prompt: list[int]

    def grant(self, **changes: object) -> Granted:
        world = self.world
        return world.control.grant(world.tenant, self.prompt, **changes)  # type: ignore[arg-type]

    async def hits(self, name: str, granted: Granted, **changes: object) -> int:
        """Tokens of the verdict; a refusal must look like every other refusal."""
        verdict = await self.engine.open(name, granted, **changes)
        if not verdict.allowed:
            assert (verdict.tokens, verdict.save) == (0, False)
            return -1
        return verdict.tokens


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with harness(tmp_path) as world:
        yield world


@pytest.fixture
async def stored(world: World) -> Stored:
    engine = await world.engine()
    granted = world.control.grant(world.tenant, PROMPT)
    assert await engine.compute_and_save("saved", granted) == 5
    return Stored(world, engine, PROMPT)
