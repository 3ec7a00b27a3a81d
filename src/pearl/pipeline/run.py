"""One run, from ports to result: the composition of the hot path, alike in the real and the simulated world."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from pearl.config.recipe import Recipe
from pearl.core.progress import Progress
from pearl.core.shape import parse_shape
from pearl.core.state import Gpu
from pearl.errors import PearlError, RunFailed
from pearl.pipeline.agent_loop import AgentPorts
from pearl.pipeline.concurrency import GuardExpired, Nursery, guard
from pearl.pipeline.evaluation import EvaluationResult, evaluate
from pearl.pipeline.rollout import Rollout, RolloutProgress
from pearl.pipeline.state import StateHolder
from pearl.pipeline.tasks import TaskStream
from pearl.pipeline.training_loop import Baseline, Checkpointer, NoHooks, StepOutcome, TrainingHooks, TrainingLoop
from pearl.pipeline.workers import Workers, specs_of
from pearl.ports import Codec, EnvironmentPool, Fleet, JournalSink, Trainer, WeightStore
from pearl.records.ids import WeightVersion
from pearl.records.training import LoadMode, Manifest
from pearl.records.trajectory import GroupStatus, Task, TrajectoryStatus

FLUSH_TIMEOUT_S = 30.0
"""For the journal to reach the disk at the end of a run."""

STOP_TIMEOUT_S = 30.0
"""The end of a run must not hang on a worker that does."""

SILENCE_FRACTION = 0.5
"""Of `rollout.turn_timeout_s`. A turn that waited for a worker first still tells a silent one; a whole time-out would not."""

FIRST_VERSION = WeightVersion(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetContext:
    """What whoever shapes a run's fleet works with."""

    workers: Workers
    trainer: Trainer
    nursery: Nursery
    progress: Callable[[], Progress]
    """Of the batch that closes next."""
    start_s: float
    """Loop time at which the run began."""


