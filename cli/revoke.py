"""`strongroom revoke` and `strongroom revocation`: make something unreadable, and get the evidence.

The revocation is committed by one short call; the waiting is a call of its own, again and again,
so that a lost connection loses nothing.
"""

from __future__ import annotations

import secrets
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from cli.api import Api, ApiProblem
from cli.options import DEFAULT_TOKEN_FILE, DEFAULT_URL, AsJson, TokenFile, Url, api, console, show
from strongroom.errors import Misuse

HELP: Final = """Make something unreadable everywhere, at once, with evidence.

It is committed first, and in force once every sidecar has said so or is out of its lease: that is
waited for, as long as --deadline says. It cannot be taken back; --preview says what it would take,
and a revocation with --at can be cancelled until then (`strongroom revocation cancel`).

\b
  strongroom revoke document <id> --tenant <id> --preview
  strongroom revoke document <id> --tenant <id> --reason "contract ended" --certificate c.html
  strongroom revoke membership alice --group <id> --reason "moved" --deadline 3
  strongroom revoke tenant <id> --reason "offboarded" --at 2027-01-31T18:00:00+01:00
"""
EPILOG: Final = (
    "Exit codes: 0 in force (or previewed, scheduled, or committed with --no-wait); 1 committed, "
    "and not in force by the deadline: `strongroom revocation show` goes on waiting; 2 wrong "
    "usage; 3 not allowed; 4 not there, not yours, or revoked already; 5 a conflict; 7 away: "
    "ask again with the same --idempotency-key."
)
_STEP_S: Final = 20.0
_FORMS: Final = {".jws": "jws", ".json": "json", ".html": "html"}

app = typer.Typer(
    help="Revocations: committed, in force, still to come, and their certificates.",
    epilog="Exit codes: 0 done; 1 not in force by then; 4 not there; 5 over already, or no "
    "certificate before it is in force.",
    no_args_is_help=True,
)

Id = Annotated[str, typer.Argument(metavar="ID", help="The revocation's id.")]
Out = Annotated[
    Path, typer.Option("--out", help="*.jws, *.json (readable) or *.html (a page to print).")
]


class AxisName(StrEnum):
    """What can be revoked."""

    SUBJECT = "subject"
    MEMBERSHIP = "membership"
    GROUP = "group"
    DOCUMENT = "document"
    DOCUMENT_VERSION = "document_version"
    MODEL = "model"
    ADAPTER = "adapter"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    POLICY = "policy"
    TENANT = "tenant"
    SIDECAR = "sidecar"


def revoke(
    axis: Annotated[AxisName, typer.Argument(help="What kind of thing.")],
    target: Annotated[str, typer.Argument(help="Its id; for a subject or membership its name.")],
    reason: Annotated[
        str | None, typer.Option(help="Why; kept in the audit and the certificate.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="The tenant's component id.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="For a membership: the group's component id.")
    ] = None,
    at: Annotated[str | None, typer.Option(help="Then, and not now: RFC 3339 with a zone.")] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option("--deadline", min=0, help="Wait for the sidecars so many seconds at most."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Write the certificate to this file: *.jws, *.json or *.html."),
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="The same key again is the same revocation.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    preview: Annotated[
        bool, typer.Option("--preview", help="Say what it would take, and change nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Wait until it is in force.")] = True,
    as_json: AsJson = False,
) -> None:
    """See `HELP`."""
    body: dict[str, Any] = {"axis": axis.value, "target": target, "reason": reason or "preview"}
    body |= {name: value for name, value in (("tenant", tenant), ("group", group)) if value}
    with api(url, token_file) as client:
        if preview:
            _show_preview(client.post("/v1/revocations/preview", body), as_json=as_json)
            return
        if not reason:
            raise Misuse("say why, with --reason", field="reason")
        if certificate is not None:
            form_of(certificate)
            if at is not None or not wait:
                raise Misuse("there is no certificate before it is in force", field="certificate")
        headers = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}
        if at is not None:
            later = client.post("/v1/scheduled-revocations", body | {"at": at}, headers=headers)
            _show_scheduled(later, as_json=as_json)
            return
        started = time.monotonic()
        answer = client.post("/v1/revocations", body | {"wait": False}, headers=headers)
        if wait:
            left_s = None if deadline_s is None else deadline_s - (time.monotonic() - started)
            answer = _wait(client, answer, left_s)
        _show(answer, as_json=as_json)
        if certificate is not None and answer["in_force_at"] is not None:
            _write_certificate(client, answer["id"], certificate, quiet=as_json)
    if wait and answer["in_force_at"] is None:
        raise typer.Exit(1)


