import math
from hashlib import blake2b

import pytest

from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    GpusLeft,
    Lease,
    LeaseBegan,
    LeaseEnded,
    NoticeGiven,
    RefusalReason,
    Role,
    StateEvent,
    StateRefusal,
    WorkerAdded,
    fold,
)
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId

A, B, C, R, T, X = (GpuId(name) for name in "abcrtx")
ONE, TWO = LeaseId("one"), LeaseId("two")
W0, W1, W2 = WorkerId(0), WorkerId(1), WorkerId(2)


def gpu(gpu_id: GpuId, owner: GpuOwner = GpuOwner.EXTERNAL) -> Gpu:
    return Gpu(id=gpu_id, node=NodeId("n"), owner=owner)


def began(lease: LeaseId, *gpus: GpuId, at_s: float = 10.0, end_s: float | None = None) -> LeaseBegan:
    return LeaseBegan(lease=lease, gpus=tuple(map(gpu, gpus)), at_s=at_s, end_s=end_s)


def notice(deadline_s: float, *gpus: GpuId, at_s: float = 20.0) -> NoticeGiven:
    return NoticeGiven(gpus=gpus, deadline_s=deadline_s, at_s=at_s)


def folded(state: FleetState, *events: StateEvent) -> FleetState:
    for event in events:
        result = fold(state, event)
        assert isinstance(result, FleetState), result
        state = result
    return state


def refusal(state: FleetState, event: StateEvent) -> StateRefusal:
    before = (state, state.hash)
    result = fold(state, event)
    assert isinstance(result, StateRefusal), result
    assert result.detail
    assert (state, state.hash) == before
    return result


def refused(state: FleetState, event: StateEvent) -> RefusalReason:
    return refusal(state, event).reason


@pytest.fixture
def fleet() -> FleetState:
    """A reserved GPU r and a training GPU t, which stay, and a, b, c under lease one since 10 s."""
    stay = GpusJoined(gpus=(gpu(R, GpuOwner.RESERVED), gpu(T, GpuOwner.TRAINING)))
    return folded(FleetState(), stay, began(ONE, A, B, C, end_s=100.0))


def test_gpus_join_under_a_lease(fleet: FleetState) -> None:
    assert set(fleet.gpus) == {R, T, A, B, C}
    assert fleet.gpus[A] == gpu(A)
    assert dict(fleet.leases) == {ONE: Lease(id=ONE, gpus=(A, B, C), since_s=10.0, end_s=100.0, notice_deadline_s=None)}
    assert (fleet.version, dict(fleet.notices)) == (2, {})


def test_a_lease_may_be_open(fleet: FleetState) -> None:
    state = folded(fleet, began(TWO, X, at_s=0.0))
    assert state.leases[TWO] == Lease(id=TWO, gpus=(X,), since_s=0.0)
    assert list(state.leases) == [ONE, TWO]
    assert (state.leaves_s(X), state.leaves_s(A), state.leaves_s(R)) == (None, 100.0, None)


