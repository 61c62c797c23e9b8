"""Fixtures of the connector's tests."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    # torch warns at its first import where numpy is not installed; it is not needed here.
    warnings.simplefilter("ignore")
    import torch  # noqa: F401


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name (108 bytes at most)."""
    with tempfile.TemporaryDirectory(prefix="sr") as name:
        yield Path(name)
