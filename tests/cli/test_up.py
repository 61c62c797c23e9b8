"""`strongroom up` and the commands against it, as an operator would use them: real processes."""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cli.environment import child_environment

STRONGROOM = [sys.executable, "-m", "cli.main"]
READY_S = 90.0


@dataclass(frozen=True, slots=True)
class Installation:
    """A running `strongroom up`."""

    state: Path
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def token(self) -> Path:
        return self.state / "service" / "operator.token"

    def run(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [*STRONGROOM, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=child_environment() | {"COLUMNS": "200"},
        )
        assert done.returncode == code, done.stdout + done.stderr
        return (done.stdout + done.stderr).strip()

    def ask(self, *arguments: str, code: int = 0) -> str:
        """A command that talks to the service."""
        return self.run(*arguments, "--url", self.url, "--token-file", str(self.token), code=code)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("up")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "up.log"
    state = folder / "state"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*STRONGROOM, "up", "--state", str(state), "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=child_environment()
            | {
                "STRONGROOM_SIDECAR_HOST_BYTES": str(64 * 1024**2),
                "STRONGROOM_SIDECAR_NVME_BYTES": str(128 * 1024**2),
            },
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while "kv_connector_extra_config" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)  # another process: there is no event to wait for
        yield Installation(state, url, log, process)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
        # The sidecar ends before the service that it needs.
        for complaint in ("no serving lease", "running task", "Traceback"):
            assert complaint not in log.read_text()


def test_up_says_how_to_connect_vllm(installation: Installation) -> None:
    printed = installation.log.read_text()
    config = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    extra = config["kv_connector_extra_config"]
    assert Path(extra["socket"]).is_socket()
    assert Path(extra["token_file"]).stat().st_mode & 0o777 == 0o600
    assert config["kv_load_failure_policy"] == "recompute"


def test_everything_kept_is_its_owners_alone(installation: Installation) -> None:
    for path in installation.state.rglob("*"):
        assert path.lstat().st_mode & 0o077 == 0 or path.is_symlink(), path


def test_doctor_finds_the_running_parts_well(installation: Installation) -> None:
    said = installation.run(
        "doctor",
        "--state",
        str(installation.state),
        "--url",
        installation.url,
        "--socket",
        str(installation.state / "run" / "sidecar.sock"),
    )
    assert "FAIL" not in said.upper().split()
    assert "is ready" in said
    assert "answers, mode 600" in said


def test_ready_is_zero_here_and_seven_elsewhere(installation: Installation) -> None:
    assert "ready" in installation.run("ready", "--url", installation.url)
    installation.run("ready", "--url", "http://127.0.0.1:9", code=7)


def test_the_service_asks_every_caller_for_a_token(installation: Installation) -> None:
    assert httpx.get(f"{installation.url}/v1/tenants").status_code == 401


def test_onboard_revoke_and_verify(installation: Installation, tmp_path: Path) -> None:
    tenant = installation.ask("tenant", "create", "acme").splitlines()[-1]
    group = installation.ask("tenant", "group", tenant, "clerks").splitlines()[-1]
    installation.ask("tenant", "subject", tenant, "alice", "--group", group)
    assert "acme" in installation.ask("tenant", "list")
    again = installation.ask("tenant", "create", "acme", code=5)
    assert "name" in again
    # Nothing was restored, so there is nothing to review.
    installation.ask("tenant", "review", tenant, "--reason", "restored", code=5)

    token = tmp_path / "alice.token"
    installation.run(
        "token",
        "alice",
        "--role",
        "subject",
        "--tenant",
        tenant,
        "--state",
        str(installation.state / "service"),
        "--out",
        str(token),
    )
    assert token.stat().st_mode & 0o777 == 0o600

    certificate = tmp_path / "c.jws"
    said = installation.ask(
        "revoke",
        "group",
        group,
        "--tenant",
        tenant,
        "--reason",
        "contract ended",
        "--certificate",
        str(certificate),
    )
    assert ": in force since " in said
    assert "embedded" in said

    keys = tmp_path / "keys.json"
    operator = {"Authorization": f"Bearer {installation.token.read_text()}"}
    keys.write_text(httpx.get(f"{installation.url}/v1/keys", headers=operator).text)
    verified = installation.run("verify", str(certificate), "--keys", str(keys))
    assert verified.startswith("VALID")
    assert "fenced" in verified

    text = certificate.read_text()
    middle = len(text) // 2
    certificate.write_text(
        text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :]
    )
    refused = installation.run("verify", str(certificate), "--keys", str(keys), code=1)
    assert refused.startswith("INVALID")


