"""`strongroom doctor` sees what is wrong and says what to do."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.doctor import Finding, Health, Place, examine
from cli.main import app


def findings(place: Place) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(place)}


def test_this_machine_can_run_strongroom(tmp_path: Path) -> None:
    failed = [f for f in examine(Place(tmp_path / "state")) if f.health is Health.FAIL]
    assert failed == []


def test_a_private_state_folder_is_well_and_a_key_open_to_others_is_not(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    key = state / "installation.key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    assert findings(Place(state))["permissions"].health is Health.OK
    key.chmod(0o644)
    found = findings(Place(state))["permissions"]
    assert found.health is Health.FAIL
    assert str(key) in found.advice


def test_a_service_that_is_not_there_is_a_failure_with_advice(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    found = findings(Place(tmp_path, service_url=url))["service"]
    assert found.health is Health.FAIL
    assert "strongroom serve" in found.advice


def test_a_socket_answers_only_with_private_permissions(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        path.chmod(0o600)
        assert findings(Place(tmp_path, socket=path))["sidecar"].health is Health.OK
        path.chmod(0o666)
        assert findings(Place(tmp_path, socket=path))["sidecar"].health is Health.FAIL


def test_an_environment_without_vllm_is_no_engines_environment(tmp_path: Path) -> None:
    found = findings(Place(tmp_path, engine_python=Path(sys.executable)))
    assert found["engine: vLLM"].health is Health.FAIL
    assert found["engine: nothing else of ours"].health is Health.FAIL


@pytest.mark.parametrize(("mode", "code"), [(0o600, 0), (0o640, 1)])
def test_the_exit_code_says_whether_something_will_not_work(
    tmp_path: Path, mode: int, code: int
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    token = state / "operator.token"
    token.write_text("t")
    token.chmod(mode)
    result = CliRunner().invoke(app, ["doctor", "--state", str(state)])
    assert result.exit_code == code
