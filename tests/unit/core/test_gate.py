import math

import pytest

from pearl.core.gate import (
    Z_95,
    BorrowOption,
    BorrowVerdict,
    ChangeKind,
    GateReason,
    Thresholds,
    Verdict,
    borrow,
    change_kind,
    expansion,
    hysteresis,
    paper_gain_s,
    return_by_s,
    return_due,
)
from pearl.core.shape import Shape, parse_shape
from pearl.errors import ProfileError

NAN, INF = math.nan, math.inf
BAD = [NAN, -1.0, -INF]


# Kinds of changes


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("4C", "4C", "none"),
        ("2P6D@tp2", "2P6D@tp2", "none"),
        # Workers only come, or only go.
        ("4C", "6C", "size"),
        ("4C", "1C", "size"),
        ("2P6D", "2P7D", "size"),
        ("2P6D", "3P8D", "size"),
        ("3P8D", "2P6D", "size"),
        ("3P8D", "3P6D", "size"),
        # Some change roles, whatever else comes or goes.
        ("2P6D", "3P5D", "ratio"),
        ("2P6D", "1P9D", "ratio"),
        ("2P6D", "3P3D", "ratio"),
        ("2P2D+1C", "1P3D+1C", "ratio"),
        ("2P2D+2C", "1P2D+3C", "ratio"),
        # Colocated against prefill and decode, and hybrids of both.
        ("4C", "1P3D", "mode"),
        ("1P3D", "4C", "mode"),
        ("4C", "2C+1P1D", "mode"),
        ("4C", "4C+1P1D", "mode"),
        ("4C+1P1D", "1P1D", "mode"),
        # Workers of one tensor parallelism for those of another, in one role or in all of them.
        ("4C", "2C@tp2", "tp"),
        ("2P2D", "2P@tp1+1D@tp2", "tp"),
        ("2P2D", "1P@tp2+2D@tp1", "tp"),
        ("4C", "1P1D@tp2", "tp"),
        ("4C", "2P@tp1+1D@tp2", "tp"),
        ("1D@tp2+1P@tp1", "3P1D", "tp"),
        # Those of a tensor parallelism stay and change roles.
        ("2P@tp1+2D@tp2", "2P@tp2+2D@tp1", "ratio"),
        ("2P@tp1+1D@tp2", "2C@tp2", "tp"),
        ("2P@tp1+1D@tp2", "2C@tp1", "mode"),
        ("2C@tp1", "2P@tp1+1D@tp2", "mode"),
        ("1P1D@tp2", "1P1D@tp2+1C@tp1", "mode"),
        ("4C@tp1", "4C@tp1+1C@tp2", "size"),
    ],
)
def test_how_far_a_change_goes(old: str, new: str, kind: str) -> None:
    assert change_kind(parse_shape(old), parse_shape(new)) is ChangeKind(kind)
    assert change_kind(parse_shape(new), parse_shape(old)) is ChangeKind(kind)


def test_the_order_of_pools_is_no_change() -> None:
    assert change_kind(parse_shape("2P3D"), parse_shape("3D2P")) is ChangeKind.NONE


def test_from_and_to_nothing_is_a_size() -> None:
    assert change_kind(Shape(()), parse_shape("1P3D@tp2")) is ChangeKind.SIZE
    assert change_kind(parse_shape("4C"), Shape(())) is ChangeKind.SIZE
    assert change_kind(Shape(()), Shape(())) is ChangeKind.NONE


# Hysteresis


def switched(kind: str, old_s: float, new_s: float, cost_s: float = 0.0) -> GateReason:
    verdict = hysteresis(ChangeKind(kind), old_s=old_s, new_s=new_s, cost_s=cost_s)
    assert verdict.passed == (verdict.reason in (GateReason.GAIN, GateReason.CURRENT_INFEASIBLE))
    return verdict.reason