def test_a_subjects_token_opens_no_administration(
    installation: Installation, tmp_path: Path
) -> None:
    tenant = installation.ask("tenant", "create", "globex").splitlines()[-1]
    installation.ask("tenant", "subject", tenant, "bob")
    token = tmp_path / "bob.token"
    state = str(installation.state / "service")
    arguments = ("token", "bob", "--role", "subject", "--tenant", tenant, "--state", state)
    installation.run(*arguments, "--out", str(token))
    url = ("--url", installation.url, "--token-file", str(token))
    installation.run("tenant", "create", "initech", *url, code=3)


@pytest.mark.parametrize(
    "question",
    [
        ("events", "--category", "control"),
        ("accesses",),
        ("denials",),
        ("key-uses",),
        ("cross-tenant-hits",),
        ("report",),
        ("report", "--json"),
        ("holds", "list"),
        ("heads", "list"),
    ],
)
def test_audit_questions_answer(installation: Installation, question: tuple[str, ...]) -> None:
    installation.ask("audit", *question)


def test_keys_are_rotated_and_their_use_is_told(installation: Installation) -> None:
    tenant = installation.ask("tenant", "create", "keyed").splitlines()[-1]
    done = json.loads(installation.ask("keys", "rotate", "--tenant", tenant, "--json"))
    assert (done["state"], done["kek"], done["components_left"]) == ("done", tenant, 0)
    assert done["components_total"] > 0
    assert done["id"] in installation.ask("keys", "rotations", "--tenant", tenant)
    asked = ("--purpose", "rotation", "--tenant", tenant)
    use = json.loads(installation.ask("keys", "uses", *asked, "--json"))
    assert (use["reference"], use["actor_kind"]) == (done["id"], "system")
    assert json.loads(installation.ask("keys", "status", "--json"))["provider"] == "file_ring"
    installation.ask("keys", "rotate", "--tenant", "f" * 32, code=4)
    assert not list((installation.state / "service" / "keys").glob(f"kek-{tenant}-v1.key"))


def test_a_backup_is_made_while_it_serves_and_verified(
    installation: Installation, tmp_path: Path
) -> None:
    state = ("--state", str(installation.state / "service"))
    out = tmp_path / "backup"
    assert "backup in" in installation.run("backup", "create", "--out", str(out), *state)
    assert installation.run("backup", "verify", str(out), *state).startswith("VALID")
    keys = tmp_path / "keys.json"
    operator = {"Authorization": f"Bearer {installation.token.read_text()}"}
    keys.write_text(httpx.get(f"{installation.url}/v1/keys", headers=operator).text)
    elsewhere = ("--state", str(tmp_path / "none"), "--keys", str(keys))
    assert installation.run("backup", "verify", str(out), *elsewhere).startswith("VALID")
    # The service runs: nothing is put over its database.
    installation.run("backup", "restore", str(out), *state, code=5)
    database = out / "database.db"
    database.write_bytes(database.read_bytes()[:-4096])
    installation.run("backup", "verify", str(out), *state, code=1)


def test_the_log_is_verified_against_heads_that_were_kept(
    installation: Installation, tmp_path: Path
) -> None:
    head = tmp_path / "head.jws"
    head.write_text(installation.ask("audit", "heads", "sign"))
    assert "INTACT" in installation.ask("audit", "verify", "--heads", str(head))
    export = tmp_path / "events.jsonl"
    installation.ask("audit", "events", "--export", str(export), "--order", "chain")
    events = [json.loads(line) for line in export.read_text().splitlines()]
    assert [event["seq"] for event in events] == list(range(len(events)))
    installation.ask("audit", "events", "--export", str(export), code=2)
    other = head.read_text().split(".")
    claims = json.loads(base64.urlsafe_b64decode(other[1] + "=="))
    claims["root"] = "0" * 64
    other[1] = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    head.write_text(".".join(other))
    installation.ask("audit", "verify", "--heads", str(head), code=3)


def test_a_hold_is_placed_and_released(installation: Installation) -> None:
    hold = installation.ask("audit", "holds", "place", "--reason", "matter 1").splitlines()[-1]
    assert hold in installation.ask("audit", "holds", "list")
    installation.ask("audit", "holds", "release", hold)


def test_a_second_up_on_the_same_state_is_refused_and_harms_nothing(
    installation: Installation,
) -> None:
    installation.run("up", "--state", str(installation.state), "--port", "0", code=5)
    assert "ready" in installation.run("ready", "--url", installation.url)
