"""Group-relative advantages, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pearl.train.advantage import group_advantages


def test_by_hand() -> None:
    # Group a: 1, 3: mean 2, population std 1. Group b: 0, 0, 3: mean 1, std sqrt(2).
    advantages, zero = group_advantages([1, 0, 3, 0, 3], ["a", "b", "a", "b", "b"], offset=0.25)
    b = 2**0.5 + 0.25
    np.testing.assert_allclose(advantages, [-1 / 1.25, -1 / b, 1 / 1.25, -1 / b, 2 / b])
    assert zero == 0


def test_a_group_that_did_alike_teaches_nothing() -> None:
    # 0.1 has no exact binary form: (0.1 - mean) / 1e-12 would be about 1e-5, not 0.
    advantages, zero = group_advantages([0.1] * 3 + [0, 1], ["a"] * 3 + ["b"] * 2, offset=1e-12)
    assert advantages[:3].tolist() == [0, 0, 0]
    np.testing.assert_allclose(advantages[3:], [-1, 1])
    assert zero == 0.5


def test_a_group_of_one_teaches_nothing() -> None:
    assert group_advantages([0.7], ["a"], offset=1e-6)[0].tolist() == [0]


@pytest.mark.parametrize("offset", [1e-6, 0.2, 10.0])
def test_advantages_of_a_group_sum_to_zero_and_shrink_with_the_offset(offset: float) -> None:
    rewards = np.random.default_rng(0).normal(size=8)
    advantages, _ = group_advantages(rewards.tolist(), [0] * 8, offset)
    assert abs(advantages.sum()) < 1e-9
    np.testing.assert_allclose(advantages.std(), rewards.std() / (rewards.std() + offset))


def test_nothing() -> None:
    advantages, zero = group_advantages([], [], 0.1)
    assert len(advantages) == 0
    assert zero == 0
