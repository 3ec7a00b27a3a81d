"""The hash of one state after the other is that of each by itself."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    GpusLeft,
    LeaseBegan,
    NoticeGiven,
    Role,
    RoleChanged,
    StateEvent,
    StateRefusal,
    WorkerAdded,
    WorkerRemoved,
    fold,
)
from pearl.core.state_hash import StateHash
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId

NAMES = ("a", "b", "c")


def gpu(name: str) -> Gpu:
    return Gpu(id=GpuId(name), node=NodeId("n"), owner=GpuOwner.EXTERNAL)


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def follow(state: FleetState, event: StateEvent) -> FleetState:
    result = fold(state, event)
    return state if isinstance(result, StateRefusal) else result


def test_it_is_over_the_content_in_slot_order() -> None:
    events: list[StateEvent] = [
        GpusJoined(gpus=(gpu("b"),)),
        LeaseBegan(lease=LeaseId("l"), gpus=(gpu("a"),), at_s=1, end_s=None),
        WorkerAdded(worker=WorkerId(10), gpus=(GpuId("b"),), role=Role.DECODE),
        WorkerAdded(worker=WorkerId(9), gpus=(GpuId("a"),), role=Role.PREFILL),
        NoticeGiven(gpus=(GpuId("a"),), at_s=2, deadline_s=5),
    ]
    state = FleetState()
    for event in events:
        state = follow(state, event)
    want = (
        "a|n|external\nb|n|external\n9|a\n10|b\n9|prefill|transitioning\n10|decode|transitioning\n"
        "lease l|a|1.0|open\nnotice a|5.0\n"
    )
    assert state.hash == StateHash().of(state) == digest(want)


EVENTS: st.SearchStrategy[StateEvent] = st.one_of(
    st.builds(lambda name: GpusJoined(gpus=(gpu(name),)), st.sampled_from(NAMES)),
    st.builds(lambda name: GpusLeft(gpus=(GpuId(name),)), st.sampled_from(NAMES)),
    st.builds(
        lambda slot, role: WorkerAdded(worker=WorkerId(slot), gpus=(GpuId(NAMES[slot]),), role=role),
        st.integers(0, 2),
        st.sampled_from([Role.DECODE, Role.COLOCATED]),
    ),
    st.builds(lambda slot: WorkerRemoved(worker=WorkerId(slot)), st.integers(0, 2)),
    st.builds(
        lambda slot, to: ActivityChanged(worker=WorkerId(slot), activity=to),
        st.integers(0, 2),
        st.sampled_from(Activity),
    ),
    st.builds(lambda slot: RoleChanged(worker=WorkerId(slot), role=Role.PREFILL), st.integers(0, 2)),
)


@given(st.lists(EVENTS, max_size=30))
def test_what_is_remembered_changes_nothing(events: list[StateEvent]) -> None:
    remembering, state, states = StateHash(), FleetState(), [FleetState()]
    for event in events:
        state = follow(state, event)
        states.append(state)
        assert remembering.of(state) == StateHash().of(state)
    for state in reversed(states):
        assert remembering.of(state) == StateHash().of(state)
