"""Versions of a tenant's policy over HTTP: read, import, export, compare, try, roll back.

What changes a policy as a whole must say in `If-Match` which state it changes. Who may read rules
may have decisions explained; nobody else is told why.
"""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.cases import Case, Failure
from policy.conditions import Context
from policy.decide import Allow, explain
from policy.documents import Form, PolicyDocument, reading, writing
from policy.enforcer import applies
from policy.permissions import Permission
from policy.rules import Link, Rule
from service.auth.scope import Scoped, scoped
from service.db.base import now
from service.http_errors import CONDITIONAL
from service.http_page import PagingDep
from service.policies.activate import Activated, Intent, Plan, activate, policy_tag, prepare
from service.policies.dry_run import count_abandoned, count_bytes, count_namespaces, imagining
from service.policies.version_schemas import (
    VERSION_MAX,
    ActivatedAnswer,
    CaseAnswer,
    CasesAnswer,
    CasesBody,
    ChangeLine,
    ConcernedRule,
    DiffAnswer,
    DifferenceAnswer,
    DryRunAnswer,
    ExplainAnswer,
    ExplainBody,
    FailureAnswer,
    ImportBody,
    InvalidationAnswer,
    PolicyAnswer,
    PolicyVersionAnswer,
    PolicyVersionPage,
    ProposalBody,
    RollbackBody,
    TestRunAnswer,
)
from service.preconditions import IfMatch, IfNoneMatch
from service.rules import store
from service.rules.models import Origin, VersionRow
from service.rules.store import Content
from service.runtime import Runtime, RuntimeDep
from service.tenancy import store as tenancy
from strongroom.errors import Misuse

router = APIRouter(prefix="/v1/tenants/{tenant}/policy", tags=["policy"])

TOLD_MAX = 1000
"""Gains, losses and failures that one answer lists; their totals are always told."""
Reader = Annotated[Scoped, Depends(scoped(Permission.RULE_READ))]
Writer = Annotated[Scoped, Depends(scoped(Permission.RULE_WRITE))]
Number = Annotated[int, Path(ge=1, le=VERSION_MAX)]
NumberQuery = Annotated[int | None, Query(ge=0, le=VERSION_MAX)]
_MEDIA = {Form.YAML: "application/yaml", Form.CSV: "text/csv"}


@router.get("", summary="Read the policy in force")
async def read_policy(runtime: RuntimeDep, scope: Reader, response: Response) -> PolicyAnswer:
    """Version, revision and size of the policy; the `ETag` is what `If-Match` takes."""
    async with runtime.database.snapshots() as session:
        tenant = await tenancy.get_tenant(session, scope.tenant)
        number = await store.newest(session, tenant.id)
        row = await store.get_version(session, tenant.id, number) if number else None
        stored = await store.read_stored(session, tenant.id)
    response.headers["ETag"] = policy_tag(tenant.id, number)
    return PolicyAnswer(
        version=number,
        revision=tenant.revision,
        rules=len(stored.rules),
        roles=len(stored.roles),
        tests=len(stored.cases),
        newest=None if row is None else PolicyVersionAnswer.model_validate(row),
    )


@router.get(
    "/document",
    summary="Export a policy",
    response_class=PlainTextResponse,
    responses={
        200: {"content": {"application/yaml": {}, "text/csv": {}}},
        304: {"description": "The policy in force is the one that you have."},
    },
)
async def export_policy(
    runtime: RuntimeDep,
    scope: Reader,
    expected: IfNoneMatch,
    form: Form = Form.YAML,
    version: NumberQuery = None,
) -> Response:
    """Rules, roles and test cases as YAML or CSV; of an earlier version if one is named."""
    async with runtime.database.snapshots() as session:
        await tenancy.get_tenant(session, scope.tenant)
        number = await store.newest(session, scope.tenant) if version is None else version
        tag = policy_tag(scope.tenant, number)
        headers = {"ETag": tag}
        if expected.shown(tag):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        stored = await store.read_stored(session, scope.tenant, number)
    builder = runtime.enforcers.builder
    content = await builder.build(stored.typing())
    text = await builder.build(
        writing(form, PolicyDocument(content.rules, content.links, content.cases))
    )
    return Response(text, media_type=_MEDIA[form], headers=headers)


@router.put("/document", summary="Import a policy", responses=CONDITIONAL)
async def import_policy(
    runtime: RuntimeDep, scope: Writer, body: ImportBody, expected: IfMatch, response: Response
) -> ActivatedAnswer:
    """Put a whole policy in force, if nothing in it is wrong and all of its test cases pass."""
    document = await runtime.enforcers.builder.build(reading(body.form, body.document))
    intent = Intent(
        Origin.IMPORTED,
        _of(document),
        "policy.imported",
        f"{len(document.rules)} rules, {len(document.links)} roles, {len(document.cases)} tests",
        body.reason,
        expected=expected,
    )
    return _activated(scope, await activate(runtime, scope, intent), response)