@pytest.mark.parametrize(
    ("kind", "new_s", "reason"),
    [
        # Of 100 s a ratio must win more than 5, a mode or tp more than 10, a size anything.
        ("ratio", 94.9, GateReason.GAIN),
        ("ratio", 95.0, GateReason.BELOW_THRESHOLD),
        ("ratio", 95.1, GateReason.BELOW_THRESHOLD),
        ("mode", 89.9, GateReason.GAIN),
        ("mode", 90.0, GateReason.BELOW_THRESHOLD),
        ("tp", 89.9, GateReason.GAIN),
        ("tp", 90.0, GateReason.BELOW_THRESHOLD),
        ("size", 99.9, GateReason.GAIN),
        ("size", 100.0, GateReason.BELOW_THRESHOLD),
        ("size", 101.0, GateReason.BELOW_THRESHOLD),
    ],
)
def test_a_change_must_win_more_than_its_threshold(kind: str, new_s: float, reason: GateReason) -> None:
    assert switched(kind, 100.0, new_s) is reason


@pytest.mark.parametrize(
    ("cost_s", "reason"),
    [(19.9, GateReason.GAIN), (20.0, GateReason.BELOW_COST), (20.1, GateReason.BELOW_COST)],
)
def test_a_change_must_win_more_than_it_costs(cost_s: float, reason: GateReason) -> None:
    # Rent or buy: 100 s become 80 s.
    assert switched("mode", 100.0, 80.0, cost_s) is reason


def test_a_large_share_of_little_is_not_worth_a_move() -> None:
    # 10 s become 5 s, half of it, and a role change takes 20 s; of 1,000 s it is worth it.
    assert switched("ratio", 10.0, 5.0, 20.0) is GateReason.BELOW_COST
    assert switched("ratio", 1000.0, 500.0, 20.0) is GateReason.GAIN


def test_a_verdict_carries_its_figures() -> None:
    verdict = hysteresis(ChangeKind.MODE, old_s=200.0, new_s=150.0, cost_s=30.0)
    assert verdict == Verdict(
        passed=True,
        reason=GateReason.GAIN,
        numbers=(
            ("old_s", 200.0),
            ("new_s", 150.0),
            ("cost_s", 30.0),
            ("gain_s", 50.0),
            ("gain_share", 0.25),
            ("threshold_share", 0.10),
        ),
    )
    refused = hysteresis(ChangeKind.RATIO, old_s=200.0, new_s=196.0, cost_s=0.0)
    assert (refused.passed, dict(refused.numbers)["threshold_share"]) == (False, 0.05)


def test_thresholds_may_be_chosen() -> None:
    mine = Thresholds(size=0.1, ratio=0.2, mode=0.3, tp=0.4)
    edges = {ChangeKind.SIZE: 90.0, ChangeKind.RATIO: 80.0, ChangeKind.MODE: 70.0, ChangeKind.TP: 60.0}
    for kind, edge_s in edges.items():
        assert mine.of(kind) == pytest.approx(1 - edge_s / 100)
        for new_s, passed in ((edge_s + 0.1, False), (edge_s - 0.1, True)):
            assert hysteresis(kind, old_s=100.0, new_s=new_s, cost_s=0.0, thresholds=mine).passed == passed
    assert Thresholds() == Thresholds(size=0.0, ratio=0.05, mode=0.10, tp=0.10)


@pytest.mark.parametrize("value", [NAN, -0.01, 1.0, INF])
@pytest.mark.parametrize("name", ["size", "ratio", "mode", "tp"])
def test_thresholds_are_shares(name: str, value: float) -> None:
    with pytest.raises(ProfileError, match=rf"^thresholds: {name}: got {value}, want 0 <= share < 1$"):
        Thresholds(**{name: value})
    assert getattr(Thresholds(**{name: 0.99}), name) == 0.99


