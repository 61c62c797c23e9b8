"""The name of the group: suites whose rows lie in one file."""

from __future__ import annotations

from typing import Final

GROUP: Final = "control"
