"""How fast news is everywhere, and how many grants a process gives.

Two replicas run as processes of their own over one PostgreSQL. The sidecars are the followers that
a sidecar has, half of them at each replica, all in this process: their own work is in the figure,
on the same cores. A sample is one sidecar's: from the moment a revocation is *asked* for (so it
contains the commit) to the answer to its acknowledgement.

Grants come from one replica, asked for by clients that write bytes and read bytes, many at once,
for subjects and documents in turn; the reference is `benchmarks.control.floor`, asked in the same
way. Each has a process; PostgreSQL and the clients share the cores with it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from benchmarks.control.group import GROUP
from benchmarks.control.postgres import lacks, postgres
from benchmarks.rows import Row, absolute, ratio
from benchmarks.suite import ROOT, Bench, Suite
from cli.environment import child_environment
from service.auth.issuer import bootstrap_operator_token, open_issuer
from service.auth.tokens import Role
from service.db.migrate import upgrade
from service.settings import ServiceSettings
from sidecar.clocks import Clocks
from sidecar.control.client import ControlClient, enrol, http_client
from sidecar.state import StateDirectory
from strongroom.control import AckRequest, Typ
from strongroom.private_files import private_directory

_START_S: Final = 60.0
_KINDS: Final = ("model", "tokenizer", "template", "policy")
_AT_ONCE: Final = 16
"""Clients that ask for grants."""
_SUBJECTS: Final = 20
_DOCUMENTS: Final = 20
_DIGEST: Final = "ab" * 32


def measure(bench: Bench) -> list[Row]:
    """Both rows."""
    with bench.folder("propagation") as folder, postgres(folder / "pg") as url:
        settings = ServiceSettings(state_directory=folder / "state", database_url=url)
        settings.state_directory.mkdir(mode=0o700)
        upgrade(url)
        token = bootstrap_operator_token(settings)
        with ExitStack() as stack:
            one = stack.enter_context(_replica(settings))
            two = stack.enter_context(_replica(settings))
            plain = stack.enter_context(_floor(url))
            waits = asyncio.run(_propagation(bench, folder, [one, two], token))
            rates = asyncio.run(_grants(bench, settings, one, plain, token))
    sidecars = bench.scale.sidecars
    return [
        absolute(
            "propagation_ms_p99",
            "ms",
            waits,
            note=f"{sidecars} sidecars, two replicas; reference: the median sidecar's",
        ),
        ratio("grants_per_s_vs_floor", "1/s", rates, note=f"{_AT_ONCE} clients at once"),
    ]


@contextmanager
def _process(command: Sequence[str], url: str, ready: str, **settings: str) -> Iterator[str]:
    environment = child_environment() | settings
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment)
    try:
        ends = time.monotonic() + _START_S
        while True:
            try:
                if httpx.get(url + ready).status_code < 500:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"{command[0]} has not started")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _replica(settings: ServiceSettings) -> Iterator[str]:
    port = _free_port()
    state = str(settings.state_directory)
    command = ["cli.main", "serve", "--state", state, "--port", str(port)]
    limits = {
        f"STRONGROOM_SERVICE_{name}_REQUESTS_PER_MIN": "10000000"
        for name in ("PRINCIPAL", "TENANT", "SIDECAR")
    }
    database = {"STRONGROOM_SERVICE_DATABASE_URL": settings.database_url}
    with _process(command, f"http://127.0.0.1:{port}", "/readyz", **limits, **database) as url:
        yield url


@contextmanager
def _floor(database: str) -> Iterator[str]:
    port = _free_port()
    command = ["benchmarks.control.floor", database, str(port)]
    with _process(command, f"http://127.0.0.1:{port}", "/floor") as url:
        yield url


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await http.post(path, json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def _operator(url: str, token: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60, trust_env=False
    )


# News


class _Acked:
    """When each sidecar's acknowledgement of a seq was answered."""

    def __init__(self, sidecars: int) -> None:
        self._sidecars = sidecars
        self._at: dict[int, list[float]] = {}
        self.changed = asyncio.Event()

    def note(self, seq: int) -> None:
        self._at.setdefault(seq, []).append(time.perf_counter())
        self.changed.set()

    async def everybody(self, seq: int) -> list[float]:
        while len(self._at.get(seq, [])) < self._sidecars:
            self.changed.clear()
            await self.changed.wait()
        return self._at[seq]


async def _propagation(
    bench: Bench, folder: Path, urls: Sequence[str], token: str
) -> list[tuple[float, float]]:
    scale = bench.scale
    acked, pairs = _Acked(scale.sidecars), []
    async with AsyncExitStack() as stack:
        operator = await stack.enter_async_context(_operator(urls[0], token))
        tenant = (await _post(operator, "/v1/tenants", {"name": "news"}))["id"]
        group = (await _post(operator, f"/v1/tenants/{tenant}/groups", {"name": "all"}))["id"]
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        following = []
        for number in range(scale.sidecars):
            http = await stack.enter_async_context(
                http_client(urls[number % len(urls)], timeout_s=60)
            )
            client = await _enrolled(operator, http, folder / f"node-{number}")
            ready = asyncio.Event()
            following.append(tasks.create_task(_follow(client, acked, ready)))
            await ready.wait()
        for number in bench.rounds("propagation"):
            samples: list[float] = []
            for each in range(scale.revocations):
                document = await _document(operator, tenant, group, f"d-{number}-{each}")
                asked = time.perf_counter()
                answer = await _post(
                    operator,
                    "/v1/revocations",
                    {"axis": "document_version", "target": document, "reason": "x"},
                )
                if {standing["state"] for standing in answer["sidecars"]} != {"fenced"}:
                    raise AssertionError("a sidecar's lease ran out first")
                samples += [at - asked for at in await acked.everybody(answer["seq"])]
            samples.sort()
            pairs.append((_quantile(samples, 0.99) * 1e3, _quantile(samples, 0.5) * 1e3))
        for task in following:
            task.cancel()
    return pairs


