"""Scheduling decisions from memory alone: no socket, no engine, a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.blocks import pack_tokens
from strongroom.connectors.lookups import Ask, Lookups, Standing
from strongroom.errors import Missing
from strongroom.limits import GRANT_BYTES_MAX
from strongroom.wire.frames import (
    Cancel,
    EngineFrame,
    Fenced,
    Finish,
    Lease,
    Open,
    Verdict,
    Welcome,
)

PAGE = 32
SECOND = 1_000_000_000


class RecordingLink:
    """Keeps what is sent; `generation` 0 is a sidecar that is away."""

    def __init__(self) -> None:
        self.generation = 1
        self.frames: list[EngineFrame] = []

    def send(self, frame: EngineFrame) -> bool:
        if not self.generation:
            return False
        self.frames.append(frame)
        return True


class World:
    """A `Lookups` with its link and clock."""

    def __init__(self) -> None:
        self.link = RecordingLink()
        self.now_ns = 0
        self.lookups = Lookups(self.link, PAGE, deadline_s=0.2, clock=lambda: self.now_ns)
        self.lease(3600)

    def lease(self, seconds: float) -> None:
        """A lease that runs so long from now on."""
        self.lookups.received(Lease(self.now_ns + int(seconds * SECOND)))

    def open(self, tokens: int = 100, key: str = "a", grant: str = "grant") -> str:
        ask = Ask(grant, "salt", pack_tokens(range(tokens)))
        assert self.lookups.open(key, ask) is Standing.WAITING
        frame = self.link.frames[-1]
        assert isinstance(frame, Open)
        return frame.request

    def allow(self, request: str, tokens: int, *, save: bool = True) -> None:
        self.lookups.received(Verdict(request, True, tokens, save))

    def refuse(self, request: str) -> None:
        self.lookups.received(Verdict(request, False, 0, False))


@pytest.fixture
def world() -> World:
    return World()


def test_a_request_asks_again_until_its_verdict_is_in_memory(world: World) -> None:
    request = world.open()
    assert world.lookups.matched("a", 0, 100) is None
    assert world.lookups.settle() == []
    world.allow(request, 96)
    assert world.lookups.matched("a", 0, 100) == 96


def test_asking_repeatedly_changes_nothing_and_sends_nothing(world: World) -> None:
    world.allow(world.open(), 64)
    sent = len(world.link.frames)
    assert {world.lookups.matched("a", 0, 100) for _ in range(5)} == {64}
    assert len(world.link.frames) == sent
    assert world.lookups.take_orders().loads == ()


def test_a_refused_request_asks_once_more_and_is_told_to_skip_outside_the_lookup(
    world: World,
) -> None:
    world.refuse(world.open())
    # The engine has its local hit in hand here: a number would let it keep that hit.
    assert world.lookups.matched("a", 64, 100) is None
    waits = [world.lookups.loading]
    assert world.lookups.settle() == ["a"]
    waits.append(world.lookups.loading)
    assert waits == [True, False], "it waits for nothing of ours any more"
    assert world.lookups.matched("a", 0, 100) == 0
    assert world.lookups.settle() == []


def test_an_allowed_request_is_never_told_to_skip(world: World) -> None:
    world.allow(world.open(), 0)
    assert world.lookups.matched("a", 64, 100) == 0
    assert world.lookups.settle() == []


def test_no_verdict_by_the_deadline_is_a_refusal(world: World) -> None:
    world.open()
    world.now_ns = 199_000_000
    assert world.lookups.settle() == []
    world.now_ns = 200_000_000
    assert world.lookups.matched("a", 64, 100) is None
    assert world.lookups.settle() == ["a"]
    assert world.lookups.matched("a", 0, 100) == 0


def test_a_verdict_after_the_deadline_opens_no_reading_but_lets_the_prompt_be_saved(
    world: World,
) -> None:
    request = world.open()
    world.now_ns = 300_000_000
    assert world.lookups.settle() == ["a"]
    world.allow(request, 96)
    assert world.lookups.matched("a", 0, 100) == 0
    world.lookups.scheduled("a", 100, lambda: list(range(10, 14)))
    assert world.lookups.take_orders().saves == ()  # all of it is stored already
    other = world.open(key="b")
    world.now_ns = 600_000_000
    assert world.lookups.settle() == ["b"]
    world.allow(other, 0)
    world.lookups.scheduled("b", 100, lambda: list(range(10, 14)))
    assert [order.end for order in world.lookups.take_orders().saves] == [96]


def test_a_sidecar_that_is_away_refuses_at_once(world: World) -> None:
    world.link.generation = 0
    ask = Ask("grant", "salt", pack_tokens(range(100)))
    assert world.lookups.open("a", ask) is Standing.REFUSED
    assert world.lookups.matched("a", 0, 100) == 0


def test_a_sidecar_that_goes_away_takes_its_verdicts_with_it(world: World) -> None:
    world.allow(world.open(), 96)
    assert world.lookups.matched("a", 0, 100) == 96
    world.link.generation = 0
    assert world.lookups.matched("a", 0, 100) is None
    assert world.lookups.settle() == ["a"]


def test_a_verdict_of_one_session_means_nothing_in_the_next(world: World) -> None:
    world.allow(world.open(), 96)
    world.link.generation = 2
    assert world.lookups.matched("a", 0, 100) is None
    assert world.lookups.settle() == ["a"]


def test_a_request_without_a_grant_is_refused_before_the_engine_looks(world: World) -> None:
    assert world.lookups.open("a", None) is Standing.REFUSED
    assert world.lookups.matched("a", 0, 100) == 0
    assert world.link.frames == []


def test_a_grant_too_large_for_the_wire_is_refused_here(world: World) -> None:
    ask = Ask("x" * (GRANT_BYTES_MAX + 1), "salt", pack_tokens(range(100)))
    assert world.lookups.open("a", ask) is Standing.REFUSED
    assert world.link.frames == []


def test_a_prompt_of_no_tokens_is_refused_here(world: World) -> None:
    assert world.lookups.open("a", Ask("grant", "", b"")) is Standing.REFUSED


def test_a_fenced_request_reads_and_saves_nothing_more(world: World) -> None:
    request = world.open()
    world.allow(request, 32)
    world.lookups.received(Fenced(request))
    assert world.lookups.matched("a", 0, 100) is None
    assert world.lookups.settle() == ["a"]
    world.lookups.scheduled("a", 100, lambda: list(range(4)))
    assert world.lookups.take_orders().saves == ()


def test_the_client_cannot_choose_the_name_that_the_sidecar_hears(world: World) -> None:
    first, second = world.open(key="k" * 5000), world.open(key="k" * 5000 + "!")
    assert first != second
    assert len(first) < 200
    hostile = world.open(key="\ud800\n\x1b[2J")
    assert hostile.isascii()
    assert hostile.isprintable()


def test_at_least_one_token_is_left_to_compute(world: World) -> None:
    world.allow(world.open(tokens=96), 96)
    assert world.lookups.matched("a", 0, 96) == 64


def test_a_local_hit_longer_than_what_is_stored_loads_nothing(world: World) -> None:
    world.allow(world.open(), 32)
    assert world.lookups.matched("a", 64, 100) == 0


def test_only_pages_above_the_local_hit_are_written(world: World) -> None:
    world.allow(world.open(tokens=200), 192)
    assert world.lookups.matched("a", 64, 200) == 128
    world.lookups.allocated("a", 128, [7, 8, 20, 21, 22, 23, 24])
    (order,) = world.lookups.take_orders().loads
    assert (order.start, order.end, order.pages) == (64, 192, (20, 21, 22, 23))


def test_being_told_again_with_nothing_after_a_load_orders_nothing(world: World) -> None:
    world.allow(world.open(), 96)
    world.lookups.matched("a", 0, 100)
    world.lookups.allocated("a", 96, [1, 2, 3, 4])
    assert len(world.lookups.take_orders().loads) == 1
    world.lookups.allocated("a", 0, [1, 2, 3, 4])
    assert world.lookups.take_orders().loads == ()


def test_a_load_that_cannot_be_described_is_still_told_to_the_worker(world: World) -> None:
    world.allow(world.open(), 96)
    world.lookups.matched("a", 0, 100)
    world.lookups.allocated("a", 96, [1])
    (order,) = world.lookups.take_orders().loads
    assert order.lost
    assert order.key == "a"


@pytest.mark.parametrize("by_page", [True, False])
def test_a_load_that_failed_is_not_tried_again_and_its_request_is_refused(
    world: World, by_page: bool
) -> None:
    world.allow(world.open(), 96)
    world.lookups.matched("a", 0, 100)
    world.lookups.allocated("a", 96, [1, 2, 3, 4])
    world.lookups.loaded(["a"], {3} if by_page else set(), set() if by_page else {"a"})
    assert world.lookups.settle() == ["a"]
    assert world.lookups.matched("a", 0, 100) == 0


def test_a_load_that_ended_well_may_be_repeated_after_a_preemption(world: World) -> None:
    world.allow(world.open(), 96)
    world.lookups.matched("a", 0, 100)
    world.lookups.allocated("a", 96, [1, 2, 3, 4])
    world.lookups.loaded(["a"], {77}, set())
    assert world.lookups.settle(["a"]) == []
    assert world.lookups.matched("a", 0, 105) == 96


def test_a_prompt_is_saved_once_when_its_last_token_is_computed(world: World) -> None:
    world.allow(world.open(tokens=100), 0)
    world.lookups.scheduled("a", 64, lambda: [1, 2])
    assert world.lookups.take_orders().saves == ()
    world.lookups.scheduled("a", 100, lambda: [1, 2, 3, 4])
    (order,) = world.lookups.take_orders().saves
    assert (order.end, order.pages) == (96, (1, 2, 3))
    world.lookups.scheduled("a", 101, lambda: [1, 2, 3, 4])
    assert world.lookups.take_orders().saves == ()


def test_nothing_is_saved_without_the_right_to(world: World) -> None:
    world.allow(world.open(), 0, save=False)
    world.lookups.scheduled("a", 100, lambda: [1, 2, 3, 4])
    assert world.lookups.take_orders().saves == ()


def test_a_prompt_shorter_than_a_page_is_not_saved(world: World) -> None:
    world.allow(world.open(tokens=31), 0)
    world.lookups.scheduled("a", 31, lambda: [1])
    assert world.lookups.take_orders().saves == ()


def test_a_preempted_prompt_is_saved_again_once_it_is_recomputed(world: World) -> None:
    world.allow(world.open(), 0)
    world.lookups.scheduled("a", 100, lambda: [1, 2, 3, 4])
    world.lookups.take_orders()
    world.lookups.settle(["a"])
    assert world.lookups.take_orders().preempted == ("a",)
    world.lookups.scheduled("a", 102, lambda: [5, 6, 7, 8])
    assert world.lookups.take_orders().saves[0].pages == (5, 6, 7)


def test_pages_of_an_ordered_save_are_held_and_others_are_not(world: World) -> None:
    world.allow(world.open(), 0)
    world.lookups.scheduled("a", 100, lambda: [1, 2, 3, 4])
    assert world.lookups.finished("a", aborted=False)
    assert world.lookups.take_orders().held == ("a",)
    world.allow(world.open(key="b"), 0)
    assert not world.lookups.finished("b", aborted=False)


def test_pages_of_a_load_in_flight_are_not_held_twice(world: World) -> None:
    """The engine holds them itself; two reports for one request would name freed pages."""
    request = world.open()
    world.allow(request, 32)
    world.lookups.scheduled("a", 100, lambda: [1, 2, 3, 4])
    world.lookups.matched("a", 0, 100)
    world.lookups.allocated("a", 32, [1, 2, 3, 4])
    assert not world.lookups.finished("a", aborted=True)
    assert world.link.frames[-1] == Cancel(request)


def test_an_orderly_end_is_told_to_the_sidecar(world: World) -> None:
    request = world.open()
    world.lookups.finished("a", aborted=False)
    assert world.link.frames[-1] == Finish(request)


def test_an_end_is_not_told_to_a_session_that_never_knew_the_request(world: World) -> None:
    world.open()
    world.link.generation = 2
    sent = len(world.link.frames)
    world.lookups.finished("a", aborted=False)
    assert len(world.link.frames) == sent


def test_after_a_reset_no_earlier_verdict_counts(world: World) -> None:
    world.allow(world.open(), 96)
    world.lookups.forget()
    assert world.lookups.matched("a", 0, 100) is None
    assert world.lookups.settle() == ["a"]


def test_a_second_verdict_for_a_request_is_ignored(world: World) -> None:
    request = world.open()
    world.refuse(request)
    world.allow(request, 96)
    assert world.lookups.settle() == ["a"]


def test_a_verdict_allows_nothing_once_the_lease_is_over(world: World) -> None:
    """Neither a load nor the engine's own prefix cache: the skip flag is set as for a refusal."""
    world.lease(5)
    world.allow(world.open(), 96)
    world.now_ns = 5 * SECOND - 1
    assert world.lookups.matched("a", 64, 100) == 32
    world.now_ns = 5 * SECOND
    assert world.lookups.matched("a", 64, 100) is None
    assert world.lookups.settle() == ["a"]
    assert world.lookups.matched("a", 0, 100) == 0


