from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pearl.core.budget import Budget
from pearl.core.choose import FEW, FEWEST, LINES, TIE, Choice, Moves, Option, choose, first_round, moves, search
from pearl.core.distribution import constant, distribution_of
from pearl.core.fluid import FluidPredictor
from pearl.core.lines import POINTS, Line, Space, lines_of, spread
from pearl.core.makespan import SERVING_ROLES, Candidates, Infeasible, Predictions, Profile, Target, candidates_of
from pearl.core.progress import fresh_batch
from pearl.core.shape import Shape, parse_shape
from pearl.core.state import Role
from pearl.core.workload import WorkloadProfile
from tests.fleets import Formula, Told, platform, situation

ANY = Space()
COLOCATED = Space(disaggregated=False)
PAIRS = Space(colocated=False)


def budget(workers: dict[int, int], *, overlap: int = 0, overlap_tp: int = 1) -> Budget:
    return Budget(usable=frozenset(), workers=workers, lendable=frozenset(), overlap=overlap, overlap_tp=overlap_tp)


def shapes(
    space: Space,
    workers: dict[int, int],
    *,
    borrowed: int = 0,
    overlap: int | None = None,
    overlap_tp: int = 1,
    pairs: set[tuple[int, int]] | None = None,
) -> list[list[str]]:
    """Each line as its shapes, in order; every one says how many are borrowed."""
    there = budget(workers, overlap=borrowed if overlap is None else overlap, overlap_tp=overlap_tp)
    lines = lines_of(platform(*workers, pairs=pairs), there, space, borrowed)
    assert all(line.borrowed == borrowed for line in lines)
    return [[str(line.target(place)) for place in range(line.length)] for line in lines]


# Which shapes there are


def test_colocated_is_one_shape_for_each_tensor_parallelism() -> None:
    assert shapes(COLOCATED, {1: 5, 2: 2, 4: 1}) == [["5C"], ["2C@tp2"], ["1C@tp4"]]


def test_tensor_parallelisms_larger_than_any_node_are_no_shapes() -> None:
    assert shapes(COLOCATED, {1: 3, 2: 1, 4: 0}) == [["3C"], ["1C@tp2"]]
    assert shapes(Space(hybrid=True), {1: 0, 2: 0}) == []
    assert lines_of(platform(1, 2), budget({}), Space(hybrid=True), 0) == []


def test_a_space_allows_some_tensor_parallelisms() -> None:
    assert shapes(replace(COLOCATED, tps=(2, 8)), {1: 5, 2: 2, 4: 1}) == [["2C@tp2"]]
    assert shapes(replace(COLOCATED, tps=()), {1: 5}) == []


def test_pairs_of_one_tensor_parallelism_share_all_workers() -> None:
    assert shapes(PAIRS, {1: 4}) == [["1P3D", "2P2D", "3P1D"]]
    assert shapes(PAIRS, {1: 2}) == [["1P1D"]]
    assert shapes(PAIRS, {1: 1}) == []


def test_large_workers_of_a_pair_take_the_place_of_small_ones() -> None:
    # Eight GPUs: each worker of tp 2 takes two of them, at least one GPU is left for the other role.
    assert shapes(PAIRS, {1: 8, 2: 4}, pairs={(1, 2)}) == [["6P@tp1+1D@tp2", "4P@tp1+2D@tp2", "2P@tp1+3D@tp2"]]
    assert shapes(PAIRS, {1: 8, 2: 4}, pairs={(2, 1)}) == [["1P@tp2+6D@tp1", "2P@tp2+4D@tp1", "3P@tp2+2D@tp1"]]
    assert shapes(PAIRS, {1: 5, 4: 1}, pairs={(4, 1)}) == [["1P@tp4+1D@tp1"]]
    # Exactly used up: nothing is left.
    assert shapes(PAIRS, {1: 4, 4: 1}, pairs={(4, 1)}) == []
    assert shapes(PAIRS, {1: 4, 4: 0}, pairs={(4, 1)}) == []
    # An odd GPU beside one block: it serves.
    assert shapes(PAIRS, {1: 3, 2: 1}, pairs={(2, 1)}) == [["1P@tp2+1D@tp1"]]
    # Workers that sit across blocks: more small ones than whole blocks, or fewer.
    assert shapes(PAIRS, {1: 6, 2: 2}, pairs={(2, 1)}) == [["1P@tp2+4D@tp1", "2P@tp2+2D@tp1"]]
    assert shapes(PAIRS, {2: 2, 4: 2}, pairs={(4, 2)}) == []


