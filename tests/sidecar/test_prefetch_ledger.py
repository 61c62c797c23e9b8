"""Reservations are the bytes on their way and unread, whatever happens, and nothing at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sidecar.prefetch.budget import Budget, Denial, Denied, Reservation
from sidecar.prefetch.ledger import Ending, Issued, Ledger
from sidecar.prefetch.waste import WasteSettings
from sidecar.prefetch.waste_gates import WasteGates
from storage.block import BlockAddress
from storage.lifecycle import Resident
from storage.tiers.protocol import TierName
from strongroom.errors import Misuse
from tests.storage.support import FakeClock, block, component, namespace

BLOCK = 4096
KEEP_NS = 10 * 10**9


def resident(number: int, tenant: int = 1, nbytes: int = BLOCK) -> Resident:
    return Resident(
        BlockAddress(block(number), 0), component(tenant), namespace(tenant), nbytes, number
    )


class Books:
    """A ledger with what it is made of."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.clock = FakeClock()
        self.budget = Budget(8 * BLOCK, 5 * BLOCK) if budget is None else budget
        self.waste = WasteGates(WasteSettings(), self.clock)
        self.ledger = Ledger(self.budget, self.waste, self.clock)

    def try_issue(
        self, owner: object, found: Resident, deadline_ns: int | None = None
    ) -> Issued | Denied:
        return self.ledger.issue(
            owner, found, deadline_ns=deadline_ns, expires_ns=self.clock() + KEEP_NS
        )

    def issue(self, owner: object, number: int, deadline_ns: int | None = None) -> Issued:
        issued = self.try_issue(owner, resident(number), deadline_ns)
        assert isinstance(issued, Issued)
        return issued

    def landed(self, owner: object, number: int) -> Issued:
        issued = self.issue(owner, number)
        self.ledger.landed(issued)
        return issued

    def sweep(self, here: Callable[[BlockAddress], bool] = lambda _: True) -> None:
        for _ in self.ledger.sweep(here):
            pass

    @property
    def adds_up(self) -> bool:
        both = self.ledger.on_its_way_bytes + self.ledger.unread_bytes
        return self.ledger.faults() == () and self.budget.used_bytes == both


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_tenant_and_the_whole_have_a_bound_each_and_a_refusal_is_counted(books: Books) -> None:
    for number in range(5):
        books.issue("a", number)
    assert books.try_issue("a", resident(5)) == Denied(Denial.TENANT_BUDGET)
    for number in range(6, 9):
        assert isinstance(books.try_issue("b", resident(number, tenant=2)), Issued)
    assert books.try_issue("b", resident(9, tenant=2)) == Denied(Denial.BUDGET)
    refused = books.ledger.counts.refused
    assert {reason: moved.bytes for reason, moved in refused.items()} == {
        Denial.TENANT_BUDGET: BLOCK,
        Denial.BUDGET: BLOCK,
    }
    assert books.adds_up


def test_a_block_is_used_once_and_gives_its_room_back(books: Books) -> None:
    found = books.landed("a", 1)
    assert books.budget.used_bytes == BLOCK
    books.ledger.was_read(found.address, TierName.HOST)
    books.ledger.was_read(found.address, TierName.HOST)
    assert books.ledger.counts.used.blocks == 1
    assert books.budget.used_bytes == 0
    assert books.adds_up


@pytest.mark.parametrize("how", ["evicted", "expired", "disowned", "read from nvme"])
def test_a_block_that_nobody_read_from_host_memory_is_wasted(books: Books, how: str) -> None:
    found = books.landed("a", 1)
    books.sweep()
    assert books.ledger.counts.wasted.blocks == 0
    match how:
        case "evicted":
            books.sweep(lambda _: False)
        case "expired":
            books.clock.advance_s(KEEP_NS / 10**9)
            books.sweep()
        case "disowned":
            books.ledger.disown("a")
        case _:
            books.ledger.was_read(found.address, TierName.NVME)
    assert (books.ledger.counts.wasted.blocks, books.ledger.counts.used.blocks) == (1, 0)
    assert books.budget.used_bytes == 0
    assert books.adds_up


