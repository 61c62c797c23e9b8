"""Reading and writing the rows of policies. The caller's session commits.

An edition is a new version under way. It gets its number from the first difference that is made
in it, so that what changes nothing makes no version. Changes are serial (`service.changes`), and
a unique constraint stands behind the number.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import ColumnElement, Executable, Select, and_, func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from policy.cases import Case, decode_context, encode_context
from policy.conditions import decode_condition, encode_condition
from policy.permissions import Permission
from policy.rules import STEP, Link, Rule, parse_rule
from service.changes import Change
from service.db.base import now
from service.rules.models import CaseRow, Origin, RoleRow, RuleRow, VersionRow
from strongroom.errors import Conflict, Corrupt, Missing, Misuse
from strongroom.identity import ComponentId

Row = RuleRow | RoleRow | CaseRow
_PART: Final = 50
"""Rows that are fetched at once."""
_IN_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Content:
    """What a version holds."""

    rules: frozenset[Rule]
    links: frozenset[Link]
    cases: frozenset[Case]


class Edition:
    """The next version of a tenant's policy, in one change."""

    def __init__(
        self,
        change: Change,
        tenant: ComponentId,
        origin: Origin,
        reason: str = "",
        source: int | None = None,
    ) -> None:
        self._change = change
        self._tenant = tenant
        self._origin = origin
        self._reason = reason
        self._source = source
        self._number: int | None = None
        self._added = 0
        self._removed = 0

    async def number(self) -> int:
        """The version's number; asking makes it a version."""
        if self._number is None:
            self._number = await newest(self._change.session, self._tenant) + 1
        return self._number

    async def add(self, each: Rule | Link | Case) -> Row:
        """Put something in that is not there; the caller has looked, or gets `Conflict`."""
        row = _row(each, self._tenant, await self.number())
        self._added += 1
        self._change.session.add(row)
        return row

    async def remove(self, row: Row) -> None:
        """Leave something out from this version on."""
        row.removed_in = await self.number()
        self._removed += 1

    async def remove_all(self, gone: Collection[Rule | Link | Case]) -> None:
        """Leave all of `gone` out, in few statements however many there are. Raises `Conflict`."""
        number = await self.number()
        session = self._change.session
        for record, kind in ((RuleRow, Rule), (RoleRow, Link), (CaseRow, Case)):
            wanted = {_key(each) for each in gone if isinstance(each, kind)}
            if not wanted:
                continue
            columns = [getattr(record, name) for name in _KEYS[record]]
            statement = select(record.id, *columns).where(
                record.tenant == self._tenant, record.removed_in.is_(None)
            )
            found = [
                row[0] for row in await in_parts(session, statement) if tuple(row[1:]) in wanted
            ]
            if len(found) != len(wanted):
                raise Conflict("this was changed by another request", field="policy")
            for start in range(0, len(found), _IN_MAX):
                await session.execute(
                    update(record)
                    .where(record.id.in_(found[start : start + _IN_MAX]))
                    .values(removed_in=number)
                    .execution_options(synchronize_session=False)
                )
            self._removed += len(found)

    async def close(self, revision: int) -> VersionRow | None:
        """Write the version, counting from `revision`; None: nothing was different."""
        if self._number is None:
            return None
        version = VersionRow(
            id=secrets.token_hex(16),
            tenant=self._tenant,
            number=self._number,
            origin=self._origin,
            author_kind=self._change.actor.kind.value,
            author=self._change.actor.id,
            reason=self._reason,
            source=self._source,
            added=self._added,
            removed=self._removed,
            revision=revision,
            created_at=now(),
        )
        self._change.session.add(version)
        await flush(self._change.session, "policy")
        return version


_KEYS: Final[Mapping[type[Row], tuple[str, ...]]] = MappingProxyType(
    {
        RuleRow: ("subject", "action", "resource", "effect", "condition"),
        RoleRow: ("subject", "role"),
        CaseRow: ("name",),
    }
)
"""What tells rows of the newest version apart."""


