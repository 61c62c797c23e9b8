"""One change, one transaction: what is done, what it retires, and the record of both.

    async with changes.begin(actor) as change:
        await tenancy.remove(change.session, ...)
        await change.invalidate(kind=InvalidationKind.SUBJECT, tenant=..., subject=...)
        await change.audit("principal.removed", tenant=..., subject=...)

Rules:
- `begin` takes the log's counter row (SQLite: the write lock) until commit, so seq has no gaps
  and commit order is seq order. An exception leaves nothing behind.
- Audit events are appended last, in the same transaction, under the audit counter's row.
- Before the block is left the new entries are in the journal, synced; whoever is told that a
  change was made can rely on it. An entry that could not be journalled keeps every later
  change from beginning until it is.
- Where the log ends before what this process has journalled, the database was put back under it (a
  restore, a failover to one that lags): nothing is changed or leased until a restart has compared
  the two (`service.journal.reconcile`).
- Where secrets were destroyed, SQLite's write-ahead log is then cut to nothing. What kept it
  from being cut is met again by the next change, by the rotation's round, and by a start: the
  process before may have died between a commit and the cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from policy.signing import Signer
from service.audit import store as audit_store
from service.audit.events import AuditEvent, Draft, encode_details
from service.auth.actor import Actor
from service.db.base import now as wall_clock
from service.db.session import Database
from service.journal.file import Journal
from service.log import chain, wakes
from service.log import store as log_store
from service.log.kick import Kick
from strongroom.errors import Misuse, Unavailable
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry

COMPONENTS_MAX: Final = 8192
"""Components that one entry may name; its JWS stays well below the limit of a signature."""
_PAGE: Final = 1000
_REFERENCE_CHARS: Final = (32, 64)
_log = logging.getLogger("strongroom.service")


class Change:
    """A change under way. Its session is committed by `Changes.begin`, never by its users."""

    def __init__(self, session: AsyncSession, actor: Actor, signer: Signer, at: datetime) -> None:
        self.session = session
        self.actor = actor
        self.at = at
        self.entries: list[LogEntry] = []
        """What this change has appended to the log."""
        self.audited: tuple[AuditEvent, ...] = ()
        """Its audit events, in order, once it is committed."""
        self.position = 0
        """Of the last of them, among the entries of all epochs."""
        self._signer = signer
        self._drafts: list[Draft] = []
        self.secrets_destroyed = False
        """Set by an invalidation of components, or by whoever destroys a secret otherwise."""

    async def invalidate(
        self,
        *,
        kind: InvalidationKind,
        tenant: str | None = "",
        components: Sequence[ComponentId] = (),
        subject: str = "",
        min_revision: int = 0,
        sidecar: str = "",
    ) -> LogEntry:
        """Append one entry to the log."""
        if len(components) > COMPONENTS_MAX:
            raise Misuse("too many components at once", field="components", limit=COMPONENTS_MAX)
        entry = chain.next_entry(
            await log_store.head(self.session),
            self.at,
            kind,
            tenant=tenant or "",
            components=tuple(components),
            subject=subject,
            min_revision=min_revision,
            sidecar=sidecar,
        )
        await self._append(entry)
        return entry

    async def begin_epoch(self) -> LogEntry:
        """Begin a new epoch: every grant and position of the one before is dead."""
        head = chain.empty(chain.new_epoch())
        entry = chain.next_entry(head, self.at, InvalidationKind.EPOCH)
        await self._append(entry)
        return entry

    async def _append(self, entry: LogEntry) -> None:
        self.position = await log_store.append(self.session, entry, chain.sign(entry, self._signer))
        self.entries.append(entry)
        self.secrets_destroyed |= bool(entry.components)

    async def audit(
        self,
        kind: str,
        *,
        tenant: str | None = None,
        subject: str = "",
        target: str = "",
        outcome: str = "ok",
        reason: str = "",
        details: Mapping[str, Any] | None = None,
        references: Iterable[str] = (),
        occurred_at: str = "",
    ) -> None:
        """Record an event. It gets its place in the chain when the block is left.

        `references` are the components and namespaces that the event is about, so that it is
        found by them; a `target` that is one is among them by itself.
        """
        about = set(references)
        if len(target) in _REFERENCE_CHARS and not set(target) - set("0123456789abcdef"):
            about.add(target)
        self._drafts.append(
            Draft(
                kind=kind,
                actor_kind=self.actor.kind,
                actor=self.actor.id,
                tenant=tenant or None,
                subject=subject,
                target=target,
                outcome=outcome,
                reason=reason,
                details=encode_details(details),
                references=tuple(sorted(about)),
                occurred_at=occurred_at,
            )
        )

    async def seal(self) -> None:
        """Append the audit events; the last thing before the commit."""
        await self.session.flush()
        if self.entries:
            await wakes.notify(self.session, wakes.LOG)
        if self._drafts:
            self.audited = await audit_store.append(self.session, self._drafts, self.at)


class Changes:
    """Begins changes, one after another, and journals them."""

    def __init__(
        self,
        database: Database,
        signer: Signer,
        journal: Journal,
        kick: Kick,
        *,
        clock: Callable[[], datetime] = wall_clock,
    ) -> None:
        self._database = database
        self._signer = signer
        self._journal = journal
        self._kick = kick
        self._clock = clock
        self._writing = asyncio.Lock()
        """In this process changes queue here, in order, and not at the database's lock."""
        self._journalling = asyncio.Lock()
        """Guards the journal and `_journalled`; never held together with a transaction."""
        self._committed = 0
        self._journalled = 0
        """Positions in the log of all epochs: what may be committed, what is in the journal."""
        self._wal_dirty = True
        """SQLite's log may hold destroyed secrets; at first, those of the process before."""

    @asynccontextmanager
    async def begin(self, actor: Actor, *, settling: bool = False) -> AsyncIterator[Change]:
        """One transaction; see the module's rules. `settling`: a start brings up what is behind.

        Raises `Unavailable` when the database or the journal cannot take the change. If it was
        the journal, the change is committed nonetheless, and is journalled before the next.
        """
        async with self._writing:
            await self._catch_up()
            change: Change | None = None
            try:
                async with self._database.writers() as session, session.begin():
                    counter = await log_store.lock(session)
                    position = 0 if counter is None else counter.position
                    if not settling:
                        self.require_reached(position)
                    change = Change(session, actor, self._signer, self._clock())
                    yield change
                    if change.entries and self._journal.shared and not settling:
                        # Another replica may have journalled further than this one knows.
                        self._require(position, await self._journal.count())
                    await change.seal()
            except (OperationalError, InterfaceError, OSError) as error:
                raise Unavailable("the database did not take the change") from error
            finally:
                # Also when the commit's outcome is not known: looking costs one query.
                if change is not None:
                    self._wal_dirty |= change.secrets_destroyed
                    if change.entries:
                        self._committed = max(self._committed, change.position)
        await self._catch_up()
        if change.entries:
            self._kick.ring()
        await self.cut_wal()

    def require_reached(self, position: int) -> None:
        """Raise `Unavailable` if a log that ends at `position` lacks what was journalled."""
        self._require(position, self._journalled)

    @staticmethod
    def _require(position: int, journalled: int) -> None:
        if position < journalled:
            raise Unavailable(
                f"the database's log ends at {position}, before the journal's {journalled}: "
                "it was put back under the running service; restart it",
                field="database_url",
            )

    async def cut_wal(self) -> bool:
        """Cut SQLite's log to nothing if it may hold destroyed secrets; False: call again.

        The change itself is made, so that what fails here is no error of it.
        """
        if not self._wal_dirty:
            return True
        # Cleared before: a secret that is destroyed meanwhile needs another cut.
        self._wal_dirty = False
        cut = False
        try:
            cut = await self._database.truncate_wal()
        finally:
            self._wal_dirty |= not cut
        if not cut:
            _log.warning("the write-ahead log is in use: destroyed secrets are cut out later")
        return cut

    async def journalled(self, position: int) -> None:
        """Start-up has brought the journal to `position`."""
        async with self._journalling:
            self._committed = self._journalled = position

    async def _catch_up(self) -> None:
        """Bring the journal to the end of the log, in the log's order."""
        if self._journalled >= self._committed:
            return
        async with self._journalling:
            while self._journalled < self._committed:
                behind = await self._behind()
                if not behind:
                    self._committed = self._journalled  # the commit did not happen
                    return
                await self._journal.append(
                    [stored.jws for stored in behind], after=self._journalled
                )
                self._journalled = behind[-1].position

    async def _behind(self) -> Sequence[log_store.Stored]:
        try:
            async with self._database.readers() as session:
                return await log_store.all_after(session, self._journalled, _PAGE)
        except (DBAPIError, OSError) as error:
            raise Unavailable("the database does not answer", field="database_url") from error
