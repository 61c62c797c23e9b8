"""The service's own server: TLS, certificates exchanged while it serves, who may connect."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from cli.serve import listening, url_of
from service.db.migrate import upgrade_async
from service.settings import ServiceSettings, read_settings
from service.tls import ServerTls, check_listen, open_tls
from sidecar.control.client import ClientTls, http_client
from strongroom.errors import Misuse
from strongroom.problem import MEDIA_TYPE


@dataclass(frozen=True, slots=True)
class Files:
    """One authority's certificate for 127.0.0.1, and where it lies."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, authority: trustme.CA) -> None:
        issued = authority.issue_cert("127.0.0.1")
        for path in (self.certificate, self.key, self.ca):
            path.unlink(missing_ok=True)
        self.key.touch(mode=0o600)
        issued.private_key_pem.write_to_path(self.key)
        self.certificate.write_bytes(b"".join(p.bytes() for p in issued.cert_chain_pems))
        authority.cert_pem.write_to_path(self.ca)

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"tls_certificate": self.certificate, "tls_key": self.key, **more}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Files:
    made = Files(tmp_path / "tls")
    made.folder.mkdir()
    made.issue(authority)
    return made


@asynccontextmanager
async def served(tmp_path: Path, **values: Any) -> AsyncIterator[str]:
    """The service, listening as `strongroom serve` does; gives its URL."""
    settings = read_settings({}, state_directory=tmp_path / "state", port=0, **values)
    settings.state_directory.mkdir(mode=0o700)
    await upgrade_async(settings.database)
    async with listening(settings, guest=True) as (server, door), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve([door]))
        await server.answering.wait()
        try:
            yield url_of(settings, door)
        finally:
            server.should_exit = True
            await serving


def client(url: str, ca: Path | None, **context: Any) -> httpx.AsyncClient:
    trusted = ssl.create_default_context(cafile=None if ca is None else str(ca))
    for name, value in context.items():
        setattr(trusted, name, value)
    return httpx.AsyncClient(base_url=url, verify=trusted, trust_env=False)


async def test_it_is_served_over_tls_to_whoever_trusts_its_authority(
    tmp_path: Path, files: Files
) -> None:
    async with served(tmp_path, **files.settings()) as url:
        assert url.startswith("https://127.0.0.1:")
        async with client(url, files.ca) as http:
            assert (await http.get("/healthz")).json() == {"status": "ok"}
        async with client(url, None) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/healthz")
        async with http_client(url, 5.0, None, ClientTls(files.ca)) as sidecar:
            assert (await sidecar.get("/readyz")).status_code == 200
        plain = url.replace("https:", "http:")
        async with httpx.AsyncClient(base_url=plain, trust_env=False) as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get("/healthz")


@pytest.mark.parametrize(("least", "good"), [("1.3", False), ("1.2", True)])
async def test_old_versions_and_weak_ciphers_are_refused(
    tmp_path: Path, files: Files, least: str, good: bool
) -> None:
    async with served(tmp_path, **files.settings(tls_version_min=least)) as url:
        old = client(url, files.ca, maximum_version=ssl.TLSVersion.TLSv1_2)
        async with old as http:
            if good:
                assert (await http.get("/healthz")).status_code == 200
            else:
                with pytest.raises(httpx.ConnectError):
                    await http.get("/healthz")
        weak = ssl.create_default_context(cafile=str(files.ca))
        weak.maximum_version = ssl.TLSVersion.TLSv1_2
        weak.set_ciphers("ECDHE+AES128+SHA256:AES128-SHA:@SECLEVEL=0")
        async with httpx.AsyncClient(base_url=url, verify=weak, trust_env=False) as http:
            with pytest.raises(httpx.ConnectError):
                await http.get("/healthz")


async def test_a_client_without_the_right_certificate_does_not_get_as_far_as_http(
    tmp_path: Path, files: Files, authority: trustme.CA
) -> None:
    own, other = authority.issue_cert("node-1"), trustme.CA().issue_cert("node-1")
    for number, issued in enumerate((own, other)):
        issued.private_key_and_cert_chain_pem.write_to_path(files.folder / f"client-{number}.pem")
    async with served(tmp_path, **files.settings(tls_client_ca=files.ca)) as url:
        right = ClientTls(files.ca, files.folder / "client-0.pem")
        async with http_client(url, 5.0, None, right) as http:
            assert (await http.get("/healthz")).status_code == 200
        for wrong in (ClientTls(files.ca), ClientTls(files.ca, files.folder / "client-1.pem")):
            async with http_client(url, 5.0, None, wrong) as http:
                with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)):
                    await http.get("/healthz")


