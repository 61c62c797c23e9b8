"""Sessions of gateways: who gives hints and is no engine.

Rules:
- A gateway has one session for an engine: the newest wins, as an engine's connections do.
- All sessions of a gateway together may ask for what one engine may (`hints.Allowance`),
  also when it connects anew.
- Gateways have a part of the connections and no more, and one gateway half of that part: they never
  take an engine's place, nor all of each other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from sidecar.engines.connection import Connection, SessionOver, end_session
from sidecar.engines.hello import GatewayGreeting
from sidecar.engines.hints import Allowance, Facts, HintDesk, Hints
from strongroom.errors import Conflict, Overloaded, ProtocolViolation
from strongroom.wire.frames import EngineFrame, Hint, Unhint


class Gateways:
    """Every gateway's sessions. `places` is how many there may be."""

    def __init__(self, desk: HintDesk, places: int) -> None:
        self._desk = desk
        self._places = max(1, places)
        self._open: dict[tuple[str, str], GatewaySession] = {}
        self._members: list[str] = []
        self._allowances: dict[str, Allowance] = {}
        """By name; there are as many as token files."""

    @contextmanager
    def admitted(self, greeting: GatewayGreeting) -> Iterator[None]:
        """A place for the session; `Overloaded` when there is none."""
        mine = self._members.count(greeting.name)
        replaces = (greeting.name, greeting.engine) in self._open
        if not replaces and (
            len(self._members) >= self._places or mine >= max(1, self._places // 2)
        ):
            raise Overloaded("too many gateway sessions", limit=self._places)
        self._members.append(greeting.name)
        try:
            yield
        finally:
            self._members.remove(greeting.name)

    async def serve(self, greeting: GatewayGreeting, facts: Facts, connection: Connection) -> None:
        """Until the connection ends, or a newer one takes over."""
        key = (greeting.name, greeting.engine)
        allowance = self._allowances.get(greeting.name)
        if allowance is None:
            allowance = self._desk.allowance()
            self._allowances[greeting.name] = allowance
        session = GatewaySession(self._desk, facts, connection, allowance)
        earlier = self._open.get(key)
        self._open[key] = session
        if earlier is not None:
            earlier.close()
        try:
            await session.serve()
        finally:
            if self._open.get(key) is session:
                del self._open[key]


class GatewaySession:
    """`Hint` and `Unhint` of a gateway, for one engine."""

    def __init__(
        self, desk: HintDesk, facts: Facts, connection: Connection, allowance: Allowance
    ) -> None:
        self._connection = connection
        self._hints = Hints(desk, facts, allowance)

    def close(self) -> None:
        """A newer session of the same gateway, for the same engine, is here."""
        self._connection.close(Conflict("a newer connection of this gateway took over"))

    async def serve(self) -> None:
        """Until the connection ends; then its hints do."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._connection.serve(self._handle)
                end_session()
        except* SessionOver:
            pass
        finally:
            self._hints.close()

    def _handle(self, frame: EngineFrame) -> None:
        match frame:
            case Hint():
                self._hints.take(frame, self._tasks)
            case Unhint(name):
                self._hints.drop(name)
            case _:
                raise ProtocolViolation("not a gateway's frame", field="frame")
