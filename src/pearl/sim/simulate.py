"""A recipe, run in the simulated world: the very code of a real run on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.config.recipe import Recipe
from pearl.core.policy import Policy
from pearl.core.state import FleetState, Gpu, GpuOwner
from pearl.elastic.control import ElasticFleet, ElasticOptions
from pearl.errors import ConfigError, ProfileError
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.rollout import RolloutProgress
from pearl.pipeline.run import RunObserver, RunPorts, RunStart, run
from pearl.pipeline.training_loop import StepOutcome
from pearl.pipeline.workers import Workers
from pearl.ports import JournalSink, WorkerSpec
from pearl.records.ids import GpuId, WeightVersion
from pearl.report.live import StepReport
from pearl.report.planning import fleet_of, policy_of, situation_of
from pearl.report.totals import RunTotals
from pearl.sim.availability import recorded_availability, synthetic_availability
from pearl.sim.codec import SimCodec
from pearl.sim.disturbances import AnyWorker, random_faults, scheduled_faults
from pearl.sim.environment import SimEnvironmentPool
from pearl.sim.faults import FaultInjector
from pearl.sim.fleet import SimFleet, WorkerTimes
from pearl.sim.gpu_source import SimGpuSource
from pearl.sim.leases import Availability, SourceSettings
from pearl.sim.limits import Limits, Mixing
from pearl.sim.network import Network
from pearl.sim.presets import configured_workload
from pearl.sim.settings import EngineSettings, EngineWorld
from pearl.sim.tally import Tally
from pearl.sim.trainer import SimTrainer, TrainTimes
from pearl.sim.weights import SimWeightStore
from pearl.sim.workload import Workload
from pearl.virtual_time import Stall, VirtualLoop, rare_collections

PUBLISH_BYTES_PER_S = 50e9
"""At which the trainer gathers its weights for publication. A choice, near what a node's links carry."""

LONGEST_S = 7 * 86_400.0
"""For which availability is drawn where a run has no `simulation.duration_s`; it stays as it is behind that."""


@dataclass(slots=True)
class NoCheckpoints:
    """A simulated run begins anew."""

    saved: int = 0

    async def save(self, version: WeightVersion, progress: RolloutProgress) -> None:
        """Count it."""
        del version, progress
        self.saved += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """What a world has beside its recipe, unknown to whoever decides in it; the recipe says what is assumed."""

    workload: Workload | None = None
    """Trajectories; None: those of the recipe."""
    time_scale: float = 1.0
    """Iterations take so many times what the tables say, on all workers."""
    policy: Policy | None = None
    """Who decides; None: that of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated run that has ended."""

    policy: str
    seconds: float
    """Virtual, from the first worker's start on."""
    tally: Tally
    trainer_busy_s: float
    trained_tokens: int
    trained_twice: int
    """Trajectories; a fault of the system if not 0."""
    stalls: tuple[Stall, ...]
    availability: Availability = ()
    """GPUs from outside over time; empty where all of them are there all the time."""
    busy_gpu_s: float = 0.0
    """GPU-seconds of rollout inside iterations."""
    totals: RunTotals = field(default_factory=RunTotals)
    restarts: int = 0
    """Workers that were lost and started again."""
    faults: int = 0
    """Injected ones that hit something."""

    @property
    def tokens_per_s(self) -> float:
        """System throughput: tokens of rollout and of training over time. Source: PEARL, section 6."""
        rollout = self.tally.prompt_tokens + self.tally.generated_tokens
        return (rollout + self.trained_tokens) / self.seconds if self.seconds > 0 else 0.0


class _Discard:
    """A journal that nobody reads."""

    def write(self, entry: object) -> None:
        """Forget it."""

    async def flush(self) -> None:
        """Nothing is kept."""


