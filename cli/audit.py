"""`strongroom audit`: who saw what, what derived from a document, what was denied."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.options import DEFAULT_TOKEN_FILE, DEFAULT_URL, AsJson, TokenFile, Url, api, show

app = typer.Typer(help="The first compliance questions.", no_args_is_help=True)

Since = Annotated[
    str | None, typer.Option("--since", help="From this time on (RFC 3339, with zone).")
]
Until = Annotated[str | None, typer.Option("--until", help="Before this time.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many rows.")]

_EVENT = ("at", "tenant", "subject", "kind", "outcome", "reason", "tokens", "tier")


@app.command()
def accesses(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    document: Annotated[str | None, typer.Option(help="Only this document version.")] = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 100,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Who accessed a tenant's cache, or what depends on a document, and when."""
    with api(url, token_file) as client:
        rows: list[dict[str, Any]] = client.get(
            "/v1/audit/accesses",
            tenant=tenant,
            document=document,
            since=since,
            until=until,
            limit=limit,
        )["items"]
        show(rows, _EVENT, as_json=as_json)


@app.command()
def denials(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    since: Since = None,
    until: Until = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Denials counted by reason."""
    with api(url, token_file) as client:
        answer = client.get("/v1/audit/denials", tenant=tenant, since=since, until=until)
        show(answer["items"], ("kind", "reason", "count"), as_json=as_json)


@app.command()
def derived(
    document: Annotated[str, typer.Argument(help="A document version's component id.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Every namespace that derived from a document, and whether it is retired."""
    with api(url, token_file) as client:
        answer = client.get("/v1/audit/derived", document=document)
        show(answer["items"], ("namespace", "created_at", "retired"), as_json=as_json)
