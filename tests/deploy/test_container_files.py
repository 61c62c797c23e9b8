"""The container files name only paths, ports, commands and settings that exist.

No container engine runs in CI, so what can be known without one is checked: every file that a
Dockerfile copies, every option that a command passes, every setting that an environment names.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cli.main import app
from service.settings import ENV_PREFIX as SERVICE_PREFIX
from service.settings import ServiceSettings
from sidecar.settings import ENV_PREFIX as SIDECAR_PREFIX
from sidecar.settings import SidecarSettings
from strongroom.connectors.settings import ConnectorSettings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = ("service", "sidecar")


def dockerfiles() -> list[Path]:
    return [
        ROOT / service["build"]["context"] / service["build"]["dockerfile"]
        for service in COMPOSE["services"].values()
        if "build" in service
    ]


def instructions(path: Path) -> list[tuple[str, list[str]]]:
    """A Dockerfile's instructions, continuation lines joined, comments dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    return [
        (line.split(maxsplit=1)[0], shlex.split(line.split(maxsplit=1)[1]))
        for line in joined.splitlines()
        if line.strip()
    ]


def command_of(name: str) -> Any:
    """The command behind a verb, as Typer builds it; `KeyError` when there is none."""
    group: Any = typer.main.get_command(app)
    return group.commands[name]


def test_the_four_parts_are_there() -> None:
    assert set(COMPOSE["services"]) == {"database", "service", "sidecar", "vllm"}


@pytest.mark.parametrize("path", sorted(set(dockerfiles())), ids=lambda path: path.name)
def test_a_dockerfile_copies_only_what_exists(path: Path) -> None:
    copied = [
        source
        for name, words in instructions(path)
        if name == "COPY" and not any(word.startswith("--from") for word in words)
        for source in words[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source


def test_the_engines_image_receives_no_service_policy_storage_or_sidecar() -> None:
    words = [
        word
        for name, words in instructions(ROOT / "deploy/vllm.Dockerfile")
        if name == "COPY"
        for word in words
    ]
    assert "strongroom" in words
    assert not {"service", "policy", "storage", "sidecar", "cli"} & set(words)


@pytest.mark.parametrize("name", OURS)
def test_every_option_of_a_command_exists(name: str) -> None:
    verb, *words = COMPOSE["services"][name]["command"]
    known = {option for parameter in command_of(verb).params for option in parameter.opts}
    for word in words:
        if word.startswith("--"):
            assert word in known, word


@pytest.mark.parametrize(
    ("name", "prefix", "settings"),
    [
        ("service", SERVICE_PREFIX, ServiceSettings),
        ("sidecar", SIDECAR_PREFIX, SidecarSettings),
    ],
)
def test_every_setting_exists(name: str, prefix: str, settings: Any) -> None:
    environment = COMPOSE["services"][name]["environment"]
    assert environment
    for variable in environment:
        assert variable.startswith(prefix)
        assert variable.removeprefix(prefix).lower() in settings.model_fields


def test_the_health_check_is_a_command_that_exists() -> None:
    form, program, verb, *_ = COMPOSE["services"]["service"]["healthcheck"]["test"]
    assert (form, program) == ("CMD", "strongroom")
    assert command_of(verb) is not None


def test_the_sidecar_calls_the_service_where_it_listens() -> None:
    service = COMPOSE["services"]["service"]["command"]
    sidecar = COMPOSE["services"]["sidecar"]["command"]
    port = service[service.index("--port") + 1]
    assert sidecar[sidecar.index("--service") + 1] == f"http://service:{port}"


def test_only_the_engine_is_published_and_only_on_loopback() -> None:
    published = {
        name: service["ports"]
        for name, service in COMPOSE["services"].items()
        if "ports" in service
    }
    assert published == {"vllm": ["127.0.0.1:8000:8000"]}


def test_the_engines_connector_configuration_parses_and_meets_the_sidecar() -> None:
    words = COMPOSE["services"]["vllm"]["command"]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_load_failure_policy"] == "recompute"
    parsed = ConnectorSettings.parse(transfer["kv_connector_extra_config"])
    sidecar = COMPOSE["services"]["sidecar"]["command"]
    socket = Path(sidecar[sidecar.index("--socket") + 1])
    engine = sidecar[sidecar.index("--engine") + 1]
    assert parsed.socket == socket
    assert parsed.engine == engine
    assert parsed.token_file == socket.parent / "engines" / f"{engine}.token"


def test_every_volume_and_network_that_is_used_is_declared() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"]
        for network in service.get("networks", []):
            assert network in COMPOSE["networks"]


def test_no_secret_is_written_down() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert "${POSTGRES_PASSWORD:?" in text
    assert re.search(r"PASSWORD: [^$]", text) is None
