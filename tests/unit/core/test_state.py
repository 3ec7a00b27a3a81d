import pytest

from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    GpusLeft,
    RefusalReason,
    Role,
    RoleChanged,
    StateEvent,
    StateRefusal,
    WorkerAdded,
    WorkerRemoved,
    fold,
)
from pearl.records.ids import GpuId, NodeId, WorkerId

A, B, C, D, E, X = (GpuId(name) for name in ("a", "b", "c", "d", "e", "x"))
W0, W1, W2 = WorkerId(0), WorkerId(1), WorkerId(2)


def gpu(name: str, node: str = "n1", owner: GpuOwner = GpuOwner.RESERVED) -> Gpu:
    return Gpu(id=GpuId(name), node=NodeId(node), owner=owner)


def added(worker: WorkerId, *gpus: GpuId, role: Role = Role.COLOCATED) -> WorkerAdded:
    return WorkerAdded(worker=worker, gpus=gpus, role=role)


def turned(worker: WorkerId, activity: Activity) -> ActivityChanged:
    return ActivityChanged(worker=worker, activity=activity)


def folded(state: FleetState, *events: StateEvent) -> FleetState:
    for event in events:
        result = fold(state, event)
        assert isinstance(result, FleetState), result
        state = result
    return state


def refused(state: FleetState, event: StateEvent) -> RefusalReason:
    before = state.hash
    result = fold(state, event)
    assert isinstance(result, StateRefusal), result
    assert result.detail
    assert state.hash == before
    return result.reason


@pytest.fixture
def three() -> FleetState:
    """GPUs a and b on one node, c on another; nobody on them."""
    return folded(FleetState(), GpusJoined(gpus=(gpu("a"), gpu("b"), gpu("c", "n2"))))


@pytest.fixture
def overlap() -> FleetState:
    """Training GPUs a and b on one node; nobody on them."""
    gpus = tuple(gpu(name, owner=GpuOwner.TRAINING) for name in ("a", "b"))
    return folded(FleetState(), GpusJoined(gpus=gpus))


def test_a_fleet_begins_empty() -> None:
    state = FleetState()
    assert (state.version, dict(state.gpus), dict(state.workers), dict(state.slots)) == (0, {}, {}, {})
    assert state.active() == ()


def test_a_worker_lives_from_start_to_end(three: FleetState) -> None:
    state = folded(three, added(W0, A, B, role=Role.PREFILL))
    assert state.workers[W0].activity is Activity.TRANSITIONING
    assert state.active() == ()
    state = folded(state, turned(W0, Activity.ACTIVE))
    assert [worker.id for worker in state.active()] == [W0]
    state = folded(state, turned(W0, Activity.TRANSITIONING), RoleChanged(worker=W0, role=Role.DECODE))
    state = folded(state, turned(W0, Activity.INACTIVE))
    assert state.workers[W0].role is Role.DECODE
    state = folded(state, WorkerRemoved(worker=W0))
    assert dict(state.workers) == {}
    assert state.slots[W0] == (A, B)
    assert state.version == 7


def test_workers_that_serve_are_listed_in_slot_order(three: FleetState) -> None:
    state = folded(three, added(W2, A), added(W0, B), added(W1, C))
    for worker in (W2, W0):
        state = folded(state, turned(worker, Activity.ACTIVE))
    assert [worker.id for worker in state.active()] == [W0, W2]


def test_a_slot_keeps_its_gpus_for_life(three: FleetState) -> None:
    state = folded(three, added(W0, A, B), WorkerRemoved(worker=W0))
    assert refused(state, added(W0, B, A)) is RefusalReason.SLOT_REBOUND
    assert refused(state, added(W0, A)) is RefusalReason.SLOT_REBOUND
    assert folded(state, added(W0, A, B)).workers[W0].gpus == (A, B)


def test_a_slot_holds_one_worker(three: FleetState) -> None:
    assert refused(folded(three, added(W0, A)), added(W0, A)) is RefusalReason.DUPLICATE_WORKER


def test_a_gpu_serves_one_worker(overlap: FleetState) -> None:
    state = folded(overlap, added(W0, A, role=Role.TRAINING), turned(W0, Activity.ACTIVE), added(W1, A, B))
    assert refused(state, turned(W1, Activity.ACTIVE)) is RefusalReason.GPU_BUSY
    # Borrowing: the trainer rests, rollout serves, and the other way round.
    state = folded(
        state,
        turned(W0, Activity.TRANSITIONING),
        turned(W0, Activity.INACTIVE),
        turned(W1, Activity.ACTIVE),
        turned(W0, Activity.TRANSITIONING),
    )
    assert refused(state, turned(W0, Activity.ACTIVE)) is RefusalReason.GPU_BUSY


