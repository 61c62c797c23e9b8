"""What the routes of versions, documents, tests and dry runs take and give."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from policy.cases import CASES_MAX, Case, context_fields
from policy.documents import Form
from policy.impact import Difference
from policy.permissions import Permission
from policy.rules import Effect
from policy.yaml_tree import BYTES_MAX
from service.policies.schemas import ContextBody, DecisionAnswer, Party, Resource
from service.rules.models import Origin
from service.schemas import Answer, Body
from strongroom.limits import NAME_CHARS_MAX

VERSION_MAX = 2**31 - 1
_AT = "2026-01-31T12:00:00Z"
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=256)]
VersionNumber = Annotated[int, Field(ge=0, le=VERSION_MAX, strict=True)]
CaseName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:@/-]*$", max_length=NAME_CHARS_MAX),
]
DocumentText = Annotated[str, Field(max_length=BYTES_MAX)]


class PolicyVersionAnswer(Answer):
    """One version: who made it, when, why, and from which revision of the tenant it counts."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "number": 4,
                    "origin": "imported",
                    "author": "root",
                    "reason": "contractors end",
                    "source": None,
                    "added": 2,
                    "removed": 1,
                    "revision": 17,
                    "created_at": _AT,
                }
            ]
        }
    )

    number: int
    origin: Origin
    author: str
    reason: str
    source: int | None
    """Of a rollback: the version whose rules and roles it has again."""
    added: int
    removed: int
    revision: int
    created_at: datetime


class PolicyVersionPage(Answer):
    """Some versions, newest first, and the cursor that goes on."""

    items: list[PolicyVersionAnswer]
    next_cursor: str | None = None


class PolicyAnswer(Answer):
    """The policy in force. Version 0 is empty and nobody's."""

    version: int
    revision: int
    rules: int
    roles: int
    tests: int
    newest: PolicyVersionAnswer | None


class ImportBody(Body):
    """A whole policy that takes the place of the one in force."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "form": "yaml",
                    "document": "strongroom_policy: 1\nrules: []\nroles: []\ntests: []\n",
                    "reason": "first policy",
                }
            ]
        }
    )

    form: Form
    document: DocumentText
    reason: Reason


class RollbackBody(Body):
    """Have the rules and roles of an earlier version again, as a new one."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"version": 3, "reason": "version 4 denied too much"}]}
    )

    version: VersionNumber
    reason: Reason


class ActivatedAnswer(Answer):
    """The version in force, and the revision of the tenant; `changed` false: it was so before."""

    version: int
    revision: int
    changed: bool


class ChangeLine(Answer):
    """One thing that one version has and the other has not."""

    change: Literal["added", "removed"]
    kind: Literal["rule", "role", "test"]
    text: str


class DiffAnswer(Answer):
    """What is different in `to` from what was in `from`."""

    model_config = ConfigDict(populate_by_name=True)

    from_version: int
    to_version: int
    changes: list[ChangeLine]


class CaseBody(Body):
    """A test case: a question, and the answer that it must get."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "contractors do not read legal",
                    "subject": "role:contractor",
                    "action": "group:read",
                    "resource": "group:0123456789abcdef0123456789abcdef",
                    "expect": "deny",
                }
            ]
        }
    )

    name: CaseName
    subject: Party
    action: Permission
    resource: Resource
    expect: Effect
    context: ContextBody | None = None

    def typed(self) -> Case:
        """The case. Raises `Misuse`."""
        asked = (self.subject, self.action, self.resource, self.expect)
        if self.context is None:
            return Case(self.name, *asked)
        return Case(self.name, *asked, self.context.typed())


class CaseAnswer(Answer):
    """A stored test case."""

    name: str
    subject: str
    action: str
    resource: str
    expect: Effect
    context: dict[str, str]

    @classmethod
    def of(cls, case: Case) -> Self:
        """The answer for a case."""
        return cls(
            name=case.name,
            subject=case.subject,
            action=case.action.value,
            resource=case.resource,
            expect=case.expect,
            context=context_fields(case.context),
        )


class CasesBody(Body):
    """All test cases of a policy; they take the place of those that are stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "tests": [
                        {
                            "name": "contractors do not read legal",
                            "subject": "role:contractor",
                            "action": "group:read",
                            "resource": "group:0123456789abcdef0123456789abcdef",
                            "expect": "deny",
                        }
                    ],
                    "reason": "legal's documents are for the firm alone",
                }
            ]
        }
    )

    tests: Annotated[list[CaseBody], Field(max_length=CASES_MAX)]
    reason: Reason