def test_a_lease_renewed_in_time_keeps_the_verdict_and_one_renewed_too_late_does_not(
    world: World,
) -> None:
    world.lease(5)
    world.allow(world.open(key="late"), 96)
    world.allow(world.open(key="prompt"), 96)
    world.now_ns = 6 * SECOND
    assert world.lookups.matched("late", 0, 100) is None
    assert world.lookups.settle() == ["late"]
    world.lease(5)
    assert world.lookups.matched("late", 0, 100) == 0
    assert world.lookups.matched("prompt", 0, 100) == 96
    assert world.lookups.settle() == []


def test_until_its_deadline_a_request_waits_for_a_lease_to_be_renewed(world: World) -> None:
    world.lease(0.1)
    world.allow(world.open(), 96)
    world.now_ns = SECOND // 10
    assert world.lookups.matched("a", 64, 100) is None
    assert world.lookups.settle() == []
    world.lease(5)
    assert world.lookups.matched("a", 64, 100) == 32


def test_a_session_that_never_got_a_lease_allows_nothing(world: World) -> None:
    world.lookups.opened(Welcome(1, "s", 256, 0), None)
    world.allow(world.open(), 96)
    assert world.lookups.matched("a", 64, 100) is None
    world.now_ns = SECOND
    assert world.lookups.settle() == ["a"]


