import math
from dataclasses import replace

import pytest

from pearl.core.budget import Budget
from pearl.core.choose import Choice, Option
from pearl.core.consider import (
    BORROW_POINTS,
    Lending,
    Settled,
    borrow_more,
    move_cost_s,
    options_for,
    settle,
)
from pearl.core.decision import Gated
from pearl.core.gate import GateReason, Thresholds
from pearl.core.lines import Space
from pearl.core.makespan import Infeasible, Target
from pearl.core.policy import Borrow, Policy
from pearl.core.shape import parse_shape
from pearl.core.toggle import ToggleEstimate
from pearl.records.ids import GpuId
from tests.fleets import COSTS, Told, platform

INF = math.inf
EVERY = Space()
COLOCATED = Space(disaggregated=False)
FREE = replace(COSTS, role_change_s=0, start_s=0, stop_s=0)


def option(text: str, close_s: float, *, borrowed: int = 0, error_s: float = 0.0) -> Option:
    shape, _, bound = text.partition(" append<=")
    return Option(
        target=Target(shape=parse_shape(shape), append_tokens=int(bound or 0)),
        borrowed=borrowed,
        close_s=close_s,
        error_s=error_s,
        infeasible=Infeasible.NO if math.isfinite(close_s) else Infeasible.KV_CAPACITY,
    )


def choice(*options: Option) -> Choice:
    """The first is the best one, or the one of equally good ones that changes least."""
    return Choice(
        best=options[0] if options and math.isfinite(options[0].close_s) else None,
        considered=tuple(sorted(options, key=lambda each: each.close_s)),
        evaluated=len(options),
    )


def policy(told: Told | None = None, *, space: Space = EVERY, borrow: Borrow = Borrow.ANY, **other: object) -> Policy:
    return Policy(name="p", predictor=told or Told({}), space=space, borrow=borrow, **other)  # type: ignore[arg-type]


def said(settled: Settled) -> list[tuple[str, str, bool, str]]:
    return [(each.gate, each.about, each.verdict.passed, each.verdict.reason.value) for each in settled.gates]


def numbers(gated: Gated) -> dict[str, float]:
    return dict(gated.verdict.numbers)


# Which shapes a policy may choose from


def budget(workers: dict[int, int], gpus: int, *, overlap: int = 0, overlap_tp: int = 1) -> Budget:
    return Budget(
        usable=frozenset(GpuId(str(i)) for i in range(gpus)),
        workers=workers,
        lendable=frozenset(),
        overlap=overlap,
        overlap_tp=overlap_tp,
    )


def asked(wants: Policy, there: Budget, borrowed: int = 0) -> list[str]:
    told = Told({})
    options_for(wants, told._predict, platform(*there.workers), there, borrowed, None)
    return told.asked


def test_what_the_policys_space_has() -> None:
    assert asked(policy(), budget({1: 3}, 3)) == ["3C", "1P2D", "2P1D"]
    assert asked(policy(space=Space(disaggregated=False)), budget({1: 2}, 2, overlap=3), 3) == ["5C"]


def test_where_a_mode_needs_more_workers_than_are_left_any_mode_serves() -> None:
    apart = policy(space=Space(colocated=False, tps=(2,)))
    assert asked(apart, budget({1: 4, 2: 2}, 4)) == ["1P1D@tp2"]
    assert asked(apart, budget({1: 2, 2: 1}, 2)) == ["1C@tp2"]
    assert asked(apart, budget({1: 1, 2: 0}, 1)) == []


