"""The connector's settings, from `kv_connector_extra_config`. An unknown key is an error.

Times are in seconds. `lookup_deadline_s` bounds how long a request may wait for its verdict,
`load_deadline_s` a whole load, `save_deadline_s` how long pages may be held for their copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strongroom.errors import Misuse
from strongroom.limits import LOAD_DEADLINE_S_DEFAULT, LOOKUP_DEADLINE_S_DEFAULT, NAME_CHARS_MAX

TIMEOUT_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Read once, when the engine starts."""

    socket: Path
    token_file: Path
    engine: str = ""
    """This engine's name; empty takes the id that the engine gave itself."""
    lookup_deadline_s: float = LOOKUP_DEADLINE_S_DEFAULT
    load_deadline_s: float = LOAD_DEADLINE_S_DEFAULT
    save_deadline_s: float = 2.0
    connect_wait_s: float = 2.0
    """How long the engine's start may wait for the sidecar; it starts without it then."""
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    """A sidecar that has said nothing for so long is taken for gone."""
    layers: bool | None = None
    """Copy a block's layers while the sidecar still opens the others; None ("auto"): where a
    block is large enough to gain by it."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> ConnectorSettings:
        """Check `values`; raises `Misuse` naming the key that is unknown, missing or wrong."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise Misuse(
                    f"unknown key {str(key)[:NAME_CHARS_MAX]!r} in kv_connector_extra_config; "
                    f"known keys: {', '.join(sorted(known))}",
                    field=str(key)[:NAME_CHARS_MAX],
                )
        parsed: dict[str, Any] = {}
        for key in ("socket", "token_file"):
            value = values.get(key)
            if not isinstance(value, str | Path) or not str(value):
                raise Misuse(f"{key} must name a file in kv_connector_extra_config", field=key)
            parsed[key] = Path(value)
        if "engine" in values:
            name = values["engine"]
            if not isinstance(name, str) or len(name) > NAME_CHARS_MAX:
                raise Misuse("engine must be a short text", field="engine", limit=NAME_CHARS_MAX)
            parsed["engine"] = name
        if "layers" in values:
            mode = values["layers"]
            if mode != "auto" and not isinstance(mode, bool):
                raise Misuse('layers must be true, false or "auto"', field="layers")
            parsed["layers"] = None if mode == "auto" else mode
        for key in known & set(values) - set(parsed):
            parsed[key] = _seconds(key, values[key])
        return cls(**parsed)


def _seconds(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Misuse(f"{key} must be a number of seconds", field=key)
    if not math.isfinite(value) or not 0 < value <= TIMEOUT_S_MAX:
        raise Misuse(
            f"{key} must be above 0 and at most {TIMEOUT_S_MAX:.0f} seconds",
            field=key,
            limit=int(TIMEOUT_S_MAX),
        )
    return float(value)
