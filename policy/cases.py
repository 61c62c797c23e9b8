"""Test cases of a policy: a question in a context, and the answer that it must get.

A policy whose cases do not all get their answers is not activated. A case that names no time is
asked without one, so that a rule with a time window answers as it does to who has no clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from policy.conditions import NOWHERE, Context, Sensitivity, check_purpose
from policy.decide import Allow, Decision, explain
from policy.permissions import Permission
from policy.rules import ANY, Effect, check_resource, check_subject
from strongroom.canonical import canonical_json
from strongroom.errors import Misuse
from strongroom.identity import ComponentId, parse_component_id
from strongroom.limits import NAME_CHARS_MAX

CASES_MAX: Final = 1000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:@/-]*")
_STEP: Final = 8

Ask = Callable[[str, Permission, str, Context], Decision]
"""Subject, action, resource, context."""


@dataclass(frozen=True, slots=True)
class Case:
    """`subject` must get `expect` for `action` on `resource` in `context`."""

    name: str
    subject: str
    action: Permission
    resource: str
    expect: Effect
    context: Context = NOWHERE

    def __post_init__(self) -> None:
        if len(self.name) > NAME_CHARS_MAX or _NAME.fullmatch(self.name) is None:
            raise Misuse("a case's name is words of letters and digits", field="name")
        check_subject(self.subject, "subject")
        if not isinstance(self.action, Permission):
            raise Misuse("action is not a permission", field="action")
        check_resource(self.resource, self.action)
        if self.resource.partition(":")[2] == ANY:
            raise Misuse("a case is about one resource", field="resource")


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that got another answer, and why."""

    case: Case
    reason: str


def run_cases(cases: Iterable[Case], ask: Ask) -> Generator[None, None, tuple[Failure, ...]]:
    """Ask each case, in steps; returns those that got another answer than they must."""
    failures = []
    for number, case in enumerate(cases):
        decision = ask(case.subject, case.action, case.resource, case.context)
        if isinstance(decision, Allow) != (case.expect is Effect.ALLOW):
            failures.append(Failure(case, explain(decision)))
        if number % _STEP == _STEP - 1:
            yield
    return tuple(failures)


class _Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    purpose: str | None = None
    model: str | None = None
    sensitivity: Sensitivity | None = None
    at: str | None = None


def parse_context(
    purpose: str | None, model: str | None, sensitivity: Sensitivity | None, at: str | None
) -> Context:
    """A context from text. Raises `Misuse` naming the field that is wrong."""
    if purpose is not None:
        check_purpose(purpose)
    moment = None
    if at is not None:
        try:
            moment = datetime.fromisoformat(at)
        except ValueError as error:
            raise Misuse("at must be RFC 3339 with a zone", field="at") from error
        if moment.tzinfo is None:
            raise Misuse("at must be RFC 3339 with a zone", field="at")
        moment = moment.astimezone(UTC)
    known: ComponentId | None = None if model is None else parse_component_id(model, "model")
    return Context(purpose, known, sensitivity, moment)


def context_fields(context: Context) -> dict[str, str]:
    """What is known, as plain text."""
    at = None if context.at is None else context.at.astimezone(UTC).isoformat()
    stored = _Context(context.purpose, context.model, context.sensitivity, at)
    plain: dict[str, str] = msgspec.to_builtins(stored)
    return plain


def encode_context(context: Context) -> str:
    """The one text of a context; empty where nothing is known."""
    fields = context_fields(context)
    return canonical_json(fields).decode() if fields else ""


def decode_context(text: str) -> Context:
    """The context of a stored text. Raises `Misuse` for what is none."""
    try:
        stored = msgspec.json.decode(text or "{}", type=_Context, strict=True)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Misuse("a context cannot be read", field="context") from error
    return parse_context(stored.purpose, stored.model, stored.sensitivity, stored.at)
