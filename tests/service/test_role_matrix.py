"""Every operation of the document for every role and for nobody: who gets past the door.

`MATRIX` says it once more, beside the code: an operation that is not in it fails the test, and so
does one that lets in anybody else. A letter is a caller who is let in; what becomes of the request
then is another question (most are answered 404 or 422 here, since they name nothing real).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest

from service.auth.tokens import Role
from tests.service.house import Party, Service
from tests.service.sidecar_party import SidecarParty, enrolled

CALLERS: Final = {
    "O": (Role.OPERATOR, False),
    "A": (Role.AUDITOR, False),
    "G": (Role.GATEWAY, False),
    "T": (Role.TENANT_ADMIN, True),
    "a": (Role.AUDITOR, True),
    "g": (Role.GATEWAY, True),
    "s": (Role.SUBJECT, True),
}
"""Role, and whether it is one of the tenant's or of the installation."""
SIDECAR: Final = "K"
OPEN: Final = "*"
BY_BODY: Final = "join token"
"""Whoever brings a one-time token in the body."""

MATRIX: Final[dict[str, str]] = {
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "POST /v1/tenants": "O",
    "GET /v1/tenants": "OATa",
    "GET /v1/tenants/{tenant}": "OATa",
    "POST /v1/tenants/{tenant}/review": "O",
    "POST /v1/tenants/{tenant}/principals": "OT",
    "GET /v1/tenants/{tenant}/principals": "OATa",
    "GET /v1/tenants/{tenant}/principals/{principal}": "OATa",
    "DELETE /v1/tenants/{tenant}/principals/{principal}": "OT",
    "POST /v1/tenants/{tenant}/groups": "OT",
    "GET /v1/tenants/{tenant}/groups": "OATa",
    "GET /v1/tenants/{tenant}/groups/{group}": "OATa",
    "DELETE /v1/tenants/{tenant}/groups/{group}": "OT",
    "POST /v1/tenants/{tenant}/memberships": "OT",
    "GET /v1/tenants/{tenant}/memberships": "OATa",
    "DELETE /v1/tenants/{tenant}/memberships/{group}/{principal}": "OT",
    "POST /v1/artefacts": "OT",
    "GET /v1/artefacts": "OAGTag",
    "GET /v1/artefacts/{artefact}": "OAGTag",
    "POST /v1/artefacts/{artefact}/upgrade": "OT",
    "POST /v1/tenants/{tenant}/documents": "OT",
    "GET /v1/tenants/{tenant}/documents": "OATa",
    "GET /v1/tenants/{tenant}/documents/{document}": "OATa",
    "POST /v1/tenants/{tenant}/documents/{document}/versions": "OT",
    "GET /v1/tenants/{tenant}/documents/{document}/versions": "OATa",
    "POST /v1/tenants/{tenant}/rules": "OT",
    "GET /v1/tenants/{tenant}/rules": "OATa",
    "DELETE /v1/tenants/{tenant}/rules/{rule}": "OT",
    "POST /v1/tenants/{tenant}/roles": "OT",
    "GET /v1/tenants/{tenant}/roles": "OATa",
    "DELETE /v1/tenants/{tenant}/roles/{role}": "OT",
    "POST /v1/tenants/{tenant}/decisions": "OATa",
    "GET /v1/tenants/{tenant}/policy": "OATa",
    "GET /v1/tenants/{tenant}/policy/document": "OATa",
    "PUT /v1/tenants/{tenant}/policy/document": "OT",
    "POST /v1/tenants/{tenant}/policy/rollback": "OT",
    "POST /v1/tenants/{tenant}/policy/dry-run": "OT",
    "GET /v1/tenants/{tenant}/policy/versions": "OATa",
    "GET /v1/tenants/{tenant}/policy/versions/{version}": "OATa",
    "GET /v1/tenants/{tenant}/policy/diff": "OATa",
    "GET /v1/tenants/{tenant}/policy/tests": "OATa",
    "PUT /v1/tenants/{tenant}/policy/tests": "OT",
    "POST /v1/tenants/{tenant}/policy/tests/run": "OT",
    "POST /v1/tenants/{tenant}/policy/explain": "OATa",
    "POST /v1/grants": "OGTgs",
    "POST /v1/tokens": "OT",
    "GET /v1/keys": "OAGTags",
    "GET /v1/keys/status": "OA",
    "POST /v1/keys/rotations": "O",
    "GET /v1/keys/rotations": "OATa",
    "GET /v1/keys/rotations/{rotation}": "OATa",
    "GET /v1/keys/uses": "OATa",
    "POST /v1/revocations": "OT",
    "POST /v1/revocations/preview": "OT",
    "POST /v1/scheduled-revocations": "OT",
    "GET /v1/scheduled-revocations": "OATa",
    "GET /v1/scheduled-revocations/{scheduled}": "OATa",
    "DELETE /v1/scheduled-revocations/{scheduled}": "OT",
    "GET /v1/revocations": "OATa",
    "GET /v1/revocations/{revocation}": "OATa",
    "GET /v1/revocations/{revocation}/certificate": "OATa",
    "GET /v1/audit/events": "OATa",
    "GET /v1/audit/events.jsonl": "OATa",
    "GET /v1/audit/accesses": "OATa",
    "GET /v1/audit/key-uses": "OATa",
    "GET /v1/audit/derived": "OATa",
    "GET /v1/audit/revocations/{revocation}/accesses": "OATa",
    "GET /v1/audit/denials": "OATa",
    "GET /v1/audit/cross-tenant-hits": "OATa",
    "GET /v1/audit/report": "OATa",
    "POST /v1/audit/heads": "OA",
    "GET /v1/audit/heads": "OA",
    "GET /v1/audit/heads/latest": "OA",
    "GET /v1/audit/proofs/inclusion": "OA",
    "GET /v1/audit/proofs/consistency": "OA",
    "POST /v1/audit/verify": "OA",
    "POST /v1/audit/holds": "OT",
    "GET /v1/audit/holds": "OATa",
    "DELETE /v1/audit/holds/{hold}": "OT",
    "GET /v1/log": "OA",
    "POST /v1/sidecars/join-tokens": "O",
    "GET /v1/sidecars": "OAa",
    "POST /v1/sidecars": BY_BODY,
    "GET /v1/sidecars/{sidecar}": "OAa",
    "POST /v1/sidecars/self/keys": SIDECAR,
    "POST /v1/sidecars/self/serving-lease": SIDECAR,
    "POST /v1/sidecars/self/key-lease": SIDECAR,
    "GET /v1/sidecars/self/invalidations": SIDECAR,
    "GET /v1/sidecars/self/invalidations/stream": SIDECAR,
    "POST /v1/sidecars/self/acks": SIDECAR,
    "POST /v1/sidecars/self/liveness": SIDECAR,
    "POST /v1/sidecars/self/residency": SIDECAR,
    "GET /v1/tenants/{tenant}/residency": "OAa",
    "POST /v1/sidecars/self/audit": SIDECAR,
}


