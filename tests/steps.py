"""Acting at the n-th await: every point at which a task gives way, without sleeping.

    steps = Steps(("BlockStore.save", "OffloadPipeline"), at=7, act=lambda: fence.cut())
    with steps.installed(): ...

Tasks whose coroutine's name begins with one of the words are counted, each time they suspend; at
suspension number `at` `act` is called, right there, between two steps of the program. A test
runs with at = 0, 1, 2, ... until a run ends in which that number was not reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class Steps:
    """`watch` is called at every suspension after the one that acted."""

    def __init__(
        self,
        words: tuple[str, ...],
        at: int,
        act: Callable[[], None],
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._words = words
        self._at = at
        self._act = act
        self._watch = watch
        self._armed = False
        self.count = 0

    @property
    def acted(self) -> bool:
        return self.count > self._at

    def arm(self) -> None:
        """Count from here on."""
        self._armed = True

    def suspended(self) -> None:
        if not self._armed:
            return
        if self.count == self._at:
            self._act()
        elif self.count > self._at:
            self._watch()
        self.count += 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        earlier = loop.get_task_factory()
        loop.set_task_factory(self._make)
        try:
            yield
        finally:
            self._armed = False
            loop.set_task_factory(earlier)

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        name = getattr(coroutine, "__qualname__", "")
        if name.startswith(self._words):
            coroutine = _Stepped(coroutine, self.suspended)
        return asyncio.Task(coroutine, loop=loop, **options)


class _Stepped(Coroutine[Any, Any, Any]):
    """The coroutine itself, with a word said each time it suspends."""

    def __init__(self, inner: Coroutine[Any, Any, Any], suspended: Callable[[], None]) -> None:
        self._inner = inner
        self._suspended = suspended

    def send(self, value: Any) -> Any:
        yielded = self._inner.send(value)
        self._suspended()
        return yielded

    def throw(
        self,
        kind: Any,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        yielded = self._inner.throw(kind if value is None else value)  # type: ignore[arg-type]
        self._suspended()
        return yielded

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()
