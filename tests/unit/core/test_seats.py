import pytest

from pearl.core.seats import Seat, SeatKind, Seats, is_overlap, seats_of, untouchable
from pearl.core.state import FleetState, Gpu, GpuOwner, Role
from pearl.records.ids import GpuId, NodeId, WorkerId
from tests.unit.core._fleets import fleet, ids, zones


def seats(state: FleetState, *tps: int, without: str = "") -> Seats:
    usable, lendable = zones(state, without)
    return seats_of(state, usable, lendable, tps)


def blocks(found: Seats) -> list[tuple[str, int | None]]:
    """GPUs and slot of all blocks for new workers."""
    return [(" ".join(seat.gpus), seat.worker) for seat in found.options if seat.kind is SeatKind.START]


def slots(workers: tuple[object, ...]) -> list[int]:
    return [worker.id for worker in workers]  # type: ignore[attr-defined]


def test_workers_that_serve_or_sleep_have_a_seat() -> None:
    state = fleet("a4 b2t", "3 P a0", "1 D- a1", "0 C b0", "2 D- b1")
    found = seats(state, 1)
    assert slots(found.serving) == [0, 3]
    assert slots(found.asleep) == [1, 2]
    assert slots(found.resting) == [1]
    assert found.forced == ()
    assert found.options[:4] == (
        Seat(kind=SeatKind.KEEP, gpus=ids("b0"), worker=WorkerId(0), role=Role.COLOCATED, overlap=True),
        Seat(kind=SeatKind.KEEP, gpus=ids("a0"), worker=WorkerId(3), role=Role.PREFILL, overlap=False),
        Seat(kind=SeatKind.WAKE, gpus=ids("a1"), worker=WorkerId(1), role=None, overlap=False),
        Seat(kind=SeatKind.WAKE, gpus=ids("b1"), worker=WorkerId(2), role=None, overlap=True),
    )


def test_new_workers_fit_on_free_dedicated_gpus_only() -> None:
    state = fleet("a2 b2t c1x")
    assert blocks(seats(state, 1)) == [("a0", None), ("a1", None), ("c0", None)]
    assert blocks(seats(state, 1, without="a0 c0")) == [("a1", None)]
    (first, *_) = seats(state, 1).options
    assert first == Seat(kind=SeatKind.START, gpus=ids("a0"), worker=None, role=None, overlap=False)


def test_blocks_are_aligned() -> None:
    state = fleet("a8 b3")
    assert blocks(seats(state, 4)) == [("a0 a1 a2 a3", None), ("a4 a5 a6 a7", None)]
    assert blocks(seats(state, 3)) == [("a0 a1 a2", None), ("a3 a4 a5", None), ("b0 b1 b2", None)]
    assert blocks(seats(state, 2, without="a1")) == [("a2 a3", None), ("a4 a5", None), ("a6 a7", None), ("b0 b1", None)]
    assert blocks(seats(state, 9)) == []
    # What is left over at the end of a node is no block of a smaller kind.
    assert blocks(seats(fleet("a7"), 3, 4)) == [("a0 a1 a2", None), ("a3 a4 a5", None), ("a0 a1 a2 a3", None)]


def test_blocks_come_in_order_of_nodes_and_the_small_ones_first() -> None:
    assert blocks(seats(fleet("b2 a2"), 2, 1)) == [
        ("a0", None),
        ("a1", None),
        ("a0 a1", None),
        ("b0", None),
        ("b1", None),
        ("b0 b1", None),
    ]


def test_order_is_that_of_names() -> None:
    # The names of GPUs run against those of their nodes, and the state lists them in neither order.
    named = {"g1": "y", "g3": "x", "g0": "y", "g2": "x"}
    gpus = {GpuId(gpu): Gpu(id=GpuId(gpu), node=NodeId(node), owner=GpuOwner.RESERVED) for gpu, node in named.items()}
    assert blocks(seats(FleetState(gpus=gpus), 2)) == [("g2 g3", None), ("g0 g1", None)]


