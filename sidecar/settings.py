"""Every setting of the sidecar, read once, frozen, and handed down as values.

Environment variables carry the prefix `STRONGROOM_SIDECAR_`. An unknown one is an error: a
misspelt limit must not silently leave its default in force. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from sidecar.clocks import NS
from sidecar.degrade import measures
from sidecar.degrade.conditions import Condition
from sidecar.prefetch.patience import PatienceSettings, PrefetchPolicy
from sidecar.prefetch.settings import PrefetchSettings
from sidecar.prefetch.waste import WasteSettings
from sidecar.prefetch.window import WindowSettings
from sidecar.record.spool import SpoolSync
from strongroom.errors import Misuse
from strongroom.limits import (
    LOAD_DEADLINE_S_DEFAULT,
    PIN_S_DEFAULT,
    TOKENS_PER_BLOCK_DEFAULT,
)

ENV_PREFIX: Final = "STRONGROOM_SIDECAR_"

Seconds = Annotated[float, Field(gt=0, le=24 * 3600)]
Count = Annotated[int, Field(gt=0, le=1_000_000)]
Bytes = Annotated[int, Field(ge=4096)]
Share01 = Annotated[float, Field(gt=0, le=1)]


class TenantShare(BaseModel):
    """One tenant's part of one tier, in bytes; the weight divides what is not guaranteed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    guaranteed_bytes: Annotated[int, Field(ge=0)] = 0
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    cap_bytes: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _a_guarantee_is_within_the_cap(self) -> Self:
        if self.cap_bytes is not None and self.guaranteed_bytes > self.cap_bytes:
            raise ValueError("guaranteed_bytes must not exceed cap_bytes")
        return self


TenantShares = dict[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], TenantShare]
"""By tenant id; in the environment a JSON object."""


