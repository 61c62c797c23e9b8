"""A process that rotates the installation's KEK and stands still where it is told to.

`python -m tests.service.rotation_process SETTINGS.json WHERE`: says `here` once it stands there,
for its parent to kill it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from service.app import create_app
from service.auth.actor import SYSTEM
from service.keys import rotation
from service.keys.provider import INSTALLATION, KeyProvider
from service.runtime import Runtime
from service.settings import ServiceSettings

STEP = 10


class Watched:
    """A provider that stands still before or after it destroys a version."""

    def __init__(self, provider: KeyProvider, where: str) -> None:
        self._provider = provider
        self._where = where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    async def destroy(self, kek: str, version: int) -> None:
        stand_still(self._where == "before_destruction")
        await self._provider.destroy(kek, version)
        stand_still(self._where == "after_destruction")


def stand_still(here: bool) -> None:
    if here:
        sys.stdout.write("here\n")
        sys.stdout.flush()
        sys.stdin.read()


async def main(settings: ServiceSettings, where: str) -> None:
    rotation.STEP = STEP  # type: ignore[misc]
    app = create_app(settings)
    runtime: Runtime = app.state.runtime
    async with app.router.lifespan_context(app):
        watched: Any = Watched(runtime.key_provider, where)
        begun = await rotation.begin(runtime.changes, watched, INSTALLATION, SYSTEM)
        stand_still(where == "begun")
        steps = 0

        def told(_: int) -> None:
            nonlocal steps
            steps += 1
            stand_still(where == "in_the_middle" and steps == 3)

        await rotation.carry_on(runtime.database, runtime.changes, watched, begun, told)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(main(ServiceSettings(**given), sys.argv[2]))
