"""Exports hold what the pages hold, each tenant its own, and a spreadsheet runs none of it."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from service.audit import ocsf
from service.audit.export import cell
from service.auth.tokens import Role
from tests.service.house import Service
from tests.service.test_audit import Accessed

FORMULA = '=HYPERLINK("http://evil","x")'

# Of the published schema, version 1.8.0: class 6003, its base classes, and the objects used here.
REQUIRED = {
    "": {
        "activity_id", "category_uid", "class_uid", "severity_id", "type_uid", "time", "metadata",
        "actor", "api", "src_endpoint",
    },
    "metadata": {"product", "version"},
    "api": {"operation"},
}  # fmt: skip
KNOWN = {
    "": {
        "activity_id", "activity_name", "category_name", "category_uid", "class_name", "class_uid",
        "count", "duration", "end_time", "enrichments", "message", "metadata", "observables",
        "raw_data", "severity", "severity_id", "start_time", "status", "status_code",
        "status_detail", "status_id", "time", "timezone_offset", "type_name", "type_uid",
        "unmapped", "actor", "api", "dst_endpoint", "http_request", "http_response", "resources",
        "src_endpoint",
    },
    "metadata": {
        "version", "product", "log_name", "uid", "sequence", "original_time", "logged_time",
        "event_code", "tenant_uid",
    },
    "actor": {"app_name", "app_uid", "user", "session", "process", "idp", "invoked_by"},
    "api": {"operation", "service", "request", "response", "group", "version"},
    "src_endpoint": {"uid", "name", "svc_name", "ip", "hostname"},
}  # fmt: skip


async def export(service: Service, form: str, path: str = "events", **params: Any) -> bytes:
    response = await service.operator.ask(
        "GET", f"/v1/audit/{path}", params={"format": form, **params}
    )
    assert response.is_success, response.text
    assert "attachment" in response.headers["content-disposition"]
    return response.content


async def world(service: Service) -> Accessed:
    accessed = await Accessed(service).build()
    names = accessed.names[accessed.world.tenant]
    await accessed.serve(accessed.world, names, request=FORMULA, subject="+1+1")
    return accessed


@pytest.mark.parametrize(
    "text", [FORMULA, "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "  =1"]
)
def test_a_formula_is_text_in_a_cell(text: str) -> None:
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize(
    ("value", "text"), [("alice", "alice"), (-5, "-5"), (None, ""), (True, "true")]
)
def test_what_is_no_formula_stays_as_it_is(value: Any, text: str) -> None:
    assert cell(value) == text


async def test_csv_has_every_event_and_no_formula(service: Service) -> None:
    await world(service)
    rows = list(csv.DictReader(io.StringIO((await export(service, "csv")).decode(), newline="")))
    pages = await service.operator.get("/v1/audit/events", limit=1000)
    assert {row["seq"] for row in rows} >= {
        str(each["seq"]) for each in pages["items"] if each["kind"] != "audit.exported"
    }
    assert [row["target"] for row in rows if "HYPERLINK" in row["target"]] == [f"'{FORMULA}"]
    assert not [
        value for row in rows for value in row.values() if value.startswith(("=", "+", "@"))
    ]


async def test_parquet_has_every_event_with_numbers_as_numbers(service: Service) -> None:
    from pyarrow import parquet

    await world(service)
    raw = await export(service, "parquet", order="chain")
    table = parquet.read_table(io.BytesIO(raw))
    assert table.column("seq").to_pylist() == list(range(table.num_rows))
    loads = [row for row in table.to_pylist() if row["kind"] == "access.load"]
    assert {row["tokens"] for row in loads} == {128}
    assert all(json.loads(row["references"]) for row in loads)


async def test_ocsf_is_an_api_activity_of_the_published_class(service: Service) -> None:
    accessed = await world(service)
    await accessed.serve(accessed.world, [], outcome="miss", reason="permission", kind="denied")
    lines = (await export(service, "ocsf")).splitlines()
    assert len(lines) > 10
    for line in lines:
        event = json.loads(line)
        for place, required in REQUIRED.items():
            assert required <= set(event[place] if place else event), place
        for place, known in KNOWN.items():
            assert set(event[place] if place else event) <= known, place
        assert event["metadata"]["version"] == ocsf.VERSION == "1.8.0"
        assert (event["category_uid"], event["class_uid"]) == (6, 6003)
        assert event["type_uid"] == 600300 + event["activity_id"]
        assert event["activity_id"] in {1, 2, 3, 4, 99}
        assert event["severity_id"] in range(1, 7)
        assert event["status_id"] in {1, 2}
        assert event["actor"]["user"]["uid"]
        assert event["src_endpoint"]["uid"]
        assert isinstance(event["time"], int)
    denied = [
        each for each in map(json.loads, lines) if each["api"]["operation"] == "access.denied"
    ]
    assert [(each["status_id"], each["status_detail"]) for each in denied] == [(2, "permission")]


@pytest.mark.parametrize("form", ["jsonl", "csv", "ocsf"])
async def test_a_tenants_export_holds_that_tenants_events_and_no_others(
    service: Service, form: str
) -> None:
    accessed = await world(service)
    mine, theirs = accessed.world, accessed.other
    texts = {}
    for one in (mine, theirs):
        auditor = service.party("aud", one.tenant, Role.AUDITOR)
        for path in ("events", "accesses"):
            response = await auditor.ask("GET", f"/v1/audit/{path}", params={"format": form})
            texts[one.tenant, path] = response.text
    for path in ("events", "accesses"):
        assert accessed.names[mine.tenant][0] in texts[mine.tenant, path]
        assert accessed.names[mine.tenant][0] not in texts[theirs.tenant, path]
        assert theirs.tenant not in texts[mine.tenant, path]


async def test_questions_that_are_no_events_are_exported_too(service: Service) -> None:
    accessed = await world(service)
    document = accessed.world.document
    rows = (await export(service, "jsonl", "derived", document=document)).splitlines()
    assert {json.loads(row)["namespace"] for row in rows} == set(
        accessed.names[accessed.world.tenant][1:]
    )
    await export(service, "csv", "denials")
    await service.operator.post("/v1/audit/holds", {"reason": "=1"})
    assert "'=1" in (await export(service, "csv", "holds")).decode()
    response = await service.operator.ask("GET", "/v1/audit/denials", params={"format": "ocsf"})
    assert response.status_code == 422
