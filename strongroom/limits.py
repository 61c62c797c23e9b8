"""The numbers that bind every part (DESIGN section 11). Units and bounds come last in each name."""

from __future__ import annotations

from typing import Final

FRAME_BYTES_MAX: Final = 8 * 1024 * 1024
SEGMENT_BYTES_MAX: Final = 1024 * 1024 * 1024
SEGMENTS_MAX: Final = 512
GRANT_LIFE_S_MAX: Final = 300
GRANT_BYTES_MAX: Final = 256 * 1024
SPANS_MAX: Final = 1024
LABELS_MAX: Final = 1024
PROMPT_TOKENS_MAX: Final = 1_000_000
TOKEN_ID_MAX: Final = 2**32 - 1
EXTRAS_BYTES_MAX: Final = 4096
ENGINE_SALT_CHARS_MAX: Final = 128
TOKENS_PER_BLOCK_DEFAULT: Final = 256
SERVING_LEASE_S_DEFAULT: Final = 5.0
KEY_LEASE_S_DEFAULT: Final = 60.0
PIN_S_DEFAULT: Final = 30.0
LOOKUP_DEADLINE_S_DEFAULT: Final = 0.2
LOAD_DEADLINE_S_DEFAULT: Final = 30.0
ERASURE_FINAL_S_DEFAULT: Final = 24 * 3600
NAME_CHARS_MAX: Final = 128
REQUEST_ID_CHARS_MAX: Final = 256
