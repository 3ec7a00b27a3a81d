from dataclasses import replace

import pytest

from pearl.core import arrange
from pearl.core.plan import Plan, PlanRefusal, PlanRefusalReason, PlanRequest, apply, plan
from pearl.core.platform import TransitionCosts
from pearl.core.schedule import Arrival
from pearl.core.shape import Pool, Shape, parse_shape
from pearl.core.state import FleetState, GpuOwner, GpusLeft, RefusalReason, Role, StateRefusal, fold
from pearl.errors import ShapeError
from pearl.records.ids import WorkerId
from tests.unit.core._fleets import fleet, ids, request, serving, story

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
COSTS = TransitionCosts(start_s=50, activate_s=6, return_s=3, role_change_s=20, stop_s=1)


def planned(state: FleetState, shape: str, *, borrowed: int = 0, without: str = "") -> Plan:
    made = plan(state, request(state, shape, borrowed=borrowed, without=without), COSTS)
    assert isinstance(made, Plan), made
    return made


def reached(state: FleetState, made: Plan) -> dict[int, str]:
    after = apply(state, made)
    assert isinstance(after, FleetState), after
    return serving(after)


def refused(state: FleetState, shape: str, *, borrowed: int = 0, without: str = "") -> tuple[PlanRefusalReason, str]:
    before = state.hash
    made = plan(state, request(state, shape, borrowed=borrowed, without=without), COSTS)
    assert isinstance(made, PlanRefusal), made
    assert state.hash == before
    return made.reason, made.detail


# -- worked examples ------------------------------------------------------------------------------------------------


def test_nothing_to_do() -> None:
    state = fleet("a4 b2t", "0 P a0 a1", "1 D a2 a3", "2 D- b0 b1")
    assert planned(state, "1P1D@tp2") == Plan(
        kept=(WorkerId(0), WorkerId(1)),
        reassigned={},
        woken={},
        added=(),
        removed=(),
        returned=(),
        groups=(),
        cost_s=0,
        d_worker=0,
        d_role=0,
    )


def test_a_first_fleet() -> None:
    state = fleet("a4 b4")
    made = planned(state, "1P2D@tp2")
    assert made.added == (
        Arrival(worker=WorkerId(0), gpus=ids("a0 a1"), role=P, wakes=False),
        Arrival(worker=WorkerId(1), gpus=ids("a2 a3"), role=D, wakes=False),
        Arrival(worker=WorkerId(2), gpus=ids("b0 b1"), role=D, wakes=False),
    )
    assert (made.cost_s, made.d_worker, made.d_role) == (150, 3, 0)
    assert reached(state, made) == {0: "P2", 1: "D2", 2: "D2"}


def test_one_worker_turns() -> None:
    # 2P2D -> 1P3D: of n_src(P) = 2 only n_dst = 1 stays, so D_role = 1, and the higher slot of the two turns.
    state = fleet("a4", "0 P a0", "1 D a1", "2 P a2", "3 D a3")
    made = planned(state, "1P3D")
    assert made.kept == (0, 1, 3)
    assert made.reassigned == {2: D}
    assert (made.cost_s, made.d_worker, made.d_role) == (20, 0, 1)
    assert story(made.groups) == ["roles: 0 drain 2; 1 set 2 D <0; 2 admit 2 <1"]
    assert reached(state, made) == {0: "P1", 1: "D1", 2: "D1", 3: "D1"}


def test_external_gpus_come() -> None:
    # 2P2D on 4 GPUs -> 2P4D with two more: both new ones decode.
    state = fleet("a4 x2x", "0 P a0", "1 D a1", "2 P a2", "3 D a3")
    made = planned(state, "2P4D")
    assert [(each.worker, each.gpus, each.role) for each in made.added] == [(4, ids("x0"), D), (5, ids("x1"), D)]
    assert (made.cost_s, made.d_worker, made.d_role) == (100, 2, 0)


def test_external_gpus_leave() -> None:
    # 3P3D less slots 4 (decode) and 5 (prefill) is 2P2D; slot 6, asleep, was no part of W.
    state = fleet("a4 x3x", "0 P a0", "1 D a1", "2 P a2", "3 D a3", "4 D x0", "5 P x1", "6 D- x2")
    made = planned(state, "2P2D", without="x0 x1 x2")
    assert made.kept == (0, 1, 2, 3)
    assert made.removed == (4, 5, 6)
    assert (made.cost_s, made.d_worker, made.d_role) == (3, 2, 0)
    assert story(made.groups) == [
        "vacate: 0 drain 4; 1 drain 5; 2 stop 4 <0; 3 stop 5 <1; 4 stop 6; 5 back to external x0 x1 x2 <2 <3 <4"
    ]
    after = apply(state, made)
    assert isinstance(after, FleetState)
    assert sorted(after.gpus) == list(ids("a0 a1 a2 a3"))