class SidecarSettings(BaseSettings):
    """Frozen; an unknown name, from the environment or a caller, is refused."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True
    )

    # Where things lie.
    state_directory: Path
    """Keys, enrolment, log position and audit spool: 0700, one process at a time."""
    socket_path: Path
    """The Unix socket; its folder is made 0700."""
    engine_tokens: Path
    """A folder with one file an engine, `<engine>.token`, that only that engine can read."""
    nvme_path: Path | None = None
    nvme_paths: tuple[Path, ...] = ()
    """Further folders, each on a device of its own; with `nvme_path` they are one tier."""

    # The control plane.
    service_url: str = "http://127.0.0.1:8420"
    service_ca_file: Path | None = None
    """Authorities of the service's certificate. None: those of the system."""
    service_certificate_file: Path | None = None
    """Our certificate, where the service takes no others (`tls_client_ca`)."""
    service_key_file: Path | None = None
    key_life_s: Annotated[float, Field(gt=0, le=10 * 365 * 24 * 3600)] = 30 * 24 * 3600.0
    """Our keys are exchanged, while we serve, when they are this old."""
    name: str = "sidecar"
    join_token: SecretStr | None = None
    """One-time token for the first start; unused once enrolled."""
    control_timeout_s: Seconds = 2.0
    enrol_timeout_s: Seconds = 60.0
    catch_up_s: Seconds = 0.1
    """How long a lookup waits for the log to reach its grant's seq before it is a miss."""
    heartbeat_timeout_s: Seconds = 30.0
    """Silence on the invalidation stream after which it is opened anew."""

    start_afresh: bool = False
    """Forget how far an earlier life had read the log. For an operator who has looked into why
    the log stepped back or forked; grants from before are dead in any case."""

    # Who may connect.
    allowed_uids: frozenset[int] = Field(default_factory=lambda: frozenset((os.getuid(),)))
    connections_max: Count = 256
    hello_timeout_s: Seconds = 5.0
    send_timeout_s: Seconds = 10.0
    send_queue_max: Count = 4096
    requests_max: Count = 4096
    """Open requests of one engine."""
    prompt_bytes_max: Bytes = 256 * 1024 * 1024
    """Token ids of one engine's open requests, 4 bytes each; as much again may be kept of those
    that have finished, for a save that follows."""
    transfers_max: Count = 256
    """Loads and saves in flight on one connection."""
    opens_max: Count = 64
    """Verdicts being worked out at once for one engine; the next waits."""
    finished_linger_s: Seconds = 30.0
    """How long after `Finish` a save of the request may still arrive."""

    # Bytes.
    tokens_per_block: Count = TOKENS_PER_BLOCK_DEFAULT
    staging_bytes: Bytes = 256 * 1024 * 1024
    """Staging of one worker connection."""
    host_bytes: Bytes = 1024 * 1024 * 1024
    nvme_bytes: Bytes = 4 * 1024 * 1024 * 1024
    """Of all folders together."""
    nvme_write_bytes_per_day: Bytes | None = None
    """How much flash may be written in a day; over it new blocks stay in host memory."""
    nvme_free_floor_bytes: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    """Free space of a device's file system below which nothing new is written to it."""
    nvme_queue_depth: Annotated[int, Field(ge=1, le=256)] = 8
    """System calls that one batch of reads or writes keeps in flight."""
    disk_threads: Annotated[int, Field(ge=1, le=256)] = 8
    region_bytes: Bytes = 64 * 1024 * 1024
    tenant_host_bytes: Bytes | None = None
    tenant_nvme_bytes: Bytes | None = None
    """A tenant's cap in each tier, unless it has one of its own below; None is none."""
    host_shares: TenantShares = Field(default_factory=dict)
    """`{"<tenant id>": {"guaranteed_bytes": 1073741824, "weight": 2, "cap_bytes": null}}`."""
    nvme_shares: TenantShares = Field(default_factory=dict)
    priority_ageing_s: Seconds = 30.0
    """Time without a use that costs a retention priority above the default one point."""
    high_priority_share_max: Share01 = 0.5
    """Of a tenant's bytes in a tier, the most that priorities above the default protect."""
    crypto_threads: Annotated[int, Field(ge=1, le=64)] = 2
    huge_pages: bool = True
    """Ask for huge pages for arena and staging; the log says where there are none."""
    numa_node: Annotated[int, Field(ge=0, le=1023)] | None = None
    """The node whose memory arena and staging take; None leaves it to the system."""
    staging_wipe_s: Seconds = 1.0
    """Staging that was given back is wiped within this, unless it was overwritten before."""
    pin_s: Seconds = PIN_S_DEFAULT

    # Deadlines of transfers.
    load_deadline_s: Seconds = LOAD_DEADLINE_S_DEFAULT
    fill_deadline_s: Seconds = 30.0
    """How long an engine may take to fill the slots of a save."""
    staging_grace_s: Seconds = 1.0
    """After a part's deadline its slot is held this much longer, for a copy under way."""

    # Prefetch: blocks of a granted prompt, from NVMe into host memory before a load asks.
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.BEST_EFFORT
    prefetch_timeout_base_s: Seconds = 0.05
    prefetch_timeout_per_1k_s: Seconds = 0.02
    """With the policy `timeout`, how long a load waits: a base, and more for each 1,000 tokens."""
    prefetch_bytes: Bytes | None = None
    """On their way, or brought and unread, in all; None is a quarter of `host_bytes`."""
    prefetch_tenant_bytes: Bytes | None = None
    """The same of one tenant; None is half of that."""
    prefetch_keep_s: Seconds = 30.0
    """How long after its expected start a block may lie unread before it counts as wasted."""
    prefetch_read_s: Seconds = 10.0
    """A read of a prefetch that takes longer is given up."""
    prefetch_readers: Annotated[int, Field(ge=1, le=64)] = 2
    """Prefetches that read at once."""
    prefetch_pending_max: Count = 1024
    prefetch_waste_limit: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of brought bytes that nobody read, above which prefetching stops for a while."""
    prefetch_waste_window_s: Seconds = 60.0
    prefetch_waste_blocks_min: Count = 32
    """Blocks that must have been read or wasted in the window before the share counts."""
    prefetch_cool_down_s: Seconds = 30.0
    prefetch_probe_blocks: Count = 8
    """After a cool-down so many blocks must be within the limit before prefetching flows again."""
    prefetch_bandwidth_bytes_s: Annotated[float, Field(gt=0)] = 500e6
    """What is assumed of the device before the first prefetch has measured it."""
    hints_max: Count = 1024
    """Hints of one engine or gateway that are alive."""
    hints_judged_max: Count = 8
    """Hints of one engine or gateway being judged at once; more are dropped."""
    hints_per_s: Count = 500
    """Hints that one engine or gateway may give in a second; more are dropped."""

    # Watching, degradation and breakers (sidecar/degrade/pressure.py, sidecar/degrade/breaker.py).
    watch_interval_s: Seconds = 1.0
    """How often the gauges are looked at."""
    pressure_limit_tokens: Count = 4096
    """The longest cached context once an engine is short of pages."""
    events_max: Count = 65_536
    """Operational events kept in memory."""
    breaker_cooldown_s: Seconds = 60.0
    """How long caching stays off after a performance trip, before its probation."""
    breaker_probation_s: Seconds = 120.0
    restore_slow_share: Share01 = 0.05
    """Trips when more of the restores than this took longer than recomputing: 0.05 is "the P95"."""
    restore_slow_min: Count = 100
    restore_slow_window_s: Seconds = 60.0
    thrash_share: Share01 = 0.5
    """Blocks wanted again right after they were evicted, of those stored."""
    thrash_min: Count = 200
    thrash_window_s: Seconds = 60.0
    prefetch_waste_share: Share01 = 0.8
    """Far above `prefetch_waste_limit`, at which prefetching alone stops."""
    prefetch_waste_min: Count = 100
    prefetch_waste_trip_window_s: Seconds = 300.0
    engine_idle_rise: Share01 = 0.2
    """How much more of its time an engine waits for loads than in its best recent window."""
    engine_idle_min_s: Seconds = 5.0
    """Engine time that a window must hold before it is judged."""
    engine_idle_window_s: Seconds = 30.0
    error_streak: Count = 20
    """Transfers that failed in a row for no reason of policy."""
    error_streak_window_s: Seconds = 60.0
    checksum_mismatches: Count = 3
    """Blocks that did not open. A security condition: an operator clears it."""
    checksum_window_s: Seconds = 300.0
    cross_tenant_hits: Count = 1
    readable_after_deletion: Count = 1
    """Both are expected never. They refuse all caching, and an operator clears them."""

    # Restore or recompute.
    cost_model: bool = True
    """Whether a hit that is computed sooner than it is restored is computed. Off: restore all."""
    cost_quantile: Annotated[float, Field(ge=0.5, le=0.999)] = 0.95
    """The SLO's quantile, at which both sides are priced."""
    cost_half_window_s: Seconds = 30.0
    """An observation counts for one to two of these."""
    cost_margin: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """How much better the other side must be for a change of sides (hysteresis)."""
    admission: bool = True
    """Whether a block must be worth its write to flash. Off: all are written."""

    # The operator's door (sidecar/operations/door.py).
    metrics_listen: str | None = None
    """`127.0.0.1:9464`, or `unix:/path` in a folder that is made 0700; None: nowhere."""
    metrics_beyond_loopback: bool = False
    """Allow an address that other machines reach, in plain HTTP (behind a TLS proxy)."""
    operator_token_file: Path | None = None
    """A file (0600) with the token for clearing breakers; without it none can be cleared."""

    # Audit.
    spool_sync: SpoolSync = SpoolSync.WITHIN_SECOND
    spool_bytes_max: Bytes = 1024 * 1024 * 1024
    """Records that the service has not taken yet; when full, nothing is served."""
    spool_segment_bytes: Bytes = 1024 * 1024
    ship_interval_s: Seconds = 1.0

    # The residency catalogue.
    residency_interval_s: Seconds = 30.0
    """How often the service is told how much of which namespace lies here."""

    @property
    def nvme_folders(self) -> tuple[Path, ...]:
        """Of the NVMe tier, in the order in which its devices are numbered."""
        return (*((self.nvme_path,) if self.nvme_path else ()), *self.nvme_paths)

    @property
    def rules(self) -> Mapping[Condition, measures.Rule]:
        """The breakers' conditions, by these settings."""
        return {
            Condition.RESTORE_SLOW: measures.Ratio(
                self.restore_slow_share, self.restore_slow_min, self.restore_slow_window_s
            ),
            Condition.THRASH: measures.Ratio(
                self.thrash_share, self.thrash_min, self.thrash_window_s
            ),
            Condition.PREFETCH_WASTE: measures.Ratio(
                self.prefetch_waste_share,
                self.prefetch_waste_min,
                self.prefetch_waste_trip_window_s,
            ),
            Condition.ENGINE_IDLE: measures.Rise(
                self.engine_idle_rise, int(self.engine_idle_min_s * 1e6), self.engine_idle_window_s
            ),
            Condition.ERROR_STREAK: measures.Streak(self.error_streak, self.error_streak_window_s),
            Condition.CHECKSUM: measures.Count(self.checksum_mismatches, self.checksum_window_s),
            Condition.CROSS_TENANT: measures.Count(self.cross_tenant_hits, 3600.0),
            Condition.READABLE: measures.Count(self.readable_after_deletion, 3600.0),
        }

    @model_validator(mode="after")
    def _a_block_fits_everywhere(self) -> Self:
        if self.region_bytes > self.nvme_bytes:
            raise ValueError("region_bytes must not exceed nvme_bytes")
        folders = self.nvme_folders
        if len(set(folders)) < len(folders):
            raise ValueError("nvme_paths names a folder twice")
        if (self.prefetch_bytes or 0) > self.host_bytes // 2:
            raise ValueError("prefetch_bytes must not exceed half of host_bytes")
        return self


