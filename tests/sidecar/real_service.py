"""The real service, on a real TCP socket and SQLite, for the sidecar under test to talk to."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn

from service.app import create_app
from service.auth.issuer import open_issuer
from service.auth.tokens import Role
from service.db.migrate import upgrade_async
from service.runtime import Runtime
from service.settings import ServiceSettings, read_settings
from sidecar.clocks import Clocks
from sidecar.compose import running
from sidecar.settings import load_settings
from strongroom.blocks import pack_tokens, prompt_digest
from tests.sidecar.control_plane import MODEL, TEMPLATE, TOKENIZER, FakeControlPlane, Tenant
from tests.sidecar.harness import ENGINE, MIB, World

POLICY = hashlib.sha256(b"policy").hexdigest()


@dataclass
class RealGrant:
    """Has what `tests.sidecar.harness.Engine` needs of a grant."""

    token: str
    salt: str
    prompt: list[int]
    granted_tokens: int


@dataclass
class RealService:
    """A running service and the parties that speak to it."""

    url: str
    settings: ServiceSettings
    http: httpx.AsyncClient
    runtime: Runtime
    artefacts: dict[str, str] = field(default_factory=dict)
    """By kind, their ids."""

    def token(self, name: str, tenant: str, role: Role) -> str:
        return open_issuer(self.settings).issue(name, tenant, (role,), 600)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        headers = {"Authorization": f"Bearer {self.token('root', '', Role.OPERATOR)}"} | headers
        answer = await self.http.request(method, path, json=body, headers=headers)
        assert answer.is_success, f"{answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    async def tenant(self, name: str) -> str:
        return str((await self.ask("POST", "/v1/tenants", {"name": name}))["id"])

    async def group(self, tenant: str, name: str) -> str:
        return str((await self.ask("POST", f"/v1/tenants/{tenant}/groups", {"name": name}))["id"])

    async def subject(self, tenant: str, name: str, *groups: str) -> None:
        await self.ask("POST", f"/v1/tenants/{tenant}/principals", {"name": name})
        for group in groups:
            body = {"group": group, "principal": name}
            await self.ask("POST", f"/v1/tenants/{tenant}/memberships", body)

    async def document(self, tenant: str, name: str, group: str) -> str:
        documents = f"/v1/tenants/{tenant}/documents"
        document = (await self.ask("POST", documents, {"name": name}))["id"]
        body = {"content_digest": hashlib.sha256(name.encode()).hexdigest(), "group": group}
        return str((await self.ask("POST", f"{documents}/{document}/versions", body))["id"])

    async def register(self) -> None:
        digests = {
            "model": MODEL, "tokenizer": TOKENIZER, "template": TEMPLATE, "policy": POLICY,
        }  # fmt: skip
        for kind, digest in digests.items():
            body = {"kind": kind, "name": kind, "revision": "1", "digest": digest}
            self.artefacts[kind] = (await self.ask("POST", "/v1/artefacts", body))["id"]

    async def grant(
        self, tenant: str, subject: str, prompt: Sequence[int], spans: Sequence[dict[str, Any]]
    ) -> RealGrant:
        body = self.artefacts | {
            "adapter": "none",
            "spans": list(spans),
            "prompt_tokens": len(prompt),
            "prompt_digest": prompt_digest(pack_tokens(prompt)).hex(),
            "operations": ["read", "write"],
        }
        token = self.token(subject, tenant, Role.SUBJECT)
        answer = await self.ask("POST", "/v1/grants", body, Authorization=f"Bearer {token}")
        return RealGrant(answer["grant"], answer["salt"], list(prompt), answer["granted_tokens"])

    async def revoke(self, axis: str, target: str, **more: Any) -> Any:
        body = {"axis": axis, "target": target, "reason": "test", **more}
        return await self.ask("POST", "/v1/revocations", body)


@asynccontextmanager
async def real_service(
    directory: Path, *, artefacts: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[RealService]:
    """Migrated, served by uvicorn in this loop, with artefacts registered if there are none."""
    settings = {"serving_lease_s": 30} | settings  # the machine may be busy with other tests
    read = read_settings({}, state_directory=directory / "service", **settings)
    await upgrade_async(read.database)
    async with replica(read, artefacts) as service:
        if artefacts is None:
            await service.register()
        yield service


@asynccontextmanager
async def replica(
    read: ServiceSettings, artefacts: dict[str, str] | None = None
) -> AsyncIterator[RealService]:
    """One more process's worth of the service: an application of its own, over the same places."""
    app = create_app(read)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="warning", lifespan="on",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server._serve())
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http:
            service = RealService(url, read, http, app.state.runtime, artefacts or {})
            try:
                yield service
            finally:
                server.should_exit = True


@asynccontextmanager
async def sidecar_of(
    service: RealService,
    directory: Path,
    *,
    tenants: Sequence[str] = (),
    clocks: Clocks | None = None,
    **overrides: Any,
) -> AsyncIterator[World]:
    """A sidecar enrolled with the real service."""
    fields = await sidecar_fields(service, directory, tenants)
    settings = load_settings({}, **(fields | overrides))
    async with running(settings, clocks=clocks or Clocks()) as sidecar:
        async with asyncio.timeout(20):
            await sidecar.serving_begun()
        world = World(
            sidecar, cast("FakeControlPlane", None), cast("Tenant", None), directory,
            settings.socket_path, fields["engine_tokens"] / f"{ENGINE}.token", "engine-token",
        )  # fmt: skip
        try:
            yield world
        finally:
            for engine in world.engines:
                await engine.close()


async def sidecar_fields(
    service: RealService, directory: Path, tenants: Sequence[str] = ()
) -> dict[str, Any]:
    """Settings of a sidecar of `service` below `directory`, with a join token if it needs one."""
    tokens = directory / "tokens"
    tokens.mkdir(exist_ok=True, parents=True)
    token_path = tokens / f"{ENGINE}.token"
    token_path.touch(mode=0o600)
    token_path.write_text("engine-token")
    fields: dict[str, Any] = {
        "state_directory": directory / "state",
        "socket_path": directory / "run" / "s.sock",
        "engine_tokens": tokens,
        "nvme_path": directory / "nvme",
        "service_url": service.url,
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
    if not (directory / "state" / "enrolment.json").exists():
        body = {"tenants": list(tenants)}
        answer = await service.ask("POST", "/v1/sidecars/join-tokens", body)
        fields["join_token"] = answer["join_token"]
    return fields
