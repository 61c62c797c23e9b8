"""`make audit`: no runtime distribution with a known vulnerability, and none under a licence that
we do not know or do not want.

Rules:
- Looked at is what `strongroom` and all of its extras need to run, as it is installed here, in
  any depth. Tools for development are no part of what is delivered.
- A licence is an SPDX expression of the distribution, else its classifiers, else its `License`
  text. Every part of an AND, one part of an OR and every classifier has to be in `ALLOWED`.
  GPL, AGPL, LGPL and SSPL are in no list, and what says nothing is refused as unknown.
- `EXCEPTIONS` is the whole list of what is let in all the same, each with its reason. One that
  nothing needs any more is an error, so that the list stays true.
- Vulnerabilities come from pip-audit, which asks PyPI's advisories. A version that the database
  does not answer for is not audited, and what is not audited is not well: it fails closed. Who has
  no network says so with `STRONGROOM_AUDIT_OFFLINE=1`: then only licences are checked, and
  the last line says that vulnerabilities were not. `--unreachable-is-said` is for a CI that may
  or may not have a network: where no advisory at all was answered for, that is said in place of
  failing; one version without an answer among others fails as ever. A release is never made from
  a run that did not look for vulnerabilities.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Final, Protocol

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OFFLINE: Final = "STRONGROOM_AUDIT_OFFLINE"
ROOT: Final = "strongroom"
_NOT_AUDITED: Final = "not audited"

ALLOWED: Final = frozenset(
    {
        "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MIT-0", "PSF-2.0",
        "Python-2.0", "Unlicense", "Zlib",
    }
)  # fmt: skip
_SPDX: Final[Mapping[str, str]] = {
    # What distributions without an SPDX expression call them.
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "ISC License": "ISC",
    "MIT License": "MIT",
}
EXCEPTIONS: Final[Mapping[str, str]] = {
    "certifi": "MPL-2.0 on a list of certificates: it is used unchanged, and binds no other file",
}


class Told(Protocol):
    """What a distribution says of itself: its metadata."""

    def get_all(self, name: str, failobj: None = None) -> list[str] | None: ...


@dataclass(frozen=True, slots=True)
class Licence:
    """`terms` are the SPDX expressions that all apply; none: it says nothing."""

    terms: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether it may be used without an exception."""
        return bool(self.terms) and all(_allows(term) for term in self.terms)

    def __str__(self) -> str:
        return " AND ".join(self.terms) or "unknown"


def licence_of(told: Told) -> Licence:
    """The licence that a distribution's metadata tells."""
    expression = told.get_all("License-Expression")
    if expression:
        return Licence(tuple(expression))
    classifiers = [
        each for each in told.get_all("Classifier") or [] if each.startswith("License :: ")
    ]
    if classifiers:
        return Licence(tuple(dict.fromkeys(_SPDX.get(each, each) for each in classifiers)))
    text = [each.strip() for each in told.get_all("License") or [] if each.strip()]
    # A whole licence in place of its name says nothing that a program should guess from.
    return Licence(tuple(_SPDX.get(each, each.partition("\n")[0]) for each in text))


def _allows(term: str) -> bool:
    """Of an SPDX expression: any part of an OR, every part of an AND. AND binds closer."""
    flat = re.sub(r"[()]", " ", term)
    if flat != term and re.search(r"\bAND\b", flat) and re.search(r"\bOR\b", flat):
        return False  # brackets around a mixture: for a person to read
    ways = re.split(r"\s+OR\s+", flat.strip())
    return any(all(part.strip() in ALLOWED for part in re.split(r"\s+AND\s+", way)) for way in ways)


def runtime() -> Iterator[Distribution]:
    """The installed distributions that the application needs, itself left out."""
    extras = tuple(distribution(ROOT).metadata.get_all("Provides-Extra") or ())
    # torch is an option that brings its own world; who installs it audits that environment.
    waiting = [(ROOT, tuple(each for each in extras if each != "torch"))]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    told: set[str] = set()
    while waiting:
        name, wanted = key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        found = distribution(name)
        if name != ROOT and name not in told:
            told.add(name)
            yield found
        for line in found.requires or []:
            needs = Requirement(line)
            if needs.marker is None or any(
                needs.marker.evaluate({"extra": extra}) for extra in ("", *wanted)
            ):
                waiting.append((canonicalize_name(needs.name), tuple(sorted(needs.extras))))


def unwanted(licences: Mapping[str, Licence], exceptions: Mapping[str, str]) -> list[str]:
    """What is wrong with these licences, a line each."""
    lines = [
        f"{name}: its licence is {licence}"
        for name, licence in sorted(licences.items())
        if not licence.fits and name not in exceptions
    ]
    return lines + [
        f"{name}: the exception is not needed any more"
        for name in sorted(exceptions)
        if name not in licences or licences[name].fits
    ]


def unsafe(
    report: Mapping[str, Sequence[Mapping[str, object]]], pinned: Sequence[str]
) -> list[str]:
    """What a report of pip-audit has against the distributions `pinned`, a line each."""
    lines: list[str] = []
    answered: set[str] = set()
    for each in report.get("dependencies", ()):
        name = canonicalize_name(str(each["name"]))
        if "skip_reason" in each:
            continue
        answered.add(name)
        found = each.get("vulns") or ()
        assert isinstance(found, Sequence)
        lines += [f"{name} {each['version']}: {flaw['id']}" for flaw in found]
    missing = [name for name in pinned if name not in answered]
    if missing:
        lines.append(f"{_NOT_AUDITED}, the advisories did not answer: {', '.join(sorted(missing))}")
    return lines


def is_unreachable(lines: Sequence[str], names: Iterable[str]) -> bool:
    """Whether these lines of `unsafe` and `vulnerabilities` say that nothing was answered for."""
    nobody = f"{_NOT_AUDITED}, the advisories did not answer: {', '.join(sorted(names))}"
    return len(lines) == 1 and (
        lines[0] == nobody or lines[0].startswith(f"{_NOT_AUDITED}, pip-audit failed: ")
    )


def vulnerabilities(found: Sequence[Distribution]) -> list[str]:
    """Ask pip-audit about exactly these versions."""
    names = [canonicalize_name(each.name) for each in found]
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "runtime.txt"
        report = Path(folder) / "report.json"
        listed.write_text("".join(f"{each.name}=={each.version}\n" for each in found))
        done = subprocess.run(  # noqa: S603
            [
                sys.executable, "-m", "pip_audit", "--requirement", str(listed), "--no-deps",
                "--disable-pip", "--progress-spinner", "off", "--format", "json",
                "--output", str(report),
            ],
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        if not report.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return [f"{_NOT_AUDITED}, pip-audit failed: {last}"]
        return unsafe(json.loads(report.read_text()), names)


def main(arguments: Sequence[str] = ()) -> int:
    """Print what is wrong; the exit code says whether something is."""
    found = list(runtime())
    licences = {canonicalize_name(each.name): licence_of(each.metadata) for each in found}
    wrong = [f"licence: {line}" for line in unwanted(licences, EXCEPTIONS)]
    offline = os.environ.get(OFFLINE) == "1"  # noqa: TID251 - a tool, which has no settings
    if not offline:
        flaws = vulnerabilities(found)
        if "--unreachable-is-said" in arguments and is_unreachable(flaws, licences):
            offline = True
        else:
            wrong += [f"vulnerability: {line}" for line in flaws]
    for line in wrong:
        print(line)  # noqa: T201
    checked = "licences alone; vulnerabilities were NOT looked for" if offline else "both"
    print(f"{len(found)} distributions, {len(wrong)} findings ({checked})")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