def test_borrowing_and_returning() -> None:
    alone = fleet("a2 b2t", "0 P a0", "1 D a1", "2 P- b0", "3 P- b1")
    made = planned(alone, "1P3D", borrowed=2)
    # A worker that slept takes any role for nothing.
    assert made.woken == {2: D, 3: D}
    assert (made.cost_s, made.d_worker, made.d_role) == (12, 2, 0)
    with_borrowed = apply(alone, made)
    assert isinstance(with_borrowed, FleetState)
    assert serving(with_borrowed) == {0: "P1", 1: "D1", 2: "D1", 3: "D1"}

    back = planned(with_borrowed, "1P1D", without="b0 b1")
    assert back.returned == (2, 3)
    assert (back.cost_s, back.d_worker, back.d_role) == (6, 2, 0)
    assert story(back.groups) == [
        "return: 0 drain 2; 1 drain 3; 2 sleep 2 <0; 3 sleep 3 <1; 4 back to training b0 b1 <2 <3"
    ]
    assert reached(with_borrowed, back) == {0: "P1", 1: "D1"}


def test_a_return_that_takes_all_prefill_workers_turns_a_survivor() -> None:
    state = fleet("a2 b1t", "0 D a0", "1 D a1", "2 P b0")
    made = planned(state, "1P1D", without="b0")
    assert (made.kept, made.reassigned, made.returned) == ((0,), {1: P}, (2,))
    assert (made.cost_s, made.d_worker, made.d_role) == (23, 1, 1)
    assert [group.gap for group in made.groups] == [True, True]


def test_two_workers_make_way_for_one_of_twice_the_gpus() -> None:
    state = fleet("a4", "0 C a0 a1", "1 C a2", "2 C a3")
    made = planned(state, "1C@tp2+1C@tp1")
    assert (made.kept, made.removed, made.added) == ((0, 1), (2,), ())
    other = planned(fleet("a4", "0 C a0", "1 C a1", "2 C a2"), "1C@tp2+1C@tp1")
    # tp2 needs a whole block: a2 a3 costs the fewest, and slots 0 and 1 are one too many.
    assert (other.kept, other.removed) == ((0,), (1, 2))
    assert [each.gpus for each in other.added] == [ids("a2 a3")]
    assert (other.cost_s, other.d_worker, other.d_role) == (52, 3, 0)


def test_roles_are_counted_for_each_tensor_parallelism() -> None:
    # P@tp1 and D@tp2 -> D@tp1 and P@tp2: by role alone nothing would change, yet both workers must turn.
    state = fleet("a3", "0 D a0 a1", "1 P a2")
    made = planned(state, "1D@tp1+1P@tp2")
    assert made.reassigned == {0: P, 1: D}
    assert (made.cost_s, made.d_worker, made.d_role) == (40, 0, 2)


def test_open_roles_are_filled_in_order_of_slots_and_pools() -> None:
    # One prefill, one colocated open: surplus slot 1 gets the first, the new slot the second.
    state = fleet("a3", "0 D a0", "1 D a1")
    made = planned(state, "1P1D1C")
    assert made.kept == (0,)
    assert made.reassigned == {1: P}
    assert [(each.worker, each.role) for each in made.added] == [(2, C)]


def test_new_slots_get_the_next_numbers_and_old_ones_come_back() -> None:
    state = fleet("b2 a4", "7 slot a2", "3 C a0", "5 slot b1")
    made = planned(state, "6C")
    assert [(each.worker, *each.gpus) for each in made.added] == [
        (5, "b1"),
        (7, "a2"),
        (8, "a1"),
        (9, "a3"),
        (10, "b0"),
    ]
    assert reached(state, made) == dict.fromkeys((3, 5, 7, 8, 9, 10), "C1")


