import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import pytest

from pearl.core.choose import Option
from pearl.core.decide import FALLBACKS, HORIZON_S, _refused, decide
from pearl.core.decision import Decision, Gated, Moment, Reason, Situation
from pearl.core.gate import BorrowOption, borrow
from pearl.core.lines import Space
from pearl.core.makespan import Candidates, Forecast, Infeasible, Predictions, Profile, Target
from pearl.core.plan import PlanRefusalReason, apply
from pearl.core.policy import POLICIES, Borrow, Policy, PolicyOptions, policy_named
from pearl.core.progress import Progress, fresh_batch
from pearl.core.scene import LEAVE_MARGIN_S
from pearl.core.shape import parse_shape
from pearl.core.state import FleetState
from pearl.core.survival import LeaseHistory, LeaseSpan
from pearl.errors import ProfileError
from tests.fleets import COSTS, Told, leased, noticed, situation
from tests.unit.core._fleets import fleet, serving, story

INF, NAN = math.inf, math.nan
COLOCATED = Space(disaggregated=False)


def policy(
    times_s: dict[str, float],
    *,
    borrow: Borrow = Borrow.NEVER,
    errors_s: dict[str, float] | None = None,
    **other: object,
) -> Policy:
    told = Told(times_s, errors_s or {})
    return Policy(  # type: ignore[arg-type]
        name="p", predictor=told, borrow=borrow, **{"space": Space(), "return_z": 2.0, **other}
    )


def decided(
    wants: Policy,
    state: FleetState,
    about: Situation | None = None,
    *,
    moment: Moment = Moment.TICK,
    now_s: float = 100.0,
) -> Decision:
    """Decides, and whatever comes of it: the state is as it was, and after the plan nothing more is wanted."""
    about, before = about or situation(), state.hash
    made = decide(wants, state, about, moment, now_s)
    assert state.hash == before
    assert repr(decide(wants, state, about, moment, now_s)) == repr(made)
    if made.plan is not None or made.reason is Reason.MOVED:
        after = state if made.plan is None else apply(state, made.plan)
        assert isinstance(after, FleetState)
        append_tokens = about.append_tokens if made.chosen is None else made.chosen.target.append_tokens
        again = decide(wants, after, replace(about, append_tokens=append_tokens), moment, now_s)
        assert again.plan is None
        if made.chosen is not None:
            assert again.chosen is not None
            assert (again.chosen.target, again.chosen.borrowed) == (made.chosen.target, made.chosen.borrowed)
            assert again.chosen == again.current
    return made


def text(option: Option | None) -> str | None:
    return None if option is None else str(option.target)


def gates(made: Decision) -> list[tuple[str, str, bool, str]]:
    return [(each.gate, each.about, each.verdict.passed, each.verdict.reason.value) for each in made.gates]


def numbers(made: Decision, gate: str) -> list[dict[str, float]]:
    return [dict(each.verdict.numbers) for each in made.gates if each.gate == gate]


def plan_of(made: Decision) -> list[str]:
    return [] if made.plan is None else story(made.plan.groups)


def after(state: FleetState, made: Decision) -> dict[int, str]:
    assert made.plan is not None
    done = apply(state, made.plan)
    assert isinstance(done, FleetState)
    return serving(done)


# What is no time, and what has no GPUs


@pytest.mark.parametrize("now_s", [NAN, INF, -INF, -1e-9])
def test_what_is_no_time_is_refused(now_s: float) -> None:
    state = fleet("a2", "0 C a0")
    assert decided(policy({"2C": 1.0}), state, now_s=now_s) == Decision(reason=Reason.BAD_TIME)


def test_time_may_begin_at_zero() -> None:
    assert decided(policy({"1C": 1.0}), fleet("a1", "0 C a0"), now_s=0.0).reason is Reason.BEST


def test_without_gpus_nothing_fits() -> None:
    assert decided(policy({"1C": 1.0}), FleetState()) == Decision(reason=Reason.NOTHING_FITS, evaluated=1)


def test_a_tensor_parallelism_larger_than_a_node_fits_nowhere() -> None:
    made = decided(policy({"1C@tp4": 1.0}), fleet("a2 b2"), situation(4))
    assert (made.reason, made.chosen, made.plan, made.considered) == (Reason.NOTHING_FITS, None, None, ())


def test_a_batch_that_nothing_can_hold_fits_nothing_and_what_was_asked_is_told() -> None:
    made = decided(policy({}), fleet("a2"))
    assert made.reason is Reason.NOTHING_FITS
    assert [(text(each), each.infeasible) for each in made.considered] == [
        ("2C", Infeasible.KV_CAPACITY),
        ("1P1D", Infeasible.KV_CAPACITY),
    ]
    assert made.evaluated == 3


# From nothing, and onwards


def test_at_the_start_the_best_shape_is_started() -> None:
    state = fleet("a2")
    made = decided(policy({"2C": 50.0, "1P1D": 40.0}), state, moment=Moment.STARTED)
    assert (made.reason, made.current, text(made.chosen)) == (Reason.FORCED, None, "1P1D")
    assert gates(made) == [("hysteresis", "1P1D", True, "current_infeasible")]
    assert plan_of(made) == ["expand: 0 start 0 P a0; 1 start 1 D a1; 2 load 0 <0; 3 load 1 <1; 4 admit 0 1 <2 <3"]
    assert [text(each) for each in made.considered] == ["1P1D", "2C"]
    assert (made.evaluated, made.refusal, made.look_again_s) == (3, None, None)


def test_the_best_stays() -> None:
    made = decided(policy({"2C": 50.0, "1P1D": 60.0}), fleet("a2", "0 C a0", "1 C a1"))
    assert made == Decision(
        reason=Reason.BEST, current=made.current, chosen=made.current, considered=made.considered, evaluated=3
    )
    assert made.current == Option(
        target=Target(shape=parse_shape("2C")), borrowed=0, close_s=50.0, error_s=0.0, infeasible=Infeasible.NO
    )


def test_something_faster_that_does_not_win_enough_is_gated() -> None:
    made = decided(policy({"2C": 100.0, "1P1D": 91.0}), fleet("a2", "0 C a0", "1 C a1"))
    assert (made.reason, text(made.chosen), made.plan) == (Reason.GATED, "2C", None)
    assert gates(made) == [("hysteresis", "1P1D", False, "below_threshold")]
    assert numbers(made, "hysteresis") == [
        {"old_s": 100.0, "new_s": 91.0, "cost_s": 20.0, "gain_s": 9.0, "gain_share": 0.09, "threshold_share": 0.1}
    ]


def test_something_slower_is_not_what_is_gated() -> None:
    # 1C was made by hand: two GPUs of another tensor parallelism are what the policy knows.
    made = decided(policy({"1C": 50.0, "1C@tp2": 60.0}, space=Space(tps=(2,))), fleet("a2", "0 C a0"), situation(1, 2))
    assert (made.reason, text(made.chosen), gates(made)) == (Reason.BEST, "1C", [])
    # Equally fast is not faster.
    made = decided(policy({"1C": 50.0, "1C@tp2": 50.0}, space=Space(tps=(2,))), fleet("a2", "0 C a0"), situation(1, 2))
    assert (made.reason, text(made.chosen)) == (Reason.BEST, "1C")
    # Nor where there is nothing left to do.
    made = decided(policy({"1C": 0.0, "1C@tp2": 0.0}, space=Space(tps=(2,))), fleet("a2", "0 C a0"), situation(1, 2))
    assert (made.reason, gates(made)) == (Reason.BEST, [])
    # A little faster is.
    made = decided(policy({"1C": 50.0, "1C@tp2": 49.5}, space=Space(tps=(2,))), fleet("a2", "0 C a0"), situation(1, 2))
    assert (made.reason, text(made.chosen)) == (Reason.GATED, "1C")


