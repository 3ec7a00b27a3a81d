"""The training loop: batch -> hooks -> update -> publication -> hooks, while rollout goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from pearl.config.recipe import Recipe
from pearl.errors import RunFailed, WorkerLost
from pearl.pipeline.batch import assemble
from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.pipeline.rollout import Rollout, RolloutProgress
from pearl.pipeline.turns import RouterCounts
from pearl.pipeline.workers import Workers
from pearl.ports import EngineStats, JournalSink, Trainer, WeightStore
from pearl.records.ids import WeightVersion
from pearl.records.journal import StepEntry
from pearl.records.training import TrainingBatch, TrainReport
from pearl.records.trajectory import Group, TrajectoryStatus

SMOOTHING_STEPS = 5
"""`run.stop_at_success` looks at the mean success over this many steps: a single batch is a noisy estimate."""


class TrainingHooks(Protocol):
    """What `elastic` does around a training step."""

    async def training_begin(self, version: WeightVersion) -> None:
        """The batch is complete; training GPUs are about to be used."""

    async def training_finished(self, version: WeightVersion) -> None:
        """The new weights serve; training GPUs idle until the next batch."""


class NoHooks:
    """A run whose fleet stays as it is."""

    async def training_begin(self, version: WeightVersion) -> None:
        """Nothing to do."""

    async def training_finished(self, version: WeightVersion) -> None:
        """Nothing to do."""


class Checkpointer(Protocol):
    """Saves trainer state and progress together, atomically."""

    async def save(self, version: WeightVersion, progress: RolloutProgress) -> None:
        """Save a checkpoint of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Totals when training begins: what start-up and evaluation did is in them, and no part of any step."""

    at_s: float
    """Since the run began."""
    generated_tokens: int
    rollout_busy_s: Mapping[int, float]
    """Worker -> seconds inside iterations since its start."""
    rollout_iterations: Mapping[int, tuple[int, int]]
    """Worker -> iterations since its start, and how many of them were late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One training step as an observer sees it."""

    at_s: float
    """Since the run began."""
    batch: TrainingBatch
    report: TrainReport
    wait_s: float
    publish_s: float
    reward_mean: float
    success_mean: float | None
    """None where the environment does not know."""
    active_trajectories: int
    router: RouterCounts
    """Totals so far."""
    faults: Mapping[TrajectoryStatus, int]
    rollout_busy_s: Mapping[int, float]
    """Worker -> seconds inside iterations since its start."""
    rollout_iterations: Mapping[int, tuple[int, int]]
    """Worker -> iterations since its start, and how many of them were late."""


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """Runs training steps until the recipe is fulfilled."""

    recipe: Recipe
    trainer: Trainer
    weights: WeightStore
    workers: Workers
    rollout: Rollout
    journal: JournalSink
    checkpointer: Checkpointer
    hooks: TrainingHooks
    begin: Callable[[Baseline], None]
    observe: Callable[[StepOutcome], None]
    start_s: float
    version: WeightVersion
    """Of the trainer now."""
    _successes: list[float] = field(default_factory=list)
    _saved: WeightVersion | None = None

    async def run(self) -> WeightVersion:
        """Train until `run.steps`, or until the success rate asked for; returns the last version."""
        self.begin(await self._baseline())
        self.rollout.serve(self.version)
        while self.version < self.recipe.run.steps and not self._is_good_enough():
            await self._step()
            every = self.recipe.checkpoint.every_steps
            if every and self.version % every == 0:
                await self._save()
        if self._saved != self.version:
            await self._save()
        await self.rollout.stop()
        return self.version

    async def _baseline(self) -> Baseline:
        stats = await self._stats()
        return Baseline(
            at_s=asyncio.get_running_loop().time() - self.start_s,
            generated_tokens=self.workers.router.counts.generated_tokens,
            rollout_busy_s=_busy_s(stats),
            rollout_iterations=_iterations(stats),
        )

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        waiting_s = loop.time()
        groups = await self.rollout.next_batch(self.version)
        batch = assemble(self.version, groups)
        if not batch.samples:
            raise RunFailed(f"training step {self.version + 1}: no trajectory of the batch has a generated token")
        training_s = loop.time()
        await self.hooks.training_begin(self.version)
        report = await self._train(batch)
        publishing_s = loop.time()
        await self._publish(report.version)
        await self.hooks.training_finished(self.version)
        ended_s = loop.time()
        stats = await self._stats()
        outcome = StepOutcome(
            at_s=ended_s - self.start_s,
            batch=batch,
            report=report,
            wait_s=training_s - waiting_s,
            publish_s=ended_s - publishing_s,
            reward_mean=_mean([t.reward for group in groups for t in group.trajectories]) or 0.0,
            success_mean=_success(groups),
            active_trajectories=self.rollout.active_trajectories,
            router=replace(self.workers.router.counts),
            faults=Counter(self.rollout.faults),
            rollout_busy_s=_busy_s(stats),
            rollout_iterations=_iterations(stats),
        )
        self._record(outcome)

    async def _train(self, batch: TrainingBatch) -> TrainReport:
        try:
            async with guard(self.recipe.train.step_timeout_s, f"training step {batch.version + 1}"):
                return await self.trainer.train(batch)
        except GuardExpired as error:
            raise RunFailed(f"{error} (train.step_timeout_s)") from error

    async def _publish(self, version: WeightVersion) -> None:
        try:
            async with guard(self.recipe.weights.timeout_s, f"publication of weights {version}"):
                manifest = await self.weights.publish(version)
        except GuardExpired as error:
            raise RunFailed(f"{error} (weights.timeout_s)") from error
        await self.workers.publish(manifest)
        self.version = version
        self.rollout.serve(version)

    async def _save(self) -> None:
        try:
            async with guard(self.recipe.train.step_timeout_s, f"checkpoint of version {self.version}"):
                await self.checkpointer.save(self.version, self.rollout.snapshot())
        except GuardExpired as error:
            raise RunFailed(f"{error} (train.step_timeout_s)") from error
        self._saved = self.version

    async def _stats(self) -> dict[int, EngineStats]:
        stats: dict[int, EngineStats] = {}
        router = self.workers.router
        for worker in router.workers:
            engine = router.engine(worker)
            try:
                async with guard(5.0, f"worker {worker}: statistics"):
                    if engine is not None:
                        stats[worker] = await engine.stats()
            except (WorkerLost, GuardExpired):
                # Its loss is dealt with where it serves; here its numbers are missing.
                continue
        return stats

    def _is_good_enough(self) -> bool:
        goal, recent = self.recipe.run.stop_at_success, self._successes[-SMOOTHING_STEPS:]
        return goal is not None and len(recent) == SMOOTHING_STEPS and sum(recent) / len(recent) >= goal

    def _record(self, outcome: StepOutcome) -> None:
        if outcome.success_mean is not None:
            self._successes.append(outcome.success_mean)
        self.journal.write(
            StepEntry(
                at_s=outcome.at_s,
                version=outcome.report.version,
                groups=list(outcome.batch.groups),
                samples=outcome.report.samples,
                trained_tokens=outcome.report.trained_tokens,
                staleness_tokens={str(k): n for k, n in outcome.batch.staleness_tokens.items()},
                wait_s=outcome.wait_s,
                train_s=outcome.report.train_s,
                publish_s=outcome.publish_s,
                reward_mean=outcome.reward_mean,
                success_mean=outcome.success_mean,
                metrics=dict(outcome.report.metrics),
            )
        )
        self.observe(outcome)


def _busy_s(stats: Mapping[int, EngineStats]) -> dict[int, float]:
    return {worker: one.busy_s for worker, one in stats.items()}


def _iterations(stats: Mapping[int, EngineStats]) -> dict[int, tuple[int, int]]:
    return {worker: (one.iterations, one.late_iterations) for worker, one in stats.items()}


def _success(groups: list[Group]) -> float | None:
    known = [float(t.success) for group in groups for t in group.trajectories if t.success is not None]
    total = sum(len(group.trajectories) for group in groups)
    # A truncated trajectory did not succeed, but only where the environment tells success at all.
    return sum(known) / total if known else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