def test_no_change_is_never_made() -> None:
    for forced in (False, True):
        verdict = hysteresis(ChangeKind.NONE, old_s=100.0, new_s=1.0, cost_s=2.0, forced=forced)
        assert verdict == Verdict(
            passed=False, reason=GateReason.NO_CHANGE, numbers=(("old_s", 100.0), ("new_s", 1.0), ("cost_s", 2.0))
        )


@pytest.mark.parametrize(("new_s", "cost_s"), [(500.0, 1e9), (INF, 0.0), (NAN, NAN)])
def test_forced_changes_are_never_blocked(new_s: float, cost_s: float) -> None:
    for kind in (ChangeKind.SIZE, ChangeKind.RATIO, ChangeKind.MODE, ChangeKind.TP):
        verdict = hysteresis(kind, old_s=100.0, new_s=new_s, cost_s=cost_s, forced=True)
        assert (verdict.passed, verdict.reason) == (True, GateReason.FORCED)
        assert [name for name, _ in verdict.numbers] == ["old_s", "new_s", "cost_s"]


def test_what_cannot_serve_is_left_whatever_it_costs() -> None:
    verdict = hysteresis(ChangeKind.MODE, old_s=INF, new_s=1e6, cost_s=1e9)
    assert verdict == Verdict(
        passed=True, reason=GateReason.CURRENT_INFEASIBLE, numbers=(("old_s", INF), ("new_s", 1e6), ("cost_s", 1e9))
    )
    for old_s in (INF, 100.0):
        refused = hysteresis(ChangeKind.MODE, old_s=old_s, new_s=INF, cost_s=5.0)
        assert refused == Verdict(
            passed=False,
            reason=GateReason.TARGET_INFEASIBLE,
            numbers=(("old_s", old_s), ("new_s", INF), ("cost_s", 5.0)),
        )


def test_when_nothing_is_left_nothing_is_won() -> None:
    verdict = hysteresis(ChangeKind.SIZE, old_s=0.0, new_s=0.0, cost_s=0.0)
    assert (verdict.reason, dict(verdict.numbers)["gain_share"]) == (GateReason.BELOW_THRESHOLD, 0.0)
    assert switched("size", 1.0, 0.0) is GateReason.GAIN
    # Below a second, too, it is the share that counts.
    assert switched("ratio", 0.5, 0.4) is GateReason.GAIN


@pytest.mark.parametrize("bad", BAD)
def test_hysteresis_takes_no_nonsense(bad: float) -> None:
    sound = {"old_s": 100.0, "new_s": 50.0, "cost_s": 1.0}
    for name in sound:
        verdict = hysteresis(ChangeKind.RATIO, **{**sound, name: bad})
        assert (verdict.passed, verdict.reason) == (False, GateReason.BAD_NUMBER)
        assert [one for one, _ in verdict.numbers] == ["old_s", "new_s", "cost_s"]
    assert switched("ratio", 100.0, 50.0, INF) is GateReason.BAD_NUMBER
    assert switched("ratio", INF, 50.0, NAN) is GateReason.BAD_NUMBER


# Borrowing


def options(*close_s: float, toggle_s: float = 0.0, each_s: float = 0.0) -> list[BorrowOption]:
    return [
        BorrowOption(workers=m, close_s=close, toggle_s=toggle_s + each_s * m if m else 0.0)
        for m, close in enumerate(close_s)
    ]


def test_the_number_that_wins_most_is_borrowed() -> None:
    # Gains 0, 30, 45, 50 s; less 10 s and 4 s for each worker: 0, 16, 27, 28.
    assert borrow(options(100, 70, 55, 50, toggle_s=10, each_s=4)) == BorrowVerdict(
        passed=True,
        reason=GateReason.GAIN,
        workers=3,
        numbers=(("dedicated_s", 100), ("borrowed_s", 50), ("gain_s", 50), ("toggle_s", 22.0)),
    )
    # Less 10 s and 6 s for each: 0, 14, 23, 22.
    verdict = borrow(options(100, 70, 55, 50, toggle_s=10, each_s=6))
    assert (verdict.passed, verdict.workers) == (True, 2)
    # What is faster is told as well: 50 s for 10 + 18.
    assert verdict.numbers == (
        ("dedicated_s", 100),
        ("borrowed_s", 55),
        ("gain_s", 45),
        ("toggle_s", 22.0),
        ("fastest_s", 50),
        ("fastest_toggle_s", 28.0),
    )


