"""The service's own keys, as 32-byte files beside the KEK ring: two of Ed25519, one for MACs.

`service-signing.key` signs grants, leases, log entries and certificates; `token-issuer.key`
signs bearer tokens, so that whoever mints tokens cannot mint grants. `cursor.key` is for the MAC
of cursors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy.signing import Signer, Verifier
from service.keys import files

SERVICE_KEY: Final = "service-signing.key"
TOKEN_KEY: Final = "token-issuer.key"  # noqa: S105 - a file name
CURSOR_KEY: Final = "cursor.key"


def load_signer(directory: Path, name: str) -> Signer:
    """The signer whose key is file `name`, made at the first start."""
    files.prepare_directory(directory)
    return Signer(Ed25519PrivateKey.from_private_bytes(files.read_or_create(directory / name)))


def load_cursor_key(directory: Path) -> bytes:
    """The key of cursors, made at the first start."""
    files.prepare_directory(directory)
    return files.read_or_create(directory / CURSOR_KEY)


def own_verifier(signer: Signer) -> Verifier:
    """Verifies what `signer` signed."""
    return Verifier({signer.kid: signer.public_key})
