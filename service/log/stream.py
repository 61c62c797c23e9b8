"""The log as server-sent events.

An entry is `id: <epoch>:<seq>` and `data: <JWS>`. A client resumes by sending the last id it
has. Silence is filled with comments. `event: restart` says that the client's epoch is over:
start afresh in the epoch that its data names.

Nothing is queued for a client: each reads at its own pace, a page at a time, from what the process
keeps of the log's end (`tail`) or from the database, and the transport's backpressure holds it; the
server cuts off one that does not read (`cli.serve`). One that is more than `behind_max` entries
behind is told to start afresh: dropping everything and asking again is less than that.

A bell wakes a stream for what this process commits, and for what another commits by PostgreSQL's
notices (`wakes`); where those fail, the log is looked at at every heartbeat.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from service.log.tail import Tail
from strongroom.errors import Misuse
from strongroom.log import LogHead

_EVENT_ID: Final = re.compile(r"([0-9a-f]{32}):([0-9]{1,18})")


def parse_event_id(text: str) -> tuple[str, int]:
    """Epoch and seq of a `Last-Event-ID`."""
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        raise Misuse("not an id of this stream", field="Last-Event-ID")
    return found[1], int(found[2])


async def stream(
    tail: Tail,
    epoch: str,
    after: int,
    heartbeat_s: float,
    may_go_on: Callable[[], Awaitable[bool]],
    behind_max: int,
) -> AsyncGenerator[bytes, None]:
    """Entries of `epoch` after `after`, as they are committed; ends with a `restart`.

    `epoch` empty: the one in force. `may_go_on` is asked before anything is sent.
    """
    yield b": strongroom invalidation log\n\n"
    while True:
        news = tail.kick.listen()
        head, entries = await tail.after(epoch, after)
        epoch = epoch or head.epoch
        if must_restart(head, epoch, after, behind_max):
            yield _event("restart", f"{head.epoch}:0", json.dumps({"epoch": head.epoch}))
            return
        if entries and not await may_go_on():
            return
        for entry in entries:
            yield _event("", f"{entry.epoch}:{entry.seq}", entry.jws)
            after = entry.seq
        if after < head.seq:
            continue
        try:
            async with asyncio.timeout(heartbeat_s):
                await news.wait()
        except TimeoutError:
            if not await may_go_on():
                return
            yield b": heartbeat\n\n"


def must_restart(head: LogHead, epoch: str, after: int, behind_max: int) -> bool:
    """Whether who stands at (`epoch`, `after`) has to start afresh at `head`.

    It is of another epoch, ahead of the log, or so far behind that it would not catch up soon.
    """
    return epoch != head.epoch or after > head.seq or head.seq - after > behind_max


def _event(kind: str, event_id: str, data: str) -> bytes:
    head = f"event: {kind}\n" if kind else ""
    return f"{head}id: {event_id}\ndata: {data}\n\n".encode()
