"""`strongroom keys`: rotate a key-encryption key, see how far it is, and who used what."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Final

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cli.api import Api
from cli.options import DEFAULT_TOKEN_FILE, DEFAULT_URL, AsJson, TokenFile, Url, api, console, show

app = typer.Typer(help="Key-encryption keys and their use.", no_args_is_help=True)

_POLL_S: Final = 0.5
_ROTATION = ("id", "kek", "state", "components_total", "components_left", "started_at",
             "finished_at", "failure")  # fmt: skip
_USE = ("at", "component", "kek", "kek_version", "tenant", "purpose", "actor_kind", "actor",
        "reference")  # fmt: skip


@app.command()
def status(
    url: Url = DEFAULT_URL, token_file: TokenFile = DEFAULT_TOKEN_FILE, *, as_json: AsJson = False
) -> None:
    """Where the keys are kept, and whether erasures are final in time; exit code 1 if not."""
    with api(url, token_file) as client:
        answer = client.get("/v1/keys/status")
        if as_json:
            console.print_json(json.dumps(answer), indent=None)
        else:
            show([answer], tuple(answer), as_json=False)
    if answer["overdue"]:
        raise typer.Exit(1)


@app.command()
def rotate(
    tenant: Annotated[
        str | None, typer.Option(help="The tenant's id; without it the installation's own key.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until it has ended, with a bar.")] = True,
    as_json: AsJson = False,
) -> None:
    """Give a key a new version, rewrap what lives, and destroy the versions before.

    The service does it, and goes on after a restart: this command may be interrupted.
    """
    with api(url, token_file) as client:
        rotation = client.post("/v1/keys/rotations", {"kek": tenant or "installation"})
        if wait:
            rotation = _watch(client, rotation)
        show([rotation], _ROTATION, as_json=as_json)


@app.command()
def rotations(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's key.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Rotations, under way and done."""
    with api(url, token_file) as client:
        show(list(client.items("/v1/keys/rotations", kek=tenant)), _ROTATION, as_json=as_json)


@app.command()
def uses(
    tenant: Annotated[str | None, typer.Option(help="Only for this tenant.")] = None,
    component: Annotated[str | None, typer.Option(help="Only of this component.")] = None,
    purpose: Annotated[
        str | None, typer.Option(help="grant_salt, key_lease, rotation or check.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="From this time on (RFC 3339).")] = None,
    until: Annotated[str | None, typer.Option(help="Before this time.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many rows.")] = 1000,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Who unwrapped which component's secret, under which version, what for."""
    with api(url, token_file) as client:
        found = client.items(
            "/v1/keys/uses",
            tenant=tenant,
            component=component,
            purpose=purpose,
            since=since,
            until=until,
        )
        rows: list[dict[str, Any]] = []
        for row in found:
            rows.append(row)
            if len(rows) == limit:
                break
        show(rows, _USE, as_json=as_json)


def _watch(client: Api, rotation: dict[str, Any]) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        total = rotation["components_total"]
        task = progress.add_task(f"rotating {rotation['kek']}", total=total)
        while rotation["state"] != "done":
            failure = f" ({rotation['failure']}, tried again)" if rotation["failure"] else ""
            progress.update(
                task,
                completed=total - rotation["components_left"],
                description=f"rotating {rotation['kek']}{failure}",
            )
            time.sleep(_POLL_S)
            rotation = client.get(f"/v1/keys/rotations/{rotation['id']}")
    return rotation