@dataclass(frozen=True, slots=True)
class Callers:
    """Everybody who might ask."""

    tenant: str
    parties: dict[str, Party]
    sidecar: SidecarParty

    async def ask(self, letter: str, operation: Operation) -> httpx.Response:
        method, path = operation.method, operation.concrete(self.tenant)
        body: Any = {} if method in {"POST", "PUT", "PATCH"} else None
        # It would follow the log for ever; this is looked at after the caller is.
        headers = {"Last-Event-ID": "wrong"} if path.endswith("/stream") else {}
        if letter == SIDECAR:
            raw = b"" if body is None else b"{}"
            proof = self.sidecar.proof(method, path, raw)
            headers |= {"Authorization": f"Sidecar {proof}", "Content-Type": "application/json"}
            return await self.sidecar.http.request(method, path, content=raw, headers=headers)
        return await self.parties[letter].ask(method, path, body, headers=headers)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    security: list[Any]

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def concrete(self, tenant: str) -> str:
        path = self.path.replace("{tenant}", tenant).replace("{principal}", "nobody")
        while "{" in path:
            path = path[: path.index("{")] + "0" * 32 + path[path.index("}") + 1 :]
        return path


def operations(document: dict[str, Any]) -> Iterator[Operation]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield Operation(method.upper(), path, operation.get("security", []))


@pytest.fixture
async def callers(service: Service) -> Callers:
    tenant = await service.tenant()
    await service.subject(tenant, "alice")
    parties = {
        letter: service.party("alice", tenant if of_tenant else "", role)
        for letter, (role, of_tenant) in CALLERS.items()
    }
    return Callers(tenant, parties | {"-": service.nobody}, await enrolled(service))


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_every_operation_says_who_may_call_it(service: Service) -> None:
    found = {operation.name: operation for operation in operations(service.app.openapi())}
    assert sorted(set(found) - set(MATRIX)) == [], "say in MATRIX who may call these"
    assert sorted(set(MATRIX) - set(found)) == [], "these are gone"
    for name, allowed in MATRIX.items():
        schemes = {scheme for each in found[name].security for scheme in each}
        expected = {SIDECAR: {"sidecar"}, OPEN: set(), BY_BODY: set()}.get(allowed, {"bearer"})
        assert schemes == expected, name


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_every_role_gets_through_its_own_doors_and_no_other(
    service: Service, callers: Callers
) -> None:
    wrong: list[str] = []
    for operation in operations(service.app.openapi()):
        allowed = MATRIX[operation.name]
        for letter in (*CALLERS, SIDECAR, "-"):
            answer = await callers.ask(letter, operation)
            status = answer.status_code
            if allowed == OPEN:
                right = status == 200
            elif allowed == BY_BODY:
                right = status == 422  # no body, no token
            elif allowed == SIDECAR:
                right = (status not in {401, 403}) if letter == SIDECAR else status == 401
            elif letter in {SIDECAR, "-"}:
                right = status == 401
            else:
                right = (status not in {401, 403}) if letter in allowed else status == 403
            if not right or status >= 500:
                wrong.append(f"{operation.name} by {letter!r}: {status}")
    assert not wrong


async def test_another_tenants_admin_is_told_that_there_is_no_such_tenant(
    service: Service, callers: Callers
) -> None:
    other = await service.tenant("globex")
    stranger = service.party("alice", other, Role.TENANT_ADMIN)
    for operation in operations(service.app.openapi()):
        if "{tenant}" not in operation.path or "T" not in MATRIX[operation.name]:
            continue
        body: Any = {} if operation.method in {"POST", "PUT", "PATCH"} else None
        answers = [
            await stranger.ask(operation.method, operation.concrete(tenant), body)
            for tenant in (callers.tenant, "0" * 32)
        ]
        # What is wrong with the body itself is said before whose tenant it is, and to all alike.
        assert {answer.status_code for answer in answers} <= {404, 422, 428}, operation.name
        assert len({answer.text for answer in answers}) == 1, operation.name
