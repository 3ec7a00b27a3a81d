"""One run on Ray: processes, warm-up, the pipeline, and what is reported of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from pearl.cluster import checkpoints
from pearl.cluster.environment_pool import RayEnvironmentPool
from pearl.cluster.fleet import RayFleet
from pearl.cluster.trainer_actor import RayTrainer
from pearl.cluster.weights import SharedMemoryWeights
from pearl.config.recipe import Recipe
from pearl.core.shape import parse_shape
from pearl.core.state import Gpu, GpuOwner
from pearl.env.codec import codec_of
from pearl.env.registry import evaluation_params
from pearl.errors import RunFailed
from pearl.pipeline.concurrency import GuardExpired, Nursery, guard
from pearl.pipeline.run import RunObserver, RunPorts, RunResult, RunStart, run
from pearl.pipeline.training_loop import StepOutcome
from pearl.records.ids import GpuId, NodeId, TaskId
from pearl.records.trajectory import Task
from pearl.report.journal import JournalWriter
from pearl.report.live import JobSummary, Reporter
from pearl.report.run_folder import RunFolder
from pearl.report.summary import write_summary
from pearl.report.totals import RunTotals

T = TypeVar("T")


def run_job(
    recipe: Recipe, folder: RunFolder, reporter: Reporter, resume: bool, begun: Callable[[], None] = lambda: None
) -> JobSummary:
    """Run a recipe on Ray, which is there (`ray_session`), to its end.

    `begun` is called when the trainer is ready, before the run changes anything that a resumption would find.

    Raises:
        UserError: something the user asked for cannot be done.
        RunFailed: the run cannot go on; its folder can be resumed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything was ended in order.
    """
    try:
        summary = asyncio.run(_until_told(_Job(recipe, folder, reporter, resume, begun)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    write_summary(summary)
    return summary


async def _until_told(job: _Job) -> JobSummary:
    """Run the job; SIGTERM, which schedulers send, gives it the same tidy end as Ctrl-C."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await job.run()


