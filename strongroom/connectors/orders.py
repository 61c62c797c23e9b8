"""What the scheduler's side tells every worker in one step. Plain values: the engine ships them.

`key` is the engine's own request id; `request` is the name under which the sidecar knows it,
which a client cannot choose.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Bring tokens `[start, end)`, both whole pages, into `pages`, one id for each page.

    `lost`: the order could not be drawn up; the worker reports it as failed as a whole.
    """

    key: str
    request: str
    start: int
    end: int
    pages: tuple[int, ...]
    lost: bool = False


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """After this step the prompt's first `end` tokens are final and lie in `pages`."""

    key: str
    request: str
    end: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """Everything for one step."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    preempted: tuple[str, ...] = ()
    """Keys whose pages will be overwritten in this step."""
    held: tuple[str, ...] = ()
    """Keys of finished requests whose pages the engine keeps until it is told."""
    idle: bool = False
    """Nothing is computed in this step."""
