"""The named, bounded executors: one for AES-GCM, one for disk.

Crypto threads run at nice 10: a lookup on the event loop never waits behind a restore. (On
Linux a nice value belongs to a thread.)
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

CRYPTO_NICE = 10
_log = logging.getLogger(__name__)


def crypto_executor(threads: int) -> ThreadPoolExecutor:
    """Threads for encryption and decryption, below the event loop's priority."""
    return ThreadPoolExecutor(threads, "strongroom-crypto", initializer=_lower_priority)


def disk_executor(threads: int) -> ThreadPoolExecutor:
    """Threads that wait for the disk."""
    return ThreadPoolExecutor(threads, "strongroom-disk")


def _lower_priority() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), CRYPTO_NICE)
    except OSError as error:
        _log.warning("crypto threads keep the event loop's priority: %s", error.strerror)
