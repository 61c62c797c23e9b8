"""Key ring and fence: secrets leave on time and for good."""

from __future__ import annotations

import pytest

from storage.fence import Fence, Fenced
from storage.keyring import FORMATS_MAX, KeyRing
from strongroom.derivation import engine_salt, namespace_keys
from strongroom.errors import Misuse, Refused
from tests.storage.support import FakeClock, component, namespace

SECRET = bytes(range(32))
FORMAT = b"f" * 32


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ring(clock: FakeClock) -> KeyRing:
    ring = KeyRing(clock)
    ring.put(namespace(1), SECRET, (component(1), component(2)), clock.now_ns + 60 * 10**9)
    ring.put(namespace(2), SECRET, (component(1), component(3)), clock.now_ns + 60 * 10**9)
    return ring


def test_keys_and_salt_are_derived_from_the_leased_secret(ring: KeyRing) -> None:
    keys = ring.keys(namespace(1), FORMAT)
    assert keys is not None
    expected = namespace_keys(SECRET, FORMAT)
    assert (keys.lookup, keys.data) == (expected.lookup, expected.data)
    assert ring.salt(namespace(1)) == engine_salt(SECRET)


def test_a_namespace_that_was_never_leased_has_no_keys(ring: KeyRing) -> None:
    assert ring.keys(namespace(9), FORMAT) is None
    assert ring.salt(namespace(9)) is None


def test_a_lease_ends_by_the_boot_clock_and_its_secret_is_overwritten(
    ring: KeyRing, clock: FakeClock
) -> None:
    buffer = ring._entries[namespace(1)].secret
    clock.advance_s(59)
    assert ring.keys(namespace(1), FORMAT) is not None
    clock.advance_s(1)
    assert ring.keys(namespace(1), FORMAT) is None
    assert ring.namespaces() == frozenset()
    assert buffer == bytes(32)


def test_dropping_one_component_takes_every_namespace_that_contains_it_and_no_other(
    ring: KeyRing,
) -> None:
    buffer = ring._entries[namespace(1)].secret
    assert ring.drop_components([component(2)]) == {namespace(1)}
    assert buffer == bytes(32)
    assert ring.keys(namespace(1), FORMAT) is None
    assert ring.keys(namespace(2), FORMAT) is not None


def test_drop_all_overwrites_every_secret(ring: KeyRing) -> None:
    buffers = [entry.secret for entry in ring._entries.values()]
    ring.drop_all()
    assert ring.namespaces() == frozenset()
    assert all(buffer == bytes(32) for buffer in buffers)


def test_a_new_lease_overwrites_the_secret_of_the_old_one(ring: KeyRing, clock: FakeClock) -> None:
    buffer = ring._entries[namespace(1)].secret
    ring.put(namespace(1), b"n" * 32, (component(1),), clock.now_ns + 1)
    assert buffer == bytes(32)


def test_what_was_derived_once_is_the_same_again_and_ends_with_its_lease(
    ring: KeyRing, clock: FakeClock
) -> None:
    first = (ring.keys(namespace(1), FORMAT), ring.salt(namespace(1)))
    again = (ring.keys(namespace(1), FORMAT), ring.salt(namespace(1)))
    assert again == first == (namespace_keys(SECRET, FORMAT), engine_salt(SECRET))
    entry = ring._entries[namespace(1)]
    buffers = [entry.secret, entry.salt, *entry.derived.values()]
    assert [len(buffer) for buffer in buffers] == [32, 43, 64]
    assert ring.holds(namespace(1))
    clock.advance_s(60)
    assert ring.keys(namespace(1), FORMAT) is None
    assert ring.salt(namespace(1)) is None
    assert not ring.holds(namespace(1))
    assert not any(any(buffer) for buffer in buffers), "all of it is overwritten"


def test_what_was_derived_goes_with_a_component_and_with_a_newer_secret(
    ring: KeyRing, clock: FakeClock
) -> None:
    for name in (namespace(1), namespace(2)):
        assert ring.keys(name, FORMAT) is not None
        assert ring.salt(name) is not None
    derived = [ring._entries[name].derived[FORMAT] for name in (namespace(1), namespace(2))]
    ring.drop_components([component(2)])
    assert ring.keys(namespace(1), FORMAT) is None
    assert ring.salt(namespace(1)) is None
    assert ring.keys(namespace(2), FORMAT) == namespace_keys(SECRET, FORMAT)
    ring.put(namespace(2), b"n" * 32, (component(1),), clock.now_ns + 1)
    assert ring.keys(namespace(2), FORMAT) == namespace_keys(b"n" * 32, FORMAT)
    assert ring.salt(namespace(2)) == engine_salt(b"n" * 32)
    assert not any(any(buffer) for buffer in derived)


def test_each_format_has_keys_of_its_own_and_only_some_formats_are_kept(ring: KeyRing) -> None:
    formats = [bytes([number]) * 32 for number in range(FORMATS_MAX + 3)]
    for _ in range(2):
        for each in formats:
            assert ring.keys(namespace(1), each) == namespace_keys(SECRET, each)
    assert len(ring._entries[namespace(1)].derived) == FORMATS_MAX


def test_a_secret_of_another_length_is_refused(ring: KeyRing) -> None:
    with pytest.raises(Misuse):
        ring.put(namespace(3), b"short", (component(1),), 1)
    with pytest.raises(Misuse):
        ring.put(namespace(3), SECRET, (), 1)


def test_a_fence_is_cut_once_and_for_ever() -> None:
    fence = Fence()
    fence.check()
    fence.cut()
    fence.cut()
    assert fence.is_cut
    with pytest.raises(Fenced):
        fence.check()
    assert issubclass(Fenced, Refused)
