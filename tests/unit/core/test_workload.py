"""The workload profile and how it follows what is seen: moving averages by hand, nonsense counted, outliers tamed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from pearl.core.distribution import LARGEST, Distribution, constant
from pearl.core.workload import (
    WorkloadProfile,
    WorkloadSample,
    bubble_ratio,
    likeness_of,
    refit_workload,
    within_limits,
)
from pearl.errors import ProfileError

PROFILE = WorkloadProfile(
    turns=Distribution((1.0, 4.0), (0.5, 0.5)),
    prompt_tokens=constant(100),
    new_tokens=constant(20),
    generated_tokens=Distribution((10.0, 30.0), (0.5, 0.5)),
    env_s=Distribution((0.0, 8.0), (0.75, 0.25)),
    retained=0.5,
    turn_overhead_s=0.2,
    theta=1.0,
)


class TestProfile:
    def test_contexts_grow(self) -> None:
        """20 new tokens and half of 20 generated ones per turn, on top of 100."""
        assert PROFILE.growth_tokens == 30.0
        assert PROFILE.context_tokens(0) == 100.0
        assert PROFILE.context_tokens(2.5) == 175.0

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"turns": Distribution((0.99, 2.0), (0.5, 0.5))}, "turns: got 0.99, want >= 1"),
            ({"generated_tokens": constant(0)}, "generated_tokens: got a mean of 0, want > 0"),
            ({"generated_tokens": Distribution((0.0, 9.0), (1.0, 0.0))}, "generated_tokens: got a mean of 0, want > 0"),
            ({"retained": -0.01}, r"retained: got -0.01, want 0\.\.1"),
            ({"retained": 1.01}, r"retained: got 1.01, want 0\.\.1"),
            ({"retained": math.nan}, r"retained: got nan, want 0\.\.1"),
            ({"turn_overhead_s": -0.1}, "turn_overhead_s: got -0.1, want a finite number >= 0"),
            ({"turn_overhead_s": math.inf}, "turn_overhead_s: got inf, want a finite number >= 0"),
            ({"theta": -0.1}, "theta: got -0.1, want a finite number >= 0"),
            ({"likeness": -0.01}, r"likeness: got -0.01, want 0\.\.1"),
            ({"likeness": 1.01}, r"likeness: got 1.01, want 0\.\.1"),
            ({"likeness": math.nan}, r"likeness: got nan, want 0\.\.1"),
            ({"theta": math.nan}, "theta: got nan, want a finite number >= 0"),
        ],
    )
    def test_refused_by_name(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ProfileError, match=f"^workload: {message}$"):
            replace(PROFILE, **changes)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "changes",
        [
            {"turns": constant(1)},
            {"generated_tokens": Distribution((0.0, 9.0), (0.5, 0.5))},
            {"retained": 0.0},
            {"retained": 1.0},
            {"turn_overhead_s": 0.0},
            {"theta": 0.0},
            {"likeness": 0.0},
            {"likeness": 1.0},
        ],
    )
    def test_the_edges_are_allowed(self, changes: dict[str, object]) -> None:
        found = replace(PROFILE, **changes)  # type: ignore[arg-type]
        assert {name: getattr(found, name) for name in changes} == changes

    def test_what_is_not_said(self) -> None:
        plain = WorkloadProfile(
            turns=constant(1),
            prompt_tokens=constant(1),
            new_tokens=constant(1),
            generated_tokens=constant(1),
            env_s=constant(0),
        )
        assert (plain.retained, plain.turn_overhead_s, plain.theta, plain.likeness) == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("share", "theta"), [(1.0, 0.0), (0.5, 1.0), (0.25, 3.0), (0.001, 999.0), (0.0, 999.0), (1.5, 0.0), (-1.0, 999.0)]
)
def test_bubble_ratio(share: float, theta: float) -> None:
    assert bubble_ratio(share) == pytest.approx(theta)


class TestLikeness:
    def test_by_hand(self) -> None:
        """Shares of mid-ranks 1/8, 3/8, 5/8, 7/8, so scores -a, -b, b, a: between (a + b)^2, within (a - b)^2 / 2."""
        a, b = norm.ppf(7 / 8), norm.ppf(5 / 8)
        between, within = (a + b) ** 2, (a - b) ** 2 / 2
        want = (between - within) / (between + within)
        assert likeness_of([[1, 2], [3, 4]]) == pytest.approx(want)
        assert likeness_of([[3e9, 4e9], [0.1, 0.2]]) == pytest.approx(want)

    def test_groups_of_different_sizes_by_hand(self) -> None:
        """Scores -a, 0, a of {1, 3}, {2}: the one between is the mean of both, so nothing is between the groups."""
        assert likeness_of([[1, 3], [2]]) == 0.0
        # {1, 2}, {3}: sums -a and a over 2 and 1; size (3 - 5 / 3) / 1 = 4 / 3.
        a = norm.ppf(5 / 6)
        between, within = a**2 / 2 + a**2, 2 * a**2 - (a**2 / 2 + a**2)
        want = (between - within) / (between + (4 / 3 - 1) * within)
        assert likeness_of([[1, 2], [3]]) == pytest.approx(want)

    def test_ties_share_a_rank(self) -> None:
        """Two values: scores of 1/4 and 3/4, three of four of a kind in a group."""
        s = norm.ppf(3 / 4)
        between = 2 * (2 * s) ** 2 / 4
        within = (8 * s**2 - between) / 6
        want = (between - within) / (between + 3 * within)
        assert likeness_of([[1, 1, 1, 5], [5, 5, 5, 1]]) == pytest.approx(want)

    def test_ties_of_three_values(self) -> None:
        """Scores -a, 0, a, two each: between 8/3 a^2, within (4 - 8/3) a^2 / 4; whatever a is, that makes (7/3) / (10/3)."""
        assert likeness_of([[1, 1, 2], [2, 5, 5]]) == pytest.approx(0.7)

    def test_all_alike_and_more_unlike_than_chance(self) -> None:
        assert likeness_of([[1, 1], [2, 2], [3, 3, 3]]) == 1.0
        assert likeness_of([[1, 9], [2, 8], [3, 7]]) == 0.0

    @pytest.mark.parametrize("groups", [[], [[1, 2, 3]], [[1], [2], [3]], [[4, 4], [4, 4, 4]]])
    def test_too_few_to_tell(self, groups: list[list[float]]) -> None:
        """No two groups, nobody beside another, nothing that differs."""
        assert likeness_of(groups) is None

    @pytest.mark.parametrize("share", [0.0, 0.15, 0.5, 0.9])
    def test_of_drawn_groups(self, share: float) -> None:
        """Whole numbers of a skewed distribution, in groups of 2 to 15 whose scores have so much of their variance in common."""
        rng = np.random.default_rng(17)
        groups = []
        for size in rng.integers(2, 16, 1500):
            scores = math.sqrt(share) * rng.standard_normal() + math.sqrt(1 - share) * rng.standard_normal(size)
            groups.append(np.ceil(np.exp(3 + 0.8 * scores)).tolist())
        assert likeness_of(groups) == pytest.approx(share, abs=0.03)


class TestLimits:
    """A prompt of 100 and 20 generated make 120; each further turn adds 20 and half of 20: 150, 180, 210."""

    LONG = replace(PROFILE, turns=Distribution((1.0, 2.0, 3.0, 9.0), (0.25, 0.25, 0.25, 0.25)))

    @pytest.mark.parametrize(
        ("max_context_tokens", "turns"),
        [(149, (1.0,)), (150, (1.0, 2.0)), (179, (1.0, 2.0)), (180, (1.0, 2.0, 3.0)), (210, (1.0, 2.0, 3.0, 4.0))],
    )
    def test_turns_that_do_not_fit_the_context_are_cut(self, max_context_tokens: int, turns: tuple[float, ...]) -> None:
        found = within_limits(self.LONG, max_turns=100, max_context_tokens=max_context_tokens)
        assert found.turns.values == turns
        assert found.turns.weights[-1] == pytest.approx(1 - 0.25 * (len(turns) - 1))
        assert replace(found, turns=self.LONG.turns) == self.LONG

    @pytest.mark.parametrize(("max_turns", "turns"), [(1, (1.0,)), (2, (1.0, 2.0)), (9, (1.0, 2.0, 3.0, 9.0))])
    def test_turns_beyond_the_limit_are_cut(self, max_turns: int, turns: tuple[float, ...]) -> None:
        assert within_limits(self.LONG, max_turns=max_turns, max_context_tokens=10_000).turns.values == turns

    def test_one_turn_always_fits(self) -> None:
        assert within_limits(self.LONG, max_turns=5, max_context_tokens=2).turns == constant(1)

    def test_a_context_that_does_not_grow_fits_for_ever(self) -> None:
        still = replace(self.LONG, new_tokens=constant(0), retained=0.0)
        assert within_limits(still, max_turns=100, max_context_tokens=120) == still


class TestRefit:
    def test_an_empty_step_teaches_nothing(self) -> None:
        found = refit_workload(PROFILE, WorkloadSample(), 0.3)
        assert found.profile == PROFILE
        assert found.ignored == 0

    @pytest.mark.parametrize("name", ["turns", "prompt_tokens", "new_tokens", "generated_tokens", "env_s"])
    def test_each_distribution_is_mixed_with_its_sample(self, name: str) -> None:
        """Two samples share a quarter of the weight; the others stay as they were."""
        found = refit_workload(PROFILE, WorkloadSample(**{name: [2.0, 3.0]}), 0.25)
        old: Distribution = getattr(PROFILE, name)
        want = {value: 0.75 * weight for value, weight in zip(old.values, old.weights, strict=True)}
        want |= {2.0: 0.125, 3.0: 0.125}
        mixed: Distribution = getattr(found.profile, name)
        assert dict(zip(mixed.values, mixed.weights, strict=True)) == pytest.approx(want)
        assert replace(found.profile, **{name: old}) == PROFILE
        assert found.ignored == 0

    def test_all_of_the_new(self) -> None:
        found = refit_workload(PROFILE, WorkloadSample(turns=[2.0]), 1.0)
        assert found.profile.turns == constant(2)

    @pytest.mark.parametrize(
        ("sample", "name", "want"),
        [
            (WorkloadSample(retained=0.9), "retained", 0.6),
            (WorkloadSample(retained=0.0), "retained", 0.375),
            (WorkloadSample(retained=1.0), "retained", 0.625),
            (WorkloadSample(turn_overhead_s=0.4), "turn_overhead_s", 0.25),
            (WorkloadSample(turn_overhead_s=0.0), "turn_overhead_s", 0.15),
            # f was 1/2; a quarter of the way to 0.1 it is 0.4, and theta 0.6 / 0.4; to 0 it is 0.375; to 1, 0.625.
            (WorkloadSample(decoding_share=0.1), "theta", 1.5),
            (WorkloadSample(decoding_share=0.0), "theta", 0.625 / 0.375),
            (WorkloadSample(decoding_share=1.0), "theta", 0.6),
            (WorkloadSample(likeness=0.8), "likeness", 0.2),
            (WorkloadSample(likeness=0.0), "likeness", 0.0),
        ],
    )
    def test_numbers_move_by_their_share(self, sample: WorkloadSample, name: str, want: float) -> None:
        found = refit_workload(PROFILE, sample, 0.25)
        assert getattr(found.profile, name) == pytest.approx(want)
        assert replace(found.profile, **{name: getattr(PROFILE, name)}) == PROFILE
        assert found.ignored == 0

    def test_a_fleet_that_never_decodes_has_a_bounded_ratio(self) -> None:
        found = refit_workload(PROFILE, WorkloadSample(decoding_share=0.0), 1.0)
        assert found.profile.theta == pytest.approx(999.0)

    @pytest.mark.parametrize("name", ["turns", "prompt_tokens", "new_tokens", "generated_tokens", "env_s"])
    def test_nonsense_is_left_out_and_counted(self, name: str) -> None:
        nonsense = [math.nan, math.inf, -math.inf, -1.0, 1.01 * LARGEST, 10**400]
        alone = refit_workload(PROFILE, WorkloadSample(**{name: nonsense}), 0.3)
        assert alone.profile == PROFILE
        assert alone.ignored == 6
        beside = refit_workload(PROFILE, WorkloadSample(**{name: [2.0, *nonsense]}), 0.3)
        assert beside.profile == refit_workload(PROFILE, WorkloadSample(**{name: [2.0]}), 0.3).profile
        assert beside.ignored == 6

    def test_a_turn_generates_at_least_one_token(self) -> None:
        """0.99 and 0 are left out; 1 takes half of the weight."""
        found = refit_workload(PROFILE, WorkloadSample(generated_tokens=[0.99, 0.0, 1.0]), 0.5)
        assert found.ignored == 2
        assert found.profile.generated_tokens.values == (1.0, 10.0, 30.0)
        assert found.profile.generated_tokens.weights == pytest.approx((0.5, 0.25, 0.25))

    def test_zero_is_sound_except_for_turns_and_generated_tokens(self) -> None:
        found = refit_workload(PROFILE, WorkloadSample(turns=[0.99, 0.0, 1.0], env_s=[0.0], new_tokens=[0.0]), 0.5)
        assert found.ignored == 2
        assert found.profile.turns.weights == pytest.approx((0.75, 0.25))
        assert found.profile.new_tokens.values == (0.0, 20.0)

    @pytest.mark.parametrize(
        ("sample", "ignored"),
        [
            (WorkloadSample(retained=-0.1), 1),
            (WorkloadSample(retained=1.1), 1),
            (WorkloadSample(retained=math.nan), 1),
            (WorkloadSample(turn_overhead_s=-0.1), 1),
            (WorkloadSample(turn_overhead_s=math.inf), 1),
            (WorkloadSample(turn_overhead_s=1.01 * LARGEST), 1),
            (WorkloadSample(decoding_share=-0.1), 1),
            (WorkloadSample(decoding_share=1.1), 1),
            (WorkloadSample(decoding_share=math.nan), 1),
            (WorkloadSample(likeness=-0.1), 1),
            (WorkloadSample(likeness=1.1), 1),
            (WorkloadSample(likeness=math.nan), 1),
            (WorkloadSample(turns=[-1.0], retained=2.0, decoding_share=2.0), 3),
        ],
    )
    def test_senseless_numbers_teach_nothing(self, sample: WorkloadSample, ignored: int) -> None:
        found = refit_workload(PROFILE, sample, 0.3)
        assert found.profile == PROFILE
        assert found.ignored == ignored

    def test_an_outlier_counts_as_four_times_the_largest(self) -> None:
        """32 instead of an hour."""
        found = refit_workload(PROFILE, WorkloadSample(env_s=[3600.0, 1.0]), 0.5)
        assert found.profile.env_s == refit_workload(PROFILE, WorkloadSample(env_s=[32.0, 1.0]), 0.5).profile.env_s
        assert found.profile.env_s.largest == 32.0
        assert found.ignored == 0

    def test_what_is_within_four_times_counts_as_it_is(self) -> None:
        found = refit_workload(PROFILE, WorkloadSample(env_s=[31.9]), 0.5)
        assert found.profile.env_s.largest == 31.9

    def test_beyond_nothing_at_all_there_are_no_outliers(self) -> None:
        idle = replace(PROFILE, env_s=constant(0), turn_overhead_s=0.0)
        found = refit_workload(idle, WorkloadSample(env_s=[3600.0], turn_overhead_s=1e5), 0.5)
        assert found.profile.env_s.largest == 3600.0
        assert found.profile.turn_overhead_s == 5e4
        assert found.ignored == 0

    def test_a_slow_overhead_counts_as_four_times_what_was_known(self) -> None:
        """A quarter of the way from 0.2 to 0.8."""
        found = refit_workload(PROFILE, WorkloadSample(turn_overhead_s=1e9), 0.25)
        assert found.profile.turn_overhead_s == pytest.approx(0.35)

    def test_the_limit_of_what_is_known_stays_within_all_limits(self) -> None:
        vast = replace(PROFILE, env_s=constant(0.5 * LARGEST))
        assert refit_workload(vast, WorkloadSample(env_s=[LARGEST]), 0.5).profile.env_s.largest == LARGEST
