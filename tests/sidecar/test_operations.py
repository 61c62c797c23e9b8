"""The operator's door: who may reach it, what it tells whom, and what clears a breaker."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.degrade.conditions import Condition
from sidecar.degrade.stance import Action
from sidecar.operations.door import TcpPlace, open_place, place_of
from sidecar.operations.doorway import CONNECTIONS_MAX
from strongroom.errors import Misuse
from tests.sidecar.harness import World, harness

TOKEN = "an-operator-of-this-node"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
PATHS = ("/metrics", "/healthz", "/readyz", "/v1/state", "/v1/events", "/v1/breakers/thrash")


@asynccontextmanager
async def door(
    directory: Path, *, tcp: bool = False, token: bool = True
) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """A sidecar with a door on a Unix socket, or on a free port of loopback."""
    token_file = directory / "operator.token"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN + "\n")
    listen = f"unix:{directory / 'm' / 'm.sock'}"
    if tcp:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            listen = f"127.0.0.1:{probe.getsockname()[1]}"
    async with harness(
        directory,
        metrics_listen=listen,
        watch_interval_s=3600,
        operator_token_file=token_file if token else None,
    ) as world:
        transport = None if tcp else httpx.AsyncHTTPTransport(uds=str(directory / "m" / "m.sock"))
        base = f"http://{listen}" if tcp else "http://sidecar"
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            yield world, client


def is_problem(answer: httpx.Response, status: int, code: str) -> bool:
    """RFC 9457, and nothing of the input in it."""
    body = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["type"] == f"urn:strongroom:{code}"
    assert body["title"]
    return (answer.status_code, body["status"], body["code"]) == (status, status, code)


# Where it listens


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:9464", TcpPlace("127.0.0.1", 9464)),
        ("[::1]:0", TcpPlace("::1", 0)),
        ("unix:/run/strongroom/m.sock", Path("/run/strongroom/m.sock")),
    ],
)
def test_loopback_and_sockets_are_places(text: str, place: object) -> None:
    assert place_of(text, beyond_loopback=False) == place


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0:9464", "[::]:9464", "10.1.2.3:1", "localhost:1", ":1", "127.0.0.1", "127.0.0.1:x",
     "127.0.0.1:65536", "unix:relative.sock", "", "example.org:80"],
)  # fmt: skip
def test_what_others_can_reach_or_nobody_understands_is_refused(text: str) -> None:
    with pytest.raises(Misuse):
        place_of(text, beyond_loopback=False)


def test_beyond_loopback_has_to_be_said() -> None:
    assert place_of("0.0.0.0:9464", beyond_loopback=True) == TcpPlace("0.0.0.0", 9464)


def test_the_unix_socket_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "m" / "m.sock"
    with open_place(path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(Misuse), open_place(path):
        pass


async def test_without_the_setting_there_is_no_door(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        assert world.sidecar.settings.metrics_listen is None
        assert not list(tmp_path.glob("m/*"))


async def test_the_door_is_shut_with_the_sidecar(tmp_path: Path) -> None:
    async with door(tmp_path, tcp=True) as (_, client):
        assert (await client.get("/healthz")).status_code == 200
        url = str(client.base_url)
    async with httpx.AsyncClient(base_url=url) as late:
        with pytest.raises(httpx.ConnectError):
            await late.get("/healthz")


# What it tells


async def test_metrics_are_an_exposition_without_names(tmp_path: Path) -> None:
    async with door(tmp_path) as (world, client):
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(1000, 1300))
        await engine.compute_and_save("a-request", granted)
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        families = {f.name: f for f in text_string_to_metric_families(answer.text)}
        stored = families["strongroom_tier_blocks"].samples
        assert {s.labels["tier"]: s.value for s in stored}["host"] == 5
        for hidden in ("a-request", granted.claims.sub, granted.claims.jti, granted.salt,
                       *granted.namespaces, str(tmp_path)):  # fmt: skip
            assert hidden not in answer.text
        assert world.tenant.id in answer.text


async def test_state_shows_what_is_in_force(tmp_path: Path) -> None:
    async with door(tmp_path) as (world, client):
        state = (await client.get("/v1/state")).json()
        assert state["action"] == "none"
        assert [tier["name"] for tier in state["tiers"]] == ["host", "nvme"]
        assert {breaker["name"] for breaker in state["breakers"]} == set(Condition)
        world.sidecar.watch.breakers.note(Condition.CROSS_TENANT, 1, 1)
        state = (await client.get("/v1/state")).json()
        assert state["action"] == "refuse"
        tripped = [b["name"] for b in state["breakers"] if b["state"] == "tripped"]
        assert tripped == ["cross_tenant_hit"]


async def test_ready_is_having_a_lease_and_health_is_answering(tmp_path: Path) -> None:
    async with door(tmp_path) as (world, client):
        assert (await client.get("/readyz")).json() == {"status": "ready"}
        world.sidecar.gate.shut("this sidecar was retired")
        assert is_problem(await client.get("/readyz"), 503, "unavailable")
        assert (await client.get("/healthz")).status_code == 200


async def test_events_go_on_where_the_reader_left_off(tmp_path: Path) -> None:
    async with door(tmp_path) as (world, client):
        engine = await world.engine()
        await engine.open("r", world.control.grant(world.tenant, range(1000, 1300)))
        world.sidecar.watch.breakers.note(Condition.CHECKSUM, 3, 3)
        first = await client.get("/v1/events", params={"limit": "1"})
        assert first.headers["strongroom-events-lost"] == "false"
        (line,) = first.text.splitlines()
        assert json.loads(line)["request"] == "r"
        rest = await client.get(
            "/v1/events", params={"after": first.headers["strongroom-events-next"]}
        )
        kinds = [json.loads(line)["kind"] for line in rest.text.splitlines()]
        assert kinds == ["prefix_miss", "action", "breaker_tripped"]
        again = await client.get(
            "/v1/events", params={"after": rest.headers["strongroom-events-next"]}
        )
        assert again.text == ""


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=10001", "after=" + "9" * 30])
async def test_a_number_that_is_none_is_named(tmp_path: Path, query: str) -> None:
    async with door(tmp_path) as (_, client):
        answer = await client.get(f"/v1/events?{query}")
        assert is_problem(answer, 422, "misuse")
        assert answer.json()["field"] == query.split("=", maxsplit=1)[0]


# Who may


async def test_over_tcp_events_and_evidence_need_the_token(tmp_path: Path) -> None:
    async with door(tmp_path, tcp=True) as (_, client):
        for path in ("/v1/events", "/v1/breakers/thrash"):
            answer = await client.get(path)
            assert is_problem(answer, 401, "unauthenticated")
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert (await client.get(path, headers=SHOWN)).status_code == 200
        for path in ("/metrics", "/healthz", "/readyz", "/v1/state"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("tcp", [True, False])
async def test_clearing_needs_the_token_and_does_it(tmp_path: Path, tcp: bool) -> None:
    async with door(tmp_path, tcp=tcp) as (world, client):
        breakers = world.sidecar.watch.breakers
        breakers.note(Condition.CROSS_TENANT, 1, 1)
        path = "/v1/breakers/cross_tenant_hit"
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN},
                      {"Authorization": f"Bearer {TOKEN}x"}):  # fmt: skip
            assert is_problem(await client.post(f"{path}/clear", headers=wrong), 401,
                              "unauthenticated")  # fmt: skip
            assert breakers.states()[Condition.CROSS_TENANT].__class__.__name__ == "Tripped"
        evidence = (await client.get(path, headers=SHOWN)).json()
        assert evidence["state"] == "tripped"
        assert evidence["trip"]["condition"] == "cross_tenant_hit"
        answer = await client.post(f"{path}/clear", headers=SHOWN)
        assert answer.json() == {"name": "cross_tenant_hit", "state": "armed"}
        assert breakers.action is Action.NONE
        again = await client.post(f"{path}/clear", headers=SHOWN)
        assert is_problem(again, 409, "conflict")


async def test_without_a_token_file_nothing_is_cleared(tmp_path: Path) -> None:
    async with door(tmp_path, token=False) as (world, client):
        world.sidecar.watch.breakers.note(Condition.CHECKSUM, 3, 3)
        answer = await client.post("/v1/breakers/checksum_mismatch/clear", headers=SHOWN)
        assert is_problem(answer, 403, "refused")
        assert world.sidecar.watch.breakers.action is Action.ENGINE_ONLY


@pytest.mark.parametrize("content", ["", "short"])
async def test_an_empty_or_short_token_file_opens_nothing(tmp_path: Path, content: str) -> None:
    async with door(tmp_path) as (world, client):
        (tmp_path / "operator.token").write_text(content)
        world.sidecar.watch.breakers.note(Condition.CHECKSUM, 3, 3)
        for shown in (content, TOKEN):
            answer = await client.post(
                "/v1/breakers/checksum_mismatch/clear",
                headers={"Authorization": f"Bearer {shown}".strip()},
            )
            assert is_problem(answer, 401, "unauthenticated")


async def test_a_token_file_that_others_can_read_opens_nothing(tmp_path: Path) -> None:
    async with door(tmp_path) as (world, client):
        (tmp_path / "operator.token").chmod(0o644)
        world.sidecar.watch.breakers.note(Condition.CHECKSUM, 3, 3)
        answer = await client.post("/v1/breakers/checksum_mismatch/clear", headers=SHOWN)
        assert is_problem(answer, 503, "unavailable")
        # Whoever shows no token does not learn where it lies.
        answer = await client.post("/v1/breakers/checksum_mismatch/clear")
        assert "operator.token" not in answer.text
        assert world.sidecar.watch.breakers.action is Action.ENGINE_ONLY


async def test_what_is_not_there_and_what_is_done_otherwise(tmp_path: Path) -> None:
    async with door(tmp_path) as (_, client):
        assert is_problem(await client.get("/v2"), 404, "missing")
        assert is_problem(await client.get("/v1/breakers/nothing"), 404, "missing")
        unknown = await client.post("/v1/breakers/nothing/clear", headers=SHOWN)
        assert is_problem(unknown, 404, "missing")
        for path in PATHS:
            answer = await client.post(path)
            assert is_problem(answer, 405, "method_not_allowed")
            assert answer.headers["allow"] == "GET"
        answer = await client.get("/v1/breakers/thrash/clear", headers=SHOWN)
        assert is_problem(answer, 405, "method_not_allowed")


async def test_a_fault_of_ours_is_a_plain_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(tmp_path) as (_, client):

        def broken(_: object) -> None:
            raise RuntimeError("a secret of ours")

        monkeypatch.setattr("sidecar.operations.door.state_of", broken)
        answer = await client.get("/v1/state")
        assert is_problem(answer, 500, "error")
        assert "secret" not in answer.text


# Who only holds it open


async def test_who_holds_connections_open_does_not_keep_the_operator_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.operations.doorway.HEAD_S", 3600.0)
    async with door(tmp_path, tcp=True) as (_, client):
        host, port = client.base_url.host, client.base_url.port
        held = [await asyncio.open_connection(host, port) for _ in range(2 * CONNECTIONS_MAX)]
        for path in ("/healthz", "/metrics"):
            assert (await client.get(path)).status_code == 200
        # The oldest had to go; the door does not grow.
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                assert await held[0][0].read() == b""
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nx: "])
async def test_who_does_not_ask_in_time_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr("sidecar.operations.doorway.HEAD_S", 0.05)
    async with door(tmp_path, tcp=True) as (_, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(begun)
        async with asyncio.timeout(4):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_what_is_no_http_gets_problem_details(tmp_path: Path) -> None:
    async with door(tmp_path, tcp=True) as (_, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nbad header\r\n\r\n")
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"application/problem+json" in answer
        assert b"bad header" not in answer
