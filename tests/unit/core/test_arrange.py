from itertools import product
from typing import Any

import numpy as np
import pytest

from pearl.core import arrange as module
from pearl.core.arrange import Arrangement, Demand, Unseated, arrange
from pearl.core.platform import TransitionCosts
from pearl.core.seats import seats_of
from pearl.core.state import FleetState, Role
from tests.unit.core._fleets import fleet, request, zones

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
COSTS = TransitionCosts(start_s=50, activate_s=6, return_s=3, role_change_s=20, stop_s=1)


def arranged(
    state: FleetState, demand: Demand, borrowed: int = 0, costs: TransitionCosts = COSTS
) -> tuple[list[str], list[int]] | None:
    """Seats as text, and the sleeping workers that end."""
    usable, lendable = zones(state)
    found = arrange(seats_of(state, usable, lendable, {tp for _, tp in demand}), demand, borrowed, costs)
    if isinstance(found, Unseated):
        assert found is Unseated.NO_ROOM
        return None
    seats = [f"{seat.kind.value} {' '.join(seat.gpus) if seat.worker is None else seat.worker}" for seat in found.seats]
    return sorted(seats), sorted(found.ended)


def costing(**costs: float) -> TransitionCosts:
    """`COSTS` but for some."""
    named = {name: getattr(COSTS, name) for name in ("start_s", "activate_s", "return_s", "role_change_s", "stop_s")}
    return TransitionCosts(**{**named, **costs})


def test_nobody_is_seated_where_nobody_is_wanted() -> None:
    assert arranged(fleet("a2", "0 P a0"), {}) == ([], [])


def test_workers_of_the_wanted_role_stay_first() -> None:
    state = fleet("a4", "0 D a0", "1 P a1", "2 C a2", "3 P a3")
    assert arranged(state, {(P, 1): 2}) == (["keep 1", "keep 3"], [])
    assert arranged(state, {(P, 1): 1}) == (["keep 1"], [])
    assert arranged(state, {(D, 1): 1, (C, 1): 1}) == (["keep 0", "keep 2"], [])


def test_of_workers_alike_the_lowest_slots_stay() -> None:
    state = fleet("a4", "7 P a0", "3 P a1", "5 P a2", "1 P a3")
    assert arranged(state, {(P, 1): 2}) == (["keep 1", "keep 3"], [])


@pytest.mark.parametrize(
    ("costs", "seat"),
    [
        # A worker turns (20) or ends while a sleeping one is woken (1 + 6) or a new one started (1 + 50).
        (COSTS, "wake 1"),
        (costing(role_change_s=7.001), "wake 1"),
        (costing(role_change_s=7), "keep 0"),  # as cheap, and one change instead of two
        (costing(role_change_s=6.999), "keep 0"),
        (costing(role_change_s=60, activate_s=50.001), "start a2"),
        (costing(role_change_s=60, activate_s=49.999), "wake 1"),
        (costing(role_change_s=51.001, activate_s=100), "start a2"),
        (costing(role_change_s=51, activate_s=100), "keep 0"),
        (costing(role_change_s=20, activate_s=100, start_s=10, stop_s=9.999), "start a2"),
        (costing(role_change_s=20, activate_s=100, start_s=10, stop_s=10.001), "keep 0"),
    ],
)
def test_prices_decide(costs: TransitionCosts, seat: str) -> None:
    assert arranged(fleet("a3", "0 P a0", "1 P- a1"), {(D, 1): 1}, costs=costs) == ([seat], [])


def test_prices_count_in_whole_milliseconds() -> None:
    # 7.0004 is the same as 7, so fewer changes win; 7.0006 is a millisecond more.
    state = fleet("a2", "0 P a0", "1 P- a1")
    assert arranged(state, {(D, 1): 1}, costs=costing(role_change_s=7.0004)) == (["keep 0"], [])
    assert arranged(state, {(D, 1): 1}, costs=costing(role_change_s=7.0006)) == (["wake 1"], [])


