"""Events as OCSF: schema 1.8.0, class API Activity (6003) of category Application Activity (6).

What OCSF has a place for goes there; the rest is in `unmapped`, so that the export loses nothing.
A denial is status Failure; an alarm has severity High.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from service.audit.events import Category
from service.audit.schemas import EventAnswer

VERSION: Final = "1.8.0"
CLASS_UID: Final = 6003
CATEGORY_UID: Final = 6
_CREATE, _READ, _UPDATE, _DELETE, _OTHER = 1, 2, 3, 4, 99
_ACTIVITIES: Final = {
    _CREATE: "Create",
    _READ: "Read",
    _UPDATE: "Update",
    _DELETE: "Delete",
    _OTHER: "Other",
}
_VERBS: Final = {
    "save": _CREATE,
    "created": _CREATE,
    "registered": _CREATE,
    "added": _CREATE,
    "issued": _CREATE,
    "enrolled": _CREATE,
    "placed": _CREATE,
    "lookup": _READ,
    "load": _READ,
    "hint": _READ,
    "leased": _READ,
    "exported": _READ,
    "verified": _READ,
    "upgraded": _UPDATE,
    "rotated": _UPDATE,
    "in_force": _UPDATE,
    "reviewed": _UPDATE,
    "removed": _DELETE,
    "committed": _DELETE,
    "destroyed": _DELETE,
    "released": _DELETE,
    "purged": _DELETE,
}
_INFORMATIONAL, _LOW, _HIGH = 1, 2, 4
_SEVERITIES: Final = {_INFORMATIONAL: "Informational", _LOW: "Low", _HIGH: "High"}
_SUCCESS, _FAILURE = 1, 2


def api_activity(event: EventAnswer) -> dict[str, Any]:
    """One event as an API Activity."""
    activity = _VERBS.get(event.kind.rpartition(".")[2], _OTHER)
    severity = _severity(event.category)
    failed = event.category in (Category.DENIED, Category.ALARM) or event.outcome == "failed"
    found: dict[str, Any] = {
        "category_uid": CATEGORY_UID,
        "category_name": "Application Activity",
        "class_uid": CLASS_UID,
        "class_name": "API Activity",
        "activity_id": activity,
        "activity_name": _ACTIVITIES[activity],
        "type_uid": CLASS_UID * 100 + activity,
        "type_name": f"API Activity: {_ACTIVITIES[activity]}",
        "severity_id": severity,
        "severity": _SEVERITIES[severity],
        "time": _milliseconds(event.occurred_at),
        "status_id": _FAILURE if failed else _SUCCESS,
        "status": "Failure" if failed else "Success",
        "status_code": event.outcome,
        "metadata": _metadata(event),
        "actor": {
            "app_name": event.actor_kind,
            "app_uid": event.actor,
            "user": {"uid": event.subject or event.actor, "type_id": 0},
        },
        "api": {"operation": event.kind, "service": {"name": "strongroom"}},
        "src_endpoint": {"uid": event.actor, "name": event.actor_kind},
        "resources": [
            {"uid": reference, "type": "namespace" if len(reference) == 64 else "component"}
            for reference in event.references
        ],
        "unmapped": {
            "target": event.target,
            "tokens": event.tokens,
            "bytes": event.bytes,
            "tier": event.tier,
            "grant": event.grant,
            "prev": event.prev,
            "hash": event.hash,
            "details": event.details,
        },
    }
    if event.reason:
        found["status_detail"] = event.reason
    if event.request:
        found["api"]["request"] = {"uid": event.request}
    return found


def _metadata(event: EventAnswer) -> dict[str, Any]:
    found: dict[str, Any] = {
        "version": VERSION,
        "product": {"name": "Strongroom", "vendor_name": "Strongroom"},
        "log_name": "audit",
        "uid": event.hash,
        "sequence": event.seq,
        "original_time": event.occurred_at,
        "logged_time": _milliseconds(event.at),
        "event_code": event.kind,
    }
    if event.tenant is not None:
        found["tenant_uid"] = event.tenant
    return found


def _severity(category: Category) -> int:
    match category:
        case Category.ALARM:
            return _HIGH
        case Category.DENIED:
            return _LOW
        case Category.SERVED | Category.MISSED | Category.KEY | Category.GRANT | Category.CONTROL:
            return _INFORMATIONAL


def _milliseconds(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)
