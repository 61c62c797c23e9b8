"""What start-up makes of the journal and the database.

- Neither has anything: a new log begins.
- The journal is behind (the process died between commit and append): it is completed.
- The database is behind (a backup was restored, or it was lost): what the journal has beyond
  it is done again (`service.journal.replay`), and a new epoch begins.
- The journal is empty and the database's log is not: the journal was lost, or another folder was
  named. Whether the database is the newest can't be told without it, so the service does not
  serve (`Corrupt`) unless `accept_lost_journal` says that it is; the journal is then written anew
  and an alarm says so. A log of one entry is no loss: the process died as it began.
- A backup was restored (`service.backup`): besides, the journal has to reach at least to where the
  backup was made, as it did then. One that does not is older than the backup, and what was
  revoked since can't be told: the service does not serve. A new epoch begins in any case.
- Neither is the beginning of the other, or an entry is damaged or not ours: `Corrupt`, and the
  service does not serve. Which of the two is right is for a person to say.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from policy.signing import Verifier
from service.auth.actor import SYSTEM
from service.changes import Change, Changes
from service.db.session import Database
from service.journal.file import Journal
from service.journal.models import Restoration
from service.journal.replay import replay
from service.log import chain
from service.log import store as log_store
from strongroom.errors import Corrupt
from strongroom.log import LogEntry

_PAGE = 1000


class Outcome(StrEnum):
    """What start-up found."""

    BEGUN = "begun"
    AGREED = "agreed"
    JOURNAL_COMPLETED = "journal_completed"
    JOURNAL_LOST = "journal_lost"
    DATABASE_REPLAYED = "database_replayed"
    BACKUP_RESTORED = "backup_restored"
    """And the journal had nothing beyond it."""


async def reconcile(
    database: Database,
    journal: Journal,
    changes: Changes,
    verifier: Verifier,
    *,
    accept_lost_journal: bool = False,
) -> Outcome:
    """Bring both to one state, or raise `Corrupt`. Nothing else may write meanwhile."""
    lines = await journal.lines()
    common = 0
    missing: list[str] = []
    async with database.readers() as session:
        async for stored in _rows(session):
            if common < len(lines):
                if missing or lines[common] != stored.jws:
                    raise Corrupt(
                        f"journal and database differ at entry {common + 1}", field="journal"
                    )
                common += 1
            else:
                missing.append(stored.jws)
        known = await log_store.find_head(session)
        restored = (
            await session.scalars(select(Restoration).where(Restoration.settled_at.is_(None)))
        ).all()
    if missing and common < len(lines):
        raise Corrupt("journal and database differ", field="journal")
    lost = not lines and len(missing) > 1
    if lost and not accept_lost_journal:
        raise Corrupt(
            f"the journal is empty, and the database's log has {len(missing)} entries: put the "
            "journal back; or, if it is lost and this database is the newest, start once with "
            "the setting accept_lost_journal",
            field="accept_lost_journal",
        )
    reaches = max((each.position for each in restored), default=0)
    if len(lines) < reaches and not accept_lost_journal:
        raise Corrupt(
            f"the journal has {len(lines)} entries, and the restored backup was made when it had "
            f"{reaches}: put the newest journal back; or, if it is lost and nothing was revoked "
            "since, start once with the setting accept_lost_journal",
            field="accept_lost_journal",
        )
    replayed = _check(lines, common, missing, verifier)
    if missing:
        await journal.append(missing, after=len(lines))
    await changes.journalled(len(lines) + len(missing))
    if replayed:
        await _replay(changes, lines[common:], replayed, restored)
        return Outcome.DATABASE_REPLAYED
    if restored:
        async with changes.begin(SYSTEM, settling=True) as change:
            await change.begin_epoch()
            await _settle(change, restored, lost=len(lines) < reaches)
        return Outcome.BACKUP_RESTORED
    if known is None:
        async with changes.begin(SYSTEM) as change:
            entry = await change.begin_epoch()
            await change.audit("log.begun", details={"epoch": entry.epoch})
        return Outcome.BEGUN
    if lost:
        async with changes.begin(SYSTEM) as change:
            await change.audit(
                "log.journal_lost",
                outcome="alarm",
                reason="the journal was written anew from the database",
                details={"entries": len(missing)},
            )
        return Outcome.JOURNAL_LOST
    return Outcome.JOURNAL_COMPLETED if missing else Outcome.AGREED


def _check(
    lines: Sequence[str], common: int, missing: Sequence[str], verifier: Verifier
) -> list[LogEntry]:
    """Follow the whole chain; returns the entries that the database lacks.

    Signatures are checked where one side is about to believe the other. What both have alike
    was checked when it was written, and has to chain.
    """
    links = chain.Chain()
    lacking = []
    for number, jws in enumerate((*lines, *missing)):
        alike = number < common
        entry = chain.parse(jws) if alike else chain.read(jws, verifier)
        links.follow(entry)
        if not alike and number < len(lines):
            lacking.append(entry)
    return lacking


async def _rows(session: AsyncSession) -> AsyncIterator[log_store.Stored]:
    position = 0
    while page := await log_store.all_after(session, position, _PAGE):
        for stored in page:
            if stored.position != position + 1:
                raise Corrupt(f"the database lacks log entry {position + 1}", field="database")
            position = stored.position
            yield stored


async def _replay(
    changes: Changes,
    lines: Sequence[str],
    entries: Sequence[LogEntry],
    restored: Sequence[Restoration],
) -> None:
    async with changes.begin(SYSTEM, settling=True) as change:
        for jws, entry in zip(lines, entries, strict=True):
            await log_store.append(change.session, entry, jws)
        await replay(change, entries)
        await _settle(change, restored, lost=False)


async def _settle(change: Change, restored: Sequence[Restoration], *, lost: bool) -> None:
    """Restored backups are settled, on record for ever."""
    for each in restored:
        await change.session.execute(
            update(Restoration)
            .where(Restoration.id == each.id)
            .values(settled_at=change.at)
            .execution_options(synchronize_session=False)
        )
        await change.audit(
            "backup.restored",
            target=each.backup,
            outcome="alarm",
            reason="the journal was lost" if lost else "",
            details={"made_at": each.made_at, "position": each.position},
        )
