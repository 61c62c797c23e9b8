"""The end of the log, read once for every stream of this process that waits for it.

The newest entries are kept, `PAGE_ENTRIES` at most. A stream that is further behind reads its own
pages from the database until it has caught up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from service.db.session import Sessions
from service.log import store
from service.log.kick import Kick
from service.log.store import Stored
from service.log.together import Together
from strongroom.log import LogHead

PAGE_ENTRIES: Final = 500


@dataclass(frozen=True, slots=True)
class Seen:
    """Where the log stood, and its last entries, in order and without a gap."""

    head: LogHead
    entries: tuple[Stored, ...]


class Tail:
    """Reads for all streams at once. `kick` rings when there is news."""

    def __init__(self, sessions: Sessions, kick: Kick) -> None:
        self.kick = kick
        self._sessions = sessions
        self._together: Together[Seen] = Together(self._read)
        self._seen: Seen | None = None

    async def after(self, epoch: str, seq: int) -> tuple[LogHead, Sequence[Stored]]:
        """Where the log stands, and a page of the entries of `epoch` after `seq`.

        `epoch` empty: the one in force. No entries where another epoch is in force.
        """
        seen = await self._together.get()
        if epoch not in ("", seen.head.epoch) or seq >= seen.head.seq:
            return seen.head, ()
        if seen.entries and seen.entries[0].seq <= seq + 1:
            return seen.head, seen.entries[seq + 1 - seen.entries[0].seq :]
        async with self._sessions() as session:
            return seen.head, await store.page(session, seen.head.epoch, seq, PAGE_ENTRIES)

    async def _read(self) -> Seen:
        known = self._seen
        async with self._sessions() as session:
            head = await store.head(session)
            if known is not None and known.head == head:
                return known
            kept: tuple[Stored, ...] = ()
            newest = max(0, head.seq - PAGE_ENTRIES)
            if known is not None and known.head.epoch == head.epoch and known.head.seq > newest:
                kept, newest = known.entries, known.head.seq
            # An entry may have been committed since the head was read: it waits for the next read.
            page = await store.page(session, head.epoch, newest, head.seq - newest)
        entries = (*kept, *page)[-PAGE_ENTRIES:]
        self._seen = Seen(head, entries)
        return self._seen