def test_a_slot_of_before_is_reused() -> None:
    # Slot 4 has its GPUs in another order, slot 6 the same ones again, slot 5 lies across blocks.
    state = fleet("a4", "6 slot a0 a1", "4 slot a1 a0", "5 slot a1 a2")
    assert blocks(seats(state, 2)) == [("a1 a0", 4), ("a2 a3", None), ("a1 a2", 5)]
    assert blocks(seats(state, 2, without="a1")) == [("a2 a3", None)]
    assert blocks(seats(state, 1)) == [("a0", None), ("a1", None), ("a2", None), ("a3", None)]


def test_a_slot_whose_worker_may_stay_is_not_started_again() -> None:
    state = fleet("a4", "0 P a0 a1", "1 D- a2 a3", "2 slot a0 a1")
    assert blocks(seats(state, 2)) == []
    assert blocks(seats(state, 1)) == [("a0", None), ("a1", None), ("a2", None), ("a3", None)]


def test_only_what_was_asked_for_is_an_option() -> None:
    state = fleet("a4", "0 P a0 a1", "1 D- a2")
    assert [seat.worker for seat in seats(state, 2).options] == [0, None]
    assert [seat.worker for seat in seats(state, 1).options[:2]] == [1, None]
    assert seats(state).options == ()
    assert slots(seats(state).serving) == [0]
    assert slots(seats(state).asleep) == [1]


def test_workers_on_lost_gpus_must_go() -> None:
    state = fleet("a4 b4t", "0 P a0", "1 D- a1", "2 C b0 b1", "3 D- b2", "4 P a2", "5 C b3")
    found = seats(state, 1, 2, without="a0 a1 b1 b2")
    # An overlap worker that sleeps where nobody may be woken sleeps on.
    assert slots(found.forced) == [0, 1, 2]
    assert slots(found.serving) == [4, 5]
    assert found.asleep == ()
    assert found.resting == ()
    assert [seat.worker for seat in found.options if seat.worker is not None] == [4, 5]


def test_one_lost_gpu_is_enough() -> None:
    found = seats(fleet("a2", "0 P a0 a1"), 1, 2, without="a1")
    assert slots(found.forced) == [0]
    assert blocks(found) == [("a0", None)]


@pytest.mark.parametrize("other", ["1 D~ a0 a1", "1 T a0 a1", "1 T~ a0 a1"])
def test_nobody_comes_to_gpus_that_another_holds(other: str) -> None:
    found = seats(fleet("a4", "0 P- a0", "2 slot a0", other), 1, 2)
    assert found.asleep == ()
    assert slots(found.resting) == [0]
    assert found.serving == found.forced == ()
    assert blocks(found) == [("a2", None), ("a3", None), ("a2 a3", None)]


def test_a_trainer_that_rests_holds_nothing() -> None:
    state = fleet("a1 b1t", "0 T- b0", "1 D- b0", "2 T- a0")
    found = seats(state, 1)
    assert slots(found.asleep) == [1]
    assert found.resting == ()
    # The trainer's slot is its own all the same.
    assert blocks(found) == [("a0", None)]


def test_lost_gpus_do_not_move_what_nobody_may_touch() -> None:
    found = seats(fleet("a2 b1t", "0 D~ a0", "1 T a1", "2 T- b0"), 1, without="a0 a1 b0")
    assert found == Seats(serving=(), asleep=(), resting=(), forced=(), options=())


def test_which_workers_sit_on_the_trainers_gpus() -> None:
    state = fleet("a1 b2t", "0 P a0", "1 D b0", "2 T b1", "3 D~ b0", "4 D- a0", "5 C b1 a0")
    workers = [state.workers[slot] for slot in sorted(state.workers)]
    assert [is_overlap(state, worker) for worker in workers] == [False, True, True, True, False, True]
    assert [untouchable(worker) for worker in workers] == [False, False, True, True, False, False]
