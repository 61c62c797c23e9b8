"""The progress bar of a start: how much of the NVMe tier is read, then how many blocks are in.

It is shown only where somebody can watch it, and only when there is something to see.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from storage.tiers.recovery import RecoveryProgress

_GIB = 1024**3


class RecoveryBar:
    """Call it with each `RecoveryProgress`; as a context manager it is gone at the end."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._reading = self._progress.add_task("NVMe tier", total=None, visible=False)
        self._indexing = self._progress.add_task("index", total=None, visible=False)

    def __call__(self, at: RecoveryProgress) -> None:
        if at.total_bytes:
            self._progress.update(
                self._reading,
                description=f"NVMe tier, {at.total_bytes / _GIB:.1f} GiB",
                completed=at.read_bytes,
                total=at.total_bytes,
                visible=True,
            )
        elif at.total_blocks:
            self._progress.update(
                self._indexing,
                description=f"index, {at.total_blocks:,} blocks",
                completed=at.indexed_blocks,
                total=at.total_blocks,
                visible=True,
            )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away; it may be told more, and shows nothing."""
        self._progress.stop()
