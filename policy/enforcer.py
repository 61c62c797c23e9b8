"""One tenant's rules, loaded into Casbin by our own loader, and decided by it.

Rules:
- An enforcer is built aside from typed rules and links that were checked, and never changes:
  a new state of the tenant is a new enforcer, swapped whole. Casbin's adapters, filters and batch
  removals are not used.
- Casbin scans every rule it holds. So an index by (action, resource) and by the names that the
  subject resolves to selects the candidates, leaves out those whose condition does not apply in
  the context, and Casbin decides among the rest. That this equals plain Casbin over all rules,
  with the conditions in its matcher, is a property test.
- `building` builds in steps of well below a millisecond, so that a thread that builds can let
  others go on between them.
- Not thread-safe; one event loop's thread uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from datetime import datetime
from typing import Any, Final, TypeVar

import casbin
from casbin.model import Model
from casbin.rbac.default_role_manager import RoleManager

from policy.conditions import NOWHERE, Context
from policy.model import MODEL, any_of_kind
from policy.permissions import Permission
from policy.rules import STEP, Effect, Link, Rule, checking
from strongroom.identity import ComponentId

_Listed = TypeVar("_Listed", Rule, Link)
_CASBIN_LEVELS: Final = 10
_BASE_BYTES: Final = 64 * 1024
_RULE_BYTES: Final = 1100
_LINK_BYTES: Final = 1500
"""What an enforcer, each of its rules and each of its links take at most, as a test measures."""


class TenantEnforcer:
    """The decisions of one tenant at one revision."""

    def __init__(
        self, tenant: ComponentId, revision: int, rules: Iterable[Rule], links: Iterable[Link]
    ) -> None:
        self._begin(tenant, revision)
        deque(self._fill(rules, links), maxlen=0)

    @classmethod
    def building(
        cls, tenant: ComponentId, revision: int, rules: Iterable[Rule], links: Iterable[Link]
    ) -> Generator[None, None, TenantEnforcer]:
        """Build one in steps; the generator returns it."""
        enforcer = cls.__new__(cls)
        enforcer._begin(tenant, revision)
        yield from enforcer._fill(rules, links)
        return enforcer

    def _begin(self, tenant: ComponentId, revision: int) -> None:
        self.tenant = tenant
        self.revision = revision
        self.rules: tuple[Rule, ...] = ()
        self.links: tuple[Link, ...] = ()
        self._index: dict[tuple[str, str], dict[str, list[Rule]]] = {}
        self._naming: dict[str, list[Rule]] = {}
        self._parents: dict[str, list[str]] = {}
        self._casbin = _casbin_enforcer(tenant)

    def _fill(self, rules: Iterable[Rule], links: Iterable[Link]) -> Generator[None]:
        self.rules = yield from _distinct(rules)
        self.links = yield from _distinct(links)
        yield from checking(self.rules, self.links)
        for number, rule in enumerate(self.rules):
            by_subject = self._index.setdefault((rule.action, rule.resource), {})
            by_subject.setdefault(rule.subject, []).append(rule)
            self._naming.setdefault(rule.subject, []).append(rule)
            if number % STEP == STEP - 1:
                yield
        roles = self._casbin.get_role_manager()
        for number, link in enumerate(self.links):
            self._parents.setdefault(link.member, []).append(link.parent)
            roles.add_link(link.member, link.parent)
            if number % STEP == STEP - 1:
                yield

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, estimated from above."""
        return _BASE_BYTES + _RULE_BYTES * len(self.rules) + _LINK_BYTES * len(self.links)

    def names_of(self, subject: str) -> frozenset[str]:
        """`subject` and every group and role that it has, directly or through others."""
        found = {subject}
        waiting = [subject]
        while waiting:
            for parent in self._parents.get(waiting.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    waiting.append(parent)
        return frozenset(found)

    def rules_naming(self, name: str) -> tuple[Rule, ...]:
        """The rules whose subject is `name` itself."""
        return tuple(self._naming.get(name, ()))

    def allowed_names(self, action: Permission, resource: str) -> list[str]:
        """The subjects of every rule that allows this, whatever its condition."""
        return [
            rule.subject
            for key in (resource, any_of_kind(resource))
            for rules in self._index.get((action, key), {}).values()
            for rule in rules
            if rule.effect is Effect.ALLOW
        ]

    def candidates(
        self, subject: str, action: Permission, resource: str, context: Context = NOWHERE
    ) -> list[Rule]:
        """The rules that apply: action, resource, a name that the subject has, and condition."""
        return [
            rule for rule in self.concerned(subject, action, resource) if applies(rule, context)
        ]

    def concerned(self, subject: str, action: Permission, resource: str) -> list[Rule]:
        """The rules about this subject, action and resource, whatever their conditions."""
        names = self.names_of(subject)
        return [
            rule
            for key in (resource, any_of_kind(resource))
            for rule in self._matching(names, (action, key))
        ]

    def _matching(self, names: frozenset[str], key: tuple[str, str]) -> Iterator[Rule]:
        by_subject = self._index.get(key, {})
        if len(by_subject) < len(names):
            for subject, rules in by_subject.items():
                if subject in names:
                    yield from rules
        else:
            for name in names:
                yield from by_subject.get(name, ())

    def enforce(
        self, subject: str, action: Permission, resource: str, context: Context = NOWHERE
    ) -> tuple[bool, Rule | None, datetime | None]:
        """Casbin's answer over the candidates, the rule that decided, if one did, and until when.

        None: until the tenant's next revision; else a window may open or close then.
        """
        concerned = self.concerned(subject, action, resource)
        until = _until(concerned, context)
        candidates = [rule for rule in concerned if applies(rule, context)]
        if not candidates:
            return False, None, until
        return (*self._ask(candidates, subject, action, resource), until)

    def enforce_all(
        self, subject: str, action: Permission, resource: str, context: Context = NOWHERE
    ) -> tuple[bool, Rule | None]:
        """Casbin's answer over every rule of the tenant: slow, the reference for `enforce`."""
        held = [rule for rule in self.rules if applies(rule, context)]
        return self._ask(held, subject, action, resource)

    def _ask(
        self, rules: Iterable[Rule], subject: str, action: Permission, resource: str
    ) -> tuple[bool, Rule | None]:
        # In one order, so that the same rule explains the same decision.
        held = sorted(rules, key=_order)
        section = self._casbin.get_model().model["p"]["p"]
        section.policy = [_line(rule, self.tenant) for rule in held]
        allowed, explained = self._casbin.enforce_ex(subject, self.tenant, resource, action.value)
        section.policy = []
        rule = next((rule for rule in held if _line(rule, self.tenant) == list(explained)), None)
        if not allowed and rule is not None and rule.effect is Effect.ALLOW:
            rule = None
        return bool(allowed), rule


def applies(rule: Rule, context: Context) -> bool:
    """Whether the rule's condition lets it apply: an allow's surely holds, a deny's may hold."""
    if not rule.condition:
        return True
    holds = rule.condition.holds(context)
    return holds is True if rule.effect is Effect.ALLOW else holds is not False


def _until(rules: Iterable[Rule], context: Context) -> datetime | None:
    if context.at is None:
        return None
    instants = [
        rule.condition.window.until(context.at)
        for rule in rules
        if rule.condition.window is not None and rule.condition.timeless(context) is not False
    ]
    return min(instants, default=None)


def _order(rule: Rule) -> tuple[str, str, str, str, str]:
    return rule.sort_key


def _distinct(listed: Iterable[_Listed]) -> Generator[None, None, tuple[_Listed, ...]]:
    found: dict[_Listed, None] = {}
    for number, each in enumerate(listed):
        found[each] = None
        if number % STEP == STEP - 1:
            yield
    return tuple(found)


def _line(rule: Rule, tenant: ComponentId) -> list[str]:
    return [rule.subject, tenant, rule.resource, rule.action.value, rule.effect.value]


class _TenantRoles(RoleManager):  # type: ignore[misc]
    """Casbin's graph of roles, of one tenant.

    Casbin's manager of many domains holds every link against every name by default, and builds a
    domain at the first question about it, which would be in the event loop.
    """

    def __init__(self, tenant: ComponentId) -> None:
        super().__init__(_CASBIN_LEVELS)
        self._tenant = tenant

    def has_link(self, name1: str, name2: str, *domain: str) -> bool:
        return domain == (self._tenant,) and bool(super().has_link(name1, name2))


def _casbin_enforcer(tenant: ComponentId) -> Any:
    model = Model()
    model.load_model_from_text(MODEL)
    enforcer = casbin.Enforcer(model)
    enforcer.enable_auto_save(auto_save=False)
    enforcer.add_function("p_any", any_of_kind)
    roles = _TenantRoles(tenant)
    enforcer.set_role_manager(roles)
    model.model["g"]["g"].rm = roles
    return enforcer
