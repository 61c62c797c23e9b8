"""packaging/audit.py: licences and advisories are judged, and what is not known is not well."""

from __future__ import annotations

import importlib.util
import sys
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _loaded() -> ModuleType:
    place = importlib.util.spec_from_file_location("audit", ROOT / "packaging" / "audit.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    sys.modules["audit"] = module
    place.loader.exec_module(module)
    return module


audit: Any = _loaded()


def told(**headers: str) -> Message:
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return message


GPL = "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"


@pytest.mark.parametrize(
    ("headers", "fits"),
    [
        ({"License_Expression": "MIT"}, True),
        ({"License_Expression": "Apache-2.0 OR BSD-3-Clause"}, True),
        ({"License_Expression": "MIT AND PSF-2.0"}, True),
        ({"License_Expression": "GPL-3.0-only OR MIT"}, True),
        ({"License": "Apache 2.0"}, True),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, True),
        ({"License_Expression": "GPL-3.0-or-later"}, False),
        ({"License_Expression": "AGPL-3.0-only"}, False),
        ({"License_Expression": "MIT AND GPL-2.0-only"}, False),
        ({"License_Expression": "(MIT OR Apache-2.0) AND GPL-2.0-only"}, False),
        ({"License_Expression": "MIT OR Apache-2.0 AND GPL-2.0-only"}, True),
        ({"Classifier": GPL}, False),
        ({"License": "MIT", "Classifier": GPL}, False),
        ({"License": "Proprietary"}, False),
        ({"License": "UNKNOWN"}, False),
        ({"License": ""}, False),
        ({}, False),
    ],
)
def test_a_licence_is_known_and_wanted_or_it_is_refused(
    headers: dict[str, str], fits: bool
) -> None:
    assert audit.licence_of(told(**headers)).fits is fits


def test_an_exception_lets_one_in_and_is_an_error_when_nothing_needs_it() -> None:
    licences = {"odd": audit.Licence(("MPL-2.0",)), "good": audit.Licence(("MIT",))}
    assert audit.unwanted(licences, {"odd": "because"}) == []
    assert audit.unwanted(licences, {}) == ["odd: its licence is MPL-2.0"]
    for name in ("good", "gone"):
        lines = audit.unwanted(licences, {"odd": "because", name: "because"})
        assert lines == [f"{name}: the exception is not needed any more"]


def test_everything_that_is_installed_to_run_has_a_licence_that_fits() -> None:
    found = {each.name.lower(): audit.licence_of(each.metadata) for each in audit.runtime()}
    assert {"fastapi", "cryptography", "starlette", "certifi"} <= set(found), "in any depth"
    assert "pytest" not in found
    assert audit.unwanted(found, audit.EXCEPTIONS) == []
    assert all(audit.EXCEPTIONS.values())


def test_a_flaw_and_a_missing_answer_are_findings_and_a_clean_report_is_none() -> None:
    clean = {"name": "One", "version": "1", "vulns": []}
    flawed = {"name": "two", "version": "2", "vulns": [{"id": "PYSEC-1"}]}
    skipped = {"name": "three", "skip_reason": "not found"}
    assert audit.unsafe({"dependencies": [clean]}, ["one"]) == []
    assert audit.unsafe({"dependencies": [clean, flawed]}, ["one", "two"]) == ["two 2: PYSEC-1"]
    for report in ({"dependencies": [clean, skipped]}, {"dependencies": [clean]}, {}):
        assert any("three" in line for line in audit.unsafe(report, ["three"]))


def test_offline_is_said_aloud_and_a_finding_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(audit.OFFLINE, "1")
    assert audit.main() == 0
    assert "vulnerabilities were NOT looked for" in capsys.readouterr().out
    monkeypatch.setattr(audit, "EXCEPTIONS", {})
    assert audit.main() == 1
    monkeypatch.delenv(audit.OFFLINE)
    monkeypatch.setattr(audit, "vulnerabilities", lambda _: ["not audited"])
    assert audit.main() == 1
    assert "vulnerability: not audited" in capsys.readouterr().out


def test_only_a_database_that_answers_for_nothing_is_unreachable() -> None:
    nothing: dict[str, list[Any]] = {"dependencies": []}
    assert audit.is_unreachable(audit.unsafe(nothing, ["a", "b"]), ["b", "a"])
    assert audit.is_unreachable(["not audited, pip-audit failed: no route to host"], ["a"])
    one: dict[str, Any] = {"dependencies": [{"name": "a", "version": "1", "vulns": []}]}
    assert not audit.is_unreachable(audit.unsafe(one, ["a", "b"]), ["a", "b"]), "b alone is missing"
    flaw = {"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1"}]}]}
    assert not audit.is_unreachable(audit.unsafe(flaw, ["a"]), ["a"])
    assert not audit.is_unreachable([], ["a"])
