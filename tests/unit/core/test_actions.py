import pytest

from pearl.core.actions import (
    Action,
    ActionGroup,
    Admit,
    Drain,
    GiveBack,
    GroupKind,
    LoadWeights,
    SetRole,
    Sleep,
    Start,
    Step,
    Stop,
    Wake,
    events_of,
    perform,
    undo_of,
)
from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    GpuOwner,
    GpusLeft,
    RefusalReason,
    Role,
    RoleChanged,
    StateEvent,
    StateRefusal,
    WorkerAdded,
    WorkerRemoved,
)
from pearl.records.ids import WorkerId
from tests.unit.core._fleets import fleet, ids

W0, W1, W2, W3 = (WorkerId(i) for i in range(4))
FLEET = fleet("a4 x2x", "0 P a0", "1 D- a1", "2 C x0 x1")
"""Serving, asleep, serving on external GPUs."""


def turned(worker: WorkerId, activity: Activity) -> ActivityChanged:
    return ActivityChanged(worker=worker, activity=activity)


@pytest.mark.parametrize(
    ("action", "events"),
    [
        (Drain(worker=W1), (turned(W1, Activity.TRANSITIONING),)),
        (Stop(worker=W1), (WorkerRemoved(worker=W1),)),
        (Sleep(worker=W1), (turned(W1, Activity.INACTIVE),)),
        (GiveBack(gpus=ids("x0 x1"), to=GpuOwner.EXTERNAL), (GpusLeft(gpus=ids("x0 x1")),)),
        (GiveBack(gpus=ids("x0"), to=GpuOwner.TRAINING), ()),
        (SetRole(worker=W1, role=Role.DECODE), (RoleChanged(worker=W1, role=Role.DECODE),)),
        (
            Start(worker=W3, gpus=ids("a2 a3"), role=Role.DECODE),
            (WorkerAdded(worker=W3, gpus=ids("a2 a3"), role=Role.DECODE),),
        ),
        (
            Wake(worker=W1, role=Role.COLOCATED),
            (turned(W1, Activity.TRANSITIONING), RoleChanged(worker=W1, role=Role.COLOCATED)),
        ),
        (LoadWeights(worker=W1), ()),
        (Admit(workers=(W1, W3)), (turned(W1, Activity.ACTIVE), turned(W3, Activity.ACTIVE))),
        (Admit(workers=()), ()),
    ],
)
def test_what_an_action_does_to_the_state(action: Action, events: tuple[StateEvent, ...]) -> None:
    assert events_of(action) == events


@pytest.mark.parametrize(
    ("action", "undo"),
    [
        (Drain(worker=W0), (Admit(workers=(W0,)),)),
        (Stop(worker=W0), None),
        (Sleep(worker=W0), (Wake(worker=W0, role=Role.PREFILL), LoadWeights(worker=W0))),
        (GiveBack(gpus=ids("x0"), to=GpuOwner.EXTERNAL), None),
        (SetRole(worker=W0, role=Role.DECODE), (SetRole(worker=W0, role=Role.PREFILL),)),
        (Start(worker=W3, gpus=ids("a2"), role=Role.DECODE), (Stop(worker=W3),)),
        (Wake(worker=W1, role=Role.COLOCATED), (SetRole(worker=W1, role=Role.DECODE), Sleep(worker=W1))),
        (LoadWeights(worker=W1), ()),
        (Admit(workers=(W1, W3)), (Drain(worker=W3), Drain(worker=W1))),
    ],
)
def test_how_an_action_is_undone(action: Action, undo: tuple[Action, ...] | None) -> None:
    assert undo_of(FLEET, action) == undo


DONE_AND_UNDONE: list[tuple[Action, ...]] = [
    (Drain(worker=W0), Sleep(worker=W0)),
    (Drain(worker=W0), SetRole(worker=W0, role=Role.DECODE), Admit(workers=(W0,))),
    (Wake(worker=W1, role=Role.PREFILL), LoadWeights(worker=W1), Admit(workers=(W1,))),
    (
        Wake(worker=W1, role=Role.PREFILL),
        Start(worker=W3, gpus=ids("a2 a3"), role=Role.DECODE),
        LoadWeights(worker=W1),
        LoadWeights(worker=W3),
        Admit(workers=(W1, W3)),
    ),
]


@pytest.mark.parametrize("actions", DONE_AND_UNDONE)
def test_a_group_is_undone_from_wherever_it_got(actions: tuple[Action, ...]) -> None:
    group = grouped(*actions)
    for done in range(len(actions) + 1):
        undo = group.undo(done)
        assert undo is not None
        after = perform(FLEET, (*actions[:done], *undo))
        assert isinstance(after, FleetState), after
        assert dict(after.workers) == dict(FLEET.workers)


def grouped(*actions: Action) -> ActionGroup:
    steps = tuple(
        Step(index=i, action=action, after=(), undo=undo_of(FLEET, action)) for i, action in enumerate(actions)
    )
    return ActionGroup(kind=GroupKind.EXPAND, steps=steps, gap=False)


def test_undoing_goes_backwards() -> None:
    group = grouped(Drain(worker=W0), SetRole(worker=W0, role=Role.DECODE), Admit(workers=(W0,)))
    assert group.undo(0) == ()
    assert group.undo(1) == (Admit(workers=(W0,)),)
    assert group.undo(2) == (SetRole(worker=W0, role=Role.PREFILL), Admit(workers=(W0,)))
    assert group.undo(3) == (Drain(worker=W0), SetRole(worker=W0, role=Role.PREFILL), Admit(workers=(W0,)))


def test_there_is_no_way_back_once_a_process_has_ended() -> None:
    group = grouped(Drain(worker=W2), Stop(worker=W2), GiveBack(gpus=ids("x0 x1"), to=GpuOwner.EXTERNAL))
    assert group.undo(1) == (Admit(workers=(W2,)),)
    assert group.undo(2) is None
    assert group.undo(3) is None


def test_actions_fold_one_after_the_other() -> None:
    after = perform(FLEET, [Drain(worker=W2), Stop(worker=W2), GiveBack(gpus=ids("x0 x1"), to=GpuOwner.EXTERNAL)])
    assert isinstance(after, FleetState)
    assert sorted(after.workers) == [W0, W1]
    assert sorted(after.gpus) == list(ids("a0 a1 a2 a3"))
    assert after.version == 3
    assert perform(FLEET, []) is FLEET


def test_the_first_refusal_ends_it() -> None:
    # A sleeping worker cannot serve at once; what comes behind it is not even looked at.
    refusal = perform(FLEET, [Drain(worker=W0), Admit(workers=(W1,)), Stop(worker=WorkerId(9))])
    assert isinstance(refusal, StateRefusal)
    assert refusal.reason is RefusalReason.BAD_TRANSITION
    assert refusal.detail == "worker 1: inactive -> active is not a transition"
