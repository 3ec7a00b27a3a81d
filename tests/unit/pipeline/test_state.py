from __future__ import annotations

import pytest

from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    Role,
    StateEvent,
    StateRefusal,
    WorkerAdded,
    WorkerRemoved,
    fold,
)
from pearl.pipeline.state import StateHolder
from pearl.records.ids import GpuId, NodeId, WorkerId
from pearl.records.journal import StateEntry
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual

GPU = Gpu(id=GpuId("gpu0"), node=NodeId("node0"), owner=GpuOwner.EXTERNAL)
JOINED = GpusJoined(gpus=(GPU,))
ADDED = WorkerAdded(worker=WorkerId(0), gpus=(GPU.id,), role=Role.COLOCATED)
ACTIVE = ActivityChanged(worker=WorkerId(0), activity=Activity.ACTIVE)


def submitted(*events: StateEvent) -> tuple[StateHolder, list[StateRefusal | None], list[StateEntry]]:
    journal = ListSink()
    holder = StateHolder(journal, start_s=-5.0)

    async def work() -> list[StateRefusal | None]:
        return [holder.submit(event) for event in events]

    return holder, run_virtual(work()), journal.of(StateEntry)


def test_events_are_folded_one_after_the_other_and_each_is_journalled_with_the_state_after_it() -> None:
    holder, refusals, entries = submitted(JOINED, ADDED, ACTIVE)
    assert refusals == [None, None, None]
    state = FleetState()
    for event, entry in zip((JOINED, ADDED, ACTIVE), entries, strict=True):
        folded = fold(state, event)
        assert isinstance(folded, FleetState)
        state = folded
        assert (entry.event, entry.state_version, entry.state_hash) == (
            type(event).__name__,
            state.version,
            state.hash,
        )
        assert entry.at_s == 5.0
    assert holder.snapshot == state


def test_inputs_are_plain_values() -> None:
    _, _, entries = submitted(JOINED, ADDED, ACTIVE)
    assert [entry.inputs for entry in entries] == [
        {"gpus": [{"id": "gpu0", "node": "node0", "owner": "external"}]},
        {"worker": 0, "gpus": ["gpu0"], "role": "colocated"},
        {"worker": 0, "activity": "active"},
    ]


def test_a_refused_event_leaves_the_state_and_is_journalled_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    holder, refusals, entries = submitted(JOINED, WorkerRemoved(worker=WorkerId(3)))
    assert refusals[1] is not None
    assert [entry.refused for entry in entries] == [None, "unknown_worker"]
    assert entries[1].state_version == entries[0].state_version == holder.snapshot.version
    assert entries[1].state_hash == entries[0].state_hash
    assert "WorkerRemoved refused" in caplog.text
