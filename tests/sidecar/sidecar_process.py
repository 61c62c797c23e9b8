"""A sidecar in a process of its own, forked from one that has imported everything already."""

from __future__ import annotations

import logging
import multiprocessing
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any

from sidecar.main import run
from sidecar.settings import load_settings

_context = multiprocessing.get_context("forkserver")


def start(fields: dict[str, Any]) -> ForkServerProcess:
    """A running sidecar with these settings. The caller ends it, by whatever signal."""
    _context.set_forkserver_preload(["tests.sidecar.sidecar_process"])
    process = _context.Process(target=_live, args=(fields,), daemon=True)
    process.start()
    return process


def killed(process: BaseProcess) -> None:
    """SIGKILL, and wait until the kernel has taken everything back."""
    process.kill()
    process.join()
    process.close()


def _live(fields: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.ERROR)
    run(load_settings({}, **fields))
