"""Known secret bytes go through every path, and are looked for wherever an operator can look.

Whoever runs the service sees its logs, its answers, its database and its dumps. None of these
holds a component's secret, a key-encryption key, a signing key or a token, in any usual writing.
The last tests show that the search itself finds what there is.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import logging
import pkgutil
import re
import secrets as entropy
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from cli.environment import child_environment
from service.keys import components, rotation
from service.keys.models import Component
from service.keys.provider import INSTALLATION
from service.settings import ServiceSettings
from strongroom.identity import ComponentId, ComponentKind
from tests.service.evidence import noted
from tests.service.house import Service, running
from tests.service.sidecar_party import enrolled
from tests.service.test_backup import every_row
from tests.service.test_grants import Scene
from tests.service.test_revocation import body

ROOT: Final = Path(__file__).parents[2]


def writings(secret: bytes) -> list[bytes]:
    """How a secret might be written."""
    url = base64.urlsafe_b64encode(secret).rstrip(b"=")
    return [
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        # Without the last group, whose form depends on what follows.
        base64.b64encode(secret)[:40],
        url[:40],
        repr(secret)[2:-1].encode(),
        json.dumps(list(secret))[1:-1].encode(),
        str(int.from_bytes(secret, "big")).encode(),
    ]


def found(canaries: Iterable[bytes], told: bytes) -> list[bytes]:
    """The canaries that `told` holds."""
    return [each for each in canaries if any(form in told for form in writings(each))]


class Canaries:
    """Secrets drawn for components, known to the test."""

    def __init__(self) -> None:
        self.drawn: list[bytes] = []

    def token_bytes(self, count: int) -> bytes:
        self.drawn.append(entropy.token_bytes(count))
        return self.drawn[-1]


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Canaries:
    drawn = Canaries()
    monkeypatch.setattr(components, "entropy", drawn)
    return drawn


@pytest.fixture
def loud(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Everything is logged: the database's statements too."""
    caplog.set_level(logging.DEBUG)
    for name in ("sqlalchemy.engine", "sqlalchemy.pool", "strongroom.service", "aiosqlite"):
        caplog.set_level(logging.DEBUG, name)
    return caplog


def recorded(service: Service) -> list[bytes]:
    """Every answer of the service from now on."""
    answers: list[bytes] = []

    async def keep(response: httpx.Response) -> None:
        await response.aread()
        answers.append(response.content + repr(response.headers).encode())

    service.http.event_hooks["response"].append(keep)
    return answers


