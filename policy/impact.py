"""What a change of a policy would do: who gains, who loses, and where nobody is left.

Rules:
- Both policies decide, before and after, and what differs is told: nothing is concluded from the
  rules by reading them.
- Only what may differ is asked: subjects whom a changed rule or membership concerns, and what
  such a rule is about; a wildcard is about everything known of its kind.
- Where conditions matter each question is asked in several contexts: every value that a condition
  names and one that none names, unknown, now, and the next time that a window opens or closes.
- Questions are bounded; `complete` says whether all were asked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, product
from typing import Final

from policy.conditions import Context, Sensitivity
from policy.decide import Allow, Decision
from policy.enforcer import TenantEnforcer
from policy.permissions import Permission
from policy.rules import ANY, Rule
from strongroom.identity import ComponentId

QUESTIONS_MAX: Final = 40_000
CONTEXTS_MAX: Final = 96
_OTHER: Final = "none-of-these"
_OTHER_MODEL: Final = ComponentId("0" * 32)

Decide = Callable[[str, Permission, str, Context], Decision]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two policies: its rules, and how it decides."""

    enforcer: TenantEnforcer
    decide: Decide
    owners: Mapping[str, str] = field(default_factory=dict)
    """Resources to the subject that has them without a rule."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Somebody may, or may not any more, do something; for example in `context`."""

    subject: str
    action: Permission
    resource: str
    context: Context
    conditional: bool
    """Only in some of the contexts that were tried."""
    because: str
    """The rule that decides now, in words; empty: none."""


@dataclass(slots=True)
class Impact:
    """What a change would do."""

    gains: list[Difference] = field(default_factory=list)
    losses: list[Difference] = field(default_factory=list)
    abandoned: set[str] = field(default_factory=set)
    """Resources that somebody had, and nobody has any more."""
    questions: int = 0
    complete: bool = True


def comparing(
    before: Side,
    after: Side,
    subjects: Sequence[str],
    resources: Sequence[str],
    now: datetime,
    questions_max: int = QUESTIONS_MAX,
) -> Generator[None, None, Impact]:
    """Compare the two for `subjects` and known `resources`, in steps."""
    impact = Impact()
    lost: set[tuple[Permission, str]] = set()
    for subject in subjects:
        yield
        for action, resource in _asked(before, after, subject, resources):
            if impact.questions >= questions_max:
                impact.complete = False
                break
            _ask(impact, before, after, (subject, action, resource), now, lost)
            yield
    holders: dict[str, list[str]] = {}
    for subject in subjects:
        for name in after.enforcer.names_of(subject):
            holders.setdefault(name, []).append(subject)
        yield
    for action, resource in sorted(lost):
        if impact.questions >= questions_max:
            impact.complete = False
            break
        if not _somebody_left(impact, after, holders, action, resource, now):
            impact.abandoned.add(resource)
        yield
    return impact


def _asked(
    before: Side, after: Side, subject: str, resources: Sequence[str]
) -> Iterable[tuple[Permission, str]]:
    """What may be different for `subject`."""
    changed = _rules_of(before.enforcer, subject) ^ _rules_of(after.enforcer, subject)
    found: dict[tuple[Permission, str], None] = {}
    for rule in sorted(changed, key=lambda each: each.sort_key):
        kind, _, name = rule.resource.partition(":")
        if name != ANY:
            found[rule.action, rule.resource] = None
            continue
        for resource in resources:
            if resource.startswith(f"{kind}:"):
                found[rule.action, resource] = None
    return found


def _rules_of(enforcer: TenantEnforcer, subject: str) -> set[Rule]:
    return {rule for name in enforcer.names_of(subject) for rule in enforcer.rules_naming(name)}


def _ask(
    impact: Impact,
    before: Side,
    after: Side,
    asked: tuple[str, Permission, str],
    now: datetime,
    lost: set[tuple[Permission, str]],
) -> None:
    subject, action, resource = asked
    concerned = [
        *before.enforcer.concerned(*asked),
        *after.enforcer.concerned(*asked),
    ]
    contexts, whole = contexts_of(concerned, now)
    impact.complete &= whole
    gains, losses = [], []
    for context in contexts:
        impact.questions += 2
        was = before.decide(subject, action, resource, context)
        will = after.decide(subject, action, resource, context)
        if isinstance(will, Allow) and not isinstance(was, Allow):
            gains.append((context, will))
        elif isinstance(was, Allow) and not isinstance(will, Allow):
            losses.append((context, will))
    for found, kept in ((gains, impact.gains), (losses, impact.losses)):
        if found:
            context, decision = found[0]
            conditional = len(found) < len(contexts)
            because = "" if decision.rule is None else str(decision.rule)
            kept.append(Difference(subject, action, resource, context, conditional, because))
    if losses:
        lost.add((action, resource))


def contexts_of(rules: Iterable[Rule], now: datetime) -> tuple[list[Context], bool]:
    """The contexts in which `rules` may decide differently, the most ordinary one first, and
    whether these are all: there are at most `CONTEXTS_MAX`.
    """
    conditions = [rule.condition for rule in rules if rule.condition]
    purposes: dict[str | None, None] = {None: None}
    models: dict[ComponentId | None, None] = {None: None}
    levels: dict[Sensitivity | None, None] = {None: None}
    times: dict[datetime, None] = {now: None}
    for condition in conditions:
        if condition.purposes:
            purposes.update(dict.fromkeys((*condition.purposes, _OTHER)))
        if condition.models:
            models.update(dict.fromkeys((*condition.models, _OTHER_MODEL)))
        if condition.sensitivity_max is not None or condition.sensitivity_above is not None:
            levels.update(dict.fromkeys(Sensitivity))
        if condition.window is not None:
            times[condition.window.until(now)] = None
    every = product(purposes, models, levels, times)
    number = len(purposes) * len(models) * len(levels) * len(times)
    asked = [Context(*values) for values in islice(every, CONTEXTS_MAX)]
    return asked, number <= CONTEXTS_MAX


def _somebody_left(
    impact: Impact,
    after: Side,
    holders: Mapping[str, Sequence[str]],
    action: Permission,
    resource: str,
    now: datetime,
) -> bool:
    """Whether anybody whom an allowing rule concerns still has it."""
    asked: dict[str, None] = {}
    if resource in after.owners:
        asked[after.owners[resource]] = None
    for name in after.enforcer.allowed_names(action, resource):
        asked.update(dict.fromkeys(holders.get(name, ())))
    for subject in asked:
        contexts, whole = contexts_of(after.enforcer.concerned(subject, action, resource), now)
        impact.complete &= whole
        for context in contexts:
            impact.questions += 1
            if isinstance(after.decide(subject, action, resource, context), Allow):
                return True
    return False
