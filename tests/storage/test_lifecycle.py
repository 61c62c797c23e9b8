"""Reserved, Sealed, Resident, weak and strong: the order is kept by types and by behaviour."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from storage.fence import Fenced
from storage.index import Index
from storage.lifecycle import Place, Reserved, Resident, Sealed, weaken
from storage.tiers.host import HostTier
from strongroom.errors import Missing, Overloaded, QuotaExceeded
from tests.storage.support import FakeClock, component, context, namespace, sealed

T = TypeVar("T")
Holding = AbstractAsyncContextManager[memoryview]
Held = tuple[int, bytes, int]
"""A holder: its number, the bytes it saw, and when its pin runs out."""

ROOT = Path(__file__).parents[2]
SNIPPET = """
from storage.header import Header
from storage.index import Index
from storage.lifecycle import Pin, Reserved, Resident, Sealed, WeakReference, seal, weaken
from storage.tiers.host import HostTier

def right(host: HostTier, index: Index, reserved: Reserved, header: Header) -> None:
    resident: Resident = host.publish(seal(reserved, header), lambda: None)
    weak: WeakReference = weaken(resident)
    pin: Pin | None = index.pin(weak, 1)
    if pin is not None:
        index.unpin(pin)

def wrong(host: HostTier, index: Index, reserved: Reserved, header: Header,
          sealed: Sealed, resident: Resident, weak: WeakReference, pin: Pin | None) -> None:
    host.publish(reserved, lambda: None)  # wrong: published before it is sealed
    seal(sealed, header)  # wrong: sealed twice
    seal(resident, header)  # wrong: sealed after it is visible
    host.publish(resident, lambda: None)  # wrong: published twice
    host.abandon(resident)  # wrong: a visible block is evicted, not abandoned
    index.pin(sealed, 1)  # wrong: pinned before it is visible
    index.pin(reserved, 1)  # wrong: pinned before it has content
    index.unpin(weak)  # wrong: a weak reference holds nothing
    index.unpin(pin)  # wrong: an upgrade may have failed
    weaken(sealed)  # wrong: there is nothing to refer to
    reserved.place = sealed.reserved.place  # wrong: a state is frozen