@router.post("/rollback", summary="Roll a policy back", responses=CONDITIONAL)
async def roll_back(
    runtime: RuntimeDep, scope: Writer, body: RollbackBody, expected: IfMatch, response: Response
) -> ActivatedAnswer:
    """Have an earlier version's rules and roles again, as a new version.

    The test cases stay those of now, and have to pass. Grants of then stay dead.
    """
    intent = Intent(
        Origin.ROLLED_BACK,
        _back_to(runtime, scope, body.version),
        "policy.rolled_back",
        f"back to version {body.version}",
        body.reason,
        body.version,
        expected,
    )
    return _activated(scope, await activate(runtime, scope, intent), response)


@router.post("/dry-run", summary="Try a policy without changing it")
async def dry_run(runtime: RuntimeDep, scope: Writer, body: ProposalBody) -> DryRunAnswer:
    """Who would gain and lose what, what its invalidation would take, and which tests fail."""
    plan = await _proposal(runtime, scope, body)
    prepared = await prepare(runtime, scope.tenant, Intent(Origin.IMPORTED, plan, "", ""))
    impact = await runtime.enforcers.builder.build(imagining(prepared, now()))
    async with runtime.database.snapshots() as session:
        namespaces = await count_namespaces(session, scope.tenant)
        abandoned = await count_abandoned(session, scope.tenant, impact)
        nbytes, note = await count_bytes(session, scope.tenant, impact)
    before, after = prepared.before, prepared.after
    kills = (before.rules, before.links) != (after.rules, after.links)
    return DryRunAnswer(
        version=prepared.version,
        changes=_changes(before, after),
        gains=[DifferenceAnswer.of(each) for each in impact.gains[:TOLD_MAX]],
        losses=[DifferenceAnswer.of(each) for each in impact.losses[:TOLD_MAX]],
        gains_total=len(impact.gains),
        losses_total=len(impact.losses),
        complete=impact.complete,
        invalidation=InvalidationAnswer(
            grants="all of the tenant" if kills else "none",
            namespaces=namespaces if kills else 0,
            namespaces_abandoned=abandoned,
            bytes=nbytes,
            bytes_note=note,
        ),
        failures=_failures(prepared.failures),
    )


@router.get("/versions", summary="List the versions of a policy")
async def list_policy_versions(
    runtime: RuntimeDep, scope: Reader, paging: PagingDep
) -> PolicyVersionPage:
    """Every version with its author and reason, newest first."""
    statement = select(VersionRow).where(VersionRow.tenant == scope.tenant)
    if paging.place is not None:
        statement = statement.where(VersionRow.number < int.from_bytes(paging.place))
    statement = statement.order_by(VersionRow.number.desc()).limit(paging.limit + 1)
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        rows = (await session.scalars(statement)).all()
    shown = rows[: paging.limit]
    more = len(rows) > paging.limit
    return PolicyVersionPage(
        items=[PolicyVersionAnswer.model_validate(row) for row in shown],
        next_cursor=paging.cursor(shown[-1].number.to_bytes(4)) if more else None,
    )


@router.get("/versions/{version}", summary="Read a version of a policy")
async def read_policy_version(
    runtime: RuntimeDep, scope: Reader, version: Number
) -> PolicyVersionAnswer:
    """One version's author, time and reason."""
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        row = await store.get_version(session, scope.tenant, version)
    return PolicyVersionAnswer.model_validate(row)


@router.get("/diff", summary="Compare two versions of a policy")
async def compare_versions(
    runtime: RuntimeDep,
    scope: Reader,
    from_version: Annotated[int, Query(alias="from", ge=0, le=VERSION_MAX)],
    to_version: Annotated[
        int | None, Query(alias="to", ge=0, le=VERSION_MAX, description="None: the newest.")
    ] = None,
) -> DiffAnswer:
    """What the later one has and has not, in words."""
    builder = runtime.enforcers.builder
    async with runtime.database.snapshots() as session:
        await tenancy.get_tenant(session, scope.tenant)
        newest = await store.newest(session, scope.tenant)
        last = newest if to_version is None else to_version
        one = await store.read_stored(session, scope.tenant, from_version)
        other = await store.read_stored(session, scope.tenant, last)
    before, after = await builder.build(one.typing()), await builder.build(other.typing())
    return DiffAnswer(from_version=from_version, to_version=last, changes=_changes(before, after))


@router.get("/tests", summary="Read the test cases of a policy")
async def read_cases(runtime: RuntimeDep, scope: Reader, response: Response) -> CasesAnswer:
    """The test cases that are stored beside the policy."""
    async with runtime.database.snapshots() as session:
        await tenancy.get_tenant(session, scope.tenant)
        number = await store.newest(session, scope.tenant)
        stored = await store.read_stored(session, scope.tenant)
    content = await runtime.enforcers.builder.build(stored.typing())
    response.headers["ETag"] = policy_tag(scope.tenant, number)
    return CasesAnswer(
        version=number,
        tests=[CaseAnswer.of(case) for case in sorted(content.cases, key=_name)],
    )


