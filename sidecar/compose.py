"""The one place that builds the sidecar: `async with running(settings) as sidecar`.

The order of start: state directory, store, spool, enrolment, then the socket, and beside it the
tasks that follow the log, renew leases and ship the audit. The socket listens before the first
lease is there: an engine is answered "miss" at once instead of waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import httpx

from sidecar.clocks import NS, Clocks
from sidecar.control.client import ClientTls, ControlClient, enrol, http_client
from sidecar.control.gate import Gate
from sidecar.control.leases import KeyLeases, ServingLeases
from sidecar.control.logstate import LogState
from sidecar.control.renewal import Renewal
from sidecar.cost.appraisal import AppraisalSettings, Appraiser
from sidecar.cost.decision import DecisionSettings
from sidecar.cost.model import CostSettings
from sidecar.degrade.breaker import Breakers, BreakerSettings
from sidecar.degrade.gauges import Gauges, read_gauges
from sidecar.degrade.pressure import Ladders, Pressure, SidecarLevers
from sidecar.degrade.sentry import Sentry
from sidecar.degrade.watch import Sources, Tally, Watch, WatchSettings
from sidecar.engines.hello import Doorkeeper
from sidecar.engines.hints import HintDesk, HintLimits
from sidecar.engines.opens import Names, Steps
from sidecar.engines.server import Server, ServerLimits, listening
from sidecar.engines.session import Bench, SessionLimits, Sessions
from sidecar.lookup.judge import Judge
from sidecar.operations.door import Operations, open_place, place_of
from sidecar.operations.doorway import serving
from sidecar.operations.metrics import Snapshot
from sidecar.prefetch.prefetcher import Prefetcher
from sidecar.record.audit import Audit
from sidecar.record.damage import Damage
from sidecar.record.events import Events, Sequence
from sidecar.record.residency import ResidencyReporter
from sidecar.record.shipper import Shipper
from sidecar.record.spool import Spool, SpoolSettings
from sidecar.revocation.follower import Follower
from sidecar.revocation.invalidation import Invalidation, LiveRequests
from sidecar.settings import SidecarSettings, TenantShare, prefetch_settings
from sidecar.state import SidecarKeys, StateDirectory
from sidecar.statistics import FollowerStatistics, HintStatistics, SidecarStatistics
from sidecar.transfers.depot import Depot, TransferTimes
from sidecar.transfers.saves import SavesInFlight
from sidecar.transfers.slots import Rooms, wiping_workers
from storage.admission import Admission
from storage.compose import StoreSettings, open_store
from storage.eviction import EvictionSettings
from storage.keyring import KeyRing
from storage.memfd import MemoryOptions
from storage.shares import Share
from storage.store import BlockStore
from storage.tiers.limits import NvmeLimits
from storage.tiers.recovery import Progress
from storage.workers import Workers
from strongroom.control import EnrolAnswer
from strongroom.errors import Misuse, Unavailable
from strongroom.identity import ComponentId

_log = logging.getLogger(__name__)
_ENROL_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A running sidecar. Its parts are here for tests and metrics; nobody rebuilds them."""

    settings: SidecarSettings
    enrolled: EnrolAnswer
    clocks: Clocks
    log: LogState
    gate: Gate
    ring: KeyRing
    store: BlockStore
    spool: Spool
    audit: Audit
    follower: Follower
    serving: ServingLeases
    keys: KeyLeases
    renewal: Renewal
    server: Server
    sessions: Sessions
    in_flight: SavesInFlight
    prefetcher: Prefetcher
    shipper: Shipper
    residency: ResidencyReporter
    invalidation: Invalidation
    damage: Damage
    watch: Watch
    appraiser: Appraiser
    admission: Admission

    async def serving_begun(self) -> None:
        """Return once the first serving lease was granted under a verified head."""
        await self.serving.first.wait()

    def gauges(self, *, inventory: bool = True) -> Gauges:
        """What there is now; the watch looks without the `inventory`."""
        return read_gauges(
            self.store,
            folders=self.settings.nvme_folders,
            alive=lambda: self.keys.known() | self.invalidation.alive,
            inventory=inventory,
            transfers=sum(
                worker.transfers for found in self.sessions for worker in found.workers.values()
            ),
            engines=self.watch.reports.latest(),
        )

    def tally(self) -> Tally:
        """Counters whose differences the breakers judge."""
        return Tally(
            io_errors=sum(tier.io_errors for tier in self.store.statistics().tiers),
        )

    def snapshot(self) -> Snapshot:
        """For a scrape."""
        return Snapshot(self.statistics(), self.gauges())

    def statistics(self) -> SidecarStatistics:
        """Counters since start and gauges now."""
        sets = list(self.sessions)
        counts = self.follower.counts
        return SidecarStatistics(
            sidecar=self.enrolled.sidecar,
            gate=self.gate.state(),
            log=self.log.head,
            log_broken=self.log.broken,
            follower=FollowerStatistics(**asdict(counts)),
            serving_leases_renewed=self.serving.counts.renewed,
            serving_leases_failed=self.serving.counts.failed,
            key_leases=self.keys.counts.leased,
            key_leases_refused=self.keys.counts.refused,
            key_leases_dropped=self.keys.counts.dropped,
            namespaces_leased=len(self.ring.namespaces()),
            connections=self.server.counts.connections,
            connections_refused=self.server.counts.refused,
            protocol_violations=self.server.counts.violations,
            connections_crashed=self.server.counts.crashed,
            engines=len(sets),
            requests=sum(len(found.requests) for found in sets),
            requests_refused=self.sessions.refused,
            saves_in_flight=len(self.in_flight),
            saves=self.in_flight.statistics(),
            prefetch=self.prefetcher.statistics(),
            hints=HintStatistics(**asdict(self.sessions.hints.counts)),
            staging_used_bytes=sum(
                worker.slots.used_bytes for found in sets for worker in found.workers.values()
            ),
            spool=self.spool.statistics(),
            events_shipped=self.shipper.shipped,
            ship_failures=self.shipper.failures,
            events=MappingProxyType(dict(self.audit.counts)),
            store=self.store.statistics(),
            watch=self.watch.statistics(),
            costs=self.appraiser.cost.rows(),
        )


