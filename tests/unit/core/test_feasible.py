"""What fleets must keep, whatever time they take: every reason on both sides of its limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pearl.core.distribution import Distribution, constant
from pearl.core.feasible import Limits
from pearl.core.makespan import Candidates, Infeasible, Profile, Target, candidates_of
from pearl.core.platform import Platform
from pearl.core.shape import Pool, Shape
from pearl.core.state import Role
from pearl.core.workload import WorkloadProfile
from tests.platforms import engine_profile, linear_times, platform_of, target

TIMES = linear_times(0.01, 0.002, 0.001)
WORK = WorkloadProfile(
    turns=constant(4),
    prompt_tokens=constant(100),
    new_tokens=constant(50),
    generated_tokens=constant(20),
    env_s=constant(3),
)
PLATFORM = platform_of({1: TIMES, 2: TIMES}, 2048)


def room(capacity: int) -> Platform:
    """KV of so many tokens on workers of tp 1; of tp 2 as many as anybody wants."""
    return Platform(by_tp={1: engine_profile(1, TIMES, capacity=capacity), 2: engine_profile(2, TIMES)})


def broken(
    targets: list[Target] | Candidates, work: WorkloadProfile = WORK, platform: Platform = PLATFORM
) -> list[Infeasible]:
    candidates = targets if isinstance(targets, Candidates) else candidates_of(targets)
    return [Infeasible(why) for why in Limits(Profile(workload=work, platform=platform)).broken(candidates)]


def bare(*pools: tuple[Role, int, int]) -> Target:
    """Pools that no parser would take."""
    return Target(shape=Shape(tuple(Pool(role=role, workers=workers, tp=tp) for role, workers, tp in pools)))


P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        (bare(), Infeasible.NO_WORKERS),
        (bare((P, 1, 1)), Infeasible.NO_WORKERS),
        (bare((D, 1, 1)), Infeasible.NO_WORKERS),
        (bare((P, 1, 1), (C, 1, 1)), Infeasible.NO_WORKERS),
        (bare((D, 1, 1), (C, 1, 1)), Infeasible.NO_WORKERS),
        (bare((P, 1, 1), (D, 1, 1)), Infeasible.NO),
        (bare((P, 1, 1), (D, 1, 1), (C, 1, 1)), Infeasible.NO),
        (target("1C"), Infeasible.NO),
        (target("1C@tp1+1C@tp2"), Infeasible.NO),
        (target("1P@tp1+1D@tp1+1C@tp1+1C@tp2"), Infeasible.UNSUPPORTED),
        (target("1C@tp3"), Infeasible.UNKNOWN_TP),
        (target("1C@tp4"), Infeasible.UNKNOWN_TP),
        (target("1C@tp1+1C@tp4"), Infeasible.UNKNOWN_TP),
        (target("1C@tp4+1C@tp1"), Infeasible.UNKNOWN_TP),
        (target("1P@tp4+1D@tp1"), Infeasible.UNKNOWN_TP),
        (target("1P@tp1+1D@tp4"), Infeasible.UNKNOWN_TP),
        (target("1P@tp1+1D@tp1+1C@tp4"), Infeasible.UNKNOWN_TP),
    ],
)
def test_reasons(fleet: Target, reason: Infeasible) -> None:
    assert broken([target("2C"), fleet]) == [Infeasible.NO, reason]


def test_a_second_pool_without_a_first() -> None:
    alone = candidates_of([target("1C@tp1+1C@tp2")])
    alone = replace(alone, workers={**alone.workers, C: np.zeros(1, dtype=np.int64)})
    assert broken(alone) == [Infeasible.UNSUPPORTED]


def test_parallelisms_of_roles_without_workers_do_not_matter() -> None:
    """Neither unknown ones nor those without room; 1 where there is nobody."""
    only = Platform(by_tp={2: PLATFORM.by_tp[2], 4: engine_profile(4, TIMES, capacity=1)})
    found = broken([target("1C@tp2"), target("1P1D@tp2"), target("1C@tp1")], platform=only)
    assert found == [Infeasible.NO, Infeasible.NO, Infeasible.UNKNOWN_TP]


def test_pairs() -> None:
    """Allowed is (2, 1); of colocated workers nothing is said."""
    platform = replace(PLATFORM, tp_pairs=frozenset({(2, 1)}))
    fleets = [target(text) for text in ("1P@tp2+1D@tp1", "1P@tp1+1D@tp2", "1P1D", "1C@tp1", "1C@tp2+1C@tp1")]
    no, unknown = Infeasible.NO, Infeasible.UNKNOWN_TP
    assert broken(fleets, platform=platform) == [no, unknown, unknown, no, no]


@pytest.mark.parametrize("text", ["1C@tp1", "1P@tp1+1D@tp2", "1P@tp2+1D@tp1", "1C@tp1+1C@tp2", "1C@tp2+1C@tp1"])
@pytest.mark.parametrize(("capacity", "reason"), [(330, Infeasible.NO), (329, Infeasible.KV_CAPACITY)])
def test_the_longest_context_fits_on_a_worker_alone(text: str, capacity: int, reason: Infeasible) -> None:
    """100 + 3 * (50 + 20) + 20 tokens at the end of the last turn."""
    found = broken([target(text), target("1C@tp2")], platform=room(capacity))
    assert found == [reason, Infeasible.NO]


@pytest.mark.parametrize(("share", "reason"), [(0.010, Infeasible.NO), (0.011, Infeasible.KV_CAPACITY)])
def test_but_for_one_in_a_hundred(share: float, reason: Infeasible) -> None:
    work = replace(WORK, turns=Distribution((4.0, 40.0), (1 - share, share)))
    assert broken([target("1C")], work=work, platform=room(330)) == [reason]


def test_of_several_reasons_the_first() -> None:
    """The shape, its workers, their parallelism, their room."""
    platform = room(1)
    fleets = [
        target("1P@tp1+1D@tp1+1C@tp1+1C@tp4"),
        bare((P, 1, 4)),
        bare((P, 1, 1)),
        target("1C@tp1+1C@tp4"),
        target("1C@tp1"),
    ]
    want = [
        Infeasible.UNSUPPORTED,
        Infeasible.NO_WORKERS,
        Infeasible.NO_WORKERS,
        Infeasible.UNKNOWN_TP,
        Infeasible.KV_CAPACITY,
    ]
    assert broken(fleets, platform=platform) == want