def test_a_full_stop() -> None:
    state = fleet("a3 b1t x1x", "0 P a0", "1 D a1", "2 D b0", "3 C- a2", "4 T- b0", "5 C~ x0")
    made = planned(state, "")
    assert (made.kept, made.removed, made.returned) == ((), (0, 1), (2,))
    assert (made.cost_s, made.d_worker, made.d_role) == (5, 3, 0)
    assert story(made.groups) == [
        "return: 0 drain 2; 1 sleep 2 <0; 2 back to training b0 <1",
        "surplus: 3 drain 0; 4 drain 1; 5 stop 0 <3; 6 stop 1 <4",
    ]
    assert reached(state, made) == {}


# -- what is left alone ---------------------------------------------------------------------------------------------


def test_workers_on_their_way_do_not_count_and_are_not_named() -> None:
    state = fleet("a4 b2t", "0 P a0", "1 D~ a1", "2 T b0", "3 P~ b1")
    made = planned(state, "1P1D")
    assert made.kept == (0,)
    assert [each.gpus for each in made.added] == [ids("a2")]
    assert story(made.groups) == ["expand: 0 start 4 D a2; 1 load 4 <0; 2 admit 4 <1"]


def test_gpus_with_somebody_left_on_them_do_not_go_back() -> None:
    state = fleet("a1 x4x", "0 C a0", "1 D~ x0", "2 T- x1", "3 D x2")
    made = planned(state, "1C", without="x0 x1 x2 x3")
    assert story(made.groups) == ["vacate: 0 drain 3; 1 stop 3 <0; 2 back to external x2 x3 <1"]


@pytest.mark.parametrize(
    ("leaving", "back"),
    [
        (None, "x1 x2 x3"),
        ("x1 x2 x3", "x1 x2 x3"),
        ("x2", "x2"),
        ("x1 x2", "x1 x2"),
        # What may be used, what is reserved and what is not there does not leave, whoever says so.
        ("x0 x2 x4 a1 z9", "x2"),
        ("x0", ""),
        ("x4", ""),
        ("", ""),
    ],
)
def test_of_external_gpus_that_may_not_be_used_those_go_back_that_leave(leaving: str | None, back: str) -> None:
    # Nobody is on x3 and x4; x4 may be used, and is kept.
    state = fleet("a2 x5x", "0 C a0", "1 C x0", "2 C x2")
    named = None if leaving is None else frozenset(ids(leaving))
    made = plan(state, replace(request(state, "2C", without="a1 x1 x2 x3"), leaving=named), COSTS)
    assert isinstance(made, Plan)
    assert (made.kept, made.removed) == ((0, 1), (2,))
    last = f"; 2 back to external {back} <1" if back else ""
    assert story(made.groups) == [f"vacate: 0 drain 2; 1 stop 2 <0{last}"]
    assert PlanRequest(shape=Shape(()), usable=frozenset()).leaving is None


def test_gpus_that_leave_go_back_only_when_nobody_is_on_them() -> None:
    state = fleet("a1 x3x", "0 C a0", "1 D~ x0", "2 D x1")
    wanted = replace(request(state, "1C", without="x0 x1 x2"), leaving=frozenset(ids("x0 x1")))
    made = plan(state, wanted, COSTS)
    assert isinstance(made, Plan)
    assert story(made.groups) == ["vacate: 0 drain 2; 1 stop 2 <0; 2 back to external x1 <1"]


def test_all_that_end_are_listed_in_order_of_slots() -> None:
    made = planned(fleet("a3", "0 C a0", "1 C a1", "2 C a2"), "1C", without="a2")
    assert (made.kept, made.removed) == ((0,), (1, 2))
    made = planned(fleet("a3", "0 C a0", "1 C a1", "2 C a2"), "1C", without="a0")
    assert (made.kept, made.removed) == ((1,), (0, 2))
    made = planned(fleet("a3", "0 C a0", "1 P a1", "2 C a2"), "1C", without="a2")
    assert (made.kept, made.removed) == ((0,), (1, 2))


def test_all_that_return_are_listed_in_order_of_slots() -> None:
    # Slot 0 must go, slot 1 is not needed.
    assert planned(fleet("b2t", "0 C b0", "1 C b1"), "", without="b0").returned == (0, 1)


def test_new_slots_are_numbered_in_order_of_their_gpus() -> None:
    # The larger one is seated first, on the only block of two.
    made = planned(fleet("a1 b2"), "1C@tp2+1C@tp1")
    assert [(each.worker, each.gpus) for each in made.added] == [(0, ids("a0")), (1, ids("b0 b1"))]