@pytest.mark.parametrize("owner", [GpuOwner.RESERVED, GpuOwner.EXTERNAL])
def test_training_is_for_the_trainers_gpus(overlap: FleetState, owner: GpuOwner) -> None:
    state = folded(overlap, GpusJoined(gpus=(gpu("d", "n1", owner),)))
    assert refused(state, added(W0, D, role=Role.TRAINING)) is RefusalReason.NOT_TRAINING
    assert refused(state, added(W0, A, D, role=Role.TRAINING)) is RefusalReason.NOT_TRAINING
    state = folded(state, added(W0, D))
    assert refused(state, RoleChanged(worker=W0, role=Role.TRAINING)) is RefusalReason.NOT_TRAINING
    assert folded(state, added(W1, A, B, role=Role.TRAINING)).workers[W1].role is Role.TRAINING


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.COLOCATED])
def test_rollout_sits_in_one_zone(overlap: FleetState, role: Role) -> None:
    state = folded(overlap, GpusJoined(gpus=(gpu("d", "n1"), gpu("e", "n1", GpuOwner.EXTERNAL))))
    assert refused(state, added(W0, A, D, role=role)) is RefusalReason.MIXED_OWNERS
    assert refused(state, added(W0, E, A, role=role)) is RefusalReason.MIXED_OWNERS
    # Reserved and external GPUs are both dedicated.
    state = folded(state, added(W0, D, E, role=role), added(W1, A, B, role=role))
    assert (state.is_overlap(W0), state.is_overlap(W1)) == (False, True)


def test_overlap_workers_are_rollout_on_training_gpus(overlap: FleetState) -> None:
    state = folded(overlap, added(W0, A, role=Role.TRAINING), added(W1, A))
    assert [state.is_overlap(worker) for worker in (W0, W1, W2)] == [False, True, False]


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ((), RefusalReason.NO_GPU),
        ((X,), RefusalReason.UNKNOWN_GPU),
        ((A, X), RefusalReason.UNKNOWN_GPU),
        ((A, C), RefusalReason.SPLIT_NODE),
        ((A, A), RefusalReason.DUPLICATE_GPU),
        ((A, B, C), RefusalReason.TP_TOO_LARGE),
    ],
)
def test_a_worker_sits_on_gpus_of_one_node(three: FleetState, gpus: tuple[GpuId, ...], reason: RefusalReason) -> None:
    assert refused(three, added(W0, *gpus)) is reason


def test_a_gpu_joins_once(three: FleetState) -> None:
    assert refused(three, GpusJoined(gpus=(gpu("d"), gpu("a")))) is RefusalReason.DUPLICATE_GPU
    assert refused(three, GpusJoined(gpus=(gpu("d"), gpu("d")))) is RefusalReason.DUPLICATE_GPU


def test_an_event_names_gpus(three: FleetState) -> None:
    assert refused(three, GpusJoined(gpus=())) is RefusalReason.NO_GPU
    assert refused(three, GpusLeft(gpus=())) is RefusalReason.NO_GPU


def test_the_largest_of_a_workers_nodes_bounds_its_tp(three: FleetState) -> None:
    # n1 has 2 GPUs, n2 has 1: two GPUs would fit on n1, three fit nowhere; a larger node elsewhere is none of its own.
    state = folded(three, GpusJoined(gpus=tuple(gpu(name, "n3") for name in ("d", "e", "f"))))
    assert refused(state, added(W0, A, C)) is RefusalReason.SPLIT_NODE
    assert refused(state, added(W0, C, A, B)) is RefusalReason.TP_TOO_LARGE
    assert refused(state, added(W0, A, B, D)) is RefusalReason.SPLIT_NODE
    result = fold(state, added(W0, C, A, B))
    assert isinstance(result, StateRefusal)
    assert "got tp 3, want <= 2" in result.detail


def test_gpus_take_their_workers_along(three: FleetState) -> None:
    state = folded(three, added(W0, A, B), added(W1, C), added(W2, B))
    state = folded(state, GpusLeft(gpus=(B,)))
    assert set(state.gpus) == {A, C}
    assert set(state.workers) == {W1}
    assert refused(state, GpusLeft(gpus=(A, B))) is RefusalReason.UNKNOWN_GPU
    assert refused(state, added(W0, A, B)) is RefusalReason.UNKNOWN_GPU


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ((), {Activity.ACTIVE, Activity.INACTIVE}),
        ((Activity.ACTIVE,), {Activity.TRANSITIONING}),
        ((Activity.INACTIVE,), {Activity.TRANSITIONING}),
    ],
)
def test_serving_begins_and_ends_by_way_of_a_transition(
    three: FleetState, path: tuple[Activity, ...], allowed: set[Activity]
) -> None:
    state = folded(three, added(W0, A), *(turned(W0, activity) for activity in path))
    for activity in Activity:
        if activity in allowed:
            assert folded(state, turned(W0, activity)).workers[W0].activity is activity
        else:
            assert refused(state, turned(W0, activity)) is RefusalReason.BAD_TRANSITION


