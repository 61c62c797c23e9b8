"""Signed entries and how one follows another; pure.

`Chain` is fed entries in order and refuses what does not continue the chain: a bad signature,
a gap, a step back, a fork. The first entry of an epoch stands on the epoch's genesis and is of
kind EPOCH.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

import msgspec

from policy.signing import Signer, Verifier, decode_base64url
from strongroom.control import Typ
from strongroom.errors import Corrupt, Misuse, Refused
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry, LogHead, genesis

_decoder = msgspec.json.Decoder(LogEntry, strict=True)
_EPOCH_BYTES = 16


def new_epoch() -> str:
    """An epoch that was never used: 128 random bits."""
    return secrets.token_hex(_EPOCH_BYTES)


def rfc3339(moment: datetime) -> str:
    """UTC with microseconds: one width, so that texts order as their moments do."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def next_entry(
    head: LogHead,
    at: datetime,
    kind: InvalidationKind,
    *,
    tenant: str = "",
    components: tuple[ComponentId, ...] = (),
    subject: str = "",
    min_revision: int = 0,
    sidecar: str = "",
) -> LogEntry:
    """The entry that follows `head`."""
    return LogEntry(
        epoch=head.epoch,
        seq=head.seq + 1,
        prev=head.hash,
        at=rfc3339(at),
        kind=kind,
        tenant=tenant,
        components=components,
        subject=subject,
        min_revision=min_revision,
        sidecar=sidecar,
    )


def head_of(entry: LogEntry) -> LogHead:
    """Where the log stands after `entry`."""
    return LogHead(entry.epoch, entry.seq, entry.hash())


def empty(epoch: str) -> LogHead:
    """Where a new epoch stands before its first entry."""
    return LogHead(epoch, 0, genesis(epoch))


def sign(entry: LogEntry, signer: Signer) -> str:
    """The compact JWS that travels."""
    return signer.sign(Typ.LOG, entry.payload())


def read(jws: str, verifier: Verifier) -> LogEntry:
    """The entry in `jws`. Raises `Corrupt` for whatever is no canonical entry of this service."""
    try:
        payload = verifier.verify(Typ.LOG, jws)
        entry = _decoder.decode(payload)
    except (Refused, msgspec.DecodeError) as error:
        raise Corrupt("a log entry is not one that this service signed") from error
    if entry.payload() != payload:
        raise Corrupt("a log entry is not in its canonical form")
    return entry


def parse(jws: str) -> LogEntry:
    """The entry in `jws`, its signature unchecked: for one that was checked when it was stored."""
    try:
        _, payload, _ = jws.split(".")
        return _decoder.decode(decode_base64url(payload, "entry"))
    except (ValueError, Misuse, msgspec.DecodeError) as error:
        raise Corrupt("a log entry cannot be read") from error


class Chain:
    """Follows a log through its epochs from the very first entry."""

    def __init__(self, head: LogHead | None = None) -> None:
        self.head = head

    def follow(self, entry: LogEntry) -> None:
        """Step to `entry`, or raise `Corrupt`."""
        head = self.head
        if entry.kind is InvalidationKind.EPOCH:
            if head is not None and entry.epoch == head.epoch:
                raise Corrupt(f"log epoch {entry.epoch} begins twice")
            head = empty(entry.epoch)
        if head is None or entry.epoch != head.epoch:
            raise Corrupt(f"the log enters epoch {entry.epoch} without its first entry")
        if entry.seq != head.seq + 1:
            raise Corrupt(f"the log has entry {entry.seq} where {head.seq + 1} belongs")
        if entry.prev != head.hash:
            raise Corrupt(f"the log forks at entry {entry.seq}")
        self.head = head_of(entry)