@dataclass
class _World:
    """The simulated ports of a recipe."""

    recipe: Recipe
    sink: JournalSink
    hidden: Hidden = field(default_factory=Hidden)
    workers: list[Workers] = field(default_factory=list)
    injectors: tuple[FaultInjector, ...] = ()

    def __post_init__(self) -> None:
        recipe, simulation = self.recipe, self.recipe.simulation
        hidden = self.hidden
        situation = situation_of(recipe)
        self.platform = situation.profile.platform
        fleet = fleet_of(recipe)
        self.trainer = SimTrainer(
            TrainTimes(
                gpus=max(1, recipe.fleet.training_gpus),
                gpu_s_per_token=1 / simulation.train_tokens_per_gpu_s,
            )
        )
        network = Network(lambda _: simulation.network_bytes_per_s)
        first = self.platform.by_tp[self.platform.tps[0]]
        self.store = SimWeightStore(
            self.trainer,
            network,
            {"weights": int(simulation.weight_bytes)},
            hash_of_model=first.model_hash,
            gather_s=simulation.weight_bytes / PUBLISH_BYTES_PER_S,
        )
        self.fleet = SimFleet(
            self._settings,
            self._times,
            EngineWorld(links=network, weights=self.store),
            health_s=recipe.cluster.health_timeout_s,
            left=self.store.leave,
        )
        self.availability = self._availability()
        self.source = self._source()
        self.pool = SimEnvironmentPool(
            recipe.environment.slots,
            hidden.workload or configured_workload(recipe.workload, seed=recipe.run.seed),
            seed=recipe.run.seed,
        )
        self.control = ElasticFleet(
            ElasticOptions(
                policy=hidden.policy or policy_of(recipe),
                situation=situation,
                reserved=_gpus(fleet, GpuOwner.RESERVED),
                training=_gpus(fleet, GpuOwner.TRAINING),
                overlap_tp=recipe.fleet.overlap_tp,
                refit_share=recipe.elastic.refit_share,
            ),
            self.source,
        )
        self.tally = Tally(
            sink=self.sink,
            state=lambda: self.workers[0].state.snapshot,
            is_ending=lambda: bool(self.workers) and self.workers[0].is_stopping,
        )
        self.injectors = self._injectors()

    def _injectors(self) -> tuple[FaultInjector, ...]:
        faults, simulation = self.recipe.faults, self.recipe.simulation
        drawn = random_faults(faults, seed=self.recipe.run.seed, duration_s=simulation.duration_s)
        return (
            FaultInjector(
                faults=scheduled_faults(faults), fleet=self.fleet, environments=self.pool, source=self.source
            ),
            FaultInjector(faults=drawn, fleet=AnyWorker(self.fleet), environments=self.pool),
        )

    @property
    def ports(self) -> RunPorts:
        """For `pearl.pipeline.run.run`."""
        return RunPorts(
            fleet=self.fleet,
            weights=self.store,
            trainer=self.trainer,
            environments=self.pool,
            codec=SimCodec(),
            journal=self.tally,
            checkpointer=NoCheckpoints(),
            control=self.control,
        )

    def _settings(self, spec: WorkerSpec) -> EngineSettings:
        simulation, platform = self.recipe.simulation, self.platform
        limits = Limits(
            max_sequences=platform.max_sequences,
            chunk_tokens=platform.prefill_chunk_tokens,
            mixing=Mixing(simulation.mixing),
        )
        tp = len(spec.gpus)
        return EngineSettings(
            profile=platform.by_tp[tp],
            limits=limits,
            time_scale=platform.scale(tp) * self.hidden.time_scale,
            max_context_tokens=self.recipe.engine.max_context_tokens,
        )

    def _times(self, spec: WorkerSpec) -> WorkerTimes:
        return WorkerTimes.published(self.platform.by_tp[len(spec.gpus)], self.platform.costs)

    def _availability(self) -> Availability:
        most, simulation = self.recipe.fleet.external_gpus, self.recipe.simulation
        if simulation.availability is not None:
            try:
                rows = recorded_availability(simulation.availability)
            except ProfileError as error:
                raise ProfileError(f"simulation.availability: {error}") from None
            return tuple((at_s, min(gpus, most)) for at_s, gpus in rows)
        if simulation.mean_external_gpus is not None and most:
            return synthetic_availability(
                seed=self.recipe.run.seed,
                length_s=simulation.duration_s or LONGEST_S,
                most_gpus=most,
                mean_gpus=simulation.mean_external_gpus,
                changes_per_h=simulation.changes_per_h,
                step_gpus=simulation.change_gpus,
            )
        return ((0.0, most),) if most else ()

    def _source(self) -> SimGpuSource:
        recipe = self.recipe
        return SimGpuSource(
            self.availability,
            SourceSettings(
                unit_gpus=max(recipe.fleet.tp),
                node_gpus=recipe.fleet.gpus_per_node,
                notice_s=recipe.simulation.notice_s,
                seed=recipe.run.seed,
            ),
            on_withdrawn=self._withdrawn,
        )

    def _withdrawn(self, gpus: tuple[GpuId, ...]) -> None:
        """Processes die with their GPUs."""
        if not self.workers:
            return
        gone = set(gpus)
        for worker in sorted(self.workers[0].state.snapshot.workers.values(), key=lambda worker: worker.id):
            if not gone.isdisjoint(worker.gpus):
                self.fleet.kill(worker.id, "its GPUs were withdrawn")