def test_where_the_best_wins_nothing_what_is_faster_and_too_dear_is_told() -> None:
    # Less cost: 101 and 120 s; of the two fastest the one with fewer workers.
    dear = [
        BorrowOption(workers=workers, close_s=close_s, toggle_s=toggle_s)
        for workers, close_s, toggle_s in ((0, 100.0, 0.0), (1, 101.0, 0.0), (2, 80.0, 40.0), (3, 80.0, 50.0))
    ]
    verdict = borrow(dear)
    assert (verdict.passed, verdict.workers, verdict.reason) == (False, 0, GateReason.BELOW_COST)
    assert verdict.numbers == (
        ("dedicated_s", 100.0),
        ("borrowed_s", 101.0),
        ("gain_s", -1.0),
        ("toggle_s", 0.0),
        ("fastest_s", 80.0),
        ("fastest_toggle_s", 40.0),
    )
    # Not where another is as fast as the best.
    assert "fastest_s" not in dict(borrow([*dear[:1], dear[2], dear[3]]).numbers)


def test_a_tie_goes_to_fewer_workers() -> None:
    # Each worker wins 10 s and costs 5 s at first; the third wins just what it costs.
    assert borrow(options(100, 90, 80, 75, each_s=5)).workers == 2
    assert borrow(options(100, 90, 90, 90)).workers == 1


@pytest.mark.parametrize(
    ("toggle_s", "passed"), [(9.4, True), (9.5, False), (9.6, False)], ids=["below", "at", "above"]
)
def test_borrowing_must_win_more_than_it_costs(toggle_s: float, passed: bool) -> None:
    verdict = borrow(options(40, 30.5, toggle_s=toggle_s))
    assert (verdict.passed, verdict.workers) == (passed, 1 if passed else 0)
    assert verdict.reason is (GateReason.GAIN if passed else GateReason.BELOW_COST)
    assert verdict.numbers == (("dedicated_s", 40), ("borrowed_s", 30.5), ("gain_s", 9.5), ("toggle_s", toggle_s))


def test_a_refusal_shows_the_best_that_was_refused() -> None:
    verdict = borrow(options(40, 39, 36, toggle_s=10))
    assert (verdict.passed, verdict.workers, verdict.reason) == (False, 0, GateReason.BELOW_COST)
    assert dict(verdict.numbers)["borrowed_s"] == 36


def test_what_borrowing_none_would_cost_is_of_no_meaning() -> None:
    none = BorrowOption(workers=0, close_s=40, toggle_s=50)
    assert not borrow([none, BorrowOption(workers=2, close_s=35, toggle_s=5)]).passed


def test_workers_may_be_skipped() -> None:
    # All or nothing, as in the paper.
    two = [BorrowOption(workers=0, close_s=100.0), BorrowOption(workers=8, close_s=60.0, toggle_s=9.5)]
    assert borrow(two).workers == 8


def test_infeasible_numbers_of_workers_are_passed_over() -> None:
    assert borrow(options(100, INF, 80, INF)).workers == 2
    verdict = borrow(options(INF, INF, 80, 70, toggle_s=5))
    assert (verdict.passed, verdict.workers, verdict.reason) == (True, 3, GateReason.CURRENT_INFEASIBLE)
    for dedicated_s in (100.0, INF):
        refused = borrow(options(dedicated_s, INF, INF))
        assert refused == BorrowVerdict(
            passed=False, reason=GateReason.TARGET_INFEASIBLE, numbers=(("dedicated_s", dedicated_s),)
        )