@pytest.mark.parametrize(
    ("shape", "workers", "gpus", "shapes"),
    [
        ("1P2D", {1: 3}, 3, ["1P2D"]),
        ("1P2D", {1: 9}, 9, ["1P2D"]),
        ("3C@tp2", {1: 6, 2: 3}, 6, ["3C@tp2"]),
        ("1P@tp1+1D@tp2", {1: 3, 2: 1}, 3, ["1P@tp1+1D@tp2"]),
        ("1P1D2C", {1: 4}, 4, ["1P1D2C"]),
        ("1C@tp2+2C@tp1", {1: 4, 2: 2}, 4, ["2C@tp1+1C@tp2"]),
        # Too few: by a worker, by a GPU, by what fits side by side.
        ("1P3D", {1: 3}, 3, ["1P2D", "2P1D"]),
        ("1P1D@tp2", {1: 4, 2: 1}, 4, ["1C@tp2"]),
        # One block of four, and two GPUs elsewhere.
        ("1P@tp4+1D@tp2", {1: 6, 2: 2, 4: 1}, 6, ["1P1D@tp2"]),
        ("1P@tp4+1D@tp2", {1: 6, 2: 3, 4: 1}, 6, ["1P@tp4+1D@tp2"]),
        ("1P@tp3+1D@tp2", {2: 2, 3: 1}, 5, ["1P1D@tp2"]),
        ("1P@tp3+1D@tp2", {2: 3, 3: 1}, 6, ["1P@tp3+1D@tp2"]),
        ("1P@tp1+1D@tp2", {1: 2, 2: 1}, 2, ["1P1D"]),
        ("2C@tp4", {1: 8, 2: 4}, 8, []),
    ],
)
def test_a_static_shape_or_what_is_left_in_its_mode(
    shape: str, workers: dict[int, int], gpus: int, shapes: list[str]
) -> None:
    wanted = parse_shape(shape)
    letters = "".join(shape)
    space = Space(colocated="C" in letters, disaggregated="P" in letters, tps=tuple({pool.tp for pool in wanted.pools}))
    assert asked(policy(space=space, shape=wanted), budget(workers, gpus)) == shapes


def test_the_incumbent_wins_ties() -> None:
    told = Told({"3C": 10.0, "1P2D": 10.0, "2P1D": 10.0})
    for shape in told.times_s:
        found = options_for(policy(), told._predict, platform(1), budget({1: 3}, 3), 0, option(shape, 10.0))
        assert found.best is not None
        assert str(found.best.target) == shape
    assert options_for(policy(), told._predict, platform(1), budget({1: 3}, 3), 0, None).best == option("3C", 10.0)


# What a move costs


@pytest.mark.parametrize(
    ("old", "new", "cost_s"),
    [
        ("4C", "4C", 0.0),
        ("4C", "8C", 0.0),  # in the background
        ("4C", "1C", 0.0),
        ("2P2D", "1P3D", 20 / 4),
        ("2P2D@tp2", "1P3D@tp2", 20 / 4),
        ("4C", "1P3D", 20.0),
        ("4C", "2P6D", 20.0),  # all four change roles, four are new
        # Another tensor parallelism: all that is rebuilt stops and starts.
        ("4C", "2C@tp2", 51.0),
        ("4C", "4C@tp2", 51.0),  # on free GPUs as well, but also on those of all that were there
        ("8C", "2C@tp2", 51 / 2),  # on those of half of them
        # By GPUs: of two tensor parallelisms six GPUs, of which two change roles.
        ("2P@tp1+2D@tp2", "1P@tp1+1C@tp1+2D@tp2", 20 / 6),
    ],
)
def test_a_move_costs_the_share_of_gpus_that_do_not_serve(old: str, new: str, cost_s: float) -> None:
    assert move_cost_s(option(old, 1.0), option(new, 1.0), COSTS) == pytest.approx(cost_s, rel=1e-12)


def test_from_nothing_a_move_costs_nothing() -> None:
    assert move_cost_s(None, option("4C@tp2", 1.0), COSTS) == 0.0


# From a choice to what is worth moving to


def settled(found: Choice, current: Option | None, wants: Policy | None = None) -> Settled:
    return settle(wants or policy(), found, current, FREE)


def test_nothing_to_choose_from_leaves_what_there_is() -> None:
    assert settled(choice(), option("4C", 9.0)) == Settled(option=option("4C", 9.0), gates=())
    assert settled(choice(option("2C", INF)), option("4C", INF)) == Settled(option=None, gates=())
    assert settled(choice(), None) == Settled(option=None, gates=())


def test_from_nothing_the_best_passes() -> None:
    found = settled(choice(option("1P3D", 90.0), option("4C", 95.0)), None)
    assert found.option == option("1P3D", 90.0)
    assert said(found) == [("hysteresis", "1P3D", True, "current_infeasible")]
    assert numbers(found.gates[0]) == {"old_s": INF, "new_s": 90.0, "cost_s": 0.0}