@app.command("list")
def list_revocations(
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    scheduled: Annotated[
        bool, typer.Option("--scheduled", help="Those asked for ahead, and what became of them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what was revoked, or is to be."""
    with api(url, token_file) as client:
        if scheduled:
            rows = list(client.items("/v1/scheduled-revocations"))
            columns: tuple[str, ...] = ("id", "state", "due_at", "axis", "target", "reason")
        else:
            rows = list(client.items("/v1/revocations"))
            columns = ("id", "committed_at", "in_force_at", "axis", "target", "reason")
        show(rows, columns, as_json=as_json)


@app.command("show")
def show_revocation(
    revocation: Id,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Wait so many seconds for it to be in force.")
    ] = 0.0,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Say where each sidecar stands; of one that is to come, when it is due."""
    with api(url, token_file) as client:
        try:
            answer = client.get(f"/v1/revocations/{revocation}")
        except ApiProblem as problem:
            if problem.status != 404:
                raise
            later = client.get(f"/v1/scheduled-revocations/{revocation}")
            _show_scheduled(later, as_json=as_json)
            return
        if wait_s:
            answer = _wait(client, answer, wait_s)
        _show(answer, as_json=as_json)
    if wait_s and answer["in_force_at"] is None:
        raise typer.Exit(1)


@app.command()
def cancel(
    revocation: Id,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Cancel a revocation that is still to come."""
    with api(url, token_file) as client:
        _show_scheduled(client.delete(f"/v1/scheduled-revocations/{revocation}"), as_json=False)


@app.command("certificate")
def fetch_certificate(
    revocation: Id,
    out: Out,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Fetch the certificate: a later one knows more, such as that the erasure is final."""
    with api(url, token_file) as client:
        _write_certificate(client, revocation, out, quiet=False)


def form_of(path: Path) -> str:
    """The form that a file's name asks for. Raises `Misuse`."""
    form = _FORMS.get(path.suffix)
    if form is None:
        raise Misuse("a certificate's name ends in .jws, .json or .html", field="certificate")
    return form


def _write_certificate(client: Api, revocation: str, path: Path, *, quiet: bool) -> None:
    text = client.text(f"/v1/revocations/{revocation}/certificate", form=form_of(path))
    path.write_text(text, encoding="utf-8")
    if not quiet:
        console.print(f"certificate in {path}", highlight=False)


def _wait(client: Api, answer: dict[str, Any], left_s: float | None) -> dict[str, Any]:
    ends = None if left_s is None else time.monotonic() + left_s
    while answer["in_force_at"] is None:
        step_s = _STEP_S if ends is None else min(_STEP_S, ends - time.monotonic())
        if step_s <= 0:
            break
        # Whole milliseconds: a shorter wait may be one of no length at all.
        step = f"{max(step_s, 0.001):.3f}"
        answer = client.get(f"/v1/revocations/{answer['id']}", wait_s=step)
    return answer


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.print_json(data=answer)
        return
    table = Table("sidecar", "state", "at", "namespaces", box=None, header_style="bold")
    for each in answer["sidecars"]:
        state = "out of its lease" if each["state"] == "lease_expired" else each["state"]
        table.add_row(each["name"], state, each["at"], str(each["namespaces_dropped"]))
    in_force = answer["in_force_at"]
    told = "committed, not yet in force" if in_force is None else f"in force since {in_force}"
    console.print(f"revocation {answer['id']}: {told}", highlight=False, soft_wrap=True)
    console.print(
        f"components destroyed: {answer['components_total']}; erasure: {_erasure(answer['final'])}",
        highlight=False,
        soft_wrap=True,
    )
    if answer["sidecars"]:
        console.print(table)


def _erasure(final: dict[str, Any]) -> str:
    match final["state"]:
        case "pending":
            return f"pending, final by {final['at']}"
        case "final":
            return f"final since {final['at']}"
        case _:
            return "none"


def _show_scheduled(later: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.print_json(data=later)
        return
    failed = f" ({later['failure']})" if later["failure"] else ""
    console.print(
        f"revocation {later['id']}: {later['state']}{failed}, due at {later['due_at']}",
        highlight=False,
        soft_wrap=True,
    )
    if later["state"] == "scheduled":
        console.print(f"cancel it with: strongroom revocation cancel {later['id']}", style="dim")


_GRANTS: Final = {
    "subject": "every one of the subject dies",
    "tenant": "every one in the tenant dies",
    "dependent": "those that depend on it die",
    "sidecar": "they live, and open nothing at this sidecar",
}


def _show_preview(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.print_json(data=found)
        return
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("would revoke", ", ".join(f"{k} {v}" for k, v in found["target"].items()))
    table.add_row("components destroyed", str(found["components_total"]))
    table.add_row("namespaces lost", str(found["namespaces"]))
    table.add_row("subjects who could read it", str(found["subjects"]))
    table.add_row("grants", _GRANTS[found["grants"]])
    table.add_row("sidecars waited for", ", ".join(s["name"] for s in found["sidecars"]) or "none")
    for what in ("blocks", "bytes"):
        known = found[what]
        table.add_row(what, found["held_note"] if known is None else str(known))
    console.print(table)
    console.print("nothing was changed", style="dim")
