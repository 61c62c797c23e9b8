"""SIGKILL at random points under load, two hundred times, against the real service.

A life of the sidecar ends at its n-th frame, n drawn from a seed, or before it answers at all.
Three clients save, look up and load meanwhile, and documents are revoked. Whatever is restored
must be what was saved; what was revoked must never hit again; and at the end the disk holds
nothing that nobody may read, all of its room can be used again, and the audit has every access.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random  # noqa: TID251 - a seeded order of steps, no secret
from typing import Any, cast

import pytest

from storage.compose import StoreSettings, open_store
from storage.fence import Fence
from storage.header import record_bytes
from storage.store import BlockStore
from storage.tiers.protocol import TierName, TierStatistics
from strongroom.identity import NamespaceId
from strongroom.wire.frames import PROTOCOL_VERSION, Finish, Hello, Lease, SidecarFrame
from tests.sidecar.control_plane import Granted
from tests.sidecar.harness import (
    DIGESTS,
    ENGINE,
    FORMAT,
    MIB,
    PAGE_BYTES,
    Engine,
    Wire,
    block_content,
    layout,
)
from tests.sidecar.real_service import RealGrant, RealService, real_service
from tests.sidecar.sidecar_process import killed, start
from tests.storage.support import KEYS, context, plaintext

LIVES = 200
CLIENTS = 3
DOCUMENTS = 6
REVOKE_EVERY = 10
RENEW_EVERY = 2
"""Lives after which a document makes way for a new one, so that something is saved throughout."""
SHARED = 100
"""Tokens of a prompt before its document begins."""
WHOLE = 288
Gone = (ConnectionError, asyncio.IncompleteReadError, BrokenPipeError)

pytestmark = pytest.mark.timeout(1200)


@dataclass
class Fuse:
    """Kills its process when the clients have read so many frames."""

    process: BaseProcess
    frames: int

    def burn(self) -> None:
        self.frames -= 1
        if self.frames == 0:
            self.process.kill()


class CountedWire(Wire):
    """A connection whose frames count."""

    fuse: Fuse | None = None

    async def receive(self) -> SidecarFrame:
        frame = await super().receive()
        if self.fuse is not None:
            self.fuse.burn()
        return frame


@dataclass
class Tally:
    """What the clients saw, over all lives."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    broken: int = 0
    saved: int = 0
    early: int = 0


