"""`strongroom tenant`: tenants, their people, groups and documents."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import DEFAULT_TOKEN_FILE, DEFAULT_URL, AsJson, TokenFile, Url, api, console, show

app = typer.Typer(help="Tenants, their subjects, groups and documents.", no_args_is_help=True)

Tenant = Annotated[str, typer.Argument(help="The tenant's component id.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="A name, unique among live tenants.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Register a tenant; prints its component id."""
    with api(url, token_file) as client:
        console.print(client.post("/v1/tenants", {"name": name})["id"], highlight=False)


@app.command("list")
def list_tenants(
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """List tenants."""
    with api(url, token_file) as client:
        columns = ("id", "name", "revision", "review_required")
        show(list(client.items("/v1/tenants")), columns, as_json=as_json)


@app.command()
def review(
    tenant: Tenant,
    reason: Annotated[str, typer.Option(help="What was reviewed; kept in the audit.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Say that a tenant's rules and memberships are right after a restore; grants go on."""
    with api(url, token_file) as client:
        client.post(f"/v1/tenants/{tenant}/review", {"reason": reason})
        console.print("reviewed; grants are given out again")


@app.command()
def subject(
    tenant: Tenant,
    name: Annotated[str, typer.Argument(help="The subject's name, as in its tokens.")],
    group: Annotated[
        list[str] | None, typer.Option("--group", help="A group's component id; repeatable.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Register a subject, with a private group of its own, and put it into groups."""
    with api(url, token_file) as client:
        client.post(f"/v1/tenants/{tenant}/principals", {"name": name})
        for member_of in group or []:
            client.post(
                f"/v1/tenants/{tenant}/memberships", {"principal": name, "group": member_of}
            )
        console.print(f"{name} is registered")


@app.command()
def group(
    tenant: Tenant,
    name: Annotated[str, typer.Argument(help="A name, unique among the tenant's live groups.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Register an access group; prints its component id."""
    with api(url, token_file) as client:
        answer = client.post(f"/v1/tenants/{tenant}/groups", {"name": name})
        console.print(answer["id"], highlight=False)
