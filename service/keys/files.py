"""Key files: 32 raw bytes each, in one directory that only its owner may enter.

Rules:
- The directory has mode 0700 and a file 0600, both owned by the user that runs the service.
  Whatever is wider, or someone else's, stops the start with a message that says what to do.
- A file appears whole or not at all: it is written aside, synced and linked into place.
- A destroyed file is overwritten and synced before it is unlinked.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from strongroom.errors import Conflict, Corrupt, Missing, Misuse

KEY_BYTES: Final = 32
_OTHERS: Final = 0o077


def prepare_directory(directory: Path) -> None:
    """Make `directory` if it is not there, and check it and every file in it."""
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
    check_mode(directory, 0o700)
    if not directory.is_dir():
        raise Misuse("the key directory is no directory", field="key_directory")
    for path in directory.iterdir():
        check_mode(path, 0o600)


def check_mode(path: Path, wanted: int) -> None:
    """Refuse a path that others may open, that another user owns, or that is a link."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise Misuse(f"{path.name} in the key directory is a link: replace it", field=path.name)
    if status.st_uid != os.geteuid():
        raise Misuse(
            f"{path} belongs to user {status.st_uid}: run `chown {os.geteuid()} {path}`",
            field=path.name,
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS:
        raise Misuse(
            f"{path} has mode {mode:04o}, so others may open it: run `chmod {wanted:04o} {path}`",
            field=path.name,
            limit=f"{wanted:04o}",
        )


def create(path: Path, key: bytes) -> None:
    """Write a new key file. Raises `Conflict` if it is there."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            os.write(descriptor, key)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(aside, path)
    except FileExistsError as error:
        raise Conflict("this key file is there already", field=path.name) from error
    finally:
        aside.unlink(missing_ok=True)
    _sync_directory(path.parent)


def read(path: Path) -> bytes:
    """The key in `path`. Raises `Missing` or `Corrupt`."""
    try:
        check_mode(path, 0o600)
        key = path.read_bytes()
    except FileNotFoundError as error:
        raise Missing("a key file is gone", field=path.name) from error
    if len(key) != KEY_BYTES:
        raise Corrupt(f"{path} does not hold {KEY_BYTES} bytes", field=path.name, limit=KEY_BYTES)
    return key


def read_or_create(path: Path) -> bytes:
    """The key in `path`, drawn afresh if the file is not there yet."""
    if not path.exists():
        try:
            create(path, secrets.token_bytes(KEY_BYTES))
        except Conflict:
            # Another process of this installation was faster; its key is the key.
            return read(path)
    return read(path)


def destroy(path: Path) -> None:
    """Overwrite and remove a key file. Idempotent."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        os.write(descriptor, bytes(KEY_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    path.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