def test_what_wins_enough_is_moved_to() -> None:
    state = fleet("a4", "0 P a0", "1 P a1", "2 D a2", "3 D a3")
    made = decided(policy({"2P2D": 100.0, "1P3D": 90.0}), state)
    assert (made.reason, text(made.current), text(made.chosen)) == (Reason.MOVED, "2P2D", "1P3D")
    assert gates(made) == [("hysteresis", "1P3D", True, "gain")]
    assert after(state, made) == {0: "P1", 1: "D1", 2: "D1", 3: "D1"}
    # The same gain is less than it costs where changing a role takes longer: half the fleet for 20 s.
    dear = situation(costs=replace(COSTS, role_change_s=40))
    made = decided(policy({"2P2D": 100.0, "1P3D": 90.0}), state, dear)
    assert gates(made) == [("hysteresis", "1P3D", False, "below_cost")]


def test_reserved_gpus_are_used_without_weighing_a_lease() -> None:
    state = fleet("a2", "0 C a0")
    made = decided(policy({"1C": 100.0, "2C": 99.0}, lease_aware=True), state)
    assert (made.reason, text(made.chosen), gates(made)) == (
        Reason.MOVED,
        "2C",
        [("hysteresis", "2C", True, "gain")],
    )


@pytest.mark.parametrize(("more_s", "reason"), [(999.0, Reason.GATED), (999.01, Reason.BEST)])
def test_what_is_equally_good_is_not_gated(more_s: float, reason: Reason) -> None:
    # Whichever gate keeps it back: of hysteresis, of expansion (10 s), of borrowing (10 s).
    times = {"1C": 1000.0, "1C@tp2": more_s, "2C": more_s}
    # Of what is equally good none is asked, and each asked about is told.
    asked = reason is Reason.GATED
    made = decided(policy(times, space=Space(tps=(2,))), fleet("a2", "0 C a0"), situation(1, 2))
    assert (gates(made), made.reason) == ([("hysteresis", "1C@tp2", False, "below_threshold")] * asked, reason)
    made = decided(policy(times, space=COLOCATED, lease_aware=True), fleet("a1 c1x", "0 C a0"))
    assert (gates(made)[-1:], made.reason) == ([("expansion", "2C", False, "gain_too_small")] * asked, reason)
    assert [text(each) for each in made.considered] == ["1C", *["2C"] * asked]
    made = decided(policy(times, space=COLOCATED, borrow=Borrow.ANY), fleet("a1 b1t", "0 C a0", "1 C- b0"))
    assert (gates(made), made.reason) == ([("borrow", "up to 1 workers", False, "below_cost")] * asked, reason)


def test_what_is_faster_and_too_dear_is_gated_though_the_cheapest_wins_nothing() -> None:
    # One worker more wins 0.5 s of 1,000, which is as good as nothing, for 110 s; two win 100 s for 220 s, and lose more.
    times = {"1C": 1000.0, "2C": 999.5, "3C": 900.0}
    state = fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1")
    about = situation(toggle_s=0.0)
    about = replace(about, toggle=replace(about.toggle, per_worker_s=110.0))
    made = decided(policy(times, space=COLOCATED, borrow=Borrow.ANY), state, about)
    assert gates(made) == [("borrow", "up to 2 workers", False, "below_cost")]
    assert numbers(made, "borrow")[0] == {
        "dedicated_s": 1000.0,
        "borrowed_s": 900.0,
        "gain_s": 100.0,
        "toggle_s": 220.0,
    }
    assert made.reason is Reason.GATED


@pytest.mark.parametrize(("fastest_s", "refused"), [(99.0, True), (99.95, False)])
def test_the_fastest_counts_beside_the_best_of_a_gate(fastest_s: float, refused: bool) -> None:
    found = borrow(
        [
            BorrowOption(workers=0, close_s=100.0),
            BorrowOption(workers=1, close_s=101.0),
            BorrowOption(workers=2, close_s=fastest_s, toggle_s=9.0),
        ]
    )
    assert _refused(Gated(gate="borrow", about="", verdict=found)) == refused


def test_another_bound_of_append_prefill_needs_no_plan() -> None:
    state = fleet("a2", "0 P a0", "1 D a1")
    wants = policy({"1P1D": 100.0, "1P1D append<=256": 90.0}, space=Space(append_tokens=(0, 256)))
    made = decided(wants, state)
    assert (made.reason, text(made.chosen), made.plan) == (Reason.MOVED, "1P1D append<=256", None)
    assert decided(wants, state, replace(situation(), append_tokens=256)).reason is Reason.BEST


def test_the_bound_of_append_prefill_in_force_counts_where_there_is_a_decode_worker() -> None:
    about = replace(situation(), append_tokens=256)
    space = Space(append_tokens=(0, 256), hybrid=True)
    state = fleet("a3", "0 P a0", "1 D a1", "2 C a2")
    made = decided(policy({"1P1D1C append<=256": 50.0}, space=space), state, about)
    assert (made.reason, text(made.current)) == (Reason.BEST, "1P1D1C append<=256")
    assert text(decided(policy({"2C": 50.0}, space=space), fleet("a2", "0 C a0", "1 C a1"), about).current) == "2C"


def test_a_role_that_lost_its_last_worker_forces_a_change() -> None:
    state = fleet("a3", "1 D a1", "2 D a2")
    made = decided(policy({"3C": 80.0, "1P2D": 70.0}), state, moment=Moment.WORKERS_CHANGED)
    assert (made.reason, text(made.current), text(made.chosen)) == (Reason.FORCED, "2D", "1P2D")
    assert made.current is not None
    assert (made.current.close_s, made.current.infeasible) == (INF, Infeasible.KV_CAPACITY)
    assert after(state, made) == {1: "D1", 2: "D1", 3: "P1"}
    # Where the rest is too small for both roles: colocated.
    made = decided(policy({"1C": 90.0}, space=Space(colocated=False)), fleet("a1", "1 D a0"))
    assert (made.reason, text(made.chosen)) == (Reason.FORCED, "1C")


def test_trainers_are_no_part_of_it() -> None:
    state = fleet("a1 b1t", "0 C a0", "1 T b0", "2 T~ b0")
    made = decided(policy({"1C": 50.0}), state)
    assert (made.reason, text(made.current)) == (Reason.BEST, "1C")


def test_a_fleet_that_no_predictor_can_be_asked_about_cannot_stay() -> None:
    state = fleet("a4", "0 P a0", "1 P a1 a2", "2 D a3")
    made = decided(policy({"4C": 50.0}), state, situation(1, 2))
    assert made.current is not None
    assert (text(made.current), made.current.close_s, made.current.error_s, made.current.infeasible) == (
        "1P@tp1+1P@tp2+1D@tp1",
        INF,
        INF,
        Infeasible.UNSUPPORTED,
    )
    assert (made.reason, text(made.chosen)) == (Reason.FORCED, "4C")
    assert made.current.borrowed == 0


