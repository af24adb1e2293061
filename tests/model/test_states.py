from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.model.states import (
    DIRTY,
    TRANSITIONS,
    TROUBLED,
    Event,
    GenState,
    InvalidTransition,
    advance,
)


def test_the_way_of_every_file() -> None:
    state = GenState.OPEN
    for event in (Event.SEAL, Event.START, Event.COMMIT):
        state = advance(state, event)
    assert state is GenState.DURABLE


@given(st.lists(st.sampled_from(Event)))
def test_durable_only_by_commit(events: list[Event]) -> None:
    """Whatever happens, a generation is durable only when the store confirmed it."""
    state = GenState.OPEN
    for event in events:
        before = state
        try:
            state = advance(state, event)
        except InvalidTransition as problem:
            assert str(problem) == f"a generation that is {before} cannot {event}"
            continue
        if state is GenState.DURABLE and before is not GenState.DURABLE:
            assert (before, event) == (GenState.UPLOADING, Event.COMMIT)
        assert before is not GenState.SUPERSEDED or event is Event.RESOLVE


def test_the_table_is_complete() -> None:
    assert set(TRANSITIONS) == set(GenState)
    reached = {after for row in TRANSITIONS.values() for after in row.values()}
    assert reached == set(GenState) - {GenState.OPEN}
    used = {event for row in TRANSITIONS.values() for event in row}
    assert used == set(Event)


def test_nothing_that_may_be_the_only_copy_is_evictable() -> None:
    assert set(GenState) - DIRTY == {GenState.DURABLE, GenState.SUPERSEDED}
    assert TROUBLED < DIRTY


@pytest.mark.parametrize("state", sorted(DIRTY))
def test_everything_dirty_can_become_moot(state: GenState) -> None:
    assert advance(state, Event.SUPERSEDE) is GenState.SUPERSEDED


@pytest.mark.parametrize("state", sorted(TROUBLED))
def test_trouble_has_a_way_out(state: GenState) -> None:
    event = Event.RELEASE if state is GenState.HELD else Event.RESOLVE
    assert advance(state, event) is GenState.SEALED
