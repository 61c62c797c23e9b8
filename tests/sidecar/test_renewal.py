"""The sidecar exchanges its keys while it serves, and dies at no point with keys nobody knows."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.clocks import Clocks
from sidecar.control.client import ControlClient, Turnstile, enrol, http_client
from sidecar.control.renewal import Renewal
from sidecar.state import StateDirectory
from strongroom.errors import Corrupt, Refused, Unavailable
from tests.sidecar.real_service import RealService, real_service


class Wire(httpx.AsyncBaseTransport):
    """A network that can lose an answer, or a question."""

    def __init__(self) -> None:
        self._real = httpx.AsyncHTTPTransport()
        self.lose_answer = self.lose_question = False
        self.sent: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request.url.path)
        if request.url.path.endswith("/keys"):
            if self.lose_question:
                raise httpx.ConnectError("lost")
            if self.lose_answer:
                await self._real.handle_async_request(request)
                raise httpx.ReadError("lost")
        return await self._real.handle_async_request(request)

    async def aclose(self) -> None:
        await self._real.aclose()


@dataclass
class Node:
    """One sidecar's state and client; `restarted` is its next life."""

    state: StateDirectory
    client: ControlClient
    http: httpx.AsyncClient
    wire: Wire

    @property
    def renewal(self) -> Renewal:
        return Renewal(self.client, self.state, 3600.0)

    def restarted(self) -> Node:
        client = ControlClient(self.http, self.client.enrolled, self.state.keys(), Clocks())
        return Node(self.state, client, self.http, self.wire)

    async def serves(self) -> bool:
        try:
            await self.client.serving_lease("", 0)
        except Refused:
            return False
        return True

    def kid(self) -> str:
        return self.state.keys().signer.kid


@asynccontextmanager
async def node_of(service: RealService, folder: Path) -> AsyncIterator[Node]:
    state = StateDirectory(folder)
    wire = Wire()
    token = (await service.ask("POST", "/v1/sidecars/join-tokens", {}))["join_token"]
    with state.locked():
        async with http_client(service.url, 5.0, wire) as http:
            keys = state.keys()
            enrolled = await enrol(http, join_token=token, name="node", keys=keys)
            yield Node(state, ControlClient(http, enrolled, keys, Clocks()), http, wire)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with (
        real_service(tmp_path / "service") as service,
        node_of(service, tmp_path / "sidecar") as started,
    ):
        yield started


async def test_it_changes_its_keys_while_calls_go_on_and_none_is_refused(node: Node) -> None:
    before = node.kid()
    thief = node.restarted()
    done = asyncio.Event()
    served = 0

    async def ask() -> None:
        nonlocal served
        while not done.is_set():
            await node.client.serving_lease("", 0)
            served += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(ask())
        for _ in range(3):
            await node.renewal.renew()
        done.set()
    assert served > 0
    assert node.kid() != before
    assert await node.serves()
    assert await node.restarted().serves()
    assert not await thief.serves()
    assert not node.state.has_next_keys()


@pytest.mark.parametrize("made", [True, False])
async def test_when_the_answer_is_lost_the_next_try_finds_out(node: Node, made: bool) -> None:
    before = node.kid()
    node.wire.lose_answer, node.wire.lose_question = made, not made
    with pytest.raises(Unavailable):
        await node.renewal.renew()
    node.wire.lose_answer = node.wire.lose_question = False
    assert node.kid() == before
    assert node.state.has_next_keys()
    # Also when it dies now: the keys that may be in force are on disk.
    for life in (node, node.restarted()):
        assert await life.serves() is not made
    reborn = node.restarted()
    await reborn.renewal.renew()
    assert await reborn.serves()
    assert reborn.kid() != before
    assert not reborn.state.has_next_keys()
    assert await reborn.restarted().serves()


async def test_a_death_between_the_two_files_is_mended_at_the_next_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sidecar import state as module

    real: Any = vars(module)["replace_file"]
    written: list[str] = []

    def dying(path: Path, content: bytes, *, sync: bool = True) -> None:
        if path.name == "signing.key":
            raise OSError("dead")
        written.append(path.name)
        real(path, content, sync=sync)

    monkeypatch.setattr(module, "replace_file", dying)
    with pytest.raises(OSError, match="dead"):
        await node.renewal.renew()
    monkeypatch.setattr(module, "replace_file", real)
    assert written == ["keys.next", "hpke.key"]
    reborn = node.restarted()
    assert not await reborn.serves()
    await reborn.renewal.renew()
    assert await reborn.serves()
    assert await reborn.restarted().serves()


async def test_old_keys_are_exchanged_by_the_running_task_and_young_ones_stay(node: Node) -> None:
    young = node.kid()
    running = asyncio.ensure_future(node.renewal.run())  # noqa: TID251
    await asyncio.sleep(0)
    assert node.kid() == young
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    os.utime(node.state.signing_key_path, (1, 1))
    running = asyncio.ensure_future(node.renewal.run())  # noqa: TID251
    async with asyncio.timeout(10):
        while node.kid() == young:
            await asyncio.sleep(0.01)
    running.cancel()
    assert await node.serves()


async def test_damaged_next_keys_are_told(node: Node) -> None:
    (node.state.path / "keys.next").write_bytes(secrets.token_bytes(63))
    (node.state.path / "keys.next").chmod(0o600)
    with pytest.raises(Corrupt):
        await node.renewal.renew()
    assert await node.serves()


async def test_the_one_that_is_alone_waits_for_all_and_keeps_the_next_out() -> None:
    turnstile = Turnstile()
    order: list[str] = []
    leave = asyncio.Event()

    async def pass_through(name: str) -> None:
        async with turnstile.through():
            order.append(f"{name} in")
            if name == "first":
                await leave.wait()
            order.append(f"{name} out")

    async def be_alone() -> None:
        async with turnstile.alone():
            order.append("alone in")
            await asyncio.sleep(0)
            order.append("alone out")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pass_through("first"))
        await asyncio.sleep(0)
        tasks.create_task(be_alone())
        await asyncio.sleep(0)
        tasks.create_task(pass_through("second"))
        await asyncio.sleep(0)
        assert order == ["first in"]
        leave.set()
    assert order == [
        "first in", "first out", "alone in", "alone out", "second in", "second out",
    ]  # fmt: skip