def test_pools_of_the_current_shape_are_in_one_order() -> None:
    state = fleet("a2 b4t", "0 C a0 a1", "1 C b0", "2 C b1", "3 D b2", "4 P b3")
    made = decided(policy({}, borrow=Borrow.ANY), state, situation(1, 2))
    assert text(made.current) == "1P@tp1+1D@tp1+2C@tp1+1C@tp2"


# GPUs that leave


def test_a_notice_is_obeyed_as_long_before_as_leaving_takes() -> None:
    # Stopping takes 1 s, and there is a margin of 5.
    assert LEAVE_MARGIN_S == 5.0
    wants = policy({"2C": 50.0, "1C": 90.0}, space=COLOCATED)
    state = fleet("a1 c1x", "0 C a0", "1 C c0")
    due = noticed(state, "c0", 106.0)
    made = decided(wants, due, moment=Moment.GPUS_CHANGED)
    assert (made.reason, text(made.current), text(made.chosen)) == (Reason.FORCED, "1C", "1C")
    assert plan_of(made) == ["vacate: 0 drain 1; 1 stop 1 <0; 2 back to external c0 <1"]
    assert (gates(made), made.look_again_s) == ([], None)
    early = decided(wants, noticed(state, "c0", 106.5))
    assert (early.reason, text(early.chosen), early.look_again_s) == (Reason.BEST, "2C", 100.5)


def test_the_end_of_a_lease_counts_as_a_notice() -> None:
    wants = policy({"2C": 50.0, "1C": 90.0}, space=COLOCATED)
    state = fleet("a1 c1x", "0 C a0", "1 C c0")
    assert decided(wants, leased(state, "l", "c0", end_s=106.0)).reason is Reason.FORCED
    assert decided(wants, leased(state, "l", "c0", end_s=50.0)).reason is Reason.FORCED  # over already
    later = decided(wants, leased(state, "l", "c0", end_s=200.0))
    assert (later.reason, later.look_again_s) == (Reason.BEST, 194.0)
    first = decided(wants, noticed(leased(state, "l", "c0", end_s=200.0), "c0", 150.0))
    assert first.look_again_s == 144.0


def test_no_worker_starts_on_gpus_under_notice() -> None:
    state = fleet("a1 c1x", "0 C a0")
    made = decided(policy({"2C": 50.0, "1C": 90.0}), noticed(state, "c0", 9000.0))
    assert (made.reason, text(made.chosen)) == (Reason.BEST, "1C")
    over = decided(policy({"2C": 50.0, "1C": 90.0}), leased(state, "l", "c0", end_s=100.0))
    assert (over.reason, text(over.chosen)) == (Reason.BEST, "1C")


def test_where_nothing_is_left_that_can_serve_what_must_go_goes() -> None:
    state = noticed(fleet("c1x", "0 C c0"), "c0", 100.0)
    made = decided(policy({"1C": 50.0}), state)
    assert (made.reason, made.current, made.chosen, made.refusal) == (Reason.NOTHING_FITS, None, None, None)
    assert plan_of(made) == ["vacate: 0 drain 0; 1 stop 0 <0; 2 back to external c0 <1"]
    # And what cannot serve alone stays, as it is.
    state = noticed(fleet("a1 c1x", "0 C c0", "1 D a0"), "c0", 100.0)
    made = decided(policy({}), state)
    assert (made.reason, text(made.current), made.chosen) == (Reason.NOTHING_FITS, "1D", None)
    assert plan_of(made) == ["vacate: 0 drain 0; 1 stop 0 <0; 2 back to external c0 <1"]


def test_a_forced_change_goes_to_the_best_of_what_is_left() -> None:
    state = noticed(fleet("a2 c1x", "0 D a0", "1 D a1", "2 P c0"), "c0", 101.0)
    made = decided(policy({"1P2D": 40.0, "1P1D": 60.0, "2C": 70.0}), state)
    assert (made.reason, text(made.current), text(made.chosen)) == (Reason.FORCED, "2D", "1P1D")
    assert gates(made) == [("hysteresis", "1P1D", True, "current_infeasible")]


# Which GPUs a policy uses


def test_a_policy_may_leave_external_gpus_alone() -> None:
    wants = policy({"2C": 50.0, "1C": 90.0}, space=COLOCATED, external=False)
    made = decided(wants, fleet("a1 c1x", "0 C a0"))
    assert (made.reason, text(made.chosen)) == (Reason.BEST, "1C")
    # A worker that sits there all the same goes; the GPU is not given back, since nobody asked for it.
    made = decided(wants, fleet("a1 c1x", "0 C a0", "1 C c0"))
    assert (made.reason, plan_of(made)) == (Reason.FORCED, ["vacate: 0 drain 1; 1 stop 1 <0"])


def test_a_policy_may_use_a_number_of_gpus_those_that_are_used_first() -> None:
    wants = policy({"2C": 50.0, "3C": 40.0, "4C": 30.0, "1C": 90.0}, space=COLOCATED, gpus=2)
    state = fleet("a4 b2t", "0 C a2", "5 C- b0")
    made = decided(wants, state)
    assert after(state, made) == {0: "C1", 6: "C1"}
    assert plan_of(made) == ["expand: 0 start 6 C a0; 1 load 6 <0; 2 admit 6 <1"]
    # Three serve: the first two stay.
    state = fleet("a4", "0 C a1", "1 C a2", "2 C a3")
    assert after(state, decided(wants, state)) == {0: "C1", 1: "C1"}
    # One is on its way: it is one of the two.
    moving = fleet("a4", "0 C~ a3")
    made = decided(wants, moving)
    assert plan_of(made) == ["expand: 0 start 1 C a0; 1 load 1 <0; 2 admit 1 <1"]
    # Exactly as many as there are.
    assert text(decided(replace(wants, gpus=4), fleet("a4")).chosen) == "4C"


def test_a_static_shape_is_gone_to_whatever_it_costs() -> None:
    wants = policy({"1P2D": 500.0, "3C": 10.0, "2P1D": 20.0}, shape=parse_shape("1P2D"))
    state = fleet("a3", "0 C a0", "1 C a1", "2 C a2")
    made = decided(wants, state)
    assert (made.reason, text(made.chosen)) == (Reason.MOVED, "1P2D")
    assert gates(made) == [("hysteresis", "1P2D", True, "forced")]
    assert [text(each) for each in made.considered] == ["1P2D"]


# Transitions


def test_while_workers_are_in_transition_everything_else_waits() -> None:
    wants = policy({"1C": 100.0, "2C": 10.0, "1P2D": 1.0, "3C": 1.0}, borrow=Borrow.ANY)
    state = fleet("a3 b1t", "0 C a0", "1 C~ a1", "2 C- b0")
    made = decided(wants, state)
    assert (made.reason, text(made.current), text(made.chosen), made.plan) == (
        Reason.IN_TRANSITION,
        "1C",
        "1C",
        None,
    )
    assert (made.considered, made.evaluated, made.gates) == ((), 1, ())
    # A trainer on its way is none of it.
    state = fleet("a2 b1t", "0 C a0", "1 T~ b0")
    assert decided(wants, state).reason is Reason.MOVED


def test_what_must_go_goes_while_others_are_in_transition_and_those_are_left_alone() -> None:
    state = noticed(fleet("a2 c1x", "0 C a0", "1 C~ a1", "2 C c0"), "c0", 101.0)
    made = decided(policy({"1C": 100.0}), state)
    assert (made.reason, plan_of(made)) == (
        Reason.FORCED,
        ["vacate: 0 drain 2; 1 stop 2 <0; 2 back to external c0 <1"],
    )


