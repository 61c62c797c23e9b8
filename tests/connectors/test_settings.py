"""Settings: an unknown, missing or wrong key stops the engine's start and is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strongroom.connectors.settings import ConnectorSettings
from strongroom.errors import Misuse

GOOD = {"socket": "/run/s", "token_file": "/run/t"}


def test_defaults_need_only_the_two_paths() -> None:
    settings = ConnectorSettings.parse(GOOD)
    assert settings.socket == Path("/run/s")
    assert settings.lookup_deadline_s == 0.2
    assert settings.engine == ""


def test_every_time_can_be_set() -> None:
    settings = ConnectorSettings.parse({**GOOD, "load_deadline_s": 3, "engine": "e1"})
    assert (settings.load_deadline_s, settings.engine) == (3.0, "e1")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sockets": "x"}, "sockets"),
        ({"socket": ""}, "socket"),
        ({"token_file": 3}, "token_file"),
        ({"lookup_deadline_s": 0}, "lookup_deadline_s"),
        ({"lookup_deadline_s": "1"}, "lookup_deadline_s"),
        ({"load_deadline_s": float("inf")}, "load_deadline_s"),
        ({"load_deadline_s": True}, "load_deadline_s"),
        ({"save_deadline_s": 1e9}, "save_deadline_s"),
        ({"engine": 7}, "engine"),
    ],
)
def test_a_bad_key_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(Misuse) as caught:
        ConnectorSettings.parse({**GOOD, **change})
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize("missing", ["socket", "token_file"])
def test_a_missing_path_is_named(missing: str) -> None:
    values = {key: value for key, value in GOOD.items() if key != missing}
    with pytest.raises(Misuse) as caught:
        ConnectorSettings.parse(values)
    assert caught.value.field == missing


def test_layers_are_on_off_or_left_to_the_block() -> None:
    assert ConnectorSettings.parse(GOOD).layers is None
    for given, meant in ((True, True), (False, False), ("auto", None)):
        assert ConnectorSettings.parse(GOOD | {"layers": given}).layers is meant
    for wrong in ("yes", 1, None):
        with pytest.raises(Misuse, match="layers"):
            ConnectorSettings.parse(GOOD | {"layers": wrong})
