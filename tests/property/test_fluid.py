"""The fluid network on any profile that can be made.

- *sound*: what is feasible closes after a finite time, with a finite error that is no less than the model's own.
- *slower engines*: never close sooner.
- *one by one*: a prediction does not depend on what it is made beside.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.distribution import distribution_of
from pearl.core.fluid import FluidPredictor
from pearl.core.makespan import Infeasible, Predictions, Profile, candidates_of
from pearl.core.platform import Platform
from pearl.core.profile import HandOff
from pearl.core.progress import Progress
from pearl.core.workload import WorkloadProfile
from tests.platforms import engine_profile, linear_times, target

FLEETS = [
    target(text, append)
    for text in ("1C", "8C@tp2", "1C@tp1+3C@tp2", "1P1D", "1P20D", "6P@tp2+1D@tp1", "2P@tp1+3D@tp1+1C@tp2")
    for append in (0, 100)
]


@st.composite
def workloads(draw: st.DrawFn) -> WorkloadProfile:
    def some(low: float, high: float) -> list[float]:
        return draw(st.lists(st.floats(low, high), min_size=1, max_size=6))

    return WorkloadProfile(
        turns=distribution_of(some(1, 60)),
        prompt_tokens=distribution_of(some(0, 5e3)),
        new_tokens=distribution_of(some(0, 3e3)),
        generated_tokens=distribution_of(some(1, 2e3)),
        env_s=distribution_of(some(0, 100)),
        retained=draw(st.floats(0, 1)),
        turn_overhead_s=draw(st.floats(0, 3)),
        theta=draw(st.floats(0, 100)),
        likeness=draw(st.floats(0, 1)),
    )


@st.composite
def platforms(draw: st.DrawFn) -> Platform:
    def times() -> tuple[float, float, float]:
        return draw(st.tuples(st.floats(0, 0.1), st.floats(0, 0.01), st.floats(0, 0.001)))

    hand_off = draw(st.one_of(st.none(), st.builds(HandOff, fixed_s=st.floats(0, 1), s_per_byte=st.floats(0, 1e-3))))
    return Platform(
        by_tp={
            tp: engine_profile(
                tp, linear_times(*times(), contexts=(1, 8192)), capacity=draw(st.integers(1, 10**7)), hand_off=hand_off
            )
            for tp in (1, 2)
        },
        max_sequences=draw(st.integers(1, 300)),
        prefill_chunk_tokens=draw(st.integers(1, 9000)),
        readback=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn) -> Progress:
    running = draw(st.dictionaries(st.integers(0, 70), st.integers(0, 60), max_size=20))
    groups = draw(st.integers(1, 40))
    total = sum(running.values())
    needed = draw(st.integers(1, groups))
    coming_s = draw(st.floats(0, 1e4))
    return Progress(
        batch_trajectories=max(1, total),
        unfinished=total,
        live_groups=groups,
        needed_groups=needed,
        running=running,
        due_groups=draw(st.integers(0, needed)),
        due={turns: draw(st.integers(0, count)) for turns, count in running.items()},
        coming=draw(st.integers(0, 200)),
        coming_s=coming_s,
        pause_s=draw(st.floats(0, coming_s)),
    )


def predict(work: WorkloadProfile, platform: Platform, progress: Progress) -> Predictions:
    return FluidPredictor().forecast(Profile(workload=work, platform=platform), progress)(candidates_of(FLEETS))


@given(workloads(), platforms(), batches())
@settings(max_examples=40)
def test_sound(work: WorkloadProfile, platform: Platform, progress: Progress) -> None:
    found = predict(work, platform, progress)
    able = found.infeasible == Infeasible.NO
    assert np.isfinite(found.close_s).tolist() == able.tolist()
    assert np.isfinite(found.error_s).tolist() == able.tolist()
    assert (found.close_s[able] >= 0).all()
    assert (found.error_s[able] >= 0.1 * found.close_s[able]).all()


@given(workloads(), platforms(), batches(), st.floats(1, 10))
@settings(max_examples=20)
def test_slower_engines_never_close_sooner(
    work: WorkloadProfile, platform: Platform, progress: Progress, factor: float
) -> None:
    """With turns of constant duration: how much luck there is depends on the engines."""
    steady = replace(
        work,
        env_s=distribution_of([work.env_s.mean]),
        generated_tokens=distribution_of([work.generated_tokens.mean]),
    )
    slow = replace(platform, time_scale={1: factor, 2: factor})
    fast, slower = predict(steady, platform, progress), predict(steady, slow, progress)
    able = fast.infeasible == Infeasible.NO
    assert (slower.close_s[able] >= fast.close_s[able] * (1 - 1e-6)).all()


@given(workloads(), platforms(), batches())
@settings(max_examples=20)
def test_one_by_one(work: WorkloadProfile, platform: Platform, progress: Progress) -> None:
    together = predict(work, platform, progress)
    forecast = FluidPredictor().forecast(Profile(workload=work, platform=platform), progress)
    for place, fleet in enumerate(FLEETS):
        alone = forecast(candidates_of([fleet]))
        assert alone.infeasible[0] == together.infeasible[place]
        np.testing.assert_allclose(alone.close_s[0], together.close_s[place], rtol=1e-9)
        np.testing.assert_allclose(alone.error_s[0], together.error_s[place], rtol=1e-9)
