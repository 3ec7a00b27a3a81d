"""How unlike turns are, by hand: what they generate and what they wait, over a mean turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pearl.core.distribution import Distribution, constant
from pearl.core.makespan import Profile
from pearl.core.pace import Pace, pace_of
from pearl.core.workload import WorkloadProfile
from tests.platforms import linear_times, platform_of

WORK = WorkloadProfile(
    turns=constant(4),
    prompt_tokens=constant(100),
    new_tokens=constant(50),
    generated_tokens=Distribution((10.0, 30.0), (0.5, 0.5)),
    env_s=Distribution((0.0, 6.0), (0.9, 0.1)),
)
TIMES = linear_times(0.01, 0.002, 0.001)
"""12 ms for a token alone."""


def pace(work: WorkloadProfile = WORK, scale: float = 1.0) -> Pace:
    platform = platform_of({2: linear_times(9.0, 9.0, 9.0), 1: TIMES}, 2048)
    return pace_of(Profile(workload=work, platform=replace(platform, time_scale={1: scale})))


def check(found: Distribution, values: tuple[float, ...], weights: tuple[float, ...]) -> None:
    assert found.values == pytest.approx(values)
    assert found.weights == weights


def test_shares_of_a_mean_turn() -> None:
    """20 tokens of 12 ms and 0.6 s: 0.84 s on the smallest tensor parallelism."""
    found = pace()
    check(found.generates, (0.12 / 0.84, 0.36 / 0.84), (0.5, 0.5))
    check(found.waits, (0.0, 6 / 0.84), (0.9, 0.1))
    assert found.generates.mean + found.waits.mean == pytest.approx(1.0)


def test_the_scale_of_iterations_is_in_it() -> None:
    """Five times 0.24 s beside 0.6 s."""
    found = pace(scale=5.0)
    check(found.generates, (0.6 / 1.8, 1.8 / 1.8), (0.5, 0.5))
    check(found.waits, (0.0, 6 / 1.8), (0.9, 0.1))


def test_at_the_context_of_half_of_the_turns() -> None:
    """100 + 2 * (50 + 20) tokens; a sequence costs as much more as its context is of 32,768."""
    times = linear_times(0.0, 1.0, 0.0, contexts=(1, 8192))
    found = pace_of(Profile(workload=replace(WORK, env_s=constant(20)), platform=platform_of({1: times}, 2048)))
    token_s = 1 + 240 / 32768
    check(found.waits, (20 / (20 * token_s + 20),), (1.0,))


def test_nothing_but_generation_or_nothing_but_waits() -> None:
    found = pace(replace(WORK, env_s=constant(0)))
    check(found.generates, (0.5, 1.5), (0.5, 0.5))
    assert found.waits == constant(0)
    free = linear_times(0.0, 0.0, 0.0)
    found = pace_of(Profile(workload=WORK, platform=platform_of({1: free}, 2048)))
    assert found.generates == constant(0)
    check(found.waits, (0.0, 10.0), (0.9, 0.1))


def test_turns_that_take_no_time_are_alike() -> None:
    free = platform_of({1: linear_times(0.0, 0.0, 0.0)}, 2048)
    assert pace_of(Profile(workload=replace(WORK, env_s=constant(0)), platform=free)) == Pace(
        generates=constant(1), waits=constant(0)
    )