def test_a_block_of_two_owners_is_wasted_when_both_have_ended(books: Books) -> None:
    found = books.landed("a", 1)
    books.ledger.own("b", found)
    books.ledger.disown("a")
    assert books.ledger.counts.wasted.blocks == 0
    books.ledger.disown("b")
    assert books.ledger.counts.wasted.blocks == 1
    assert books.adds_up


def test_a_block_that_lands_for_nobody_is_wasted(books: Books) -> None:
    found = books.issue("a", 1)
    books.ledger.disown("a")
    assert books.budget.used_bytes == BLOCK  # the read goes on, and so does its room
    books.ledger.landed(found)
    assert (books.ledger.counts.completed.blocks, books.ledger.counts.wasted.blocks) == (1, 1)
    assert books.adds_up


@pytest.mark.parametrize(("tier", "used"), [(TierName.HOST, 1), (TierName.NVME, 0)])
def test_a_load_that_overtakes_uses_only_what_it_found_in_host_memory(
    books: Books, tier: TierName, used: int
) -> None:
    found = books.issue("a", 1)
    books.ledger.was_read(found.address, tier)
    assert books.budget.used_bytes == BLOCK
    books.ledger.landed(found)
    counts = books.ledger.counts
    assert (counts.used.blocks, counts.wasted.blocks) == (used, 1 - used)
    assert books.adds_up


def test_a_missed_deadline_counts_once_and_only_while_under_way(books: Books) -> None:
    missed = books.ledger.counts.deadline_missed
    in_time = books.issue("a", 1, deadline_ns=books.clock() + 10**9)
    late = books.issue("a", 2, deadline_ns=books.clock() + 10**9)
    books.ledger.landed(in_time)
    assert books.ledger.wanted(in_time.address) is None
    books.clock.advance_s(2)
    assert missed.blocks == 0
    assert books.ledger.wanted(late.address) is late
    books.ledger.landed(late)
    assert (missed.blocks, missed.bytes) == (1, BLOCK)
    given_up = books.issue("a", 3, deadline_ns=books.clock() - 1)
    books.ledger.withdraw(given_up, Ending.CANCELLED)
    assert missed.blocks == 2
    assert books.adds_up


def test_withdrawing_what_has_landed_changes_nothing(books: Books) -> None:
    found = books.landed("a", 1)
    books.ledger.withdraw(found, Ending.CANCELLED)
    assert books.ledger.counts.cancelled.blocks == 0
    assert books.ledger.get(found.address) is found


def test_a_reservation_is_given_back_once(books: Books) -> None:
    reserved = books.budget.reserve(component(1), BLOCK)
    assert isinstance(reserved, Reservation)
    books.budget.release(reserved)
    with pytest.raises(Misuse):
        books.budget.release(reserved)
    assert books.budget.faults() == ()


def test_a_refusal_for_waste_reserves_nothing_and_one_for_room_takes_no_probe() -> None:
    books = Books()
    for number in range(WasteSettings().blocks_min):
        books.landed("a", number % 4)
        books.ledger.disown("a")
    assert books.try_issue("a", resident(1)) == Denied(Denial.WASTE)
    assert books.budget.used_bytes == 0
    books.clock.advance_s(WasteSettings().cool_down_ns / 10**9)
    for _ in range(2 * WasteSettings().probe_blocks):
        refused = books.try_issue("a", resident(2, nbytes=6 * BLOCK))
        assert refused == Denied(Denial.TENANT_BUDGET)
    books.issue("a", 1)
    assert books.adds_up


class Forgetful(Budget):
    """Forgets one release: what a bug on one path would do."""

    forget = False

    def release(self, reservation: Reservation) -> None:
        if self.forget:
            self.forget = False
        else:
            super().release(reservation)