def test_a_gpu_is_under_one_lease(fleet: FleetState) -> None:
    state = folded(fleet, began(TWO, X))
    assert (state.lease_of(X), state.lease_of(C)) == (state.leases[TWO], state.leases[ONE])
    assert (state.lease_of(R), state.lease_of(GpuId("none"))) == (None, None)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (began(TWO), RefusalReason.NO_GPU),
        (began(ONE, X), RefusalReason.DUPLICATE_LEASE),
        (began(TWO, X, A), RefusalReason.DUPLICATE_GPU),
        (began(TWO, X, X), RefusalReason.DUPLICATE_GPU),
        (began(TWO, X, end_s=10.0), RefusalReason.LEASE_OVER),
        (began(TWO, X, end_s=9.0), RefusalReason.LEASE_OVER),
        (began(TWO, X, at_s=math.nan), RefusalReason.BAD_TIME),
        (began(TWO, X, at_s=math.inf), RefusalReason.BAD_TIME),
        (began(TWO, X, at_s=-0.5), RefusalReason.BAD_TIME),
        (began(TWO, X, end_s=math.nan), RefusalReason.BAD_TIME),
        (began(TWO, X, end_s=math.inf), RefusalReason.BAD_TIME),
        (began(TWO, X, end_s=-1.0), RefusalReason.BAD_TIME),
        (
            LeaseBegan(lease=TWO, gpus=(gpu(X), gpu(GpuId("y"), GpuOwner.RESERVED)), at_s=10.0),
            RefusalReason.NOT_EXTERNAL,
        ),
        (LeaseBegan(lease=TWO, gpus=(gpu(X, GpuOwner.TRAINING),), at_s=10.0), RefusalReason.NOT_EXTERNAL),
        (LeaseEnded(lease=TWO), RefusalReason.UNKNOWN_LEASE),
    ],
)
def test_a_lease_that_cannot_be_is_refused(fleet: FleetState, event: StateEvent, reason: RefusalReason) -> None:
    assert refused(fleet, event) is reason


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (notice(50.0), RefusalReason.NO_GPU),
        (notice(50.0, A, X), RefusalReason.UNKNOWN_GPU),
        (notice(50.0, A, R), RefusalReason.NOT_EXTERNAL),
        (notice(50.0, T), RefusalReason.NOT_EXTERNAL),
        (notice(math.nan, A), RefusalReason.BAD_TIME),
        (notice(math.inf, A), RefusalReason.BAD_TIME),
        (notice(-1.0, A), RefusalReason.BAD_TIME),
        (notice(50.0, A, at_s=math.nan), RefusalReason.BAD_TIME),
        (notice(50.0, A, at_s=-1.0), RefusalReason.BAD_TIME),
    ],
)
def test_a_notice_that_cannot_be_is_refused(fleet: FleetState, event: StateEvent, reason: RefusalReason) -> None:
    assert refused(fleet, event) is reason


def test_refusals_say_what_was_got(fleet: FleetState) -> None:
    assert refusal(fleet, began(TWO, X, end_s=9.0)).detail == "lease two: got an end at 9.0 s, want one after 10.0 s"
    assert refusal(fleet, notice(50.0, R)).detail == "GPU r is reserved, want an external one"
    assert refusal(fleet, notice(-1.0, A)).detail == "notice: got time -1.0 s, want a finite one >= 0"
    assert refusal(fleet, began(TWO, X, at_s=-1.0)).detail == "lease two: got time -1.0 s, want a finite one >= 0"
    assert refusal(fleet, LeaseEnded(lease=TWO)).detail == "lease two is not held"
    assert refusal(fleet, began(ONE, X)).detail == "lease one is already held"
    assert refusal(fleet, notice(50.0)).detail == "got a notice for no GPUs, want at least 1"


def test_notices_are_by_gpu_and_a_lease_shows_the_earliest(fleet: FleetState) -> None:
    state = folded(fleet, notice(60.0, C, A), notice(40.0, B))
    assert dict(state.notices) == {A: 60.0, B: 40.0, C: 60.0}
    assert state.leases[ONE].notice_deadline_s == 40.0
    assert state.leaving() == (A, B, C)
    assert [state.leaving(by_s) for by_s in (39.9, 40.0, 59.9, 60.0)] == [(), (B,), (B,), (A, B, C)]
    assert (state.leaves_s(A), state.leaves_s(B), state.leaves_s(R)) == (60.0, 40.0, None)


def test_a_later_notice_is_the_one_that_counts(fleet: FleetState) -> None:
    state = folded(fleet, notice(60.0, A), notice(70.0, A), notice(0.0, B))
    assert (state.notices[A], state.leases[ONE].notice_deadline_s) == (70.0, 0.0)
    # A deadline beyond the end of the lease changes nothing; so GPUs go at 100 s.
    assert folded(fleet, notice(500.0, A)).leaves_s(A) == 100.0


def test_external_gpus_without_a_lease_get_notices_too(fleet: FleetState) -> None:
    state = folded(fleet, GpusJoined(gpus=(gpu(X),)), notice(30.0, X))
    assert (state.leaving(), state.leaves_s(X), state.leases[ONE].notice_deadline_s) == ((X,), 30.0, None)


