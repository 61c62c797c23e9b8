"""What an operator sees of a sidecar at one instant, as plain values for `/v1/state`."""

from __future__ import annotations

from typing import Any

from sidecar.degrade.stance import Action
from sidecar.operations.metrics import Snapshot


def state_of(snapshot: Snapshot) -> dict[str, Any]:
    """Tiers, queues, pressure, breakers, engines, and what is in force. Ids and numbers only."""
    statistics, gauges = snapshot.statistics, snapshot.gauges
    watch, head = statistics.watch, statistics.log
    return {
        "sidecar": statistics.sidecar,
        "gate": {"open": statistics.gate.open, "reason": statistics.gate.reason},
        "log": None if head is None else {"epoch": head.epoch, "seq": head.seq},
        "action": watch.action.value,
        "in_force": {
            "prefetch_stopped": watch.effects.prefetch_stopped,
            "disk_admission": watch.effects.disk_admission,
            "swap_outs_paused": watch.effects.swap_outs_paused,
        },
        "pressure": {gauge.value: rung for gauge, rung in watch.rungs.items()},
        "tiers": [
            {
                "name": tier.name.value,
                "blocks": tier.blocks,
                "used_bytes": tier.used_bytes,
                "capacity_bytes": tier.capacity_bytes,
                "pinned_bytes": tier.pinned_bytes,
                "io_errors": tier.io_errors,
            }
            for tier in gauges.tiers
        ],
        "queues": [
            {"name": queue.name, "depth": queue.depth, "limit": queue.limit}
            for queue in gauges.queues
        ],
        "transfers_in_flight": gauges.transfers_in_flight,
        "prefetch_pending": statistics.prefetch.pending,
        "orphans": {
            "unconfirmed": gauges.orphans.unconfirmed,
            "retired": gauges.orphans.retired,
        },
        "engines": [
            {
                "engine": engine,
                "pages": reported.report.pages,
                "free_pages": reported.report.free_pages,
                "running": reported.report.running,
                "waiting": reported.report.waiting,
                "action": watch.actions.get(engine, Action.NONE).value,
            }
            for engine, reported in gauges.engines.items()
        ],
        "breakers": [
            {
                "name": breaker.condition.value,
                "state": breaker.state,
                "reading": breaker.reading,
                "threshold": breaker.threshold,
                "at": breaker.at,
                "evidence": breaker.evidence,
                "tripped_for": list(breaker.tripped_for),
            }
            for breaker in watch.breakers
        ],
        "last_event": watch.last_event,
    }