@pytest.mark.parametrize("event", ["opened", "closed"])
def test_a_lease_ends_with_its_session(world: World, event: str) -> None:
    if event == "opened":
        world.lookups.opened(Welcome(1, "s", 256, 0), None)
    else:
        world.lookups.closed()
    world.allow(world.open(), 96)
    assert world.lookups.matched("a", 0, 100) is None


def test_the_last_lease_counts_also_where_it_is_shorter(world: World) -> None:
    world.allow(world.open(), 96)
    world.lease(0)
    world.now_ns = SECOND
    assert world.lookups.matched("a", 0, 100) is None


def test_a_request_that_runs_is_not_judged_by_the_lease_until_it_is_preempted(
    world: World,
) -> None:
    world.lease(5)
    world.allow(world.open(), 96)
    assert world.lookups.matched("a", 64, 100) == 32
    world.now_ns = 6 * SECOND
    assert world.lookups.settle() == []
    assert world.lookups.settle(["a"]) == []
    # It is asked about anew before it is resumed, with the local hit of now in hand.
    assert world.lookups.matched("a", 64, 105) is None
    assert world.lookups.settle() == ["a"]


def test_a_lease_renewed_before_it_resumes_lets_a_preempted_request_use_the_cache(
    world: World,
) -> None:
    world.lease(5)
    world.allow(world.open(), 96)
    assert world.lookups.matched("a", 64, 100) == 32
    world.now_ns = 6 * SECOND
    world.lookups.settle(["a"])
    world.lease(5)
    assert world.lookups.matched("a", 64, 105) == 32


