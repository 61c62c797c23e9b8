"""docs/operations.md tells what each fault does, and names a test that exists for each."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
FAULTS = (
    "host memory pressure",
    "GPU reset",
    "model switch under load",
    "NVMe queue full",
    "ENOSPC",
    "EIO",
    "short read",
    "short write",
    "slow disk",
    "torn record",
    "bit flip in a header field",
    "bit flip in ciphertext",
    "swapped record",
    "replayed record",
    "foreign record",
    "record of a future version",
    "engine killed while it holds staging",
    "sidecar killed at random points under load",
    "clock jump",
    "cancellation storm",
    "control plane gone in a load",
    "revocation racing with load",
    "revocation racing with save",
)
"""What a storage engine has to stand; a fault may have several rows, `fault: which`."""


def rows() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Fault, behaviour, and (file, test) of each row."""
    section = re.search(r"^## Faults\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None, "the page has a section on faults"
    lines = [line for line in section[1].splitlines() if line.startswith("|")][2:]
    found = []
    for line in lines:
        fault, behaviour, tests = (cell.strip() for cell in line.strip("|").split("|"))
        found.append((fault, behaviour, re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)))
    return found


@cache
def defined_in(path: str) -> frozenset[str]:
    """The tests that a file defines at its top level: what is collected."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_a_row(fault: str) -> None:
    assert any(row.split(":")[0] == fault for row, _, _ in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_says_what_happens_and_names_tests_that_exist(
    row: tuple[str, str, list[tuple[str, str]]],
) -> None:
    fault, behaviour, tests = row
    assert fault
    assert behaviour
    assert tests, f"{fault}: a row without a test is a promise"
    for path, name in tests:
        assert name in defined_in(path), f"{path} has no {name}"


def test_no_fault_is_told_twice() -> None:
    named = [fault for fault, _, _ in rows()]
    assert len(set(named)) == len(named)