@pytest.mark.parametrize("ending", list(Ending))
def test_a_release_that_is_left_out_is_seen_and_taken_back(ending: Ending) -> None:
    budget = Forgetful(2 * BLOCK, 2 * BLOCK)
    books = Books(budget)
    found = books.issue("a", 1)
    assert books.ledger.faults() == ()
    budget.forget = True
    match ending:
        case Ending.USED:
            books.ledger.landed(found)
            books.ledger.was_read(found.address, TierName.HOST)
        case Ending.WASTED:
            books.ledger.landed(found)
            books.ledger.disown("a")
        case Ending.CANCELLED | Ending.FAILED:
            books.ledger.withdraw(found, ending)
    assert not budget.forget
    assert "reserved bytes are not the bytes on their way and unread" in books.ledger.faults()
    # And it does not end prefetching in silence: the next sweep takes it back and counts it.
    books.sweep()
    assert books.ledger.faults() == ()
    assert (budget.used_bytes, books.ledger.counts.leaked) == (0, 1)


NUMBERS = st.integers(0, 9)
OWNERS = st.sampled_from("abc")


class AnyOrder(RuleBasedStateMachine):
    """Every step in every order, by owners who know nothing of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.ledger = self.books.ledger
        self.seen: list[Issued] = []

    @rule(owner=OWNERS, number=NUMBERS, deadline_s=st.none() | st.integers(-1, 2))
    def issue_or_own(self, owner: str, number: int, deadline_s: int | None) -> None:
        known = self.ledger.get(BlockAddress(block(number), 0))
        if known is not None:
            self.ledger.own(owner, known)
            return
        deadline_ns = None if deadline_s is None else self.books.clock() + deadline_s * 10**9
        issued = self.books.try_issue(
            owner, resident(number, tenant=number % 2 + 1, nbytes=BLOCK * (number + 1)), deadline_ns
        )
        if isinstance(issued, Issued):
            self.seen.append(issued)

    @rule(pick=st.randoms(use_true_random=False))
    def land(self, pick: object) -> None:
        if self.seen:
            self.ledger.landed(pick.choice(self.seen))  # type: ignore[attr-defined]

    @rule(
        pick=st.randoms(use_true_random=False),
        ending=st.sampled_from([Ending.CANCELLED, Ending.FAILED]),
    )
    def withdraw(self, pick: object, ending: Ending) -> None:
        if self.seen:
            self.ledger.withdraw(pick.choice(self.seen), ending)  # type: ignore[attr-defined]

    @rule(owner=OWNERS, pick=st.randoms(use_true_random=False))
    def own_anything(self, owner: str, pick: object) -> None:
        if self.seen:
            self.ledger.own(owner, pick.choice(self.seen))  # type: ignore[attr-defined]

    @rule(number=NUMBERS, tier=st.sampled_from([TierName.HOST, TierName.NVME]))
    def read(self, number: int, tier: TierName) -> None:
        address = BlockAddress(block(number), 0)
        self.ledger.wanted(address)
        self.ledger.was_read(address, tier)

    @rule(number=NUMBERS)
    def want(self, number: int) -> None:
        self.ledger.wanted(BlockAddress(block(number), 0))

    @rule(owner=OWNERS)
    def disown(self, owner: str) -> None:
        self.ledger.disown(owner)

    @rule(gone=st.sets(NUMBERS))
    def sweep(self, gone: set[int]) -> None:
        away = {BlockAddress(block(number), 0) for number in gone}
        self.books.sweep(lambda address: address not in away)

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.books.clock.advance_s(seconds)

    @invariant()
    def reserved_is_on_its_way_and_unread(self) -> None:
        assert self.books.adds_up
        assert self.ledger.counts.leaked == 0
        # Somebody who waits for a block is told, unless it is still on its way.
        for issued in self.seen:
            still = self.ledger.get(issued.address) is issued and not issued.landed
            assert issued.landed or still or not issued.watchers

    def teardown(self) -> None:
        for issued in self.seen:
            self.ledger.withdraw(issued, Ending.CANCELLED)
        for owner in "abc":
            self.ledger.disown(owner)
        assert len(self.ledger) == 0
        assert self.books.budget.used_bytes == 0
        assert dict(self.books.budget.used()) == {}
        assert self.ledger.faults() == ()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
