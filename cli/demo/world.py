"""The demo's world in the control plane: two tenants, their people, groups, document, artefacts.

Everything goes through the public HTTP API, as an operator and as a gateway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from cli.api import Api, ApiProblem
from policy.signing import decode_base64url
from strongroom.blocks import pack_tokens, prompt_digest


@dataclass(frozen=True, slots=True)
class Artefacts:
    """Component ids of what the engine runs."""

    model: str
    tokenizer: str
    template: str
    policy: str


@dataclass(frozen=True, slots=True)
class Subject:
    """A user of a tenant, with a token of their own."""

    name: str
    tenant: str
    token: str
    private_group: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant as a gateway receives it."""

    token: str
    salt: str
    granted_tokens: int
    shape: tuple[str, ...]
    """The answer's field names and types, to compare what it reveals."""

    @property
    def jti(self) -> str:
        """The grant's id, by which the audit names it."""
        claims = json.loads(decode_base64url(self.token.split(".")[1], "grant"))
        return str(claims["jti"])


Part = tuple[int, dict[str, str]]
"""End token and source of one span: `{"document": id}` or `{"group": id or name}`."""


class World:
    """Sets up and changes what the service knows: `admin` as operator, `gateway` for grants."""

    def __init__(self, admin: Api, gateway: Api, mint: Callable[[str, str], str]) -> None:
        self._admin = admin
        self._gateway = gateway
        self._mint = mint

    def tenant(self, name: str) -> str:
        """A new tenant's component id."""
        return str(self._admin.post("/v1/tenants", {"name": name})["id"])

    def group(self, tenant: str, name: str) -> str:
        """A new access group's component id."""
        return str(self._admin.post(f"/v1/tenants/{tenant}/groups", {"name": name})["id"])

    def group_exists(self, tenant: str, group: str) -> bool:
        """Whether the group's component lives."""
        try:
            self._admin.get(f"/v1/tenants/{tenant}/groups/{group}")
        except ApiProblem as problem:
            if problem.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    def subject(self, tenant: str, name: str, groups: Sequence[str] = ()) -> Subject:
        """A new user, member of `groups`, with a token of their own."""
        answer = self._admin.post(f"/v1/tenants/{tenant}/principals", {"name": name})
        for group in groups:
            self._admin.post(
                f"/v1/tenants/{tenant}/memberships", {"principal": name, "group": group}
            )
        return Subject(name, tenant, self._mint(name, tenant), str(answer["private_group"]))

    def remove_subject(self, subject: Subject) -> None:
        """Remove a user: their grants die, their private group's component is destroyed."""
        self._admin.delete(f"/v1/tenants/{subject.tenant}/principals/{subject.name}")

    def artefact(
        self, kind: str, name: str, revision: str, digest: str, tenant: str | None = None
    ) -> str:
        """Register an artefact, shared or a tenant's own; its component id."""
        body: dict[str, Any] = {"kind": kind, "name": name, "revision": revision}
        body |= {"digest": digest, "scope": tenant or "shared"}
        return str(self._admin.post("/v1/artefacts", body)["id"])

    def upgrade(self, artefact: str, revision: str, digest: str) -> str:
        """Replace an artefact by a new revision in one transaction; the new component id."""
        answer = self._admin.post(
            f"/v1/artefacts/{artefact}/upgrade", {"revision": revision, "digest": digest}
        )
        return str(answer["id"])

    def document(self, tenant: str, name: str, group: str, digest: str) -> str:
        """Register a document with its first version; the version's component id."""
        document = self._admin.post(f"/v1/tenants/{tenant}/documents", {"name": name})["id"]
        version = self._admin.post(
            f"/v1/tenants/{tenant}/documents/{document}/versions",
            {"content_digest": digest, "group": group},
        )
        return str(version["id"])

    def grant(
        self,
        subject: Subject,
        artefacts: Artefacts,
        tokens: Sequence[int],
        parts: Sequence[Part],
    ) -> Grant:
        """Ask, as the gateway, for a grant in the name of the subject's own token."""
        answer = self._gateway.post(
            "/v1/grants",
            {
                "model": artefacts.model,
                "adapter": "none",
                "tokenizer": artefacts.tokenizer,
                "template": artefacts.template,
                "policy": artefacts.policy,
                "spans": [{"end": end, **source} for end, source in parts],
                "prompt_tokens": len(tokens),
                "prompt_digest": prompt_digest(pack_tokens(tokens)).hex(),
                "operations": ["read", "write"],
            },
            headers={"Strongroom-Subject-Token": subject.token},
        )
        shape = tuple(f"{name}:{type(value).__name__}" for name, value in sorted(answer.items()))
        return Grant(answer["grant"], answer["salt"], int(answer["granted_tokens"]), shape)
