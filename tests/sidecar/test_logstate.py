"""The log's memory: order, gaps, forks, and which grants are dead."""

from __future__ import annotations

import msgspec
import pytest

from sidecar.control.logstate import HISTORY_MAX, Dead, LogBroken, LogState
from strongroom.identity import new_component_id
from strongroom.log import InvalidationKind, LogEntry, LogHead, genesis
from tests.sidecar.control_plane import FakeControlPlane

KIND = InvalidationKind


def entry(head: LogHead, kind: KIND = KIND.COMPONENTS, **fields: object) -> LogEntry:
    return LogEntry(
        epoch=head.epoch, seq=head.seq + 1, prev=head.hash, at="t", kind=kind, **fields  # type: ignore[arg-type]
    )  # fmt: skip


def standing(epoch: str = "e") -> LogState:
    state = LogState()
    state.start(LogHead(epoch, 5, "5" * 64), floor_seq=5)
    return state


def head_of(state: LogState) -> LogHead:
    assert state.head is not None
    return state.head


def test_the_next_entry_is_applied_and_a_known_one_is_not_applied_twice() -> None:
    state = standing()
    first = entry(head_of(state))
    assert state.check_next(first)
    state.apply(first, 0)
    assert not state.check_next(first)
    assert head_of(state) == LogHead("e", 6, first.hash())


def test_a_gap_a_fork_and_another_epoch_break_the_log() -> None:
    state = standing()
    good = entry(head_of(state))
    assert state.check_next(good)
    for wrong in (
        msgspec.structs.replace(good, seq=7),
        msgspec.structs.replace(good, prev=genesis("e")),
        msgspec.structs.replace(good, epoch="f"),
    ):
        with pytest.raises(LogBroken):
            state.check_next(wrong)


def test_another_entry_in_the_place_of_an_applied_one_is_a_fork() -> None:
    state = standing()
    first = entry(head_of(state))
    state.apply(first, 0)
    with pytest.raises(LogBroken):
        state.check_next(msgspec.structs.replace(first, at="another"))


def test_a_claimed_head_must_lie_on_the_chain() -> None:
    state = standing()
    state.check_known(LogHead("e", 5, "5" * 64))
    for wrong in (LogHead("e", 5, "6" * 64), LogHead("e", 4, "4" * 64), LogHead("f", 5, "5" * 64)):
        with pytest.raises(LogBroken):
            state.check_known(wrong)


def test_the_history_of_hashes_is_bounded() -> None:
    state = standing()
    for _ in range(HISTORY_MAX + 10):
        state.apply(entry(head_of(state), KIND.EPOCH), 0)
    assert len(state._history) == HISTORY_MAX


def test_a_grant_dies_by_component_subject_revision_epoch_and_start() -> None:
    plane = FakeControlPlane()
    tenant, other = plane.tenant(), plane.tenant()
    state = standing(plane.epoch)
    good = plane.grant(tenant, range(64), seq=5, revision=3).claims
    assert state.dead(good) is None
    assert state.dead(msgspec.structs.replace(good, epoch="x")) is Dead.EPOCH
    assert state.dead(msgspec.structs.replace(good, seq=4)) is Dead.BEFORE_START

    def after(kind: KIND, **fields: object) -> Dead | None:
        fresh = standing(plane.epoch)
        fresh.apply(entry(head_of(fresh), kind, **fields), 0)
        return fresh.dead(good)

    assert after(KIND.COMPONENTS, components=(tenant.everyone,)) is Dead.COMPONENT
    assert after(KIND.COMPONENTS, components=(tenant.model,)) is Dead.COMPONENT
    assert after(KIND.COMPONENTS, components=(new_component_id(),)) is None
    assert after(KIND.SUBJECT, tenant=tenant.id, subject="alice") is Dead.SUBJECT
    assert after(KIND.SUBJECT, tenant=tenant.id, subject="bob") is None
    assert after(KIND.SUBJECT, tenant=other.id, subject="alice") is None
    assert after(KIND.TENANT_REVISION, tenant=tenant.id, min_revision=4) is Dead.REVISION
    assert after(KIND.TENANT_REVISION, tenant=tenant.id, min_revision=3) is None
    assert after(KIND.TENANT_REVISION, tenant=other.id, min_revision=4) is None
    assert after(KIND.EPOCH) is None


def test_a_grant_minted_after_its_subjects_entry_is_alive() -> None:
    plane = FakeControlPlane()
    tenant = plane.tenant()
    state = standing(plane.epoch)
    state.apply(entry(head_of(state), KIND.SUBJECT, tenant=tenant.id, subject="alice"), 0)
    assert state.dead(plane.grant(tenant, range(64), seq=5).claims) is Dead.SUBJECT
    assert state.dead(plane.grant(tenant, range(64), seq=6).claims) is None


def test_what_can_kill_no_living_grant_any_more_is_forgotten() -> None:
    plane = FakeControlPlane()
    tenant = plane.tenant()
    state = standing(plane.epoch)
    state.apply(entry(head_of(state), KIND.SUBJECT, tenant=tenant.id, subject="alice"), 0)
    old = plane.grant(tenant, range(64), seq=5).claims
    state.apply(entry(head_of(state), KIND.EPOCH), 300 * 10**9)
    assert state.dead(old) is Dead.SUBJECT
    state.apply(entry(head_of(state), KIND.EPOCH), 601 * 10**9)
    assert state.dead(old) is None
