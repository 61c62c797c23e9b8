"""`strongroom revoke`, `revocation` and `verify`: from a preview to evidence that needs nobody."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from cli.revoke import AxisName
from service.auth.tokens import Role
from service.revocation.models import Axis
from tests.sidecar.real_service import RealService, real_service

ROOT = Path(__file__).parents[2]


def test_the_command_knows_every_axis() -> None:
    assert [each.value for each in AxisName] == [each.value for each in Axis]


@dataclass
class Desk:
    """A running service, somebody who may revoke, and what there is to revoke."""

    service: RealService
    tenant: str
    group: str
    options: list[str]

    async def run(self, *line: str) -> Result:
        return await asyncio.to_thread(
            CliRunner(env={"COLUMNS": "200"}).invoke, app, [*line, *self.options]
        )

    async def document(self, name: str) -> str:
        return await self.service.document(self.tenant, name, self.group)


@asynccontextmanager
async def desk_in(directory: Path) -> AsyncIterator[Desk]:
    async with real_service(directory, serving_lease_s=1.5) as service:
        tenant = await service.tenant("acme")
        group = await service.group(tenant, "legal")
        await service.subject(tenant, "alice", group)
        token = directory / "token"
        token.touch(mode=0o600)
        token.write_text(service.token("root", "", Role.OPERATOR))
        yield Desk(service, tenant, group, ["--url", service.url, "--token-file", str(token)])


def revoke(version: str, *more: str) -> tuple[str, ...]:
    return ("revoke", "document_version", version, *more)


async def enrol(service: RealService) -> None:
    """A sidecar that has asked whether it may serve, and says nothing more."""
    from policy.signing import encode_base64url
    from tests.service.sidecar_party import SidecarParty

    answer = await service.ask("POST", "/v1/sidecars/join-tokens", {"tenants": []})
    party = SidecarParty(service.http, "node-1")
    assert encode_base64url(party.signer.public_key)
    assert (await party.enrol(answer["join_token"])).status_code == 201
    await party.serving_lease()


async def test_preview_changes_nothing_and_the_revocation_is_in_force(tmp_path: Path) -> None:
    async with desk_in(tmp_path) as desk:
        version = await desk.document("handbook")
        told = await desk.run(*revoke(version, "--preview"))
        assert told.exit_code == 0, told.output
        assert "nothing was changed" in told.output
        assert "unknown" in told.output
        as_json = await desk.run(*revoke(version, "--preview", "--json"))
        assert json.loads(as_json.output)["components"] == [version]
        silent = await desk.run(*revoke(version))
        assert (silent.exit_code, "--reason" in silent.stderr) == (2, True)
        done = await desk.run(*revoke(version, "--reason", "contract ended", "--json"))
        assert done.exit_code == 0, done.output
        answer = json.loads(done.output)
        assert (answer["state"], answer["components"]) == ("in_force", [version])
        again = await desk.run(*revoke(version, "--reason", "again"))
        assert again.exit_code == 4
        listed = await desk.run("revocation", "list", "--json")
        assert json.loads(listed.output)["id"] == answer["id"]


async def test_past_the_deadline_it_is_committed_and_waiting_can_go_on(tmp_path: Path) -> None:
    async with desk_in(tmp_path) as desk:
        version = await desk.document("handbook")
        await enrol(desk.service)
        late = await desk.run(*revoke(version, "--reason", "r", "--deadline", "0.05", "--json"))
        answer = json.loads(late.output)
        assert (late.exit_code, answer["state"]) == (1, "committed")
        assert [each["state"] for each in answer["sidecars"]] == ["pending"]
        out = tmp_path / "c.jws"
        early = await desk.run("revocation", "certificate", answer["id"], "--out", str(out))
        assert (early.exit_code, out.exists()) == (5, False)
        shown = await desk.run("revocation", "show", answer["id"], "--wait", "30")
        assert shown.exit_code == 0, shown.output
        assert "out of its lease" in shown.output
        got = await desk.run("revocation", "certificate", answer["id"], "--out", str(out))
        assert (got.exit_code, out.exists()) == (0, True)


async def test_the_same_key_is_the_same_revocation(tmp_path: Path) -> None:
    async with desk_in(tmp_path) as desk:
        line = revoke(await desk.document("d"), "--reason", "r", "--idempotency-key", "k", "--json")
        first, second = await desk.run(*line), await desk.run(*line)
        assert (first.exit_code, second.exit_code) == (0, 0)
        assert json.loads(first.output)["id"] == json.loads(second.output)["id"]


async def test_a_revocation_is_scheduled_shown_and_cancelled(tmp_path: Path) -> None:
    async with desk_in(tmp_path) as desk:
        version = await desk.document("handbook")
        at = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        line = revoke(version, "--reason", "later")
        naive = await desk.run(*line, "--at", "2999-01-01T00:00:00")
        assert naive.exit_code == 2
        early = await desk.run(*line, "--at", at, "--certificate", str(tmp_path / "c.jws"))
        assert early.exit_code == 2
        later = json.loads((await desk.run(*line, "--at", at, "--json")).output)
        assert later["state"] == "scheduled"
        shown = await desk.run("revocation", "show", later["id"])
        assert "scheduled" in shown.output
        cancelled = await desk.run("revocation", "cancel", later["id"])
        assert (cancelled.exit_code, "cancelled" in cancelled.output) == (0, True)
        assert (await desk.run("revocation", "cancel", later["id"])).exit_code == 5
        listed = await desk.run("revocation", "list", "--scheduled", "--json")
        assert json.loads(listed.output)["state"] == "cancelled"
        assert (await desk.run(*revoke(version, "--preview"))).exit_code == 0


def isolated() -> list[str]:
    """What runs a command without any network, where the system lets us."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    prefix = [unshare, "--user", "--map-root-user", "--net"]
    allowed = subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0
    return prefix if allowed else []