@router.put("/tests", summary="Replace the test cases of a policy", responses=CONDITIONAL)
async def replace_cases(
    runtime: RuntimeDep, scope: Writer, body: CasesBody, expected: IfMatch, response: Response
) -> ActivatedAnswer:
    """Store other test cases; they have to pass with the policy in force."""
    cases = frozenset(case.typed() for case in body.tests)
    if len({case.name for case in cases}) != len(body.tests):
        raise Misuse("two test cases have one name", field="tests")

    async def plan(session: AsyncSession, content: Content) -> Content:
        del session
        return replace(content, cases=cases)

    intent = Intent(
        Origin.TESTS_CHANGED,
        plan,
        "policy.tests_changed",
        f"{len(cases)} tests",
        body.reason,
        expected=expected,
    )
    return _activated(scope, await activate(runtime, scope, intent), response)


@router.post("/tests/run", summary="Run the test cases of a policy")
async def run_tests(runtime: RuntimeDep, scope: Writer, body: ProposalBody) -> TestRunAnswer:
    """Run them against the policy in force, or against a proposed one with its own."""
    plan = await _proposal(runtime, scope, body)
    prepared = await prepare(runtime, scope.tenant, Intent(Origin.IMPORTED, plan, "", ""))
    return TestRunAnswer(
        version=prepared.version,
        revision=prepared.source.revision,
        tests=len(prepared.after.cases),
        failures=_failures(prepared.failures),
    )


@router.post("/explain", summary="Explain a decision")
async def explain_decision(runtime: RuntimeDep, scope: Reader, body: ExplainBody) -> ExplainAnswer:
    """The rule that decides, in words, and every rule that had a part in it."""
    async with runtime.database.snapshots() as session:
        tenant = await tenancy.get_tenant(session, scope.tenant)
        policy = await runtime.enforcers.at(session, tenant)
    context = Context() if body.context is None else body.context.typed()
    if context.at is None:
        context = replace(context, at=now())
    decision = policy.decide(body.subject, body.action, body.resource, context)
    enforcer = policy.enforcer
    concerned = enforcer.concerned(body.subject, body.action, body.resource)
    return ExplainAnswer(
        allowed=isinstance(decision, Allow),
        reason=explain(decision),
        rule=None if decision.rule is None else str(decision.rule),
        until=decision.until,
        revision=policy.revision,
        names=sorted(enforcer.names_of(body.subject)),
        concerned=[
            ConcernedRule(rule=str(rule), applies=applies(rule, context), through=rule.subject)
            for rule in sorted(concerned, key=lambda each: each.sort_key)[:TOLD_MAX]
        ],
        details={
            "purpose": context.purpose,
            "model": context.model,
            "sensitivity": context.sensitivity,
            "at": context.at,
        },
    )


def _of(document: PolicyDocument) -> Plan:
    async def plan(session: AsyncSession, content: Content) -> Content:
        del session, content
        return Content(document.rules, document.links, document.cases)

    return plan


def _back_to(runtime: Runtime, scope: Scoped, number: int) -> Plan:
    async def plan(session: AsyncSession, content: Content) -> Content:
        stored = await store.read_stored(session, scope.tenant, number)
        earlier = await runtime.enforcers.builder.build(stored.typing())
        return replace(content, rules=earlier.rules, links=earlier.links)

    return plan


async def _proposal(runtime: Runtime, scope: Scoped, body: ProposalBody) -> Plan:
    if body.rollback_to is not None:
        return _back_to(runtime, scope, body.rollback_to)
    if body.form is not None and body.document is not None:
        return _of(await runtime.enforcers.builder.build(reading(body.form, body.document)))

    async def plan(session: AsyncSession, content: Content) -> Content:
        del session
        return content

    return plan


def _activated(scope: Scoped, done: Activated, response: Response) -> ActivatedAnswer:
    response.headers["ETag"] = policy_tag(scope.tenant, done.version)
    return ActivatedAnswer(
        version=done.version, revision=done.revision, changed=done.row is not None
    )


def _changes(before: Content, after: Content) -> list[ChangeLine]:
    def told(each: Rule | Link | Case) -> tuple[str, str]:
        match each:
            case Rule():
                return "rule", str(each)
            case Link():
                return "role", f"{each.member} has {each.parent}"
            case Case():
                return "test", f"{each.name}: {each.expect} {each.subject} {each.resource}"

    lines = []
    for change, one, other in (("added", after, before), ("removed", before, after)):
        found: set[Rule | Link | Case] = {
            *(one.rules - other.rules),
            *(one.links - other.links),
            *(one.cases - other.cases),
        }
        for kind, text in sorted(map(told, found)):
            lines.append(ChangeLine.model_validate({"change": change, "kind": kind, "text": text}))
    return lines


def _failures(failures: tuple[Failure, ...]) -> list[FailureAnswer]:
    return [
        FailureAnswer(name=each.case.name, expected=each.case.expect, reason=each.reason)
        for each in failures[:TOLD_MAX]
    ]


def _name(case: Case) -> str:
    return case.name