async def _enrolled(
    operator: httpx.AsyncClient, http: httpx.AsyncClient, state: Path
) -> ControlClient:
    private_directory(state)
    keys = StateDirectory(state).keys()
    join = (await _post(operator, "/v1/sidecars/join-tokens", {}))["join_token"]
    enrolled = await enrol(http, join_token=join, name=state.name, keys=keys)
    return ControlClient(http, enrolled, keys, Clocks())


async def _follow(client: ControlClient, acked: _Acked, ready: asyncio.Event) -> None:
    """What a sidecar does with each entry, but for the keys and requests that it has not."""
    page = await client.log_page("", 0)
    lease = await client.serving_lease(page.epoch, page.head_seq)
    ready.set()
    async for jws in client.stream(page.epoch, lease.claims.seq, 30.0):
        entry = json.loads(client.verifier.verify(Typ.LOG, jws))
        await client.acknowledge(AckRequest(epoch=page.epoch, seq=entry["seq"], state="fenced"))
        acked.note(entry["seq"])


async def _document(operator: httpx.AsyncClient, tenant: str, group: str, name: str) -> str:
    path = f"/v1/tenants/{tenant}/documents"
    document = (await _post(operator, path, {"name": name}))["id"]
    body = {"content_digest": _DIGEST, "group": group}
    return str((await _post(operator, f"{path}/{document}/versions", body))["id"])


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Grants


@dataclass(frozen=True, slots=True)
class _Target:
    """Where requests go, and the requests, in turn."""

    url: str
    requests: Sequence[bytes]


async def _grants(
    bench: Bench, settings: ServiceSettings, url: str, plain: str, token: str
) -> list[tuple[float, float]]:
    async with _operator(url, token) as operator:
        requests, tenant = await _grant_requests(operator, settings)
    ours = _Target(url, requests)
    floor = _Target(plain, [_request(f"/floor/{tenant}", b"")])
    asked = bench.scale.grants
    for target in (ours, floor):
        await _per_second(target, max(_AT_ONCE, asked // 4))
    pairs = []
    for number in bench.rounds("grants"):
        order = (ours, floor) if number % 2 else (floor, ours)
        rates = {target.url: await _per_second(target, asked) for target in order}
        pairs.append((rates[url], rates[plain]))
    return pairs


async def _grant_requests(
    operator: httpx.AsyncClient, settings: ServiceSettings
) -> tuple[list[bytes], str]:
    tenant = (await _post(operator, "/v1/tenants", {"name": "grants"}))["id"]
    where = f"/v1/tenants/{tenant}"
    group = (await _post(operator, f"{where}/groups", {"name": "all"}))["id"]
    issuer = open_issuer(settings)
    tokens = []
    for number in range(_SUBJECTS):
        name = f"s{number}"
        await _post(operator, f"{where}/principals", {"name": name})
        await _post(operator, f"{where}/memberships", {"group": group, "principal": name})
        tokens.append(issuer.issue(name, tenant, (Role.SUBJECT,), 3600))
    documents = [
        await _document(operator, tenant, group, f"g{number}") for number in range(_DOCUMENTS)
    ]
    artefacts = {}
    for kind in _KINDS:
        body = {"kind": kind, "name": kind, "revision": "1", "digest": _DIGEST}
        artefacts[kind] = (await _post(operator, "/v1/artefacts", body))["id"]
    requests = []
    for number, document in enumerate(documents * _SUBJECTS):
        body = artefacts | {
            "adapter": "none",
            "spans": [
                {"end": 96, "group": "everyone"},
                {"end": 1792, "document": document},
                {"end": 1810, "group": "private"},
            ],
            "prompt_tokens": 1810,
            "prompt_digest": _DIGEST,
            "operations": ["read", "write"],
        }
        requests.append(
            _request("/v1/grants", json.dumps(body).encode(), tokens[number // _DOCUMENTS])
        )
    # So that neighbours in time differ in both.
    return [requests[(7 * number) % len(requests)] for number in range(len(requests))], tenant


def _request(path: str, body: bytes, token: str = "") -> bytes:
    bearer = f"Authorization: Bearer {token}\r\n" if token else ""
    kind = "Content-Type: application/json\r\n" if body else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{bearer}{kind}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _per_second(target: _Target, asked: int) -> float:
    """How many of `asked` requests are answered a second."""
    numbers = iter(range(asked))

    async def client() -> None:
        async with _connected(target.url) as (reader, writer):
            for number in numbers:
                writer.write(target.requests[number % len(target.requests)])
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 20"):
                    raise AssertionError(head.decode())
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                await reader.readexactly(int(length))

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(client())
    return asked / (time.perf_counter() - begun)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


SUITE = Suite(
    name="control-propagation",
    summary="news to a hundred sidecars over two replicas, and grants against an empty endpoint",
    rows=("propagation_ms_p99", "grants_per_s_vs_floor"),
    measure=measure,
    lacks=lacks,
    group=GROUP,
)
