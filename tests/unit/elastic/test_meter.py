"""What the meter makes of counters, by hand, and what it does in a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pearl.core.distribution import constant
from pearl.core.makespan import Profile
from pearl.core.workload import WorkloadProfile
from pearl.elastic.meter import Window, expected_s, window_of
from pearl.ports import EngineStats
from pearl.records.ids import WeightVersion
from tests.platforms import linear_times, platform_of

WORK = WorkloadProfile(
    turns=constant(4),
    prompt_tokens=constant(130),
    new_tokens=constant(90),
    generated_tokens=constant(20),
    env_s=constant(3),
)
"""100 new tokens per turn, mean."""
TIMES = linear_times(0.01, 0.002, 0.001)
"""0.01 s, and 0.002 s per decoding sequence or 0.001 s per prompt token, whichever the helper has them for."""
PROFILE = Profile(workload=WORK, platform=platform_of({1: TIMES}, 2048))


def stats(iterations: int, busy_s: float, generated: int, computed: int) -> EngineStats:
    return EngineStats(
        version=WeightVersion(0),
        running=0,
        waiting=0,
        kv_used_tokens=0,
        generated_tokens=generated,
        computed_prompt_tokens=computed,
        iterations=iterations,
        busy_s=busy_s,
    )


def test_what_lies_between_two_readings() -> None:
    window = window_of(stats(10, 1.0, 50, 300), stats(110, 3.5, 450, 700))
    assert window == Window(iterations=100, busy_s=2.5, generated_tokens=400, computed_prompt_tokens=400)


@pytest.mark.parametrize("now", [stats(10, 1.0, 50, 300), stats(5, 0.2, 10, 20), stats(20, 0.5, 60, 300)])
def test_nothing_and_another_engine_teach_nothing(now: EngineStats) -> None:
    assert window_of(stats(10, 1.0, 50, 300), now) is None


def test_by_hand() -> None:
    """4 prompts of 100 tokens in 100 iterations: 4 sequences decode, 396 tokens in all; prompts ride on 4 iterations."""
    window = Window(iterations=100, busy_s=0.0, generated_tokens=404, computed_prompt_tokens=400)
    want = 96 * TIMES.seconds(0, 4, 1000) + 4 * TIMES.seconds(100, 4, 1000)
    assert expected_s(PROFILE, 1, window) == pytest.approx(want)


def test_only_prompts() -> None:
    """More prompts than iterations share them; the tokens that they draw are nobody's decoding."""
    window = Window(iterations=2, busy_s=0.0, generated_tokens=4, computed_prompt_tokens=400)
    assert expected_s(PROFILE, 1, window) == pytest.approx(2 * TIMES.seconds(200, 0, 1000))


def test_the_scale_is_in_it() -> None:
    window = Window(iterations=100, busy_s=0.0, generated_tokens=400, computed_prompt_tokens=0)
    slow = replace(PROFILE, platform=replace(PROFILE.platform, time_scale={1: 1.5}))
    assert expected_s(slow, 1, window) == pytest.approx(1.5 * expected_s(PROFILE, 1, window))