def test_what_serves_already_asks_no_gate() -> None:
    assert settled(choice(option("4C", 90.0), option("1P3D", 95.0)), option("4C", 90.0)) == Settled(
        option=option("4C", 90.0), gates=()
    )


@pytest.mark.parametrize(
    ("current", "best", "close_s", "taken"),
    [
        # Of 100 s: a size any gain, a ratio more than 5, a mode or tensor parallelism more than 10.
        ("4C", "8C", 99.9, True),
        ("2P2D", "1P3D", 94.9, True),
        ("2P2D", "1P3D", 95.0, False),
        ("2P2D", "2P2D append<=256", 94.9, True),
        ("2P2D", "2P2D append<=256", 95.0, False),
        ("4C", "2P2D", 89.9, True),
        ("4C", "2P2D", 90.0, False),
        ("4C", "2C@tp2", 89.9, True),
        ("4C", "2C@tp2", 90.0, False),
    ],
)
def test_a_shape_must_win_by_its_kind(current: str, best: str, close_s: float, taken: bool) -> None:
    now = option(current, 100.0)
    found = settled(choice(option(best, close_s)), now)
    assert found.option == (option(best, close_s) if taken else now)
    assert said(found) == [("hysteresis", best, taken, "gain" if taken else "below_threshold")]


@pytest.mark.parametrize("close_s", [99.91, 100.0, 100.0 + 1e-13, 101.0])
def test_of_what_is_as_good_or_worse_no_gate_is_asked(close_s: float) -> None:
    # One part in a thousand: 99.9 s is a gain (above), 99.91 s none.
    now = option("4C", 100.0)
    assert settled(choice(option("8C", close_s)), now) == Settled(option=now, gates=())
    # Nor of the best of all where it is no better than the near one that was taken.
    found = settled(choice(option("8C", 100.0), option("2P2D", close_s)), option("4C", 200.0))
    assert said(found) == [("hysteresis", "8C", True, "gain")]
    # A thousandth of nothing.
    assert settled(choice(option("8C", 0.0)), option("4C", 0.0)).gates == ()


def test_what_gates_were_asked_about_is_told() -> None:
    found = settled(choice(option("8C", 80.0), option("1P3D", 97.0)), option("2P2D", 100.0))
    assert found.considered == (option("1P3D", 97.0), option("8C", 80.0))


def test_thresholds_are_the_policys() -> None:
    wants = policy(thresholds=Thresholds(ratio=0.5))
    assert settled(choice(option("1P3D", 50.1)), option("2P2D", 100.0), wants).option == option("2P2D", 100.0)
    assert settled(choice(option("1P3D", 49.9)), option("2P2D", 100.0), wants).option == option("1P3D", 49.9)


def test_a_shape_must_win_more_than_the_move_costs() -> None:
    # A mode: 20 s for all four workers.
    for close_s, taken in ((79.9, True), (80.0, False)):
        found = settle(policy(), choice(option("1P3D", close_s)), option("4C", 100.0), COSTS)
        assert (found.option == option("1P3D", close_s)) == taken
        assert numbers(found.gates[0])["cost_s"] == 20.0
        assert found.gates[0].verdict.reason is (GateReason.GAIN if taken else GateReason.BELOW_COST)


def test_the_best_near_one_first_and_then_the_best_of_all_over_that() -> None:
    # 100 -> 80 s by more workers alone; the pair's 71 s are 11.25 % less than those.
    many = choice(option("2P6D", 71.0), option("8C", 80.0), option("4C@tp2", 75.0))
    found = settled(many, option("4C", 100.0))
    assert found.option == option("2P6D", 71.0)
    assert said(found) == [("hysteresis", "8C", True, "gain"), ("hysteresis", "2P6D", True, "gain")]
    assert numbers(found.gates[1])["old_s"] == 80.0
    # 72.5 s would win a lot over 100, but not over what more workers give by themselves.
    found = settled(choice(option("2P6D", 72.5), option("8C", 80.0)), option("4C", 100.0))
    assert found.option == option("8C", 80.0)
    assert said(found) == [("hysteresis", "8C", True, "gain"), ("hysteresis", "2P6D", False, "below_threshold")]


