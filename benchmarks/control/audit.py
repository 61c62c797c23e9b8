"""The audit on PostgreSQL: appending, verifying, and every compliance question on a long log.

Events are appended by `service.audit.store.append`, as the service does it, so that chain, tree and
tiles are what they would be. For the long log the indices are made after the rows, as one would
restore a dump; for the rate of appending they are all there and the database syncs every commit.

The log: as many tenants as `_TENANTS`, each with documents and namespaces; nine accesses of ten are
served, the rest is missed, denied, key leases and grants; one document is in a thousand namespaces;
there are revocations of documents, of a subject and of a model that everything depends on.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from random import Random  # noqa: TID251 - seeded questions, no secret
from typing import Final

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from benchmarks.control.group import GROUP
from benchmarks.control.postgres import lacks, postgres
from benchmarks.rows import Row, absolute
from benchmarks.suite import Bench, Suite
from policy.signing import Verifier
from service.audit import holds, partitions, questions, store
from service.audit.events import Category, Draft, encode_details
from service.audit.models import AuditReference, AuditRow
from service.audit.questions import Filter
from service.audit.report import report_of
from service.audit.search import Search, find
from service.audit.verify import Intact, verify_chain
from service.db.migrate import upgrade_async
from service.db.session import Database, open_database
from service.revocation.models import Revocation

_TENANTS: Final = 200
_DOCUMENTS: Final = 10_000
_NAMESPACES: Final = 20_000
_POPULAR: Final = 1000
"""Namespaces that depend on the first document."""
_DAYS: Final = 80
_BATCH: Final = 1000
"""What a sidecar ships at most at once."""
_LOADED_AT_ONCE: Final = 10_000
_DRAFTS: Final = 100_000
"""Different events; a longer log repeats them at other times."""
_MS: Final = 1e3

Ask = Callable[[AsyncSession, Random], Awaitable[object]]


def measure(bench: Bench) -> list[Row]:
    """Appending and verifying."""
    with bench.folder("audit") as folder, postgres(folder) as url:
        return asyncio.run(_rates(bench, url))


def measure_questions(bench: Bench) -> list[Row]:
    """The questions."""
    with bench.folder("questions") as folder, postgres(folder) as url:
        return asyncio.run(_questions(bench, url))


async def _rates(bench: Bench, url: str) -> list[Row]:
    database = await prepared(url)
    drafts = [_draft(number) for number in range(min(_DRAFTS, bench.scale.audit_events))]
    appended, verified = [], []
    now = datetime.now(UTC)
    for _ in bench.rounds("audit: appending and verifying"):
        begun = time.perf_counter()
        for start in range(0, len(drafts), _BATCH):
            async with database.writers() as session, session.begin():
                await store.append(session, drafts[start : start + _BATCH], now)
        append_s = time.perf_counter() - begun
        async with database.snapshots() as session:
            begun = time.perf_counter()
            verdict = await verify_chain(session, Verifier({}))
            verify_s = time.perf_counter() - begun
            assert isinstance(verdict, Intact), verdict
            read_s = await _read(session)
        appended.append((len(drafts) / append_s, len(drafts) / await _plain(database, len(drafts))))
        verified.append((verdict.events / verify_s, verdict.events / read_s))
    await database.close()
    batches = f"PostgreSQL, every index, batches of {_BATCH}, each synced; reference: "
    return [
        absolute(
            "audit_append_per_s",
            "events/s",
            appended,
            batches + "the rows alone copied by INSERT ... SELECT into a table without indices",
        ),
        absolute(
            "audit_verify_per_s", "events/s", verified, "reference: reading the rows and no more"
        ),
    ]


async def _read(session: AsyncSession) -> float:
    """Seconds to read events and references."""
    begun = time.perf_counter()
    for record in (AuditRow, AuditReference):
        connection = await session.connection()
        async with connection.stream(select(record.__table__)) as rows:
            async for _ in rows.partitions(2000):
                pass
    return time.perf_counter() - begun


async def _plain(database: Database, count: int) -> float:
    """Seconds to copy so many rows within the database."""
    async with database.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE plain (LIKE audit_events)"))
        begun = time.perf_counter()
        await connection.execute(
            text("INSERT INTO plain SELECT * FROM audit_events ORDER BY seq LIMIT :n"),
            {"n": count},
        )
        took_s = time.perf_counter() - begun
        await connection.execute(text("DROP TABLE plain"))
    return took_s


async def _questions(bench: Bench, url: str) -> list[Row]:
    database = await prepared(url)
    await load(bench, database, bench.scale.audit_questions_events)
    asks = await questions_of(database)
    worst = []
    slowest: dict[str, float] = {}
    for number in bench.rounds("audit: questions"):
        random = Random(number)
        for name, ask in asks.items():
            samples = []
            for _ in range(bench.scale.audit_asked):
                async with database.readers() as session:
                    begun = time.perf_counter()
                    await ask(session, random)
                    samples.append((time.perf_counter() - begun) * _MS)
            samples.sort()
            p95 = samples[min(len(samples) - 1, int(len(samples) * 0.95))]
            slowest[name] = max(slowest.get(name, 0.0), p95)
        async with database.readers() as session:
            begun = time.perf_counter()
            await session.scalar(text("SELECT count(*) FROM audit_events WHERE actor_kind = 'x'"))
            scan_ms = (time.perf_counter() - begun) * _MS
        worst.append((max(slowest.values()), scan_ms))
    await database.close()
    told = ", ".join(
        f"{name} {p95:.0f}" for name, p95 in sorted(slowest.items(), key=lambda each: -each[1])
    )
    note = f"{bench.scale.audit_questions_events} events; p95 of each: {told}; reference: one scan"
    return [absolute("audit_query_ms_p95", "ms", worst, note)]


async def questions_of(database: Database) -> dict[str, Ask]:
    """Every question, the wide ones and those of one tenant, in the middle of the log."""
    begin = _begin()
    async with database.readers() as session:
        revocations = (await session.scalars(select(Revocation))).all()
    by_axis = {str(row.axis): row for row in revocations}

    def window(random: Random) -> tuple[datetime, datetime]:
        since = begin + timedelta(days=random.randrange(_DAYS - 10))
        return since, since + timedelta(days=7)

    def tenant(random: Random) -> str:
        return _id("tenant", random.randrange(_TENANTS))

    def listing(make: Callable[[Random], Search]) -> Ask:
        async def ask(session: AsyncSession, random: Random) -> object:
            search = make(random)
            newest_first = random.random() < 0.5
            found = await find(session, search, None, 100, newest_first=newest_first)
            if found.last is not None:
                found = await find(session, search, found.last, 100, newest_first=newest_first)
            return found

        return ask

    def within(random: Random, **fields: str) -> Filter:
        since, until = window(random)
        return Filter(since=since, until=until, **fields)  # type: ignore[arg-type]

    async def of_document(session: AsyncSession, number: int) -> Search:
        versions = await questions.versions_of(session, _id("document", number), None)
        candidates = await questions.depending_on(session, versions)
        return Search((questions.accesses(),), candidates)

    async def document(session: AsyncSession, random: Random) -> object:
        number = random.randrange(1, _DOCUMENTS)
        return await find(session, await of_document(session, number), None, 100)

    async def popular(session: AsyncSession, random: Random) -> object:
        search = await of_document(session, 0)
        return await find(session, search, None, 100, newest_first=random.random() < 0.5)

    async def derived(session: AsyncSession, random: Random) -> object:
        del random
        versions = await questions.versions_of(session, _id("document", 0), None)
        return await questions.derived(session, versions, None, 100)

    async def key(session: AsyncSession, random: Random) -> object:
        ids = [_id("document", random.randrange(1, _DOCUMENTS))]
        candidates = await questions.depending_on(session, ids, Category.KEY)
        search = Search((questions.is_category(Category.KEY),), candidates)
        return await find(session, search, None, 100)

    async def denials(session: AsyncSession, random: Random) -> object:
        return await questions.denials(session, within(random))

    async def all_denials(session: AsyncSession, random: Random) -> object:
        del random
        return await questions.denials(session, Filter())

    async def tenant_denials(session: AsyncSession, random: Random) -> object:
        return await questions.denials(session, Filter(tenant=tenant(random)))

    async def standing_holds(session: AsyncSession, random: Random) -> object:
        del random
        return await holds.standing(session)

    async def report(session: AsyncSession, random: Random) -> object:
        return await report_of(session, window(random)[0].date(), None)

    async def tenant_report(session: AsyncSession, random: Random) -> object:
        return await report_of(session, window(random)[0].date(), tenant(random))

    return {
        "accesses of a tenant": listing(
            lambda random: within(random, tenant=tenant(random)).search().also(questions.accesses())
        ),
        "accesses of all": listing(lambda random: within(random).search()),
        "accesses of a subject": listing(
            lambda random: within(
                random, tenant=tenant(random), subject=f"user-{random.randrange(1000)}"
            ).search()
        ),
        "a request": listing(
            lambda random: Filter(target=f"request-{random.randrange(_DRAFTS)}").search()
        ),
        "a sidecar": listing(lambda random: within(random, actor=_id("sidecar", 3)).search()),
        "a kind": listing(lambda random: within(random, kind="key.leased").search()),
        "alarms": listing(lambda _: Filter(category=Category.ALARM).search()),
        "denied events": listing(
            lambda random: within(random).search().also(questions.is_category(Category.DENIED))
        ),
        "accesses of a document": document,
        "accesses of a popular document": popular,
        "derived from a document": derived,
        "after a document's revocation": listing(
            lambda _: questions.after_revocation(by_axis["document_version"])
        ),
        "after a subject's revocation": listing(
            lambda _: questions.after_revocation(by_axis["subject"])
        ),
        "after a model's revocation": listing(
            lambda _: questions.after_revocation(by_axis["model"])
        ),
        "uses of a key": key,
        "uses of keys in a tenant": listing(
            lambda random: (
                Filter(tenant=tenant(random)).search().also(questions.is_category(Category.KEY))
            )
        ),
        "cross-tenant hits": listing(lambda _: Search((), questions.cross_tenant())),
        "denials of a week": denials,
        "denials of all time": all_denials,
        "denials of a tenant": tenant_denials,
        "holds": standing_holds,
        "report": report,
        "report of a tenant": tenant_report,
    }


def _id(*parts: object) -> str:
    return hashlib.md5(repr(parts).encode(), usedforsecurity=False).hexdigest()


def _namespace(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def _begin() -> datetime:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=_DAYS)


def _draft(number: int) -> Draft:
    random = Random(number)
    tenant = random.randrange(_TENANTS)
    # The namespaces of a tenant are those whose number is the tenant's, modulo all tenants.
    namespace = random.randrange(_NAMESPACES // _TENANTS) * _TENANTS + tenant
    die = random.randrange(1000)
    kind, outcome, reason = "access.load", "hit", "host"
    if die < 20:
        kind, outcome, reason = "access.denied", "miss", random.choice(("permission", "revoked"))
    elif die < 50:
        kind, outcome, reason = "access.lookup", "miss", "nvme"
    elif die < 80:
        kind, outcome, reason = "key.leased", "ok", ""
    elif die < 100:
        kind, outcome, reason = "grant.issued", "ok", ""
    details = {"spool": "spool-000001", "count": number, "tokens": 256, "tier": "host"}
    return Draft(
        kind=kind,
        actor_kind="sidecar",
        actor=_id("sidecar", random.randrange(20)),
        tenant=_id("tenant", tenant),
        subject=f"user-{random.randrange(1000)}",
        target=f"request-{number}",
        outcome=outcome,
        reason=reason,
        details=encode_details(details | {"bytes": 33554432, "grant": _id("grant", number)}),
        references=(_namespace(namespace),),
    )


async def load(bench: Bench, database: Database, count: int) -> None:
    """Append `count` events, spread over the days of the log."""
    drafts = []
    for number in range(min(_DRAFTS, count)):
        drafts.append(_draft(number))
        if number % 20_000 == 0:
            bench.say(f"audit: {number} kinds of events made")
    begin = _begin()
    async with database.writers() as session, session.begin():
        for month in range(4):
            await partitions.make_ahead(session, begin + timedelta(days=31 * month))
    indices = await _take_indices(database)
    for start in range(0, count, _LOADED_AT_ONCE):
        at = begin + timedelta(days=_DAYS) * (start / count)
        part = [
            drafts[number % len(drafts)]
            for number in range(start, min(start + _LOADED_AT_ONCE, count))
        ]
        async with database.writers() as session, session.begin():
            await session.execute(text("SET LOCAL synchronous_commit = off"))
            await store.append(session, part, at)
        if start % 200_000 == 0:
            bench.say(f"audit: {start} of {count} events loaded")
    bench.say("audit: making indices")
    engine = database.engine.execution_options(isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text("SET maintenance_work_mem = '512MB'"))
        for index in indices:
            await connection.execute(text(index))
        await connection.execute(text("VACUUM ANALYZE"))


async def _take_indices(database: Database) -> list[str]:
    """Drop every index but the keys; returns how they are made."""
    async with database.engine.begin() as connection:
        rows = await connection.execute(
            text(
                "SELECT indexname, indexdef FROM pg_indexes WHERE indexname LIKE 'ix\\_%' "
                "AND tablename IN ('audit_events', 'audit_references')"
            )
        )
        found = rows.all()
        for name, _ in found:
            await connection.execute(text(f"DROP INDEX {name}"))
    return [made.replace(" ON ONLY ", " ON ") for _, made in found]


async def prepared(url: str) -> Database:
    """Migrated, with tenants, documents, namespaces and revocations."""
    await upgrade_async(url)
    database = open_database(url)
    begin = _begin()
    now = datetime.now(UTC)
    component = "INSERT INTO components (id, kind, tenant, kek, kek_version, wrapped, created_at"
    async with database.engine.begin() as connection:
        # Rows that the registry would make one by one; the audit's own tables have no foreign key.
        await connection.execute(text("SET LOCAL session_replication_role = replica"))
        tenants = [_id("tenant", number) for number in range(_TENANTS)]
        await connection.execute(
            text(f"{component}) VALUES (:id, 'tenant', NULL, 'k', 1, 'x', :at)"),
            [{"id": each, "at": begin} for each in tenants],
        )
        gone = [_id("model"), *(_id("document", number) for number in range(1, 51))]
        await connection.execute(
            text(
                f"{component}, destroyed_at) VALUES (:id, 'document_version', NULL, 'k', 1, NULL, "
                ":at, :now)"
            ),
            [{"id": each, "at": begin, "now": now} for each in gone],
        )
        documents = [
            {
                "id": _id("document", number),
                "document": _id("work", number),
                "tenant": tenants[number % _TENANTS],
                "digest": _namespace(-number),
                "at": begin,
            }
            for number in range(_DOCUMENTS)
        ]
        await connection.execute(
            text(
                'INSERT INTO document_versions (id, document, tenant, "group", content_digest, '
                "created_at) VALUES (:id, :document, :tenant, :tenant, :digest, :at)"
            ),
            documents,
        )
        await connection.execute(
            text("INSERT INTO namespaces (id, tenant, created_at) VALUES (:id, :tenant, :at)"),
            [
                {"id": _namespace(number), "tenant": tenants[number % _TENANTS], "at": begin}
                for number in range(_NAMESPACES)
            ],
        )
        parts = []
        for number in range(_NAMESPACES):
            needs = {tenants[number % _TENANTS], _id("model"), _id("tokenizer"), _id("template")}
            needs.add(_id("document", number % _DOCUMENTS))
            if number < _POPULAR:
                needs.add(_id("document", 0))
            parts += [
                {"namespace": _namespace(number), "component": each, "position": position}
                for position, each in enumerate(sorted(needs))
            ]
        await connection.execute(
            text(
                "INSERT INTO namespace_components (namespace, component, position) "
                "VALUES (:namespace, :component, :position)"
            ),
            parts,
        )
        await _revoke(connection.execute, now)
    return database


async def _revoke(execute: Callable[..., Awaitable[object]], now: datetime) -> None:
    """Revocations of fifty documents, a subject and a model, in force at the end of the log."""
    moment = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    asked = [("document_version", [_id("document", number)]) for number in range(1, 51)]
    asked += [("model", [_id("model")]), ("subject", [])]
    for seq, (axis, components) in enumerate(asked, start=1):
        row = {"id": _id("revocation", seq), "axis": axis, "seq": seq, "at": moment}
        row |= {"tenant": _id("tenant", 1), "components": "".join(components)}
        await execute(
            text(
                "INSERT INTO revocations (id, axis, tenant, target, reason, asked_by, request, "
                "committed_at, epoch, seq, components, effective_at) VALUES (:id, :axis, :tenant, "
                "'{\"subject\":\"user-7\"}', 'x', 'root', 'x', :at, 'e', :seq, :components, :at)"
            ),
            row,
        )
        await execute(
            text(
                "INSERT INTO log_entries (position, epoch, seq, at, kind, tenant, subject, "
                "min_revision, sidecar, hash, jws) VALUES (:seq, 'e', :seq, :at, 'components', '', "
                "'', 0, '', 'x', 'x')"
            ),
            {"seq": seq, "at": moment},
        )
        for component in components:
            await execute(
                text("INSERT INTO log_components (position, component) VALUES (:seq, :component)"),
                {"seq": seq, "component": component},
            )
    await execute(
        text(
            "INSERT INTO log_counter (id, position, epoch, seq, hash) VALUES (1, :n, 'e', :n, 'x')"
        ),
        {"n": len(asked)},
    )


SUITE = Suite(
    name="control-audit",
    summary="appending audit events and verifying them",
    rows=("audit_append_per_s", "audit_verify_per_s"),
    measure=measure,
    lacks=lacks,
    group=GROUP,
)
QUESTIONS = Suite(
    name="control-audit-questions",
    summary="every compliance question on a long log (minutes to load it)",
    rows=("audit_query_ms_p95",),
    measure=measure_questions,
    lacks=lacks,
    group=GROUP,
)
