"""`strongroom backup`: make one while the service serves, verify it, restore it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cli.hardening import keep_private
from cli.options import DEFAULT_STATE, State, console, told_errors
from service.backup import make
from service.backup.make import Told
from service.backup.manifest import Manifest
from service.settings import ServiceSettings

app = typer.Typer(help="Backups of the service's database.", no_args_is_help=True)

DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="postgresql+asyncpg://...; without it SQLite in the state folder."),
]
_STATE = DEFAULT_STATE / "service"


@app.command()
def create(
    out: Annotated[Path, typer.Option(help="A new folder for it; made 0700.")],
    state: State = _STATE,
    database_url: DatabaseUrl = None,
) -> None:
    """Back up the database; the service may go on. Keys are not part of it."""
    with told_errors(), _bar("backup") as told:
        manifest = make.create(_settings(state, database_url), out, told)
    _show(manifest, f"backup in {out}")
    console.print(
        "keep the journal apart from it, and as new as you can: a restore needs it",
        style="dim",
    )


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The backup's folder.")],
    state: State = _STATE,
    keys: Annotated[
        Path | None,
        typer.Option(help="The answer of GET /v1/keys, instead of the state's own keys."),
    ] = None,
) -> None:
    """Check a backup: its signature, its digest, the database in it and the log in that."""
    from cli.verify import read_keys  # noqa: PLC0415

    with told_errors():
        verifier = make.own_keys(_settings(state, None))[1] if keys is None else read_keys(keys)
        manifest = make.verify(folder, verifier)
    _show(manifest, "VALID")


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="The backup's folder.")],
    state: State = _STATE,
    database_url: DatabaseUrl = None,
) -> None:
    """Restore into an empty database, with the service stopped."""
    from service.backup.restore import restore as put_back  # noqa: PLC0415

    with told_errors(), _bar("restore") as told:
        settings = _settings(state, database_url)
        manifest = put_back(settings, folder, make.own_keys(settings)[1], told)
    _show(manifest, "restored")
    console.print(
        "now put the newest journal in place and start the service: what was revoked since is "
        "destroyed again, or it refuses to serve",
        style="dim",
    )


def _settings(state: Path, database_url: str | None) -> ServiceSettings:
    # The signing key is read to sign or to verify.
    keep_private()
    from cli.serve import service_settings  # noqa: PLC0415

    return service_settings(state, "127.0.0.1", 8420, database_url)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Told]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _show(manifest: Manifest, said: str) -> None:
    console.print(
        f"{said}: {manifest.id}, made {manifest.made_at}, migration {manifest.migration}, "
        f"{manifest.size_bytes} bytes, log {manifest.epoch[:8]} {manifest.seq}",
        highlight=False,
        soft_wrap=True,
    )
