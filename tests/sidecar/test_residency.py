"""The residency reporter: amounts reach the service behind everything else, and heal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidecar.record.residency import ResidencyReporter
from storage.index import Footprint
from storage.tiers.protocol import TierName
from strongroom.control import RESIDENCY_ROWS_MAX, ResidencyRequest
from strongroom.errors import Refused, Unavailable
from strongroom.identity import NamespaceId
from tests.sidecar.conftest import Stored

HOST, NVME = TierName.HOST, TierName.NVME


def name(number: int) -> NamespaceId:
    return NamespaceId(f"{number:064x}")


class Node:
    """What is resident, as a store would tell it."""

    def __init__(self) -> None:
        self.tiers: dict[TierName, dict[NamespaceId, tuple[int, int]]] = {HOST: {}, NVME: {}}

    def footprints(self, step: int) -> Iterator[tuple[TierName, list[Footprint]]]:
        for tier, names in self.tiers.items():
            rows = [Footprint(each, *amount) for each, amount in names.items()]
            for first in range(0, len(rows), step):
                yield tier, rows[first : first + step]


class Service:
    """The service's rules for taking reports, and ways to lose one."""

    def __init__(self) -> None:
        self.run, self.last = "", -1
        self.held: dict[tuple[str, str], tuple[int, int]] = {}
        self.reports: list[ResidencyRequest] = []
        self.lose_question = self.lose_answer = self.refuse = 0

    async def residency(self, report: ResidencyRequest) -> bool:
        if self.refuse:
            self.refuse -= 1
            raise Refused("no")
        if self.lose_question:
            self.lose_question -= 1
            raise Unavailable("lost")
        restart = self._take(report)
        if self.lose_answer:
            self.lose_answer -= 1
            raise Unavailable("lost")
        return restart

    def _take(self, report: ResidencyRequest) -> bool:
        assert len(report.amounts) <= RESIDENCY_ROWS_MAX
        if report.run == self.run and report.number <= self.last:
            return False
        if report.number == 0:
            self.held.clear()
        elif report.run != self.run or report.number != self.last + 1:
            return True
        self.run, self.last = report.run, report.number
        self.reports.append(report)
        for each in report.amounts:
            self.held.pop((each.tier, each.namespace), None)
            if each.blocks:
                self.held[each.tier, each.namespace] = each.blocks, each.bytes
        return False

    def forget(self) -> None:
        """An older backup was restored."""
        self.run, self.last, self.held = "", -1, {}


def agree(node: Node, service: Service) -> bool:
    return service.held == {
        (tier.value, each): amount
        for tier, names in node.tiers.items()
        for each, amount in names.items()
    }


@pytest.fixture
def node() -> Node:
    made = Node()
    made.tiers[HOST] = {name(number): (number, 10 * number) for number in range(1, 5)}
    made.tiers[NVME] = {name(1): (7, 70)}
    return made


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def reporter(node: Node, service: Service) -> ResidencyReporter:
    return ResidencyReporter(node.footprints, service, 30.0)


async def test_only_what_differs_is_said_and_many_changes_are_one_amount(
    node: Node, service: Service, reporter: ResidencyReporter
) -> None:
    await reporter.round()
    assert agree(node, service)
    await reporter.round()
    assert service.reports[-1].amounts == []
    for blocks in range(100):
        node.tiers[HOST][name(1)] = (blocks + 1, blocks + 1)
    del node.tiers[HOST][name(2)], node.tiers[NVME][name(1)]
    await reporter.round()
    assert len(service.reports[-1].amounts) == 3
    assert agree(node, service)


async def test_many_namespaces_go_in_reports_of_bounded_size(
    node: Node, service: Service, reporter: ResidencyReporter
) -> None:
    node.tiers[HOST] = {name(number): (1, 1) for number in range(3 * RESIDENCY_ROWS_MAX)}
    await reporter.round()
    assert agree(node, service)
    assert len(service.reports) > 3
    node.tiers[HOST].clear()
    await reporter.round()
    assert agree(node, service)


@pytest.mark.parametrize("lost", ["lose_question", "lose_answer"])
async def test_a_report_that_is_lost_is_made_good_by_the_next_round(
    node: Node, service: Service, reporter: ResidencyReporter, lost: str
) -> None:
    await reporter.round()
    node.tiers[HOST][name(1)] = (50, 50)
    setattr(service, lost, 1)
    with pytest.raises(Unavailable):
        await reporter.round()
    node.tiers[HOST][name(1)] = (60, 60)
    del node.tiers[HOST][name(3)]
    run = service.run
    await reporter.round()
    assert agree(node, service)
    assert service.run == run, "nothing was said anew"


async def test_a_service_that_forgot_is_told_everything_anew(
    node: Node, service: Service, reporter: ResidencyReporter
) -> None:
    await reporter.round()
    service.forget()
    await reporter.round()
    assert agree(node, service)


async def test_what_a_running_sidecar_stores_reaches_the_catalogue(stored: Stored) -> None:
    sidecar, control = stored.world.sidecar, stored.world.control
    await sidecar.residency.round()
    told = {each.namespace: each for each in control.residency if each.tier == "host"}
    assert set(told) == sidecar.store.namespaces()
    host = sidecar.store.statistics().tiers[0]
    assert sum(each.blocks for each in told.values()) == host.blocks
    assert sum(each.bytes for each in told.values()) > 0
