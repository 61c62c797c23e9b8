"""What a process that serves asks of its interpreter. For an entry point, not for a library.

What a sidecar has made by the time that it serves (modules, settings, columns, connections of its
own) stays until it ends. The collector of garbage would walk all of it again and again, and a
lookup would wait meanwhile.
"""

from __future__ import annotations

import gc


def keep_what_is_here() -> None:
    """Collect once, and let no later collection look at what is left."""
    gc.collect()
    gc.freeze()
