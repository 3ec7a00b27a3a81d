"""A recipe, run in the simulated world: the very code of a real run on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.config.recipe import Recipe
from pearl.core.policy import Policy
from pearl.core.state import FleetState, Gpu, GpuOwner
from pearl.elastic.control import ElasticFleet, ElasticOptions
from pearl.errors import ConfigError
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.rollout import RolloutProgress
from pearl.pipeline.run import RunObserver, RunPorts, RunStart, run
from pearl.pipeline.training_loop import StepOutcome
from pearl.pipeline.workers import Workers
from pearl.ports import JournalSink, WorkerSpec
from pearl.records.ids import GpuId, WeightVersion
from pearl.report.planning import fleet_of, platform_of, policy_of, situation_of
from pearl.sim.availability import recorded_availability
from pearl.sim.codec import SimCodec
from pearl.sim.environment import SimEnvironmentPool
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

    def __post_init__(self) -> None:
        recipe, simulation = self.recipe, self.recipe.simulation
        hidden = self.hidden
        self.platform = platform_of(recipe)
        situation = situation_of(recipe)
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
            self._settings, self._times, EngineWorld(links=network, weights=self.store), left=self.store.leave
        )
        self.source = SimGpuSource(
            self._availability(),
            SourceSettings(
                unit_gpus=max(recipe.fleet.tp),
                node_gpus=recipe.fleet.gpus_per_node,
                notice_s=simulation.notice_s,
                seed=recipe.run.seed,
            ),
            on_withdrawn=self._withdrawn,
        )
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
        self.tally = Tally(sink=self.sink, state=lambda: self.workers[0].state.snapshot)

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
        most, path = self.recipe.fleet.external_gpus, self.recipe.simulation.availability
        if path is None:
            return ((0.0, most),) if most else ()
        return tuple((at_s, min(gpus, most)) for at_s, gpus in recorded_availability(path))

    def _withdrawn(self, gpus: tuple[GpuId, ...]) -> None:
        """Processes die with their GPUs."""
        if not self.workers:
            return
        gone = set(gpus)
        for worker in sorted(self.workers[0].state.snapshot.workers.values(), key=lambda worker: worker.id):
            if not gone.isdisjoint(worker.gpus):
                self.fleet.kill(worker.id, "its GPUs were withdrawn")


def simulate(
    recipe: Recipe,
    sink: JournalSink | None = None,
    step: Callable[[StepOutcome], None] | None = None,
    hidden: Hidden | None = None,
) -> Simulated:
    """Run a recipe on virtual time to its end; `step` hears of each training step.

    Raises:
        ConfigError: something that the simulated world needs is not in the recipe.
        RunFailed: as a real run does.
    """
    if not (recipe.fleet.reserved_gpus or recipe.fleet.external_gpus or recipe.fleet.training_gpus):
        raise ConfigError("[fleet]: got no GPUs, want reserved_gpus, external_gpus or training_gpus > 0")
    world = _World(recipe, sink if sink is not None else _Discard(), hidden or Hidden())
    stalls: list[Stall] = []
    with rare_collections(), asyncio.Runner(loop_factory=lambda: VirtualLoop(on_stall=stalls.append)) as runner:
        seconds = runner.run(_run(recipe, world, step))
    consumed = world.trainer.consumed
    return Simulated(
        policy=world.control.options.policy.name,
        seconds=seconds,
        tally=world.tally,
        trainer_busy_s=world.trainer.busy_s,
        trained_tokens=sum(entry.trained_tokens for entry in world.tally.steps),
        trained_twice=len(consumed) - len({each.trajectory for each in consumed}),
        stalls=tuple(stalls),
    )


async def _run(recipe: Recipe, world: _World, step: Callable[[StepOutcome], None] | None) -> float:
    loop = asyncio.get_running_loop()
    observer = RunObserver(workers=world.workers.append, step=step or _ignore)
    start = RunStart(gpus=_gpus(fleet_of(recipe), GpuOwner.RESERVED))
    async with Nursery() as nursery:
        work = nursery.spawn(run(recipe, world.ports, start, observer), name="run")
        if recipe.simulation.duration_s is None:
            await work
            return loop.time()
        await asyncio.sleep(recipe.simulation.duration_s)
        ended_s = loop.time()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return ended_s


def _ignore(_: StepOutcome) -> None:
    pass


def _gpus(fleet: FleetState, owner: GpuOwner) -> tuple[Gpu, ...]:
    return tuple(fleet.gpus[gpu] for gpu in sorted(fleet.gpus) if fleet.gpus[gpu].owner is owner)
