"""Session sets: a connection that is being welcomed is never orphaned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tests.sidecar.harness import ENGINE, harness


async def until(holds: Callable[[], bool]) -> None:
    """What another task does when a socket closes has no event of its own to wait for."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_set_outlives_its_connections_while_another_is_being_welcomed(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        sessions = world.sidecar.sessions
        (found,) = list(sessions)
        # A second connection has said hello and is not registered yet, as while its staging is
        # being made; then the first ones end.
        welcomed = sessions.join(found.greeting)
        assert welcomed is found
        await engine.scheduler.close()
        for worker in engine.workers:
            await worker.close()
        await until(lambda: found.scheduler is None and not found.workers)
        assert list(sessions) == [found]
        assert sessions.join(found.greeting) is found
        sessions.leave(found)
        sessions.leave(welcomed)
        await until(lambda: len(sessions) == 0)
        assert found.greeting.engine == ENGINE
