"""Every suite, in the order in which they run."""

from __future__ import annotations

from typing import Final

from benchmarks import disk, engine, flood, host, lmcache, lookup, recovery, revoke
from benchmarks.control import suites as control
from benchmarks.suite import Suite

SUITES: Final[tuple[Suite, ...]] = (
    host.SUITE,
    disk.SUITE,
    lmcache.SUITE,
    lookup.SUITE,
    flood.SUITE,
    revoke.SUITE,
    recovery.SUITE,
    engine.SUITE,
    *control.SUITES,
)
