"""Why a policy is not activated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policy.cases import Failure
from strongroom.errors import Conflict

TOLD_MAX: Final = 100


class PolicyTestsFailed(Conflict):
    """Test cases stored beside the policy would get another answer; `failures` are those."""

    code = "policy_tests_failed"

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__(f"{len(failures)} test cases fail: nothing was changed", field="tests")
        self.failures = tuple(failures)