class FleetControl(TrainingHooks, Protocol):
    """Shapes the fleet of a run; also told when training begins and ends."""

    def journal(self, sink: JournalSink) -> JournalSink:
        """Where the run's entries go: the sink, or something before it that listens in."""

    async def start(self, context: FleetContext, manifest: Manifest) -> None:
        """Have workers serve, and shape the fleet from then on.

        Raises:
            RunFailed: none can.
        """

    async def stop(self) -> None:
        """The run is about to end its workers: change nothing more. Called in any case, also where nothing was started."""

    async def leave(self) -> None:
        """The run's workers have ended: whose GPUs it has gets them back. Called in any case, after `stop`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPorts:
    """The world that a run lives in."""

    fleet: Fleet
    weights: WeightStore
    trainer: Trainer
    environments: EnvironmentPool
    codec: Codec
    journal: JournalSink
    checkpointer: Checkpointer
    hooks: TrainingHooks = field(default_factory=NoHooks)
    control: FleetControl | None = None
    """None: the shape of the recipe, for the whole run, and `hooks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Where a run begins."""

    gpus: tuple[Gpu, ...]
    """For rollout, in the order in which workers take them."""
    version: WeightVersion = field(default=FIRST_VERSION)
    """Of the trainer now; larger than 0 when restored."""
    progress: RolloutProgress = field(default_factory=lambda: RolloutProgress(cursor=0, consumed=0, unfinished=()))
    incarnation: int = 0
    """How often the run was resumed."""
    is_restored: bool = False
    """From a checkpoint; a run that failed before its first one is resumed from the beginning."""
    evaluation_tasks: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObserver:
    """What a run tells while it goes on."""

    begin: Callable[[Baseline], None] = lambda _: None
    """Before the first training step."""
    step: Callable[[StepOutcome], None] = lambda _: None
    stage: Callable[[str, str], None] = lambda _name, _text: None
    """Name of a stage and what it does."""
    workers: Callable[[Workers], None] = lambda _: None
    """The rollout workers, before they are started: for whoever changes their roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run, ended."""

    version: WeightVersion
    wall_s: float
    """Of training, evaluation and start-up left out."""
    before: EvaluationResult | None
    after: EvaluationResult | None
    generated_tokens: int
    turns: int
    continued_turns: int
    worker_restarts: int
    worker_losses: int
    handoffs: int
    appended_turns: int
    faults: dict[TrajectoryStatus, int]
    group_ends: dict[GroupStatus, int]


async def run(recipe: Recipe, ports: RunPorts, start: RunStart, observer: RunObserver) -> RunResult:
    """Run a recipe to its end.

    Raises:
        RunFailed: a bound on restarts, failures or waits was passed; workers are stopped and the journal is flushed.
    """
    start_s = asyncio.get_running_loop().time()
    try:
        async with Nursery() as nursery:
            result = await _Run(recipe, ports, start, observer, nursery, start_s).run()
    except BaseException:
        # Why the run ended is worth more than that its journal could not be written either.
        with contextlib.suppress(PearlError):
            await _flush(ports.journal)
        raise
    await _flush(ports.journal)
    return result


async def _flush(journal: JournalSink) -> None:
    try:
        async with guard(FLUSH_TIMEOUT_S, "journal flush"):
            await journal.flush()
    except GuardExpired as error:
        raise RunFailed(f"{error}: the end of the journal may be missing") from error


class _Run:
    def __init__(
        self,
        recipe: Recipe,
        ports: RunPorts,
        start: RunStart,
        observer: RunObserver,
        nursery: Nursery,
        start_s: float,
    ) -> None:
        self.recipe, self.ports, self.start, self.observer = recipe, ports, start, observer
        self.nursery, self.start_s = nursery, start_s
        self.journal = ports.journal if ports.control is None else ports.control.journal(ports.journal)
        self.workers = Workers(
            fleet=ports.fleet,
            state=StateHolder(self.journal, start_s),
            nursery=nursery,
            start_timeout_s=recipe.cluster.start_timeout_s,
            load_timeout_s=recipe.weights.timeout_s,
            load_mode=LoadMode(recipe.engine.on_load),
            max_restarts=recipe.cluster.max_worker_restarts,
            max_turn_attempts=recipe.rollout.max_turn_attempts,
            silence_s=recipe.rollout.turn_timeout_s * SILENCE_FRACTION,
            append_prefill_tokens=recipe.engine.append_prefill_tokens,
            readback=recipe.engine.readback,
        )
        self.agents = AgentPorts(
            router=self.workers.router,
            environments=ports.environments,
            codec=ports.codec,
            journal=self.journal,
            limits=recipe.rollout,
            max_new_tokens=recipe.sampling.max_new_tokens,
            temperature=recipe.sampling.temperature,
            start_s=start_s,
        )
        self.rollout = self._rollout()

    def _rollout(self) -> Rollout:
        recipe = self.recipe
        return Rollout(
            ports=self.agents,
            tasks=TaskStream(
                environment=recipe.environment.kind, params=recipe.environment.params, seed=recipe.run.seed
            ),
            nursery=self.nursery,
            progress=self.start.progress,
            max_groups=recipe.run.steps * recipe.rollout.groups_per_batch,
            incarnation=self.start.incarnation,
        )

    async def run(self) -> RunResult:
        """Start, evaluate, train, evaluate, stop."""
        loop = asyncio.get_running_loop()
        try:
            await self._start()
            before = None if self.start.is_restored else await self._evaluate("before", self.start.version)
            self.observer.stage("training", f"up to {self.recipe.run.steps} steps")
            began_s = loop.time()
            version = await self._training_loop().run()
            wall_s = loop.time() - began_s
            after = await self._evaluate("after", version)
        finally:
            await self.rollout.stop()
            await self._stop()
        return self._result(version, wall_s, before, after)

    async def _start(self) -> None:
        control = self.ports.control
        shape = parse_shape(self.recipe.engine.shape)
        what = f"starting {shape}" if control is None else f"starting as {self.recipe.elastic.policy} decides"
        self.observer.stage("rollout", what)
        self.observer.workers(self.workers)
        manifest = await self._publish()
        if control is None:
            await self.workers.start(self.start.gpus, specs_of(shape.roles(), self.start.gpus), manifest)
            return
        context = FleetContext(
            workers=self.workers,
            trainer=self.ports.trainer,
            nursery=self.nursery,
            progress=self.rollout.batch_progress,
            start_s=self.start_s,
        )
        await control.start(context, manifest)

    async def _publish(self) -> Manifest:
        try:
            async with guard(self.recipe.weights.timeout_s, f"publication of weights {self.start.version}"):
                return await self.ports.weights.publish(self.start.version)
        except GuardExpired as error:
            raise RunFailed(f"{error} (weights.timeout_s)") from error

    def _training_loop(self) -> TrainingLoop:
        return TrainingLoop(
            recipe=self.recipe,
            trainer=self.ports.trainer,
            weights=self.ports.weights,
            workers=self.workers,
            rollout=self.rollout,
            journal=self.journal,
            checkpointer=self.ports.checkpointer,
            hooks=self.ports.control or self.ports.hooks,
            begin=self.observer.begin,
            observe=self.observer.step,
            start_s=self.start_s,
            version=self.start.version,
        )

    async def _evaluate(self, when: str, version: WeightVersion) -> EvaluationResult | None:
        config, tasks = self.recipe.evaluation, self.start.evaluation_tasks
        if not config.rollouts_per_task or not tasks:
            return None
        count = len(tasks) * config.rollouts_per_task
        self.observer.stage("evaluation", f"{when} training: {len(tasks)} tasks, {count} rollouts")
        again = f"r{self.start.incarnation}" if self.start.incarnation else ""
        name = f"{when}{version}{again}"
        result = await evaluate(self.agents, tasks, config.rollouts_per_task, config.seed, version, name)
        if result.faults:
            self.observer.stage(
                "warning",
                f"evaluation {when} training: {result.faults} of {count} rollouts ended with a fault and do not count",
            )
        return result

    async def _stop(self) -> None:
        control = self.ports.control
        if control is not None:
            await self._within(control.stop(), "ending the changes of the fleet")
        await self._within(self.workers.stop(), "stopping the rollout workers")
        if control is not None:
            await self._within(control.leave(), "giving GPUs back")

    async def _within(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """A part of the end, for as long as it may take."""
        try:
            async with guard(STOP_TIMEOUT_S, what):
                await work
        except GuardExpired as error:
            self.observer.stage("warning", str(error))

    def _result(
        self,
        version: WeightVersion,
        wall_s: float,
        before: EvaluationResult | None,
        after: EvaluationResult | None,
    ) -> RunResult:
        counts = self.workers.router.counts
        return RunResult(
            version=version,
            wall_s=wall_s,
            before=before,
            after=after,
            generated_tokens=counts.generated_tokens,
            turns=counts.turns,
            continued_turns=counts.continued,
            worker_restarts=self.workers.restarts,
            worker_losses=counts.worker_losses,
            handoffs=counts.handoffs,
            appended_turns=counts.appended_turns,
            faults=dict(self.rollout.faults),
            group_ends=dict(self.rollout.group_ends),
        )
