"""One thread that builds policies in turns, so that a large tenant's holds up nobody.

Rules:
- A build is a generator. The thread runs each for a turn of `turn_s`, one after the other, so a
  small one that comes later is done long before a large one that came earlier.
- After each turn it lets go of the interpreter for `pause_s`: an event loop that wants to run
  waits for a fraction of a millisecond, and not for the interpreter's own switch interval.
- A build whose asker has gone is dropped. What a build raises is raised where it was asked for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from strongroom.errors import Unavailable

TURN_S: Final = 0.0001
PAUSE_S: Final = 0.0003

Built = TypeVar("Built")


@dataclass(frozen=True, slots=True, eq=False)
class _Build:
    steps: Generator[None, None, Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]


class Builder:
    """The thread; `close` ends it. Its condition guards the builds that wait for a turn."""

    def __init__(self, *, turn_s: float = TURN_S, pause_s: float = PAUSE_S) -> None:
        self._turn_s = turn_s
        self._pause_s = pause_s
        self._waiting: deque[_Build] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="policy-build", daemon=True)
        self._thread.start()

    async def build(self, steps: Generator[None, None, Built]) -> Built:
        """Run `steps` to its end on the thread; returns what it returns, or raises what it does.

        Cancelled, the build is dropped at its next turn.
        """
        loop = asyncio.get_running_loop()
        build = _Build(steps, loop, loop.create_future())
        with self._changed:
            if self._closed:
                raise Unavailable("the service is stopping")
            self._waiting.append(build)
            self._changed.notify()
        built: Built = await build.done
        return built

    def close(self) -> None:
        """Stop the thread; what has not been built yet is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                build = self._waiting.popleft()
            if self._turn(build):
                with self._changed:
                    self._waiting.append(build)
            time.sleep(self._pause_s)

    def _turn(self, build: _Build) -> bool:
        """One turn; whether there is more to do."""
        ends = time.perf_counter() + self._turn_s
        try:
            while not build.done.cancelled():
                next(build.steps)
                if time.perf_counter() >= ends:
                    return True
        except StopIteration as stop:
            _settle(build, stop.value, None)
        except Exception as error:  # noqa: BLE001 - it is raised where the build was asked for
            _settle(build, None, error)
        else:
            build.steps.close()
        return False


def _settle(build: _Build, built: Any, error: Exception | None) -> None:
    def settle() -> None:
        if build.done.done():
            return
        if error is None:
            build.done.set_result(built)
        else:
            build.done.set_exception(error)

    try:
        build.loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return  # the loop has gone, and with it whoever asked