def test_the_end_of_a_lease_takes_gpus_and_workers_along(fleet: FleetState) -> None:
    state = folded(
        fleet,
        began(TWO, X),
        WorkerAdded(worker=W0, gpus=(A, B), role=Role.DECODE),
        WorkerAdded(worker=W1, gpus=(R,), role=Role.PREFILL),
        WorkerAdded(worker=W2, gpus=(X,), role=Role.DECODE),
        ActivityChanged(worker=W0, activity=Activity.ACTIVE),
        notice(50.0, A, X),
    )
    after = folded(state, LeaseEnded(lease=ONE))
    assert set(after.gpus) == {R, T, X}
    assert set(after.workers) == {W1, W2}
    assert set(after.leases) == {TWO}
    assert dict(after.notices) == {X: 50.0}
    assert after.slots[W0] == (A, B)
    assert after.version == state.version + 1
    assert refused(after, LeaseEnded(lease=ONE)) is RefusalReason.UNKNOWN_LEASE
    # What is over may begin again, without the notices of before, and its slots come back.
    again = folded(after, began(ONE, A, B, at_s=200.0), WorkerAdded(worker=W0, gpus=(A, B), role=Role.DECODE))
    assert again.leases[ONE] == Lease(id=ONE, gpus=(A, B), since_s=200.0)
    assert dict(again.notices) == {X: 50.0}


def test_a_lease_shrinks_with_its_gpus_and_ends_with_the_last(fleet: FleetState) -> None:
    state = folded(fleet, notice(40.0, B), notice(60.0, C), GpusLeft(gpus=(B,)))
    assert state.leases[ONE] == Lease(id=ONE, gpus=(A, C), since_s=10.0, end_s=100.0, notice_deadline_s=60.0)
    state = folded(state, GpusLeft(gpus=(C,)))
    assert (state.leases[ONE].gpus, state.leases[ONE].notice_deadline_s) == ((A,), None)
    state = folded(state, GpusLeft(gpus=(A,)))
    assert (dict(state.leases), dict(state.notices), set(state.gpus)) == ({}, {}, {R, T})


def test_the_hash_covers_leases_and_notices(fleet: FleetState) -> None:
    stay = GpusJoined(gpus=(gpu(R, GpuOwner.RESERVED), gpu(T, GpuOwner.TRAINING)))
    variants = [
        fleet,
        folded(FleetState(), stay, GpusJoined(gpus=(gpu(A), gpu(B), gpu(C)))),
        folded(FleetState(), stay, began(TWO, A, B, C, end_s=100.0)),
        folded(FleetState(), stay, began(ONE, A, B, C, end_s=101.0)),
        folded(FleetState(), stay, began(ONE, A, B, C)),
        folded(FleetState(), stay, began(ONE, A, B, C, at_s=11.0, end_s=100.0)),
        folded(FleetState(), stay, began(ONE, A, B, end_s=100.0), GpusJoined(gpus=(gpu(C),))),
        folded(fleet, notice(50.0, A)),
        folded(fleet, notice(51.0, A)),
        folded(fleet, notice(50.0, B)),
    ]
    assert len({state.hash for state in variants}) == len(variants)


def test_equal_states_have_equal_hashes(fleet: FleetState) -> None:
    # The order of events and 1 or 1.0, 0.0 or -0.0 make no difference.
    one = folded(fleet, began(TWO, X, at_s=0.0), notice(1, A), notice(50.0, B))
    two = folded(fleet, notice(50.0, B), notice(1.0, A), began(TWO, X, at_s=-0.0))
    assert one == two
    assert one.hash == two.hash


def test_the_hash_is_pinned(fleet: FleetState) -> None:
    # Journals hold it; the text, hashed by hand.
    text = (
        "a|n|external\nb|n|external\nc|n|external\nr|n|reserved\nt|n|training\nx|n|external\n"
        "lease one|a,b,c|10.0|100.0\nlease two|x|5.0|open\nnotice a|50.0\nnotice b|60.0\n"
    )
    state = folded(fleet, began(TWO, X, at_s=5), notice(60, B), notice(50.0, A))
    assert state.hash == blake2b(text.encode(), digest_size=8).hexdigest()
