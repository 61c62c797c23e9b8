"""The settings of prefetching: from what the operator sets to what its parts take."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidecar.clocks import NS
from sidecar.patience import PatienceSettings
from sidecar.prefetch_window import WindowSettings
from sidecar.settings import SidecarSettings
from sidecar.waste import WasteSettings


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """Sizes in bytes, times in nanoseconds where they say so; see `SidecarSettings`."""

    total_bytes: int
    tenant_bytes: int
    keep_ns: int = 30_000_000_000
    """How long after its expected start a block may lie unread."""
    horizon_ns: int = 300_000_000_000
    """A start further away than a grant lives is no start."""
    read_s: float = 10.0
    chunk_bytes: int = 32 * 1024 * 1024
    readers: int = 2
    pending_max: int = 1024
    sweep_s: float = 1.0
    patience: PatienceSettings = field(default_factory=PatienceSettings)
    window: WindowSettings = field(default_factory=WindowSettings)
    waste: WasteSettings = field(default_factory=WasteSettings)

    @property
    def tenant_pending_max(self) -> int:
        """Of one tenant: half of all."""
        return max(1, self.pending_max // 2)

    @property
    def hints_max(self) -> int:
        """Hints among them: half of all."""
        return max(1, self.pending_max // 2)

    @property
    def tenant_hints_max(self) -> int:
        """Hints of one tenant."""
        return max(1, self.pending_max // 8)


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
