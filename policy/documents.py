"""A policy as a document, YAML or CSV: read whole or refused whole, with every error's line.

Rules:
- A document is rules, roles and test cases. Memberships in groups are no part of it.
- What is read is checked as at every other door (`policy.rules`, `policy.conditions`), and as a
  set: no two equal, no cycle, no links that are too deep. Nothing is repaired, nothing ignored.
- Each error names its line and field and never repeats what stood there. Up to `ERRORS_MAX` are
  told; more are counted.
- What is written reads back as the same set, in one order, so that two exports can be compared.
- In CSV several values of a field are separated by `;`. No value begins with what a spreadsheet
  takes for a formula: no name may.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from policy.cases import CASES_MAX, Case, context_fields, parse_context
from policy.conditions import ALWAYS, Condition, Sensitivity, fields_of, parse_condition
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule, check_rules, checking, parse_rule
from policy.yaml_tree import BYTES_MAX, BadYaml, Fields, Items, Node, Text, reading_yaml
from strongroom.errors import Misuse

_Result = TypeVar("_Result")
VERSION: Final = "1"
ERRORS_MAX: Final = 1000
_STEP: Final = 16
_HEAD: Final = "strongroom_policy"
_RULE: Final = ("subject", "action", "resource", "effect")
_CONDITION: Final = ("purposes", "models", "window", "sensitivity_max", "sensitivity_above")
_WINDOW: Final = ("zone", "start", "end", "days")
_CONTEXT: Final = ("purpose", "model", "sensitivity", "at")
_CASE: Final = ("name", "subject", "action", "resource", "expect")
_COLUMNS: Final = (
    "kind", "subject", "action", "resource", "effect", "role", "purposes", "models", "zone",
    "start", "end", "days", "sensitivity_max", "sensitivity_above", "name", "expect", *_CONTEXT,
)  # fmt: skip
_LISTS: Final = ("purposes", "models", "days")


class Form(StrEnum):
    """How a document is written."""

    YAML = "yaml"
    CSV = "csv"


@dataclass(frozen=True, slots=True, order=True)
class LineError:
    """What is wrong in one line."""

    line: int
    field: str
    detail: str


class PolicyInvalid(Misuse):
    """A policy document is refused, and nothing of it taken."""

    code = "policy_invalid"

    def __init__(self, errors: Iterable[LineError]) -> None:
        found = sorted(set(errors))
        first = found[0]
        super().__init__(
            f"{len(found)} errors; line {first.line}: {first.detail}", field=f"line {first.line}"
        )
        self.count = len(found)
        self.errors = tuple(found[:ERRORS_MAX])


@dataclass(frozen=True, slots=True)
class PolicyDocument:
    """A checked set."""

    rules: frozenset[Rule] = frozenset()
    links: frozenset[Link] = frozenset()
    cases: frozenset[Case] = frozenset()


class _Reading:
    """What was read so far, with the line of each, and what was wrong."""

    def __init__(self) -> None:
        self.errors: list[LineError] = []
        self.rules: dict[Rule, int] = {}
        self.links: dict[Link, int] = {}
        self.cases: dict[str, tuple[int, Case]] = {}

    def wrong(self, line: int, field: str, detail: str) -> None:
        self.errors.append(LineError(line, field, detail))

    def attempt(self, line: int, read: Callable[[], None]) -> None:
        try:
            read()
        except Misuse as error:
            self.wrong(line, error.field or "", error.message)

    def rule(self, line: int, rule: Rule) -> None:
        if rule in self.rules:
            self.wrong(line, "rules", f"this rule is in line {self.rules[rule]} already")
        self.rules.setdefault(rule, line)

    def link(self, line: int, link: Link) -> None:
        if not link.parent.startswith("role:"):
            raise Misuse("role must be role:<name>", field="role")
        if link in self.links:
            self.wrong(line, "roles", f"this role is in line {self.links[link]} already")
        self.links.setdefault(link, line)

    def case(self, line: int, case: Case) -> None:
        if case.name in self.cases:
            self.wrong(line, "name", f"a case in line {self.cases[case.name][0]} has this name")
        self.cases.setdefault(case.name, (line, case))

    def finish(self) -> Generator[None, None, PolicyDocument]:
        """The set. Raises `PolicyInvalid`."""
        if len(self.cases) > CASES_MAX:
            self.wrong(1, "tests", f"at most {CASES_MAX} test cases")
        if not self.errors:
            yield from self._check_set()
        if self.errors:
            raise PolicyInvalid(self.errors)
        cases = frozenset(case for _, case in self.cases.values())
        return PolicyDocument(frozenset(self.rules), frozenset(self.links), cases)

    def _check_set(self) -> Generator[None]:
        try:
            yield from checking(self.rules, self.links)
        except Misuse as error:
            self.wrong(self._line_of_links(), error.field or "", error.message)

    def _line_of_links(self) -> int:
        """The line of the link with which they became too deep or a cycle."""
        listed = sorted(self.links, key=lambda link: self.links[link])
        low, high = 0, len(listed)
        while low < high:
            middle = (low + high) // 2
            try:
                check_rules((), listed[: middle + 1])
            except Misuse:
                high = middle
            else:
                low = middle + 1
        return self.links[listed[low]] if low < len(listed) else 1


def read(form: Form, text: str) -> PolicyDocument:
    """The policy of a document. Raises `PolicyInvalid` with every error's line."""
    return finished(reading(form, text))


