"""Whole runs on fakes and virtual time, with faults at given times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pearl.pipeline.run import RunResult
from pearl.records.journal import StepEntry
from pearl.records.trajectory import Task
from pearl.testing.engine import FakeEngineConfig
from pearl.testing.environment import Behaviour
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld

ENGINE = FakeEngineConfig(token_s=0.125, turn_tokens=8)
"""A turn takes 1 s."""


def quick(_task: Task, _attempt: int) -> Behaviour:
    """A trajectory takes 4 s."""
    return Behaviour(step_s=3, reward=1.0)


def play(world: FakeWorld, *faults: tuple[float, Callable[[], None]]) -> RunResult:
    """Run to the end, with faults at times."""

    async def work() -> RunResult:
        for at_s, fault in faults:
            asyncio.get_running_loop().call_at(at_s, fault)
        return await world.run()

    try:
        return run_virtual(work())
    finally:
        world.check_ledger()


def steps(world: FakeWorld) -> list[int]:
    return [entry.version for entry in world.journal.of(StepEntry)]