def test_nothing_is_saved_while_the_lease_is_over_and_it_is_once_renewed(world: World) -> None:
    world.lease(5)
    world.allow(world.open(), 0)
    world.now_ns = 6 * SECOND
    world.lookups.scheduled("a", 100, lambda: [1, 2, 3, 4])
    assert world.lookups.take_orders().saves == ()
    world.lease(5)
    world.lookups.scheduled("a", 101, lambda: [1, 2, 3, 4])
    assert [order.end for order in world.lookups.take_orders().saves] == [96]


def test_a_request_that_was_never_looked_up_is_not_judged_by_default(world: World) -> None:
    with pytest.raises(Missing):
        world.lookups.matched("stranger", 64, 100)


@given(
    prompt=st.integers(1, 400),
    stored=st.integers(0, 600),
    local_pages=st.integers(0, 14),
    generated=st.integers(0, 40),
)
def test_external_tokens_are_whole_pages_within_prompt_and_leave_one_token(
    prompt: int, stored: int, local_pages: int, generated: int
) -> None:
    world = World()
    world.allow(world.open(tokens=prompt), stored)
    local = min(local_pages * PAGE, (prompt + generated - 1) // PAGE * PAGE)
    external = world.lookups.matched("a", local, prompt + generated)
    assert external is not None
    assert external >= 0
    assert external % PAGE == 0
    if external:
        assert local + external <= min(stored, prompt, prompt + generated - 1)
