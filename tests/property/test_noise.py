"""Noise of what is measured, through refit, predictor and decision: the fleet does not follow it.

- *settled*: the work and the engines stay as they are; what each step shows of them is off by up to `NOISE`, each distribution
  and the time scale of each tensor parallelism for itself. On fixed GPUs the fleet changes at most once after the first
  decision: once, since that was made on a single step, and is put right when more are known.

Why that can be asked for: a moving average of `SHARE` leaves sqrt(SHARE / (2 - SHARE)) = 0.42 of the noise of single steps, and
two shapes' times move against each other by some multiple of that, below the least threshold (5 %). It cannot be of profiles that
are one step each (a share of 1): with few decode workers one more or less is a third of their side, so that 3 % on either side of
the balance between prefill and decode are more than 5 % of the time, and each such change wins by what is known. Nor does it hold
of what *fits*: a shape whose KV suffices in one step and not in the next has no time there, and no threshold weighs that.

Moves cost nothing here, so that the thresholds alone hold the fleet. The cases are those of 248 in which it moves most without
them, up to nine times. With them it moved after the first decision in one of the 248, twice: there 16C did not fit in one step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import pytest

from benchmarks.decide import _random_case
from pearl.core.decide import decide
from pearl.core.decision import Moment, Reason, Situation
from pearl.core.distribution import Distribution
from pearl.core.gate import Thresholds
from pearl.core.makespan import Profile
from pearl.core.plan import apply
from pearl.core.platform import Platform, TransitionCosts, refit_scale
from pearl.core.policy import Policy, PolicyOptions, policy_named
from pearl.core.progress import Progress
from pearl.core.state import FleetState
from pearl.core.toggle import toggle_prior
from pearl.core.workload import WorkloadProfile, WorkloadSample, refit_workload
from tests.unit.core._fleets import fleet

MOMENTS = 30
NOISE = 0.03
SHARE = 0.3
VALUES = 200
"""Of each distribution in a step."""
FREE = TransitionCosts(**{each.name: 0.0 for each in fields(TransitionCosts)})
NONE = Thresholds(ratio=0.0, mode=0.0, tp=0.0)


@dataclass(frozen=True)
class Case:
    """A random workload and platform with some tensor parallelisms, on 8, 16 or 24 GPUs, with 8 of the trainer's or without."""

    seed: int
    tps: tuple[int, ...]
    lent: bool = False
    apart: bool = True
    """Prefill and decode workers only."""

    def __str__(self) -> str:
        return f"{self.seed}-tp{'+'.join(map(str, self.tps))}{'-lent' * self.lent}{'' if self.apart else '-any'}"


CASES = [
    Case(24, (1,)),
    Case(27, (2,)),
    Case(51, (2,), lent=True),
    Case(27, (1, 2), apart=False),
    Case(10, (2,), lent=True),
    Case(41, (2,), lent=True),
    Case(33, (2,)),
    Case(8, (1,)),
]


def moves(case: Case, thresholds: Thresholds) -> int:
    """How often the fleet changes after the first decision."""
    rng = random.Random(case.seed)
    dedicated = rng.choice((8, 16, 24))
    truth, progress = _random_case(rng, dedicated)
    truth = replace(truth, platform=only(truth.platform, case.tps))
    policy = policy_named("pearl", PolicyOptions(tps=case.tps, thresholds=thresholds))
    if case.apart:
        policy = replace(policy, space=replace(policy.space, colocated=False))
    nodes = [f"{node}8" for node in "abc"[: dedicated // 8]] + ["t8t"] * case.lent
    asleep = [f"{slot} C- t{2 * slot} t{2 * slot + 1}" for slot in range(4 * case.lent)]
    return sum(changes(policy, fleet(" ".join(nodes), *asleep), truth, progress, rng)) - 1


def only(platform: Platform, tps: tuple[int, ...]) -> Platform:
    return replace(
        platform,
        by_tp=MappingProxyType({tp: platform.by_tp[tp] for tp in tps}),
        time_scale=MappingProxyType({tp: platform.time_scale[tp] for tp in tps}),
        costs=FREE,
    )


def changes(
    policy: Policy, state: FleetState, truth: Profile, progress: Progress, rng: random.Random
) -> Iterator[bool]:
    """Whether the fleet changes, at each moment."""
    about = Situation(profile=truth, progress=progress, toggle=toggle_prior(FREE), since_training_s=0.0)
    for moment in range(MOMENTS):
        share = SHARE if moment else 1.0
        about = replace(about, profile=refitted(about.profile, truth, rng, share))
        made = decide(policy, state, about, Moment.REFITTED, 10.0)
        yield made.plan is not None or made.reason is Reason.MOVED
        if made.plan is not None:
            after = apply(state, made.plan)
            assert isinstance(after, FleetState)
            state = after
        if made.chosen is not None:
            about = replace(about, append_tokens=made.chosen.target.append_tokens)


def refitted(profile: Profile, truth: Profile, rng: random.Random, share: float) -> Profile:
    """After one more step, which counts as that share."""

    def noise() -> float:
        return 1 + rng.uniform(-NOISE, NOISE)

    def shown(of: Distribution, low: float) -> list[float]:
        factor = noise()
        return [max(low, of.quantile((place + 0.5) / VALUES) * factor) for place in range(VALUES)]

    work: WorkloadProfile = truth.workload
    sample = WorkloadSample(
        turns=shown(work.turns, 1.0),
        prompt_tokens=shown(work.prompt_tokens, 0.0),
        new_tokens=shown(work.new_tokens, 0.0),
        generated_tokens=shown(work.generated_tokens, 1.0),
        env_s=shown(work.env_s, 0.0),
    )
    platform = profile.platform
    for tp in platform.tps:
        measured = truth.platform.scale(tp) * noise()
        platform = refit_scale(platform, tp, measured / platform.scale(tp), share)
    return Profile(workload=refit_workload(profile.workload, sample, share).profile, platform=platform)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fleet_does_not_follow_the_noise_of_what_is_measured(case: Case) -> None:
    assert 0 <= moves(case, Thresholds()) <= 1


def test_without_thresholds_it_would() -> None:
    # 7, 9, 7 and 6 times.
    found = [moves(case, NONE) for case in CASES[:4]]
    assert min(found) >= 2, found
    assert sum(found) >= 14, found
