"""Options that several commands share, and how errors leave the process.

Exit codes: 0 done, 1 a check or step failed, 2 wrong usage, 3 refused, 4 not found,
5 conflict, 6 overloaded, 7 unavailable.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cli.api import Api, ApiProblem, read_token
from strongroom.errors import (
    Conflict,
    Corrupt,
    Missing,
    Misuse,
    Overloaded,
    Refused,
    StrongroomError,
    Unavailable,
)

DEFAULT_URL = "http://127.0.0.1:8420"
DEFAULT_STATE = Path("state")

console = Console()
errors = Console(stderr=True)

Url = Annotated[
    str, typer.Option("--url", envvar="STRONGROOM_URL", help="Where the service listens.")
]
TokenFile = Annotated[
    Path,
    typer.Option(
        "--token-file",
        envvar="STRONGROOM_TOKEN_FILE",
        help="A file (mode 0600) with a bearer token; `strongroom up` writes one.",
    ),
]
State = Annotated[
    Path, typer.Option("--state", envvar="STRONGROOM_STATE", help="Folder for everything kept.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

DEFAULT_TOKEN_FILE = DEFAULT_STATE / "service" / "operator.token"

_EXIT_CODES: tuple[tuple[type[StrongroomError], int], ...] = (
    (Misuse, 2),
    (Refused, 3),
    (Missing, 4),
    (Conflict, 5),
    (Overloaded, 6),
    (Unavailable, 7),
    (Corrupt, 1),
)
_STATUS_CODES = {400: 2, 401: 3, 403: 3, 404: 4, 409: 5, 412: 5, 422: 2, 429: 6, 503: 7}


@contextlib.contextmanager
def told_errors() -> Iterator[None]:
    """Turn our errors into one line on standard error and an exit code."""
    try:
        yield
    except StrongroomError as error:
        place = f" [{error.field}]" if error.field else ""
        limit = f" (limit: {error.limit})" if error.limit is not None else ""
        errors.print(f"strongroom: {error.message}{place}{limit}", style="red", markup=False)
        raise typer.Exit(exit_code(error)) from error


def exit_code(error: StrongroomError) -> int:
    """The process's exit code for an error."""
    if isinstance(error, ApiProblem):
        return _STATUS_CODES.get(error.status, 1)
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


@contextlib.contextmanager
def api(url: str, token_file: Path) -> Iterator[Api]:
    """The service, with errors told."""
    with told_errors(), Api(url, read_token(token_file)) as client:
        yield client


def show(rows: list[dict[str, Any]], columns: tuple[str, ...], *, as_json: bool) -> None:
    """Print rows as JSON Lines or as a table of `columns`."""
    if as_json:
        for row in rows:
            console.print_json(json.dumps(row), indent=None)
        return
    if not rows:
        console.print("nothing found", style="dim")
        return
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    console.print(table)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    return str(value)