def _key(each: Rule | Link | Case) -> tuple[str, ...]:
    match each:
        case Rule():
            return each.sort_key
        case Link():
            return (each.member, each.parent)
        case Case():
            return (each.name,)


async def newest(session: AsyncSession, tenant: str) -> int:
    """The number of the version in force; 0: there was never a rule."""
    number = await session.scalar(
        select(func.max(VersionRow.number)).where(VersionRow.tenant == tenant)
    )
    return int(number or 0)


async def get_version(session: AsyncSession, tenant: str, number: int) -> VersionRow:
    """One version. Raises `Missing`."""
    found: VersionRow | None = await session.scalar(
        select(VersionRow).where(VersionRow.tenant == tenant, VersionRow.number == number)
    )
    if found is None:
        raise Missing("there is no such version", field="version")
    return found


def in_version(
    record: type[RuleRow | RoleRow | CaseRow], number: int | None
) -> ColumnElement[bool]:
    """Whether a row is in version `number`; None: in the newest."""
    if number is None:
        return record.removed_in.is_(None)
    return and_(
        record.added_in <= number, or_(record.removed_in.is_(None), record.removed_in > number)
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """What a version holds, as it was read: plain rows, not typed yet."""

    rules: Sequence[Any]
    roles: Sequence[Any]
    cases: Sequence[Any]

    def typing(self) -> Generator[None, None, Content]:
        """The typed content, in steps. Raises `Corrupt` for a row that is none."""
        rules: set[Rule] = set()
        links: set[Link] = set()
        cases: set[Case] = set()
        for number, rule in enumerate(self.rules):
            rules.add(typed_rule(rule))
            if number % STEP == STEP - 1:
                yield
        for number, role in enumerate(self.roles):
            links.add(typed_link(role))
            if number % STEP == STEP - 1:
                yield
        for number, case in enumerate(self.cases):
            cases.add(typed_case(case))
            if number % STEP == STEP - 1:
                yield
        return Content(frozenset(rules), frozenset(links), frozenset(cases))


async def read_stored(session: AsyncSession, tenant: str, number: int | None = None) -> Stored:
    """What a version holds; None: the newest. Raises `Missing`."""
    if number:
        await get_version(session, tenant, number)
    parts = []
    for record in (RuleRow, RoleRow, CaseRow):
        columns = [
            column
            for column in record.__table__.columns
            if column.name not in {"id", "tenant", "created_at", "added_in", "removed_in"}
        ]
        parts.append(
            await in_parts(
                session,
                select(*columns).where(record.tenant == tenant, in_version(record, number)),
            )
        )
    return Stored(*parts)


async def in_parts(session: AsyncSession, statement: Executable) -> list[Any]:
    """Every row, fetched in parts between which the event loop goes on."""
    found: list[Any] = []
    result = await session.stream(statement)
    async for part in result.partitions(_PART):
        found += part
    return found


def typed_rule(row: Any) -> Rule:
    """The rule of a row. Raises `Corrupt`."""
    try:
        condition = decode_condition(row.condition)
        return parse_rule(row.subject, row.action, row.resource, row.effect, condition=condition)
    except Misuse as error:
        raise Corrupt("a stored rule is no rule", field="rule") from error


def typed_link(row: Any) -> Link:
    """The link of a row. Raises `Corrupt`."""
    try:
        return Link(row.subject, row.role)
    except Misuse as error:
        raise Corrupt("a stored role is no role", field="role") from error


def typed_case(row: Any) -> Case:
    """The case of a row. Raises `Corrupt`."""
    try:
        return Case(
            row.name,
            row.subject,
            Permission(row.action),
            row.resource,
            row.expect,
            decode_context(row.context),
        )
    except (Misuse, ValueError) as error:
        raise Corrupt("a stored case is no case", field="case") from error


async def find_row(session: AsyncSession, tenant: str, each: Rule | Link | Case) -> Row | None:
    """The row of the newest version that holds `each`."""
    statement: Select[Any]
    match each:
        case Rule():
            statement = select(RuleRow).where(
                RuleRow.tenant == tenant,
                RuleRow.removed_in.is_(None),
                RuleRow.subject == each.subject,
                RuleRow.action == each.action.value,
                RuleRow.resource == each.resource,
                RuleRow.effect == each.effect,
                RuleRow.condition == encode_condition(each.condition),
            )
        case Link():
            statement = select(RoleRow).where(
                RoleRow.tenant == tenant,
                RoleRow.removed_in.is_(None),
                RoleRow.subject == each.member,
                RoleRow.role == each.parent,
            )
        case Case():
            statement = select(CaseRow).where(
                CaseRow.tenant == tenant, CaseRow.removed_in.is_(None), CaseRow.name == each.name
            )
    found: Row | None = await session.scalar(statement)
    return found


async def get_rule(session: AsyncSession, tenant: str, rule: str) -> RuleRow:
    """One rule of the newest version, by id. Raises `Missing`."""
    found: RuleRow | None = await session.scalar(
        select(RuleRow).where(
            RuleRow.id == rule, RuleRow.tenant == tenant, RuleRow.removed_in.is_(None)
        )
    )
    if found is None:
        raise Missing("there is no such rule", field="rule")
    return found


async def get_role(session: AsyncSession, tenant: str, role: str) -> RoleRow:
    """One role assignment of the newest version, by id. Raises `Missing`."""
    found: RoleRow | None = await session.scalar(
        select(RoleRow).where(
            RoleRow.id == role, RoleRow.tenant == tenant, RoleRow.removed_in.is_(None)
        )
    )
    if found is None:
        raise Missing("there is no such role assignment", field="role")
    return found


async def remove_subjects(
    change: Change, tenant: ComponentId, subjects: Sequence[str], revision: int, reason: str = ""
) -> None:
    """Remove every rule and role of `subjects`, and every rule about them.

    Whoever is called so next inherits nothing. Test cases stay: they are about names. Nothing
    keeps this from happening, a failing case neither.
    """
    edition = Edition(change, tenant, Origin.SUBJECT_REMOVED, reason)
    about = or_(RuleRow.subject.in_(subjects), RuleRow.resource.in_(subjects))
    found: list[Row] = [
        *await change.session.scalars(
            select(RuleRow).where(RuleRow.tenant == tenant, RuleRow.removed_in.is_(None), about)
        ),
        *await change.session.scalars(
            select(RoleRow).where(
                RoleRow.tenant == tenant,
                RoleRow.removed_in.is_(None),
                RoleRow.subject.in_(subjects),
            )
        ),
    ]
    for row in found:
        await edition.remove(row)
    await edition.close(revision)


async def flush(session: AsyncSession, field: str) -> None:
    """Flush; a race that a unique index decided is a `Conflict`."""
    try:
        await session.flush()
    except IntegrityError as error:
        raise Conflict(f"this {field} was added just now", field=field) from error


def _row(each: Rule | Link | Case, tenant: ComponentId, number: int) -> Row:
    common = {
        "id": secrets.token_hex(16),
        "tenant": tenant,
        "added_in": number,
        "created_at": now(),
    }
    match each:
        case Rule():
            return RuleRow(
                **common,
                subject=each.subject,
                action=each.action.value,
                resource=each.resource,
                effect=each.effect,
                condition=encode_condition(each.condition),
            )
        case Link():
            return RoleRow(**common, subject=each.member, role=each.parent)
        case Case():
            return CaseRow(
                **common,
                name=each.name,
                subject=each.subject,
                action=each.action.value,
                resource=each.resource,
                expect=each.expect,
                context=encode_context(each.context),
            )
