"""Shedding a tenant: destroying the secrets that its records depend on, against deleting them.

Ours is the whole of what makes the tenant unreadable: the revocation of the tenant as the service
carries it out (every component's secret, the log entry, the signature, the journal's sync, the
audit, the commit, the cut of the write-ahead log). The reference deletes the tenant's records from
an indexed table so that they are gone as well: overwritten, committed, and cut out of the
write-ahead log. Each has `PAYLOAD_BYTES` of payload, far less than one token of any model's KV.
SQLite with full synchronisation and `secure_delete` on both sides; the service has revoked another
tenant before, as one that runs has.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.control.group import GROUP
from benchmarks.rows import Row, ratio
from benchmarks.suite import Bench, Suite
from service.app import create_app
from service.auth.issuer import bootstrap_operator_token
from service.db.migrate import upgrade
from service.settings import ServiceSettings

_BATCH: Final = 10_000
_DOCUMENTS: Final = 20
PAYLOAD_BYTES: Final = 512
_TABLE: Final = (
    "CREATE TABLE records (id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, block BLOB NOT NULL, "
    "namespace TEXT NOT NULL, payload BLOB NOT NULL)"
)


def measure(bench: Bench) -> list[Row]:
    """The row of the suite."""
    records = bench.scale.records
    bench.say(f"keys: one tenant of {records} records")
    pairs = []
    with bench.folder("keys") as folder:
        settings = ServiceSettings(state_directory=folder / "state")
        settings.state_directory.mkdir(mode=0o700)
        upgrade(settings.database)
        token = bootstrap_operator_token(settings)
        for number in bench.rounds("shedding a tenant"):
            tenant = asyncio.run(_onboard(settings, token, number))
            fill(folder / "records.db", tenant, records)
            shed_s = asyncio.run(_shed(settings, token, tenant))
            pairs.append((shed_s, _delete(folder / "records.db", tenant)))
    note = f"{records} records with {PAYLOAD_BYTES} bytes of payload; {_DOCUMENTS} documents"
    return [ratio("shed_vs_delete", "s", pairs, note=note)]


async def _onboard(settings: ServiceSettings, token: str, number: int) -> str:
    async with started(settings, token) as http:
        tenant = str((await post(http, "/v1/tenants", {"name": f"tenant-{number}"}))["id"])
        group = await post(http, f"/v1/tenants/{tenant}/groups", {"name": "clerks"})
        for each in range(_DOCUMENTS):
            path = f"/v1/tenants/{tenant}/documents"
            document = await post(http, path, {"name": f"d{each}"})
            body = {"content_digest": f"{each:064x}", "group": group["id"]}
            await post(http, f"{path}/{document['id']}/versions", body)
    return tenant


def fill(path: Path, tenant: str, records: int) -> None:
    """One row for each of the tenant's records, and an index by tenant, as a cache has one."""
    path.unlink(missing_ok=True)
    payload = bytes(range(256)) * (PAYLOAD_BYTES // 256)
    with closing(_open(path)) as connection:
        connection.execute(_TABLE)
        for start in range(0, records, _BATCH):
            connection.executemany(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?)",
                (
                    (number, tenant, number.to_bytes(32, "big"), tenant * 2, payload)
                    for number in range(start, min(records, start + _BATCH))
                ),
            )
        connection.execute("CREATE INDEX by_tenant ON records (tenant)")
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _delete(path: Path, tenant: str) -> float:
    with closing(_open(path)) as connection:
        begun = time.perf_counter()
        connection.execute("DELETE FROM records WHERE tenant = ?", (tenant,))
        connection.commit()
        # Until then the log holds what was deleted, as it would a destroyed secret.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        taken = time.perf_counter() - begun
        [[left]] = connection.execute("SELECT count(*) FROM records").fetchall()
    if left:
        raise AssertionError(f"{left} records are left")
    return taken


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")
    return connection


async def _shed(settings: ServiceSettings, token: str, tenant: str) -> float:
    asked = {"axis": "tenant", "reason": "offboarding", "wait": True}
    async with started(settings, token) as http:
        other = await post(http, "/v1/tenants", {"name": f"before-{tenant[:8]}"})
        await post(http, "/v1/revocations", asked | {"target": other["id"]})
        begun = time.perf_counter()
        answer = await post(http, "/v1/revocations", asked | {"target": tenant})
        taken = time.perf_counter() - begun
        if not answer["components_total"] > _DOCUMENTS:
            raise AssertionError("the tenant's secrets are still there")
    return taken


@asynccontextmanager
async def started(settings: ServiceSettings, token: str) -> AsyncIterator[httpx.AsyncClient]:
    """A running service, spoken to as its operator."""
    app = create_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://service",
            headers={"Authorization": f"Bearer {token}"},
        ) as http,
    ):
        yield http


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer; an error is raised."""
    response = await http.post(path, json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


SUITE = Suite(
    name="control-keys",
    summary="making a tenant unreadable against deleting its records",
    rows=("shed_vs_delete",),
    measure=measure,
    group=GROUP,
)
