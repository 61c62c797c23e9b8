"""The state directory: this sidecar's keys, its enrolment and how far it has read the log.

Rules:
- The directory is 0700 and belongs to one process at a time (`flock`); files are 0600.
- Files are replaced whole, so that a crash leaves old or new (`strongroom.private_files`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from policy.signing import Signer
from strongroom.control import EnrolAnswer
from strongroom.errors import Conflict, Corrupt
from strongroom.log import LogHead
from strongroom.private_files import private_directory, read_private, replace_file

_SIGNING_KEY: Final = "signing.key"
_HPKE_KEY: Final = "hpke.key"
_NEXT_KEYS: Final = "keys.next"
_ENROLMENT: Final = "enrolment.json"
_POSITION: Final = "log.json"
_LOCK: Final = "lock"
_KEY_BYTES: Final = 32
_Struct = TypeVar("_Struct")


@dataclass(frozen=True, slots=True, repr=False)
class SidecarKeys:
    """Ed25519 for proofs, X25519 to receive key leases."""

    signer: Signer
    hpke: X25519PrivateKey

    @property
    def hpke_public(self) -> bytes:
        return self.hpke.public_key().public_bytes_raw()


class StateDirectory:
    """Reads and replaces the files of one sidecar."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the directory; raises `Conflict` when another process does."""
        private_directory(self.path)
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Conflict(
                    "another sidecar uses this state directory", field="state_directory"
                ) from error
            yield
        finally:
            os.close(descriptor)

    def keys(self) -> SidecarKeys:
        """The sidecar's keys, made on first use."""
        return _keys_of(self._key(_SIGNING_KEY), self._key(_HPKE_KEY))

    @property
    def signing_key_path(self) -> Path:
        """As old as the keys in force."""
        return self.path / _SIGNING_KEY

    def has_next_keys(self) -> bool:
        """Whether keys were drawn that may or may not be in force."""
        return (self.path / _NEXT_KEYS).exists()

    def next_keys(self) -> SidecarKeys:
        """The keys that will follow, drawn and synced on first use."""
        path = self.path / _NEXT_KEYS
        if not path.exists():
            replace_file(path, os.urandom(2 * _KEY_BYTES))
        return _keys_of(*self._next())

    def take_next_keys(self) -> None:
        """The service has put them in force. Until the last step they are all still there."""
        signing, hpke = self._next()
        replace_file(self.path / _HPKE_KEY, hpke)
        replace_file(self.path / _SIGNING_KEY, signing)
        (self.path / _NEXT_KEYS).unlink()

    def _next(self) -> tuple[bytes, bytes]:
        raw = read_private(self.path / _NEXT_KEYS)
        if len(raw) != 2 * _KEY_BYTES:
            raise Corrupt("the next keys have not 64 bytes", field=_NEXT_KEYS)
        return raw[:_KEY_BYTES], raw[_KEY_BYTES:]

    def _key(self, name: str) -> bytes:
        path = self.path / name
        if not path.exists():
            replace_file(path, os.urandom(_KEY_BYTES))
        raw = read_private(path)
        if len(raw) != _KEY_BYTES:
            raise Corrupt(f"the key file {name} has not 32 bytes", field=name, limit=_KEY_BYTES)
        return raw

    def enrolment(self) -> EnrolAnswer | None:
        """Who this sidecar is to the service; None before it has enrolled."""
        return self._read(_ENROLMENT, EnrolAnswer)

    def write_enrolment(self, answer: EnrolAnswer) -> None:
        replace_file(self.path / _ENROLMENT, msgspec.json.encode(answer))

    def position(self) -> LogHead | None:
        """The last log entry that was applied in an earlier life."""
        return self._read(_POSITION, LogHead)

    def write_position(self, head: LogHead) -> None:
        replace_file(self.path / _POSITION, msgspec.json.encode(head), sync=False)

    def forget_position(self) -> None:
        """Stand on the next verified head, wherever it is."""
        (self.path / _POSITION).unlink(missing_ok=True)

    def _read(self, name: str, kind: type[_Struct]) -> _Struct | None:
        path = self.path / name
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(read_private(path), type=kind)
        except msgspec.DecodeError as error:
            raise Corrupt(f"{name} is damaged", field=name) from error


def _keys_of(signing: bytes, hpke: bytes) -> SidecarKeys:
    return SidecarKeys(
        Signer(Ed25519PrivateKey.from_private_bytes(signing)),
        X25519PrivateKey.from_private_bytes(hpke),
    )
