"""docs/operations.md tells of providers, TLS and limits what the settings say."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from service.auth.providers import KubernetesProvider, OidcProvider, read_providers
from service.settings import ServiceSettings

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
SECTION = PAGE.split("\n## Who may call, and over what\n", 1)[1].split("\n## ", 1)[0]
UNITS = {"s": 1, "MiB": 1024 * 1024}


def test_the_example_of_the_page_is_read_as_it_stands(tmp_path: Path) -> None:
    lines = SECTION.splitlines()
    first = lines.index("    [[oidc]]")
    last = max(number for number, line in enumerate(lines) if line.startswith("    roles"))
    path = tmp_path / "providers.toml"
    path.write_text(textwrap.dedent("\n".join(lines[first : last + 1])))
    oidc, kubernetes = read_providers(path, "strongroom")
    assert isinstance(oidc, OidcProvider)
    assert isinstance(kubernetes, KubernetesProvider)
    assert len(oidc.bindings) == 2
    assert len(kubernetes.bindings) == 1


@pytest.mark.parametrize(
    "row", re.findall(r"^\| (`\w+`[^|]*) \| ([^|]*) \|", SECTION, re.MULTILINE)
)
def test_a_settings_default_is_the_one_that_is_written(row: tuple[str, str]) -> None:
    names, written = row
    for name in re.findall(r"`(\w+)`", names):
        default = ServiceSettings.model_fields[name].default
        number, _, unit = written.strip("`").partition(" ")
        if default is None or isinstance(default, bool):
            assert written == {None: "none", False: "false"}[default]
        elif isinstance(default, str):
            assert number == default
        else:
            assert float(number) * UNITS.get(unit, 1) == default


@pytest.mark.parametrize(
    ("name", "written"),
    [("skew_s", 30), ("life_s_max", 86400), ("keys_fresh_s", 300), ("keys_stale_s", 3600),
     ("refetch_s", 10)],
)  # fmt: skip
def test_a_providers_default_is_the_one_that_is_written(name: str, written: int) -> None:
    assert OidcProvider.model_fields[name].default == written
    assert re.search(rf"`{name}` \({written}\b", SECTION)
