"""The log as server-sent events.

An entry is `id: <epoch>:<seq>` and `data: <JWS>`. A client resumes by sending the last id it
has. Silence is filled with comments. `event: restart` says that the client's epoch is over:
start afresh in the epoch that its data names.

Nothing is queued for a client: each reads the database at its own pace, a page at a time, and
the transport's backpressure holds it. A bell wakes it for what this process commits; what
another process commits is looked for at every heartbeat.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from service.db.session import Sessions
from service.log import store
from service.log.kick import Kick
from strongroom.errors import Misuse

PAGE_ENTRIES: Final = 500
_EVENT_ID: Final = re.compile(r"([0-9a-f]{32}):([0-9]{1,18})")


def parse_event_id(text: str) -> tuple[str, int]:
    """Epoch and seq of a `Last-Event-ID`."""
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        raise Misuse("not an id of this stream", field="Last-Event-ID")
    return found[1], int(found[2])


async def stream(
    sessions: Sessions,
    kick: Kick,
    epoch: str,
    after: int,
    heartbeat_s: float,
    may_go_on: Callable[[], Awaitable[bool]],
) -> AsyncGenerator[bytes, None]:
    """Entries of `epoch` after `after`, as they are committed; ends with a `restart`.

    `epoch` empty: the one in force. `may_go_on` is asked before anything is sent.
    """
    yield b": strongroom invalidation log\n\n"
    while True:
        news = kick.listen()
        async with sessions() as session:
            head = await store.head(session)
            epoch = epoch or head.epoch
            entries = await store.page(session, epoch, after, PAGE_ENTRIES)
        if head.epoch != epoch or after > head.seq:
            yield _event("restart", f"{head.epoch}:0", json.dumps({"epoch": head.epoch}))
            return
        if entries and not await may_go_on():
            return
        for entry in entries:
            yield _event("", f"{entry.epoch}:{entry.seq}", entry.jws)
            after = entry.seq
        if len(entries) == PAGE_ENTRIES:
            continue
        try:
            async with asyncio.timeout(heartbeat_s):
                await news.wait()
        except TimeoutError:
            if not await may_go_on():
                return
            yield b": heartbeat\n\n"


def _event(kind: str, event_id: str, data: str) -> bytes:
    head = f"event: {kind}\n" if kind else ""
    return f"{head}id: {event_id}\ndata: {data}\n\n".encode()