def test_what_cannot_serve_does_not_wait() -> None:
    made = decided(policy({"1C": 100.0}), fleet("a2", "0 D a0", "1 P~ a1"))
    assert (made.reason, text(made.current), text(made.chosen)) == (Reason.FORCED, "1D", "1C")


def test_nothing_can_be_said_to_fit_before_the_last_change_is_done() -> None:
    made = decided(policy({"1C": 100.0}), fleet("a1", "0 C~ a0"))
    assert (made.reason, made.chosen, made.plan) == (Reason.IN_TRANSITION, None, None)


# No way there


TWINS = ("0 C- b0 b1", "1 C- b0 b1")
"""Two overlap workers on the same GPUs: only one of them can serve, which counting does not see."""


def test_where_there_is_no_way_to_a_shape_what_serves_stays() -> None:
    state = fleet("a2 b2t", *TWINS, "2 C a0 a1")
    wants = policy({"1C@tp2": 100.0, "3C@tp2": 20.0}, borrow=Borrow.ALL_OR_NONE)
    made = decided(wants, state, situation(2))
    assert (made.reason, text(made.chosen), made.plan) == (Reason.NO_PLAN, "1C@tp2", None)
    assert made.refusal is not None
    assert made.refusal.reason is PlanRefusalReason.TOO_FEW_GPUS
    assert gates(made)[-1] == ("borrow", "up to 2 workers", True, "gain")


def test_where_nothing_serves_the_next_best_is_gone_to() -> None:
    wants = policy({"1C@tp2": 100.0, "3C@tp2": 20.0}, borrow=Borrow.ALL_OR_NONE)
    made = decide(wants, fleet("a2 b2t", *TWINS), situation(2), Moment.STARTED, 0.0)
    assert (made.reason, text(made.chosen), made.refusal) == (Reason.FORCED, "1C@tp2", None)
    assert plan_of(made) == ["expand: 0 start 2 C a0 a1; 1 load 2 <0; 2 admit 2 <1"]
    # What serves in one role alone does not serve.
    made = decide(wants, fleet("a2 b2t", *TWINS, "2 D a0 a1"), situation(2), Moment.TICK, 0.0)
    assert (made.reason, text(made.current), text(made.chosen)) == (Reason.FORCED, "1D@tp2", "1C@tp2")


def test_where_there_is_no_way_at_all_what_must_go_goes() -> None:
    state = noticed(fleet("c2x b2t", *TWINS, "2 C c0 c1"), "c0 c1", 0.0)
    wants = policy({"1C@tp2": 100.0, "2C@tp2": 20.0}, borrow=Borrow.ALL_OR_NONE)
    made = decide(wants, state, situation(2), Moment.TICK, 0.0)
    assert (made.reason, made.chosen) == (Reason.NO_PLAN, None)
    assert made.refusal is not None
    assert made.refusal.reason is PlanRefusalReason.TOO_FEW_GPUS
    assert plan_of(made) == ["vacate: 0 drain 2; 1 stop 2 <0; 2 back to external c0 c1 <1"]
    # Nothing serves, and nothing must go.
    made = decide(wants, fleet("b2t", *TWINS), situation(2), Moment.TICK, 0.0)
    assert (made.reason, made.chosen, made.plan) == (Reason.NO_PLAN, None, None)
    assert made.refusal is not None


def test_at_most_five_others_are_tried() -> None:
    assert FALLBACKS == 5


# Borrowing, and giving back

LENT = {"1C": 100.0, "2C": 60.0, "3C": 50.0}


def test_training_gpus_are_borrowed_where_that_pays() -> None:
    state = fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1")
    made = decided(policy(LENT, borrow=Borrow.ANY), state, moment=Moment.TRAINING_FINISHED)
    assert (made.reason, text(made.current), text(made.chosen)) == (Reason.BORROWED, "1C", "3C")
    assert made.chosen is not None
    assert made.chosen.borrowed == 2
    assert gates(made) == [("borrow", "up to 2 workers", True, "gain")]
    assert numbers(made, "borrow") == [{"dedicated_s": 100.0, "borrowed_s": 50.0, "gain_s": 50.0, "toggle_s": 10.0}]
    # Back 4 s before the batch closes, 50 s from now.
    assert made.look_again_s == 146.0
    assert [(text(each), each.borrowed) for each in made.considered] == [("1C", 0), ("2C", 1), ("3C", 2)]
    per_worker = replace(situation(), toggle=replace(situation().toggle, per_worker_s=15.0))
    made = decided(policy(LENT, borrow=Borrow.ANY), state, per_worker)
    assert made.chosen is not None
    assert (text(made.chosen), made.chosen.borrowed) == ("2C", 1)


def test_and_not_where_it_does_not() -> None:
    state = fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1")
    made = decided(policy(LENT, borrow=Borrow.ANY), state, situation(toggle_s=50.0))
    assert (made.reason, text(made.chosen), made.plan) == (Reason.GATED, "1C", None)
    assert gates(made) == [("borrow", "up to 2 workers", False, "below_cost")]
    never = decided(policy(LENT), state)
    assert (never.reason, never.gates) == (Reason.BEST, ())


def test_where_only_borrowed_workers_can_serve_they_do() -> None:
    state = fleet("b2t", "1 C- b0", "2 C- b1")
    made = decided(policy({"2C": 60.0, "1C": 90.0}, borrow=Borrow.ANY), state)
    assert (made.reason, text(made.chosen)) == (Reason.FORCED, "2C")
    assert gates(made) == [("borrow", "up to 2 workers", True, "current_infeasible")]


def test_borrowed_workers_go_back_in_time() -> None:
    state = fleet("a1 b2t", "0 C a0", "1 C b0", "2 C b1")
    # 50 s from now, with an error of 20 s twice, 4 s for going back: 6 s from now.
    made = decided(policy(LENT, borrow=Borrow.ANY, errors_s={"3C": 20.0}), state)
    assert (made.reason, text(made.chosen), made.plan, made.look_again_s) == (Reason.BEST, "3C", None, 106.0)
    assert gates(made) == [("return", "2 workers", False, "not_yet")]
    assert numbers(made, "return") == [{"now_s": 100.0, "close_s": 50.0, "error_s": 20.0, "return_by_s": 106.0}]
    due = decided(policy(LENT, borrow=Borrow.ANY, errors_s={"3C": 23.0}), state)
    assert (due.reason, text(due.current), text(due.chosen)) == (Reason.RETURNED, "1C", "1C")
    assert gates(due) == [("return", "2 workers", True, "due")]
    assert plan_of(due) == ["return: 0 drain 1; 1 drain 2; 2 sleep 1 <0; 3 sleep 2 <1; 4 back to training b0 b1 <2 <3"]
    assert due.look_again_s is None


@pytest.mark.parametrize("borrow", [Borrow.ANY, Borrow.ALL_OR_NONE, Borrow.ALWAYS])
def test_and_stay_there_after_the_deadline(borrow: Borrow) -> None:
    state = fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1")
    wants = policy({"1C": 100.0, "3C": 50.0}, borrow=borrow, errors_s={"3C": 23.0})
    made = decided(wants, state)
    # Faster, if not for long: that is told, and what it was.
    assert (made.reason, text(made.chosen), made.plan) == (Reason.GATED, "1C", None)
    assert gates(made) == [("borrow", "3C", False, "due_at_once")]
    assert [(text(each), each.borrowed) for each in made.considered] == [("1C", 0), ("3C", 2)]