def test_pairs_whose_tensor_parallelisms_do_not_divide_are_left_out() -> None:
    assert shapes(PAIRS, {2: 6, 3: 4}, pairs={(2, 3), (3, 2)}) == []


def test_only_pairs_that_the_platform_allows() -> None:
    assert [line[0] for line in shapes(PAIRS, {1: 4, 2: 2})] == ["1P3D", "2P@tp1+1D@tp2", "1P@tp2+2D@tp1", "1P1D@tp2"]
    assert shapes(PAIRS, {1: 4, 2: 2}, pairs={(2, 2)}) == [["1P1D@tp2"]]
    assert shapes(Space(colocated=False, disaggregated=False, hybrid=True), {1: 4, 2: 4}, pairs={(1, 2)}) == []


def test_append_prefill_is_a_choice_of_its_own_with_pairs_alone() -> None:
    space = Space(append_tokens=(0, 256))
    assert shapes(space, {1: 3}) == [["3C"], ["1P2D", "2P1D"], ["1P2D append<=256", "2P1D append<=256"]]


def test_hybrids_are_behind_a_switch() -> None:
    assert shapes(Space(), {1: 4}) == [["4C"], ["1P3D", "2P2D", "3P1D"]]
    space = Space(colocated=False, disaggregated=False, hybrid=True, append_tokens=(0, 8))
    assert shapes(space, {1: 4}) == [
        ["1P2D1C", "2P1D1C"],
        ["1P2D1C append<=8", "2P1D1C append<=8"],
        ["1P1D2C"],
        ["1P1D2C append<=8"],
    ]
    assert shapes(space, {2: 3})[0] == ["1P1D1C@tp2"]
    assert shapes(space, {1: 4, 2: 2}, pairs={(1, 1)}) == shapes(space, {1: 4})
    assert shapes(space, {1: 2}) == shapes(space, {1: 1}) == shapes(space, {1: 0}) == []
    # Many: some numbers of colocated workers, from 1 to all but two: 1 + 74 i^2 / 225 for i = 0 .. 7, and so from the other end.
    many = shapes(replace(space, append_tokens=(0,)), {1: 40})
    numbers = (1, 2, 4, 6, 9, 13, 17, 22, 26, 30, 33, 35, 37, 38)
    assert [line[0] for line in many] == [f"1P{39 - c}D{c}C" for c in numbers]
    assert many[-1] == ["1P1D38C"]


def test_tensor_parallelisms_of_which_a_budget_says_nothing_have_no_workers() -> None:
    two = platform(1, 2, pairs={(2, 1)})
    assert lines_of(two, budget({1: 4}), PAIRS, 0) == []
    assert lines_of(platform(1, 2), budget({}, overlap=1), PAIRS, 1) == []
    assert lines_of(two, budget({2: 2}, overlap=1, overlap_tp=2), PAIRS, 1) == []


def test_lines_ask_for_what_their_targets_ask_for() -> None:
    # So that nothing is predicted twice.
    there = budget({1: 8, 2: 4, 4: 2}, overlap=1, overlap_tp=4)
    for borrowed in (0, 1):
        lines = lines_of(platform(1, 2, 4), there, Space(hybrid=True, append_tokens=(0, 8)), borrowed)
        targets = [line.target(place) for line in lines for place in range(line.length)]
        asked, meant = first_round([[line] for line in lines]), candidates_of(targets)
        assert len(asked) == len(meant) > 15
        for role in SERVING_ROLES:
            assert asked.workers[role].tolist() == meant.workers[role].tolist()
            assert asked.tp[role].tolist() == meant.tp[role].tolist()
        assert asked.append_tokens.tolist() == meant.append_tokens.tolist()
        assert asked.second.tolist() == meant.second.tolist()
        assert asked.second_tp.tolist() == meant.second_tp.tolist()


# With borrowed workers


def test_borrowed_workers_join_the_role_that_has_their_tensor_parallelism() -> None:
    assert shapes(Space(), {1: 2}, borrowed=3) == [["5C"], ["1P4D", "2P3D", "3P2D", "4P1D"]]
    hybrid = Space(colocated=False, disaggregated=False, hybrid=True)
    assert shapes(hybrid, {1: 1}, borrowed=2) == [["1P1D1C"]]
    # Nothing but borrowed ones.
    assert shapes(Space(), {1: 0}, borrowed=2) == [["2C"], ["1P1D"]]


