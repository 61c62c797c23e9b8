"""`strongroom audit verify`: the service recomputes its log; what was kept elsewhere judges it.

The service is not simply believed: the root that it found is held against the heads that the
auditor kept, by consistency proofs that are checked here, with nothing but their hashes.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli.api import Api
from policy.audit_heads import AuditHeadClaims
from policy.transparency import verify_consistency
from strongroom.errors import Misuse, Refused

_HEADS_AT_ONCE = 1000


def verify_log(client: Api, kept: Path | None, console: Console) -> bool:
    """Say whether the log is whole, with a bar while it is recomputed."""
    tokens = [] if kept is None else _read(kept)
    verdict = _recompute(client, tokens[-_HEADS_AT_ONCE:], console)
    if not verdict["intact"]:
        text = f"BROKEN at event {verdict['broken_at']}: {verdict['reason']}"
        console.print(text, style="red", markup=False, soft_wrap=True)
        return False
    size, root = verdict["events"], bytes.fromhex(verdict["root"])
    for token in tokens:
        claims = _claims(token)
        if not _continues(client, claims, size, root):
            text = (
                f"BROKEN: the log does not continue the head of {claims.size} events of {claims.at}"
            )
            console.print(text, style="red", markup=False, soft_wrap=True)
            return False
    console.print(
        f"INTACT: {size} events ({verdict['purged']} purged), {len(tokens)} kept heads, root "
        f"{verdict['root']}",
        style="green",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return True


def _recompute(client: Api, heads: Sequence[str], console: Console) -> dict[str, Any]:
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("verifying", total=None)
        lines = client.lines("/v1/audit/verify", {"heads": list(heads)}, progress="true")
        for line in lines:
            told = json.loads(line)
            progress.update(task, completed=told["events"], total=told["total"])
            if told["verdict"] is not None:
                verdict: dict[str, Any] = told["verdict"]
                return verdict
    raise Refused("the service ended the verification without a verdict")


def _continues(client: Api, claims: AuditHeadClaims, size: int, root: bytes) -> bool:
    if claims.size > size:
        return False
    proof = client.get("/v1/audit/proofs/consistency", old_size=claims.size, size=size)
    steps = [bytes.fromhex(step) for step in proof["path"]]
    try:
        verify_consistency(claims.size, bytes.fromhex(claims.root), size, root, steps)
    except Refused:
        return False
    return True


def _read(kept: Path) -> list[str]:
    """The heads in a folder or a file, the smallest tree first."""
    paths = sorted(kept.glob("*.jws")) if kept.is_dir() else [kept]
    try:
        tokens = [path.read_text().strip() for path in paths]
    except (OSError, UnicodeError) as error:
        raise Misuse(f"{kept} cannot be read", field="heads") from error
    if not tokens:
        raise Misuse(f"{kept} holds no heads", field="heads")
    return tokens


def _claims(token: str) -> AuditHeadClaims:
    """What a head says. Whose it is: the service has checked the signature, or whoever kept it."""
    try:
        payload = token.split(".")[1]
        raw = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
        return msgspec.json.decode(raw, type=AuditHeadClaims)
    except (IndexError, binascii.Error, msgspec.DecodeError) as error:
        raise Misuse("a kept head cannot be read", field="heads") from error