def write(form: Form, policy: PolicyDocument) -> str:
    """The document of a policy."""
    return finished(writing(form, policy))


def reading(form: Form, text: str) -> Generator[None, None, PolicyDocument]:
    """`read` in steps."""
    found = _Reading()
    if len(text.encode()) > BYTES_MAX:
        raise PolicyInvalid([LineError(1, "document", f"at most {BYTES_MAX} bytes")])
    match form:
        case Form.YAML:
            yield from _read_yaml(text, found)
        case Form.CSV:
            yield from _read_csv(text, found)
    return (yield from found.finish())


def writing(form: Form, policy: PolicyDocument) -> Generator[None, None, str]:
    """`write` in steps."""
    match form:
        case Form.YAML:
            return (yield from _write_yaml(policy))
        case Form.CSV:
            return (yield from _write_csv(policy))


def finished(steps: Generator[None, None, _Result]) -> _Result:
    """What `steps` returns, when all of them were taken."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: _Result = stop.value
            return result


# YAML


def _read_yaml(text: str, reading: _Reading) -> Generator[None]:
    try:
        root = yield from reading_yaml(text)
    except BadYaml as error:
        reading.wrong(error.line, "document", error.message)
        return
    if not isinstance(root, Fields):
        reading.wrong(root.line, "document", "the document is a mapping")
        return
    _check_keys(root, (_HEAD, "rules", "roles", "tests"), reading)
    head = root.fields.get(_HEAD)
    if head is None or not isinstance(head[1], Text) or head[1].value != VERSION:
        reading.wrong(root.line if head is None else head[0], _HEAD, f"must be {VERSION}")
    for entry in _entries(root, "rules", reading):
        _check_keys(entry, (*_RULE, *_CONDITION), reading)
        reading.attempt(entry.line, lambda e=entry: reading.rule(e.line, _rule(e)))  # type: ignore[misc]
        yield
    for entry in _entries(root, "roles", reading):
        _check_keys(entry, ("subject", "role"), reading)
        reading.attempt(
            entry.line,
            lambda e=entry: reading.link(e.line, Link(_text(e, "subject"), _text(e, "role"))),  # type: ignore[misc]
        )
    for entry in _entries(root, "tests", reading):
        _check_keys(entry, (*_CASE, *_CONTEXT), reading)
        reading.attempt(
            entry.line,
            lambda e=entry: reading.case(  # type: ignore[misc]
                e.line, _case({n: _text(e, n) for n in (*_CASE, *_CONTEXT) if n in e.fields})
            ),
        )


def _entries(root: Fields, name: str, reading: _Reading) -> list[Fields]:
    if name not in root.fields:
        return []
    line, node = root.fields[name]
    if not isinstance(node, Items):
        reading.wrong(line, name, f"{name} is a list")
        return []
    found = []
    for item in node.items:
        if isinstance(item, Fields):
            found.append(item)
        else:
            reading.wrong(item.line, name, "each of them is a mapping")
    return found


def _check_keys(node: Fields, known: tuple[str, ...], reading: _Reading) -> None:
    for name, (line, _) in node.fields.items():
        if name not in known:
            reading.wrong(line, "key", f"this key is not one of {', '.join(known)}")


def _text(node: Fields, name: str) -> str:
    _, value = node.fields.get(name, (0, None))
    if not isinstance(value, Text):
        raise Misuse(f"{name} must be there, as text", field=name)
    return value.value


def _rule(node: Fields) -> Rule:
    fields: dict[str, object] = {
        name: _plain(node.fields[name][1]) for name in _CONDITION if name in node.fields
    }
    condition = parse_condition(fields) if fields else ALWAYS
    subject, action, resource, effect = (_text(node, name) for name in _RULE)
    return parse_rule(subject, action, resource, effect, condition=condition)


def _plain(node: Node) -> object:
    match node:
        case Text():
            return node.value
        case Items():
            return [_plain(item) for item in node.items]
        case Fields():
            return {name: _plain(value) for name, (_, value) in node.fields.items()}


def _write_yaml(policy: PolicyDocument) -> Generator[None, None, str]:
    """One entry a line: what differs between two exports is whole lines."""
    lines = [f"{_HEAD}: {VERSION}"]
    for name, entries in (
        ("rules", map(_rule_fields, _rules(policy))),
        ("roles", ({"subject": e.member, "role": e.parent} for e in sorted(policy.links))),
        ("tests", map(_case_fields, _cases(policy))),
    ):
        head = len(lines)
        lines.append(f"{name}:")
        for number, entry in enumerate(entries):
            lines.append(f"  - {_flow(entry)}")
            if number % _STEP == _STEP - 1:
                yield
        if len(lines) == head + 1:
            lines[head] = f"{name}: []"
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    """A value in flow style. A quoted JSON text is a YAML text to every reader."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_flow(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    return json.dumps(value)


