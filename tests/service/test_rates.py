"""Rate limits: whom they count for, when they end, and what they cost in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.auth.tokens import Role
from service.rates import RateRules, Rates, TooMany, Windows
from service.settings import ServiceSettings
from strongroom.problem import MEDIA_TYPE
from tests.service.house import Party, Service, running
from tests.service.sidecar_party import SidecarParty, enrolled

NS = 1_000_000_000
RULES = RateRules(principal=10, tenant=25, sidecar=5, address=3, subjects_max=1000)


class HandClock:
    def __init__(self, at_s: float = 600.0) -> None:
        self.now_ns = int(at_s * NS)

    def __call__(self) -> int:
        return self.now_ns

    def forward(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS)


def used(rates: Rates, times: int, tenant: str | None = "a", subject: str = "alice") -> None:
    for _ in range(times):
        rates.principal(tenant, subject)


def test_a_principal_is_stopped_at_its_limit_and_others_are_not() -> None:
    rates = Rates(RULES, HandClock())
    standing = rates.principal("a", "alice")
    assert (standing.limit, standing.remaining) == (10, 9)
    used(rates, 9)
    with pytest.raises(TooMany) as refusal:
        rates.principal("a", "alice")
    assert (refusal.value.limit, refusal.value.code) == (10, "rate_limited")
    # The same name in another tenant, or in none, is somebody else.
    for tenant, subject in (("a", "bob"), ("b", "alice"), (None, "alice")):
        rates.principal(tenant, subject)


def test_many_names_in_one_tenant_share_its_limit() -> None:
    rates = Rates(RULES, HandClock())
    for number in range(25):
        rates.principal("a", f"user-{number}")
    with pytest.raises(TooMany, match="tenant"):
        rates.principal("a", "another")
    rates.principal("b", "another")


@given(start_s=st.floats(600, 720), early=st.integers(0, 10), pause_s=st.floats(0, 59))
def test_after_what_it_was_told_to_wait_the_caller_gets_in(
    start_s: float, early: int, pause_s: float
) -> None:
    clock = HandClock(start_s)
    rates = Rates(RULES, clock)
    used(rates, early)
    clock.forward(pause_s)
    with pytest.raises(TooMany) as refusal:
        used(rates, 11)
    assert 1 <= refusal.value.retry_after_s <= 120
    clock.forward(refusal.value.retry_after_s)
    rates.principal("a", "alice")


@given(steps=st.lists(st.floats(0, 30), min_size=1, max_size=60))
def test_no_minute_lets_in_twice_the_limit(steps: list[float]) -> None:
    clock = HandClock()
    rates = Rates(RULES, clock)
    let_in: list[int] = []
    for step in steps:
        clock.forward(step)
        for _ in range(12):
            try:
                rates.principal(None, "alice")
            except TooMany:
                break
            let_in.append(clock.now_ns)
    for moment in let_in:
        within = [at for at in let_in if moment <= at < moment + 60 * NS]
        # A sliding counter is an estimate: it takes the requests of before as spread evenly.
        assert len(within) < 2 * RULES.principal


def test_memory_is_bounded_and_whoever_calls_is_not_forgotten() -> None:
    rules = RateRules(principal=10, tenant=10**6, sidecar=5, address=3, subjects_max=100)
    rates = Rates(rules, HandClock())
    used(rates, 10, None)
    for number in range(10_000):
        rates.principal(None, f"user-{number}")
        with pytest.raises(TooMany):
            rates.principal(None, "alice")
    assert len(rates._windows) == 100


def test_the_librarys_other_calls_do_what_they_say() -> None:
    windows = Windows(HandClock(), 10)
    assert (windows.incr("k", 60), windows.incr("k", 60, 2), windows.get("k")) == (1, 3, 3)
    windows.clear_sliding_window("k", 60)
    assert (windows.get("k"), windows.check(), windows.get_expiry("k")) == (0, True, 600.0)
    windows.incr("k", 60)
    assert (windows.reset(), len(windows)) == (1, 0)


# Over HTTP


@pytest.fixture
async def strict(settings: ServiceSettings) -> AsyncIterator[Service]:
    limits = {
        "principal_requests_per_min": 5,
        "sidecar_requests_per_min": 5,
        "enrolments_per_min": 3,
    }
    async with running(settings.model_copy(update=limits)) as started:
        yield started


async def test_many_tokens_are_one_principal_still(strict: Service) -> None:
    tokens = [strict.party("auditor-1", "", Role.AUDITOR) for _ in range(6)]
    answers = [await party.ask("GET", "/v1/tenants") for party in tokens]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert answers[0].headers["ratelimit-policy"] == '"principal";q=5;w=60'
    assert answers[0].headers["ratelimit"].startswith('"principal";r=4;t=')
    refusal = answers[-1]
    assert refusal.headers["content-type"] == MEDIA_TYPE
    assert (refusal.json()["code"], refusal.json()["limit"]) == ("rate_limited", 5)
    assert 1 <= int(refusal.headers["retry-after"]) <= 120
    # Another role does not help it, and nobody else is held up by it.
    same = strict.party("auditor-1", "", Role.GATEWAY)
    assert (await same.ask("GET", "/v1/artefacts")).status_code == 429
    other = strict.party("auditor-2", "", Role.AUDITOR)
    assert (await other.ask("GET", "/v1/tenants")).status_code == 200


async def test_a_problem_says_what_is_left_too(strict: Service) -> None:
    party = strict.party("gateway-1", "", Role.GATEWAY)
    answer = await party.ask("GET", "/v1/tenants")
    assert answer.status_code == 403
    assert answer.headers["ratelimit"].startswith('"principal";r=4;t=')


async def test_whoever_proves_nothing_counts_for_nobody(strict: Service) -> None:
    forged = Party(strict.http, strict.token("auditor-1", "", Role.AUDITOR)[:-4] + "AAAA")
    for _ in range(7):
        assert (await forged.ask("GET", "/v1/tenants")).status_code == 401
    right = strict.party("auditor-1", "", Role.AUDITOR)
    assert (await right.ask("GET", "/v1/tenants")).status_code == 200


async def test_enrolments_of_one_address_are_bounded_and_so_are_their_audit_events(
    strict: Service,
) -> None:
    party = SidecarParty(strict.http)
    answers = await asyncio.gather(*(party.enrol("srj_wrong") for _ in range(6)))
    assert sorted(answer.status_code for answer in answers) == [403, 403, 403, 429, 429, 429]
    found = await strict.operator.get("/v1/audit/events", kind="sidecar.enrolled")
    assert len(found["items"]) == 3


async def test_a_sidecar_has_a_limit_of_its_own(strict: Service) -> None:
    first = await enrolled(strict, name="node-1")
    second = await enrolled(strict, name="node-2")
    answers = [await first.send("GET", "/invalidations") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert (await second.send("GET", "/invalidations")).status_code == 200