@asynccontextmanager
async def running(
    settings: SidecarSettings,
    *,
    clocks: Clocks | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    progress: Progress | None = None,
) -> AsyncIterator[Sidecar]:
    """Start everything; leaving the block stops serving, flushes tiers and syncs the spool.

    `transport` replaces the network in tests; `progress` follows the recovery of the NVMe tier.
    Raises typed errors for a state directory that is
    taken or open to others, a socket that is served already, and an enrolment that is refused.
    """
    clocks = clocks or Clocks()
    state = StateDirectory(settings.state_directory)
    async with AsyncExitStack() as stack:
        stack.enter_context(state.locked())
        listener = stack.enter_context(listening(settings.socket_path))
        if settings.start_afresh:
            state.forget_position()
        keys = state.keys()
        http = await stack.enter_async_context(
            http_client(
                settings.service_url,
                settings.control_timeout_s,
                transport,
                ClientTls(
                    settings.service_ca_file,
                    settings.service_certificate_file,
                    settings.service_key_file,
                ),
            )
        )
        enrolled = await _enrolled(settings, state, http, keys)
        appraiser = Appraiser(clocks.boot, _appraisal_settings(settings))
        admission = Admission(clocks.boot, saved_s=appraiser.saved_seconds)
        store = await stack.enter_async_context(
            open_store(
                _store_settings(settings),
                clocks.boot,
                progress=progress,
                policy=admission if settings.admission else None,
                evicted=admission.evicted,
            )
        )
        spool = await stack.enter_async_context(
            Spool.opened(
                state.spool,
                SpoolSettings(
                    settings.spool_sync, settings.spool_bytes_max, settings.spool_segment_bytes
                ),
            )
        )
        client = ControlClient(http, enrolled, keys, clocks)
        wiping = wiping_workers()
        stack.callback(wiping.close)
        sidecar = _build(
            settings, clocks, state, client, store, spool, wiping, appraiser, admission
        )
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(sidecar.serving.run(), name="serving-leases"),
                tasks.create_task(sidecar.follower.run_stream(), name="log-stream"),
                tasks.create_task(sidecar.follower.run_fenced(), name="acks-fenced"),
                tasks.create_task(sidecar.follower.run_reclaimed(), name="acks-reclaimed"),
                tasks.create_task(sidecar.renewal.run(), name="key-renewal"),
                tasks.create_task(sidecar.shipper.run(), name="audit-shipper"),
                tasks.create_task(sidecar.residency.run(), name="residency"),
                tasks.create_task(sidecar.watch.run(), name="watch"),
                tasks.create_task(sidecar.damage.run(), name="damage"),
            ]
            try:
                async with (
                    sidecar.prefetcher.running(),
                    _door(sidecar),
                    sidecar.server.accepting(listener),
                ):
                    yield sidecar
            finally:
                for task in background:
                    task.cancel()
                sidecar.ring.drop_all()


