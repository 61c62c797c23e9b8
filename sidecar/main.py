"""The entry: `run(settings)` serves until SIGINT or SIGTERM, and then stops in good order."""

from __future__ import annotations

import asyncio
import logging
import signal

import uvloop

from sidecar.compose import running
from sidecar.interpreter import keep_freed_memory, keep_what_is_here
from sidecar.settings import SidecarSettings

_log = logging.getLogger(__name__)


def run(settings: SidecarSettings) -> None:
    """Serve in this process. Returns after a signal; raises the typed errors of `running`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))


async def serve(settings: SidecarSettings) -> None:
    """`run`, inside a loop that exists already."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as sidecar:
        keep_what_is_here()
        keep_freed_memory()
        _log.info("sidecar %s listens at %s", sidecar.enrolled.sidecar, settings.socket_path)
        await stop.wait()
    _log.info("stopped")