def test_where_all_is_free_nothing_is_changed_for_nothing() -> None:
    free = TransitionCosts(start_s=0, activate_s=0, return_s=0, role_change_s=0, stop_s=0)
    state = fleet("a5 b2t", "0 P a0", "1 D a1", "2 P a2", "3 D- a3", "4 D b0", "5 D- b1")
    assert arranged(state, {(P, 1): 2, (D, 1): 2}, 1, free) == (["keep 0", "keep 1", "keep 2", "keep 4"], [])
    assert arranged(state, {(P, 1): 1, (D, 1): 1}, 0, free) == (["keep 0", "keep 1"], [])


def test_so_many_are_borrowed_as_wanted() -> None:
    state = fleet("a3 b3t", "0 P a0", "1 P a1", "2 P b0", "3 P- b1", "4 P- b2")
    assert arranged(state, {(P, 1): 2}, 0) == (["keep 0", "keep 1"], [])
    assert arranged(state, {(P, 1): 2}, 1) == (["keep 0", "keep 2"], [])
    assert arranged(state, {(P, 1): 2}, 2) == (["keep 2", "wake 3"], [])
    assert arranged(state, {(P, 1): 3}, 3) == (["keep 2", "wake 3", "wake 4"], [])
    assert arranged(state, {(P, 1): 4}, 1) == (["keep 0", "keep 1", "keep 2", "start a2"], [])
    assert arranged(state, {(P, 1): 4}, 4) is None


def test_who_borrows_is_chosen_over_all_tensor_parallelisms() -> None:
    # One of two must be borrowed. The tp2 one serves there; to borrow the tp1 one it would have to be woken.
    state = fleet("a3 b3t", "0 P a0", "1 D a1 a2", "2 P- b0", "3 D b1 b2")
    assert arranged(state, {(P, 1): 1, (D, 2): 1}, 1) == (["keep 0", "keep 3"], [])


@pytest.mark.parametrize(
    ("costs", "seat"),
    [
        # Turning costs 20, returning the one and waking the other 6 and what returning costs.
        (COSTS, "wake 1"),
        (costing(return_s=13.999, stop_s=100), "wake 1"),
        (costing(return_s=14), "keep 0"),
        (costing(return_s=14.001, stop_s=0), "keep 0"),
    ],
)
def test_returning_has_a_price_of_its_own(costs: TransitionCosts, seat: str) -> None:
    assert arranged(fleet("b2t", "0 P b0", "1 P- b1"), {(D, 1): 1}, 1, costs) == ([seat], [])


def test_two_zones_of_one_role_are_filled_at_least_cost() -> None:
    # 2 decode and 1 prefill stay, one of the three borrowed: the borrowed one can be of either role, and the decode
    # workers of the dedicated zone are those that need no change.
    state = fleet("a3 b2t", "0 D a0", "1 D a1", "2 P a2", "3 P b0", "4 C b1")
    assert arranged(state, {(P, 1): 1, (D, 1): 2}, 1) == (["keep 0", "keep 1", "keep 3"], [])


def test_new_workers_come_where_they_displace_the_fewest() -> None:
    state = fleet("a4 b4", "0 P a0", "1 P a1", "2 P b0", "3 P b1 b2")
    # tp4: node a costs slots 0 and 1; node b slot 2 and a tp2 worker that nobody wants. Two of the tp1 stay either way.
    assert arranged(state, {(P, 1): 2, (D, 4): 1}) == (["keep 0", "keep 1", "start b0 b1 b2 b3"], [])
    assert arranged(state, {(P, 1): 1, (D, 4): 1}) == (["keep 2", "start a0 a1 a2 a3"], [])


def test_a_free_block_is_taken_before_one_that_has_to_be_cleared() -> None:
    # Slot 0 ends either way, but only after the new one has come.
    assert arranged(fleet("a2 b2", "0 P a0"), {(D, 2): 1}) == (["start b0 b1"], [])


def test_no_more_are_displaced_than_can_be_spared() -> None:
    # Each of the three blocks of two has a prefill worker on it, and one is to spare. The second that is displaced is
    # made up for by a new one on a GPU that is left.
    state = fleet("a4 b2 c1", "0 P a0", "1 P a2", "2 P b0")
    seats, ended = arranged(state, {(P, 1): 2, (D, 2): 2}) or ([], [])
    assert [seat.split()[0] for seat in seats] == ["keep", "start", "start", "start"]
    assert sorted(len(seat.split()) for seat in seats) == [2, 2, 3, 3]
    assert ended == []


