"""Restoring a backup into an empty database, and leaving word of it for the next start.

The row of `restorations` is what makes the start sure (`service.journal.reconcile`): the journal
has to reach at least to where the backup was made, since it did so then; what it has beyond
that is done again; and a new epoch begins.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from sqlalchemy import Connection

from policy.signing import Verifier
from service.backup import make, rows
from service.backup.make import Told
from service.backup.manifest import Manifest, check_file
from service.db.base import now
from service.db.migrate import upgrade
from service.db.session import SQLITE, open_database, parse_url
from service.journal.file import Journal
from service.journal.models import Restoration
from service.settings import ServiceSettings
from strongroom.errors import Conflict, Misuse
from strongroom.private_files import private_folders, replace_file


def restore(
    settings: ServiceSettings, folder: Path, verifier: Verifier, told: Told = lambda *_: None
) -> Manifest:
    """Restore the backup in `folder` into the settings' database, which must be empty.

    Raises `Conflict` while a service uses it, or when there is a database already.
    """
    manifest = make.verify(folder, verifier)
    url = parse_url(settings.database)
    if url.get_backend_name() != manifest.dialect:
        raise Misuse(
            f"this is a backup of {manifest.dialect}, and the database is {url.get_backend_name()}",
            field="database_url",
        )
    asyncio.run(_refuse_while_running(settings))
    path = check_file(folder, manifest)
    if manifest.dialect == SQLITE:
        target = Path(str(url.database))
        if target.exists():
            raise Conflict(f"there is a database at {target}: move it away", field="database_url")
        private_folders(target.parent)
        # Beside it, a log of the database that was there would be taken for this one's.
        for suffix in ("-wal", "-shm"):
            target.with_name(target.name + suffix).unlink(missing_ok=True)
        replace_file(target, path.read_bytes())
        told(manifest.size_bytes, manifest.size_bytes)
    else:
        upgrade(settings.database, manifest.migration)
        asyncio.run(_load(settings.database, path, manifest, told))
    upgrade(settings.database)
    asyncio.run(_leave_word(settings.database, manifest))
    return manifest


async def _refuse_while_running(settings: ServiceSettings) -> None:
    """A running service holds the journal."""
    if not (settings.journal / "log.jws").exists():
        return
    journal = Journal(settings.journal / "log.jws")
    try:
        await journal.open()
    finally:
        await journal.close()


async def _load(url: str, path: Path, manifest: Manifest, told: Told) -> None:
    database = open_database(url)

    def work(connection: Connection) -> None:
        with path.open(encoding="utf-8") as file:
            rows.load(connection, file, lambda count: told(count, manifest.rows))

    try:
        async with database.engine.begin() as connection:
            await connection.run_sync(work)
    finally:
        await database.close()


async def _leave_word(url: str, manifest: Manifest) -> None:
    database = open_database(url)
    try:
        async with database.writers.begin() as session:
            session.add(
                Restoration(
                    id=secrets.token_hex(16),
                    backup=manifest.id,
                    made_at=manifest.made_at,
                    position=manifest.position,
                    restored_at=now(),
                )
            )
    finally:
        await database.close()
