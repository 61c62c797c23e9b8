"""What is taken is in start-time fair order; against a model that recomputes everything."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from storage.fair_queue import FairQueue
from strongroom.identity import ComponentId

TENANTS = [ComponentId(name * 32) for name in "abcd"]
WEIGHTS = dict(zip(TENANTS, (1.0, 2.0, 4.0, 1.0), strict=True))

kinds = st.sampled_from(["add", "add", "take", "discard"])
steps = st.lists(st.tuples(kinds, st.integers(0, 3), st.integers(1, 9)), max_size=200)


def test_of_two_that_wait_each_leaves_by_its_weight_whoever_came_first() -> None:
    queue: FairQueue[int] = FairQueue(WEIGHTS.__getitem__)
    for number in range(400):
        queue.add(number, TENANTS[0], 10)
    for number in range(400, 440):
        queue.add(number, TENANTS[1], 10)
    first = [queue.take() for _ in range(30)]
    assert sum(number >= 400 for number in first) in {19, 20, 21}, "two of three"
    assert [number for number in first if number < 400] == list(range(10)), "in its own order"


def test_who_comes_to_a_flood_goes_next_and_gathers_no_credit_while_away() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(100):
        queue.add(number, TENANTS[0], 10)
    for _ in range(50):
        queue.take()
    for number in range(100, 110):
        queue.add(number, TENANTS[1], 10)
    taken = [queue.take() for _ in range(10)]
    assert any(number >= 100 for number in taken[:2])
    assert sum(number >= 100 for number in taken) in {5, 6}, "and not all that it missed"


@given(steps)
def test_what_left_over_weight_differs_by_the_largest_items_at_most(
    script: list[tuple[str, int, int]],
) -> None:
    queue: FairQueue[int] = FairQueue(WEIGHTS.__getitem__)
    waiting: dict[int, tuple[ComponentId, int]] = {}
    served: Counter[ComponentId] = Counter()
    since: dict[ComponentId, Counter[ComponentId]] = {}
    for number, (step, at, cost) in enumerate(script):
        if step == "add":
            tenant = TENANTS[at]
            if all(who != tenant for who, _ in waiting.values()):
                since[tenant] = served.copy()
            queue.add(number, tenant, cost)
            waiting[number] = (tenant, cost)
        elif step == "discard" and waiting:
            item = list(waiting)[at % len(waiting)]
            queue.discard(item)
            queue.discard(item)
            del waiting[item]
        elif waiting:
            first = queue.first()
            assert queue.take() == first
            tenant, of_it = waiting.pop(first)
            assert all(item > first for item, (who, _) in waiting.items() if who == tenant)
            served[tenant] += of_it
            for other in {who for who, _ in waiting.values()} - {tenant}:
                # From when both waited on, neither is ahead by more than one item of each.
                both = (
                    since[other]
                    if sum(since[other].values()) > sum(since[tenant].values())
                    else since[tenant]
                )
                mine = Fraction(served[tenant] - both[tenant]) / Fraction(WEIGHTS[tenant])
                its = Fraction(served[other] - both[other]) / Fraction(WEIGHTS[other])
                assert mine - its <= 9 / Fraction(WEIGHTS[tenant]) + 9 / Fraction(WEIGHTS[other])
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting)
