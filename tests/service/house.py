"""The service under test, and the parties that speak to it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from service.app import create_app
from service.auth.tokens import Role
from service.runtime import Runtime
from service.settings import ServiceSettings
from strongroom.blocks import pack_tokens, prompt_digest

LIFE_S = 600


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Party:
    """Somebody with a token."""

    def __init__(self, http: httpx.AsyncClient, token: str | None) -> None:
        self._http = http
        self.token = token

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        params: dict[str, Any] | None = None,
    ) -> httpx.Response:
        sent = dict(headers or {})
        if self.token is not None:
            sent["Authorization"] = f"Bearer {self.token}"
        return await self._http.request(method, path, json=body, headers=sent, params=params)

    async def get(self, path: str, **params: Any) -> Any:
        return self._good(await self.ask("GET", path, params=params or None))

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._good(await self.ask("POST", path, body, headers=named))

    async def delete(self, path: str) -> Any:
        return self._good(await self.ask("DELETE", path))

    @staticmethod
    def _good(response: httpx.Response) -> Any:
        assert response.is_success, f"{response.status_code} {response.text}"
        return response.json()


@dataclass(frozen=True, slots=True)
class Artefacts:
    model: str
    tokenizer: str
    template: str
    policy: str

    def body(self) -> dict[str, str]:
        return {
            "model": self.model,
            "adapter": "none",
            "tokenizer": self.tokenizer,
            "template": self.template,
            "policy": self.policy,
        }


class Service:
    """A started service."""

    def __init__(self, app: FastAPI, http: httpx.AsyncClient) -> None:
        self.app = app
        self.http = http
        self.runtime: Runtime = app.state.runtime
        self.operator = self.party("root", "", Role.OPERATOR)
        self.nobody = Party(http, None)

    def token(self, name: str, tenant: str, *roles: Role, life_s: int = LIFE_S) -> str:
        return self.runtime.issuer.issue(name, tenant, roles, life_s)

    def party(self, name: str, tenant: str, *roles: Role) -> Party:
        return Party(self.http, self.token(name, tenant, *roles))

    async def tenant(self, name: str = "acme") -> str:
        return str((await self.operator.post("/v1/tenants", {"name": name}))["id"])

    async def group(self, tenant: str, name: str) -> str:
        return str((await self.operator.post(f"/v1/tenants/{tenant}/groups", {"name": name}))["id"])

    async def subject(self, tenant: str, name: str, groups: Sequence[str] = ()) -> Party:
        await self.operator.post(f"/v1/tenants/{tenant}/principals", {"name": name})
        for group in groups:
            await self.operator.post(
                f"/v1/tenants/{tenant}/memberships", {"group": group, "principal": name}
            )
        return self.party(name, tenant, Role.SUBJECT)

    async def document(self, tenant: str, name: str, group: str) -> str:
        """A document's first version, by id."""
        document = await self.operator.post(f"/v1/tenants/{tenant}/documents", {"name": name})
        version = await self.operator.post(
            f"/v1/tenants/{tenant}/documents/{document['id']}/versions",
            {"content_digest": digest(name), "group": group},
        )
        return str(version["id"])

    async def artefacts(self, revision: str = "1", scope: str = "shared") -> Artefacts:
        ids = {}
        for kind in ("model", "tokenizer", "template", "policy"):
            answer = await self.operator.post(
                "/v1/artefacts",
                {
                    "kind": kind,
                    "name": f"the-{kind}",
                    "revision": revision,
                    "digest": digest(f"{kind}{revision}"),
                    "scope": scope,
                },
            )
            ids[kind] = answer["id"]
        return Artefacts(**ids)


def prompt(tokens: int) -> dict[str, Any]:
    """The part of a grant's request that is about the prompt's tokens."""
    return {
        "prompt_tokens": tokens,
        "prompt_digest": prompt_digest(pack_tokens(range(tokens))).hex(),
        "operations": ["read", "write"],
    }


@asynccontextmanager
async def running(settings: ServiceSettings) -> AsyncIterator[Service]:
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            yield Service(app, http)