def test_borrowed_workers_stand_beside_colocated_ones_of_another_tensor_parallelism() -> None:
    assert shapes(COLOCATED, {1: 4, 2: 2, 4: 1}, borrowed=3, overlap_tp=2) == [
        ["4C@tp1+3C@tp2"],
        ["5C@tp2"],
        ["3C@tp2+1C@tp4"],
    ]
    assert shapes(COLOCATED, {1: 4, 2: 2}, borrowed=1, overlap_tp=2) == [["4C@tp1+1C@tp2"], ["3C@tp2"]]
    # Where none is dedicated there is nothing to stand beside.
    assert shapes(COLOCATED, {1: 0, 2: 0}, borrowed=3, overlap_tp=2) == [["3C@tp2"]]


def test_all_hybrids_where_all_shapes_are_asked_for() -> None:
    """Of 40 workers 1 to 38 colocated ones, the rest pairs; else some numbers of colocated ones."""
    hybrid = Space(colocated=False, disaggregated=False, hybrid=True)
    every = [each for line in shapes(replace(hybrid, exhaustive=True), {1: 40}) for each in line]
    assert every == [f"{x}P{40 - c - x}D{c}C" for c in range(1, 39) for x in range(1, 40 - c)]
    assert 10 < len(shapes(hybrid, {1: 40})) <= POINTS


def test_borrowed_workers_of_another_tensor_parallelism_join_no_pair_and_no_hybrid() -> None:
    assert shapes(PAIRS, {1: 4, 2: 2}, borrowed=1, overlap_tp=2, pairs={(1, 1)}) == []
    hybrid = Space(colocated=False, disaggregated=False, hybrid=True)
    assert shapes(hybrid, {1: 8, 2: 2}, borrowed=1, overlap_tp=2) == [["1P1D1C@tp2"]]
    assert shapes(PAIRS, {1: 8, 2: 4, 4: 2}, borrowed=1, overlap_tp=4, pairs={(1, 2), (2, 1)}) == []


def test_borrowed_workers_are_all_in_the_role_of_their_tensor_parallelism() -> None:
    # Four dedicated GPUs, and two borrowed workers of tp 2: those can be all of the role.
    assert shapes(PAIRS, {1: 4, 2: 2}, borrowed=2, overlap_tp=2, pairs={(2, 1)}) == [["2P@tp2+4D@tp1", "3P@tp2+2D@tp1"]]
    assert shapes(PAIRS, {1: 4, 2: 2}, borrowed=2, overlap_tp=2, pairs={(1, 2)}) == [["4P@tp1+2D@tp2", "2P@tp1+3D@tp2"]]
    # Two borrowed ones of tp 1: they can be all of the small role, so that every dedicated GPU is of a large worker.
    assert shapes(PAIRS, {1: 4, 2: 2}, borrowed=2, overlap_tp=1, pairs={(2, 1)}) == [["1P@tp2+4D@tp1", "2P@tp2+2D@tp1"]]
    # No dedicated GPU for the other role.
    assert shapes(PAIRS, {1: 0, 2: 0}, borrowed=2, overlap_tp=2, pairs={(2, 1)}) == []
    assert shapes(PAIRS, {1: 1, 2: 0}, borrowed=2, overlap_tp=2, pairs={(2, 1)}) == [["2P@tp2+1D@tp1"]]


def test_no_more_are_borrowed_than_there_are_nor_of_what_is_not_allowed() -> None:
    assert shapes(Space(), {1: 2}, borrowed=3, overlap=2) == []
    assert shapes(Space(), {1: 2}, borrowed=2, overlap=2) != []
    assert shapes(replace(COLOCATED, tps=(1,)), {1: 2, 2: 1}, borrowed=1, overlap_tp=2) == []


def test_a_line_knows_its_second_tensor_parallelism() -> None:
    there = budget({1: 4, 2: 2}, overlap=3, overlap_tp=2)
    beside, joined = lines_of(platform(1, 2), there, COLOCATED, 3)
    assert beside == Line(
        prefill_tp=1,
        decode_tp=1,
        colocated_tp=1,
        length=1,
        first=(0, 0, 4),
        step=(0, 0, 0),
        append_tokens=0,
        borrowed=3,
        second=3,
        second_tp=2,
    )
    assert (joined.first, joined.second, joined.second_tp, joined.colocated_tp) == ((0, 0, 5), 0, 1, 2)


