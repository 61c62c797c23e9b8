"""docs/api.md lists the routes that there are."""

from __future__ import annotations

import re
from pathlib import Path

from service.app import create_app
from service.settings import read_settings

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_table_of_the_page_is_the_applications(tmp_path: Path) -> None:
    app = create_app(read_settings({}, state_directory=tmp_path / "state"))
    routes = {
        f"{method.upper()} {path}": operation["summary"]
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    }
    listed = dict(re.findall(r"^\| `([A-Z]+ /\S*)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert listed == routes
