"""`strongroom revoke`: make something unreadable everywhere, and get the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.api import Api


def revoke(
    client: Api, body: dict[str, Any], certificate: Path | None, console: Console
) -> dict[str, Any]:
    """Revoke, wait until it is in force everywhere, and write the certificate."""
    with console.status("revoking; in force within one lease ..."):
        answer: dict[str, Any] = client.post("/v1/revocations", body)
    table = Table("sidecar", "state", "at", box=None, header_style="bold")
    for sidecar in answer.get("sidecars", []):
        table.add_row(
            str(sidecar.get("name", "")), str(sidecar.get("state", "")), str(sidecar.get("at"))
        )
    console.print(f"revocation {answer['id']}: {answer['state']}", highlight=False)
    console.print(table)
    if certificate is not None:
        certificate.write_text(client.text(f"/v1/revocations/{answer['id']}/certificate"))
        console.print(f"certificate in {certificate}", highlight=False)
    return answer
