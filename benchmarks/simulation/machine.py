"""How fast and how large the simulated machine is."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds and sizes. Bandwidths are bytes a second; `token_bytes` is KV a token, all layers."""

    name: str
    link_bytes_s: float
    link_fixed_s: float
    disk_bytes_s: float
    disk_fixed_s: float
    write_bytes_s: float
    prefill_tokens_s: float
    step_s: float = 0.008
    decode_s: float = 0.00008
    context_s: float = 1.5e-9
    """More time a token of prompt for each token before it."""
    batch_tokens: int = 4096
    token_bytes: int = 131072
    host_bytes: int = 48 * 2**30
    nvme_bytes: int = 512 * 2**30
    noise: float = 0.15
    """Sigma of the log-normal noise on each block and step."""
    stall: float = 0.002
    """Share of disk reads that take 20 times as long."""
    slow_from_s: float = math.inf
    """From here on the disk is `slow_factor` times slower."""
    slow_factor: float = 10.0
