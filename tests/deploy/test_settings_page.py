"""docs/operations.md lists every setting of the sidecar with its default, and every breaker."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Final

import pytest
from pydantic.fields import FieldInfo

from sidecar.degrade.conditions import REFUSING, SCOPES, SECURITY, Condition
from sidecar.degrade.pressure import Gauge, Ladder, Ladders
from sidecar.degrade.stance import Action
from sidecar.settings import SidecarSettings

PAGE: Final = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
ROW: Final = re.compile(r"^\| `(\w+)` \| ([^|]*) \| [^|]*\|$", re.MULTILINE)
UNITS: Final = {
    "s": 1.0,
    "KiB": 1024.0,
    "MiB": 1024.0**2,
    "GiB": 1024.0**3,
    "MB/s": 1e6,
}
FIELDS: Final = SidecarSettings.model_fields


def _section(title: str) -> str:
    """The page from one heading to the next of its level."""
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


SETTINGS: Final = _section("Settings").split("\n### Connector\n", 1)[0]
LISTED: Final = dict(ROW.findall(SETTINGS))


def _written(name: str, field: FieldInfo) -> str:
    """How the page writes a default that is no quantity."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    special = {"allowed_uids": (frozenset((os.getuid(),)), "own uid")}
    if name in special:
        expected, text = special[name]
        assert default == expected
        return text
    match default:
        case None:
            return "none"
        case bool():
            return str(default).lower()
        case StrEnum():
            return f"`{default.value}`"
        case str():
            return f"`{default}`"
        case ():
            return "`[]`"
        case {}:
            return "`{}`"
        case _:
            return ""


def test_every_setting_is_listed_once_and_nothing_else() -> None:
    assert sorted(name for name, _ in ROW.findall(SETTINGS)) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_the_default_is_the_one_that_is_written(name: str) -> None:
    field, written = FIELDS[name], LISTED[name]
    plain = _written(name, field)
    if plain:
        assert written == plain
        return
    number, _, unit = written.partition(" ")
    default = field.get_default(call_default_factory=True, validated_data={})
    assert float(number) * UNITS.get(unit, 1.0) == default
    assert unit == "" or unit in UNITS


@pytest.mark.parametrize("name", FIELDS)
def test_the_unit_is_the_one_that_the_name_says(name: str) -> None:
    number, _, unit = LISTED[name].partition(" ")
    if not re.fullmatch(r"[\d.]+", number):
        return
    if "bytes" in name:
        assert unit in {"KiB", "MiB", "GiB", "MB/s"}
    elif name.endswith("_s") and not name.endswith("_per_s"):
        assert unit == "s"
    else:
        assert unit == ""


def test_every_variable_that_the_page_names_is_a_setting() -> None:
    named = set(re.findall(r"STRONGROOM_SIDECAR_([A-Z][A-Z_]+)", PAGE))
    assert named
    assert {name.lower() for name in named} <= set(FIELDS)


def test_every_breaker_is_listed_with_its_kind_and_whom_it_is_about() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ((?:performance|security)[^|]*) \| (\w+) \|", PAGE, re.MULTILINE
    )
    assert rows == [(c.value, _kind(c), SCOPES[c].value) for c in Condition]


def _kind(condition: Condition) -> str:
    if condition not in SECURITY:
        return "performance"
    return "security, refuses" if condition in REFUSING else "security"


def test_every_step_is_listed_with_its_number() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d) \|", _section("Degradation"), re.MULTILINE)
    assert rows == [(action.value, str(action.weight)) for action in Action]


@pytest.mark.parametrize("gauge", [*Gauge, None])
def test_every_ladder_is_as_it_is_written(gauge: Gauge | None) -> None:
    ladders = Ladders()
    name, ladder = "an engine's pages", ladders.engine
    if gauge is not None:
        name, ladder = f"`{gauge.value}`", ladders.gauges[gauge]
    row = next(
        line for line in _section("Degradation").splitlines() if line.startswith(f"| {name} |")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == ", ".join(_rung(gauge, rung) for rung in ladder.rungs)
    assert cells[4] == _times(ladder)


def _rung(gauge: Gauge | None, rung: float) -> str:
    if gauge is Gauge.NVME_ERRORS:  # a share of ten failures a second
        return f"{rung * 10:.0f}"
    return f"{rung * 100:.0f}%"


def _times(ladder: Ladder) -> str:
    return f"{ladder.rise_s:.0f} s, {ladder.rest_s:.0f} s"
