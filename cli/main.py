"""The `strongroom` command: its verbs, their options and their help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import httpx
import typer

from cli import audit, backup, keys, policy, revoke, tenant
from cli.api import system_tls
from cli.hardening import keep_private
from cli.options import (
    DEFAULT_STATE,
    DEFAULT_TOKEN_FILE,
    DEFAULT_URL,
    AsJson,
    State,
    TokenFile,
    Url,
    api,
    console,
    told_errors,
)
from strongroom.private_files import write_private

app = typer.Typer(
    name="strongroom",
    help="A multi-tenant, encrypted KV cache with a policy engine, for LLM inference.",
    epilog="Start with `strongroom doctor`, then `strongroom up`. docs/operations.md has the rest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(tenant.app, name="tenant")
app.add_typer(policy.app, name="policy")
app.add_typer(audit.app, name="audit")
app.add_typer(keys.app, name="keys")
app.add_typer(backup.app, name="backup")
app.add_typer(revoke.app, name="revocation")
app.command(help=revoke.HELP, epilog=revoke.EPILOG)(revoke.revoke)

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")]
BeyondLoopback = Annotated[
    bool,
    typer.Option(
        "--listen-beyond-loopback-in-plain-http",
        help="Listen where others can reach it, readable for all on the way: behind a TLS proxy.",
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="postgresql+asyncpg://...; without it SQLite in the state folder."),
]


DEFAULT_DOOR = "127.0.0.1:9464"
Door = Annotated[
    str,
    typer.Option("--at", envvar="STRONGROOM_METRICS", help="What the sidecar's --metrics says."),
]


@app.command()
def serve(
    state: State = DEFAULT_STATE / "service",
    host: Host = "127.0.0.1",
    port: Port = 8420,
    database_url: DatabaseUrl = None,
    *,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Certificate (PEM) with its chain; without it plain HTTP.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key; not readable for all.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Take only clients with a certificate of this authority.")
    ] = None,
    listen_beyond_loopback_in_plain_http: BeyondLoopback = False,
) -> None:
    """Run the control plane: registry, keys, grants, revocation, audit."""
    from cli import serve as processes  # noqa: PLC0415 - the server's imports take a second
    from service.tls import check_listen  # noqa: PLC0415

    with told_errors(), startup_errors():
        settings = processes.service_settings(
            state,
            host,
            port,
            database_url,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            # False is "not said here": the environment may have said it.
            listen_beyond_loopback_in_plain_http=listen_beyond_loopback_in_plain_http or None,
        )
        check_listen(settings)
        keep_private()
        processes.log_to_stderr()
        processes.serve(settings, console)


@app.command()
def sidecar(
    state: State = DEFAULT_STATE / "sidecar",
    service: Annotated[str, typer.Option(help="Where the service listens.")] = DEFAULT_URL,
    socket: Annotated[
        Path, typer.Option(help="The Unix socket for engines; its folder is made 0700.")
    ] = DEFAULT_STATE / "run" / "sidecar.sock",
    engine: Annotated[
        list[str] | None,
        typer.Option(help="An engine's name: its token file is made on first use; repeatable."),
    ] = None,
    nvme: Annotated[
        Path | None, typer.Option(help="Folder of the NVMe tier; without it there is none.")
    ] = None,
    nvme_bytes: Annotated[int | None, typer.Option(help="Size of the NVMe tier.")] = None,
    host_bytes: Annotated[int | None, typer.Option(help="Size of the host tier.")] = None,
    join_token_file: Annotated[
        Path | None, typer.Option(help="One-time join token, for the first start.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Metrics and status on 127.0.0.1:PORT or unix:/PATH; else nowhere."),
    ] = None,
    operator_token_file: Annotated[
        Path | None,
        typer.Option(help="Token for clearing breakers; the file is made on first use."),
    ] = None,
) -> None:
    """Run the sidecar beside the engines of this node.

    Every other setting is an environment variable, STRONGROOM_SIDECAR_<NAME>; see
    docs/operations.md.
    """
    from cli import serve as processes  # noqa: PLC0415
    from cli.api import read_token  # noqa: PLC0415

    with told_errors(), startup_errors():
        keep_private()
        processes.log_to_stderr()
        tokens = socket.parent / "engines"
        for name in engine or ["engine"]:
            processes.engine_token(tokens, name)
        join = None
        if join_token_file is not None and join_token_file.exists():
            join = read_token(join_token_file)
        if operator_token_file is not None:
            processes.operator_token(operator_token_file)
        settings = processes.sidecar_settings(
            state_directory=state,
            service_url=service,
            socket_path=socket,
            engine_tokens=tokens,
            nvme_path=nvme,
            nvme_bytes=nvme_bytes,
            host_bytes=host_bytes,
            join_token=join,
            metrics_listen=metrics,
            operator_token_file=operator_token_file,
        )
        processes.run_sidecar(settings, console)


@app.command()
def up(state: State = DEFAULT_STATE, port: Port = 8420) -> None:
    """Run service and sidecar together on this machine, and say how to connect vLLM."""
    from cli import serve as processes  # noqa: PLC0415

    with told_errors(), startup_errors():
        keep_private()
        processes.log_to_stderr()
        place = processes.Embedded(state)
        settings = processes.service_settings(place.service, "127.0.0.1", port, None)
        processes.up(settings, place, console)


@app.command()
def token(
    subject: Annotated[str, typer.Argument(help="Who the token is for.")],
    role: Annotated[
        list[str],
        typer.Option(help="operator, tenant_admin, auditor, gateway or subject; repeatable."),
    ],
    tenant_id: Annotated[
        str, typer.Option("--tenant", help="The tenant's component id; none for an operator.")
    ] = "",
    life_s: Annotated[int, typer.Option(min=1, help="Seconds that it lives.")] = 3600,
    state: State = DEFAULT_STATE / "service",
    out: Annotated[Path | None, typer.Option(help="Write it to this file (0600).")] = None,
) -> None:
    """Mint a bearer token with the embedded issuer's key, for whoever may read that key."""
    from cli import serve as processes  # noqa: PLC0415
    from cli import token as tokens  # noqa: PLC0415

    with told_errors():
        settings = processes.service_settings(state, "127.0.0.1", 8420, None)
        minted = tokens.mint(settings, subject, tenant_id, role, life_s)
        if out is None:
            typer.echo(minted)
        else:
            write_private(out, minted)
            console.print(f"written to {out}", highlight=False)


