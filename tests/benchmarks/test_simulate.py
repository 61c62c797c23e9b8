"""The simulator is deterministic, and its bound fails when the decision is taken away."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate import WITHIN, judge
from benchmarks.simulation.cases import JUDGED, TUNING, Case, Scaled
from benchmarks.simulation.fit import RECORDED
from benchmarks.simulation.replay import Choose, Policy, Result, choose_all, simulate
from benchmarks.traces import Agents, Chat, Rag, Saturated, Trace

REDUCED = (
    Case(
        "saturated",
        Saturated(32, 30, 4096, 160, 120.0, 2.0, 8.0),
        Scaled(40_000, 256, link_times=7.0),
        1.0,
        # Pooled, as judged cases are: the P99 of one trace moves by more than is allowed here.
        (5, 6, 7),
    ),
    Case("slow_disk", Rag(400, 1.5, 60, 1.0, 3000.0, warm=60), Scaled(20_000, 4, 12.0), 1.0, (6,)),
    Case("busy_engine", Rag(160, 1.5, 120, 1.1, 3000.0), Scaled(11_000, 200), 2.0, (7,)),
)


def replay(case: Case, policy: Policy, choose: Choose | None = None) -> Result:
    return simulate(case.traces(), case.machine(RECORDED), policy, slo_s=case.slo_s, choose=choose)


@pytest.fixture(scope="module")
def peers() -> list[Result]:
    return [
        replay(case, policy) for case in REDUCED for policy in Policy if policy is not Policy.OURS
    ]


def test_ours_is_the_best_or_close_to_it_on_a_reduced_set(peers: list[Result]) -> None:
    verdicts = judge([*peers, *(replay(case, Policy.OURS) for case in REDUCED)])
    assert len(verdicts) == 4 * len(REDUCED)
    assert [verdict for verdict in verdicts if not verdict.holds] == []


def test_the_bound_fails_when_the_decision_is_replaced_by_always_restoring(
    peers: list[Result],
) -> None:
    fake = [replay(case, Policy.OURS, choose_all) for case in REDUCED]
    lost = {verdict.trace for verdict in judge([*peers, *fake]) if not verdict.holds}
    assert {"saturated", "slow_disk"} <= lost


def test_the_same_seed_gives_the_same_figures_and_another_seed_others() -> None:
    case = REDUCED[0]
    assert replay(case, Policy.OURS) == replay(case, Policy.OURS)
    assert replay(case, Policy.OURS) != replay(replace(case, seeds=(99,)), Policy.OURS)


def test_all_policies_answer_every_request(peers: list[Result]) -> None:
    for case in REDUCED:
        count = sum(len(trace.requests) for trace, _ in case.traces())
        assert {result.requests for result in peers if result.trace == case.name} == {count}


def test_always_restoring_collapses_on_a_saturated_link(peers: list[Result]) -> None:
    found = {r.policy: r for r in peers if r.trace == "saturated"}
    collapsed, computed = found[Policy.RESTORE], found[Policy.RECOMPUTE]
    assert collapsed.ttft_p99_s > 5 * computed.ttft_p99_s


def test_judged_traces_were_not_tuned_on() -> None:
    seeds = [seed for case in (*JUDGED, *TUNING) for seed in case.seeds]
    assert len(set(seeds)) == len(seeds)
    for case in JUDGED:
        assert case.workload not in [tuned.workload for tuned in TUNING]
        assert case.scaled not in [tuned.scaled for tuned in TUNING]


@pytest.mark.parametrize("workload", [Chat(40), Rag(60), Agents(6), Saturated(4, 3)])
def test_traces_are_seeded_and_their_requests_are_in_order(
    workload: Chat | Rag | Agents | Saturated,
) -> None:
    trace: Trace = workload.trace("t", 3)
    assert trace == workload.trace("t", 3)
    assert trace != workload.trace("t", 4)
    assert [request.number for request in trace.requests] == list(range(len(trace.requests)))
    for request in trace.requests:
        assert all(span.tokens % 16 == 0 for span in request.spans)
        assert request.after is None or request.after < request.number


def test_documents_are_as_skewed_as_published() -> None:
    """3% of the documents draw 60% of the requests (RAGCache)."""
    drawn: dict[int, int] = {}
    for request in Rag(4000).trace("rag", 11).requests:
        for span in request.spans:
            if span.kind == "document":
                drawn[span.stream] = drawn.get(span.stream, 0) + 1
    top = sorted(drawn.values(), reverse=True)[: int(0.03 * 2000)]
    assert sum(top) / sum(drawn.values()) == pytest.approx(0.6, abs=0.08)


def test_the_command_writes_what_it_judged(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.simulate", "--costs", "recorded", "--processes", "1",
            "--tuning", "--traces", "saturated_2k_c32_a", "--out", str(tmp_path),
        ],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    written = json.loads((tmp_path / "simulate.json").read_text())
    assert {each["policy"] for each in written["results"]} == {str(policy) for policy in Policy}
    assert written["within"] == WITHIN
    holds = all(each["holds"] for each in written["verdicts"])
    assert done.returncode == (0 if holds else 1), done.stderr