def test_without_idle_gpus_there_is_nothing_to_borrow() -> None:
    assert borrow(options(100.0)) == BorrowVerdict(
        passed=False, reason=GateReason.NO_CHANGE, numbers=(("dedicated_s", 100.0),)
    )


@pytest.mark.parametrize("workers", [(), (1,), (1, 2), (0, 2, 1), (0, 1, 1), (0, 0), (-1, 0), (0, -1)])
def test_options_rise_from_none(workers: tuple[int, ...]) -> None:
    verdict = borrow([BorrowOption(workers=m, close_s=10.0) for m in workers])
    assert verdict == BorrowVerdict(passed=False, reason=GateReason.BAD_OPTIONS)


@pytest.mark.parametrize("bad", BAD)
def test_borrowing_takes_no_nonsense(bad: float) -> None:
    refused = BorrowVerdict(passed=False, reason=GateReason.BAD_NUMBER)
    assert borrow(options(bad, 1, 1)) == refused
    assert borrow(options(100, 50, bad)) == refused
    assert borrow(options(100, 50, toggle_s=bad)) == refused
    assert borrow(options(100, 50, toggle_s=INF)) == refused
    assert borrow([BorrowOption(workers=0, close_s=bad)]) == refused


def test_the_papers_gain() -> None:
    # 16 of 64 trajectories are left of a batch that takes 400 s without and 240 s with all training GPUs: 40 s.
    assert paper_gain_s(16, 64, 400.0, 240.0) == 40.0
    assert paper_gain_s(64, 64, 400.0, 240.0) == 160.0
    assert paper_gain_s(1, 64, 240.0, 400.0) == -2.5
    assert paper_gain_s(16, 64, INF, 240.0) == INF
    assert paper_gain_s(0, 64, 400.0, 240.0) == 0.0
    assert paper_gain_s(0, 64, INF, 240.0) == 0.0


def test_the_papers_gate_is_that_of_the_rest_of_the_batch() -> None:
    # (16 / 64) * 400 = 100 s and (16 / 64) * 240 = 60 s: 40 s pass 39.9 s and not 40 s.
    for toggle_s, passed in ((39.9, True), (40.0, False)):
        full = BorrowOption(workers=8, close_s=60.0, toggle_s=toggle_s)
        assert borrow([BorrowOption(workers=0, close_s=100.0), full]).passed == passed
        assert (paper_gain_s(16, 64, 400.0, 240.0) > toggle_s) == passed


@pytest.mark.parametrize(
    ("remaining", "batch", "dedicated_s", "full_s"),
    [(-1, 64, 4, 2), (65, 64, 4, 2), (0, 0, 4, 2), (1, 64, NAN, 2), (1, 64, 4, NAN), (1, 64, -4, 2), (1, 64, 4, -2)],
)
def test_the_papers_gain_of_nonsense_is_no_number(
    remaining: int, batch: int, dedicated_s: float, full_s: float
) -> None:
    assert math.isnan(paper_gain_s(remaining, batch, dedicated_s, full_s))


# Expansion


def expanded(**changes: float) -> Verdict:
    """GPUs for 160 s, of which 60 s go by before they serve; the batch takes 150 s, or 100 s with them."""
    inputs = {"expected_use_s": 160.0, "start_s": 60.0, "old_s": 150.0, "new_s": 100.0, "finalise_s": 11.0, **changes}
    return expansion(**inputs)


def test_expected_service_is_weighed_against_what_it_takes() -> None:
    # In 100 s the larger fleet does what took 150 s: 50 s won. 11 s of pause.
    assert expanded() == Verdict(
        passed=True,
        reason=GateReason.GAIN,
        numbers=(("useful_s", 100.0), ("old_s", 150.0), ("new_s", 100.0), ("cost_s", 11.0), ("gain_s", 50.0)),
    )


