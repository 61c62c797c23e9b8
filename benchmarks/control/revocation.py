"""Committing a revocation: a document with many dependent blocks against one with few.

The service has no row for a block. What grows with what depends on a document are namespaces, so
each dependent block is given a namespace of its own, which is the most that a database can be made
to hold for so many blocks. A sample is `POST /v1/revocations` without waiting: the secret, the
log's entry, the signature, the journal's sync, the audit, the commit, the cut of the write-ahead
log. SQLite with full synchronisation. How the fence at a sidecar scales is `revoke_scaling`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import httpx

from benchmarks.control.group import GROUP
from benchmarks.control.keys import post, started
from benchmarks.rows import Row, ratio
from benchmarks.suite import Bench, Suite
from service.auth.issuer import bootstrap_operator_token
from service.db.migrate import upgrade
from service.settings import ServiceSettings

FEW: Final = 10
_BATCH: Final = 10_000
_ROUNDS_MAX: Final = 5
"""Each makes every namespace depend on one more document."""
_MS: Final = 1e3


def measure(bench: Bench) -> list[Row]:
    """The row of the suite."""
    many = bench.scale.records
    with bench.folder("revocation") as folder:
        settings = ServiceSettings(state_directory=folder / "state")
        settings.state_directory.mkdir(mode=0o700)
        upgrade(settings.database)
        token = bootstrap_operator_token(settings)
        rounds = min(bench.scale.rounds, _ROUNDS_MAX)
        tenant, versions = asyncio.run(_register(settings, token, 2 * rounds + 1))
        path = Path(settings.database.removeprefix("sqlite+aiosqlite:///"))
        bench.say(f"revocation: {many} namespaces")
        add_namespaces(path, tenant, many)
        samples = []
        for number in range(rounds):
            bench.say(f"revocation: round {number + 1} of {rounds}")
            big, small = versions[2 * number], versions[2 * number + 1]
            add_dependents(path, big, many)
            add_dependents(path, small, min(FEW, many))
            order = (big, small) if number % 2 else (small, big)
            taken = asyncio.run(_revoke(settings, token, versions[-1] if not number else "", order))
            samples.append((taken[big], taken[small]))
    note = f"{many} dependent blocks, each in a namespace of its own, against {FEW}"
    return [ratio("revoke_commit_scaling", "ms", samples, note=note)]


async def _register(settings: ServiceSettings, token: str, documents: int) -> tuple[str, list[str]]:
    async with started(settings, token) as http:
        tenant = str((await post(http, "/v1/tenants", {"name": "acme"}))["id"])
        group = await post(http, f"/v1/tenants/{tenant}/groups", {"name": "clerks"})
        versions = []
        for number in range(documents):
            path = f"/v1/tenants/{tenant}/documents"
            document = await post(http, path, {"name": f"d{number}"})
            body = {"content_digest": f"{number:064x}", "group": group["id"]}
            versions.append((await post(http, f"{path}/{document['id']}/versions", body))["id"])
    return tenant, versions


def add_namespaces(path: Path, tenant: str, count: int) -> None:
    """So many namespaces of `tenant`."""
    with closing(sqlite3.connect(path)) as connection:
        for batch in _batches(count):
            connection.executemany(
                "INSERT INTO namespaces (id, tenant, created_at) VALUES (?, ?, ?)",
                ((f"{number:064x}", tenant, "2026-01-01 00:00:00.000000") for number in batch),
            )
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def add_dependents(path: Path, component: str, count: int) -> None:
    """Have the first `count` namespaces depend on `component` too."""
    with closing(sqlite3.connect(path)) as connection:
        for batch in _batches(count):
            connection.executemany(
                "INSERT INTO namespace_components (namespace, component, position) "
                "VALUES (?, ?, 6)",
                ((f"{number:064x}", component) for number in batch),
            )
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _batches(count: int) -> Iterator[range]:
    for start in range(0, count, _BATCH):
        yield range(start, min(count, start + _BATCH))


async def _revoke(
    settings: ServiceSettings, token: str, first: str, order: tuple[str, str]
) -> dict[str, float]:
    taken: dict[str, float] = {}
    async with started(settings, token) as http:
        # A service that runs has revoked before: what is made once is made.
        warm = await post(http, "/v1/tenants", {"name": f"before-{order[0]}"})
        await _commit(http, "tenant", warm["id"])
        if first:
            await _commit(http, "document_version", first)
        for version in order:
            begun = time.perf_counter()
            answer = await _commit(http, "document_version", version)
            taken[version] = (time.perf_counter() - begun) * _MS
            if answer != [version]:
                raise AssertionError("another component was destroyed")
    return taken


async def _commit(http: httpx.AsyncClient, axis: str, target: str) -> list[str]:
    asked = {"axis": axis, "target": target, "reason": "benchmark", "wait": False}
    components: list[str] = (await post(http, "/v1/revocations", asked))["components"]
    return components


SUITE = Suite(
    name="control-revocation",
    summary="committing a revocation, with many dependent blocks against few",
    rows=("revoke_commit_scaling",),
    measure=measure,
    group=GROUP,
)
