"""`strongroom audit`: every compliance question, exports, holds, heads, the report, verification.

A question prints a table, with `--json` JSON Lines; `--export FILE` writes everything in the
format that the file's suffix names: `.jsonl`, `.csv`, `.parquet`, `.ocsf`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.audit_verify import verify_log
from cli.options import (
    DEFAULT_TOKEN_FILE,
    DEFAULT_URL,
    AsJson,
    TokenFile,
    Url,
    api,
    console,
    show,
)
from strongroom.errors import Misuse

app = typer.Typer(
    help="Who saw what, and the proof that the record is whole.", no_args_is_help=True
)
holds = typer.Typer(help="Legal holds: what one covers is not purged.", no_args_is_help=True)
heads = typer.Typer(help="Signed heads of the audit's tree.", no_args_is_help=True)
app.add_typer(holds, name="holds")
app.add_typer(heads, name="heads")

Tenant = Annotated[str | None, typer.Option(help="Only this tenant.")]
Subject = Annotated[str | None, typer.Option(help="Only this subject.")]
Kind = Annotated[
    str | None, typer.Option(help="Only this kind; one that ends in a dot is a prefix.")
]
Outcome = Annotated[str | None, typer.Option(help="Only this outcome.")]
Since = Annotated[
    str | None, typer.Option("--since", help="From this time on (RFC 3339, with zone).")
]
Until = Annotated[str | None, typer.Option("--until", help="Before this time.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many rows.")]
Order = Annotated[str, typer.Option(help="asc or desc, by time; chain, where it is possible.")]
Export = Annotated[
    Path | None,
    typer.Option(help="Write everything to this new file: .jsonl, .csv, .parquet or .ocsf."),
]

_EVENT = ("at", "tenant", "subject", "kind", "outcome", "reason", "tokens", "tier")
_FORMATS = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet", ".ocsf": "ocsf"}


def _ask(
    path: str,
    columns: tuple[str, ...],
    url: str,
    token_file: Path,
    export: Path | None,
    *,
    as_json: bool,
    **params: str | int | None,
) -> None:
    with api(url, token_file) as client:
        if export is None:
            show(client.get(path, **params)["items"], columns, as_json=as_json)
            return
        form = _FORMATS.get(export.suffix)
        if form is None:
            raise Misuse(
                "the file's suffix names the format", field="export", limit=", ".join(_FORMATS)
            )
        params.pop("limit", None)
        count = client.download(path, export, format=form, **params)
        console.print(f"{count} bytes in {export}", markup=False, highlight=False)


@app.command()
def events(
    tenant: Tenant = None,
    subject: Subject = None,
    kind: Kind = None,
    outcome: Outcome = None,
    category: Annotated[str | None, typer.Option(help="Only this category.")] = None,
    reference: Annotated[str | None, typer.Option(help="Only about this id.")] = None,
    since: Since = None,
    until: Until = None,
    order: Order = "asc",
    limit: Limit = 100,
    export: Export = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Events that fit every filter."""
    _ask(
        "/v1/audit/events",
        _EVENT,
        url,
        token_file,
        export,
        as_json=as_json,
        tenant=tenant,
        subject=subject,
        kind=kind,
        outcome=outcome,
        category=category,
        reference=reference,
        since=since,
        until=until,
        order=order,
        limit=limit,
    )


