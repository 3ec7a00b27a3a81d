"""The fluid network, and fleets with one worker more.

- *colocated*, *prefill*: one more never closes the batch later.
- *decode*: one more may be predicted to by up to 2 %, where prefill workers are what there is too little of, so that it is worth
  nothing: 1.1 % at most in 700 random profiles, since curves are straight between the points at which they are looked at.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decide import _random_case
from pearl.core.distribution import Floats
from pearl.core.fluid import APPEND_TOKENS, FluidPredictor
from pearl.core.makespan import Predictions, Profile, candidates_of
from pearl.core.platform import Platform
from pearl.core.progress import Progress
from pearl.core.workload import WorkloadProfile
from tests.platforms import target
from tests.property.test_fluid import batches, platforms, workloads

COLOCATED = {tp: candidates_of([target(f"{n}C@tp{tp}", 0) for n in range(1, 41)]) for tp in (1, 2, 4)}
MOST = 8
PREFILL, DECODE = 1e-9, 0.02
"""How much later, over the time before."""


def later(close_s: Floats, axis: int) -> Floats:
    """By what share a batch closes later with one worker more along an axis; what is infeasible either way is not later."""
    before, after = (np.delete(close_s, place, axis) for place in (-1, 0))
    assert np.isfinite(after[np.isfinite(before)]).all(), "one worker more, and infeasible"
    both = np.isfinite(before) & (before > 0)
    return np.asarray(after[both] / before[both] - 1, dtype=np.float64)


def colocated(profile: Profile, progress: Progress, tp: int) -> Predictions:
    return FluidPredictor().forecast(profile, progress)(COLOCATED[tp])


@given(workloads(), platforms(), batches())
@settings(max_examples=40)
def test_colocated_on_any_profile(work: WorkloadProfile, platform: Platform, progress: Progress) -> None:
    for tp in (1, 2):
        found = colocated(Profile(workload=work, platform=platform), progress, tp)
        assert (later(found.close_s, 0) <= 1e-12).all()


@given(st.integers(0, 2**32), st.sampled_from((1, 2, 4)))
@settings(max_examples=30)
def test_colocated_on_likely_profiles(seed: int, tp: int) -> None:
    profile, progress = _random_case(random.Random(seed), 64)
    assert (later(colocated(profile, progress, tp).close_s, 0) <= 1e-12).all()


@given(st.integers(0, 2**32), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)), st.sampled_from(APPEND_TOKENS))
@settings(max_examples=60)
def test_prefill_and_decode(seed: int, prefill_tp: int, decode_tp: int, append: int) -> None:
    rng = random.Random(seed)
    profile, progress = _random_case(rng, rng.choice((32, 64, 96, 128)))
    counts = range(1, MOST + 1)
    fleets = [target(f"{x}P@tp{prefill_tp}+{y}D@tp{decode_tp}", append) for x in counts for y in counts]
    close_s = FluidPredictor().forecast(profile, progress)(candidates_of(fleets)).close_s.reshape(MOST, MOST)
    assert (later(close_s, 0) <= PREFILL).all()
    assert (later(close_s, 1) <= DECODE).all()


@pytest.mark.parametrize(("axis", "expected"), [(0, [0.5, -0.5]), (1, [1.0, -1 / 3])])
def test_what_later_means(axis: int, expected: list[float]) -> None:
    """Rows, then columns: 2 -> 3 and 4 -> 2; 2 -> 4 and 3 -> 2. A time of 0 and what cannot serve do not count."""
    assert later(np.array([[2.0, 4.0], [3.0, 2.0]]), axis).tolist() == pytest.approx(expected)
    assert later(np.array([np.inf, 0.0, 0.0, 2.0]), 0).tolist() == []
    with pytest.raises(AssertionError, match="one worker more, and infeasible"):
        later(np.array([1.0, np.inf]), 0)