def test_pools_are_in_one_order_whichever_was_first() -> None:
    there = budget({4: 1}, overlap=3, overlap_tp=2)
    (line,) = lines_of(platform(2, 4), there, replace(COLOCATED, tps=(2, 4)), 3)[1:]
    assert (line.colocated_tp, line.second_tp) == (4, 2)
    assert str(line.target(0)) == "3C@tp2+1C@tp4"
    told = Told({"3C@tp2+1C@tp4": 7.0})
    best = choose(told._predict, platform(2, 4), there, COLOCATED, borrowed=3).best
    assert best is not None
    assert (str(best.target), best.close_s, best.borrowed) == ("3C@tp2+1C@tp4", 7.0, 3)


# Which one is best


def chosen(
    times_s: dict[str, float], workers: dict[int, int], space: Space = ANY, incumbent: str | None = None
) -> Choice:
    now = None if incumbent is None else target(incumbent)
    return choose(Told(times_s)._predict, platform(*workers), budget(workers), space, incumbent=now)


def target(text: str) -> Target:
    shape, _, bound = text.partition(" append<=")
    return Target(shape=parse_shape(shape), append_tokens=int(bound or 0))


def best(choice: Choice) -> str:
    assert choice.best is not None
    return str(choice.best.target)


def test_the_fastest_shape_wins_and_the_best_of_each_line_is_reported() -> None:
    choice = chosen({"4C": 50.0, "1P3D": 40.0, "2P2D": 30.0}, {1: 4})
    assert choice.best == Option(target=target("2P2D"), borrowed=0, close_s=30.0, error_s=0.0, infeasible=Infeasible.NO)
    assert [(str(each.target), each.close_s) for each in choice.considered] == [("2P2D", 30.0), ("4C", 50.0)]
    assert choice.evaluated == 4


def test_what_cannot_serve_is_reported_and_never_chosen() -> None:
    choice = chosen({"2P2D": 90.0}, {1: 4})
    assert best(choice) == "2P2D"
    assert [each.infeasible for each in choice.considered] == [Infeasible.NO, Infeasible.KV_CAPACITY]
    assert np.isinf([choice.considered[1].close_s, choice.considered[1].error_s]).all()
    nothing = chosen({}, {1: 4})
    assert nothing.best is None
    assert [str(each.target) for each in nothing.considered] == ["4C", "1P3D"]
    assert nothing.evaluated == 4


def test_without_gpus_nothing_is_asked() -> None:
    told = Told({})
    assert choose(told._predict, platform(1), budget({1: 0}), Space()) == Choice(best=None, considered=(), evaluated=0)
    assert told.asked == []


def test_the_error_of_a_prediction_is_passed_on() -> None:
    told = Told({"1C": 9.0}, {"1C": 2.5})
    option = choose(told._predict, platform(1), budget({1: 1}), Space()).best
    assert option is not None
    assert option.error_s == 2.5


def test_equally_good_ones_are_a_tie_up_to_one_part_in_a_thousand() -> None:
    # 4C stays for 0.1 % and no more.
    assert TIE == 1e-3
    times = {"2P2D": 1000.0}
    assert best(chosen({**times, "4C": 1000.9}, {1: 4}, incumbent="4C")) == "4C"
    assert best(chosen({**times, "4C": 1000.0 * (1 + TIE)}, {1: 4}, incumbent="4C")) == "4C"
    assert best(chosen({**times, "4C": 1001.1}, {1: 4}, incumbent="4C")) == "2P2D"


def test_ties_go_to_what_changes_fewer_workers() -> None:
    times = {"1P3D": 10.0, "2P2D": 10.0, "3P1D": 10.0, "4C": 10.0}
    assert best(chosen(times, {1: 4}, incumbent="3P1D")) == "3P1D"
    assert best(chosen(times, {1: 4}, incumbent="1P3D")) == "1P3D"
    assert best(chosen(times, {1: 4}, incumbent="4C")) == "4C"
    # One more of each: 2P2D adds two decode workers, 3P1D one of each.
    assert best(chosen({"2P2D": 10.0, "3P1D": 10.0}, {1: 4}, incumbent="2P1D")) == "2P2D"
    # Both add two workers: the first of them.
    assert best(chosen({"2P2D": 10.0, "1P3D": 10.0}, {1: 4}, incumbent="1P1D")) == "1P3D"


