"""Distributions: every number by hand, and squeezing at its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pearl.core.distribution import FORGOTTEN, LARGEST, MAX_POINTS, Distribution, constant, distribution_of, squeezed
from pearl.errors import ProfileError

# Mean 1/4 * 0 + 1/2 * 2 + 1/4 * 6 = 2.5; variance 1/4 * 6.25 + 1/2 * 0.25 + 1/4 * 12.25 = 4.75.
THREE = Distribution((0.0, 2.0, 6.0), (0.25, 0.5, 0.25))


class TestNumbers:
    def test_moments(self) -> None:
        assert THREE.mean == 2.5
        assert THREE.variance == 4.75
        assert THREE.largest == 6.0

    def test_a_constant(self) -> None:
        assert constant(7) == Distribution((7.0,), (1.0,))
        assert constant(7).variance == 0.0

    @pytest.mark.parametrize(
        ("share", "value"),
        [(0.0, 0.0), (0.25, 0.0), (0.251, 2.0), (0.75, 2.0), (0.751, 6.0), (1.0, 6.0)],
    )
    def test_quantiles(self, share: float, value: float) -> None:
        assert THREE.quantile(share) == value

    def test_a_quantile_bears_rounding(self) -> None:
        """Ten tenths are a little less than 1 in floating point, and three of them a little more than 0.3."""
        tenths = Distribution(tuple(map(float, range(10))), (0.1,) * 10)
        assert sum([0.1] * 10) < 1.0
        assert tenths.quantile(1.0) == 9.0
        assert tenths.quantile(0.8) == 7.0

    def test_weights_that_fall_short_of_one_still_have_a_last_quantile(self) -> None:
        short = Distribution((1.0, 2.0), (0.5, 0.4999995))
        assert short.quantile(1.0) == 2.0

    def test_scaled(self) -> None:
        assert THREE.scaled(0.5) == Distribution((0.0, 1.0, 3.0), (0.25, 0.5, 0.25))

    def test_neighbours_that_scaling_makes_equal(self) -> None:
        """The smallest numbers there are: a quarter of them is 0."""
        close = Distribution((5e-324, 1e-323, 1.0), (0.25, 0.25, 0.5))
        assert close.scaled(0.25) == Distribution((0.0, 0.25), (0.5, 0.5))


class TestRefused:
    @pytest.mark.parametrize(
        ("values", "weights", "message"),
        [
            ((), (), "got 0 values and 0 weights, want as many, at least 1"),
            ((1.0, 2.0), (1.0,), "got 2 values and 1 weights, want as many"),
            ((-0.5,), (1.0,), "got value -0.5, want numbers 0..1e[+]15"),
            ((math.nan,), (1.0,), "got value nan"),
            ((math.inf,), (1.0,), "got value inf"),
            ((1.001e15,), (1.0,), "got value 1001000000000000.0, want numbers 0..1e[+]15"),
            ((1.0, 2.0), (1.5, -0.5), "got weight -0.5"),
            ((1.0,), (math.nan,), "got weight nan"),
            ((1.0, 1.0), (0.5, 0.5), "got values that do not rise, want each of them once, ascending"),
            ((2.0, 1.0), (0.5, 0.5), "got values that do not rise"),
            ((1.0, 2.0), (0.5, 0.499), "got weights of 0.999 in all, want 1"),
            ((1.0, 2.0), (0.5, 0.501), "got weights of 1.001 in all, want 1"),
        ],
    )
    def test_by_name(self, values: tuple[float, ...], weights: tuple[float, ...], message: str) -> None:
        with pytest.raises(ProfileError, match=f"^distribution: {message}"):
            Distribution(values, weights)

    def test_the_edges_are_allowed(self) -> None:
        assert Distribution((0.0, LARGEST), (0.0, 1.0)).mean == LARGEST
        assert Distribution((1.0, 2.0), (0.5, 0.5 - 9e-7)).largest == 2.0
        with pytest.raises(ProfileError, match="want 1"):
            Distribution((1.0, 2.0), (0.5, 0.5 - 2e-6))

    def test_squares_of_the_largest_value_do_not_overflow(self) -> None:
        assert Distribution((0.0, LARGEST), (0.5, 0.5)).variance == (LARGEST / 2) ** 2


class TestOfASample:
    def test_equal_values_become_one(self) -> None:
        assert distribution_of([3, 1, 3, 3]) == Distribution((1.0, 3.0), (0.25, 0.75))

    def test_the_order_does_not_matter(self) -> None:
        sample = [float(n * n % 101) for n in range(200)]
        assert distribution_of(sample) == distribution_of(sorted(sample)) == distribution_of(reversed(sample))

    def test_weights_count_relative_to_each_other(self) -> None:
        assert distribution_of([5, 1, 5], [2, 4, 2]) == Distribution((1.0, 5.0), (0.5, 0.5))

    def test_no_weight_no_point(self) -> None:
        assert distribution_of([1, 2], [1, 0]) == constant(1)

    @pytest.mark.parametrize(("weight", "points"), [(1.1 * FORGOTTEN, 2), (0.9 * FORGOTTEN, 1)])
    @pytest.mark.parametrize("scale", [1.0, 1000.0])
    def test_what_hardly_weighs_is_forgotten(self, weight: float, points: int, scale: float) -> None:
        assert len(distribution_of([1, 9], [scale, scale * weight]).values) == points

    @pytest.mark.parametrize(
        ("values", "weights", "message"),
        [
            ([], None, "got no values, want at least 1"),
            ([1], [0], "got no values"),
            ([1], [1, 1], "got 1 values and 2 weights, want as many"),
            ([1, 2], [3, -1], "negative or not finite"),
            ([1, math.nan], None, "negative or not finite"),
            ([math.inf], None, "negative or not finite"),
            ([1], [math.nan], "negative or not finite"),
            ([1], [math.inf], "negative or not finite"),
            ([-1], None, "got value -1.0, want numbers 0"),
        ],
    )
    def test_refused(self, values: list[float], weights: list[float] | None, message: str) -> None:
        with pytest.raises(ProfileError, match=message):
            distribution_of(values, weights)

    def test_a_large_sample_keeps_its_ends_and_its_mean(self) -> None:
        found = distribution_of(range(1000))
        assert len(found.values) == MAX_POINTS == 48
        assert (found.values[0], found.weights[0]) == (0.0, pytest.approx(0.001))
        assert (found.values[-1], found.weights[-1]) == (999.0, pytest.approx(0.001))
        assert found.mean == pytest.approx(499.5)
        # 998 values over 46 points: 21 or 22 each.
        assert {round(weight * 1000) for weight in found.weights[1:-1]} == {21, 22}

    def test_as_many_values_as_points_stay_themselves(self) -> None:
        """Whatever they weigh."""
        values = tuple(map(float, range(MAX_POINTS)))
        assert distribution_of(values).values == values
        assert distribution_of(values, [1.0, 1.0, *[0.01] * (MAX_POINTS - 2)]).values == values


class TestSqueezed:
    def test_by_hand(self) -> None:
        """Six values to four points: 1, then 2 and 3, then 5 and 8, then 100."""
        values, weights = squeezed(np.array([1.0, 2, 3, 5, 8, 100]), np.array([1.0, 1, 3, 2, 2, 1]) / 10, 4)
        assert values.tolist() == pytest.approx([1, 11 / 4, 26 / 4, 100])
        assert weights.tolist() == pytest.approx([0.1, 0.4, 0.4, 0.1])

    def test_a_value_belongs_where_its_middle_lies(self) -> None:
        """Of the 1.0 within, 2 holds 0 to 0.2, 3 holds 0.2 to 0.7, whose middle is in the first half, and 4 the rest."""
        values, weights = squeezed(np.array([1.0, 2, 3, 4, 9]), np.array([0.5, 0.2, 0.5, 0.3, 0.5]), 4)
        assert values.tolist() == pytest.approx([1, (0.4 + 1.5) / 0.7, 4, 9])
        assert weights.tolist() == pytest.approx([0.5, 0.7, 0.3, 0.5])

    def test_three_points_are_the_ends_and_what_is_between(self) -> None:
        values, weights = squeezed(np.array([1.0, 2, 4, 9]), np.full(4, 0.25), 3)
        assert values.tolist() == [1, 3, 9]
        assert weights.tolist() == [0.25, 0.5, 0.25]

    def test_a_heavy_value_leaves_points_unused(self) -> None:
        values, weights = squeezed(np.array([1.0, 2, 3, 4, 5, 9]), np.array([0.01, 0.01, 0.95, 0.01, 0.01, 0.01]), 5)
        # Of the 0.98 within, 2 lies in the first third, 3 in the second, 4 and 5 in the last.
        assert values.tolist() == pytest.approx([1, 2, 3, 4.5, 9])
        values, weights = squeezed(np.array([1.0, 2, 3, 4, 9]), np.array([0.1, 0.0, 0.8, 0.0, 0.1]), 4)
        assert weights.tolist() == pytest.approx([0.1, 0.8, 0.1])

    @pytest.mark.parametrize("count", [49, 55, 60])
    def test_neighbours_in_the_last_digit_still_rise(self, count: int) -> None:
        """Means of them, rounded, would meet or change places, and the ends would move."""
        values = [0.1]
        for _ in range(count - 1):
            values.append(math.nextafter(values[-1], 1))
        weights = np.linspace(1, 2, count)
        found, _ = squeezed(np.array(values), weights / weights.sum(), MAX_POINTS)
        assert (np.diff(found) > 0).all()
        assert (found[0], found[-1]) == (values[0], values[-1])


class TestMixed:
    def test_by_hand(self) -> None:
        mixed = Distribution((0.0, 2.0), (0.5, 0.5)).mixed_with(Distribution((2.0, 4.0), (0.25, 0.75)), 0.4)
        assert mixed.values == (0.0, 2.0, 4.0)
        assert mixed.weights == pytest.approx((0.3, 0.3 + 0.1, 0.3))

    def test_all_or_nothing(self) -> None:
        assert THREE.mixed_with(constant(9), 1.0) == constant(9)
        assert THREE.mixed_with(constant(9), 0.0) == THREE

    @pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
    def test_a_share_outside_is_refused(self, share: float) -> None:
        with pytest.raises(ProfileError, match="negative or not finite"):
            THREE.mixed_with(constant(9), share)

    def test_an_end_that_is_not_seen_again_is_forgotten(self) -> None:
        """Half of its weight goes each time: 2 ** -30 is the first below 1e-9."""
        found = Distribution((1.0, 1000.0), (0.5, 0.5))
        for _ in range(28):
            found = found.mixed_with(constant(1), 0.5)
        assert found.largest == 1000.0
        assert found.mixed_with(constant(1), 0.5) == constant(1)
