"""`strongroom status` and `clear` against a running sidecar's door."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from cli import status
from cli.api import Api
from cli.main import app
from sidecar.degrade.conditions import Condition
from sidecar.degrade.stance import Action
from strongroom.errors import Misuse, Unavailable
from strongroom.wire.frames import Report
from tests.sidecar.harness import World, harness

TOKEN = "an-operator-of-this-node"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("cli.main.console._width", 200)


async def run(*arguments: str) -> Result:
    """In a thread: the sidecar runs on this one."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, list(arguments)))


def door(directory: Path) -> str:
    return f"unix:{directory / 'm' / 's'}"


def token(directory: Path, text: str = TOKEN) -> str:
    path = directory / "operator.token"
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


async def prepared(world: World) -> None:
    """An engine with a stored prompt that is short of pages, and a tripped breaker."""
    engine = await world.engine()
    granted = world.control.grant(world.tenant, range(1000, 1300))
    await engine.compute_and_save("saved", granted)
    world.sidecar.watch.reported("engine-a", Report(1000, 345, 2, 1, 0, 0, 0, 0))
    world.sidecar.watch.breakers.note(Condition.CHECKSUM, 3, 3)


async def test_status_shows_tiers_engines_breakers_and_what_is_in_force(tmp_path: Path) -> None:
    async with harness(tmp_path, metrics_listen=door(tmp_path), watch_interval_s=3600) as world:
        in_order = await run("status", "--at", door(tmp_path))
        assert in_order.exit_code == 0, in_order.stderr
        assert "everything is in order" in in_order.output
        assert "tripped" not in in_order.output
        await prepared(world)
        shown = await run("status", "--at", door(tmp_path))
        assert "engine_only" in shown.output
        for line in (("host", "5", "8.0 MiB"), ("engine-a", "345", "1000", "engine_only"),
                     ("checksum_mismatch", "tripped"), ("thrash", "armed"),
                     ("crypto", "1024", "normal")):  # fmt: skip
            assert any(all(word in row for word in line) for row in shown.output.splitlines())
        as_json = await run("status", "--at", door(tmp_path), "--json")
        assert json.loads(as_json.output)["action"] == "engine_only"


async def test_a_state_that_only_a_newer_sidecar_knows_is_shown_as_it_is(tmp_path: Path) -> None:
    async with harness(tmp_path, metrics_listen=door(tmp_path)):
        as_json = await run("status", "--at", door(tmp_path), "--json")
    found = json.loads(as_json.output)
    found["breakers"][0]["state"] = "[bold]melted[/]"
    found["pressure"].clear()
    console = Console(width=200, record=True, file=io.StringIO())
    status.show(found, console)
    shown = console.export_text()
    assert "[bold]melted[/]" in shown
    assert "unknown" in shown


async def test_clear_needs_the_token_and_arms_the_breaker(tmp_path: Path) -> None:
    path = token(tmp_path)
    settings = {"metrics_listen": door(tmp_path), "operator_token_file": path}
    async with harness(tmp_path, watch_interval_s=3600, **settings) as world:  # type: ignore[arg-type]
        breakers = world.sidecar.watch.breakers
        breakers.note(Condition.CROSS_TENANT, 1, 1)
        (tmp_path / "wrong").mkdir()
        wrong = token(tmp_path / "wrong", "somebody-elses-token")
        arguments = ("clear", "cross_tenant_hit", "--at", door(tmp_path), "--operator-token-file")
        refused = await run(*arguments, wrong)
        assert refused.exit_code == 3
        assert breakers.action is Action.REFUSE
        assert (await run(*arguments, path)).exit_code == 0
        assert breakers.action.value == "none"
        assert (await run(*arguments, path)).exit_code == 5
        missing = await run("clear", "nothing", "--at", door(tmp_path), *arguments[-1:], path)
        assert missing.exit_code == 4


@pytest.mark.parametrize("at", ["127.0.0.1:1", "unix:/nowhere/at/all"])
async def test_nobody_there_says_how_to_start_one(at: str) -> None:
    result = await run("status", "--at", at)
    assert result.exit_code == 7
    assert "--metrics" in result.stderr


class Overheard(http.server.BaseHTTPRequestHandler):
    """A proxy that remembers what went through it."""

    seen: ClassVar[list[str]] = []

    def _answer(self) -> None:
        self.seen.append(self.path)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = _answer  # noqa: N815 - the names that the library calls

    def log_message(self, *_: object) -> None:
        """Nothing to the terminal."""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A proxy that the environment names, and what it heard."""
    Overheard.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Overheard) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield Overheard.seen
        server.shutdown()
        thread.join()


def test_no_token_goes_to_a_proxy_of_the_environment(tmp_path: Path, proxy: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unavailable), status.door(nobody) as client:
        status.clear(client, "thrash", Path(token(tmp_path)))
    with Api(f"http://{nobody}", TOKEN) as api, pytest.raises(Unavailable):
        api.get("/v1/sidecars")
    assert proxy == []
    # It would have heard of them: the environment does name it.
    httpx.get(f"http://{nobody}/")
    assert len(proxy) == 1


def test_a_token_goes_over_no_network_in_clear(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="in clear"), status.door("192.0.2.1:9464") as client:
        status.clear(client, "thrash", Path(token(tmp_path)))