@app.command()
def accesses(
    tenant: Tenant = None,
    subject: Subject = None,
    document: Annotated[
        str | None, typer.Option(help="Only this document, or this version of one.")
    ] = None,
    since: Since = None,
    until: Until = None,
    order: Order = "asc",
    limit: Limit = 100,
    export: Export = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Who accessed a tenant's cache, or what depends on a document, and when."""
    _ask(
        "/v1/audit/accesses",
        _EVENT,
        url,
        token_file,
        export,
        as_json=as_json,
        tenant=tenant,
        subject=subject,
        document=document,
        since=since,
        until=until,
        order=order,
        limit=limit,
    )


@app.command("key-uses")
def key_uses(
    key: Annotated[
        str | None, typer.Option(help="A component's or namespace's id; without it, every key.")
    ] = None,
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    order: Order = "asc",
    limit: Limit = 100,
    export: Export = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Who leased or used a key."""
    _ask(
        "/v1/audit/key-uses",
        _EVENT,
        url,
        token_file,
        export,
        as_json=as_json,
        key=key,
        tenant=tenant,
        since=since,
        until=until,
        order=order,
        limit=limit,
    )


@app.command("after-revocation")
def after_revocation(
    revocation: Annotated[str, typer.Argument(help="The revocation's id.")],
    order: Order = "asc",
    limit: Limit = 100,
    export: Export = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """What was served though it was revoked: always nothing."""
    _ask(
        f"/v1/audit/revocations/{revocation}/accesses",
        _EVENT,
        url,
        token_file,
        export,
        as_json=as_json,
        order=order,
        limit=limit,
    )


@app.command("cross-tenant-hits")
def cross_tenant_hits(
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 100,
    export: Export = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """What one tenant was served of another's: always nothing."""
    _ask(
        "/v1/audit/cross-tenant-hits",
        _EVENT,
        url,
        token_file,
        export,
        as_json=as_json,
        tenant=tenant,
        since=since,
        until=until,
        limit=limit,
    )


@app.command()
def denials(
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    export: Export = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Denials counted by reason."""
    _ask(
        "/v1/audit/denials",
        ("kind", "reason", "count"),
        url,
        token_file,
        export,
        as_json=as_json,
        tenant=tenant,
        since=since,
        until=until,
    )


@app.command()
def derived(
    document: Annotated[str, typer.Argument(help="A document's, or a version's, id.")],
    limit: Limit = 100,
    export: Export = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Every namespace that derived from a document, and the revocations that retired it."""
    _ask(
        "/v1/audit/derived",
        ("namespace", "created_at", "retired", "revocations"),
        url,
        token_file,
        export,
        as_json=as_json,
        document=document,
        limit=limit,
    )


@app.command()
def report(
    day: Annotated[str | None, typer.Option(help="YYYY-MM-DD in UTC; without it, today.")] = None,
    tenant: Tenant = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """One day: cross-tenant hits, accesses after a revocation, denials, what is unacknowledged.

    Exit code 1 if one of the first two is not 0.
    """
    with api(url, token_file) as client:
        found: dict[str, Any] = client.get("/v1/audit/report", day=day, tenant=tenant)
    if as_json:
        console.print_json(json.dumps(found), indent=None)
    else:
        _print_report(found)
    if found["cross_tenant_hits"] or found["accesses_after_revocation"]:
        raise typer.Exit(1)


def _print_report(found: dict[str, Any]) -> None:
    lines = [
        f"audit report of {found['day']} (UTC), "
        + ("all tenants" if found["tenant"] is None else f"tenant {found['tenant']}"),
        f"cross-tenant hits          {found['cross_tenant_hits']}",
        f"accesses after revocation  {found['accesses_after_revocation']}",
        f"denied                     {found['denied']}",
        *(f"  {each['kind']} {each['reason']}: {each['count']}" for each in found["denials"]),
        f"alarms                     {found['alarms']}",
        f"legal holds standing       {found['holds']}",
    ]
    if found["tenant"] is None:
        open_entry = found["oldest_unacknowledged"]
        head = found["last_head"]
        lines += [
            "oldest unacknowledged      "
            + (
                "none"
                if open_entry is None
                else f"{open_entry['kind']} at {open_entry['at']}, seq {open_entry['seq']}, "
                f"sidecar {open_entry['sidecar']}"
            ),
            f"events                     {found['tree_size']}",
            "last signed head           "
            + ("none" if head is None else f"{head['size']} events at {head['at']}"),
        ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def verify(
    heads_folder: Annotated[
        Path | None,
        typer.Option("--heads", help="Heads that were kept elsewhere: a folder, or one file."),
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Recompute the whole log, and hold it against signed heads. Exit code 1 if it is broken."""
    with api(url, token_file) as client:
        if not verify_log(client, heads_folder, console):
            raise typer.Exit(1)


@holds.command("list")
def list_holds(
    limit: Limit = 100,
    export: Export = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Legal holds, standing and released."""
    _ask(
        "/v1/audit/holds",
        ("id", "tenant", "since", "until", "reason", "placed_by", "released_at"),
        url,
        token_file,
        export,
        as_json=as_json,
        limit=limit,
    )


@holds.command("place")
def place_hold(
    reason: Annotated[str, typer.Option(help="Why; it is on record.")],
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Place a hold. It stops no revocation."""
    body = {"tenant": tenant, "since": since, "until": until, "reason": reason}
    with api(url, token_file) as client:
        placed = client.post("/v1/audit/holds", body)
        console.print(placed["id"], markup=False, highlight=False)


@holds.command("release")
def release_hold(
    hold: Annotated[str, typer.Argument(help="The hold's id.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Release a hold: what it covered may be purged from now on."""
    with api(url, token_file) as client:
        client.delete(f"/v1/audit/holds/{hold}")


@heads.command("list")
def list_heads(
    limit: Limit = 100,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Signed heads, the smallest tree first."""
    with api(url, token_file) as client:
        rows = client.get("/v1/audit/heads", limit=limit)["items"]
        show(rows, ("size", "at", "root"), as_json=as_json)


@heads.command("sign")
def sign_head(url: Url = DEFAULT_URL, token_file: TokenFile = DEFAULT_TOKEN_FILE) -> None:
    """Sign the tree as it is now and print the head: keep it elsewhere."""
    with api(url, token_file) as client:
        print(client.post("/v1/audit/heads", {})["jws"])  # noqa: T201 - to be piped into a file