def handshake(tls: ServerTls, files: Files, ca: bytes) -> str:
    """A handshake in memory by a client that names no server: what it saw of the certificate."""
    trusted = ssl.create_default_context(cadata=ca.decode())
    trusted.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = trusted.wrap_bio(to_client, to_server)
    server_side = tls.context.wrap_bio(to_server, to_client, server_side=True)
    done = 0
    while done < 2:
        done = 0
        for side in (client_side, server_side):
            try:
                side.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                continue
    del files
    return str(client_side.getpeercert(binary_form=True))


def test_a_changed_certificate_is_in_force_for_new_connections(
    tmp_path: Path, files: Files, authority: trustme.CA
) -> None:
    settings = read_settings({}, state_directory=tmp_path, **files.settings())
    tls = open_tls(settings)
    assert tls is not None
    before = handshake(tls, files, authority.cert_pem.bytes())
    assert not tls.look()
    renewed = trustme.CA()
    files.issue(renewed)
    # Until it is looked at, the old one serves.
    assert handshake(tls, files, authority.cert_pem.bytes()) == before
    assert tls.look()
    after = handshake(tls, files, renewed.cert_pem.bytes())
    assert after != before
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tls, files, authority.cert_pem.bytes())


def test_files_that_do_not_fit_together_leave_the_old_certificate_in_force(
    tmp_path: Path, files: Files, authority: trustme.CA
) -> None:
    tls = open_tls(read_settings({}, state_directory=tmp_path, **files.settings()))
    assert tls is not None
    before = handshake(tls, files, authority.cert_pem.bytes())
    key = files.key.read_bytes()
    for content in (b"", b"no key", trustme.CA().issue_cert("x").private_key_pem.bytes()):
        files.key.write_bytes(content)
        assert not tls.look()
        assert handshake(tls, files, authority.cert_pem.bytes()) == before
    files.key.unlink()
    assert not tls.look()
    files.key.touch(mode=0o600)
    files.key.write_bytes(key)
    assert tls.look()


def test_a_key_that_everybody_can_read_stops_the_start(tmp_path: Path, files: Files) -> None:
    settings = read_settings({}, state_directory=tmp_path, **files.settings())
    files.key.chmod(0o640)
    assert open_tls(settings) is not None
    files.key.chmod(0o644)
    with pytest.raises(Misuse, match="chmod o-r") as refusal:
        open_tls(settings)
    assert refusal.value.field == "tls_key"


@pytest.mark.parametrize(
    "given", [{"tls_certificate": "c"}, {"tls_key": "k"}, {"tls_client_ca": "a"}]
)
def test_half_a_set_of_files_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(Misuse, match="tls_"):
        read_settings({f"STRONGROOM_SERVICE_{name.upper()}": text for name, text in given.items()})


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "service.example", "127.0.0.1.nip.io"]
)
def test_beyond_loopback_it_is_tls_or_said_in_so_many_words(host: str, files: Files) -> None:
    def settings(**values: Any) -> ServiceSettings:
        return read_settings({}, host=host, **values)

    with pytest.raises(Misuse) as refusal:
        check_listen(settings())
    assert refusal.value.field == "host"
    for option in ("--tls-certificate", "--listen-beyond-loopback-in-plain-http"):
        assert option in refusal.value.message
    check_listen(settings(**files.settings()))
    check_listen(settings(listen_beyond_loopback_in_plain_http=True))
    for loopback in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        check_listen(read_settings({}, host=loopback))


async def test_the_server_itself_refuses_the_address(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="plain HTTP"):
        async with served(tmp_path, host="0.0.0.0"):
            pass  # pragma: no cover


async def test_what_is_no_http_is_a_problem_too(tmp_path: Path) -> None:
    async with served(tmp_path) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        for sent in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert MEDIA_TYPE.encode() in answer
            assert b"hello" not in answer
            writer.close()
            await writer.wait_closed()


async def test_the_server_does_not_say_what_it_is(tmp_path: Path) -> None:
    async with served(tmp_path) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        assert "server" not in (await http.get("/healthz")).headers
