"""`strongroom status` and `clear`: one sidecar's state, and its breakers, by the operator's door.

The door is what the sidecar's `metrics_listen` says: `127.0.0.1:9464` or `unix:/path`.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.api import ApiProblem, read_token
from strongroom.errors import Misuse, Unavailable

TIMEOUT_S: Final = 5.0
_SHOWN_MAX: Final = 3
_SOCKET_HOST: Final = "sidecar.socket.invalid"
"""Stands for the Unix socket; no name that can be looked up."""
_MEANS: Final = {
    "none": "everything is in order",
    "stop_prefetch": "prefetch is stopped",
    "limit_context": "the longest cached context is lowered",
    "recompute": "nothing is restored; saving goes on",
    "engine_only": "engine-only: nothing is restored and nothing saved",
    "refuse": "refused: not even the engines' own pages are used",
}
_COLOURS: Final = {"armed": "green", "probation": "yellow", "tripped": "red"}


@contextlib.contextmanager
def door(at: str) -> Iterator[httpx.Client]:
    """A client for the door at `at`."""
    transport = None
    url = at if at.startswith("https://") else f"http://{at}"
    nobody = f"no sidecar answers at {at}: start it with --metrics {at}"
    if at.startswith("unix:"):
        path = Path(at.removeprefix("unix:"))
        if not path.is_socket():
            raise Unavailable(nobody, field="at")
        transport = httpx.HTTPTransport(uds=str(path))
        url = f"http://{_SOCKET_HOST}"
    try:
        # No proxy from the environment: what is said here, a token included, is for the door.
        with httpx.Client(
            transport=transport, base_url=url, timeout=TIMEOUT_S, trust_env=False
        ) as client:
            yield client
    except httpx.InvalidURL as error:
        raise Misuse("say 127.0.0.1:PORT or unix:/PATH", field="at") from error
    except httpx.HTTPError as error:
        raise Unavailable(nobody, field="at") from error


def state(client: httpx.Client) -> dict[str, Any]:
    """What `/v1/state` says."""
    found: dict[str, Any] = _told(client.get("/v1/state"))
    return found


def clear(client: httpx.Client, breaker: str, token_file: Path) -> None:
    """Clear one breaker; raises what the sidecar says against it.

    The token goes in clear to a Unix socket and to loopback alone.
    """
    url = client.base_url
    if url.scheme != "https" and url.host != _SOCKET_HOST and not _is_loopback(url.host):
        raise Misuse(
            "the token would go over the network in clear: say https://..., or clear it there",
            field="at",
        )
    headers = {"Authorization": f"Bearer {read_token(token_file)}"}
    _told(client.post(f"/v1/breakers/{breaker}/clear", headers=headers))


def show(found: dict[str, Any], console: Console) -> None:
    """Print a state as tables."""
    gate, action = found["gate"], found["action"]
    console.print(f"sidecar {found['sidecar']}", style="bold", highlight=False)
    serving = "serving" if gate["open"] else f"not serving: {gate['reason']}"
    console.print(serving, style="green" if gate["open"] else "red", markup=False)
    style = "green" if action == "none" else "yellow"
    console.print(f"in force: {action} ({_MEANS.get(action, action)})", style=style, markup=False)
    force = found["in_force"]
    for said, text in (
        (force["prefetch_stopped"], "prefetch is stopped"),
        (force["swap_outs_paused"], "no new swap-outs"),
        (force["disk_admission"] < 1, f"admission to the disk is {force['disk_admission']:.0%}"),
    ):
        if said:
            console.print(f"  {text}", style="yellow", markup=False)
    console.print(_tiers(found["tiers"]))
    console.print(_queues(found))
    if found["engines"]:
        console.print(_engines(found["engines"]))
    console.print(_breakers(found["breakers"]))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tiers(tiers: list[dict[str, Any]]) -> Table:
    table = Table("tier", "blocks", "used", "of", "pinned", "errors", box=None, header_style="bold")
    for tier in tiers:
        table.add_row(
            tier["name"],
            str(tier["blocks"]),
            _size(tier["used_bytes"]),
            _size(tier["capacity_bytes"]),
            _size(tier["pinned_bytes"]),
            str(tier["io_errors"]),
        )
    return table


def _queues(found: dict[str, Any]) -> Table:
    table = Table("queue", "depth", "of", "pressure", box=None, header_style="bold")
    rungs = found["pressure"]
    for queue in found["queues"]:
        name = queue["name"].removeprefix("strongroom-")
        rung = rungs.get("host_queue" if name == "crypto" else "disk_queue")
        table.add_row(name, str(queue["depth"]), str(queue["limit"]), _rung(rung))
    table.add_row("host tier", "", "", _rung(rungs.get("host_tier")))
    table.add_row("nvme errors", "", "", _rung(rungs.get("nvme_errors")))
    table.add_row("transfers", str(found["transfers_in_flight"]), "", "")
    table.add_row("prefetches", str(found["prefetch_pending"]), "", "")
    return table


def _engines(engines: list[dict[str, Any]]) -> Table:
    table = Table("engine", "free pages", "of", "running", "waiting", "in force", box=None,
                  header_style="bold")  # fmt: skip
    for engine in engines:
        table.add_row(
            engine["engine"],
            str(engine["free_pages"]),
            str(engine["pages"]) if engine["pages"] else "unknown",
            str(engine["running"]),
            str(engine["waiting"]),
            engine["action"],
        )
    return table


def _breakers(breakers: list[dict[str, Any]]) -> Table:
    table = Table("breaker", "state", "reads", "trips at", "since", "for", box=None,
                  header_style="bold")  # fmt: skip
    for breaker in breakers:
        reading = breaker["reading"]
        table.add_row(
            breaker["name"],
            # A newer sidecar may know states that this does not.
            Text(breaker["state"], style=_COLOURS.get(breaker["state"], "")),
            "" if reading is None else f"{reading:.3g}",
            f"{breaker['threshold']:.3g}",
            breaker["at"],
            _for_whom(breaker["tripped_for"]),
        )
    return table


def _for_whom(tripped_for: list[str]) -> str:
    """Engines or tenants; an empty name is the node."""
    shown = [about or "the node" for about in tripped_for[:_SHOWN_MAX]]
    more = len(tripped_for) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _rung(rung: int | None) -> str:
    if rung is None:
        return "unknown"
    return "normal" if rung == 0 else f"[yellow]step {rung}[/]"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _told(answer: httpx.Response) -> Any:
    if answer.is_success:
        return answer.json()
    try:
        problem = answer.json()
    except ValueError:
        problem = {}
    raise ApiProblem(answer.status_code, problem if isinstance(problem, dict) else {})