def test_ties_without_difference_in_changes_go_to_no_append_then_colocated_then_the_fastest() -> None:
    space = Space(append_tokens=(0, 256))
    every = {"2C": 10.0, "1P1D": 10.0, "1P1D append<=256": 10.0}
    assert best(chosen(every, {1: 2}, space)) == "2C"
    del every["2C"]
    assert best(chosen(every, {1: 2}, space)) == "1P1D"
    assert best(chosen({"2P2D": 10.0, "1P3D": 10.001, "3P1D": 9.999}, {1: 4})) == "3P1D"
    # Slower ones within the tie, all the same: append-prefill and pairs have to win more than a tie.
    assert best(chosen({"2C": 10.005, "1P1D": 10.0}, {1: 2})) == "2C"
    assert best(chosen({"1P1D": 10.005, "1P1D append<=256": 10.0}, {1: 2}, space)) == "1P1D"


def test_another_bound_of_append_prefill_is_a_change() -> None:
    space = Space(append_tokens=(0, 256))
    both = {"1P1D": 10.0, "1P1D append<=256": 10.0}
    assert best(chosen(both, {1: 2}, space, incumbent="1P1D append<=256")) == "1P1D append<=256"
    assert best(chosen(both, {1: 2}, space, incumbent="1P1D")) == "1P1D"


def test_ties_of_lines_go_to_the_first() -> None:
    choice = chosen({"2C": 10.0, "1P1D": 10.0, "1C@tp2": 10.0}, {1: 2, 2: 1})
    assert [str(each.target) for each in choice.considered][:3] == ["2C", "1C@tp2", "1P1D"]


# Coarse to fine


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (0, 0, [0]),
        (3, 5, [3, 4, 5]),
        (0, 15, list(range(16))),
        (20, 35, list(range(20, 36))),
        (1, 0, []),
        # Sixteen, of which the i-th is (2 i / 15)^2 / 2 of the way for i = 0 .. 7, and the others as far from the other end.
        # Of 64: 128 i^2 / 225 = 0, 0.6, 2.3, 5.1, 9.1, 14.2, 20.5, 27.9.
        (0, 64, [0, 1, 2, 5, 9, 14, 20, 28, 36, 44, 50, 55, 59, 62, 63, 64]),
        (100, 164, [100, 101, 102, 105, 109, 114, 120, 128, 136, 144, 150, 155, 159, 162, 163, 164]),
        # Of 16: 0, 0.1, 0.6, 1.3, 2.3, 3.6, 5.1, 7.0; the same number counts once.
        (0, 16, [0, 1, 2, 4, 5, 7, 9, 11, 12, 14, 15, 16]),
    ],
)
def test_places_are_denser_at_both_ends(low: int, high: int, numbers: list[int]) -> None:
    assert spread(low, high).tolist() == numbers


def test_a_first_round_of_sixteen_then_closer_around_the_best() -> None:
    # 65 ratios; the best is 30P36D, place 29. First round: as above for 64. Its best is place 28, between 20 and 36: there at
    # 16 places from 20 on, as above for 16. Then 29 is best, between 28 and 31; then its neighbours are known.
    told = Told({f"{p}P{66 - p}D": 100.0 + abs(p - 30) for p in range(1, 66)})
    choice = choose(told._predict, platform(1), budget({1: 66}), PAIRS)
    assert best(choice) == "30P36D"
    assert choice.evaluated == len(told.asked) == len(set(told.asked))
    assert POINTS == 16
    first = (0, 1, 2, 5, 9, 14, 20, 28, 36, 44, 50, 55, 59, 62, 63, 64)
    second = (21, 22, 24, 25, 27, 29, 31, 32, 34, 35)
    assert told.asked == [f"{place + 1}P{65 - place}D" for place in (*first, *second, 30)]


@pytest.mark.parametrize("best_place", [1, 2, 3, 17, 64, 125, 126, 127])
def test_the_best_ratio_is_found_wherever_it_is(best_place: int) -> None:
    formula = Formula(lambda each: 100.0 + abs(each.shape.pools[0].workers - best_place))
    choice = choose(formula.forecast(*known()), platform(1), budget({1: 128}), PAIRS)
    assert best(choice) == f"{best_place}P{128 - best_place}D"
    assert choice.evaluated < 40


@pytest.mark.parametrize("best_place", [2, 5, 9, 990, 994, 998])
def test_the_best_ratio_is_found_between_an_end_and_what_is_next_to_it(best_place: int) -> None:
    # Of 999 ratios the first round looks at 0 and 9, and at as many at the other end.
    formula = Formula(lambda each: 100.0 + abs(each.shape.pools[0].workers - best_place))
    choice = choose(formula.forecast(*known()), platform(1), budget({1: 1000}), PAIRS)
    assert best(choice) == f"{best_place}P{1000 - best_place}D"