def test_the_second_move_costs_what_it_takes_from_the_first() -> None:
    # 2P1D -> 2P6D costs nothing; on to colocated all eight change roles. The pair of other ratio is near.
    found = settle(policy(), choice(option("8C", 50.0), option("2P6D", 80.0)), option("2P1D", 100.0), COSTS)
    assert said(found) == [("hysteresis", "2P6D", True, "gain"), ("hysteresis", "8C", True, "gain")]
    assert [numbers(gate)["cost_s"] for gate in found.gates] == [0.0, 20.0]


def test_where_the_near_one_is_refused_the_best_is_weighed_against_what_there_is() -> None:
    found = settled(choice(option("8C", 80.0), option("1P3D", 97.0)), option("2P2D", 100.0))
    assert found.option == option("8C", 80.0)
    assert said(found) == [("hysteresis", "1P3D", False, "below_threshold"), ("hysteresis", "8C", True, "gain")]
    assert numbers(found.gates[1])["old_s"] == 100.0


def test_equally_good_ones_count_as_the_first_of_them() -> None:
    # Two ties: the one that changes least comes first, though the other is a little faster.
    found = settled(choice(option("3P5D", 80.0), option("2P6D", 79.95)), option("1P7D", 100.0))
    assert found.option == option("3P5D", 80.0)
    assert said(found) == [("hysteresis", "3P5D", True, "gain")]
    # One part in a thousand is the limit, included.
    at = 80.0 * (1 + 1e-3)
    assert settled(choice(option("3P5D", at), option("2P6D", 80.0)), option("1P7D", 100.0)).option == option("3P5D", at)
    beyond = settled(choice(option("3P5D", 80.1), option("2P6D", 80.0)), option("1P7D", 100.0))
    assert beyond.option == option("2P6D", 80.0)


def test_what_can_serve_takes_over_from_what_cannot() -> None:
    found = settled(choice(option("2C", 500.0)), option("2D1P", INF))
    assert found.option == option("2C", 500.0)
    assert said(found) == [("hysteresis", "2C", True, "current_infeasible")]


def test_a_static_shape_need_not_win_but_what_stands_in_for_it_must() -> None:
    wants = policy(shape=parse_shape("3D1P"))
    found = settled(choice(option("1P3D", 500.0)), option("4C", 100.0), wants)
    assert found.option == option("1P3D", 500.0)
    assert said(found) == [("hysteresis", "1P3D", True, "forced")]
    found = settled(choice(option("2P1D", 96.0)), option("1P2D", 100.0), wants)
    assert found.option == option("1P2D", 100.0)
    assert said(found) == [("hysteresis", "2P1D", False, "below_threshold")]


# Borrowing


def lending(
    times_s: dict[str, float],
    *,
    borrow: Borrow = Borrow.ANY,
    workers: dict[int, int] | None = None,
    overlap: int = 4,
    overlap_tp: int = 1,
    borrowed: int = 0,
    space: Space = COLOCATED,
    toggle_s: float = 10.0,
    per_worker_s: float = 0.0,
    errors_s: dict[str, float] | None = None,
    return_z: float = 2.0,
) -> tuple[Lending, Told]:
    """Four dedicated GPUs and four overlap workers of one GPU, colocated alone, where nothing else is said."""
    told = Told(times_s, errors_s or {})
    there = budget(workers or {1: 4}, 4, overlap=overlap, overlap_tp=overlap_tp)
    wants = policy(told, space=space, borrow=borrow, return_z=return_z)
    about = Lending(
        policy=wants,
        forecast=told._predict,
        platform=platform(*there.workers, *{overlap_tp} - there.workers.keys()),
        budget=there,
        toggle=ToggleEstimate(prior_s=toggle_s, per_worker_s=per_worker_s),
        borrowed=borrowed,
        now_s=1000.0,
    )
    return about, told


GROWING = {"5C": 95.0, "6C": 90.0, "7C": 80.0, "8C": 70.0}


def test_all_are_borrowed_where_all_win_most() -> None:
    about, _ = lending(GROWING)
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("8C", 70.0, borrowed=4)
    assert said(found) == [("borrow", "up to 4 workers", True, "gain")]
    assert numbers(found.gates[0]) == {"dedicated_s": 100.0, "borrowed_s": 70.0, "gain_s": 30.0, "toggle_s": 10.0}