def test_a_worker_that_serves_keeps_its_role(three: FleetState) -> None:
    state = folded(three, added(W0, A), turned(W0, Activity.ACTIVE))
    assert refused(state, RoleChanged(worker=W0, role=Role.DECODE)) is RefusalReason.BAD_TRANSITION


@pytest.mark.parametrize(
    "event", [WorkerRemoved(worker=W1), turned(W1, Activity.ACTIVE), RoleChanged(worker=W1, role=Role.DECODE)]
)
def test_a_worker_must_be_known(three: FleetState, event: StateEvent) -> None:
    assert refused(three, event) is RefusalReason.UNKNOWN_WORKER


def test_a_state_cannot_be_changed_from_outside(three: FleetState) -> None:
    state = folded(three, added(W0, A))
    for mapping in (state.gpus, state.workers, state.slots, state.leases, state.notices):
        with pytest.raises(TypeError):
            mapping[A] = None  # type: ignore[index]


def test_the_hash_is_of_the_content() -> None:
    one = folded(FleetState(), GpusJoined(gpus=(gpu("a"),)), GpusJoined(gpus=(gpu("b"),)), added(W0, A), added(W1, B))
    other = folded(FleetState(), GpusJoined(gpus=(gpu("b"), gpu("a"))), added(W1, B), added(W0, A))
    assert one.version != other.version
    assert one.hash == other.hash
    assert len(one.hash) == 16


def test_every_part_of_the_content_is_hashed(three: FleetState) -> None:
    state = folded(three, added(W0, A))
    variants = [
        three,
        state,
        folded(state, turned(W0, Activity.INACTIVE)),
        folded(state, RoleChanged(worker=W0, role=Role.DECODE)),
        folded(state, WorkerRemoved(worker=W0)),
        folded(three, added(W1, A)),
        folded(three, added(W0, B)),
        folded(FleetState(), GpusJoined(gpus=(gpu("a"), gpu("b"), gpu("c", "n3")))),
        folded(FleetState(), GpusJoined(gpus=(gpu("a"), gpu("b"), gpu("c", "n2", GpuOwner.EXTERNAL)))),
    ]
    assert len({variant.hash for variant in variants}) == len(variants)


def test_the_hash_is_pinned(three: FleetState) -> None:
    # Journals of earlier runs hold it; see the text below, hashed by hand.
    text = "a|n1|reserved\nb|n1|reserved\nc|n2|reserved\n0|a,b\n0|decode|transitioning\n"
    from hashlib import blake2b

    state = folded(three, added(W0, A, B, role=Role.DECODE))
    assert state.hash == blake2b(text.encode(), digest_size=8).hexdigest()


def test_reasons_are_names_in_journals() -> None:
    assert {reason.name.lower() for reason in RefusalReason} == {reason.value for reason in RefusalReason}


def test_refusals_say_what_where_and_what_was_got(three: FleetState) -> None:
    state = folded(three, GpusJoined(gpus=(gpu("d", "n1", GpuOwner.TRAINING),)), added(W0, A), added(W1, A))
    state = folded(state, turned(W0, Activity.ACTIVE))
    gone = folded(state, WorkerRemoved(worker=W1))
    cases = [
        (state, GpusJoined(gpus=()), "got no GPUs that join, want at least 1"),
        (state, GpusLeft(gpus=()), "got no GPUs that leave, want at least 1"),
        (state, GpusJoined(gpus=(gpu("a"),)), "GPU a is already here"),
        (state, GpusLeft(gpus=(X,)), "GPU x is not part of the job"),
        (state, added(W0, A), "slot 0 already has a worker"),
        (gone, added(W1, B), "slot 1: got GPUs ['b'], want ['a'] for life"),
        (state, added(W2, A, A), "slot 2: got GPUs ['a', 'a'], want each of them once"),
        (state, WorkerRemoved(worker=W2), "slot 2 has no worker"),
        (state, turned(W0, Activity.INACTIVE), "worker 0: active -> inactive is not a transition"),
        (state, RoleChanged(worker=W0, role=Role.DECODE), "worker 0 serves; drain it before its role changes"),
        (state, added(W2), "worker 2 has no GPU"),
        (state, turned(W1, Activity.ACTIVE), "GPU a would serve workers 0 and 1"),
        (state, added(W2, A, C), "worker 2: its GPUs sit on several nodes"),
        (state, added(W2, A, role=Role.TRAINING), "worker 2 would train on GPUs that are not the trainer's"),
        (state, added(W2, A, D), "worker 2: some of its GPUs are the trainer's, want all or none"),
    ]
    for before, event, detail in cases:
        result = fold(before, event)
        assert isinstance(result, StateRefusal)
        assert result.detail == detail
