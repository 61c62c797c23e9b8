"""A real sidecar in a process of its own, with the tests' control plane, told what to do by lines.

    python -m benchmarks.sidecar_process CONFIG ANSWERS

CONFIG is JSON: `directory`, `blocks` (small records that are resident from the start, of the
namespace that `grant` grants), `settings` (of the sidecar). Socket, spool, tiers, leases and log
are the real ones; the control plane signs, derives and seals for real and has no database.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import small_records
from sidecar.interpreter import keep_freed_memory, keep_what_is_here
from strongroom.grant import EngineDigests
from tests.sidecar.control_plane import FakeControlPlane, Tenant
from tests.sidecar.harness import World, harness

ENGINES = ("engine-a", "engine-b")


class Serving:
    """The commands."""

    def __init__(self, world: World, tenant: Tenant) -> None:
        self._world = world
        self._tenant = tenant
        self._tenants = [tenant]

    async def where(self) -> dict[str, Any]:
        """The socket, and a token for each engine."""
        folder = self._world.token_path.parent
        return {
            "socket": str(self._world.socket_path),
            "tokens": {name: (folder / f"{name}.token").read_text() for name in ENGINES},
        }

    async def grant(self, first: int, count: int, tenant: int = 0) -> dict[str, Any]:
        """A grant for the prompt `first, first + 1, ...`; further tenants are made on the way."""
        while tenant >= len(self._tenants):
            self._tenants.append(self._world.control.tenant())
        granted = self._world.control.grant(self._tenants[tenant], range(first, first + count))
        return {"token": granted.token, "salt": granted.salt}

    async def grant_tokens(self, tokens: list[int], engine: dict[str, str]) -> dict[str, Any]:
        """A grant for these tokens on an engine with these digests."""
        granted = self._world.control.grant(self._tenant, tokens, engine=EngineDigests(**engine))
        return {"token": granted.token, "salt": granted.salt}

    async def revoke(self) -> dict[str, Any]:
        """Retire the group that everything depends on: seconds from log entry to `fenced`."""
        started = time.perf_counter()
        entry = self._world.control.revoke(self._tenant.everyone)
        await self._world.control.until_acked("fenced", entry.seq)
        return {"seconds": time.perf_counter() - started}

    async def flush(self) -> dict[str, Any]:
        """Return once all that was saved is on NVMe, or has failed to get there."""
        await self._world.sidecar.store.flush()
        return {}

    async def resident(self) -> dict[str, Any]:
        """Blocks in every tier, and objects that the garbage collector walks."""
        tiers = self._world.sidecar.store.statistics().tiers
        return {"blocks": sum(tier.blocks for tier in tiers)}


async def serve(config: dict[str, Any], answers: int) -> None:
    """Answer until standard input ends."""
    directory = Path(config["directory"])
    control = FakeControlPlane(lease_ms=60_000)
    tenant = control.tenant()
    settings = dict(config["settings"])
    if config["blocks"]:
        # The namespace of a prompt that depends on the tenant's common group alone.
        (namespace,) = control.grant(tenant, range(16)).namespaces
        made = await asyncio.to_thread(
            small_records.make, directory / "nvme", config["blocks"], tenant.id, namespace
        )
        settings |= {
            "nvme_bytes": made.nvme_bytes + 4 * small_records.REGION_BYTES,
            "region_bytes": small_records.REGION_BYTES,
        }
    _write_tokens(directory / "tokens")
    async with harness(directory, control, **settings) as world:
        serving = Serving(world, tenant)
        commands: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "where": serving.where,
            "grant": serving.grant,
            "grant_tokens": serving.grant_tokens,
            "revoke": serving.revoke,
            "resident": serving.resident,
            "flush": serving.flush,
        }
        keep_what_is_here()
        keep_freed_memory()
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        with os.fdopen(answers, "w", buffering=1) as out:
            while line := await reader.readline():
                command = json.loads(line)
                answer = await commands[command.pop("do")](**command)
                out.write(json.dumps(answer) + "\n")


def _write_tokens(folder: Path) -> None:
    folder.mkdir()
    for engine in ENGINES:
        path = folder / f"{engine}.token"
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(32))


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.argv[1]), int(sys.argv[2])))
