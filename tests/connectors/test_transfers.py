"""Loads and saves of one rank: frames are handed in by the test, copies are real."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strongroom.connectors.orders import LoadOrder, SaveOrder
from strongroom.connectors.pages import pages_of
from strongroom.connectors.transfers import Report, Transfers
from strongroom.errors import Misuse, ProtocolViolation
from strongroom.kvformat import Layout
from strongroom.wire.frames import (
    Copied,
    EngineFrame,
    Fenced,
    Filled,
    Layers,
    Load,
    LoadDone,
    LoadFailed,
    Part,
    Save,
    SaveDone,
    Slot,
    Slots,
    Welcome,
)

PAGE = 32
PAGES = 40
LATER = 10**15
SECOND = 10**9


class RecordingLink:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.generation = 1
        self.alive = True
        self.frames: list[EngineFrame] = []

    def send(self, frame: EngineFrame) -> bool:
        if not self.generation:
            return False
        self.frames.append(frame)
        return True

    def wake(self) -> None:
        return


class Rank:
    """Transfers over two layers of small pages, with staging of 64 KiB."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.link = RecordingLink()
        self.tensors = [torch.zeros(PAGES, 1, PAGE, 2) for _ in range(2)]
        size = PAGE * 2 * 4
        self.layout = Layout("vllm-cpu-packed", "vec", PAGE, (size, size), 1, 0, 1, 0)
        self.transfers = Transfers(
            pages_of(self.tensors, PAGES), self.layout,
            load_deadline_s=5, save_deadline_s=2, clock=lambda: self.now_ns,
        )  # fmt: skip
        self.transfers.attach(self.link)
        self.staging = mmap.mmap(-1, 65536)
        self.transfers.opened(Welcome(1, "s", 4 * PAGE, 65536), self.staging)

    def order(self, start: int = 0, end: int = 8 * PAGE, key: str = "a") -> int:
        pages = tuple(range(20 + start // PAGE, 20 + end // PAGE))
        self.transfers.start_loads([LoadOrder(key, f"1-{key}", start, end, pages)])
        frame = self.link.frames[-1]
        assert isinstance(frame, Load)
        return frame.load

    def part(self, load: int, start: int, end: int, offset: int = 0, late: bool = False) -> None:
        values = torch.arange(start // PAGE + 1, end // PAGE + 1, dtype=torch.float32)
        block = values.repeat_interleave(PAGE * 2).repeat(2)
        data = bytes(block.view(torch.uint8).tolist())
        self.staging[offset : offset + len(data)] = data
        deadline = self.now_ns if late else LATER
        self.transfers.received(Part(load, start, end, offset, deadline))

    def reopen(self) -> None:
        """The session is lost, and there is another."""
        self.transfers.closed()
        self.transfers.opened(Welcome(1, "s", 4 * PAGE, 65536), self.staging)

    def page(self, number: int) -> list[float]:
        """The one value of this page in each layer."""
        values = [set(tensor[number].flatten().tolist()) for tensor in self.tensors]
        assert all(len(value) == 1 for value in values)
        return [value.pop() for value in values]

    def page_of(self, layer: int, number: int) -> float:
        """The one value of this page in one layer."""
        (value,) = set(self.tensors[layer][number].flatten().tolist())
        return float(value)

    def report(self, ended: tuple[str, ...] = (), held: tuple[str, ...] = ()) -> Report:
        return self.transfers.take_report(ended, held)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_parts_land_in_the_pages_that_were_asked_for(rank: Rank) -> None:
    load = rank.order()
    rank.part(load, 0, 4 * PAGE)
    rank.part(load, 4 * PAGE, 8 * PAGE, 4096)
    assert rank.report() == Report()
    rank.transfers.received(LoadDone(load, LATER))
    assert rank.report() == Report(received=frozenset({"a"}))
    assert [rank.page(20 + index) for index in range(8)] == [[i + 1.0] * 2 for i in range(8)]
    assert rank.page(28) == [0.0, 0.0]
    assert [f for f in rank.link.frames if isinstance(f, Copied)] == [
        Copied(load, 0), Copied(load, 4096),
    ]  # fmt: skip


def test_a_load_is_reported_once(rank: Rank) -> None:
    load = rank.order(end=4 * PAGE)
    rank.part(load, 0, 4 * PAGE)
    rank.transfers.received(LoadDone(load, LATER))
    assert rank.report().received == {"a"}
    rank.transfers.received(LoadDone(load, LATER))
    rank.transfers.received(LoadFailed(load, 0))
    rank.transfers.closed()
    assert rank.report(ended=("a",)) == Report()


def test_pages_below_the_local_hit_are_not_written(rank: Rank) -> None:
    """The block starts below: its first pages are shared with other requests."""
    load = rank.order(start=2 * PAGE, end=6 * PAGE)
    rank.part(load, 0, 4 * PAGE)
    rank.part(load, 4 * PAGE, 8 * PAGE, 4096)
    rank.transfers.received(LoadDone(load, LATER))
    assert rank.report() == Report(received=frozenset({"a"}))
    assert [rank.page(page)[0] for page in range(20, 28)] == [0, 0, 3, 4, 5, 6, 0, 0]


def test_parts_may_come_in_any_order(rank: Rank) -> None:
    load = rank.order()
    rank.part(load, 4 * PAGE, 8 * PAGE, 4096)
    rank.part(load, 0, 4 * PAGE)
    rank.transfers.received(LoadDone(load, LATER))
    assert rank.report().failed_pages == frozenset()


def test_a_part_that_never_came_fails_everything_after_it(rank: Rank) -> None:
    load = rank.order()
    rank.part(load, 4 * PAGE, 8 * PAGE, 4096)
    rank.transfers.received(LoadDone(load, LATER))
    assert rank.report().failed_pages == set(range(20, 28))


def test_a_load_that_fails_half_way_keeps_what_came_before(rank: Rank) -> None:
    load = rank.order()
    rank.part(load, 0, 4 * PAGE)
    rank.transfers.received(LoadFailed(load, 4 * PAGE))
    assert rank.report() == Report(received=frozenset({"a"}), failed_pages=frozenset(range(24, 28)))


def test_a_late_part_is_a_failure_from_there_on(rank: Rank) -> None:
    load = rank.order()
    rank.part(load, 0, 4 * PAGE)
    rank.part(load, 4 * PAGE, 8 * PAGE, 4096, late=True)
    assert rank.page(24) == [0.0, 0.0]
    assert rank.report() == Report(received=frozenset({"a"}), failed_pages=frozenset(range(24, 28)))
    assert rank.link.frames[-1] == Copied(load, 4096)


def test_a_part_whose_deadline_passes_during_the_copy_is_a_failure(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = rank.order(end=4 * PAGE)
    copy_in: Callable[..., None] = rank.transfers._pages.copy_in

    def slow(*arguments: object) -> None:
        copy_in(*arguments)
        rank.now_ns = LATER

    monkeypatch.setattr(rank.transfers._pages, "copy_in", slow)
    rank.part(load, 0, 4 * PAGE)
    assert rank.report().failed_pages == set(range(20, 24))


def test_a_load_under_a_lease_that_ran_out_is_a_failure(rank: Rank) -> None:
    load = rank.order(end=4 * PAGE)
    rank.part(load, 0, 4 * PAGE)
    rank.transfers.received(LoadDone(load, rank.now_ns))
    assert rank.report().failed_pages == set(range(20, 24))


def test_a_silent_sidecar_fails_the_load_at_its_deadline(rank: Rank) -> None:
    rank.order(end=4 * PAGE)
    assert rank.transfers.due(0) == 5 * SECOND
    assert rank.report() == Report()
    rank.transfers.due(5 * SECOND)
    assert rank.report() == Report(received=frozenset({"a"}), failed_pages=frozenset(range(20, 24)))


def test_a_lost_session_fails_whatever_it_had_not_finished(rank: Rank) -> None:
    load = rank.order()
    rank.part(load, 0, 4 * PAGE)
    rank.transfers.closed()
    assert rank.report().failed_pages == set(range(20, 28))


def test_a_load_without_a_sidecar_fails_at_once(rank: Rank) -> None:
    rank.link.generation = 0
    rank.transfers.start_loads([LoadOrder("a", "1-a", 0, PAGE, (3,))])
    assert rank.report() == Report(received=frozenset({"a"}), failed_pages=frozenset({3}))


def test_a_dead_io_thread_fails_every_load_and_frees_every_page(rank: Rank) -> None:
    rank.order(end=4 * PAGE)
    rank.transfers.start_saves([SaveOrder("b", "1-b", PAGE, (1,))])
    rank.link.alive = False
    report = rank.report(held=("b",))
    assert report.received == {"a"}
    assert report.failed_pages == set(range(20, 24))
    assert report.sent == {"b"}


def test_a_fence_fails_the_whole_load(rank: Rank) -> None:
    load = rank.order()
    rank.part(load, 0, 4 * PAGE)
    rank.transfers.received(Fenced("1-a"))
    assert rank.report().failed_pages == set(range(20, 28))


def test_a_fence_leaves_other_requests_alone(rank: Rank) -> None:
    load = rank.order(end=4 * PAGE)
    rank.transfers.received(Fenced("1-b"))
    rank.part(load, 0, 4 * PAGE)
    rank.transfers.received(LoadDone(load, LATER))
    assert rank.report() == Report(received=frozenset({"a"}))


def test_an_aborted_request_is_reported_once_and_no_part_is_used_after(rank: Rank) -> None:
    load = rank.order(end=4 * PAGE)
    assert rank.report(ended=("a",)) == Report()
    rank.part(load, 0, 4 * PAGE)
    assert rank.page(20) == [0.0, 0.0]
    rank.transfers.due(rank.now_ns)
    assert rank.report().received == {"a"}
    assert rank.report() == Report()


def test_a_part_of_a_load_that_ended_gives_its_staging_back(rank: Rank) -> None:
    load = rank.order(end=4 * PAGE)
    rank.transfers.due(5 * SECOND)
    rank.report()
    rank.part(load, 0, 4 * PAGE)
    assert rank.link.frames[-1] == Copied(load, 0)
    assert rank.page(20) == [0.0, 0.0]


def test_an_order_that_could_not_be_drawn_up_fails_without_pages(rank: Rank) -> None:
    rank.transfers.start_loads([LoadOrder("a", "", 0, 0, (), lost=True)])
    assert rank.report() == Report(received=frozenset({"a"}), failed=frozenset({"a"}))


@pytest.mark.parametrize(
    ("start", "end", "offset"),
    [(0, PAGE + 1, 0), (PAGE, PAGE, 0), (-PAGE, PAGE, 0), (0, PAGE, -1), (0, PAGE, 65536)],
)
def test_a_part_outside_of_staging_or_off_the_grid_ends_the_session(
    rank: Rank, start: int, end: int, offset: int
) -> None:
    load = rank.order()
    with pytest.raises(ProtocolViolation):
        rank.transfers.received(Part(load, start, end, offset, LATER))


def test_tensors_of_another_layout_than_declared_are_refused() -> None:
    layout = Layout("vllm-cpu-packed", "vec", PAGE, (1, 1), 1, 0, 1, 0)
    with pytest.raises(Misuse):
        Transfers(pages_of([torch.zeros(PAGES, 1, PAGE, 2)] * 2, PAGES), layout)


def save(rank: Rank, key: str = "a", end: int = 8 * PAGE) -> int:
    for page in range(20, 20 + end // PAGE):
        for tensor in rank.tensors:
            tensor[page] = float(page)
    rank.transfers.start_saves(
        [SaveOrder(key, f"1-{key}", end, tuple(range(20, 20 + end // PAGE)))]
    )
    frame = rank.link.frames[-1]
    assert isinstance(frame, Save)
    return frame.save


def test_slots_are_filled_with_the_pages_of_their_tokens(rank: Rank) -> None:
    number = save(rank)
    rank.transfers.received(Slots(number, (Slot(4 * PAGE, 8 * PAGE, 8192),)))
    assert rank.link.frames[-1] == Filled(number, 8192, True)
    floats = memoryview(rank.staging)[8192 : 8192 + 2 * 4 * 256].cast("f").tolist()
    expected = [float(page) for page in range(24, 28) for _ in range(64)]
    assert floats == expected * 2


def test_a_finished_request_is_held_until_its_slots_are_filled(rank: Rank) -> None:
    number = save(rank)
    assert rank.report(held=("a",)).sent == frozenset()
    rank.transfers.received(Slots(number, (Slot(0, 8 * PAGE, 0),)))
    assert rank.report().sent == {"a"}
    assert rank.report().sent == frozenset()


def test_a_held_request_with_nothing_to_copy_is_freed_in_the_same_step(rank: Rank) -> None:
    number = save(rank)
    rank.transfers.received(Slots(number, ()))
    assert rank.report(held=("a", "never-saved")).sent == {"a", "never-saved"}


def test_pages_are_held_for_no_longer_than_the_deadline(rank: Rank) -> None:
    number = save(rank)
    assert rank.report(held=("a",)).sent == frozenset()
    rank.now_ns = 2 * SECOND
    rank.transfers.due(rank.now_ns)
    assert rank.report().sent == {"a"}
    rank.transfers.received(Slots(number, (Slot(0, 8 * PAGE, 0),)))
    assert rank.link.frames[-1] == Filled(number, 0, False)


def test_pages_of_a_preempted_request_are_not_read_any_more(rank: Rank) -> None:
    number = save(rank)
    rank.transfers.cancel_saves({"a"})
    rank.transfers.received(Slots(number, (Slot(0, 8 * PAGE, 0),)))
    assert rank.link.frames[-1] == Filled(number, 0, False)
    assert bytes(rank.staging[:16]) == bytes(16)


def test_a_preemption_of_one_request_leaves_the_saves_of_others(rank: Rank) -> None:
    number = save(rank)
    rank.transfers.cancel_saves({"b"})
    rank.transfers.received(Slots(number, (Slot(0, 8 * PAGE, 0),)))
    assert rank.link.frames[-1] == Filled(number, 0, True)


def test_what_found_no_room_is_offered_again_while_the_pages_are_there(rank: Rank) -> None:
    number = save(rank)
    rank.transfers.received(Slots(number, (Slot(0, 4 * PAGE, 0),)))
    assert rank.report(held=("a",)).sent == frozenset()
    rank.transfers.received(SaveDone(number, 1))
    again = rank.link.frames[-1]
    assert again == Save("1-a", number + 1, 8 * PAGE)
    rank.transfers.received(Slots(number + 1, ()))
    assert rank.report().sent == {"a"}


def test_a_fenced_request_gives_nothing_out(rank: Rank) -> None:
    number = save(rank)
    rank.transfers.received(Fenced("1-a"))
    rank.transfers.received(Slots(number, (Slot(0, 8 * PAGE, 0),)))
    assert rank.link.frames[-1] == Filled(number, 0, False)


def test_a_lost_session_frees_held_pages(rank: Rank) -> None:
    save(rank)
    assert rank.report(held=("a",)).sent == frozenset()
    rank.transfers.closed()
    assert rank.report().sent == {"a"}


def test_slots_of_an_unknown_save_are_given_back(rank: Rank) -> None:
    rank.transfers.received(Slots(77, (Slot(0, PAGE, 0),)))
    assert rank.link.frames[-1] == Filled(77, 0, False)


def test_a_slot_beyond_what_was_offered_ends_the_session(rank: Rank) -> None:
    number = save(rank)
    with pytest.raises(ProtocolViolation):
        rank.transfers.received(Slots(number, (Slot(8 * PAGE, 9 * PAGE, 0),)))


EVENTS = st.sampled_from(
    ["part0", "part1", "late1", "done", "done_late", "failed0", "failed1", "fenced", "closed",
     "ended", "due", "deadline"]
)  # fmt: skip


@given(st.lists(EVENTS, max_size=12))
def test_whatever_happens_a_load_ends_once_and_good_pages_hold_their_bytes(
    events: list[str],
) -> None:
    rank = Rank()
    load = rank.order()
    reports: list[Report] = []
    actions: dict[str, Callable[[], object]] = {
        "part0": lambda: rank.part(load, 0, 4 * PAGE),
        "part1": lambda: rank.part(load, 4 * PAGE, 8 * PAGE, 4096),
        "late1": lambda: rank.part(load, 4 * PAGE, 8 * PAGE, 4096, late=True),
        "done": lambda: rank.transfers.received(LoadDone(load, LATER)),
        "done_late": lambda: rank.transfers.received(LoadDone(load, 0)),
        "failed0": lambda: rank.transfers.received(LoadFailed(load, 0)),
        "failed1": lambda: rank.transfers.received(LoadFailed(load, 4 * PAGE)),
        "fenced": lambda: rank.transfers.received(Fenced("1-a")),
        "closed": rank.reopen,
        "ended": lambda: reports.append(rank.report(ended=("a",))),
        "due": lambda: rank.transfers.due(rank.now_ns),
        "deadline": lambda: rank.transfers.due(rank.now_ns + 6 * SECOND),
    }
    for event in [*events, "deadline"]:
        actions[event]()
        reports.append(rank.report())
    told = [report for report in reports if report.received]
    assert len(told) == 1
    failed = told[0].failed_pages
    assert all(report.failed_pages <= failed for report in reports)
    assert failed in [set(range(first, 28)) for first in range(20, 29)]
    for index in range(8):
        if 20 + index not in failed:
            assert rank.page(20 + index) == [index + 1.0] * 2


# Layers before their part


class Eager(Rank):
    """A rank that asks for layers."""

    def __init__(self, layers: bool | None = True) -> None:
        super().__init__()
        self.transfers = Transfers(
            pages_of(self.tensors, PAGES), self.layout,
            load_deadline_s=5, save_deadline_s=2, layers=layers, clock=lambda: self.now_ns,
        )  # fmt: skip
        self.transfers.attach(self.link)
        self.transfers.opened(Welcome(1, "s", 4 * PAGE, 65536), self.staging)

    def put(self, start: int, end: int, offset: int, layers: range) -> None:
        """These layers of a block, each page holding its number."""
        values = torch.arange(start // PAGE + 1, end // PAGE + 1, dtype=torch.float32)
        data = bytes(values.repeat_interleave(PAGE * 2).view(torch.uint8).tolist())
        for layer in layers:
            at = offset + layer * len(data)
            self.staging[at : at + len(data)] = data

    def layers(self, load: int, layers: int, deadline_ns: int = LATER, offset: int = 0) -> None:
        self.transfers.received(Layers(load, 0, 4 * PAGE, offset, layers, deadline_ns))

    def whole(self, load: int) -> None:
        self.transfers.received(Part(load, 0, 4 * PAGE, 0, LATER))


def test_layers_are_asked_for_as_set_and_by_default_for_large_blocks_alone() -> None:
    for layers, tokens, asked in (
        (True, 4 * PAGE, True), (False, 4 * PAGE, False), (None, 4 * PAGE, False),
        (None, 2**20 * PAGE, True),
    ):  # fmt: skip
        rank = Eager(layers)
        rank.transfers.opened(Welcome(1, "s", tokens, 65536), rank.staging)
        rank.order()
        frame = rank.link.frames[-1]
        assert isinstance(frame, Load)
        assert frame.layers is asked


def test_a_layer_is_copied_when_it_is_announced_and_not_again_with_its_part() -> None:
    rank = Eager()
    load = rank.order(end=4 * PAGE)
    rank.put(0, 4 * PAGE, 0, range(1))
    rank.layers(load, 1)
    assert [rank.page_of(0, 20 + index) for index in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert rank.page_of(1, 20) == 0.0
    assert not [frame for frame in rank.link.frames if isinstance(frame, Copied)]
    # What lies there afterwards shows that the part brings only what was not copied yet.
    rank.staging[0 : 4 * PAGE * 2 * 4] = bytes(4 * PAGE * 2 * 4)
    rank.put(0, 4 * PAGE, 0, range(1, 2))
    rank.whole(load)
    assert [rank.page(20 + index) for index in range(4)] == [[i + 1.0] * 2 for i in range(4)]
    rank.transfers.received(LoadDone(load, LATER))
    assert rank.report() == Report(received=frozenset({"a"}))
    assert [frame for frame in rank.link.frames if isinstance(frame, Copied)] == [Copied(load, 0)]
    counts = rank.transfers.statistics()
    assert (counts.layers_early, counts.pages_in) == (1, 4)


def test_a_load_that_fails_takes_back_its_layers_and_gives_the_slot_back() -> None:
    rank = Eager()
    load = rank.order(end=8 * PAGE)
    rank.put(0, 4 * PAGE, 0, range(1))
    rank.layers(load, 1)
    rank.transfers.received(LoadFailed(load, 0))
    report = rank.report()
    assert report.failed_pages == frozenset(range(20, 28))
    assert rank.link.frames[-1] == Copied(load, 0)
    # Another load may have the same offset, and starts from its own first layer.
    other = rank.order(end=4 * PAGE, key="b")
    rank.put(0, 4 * PAGE, 0, range(2))
    rank.whole(other)
    rank.transfers.received(LoadDone(other, LATER))
    assert rank.report().failed_pages == frozenset()
    assert [rank.page(20 + index) for index in range(4)] == [[i + 1.0] * 2 for i in range(4)]


def test_pages_count_with_the_part_and_not_with_layers_however_many() -> None:
    rank = Eager()
    load = rank.order(end=4 * PAGE)
    rank.put(0, 4 * PAGE, 0, range(2))
    rank.layers(load, 2)
    rank.transfers.received(LoadDone(load, LATER))
    assert rank.report().failed_pages == frozenset(range(20, 24))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_layer_is_not_used_after_its_deadline(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Eager()
    load = rank.order(end=4 * PAGE)
    rank.put(0, 4 * PAGE, 0, range(2))
    if when == "before":
        rank.now_ns = SECOND
        rank.layers(load, 1, SECOND)
        assert rank.page_of(0, 20) == 0.0
    else:
        pages = rank.transfers._pages
        copy = pages.copy_in

        def slow(*args: object) -> None:
            copy(*args)  # type: ignore[arg-type]
            rank.now_ns = SECOND

        monkeypatch.setattr(pages, "copy_in", slow)
        rank.layers(load, 1, SECOND)
    report = rank.report()
    assert report.failed_pages == frozenset(range(20, 24))
    assert rank.transfers.statistics().parts_late == 1
    rank.whole(load)  # its slot is given back all the same
    assert rank.link.frames[-1] == Copied(load, 0)


def test_layers_of_a_load_that_has_ended_are_left_alone() -> None:
    rank = Eager()
    load = rank.order(end=4 * PAGE)
    rank.transfers.received(Fenced("1-a"))
    rank.put(0, 4 * PAGE, 0, range(2))
    rank.layers(load, 1)
    assert rank.page_of(0, 20) == 0.0
    rank.layers(77, 1)
    assert rank.page_of(0, 20) == 0.0


def test_a_session_that_was_lost_forgets_what_it_had_announced() -> None:
    rank = Eager()
    load = rank.order(end=4 * PAGE)
    rank.put(0, 4 * PAGE, 0, range(1))
    rank.layers(load, 1)
    rank.reopen()
    assert rank.report().failed_pages == frozenset(range(20, 24))
    rank.transfers.received(LoadFailed(load, 0))
    assert not [frame for frame in rank.link.frames if isinstance(frame, Copied)]


@pytest.mark.parametrize("layers", [0, 3, -1])
def test_layers_that_a_block_does_not_have_end_the_session(layers: int) -> None:
    rank = Eager()
    load = rank.order(end=4 * PAGE)
    with pytest.raises(ProtocolViolation):
        rank.layers(load, layers)
    with pytest.raises(ProtocolViolation):
        rank.layers(load, 1, offset=65536)
