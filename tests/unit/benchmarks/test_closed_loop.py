from dataclasses import replace

import pytest

from benchmarks._closed_loop import Routing, Sessions, alike, simulate, specs
from pearl.core.profile import HandOff, IterationTimes
from pearl.core.state import Role
from pearl.silicon.tables import silicon_profiles
from pearl.sim.limits import Limits
from pearl.sim.script import ScriptTurn

ONE_SECOND = IterationTimes(
    prefill_tokens=(0, 1000), decoding=(0, 100), context_tokens=(1,), cells_s=(((1.0,), (1.0,)), ((1.0,), (1.0,)))
)
PROFILE = replace(
    silicon_profiles("qwen3-8b", "h100", (1,))[1],
    iterations=ONE_SECOND,
    hand_off=HandOff(fixed_s=0.25, s_per_byte=0.0),
)


def test_sessions_begin_when_others_end() -> None:
    # Each session: 4 iterations, a wait of 2 s, 4 iterations; three of them, two at once.
    sessions = alike(2, 3, [ScriptTurn(10, 4, 2.0)] * 2)
    played = simulate(sessions, "1C", PROFILE, Limits())
    assert played.makespan_s == pytest.approx(20.0)
    assert played.turn_mean_s == pytest.approx(4.0)


def test_hand_off_takes_its_time() -> None:
    sessions = alike(1, 1, [ScriptTurn(10, 4, 0.0)])
    assert simulate(sessions, "1P1D", PROFILE, Limits()).makespan_s == pytest.approx(4.25)


def test_time_scale() -> None:
    sessions = alike(1, 1, [ScriptTurn(10, 4, 0.0)])
    assert simulate(sessions, "1C", PROFILE, Limits(), Routing(), time_scale=3.0).makespan_s == pytest.approx(12.0)


def test_roles_of_a_shape() -> None:
    assert [spec.role for spec in specs("1P2D")] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert len({spec.gpus for spec in specs("1P2D")}) == 3


def test_no_sessions() -> None:
    with pytest.raises(ValueError, match="got 0 at once of 1"):
        alike(0, 1, [ScriptTurn(1, 1, 0.0)])
    with pytest.raises(ValueError, match="attempt 1 at session 0"):
        Sessions(at_once=1, scripts=alike(1, 1, [ScriptTurn(1, 1, 0.0)]).scripts).script(0, 1)
