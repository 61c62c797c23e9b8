"""The command teaches itself, and its errors leave with a code of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.main import app
from cli.options import exit_code
from strongroom.errors import (
    Conflict,
    Corrupt,
    LeaseExpired,
    Missing,
    Misuse,
    Overloaded,
    QuotaExceeded,
    Refused,
    Unavailable,
)

runner = CliRunner()


def verbs() -> list[str]:
    group: Any = typer.main.get_command(app)
    return sorted(group.commands)


def test_the_verbs_that_the_documentation_names_exist() -> None:
    named = {"serve", "sidecar", "up", "demo", "tenant", "revoke", "audit", "verify", "doctor"}
    assert named <= set(verbs())


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_help(verb: str) -> None:
    result = runner.invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Misuse("x"), 2),
        (Refused("x"), 3),
        (Missing("x"), 4),
        (Conflict("x"), 5),
        (Overloaded("x"), 6),
        (QuotaExceeded("x"), 6),
        (Unavailable("x"), 7),
        (LeaseExpired("x"), 7),
        (Corrupt("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: Any, code: int) -> None:
    assert exit_code(error) == code


def test_a_missing_token_says_how_to_get_one(tmp_path: Path) -> None:
    result = runner.invoke(app, ["tenant", "list", "--token-file", str(tmp_path / "none")])
    assert result.exit_code == 3
    assert "strongroom token" in result.stderr


def test_a_token_that_others_can_read_is_refused_and_a_private_one_is_used(tmp_path: Path) -> None:
    token = tmp_path / "t.token"
    token.write_text("secret-of-the-operator")
    token.chmod(0o644)
    arguments = ["tenant", "list", "--url", "http://127.0.0.1:9", "--token-file", str(token)]
    refused = runner.invoke(app, arguments)
    assert refused.exit_code == 3
    assert "chmod 600" in refused.stderr
    assert "secret-of-the-operator" not in refused.output + refused.stderr
    token.chmod(0o600)
    unreachable = runner.invoke(app, arguments)
    assert unreachable.exit_code == 7
    assert "strongroom serve" in unreachable.stderr


@pytest.mark.parametrize(("host", "code"), [("0.0.0.0", 2), ("192.0.2.1", 2)])
def test_listening_beyond_loopback_needs_to_be_said(tmp_path: Path, host: str, code: int) -> None:
    result = runner.invoke(app, ["serve", "--host", host, "--state", str(tmp_path / "s")])
    assert result.exit_code == code
    assert "--tls-certificate" in result.stderr
    assert "--listen-beyond-loopback-in-plain-http" in result.stderr
    assert not (tmp_path / "s").exists()