"""


def test_a_wrong_transition_does_not_type_check(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    wanted = [n for n, line in enumerate(SNIPPET.splitlines(), 1) if "# wrong" in line]
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--hide-error-context",
         f"--cache-dir={tmp_path}", str(snippet)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={"MYPYPATH": str(ROOT)},
    )  # fmt: skip
    found = re.findall(r"snippet\.py:(\d+): error: .*\[([a-z-]+)\]", answer.stdout)
    assert sorted({int(line) for line, _ in found}) == wanted, answer.stdout + answer.stderr
    assert {code for _, code in found} <= {"arg-type", "misc"}


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast("T", stop.value)
    raise AssertionError("it waited")


def admit() -> None:
    """Let it in."""


def refuse() -> None:
    raise Fenced("cut")


NUMBERS = st.integers(0, 11)
RECORD = len(sealed(context())[1])
ROOM = 6
QUOTA = 4 * RECORD
PIN_S = 30


class Lifecycle(RuleBasedStateMachine):
    """A host tier against a dictionary: what is visible, pinned, charged and stored."""

    reserved = Bundle("reserved")
    sealed = Bundle("sealed")
    pins = Bundle("pins")

    @initialize()
    def start(self) -> None:
        self.clock = FakeClock()
        self.tier = HostTier(
            ROOM * RECORD, self.clock, pin_ns=PIN_S * 10**9, quota_bytes=QUOTA, lock_memory=False
        )
        self.visible: dict[int, bytes] = {}
        self.in_transition = 0
        self.holding: list[Holding] = []
        self.holders: list[Held] = []

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            for holding in self.holding:
                now(holding.__aexit__(None, None, None))
            now(self.tier.close())

    def tenant(self, number: int) -> int:
        return number % 2

    @rule(target=reserved, number=NUMBERS)
    def reserve(self, number: int) -> tuple[int, Reserved] | None:
        wanted = context(number, tenant=self.tenant(number))
        before = dict(self.tier.used())
        try:
            block = self.tier.reserve(
                wanted.address, wanted.parent, wanted.tenant, wanted.namespace, RECORD
            )
        except QuotaExceeded:
            assert before.get(wanted.tenant, 0) + RECORD > QUOTA
            return None
        except Overloaded:
            return None
        finally:
            self._forget_evicted()
        self.in_transition += 1
        return number, block

    @rule(target=sealed, item=consumes(reserved))
    def seal(self, item: tuple[int, Reserved] | None) -> tuple[int, Sealed, bytes] | None:
        if item is None:
            return None
        number, block = item
        header, record = sealed(context(number, tenant=self.tenant(number)))
        self.tier.buffer(block)[:] = record
        return number, self.tier.seal(block, header), bytes(record)

    @rule(item=consumes(reserved))
    def abandon_reserved(self, item: tuple[int, Reserved] | None) -> None:
        if item is not None:
            self.tier.abandon(item[1])
            self.in_transition -= 1

    @rule(item=consumes(sealed))
    def abandon_sealed(self, item: tuple[int, Sealed, bytes] | None) -> None:
        if item is not None:
            self.tier.abandon(item[1])
            self.in_transition -= 1

    @rule(item=consumes(sealed), admitted=st.booleans())
    def publish(self, item: tuple[int, Sealed, bytes] | None, admitted: bool) -> None:
        if item is None:
            return
        number, block, record = item
        self.in_transition -= 1
        if admitted:
            resident = self.tier.publish(block, admit)
            assert resident.address == context(number).address
            self.visible[number] = record
        else:
            with pytest.raises(Fenced):
                self.tier.publish(block, refuse)

    @rule(target=pins, number=NUMBERS)
    def hold(self, number: int) -> tuple[Holding, memoryview, Held] | None:
        holding = self.tier.hold(context(number).address)
        if number not in self.visible:
            with pytest.raises(Missing):
                now(holding.__aenter__())
            return None
        view = now(holding.__aenter__())
        item = (number, self.visible[number], self.clock.now_ns + PIN_S * 10**9)
        self.holders.append(item)
        self.holding.append(holding)
        return holding, view, item

    @rule(item=consumes(pins))
    def let_go(self, item: tuple[Holding, memoryview, Held] | None) -> None:
        if item is None:
            return
        holding, view, held = item
        assert bytes(view) == held[1], "a holder's bytes never change"
        now(holding.__aexit__(None, None, None))
        self.holders.remove(held)
        self.holding.remove(holding)

    @rule(number=NUMBERS)
    def evict(self, number: int) -> None:
        freed = self.tier.evict(context(number).address)
        pinned = any(
            held[1] == self.visible.get(number) and held[2] > self.clock.now_ns
            for held in self.holders
        )
        assert bool(freed) == (number in self.visible and not pinned)
        if freed:
            del self.visible[number]

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        assert bool(self.tier.drop(context(number).address)) == (number in self.visible)
        self.visible.pop(number, None)

    @precondition(lambda self: self.holders)
    @rule()
    def time_passes(self) -> None:
        self.clock.advance_s(PIN_S)

    @invariant()
    def exactly_what_was_published_is_visible(self) -> None:
        if not hasattr(self, "tier"):
            return
        for number in range(12):
            assert (context(number).address in self.tier) == (number in self.visible)
        assert self.tier.statistics().blocks == len(self.visible)

    @invariant()
    def every_byte_is_charged_once_and_given_back(self) -> None:
        if not hasattr(self, "tier"):
            return
        leaving = {held[1] for held in self.holders if held[1] not in self.visible.values()}
        count = len(self.visible) + self.in_transition + len(leaving)
        assert sum(self.tier.used().values()) == count * RECORD
        assert self.tier.statistics().used_bytes == count * RECORD
        assert all(used <= QUOTA for used in self.tier.used().values())

    def _forget_evicted(self) -> None:
        gone = [n for n in self.visible if context(n).address not in self.tier]
        for number in gone:
            held = [h for h in self.holders if h[1] == self.visible[number]]
            assert all(h[2] <= self.clock.now_ns for h in held), "a pinned block was evicted"
            del self.visible[number]


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def index() -> Index:
    return Index(FakeClock())


def insert(index: Index, number: int) -> Resident:
    wanted = context(number)
    return index.insert(
        wanted.address, wanted.parent, component(1), namespace(1), Place(number * 4096, 4096)
    )


def test_a_weak_reference_is_upgraded_while_its_writing_is_there(index: Index) -> None:
    weak = weaken(insert(index, 1))
    pin = index.pin(weak, 2 * 10**9)
    assert pin is not None
    assert index.is_pinned(context(1).address)
    index.unpin(pin)
    index.unpin(pin)
    assert index.pinned == 0, "never negative"


def test_a_weak_reference_to_an_earlier_writing_is_not_upgraded(index: Index) -> None:
    weak = weaken(insert(index, 1))
    index.remove(context(1).address)
    insert(index, 1)
    assert index.pin(weak, 2 * 10**9) is None


def test_releasing_a_pin_of_an_earlier_writing_frees_no_later_one(index: Index) -> None:
    old = index.pin(insert(index, 1), 2 * 10**9)
    assert old is not None
    index.remove(context(1).address)
    index.pin(insert(index, 1), 2 * 10**9)
    index.unpin(old)
    assert index.is_pinned(context(1).address)


def test_a_removed_parents_slot_is_reused_without_confusing_its_children(index: Index) -> None:
    insert(index, 1)
    child = context(2, parent=1)
    index.insert(child.address, child.parent, component(1), namespace(1), Place(0, 1))
    index.remove(context(1).address)
    insert(index, 3)  # takes the parent's slot
    index.remove(child.address)
    assert [a.block[-1] for a in index.victims()] == [3]
