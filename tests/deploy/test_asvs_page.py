"""docs/asvs.md: every item names a test that exists, or a line of the threat model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
ITEMS: Final = (
    "8.2.1", "8.2.2", "8.3.2", "8.3.3", "8.4.1", "9.1.2", "9.1.3", "9.2.3", "11.1.1", "11.2.4",
    "11.3.3", "11.3.4", "12.1.3", "12.3.5", "13.3.1", "14.2.7", "15.4.2", "16.3.2", "16.4.2",
    "16.5.3",
)  # fmt: skip
ROWS: Final = {
    cells[1].strip(): cells[3].strip()
    for line in (ROOT / "docs" / "asvs.md").read_text().splitlines()
    if re.match(r"\| \d+\.\d+\.\d+ \|", line)
    for cells in (line.split("|"),)
}
TEST: Final = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
LINE: Final = re.compile(r'threat model: "([^"]+)"')


def plain(text: str) -> str:
    """Without marks and line breaks."""
    return re.sub(r"\s+", " ", text.replace("**", ""))


def test_the_page_has_every_item_once_in_order() -> None:
    assert tuple(ROWS) == ITEMS


@pytest.mark.parametrize("item", ITEMS)
def test_an_item_is_held_by_a_test_or_a_line(item: str) -> None:
    tests, lines = TEST.findall(ROWS[item]), LINE.findall(ROWS[item])
    assert tests or lines
    for path, name in tests:
        assert re.search(rf"def {name}\b", (ROOT / path).read_text()), name
    page = plain((ROOT / "docs" / "threat-model.md").read_text())
    for line in lines:
        assert line in page, line
