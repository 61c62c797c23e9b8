"""`strongroom policy` against a running service: a policy's whole life from the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner, Result

from cli.main import app
from service.auth.tokens import Role
from tests.sidecar.real_service import real_service


async def test_a_policy_is_written_tried_tested_imported_explained_compared_and_rolled_back(
    tmp_path: Path,
) -> None:
    async with real_service(tmp_path) as service:
        tenant = await service.tenant("acme")
        group = await service.group(tenant, "legal")
        await service.subject(tenant, "alice")
        token = tmp_path / "token"
        token.touch(mode=0o600)
        token.write_text(service.token("root", "", Role.OPERATOR))
        options = ["--url", service.url, "--token-file", str(token)]

        async def run(verb: str, *arguments: str) -> Result:
            line = ["policy", verb, tenant, *arguments, *options]
            return await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, app, line)

        policy = tmp_path / "policy.yaml"
        exported = await run("export", "--out", str(policy))
        assert exported.exit_code == 0, exported.output
        head, _ = policy.read_text().split("rules:", 1)
        rule = f'subject: "user:alice", action: "group:read", resource: "group:{group}"'
        text = (
            f"{head}rules:\n  - {{{rule}, effect: allow}}\n"
            f"tests:\n  - {{name: alice reads, {rule}, expect: %s}}\n"
        )
        policy.write_text(text % "deny")
        failing = await run("test", str(policy))
        assert failing.exit_code == 1
        assert "failed: alice reads" in failing.output
        refused = await run("import", str(policy), "--reason", "first")
        assert refused.exit_code == 5
        assert "alice reads" in refused.output
        policy.write_text((text % "allow").replace("effect: allow", "effect: maybe"))
        wrong = await run("import", str(policy), "--reason", "first")
        assert wrong.exit_code == 2
        assert "line 3, effect" in wrong.output
        policy.write_text(text % "allow")
        tried = await run("dry-run", str(policy))
        assert tried.exit_code == 0
        assert "gains: 1" in tried.output
        assert "user:alice" in tried.output
        assert (await run("explain", "user:alice", f"group:{group}")).exit_code == 1
        done = await run("import", str(policy), "--reason", "first")
        assert (done.exit_code, "version 1 is in force" in done.output) == (0, True), done.output
        again = await run("import", str(policy), "--reason", "again")
        assert "says the same already" in again.output
        told = await run("explain", "user:alice", f"group:{group}")
        assert (told.exit_code, "allowed by" in told.output) == (0, True)
        assert (await run("test")).exit_code == 0
        back = await run("rollback", "0", "--reason", "too early")
        assert back.exit_code == 5, "the stored test case refuses it"
        sheet = tmp_path / "policy.csv"
        await run("export", "--format", "csv", "--out", str(sheet))
        header = sheet.read_text().splitlines()[0]
        sheet.write_text(f"{header}\n")
        assert (await run("import", str(sheet), "--reason", "empty")).exit_code == 0
        assert (await run("rollback", "1", "--reason", "back")).exit_code == 0
        listed = await run("history")
        for number, reason in ((1, "first"), (2, "empty"), (3, "back")):
            assert any(
                line.split()[0] == str(number) and reason in line
                for line in listed.output.splitlines()
            ), listed.output
        compared = await run("diff", "2", "3")
        assert compared.exit_code == 1
        assert f"+ rule allow user:alice group:read on group:{group}" in compared.output
        assert (await run("diff", "1", "1")).exit_code == 0
        absent = await run("rollback", "9", "--reason", "x")
        assert absent.exit_code == 4
        odd = tmp_path / "policy.txt"
        odd.write_text("x")
        assert (await run("import", str(odd), "--reason", "x")).exit_code == 2
