"""What is kept of requests: a running total of prompts, and how long each is known."""

from __future__ import annotations

import random  # noqa: TID251 - a seeded generator, so that a failure repeats

import pytest

from sidecar.lookup.request import Denied, Finished, Hit, Judged, Opened, Prompt, Requests
from tests.sidecar.control_plane import FakeControlPlane


@pytest.fixture(scope="module")
def judged() -> Judged:
    control = FakeControlPlane()
    claims = control.grant(control.tenant(), range(64)).claims
    return Judged(claims, Prompt(bytes(256), b"", "grant"), Hit(), may_save=True)


class Moving:
    """A transfer in flight."""

    kind = "save"

    def stop(self) -> None:
        """It goes on."""


def sweep(requests: Requests, before_ns: int) -> None:
    """By age alone."""
    requests.sweep(before_ns, number_max=1000, bytes_max=1 << 30)


def counted(requests: Requests, *, finished: bool) -> int:
    """The total by its definition."""
    return sum(
        len(each.prompt.tokens)
        for each in requests
        if each.prompt is not None and isinstance(each.state, Finished) is finished
    )


def test_the_running_total_is_the_sum_whatever_happens(judged: Judged) -> None:
    chance = random.Random(7)
    requests, now = Requests(), 0
    for _ in range(3000):
        now += 1
        name = f"r{chance.randrange(12)}"
        request = requests.get(name)
        match chance.randrange(9):
            case 0 | 1:
                requests.open(name, now)
            case 2 | 3 if request is not None:
                request.settle(judged)
            case 4 if request is not None and isinstance(request.state, Opened):
                request.settle(Denied())
                request.deny(now)
            case 5 if request is not None:
                request.finish(now)
            case 6 if request is not None:
                request.cancel(now)
            case 7 if request is not None:
                request.fence_off()
            case _:
                sweep(requests, now - 20)
        assert requests.prompt_bytes == counted(requests, finished=False)
        assert requests.finished_bytes == counted(requests, finished=True)
    requests.cancel_all(now)
    assert requests.prompt_bytes == requests.finished_bytes == 0
    assert len(requests) == 0


def test_what_finished_lingers_and_everything_else_is_forgotten_at_once(judged: Judged) -> None:
    requests = Requests()
    finished, cancelled, running = (requests.open(name, 1) for name in ("f", "c", "r"))
    for request in (finished, cancelled, running):
        request.settle(judged)
    finished.finish(10)
    cancelled.cancel(10)
    sweep(requests, 9)
    assert [request.name for request in requests] == ["f", "r"]
    sweep(requests, 10)
    assert [request.name for request in requests] == ["r"]
    assert requests.prompt_bytes == 256


def test_a_request_with_a_transfer_in_flight_is_kept_until_that_ends(judged: Judged) -> None:
    requests, moving = Requests(), Moving()
    request = requests.open("f", 1)
    request.settle(judged)
    request.transfers.add(moving)  # type: ignore[arg-type]
    request.finish(10)
    sweep(requests, 100)
    assert requests.get("f") is request
    request.transfers.clear()
    sweep(requests, 100)
    assert requests.get("f") is None
    assert requests.prompt_bytes == requests.finished_bytes == 0


def test_a_swept_name_that_is_used_again_is_another_request(judged: Judged) -> None:
    requests = Requests()
    first = requests.open("r", 1)
    first.settle(judged)
    first.finish(2)
    second = requests.open("r", 3)
    second.settle(judged)
    sweep(requests, 100)
    assert requests.get("r") is second
    assert requests.prompt_bytes == 256


def test_what_ended_is_kept_once_however_often_the_engine_says_so(judged: Judged) -> None:
    told: list[str] = []
    requests = Requests(lambda request: told.append(request.name))
    finished, cancelled = requests.open("finished", 0), requests.open("cancelled", 0)
    finished.settle(judged)
    for now in range(1, 1001):
        finished.finish(now)
        cancelled.cancel(now)
    assert told == ["finished", "cancelled"]
    assert (len(requests._lingering), len(requests._over)) == (1, 1)
    assert finished.ended_ns == 1, "and it is forgotten no later"
    # Nor is another pushed out by it.
    other = requests.open("other", 0)
    other.settle(judged)
    other.finish(1)
    requests.sweep(0, number_max=2, bytes_max=1 << 30)
    assert requests.get("finished") is finished
    assert requests.get("other") is other


def test_a_request_that_is_cancelled_after_it_finished_is_forgotten(judged: Judged) -> None:
    requests = Requests()
    request = requests.open("r", 0)
    request.settle(judged)
    request.finish(1)
    request.cancel(2)
    assert requests.finished_bytes == 0
    sweep(requests, 1)
    assert requests.get("r") is None