CLOSED = Progress(batch_trajectories=64, unfinished=0, live_groups=4, needed_groups=0)


@pytest.mark.parametrize(
    ("moment", "training", "progress"),
    [
        (Moment.TRAINING_BEGAN, False, fresh_batch(4, 16)),
        (Moment.TICK, True, fresh_batch(4, 16)),
        (Moment.GPUS_CHANGED, False, CLOSED),
    ],
)
@pytest.mark.parametrize("borrow", [Borrow.ANY, Borrow.ALL_OR_NONE, Borrow.ALWAYS, Borrow.SEEDING])
def test_when_the_batch_is_there_they_go_back_at_once(
    moment: Moment, training: bool, progress: Progress, borrow: Borrow
) -> None:
    about = replace(situation(progress=progress), training=training, since_training_s=1.0)
    wants = policy(LENT, borrow=borrow, seeding_s=50.0)
    state = fleet("a1 b2t", "0 C a0", "1 C b0", "2 C b1")
    made = decided(wants, state, about, moment=moment)
    assert (made.reason, text(made.chosen)) == (Reason.RETURNED, "1C")
    assert gates(made) == [("return", "2 workers", True, "batch_closed")]
    # And none are borrowed.
    state = fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1")
    made = decided(wants, state, about, moment=moment)
    assert (made.reason, made.gates) == (Reason.BEST, ())


def test_they_go_back_where_nothing_is_left_that_can_serve() -> None:
    made = decided(policy({"1C": 9.0}, borrow=Borrow.ANY), fleet("b1t", "1 C b0"), moment=Moment.TRAINING_BEGAN)
    assert (made.reason, made.chosen) == (Reason.NOTHING_FITS, None)
    assert plan_of(made) == ["return: 0 drain 1; 1 sleep 1 <0; 2 back to training b0 <1"]


def test_they_go_back_whatever_is_in_transition() -> None:
    state = fleet("a2 b1t", "0 C a0", "1 C b0", "2 C~ a1")
    made = decided(policy(LENT, borrow=Borrow.ANY), state, moment=Moment.TRAINING_BEGAN)
    assert (made.reason, text(made.chosen)) == (Reason.RETURNED, "1C")


def test_a_trainer_that_takes_its_gpus_is_made_way_for() -> None:
    state = fleet("a1 b2t", "0 C a0", "1 C b0", "2 C b1", "3 T~ b0")
    made = decided(policy({**LENT, "2C": 60.0}, borrow=Borrow.ANY), state)
    assert (made.reason, text(made.chosen)) == (Reason.RETURNED, "2C")
    assert plan_of(made) == ["return: 0 drain 1; 1 sleep 1 <0; 2 back to training b0 <1"]


def test_a_policy_that_never_borrows_gives_back_what_it_finds() -> None:
    made = decided(policy(LENT), fleet("a1 b1t", "0 C a0", "1 C b0"))
    assert (made.reason, gates(made)) == (Reason.RETURNED, [("return", "1 workers", False, "not_yet")])


def test_infeasible_ones_are_not_due_and_serve_no_more_than_others() -> None:
    # Borrowed prefill without decode: nothing serves, and what is best is gone to.
    made = decided(policy({"2C": 60.0, "1C": 70.0}, borrow=Borrow.ANY), fleet("a1 b1t", "0 P a0", "1 P b0"))
    assert (made.reason, text(made.chosen)) == (Reason.FORCED, "2C")
    assert numbers(made, "return") == [{"now_s": 100.0, "close_s": INF, "error_s": INF, "return_by_s": INF}]