@app.command("join-token")
def join_token(
    name: Annotated[str, typer.Option(help="The sidecar's name.")],
    out: Annotated[Path, typer.Option(help="Write the token to this file (0600).")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
) -> None:
    """Make a one-time token with which one sidecar enrols."""

    with api(url, token_file) as client:
        answer = client.post("/v1/sidecars/join-tokens", {"name": name})
        write_private(out, answer["join_token"])
        console.print(f"written to {out}", highlight=False)


@app.command()
def ready(url: Url = DEFAULT_URL) -> None:
    """Exit with 0 if the service is ready, for health checks."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=3.0, verify=system_tls())
    except httpx.HTTPError as error:
        console.print(f"not reachable: {type(error).__name__}")
        raise typer.Exit(7) from error
    if not answer.is_success:
        console.print(answer.text, highlight=False)
        raise typer.Exit(7)
    console.print("ready")


@app.command()
def status(
    at: Door = DEFAULT_DOOR,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a sidecar: tiers, pressure, engines, breakers, and which action is in force."""
    from cli import status as sidecars  # noqa: PLC0415

    with told_errors(), sidecars.door(at) as client:
        found = sidecars.state(client)
        if as_json:
            console.print_json(data=found)
        else:
            sidecars.show(found, console)


@app.command()
def clear(
    breaker: Annotated[str, typer.Argument(help="Its name, as `strongroom status` shows it.")],
    operator_token_file: Annotated[
        Path, typer.Option(help="The file that the sidecar's --operator-token-file names.")
    ],
    at: Door = DEFAULT_DOOR,
) -> None:
    """Clear a breaker that has tripped, once you have looked into its evidence."""
    from cli import status as sidecars  # noqa: PLC0415

    with told_errors(), sidecars.door(at) as client:
        sidecars.clear(client, breaker, operator_token_file)
        console.print(f"{breaker} is armed again", highlight=False)


@app.command()
def verify(
    certificate: Annotated[
        Path, typer.Argument(help="The certificate, in any of its forms: *.jws, *.json, *.html.")
    ],
    keys: Annotated[
        Path, typer.Option(help="The service's public keys: the answer of GET /v1/keys.")
    ],
) -> None:
    """Verify a revocation's certificate with the public key alone, offline.

    Exit code 0: it holds; 1: it does not, and why; 2: a file cannot be read.
    """
    from cli.verify import verify as run  # noqa: PLC0415

    with told_errors():
        if not run(certificate, keys, console):
            raise typer.Exit(1)


@app.command()
def doctor(
    state: State = DEFAULT_STATE,
    url: Annotated[str | None, typer.Option(help="Check this service too.")] = None,
    socket: Annotated[Path | None, typer.Option(help="Check this sidecar's socket too.")] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="Check this interpreter's environment for vLLM too.")
    ] = None,
) -> None:
    """Check this machine and say what to fix. Exit code 1 if something will not work."""
    from cli.doctor import Health, Place, examine  # noqa: PLC0415

    colours = {Health.OK: "green", Health.WARN: "yellow", Health.FAIL: "red"}
    failed = False
    for finding in examine(Place(state, url, socket, engine_python)):
        failed |= finding.health is Health.FAIL
        console.print(f"[{colours[finding.health]}]{finding.health:4}[/] {finding.check}: ", end="")
        console.print(finding.seen, markup=False, highlight=False)
        if finding.advice and finding.health is not Health.OK:
            console.print(f"       {finding.advice}", style="dim", markup=False, highlight=False)
    if failed:
        raise typer.Exit(1)


@app.command()
def demo(
    engine_python: Annotated[
        Path, typer.Option(help="The interpreter of the engine's environment.")
    ] = Path(".venv-engine/bin/python"),
    model: Annotated[Path, typer.Option(help="The dense model folder.")] = Path(
        "build/models/smollm2-135m-f32"
    ),
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("build/demo.json"),
) -> None:
    """The main job on a real engine: every promise made and checked, in about six minutes."""
    from cli.demo.command import run_demo  # noqa: PLC0415

    with told_errors():
        if not run_demo(engine_python.absolute(), model.absolute(), out, console):
            raise typer.Exit(1)


@contextlib.contextmanager
def startup_errors() -> Iterator[None]:
    """An address in use and the like, without a traceback."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = _first(group)  # what a task group carried out: the first says it all
        if not isinstance(error, OSError):
            raise error from group
    except OSError as alone:
        error = alone
    else:
        return
    console.print(f"strongroom: {error.strerror or error}", style="red", markup=False)
    raise typer.Exit(7) from error


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in a tree of groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> None:
    """Entry point of the distribution."""
    app()


if __name__ == "__main__":
    main()
