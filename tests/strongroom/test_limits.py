"""The numbers that bind (DESIGN section 11): a change of one of them is a decision."""

from __future__ import annotations

from strongroom import limits
from strongroom.blocks import pack_tokens
from strongroom.clock import boot_ns
from strongroom.grant import GrantClaims
from strongroom.wire.frames import Open
from strongroom.wire.framing import encode_frame


def test_the_numbers_are_those_of_the_design() -> None:
    assert {name: value for name, value in vars(limits).items() if name.isupper()} == {
        "FRAME_BYTES_MAX": 8 * 1024**2,
        "SEGMENT_BYTES_MAX": 1024**3,
        "SEGMENTS_MAX": 512,
        "GRANT_LIFE_S_MAX": 300,
        "GRANT_BYTES_MAX": 256 * 1024,
        "SPANS_MAX": 1024,
        "LABELS_MAX": 1024,
        "PROMPT_TOKENS_MAX": 1_000_000,
        "TOKEN_ID_MAX": 2**32 - 1,
        "EXTRAS_BYTES_MAX": 4096,
        "ENGINE_SALT_CHARS_MAX": 128,
        "TOKENS_PER_BLOCK_DEFAULT": 256,
        "SERVING_LEASE_S_DEFAULT": 5.0,
        "KEY_LEASE_S_DEFAULT": 60.0,
        "PIN_S_DEFAULT": 30.0,
        "LOOKUP_DEADLINE_S_DEFAULT": 0.2,
        "LOAD_DEADLINE_S_DEFAULT": 30.0,
        "ERASURE_FINAL_S_DEFAULT": 24 * 3600,
        "NAME_CHARS_MAX": 128,
        "REQUEST_ID_CHARS_MAX": 256,
    }


def test_the_largest_request_that_the_limits_allow_fits_in_a_frame() -> None:
    opened = Open(
        request="r" * limits.REQUEST_ID_CHARS_MAX,
        grant="g" * limits.GRANT_BYTES_MAX,
        salt="s" * limits.ENGINE_SALT_CHARS_MAX,
        tokens=pack_tokens([limits.TOKEN_ID_MAX] * limits.PROMPT_TOKENS_MAX),
        adapter="a" * 64,
        extras=bytes(limits.EXTRAS_BYTES_MAX),
    )
    assert len(encode_frame(opened)) <= limits.FRAME_BYTES_MAX


def test_a_grant_has_no_field_that_may_be_left_out() -> None:
    assert not GrantClaims.__struct_defaults__


def test_the_boot_clock_never_goes_back() -> None:
    instants = [boot_ns() for _ in range(100)]
    assert instants == sorted(instants)