def test_a_block_is_cleared_when_that_is_cheapest() -> None:
    # The three GPUs that are free lie in two blocks: slot 1 has to end (1) so that a tp2 worker can start (50), and
    # as it cannot be started where it was, another tp1 starts in its place (50).
    state = fleet("a4", "0 P a0", "1 P a3")
    assert arranged(state, {(P, 1): 2, (D, 2): 1}) == (["keep 0", "start a1", "start a2 a3"], [])


def test_seats_are_found_where_the_first_ones_that_offer_themselves_do_not_do() -> None:
    # Turning costs more than a new start. The free block a2 a3 offers itself for the tp2 worker, but then a tp1 worker
    # would have to start on a1, where slot 8 may stay: so the block a0 a1 is taken.
    state = fleet("a4", "8 D a1")
    costs = costing(start_s=0, role_change_s=20, stop_s=3)
    assert arranged(state, {(C, 2): 1, (C, 1): 2}, costs=costs) == (["start a0 a1", "start a2", "start a3"], [])


def test_a_worker_that_rests_ends_where_a_new_one_starts() -> None:
    state = fleet("a3", "2 D- a1")
    assert arranged(state, {(D, 2): 1}) == (["start a0 a1"], [2])
    # Elsewhere it would rest on, and that is cheaper by what ending it costs.
    assert arranged(fleet("a4", "2 D- a1"), {(D, 2): 1}) == (["start a2 a3"], [])


def test_a_worker_that_rests_ends_once_whatever_starts_on_it() -> None:
    # One block of two, or the other: half an ending for each half of a start would do for a linear program.
    state = fleet("a4", "1 C- a0 a1 a2 a3")
    seats, ended = arranged(state, {(C, 2): 1}) or ([], [])
    assert seats in (["start a0 a1"], ["start a2 a3"])
    assert ended == [1]
    assert arranged(state, {(C, 2): 2}) == (["start a0 a1", "start a2 a3"], [1])


def test_of_two_that_share_gpus_one_is_woken() -> None:
    state = fleet("a1 b4t", "0 P- b0 b1", "1 P- b0", "2 P- b1", "3 P- b2 b3", "4 P- b2")
    assert arranged(state, {(P, 2): 1, (P, 1): 1}, 2) in ((["wake 0", "wake 4"], []), (["wake 1", "wake 3"], []))
    assert arranged(state, {(P, 2): 2, (P, 1): 1}, 3) is None
    assert arranged(state, {(P, 1): 3}, 3) == (["wake 1", "wake 2", "wake 4"], [])


def test_a_worker_that_serves_makes_way_for_one_that_is_woken() -> None:
    state = fleet("a1 b2t", "0 P b0 b1", "1 P- b0", "2 P- b1")
    assert arranged(state, {(P, 1): 2}, 2) == (["wake 1", "wake 2"], [])
    assert arranged(state, {(P, 2): 1, (P, 1): 1}, 1) == (["keep 0", "start a0"], [])
    assert arranged(state, {(P, 2): 1, (P, 1): 1}, 2) is None


def test_no_seats_at_all() -> None:
    assert arranged(fleet("a2"), {(P, 1): 3}) is None
    assert arranged(fleet("a2"), {(P, 4): 1}) is None
    # Enough GPUs, and a block, but a tp2 and two tp1 workers do not fit on three.
    assert arranged(fleet("a3"), {(P, 2): 1, (D, 1): 2}) is None
    assert arranged(fleet("a3"), {(P, 2): 1, (D, 1): 1}) == (["start a0 a1", "start a2"], [])


def test_seats_that_share_one_gpu_are_not_both_taken() -> None:
    # Slot 0 lies across the only block; by count alone both could be had.
    state = fleet("a3 b1", "0 P a1 a2")
    assert arranged(state, {(P, 2): 2}) is None
    assert arranged(state, {(P, 2): 1}) == (["keep 0"], [])


def test_the_request_gives_the_demand() -> None:
    state = fleet("a8")
    found = arrange(
        seats_of(state, *zones(state), {1, 2}), request(state, "2P@tp1+1D@tp2").demand, 0, TransitionCosts()
    )
    assert isinstance(found, Arrangement)
    assert sorted(seat.tp for seat in found.seats) == [1, 1, 2]