def test_the_number_is_chosen_by_what_is_won_less_what_it_costs() -> None:
    # 7C: 80 + 10 + 3 * 6 = 108; 6C: 70 + 10 + 12 = 92; 5C: 95 + 10 + 6; 8C: 70 + 10 + 24.
    about, _ = lending({**GROWING, "6C": 70.0}, per_worker_s=6.0)
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("6C", 70.0, borrowed=2)
    assert numbers(found.gates[0]) == {"dedicated_s": 100.0, "borrowed_s": 70.0, "gain_s": 30.0, "toggle_s": 22.0}


def test_none_is_borrowed_where_none_pays() -> None:
    about, _ = lending({"8C": 90.0, "5C": 99.0, "6C": 98.0, "7C": 91.0})
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("4C", 100.0)
    assert said(found) == [("borrow", "up to 4 workers", False, "below_cost")]
    assert numbers(found.gates[0])["gain_s"] == 10.0
    paying, _ = lending({"8C": 89.9, "5C": 99.0, "6C": 98.0, "7C": 91.0})
    assert borrow_more(paying, option("4C", 100.0)).option == option("8C", 89.9, borrowed=4)


def test_nobody_to_borrow_asks_nothing() -> None:
    for overlap, borrowed in ((0, 0), (2, 2), (1, 2)):
        about, told = lending(GROWING, overlap=overlap, borrowed=borrowed)
        now = option("4C", 100.0, borrowed=borrowed)
        assert borrow_more(about, now) == Settled(option=now, gates=())
        assert told.asked == []


def test_more_are_borrowed_beside_those_that_are() -> None:
    # Two serve already, of six workers; two more.
    about, _ = lending(GROWING, borrowed=2)
    found = borrow_more(about, option("6C", 90.0, borrowed=2))
    assert found.option == option("8C", 70.0, borrowed=4)
    assert numbers(found.gates[0]) == {"dedicated_s": 90.0, "borrowed_s": 70.0, "gain_s": 20.0, "toggle_s": 10.0}
    about, told = lending({**GROWING, "7C": 60.0, "8C": 59.0}, borrowed=2, per_worker_s=5.0)
    assert borrow_more(about, option("6C", 90.0, borrowed=2)).option == option("7C", 60.0, borrowed=3)
    assert "5C" not in told.asked


def test_what_wins_nothing_with_all_is_not_looked_at_with_fewer() -> None:
    about, told = lending({"8C": 100.0, "6C": 10.0})
    found = borrow_more(about, option("4C", 100.0))
    assert found == Settled(option=option("4C", 100.0), gates=())
    assert told.asked == ["8C"]
    # What a gate refuses is told: 2P6D for 4C and 4 workers, 5 % faster where a mode must win 10.
    about, _ = lending({"2P6D": 95.0}, space=Space(colocated=False))
    found = borrow_more(about, option("4C", 100.0))
    assert said(found) == [("hysteresis", "2P6D", False, "below_threshold")]
    assert found.considered == (option("2P6D", 95.0, borrowed=4),)
    about, _ = lending({})
    assert borrow_more(about, option("4C", 100.0)) == Settled(option=option("4C", 100.0), gates=())


def test_where_nothing_dedicated_can_serve_borrowed_workers_do() -> None:
    about, _ = lending({"4C": 50.0, "2C": 90.0}, workers={1: 0})
    found = borrow_more(about, None)
    assert found.option == option("4C", 50.0, borrowed=4)
    assert said(found) == [("borrow", "up to 4 workers", True, "current_infeasible")]
    # The fewest on a tie, costs included: 90 s with two, 50 + 60 s with four.
    about, _ = lending({"4C": 50.0, "2C": 90.0}, workers={1: 0}, per_worker_s=30.0)
    assert borrow_more(about, None).option == option("2C", 90.0, borrowed=2)
    about, _ = lending({}, workers={1: 0})
    assert borrow_more(about, None) == Settled(option=None, gates=())


def test_all_or_none() -> None:
    times = {**GROWING, "6C": 70.0}
    about, told = lending(times, borrow=Borrow.ALL_OR_NONE, per_worker_s=4.0)
    assert borrow_more(about, option("4C", 100.0)).option == option("8C", 70.0, borrowed=4)
    assert set(told.asked) == {"8C"}
    about, _ = lending(times, borrow=Borrow.ALL_OR_NONE, per_worker_s=5.0)
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("4C", 100.0)
    assert said(found) == [("borrow", "up to 4 workers", False, "below_cost")]


