"""Making a backup while the service serves, and verifying one.

- SQLite: its online backup API copies the pages of one state, whoever writes meanwhile.
- PostgreSQL: every row as one read-only snapshot sees it (`service.backup.rows`).
The manifest is made of the copy, never of the database, and written last: a folder without one
is no backup. Keys are not part of it: a KEK version in a backup would outlive its destruction.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, text

from policy.signing import Signer, Verifier
from service.auth.signing_keys import SERVICE_KEY, load_signer, own_verifier
from service.backup import manifest as manifests
from service.backup import rows
from service.backup.manifest import FILES, MANIFEST, Manifest
from service.db.base import now
from service.db.session import SQLITE, open_database, parse_url
from service.log import chain
from service.settings import ServiceSettings
from strongroom.errors import Conflict, Corrupt, StrongroomError, Unavailable
from strongroom.private_files import private_directory, replace_file

_PAGES: Final = 256
_HEAD: Final = "SELECT position, epoch, seq, hash FROM log_counter"
_MIGRATION: Final = "SELECT version_num FROM alembic_version"
_KEKS: Final = (
    "SELECT DISTINCT kek, kek_version FROM components WHERE wrapped IS NOT NULL "
    "ORDER BY kek, kek_version"
)
_ENTRIES: Final = "SELECT jws FROM log_entries ORDER BY position"

Told = Callable[[int, int | None], None]
"""How much is done, and of how much; pages or rows."""


def create(settings: ServiceSettings, folder: Path, told: Told = lambda *_: None) -> Manifest:
    """Write a backup into `folder`, which is new or empty. Raises `Conflict` if it is neither."""
    private_directory(folder)
    if any(folder.iterdir()):
        raise Conflict(f"{folder} is not empty", field="backup")
    signer = load_signer(settings.keys, SERVICE_KEY)
    url = parse_url(settings.database)
    if url.get_backend_name() == SQLITE:
        path = folder / FILES[SQLITE]
        _copy_sqlite(Path(str(url.database)), path, told)
        found = _facts_of_sqlite(path)
        count = 0
    else:
        path = folder / FILES["postgresql"]
        found, count = asyncio.run(_export(settings.database, path, told))
    manifest = _manifest(settings, path, found, count)
    verify_content(path, manifest, own_verifier(signer))
    replace_file(folder / MANIFEST, manifests.sign(manifest, signer).encode())
    return manifest


def verify(folder: Path, verifier: Verifier) -> Manifest:
    """Check signature, digest, database and log of a backup. Raises `Corrupt` or `Missing`."""
    manifest = manifests.read(folder, verifier)
    verify_content(manifests.check_file(folder, manifest), manifest, verifier)
    return manifest


def own_keys(settings: ServiceSettings) -> tuple[Signer, Verifier]:
    """What this service signs and verifies backups with."""
    signer = load_signer(settings.keys, SERVICE_KEY)
    return signer, own_verifier(signer)


def verify_content(path: Path, manifest: Manifest, verifier: Verifier) -> None:
    """The database in the backup is whole, and its log leads to the manifest's position."""
    links = chain.Chain()
    count = 0
    try:
        for jws in _entries(path, manifest):
            links.follow(chain.read(jws, verifier))
            count += 1
    except Corrupt:
        raise
    except StrongroomError as error:
        raise Corrupt("the log in the backup does not verify", field="backup") from error
    head = links.head
    ends = None if head is None else (head.epoch, head.seq, head.hash)
    if count != manifest.position or ends != (manifest.epoch, manifest.seq, manifest.entry_hash):
        raise Corrupt("the log in the backup ends elsewhere than its manifest says", field="backup")


def _entries(path: Path, manifest: Manifest) -> list[str]:
    if manifest.dialect != SQLITE:
        with path.open(encoding="utf-8") as file:
            return list(rows.log_entries(file))
    try:
        with closing(_read_only(path)) as connection:
            [[state]] = connection.execute("PRAGMA integrity_check(1)").fetchall()
            if state != "ok":
                raise Corrupt("the database in the backup is damaged", field="backup")
            return [jws for (jws,) in connection.execute(_ENTRIES)]
    except sqlite3.Error as error:
        raise Corrupt("the database in the backup is damaged", field="backup") from error


def _manifest(settings: ServiceSettings, path: Path, found: _Facts, count: int) -> Manifest:
    moment: datetime = now()
    (position, epoch, seq, head), migration, keks = found
    return Manifest(
        version=manifests.VERSION,
        id=secrets.token_hex(16),
        issuer=settings.issuer,
        made_at=chain.rfc3339(moment),
        dialect=next(dialect for dialect, name in FILES.items() if name == path.name),
        migration=migration,
        epoch=epoch,
        seq=seq,
        entry_hash=head,
        position=position,
        keks=tuple((str(kek), int(version)) for kek, version in keks),
        rows=count,
        sha256=manifests.digest(path),
        size_bytes=path.stat().st_size,
    )


_Facts = tuple[tuple[int, str, int, str], str, list[tuple[str, int]]]


def _copy_sqlite(source: Path, path: Path, told: Told) -> None:
    if not source.is_file():
        raise Unavailable(f"there is no database at {source}", field="database_url")
    # Made private before SQLite opens it.
    replace_file(path, b"")
    try:
        with (
            closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as live,
            closing(sqlite3.connect(path)) as copy,
        ):
            live.backup(
                copy,
                pages=_PAGES,
                progress=lambda _, left, total: told(total - left, total),
            )
            # One file: no write-ahead log beside it that could be left behind.
            copy.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise Unavailable("the database cannot be copied", field="database_url") from error


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)


def _facts_of_sqlite(path: Path) -> _Facts:
    with closing(_read_only(path)) as connection:
        return _facts(lambda sql: connection.execute(sql).fetchall())


def _facts(ask: Callable[[str], Any]) -> _Facts:
    heads = ask(_HEAD)
    if not heads:
        raise Unavailable("the service has never started here: there is nothing to back up")
    [[migration]] = ask(_MIGRATION)
    return tuple(heads[0]), str(migration), [tuple(row) for row in ask(_KEKS)]


async def _export(url: str, path: Path, told: Told) -> tuple[_Facts, int]:
    database = open_database(url)
    replace_file(path, b"")

    def work(connection: Connection) -> tuple[_Facts, int]:
        facts = _facts(lambda sql: connection.execute(text(sql)).fetchall())
        with path.open("w", encoding="utf-8") as file:
            return facts, rows.dump(connection, file, lambda count: told(count, None))

    try:
        await database.ping()
        async with database.snapshots() as session, session.begin():
            return await (await session.connection()).run_sync(work)
    finally:
        await database.close()