async def walk(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path that opens a secret, and every way in which it can fail."""
    scene = await Scene(service).set_up()
    party = await enrolled(service, scene.tenant)
    runtime = service.runtime
    answer, _ = await scene.grant(scene.alice)
    assert (await party.key_lease(answer["grant"])).is_success
    await scene.grant(scene.bob)
    await service.operator.post("/v1/revocations", body("document_version", scene.document))
    for kek in (INSTALLATION, scene.tenant):
        await rotation.rotate(runtime.database, runtime.changes, runtime.key_provider, kek)
    await runtime.key_check.look()
    await runtime.key_schedule.round()
    for path in ("/v1/keys/uses", "/v1/keys/rotations", "/v1/keys/status", "/v1/audit/events"):
        await service.operator.get(path)
    # A wrapped form is damaged; what derives from an opened secret breaks in the middle.
    version = await service.document(scene.tenant, "damaged", scene.group)
    async with runtime.database.writers.begin() as session:
        row = await session.get_one(Component, ComponentId(version))
        assert row.wrapped is not None
        row.wrapped = row.wrapped[:-1] + bytes([row.wrapped[-1] ^ 1])
    spans = [{"end": 100, "document": version}]
    refused = await scene.alice.post("/v1/grants", scene.body(spans=spans))
    assert refused["granted_tokens"] == 0, "damaged is as if it were not there"
    whole = [{"end": 100, "group": "everyone"}]

    def breaks(secrets: list[bytes], info: bytes) -> bytes:
        assert secrets
        raise RuntimeError(f"the derivation broke over {len(secrets)} secrets")

    with monkeypatch.context() as broken:
        broken.setattr("service.grants.decide.namespace_secret", breaks)
        unforeseen = await scene.alice.ask("POST", "/v1/grants", scene.body(spans=whole))
        assert unforeseen.status_code == 500
    await service.operator.ask("POST", "/v1/keys/rotations", {"kek": "f" * 32})


async def test_no_secret_is_in_a_log_an_answer_a_row_or_a_file(
    settings: ServiceSettings,
    canaries: Canaries,
    loud: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(settings) as service:
        answers = recorded(service)
        known = [path.read_bytes() for path in settings.keys.iterdir()]
        await walk(service, monkeypatch)
        known += [path.read_bytes() for path in settings.keys.iterdir()]
        rows = await every_row(service.runtime.database)
        printed = printed_of(service)
    secrets = [*canaries.drawn, *known]
    assert len(canaries.drawn) > 10
    assert len(answers) > 20
    assert "the derivation broke" in loud.text, "what fails is logged with its trace"
    out, err = capfd.readouterr()
    records = "".join(repr(vars(record)) for record in loud.records)
    places = {
        "logs": (loud.text + records).encode(),
        "answers": b"\0".join(answers),
        "stdout and stderr": (out + err).encode(),
        "rows": repr(rows).encode() + b"\0".join(every_blob(rows)),
        "repr and str": printed.encode(),
    }
    for name, told in places.items():
        assert told or name == "stdout and stderr", name
        assert found(secrets, told) == [], name
    files = [path for path in settings.state_directory.rglob("*") if path.is_file()]
    for path in files:
        if settings.keys not in path.parents:
            assert found(secrets, path.read_bytes()) == [], path


def every_blob(rows: dict[str, list[Any]]) -> Iterator[bytes]:
    for table in rows.values():
        for row in table:
            yield from (bytes(value) for value in row if isinstance(value, bytes | memoryview))


def printed_of(service: Service) -> str:
    """What printing anything that holds keys, or holds what holds them, gives."""
    runtime = service.runtime
    parts = [getattr(runtime, field.name) for field in dataclasses.fields(runtime)]
    # A key itself prints as what it is; who holds it does not print it.
    things = [runtime, *(part for part in parts if not isinstance(part, bytes))]
    things += [vars(thing) for thing in things if hasattr(thing, "__dict__")]
    return "\n".join(f"{thing!r} {thing}" for thing in things)


async def test_what_holds_an_opened_secret_prints_nothing_of_it(
    service: Service, canaries: Canaries
) -> None:
    async with service.runtime.database.writers.begin() as session:
        made = await components.register(session, ComponentKind.MODEL, None)
        uses = noted()
        [opened] = await components.secrets(session, [made], uses)
        row = await session.get_one(Component, made)
    assert bytes(opened) == canaries.drawn[-1]
    printed = f"{uses!r} {vars(uses)} {row!r} {vars(row)}".encode()
    assert found(canaries.drawn, printed) == []


HOLDS: Final = re.compile(r"secret|key$|_key$|salt$|wrapped|blob|password|^token$|join_token")
PUBLIC: Final = {
    # Public keys, and names that say "key" of something else.
    "service.registry.idempotency.Attempt.key",
    "service.sidecars.store.Enrolled.signing_key",
    "service.sidecars.store.Enrolled.hpke_key",
    "strongroom.control.EnrolRequest.signing_key",
    "strongroom.control.EnrolRequest.hpke_key",
    "strongroom.control.KeyChangeClaims.signing_key",
    "strongroom.control.KeyChangeClaims.hpke_key",
    "strongroom.control.KeyChangeRequest.signing_key",
    "strongroom.control.KeyChangeRequest.hpke_key",
    # A block's own salt lies beside its ciphertext.
    "storage.header.Header.salt",
}


def test_every_type_that_holds_a_secret_leaves_it_out_of_its_repr() -> None:
    printed = set()
    for owner, name in _printed_fields():
        if HOLDS.search(name):
            printed.add(f"{owner.__module__}.{owner.__qualname__}.{name}")
    assert printed - PUBLIC == set()


def _printed_fields() -> Iterator[tuple[type, str]]:
    """Fields of text or bytes that a `repr` made by a dataclass or a struct would print."""
    for room in ("strongroom", "policy", "storage", "sidecar", "service"):
        package = importlib.import_module(room)
        for info in pkgutil.walk_packages(package.__path__, f"{room}."):
            if ".connectors" in info.name or info.name.endswith(".tensors"):
                continue
            module = importlib.import_module(info.name)
            for owner in vars(module).values():
                if isinstance(owner, type) and owner.__module__ == info.name:
                    yield from ((owner, name) for name in _of(owner))


def _of(owner: type) -> Iterator[str]:
    held = re.compile(r"\b(str|bytes|bytearray|memoryview|AESGCM)\b")
    if dataclasses.is_dataclass(owner):
        if not owner.__dataclass_params__.repr:  # type: ignore[attr-defined]
            return
        for field in dataclasses.fields(owner):
            if field.repr and held.search(str(field.type)):
                yield field.name
    elif issubclass(owner, msgspec.Struct) and "__repr__" not in vars(owner):
        for name in owner.__struct_fields__:
            if held.search(str(owner.__annotations__.get(name, ""))):
                yield name


def test_a_database_password_is_in_no_repr_of_settings_or_database() -> None:
    from service.db.session import open_database

    url = "postgresql+asyncpg://strongroom:hunter2-canary@127.0.0.1/strongroom"
    settings = ServiceSettings(database_url=url)
    database = open_database(url)
    assert "hunter2" not in f"{settings!r} {settings} {database!r} {database.engine!r}"


# A real process


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGABRT])
def test_a_real_process_tells_no_key_and_leaves_no_core(
    tmp_path: Path, ends: signal.Signals
) -> None:
    """Also when it dies with Python's fault handler on, which writes every thread's stack."""
    state, log = tmp_path / "state", tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "cli.main", "serve", "--port", "0",
             "--state", str(state)],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            cwd=tmp_path, env=child_environment() | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while (url := re.search(r"service on (http://\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)  # another process: there is no event to wait for
        token = (state / "operator.token").read_text()
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.post(f"{url[1]}/v1/tenants", json={"name": "acme"}, headers=headers)
        assert answer.status_code == 201
        (state / "keys" / f"kek-{answer.json()['id']}-v1.key").write_bytes(b"damaged")
        assert httpx.get(f"{url[1]}/v1/tenants", headers=headers).is_success
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert re.search(r"Max core file size\s+0\s+0\s", limits)
    finally:
        process.send_signal(ends)
        process.wait(30)
    told = log.read_bytes()
    if ends is signal.SIGABRT:
        assert b"Fatal Python error: Aborted" in told
    known = [path.read_bytes() for path in (state / "keys").iterdir()]
    assert len(known) > 3
    assert found([each for each in known if len(each) == 32], told) == []
    assert token.encode() not in told
    assert not list(tmp_path.glob("core*"))


def test_a_process_that_holds_keys_is_not_dumpable() -> None:
    code = (
        "from cli.hardening import keep_private; import ctypes, resource; keep_private();"
        "print(ctypes.CDLL(None).prctl(3,0,0,0,0), resource.getrlimit(resource.RLIMIT_CORE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "0 (0, 0)"


@pytest.mark.parametrize("number", range(8))
def test_the_search_finds_a_secret_in_any_of_its_writings(number: int) -> None:
    secret = entropy.token_bytes(32)
    told = b"before " + writings(secret)[number] + b" after"
    assert found([secret], told) == [secret]
    assert found([entropy.token_bytes(32)], told) == []
