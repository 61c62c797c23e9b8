"""Many attempts at what was revoked: grants asked for, and old and new ones presented."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from strongroom.blocks import pack_tokens
from strongroom.wire.frames import Finish, Open, Verdict
from tests.sidecar.control_plane import Granted
from tests.sidecar.harness import Engine
from tests.sidecar.real_service import RealGrant, RealService

PROMPT = list(range(4000, 4300))
SHARED = 100
"""Tokens of the prompt that everyone of the tenant may have."""
WHOLE = 288
_BATCH = 25


def as_granted(grant: RealGrant) -> Granted:
    return cast("Granted", grant)


@dataclass(frozen=True, slots=True)
class Served:
    """An allow or a hit: when it was asked for and answered (boot clock), and what it was."""

    asked_s: float
    answered_s: float
    what: str


@dataclass
class Attempts:
    """What was tried, and what of it succeeded. `on` is cleared to end those who go on."""

    tried: int = 0
    served: list[Served] = field(default_factory=list)

    def asked_after(self, moment_s: float) -> list[Served]:
        return [each for each in self.served if each.asked_s >= moment_s]

    def answered_after(self, moment_s: float) -> list[Served]:
        return [each for each in self.served if each.answered_s >= moment_s]

    async def present(
        self, engine: Engine, grants: Sequence[RealGrant], more: Callable[[], bool], name: str
    ) -> None:
        """Open requests under `grants`, in batches, for as long as `more` says so."""
        number = 0
        while more():
            asked: dict[str, float] = {}
            for _ in range(_BATCH):
                grant = grants[number % len(grants)]
                request = f"{name}-{number}"
                number += 1
                asked[request] = time.monotonic()
                engine.scheduler.send(
                    Open(request, grant.token, grant.salt, pack_tokens(grant.prompt), "none")
                )
            for _ in range(_BATCH):
                verdict = await engine.scheduler.expect(Verdict)
                if verdict.allowed and verdict.tokens > SHARED:
                    now = time.monotonic()
                    self.served.append(Served(asked[verdict.request], now, f"hit at {name}"))
                self.tried += 1
            for request in asked:
                engine.scheduler.send(Finish(request))
            engine.scheduler.unread.clear()

    async def ask(
        self,
        service: RealService,
        who: tuple[str, str],
        spans: Sequence[dict[str, object]],
        more: Callable[[], bool],
        name: str,
    ) -> None:
        """Ask for grants, one after another."""
        while more():
            asked_s = time.monotonic()
            grant = await service.grant(*who, PROMPT, spans)
            if grant.granted_tokens > SHARED:
                self.served.append(Served(asked_s, time.monotonic(), f"grant of {name}"))
            self.tried += 1


async def until(condition: Callable[[], bool], limit_s: float = 20) -> None:
    """Return once `condition` holds; what it looks at is moved by others on this loop."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)
