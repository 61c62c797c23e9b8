"""How much is measured: full, quick, or tiny (for the tests, whose figures mean nothing)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of every suite. Counts are a round's, unless the name says otherwise."""

    name: str
    rounds: int
    set_bytes: int
    """The working set of host and disk rows."""
    segment_bytes: int
    segments: int
    """Of a block: its layers. 32 of 1 MiB are 256 tokens of a model of 8 billion parameters with
    8 KV heads of 128 in 16 bits (Llama 3)."""
    small_set_bytes: int
    """A set that stays inside the caches, ciphertext and plaintext together twice this."""
    lookups: int
    records: int
    """Resident blocks that stand for a million."""
    records_few: int
    revoked: int
    """Resident blocks that stand for a hundred thousand."""
    revoked_few: int
    engine_pairs: int
    engine_tokens: int
    tenants: int
    tenant_rules: int
    """Of each tenant."""
    house_rules: int
    """Of one tenant, or of one plain pycasbin enforcer."""
    decisions: int
    reloaded_rules: int
    """Of the tenant that is loaded anew while others decide."""
    sidecars: int
    revocations: int
    grants: int
    audit_events: int
    """Appended and verified."""
    audit_questions_events: int
    """In the log that is asked."""
    audit_asked: int
    """Times that each question is asked."""

    @property
    def region_bytes(self) -> int:
        """A region of the NVMe tier that holds many blocks, and of which there are many."""
        return max(8 * self.block_bytes, self.set_bytes // 4)

    @property
    def block_bytes(self) -> int:
        return self.segments * self.segment_bytes

    @property
    def blocks(self) -> int:
        return self.set_bytes // self.block_bytes


FULL: Final = Scale(
    name="full",
    rounds=9,
    set_bytes=256 * MIB,
    segment_bytes=MIB,
    segments=32,
    small_set_bytes=8 * MIB,
    lookups=1000,
    records=1_000_000,
    records_few=1000,
    revoked=100_000,
    revoked_few=100,
    engine_pairs=30,
    engine_tokens=64,
    tenants=1000,
    tenant_rules=1000,
    house_rules=100000,
    decisions=2000,
    reloaded_rules=10_000,
    sidecars=100,
    revocations=10,
    grants=1500,
    audit_events=100_000,
    audit_questions_events=5_000_000,
    audit_asked=20,
)
QUICK: Final = Scale(
    name="quick",
    rounds=3,
    set_bytes=256 * MIB,
    segment_bytes=MIB,
    segments=32,
    small_set_bytes=8 * MIB,
    lookups=300,
    records=50_000,
    records_few=1000,
    revoked=10_000,
    revoked_few=100,
    engine_pairs=6,
    engine_tokens=32,
    tenants=100,
    tenant_rules=1000,
    house_rules=100000,
    decisions=1000,
    reloaded_rules=10_000,
    sidecars=100,
    revocations=10,
    grants=1500,
    audit_events=50_000,
    audit_questions_events=200_000,
    audit_asked=10,
)
TINY: Final = Scale(
    name="tiny",
    rounds=1,
    set_bytes=4 * MIB,
    segment_bytes=256 * 1024,
    segments=4,
    small_set_bytes=2 * MIB,
    lookups=5,
    records=500,
    records_few=50,
    revoked=200,
    revoked_few=20,
    engine_pairs=1,
    engine_tokens=4,
    tenants=3,
    tenant_rules=20,
    house_rules=200,
    decisions=10,
    reloaded_rules=300,
    sidecars=3,
    revocations=1,
    grants=32,
    audit_events=600,
    audit_questions_events=2000,
    audit_asked=1,
)


def cores() -> int:
    """Cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)))
