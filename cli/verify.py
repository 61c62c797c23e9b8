"""`strongroom verify`: a revocation's certificate, offline.

Nothing is asked of anybody: the certificate and the public keys are all there is.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from policy.certificate_forms import verify_any
from policy.certificates import CertificateInvalid, Finality, Verified
from policy.signing import Verifier, decode_base64url
from strongroom.errors import Misuse


def read_keys(path: Path) -> Verifier:
    """The service's public keys from the answer of `GET /v1/keys`. Raises `Misuse`."""
    try:
        listed = json.loads(path.read_text())["keys"]
        keys = {
            str(key["kid"]): decode_base64url(str(key["key"]), "key")
            for key in listed
            if key["use"] == "service"
        }
    except FileNotFoundError as error:
        raise Misuse(f"there is no file {path}", field="keys") from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise Misuse(f"{path} is not the answer of GET /v1/keys", field="keys") from error
    if not keys:
        raise Misuse(f"{path} holds no key of the service", field="keys")
    return Verifier(keys)


def verify(certificate: Path, keys: Path, console: Console) -> bool:
    """Say whether the certificate holds, and what it proves."""
    verifier = read_keys(keys)
    try:
        text = certificate.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise Misuse(f"{certificate} cannot be read", field="certificate") from error
    try:
        verified = verify_any(text, verifier)
    except CertificateInvalid as error:
        console.print(f"INVALID: {error.message}", style="red", markup=False, soft_wrap=True)
        return False
    _show(verified, console)
    return True


def _show(verified: Verified, console: Console) -> None:
    claims = verified.claims
    target = ", ".join(f"{name} {value}" for name, value in sorted(claims.asked.target.items()))
    console.print(
        f"VALID: {claims.asked.axis} revoked at {claims.committed_at}, in force everywhere at "
        f"{claims.in_force_at}",
        style="green",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("target", target)
    table.add_row("reason", claims.asked.reason)
    table.add_row("asked by", claims.asked.by)
    table.add_row("log entry", f"epoch {claims.epoch}, seq {claims.seq}, {claims.entry_hash}")
    table.add_row("components destroyed", f"{claims.components_total}")
    table.add_row("erasure", _erasure(claims.final.state, claims.final.at))
    for name, proof in (("commit", claims.audit), ("in force", claims.in_force)):
        place = f"{proof.index} of {verified.head.size} in the signed tree"
        table.add_row(f"audit event, {name}", place)
    for sidecar in claims.sidecars:
        table.add_row(f"sidecar {sidecar.name}", f"{sidecar.state} at {sidecar.at}")
    console.print(table)


def _erasure(state: Finality, at: str) -> str:
    match state:
        case Finality.NONE:
            return "no secret was destroyed"
        case Finality.PENDING:
            return f"pending: backups of the key table are covered from {at} on"
        case Finality.FINAL:
            return f"final since {at}"
