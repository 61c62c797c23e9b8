"""`strongroom policy`: export, try, test, import, explain and roll back a tenant's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.api import Api, ApiProblem
from cli.options import (
    DEFAULT_TOKEN_FILE,
    DEFAULT_URL,
    AsJson,
    TokenFile,
    Url,
    api,
    console,
    errors,
    show,
)
from strongroom.errors import Misuse

app = typer.Typer(
    help="A tenant's policy: rules, roles and test cases, by version.",
    epilog="Exit codes: 0 done; 1 a test case fails; 2 a document is wrong; 3 not allowed; 4 not "
    "there; 5 changed by others meanwhile, or refused by a test case. docs/policy.md has the rest.",
    no_args_is_help=True,
)

Tenant = Annotated[str, typer.Argument(help="The tenant's component id.")]
Document = Annotated[
    Path, typer.Argument(help="A policy, *.yaml, *.yml or *.csv.", exists=True, dir_okay=False)
]
MaybeDocument = Annotated[
    Path | None,
    typer.Argument(
        help="A policy, *.yaml, *.yml or *.csv; none: the one in force.",
        exists=True,
        dir_okay=False,
    ),
]
Why = Annotated[str, typer.Option("--reason", help="Why; kept with the version.")]
_FORMS = {".yaml": "yaml", ".yml": "yaml", ".csv": "csv"}


def _path(tenant: str, what: str = "") -> str:
    return f"/v1/tenants/{tenant}/policy{what}"


def _proposal(document: Path | None) -> dict[str, Any]:
    if document is None:
        return {}
    form = _FORMS.get(document.suffix)
    if form is None:
        raise Misuse("a policy's name ends in .yaml, .yml or .csv", field="document")
    try:
        return {"form": form, "document": document.read_text(encoding="utf-8")}
    except UnicodeDecodeError as error:
        raise Misuse("a policy is text in UTF-8", field="document") from error


def _change(client: Api, method: str, path: str, body: dict[str, Any], tenant: str) -> Any:
    """Change the policy that is in force now, and tell what is wrong line by line."""
    try:
        return client.change(method, path, body, etag=client.etag(_path(tenant)))
    except ApiProblem as problem:
        _tell_errors(problem)
        raise


def _tell_errors(problem: ApiProblem) -> None:
    for each in problem.problem.get("errors") or ():
        place = f"line {each['line']}, {each['field']}" if "line" in each else each.get("case", "")
        errors.print(f"{place}: {each.get('detail', '')}", style="red", markup=False)


@app.command("export")
def export_policy(
    tenant: Tenant,
    form: Annotated[str, typer.Option("--format", help="yaml or csv.")] = "yaml",
    version: Annotated[
        int | None, typer.Option(min=0, help="An earlier version; else the one in force.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this file.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Write a policy as YAML or CSV, to be edited and imported again."""
    with api(url, token_file) as client:
        text = client.text(_path(tenant, "/document"), form=form, version=version)
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.write_text(text, encoding="utf-8")
            console.print(f"written to {out}", highlight=False)


