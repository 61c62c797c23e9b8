"""Decisions as values that explain themselves, cached by the revision that they were taken at.

The cache needs no expiry: a new revision of the tenant is a new key, so an old answer cannot be
found again. An answer that depends on a rule's time window says from when until when it is right,
and is not used outside. It is bounded, least recently used first out.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from typing import Final, assert_never

from policy.conditions import NOWHERE, Context, Sensitivity
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
    until: datetime | None = None
    """When a time window may end it; None: it does not depend on time."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Denied: by this rule, or because no rule allows (`rule` is None)."""

    reason: str
    rule: Rule | None = None
    until: datetime | None = None


Decision = Allow | Deny

NO_RULE: Final = "no_rule"
DENIED_BY_RULE: Final = "denied_by_rule"

_Key = tuple[
    ComponentId, int, str, str, str, str | None, ComponentId | None, Sensitivity | None, bool
]


def decide(
    enforcer: TenantEnforcer,
    subject: str,
    action: Permission,
    resource: str,
    context: Context = NOWHERE,
) -> Decision:
    """Whether `subject` may do `action` to `resource` (`<kind>:<id>`). Raises `Misuse`.

    A wildcard is for rules: of a question about everything, a deny of one thing would be no part.
    """
    check_subject(subject, "subject")
    check_resource(resource, action)
    if resource.partition(":")[2] == ANY:
        raise Misuse("a decision is about one resource", field="resource")
    allowed, rule, until = enforcer.enforce(subject, action, resource, context)
    if allowed and rule is not None and rule.effect is Effect.ALLOW:
        return Allow(rule, until)
    if rule is not None and rule.effect is Effect.DENY:
        return Deny(DENIED_BY_RULE, rule, until)
    return Deny(NO_RULE, None, until)


def explain(decision: Decision) -> str:
    """The decision in words."""
    match decision:
        case Allow(rule, _):
            return f"allowed by: {rule}"
        case Deny(_, None, _):
            return "denied: no rule allows it"
        case Deny(_, Rule() as rule, _):
            return f"denied by: {rule}"
    assert_never(decision)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Timed:
    """A decision that depends on time, and the instant that it was taken for."""

    decision: Decision
    at: datetime | None

    def right_at(self, at: datetime | None) -> bool:
        """Whether it is the decision of `at` too."""
        until = self.decision.until
        if at is None or self.at is None or until is None:
            return False
        return self.at <= at < until


class Decisions:
    """A bounded cache in front of `decide`."""

    def __init__(self, entries_max: int = CACHE_MAX) -> None:
        self._entries_max = entries_max
        self._entries: OrderedDict[_Key, Decision | _Timed] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def decide(
        self,
        enforcer: TenantEnforcer,
        subject: str,
        action: Permission,
        resource: str,
        context: Context = NOWHERE,
        *,
        remember_denials: bool = True,
    ) -> Decision:
        """As `decide`, remembered for this tenant, revision and context.

        Without `remember_denials` a denial takes as long the second time as the first, so that
        nobody learns from the clock that something of that kind was asked about before.
        """
        at = context.at
        key = (
            enforcer.tenant, enforcer.revision, subject, action.value, resource,
            context.purpose, context.model, context.sensitivity, at is None,
        )  # fmt: skip
        found = self._entries.get(key)
        if isinstance(found, _Timed):
            found = found.decision if found.right_at(at) else None
        if found is not None and (remember_denials or isinstance(found, Allow)):
            self.hits += 1
            self._entries.move_to_end(key)
            return found
        self.misses += 1
        decision = decide(enforcer, subject, action, resource, context)
        if isinstance(decision, Deny) and not remember_denials:
            return decision
        timed = at is not None and decision.until is not None
        self._entries[key] = _Timed(decision, at) if timed else decision
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)
        return decision
