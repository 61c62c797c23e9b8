"""Private files: whole or not at all, their owner's alone, gone when they are destroyed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from strongroom.errors import Conflict, Misuse
from strongroom.private_files import (
    check_private,
    create_file,
    destroy_file,
    private_directory,
    private_folders,
    read_private,
    replace_file,
    write_private,
)

SECRET = bytes(range(32))


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("write", [create_file, replace_file])
def test_a_written_file_is_its_owners_alone_whatever_the_umask(
    tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / "key", SECRET)
    finally:
        os.umask(before)
    assert mode(tmp_path / "key") == 0o600
    assert read_private(tmp_path / "key") == SECRET
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_token_makes_the_folders_above_it_private(tmp_path: Path) -> None:
    write_private(tmp_path / "a" / "b" / "token", "t")
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o700, 0o700)
    private_folders(tmp_path / "a")
    private_directory(tmp_path / "a")


def test_a_file_is_created_once(tmp_path: Path) -> None:
    create_file(tmp_path / "key", SECRET)
    with pytest.raises(Conflict):
        create_file(tmp_path / "key", bytes(32))
    assert read_private(tmp_path / "key") == SECRET


def test_a_replacement_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(tmp_path / "key", SECRET)

    def full(descriptor: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        replace_file(tmp_path / "key", bytes(32))
    assert read_private(tmp_path / "key") == SECRET


def test_a_link_put_where_the_file_is_written_aside_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "key.new").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "key", SECRET)
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("wide", [0o640, 0o604, 0o666])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, wide: int) -> None:
    replace_file(tmp_path / "key", SECRET)
    check_private(tmp_path / "key")
    (tmp_path / "key").chmod(wide)
    with pytest.raises(Misuse, match="permissions"):
        read_private(tmp_path / "key")
    with pytest.raises(Misuse, match="chmod 0600"):
        check_private(tmp_path / "key")


def test_a_wide_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide").chmod(0o755)
    with pytest.raises(Misuse, match="0700"):
        private_directory(tmp_path / "wide")


def test_a_destroyed_file_is_overwritten_before_it_goes(tmp_path: Path) -> None:
    replace_file(tmp_path / "key", SECRET)
    os.link(tmp_path / "key", tmp_path / "other-name")
    destroy_file(tmp_path / "key")
    destroy_file(tmp_path / "key")
    assert not (tmp_path / "key").exists()
    assert (tmp_path / "other-name").read_bytes() == bytes(32)
