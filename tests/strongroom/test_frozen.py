"""The vocabulary is frozen: what was checked when it was made cannot be changed afterwards."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import strongroom
import strongroom.wire
from strongroom.identity import CacheIdentity, LabelSet

ROOT = Path(__file__).parents[2]


def vocabulary() -> list[type]:
    found: set[type] = set()
    for package in (strongroom, strongroom.wire):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.ispkg:
                continue
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, type) and value.__module__ == module.name:
                    found.add(value)
    return sorted(found, key=lambda kind: kind.__qualname__)


RECORDS = [
    kind
    for kind in vocabulary()
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)
]


def test_the_vocabulary_is_found() -> None:
    assert {LabelSet, CacheIdentity} <= set(RECORDS)
    assert len(RECORDS) > 40


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__qualname__)
def test_every_record_is_frozen_and_has_no_open_namespace(kind: type) -> None:
    if issubclass(kind, msgspec.Struct):
        assert kind.__struct_config__.frozen
    else:
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert "__slots__" in vars(kind)


WRONG = """
from strongroom.grant import GrantClaims
from strongroom.identity import CacheIdentity, LabelSet
from strongroom.spans import GroupSource

def change(one: LabelSet, two: CacheIdentity, three: GroupSource, four: GrantClaims) -> None:
    one.documents = frozenset()
    two.labels = one
    two.tenant = two.model
    three.group = two.tenant
    four.exp = 0
    four.jti = "again"

def lookalike(digits: str) -> LabelSet:
    return LabelSet(frozenset((digits,)), frozenset())
"""


def test_changing_a_record_or_passing_text_for_an_id_does_not_type_check(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    checked = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--no-error-summary",
            "--config-file=", f"--cache-dir={tmp_path / 'cache'}", str(wrong),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    refused = {
        int(line.split(":")[1]) for line in checked.stdout.splitlines() if "wrong.py:" in line
    }
    assert refused == {7, 8, 9, 10, 11, 12, 15}, checked.stdout + checked.stderr
