"""The error tree says whose fault it is, and each kind has a code of its own."""

from __future__ import annotations

from strongroom import errors
from strongroom.errors import StrongroomError


def kinds() -> list[type[StrongroomError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, StrongroomError)
    ]


def test_every_error_has_a_code_of_its_own_and_says_what_it_means() -> None:
    listed = kinds()
    assert len({kind.code for kind in listed}) == len(listed)
    assert all(kind.__doc__ for kind in listed)


def test_an_error_carries_field_and_limit() -> None:
    for kind in kinds():
        error = kind("message", field="name", limit=5)
        assert (error.message, error.field, error.limit, str(error)) == (
            "message",
            "name",
            5,
            "message",
        )
