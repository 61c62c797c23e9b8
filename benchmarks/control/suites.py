"""Every suite about the control plane, in the order in which they run.

A room adds a module here with a `SUITE` of group `GROUP`, its bounds to `benchmarks.rows`, and
its promises to tests/benchmarks.
"""

from __future__ import annotations

from typing import Final

from benchmarks.control import audit, keys, policy, propagation, reload, revocation
from benchmarks.suite import Suite

SUITES: Final[tuple[Suite, ...]] = (
    policy.SUITE,
    reload.SUITE,
    keys.SUITE,
    revocation.SUITE,
    propagation.SUITE,
    audit.SUITE,
    audit.QUESTIONS,
)
