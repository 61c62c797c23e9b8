"""The settings of prefetching: from what the operator sets to what its parts take."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidecar.prefetch.patience import PatienceSettings
from sidecar.prefetch.waste import WasteSettings
from sidecar.prefetch.window import WindowSettings


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
