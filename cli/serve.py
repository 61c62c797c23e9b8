"""`strongroom serve`, `sidecar` and `up`: the long-running processes.

`serve` brings the database to the newest migration, writes an operator's token into the state
folder (0600), and refuses to listen beyond loopback unless told so in so many words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import uvicorn
from rich.console import Console
from uvicorn.protocols.http.h11_impl import H11Protocol

from cli.recovery_bar import RecoveryBar
from service.app import create_app
from service.auth.issuer import bootstrap_operator_token
from service.db.migrate import upgrade
from service.settings import ServiceSettings, read_settings
from service.tls import ServerTls, check_listen, open_tls
from sidecar.compose import running
from sidecar.settings import SidecarSettings, load_settings
from strongroom.errors import ProtocolViolation
from strongroom.private_files import private_folders, write_private
from strongroom.problem import MEDIA_TYPE, encode_problem, problem_document

TOKEN_FILE: Final = "operator.token"  # noqa: S105 - a file name
EMBEDDED_ENGINE: Final = "engine"
UNREAD_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Embedded:
    """Where `up` puts things inside one state folder."""

    state: Path

    @property
    def service(self) -> Path:
        return self.state / "service"

    @property
    def sidecar(self) -> Path:
        return self.state / "sidecar"

    @property
    def socket(self) -> Path:
        return self.state / "run" / "sidecar.sock"

    @property
    def engine_tokens(self) -> Path:
        return self.state / "engines"

    @property
    def nvme(self) -> Path:
        return self.state / "nvme"


def engine_token(folder: Path, engine: str) -> Path:
    """The token file of one engine, made on first use."""
    path = folder / f"{engine}.token"
    private_folders(folder)
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return path


def operator_token(path: Path) -> None:
    """An operator's token for one sidecar, made on first use."""
    if not path.exists():
        write_private(path, secrets.token_hex(32))


def service_settings(
    state: Path, host: str, port: int, database_url: str | None, **more: Any
) -> ServiceSettings:
    """Settings from the command line over the environment; None is "not given"."""
    values: dict[str, Any] = {"state_directory": state, "host": host, "port": port}
    given = {"database_url": database_url, **more}
    return read_settings(
        **values, **{name: value for name, value in given.items() if value is not None}
    )


def prepare_service(settings: ServiceSettings, console: Console) -> Path:
    """Migrate the database and write the operator's token; returns the token's file."""
    private_folders(settings.state_directory)
    upgrade(settings.database)
    token_file = settings.state_directory / TOKEN_FILE
    write_private(
        token_file,
        bootstrap_operator_token(settings, name="operator", life_s=settings.token_life_s_max),
    )
    hours = settings.token_life_s_max / 3600
    console.print(f"operator token for {hours:.0f} h in {token_file}", highlight=False)
    return token_file


def serve(settings: ServiceSettings, console: Console) -> None:
    """Run the service until it is told to stop."""
    prepare_service(settings, console)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings, console))


def run_sidecar(settings: SidecarSettings, console: Console) -> None:
    """Run the sidecar until it is told to stop."""
    console.print(f"sidecar on {settings.socket_path}", highlight=False)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_stopped(settings, console))


def up(settings: ServiceSettings, place: Embedded, console: Console) -> None:
    """Run service and sidecar in one process until it is told to stop."""
    # On loopback the two need no certificates between them.
    plain = {"tls_certificate": None, "tls_key": None, "tls_client_ca": None}
    settings = settings.model_copy(update=plain)
    prepare_service(settings, console)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_up(settings, place, console))


def sidecar_settings(**values: object) -> SidecarSettings:
    """Settings from the command line over the environment; None is "not given"."""
    given = {name: value for name, value in values.items() if value is not None}
    return load_settings(None, **given)


