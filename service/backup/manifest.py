"""What a backup says of itself, signed by the service's own key.

A backup is a private folder with two files: `manifest.jws`, and the database as `database.db` (a
whole SQLite file) or `database.jsonl` (every row, for PostgreSQL). The manifest binds the
second's digest to where the invalidation log stood, so that a start after a restore can tell a
journal that is older than the backup from one that goes on from it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from policy.signing import Signer, Verifier
from strongroom.canonical import canonical_json
from strongroom.control import Typ
from strongroom.errors import Corrupt, Missing, Refused

VERSION: Final = 1
MANIFEST: Final = "manifest.jws"
FILES: Final = {"sqlite": "database.db", "postgresql": "database.jsonl"}
_CHUNK: Final = 1024 * 1024


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The payload. It holds no key and no secret."""

    version: int
    id: str
    issuer: str
    made_at: str
    dialect: str
    migration: str
    epoch: str
    seq: int
    entry_hash: str
    position: int
    """Log entries of all epochs."""
    keks: tuple[tuple[str, int], ...]
    """KEK versions without which something that lives in it does not open."""
    rows: int
    sha256: str
    size_bytes: int


def sign(manifest: Manifest, signer: Signer) -> str:
    """The text of `manifest.jws`."""
    return signer.sign(Typ.BACKUP, canonical_json(msgspec.to_builtins(manifest)))


def read(folder: Path, verifier: Verifier) -> Manifest:
    """The manifest in `folder`, if this service signed it. Raises `Missing` or `Corrupt`."""
    try:
        text = (folder / MANIFEST).read_text()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Missing(f"there is no backup in {folder}", field="backup") from error
    except UnicodeError as error:
        raise Corrupt("the backup's manifest is damaged", field="backup") from error
    try:
        payload = verifier.verify(Typ.BACKUP, text.strip())
        manifest = msgspec.json.decode(payload, type=Manifest)
    except Refused as error:
        raise Corrupt(
            "the backup's manifest was not signed by this service's key", field="backup"
        ) from error
    except msgspec.DecodeError as error:
        raise Corrupt("the backup's manifest is damaged", field="backup") from error
    if manifest.version != VERSION or manifest.dialect not in FILES:
        raise Corrupt("the backup's version is not known here", field="backup")
    return manifest


def check_file(folder: Path, manifest: Manifest) -> Path:
    """The database's file, if it is the one that the manifest is about. Raises `Corrupt`."""
    path = folder / FILES[manifest.dialect]
    if not path.is_file():
        raise Corrupt(f"the backup lacks {path.name}", field="backup")
    if path.stat().st_size != manifest.size_bytes or digest(path) != manifest.sha256:
        raise Corrupt(f"{path.name} is not the one that the manifest is about", field="backup")
    return path


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            found.update(part)
    return found.hexdigest()