class CasesAnswer(Answer):
    """The test cases that are stored beside a policy."""

    version: int
    tests: list[CaseAnswer]


class FailureAnswer(Answer):
    """A test case that gets another answer than it must."""

    name: str
    expected: Effect
    reason: str


class TestRunAnswer(Answer):
    """The stored test cases, run against the policy in force or a proposed one."""

    __test__ = False

    version: int
    revision: int
    tests: int
    failures: list[FailureAnswer]


class ProposalBody(Body):
    """A proposed policy: a document, or an earlier version; neither: the one in force."""

    form: Form | None = None
    document: DocumentText | None = None
    rollback_to: VersionNumber | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.form is None) != (self.document is None):
            raise ValueError("form and document come together")
        if self.document is not None and self.rollback_to is not None:
            raise ValueError("a document or an earlier version is proposed, and not both")
        return self


class DifferenceAnswer(Answer):
    """Somebody gains or loses something, for example in this context."""

    subject: str
    action: str
    resource: str
    context: dict[str, str]
    conditional: bool
    because: str

    @classmethod
    def of(cls, difference: Difference) -> Self:
        """The answer for a difference."""
        return cls(
            subject=difference.subject,
            action=difference.action.value,
            resource=difference.resource,
            context=context_fields(difference.context),
            conditional=difference.conditional,
            because=difference.because,
        )


class InvalidationAnswer(Answer):
    """What the invalidation of this change would take.

    A change of rules retires no component: grants die, and blocks stay for whoever may read them.
    """

    grants: Literal["none", "all of the tenant"]
    namespaces: int
    """Whose grants die: every one of the tenant that was ever granted."""
    namespaces_abandoned: int | None
    """That nobody may read any more; null: too many questions to tell."""
    components_destroyed: Literal[0] = 0
    bytes: int | None
    """Held in the namespaces that nobody may read any more; null: not known."""
    bytes_note: str


class DryRunAnswer(Answer):
    """What would be different. Nothing was changed."""

    version: int
    """In force, that the proposal was compared with."""
    changes: list[ChangeLine]
    gains: list[DifferenceAnswer]
    losses: list[DifferenceAnswer]
    gains_total: int
    losses_total: int
    complete: bool
    """False: there were more questions than are asked at once."""
    invalidation: InvalidationAnswer
    failures: list[FailureAnswer]
    """Test cases that would refuse it."""


class ExplainBody(Body):
    """A question to be explained."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "subject": "user:alice",
                    "action": "group:read",
                    "resource": "group:0123456789abcdef0123456789abcdef",
                    "context": {"purpose": "support", "sensitivity": "internal"},
                }
            ]
        }
    )

    subject: Party
    action: Permission
    resource: Resource
    context: ContextBody | None = None


class ConcernedRule(Answer):
    """A rule about this question, and whether its condition lets it apply."""

    rule: str
    applies: bool
    through: str
    """The name by which the subject has it: its own, or a group's or role's."""


class ExplainAnswer(DecisionAnswer):
    """The decision, and everything that had a part in it."""

    names: list[str]
    """Every name that the subject goes by: itself, its groups and roles."""
    concerned: list[ConcernedRule]
    details: dict[str, Any]
    """The context in which it was asked."""