# Fleets that only grow: no program


def solved(
    monkeypatch: pytest.MonkeyPatch, state: FleetState, demand: Demand, borrowed: int = 0, **costs: float
) -> int:
    """How many programs it took; without the short way the same comes of it."""
    calls = 0
    real = module._solve

    def counting(program: module._Program) -> list[int] | Unseated:
        nonlocal calls
        calls += 1
        return real(program)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_solve", counting)
        found = arranged(state, demand, borrowed, costing(**costs))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_grown", lambda *_: None)
        assert found == arranged(state, demand, borrowed, costing(**costs))
    return calls


def test_where_all_may_stay_no_program_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fleet("a4 b2t", "0 P a0", "1 D a1", "2 P b0", "3 D- b1")
    for demand, borrowed, seats in (
        ({(P, 1): 2, (D, 1): 1}, 1, ["keep 0", "keep 1", "keep 2"]),
        ({(P, 1): 2, (D, 1): 3}, 1, ["keep 0", "keep 1", "keep 2", "start a2", "start a3"]),
        ({(P, 1): 2, (D, 1): 2}, 2, ["keep 0", "keep 1", "keep 2", "wake 3"]),
        ({(P, 1): 2, (D, 1): 1, (C, 1): 2}, 2, ["keep 0", "keep 1", "keep 2", "start a2", "wake 3"]),
    ):
        assert arranged(state, demand, borrowed) == (seats, [])
        assert solved(monkeypatch, state, demand, borrowed) == 0
    assert solved(monkeypatch, fleet("a2"), {(P, 1): 2}) == 0


def test_of_missing_ones_the_cheapest_are_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fleet("a3", "0 C a0", "1 C- a1")
    assert arranged(state, {(C, 1): 2}) == (["keep 0", "wake 1"], [])
    assert solved(monkeypatch, state, {(C, 1): 2}) == 0
    assert arranged(state, {(C, 1): 2}, costs=costing(activate_s=51)) == (["keep 0", "start a2"], [])
    assert solved(monkeypatch, state, {(C, 1): 2}, activate_s=51) == 0
    assert arranged(state, {(C, 1): 3}) == (["keep 0", "start a2", "wake 1"], [])
    assert solved(monkeypatch, state, {(C, 1): 3}) == 0


