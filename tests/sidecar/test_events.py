"""Events are numbered strictly upwards over a node's lives, bounded, and hold no names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidecar.clocks import Clocks
from sidecar.record.events import RESERVED_AT_ONCE, EventKind, Events, Sequence, json_lines
from strongroom.errors import Corrupt, Misuse
from tests.sidecar.harness import ManualClock


def events(directory: Path, ring_max: int = 100) -> tuple[Events, ManualClock]:
    clock = ManualClock()
    return Events(Sequence(directory).take, Clocks(clock), ring_max=ring_max), clock


def test_numbers_rise_within_a_life_and_over_lives(tmp_path: Path) -> None:
    last = 0
    for _ in range(3):  # each life ends without a word, as by SIGKILL
        ring, _ = events(tmp_path)
        for _ in range(5):
            event = ring.emit(EventKind.PRESSURE)
            assert event.seq > last
            last = event.seq


def test_numbers_that_run_out_are_reserved_anew_before_they_are_used(tmp_path: Path) -> None:
    sequence = Sequence(tmp_path)
    first = sequence.take()
    sequence._next = first + RESERVED_AT_ONCE - 2
    taken = [sequence.take() for _ in range(4)]
    assert taken == sorted(set(taken))
    assert Sequence(tmp_path).take() > taken[-1]


def test_numbers_are_reserved_in_good_time_so_that_a_full_disk_ends_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    sequence = Sequence(tmp_path)
    end = sequence._end
    sequence._next = end - RESERVED_AT_ONCE // 2
    with monkeypatch.context() as failing:
        failing.setattr("sidecar.record.events.replace_file", full)
        taken = [sequence.take() for _ in range(5000)]  # asked for, and not to be had yet
    taken += [sequence.take() for _ in range(5000)]
    monkeypatch.setattr("sidecar.record.events.replace_file", full)
    sequence._next = end - 2
    taken += [sequence.take() for _ in range(4)]
    assert taken == sorted(set(taken))
    assert int((tmp_path / "events.next").read_text()) > taken[-1]


@pytest.mark.parametrize("content", [b"", b"-1", b"twelve", b"9" * 16])
def test_a_damaged_number_stops_the_start_instead_of_repeating_one(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "events.next"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(Corrupt):
        Sequence(tmp_path)
    path.write_bytes(b"77")
    assert Sequence(tmp_path).take() == 77
    path.chmod(0o644)
    with pytest.raises(Misuse):
        Sequence(tmp_path)


def test_the_ring_is_bounded_and_a_late_reader_is_told(tmp_path: Path) -> None:
    ring, _ = events(tmp_path, ring_max=10)
    for _ in range(8):
        ring.emit(EventKind.PREFIX_HIT)
    assert not ring.lost(0)
    assert [event.seq for event in ring.after(5, 100)] == [6, 7, 8]
    for _ in range(8):
        ring.emit(EventKind.PREFIX_HIT)
    assert len(ring) == 10
    assert ring.lost(0)
    assert not ring.lost(6)
    assert [event.seq for event in ring.after(0, 3)] == [7, 8, 9]


def test_the_window_is_what_happened_just_before(tmp_path: Path) -> None:
    ring, clock = events(tmp_path)
    for _ in range(10):
        ring.emit(EventKind.PREFIX_MISS)
        clock.advance(1)
    assert [event.seq for event in ring.window(3.5, 100)] == [8, 9, 10]
    assert [event.seq for event in ring.window(100, 2)] == [9, 10]


def test_the_export_is_one_json_object_a_line_without_empty_fields(tmp_path: Path) -> None:
    ring, _ = events(tmp_path)
    ring.emit(EventKind.PRESSURE, subject="disk_queue", numbers={"from": 0, "to": 1})
    ring.emit(EventKind.SWAP_IN_DONE, engine="e", request="r", nbytes=4096)
    first, second = map(json.loads, json_lines(ring.after(0, 10)).splitlines())
    assert first.keys() == {"seq", "at", "boot_ns", "kind", "subject", "numbers"}
    assert (second["seq"], second["nbytes"]) == (2, 4096)