@pytest.mark.parametrize("borrow", [Borrow.ALWAYS, Borrow.SEEDING])
def test_all_without_asking_what_it_costs(borrow: Borrow) -> None:
    about, _ = lending({**GROWING, "8C": 99.0}, borrow=borrow)
    assert borrow_more(about, option("4C", 100.0)) == Settled(
        option=option("8C", 99.0, borrowed=4), gates=(), considered=(option("8C", 99.0, borrowed=4),)
    )
    # Not where it would take longer.
    about, _ = lending({"8C": 100.0}, borrow=borrow)
    assert borrow_more(about, option("4C", 100.0)).option == option("4C", 100.0)


@pytest.mark.parametrize("borrow", [Borrow.ANY, Borrow.ALL_OR_NONE, Borrow.ALWAYS, Borrow.SEEDING])
def test_what_would_have_to_go_back_at_once_is_not_borrowed(borrow: Borrow) -> None:
    # Due 2 * 26.5 + 4 = 57 s before the batch closes: now, were it a tenth nearer, and 6 s of waking.
    about, _ = lending({"8C": 70.0}, borrow=borrow, errors_s={"8C": 26.5})
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("4C", 100.0)
    assert said(found) == [("borrow", "8C", False, "due_at_once")]
    assert numbers(found.gates[0]) == {
        "dedicated_s": 100.0,
        "borrowed_s": 70.0,
        "now_s": 1000.0,
        "nearer_s": 57.0,
        "error_s": 26.5,
        "return_by_s": 1000.0,
    }
    assert found.considered == (option("8C", 70.0, borrowed=4, error_s=26.5),)
    about, _ = lending({"8C": 70.0}, borrow=borrow, errors_s={"8C": 26.4})
    assert borrow_more(about, option("4C", 100.0)).option == option("8C", 70.0, borrowed=4, error_s=26.4)
    # Nothing is nearer than now.
    about, _ = lending({"8C": 5.0}, borrow=borrow)
    assert numbers(borrow_more(about, option("4C", 100.0)).gates[0])["nearer_s"] == 0.0
    # Nor is anything known of what serves where nothing does.
    about, _ = lending({"4C": 5.0}, borrow=borrow, workers={1: 0})
    found = borrow_more(about, None)
    assert (found.option, numbers(found.gates[0])["dedicated_s"]) == (None, INF)


def test_where_all_would_have_to_go_back_fewer_are_not_borrowed_either() -> None:
    about, told = lending(GROWING, errors_s={"8C": 33.0})
    found = borrow_more(about, option("4C", 100.0))
    assert (found.option, said(found)) == (option("4C", 100.0), [("borrow", "8C", False, "due_at_once")])
    assert told.asked == ["8C"]


def test_of_fewer_those_that_would_have_to_go_back_are_left_out() -> None:
    times = {"8C": 80.0, "7C": 40.0, "6C": 60.0}
    about, _ = lending(times)
    assert borrow_more(about, option("4C", 100.0)).option == option("7C", 40.0, borrowed=3)
    about, _ = lending(times, errors_s={"7C": 18.0})
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("6C", 60.0, borrowed=2)
    assert said(found) == [("borrow", "up to 4 workers", True, "gain"), ("borrow", "7C", False, "due_at_once")]
    assert numbers(found.gates[1])["borrowed_s"] == 40.0
    assert [str(each.target) for each in found.considered] == ["6C", "7C", "8C"]
    # Of several the fastest: 7C again, though 6C comes first.
    about, _ = lending(times, errors_s={"7C": 18.0, "6C": 27.0})
    found = borrow_more(about, option("4C", 100.0))
    assert said(found) == [("borrow", "up to 4 workers", True, "gain"), ("borrow", "7C", False, "due_at_once")]
    assert found.option == option("8C", 80.0, borrowed=4)


def test_the_cost_of_moving_counts_beside_that_of_borrowing() -> None:
    # From 4C to 2P6D all four change roles: 20 s beside 10.
    about, _ = lending({"2P6D": 69.9}, space=Space(colocated=False), borrow=Borrow.ALL_OR_NONE)
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("2P6D", 69.9, borrowed=4)
    assert numbers(found.gates[0])["toggle_s"] == 30.0
    about, _ = lending({"2P6D": 70.0}, space=Space(colocated=False), borrow=Borrow.ALL_OR_NONE)
    assert borrow_more(about, option("4C", 100.0)).option == option("4C", 100.0)