def verify(folder: Path, certificate: str, keys: str) -> subprocess.CompletedProcess[str]:
    """`strongroom verify` as on another machine: these two files, no network, no state."""
    return subprocess.run(
        [*isolated(), sys.executable, "-m", "cli.main", "verify", certificate, "--keys", keys],
        cwd=folder,
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HOME": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("form", ["jws", "json", "html"])
async def test_a_certificate_is_verified_elsewhere_with_nothing_but_the_public_key(
    tmp_path: Path, form: str
) -> None:
    empty = tmp_path / "elsewhere"
    empty.mkdir()
    async with desk_in(tmp_path) as desk:
        version = await desk.document("handbook")
        path = empty / f"c.{form}"
        done = await desk.run(*revoke(version, "--reason", "r", "--certificate", str(path)))
        assert done.exit_code == 0, done.output
        keys = await desk.service.http.get("/v1/keys", headers={
            "Authorization": f"Bearer {desk.service.token('root', '', Role.OPERATOR)}"
        })  # fmt: skip
        (empty / "keys.json").write_text(keys.text)
    # The service is gone by now.
    good = await asyncio.to_thread(verify, empty, path.name, "keys.json")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "VALID" in good.stdout
    assert version in good.stdout
    assert sorted(each.name for each in empty.iterdir()) == [f"c.{form}", "keys.json"]
    text = path.read_text(encoding="utf-8")
    (empty / f"edited.{form}").write_text(text.replace(text[40], "#", 1), encoding="utf-8")
    bad = await asyncio.to_thread(verify, empty, f"edited.{form}", "keys.json")
    assert bad.returncode == 1
    assert "INVALID" in bad.stdout


async def test_keys_of_another_service_verify_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        async with desk_in(tmp_path / name) as desk:
            version = await desk.document("d")
            out = tmp_path / f"{name}.jws"
            await desk.run(*revoke(version, "--reason", "r", "--certificate", str(out)))
            answer = await desk.service.ask("GET", "/v1/keys")
            (tmp_path / f"{name}.json").write_text(json.dumps(answer))
    runner = CliRunner()
    for name, keys, code in (("a", "a", 0), ("b", "b", 0), ("a", "b", 1), ("b", "a", 1)):
        line = ["verify", str(tmp_path / f"{name}.jws"), "--keys", str(tmp_path / f"{keys}.json")]
        assert runner.invoke(app, line).exit_code == code


def test_the_help_teaches() -> None:
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["revoke", "--help"])
    assert told.exit_code == 0
    for word in ("--preview", "--at", "--deadline", "strongroom revoke tenant", "Exit codes"):
        assert word in told.output