@app.command("import")
def import_policy(
    tenant: Tenant,
    document: Document,
    reason: Why,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Put a policy in force: all of it, if no line is wrong and every test case passes."""
    with api(url, token_file) as client:
        body = {**_proposal(document), "reason": reason}
        _tell_version(_change(client, "PUT", _path(tenant, "/document"), body, tenant))


@app.command("test")
def run_test_cases(
    tenant: Tenant,
    document: MaybeDocument = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Run the test cases of a policy; exit code 1 if one fails."""
    with api(url, token_file) as client:
        try:
            ran = client.post(_path(tenant, "/tests/run"), _proposal(document))
        except ApiProblem as problem:
            _tell_errors(problem)
            raise
    for failure in ran["failures"]:
        console.print(
            f"failed: {failure['name']}: expected {failure['expected']}, {failure['reason']}",
            style="red",
            markup=False,
            highlight=False,
        )
    passed = ran["tests"] - len(ran["failures"])
    console.print(f"{passed} of {ran['tests']} test cases pass", highlight=False)
    if ran["failures"]:
        raise typer.Exit(1)


@app.command("dry-run")
def dry_run(
    tenant: Tenant,
    document: MaybeDocument = None,
    rollback_to: Annotated[
        int | None, typer.Option(min=0, help="Try a rollback to this version instead.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Say who would gain and lose what, and what it would take; nothing is changed."""
    with api(url, token_file) as client:
        body = _proposal(document)
        if rollback_to is not None:
            body["rollback_to"] = rollback_to
        try:
            found = client.post(_path(tenant, "/dry-run"), body)
        except ApiProblem as problem:
            _tell_errors(problem)
            raise
    if as_json:
        console.print_json(data=found)
        return
    for line in found["changes"]:
        sign = "+" if line["change"] == "added" else "-"
        console.print(f"{sign} {line['kind']} {line['text']}", markup=False, highlight=False)
    columns = ("subject", "action", "resource", "conditional", "because")
    for what in ("gains", "losses"):
        console.print(f"{what}: {found[f'{what}_total']}", style="bold", highlight=False)
        if found[what]:
            show(found[what], columns, as_json=False)
    taken = found["invalidation"]
    left = taken["namespaces_abandoned"]
    console.print(
        f"grants that die: {taken['grants']}; namespaces: {taken['namespaces']}, of which nobody "
        f"could read any more: {'not known' if left is None else left}; bytes: "
        f"{taken['bytes_note'] if taken['bytes'] is None else taken['bytes']}",
        markup=False,
        highlight=False,
    )
    if not found["complete"]:
        console.print("not everything was asked: there is more", style="yellow")
    for failure in found["failures"]:
        console.print(f"would be refused by: {failure['name']}", style="red", markup=False)


@app.command()
def explain(
    tenant: Tenant,
    subject: Annotated[str, typer.Argument(help="user:<name>, role:<name> or group:<id>.")],
    resource: Annotated[str, typer.Argument(help="For example group:<id>.")],
    action: Annotated[str, typer.Option(help="The permission.")] = "group:read",
    purpose: Annotated[str | None, typer.Option(help="What it would be for.")] = None,
    model: Annotated[str | None, typer.Option(help="The model revision's component id.")] = None,
    sensitivity: Annotated[str | None, typer.Option(help="Of the document.")] = None,
    at: Annotated[str | None, typer.Option(help="When, RFC 3339 with a zone; else now.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """Say why somebody may or may not do something; exit code 1 if they may not."""
    given = {"purpose": purpose, "model": model, "sensitivity": sensitivity, "at": at}
    body = {
        "subject": subject,
        "action": action,
        "resource": resource,
        "context": {name: value for name, value in given.items() if value is not None},
    }
    with api(url, token_file) as client:
        told = client.post(_path(tenant, "/explain"), body)
    if as_json:
        console.print_json(data=told)
    else:
        console.print(told["reason"], markup=False, highlight=False)
        console.print(f"goes by: {', '.join(told['names'])}", markup=False, highlight=False)
        for each in told["concerned"]:
            state = "applies" if each["applies"] else "does not apply"
            console.print(f"  {state}: {each['rule']}", markup=False, highlight=False)
        if told["until"]:
            console.print(f"until {told['until']}", markup=False, highlight=False)
    if not told["allowed"]:
        raise typer.Exit(1)


@app.command()
def history(
    tenant: Tenant,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    *,
    as_json: AsJson = False,
) -> None:
    """List every version: who made it, when and why."""
    columns = ("number", "created_at", "author", "origin", "added", "removed", "reason")
    with api(url, token_file) as client:
        show(list(client.items(_path(tenant, "/versions"))), columns, as_json=as_json)


@app.command()
def diff(
    tenant: Tenant,
    from_version: Annotated[int, typer.Argument(min=0, metavar="FROM", help="A version.")],
    to_version: Annotated[
        int | None, typer.Argument(min=0, metavar="TO", help="A version; none: the newest.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Show what is different between two versions; exit code 1 if something is."""
    with api(url, token_file) as client:
        found = client.get(_path(tenant, "/diff"), **{"from": from_version, "to": to_version})
    for line in found["changes"]:
        sign, colour = ("+", "green") if line["change"] == "added" else ("-", "red")
        text = f"{sign} {line['kind']} {line['text']}"
        console.print(text, style=colour, markup=False, highlight=False)
    if found["changes"]:
        raise typer.Exit(1)


@app.command()
def rollback(
    tenant: Tenant,
    version: Annotated[int, typer.Argument(min=0, help="The version to have again.")],
    reason: Why,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Have an earlier version's rules and roles again, as a new version."""
    with api(url, token_file) as client:
        body = {"version": version, "reason": reason}
        _tell_version(_change(client, "POST", _path(tenant, "/rollback"), body, tenant))


def _tell_version(done: dict[str, Any]) -> None:
    if done["changed"]:
        console.print(
            f"version {done['version']} is in force, from revision {done['revision']} on",
            highlight=False,
        )
    else:
        console.print(f"version {done['version']} says the same already", highlight=False)