@pytest.mark.parametrize(
    ("since_s", "reason", "look_again_s"),
    [
        (0.0, Reason.BORROWED, 130.0),
        (29.5, Reason.BORROWED, 100.5),
        (30.0, Reason.BEST, None),
        (None, Reason.BEST, None),
    ],
)
def test_seeding_lasts_for_a_while_after_an_update(
    since_s: float | None, reason: Reason, look_again_s: float | None
) -> None:
    wants = policy(LENT, borrow=Borrow.SEEDING, seeding_s=30.0)
    about = replace(situation(), since_training_s=since_s)
    made = decided(wants, fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1"), about)
    assert (made.reason, made.look_again_s, made.gates) == (reason, look_again_s, ())
    # When it is over they go back.
    made = decided(wants, fleet("a1 b2t", "0 C a0", "1 C b0", "2 C b1"), about)
    assert made.reason is (Reason.BEST if reason is Reason.BORROWED else Reason.RETURNED)


def test_a_seeding_window_that_outlasts_the_batch_ends_with_it() -> None:
    wants = policy(LENT, borrow=Borrow.SEEDING, seeding_s=300.0)
    about = replace(situation(), since_training_s=0.0)
    assert decided(wants, fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1"), about).look_again_s == 146.0
    # Another that borrows does not look at the window.
    other = replace(wants, borrow=Borrow.ANY, seeding_s=10.0)
    assert decided(other, fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1"), about).look_again_s == 146.0


# Leases


def test_no_worker_starts_where_it_would_not_serve() -> None:
    # Starting takes 50 s; the lease ends in 50.
    state = leased(fleet("a1 c2x", "0 C a0"), "l", "c0 c1", end_s=150.0)
    wants = policy({"1C": 100.0, "3C": 10.0}, lease_aware=True, space=COLOCATED)
    made = decided(wants, state)
    assert (made.reason, text(made.chosen)) == (Reason.GATED, "1C")
    assert gates(made) == [("lease", "2 GPUs", False, "lease_too_short")]
    assert numbers(made, "lease") == [{"gpus": 2.0, "start_s": 50.0, "old_s": 100.0, "new_s": 10.0}]
    # What serves, the best without them and the best with them.
    assert made.evaluated == 3
    # A known end everybody heeds, and nobody else what is only expected.
    blind = replace(wants, lease_aware=False)
    assert gates(decided(blind, state)) == [("lease", "2 GPUs", False, "lease_too_short")]
    later = leased(fleet("a1 c2x", "0 C a0"), "l", "c0 c1", end_s=150.1)
    soon = replace(situation(), lease_prior_s=1.0)
    made = decided(blind, later, soon)
    assert (made.reason, text(made.chosen), gates(made)) == (Reason.MOVED, "3C", [("hysteresis", "3C", True, "gain")])
    assert gates(decided(wants, later, soon)) == [("lease", "2 GPUs", False, "lease_too_short")]


def lease_numbers(made: Decision) -> dict[str, float]:
    (found,) = numbers(made, "lease")
    return found


@pytest.mark.parametrize("lease_aware", [True, False])
def test_gpus_that_are_gone_too_soon_keep_back_only_what_is_faster(lease_aware: bool) -> None:
    # One more GPU is no second worker of two.
    times = {"1C@tp2": 100.0, "2C@tp2": 60.0}
    state = leased(fleet("a2 c1x", "0 C a0 a1"), "l", "c0", end_s=140.0)
    made = decided(policy(times, lease_aware=lease_aware), state, situation(2))
    assert (made.reason, text(made.chosen), made.plan) == (Reason.BEST, "1C@tp2", None)
    assert gates(made) == [("lease", "1 GPUs", False, "lease_too_short")]
    assert lease_numbers(made) == {"gpus": 1.0, "start_s": 50.0, "old_s": 100.0, "new_s": 100.0}
    # Two are.
    state = leased(fleet("a2 c2x", "0 C a0 a1"), "l", "c0 c1", end_s=140.0)
    made = decided(policy(times, lease_aware=lease_aware), state, situation(2))
    assert (made.reason, text(made.chosen)) == (Reason.GATED, "1C@tp2")
    assert lease_numbers(made) == {"gpus": 2.0, "start_s": 50.0, "old_s": 100.0, "new_s": 60.0}


@pytest.mark.parametrize(
    ("more_s", "reason"),
    [
        (999.0, Reason.GATED),
        # Within a thousandth is equally good.
        (999.01, Reason.BEST),
        (1000.0, Reason.BEST),
        (1001.0, Reason.BEST),
        (INF, Reason.BEST),
    ],
)
def test_and_what_is_slower_or_as_fast_is_not_kept_back(more_s: float, reason: Reason) -> None:
    state = leased(fleet("a1 c1x", "0 C a0"), "l", "c0", end_s=150.0)
    made = decided(policy({"1C": 1000.0, "2C": more_s}, space=COLOCATED), state)
    assert (made.reason, text(made.chosen)) == (reason, "1C")
    assert lease_numbers(made) == {"gpus": 1.0, "start_s": 50.0, "old_s": 1000.0, "new_s": more_s}


def test_a_shape_that_is_given_gains_nothing_by_more_gpus() -> None:
    state = leased(fleet("a1 c1x", "0 C a0"), "l", "c0", end_s=150.0)
    made = decided(policy({"1C": 100.0, "2C": 10.0}, shape=parse_shape("1C")), state)
    assert (made.reason, lease_numbers(made)["new_s"]) == (Reason.BEST, 100.0)


def test_what_another_gate_keeps_back_is_gated_beside_a_lease_that_does_not() -> None:
    state = leased(fleet("a4 c1x", "0 C a0 a1", "1 C a2 a3"), "l", "c0", end_s=150.0)
    made = decided(policy({"2C@tp2": 100.0, "1P1D@tp2": 95.0}), state, situation(2))
    assert gates(made) == [
        ("lease", "1 GPUs", False, "lease_too_short"),
        ("hysteresis", "1P1D@tp2", False, "below_threshold"),
    ]
    assert (made.reason, text(made.chosen)) == (Reason.GATED, "2C@tp2")


def test_a_lease_keeps_back_what_its_own_gpus_would_win() -> None:
    # c0 is gone too soon; d0 stays for 500 s of service, which win as much as admission costs: without it too.
    wants = policy({"1C": 102.0, "2C": 100.0, "3C": 1.0}, lease_aware=True, space=COLOCATED)
    state = leased(fleet("a1 c1x d1x", "0 C a0"), "l", "c0", end_s=150.0)
    made = decided(wants, leased(state, "m", "d0", end_s=650.0), certain())
    assert [each[0] for each in gates(made)] == ["lease", "hysteresis", "expansion"]
    assert (made.reason, text(made.chosen)) == (Reason.GATED, "1C")
    assert lease_numbers(made) == {"gpus": 1.0, "start_s": 50.0, "old_s": 102.0, "new_s": 100.0}
    # 1 s more of it, and it serves: they would come on top.
    made = decided(wants, leased(state, "m", "d0", end_s=652.0), certain())
    assert (made.reason, text(made.chosen)) == (Reason.MOVED, "2C")
    assert (lease_numbers(made)["old_s"], lease_numbers(made)["new_s"]) == (100.0, 1.0)


def test_a_lease_is_weighed_beside_what_is_borrowed() -> None:
    state = leased(fleet("a1 b1t c1x", "0 C a0", "1 C b0"), "l", "c0", end_s=150.0)
    made = decided(policy({"1C": 100.0, "2C": 60.0, "3C": 40.0}, borrow=Borrow.ANY, space=COLOCATED), state)
    assert (made.reason, text(made.chosen)) == (Reason.GATED, "2C")
    assert lease_numbers(made) == {"gpus": 1.0, "start_s": 50.0, "old_s": 60.0, "new_s": 40.0}


def test_a_lease_may_keep_back_the_only_gpus_there_are() -> None:
    state = leased(fleet("c1x"), "l", "c0", end_s=150.0)
    made = decided(policy({"1C": 90.0}), state)
    assert (made.reason, made.chosen) == (Reason.NOTHING_FITS, None)
    assert lease_numbers(made) == {"gpus": 1.0, "start_s": 50.0, "old_s": INF, "new_s": 90.0}
    made = decided(policy({}), state)
    assert lease_numbers(made) == {"gpus": 1.0, "start_s": 50.0, "old_s": INF, "new_s": INF}


def certain(about: Situation | None = None) -> Situation:
    """Leases last until their ends, as good as surely."""
    return replace(about or situation(), lease_prior_s=1e12)


def test_expansion_is_weighed_against_the_lease() -> None:
    # 10 s of admission against 2 s for each 100 of service with 2 % more speed.
    wants = policy({"1C": 102.0, "2C": 100.0}, lease_aware=True, space=COLOCATED)
    state = fleet("a1 c1x", "0 C a0")
    # 500 s of service, after 50 s of starting, win 500 * 0.02 = 10 s.
    made = decided(wants, leased(state, "l", "c0", end_s=650.0), certain())
    assert (made.reason, text(made.chosen)) == (Reason.GATED, "1C")
    assert gates(made) == [
        ("hysteresis", "2C", True, "gain"),
        ("expansion", "2C", False, "gain_too_small"),
    ]
    found = numbers(made, "expansion")[0]
    assert found["useful_s"] == pytest.approx(500.0, abs=1e-3)
    assert (found["old_s"], found["new_s"], found["cost_s"]) == (102.0, 100.0, 10.0)
    assert found["gain_s"] == pytest.approx(10.0, abs=1e-3)
    assert made.evaluated == 3
    made = decided(wants, leased(state, "l", "c0", end_s=651.0), certain())
    assert (made.reason, text(made.chosen)) == (Reason.MOVED, "2C")
    assert gates(made)[-1] == ("expansion", "2C", True, "gain")
    assert made.evaluated == 3


def test_what_moving_costs_is_weighed_too() -> None:
    # 1P2D -> 2P3D costs nothing but admission; 1P2D -> 1D.. here: 2P1D -> 1P4D changes a third of the GPUs' roles.
    wants = policy({"2P1D": 100.0, "1P4D": 50.0}, lease_aware=True)
    state = leased(fleet("a3 c2x", "0 P a0", "1 P a1", "2 D a2"), "l", "c0 c1", end_s=9000.0)
    made = decided(wants, state, certain())
    assert text(made.chosen) == "1P4D"
    assert numbers(made, "expansion")[0]["cost_s"] == pytest.approx(10.0 + 20 / 3)


def test_free_gpus_that_stay_longest_are_used_where_the_others_do_not_pay() -> None:
    # The speed with one, two or three more: 60, 90 and 100 % more for 10 s; the ends leave 10, 30 and 1000 s of service.
    wants = policy({"1C": 120.0, "2C": 75.0, "3C": 63.0, "4C": 60.0}, lease_aware=True, space=COLOCATED)
    state = fleet("a1 c3x", "0 C a0")
    state = leased(leased(leased(state, "k", "c0", end_s=160.0), "l", "c1", end_s=180.0), "m", "c2", end_s=1150.0)
    made = decided(wants, state, certain())
    # Of three the two shorter ones are left out first: 10 s of service do not win 10 s. Nor do they on top, both or one.
    assert (made.reason, text(made.chosen)) == (Reason.MOVED, "2C")
    assert plan_of(made) == ["expand: 0 start 1 C c2; 1 load 1 <0; 2 admit 1 <1"]
    assert gates(made) == [
        ("hysteresis", "4C", True, "gain"),
        ("expansion", "4C", False, "gain_too_small"),
        ("hysteresis", "2C", True, "gain"),
        ("expansion", "2C", True, "gain"),
        ("hysteresis", "4C", True, "gain"),
        ("expansion", "4C", False, "gain_too_small"),
        ("hysteresis", "3C", True, "gain"),
        ("expansion", "3C", False, "gain_too_small"),
    ]
    found = numbers(made, "expansion")
    assert [each["useful_s"] for each in found] == pytest.approx([10.0, 1000.0, 10.0, 30.0], abs=1e-3)
    assert [each["old_s"] for each in found] == [120.0, 120.0, 75.0, 75.0]
    assert made.evaluated == 6
    # The best of the GPUs that are used, then what gates were asked about, each once.
    assert [text(each) for each in made.considered] == ["2C", "4C", "3C"]


def test_and_of_the_others_those_that_pay_on_top() -> None:
    # 60 s of service with a third worker win 60 * (75 / 63 - 1) = 11.4 s.
    wants = policy({"1C": 120.0, "2C": 75.0, "3C": 63.0, "4C": 60.0}, lease_aware=True, space=COLOCATED)
    state = fleet("a1 c3x", "0 C a0")
    state = leased(leased(leased(state, "k", "c0", end_s=160.0), "l", "c1", end_s=210.0), "m", "c2", end_s=1150.0)
    made = decided(wants, state, certain())
    assert text(made.chosen) == "3C"
    assert [each[1:3] for each in gates(made) if each[0] == "expansion"] == [
        ("4C", False),
        ("2C", True),
        ("4C", False),
        ("3C", True),
        ("4C", False),
    ]
    assert plan_of(made) == ["expand: 0 start 1 C c1; 1 start 2 C c2; 2 load 1 <0; 3 load 2 <1; 4 admit 1 2 <2 <3"]
    assert [text(each) for each in made.considered] == ["3C", "4C", "2C"]


def test_reserved_gpus_are_used_where_external_ones_do_not_pay() -> None:
    wants = policy({"1C": 120.0, "2C": 100.0, "3C": 99.0}, lease_aware=True, space=COLOCATED)
    state = leased(fleet("a2 c1x", "0 C a0"), "l", "c0", end_s=160.0)
    made = decided(wants, state, certain())
    assert (made.reason, text(made.chosen)) == (Reason.MOVED, "2C")
    assert gates(made) == [
        ("hysteresis", "2C", True, "gain"),
        ("hysteresis", "3C", True, "gain"),
        ("expansion", "3C", False, "gain_too_small"),
    ]
    # The gain is one over what the reserved ones give.
    assert numbers(made, "expansion")[0]["old_s"] == 100.0


def test_an_expansion_is_not_refused_where_nothing_serves_without() -> None:
    wants = policy({"2C": 100.0}, lease_aware=True, space=COLOCATED)
    state = leased(fleet("a1 c1x", "0 C a0"), "l", "c0", end_s=160.0)
    made = decided(wants, state, certain())
    assert (made.reason, text(made.chosen)) == (Reason.FORCED, "2C")
    assert gates(made)[-1] == ("expansion", "2C", True, "current_infeasible")
    # Nor is one weighed where nothing serves at all.
    made = decided(wants, leased(fleet("a1 c1x"), "l", "c0", end_s=160.0), certain())
    assert (made.reason, gates(made)) == (Reason.FORCED, [("hysteresis", "2C", True, "current_infeasible")])


def test_free_gpus_that_no_shape_wants_are_not_weighed() -> None:
    wants = policy({"1C@tp2": 100.0, "1P1D@tp2": 50.0}, lease_aware=True, space=COLOCATED)
    state = fleet("a2 c1x", "0 C a0 a1")
    made = decided(wants, state, situation(2))
    assert (made.reason, gates(made)) == (Reason.BEST, [])
    # Nor where more would be slower, or as slow.
    for close_s in (100.0, 101.0):
        slow = policy({"1C": 100.0, "2C": close_s}, lease_aware=True, space=COLOCATED)
        made = decided(slow, fleet("a1 c1x", "0 C a0"))
        assert (made.reason, gates(made)) == (Reason.BEST, [])


def test_how_long_a_lease_lasts_is_expected_from_its_age_and_from_what_is_known() -> None:
    # Without any lease seen, one without an end lasts as long as the prior says, within the horizon:
    # 3600 (1 - exp(-14400 / 3600)) = 3534.1 s, and 50 s less of service.
    assert (HORIZON_S, situation().lease_prior_s) == (14400.0, 3600.0)
    wants = policy({"1C": 102.0, "2C": 100.0}, lease_aware=True, space=COLOCATED)
    state = fleet("a1 c1x", "0 C a0")
    for held in (state, leased(state, "l", "c0", since_s=40.0), leased(state, "l", "c0", since_s=1000.0)):
        made = decided(wants, held)
        assert numbers(made, "expansion")[0]["useful_s"] == pytest.approx(3600 * (1 - math.exp(-4)) - 50, rel=1e-9)
    # Ten leases that ended after 300 s each: one of 290 s is about to, one that has just begun is not.
    seen = LeaseHistory(spans=(LeaseSpan(duration_s=300.0, ended=True),) * 10)
    about = replace(situation(), leases=seen)
    young = decided(wants, leased(state, "l", "c0", since_s=100.0), about)
    old = decided(wants, leased(state, "l", "c0", since_s=0.0), about, now_s=290.0)
    assert numbers(young, "expansion")[0]["useful_s"] > 250.0
    assert numbers(old, "expansion")[0]["useful_s"] < numbers(young, "expansion")[0]["useful_s"] - 150.0


def test_a_lease_that_has_just_begun_may_end_as_soon_as_others_did() -> None:
    # Ten of twelve (two of them the prior's) ended after half a second: a sixth of what the prior says.
    seen = LeaseHistory(spans=(LeaseSpan(duration_s=0.5, ended=True),) * 10)
    wants = policy({"1C": 102.0, "2C": 100.0}, lease_aware=True, space=COLOCATED)
    for since_s in (100.0, 200.0):  # one that begins later than now begins now
        state = leased(fleet("a1 c1x", "0 C a0"), "l", "c0", since_s=since_s)
        made = decided(wants, state, replace(situation(), leases=seen))
        assert numbers(made, "expansion")[0]["useful_s"] == pytest.approx(3534.1 / 6 - 50, rel=0.01)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("lease_prior_s", NAN, "a finite number > 0"),
        ("lease_prior_s", 0.0, "a finite number > 0"),
        ("lease_prior_s", INF, "a finite number > 0"),
        ("since_training_s", NAN, "None or >= 0"),
        ("since_training_s", -0.1, "None or >= 0"),
        ("append_tokens", -1, ">= 0"),
    ],
)
def test_a_situation_that_cannot_be_is_refused(name: str, value: float, allowed: str) -> None:
    with pytest.raises(ProfileError, match=rf"^situation: {name}: got {value}, want {allowed}$"):
        replace(situation(), **{name: value})  # type: ignore[arg-type]


def test_workers_on_their_way_to_gpus_that_have_to_go_are_called_off() -> None:
    """One that is being woken when training begins; one that starts where a notice is due; not those on other GPUs."""
    state = fleet("a1 b2t c1x d1x", "0 C a0", "1 C~ b0", "2 C- b1", "3 C~ c0", "4 C~ d0")
    state = noticed(leased(leased(state, "l", "c0"), "m", "d0"), "c0", 100.5)
    wants = policy(LENT, borrow=Borrow.ANY)
    assert decided(wants, state, moment=Moment.TRAINING_BEGAN).called_off == (1, 3)
    made = decided(wants, state)
    assert (made.reason, made.called_off) == (Reason.IN_TRANSITION, (3,))
    # And looked at again when a later notice falls due: 1 s to stop, 5 s of margin.
    later = noticed(leased(fleet("a1 d1x", "0 C a0", "4 C~ d0"), "m", "d0"), "d0", 160.0)
    made = decided(wants, later)
    assert (made.called_off, made.look_again_s) == ((), 154.0)


def test_borrowing_comes_on_top_of_what_leases_allow() -> None:
    wants = policy({"1C": 102.0, "2C": 60.0, "3C": 1.0}, lease_aware=True, borrow=Borrow.ANY, space=COLOCATED)
    state = leased(fleet("a1 b1t c1x", "0 C a0", "1 C- b0"), "l", "c0", end_s=150.0)
    made = decided(wants, state, certain())
    assert (made.reason, text(made.chosen)) == (Reason.BORROWED, "2C")
    assert [each[0] for each in gates(made)] == ["lease", "borrow"]


# All policies, with real predictors


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "oracle"])
def test_every_policy_starts_trains_and_goes_on(name: str) -> None:
    overlap = ["10 C- b0 b1", "11 C- b2 b3"]
    state = leased(fleet("a4 b4t c4x", *overlap), "l", "c0 c1 c2 c3", end_s=4000.0)
    wants = policy_named(name, PolicyOptions(fixed_tp=2, shape=parse_shape("1P1D@tp2"), gpus=6))
    about = replace(situation(1, 2, 4), since_training_s=0.0)
    started = decided(wants, state, about, moment=Moment.STARTED)
    assert started.reason is Reason.FORCED
    assert started.plan is not None
    assert started.chosen is not None
    running = apply(state, started.plan)
    assert isinstance(running, FleetState)
    training = replace(about, training=True, append_tokens=started.chosen.target.append_tokens)
    began = decided(wants, running, training, moment=Moment.TRAINING_BEGAN, now_s=400.0)
    assert began.reason is (Reason.RETURNED if started.chosen.borrowed else Reason.BEST)
    assert (text(began.chosen) or "") != ""
    trained = running if began.plan is None else apply(running, began.plan)
    assert isinstance(trained, FleetState)
    assert not any(trained.is_overlap(worker.id) for worker in trained.active())
    late = decided(wants, trained, training, moment=Moment.GPUS_CHANGED, now_s=3995.0)
    used_external = any(gpu.startswith("c") for worker in trained.active() for gpu in worker.gpus)
    assert late.reason is (Reason.FORCED if used_external else Reason.BEST)


