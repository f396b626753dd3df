"""The record's states: exactly the legal moves are possible."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from exporter.contract.errors import IllegalState
from exporter.contract.spec import EXPORT_ID
from service.jobs import LEGAL, MAX_FAULTS, MAX_LOST, TERMINAL, Export, State, new_id

NEEDS: dict[State, dict[str, Any]] = {
    State.QUEUED: {},
    State.STARTING: {"lease_owner": "me", "lease_until": 9.0},
    State.RUNNING: {"lease_owner": "me", "lease_until": 9.0},
    State.SUCCEEDED: {"finished_at": 2.0, "manifest_uri": "s3://b/m.json"},
    State.FAILED: {"finished_at": 2.0, "error": {"code": "internal"}},
    State.CANCELLED: {"finished_at": 2.0},
}


def export_in(state: State) -> Export:
    return Export(id=new_id(), owner="local", caller={}, request={}, created_at=1.0, state=state, **NEEDS[state])


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_only_legal_moves_are_possible(before: State, after: State) -> None:
    export = export_in(before)
    if after in LEGAL[before]:
        assert export.move(after, **NEEDS[after]).state is after
    else:
        with pytest.raises(IllegalState):
            export.move(after, **NEEDS[after])


def test_the_legal_moves_are_those_of_the_api() -> None:
    assert {(a.value, b.value) for a in State for b in LEGAL[a]} == {
        ("queued", "starting"),
        ("queued", "failed"),
        ("queued", "cancelled"),
        ("starting", "running"),
        ("starting", "queued"),
        ("starting", "failed"),
        ("starting", "cancelled"),
        ("running", "queued"),
        ("running", "succeeded"),
        ("running", "failed"),
        ("running", "cancelled"),
    }


@pytest.mark.parametrize("state", list(State))
def test_evolve_cannot_change_the_state(state: State) -> None:
    export = export_in(State.QUEUED)
    with pytest.raises(IllegalState):
        export.evolve(state=state)
    with pytest.raises(IllegalState):
        export.evolve(id="exp_other")


@pytest.mark.parametrize(
    ("state", "missing"), [(state, field) for state in State for field in NEEDS[state] if field != "lease_until"]
)
def test_a_state_has_what_belongs_to_it(state: State, missing: str) -> None:
    fields = {name: value for name, value in NEEDS[state].items() if name != missing}
    with pytest.raises(IllegalState):
        Export(id=new_id(), owner="o", caller={}, request={}, created_at=1.0, state=state, **fields)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_finished_export_gives_its_lease_and_stage_back(state: State) -> None:
    running = export_in(State.RUNNING).evolve(stage="compiling")
    ended = running.move(state, **NEEDS[state])
    assert (ended.lease_owner, ended.lease_until, ended.stage) == (None, None, None)


def test_lost_attempts_and_faults_are_counted_apart() -> None:
    export = export_in(State.RUNNING)
    assert export.may_retry(False, lost=True)
    assert export.evolve(faults=MAX_FAULTS).may_retry(True, lost=True)
    assert not export.evolve(lost=MAX_LOST).may_retry(True, lost=True)
    assert export.evolve(lost=MAX_LOST).may_retry(True, lost=False)
    assert not export.evolve(faults=MAX_FAULTS).may_retry(True, lost=False)
    assert not export.may_retry(False, lost=False)


def test_ids_have_the_form_of_the_contract() -> None:
    ids = [new_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(EXPORT_ID.fullmatch(item) for item in ids)
