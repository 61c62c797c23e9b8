"""The Prometheus exposition: what statistics and gauges say at this instant.

Rules:
- A scrape reads one frozen snapshot; no metric object lives between scrapes and nothing is
  counted here. The registry is its own: what a library registers elsewhere never shows.
- Labels are bounded: tiers, queues, breakers, reasons, engines that are connected, and the
  largest tenants of each tier by component id, the rest summed as `other`. Never a name, a
  subject, a namespace, a request or a path.
- A metric's name never changes its meaning: deploy/alerts.yml and dashboards stand on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from sidecar.degrade.gauges import Gauges, top_tenants
from sidecar.degrade.latency import BOUNDS_S, LatencyStatistics
from sidecar.statistics import SidecarStatistics
from storage.tiers.protocol import TierName, TierStatistics

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
TENANTS_MAX: Final = 20
_US: Final = 1e6


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that one scrape shows."""

    statistics: SidecarStatistics
    gauges: Gauges


def exposition(snapshot: Snapshot, *, tenants_max: int = TENANTS_MAX) -> bytes:
    """The text for `/metrics`. Costs milliseconds, so not on the event loop."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Frozen(lambda: families(snapshot, tenants_max)))
    return generate_latest(registry)


def families(snapshot: Snapshot, tenants_max: int = TENANTS_MAX) -> Iterator[Metric]:
    """Every metric there is, also those without a sample."""
    yield from _tiers(snapshot.gauges)
    yield from _queues(snapshot)
    yield from _tenants(snapshot.gauges, tenants_max)
    yield from _engines(snapshot)
    yield from _caching(snapshot.statistics)
    yield from _transfers(snapshot.statistics)
    yield from _prefetch(snapshot.statistics)
    yield from _degradation(snapshot.statistics)
    yield from _control(snapshot.statistics)


class _Frozen(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


_Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = GaugeMetricFamily(f"strongroom_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = CounterMetricFamily(f"strongroom_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _one(value: float | None) -> _Samples:
    return () if value is None else (((), value),)


def _histogram(
    name: str, text: str, labels: tuple[str, ...], found: Iterable[tuple[str, LatencyStatistics]]
) -> Metric:
    family = HistogramMetricFamily(f"strongroom_{name}", text, labels=labels)
    for label, latency in found:
        total, buckets = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), latency.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric((label,) if labels else (), buckets, latency.sum_s)
    return family


def _tiers(gauges: Gauges) -> Iterator[Metric]:
    tiers = gauges.tiers
    for name, text, values in (
        ("used_bytes", "Bytes of records", [tier.used_bytes for tier in tiers]),
        ("capacity_bytes", "Room for records", [tier.capacity_bytes for tier in tiers]),
        ("blocks", "Resident blocks", [tier.blocks for tier in tiers]),
        ("pinned_bytes", "Bytes of records that are held", [t.pinned_bytes for t in tiers]),
    ):
        samples = [((tier.name.value,), float(v)) for tier, v in zip(tiers, values, strict=True)]
        yield _gauge(f"tier_{name}", text, ("tier",), samples)
    for name, text, counts in (
        ("stored", "Records stored", [tier.stored for tier in tiers]),
        ("evictions", "Blocks evicted", [tier.evictions for tier in tiers]),
        ("quota_refusals", "Records refused by a quota", [t.quota_refusals for t in tiers]),
        ("overloads", "Records refused for want of room", [tier.overloads for tier in tiers]),
        ("io_errors", "Device operations that failed", [tier.io_errors for tier in tiers]),
        ("corrupt", "Records found damaged by a scan", [tier.corrupt for tier in tiers]),
    ):
        samples = [((tier.name.value,), float(v)) for tier, v in zip(tiers, counts, strict=True)]
        yield _counter(f"tier_{name}", text, ("tier",), samples)
    yield _gauge("nvme_free_bytes", "Room left in the tier", (), _one(gauges.nvme_free_bytes))
    yield _gauge(
        "nvme_file_system_free_bytes",
        "Room left in the file system below a device of the tier",
        ("device",),
        [((str(n),), float(free)) for n, free in gauges.file_systems_free_bytes.items()],
    )
    yield from _devices(tiers)
    yield _gauge(
        "orphan_records",
        "Records on disk whose namespace is not known to be alive, or is retired",
        ("state",),
        (
            (("unconfirmed",), gauges.orphans.unconfirmed),
            (("retired",), gauges.orphans.retired),
            (("unburied",), sum(tier.unburied for tier in tiers)),
        ),
    )


def _devices(tiers: Iterable[TierStatistics]) -> Iterator[Metric]:
    nvme = [tier for tier in tiers if tier.name is TierName.NVME]
    yield _gauge(
        "nvme_devices_out",
        "Devices that are out of service, or could not be opened",
        (),
        [((), float(tier.devices_out)) for tier in nvme],
    )
    yield _counter(
        "nvme_refused",
        "Writes refused before they reached a device",
        ("reason",),
        [
            sample
            for tier in nvme
            for sample in (
                (("budget",), float(tier.budget_refusals)),
                (("floor",), float(tier.floor_refusals)),
            )
        ],
    )
    for name, text, values in (
        ("written_bytes", "Bytes written to devices", [tier.written_bytes for tier in nvme]),
        ("lost", "Blocks gone with a device or a damaged region", [tier.lost for tier in nvme]),
        ("moved", "Records kept when their region was reclaimed", [tier.moved for tier in nvme]),
    ):
        yield _counter(f"nvme_{name}", text, (), [((), float(value)) for value in values])


def _queues(snapshot: Snapshot) -> Iterator[Metric]:
    queues = [
        (queue.name.removeprefix("strongroom-"), queue.depth, queue.limit)
        for queue in snapshot.gauges.queues
    ]
    offload = snapshot.statistics.store.offload
    depths = [((name,), float(depth)) for name, depth, _ in queues]
    if offload is not None:
        depths.append((("offload",), float(offload.pending)))
    yield _gauge("queue_depth", "Jobs that run or wait", ("queue",), depths)
    limits = [((name,), float(limit)) for name, _, limit in queues]
    yield _gauge("queue_limit", "Jobs that may run or wait", ("queue",), limits)
    yield _gauge(
        "queue_tenants",
        "Tenants that have something waiting for its turn",
        ("queue",),
        [((q.name.removeprefix("strongroom-"),), float(q.tenants)) for q in snapshot.gauges.queues],
    )
    yield _counter(
        "queue_refused",
        "Jobs that found their tenant's part of the queue full",
        ("queue",),
        [((q.name.removeprefix("strongroom-"),), float(q.refused)) for q in snapshot.gauges.queues],
    )
    yield _gauge(
        "offload_pending_bytes",
        "Bytes in host memory on their way to NVMe",
        (),
        _one(None if offload is None else offload.pending_bytes),
    )
    yield _gauge(
        "offload_oldest_seconds",
        "How long the oldest of them has waited",
        (),
        _one(None if offload is None else offload.oldest_s),
    )
    failed = () if offload is None else [((c.value,), float(n)) for c, n in offload.failed.items()]
    yield _counter("offload_failed", "Offloads that failed", ("cause",), failed)
    yield _gauge(
        "transfers_in_flight", "Loads and saves", (), _one(snapshot.gauges.transfers_in_flight)
    )


def _tenants(gauges: Gauges, tenants_max: int) -> Iterator[Metric]:
    uses = top_tenants(gauges.tenants, tenants_max)
    yield _gauge(
        "tenant_used_bytes",
        "Bytes charged to a tenant",
        ("tier", "tenant"),
        [((use.tier.value, use.tenant), float(use.used_bytes)) for use in uses],
    )
    yield _gauge(
        "tenant_quota_bytes",
        "A tenant's hard cap",
        ("tier", "tenant"),
        [
            ((use.tier.value, use.tenant), float(use.cap_bytes))
            for use in uses
            if use.cap_bytes is not None
        ],
    )


def _engines(snapshot: Snapshot) -> Iterator[Metric]:
    found = snapshot.gauges.engines
    known = {engine: r.report for engine, r in found.items() if r.report.pages}
    for name, text, values in (
        ("pages", "Pages on the GPU", {e: r.pages for e, r in known.items()}),
        ("free_pages", "Pages that are free", {e: r.free_pages for e, r in known.items()}),
        ("running", "Requests in a step", {e: r.report.running for e, r in found.items()}),
        ("waiting", "Requests that wait", {e: r.report.waiting for e, r in found.items()}),
    ):
        samples = [((engine,), float(value)) for engine, value in values.items()]
        yield _gauge(f"engine_{name}", text, ("engine",), samples)
    reports = {engine: reported.report for engine, reported in found.items()}
    for name, text, totals in (
        ("prefill_tokens", "Prompt tokens computed", [r.prefill_tokens for r in reports.values()]),
        (
            "prefill_seconds",
            "Of steps with prompts",
            [r.prefill_us / _US for r in reports.values()],
        ),
        ("busy_seconds", "With a step in flight", [r.busy_us / _US for r in reports.values()]),
        ("idle_seconds", "Waiting for a load", [r.idle_us / _US for r in reports.values()]),
    ):
        samples = [((engine,), float(v)) for engine, v in zip(reports, totals, strict=True)]
        yield _counter(f"engine_{name}", text, ("engine",), samples)
    actions = snapshot.statistics.watch.actions
    yield _gauge(
        "engine_action",
        "What is in force: 0 none, 1 stop prefetch, 2 limit context, 3 recompute, "
        "4 engine-only, 5 refuse",
        ("engine",),
        [((engine,), float(action.weight)) for engine, action in actions.items()],
    )


def _caching(statistics: SidecarStatistics) -> Iterator[Metric]:
    store, watch = statistics.store, statistics.watch
    hits = [((tier.value,), float(count)) for tier, count in store.hits.items()]
    yield _counter("block_hits", "Blocks opened", ("tier",), hits)
    yield _counter("block_misses", "Blocks that were gone when read", (), _one(store.misses))
    yield _counter("blocks_quarantined", "Blocks that did not open", (), _one(store.quarantined))
    yield _counter("blocks_fenced", "Blocks stopped by an invalidation", (), _one(store.fenced))
    yield _counter("quota_refusals", "Saves over a quota", (), _one(store.quota_refusals))
    yield _counter("loads", "Loads that ended well", (), _one(watch.loads))
    yield _counter("loads_failed", "Loads that did not", (), _one(watch.loads_failed))
    yield _counter("saves", "Blocks saved", (), _one(watch.saves))
    yield _counter("saves_refused", "Saves that stored less", (), _one(watch.saves_refused))
    yield _counter("tokens_restored", "Tokens restored", (), _one(watch.tokens_restored))
    yield _histogram("lookup_seconds", "From Open to a positive verdict", (), (("", watch.lookup),))
    yield _histogram(
        "restore_seconds", "From Load to LoadDone, by slowest tier", ("tier",),
        watch.restore.items(),
    )  # fmt: skip
    yield _counter(
        "accesses",
        "What was put on record",
        ("kind", "outcome", "reason"),
        [(tuple(map(str, key)), float(count)) for key, count in statistics.events.items()],
    )
    yield _gauge("engines", "Engines connected", (), _one(statistics.engines))
    yield _gauge("requests", "Requests known", (), _one(statistics.requests))
    yield _counter(
        "requests_refused", "Beyond a tenant's part", (), _one(statistics.requests_refused)
    )
    yield _gauge("staging_used_bytes", "Staging in use", (), _one(statistics.staging_used_bytes))
    yield _counter(
        "protocol_violations", "Broken connections", (), _one(statistics.protocol_violations)
    )


def _transfers(statistics: SidecarStatistics) -> Iterator[Metric]:
    saves, hints, onboard = statistics.saves, statistics.hints, statistics.store.onboard
    yield _counter(
        "save_blocks",
        "Blocks that engines handed in, by what became of them",
        ("outcome",),
        [
            (("stored",), float(saves.stored)),
            (("present",), float(saves.present)),
            *(((f"dropped_{r.value}",), float(n)) for r, n in saves.dropped.items()),
        ],
    )
    yield _counter("save_bytes", "Bytes of records stored", (), _one(saves.stored_bytes))
    yield _counter(
        "hints",
        "Hints, by what became of them",
        ("outcome",),
        [
            (("taken",), float(hints.taken)),
            (("dropped",), float(hints.dropped)),
            (("denied",), float(hints.denied)),
            (("begun",), float(hints.begun)),
        ],
    )
    yield _counter(
        "onboard_blocks",
        "Blocks brought from NVMe into host memory",
        ("outcome",),
        [
            (("brought",), float(onboard.brought)),
            (("failed",), float(onboard.failed)),
            (("overdue",), float(onboard.overdue)),
        ],
    )
    yield _counter("onboard_bytes", "Bytes of records brought", (), _one(onboard.brought_bytes))
    yield _gauge("onboard_held", "Blocks that onboardings hold", (), _one(onboard.held))
    yield _gauge(
        "restore_cost_seconds",
        "What bringing a block took lately, by tier, block size and quantile",
        ("tier", "bytes", "part", "quantile"),
        [
            ((row.tier.value, str(row.bytes_class), part, quantile), seconds)
            for row in statistics.costs
            for part, three in (("queue", row.queue_s), ("service", row.service_s))
            for quantile, seconds in zip(("0.5", "0.95", "0.99"), three, strict=True)
        ],
    )


def _prefetch(statistics: SidecarStatistics) -> Iterator[Metric]:
    prefetch = statistics.prefetch
    yield _gauge("prefetch_pending", "Prefetches planned or under way", (), _one(prefetch.pending))
    yield _gauge(
        "prefetch_pending_bytes", "Bytes reserved by prefetches", (), _one(prefetch.pending_bytes)
    )
    yield _counter(
        "prefetch_blocks",
        "Blocks of prefetches by what became of them",
        ("outcome",),
        (
            (("issued",), prefetch.issued),
            (("completed",), prefetch.completed),
            (("used",), prefetch.used),
            (("wasted",), prefetch.wasted),
            (("deadline_missed",), prefetch.deadline_missed),
            (("cancelled",), prefetch.cancelled),
            (("failed",), prefetch.failed),
            (("leaked",), prefetch.leaked),
        ),
    )
    yield _gauge("prefetch_waste_ratio", "Of what was brought", (), _one(prefetch.waste_ratio))
    yield _gauge(
        "prefetch_tenants_stopped", "For their own waste", (), _one(prefetch.tenants_stopped)
    )


def _degradation(statistics: SidecarStatistics) -> Iterator[Metric]:
    watch = statistics.watch
    yield _gauge(
        "pressure_rung",
        "How far a gauge has stepped down; 0 is normal",
        ("gauge",),
        [((gauge.value,), float(rung)) for gauge, rung in watch.rungs.items()],
    )
    yield _gauge("action", "The heaviest action in force", (), _one(watch.action.weight))
    yield _gauge("disk_admission", "1 usual, 0 none", (), _one(watch.effects.disk_admission))
    yield _gauge(
        "swap_outs_paused", "1 while none begins", (), _one(watch.effects.swap_outs_paused)
    )
    yield _counter("pressure_steps", "Steps up and down", (), _one(watch.steps))
    breakers = watch.breakers
    yield _gauge(
        "breaker_tripped",
        "1 while it turns caching off",
        ("breaker",),
        [((b.condition.value,), float(b.state == "tripped")) for b in breakers],
    )
    yield _gauge(
        "breaker_reading",
        "What it measures now",
        ("breaker",),
        [((b.condition.value,), b.reading) for b in breakers if b.reading is not None],
    )
    yield _gauge(
        "breaker_threshold",
        "What that is compared with",
        ("breaker",),
        [((b.condition.value,), b.threshold) for b in breakers],
    )
    yield _gauge(
        "breaker_tripped_for",
        "For how many engines or tenants it is tripped, or 1 for the node",
        ("breaker",),
        [((b.condition.value,), float(len(b.tripped_for))) for b in breakers],
    )
    yield _counter("breaker_trips", "Trips of any breaker", (), _one(watch.trips))
    yield _counter("release_looks", "Releases looked at twice", (), _one(watch.looks))
    yield _counter("cross_tenant_hits", "Caught; always zero", (), _one(watch.crossed))
    yield _counter("reads_after_deletion", "Caught; always zero", (), _one(watch.deleted))


def _control(statistics: SidecarStatistics) -> Iterator[Metric]:
    spool, head = statistics.spool, statistics.log
    yield _gauge("gate_open", "1 while it may serve", (), _one(statistics.gate.open))
    yield _gauge("log_seq", "Applied up to here", (), _one(None if head is None else head.seq))
    yield _gauge("log_broken", "1 after a gap or fork", (), _one(bool(statistics.log_broken)))
    yield _counter(
        "serving_leases_failed", "Renewals that failed", (), _one(statistics.serving_leases_failed)
    )
    yield _gauge("namespaces_leased", "Key leases", (), _one(statistics.namespaces_leased))
    yield _gauge("spool_pending", "Audit events not shipped", (), _one(spool.pending))
    yield _gauge("spool_bytes", "Bytes of the audit spool", (), _one(spool.bytes))
    yield _gauge("spool_blocked", "1 while nothing can be recorded", (), _one(spool.blocked))
    yield _gauge("last_event", "Number of the newest event", (), _one(statistics.watch.last_event))
