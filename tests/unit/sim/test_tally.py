"""Sums of a journal, by hand."""

from __future__ import annotations

import pytest

from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    GpusLeft,
    Role,
    RoleChanged,
    WorkerAdded,
    WorkerRemoved,
    fold,
)
from pearl.records.ids import GpuId, NodeId, WorkerId
from pearl.records.journal import ChangeEntry, JournalEntry, StateEntry, TrajectoryEntry, TurnEntry
from pearl.sim.tally import Tally


class Passed:
    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []

    def write(self, entry: JournalEntry) -> None:
        self.entries.append(entry)

    async def flush(self) -> None:
        """It is there."""


def gpus(count: int, owner: GpuOwner) -> GpusJoined:
    letter = owner.value[0]
    return GpusJoined(
        gpus=tuple(Gpu(id=GpuId(f"{letter}{n}"), node=NodeId(f"{letter}-node"), owner=owner) for n in range(count))
    )


def state_entry(at_s: float) -> StateEntry:
    return StateEntry(at_s=at_s, event="X", inputs={}, state_version=1, state_hash="")


def turn(prompt: int, generated: int, computed: int) -> TurnEntry:
    return TurnEntry(
        at_s=1.0,
        trajectory="t",
        turn=0,
        prompt=prompt,
        generated=generated,
        computed=computed,
        end="stop",
        versions=[],
        workers=[0],
        generate_s=1.0,
        env_s=1.0,
    )


def test_what_is_counted_is_passed_on() -> None:
    sink = Passed()
    tally = Tally(sink=sink, state=FleetState)
    end = TrajectoryEntry(
        at_s=2.0,
        trajectory="t",
        group="g",
        status="done",
        turns=1,
        generated=5,
        reward=1.0,
        success=True,
        started_s=0.0,
    )
    change = ChangeEntry(
        at_s=3.0, number=0, seconds=1.0, done=False, groups=[["expand", True, ""], ["return", False, "why"]]
    )
    entries = [turn(100, 5, 100), turn(10, 7, 60), end, change]
    for entry in entries:
        tally.write(entry)
    assert sink.entries == entries
    assert (tally.turns, tally.prompt_tokens, tally.generated_tokens, tally.computed_tokens) == (2, 110, 12, 160)
    assert dict(tally.ends) == {"done": 1}
    assert dict(tally.changes) == {"expand": 1, "failed": 1}


def test_what_becomes_of_workers() -> None:
    """One dies, one leaves as planned, one goes with its GPUs, one dies just before they go; one is borrowed and returned."""
    state, ending = FleetState(), False
    tally = Tally(sink=Passed(), state=lambda: state, is_ending=lambda: ending)

    def happen(at_s: float, *events: object) -> None:
        nonlocal state
        for event in events:
            folded = fold(state, event)  # type: ignore[arg-type]
            assert isinstance(folded, FleetState), folded
            state = folded
            tally.write(state_entry(at_s))

    def activity(worker: int, *activities: Activity) -> list[ActivityChanged]:
        return [ActivityChanged(worker=WorkerId(worker), activity=each) for each in activities]

    happen(0.0, gpus(4, GpuOwner.RESERVED), gpus(1, GpuOwner.TRAINING))
    for slot, gpu in enumerate(("r0", "r1", "r2", "r3", "t0")):
        role = Role.COLOCATED if gpu == "t0" else Role.DECODE
        happen(1.0, WorkerAdded(worker=WorkerId(slot), gpus=(GpuId(gpu),), role=role), *activity(slot, Activity.ACTIVE))
    assert dict(+tally.workers) == {"started": 4, "borrowed": 1}
    happen(2.0, *activity(4, Activity.TRANSITIONING, Activity.INACTIVE))
    happen(2.0, *activity(1, Activity.TRANSITIONING), RoleChanged(worker=WorkerId(1), role=Role.PREFILL))
    assert (tally.workers["returned"], tally.workers["roles"]) == (1, 1)
    happen(3.0, WorkerRemoved(worker=WorkerId(0)))
    happen(3.0, WorkerRemoved(worker=WorkerId(1)))
    happen(4.0, WorkerRemoved(worker=WorkerId(3)), GpusLeft(gpus=(GpuId("r2"), GpuId("r3"))))
    counts = {"started": 4, "borrowed": 1, "returned": 1, "roles": 1, "lost": 1, "stopped": 1, "withdrawn": 2}
    assert dict(+tally.workers) == counts
    # What is ended with the run is no change.
    ending = True
    happen(5.0, *activity(4, Activity.TRANSITIONING), WorkerRemoved(worker=WorkerId(4)))
    assert dict(+tally.workers) == counts


def test_training_and_refused_events() -> None:
    state = FleetState()
    tally = Tally(sink=Passed(), state=lambda: state)
    for event in (
        gpus(2, GpuOwner.TRAINING),
        WorkerAdded(worker=WorkerId(0), gpus=(GpuId("t0"), GpuId("t1")), role=Role.TRAINING),
        ActivityChanged(worker=WorkerId(0), activity=Activity.ACTIVE),
    ):
        folded = fold(state, event)  # type: ignore[arg-type]
        assert isinstance(folded, FleetState)
        state = folded
    tally.write(state_entry(1.0))
    tally.write(StateEntry(at_s=2.0, event="X", inputs={}, state_version=1, state_hash="", refused="why"))
    assert [(moment.at_s, moment.serving) for moment in tally.timeline] == [(1.0, {"updating": 2})]
    assert dict(+tally.workers) == {}


def test_gpu_hours() -> None:
    """4 reserved from the first hour on; a worker of 2 starts, serves for half an hour at the end; training lends 2."""
    state = FleetState()
    tally = Tally(sink=Passed(), state=lambda: state)

    def happen(at_s: float, *events: object) -> None:
        nonlocal state
        for event in events:
            folded = fold(state, event)  # type: ignore[arg-type]
            assert isinstance(folded, FleetState), folded
            state = folded
            tally.write(state_entry(at_s))

    worker = WorkerId(0)
    happen(0.0, gpus(4, GpuOwner.RESERVED), gpus(2, GpuOwner.TRAINING))
    happen(3600.0, WorkerAdded(worker=worker, gpus=(GpuId("r0"), GpuId("r1")), role=Role.PREFILL))
    happen(5400.0, ActivityChanged(worker=worker, activity=Activity.ACTIVE))
    lent = WorkerId(1)
    happen(5400.0, WorkerAdded(worker=lent, gpus=(GpuId("t0"),), role=Role.COLOCATED))
    happen(6300.0, ActivityChanged(worker=lent, activity=Activity.ACTIVE))
    hours = tally.gpu_hours(7200.0)
    assert hours == pytest.approx(
        {
            "reserved": 8.0,
            "training": 4.0,
            "transition": 2 * 0.5 + 0.25,
            "serving": 2 * 0.5 + 0.25,
            "borrowed": 0.25,
            "lent": 0.25,
        }
    )
    assert [moment.at_s for moment in tally.timeline] == [0.0, 3600.0, 5400.0, 6300.0]
    assert tally.timeline[-1].serving == {"prefill": 2, "colocated": 1, "borrowed": 1}