class Simulation:
    """One simulated run: made, run once, and told of, also where it ended early."""

    def __init__(self, recipe: Recipe, sink: JournalSink | None = None, hidden: Hidden | None = None) -> None:
        """Read everything that the recipe names.

        Raises:
            ConfigError: something that the simulated world needs is not in the recipe.
            ProfileError: a file that it names is missing, damaged, or does not fit.
        """
        if not (recipe.fleet.reserved_gpus or recipe.fleet.external_gpus or recipe.fleet.training_gpus):
            raise ConfigError("[fleet]: got no GPUs, want reserved_gpus, external_gpus or training_gpus > 0")
        self._recipe = recipe
        self._world = _World(recipe, sink if sink is not None else _Discard(), hidden or Hidden())
        self._totals = RunTotals()
        self._stalls: list[Stall] = []
        self._loop: VirtualLoop | None = None
        self._seconds: float | None = None

    def run(self, step: Callable[[StepOutcome, StepReport], None] | None = None) -> Simulated:
        """Run it to its end; `step` hears of each training step.

        Raises:
            RunFailed: as a real run does.
            KeyboardInterrupt: Ctrl-C; workers were stopped and the journal was flushed.
        """
        with rare_collections(), asyncio.Runner(loop_factory=self._new_loop) as runner:
            self._seconds = runner.run(self._work(step or _ignore))
        return self.so_far()

    @property
    def now_s(self) -> float:
        """Virtual seconds so far."""
        if self._seconds is not None:
            return self._seconds
        return 0.0 if self._loop is None else self._loop.time()

    @property
    def tally(self) -> Tally:
        """Of what has happened."""
        return self._world.tally

    def so_far(self) -> Simulated:
        """What it came to until now."""
        world = self._world
        consumed = world.trainer.consumed
        recipe = self._recipe
        began_s = world.source.began_s or 0.0
        is_open = recipe.simulation.availability is None and recipe.simulation.mean_external_gpus is None
        return Simulated(
            policy=world.control.options.policy.name,
            seconds=self.now_s,
            tally=world.tally,
            trainer_busy_s=world.trainer.busy_s,
            trained_tokens=sum(entry.trained_tokens for entry in world.tally.steps),
            trained_twice=len(consumed) - len({each.trajectory for each in consumed}),
            stalls=tuple(self._stalls),
            availability=() if is_open else tuple((at_s + began_s, gpus) for at_s, gpus in world.availability),
            busy_gpu_s=world.fleet.busy_gpu_s,
            totals=self._totals,
            restarts=world.workers[0].restarts if world.workers else 0,
            faults=sum(len(injector.applied) for injector in world.injectors),
        )

    def _new_loop(self) -> VirtualLoop:
        self._loop = VirtualLoop(on_stall=self._stalls.append)
        return self._loop

    async def _work(self, step: Callable[[StepOutcome, StepReport], None]) -> float:
        loop, recipe, world = asyncio.get_running_loop(), self._recipe, self._world
        observer = RunObserver(
            workers=world.workers.append,
            begin=self._totals.begin,
            step=lambda outcome: step(outcome, self._totals.add(outcome)),
        )
        start = RunStart(gpus=_gpus(fleet_of(recipe), GpuOwner.RESERVED))
        world.source.begin()  # not when a policy first looks: all see the same times
        async with Nursery() as nursery:
            for injector in world.injectors:
                if injector.faults:
                    nursery.spawn(injector.run(), name="faults")
            work = nursery.spawn(run(recipe, world.ports, start, observer), name="run")
            if recipe.simulation.duration_s is None:
                await work
                return loop.time()
            return await _until(recipe.simulation.duration_s, work)


async def _until(end_s: float, work: asyncio.Task[object]) -> float:
    """Let it go on until a time, or its own end if that comes first; when that was."""
    loop, ended_s = asyncio.get_running_loop(), list[float]()

    def end() -> None:
        ended_s.append(loop.time())
        work.cancel()

    timer = loop.call_at(end_s, end)
    try:
        await work
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if not ended_s or (current is not None and current.cancelling()):
            raise
    finally:
        timer.cancel()
    return ended_s[0] if ended_s else loop.time()


def simulate(
    recipe: Recipe,
    sink: JournalSink | None = None,
    step: Callable[[StepOutcome], None] | None = None,
    hidden: Hidden | None = None,
) -> Simulated:
    """Run a recipe on virtual time to its end; `step` hears of each training step.

    Raises:
        ConfigError, ProfileError, RunFailed: as `Simulation`.
    """
    told = step or (lambda _: None)
    return Simulation(recipe, sink, hidden).run(lambda outcome, _: told(outcome))


def _ignore(_outcome: StepOutcome, _report: StepReport) -> None:
    pass


def _gpus(fleet: FleetState, owner: GpuOwner) -> tuple[Gpu, ...]:
    return tuple(fleet.gpus[gpu] for gpu in sorted(fleet.gpus) if fleet.gpus[gpu].owner is owner)
