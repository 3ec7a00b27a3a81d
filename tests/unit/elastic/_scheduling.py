"""A scheduler on the stage of `_stage`, whose predictor is told what each shape takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from pearl.core.makespan import Profile
from pearl.core.platform import Platform, TransitionCosts
from pearl.core.policy import Borrow, GivenTimes, Policy, PolicyOptions, policy_named
from pearl.core.priors import platform_prior, workload_prior
from pearl.core.progress import Progress, fresh_batch
from pearl.core.toggle import toggle_prior
from pearl.elastic.scheduler import Scheduler
from pearl.elastic.tracker import Tracker
from pearl.pipeline.concurrency import Nursery
from pearl.records.journal import ChangeEntry, ChoiceEntry
from pearl.testing.virtual_time import run_virtual
from tests.unit.elastic._stage import Stage

T = TypeVar("T")
COSTS = TransitionCosts(start_s=10, finalise_s=0, activate_s=3, return_s=2, role_change_s=1, stop_s=1)
RETURN_S = 150.0

TWO: Mapping[str, float] = {"1C": 4000.0, "2C": 2000.0}
"""Two colocated workers are best, and nothing is to be had beyond."""


def platform() -> Platform:
    prior = platform_prior("qwen3-8b-h100")
    return replace(prior, by_tp=MappingProxyType({1: prior.by_tp[1]}), costs=COSTS)


def policy_told(truth: Mapping[str, float], borrow: Borrow, external: bool) -> Policy:
    pearl = policy_named("pearl", PolicyOptions(tps=(1,)))
    return replace(pearl, predictor=GivenTimes(truth), borrow=borrow, lease_aware=False, external=external)


class Scheduling:
    """A scheduler that may be begun."""

    def __init__(self, stage: Stage, truth: Mapping[str, float], borrow: Borrow, external: bool) -> None:
        self.stage = stage
        profile = Profile(workload=workload_prior("webshop"), platform=platform())
        self.progress: Progress = fresh_batch(2, 2)
        self.tracker = Tracker(sink=stage.journal, profile=profile, share=0.3)
        self.scheduler = Scheduler(
            policy=policy_told(truth, borrow, external),
            workers=stage.workers,
            hands=stage.hands,
            executor=stage.executor,
            tracker=self.tracker,
            nursery=stage.nursery,
            progress=lambda: self.progress,
            toggle=toggle_prior(COSTS),
            lease_prior_s=3600.0,
            start_s=0.0,
            return_timeout_s=RETURN_S,
        )
        self.scheduler.listen()

    async def begin(self) -> None:
        self.scheduler.begin()
        await self.scheduler.serving()
        await asyncio.sleep(1)

    def choices(self) -> list[ChoiceEntry]:
        return self.stage.journal.of(ChoiceEntry)

    def moments(self) -> list[str]:
        return [entry.moment for entry in self.choices()]

    def reasons(self) -> list[tuple[str, str]]:
        return [(entry.moment, entry.reason) for entry in self.choices()]

    def planned_s(self) -> list[float]:
        """When there was a plan."""
        return [entry.at_s for entry in self.choices() if entry.plan]

    def changes(self) -> list[tuple[int, bool]]:
        return [(entry.number, entry.done) for entry in self.stage.journal.of(ChangeEntry)]


def scheduling(
    test: Callable[[Scheduling], Awaitable[T]],
    truth: Mapping[str, float] = TWO,
    borrow: Borrow = Borrow.NEVER,
    *,
    external: bool = False,
) -> T:
    async def play() -> T:
        async with Nursery() as nursery:
            stage = Stage(nursery)
            await stage.begin()
            found = await test(Scheduling(stage, truth, borrow, external))
            assert stage.refused() == []
            return found

    return run_virtual(play())