def test_the_first_of_several_reasons_is_told() -> None:
    state = fleet("a2")
    strays = PlanRequest(shape=parse_shape("1C"), usable=frozenset(ids("z7 z3 z9 z1 z8 z2 z6 z4")))
    refusal = plan(state, strays, COSTS)
    assert isinstance(refusal, PlanRefusal)
    assert refusal.detail == "usable: GPU z1 is not part of the job"
    assert refused(state, "1C@tp8+1C@tp4")[1] == "tp 4: no worker has and no node has free 4 GPUs"


def test_reserved_gpus_are_never_given_back() -> None:
    state = fleet("a3", "0 C a0", "1 C a1")
    made = planned(state, "1C", without="a1 a2")
    assert story(made.groups) == ["vacate: 0 drain 1; 1 stop 1 <0"]


def test_gpus_that_another_overlap_worker_will_use_do_not_go_back_to_training() -> None:
    lent = planned(fleet("b3t", "0 C b0 b1", "1 C- b0", "2 C- b2"), "2C@tp1", borrowed=2)
    assert lent.returned == (0,)
    assert story(lent.groups)[0] == "return gap: 0 drain 0; 1 sleep 0 <0; 2 back to training b1 <1"


def test_a_worker_that_waits_on_the_way_out_keeps_its_gpu_from_going_back() -> None:
    # Slot 2 drains on b0 while slot 0 goes from b0 and b1; a trainer on its way does not matter.
    state = fleet("b2t", "0 C b0 b1", "2 C~ b0", "3 T~ b1")
    assert story(planned(state, "").groups) == ["return: 0 drain 0; 1 sleep 0 <0; 2 back to training b1 <1"]


def test_a_worker_across_two_zones_sleeps_and_stays_where_it_is() -> None:
    state = fleet("a1", "0 C a0")
    gpus = {**state.gpus, **fleet("x1x").gpus, **fleet("x2t").gpus}
    gpus[ids("x0")[0]] = fleet("x1x").gpus[ids("x0")[0]]
    mixed = FleetState(
        gpus=gpus,
        workers={**state.workers, **fleet("x2", "1 C x0 x1").workers},
        slots={**state.slots, WorkerId(1): ids("x0 x1")},
    )
    assert gpus[ids("x1")[0]].owner is GpuOwner.TRAINING
    made = planned(mixed, "1C", without="x0 x1")
    assert story(made.groups) == ["return: 0 drain 1; 1 sleep 1 <0; 2 back to training x1 <1"]


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usable", "lendable", "detail"),
    [
        ("a0 z9", "", "usable: GPU z9 is not part of the job"),
        ("a0 b0", "", "usable: GPU b0 is training, want reserved or external"),
        ("a0", "b0 z9", "lendable: GPU z9 is not part of the job"),
        ("a0", "b0 a1", "lendable: GPU a1 is reserved, want training"),
        ("a0", "x0", "lendable: GPU x0 is external, want training"),
    ],
)
def test_gpus_of_the_wrong_zone(usable: str, lendable: str, detail: str) -> None:
    state = fleet("a2 b1t x1x")
    target = PlanRequest(shape=parse_shape("1C"), usable=frozenset(ids(usable)), lendable=frozenset(ids(lendable)))
    assert plan(state, target, COSTS) == PlanRefusal(reason=PlanRefusalReason.WRONG_ZONE, detail=detail)


def test_too_few_gpus() -> None:
    state = fleet("a4", "0 C a0", "1 C~ a1")
    assert refused(state, "4C") == (PlanRefusalReason.TOO_FEW_GPUS, "4C: wants 4 GPUs, there are 3")
    assert isinstance(planned(state, "3C"), Plan)


def test_no_block() -> None:
    state = fleet("a4 b2", "0 C~ a1")
    assert refused(state, "2C@tp4") == (
        PlanRefusalReason.NO_BLOCK,
        "tp 4: no worker has and no node has free 4 GPUs",
    )
    assert refused(state, "1C@tp1+1P1D@tp8")[0] is PlanRefusalReason.NO_BLOCK
    assert refused(fleet("b4t"), "1C")[0] is PlanRefusalReason.NO_BLOCK


def test_too_few_to_borrow() -> None:
    state = fleet("a4 b4t", "0 C- b0", "1 C- b1", "2 C- b2 b3")
    assert isinstance(planned(state, "3C", borrowed=2), Plan)
    assert refused(state, "3C", borrowed=3) == (
        PlanRefusalReason.TOO_FEW_OVERLAP,
        "3C: got 3 to borrow, want at most 2",
    )
    # One of tp2 can be borrowed, however many tp1 sleep.
    assert refused(state, "2C@tp2", borrowed=2) == (
        PlanRefusalReason.TOO_FEW_OVERLAP,
        "2C@tp2: got 2 to borrow, want at most 1",
    )
    assert refused(state, "2C@tp2+1C@tp1", borrowed=3)[1] == "2C@tp2+1C@tp1: got 3 to borrow, want at most 2"


