"""docs/format.md says what the code does: vectors, frames and their fields, kinds of messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from strongroom.control import Typ
from strongroom.limits import FRAME_BYTES_MAX
from strongroom.wire.frames import EngineFrame, SidecarFrame

KINDS = (*get_args(EngineFrame), *get_args(SidecarFrame))
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "format.md").read_text()
VECTORS = json.loads((ROOT / "tests" / "vectors" / "vectors.json").read_text())


def rows(first_header: str) -> dict[str, str]:
    """Every row of the tables under `first_header`: the first cell's code, and the second cell."""
    found: dict[str, str] = {}
    inside = False
    for line in PAGE.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0] == first_header:
                inside = True
            elif inside and cells[0].startswith("`"):
                found[cells[0].strip("`")] = cells[1]
        else:
            inside = False
    return found


def test_the_pages_vectors_are_the_scripts() -> None:
    shown = rows("name")
    assert len(shown) >= 10
    for name, value in shown.items():
        assert value == f"`{VECTORS[name]}`", name


def frame(kind: type[msgspec.Struct]) -> msgspec.inspect.StructType:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return info


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_lists_every_frame_with_its_fields_in_order(kind: type[msgspec.Struct]) -> None:
    info = frame(kind)
    told = re.sub(r"\([^)]*\)|[\[{][^\]}]*[\]}]+", "", rows("type")[str(info.tag)])
    fields = [cell.partition("=")[0].strip() for cell in told.split(",")]
    assert fields == [field.encode_name for field in info.fields]


def test_the_page_lists_no_other_frame() -> None:
    assert set(rows("type")) == {str(frame(kind).tag) for kind in KINDS}
    assert f"{FRAME_BYTES_MAX:,}" in PAGE


def test_the_page_lists_every_kind_of_signed_message() -> None:
    kinds = {value for name, value in vars(Typ).items() if name.isupper()}
    assert set(rows("typ")) == kinds