@pytest.mark.parametrize("colocated", [1, 3, 5, 16, 24, 36, 38])
def test_the_best_hybrid_is_found_beside_any_number_of_colocated_workers(colocated: int) -> None:
    # Of 40 workers; the first round looks at 14 numbers of them, of which 3, 5, 16 and 36 are none.
    def seconds(each: Target) -> float:
        counts = {pool.role: pool.workers for pool in each.shape.pools}
        return (
            100.0
            + abs(counts[Role.COLOCATED] - colocated)
            + abs(counts[Role.PREFILL] - 1) / 100
            - each.append_tokens / 10
        )

    hybrid = Space(colocated=False, disaggregated=False, hybrid=True, append_tokens=(0, 8))
    choice = choose(Formula(seconds).forecast(*known()), platform(1), budget({1: 40}), hybrid)
    assert best(choice) == f"1P{39 - colocated}D{colocated}C append<=8"
    assert choice.evaluated < 400


def test_where_pairs_are_best_hybrids_are_not_looked_at_again() -> None:
    space = Space(colocated=False, hybrid=True)
    rounds = Rounds(lambda each: 50.0 - (len(each.shape.pools) == 2))
    search(rounds, lines_of(platform(1), budget({1: 16}), space, 0), space, None)
    assert len(rounds.asked) == 1


def test_lines_of_which_all_is_known_keep_no_other_from_being_looked_at_more_closely() -> None:
    # Ten lines of one or two shapes are better than the first round of the long one, and there is no more to look at.
    found = search(
        Rounds(lambda each: 50.0 + abs(each.shape.pools[0].workers - 30) if each.shape.workers == 66 else 50.5),
        [*(colocated(2**tp) for tp in range(5)), *(pairs(tp, 2) for tp in range(1, 6)), pairs(1, 65)],
        Space(),
        None,
    )
    assert best(found) == "30P36D"


def test_all_are_asked_where_that_is_wanted() -> None:
    # Two valleys: only looking everywhere finds the narrow one.
    times = {f"{p}P{40 - p}D": 100.0 + abs(p - 10) for p in range(1, 40)} | {"33P7D": 50.0}
    choice = chosen(times, {1: 40}, replace(PAIRS, exhaustive=True))
    assert (best(choice), choice.evaluated) == ("33P7D", 39)
    coarse = chosen(times, {1: 40}, PAIRS)
    assert (best(coarse), coarse.evaluated < 39) == ("10P30D", True)


def test_only_the_best_lines_are_looked_at_more_closely() -> None:
    # Ten lines of one mode, told apart by the bound of append-prefill: each worse than the one before. 16 places of each, and on
    # the best eight 11 more, as above.
    space = replace(PAIRS, append_tokens=tuple(range(10)))
    asked: dict[int, int] = {}

    def seconds(each: Target) -> float:
        asked[each.append_tokens] = asked.get(each.append_tokens, 0) + 1
        return 100.0 + 100 * each.append_tokens + abs(each.shape.pools[0].workers - 30)

    choice = choose(Formula(seconds).forecast(*known()), platform(1), budget({1: 66}), space)
    assert [each.target.append_tokens for each in choice.considered] == list(range(10))
    assert LINES == 8
    assert [asked[bound] for bound in range(10)] == [27] * 8 + [16] * 2
    assert choice.evaluated == 8 * 27 + 2 * 16


def known() -> tuple[Profile, object]:
    about = situation()
    return about.profile, about.progress


