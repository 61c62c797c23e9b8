"""Typed rules and links, checked at the door, so that nothing that Casbin misreads gets in.

Rules:
- Names are `user:<name>`, `group:<component id>` or `role:<name>`, of a small character set: no
  comma, bracket, white space or newline, which corrupt a Casbin load.
- A resource is `<kind>:<id>` or `<kind>:*`, and a rule's kind is its permission's.
- An effect is `allow` or `deny`; Casbin reads any other text as allow.
- A condition (`policy.conditions`) narrows when a rule applies; it is typed, and never text that
  Casbin evaluates.
- A link says that a member has what its parent has: user in group or role, group in role, role
  in role. Links have no cycle and are at most `LINK_DEPTH_MAX` deep: Casbin does not follow
  deeper ones and does not say so.
- No two rules, and no two links, are equal.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from policy.conditions import ALWAYS, Condition, encode_condition
from policy.permissions import Permission
from strongroom.errors import Misuse
from strongroom.limits import NAME_CHARS_MAX

RULES_MAX: Final = 100_000
LINKS_MAX: Final = 1_000_000
LINK_DEPTH_MAX: Final = 9
"""Links from a subject to its farthest role; with the subject they are Casbin's ten levels."""
ANY: Final = "*"

_SUBJECT = re.compile(r"(user|role):[A-Za-z0-9][A-Za-z0-9._@-]*|group:[0-9a-f]{32}")
_RESOURCE = re.compile(r"[a-z_]+:([A-Za-z0-9][A-Za-z0-9._@-]*|\*)")
_PARENTS: Final[Mapping[str, frozenset[str]]] = {
    "user": frozenset(("group", "role")),
    "group": frozenset(("role",)),
    "role": frozenset(("role",)),
}


class Effect(StrEnum):
    """What a rule does to what it matches; a deny wins over every allow."""

    ALLOW = "allow"
    DENY = "deny"


STEP: Final = 16
"""Rules or links that are looked at between two `yield`s of what works in steps."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`subject` may, or may not, do `action` to `resource`, where `condition` holds."""

    subject: str
    action: Permission
    resource: str
    effect: Effect
    condition: Condition = ALWAYS

    def __post_init__(self) -> None:
        check_subject(self.subject, "subject")
        if not isinstance(self.action, Permission):
            raise Misuse("action is not a permission", field="action")
        if not isinstance(self.effect, Effect):
            raise Misuse("effect must be allow or deny", field="effect")
        check_resource(self.resource, self.action)
        encode_condition(self.condition)

    def __str__(self) -> str:
        told = f"{self.effect} {self.subject} {self.action} on {self.resource}"
        return f"{told} {self.condition}" if self.condition else told

    @property
    def sort_key(self) -> tuple[str, str, str, str, str]:
        """One order of all rules."""
        text = encode_condition(self.condition)
        return (self.subject, self.action.value, self.resource, self.effect.value, text)


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """`member` has everything that `parent` has."""

    member: str
    parent: str

    def __post_init__(self) -> None:
        check_subject(self.member, "member")
        check_subject(self.parent, "parent")
        kind, parent_kind = (name.partition(":")[0] for name in (self.member, self.parent))
        if parent_kind not in _PARENTS[kind]:
            raise Misuse(f"a {kind} cannot be a member of a {parent_kind}", field="parent")


def parse_rule(
    subject: str, action: str, resource: str, effect: str, *, condition: Condition = ALWAYS
) -> Rule:
    """A rule from text. Raises `Misuse` naming the field that is wrong."""
    try:
        permission = Permission(action)
    except ValueError as error:
        raise Misuse(f"{action[:64]!r} is not a permission", field="action") from error
    try:
        parsed = Effect(effect)
    except ValueError as error:
        raise Misuse("effect must be allow or deny", field="effect") from error
    return Rule(subject, permission, resource, parsed, condition)


def check_subject(name: str, field: str) -> None:
    """Raise `Misuse` unless `name` is a prefixed name of the small character set."""
    if len(name) > NAME_CHARS_MAX + 8 or _SUBJECT.fullmatch(name) is None:
        raise Misuse(
            f"{field} must be user:<name>, role:<name> or group:<component id>",
            field=field,
            limit=NAME_CHARS_MAX,
        )


def check_resource(resource: str, action: Permission) -> None:
    """Raise `Misuse` unless `resource` is one that `action` can be about."""
    if len(resource) > NAME_CHARS_MAX + 64 or _RESOURCE.fullmatch(resource) is None:
        raise Misuse(
            "resource must be <kind>:<id> or <kind>:*", field="resource", limit=NAME_CHARS_MAX + 64
        )
    if resource.partition(":")[0] != action.partition(":")[0]:
        raise Misuse("the resource is of another kind than the action", field="resource")


def check_rules(rules: Iterable[Rule], links: Iterable[Link]) -> None:
    """Refuse a set with duplicates, cycles, links that are too deep, or too much of anything."""
    deque(checking(rules, links), maxlen=0)


def checking(rules: Iterable[Rule], links: Iterable[Link]) -> Generator[None]:
    """`check_rules` in steps: raises `Misuse` at the step that finds something."""
    yield from _check_each(rules, "rules", "rules", RULES_MAX)
    linked = list(links)
    yield from _check_each(linked, "links", "memberships", LINKS_MAX)
    yield from _check_depth(linked)


def _check_each(
    listed: Iterable[Rule | Link], field: str, plural: str, limit: int
) -> Generator[None]:
    seen: set[Rule | Link] = set()
    for number, each in enumerate(listed):
        if number >= limit:
            raise Misuse(f"too many {plural}", field=field, limit=limit)
        if each in seen:
            raise Misuse(f"two {plural} are equal", field=field)
        seen.add(each)
        if number % STEP == STEP - 1:
            yield


def _check_depth(links: list[Link]) -> Generator[None]:
    parents: dict[str, list[str]] = {}
    for number, link in enumerate(links):
        parents.setdefault(link.member, []).append(link.parent)
        if number % STEP == STEP - 1:
            yield
    depth: dict[str, int] = {}
    for number, start in enumerate(parents):
        _measure(start, parents, depth)
        if depth[start] > LINK_DEPTH_MAX:
            raise Misuse("memberships are nested too deep", field="links", limit=LINK_DEPTH_MAX)
        if number % STEP == STEP - 1:
            yield


def _measure(start: str, parents: Mapping[str, list[str]], depth: dict[str, int]) -> None:
    """Levels above `start`, without recursion; a cycle is an error."""
    stack = [start]
    on_path: set[str] = set()
    while stack:
        name = stack[-1]
        if name in depth:
            stack.pop()
            continue
        above = parents.get(name, [])
        open_parents = [parent for parent in above if parent not in depth]
        if not open_parents:
            depth[name] = 1 + max((depth[parent] for parent in above), default=-1)
            on_path.discard(name)
            stack.pop()
            continue
        on_path.add(name)
        if any(parent in on_path for parent in open_parents):
            raise Misuse("memberships form a cycle", field="links")
        stack.extend(open_parents)
