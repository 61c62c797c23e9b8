"""Key files: 32 raw bytes each, in one directory that only its owner may enter.

`strongroom.private_files` has the rules of writing them; here are those of the directory.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from strongroom.errors import Conflict, Corrupt, Missing, Misuse
from strongroom.private_files import FOLDER_MODE, check_private, create_file, destroy_file

KEY_BYTES: Final = 32


def prepare_directory(directory: Path) -> None:
    """Make `directory` if it is not there, and check it and every file in it."""
    if not directory.exists():
        directory.mkdir(mode=FOLDER_MODE, parents=True)
    check_private(directory, FOLDER_MODE)
    if not directory.is_dir():
        raise Misuse("the key directory is no directory", field="key_directory")
    for path in directory.iterdir():
        check_private(path)


def create(path: Path, key: bytes) -> None:
    """Write a new key file. Raises `Conflict` if it is there."""
    create_file(path, key)


def read(path: Path) -> bytes:
    """The key in `path`. Raises `Missing` or `Corrupt`."""
    try:
        check_private(path)
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
    destroy_file(path)
