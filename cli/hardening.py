"""What a process that holds keys does before it holds any."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Final

_PR_SET_DUMPABLE: Final = 4


def keep_private() -> None:
    """Files are their owner's alone, and memory is left in no core dump.

    The limit alone does not keep a kernel that pipes dumps to a collector from taking one; a
    process that is not dumpable is dumped nowhere, and only root may attach a debugger to it.
    """
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