@pytest.mark.parametrize("gpus", [32, 64, 128])
@pytest.mark.parametrize("seed", range(4))
def test_coarse_finds_what_looking_everywhere_finds(gpus: int, seed: int) -> None:
    rng = np.random.default_rng(1000 * gpus + seed)
    work = WorkloadProfile(
        turns=distribution_of(np.maximum(1, rng.lognormal(rng.uniform(1, 3), 0.6, 200).round())),
        prompt_tokens=constant(rng.uniform(200, 4000)),
        new_tokens=distribution_of(rng.exponential(rng.uniform(50, 3000), 100)),
        generated_tokens=constant(rng.uniform(20, 600)),
        env_s=distribution_of(rng.exponential(rng.uniform(0.1, 10), 100)),
    )
    on = platform(1, 2, 4, 8)
    progress = fresh_batch(int(rng.choice([2, 4, 8, 32])), 16, batches=int(rng.choice([1, 2])))
    forecast = FluidPredictor().forecast(Profile(workload=work, platform=on), progress)
    there = budget({tp: gpus // tp for tp in (1, 2, 4, 8)})
    space = Space(append_tokens=(0, 256))
    coarse = choose(forecast, on, there, space)
    whole = choose(forecast, on, there, replace(space, exhaustive=True))
    assert coarse.best is not None
    assert whole.best is not None
    assert coarse.best.close_s <= whole.best.close_s * (1 + 2 * TIE)
    assert coarse.evaluated < whole.evaluated


# Rounds


class Rounds:
    """Answers with `seconds`; keeps what was asked for, round by round."""

    def __init__(self, seconds: Callable[[Target], float]) -> None:
        self.asked: list[list[str]] = []
        self._formula = Formula(seconds)

    def __call__(self, candidates: Candidates) -> Predictions:
        self.asked.append([str(candidates.target(index)) for index in range(len(candidates))])
        return self._formula.forecast(*known())(candidates)


def pairs(tp: int, length: int, append_tokens: int = 0) -> Line:
    """As many ratios of prefill at tp and decode at 1, of `length` + 1 workers."""
    return Line(
        prefill_tp=tp,
        decode_tp=1,
        colocated_tp=1,
        length=length,
        first=(1, length, 0),
        step=(1, -1, 0),
        append_tokens=append_tokens,
        borrowed=0,
    )


def colocated(tp: int) -> Line:
    return replace(pairs(1, 1), colocated_tp=tp, first=(0, 0, 3), step=(0, 0, 0))


def texts(lines: Sequence[Line]) -> list[str]:
    return [str(line.target(place)) for line in lines for place in range(line.length)]


PLAIN, APPEND = [pairs(1, 16), pairs(2, 16), pairs(4, 16)], [pairs(1, 16, 8), pairs(2, 16, 8), pairs(4, 16, 8)]


def test_few_lines_are_looked_at_whole() -> None:
    # Twelve, at 16 places each, of which there are no more.
    lines = [pairs(tp, 16, bound) for tp in (1, 2, 4) for bound in (0, 8, 64, 512)]
    rounds = Rounds(lambda _: 50.0)
    assert search(rounds, lines, Space(), None).evaluated == 192
    assert rounds.asked == [texts(lines)]


def test_the_more_lines_the_fewer_places_of_each() -> None:
    # Thirteen at 200 // 13 = 15 places: the i-th is (2 i / 14)^2 / 2 of the way of 15 for i = 0 .. 7: 0, 0.2, 0.6, 1.4, 2.4, 3.8,
    # 5.5, 7.5, and the others as far from the other end. On the best eight the neighbours of the best place, the ninth, follow.
    lines = [pairs(1, 16, bound) for bound in range(13)]

    def seconds(each: Target) -> float:
        return 100.0 + each.append_tokens + abs(each.shape.pools[0].workers - 9) / 100

    rounds = Rounds(seconds)
    found = search(rounds, lines, Space(), None)
    first = (0, 1, 2, 4, 6, 8, 9, 11, 13, 14, 15)
    assert (FEW, FEWEST) == (200, 6)
    assert rounds.asked == [
        [str(line.target(place)) for line in lines for place in first],
        [str(line.target(7)) for line in lines[:8]],
    ]
    assert best(found) == "9P8D"


def test_of_each_line_some_places_at_least() -> None:
    # Of 40 lines six each, not 200 // 40 = 5: (2 i / 5)^2 / 2 of the way of 15 for i = 0 .. 2: 0, 1.2, 4.8.
    lines = [pairs(1, 16, bound) for bound in range(40)]
    rounds = Rounds(lambda each: 50.0 + each.append_tokens)
    search(rounds, lines, Space(), None)
    assert rounds.asked[0] == [str(line.target(place)) for line in lines for place in (0, 1, 5, 10, 14, 15)]


def test_append_prefill_is_looked_at_coarsely_then_closer() -> None:
    # 65 ratios, four bounds. The best of all is with 9 tokens, at place 29.
    lines = [pairs(1, 65, bound) for bound in (0, 7, 8, 9)] + [pairs(2, 65, bound) for bound in (0, 7, 8)]

    def seconds(each: Target) -> float:
        return 100.0 - each.append_tokens + abs(each.shape.pools[0].workers - 30) + each.shape.pools[0].tp

    rounds = Rounds(seconds)
    found = search(rounds, lines, Space(), None)
    first = (0, 1, 2, 5, 9, 14, 20, 28, 36, 44, 50, 55, 59, 62, 63, 64)
    second = (21, 22, 24, 25, 27, 29, 31, 32, 34, 35)
    assert rounds.asked == [
        [str(line.target(place)) for line in lines for place in places] for places in (first, second, (30,))
    ]
    assert best(found) == "30P36D append<=9"


def test_all_are_asked_at_once_where_that_is_wanted() -> None:
    lines = [*PLAIN, *APPEND, *map(colocated, (1, 2, 4, 8, 16))]
    rounds = Rounds(lambda _: 50.0)
    assert search(rounds, lines, Space(exhaustive=True), None).evaluated == 101
    assert rounds.asked == [texts(lines)]


def test_the_first_round_of_several_searches_is_what_each_asks_at_first() -> None:
    # Few, many and long, none, and few again: many in all, but each search for itself decides how many places it looks at.
    searches = [
        [*PLAIN, *APPEND],
        [
            *(pairs(tp, 65, bound) for tp in (1, 2, 4, 8) for bound in (0, 8, 64, 512)),
            replace(colocated(2), second=4, second_tp=8),
        ],
        [],
        [colocated(1), pairs(1, 2, 8)],
    ]
    wanted: list[str] = []
    for lines in searches:
        rounds = Rounds(lambda _: 50.0)
        search(rounds, lines, Space(), None)
        wanted += rounds.asked[0] if lines else []
    together = first_round(searches)
    assert [str(together.target(index)) for index in range(len(together))] == wanted
    # Of seventeen lines 200 // 17 = 11 places each.
    assert len(wanted) == 6 * 16 + 16 * 11 + 1 + 3


def test_lines_can_be_searched_that_nobody_enumerated() -> None:
    line = Line(
        prefill_tp=1,
        decode_tp=2,
        colocated_tp=1,
        length=1,
        first=(3, 1, 0),
        step=(0, 0, 0),
        append_tokens=7,
        borrowed=2,
    )
    found = search(Told({"3P@tp1+1D@tp2 append<=7": 5.0})._predict, [line], Space(), None)
    assert found.best == found.considered[0]
    assert (str(found.considered[0].target), found.considered[0].borrowed) == ("3P@tp1+1D@tp2 append<=7", 2)
    assert found.evaluated == 1


# What a change touches


@pytest.mark.parametrize(
    ("old", "new", "added", "removed", "reassigned", "rebuilt_gpus", "reassigned_gpus"),
    [
        ("4C", "4C", 0, 0, 0, 0, 0),
        ("", "2P3D", 5, 0, 0, 0, 0),
        ("4C", "6C", 2, 0, 0, 0, 0),
        ("4C@tp2", "1C@tp2", 0, 3, 0, 0, 0),
        ("2P2D", "1P3D", 0, 0, 1, 0, 1),
        ("2P2D@tp4", "1P3D@tp4", 0, 0, 1, 0, 4),
        # One changes its role, one is new.
        ("2P2D", "1P4D", 1, 0, 1, 0, 1),
        ("2P2D", "3C", 0, 1, 3, 0, 3),
        # Another tensor parallelism: nothing can be reused but GPUs.
        ("4C", "2C@tp2", 2, 4, 0, 4, 0),
        ("4C", "4C@tp2", 4, 4, 0, 4, 0),
        ("8C", "2C@tp2", 2, 8, 0, 4, 0),
        # Each tensor parallelism for itself: at 1 one of two changes its role, at 2 one is new.
        ("2P@tp1+1D@tp2", "1P@tp1+1C@tp1+2D@tp2", 1, 0, 1, 0, 1),
        ("2P@tp1+2D@tp2", "2P@tp2+2D@tp1", 0, 0, 4, 0, 6),
        ("4C@tp1+2C@tp2", "2C@tp1+3C@tp2", 1, 2, 0, 2, 0),
    ],
)
def test_how_many_workers_a_change_touches(
    old: str, new: str, added: int, removed: int, reassigned: int, rebuilt_gpus: int, reassigned_gpus: int
) -> None:
    change = moves(parse_shape(old) if old else None, parse_shape(new))
    assert change == Moves(
        added=added,
        removed=removed,
        reassigned=reassigned,
        rebuilt_gpus=rebuilt_gpus,
        reassigned_gpus=reassigned_gpus,
    )
    assert change.all == added + removed + reassigned


def test_to_and_from_nothing() -> None:
    assert moves(Shape(()), parse_shape("2C")).all == 2
    assert moves(parse_shape("2C"), Shape(())).removed == 2