def test_the_state_is_never_changed() -> None:
    state = fleet("a1 b2t", "0 C a0", "1 C- b0", "2 C- b1")
    frozen = MappingProxyType(dict(state.workers))
    decided(policy(LENT, borrow=Borrow.ANY), state)
    assert state.workers == frozen


# How often a predictor is asked


@dataclass
class Calls:
    """A predictor of what a test says that keeps what each call asked for."""

    told: Told
    asked: list[list[str]] = field(default_factory=list)
    name: str = "calls"
    appends: bool = True

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        def predict(candidates: Candidates) -> Predictions:
            self.asked.append([str(candidates.target(index)) for index in range(len(candidates))])
            return self.told.forecast(profile, progress)(candidates)

        return predict


def calls(
    state: FleetState,
    times_s: dict[str, float],
    about: Situation | None = None,
    *,
    space: Space = COLOCATED,
    borrow: Borrow = Borrow.NEVER,
) -> list[list[str]]:
    predictor = Calls(Told(times_s))
    wants = Policy(name="p", predictor=predictor, space=space, borrow=borrow, return_z=2.0)
    decide(wants, state, about or situation(), Moment.TICK, 100.0)
    return predictor.asked


def test_all_that_will_be_asked_for_is_asked_for_at_once() -> None:
    state = fleet("a2 b2t", "0 C a0", "1 C a1", "2 C- b0", "3 C- b1")
    times = {"2C": 90.0, "4C": 50.0}
    assert calls(state, times, space=Space(), borrow=Borrow.ALL_OR_NONE) == [
        ["2C", "1P1D", "4C", "1P3D", "2P2D", "3P1D"]
    ]
    assert calls(state, times, borrow=Borrow.ALL_OR_NONE) == [["2C", "4C"]]
    # Without lending only what is dedicated.
    assert calls(state, times) == [["2C"]]
    # What serves, and is no shape of the policy's, is asked for beside.
    assert calls(fleet("a3", "0 P a0", "1 D a1"), {"3C": 50.0}) == [["3C"], ["1P1D"]]
    # Nobody serves.
    assert calls(fleet("a2"), times) == [["2C"]]


