"""The sidecar's NVMe settings are the store's."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.compose import _store_settings
from sidecar.settings import SidecarSettings


def sidecar_settings(tmp_path: Path, **changes: object) -> SidecarSettings:
    values: dict[str, object] = {
        "state_directory": tmp_path / "state",
        "socket_path": tmp_path / "sock",
        "engine_tokens": tmp_path / "tokens",
    }
    return SidecarSettings(**(values | changes))  # type: ignore[arg-type]


def test_the_sidecars_settings_are_the_stores(tmp_path: Path) -> None:
    made = _store_settings(
        sidecar_settings(
            tmp_path,
            nvme_path=tmp_path / "a",
            nvme_paths=(tmp_path / "b",),
            nvme_write_bytes_per_day=10**9,
            nvme_free_floor_bytes=10**6,
            nvme_queue_depth=3,
        )
    )
    assert made.nvme_folders == (tmp_path / "a", tmp_path / "b")
    limits = made.nvme_limits
    assert (limits.write_bytes_per_day, limits.free_floor_bytes) == (10**9, 10**6)
    assert limits.queue_depth == 3


def test_a_folder_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice"):
        sidecar_settings(tmp_path, nvme_path=tmp_path / "a", nvme_paths=(tmp_path / "a",))
