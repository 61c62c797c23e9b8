"""No question of compliance reads the whole log: the plan of every statement, on PostgreSQL."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from random import Random  # noqa: TID251 - seeded questions, no secret
from typing import Any

import pytest
from sqlalchemy import event, text

from benchmarks.control import audit
from benchmarks.scale import TINY
from benchmarks.suite import Bench
from service.db.session import open_database

EVENTS = 20_000
_WHOLE = re.compile(r"Seq Scan on (audit_events|audit_references)\w*")


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
async def test_no_question_scans_the_log(empty_database_url: str, tmp_path: Path) -> None:
    database = await audit.prepared(empty_database_url)
    bench = Bench(dataclasses.replace(TINY), tmp_path)
    await audit.load(bench, database, EVENTS)
    asked: list[tuple[str, Any]] = []
    explained = open_database(empty_database_url)

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        del conn, cursor, rest
        asked.append((statement, parameters))

    wrong: list[str] = []
    for name, ask in (await audit.questions_of(database)).items():
        asked.clear()
        event.listen(database.engine.sync_engine, "before_cursor_execute", note)
        async with database.readers() as session:
            await ask(session, Random(1))
        event.remove(database.engine.sync_engine, "before_cursor_execute", note)
        assert asked, name
        async with explained.engine.connect() as connection:
            raw = (await connection.get_raw_connection()).driver_connection
            assert raw is not None
            for statement, parameters in asked:
                if "audit_events" not in statement and "audit_references" not in statement:
                    continue
                rows = await raw.fetch(f"EXPLAIN {statement}", *parameters)
                plan = "\n".join(row[0] for row in rows)
                # A partition that is empty, or of a page or two, is read whole by right.
                for found in _WHOLE.finditer(plan):
                    table = found.group(0).split()[-1]
                    count = await connection.scalar(text(f"SELECT count(*) FROM {table}"))
                    if count and count > 500:
                        wrong.append(f"{name}: {table} ({count} rows)\n{plan}")
    await explained.close()
    await database.close()
    assert not wrong, "\n\n".join(wrong)