def load_settings(
    environment: Mapping[str, str] | None = None, /, **overrides: object
) -> SidecarSettings:
    """Settings from the environment and `overrides`; an unknown variable is `Misuse`."""
    present = os.environ if environment is None else environment  # noqa: TID251 - settings module
    known = {f"{ENV_PREFIX}{name}".upper() for name in SidecarSettings.model_fields}
    for variable in present:
        if variable.upper().startswith(ENV_PREFIX) and variable.upper() not in known:
            raise Misuse(f"unknown setting {variable}", field=variable)
    return SidecarSettings(**overrides)  # type: ignore[arg-type]  # checked by pydantic


def prefetch_settings(settings: SidecarSettings) -> PrefetchSettings:
    """The sidecar's settings as prefetching needs them."""
    total_bytes = settings.prefetch_bytes or settings.host_bytes // 4
    return PrefetchSettings(
        total_bytes=total_bytes,
        tenant_bytes=settings.prefetch_tenant_bytes or total_bytes // 2,
        keep_ns=int(settings.prefetch_keep_s * NS),
        read_s=settings.prefetch_read_s,
        readers=settings.prefetch_readers,
        pending_max=settings.prefetch_pending_max,
        patience=PatienceSettings(
            settings.prefetch_policy,
            int(settings.prefetch_timeout_base_s * NS),
            int(settings.prefetch_timeout_per_1k_s * NS),
        ),
        window=WindowSettings(settings.prefetch_bandwidth_bytes_s),
        waste=WasteSettings(
            limit=settings.prefetch_waste_limit,
            window_ns=int(settings.prefetch_waste_window_s * NS),
            blocks_min=settings.prefetch_waste_blocks_min,
            cool_down_ns=int(settings.prefetch_cool_down_s * NS),
            probe_blocks=settings.prefetch_probe_blocks,
        ),
    )
