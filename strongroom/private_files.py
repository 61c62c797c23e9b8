"""Files that only their owner may read: keys, tokens, positions. The one home of writing them.

Rules:
- A directory has mode 0700 and a file 0600, owned by the user that runs the process. Whatever
  is wider, a link, or someone else's is refused with a message that says what to do, never
  repaired in silence: somebody may have read it.
- A file appears whole or not at all: written aside, synced, and linked or renamed into place.
- A destroyed file is overwritten and synced before it is unlinked.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from strongroom.errors import Conflict, Misuse

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_OTHERS: Final = 0o077


def private_directory(path: Path) -> None:
    """Make `path` 0700, or refuse a folder that others may enter or that is not ours."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & _OTHERS:
        raise Misuse(f"{path} must be ours alone (mode 0700)", field=path.name, limit="0700")


def private_folders(path: Path) -> None:
    """Make a folder, and what is missing above it, with mode 0700; leave what exists as it is."""
    if not path.exists():
        private_folders(path.parent)
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)


def check_private(path: Path, wanted: int = FILE_MODE) -> None:
    """Refuse a path that others may open, that another user owns, or that is a link."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise Misuse(f"{path.name} in {path.parent} is a link: replace it", field=path.name)
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


def read_private(path: Path) -> bytes:
    """The content of a file that nobody else may read; `Misuse` when others may."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & _OTHERS:
            raise Misuse(f"{path.name} has wide permissions", field=path.name, limit="0600")
        return file.read()


def replace_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Put `content` at `path` with mode 0600, whole or not at all."""
    aside = path.with_name(path.name + ".new")
    descriptor = os.open(
        aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
    )
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    aside.replace(path)


def write_private(path: Path, text: str) -> None:
    """`replace_file` with text, making the folders above it that are missing."""
    private_folders(path.parent)
    replace_file(path, text.encode())


def create_file(path: Path, content: bytes) -> None:
    """Write a new file, durably. Raises `Conflict` if there is one of that name."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(aside, flags, FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, path)
    except FileExistsError as error:
        raise Conflict("this key file is there already", field=path.name) from error
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(path.parent)


def destroy_file(path: Path) -> None:
    """Overwrite and remove a file, durably. Idempotent."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make what was created or removed in `path` survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
