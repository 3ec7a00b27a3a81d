"""Evaluation: sampled play of the current weights over given tasks, apart from training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pearl.pipeline.agent_loop import AgentLoop, AgentPorts, Attempt
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.tasks import derive_seed
from pearl.records.ids import GroupId, TrajectoryId, WeightVersion
from pearl.records.trajectory import Task, Trajectory, TrajectoryStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Success over all rollouts that ended without a fault; None where there was none."""

    version: WeightVersion
    success: float | None
    """0..1; None also where the environment does not tell success."""
    reward_mean: float | None
    rollouts: int
    """That ended without a fault."""
    faults: int
    """Rollouts that ended with one, and count nowhere else."""
    success_by_task: tuple[float | None, ...]


async def evaluate(
    ports: AgentPorts, tasks: Sequence[Task], rollouts_per_task: int, seed: int, version: WeightVersion, name: str
) -> EvaluationResult:
    """Play every task `rollouts_per_task` times; the sampling seeds depend on `(seed, task, rollout)` only.

    So two evaluations of the same weights give the same result. `name` tells their trajectories apart in the journal.
    """
    places = asyncio.Semaphore(ports.environments.slots)

    async def play(task_number: int, rollout: int) -> Trajectory:
        attempt = Attempt(
            id=TrajectoryId(f"{name}.{task_number}.{rollout}"),
            group=GroupId(f"{name}.{task_number}"),
            task=replace(tasks[task_number], seed=derive_seed("evaluation task", seed, task_number, rollout) % 2**31),
            sampling_seed=derive_seed("evaluation", seed, task_number, rollout),
            min_version=version,
        )
        async with places:
            return await AgentLoop(ports=ports, attempt=attempt).run()

    async with Nursery() as nursery:
        running = [
            [
                nursery.spawn(play(number, rollout), name=f"{name}.{number}.{rollout}")
                for rollout in range(rollouts_per_task)
            ]
            for number in range(len(tasks))
        ]
        ended = [[await one for one in row] for row in running]
    return _result(version, ended)


def _result(version: WeightVersion, ended: Sequence[Sequence[Trajectory]]) -> EvaluationResult:
    valid = [[t for t in row if t.status.trainable] for row in ended]
    flat = [t for row in valid for t in row]
    # A truncated trajectory did not succeed, but one that is done and says nothing shows that nobody knows.
    is_told = any(t.success is not None for t in flat) or all(t.status is not TrajectoryStatus.DONE for t in flat)
    return EvaluationResult(
        version=version,
        success=_success(flat) if is_told else None,
        reward_mean=_mean([t.reward for t in flat]),
        rollouts=len(flat),
        faults=sum(map(len, ended)) - len(flat),
        success_by_task=tuple(_success(row) if is_told else None for row in valid),
    )


def _success(trajectories: Sequence[Trajectory]) -> float | None:
    return _mean([float(bool(t.success)) for t in trajectories])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