class _Job:
    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        reporter: Reporter,
        resume: bool,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.recipe, self.folder, self.reporter, self.resume, self.begun = recipe, folder, reporter, resume, begun
        self.totals = RunTotals()

    async def run(self) -> JobSummary:
        """Start everything, run, end everything."""
        journal = JournalWriter(self.folder.journal)
        try:
            async with self._started() as (trainer, environments):
                weights = SharedMemoryWeights(trainer, self.recipe.weights.host_budget_gib)
                try:
                    start = await self._start(trainer)
                    ports = RunPorts(
                        fleet=RayFleet(
                            self.recipe.model.path, self.recipe.engine, self.recipe.cluster.health_timeout_s
                        ),
                        weights=weights,
                        trainer=trainer,
                        environments=environments,
                        codec=codec_of(self.recipe),
                        journal=journal,
                        checkpointer=checkpoints.CheckpointFolder(
                            self.folder.checkpoints, trainer, self.recipe.checkpoint.keep
                        ),
                    )
                    observer = RunObserver(begin=self.totals.begin, step=self._on_step, stage=self.reporter.stage)
                    result = await run(self.recipe, ports, start, observer)
                    return self._summary(start, result, environments.restarts)
                finally:
                    weights.close()
        finally:
            journal.close()

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[tuple[RayTrainer, RayEnvironmentPool]]:
        """Trainer and environments, started at the same time."""
        self.reporter.stage("start", f"trainer ({self.recipe.model.path}) and environments")
        config, cluster = self.recipe.environment, self.recipe.cluster
        trainer = RayTrainer.spawn(self.recipe, self.folder.path / "trained.jsonl")
        pool = RayEnvironmentPool(
            config.open_at_once,
            config.processes,
            start_timeout_s=cluster.start_timeout_s,
            open_timeout_s=self.recipe.rollout.env_reset_timeout_s,
            step_timeout_s=self.recipe.rollout.env_step_timeout_s,
            max_restarts=cluster.max_environment_restarts,
        )
        try:
            async with Nursery() as nursery:
                model = nursery.spawn(trainer.start(cluster.start_timeout_s), "start the trainer")
                await asyncio.gather(model, nursery.spawn(pool.start(), "start environments"))
            yield trainer, pool
        finally:
            await pool.stop()
            trainer.stop()

    async def _start(self, trainer: RayTrainer) -> RunStart:
        start = RunStart(
            gpus=_local_gpus(parse_shape(self.recipe.engine.shape).gpus), evaluation_tasks=self._evaluation_tasks()
        )
        checkpoint = self.folder.latest_checkpoint() if self.resume else None
        if checkpoint is not None:
            version, progress = await self._bounded(
                checkpoints.restore(checkpoint, trainer), "train.step_timeout_s", self.recipe.train.step_timeout_s
            )
            self.reporter.stage("resume", f"from {checkpoint.name}, {len(progress.unfinished)} groups begin again")
            start = replace(start, version=version, progress=progress, is_restored=True)
        elif self.recipe.warmup.steps:
            await self._warm_up(trainer)
        # Up to here the run may be refused; then its folder is as it was.
        incarnation = checkpoints.begin_incarnation(self.folder.path) if self.resume else 0
        self.begun()
        return replace(start, incarnation=incarnation)

    async def _warm_up(self, trainer: RayTrainer) -> None:
        self.reporter.stage("warm-up", f"{self.recipe.warmup.steps} supervised steps on scripted play")
        report = await self._bounded(trainer.warm_up(), "warmup.timeout_s", self.recipe.warmup.timeout_s)
        self.reporter.stage(
            "warm-up", f"loss {report.loss_first:.3f} -> {report.loss_last:.3f} in {report.seconds:.1f} s"
        )

    async def _bounded(self, work: Coroutine[Any, Any, T], key: str, timeout_s: float) -> T:
        try:
            async with guard(timeout_s, "trainer"):
                return await work
        except GuardExpired as error:
            raise RunFailed(f"{error} ({key})") from error

    def _evaluation_tasks(self) -> tuple[Task, ...]:
        environment = self.recipe.environment
        if not self.recipe.evaluation.rollouts_per_task:
            return ()
        return tuple(
            Task(id=TaskId(f"evaluation#{number}"), environment=environment.kind, seed=number, params=params)
            for number, params in enumerate(evaluation_params(environment.kind, environment.params))
        )

    def _on_step(self, outcome: StepOutcome) -> None:
        self.reporter.step(self.totals.add(outcome))

    def _summary(self, start: RunStart, result: RunResult, environment_restarts: int) -> JobSummary:
        totals, before, after = self.totals, result.before, result.after
        return JobSummary(
            folder=self.folder.path,
            steps=result.version,
            new_steps=result.version - start.version,
            wall_s=result.wall_s,
            success_before=before.success if before else None,
            success_after=after.success if after else None,
            rollouts_before=before.rollouts if before else 0,
            rollouts_after=after.rollouts if after else 0,
            faults_before=before.faults if before else 0,
            faults_after=after.faults if after else 0,
            trained_tokens=totals.trained_tokens,
            tokens_per_s=totals.generated_tokens / max(result.wall_s, 1e-9),
            stale_token_frac=totals.stale_tokens / max(totals.trained_tokens, 1),
            staleness_max=totals.staleness_max,
            trainer_idle_frac=min(1.0, totals.wait_s / max(result.wall_s, 1e-9)),
            rollout_idle_frac=1 - min(1.0, totals.busy_s / max(totals.rollout_s, 1e-9)),
            faults={status.value: count for status, count in result.faults.items()},
            restarts=result.worker_restarts + environment_restarts,
            handoffs=result.handoffs,
            appended_turns=result.appended_turns,
            late_iterations_frac=totals.late_iterations / max(totals.iterations, 1)
            if self.recipe.engine.pacing
            else None,
        )


def _local_gpus(count: int) -> tuple[Gpu, ...]:
    """Places for rollout workers on this host; on a machine without GPUs, shares of its CPU."""
    return tuple(Gpu(id=GpuId(f"local/{n}"), node=NodeId("local"), owner=GpuOwner.RESERVED) for n in range(count))