# CSV


def _read_csv(text: str, reading: _Reading) -> Generator[None]:
    rows = csv.reader(io.StringIO(text), strict=True)
    begins = 1
    try:
        if tuple(next(rows, ())) != _COLUMNS:
            reading.wrong(1, "header", f"the first line must be {','.join(_COLUMNS)}")
            return
        begins = rows.line_num + 1
        for values in rows:
            line, begins = begins, rows.line_num + 1
            if not values:
                continue
            if len(values) != len(_COLUMNS):
                reading.wrong(line, "row", f"a row has {len(_COLUMNS)} values")
                continue
            given = {name: value for name, value in zip(_COLUMNS, values, strict=True) if value}
            reading.attempt(line, lambda n=line, g=given: _csv_row(n, g, reading))  # type: ignore[misc]
            yield
    except csv.Error:
        reading.wrong(begins, "row", "this is not CSV")


def _csv_row(line: int, given: dict[str, str], reading: _Reading) -> None:
    kind = given.pop("kind", "")
    match kind:
        case "rule":
            window: dict[str, str] = {n: given.pop(n) for n in _WINDOW if n in given}
            fields: dict[str, object] = {
                name: given.pop(name) for name in _CONDITION if name in given
            }
            if window:
                fields["window"] = _split(window)
            condition = parse_condition(_split(fields)) if fields else ALWAYS
            subject, action, resource, effect = (given.pop(name, "") for name in _RULE)
            _none_left(given)
            rule = parse_rule(subject, action, resource, effect, condition=condition)
            reading.rule(line, rule)
        case "role":
            link = Link(given.pop("subject", ""), given.pop("role", ""))
            _none_left(given)
            reading.link(line, link)
        case "test":
            taken: dict[str, str] = {
                name: given.pop(name) for name in (*_CASE, *_CONTEXT) if name in given
            }
            _none_left(given)
            reading.case(line, _case(taken))
        case _:
            raise Misuse("kind must be rule, role or test", field="kind")


def _split(fields: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value.split(";") if name in _LISTS and isinstance(value, str) else value
        for name, value in fields.items()
    }


def _none_left(given: Mapping[str, str]) -> None:
    if given:
        name = next(iter(given))
        raise Misuse(f"{name} has no place in a row of this kind", field=name)


def _write_csv(policy: PolicyDocument) -> Generator[None, None, str]:
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for rule in _rules(policy):
        fields = _rule_fields(rule)
        window = fields.pop("window", {})
        assert isinstance(window, dict)
        writer.writerow({"kind": "rule", **_joined(fields), **_joined(window)})
        yield
    for link in sorted(policy.links):
        writer.writerow({"kind": "role", "subject": link.member, "role": link.parent})
    for case in _cases(policy):
        writer.writerow({"kind": "test", **_case_fields(case)})
    return out.getvalue()


def _joined(fields: Mapping[str, object]) -> dict[str, object]:
    return {
        name: ";".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in fields.items()
    }


# Both


def _rules(policy: PolicyDocument) -> list[Rule]:
    return sorted(policy.rules, key=lambda rule: rule.sort_key)


def _cases(policy: PolicyDocument) -> list[Case]:
    return sorted(policy.cases, key=lambda case: case.name)


def _rule_fields(rule: Rule) -> dict[str, object]:
    return {
        "subject": rule.subject,
        "action": rule.action.value,
        "resource": rule.resource,
        "effect": rule.effect.value,
        **_condition_fields(rule.condition),
    }


def _condition_fields(condition: Condition) -> dict[str, object]:
    return dict(fields_of(condition)) if condition else {}


def _case_fields(case: Case) -> dict[str, object]:
    return {
        "name": case.name,
        "subject": case.subject,
        "action": case.action.value,
        "resource": case.resource,
        "expect": case.expect.value,
        **context_fields(case.context),
    }


def _case(given: Mapping[str, str]) -> Case:
    missing = next((name for name in _CASE if name not in given), None)
    if missing is not None:
        raise Misuse(f"{missing} must be there, as text", field=missing)
    try:
        action = Permission(given["action"])
    except ValueError as error:
        raise Misuse("action is not a permission", field="action") from error
    try:
        expect = Effect(given["expect"])
    except ValueError as error:
        raise Misuse("expect must be allow or deny", field="expect") from error
    level = given.get("sensitivity")
    if level is not None and level not in set(Sensitivity):
        raise Misuse("sensitivity is no level", field="sensitivity")
    context = parse_context(
        given.get("purpose"),
        given.get("model"),
        None if level is None else Sensitivity(level),
        given.get("at"),
    )
    return Case(given["name"], given["subject"], action, given["resource"], expect, context)