def test_borrowed_ones_of_one_tensor_parallelism_are_woken_without(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two overlap workers of two GPUs sleep; one is wanted, and one of one GPU starts.
    state = fleet("a2 b4t", "0 C a0", "1 C- b0 b1", "2 C- b2 b3")
    demand = {(C, 1): 2, (D, 2): 1}
    assert arranged(state, demand, 1) == (["keep 0", "start a1", "wake 1"], [])
    assert solved(monkeypatch, state, demand, 1) == 0
    # One of two that sleep; the other missing one is new. And none of them.
    state = fleet("a3 b2t", "0 P a0", "1 P- b0", "2 P- b1")
    assert arranged(state, {(P, 1): 3}, 1) == (["keep 0", "start a1", "wake 1"], [])
    assert solved(monkeypatch, state, {(P, 1): 3}, 1) == 0
    assert arranged(state, {(P, 1): 3}, 0) == (["keep 0", "start a1", "start a2"], [])
    assert solved(monkeypatch, state, {(P, 1): 3}, 0) == 0
    # Of two tensor parallelisms where none is to be borrowed.
    state = fleet("a4 b3t", "0 P a0", "1 P- b0", "2 P- b1 b2")
    assert solved(monkeypatch, state, {(P, 1): 2, (D, 2): 1}, 0) == 0


@pytest.mark.parametrize(
    ("why", "state", "demand", "borrowed", "costs"),
    [
        ("one more is borrowed than may be", fleet("a3 b1t", "0 P a0", "1 P b0"), {(P, 1): 3}, 0, {}),
        ("a role has one too many", fleet("a3", "0 P a0", "1 P a1"), {(P, 1): 1, (D, 1): 1}, 0, {}),
        ("a role is not wanted", fleet("a3", "0 C a0", "1 P a1"), {(P, 1): 2}, 0, {}),
        ("as many, of another role", fleet("a1", "0 P a0"), {(D, 1): 1}, 0, {}),
        ("seats cost the same", fleet("a3", "0 P a0", "1 P- a1"), {(P, 1): 2}, 0, {"activate_s": 50}),
        ("nobody sleeps that could be borrowed", fleet("a3 b1t", "0 P a0"), {(P, 1): 2}, 1, {}),
        ("too few sleep", fleet("a3 b1t", "0 P a0", "1 P- b0"), {(P, 1): 3}, 2, {}),
        ("too few seats", fleet("a2", "0 P a0"), {(P, 1): 3}, 0, {}),
        (
            "more are to be borrowed than are missing",
            fleet("a2 b2t", "0 P a0", "1 P a1", "2 P- b0", "3 P- b1"),
            {(P, 1): 3},
            2,
            {},
        ),
        (
            "borrowed ones of two tensor parallelisms",
            fleet("a4 b3t", "0 P a0", "1 P- b0", "2 P- b1 b2"),
            {(P, 1): 2, (D, 2): 1},
            1,
            {},
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_where_somebody_has_to_go_or_seats_compete_a_program_decides(
    why: str,
    state: FleetState,
    demand: Demand,
    borrowed: int,
    costs: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert solved(monkeypatch, state, demand, borrowed, **costs) > 0, why


def test_the_short_way_leads_where_programs_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    states = (
        fleet("a4 b2t", "0 P a0", "1 D a1", "2 D- b0", "3 P- b1"),
        fleet("a5 b1t", "0 P a0", "1 P b0", "2 D- a2"),
        fleet("a4 b2 c3t", "0 P a0", "1 D- c0", "2 P- a1"),
    )
    counts = [
        solved(monkeypatch, state, {(P, 1): p, (D, 1): d}, borrowed)
        for state, p, d, borrowed in product(states, (1, 2, 3), (1, 2), (0, 1, 2))
    ]
    assert 10 <= counts.count(0) <= len(counts) - 10


# Bounds of the solver


def reasons(state: FleetState, demand: Demand) -> Arrangement | Unseated:
    return arrange(seats_of(state, *zones(state), {tp for _, tp in demand}), demand, 0, COSTS)


class TestBounds:
    def stopped(self, monkeypatch: pytest.MonkeyPatch, at: int, status: int) -> list[bool]:
        """The program of this number ends with what it has; which of those that were tried were integer ones."""
        state = fleet(
            "a4", "1 C- a0 a1 a2 a3"
        )  # by class, then by seat, where only an integer program finds whole numbers
        tried: list[bool] = []
        real = module.milp

        def milp(*given: Any, **named: Any) -> Any:
            assert named["options"] == {"mip_rel_gap": 0.0, "node_limit": 1_000}
            tried.append(bool(named["integrality"].all()))
            result = real(*given, **named)
            assert result.x is not None
            if len(tried) == at:
                result.update(status=status, success=False)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(module, "_grown", lambda *_: None)
            patch.setattr(module, "milp", milp)
            found = reasons(state, {(C, 2): 1})
        assert (found is Unseated.UNDECIDED) == bool(at)
        return tried

    @pytest.mark.parametrize("status", [1, 3, 4])
    @pytest.mark.parametrize(
        ("at", "tried"), [(0, [False, False, True]), (1, [False]), (2, [False, False]), (3, [False, False, True])]
    )
    def test_nothing_is_taken_at_a_bound(
        self, at: int, tried: list[bool], status: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though there may be a solution, and though it may be the cheapest."""
        assert self.stopped(monkeypatch, at, status) == tried

    @staticmethod
    def program() -> module._Program:
        """The most valuable of sixty things, at most seven of each of forty random sets."""
        rng = np.random.default_rng(2)
        sets = rng.integers(0, 2, (40, 60))
        program = module._Program(weights=(-rng.random(60)).tolist(), most=[1] * 60)
        for row in sets:
            program.row(-np.inf, 7, np.flatnonzero(row).tolist())
        return program

    def test_the_bound_can_be_met(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And is met at the same place every time."""
        assert isinstance(module._solve(self.program()), list)
        monkeypatch.setattr(module, "MOST_NODES", 1)
        for _ in range(3):
            assert module._solve(self.program()) is Unseated.UNDECIDED