@asynccontextmanager
async def _door(sidecar: Sidecar) -> AsyncIterator[None]:
    """Metrics and the operator's routes, where settings ask for them."""
    settings = sidecar.settings
    if settings.metrics_listen is None:
        yield
        return
    place = place_of(settings.metrics_listen, beyond_loopback=settings.metrics_beyond_loopback)
    app = Operations(
        sidecar.snapshot,
        sidecar.watch,
        settings.operator_token_file,
        local=isinstance(place, Path),
    )
    with open_place(place) as listener:
        async with serving(app, listener):
            _log.info("metrics on %s", settings.metrics_listen)
            yield


async def _enrolled(
    settings: SidecarSettings, state: StateDirectory, http: httpx.AsyncClient, keys: SidecarKeys
) -> EnrolAnswer:
    """Who we are: from an earlier start, or by the join token, waiting for the service to be up."""
    known = state.enrolment()
    if known is not None:
        return known
    if settings.join_token is None:
        raise Misuse("not enrolled, and no join token was given", field="join_token")
    try:
        async with asyncio.timeout(settings.enrol_timeout_s):
            while True:
                try:
                    answer = await enrol(
                        http,
                        join_token=settings.join_token.get_secret_value(),
                        name=settings.name,
                        keys=keys,
                    )
                except Unavailable:
                    _log.info("waiting for the control plane to enrol")
                    await asyncio.sleep(_ENROL_RETRY_S)
                else:
                    state.write_enrolment(answer)
                    return answer
    except TimeoutError as error:
        raise Unavailable("the control plane was not reached for enrolment") from error


def _build(
    settings: SidecarSettings,
    clocks: Clocks,
    state: StateDirectory,
    client: ControlClient,
    store: BlockStore,
    spool: Spool,
    wiping: Workers,
    appraiser: Appraiser,
    admission: Admission,
) -> Sidecar:
    log = LogState()
    gate = Gate(log, clocks)
    ring = KeyRing(clocks.boot)
    audit = Audit(spool, log, clocks)
    leases = KeyLeases(client, ring, log, clocks, store.namespaces)
    live = LiveRequests()
    rooms = Rooms()
    invalidation = Invalidation(
        client.enrolled.sidecar, log, gate, leases, ring, store, live, rooms
    )
    prefetcher = Prefetcher(store, prefetch_settings(settings), clocks.boot)
    events = Events(Sequence(state.path).take, clocks, ring_max=settings.events_max)
    breakers = Breakers(
        state.path,
        BreakerSettings(settings.breaker_cooldown_s, settings.breaker_probation_s, settings.rules),
        events,
        clocks,
        invalidation.fence_requests,
    )
    sentry = Sentry(breakers, events)
    invalidation.gone = sentry.gone
    watch = Watch(
        WatchSettings(settings.watch_interval_s, settings.pressure_limit_tokens),
        events,
        breakers,
        Pressure(Ladders(), SidecarLevers(prefetcher, store, admission), events, clocks.boot),
        sentry,
        clocks,
    )
    damage = Damage(audit, watch.damaged)
    store.tell_quarantined(damage.found)
    invalidation.told = watch.journal.invalidated
    follower = Follower(
        client,
        log,
        invalidation,
        state,
        clocks,
        settings.heartbeat_timeout_s,
        heard=sentry.heard,
    )
    judge = Judge(
        client,
        log,
        gate,
        leases,
        ring,
        store,
        audit,
        clocks,
        settings.catch_up_s,
        stance=watch.stance,
        appraiser=appraiser,
    )
    times = TransferTimes(
        load_deadline_ns=int(settings.load_deadline_s * NS),
        fill_deadline_ns=int(settings.fill_deadline_s * NS),
        grace_ns=int(settings.staging_grace_s * NS),
    )
    steps, names = Steps(store.weight), Names()
    hints = HintDesk(
        judge,
        steps,
        names,
        prefetcher,
        live,
        clocks.boot,
        HintLimits(
            alive_max=settings.hints_max,
            judged_max=settings.hints_judged_max,
            per_s=settings.hints_per_s,
            overdue_ns=int(settings.prefetch_keep_s * NS),
            horizon_ns=prefetch_settings(settings).horizon_ns,
        ),
        stance=watch.stance,
        crowded=lambda: spool.crowded,
        weight=store.weight,
    )
    in_flight = SavesInFlight(settings.crypto_threads + 2, store.weight)
    sessions = Sessions(
        Bench(
            judge,
            Depot(
                store,
                ring,
                leases,
                gate,
                audit,
                prefetcher,
                clocks,
                times,
                watch,
                appraiser,
                admission.used,
            ),
            in_flight,
            live,
            hints,
            SessionLimits(
                requests_max=settings.requests_max,
                prompt_bytes_max=settings.prompt_bytes_max,
                opens_max=settings.opens_max,
                transfers_max=settings.transfers_max,
                blocks_at_once=2 * (settings.crypto_threads + 1),
                linger_ns=int(settings.finished_linger_s * NS),
                judge_wait_s=settings.load_deadline_s,
            ),
            steps,
            names,
        )
    )
    doorkeeper = Doorkeeper(
        settings.allowed_uids,
        settings.engine_tokens,
        settings.tokens_per_block,
        settings.staging_bytes,
    )
    limits = ServerLimits(
        connections_max=settings.connections_max,
        hello_timeout_s=settings.hello_timeout_s,
        send_queue_max=settings.send_queue_max,
        send_timeout_s=settings.send_timeout_s,
        staging_bytes=settings.staging_bytes,
        tokens_per_block=settings.tokens_per_block,
        memory=MemoryOptions(
            lock=True, huge_pages=settings.huge_pages, numa_node=settings.numa_node
        ),
        staging_wipe_s=settings.staging_wipe_s,
    )
    sidecar = Sidecar(
        settings=settings,
        enrolled=client.enrolled,
        clocks=clocks,
        log=log,
        gate=gate,
        ring=ring,
        store=store,
        spool=spool,
        audit=audit,
        follower=follower,
        serving=ServingLeases(client, log, follower, gate, ring, sessions.tell_lease),
        keys=leases,
        renewal=Renewal(client, state, settings.key_life_s),
        server=Server(doorkeeper, sessions, limits, rooms, wiping),
        sessions=sessions,
        in_flight=in_flight,
        prefetcher=prefetcher,
        shipper=Shipper(spool, client, settings.ship_interval_s),
        residency=ResidencyReporter(store.footprints, client, settings.residency_interval_s),
        invalidation=invalidation,
        damage=damage,
        watch=watch,
        appraiser=appraiser,
        admission=admission,
    )
    watch.attach(_watch_sources(sidecar))
    prefetcher.tell(lambda tenant, used: watch.prefetched(tenant, used=used))
    admission.told = lambda tenant, came_back: watch.written(tenant, came_back=came_back)
    return sidecar


