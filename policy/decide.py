"""Decisions as values that explain themselves, cached by the revision that they were taken at.

The cache has no clock: a new revision of the tenant is a new key, so an old answer cannot be
found again. It is bounded, least recently used first out.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, assert_never

from policy.enforcer import TenantEnforcer
from policy.permissions import Permission
from policy.rules import ANY, Effect, Rule, check_resource, check_subject
from strongroom.errors import Misuse
from strongroom.identity import ComponentId

CACHE_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class Allow:
    """Allowed, by this rule."""

    rule: Rule


@dataclass(frozen=True, slots=True)
class Deny:
    """Denied: by this rule, or because no rule allows (`rule` is None)."""

    reason: str
    rule: Rule | None = None


Decision = Allow | Deny

NO_RULE: Final = "no_rule"
DENIED_BY_RULE: Final = "denied_by_rule"

_Key = tuple[ComponentId, int, str, str, str]


def decide(enforcer: TenantEnforcer, subject: str, action: Permission, resource: str) -> Decision:
    """Whether `subject` may do `action` to `resource` (`<kind>:<id>`). Raises `Misuse`.

    A wildcard is for rules: of a question about everything, a deny of one thing would be no part.
    """
    check_subject(subject, "subject")
    check_resource(resource, action)
    if resource.partition(":")[2] == ANY:
        raise Misuse("a decision is about one resource", field="resource")
    allowed, rule = enforcer.enforce(subject, action, resource)
    if allowed and rule is not None and rule.effect is Effect.ALLOW:
        return Allow(rule)
    if rule is not None and rule.effect is Effect.DENY:
        return Deny(DENIED_BY_RULE, rule)
    return Deny(NO_RULE)


def explain(decision: Decision) -> str:
    """The decision in words."""
    match decision:
        case Allow(rule):
            return f"allowed by: {rule}"
        case Deny(_, None):
            return "denied: no rule allows it"
        case Deny(_, Rule() as rule):
            return f"denied by: {rule}"
    assert_never(decision)  # type: ignore[arg-type]


class Decisions:
    """A bounded cache in front of `decide`."""

    def __init__(self, entries_max: int = CACHE_MAX) -> None:
        self._entries_max = entries_max
        self._entries: OrderedDict[_Key, Decision] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def decide(
        self, enforcer: TenantEnforcer, subject: str, action: Permission, resource: str
    ) -> Decision:
        """As `decide`, remembered for this tenant and revision."""
        key = (enforcer.tenant, enforcer.revision, subject, action.value, resource)
        found = self._entries.get(key)
        if found is not None:
            self.hits += 1
            self._entries.move_to_end(key)
            return found
        self.misses += 1
        decision = decide(enforcer, subject, action, resource)
        self._entries[key] = decision
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)
        return decision
