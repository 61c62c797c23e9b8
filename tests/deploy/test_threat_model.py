"""docs/threat-model.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(
    r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "threat-model.md").read_text()
)


def test_the_page_names_many_defences() -> None:
    assert len(NAMED) > 80
    assert len(set(NAMED)) == len(NAMED)


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_defences_test_exists(path: str, name: str) -> None:
    assert re.search(rf"def {name}\b", (ROOT / path).read_text())