def _watch_sources(sidecar: Sidecar) -> Sources:
    return Sources(
        gauges=partial(sidecar.gauges, inventory=False),
        tally=sidecar.tally,
        pending_write_bytes=sidecar.store.pending_write_bytes,
        recompute_s=sidecar.appraiser.recompute_seconds,
        promised_s=sidecar.appraiser.promised_seconds,
        reported=sidecar.appraiser.observe_report,
        gone=sidecar.appraiser.forget,
    )


def _appraisal_settings(settings: SidecarSettings) -> AppraisalSettings:
    return AppraisalSettings(
        enabled=settings.cost_model,
        quantile=settings.cost_quantile,
        decision=DecisionSettings(margin=settings.cost_margin),
        cost=CostSettings(half_window_s=settings.cost_half_window_s),
        promise_s=settings.load_deadline_s,
    )


def _shares(settings: Mapping[str, TenantShare]) -> dict[ComponentId, Share]:
    return {ComponentId(tenant): Share(**share.model_dump()) for tenant, share in settings.items()}


def _store_settings(settings: SidecarSettings) -> StoreSettings:
    return StoreSettings(
        host_bytes=settings.host_bytes,
        nvme_path=settings.nvme_path,
        nvme_paths=settings.nvme_paths,
        nvme_bytes=settings.nvme_bytes,
        nvme_limits=NvmeLimits(
            queue_depth=settings.nvme_queue_depth,
            write_bytes_per_day=settings.nvme_write_bytes_per_day,
            free_floor_bytes=settings.nvme_free_floor_bytes,
        ),
        disk_threads=settings.disk_threads,
        region_bytes=settings.region_bytes,
        host_quota_bytes=settings.tenant_host_bytes,
        nvme_quota_bytes=settings.tenant_nvme_bytes,
        host_shares=_shares(settings.host_shares),
        nvme_shares=_shares(settings.nvme_shares),
        eviction=EvictionSettings(
            ageing_s=settings.priority_ageing_s, high_share_max=settings.high_priority_share_max
        ),
        crypto_threads=settings.crypto_threads,
        pin_s=settings.pin_s,
        huge_pages=settings.huge_pages,
        numa_node=settings.numa_node,
    )
