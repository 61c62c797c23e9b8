"""A TCP proxy between a sidecar and the service that can hold back what the service sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on. Held, what comes from the service is kept, and nothing is refused."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open = asyncio.Event()
        self._open.set()
        self.url = ""
        self.held_bytes = 0

    def point_at(self, url: str) -> None:
        """New connections go there."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)

    def hold(self) -> None:
        """From now on nothing from the service arrives."""
        self._open.clear()

    def release(self) -> None:
        """Everything arrives, at once."""
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except BaseException:
            writer.transport.abort()
            raise
        try:
            async with asyncio.TaskGroup() as tasks:
                there = tasks.create_task(self._pump(reader, up_writer, held=False))
                back = tasks.create_task(self._pump(up_reader, writer, held=True))
                await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
                there.cancel()
                back.cancel()
        finally:
            # Aborted, and not closed: what is held back keeps nobody waiting.
            writer.transport.abort()
            up_writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, held: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if held and not self._open.is_set():
                    self.held_bytes += len(data)
                    await self._open.wait()
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of `url`; its own is `Proxy.url`."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = Proxy(parts.hostname, parts.port)
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await proxy.serve(reader, writer)
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            connections.discard(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        ending = list(connections)
        for each in ending:
            each.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        # What was aborted is closed in the loop's next turns.
        for _ in range(3):
            await asyncio.sleep(0)
