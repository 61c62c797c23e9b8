"""The region directory's manifest: whose records these are, and how long a region is.

- `manifest.json` holds a version, the store's id (16 random bytes) and the region length. It is
  written aside and renamed, so that it is whole or absent.
- The id is in every record's placement: a region file from another directory is foreign.
- One process has the directory at a time, by a lock on `lock`.
- It is the one plain file of this tier, and small: aiofiles reads and writes it. Records go
  through O_DIRECT on the tier's own threads (docs/adr/0005-nvme-tier.md).
"""

from __future__ import annotations

import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiofiles
import msgspec

from strongroom.errors import Conflict, Unavailable

MANIFEST_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    store: str
    region_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """`store` has 16 bytes."""

    store: bytes
    region_bytes: int


async def open_manifest(folder: Path, region_bytes: int) -> Manifest:
    """The directory's manifest, written anew where it is absent or damaged.

    A damaged one makes every record in the directory foreign, which costs the cache and no
    more. Raises `Unavailable` for a version that this program does not know, whose records it
    must not overwrite.
    """
    path = folder / MANIFEST_NAME
    try:
        async with aiofiles.open(path, "rb") as file:
            text = await file.read()
        version = msgspec.json.decode(text, type=dict[str, object]).get("version")
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise Unavailable(
                f"{path} was written by a newer version ({version}); upgrade, or name another "
                "directory",
                field="nvme_path",
                limit=MANIFEST_VERSION,
            )
        fields = msgspec.json.decode(text, type=_Fields)
        store = bytes.fromhex(fields.store)
        if len(store) == 16 and fields.region_bytes > 0:
            return Manifest(store, fields.region_bytes)
    except (FileNotFoundError, msgspec.DecodeError, ValueError):
        pass
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error.strerror}", field="nvme_path") from error
    manifest = Manifest(secrets.token_bytes(16), region_bytes)
    try:
        await _write(path, manifest)
    except OSError as error:
        raise Unavailable(
            f"{path} cannot be written: {error.strerror}; free disk space or name another "
            "directory",
            field="nvme_path",
        ) from error
    return manifest


def prepare_folder(folder: Path) -> int:
    """Make `folder` 0700 and lock it; returns the lock's descriptor, to be closed at the end.

    Raises `Conflict` when another process has it, `Unavailable` when it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(folder / "lock", flags, 0o600)
    except OSError as error:
        raise Unavailable(
            f"{folder} cannot be prepared: {error.strerror}", field="nvme_path"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise Conflict(f"{folder} is in use by another process", field="nvme_path") from error
    return lock


async def _write(path: Path, manifest: Manifest) -> None:
    fields = _Fields(MANIFEST_VERSION, manifest.store.hex(), manifest.region_bytes)
    aside = path.with_suffix(".new")
    async with aiofiles.open(aside, "wb", opener=_private) as file:
        await file.write(msgspec.json.encode(fields))
        await file.flush()
    aside.rename(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