def test_no_room() -> None:
    # GPUs that no seat could use do not count.
    scattered = fleet("a4 b2", "0 C~ a1", "1 C~ a3")
    assert refused(scattered, "2C@tp2") == (PlanRefusalReason.TOO_FEW_GPUS, "2C@tp2: wants 4 GPUs, there are 2")
    assert refused(fleet("a3"), "1C@tp2+2C@tp1")[0] is PlanRefusalReason.TOO_FEW_GPUS
    assert refused(fleet("a3 b1"), "1C@tp3+1C@tp2") == (
        PlanRefusalReason.TOO_FEW_GPUS,
        "1C@tp3+1C@tp2: wants 5 GPUs, there are 3",
    )
    # Six GPUs wanted and there, but the block of three and that of two are on the one node.
    assert refused(fleet("a3 b1 c1 d1"), "1C@tp3+1C@tp2+1C@tp1") == (
        PlanRefusalReason.NO_ROOM,
        "1C@tp3+1C@tp2+1C@tp1 with 0 borrowed: no way to seat all workers on the GPUs",
    )
    shared = fleet("a2 b4t", "0 C- b0 b1", "1 C- b0", "2 C- b1", "3 C- b2")
    assert refused(shared, "1C@tp2+2C@tp1", borrowed=3)[0] is PlanRefusalReason.NO_ROOM


def test_what_the_solver_could_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fleet("a3", "0 P a0", "1 P a1")
    assert planned(state, "1P+1D").reassigned == {1: D}
    monkeypatch.setattr(arrange, "_solve", lambda _: arrange.Unseated.UNDECIDED)
    assert refused(state, "1P+1D") == (
        PlanRefusalReason.UNDECIDED,
        "1P1D with 0 borrowed: the cheapest seats were not found within 1,000 nodes",
    )


@pytest.mark.parametrize(
    ("borrowed", "message"),
    [
        (-1, "plan: borrowed: got -1, want 0..3, the shape's workers"),
        (4, "plan: borrowed: got 4, want 0..3, the shape's workers"),
    ],
)
def test_borrowing_more_than_there_are_is_no_request(borrowed: int, message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        PlanRequest(shape=parse_shape("1P2D"), borrowed=borrowed, usable=frozenset())
    assert str(caught.value) == message


@pytest.mark.parametrize("borrowed", [0, 3])
def test_all_or_none_may_be_borrowed(borrowed: int) -> None:
    asked = PlanRequest(shape=parse_shape("1P2D"), borrowed=borrowed, usable=frozenset())
    assert (asked.borrowed, asked.lendable) == (borrowed, frozenset())
    assert PlanRequest(shape=parse_shape("1C"), usable=frozenset()).borrowed == 0


@pytest.mark.parametrize(
    ("pool", "got"),
    [
        (Pool(role=Role.TRAINING, workers=1), "1 training workers of tp 1"),
        (Pool(role=C, workers=0), "0 colocated workers of tp 1"),
        (Pool(role=C, workers=2, tp=0), "2 colocated workers of tp 0"),
    ],
)
def test_shapes_that_are_none(pool: Pool, got: str) -> None:
    with pytest.raises(ShapeError) as caught:
        PlanRequest(shape=Shape((Pool(role=C, workers=1, tp=1), pool)), usable=frozenset())
    assert str(caught.value) == (f"plan: shape: got {got}, want at least one that serves, of tp >= 1, in each pool")


def test_pools_alike_add_up() -> None:
    asked = PlanRequest(
        shape=Shape((Pool(role=C, workers=1), Pool(role=P, workers=1, tp=2), Pool(role=C, workers=2))),
        usable=frozenset(),
    )
    assert asked.demand == {(C, 1): 3, (P, 2): 1}


def test_a_plan_of_another_state_is_refused() -> None:
    state = fleet("a2", "0 C a0", "1 C a1")
    made = planned(state, "1C")
    gone = fold(state, GpusLeft(gpus=ids("a1")))
    assert isinstance(gone, FleetState)
    refusal = apply(gone, made)
    assert isinstance(refusal, StateRefusal)
    assert refusal.reason is RefusalReason.UNKNOWN_WORKER
