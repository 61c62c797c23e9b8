"""Rows: one figure each, with its bound, both sides and the spread over the rounds.

`value` is the figure that the bound is about: a ratio ours / reference, or an absolute figure
where the bound is absolute. The bounds are written here, once, and nowhere else.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

Pairs = Sequence[tuple[float, float]]
"""Rounds of (ours, reference), taken in turn."""


class Sense(StrEnum):
    """On which side of its bound a value has to be."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, slots=True)
class Bound:
    """What a row has to reach."""

    sense: Sense
    limit: float

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.sense is Sense.AT_LEAST else value <= self.limit


def _at_least(limit: float) -> Bound:
    return Bound(Sense.AT_LEAST, limit)


def _at_most(limit: float) -> Bound:
    return Bound(Sense.AT_MOST, limit)


BOUNDS: Final[Mapping[str, Bound]] = MappingProxyType(
    {
        "host_restore_vs_gcm": _at_least(0.90),
        "host_restore_vs_memcpy": _at_least(0.85),
        "host_restore_small_set_2_threads": _at_least(1.7),
        "host_save_vs_gcm": _at_least(0.85),
        "host_restore_vs_lmcache_plain": _at_least(0.9),
        "disk_restore_vs_lmcache_encrypted": _at_least(2.0),
        "disk_restore_vs_lmcache_encrypted_warm": _at_least(1.0),
        "nvme_read_vs_fio": _at_least(0.85),
        "nvme_write_vs_fio": _at_least(0.85),
        "lookup_32k_tokens_us_p50": _at_most(600.0),
        "lookup_32k_tokens_us_p99_loaded": _at_most(3000.0),
        "flood_p99_vs_equal_share": _at_most(1.3),
        "engine_overhead": _at_least(0.97),
        "revoke_scaling": _at_most(3.0),
        "recovery_1m_s": _at_most(60.0),
        "recovery_1m_block_bytes": _at_most(400.0),
        "scaling": _at_most(1.5),
        # What the control plane's policy promises.
        "decide_cached_us_p50": _at_most(10.0),
        "decide_uncached_ms_p50": _at_most(1.0),
        "decide_uncached_ms_p99": _at_most(5.0),
        "decide_vs_pycasbin": _at_least(100.0),
        "tenant_reload_other_p99": _at_most(2.0),
        "shed_vs_delete": _at_most(0.01),
        "revoke_commit_scaling": _at_most(2.0),
        "propagation_ms_p99": _at_most(500.0),
        "grants_per_s_vs_floor": _at_least(0.5),
        "audit_append_per_s": _at_least(5000.0),
        "audit_verify_per_s": _at_least(50_000.0),
        "audit_query_ms_p95": _at_most(500.0),
    }
)
"""Rows without an entry are shown beside the others and bind nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `low` and `high`: the smallest and largest value of the rounds."""

    name: str
    value: float
    unit: str
    ours: float
    reference: float
    low: float
    high: float
    bound: float | None
    sense: str
    ok: bool
    note: str = ""
    """What a reader must know to judge the figure; one sentence."""


def ratio(name: str, unit: str, pairs: Pairs, note: str = "") -> Row:
    """Fold rounds into a row whose value is the median of ours / reference."""
    ratios = [ours / reference for ours, reference in pairs]
    return folded(name, unit, ratios, pairs, note=note)


def absolute(name: str, unit: str, pairs: Pairs, note: str = "") -> Row:
    """Fold rounds into a row whose value is the median of ours; the reference stands beside."""
    return folded(name, unit, [ours for ours, _ in pairs], pairs, note=note)


def folded(
    name: str,
    unit: str,
    values: Sequence[float],
    pairs: Pairs,
    *,
    interval: tuple[float, float] | None = None,
    note: str = "",
    excused: bool = False,
) -> Row:
    """A row of rounds. `excused`: it counts as reached for the reason that `note` states."""
    value = statistics.median(values)
    bound = BOUNDS.get(name)
    low, high = interval or (min(values), max(values))
    return Row(
        name=name,
        value=figure(value),
        unit=unit,
        ours=figure(statistics.median(ours for ours, _ in pairs)),
        reference=figure(statistics.median(reference for _, reference in pairs)),
        low=figure(low),
        high=figure(high),
        bound=None if bound is None else bound.limit,
        sense="" if bound is None else bound.sense.value,
        ok=bound is None or bound.holds(value) or excused,
        note=note,
    )


def figure(value: float) -> float:
    """Four significant digits: more would say something about the machine's mood."""
    return float(f"{value:.4g}")