def test_fewer_borrowed_ones_are_asked_for_at_once_where_the_mode_stays() -> None:
    state = fleet("a1 b4t", "0 C a0", "1 C- b0", "2 C- b1", "3 C- b2", "4 C- b3")
    times = {"1C": 99.0, "2C": 90.0, "3C": 80.0, "4C": 70.0, "5C": 50.0}
    assert calls(state, times, borrow=Borrow.ANY) == [["1C", "5C", "2C", "3C", "4C"]]


@pytest.mark.parametrize("workers", [(), ("0 P a0", "1 D a1")])
def test_where_the_mode_changes_they_are_asked_for_when_it_is_known(workers: tuple[str, ...]) -> None:
    """Nobody serves, or a pair: with one worker more than the two of their own."""
    state = fleet("a2 b2t", *workers, "2 C- b0", "3 C- b1")
    times = {"2C": 90.0, "3C": 80.0, "4C": 50.0}
    first, *more = calls(state, times, space=Space(), borrow=Borrow.ANY)
    assert {"2C", "4C"} <= set(first)
    assert [each for call in more for each in call if each.endswith("C")] == ["3C"]


def test_with_those_that_are_borrowed_it_is_asked_when_they_are_due_and_then_at_once() -> None:
    state = fleet("a1 b3t", "0 C a0", "1 C b0", "2 C- b1", "3 C- b2")
    times = {"1C": 99.0, "2C": 90.0, "4C": 50.0}
    assert calls(state, times, borrow=Borrow.ALL_OR_NONE) == [["2C"], ["4C"]]
    assert calls(state, times, space=Space(), borrow=Borrow.ALL_OR_NONE) == [
        ["2C"],
        ["1P1D", "4C", "1P3D", "2P2D", "3P1D"],
    ]


def test_without_gpus_nothing_is_asked() -> None:
    assert calls(FleetState(), {"1C": 1.0}) == []
    assert calls(fleet("a1"), {"1C@tp4": 1.0}, situation(4)) == []
    # Only with borrowed ones there is a shape.
    assert calls(fleet("b2t", "0 C- b0", "1 C- b1"), {"2C": 50.0}, borrow=Borrow.ALL_OR_NONE) == [["2C"]]