def _told_to_stop() -> asyncio.Event:
    """Set by SIGTERM and SIGINT, from now on."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _until_stopped(settings: SidecarSettings, console: Console) -> None:
    stop = _told_to_stop()
    async with _sidecar_running(settings, console):
        await stop.wait()


@contextlib.asynccontextmanager
async def _sidecar_running(settings: SidecarSettings, console: Console) -> AsyncIterator[None]:
    """The sidecar, with a bar until it has found what its NVMe tier holds."""
    with RecoveryBar(console) as bar:
        async with running(settings, progress=bar):
            bar.stop()
            yield


async def _serve(settings: ServiceSettings, console: Console) -> None:
    async with listening(settings) as (server, door):
        console.print(f"service on {url_of(settings, door)}", highlight=False)
        await server.serve([door])


async def _up(settings: ServiceSettings, place: Embedded, console: Console) -> None:
    stop = _told_to_stop()
    async with (
        listening(settings, guest=True) as (server, door),
        asyncio.TaskGroup() as tasks,
    ):
        url = url_of(settings, door)
        serving = tasks.create_task(server.serve([door]), name="service")
        await server.answering.wait()
        values: dict[str, object] = {
            "state_directory": place.sidecar,
            "socket_path": place.socket,
            "engine_tokens": place.engine_tokens,
            "nvme_path": place.nvme,
            "service_url": url,
            "name": "embedded",
            "join_token": await _join_token(settings, place, url),
        }
        engine_token(place.engine_tokens, EMBEDDED_ENGINE)
        try:
            async with _sidecar_running(sidecar_settings(**values), console):
                console.print(f"service on {url}", highlight=False)
                _say_how_to_connect(place, console)
                # The sidecar ends first: it needs the service to the last.
                stopping = tasks.create_task(stop.wait(), name="stop")
                await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
        finally:
            server.should_exit = True


@contextlib.asynccontextmanager
async def listening(
    settings: ServiceSettings, *, guest: bool = False
) -> AsyncIterator[tuple[_Server, socket.socket]]:
    """The application, started, and a bound socket for it.

    uvicorn would turn an error of either into a log line and an exit code of its own; here both
    reach the command line as what they are.
    """
    check_listen(settings)
    tls = open_tls(settings)
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        with socket.create_server((settings.host, settings.port)) as door:
            config = uvicorn.Config(
                app,
                lifespan="off",
                log_level="warning",
                access_log=False,  # paths hold tenants' ids; the audit is the record of access
                timeout_graceful_shutdown=5,
                http=Connection,
                ws="none",
                server_header=False,
                ssl_context_factory=None if tls is None else lambda config, default: tls.context,
            )
            async with asyncio.TaskGroup() as tasks:
                looking = tasks.create_task(_exchange(tls, settings), name="tls")
                try:
                    yield _Server(config, guest=guest), door
                finally:
                    looking.cancel()


async def _exchange(tls: ServerTls | None, settings: ServiceSettings) -> None:
    """Put changed certificates in force."""
    while tls is not None:
        await asyncio.sleep(settings.tls_reload_s)
        await asyncio.to_thread(tls.look)


def url_of(settings: ServiceSettings, door: socket.socket) -> str:
    host, port = door.getsockname()[:2]
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _join_token(settings: ServiceSettings, place: Embedded, service: str) -> str | None:
    """A join token for the first start; None once the sidecar has enrolled."""
    if (place.sidecar / "enrolment.json").exists():
        return None
    import httpx  # noqa: PLC0415 - only the first start needs a client

    operator = (settings.state_directory / TOKEN_FILE).read_text()
    url = f"{service}/v1/sidecars/join-tokens"
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {operator}"}) as client:
        answer = await client.post(url, json={"name": "embedded"})
        answer.raise_for_status()
        return str(answer.json()["join_token"])


def _say_how_to_connect(place: Embedded, console: Console) -> None:
    token_file = engine_token(place.engine_tokens, EMBEDDED_ENGINE)
    console.print(f"sidecar on {place.socket}", highlight=False)
    console.print("give this to vLLM as --kv-transfer-config:", style="bold")
    console.print_json(
        data={
            "kv_connector": "StrongroomConnector",
            "kv_connector_module_path": "strongroom.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "socket": str(place.socket.absolute()),
                "token_file": str(token_file.absolute()),
                "engine": EMBEDDED_ENGINE,
            },
        }
    )


class Connection(H11Protocol):
    """What is no HTTP at all is a problem document too; who does not read is cut off.

    A client may leave what it is sent unread for `unread_s` once the transport's buffer (64 KiB) is
    full. Then its connection is aborted: closing would wait for it to read.
    """

    unread_s: float = UNREAD_S
    _unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """See uvicorn: the buffer is full."""
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """See uvicorn: the client has read."""
        super().resume_writing()
        self._read()

    def connection_lost(self, exc: Exception | None) -> None:
        """See uvicorn."""
        super().connection_lost(exc)
        self._read()

    def _read(self) -> None:
        unread, self._unread = self._unread, None
        if unread is not None:
            unread.cancel()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn; the parser's own words are not repeated."""
        del msg
        document = problem_document(
            HTTPStatus.BAD_REQUEST, ProtocolViolation.code, "this is no HTTP request"
        )
        body = encode_problem(document)
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn, saying when it answers; as a guest it leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, *, guest: bool) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()
        self._guest = guest

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext() if self._guest else super().capture_signals()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.answering.set()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - not everywhere
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def log_to_stderr() -> None:
    """Warnings and above, one line each."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
