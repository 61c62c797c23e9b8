"""The environment that child processes inherit: the one place here that reads it."""

from __future__ import annotations

import os


def child_environment() -> dict[str, str]:
    """A copy of this process's environment, without Strongroom's own settings.

    What a child is to know is given to it by name, so that a stray variable of the shell never
    configures one process and not another.
    """
    inherited = os.environ  # noqa: TID251 - children get it as a value from here
    return {name: value for name, value in inherited.items() if not name.startswith("STRONGROOM_")}