@pytest.mark.parametrize(
    ("finalise_s", "role_changes_s", "passed"),
    [(11.0, 38.9, True), (11.0, 39.0, False), (11.0, 39.1, False), (49.9, 0.0, True), (50.0, 0.0, False)],
)
def test_every_cost_counts(finalise_s: float, role_changes_s: float, passed: bool) -> None:
    # 50 s are won.
    verdict = expanded(finalise_s=finalise_s, role_changes_s=role_changes_s)
    assert (verdict.passed, verdict.reason) == (
        passed,
        GateReason.GAIN if passed else GateReason.GAIN_TOO_SMALL,
    )
    assert dict(verdict.numbers)["cost_s"] == finalise_s + role_changes_s
    assert dict(verdict.numbers)["gain_s"] == 50.0


@pytest.mark.parametrize(
    ("expected_use_s", "reason"),
    [
        (0.0, GateReason.LEASE_TOO_SHORT),
        (60.0, GateReason.LEASE_TOO_SHORT),
        (60.1, GateReason.GAIN_TOO_SMALL),
        # 22 s of service win 11 s.
        (82.0, GateReason.GAIN_TOO_SMALL),
        (82.5, GateReason.GAIN),
    ],
)
def test_a_lease_must_outlast_the_start(expected_use_s: float, reason: GateReason) -> None:
    assert expanded(expected_use_s=expected_use_s).reason is reason


def test_more_gpus_that_are_no_faster_are_left() -> None:
    assert expanded(new_s=150.0, finalise_s=0.0).reason is GateReason.GAIN_TOO_SMALL
    assert expanded(new_s=200.0, finalise_s=0.0).reason is GateReason.GAIN_TOO_SMALL
    assert expanded(old_s=0.0, new_s=1.0).reason is GateReason.GAIN_TOO_SMALL


def test_expansion_of_what_cannot_serve() -> None:
    verdict = expanded(old_s=INF, finalise_s=1e6)
    assert (verdict.passed, verdict.reason) == (True, GateReason.CURRENT_INFEASIBLE)
    assert verdict.numbers == (("useful_s", 100.0), ("old_s", INF), ("new_s", 100.0), ("cost_s", 1e6))
    for old_s in (150.0, INF):
        refused = expanded(old_s=old_s, new_s=INF)
        assert (refused.passed, refused.reason) == (False, GateReason.TARGET_INFEASIBLE)
    # Even then GPUs that are gone before they serve are no help.
    assert expanded(old_s=INF, expected_use_s=60.0) == Verdict(
        passed=False,
        reason=GateReason.LEASE_TOO_SHORT,
        numbers=(("useful_s", 0.0), ("old_s", INF), ("new_s", 100.0), ("cost_s", 11.0)),
    )


@pytest.mark.parametrize("bad", [*BAD, INF])
@pytest.mark.parametrize("name", ["expected_use_s", "start_s", "finalise_s", "role_changes_s"])
def test_expansion_takes_no_nonsense(name: str, bad: float) -> None:
    verdict = expanded(**{name: bad})
    assert (verdict.passed, verdict.reason) == (False, GateReason.BAD_NUMBER)
    assert [one for one, _ in verdict.numbers] == ["useful_s", "old_s", "new_s", "cost_s"]


@pytest.mark.parametrize("bad", BAD)
def test_expansion_takes_no_nonsense_for_times(bad: float) -> None:
    for changes in ({"old_s": bad}, {"new_s": bad}, {"new_s": 0.0}):
        verdict = expanded(**changes)
        assert (verdict.passed, verdict.reason) == (False, GateReason.BAD_NUMBER)


def test_expansion_from_a_zero_on() -> None:
    # Nothing to wait for and nothing to pay: all 160 s win, half of each.
    assert dict(expanded(start_s=0.0, finalise_s=0.0).numbers)["gain_s"] == 80.0