def test_some_are_looked_at_in_the_modes_of_none_and_of_all() -> None:
    # All: 2P4D is best. With one or two more both modes are looked at, with their ratios.
    times = {"2P4D": 35.0, "6C": 60.0, "5C": 80.0, "1P4D": 30.0}
    about, told = lending(times, overlap=2, space=Space(), toggle_s=1.0)
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("1P4D", 30.0, borrowed=1)
    assert {"5C", "1P4D", "4P1D", "6C", "1P5D"} <= set(told.asked)


def test_the_number_once_chosen_all_modes_are_looked_at_with_it() -> None:
    # None and all are colocated; with one, pairs are best by far.
    times = {"6C": 80.0, "5C": 80.0, "2P3D": 40.0}
    about, _ = lending(times, overlap=2, space=Space(), per_worker_s=1.0)
    found = borrow_more(about, option("4C", 100.0))
    assert found.option == option("2P3D", 40.0, borrowed=1)
    assert numbers(found.gates[0])["borrowed_s"] == 80.0
    # Not where they would have to go back at once.
    about, _ = lending(times, overlap=2, space=Space(), per_worker_s=1.0, errors_s={"2P3D": 18.0})
    assert borrow_more(about, option("4C", 100.0)).option == option("5C", 80.0, borrowed=1)


def test_borrowed_workers_stand_beside_those_of_another_tensor_parallelism() -> None:
    # None: 4C; all: 2C@tp2 of borrowed workers beside them; one: the same.
    times = {"4C@tp1+2C@tp2": 70.0, "4C@tp1+1C@tp2": 71.0}
    about, _ = lending(times, overlap=2, overlap_tp=2, space=Space(disaggregated=False), per_worker_s=5.0)
    assert borrow_more(about, option("4C", 100.0)).option == option("4C@tp1+1C@tp2", 71.0, borrowed=1)


def test_hybrids_are_looked_at_with_some_where_all_are_one() -> None:
    times = {"2P2D2C": 70.0, "1P2D2C": 71.0}
    space = Space(colocated=False, disaggregated=False, hybrid=True)
    about, told = lending(times, overlap=2, space=space, per_worker_s=5.0)
    assert borrow_more(about, option("4C", 100.0)).option == option("1P2D2C", 71.0, borrowed=1)
    assert "1P4D" not in told.asked


def test_append_prefill_is_kept_where_some_are_looked_at() -> None:
    times = {"1P5D append<=256": 60.0, "1P4D append<=256": 61.0}
    about, _ = lending(times, overlap=2, space=Space(colocated=False, append_tokens=(0, 256)), per_worker_s=5.0)
    found = borrow_more(about, option("1P3D append<=256", 100.0))
    assert found.option == option("1P4D append<=256", 61.0, borrowed=1)


@pytest.mark.parametrize(
    ("overlap", "numbers_"),
    [
        (1, []),
        (2, [1]),
        (5, [1, 2, 3, 4]),
        (6, [1, 3, 5]),
        (9, [1, 3, 5, 7]),
        (10, [1, 4, 7]),
        (13, [1, 4, 7, 10]),
        (14, [1, 5, 9, 13]),
        (100, [1, 26, 51, 76]),
    ],
)
def test_at_most_four_numbers_are_looked_at_beside_all_and_none(overlap: int, numbers_: list[int]) -> None:
    assert BORROW_POINTS == 4
    about, told = lending({f"{4 + n}C": 100.0 - n / 2 for n in range(1, 101)}, overlap=overlap)
    borrow_more(about, option("4C", 100.0))
    assert told.asked == [f"{4 + overlap}C", *(f"{4 + n}C" for n in numbers_)]


def test_numbers_begin_beyond_those_that_are_borrowed() -> None:
    # Between 3 and 12 two apart, from 4 on.
    about, told = lending({f"{4 + n}C": 100.0 - n / 2 for n in range(1, 13)}, overlap=12, borrowed=3)
    borrow_more(about, option("7C", 99.0, borrowed=3))
    assert told.asked == ["16C", "8C", "10C", "12C", "14C"]