@dataclass
class House:
    """The service, one tenant, and the documents that prompts are made of."""

    service: RealService
    tenant: str
    group: str
    folder: Path
    random: Random
    documents: list[str] = field(default_factory=list)
    dead: set[NamespaceId] = field(default_factory=set)
    rooms: dict[str, set[NamespaceId]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    made: int = 0

    async def new_document(self) -> None:
        self.made += 1
        name = f"document-{self.made}"
        self.documents.append(await self.service.document(self.tenant, name, self.group))

    async def renew_one(self) -> None:
        """A new document in place of the oldest, which is not revoked: nobody asks for it."""
        self.documents.pop(0)
        await self.new_document()

    async def grant(self, document: str) -> RealGrant:
        prompt = prompt_of(document)
        spans = [{"end": SHARED, "group": "everyone"}, {"end": len(prompt), "document": document}]
        grant = await self.service.grant(self.tenant, "alice", prompt, spans)
        for span in claims(grant)["spans"]:
            if span["end"] > SHARED:
                self.rooms.setdefault(document, set()).add(NamespaceId(span["namespace"]))
        return grant

    async def revoke_one(self) -> None:
        """Revoke a document; from the answer on it must be nowhere."""
        document = self.documents.pop(self.random.randrange(len(self.documents)))
        await self.service.revoke("document_version", document)
        self.dead |= self.rooms.get(document, set())
        gone = await self.grant(document)
        assert gone.granted_tokens <= SHARED, "a revoked document was granted"
        await self.new_document()

    def settings(self, join_token: str) -> dict[str, Any]:
        return {
            "state_directory": self.folder / "state",
            "socket_path": self.folder / "run" / "s.sock",
            "engine_tokens": self.folder / "tokens",
            "nvme_path": self.folder / "nvme",
            "service_url": self.service.url,
            "join_token": join_token,
            "tokens_per_block": 64,
            "staging_bytes": MIB,
            "host_bytes": 8 * MIB,
            "nvme_bytes": 8 * MIB,
            "region_bytes": MIB,
            "crypto_threads": 1,
            "ship_interval_s": 0.02,
            "catch_up_s": 15,
            "control_timeout_s": 15,
        }

    async def engine(self, name: str, process: BaseProcess) -> Engine | None:
        """Connected, once the sidecar listens; None when it died before."""
        hello = {
            "version": PROTOCOL_VERSION,
            "engine": name,
            "token": "engine-token",
            "digests": DIGESTS,
            "format": FORMAT,
            "layout": layout(),
        }
        socket_path = self.folder / "run" / "s.sock"
        while process.is_alive():
            with suppress(OSError, *Gone):
                worker = await CountedWire.connect(
                    socket_path,
                    Hello(role="worker", **hello),  # type: ignore[arg-type]
                )
                scheduler = await CountedWire.connect(
                    socket_path,
                    Hello(role="scheduler", **hello),  # type: ignore[arg-type]
                )
                return Engine(scheduler, [worker])
            await asyncio.sleep(0.01)
        return None


def prompt_of(document: str) -> list[int]:
    """300 tokens: a shared beginning, then the document's own."""
    own = Random(document)
    return [*range(1000, 1000 + SHARED), *(own.randrange(50_000) for _ in range(300 - SHARED))]


def claims(grant: RealGrant) -> dict[str, Any]:
    payload = grant.token.split(".")[1]
    return cast("dict[str, Any]", json.loads(base64.urlsafe_b64decode(payload + "==")))


async def serve_one(house: House, engine: Engine, name: str, random: Random) -> None:
    """One request: what hits must be right; what does not is computed and saved."""
    document = random.choice(house.documents)
    grant = await house.grant(document)
    verdict = await engine.open(name, cast("Granted", grant))
    if not verdict.allowed:
        return
    assert verdict.tokens <= grant.granted_tokens
    if verdict.tokens:
        house.tally.hits += 1
        restored = await engine.load(name, 0, verdict.tokens)
        for at, content in restored.blocks.items():
            end = at + len(content) // (2 * PAGE_BYTES) * 16
            assert content == block_content(grant.prompt, at, end), "wrong bytes were restored"
        if restored.ok:
            house.tally.loads += 1
            assert sum(len(content) for content in restored.blocks.values()) > 0
        else:
            house.tally.broken += 1
    else:
        house.tally.misses += 1
    if verdict.tokens < WHOLE and verdict.save and grant.granted_tokens > SHARED:
        house.tally.saved += await engine.save(name, grant.prompt, WHOLE)
    engine.scheduler.send(Finish(name))


async def client(house: House, fuse: Fuse, number: int, life: int) -> None:
    """Requests until the sidecar is dead."""
    random = Random(f"{life}/{number}")
    engine = await house.engine(f"{ENGINE}-{number}", fuse.process)
    if engine is None:
        return
    try:
        for wire in (engine.scheduler, *engine.workers):
            cast("CountedWire", wire).fuse = fuse
        await engine.scheduler.expect(Lease)
        for count in range(10_000):
            await serve_one(house, engine, f"{life}-{number}-{count}", random)
    except Gone:
        return
    finally:
        with suppress(*Gone):
            await engine.close()


async def one_life(house: House, life: int, join_token: str) -> None:
    process = start(house.settings(join_token))
    try:
        # One life in ten ends before anybody is served.
        if house.random.random() < 0.1:
            house.tally.early += 1
            process.kill()
        fuse = Fuse(process, frames=house.random.randrange(1, 120))
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(client(house, fuse, number, life))
            if life % REVOKE_EVERY == REVOKE_EVERY - 1:
                tasks.create_task(house.revoke_one())
    finally:
        killed(process)


async def test_what_is_killed_at_any_point_serves_nothing_wrong_and_loses_no_room(
    tmp_path: Path,
) -> None:
    async with real_service(tmp_path, serving_lease_s=3) as service:
        tenant = await service.tenant("acme")
        group = await service.group(tenant, "team")
        await service.subject(tenant, "alice", group)
        house = House(service, tenant, group, tmp_path, Random(20261129))
        for _ in range(DOCUMENTS):
            await house.new_document()
        tokens = tmp_path / "tokens"
        tokens.mkdir()
        for number in range(CLIENTS):
            path = tokens / f"{ENGINE}-{number}.token"
            path.touch(mode=0o600)
            path.write_text("engine-token")
        answer = await service.ask("POST", "/v1/sidecars/join-tokens", {"tenants": []})
        for life in range(LIVES):
            if life % RENEW_EVERY == RENEW_EVERY - 1:
                await house.renew_one()
            await one_life(house, life, answer["join_token"])
        tally = house.tally
        assert tally.loads > LIVES // 2, tally
        assert tally.saved > LIVES // 2, tally
        assert tally.early, tally
        await the_last_life(house, answer["join_token"])
        await the_audit_is_whole(service, tally)
    await the_disk_is_whole(house)


async def the_last_life(house: House, join_token: str) -> None:
    """One that may finish: it serves, says what is reclaimed, and stops in good order."""
    process = start(house.settings(join_token))
    try:
        fuse = Fuse(process, frames=10**9)
        engine = await house.engine(f"{ENGINE}-0", process)
        assert engine is not None
        await engine.scheduler.expect(Lease)
        before = house.tally.loads
        for count in range(4 * DOCUMENTS):
            await serve_one(house, engine, f"last-{count}", Random(count))
        assert house.tally.loads > before, "what was saved before is not served any more"
        await house.revoke_one()
        await engine.close()
        assert fuse.process.pid is not None
        os.kill(fuse.process.pid, signal.SIGTERM)
        await asyncio.to_thread(process.join, 20)
        assert process.exitcode == 0
    finally:
        killed(process)


async def the_audit_is_whole(service: RealService, tally: Tally) -> None:
    """Every hit that a client saw is on record, and no record is missing in between."""
    hits = 0
    cursor: str | None = None
    while True:
        query = "/v1/audit/events?limit=200" + (f"&cursor={cursor}" if cursor else "")
        page = await service.ask("GET", query)
        for event in page["items"]:
            assert not event["kind"].startswith("alarm"), event
            hits += event["kind"] == "access.lookup" and event["outcome"] == "hit"
        cursor = page["next_cursor"]
        if not cursor:
            break
    assert hits >= tally.hits


def nvme_of(store: BlockStore) -> TierStatistics:
    return next(tier for tier in store.statistics().tiers if tier.name is TierName.NVME)


async def the_disk_is_whole(house: House) -> None:
    """Nothing of the revoked lies there; all of the room can be used, filled and freed."""
    settings = StoreSettings(
        host_bytes=8 * MIB,
        nvme_path=house.folder / "nvme",
        nvme_bytes=8 * MIB,
        region_bytes=MIB,
        write_behind_s=0.0,
        lock_memory=False,
    )
    async with open_store(settings) as store:
        assert nvme_of(store).blocks > 0
        assert house.dead
        assert not house.dead & store.namespaces(), "what was revoked is still there"
        store.retire(store.namespaces())
        await store.reclaim()
        assert nvme_of(store).used_bytes == 0
        segments = (48 * 1024,) * 2
        fits = nvme_of(store).capacity_bytes // record_bytes(segments)
        for number in range(fits // 2):
            wanted = context(number, room=9, segments=segments)
            await store.save(wanted, KEYS, plaintext(wanted), Fence())
            await store.flush()
        assert nvme_of(store).blocks == fits // 2, "room was lost"
        assert nvme_of(store).evictions == 0
