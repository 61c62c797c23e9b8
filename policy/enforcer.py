"""One tenant's rules, loaded into Casbin by our own loader, and decided by it.

Rules:
- An enforcer is built aside from typed rules and links that were checked, and never changes:
  a new state of the tenant is a new enforcer, swapped whole. Casbin's adapters, filters and batch
  removals are not used.
- Casbin scans every rule it holds. So an index by (action, resource) and by the names that the
  subject resolves to selects the candidates, and Casbin decides among them. That this equals
  Casbin over all rules is a property test.
- Not thread-safe; one event loop's thread uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import casbin
from casbin.model import Model

from policy.model import MODEL, any_of_kind
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule, check_rules
from strongroom.identity import ComponentId

_CASBIN_LEVELS: Final = 10


class TenantEnforcer:
    """The decisions of one tenant at one revision."""

    def __init__(
        self, tenant: ComponentId, revision: int, rules: Iterable[Rule], links: Iterable[Link]
    ) -> None:
        self.tenant = tenant
        self.revision = revision
        self.rules = tuple(sorted(set(rules)))
        listed = tuple(sorted(set(links)))
        check_rules(self.rules, listed)
        self._index: dict[tuple[str, str], dict[str, list[Rule]]] = {}
        for rule in self.rules:
            by_subject = self._index.setdefault((rule.action, rule.resource), {})
            by_subject.setdefault(rule.subject, []).append(rule)
        self._parents: dict[str, list[str]] = {}
        for link in listed:
            self._parents.setdefault(link.member, []).append(link.parent)
        self._casbin = _casbin_enforcer()
        _load_links(self._casbin.get_role_manager(), tenant, listed)

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

    def candidates(self, subject: str, action: Permission, resource: str) -> list[Rule]:
        """The rules that may match: right action and resource, and a name that the subject has."""
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

    def enforce(self, subject: str, action: Permission, resource: str) -> tuple[bool, Rule | None]:
        """Casbin's answer over the candidates, and the rule that decided, if one did."""
        candidates = self.candidates(subject, action, resource)
        if not candidates:
            return False, None
        return self._ask(candidates, subject, action, resource)

    def enforce_all(
        self, subject: str, action: Permission, resource: str
    ) -> tuple[bool, Rule | None]:
        """Casbin's answer over every rule of the tenant: slow, the reference for `enforce`."""
        return self._ask(self.rules, subject, action, resource)

    def _ask(
        self, rules: Iterable[Rule], subject: str, action: Permission, resource: str
    ) -> tuple[bool, Rule | None]:
        held = list(rules)
        section = self._casbin.get_model().model["p"]["p"]
        section.policy = [_line(rule, self.tenant) for rule in held]
        allowed, explained = self._casbin.enforce_ex(subject, self.tenant, resource, action.value)
        rule = next((rule for rule in held if _line(rule, self.tenant) == list(explained)), None)
        if not allowed and rule is not None and rule.effect is Effect.ALLOW:
            rule = None
        return bool(allowed), rule


def _line(rule: Rule, tenant: ComponentId) -> list[str]:
    return [rule.subject, tenant, rule.resource, rule.action.value, rule.effect.value]


def _load_links(roles: Any, tenant: ComponentId, links: Iterable[Link]) -> None:
    """Load `links`, in time proportional to their number.

    With a matching function, which Casbin sets to plain equality by default, every link is held
    against every name: quadratic. And Casbin loads a domain when it is first asked about it,
    which would be in the event loop: asking here makes it do so now.
    """
    roles.add_matching_func(None)
    for link in links:
        roles.add_link(link.member, link.parent, tenant)
    roles.has_link(tenant, tenant, tenant)


def _casbin_enforcer() -> Any:
    model = Model()
    model.load_model_from_text(MODEL)
    enforcer = casbin.Enforcer(model)
    enforcer.enable_auto_save(auto_save=False)
    enforcer.add_function("p_any", any_of_kind)
    manager = enforcer.get_role_manager()
    assert manager.max_hierarchy_level >= _CASBIN_LEVELS
    return enforcer