# Return


def test_the_trainer_need_not_wait() -> None:
    # At 1,000 s the batch closes in 100 s, give or take 20 s: with 95 % not before 67.1 s. Giving back takes 3 s.
    assert Z_95 == 1.645
    assert return_by_s(1000.0, 100.0, 20.0, 3.0) == pytest.approx(1064.1)
    assert return_by_s(1000.0, 100.0, 20.0, 3.0, z=0.0) == pytest.approx(1097.0)
    assert return_by_s(1000.0, 100.0, 20.0, 3.0, z=2.0) == pytest.approx(1057.0)


def test_the_time_to_return_is_never_before_now() -> None:
    assert return_by_s(1000.0, 10.0, 20.0, 3.0) == 1000.0
    assert return_by_s(1000.0, 3.0, 0.0, 3.0) == 1000.0
    assert return_by_s(1000.0, 0.0, 0.0, 0.0) == 1000.0
    assert return_by_s(0.0, 3.5, 0.0, 3.0) == 0.5


def test_a_batch_that_never_closes_asks_for_nothing() -> None:
    assert return_by_s(1000.0, INF, INF, 3.0) == INF
    verdict = return_due(now_s=1000.0, close_s=INF, error_s=INF, return_s=3.0)
    assert (verdict.passed, verdict.reason) == (False, GateReason.NOT_YET)


@pytest.mark.parametrize(
    ("close_s", "passed"), [(0.0, True), (22.9, True), (23.0, True), (23.1, False), (500.0, False)]
)
def test_return_is_due_when_waiting_longer_would_risk_a_wait(close_s: float, passed: bool) -> None:
    # 2 * 10 s of error and 3 s to give back.
    verdict = return_due(now_s=50.0, close_s=close_s, error_s=10.0, return_s=3.0, z=2.0)
    assert verdict.passed == passed
    assert verdict.reason is (GateReason.DUE if passed else GateReason.NOT_YET)
    by_s = 50.0 if passed else pytest.approx(50.0 + close_s - 23.0)
    assert verdict.numbers == (("now_s", 50.0), ("close_s", close_s), ("error_s", 10.0), ("return_by_s", by_s))


def test_the_default_confidence_is_95_percent() -> None:
    # 1.645 * 10 s and 3 s: 19.45 s.
    for close_s, passed in ((19.44, True), (19.46, False)):
        assert return_due(now_s=0.0, close_s=close_s, error_s=10.0, return_s=3.0).passed == passed


@pytest.mark.parametrize("close_s", [500.0, INF, NAN])
def test_a_batch_that_closed_early_takes_gpus_back_at_once(close_s: float) -> None:
    verdict = return_due(now_s=50.0, close_s=close_s, error_s=10.0, return_s=3.0, batch_closed=True)
    assert (verdict.passed, verdict.reason) == (True, GateReason.BATCH_CLOSED)
    assert [name for name, _ in verdict.numbers] == ["now_s", "close_s", "error_s", "return_by_s"]


@pytest.mark.parametrize("bad", BAD)
def test_return_takes_no_nonsense(bad: float) -> None:
    sound = {"now_s": 50.0, "close_s": 5.0, "error_s": 10.0, "return_s": 3.0, "z": 1.0}
    for name in sound:
        inputs = {**sound, name: bad}
        assert math.isnan(return_by_s(**inputs))
        verdict = return_due(**inputs)
        assert (verdict.passed, verdict.reason) == (False, GateReason.BAD_NUMBER)
    for name in ("now_s", "error_s", "return_s", "z"):
        assert math.isnan(return_by_s(**{**sound, name: INF}))


def test_reasons_and_kinds_are_names_in_journals() -> None:
    for kind in (GateReason, ChangeKind):
        assert {one.name.lower() for one in kind} == {one.value for one in kind}
