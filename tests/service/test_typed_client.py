"""A typed client is generated from the document, type-checked, and used on a live server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.app import create_app
from service.auth.tokens import Role
from service.settings import read_settings
from tests.cli.test_listening import served

BIN = Path(sys.executable).parent
TEXT_KINDS = (
    "application/jose",
    "application/jsonl",
    "application/x-ndjson",
    "text/csv",
    "text/event-stream",
    "text/html",
)
DRIVER = '''
"""A client's program: everything below is checked by mypy against the generated types."""

import json
import sys

from strongroom_client import AuthenticatedClient
from strongroom_client.api.audit import read_events
from strongroom_client.api.keys import public_keys
from strongroom_client.api.registry import register_artefact
from strongroom_client.api.revocations import revoke
from strongroom_client.api.tenancy import create_principal, create_tenant, list_principals
from strongroom_client.api.tokens import issue_token
from strongroom_client.models import (
    ArtefactAnswer, ArtefactBody, ArtefactKind, Axis, EventPage, PrincipalAnswer, PrincipalBody,
    PrincipalPage, Problem, PublicKeys, RevocationAnswer, RevocationBody, Role, TenantAnswer,
    TenantBody, TokenAnswer, TokenBody,
)
from strongroom_client.types import Unset

url, token = sys.argv[1], sys.stdin.read().strip()
client = AuthenticatedClient(base_url=url, token=token, raise_on_unexpected_status=True)

tenant = create_tenant.sync(client=client, body=TenantBody(name="acme"))
assert isinstance(tenant, TenantAnswer)
again = create_tenant.sync(client=client, body=TenantBody(name="acme"))
assert isinstance(again, Problem) and (again.status, again.code) == (409, "conflict")

for name in ("alice", "bob", "carol"):
    principal = create_principal.sync(tenant.id, client=client, body=PrincipalBody(name=name))
    assert isinstance(principal, PrincipalAnswer)

names: list[str] = []
cursor: str | None = None
while True:
    page = list_principals.sync(tenant.id, client=client, limit=2, cursor=cursor)
    assert isinstance(page, PrincipalPage)
    names += [item.name for item in page.items]
    if isinstance(page.next_cursor, Unset) or page.next_cursor is None:
        break
    cursor = page.next_cursor
assert sorted(names) == ["alice", "bob", "carol"]

body = ArtefactBody(
    kind=ArtefactKind.MODEL, name="llama", revision="1", digest="0" * 64, scope="shared"
)
first = register_artefact.sync(client=client, body=body, idempotency_key="once")
second = register_artefact.sync(client=client, body=body, idempotency_key="once")
assert isinstance(first, ArtefactAnswer) and isinstance(second, ArtefactAnswer)
assert first.id == second.id

told: dict[str, str] = {}
issued = issue_token.sync(
    client=client, body=TokenBody(subject="watcher", roles=[Role.AUDITOR])
)
assert isinstance(issued, TokenAnswer)
watcher = AuthenticatedClient(base_url=url, token=issued.token, raise_on_unexpected_status=True)
refused = create_tenant.sync(client=watcher, body=TenantBody(name="globex"))
assert isinstance(refused, Problem) and refused.status == 403
events = read_events.sync(client=watcher, tenant=tenant.id)
assert isinstance(events, EventPage)
told["kinds"] = ",".join(sorted({event.kind for event in events.items}))

keys = public_keys.sync(client=client)
assert isinstance(keys, PublicKeys) and len(keys.keys) == 2
revoked = revoke.sync(
    client=client,
    body=RevocationBody(axis=Axis.TENANT, target=tenant.id, reason="left"),
)
assert isinstance(revoked, RevocationAnswer), revoked
gone = list_principals.sync(tenant.id, client=client)
told["gone"] = type(gone).__name__
stranger = AuthenticatedClient(base_url=url, token="x", raise_on_unexpected_status=True)
nobody = public_keys.sync_detailed(client=stranger)
assert nobody.status_code == 401 and isinstance(nobody.parsed, Problem)
print(json.dumps(told))
'''


@dataclass(frozen=True, slots=True)
class Generated:
    folder: Path

    @property
    def driver(self) -> Path:
        return self.folder / "driver.py"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    """The client, from the document alone."""
    folder = tmp_path_factory.mktemp("client")
    app = create_app(read_settings({}, state_directory=folder / "state"))
    (folder / "openapi.json").write_text(json.dumps(app.openapi()))
    overrides = "".join(f"  {kind}: text/plain\n" for kind in TEXT_KINDS)
    overrides += "  application/vnd.apache.parquet: application/octet-stream\n"
    (folder / "config.yml").write_text(f"post_hooks: []\ncontent_type_overrides:\n{overrides}")
    done = subprocess.run(
        [BIN / "openapi-python-client", "generate", "--path", "openapi.json", "--meta", "none",
         "--config", "config.yml", "--output-path", "strongroom_client", "--fail-on-warning"],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "driver.py").write_text(DRIVER)
    return Generated(folder)


def test_every_operation_is_in_the_generated_client(generated: Generated) -> None:
    document = json.loads((generated.folder / "openapi.json").read_text())
    wanted = {
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    }
    made = {
        path.stem
        for path in (generated.folder / "strongroom_client" / "api").rglob("*.py")
        if path.stem != "__init__"
    }
    assert made == wanted


def test_a_program_that_uses_it_passes_the_strict_type_check(generated: Generated) -> None:
    def checked() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "mypy", "--strict", "--python-version", "3.11", "--cache-dir", "cache",
             "--config-file", "", "driver.py"],
            cwd=generated.folder, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    done = checked()
    assert done.returncode == 0, done.stdout
    # The types are real ones: what the document does not have is an error.
    text = generated.driver.read_text()
    generated.driver.write_text(text.replace("tenant.id, client", "tenant.identity, client"))
    try:
        wrong = checked()
    finally:
        generated.driver.write_text(text)
    assert wrong.returncode == 1
    assert 'has no attribute "identity"' in wrong.stdout


async def test_the_program_runs_against_a_live_server(generated: Generated, tmp_path: Path) -> None:
    from service.auth.issuer import open_issuer

    async with served(tmp_path) as url:
        settings = read_settings({}, state_directory=tmp_path / "state")
        token = open_issuer(settings).issue("root", "", (Role.OPERATOR,), 600)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "driver.py", url,
            cwd=generated.folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await process.communicate(token.encode())
    assert process.returncode == 0, errors.decode()
    told = json.loads(out)
    assert "tenant.created" in told["kinds"]
