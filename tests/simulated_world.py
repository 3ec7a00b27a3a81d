"""The simulated world, watched: made from a recipe and from conditions that no recipe has, and looked at when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar
from unittest import mock

from pearl.config.recipe import Recipe
from pearl.core.decision import Situation
from pearl.core.progress import fresh_batch
from pearl.elastic.control import ElasticFleet
from pearl.errors import RunFailed
from pearl.pipeline.concurrency import guard
from pearl.pipeline.training_loop import StepOutcome
from pearl.ports import Notice, Withdrawn
from pearl.records.ids import GpuId, WorkerId
from pearl.records.journal import JournalEntry, StepEntry
from pearl.report.live import StepReport
from pearl.report.planning import situation_of
from pearl.sim import simulate as simulate_module
from pearl.sim.disturbances import AnyWorker
from pearl.sim.environment import Workload
from pearl.sim.faults import Fault, FaultInjector
from pearl.sim.leases import Availability
from pearl.sim.simulate import Simulated, Simulation, _World
from pearl.sim.trainer import TrainTimes
from pearl.virtual_time import Stall, VirtualLoop
from tests.simulated_ports import Watch, WatchedControl, WatchedFleet, WatchedPool, WatchedTrainer

Entry = TypeVar("Entry", bound=JournalEntry)

LONGEST_S = 20_000.0
"""A run that takes longer waits for something that does not come."""
MOMENT_S = 1e-6
"""In which what is told at a time has been heard."""


class Entries:
    """A journal in memory."""

    def __init__(self) -> None:
        self.all: list[JournalEntry] = []

    def write(self, entry: JournalEntry) -> None:
        self.all.append(entry)

    async def flush(self) -> None:
        """It is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a recipe does not say."""

    workload: Workload
    faults: tuple[Fault, ...] = ()
    availability: Availability = ()
    times: TrainTimes
    change_options: Callable[[ElasticFleet], None] = lambda _: None


_conditions: list[Conditions] = []
"""Of the world that is being made: `Simulation` makes it from a recipe alone."""


class WatchedWorld(_World):
    """The simulated ports, each with an eye on it."""

    def __post_init__(self) -> None:
        self.conditions = _conditions[-1]
        self.watch = watch = Watch()
        super().__post_init__()
        self.trainer.times = self.conditions.times
        self.trainer.__class__, self.fleet.__class__ = WatchedTrainer, WatchedFleet
        self.pool.__class__ = WatchedPool
        trainer, fleet, pool, control = self.watched
        trainer.watch = fleet.watch = pool.watch = control.watch = watch
        trainer.fleet = fleet
        trainer.gpus = frozenset(gpu.id for gpu in control.options.training)
        control.settle = self._left
        self.conditions.change_options(control)
        push = self.source.push

        def pushed(event: object) -> None:
            if isinstance(event, Notice):
                notice_s = event.deadline_s - asyncio.get_running_loop().time()
                self._noticed.update(dict.fromkeys(event.gpus, notice_s))
            push(event)  # type: ignore[arg-type]
            if isinstance(event, Withdrawn):
                # Whatever comes back is under no notice.
                for gpu in event.gpus:
                    self._noticed.pop(gpu, None)

        self._noticed: dict[GpuId, float] = {}
        self.source.push = pushed  # type: ignore[method-assign]

    @property
    def watched(self) -> tuple[WatchedTrainer, WatchedFleet, WatchedPool, WatchedControl]:
        """The ports as what they are."""
        return self.trainer, self.fleet, self.pool, self.control  # type: ignore[return-value]

    def _availability(self) -> Availability:
        return self.conditions.availability

    def _injectors(self) -> tuple[FaultInjector, ...]:
        return (
            FaultInjector(
                faults=self.conditions.faults, fleet=AnyWorker(self.fleet), environments=self.pool, source=self.source
            ),
        )

    def _withdrawn(self, gpus: tuple[GpuId, ...]) -> None:
        notice_s = min(self._noticed.get(gpu, 0.0) for gpu in gpus)
        used = {gpu: worker for gpu, worker in self.watched[1].used_gpus().items() if gpu in gpus}
        if used and not self.watch.settled:
            hung = [worker for worker in sorted(set(used.values())) if self._is_hung(worker)]
            self.watch.surprised.append(
                (notice_s, f"GPUs {sorted(used)} of workers {sorted(set(used.values()))}, {hung} hang")
            )
        self.watch.withdrawals.append((asyncio.get_running_loop().time(), len(gpus), notice_s > 0))
        super()._withdrawn(gpus)
        asyncio.get_running_loop().call_later(MOMENT_S, self._look, gpus)

    def _is_hung(self, worker: WorkerId) -> bool:
        engine = self.fleet.engines.get(worker)
        return engine is not None and engine.is_hung

    def _look(self, gpus: tuple[GpuId, ...]) -> None:
        gone = [gpu for gpu in gpus if gpu not in self.source.held]
        used = self.watched[1].used_gpus()
        if left := {gpu: used[gpu] for gpu in gone if gpu in used}:
            self.watch.wrong.append(f"GPUs that are gone are in use: {left}")

    def explain(self) -> str:
        """What of the schedule explains that nothing goes on now; empty: nothing does."""
        if self.watch.hung:
            return "an environment hangs"
        if hung := [worker for worker, engine in self.fleet.engines.items() if engine.is_hung]:
            return f"workers {hung} hang"
        fleet = self.recipe.fleet
        policy = self.control.options.policy
        here = len(self.source.available) if policy.external else 0
        most = max(fleet.reserved_gpus, here)
        return "no GPUs" if most < min(fleet.tp) else ""

    def _left(self) -> tuple[str, ...]:
        """What is left of requests, memory, environments and transfers when rollout has ended a while ago."""
        found: list[str] = []
        for worker, engine in sorted(self.fleet.engines.items()):
            if engine.is_hung:
                continue
            requests, held = list(engine._roster.requests), engine._cache.held_tokens
            if requests or held:
                found.append(f"worker {worker}: requests {requests}, {held} tokens held")
        if self.pool.open_now:
            found.append(f"{self.pool.open_now} environments open")
        return tuple(found)


class WatchedSimulation(Simulation):
    """A simulated run under watch."""

    def _new_loop(self) -> VirtualLoop:
        self._loop = VirtualLoop(on_stall=self._stalled)
        return self._loop

    def _stalled(self, stall: Stall) -> None:
        self._stalls.append(stall)
        self.world.watch.stalls.append((stall, self.world.explain()))

    @property
    def world(self) -> WatchedWorld:
        """Its ports."""
        assert isinstance(self._world, WatchedWorld)
        return self._world

    async def _work(self, step: Callable[[StepOutcome, StepReport], None]) -> float:
        async with guard(LONGEST_S, "the whole run"):
            try:
                return await super()._work(step)
            finally:
                self._look()

    def _look(self) -> None:
        """What is there when everything has ended."""
        loop, world, watch = self._loop, self.world, self.world.watch
        assert loop is not None
        watch.borrowed = sum(what == "lend" for _, what, _ in world.trainer.loans)
        tasks = sorted(task.get_name() for task in asyncio.all_tasks(loop) if task is not asyncio.current_task())
        fleet = world.fleet
        left = {
            "tasks": tasks,
            "workers": sorted(fleet.engines),
            "starts": sorted(fleet._starting),
            "environments": world.pool.open_now,
            "transfers": world.store._network.active,
            "GPUs of the trainer": list(world.trainer.lent),
            "GPUs from outside": sorted(world.source.held),
            "guards": [w for _, _, t in loop._guards.heap if not t.cancelled() and (w := t.waiter) != "the whole run"],
        }
        watch.wrong += [f"left at the end: {name}: {what}" for name, what in left.items() if what]


@cache
def _situation(recipe: str) -> Situation:
    """Made once for recipes that are alike: shaping a prior takes longer than a run."""
    return situation_of(Recipe.model_validate_json(recipe))


def _known_situation(recipe: Recipe) -> Situation:
    """Of what it is made of: work, platform, and how much of it a batch is."""
    rollout = recipe.rollout
    limits = Recipe.model_validate(
        {
            "model": recipe.model,
            "environment": recipe.environment,
            "rollout": {"max_turns": rollout.max_turns, "max_context_tokens": rollout.max_context_tokens},
            "fleet": {name: getattr(recipe.fleet, name) for name in ("gpus_per_node", "tp", "overlap_tp")},
            "workload": recipe.workload,
            "platform": recipe.platform,
        }
    )
    batches = rollout.max_staleness + 1
    progress = fresh_batch(rollout.groups_per_batch, rollout.group_size, batches=batches)
    return replace(_situation(limits.model_dump_json()), progress=progress)


def _given(*_: object, **__: object) -> Workload:
    return _conditions[-1].workload


@dataclass(slots=True)
class Run:
    """One run, before and after."""

    seed: int
    recipe: Recipe
    conditions: Conditions
    simulation: WatchedSimulation
    journal: Entries
    result: Simulated | None = None
    failure: RunFailed | None = None
    error: Exception | None = None
    """Anything else that ended it: always a finding."""

    @property
    def world(self) -> WatchedWorld:
        """Its ports."""
        return self.simulation.world

    @property
    def watch(self) -> Watch:
        """What was seen."""
        return self.world.watch

    @property
    def applied(self) -> list[tuple[float, Fault]]:
        """Faults that hit something."""
        return [fault for injector in self.world.injectors for fault in injector.applied]

    def of(self, kind: type[Entry]) -> list[Entry]:
        """Journal entries of a kind, in order."""
        return [entry for entry in self.journal.all if type(entry) is kind]

    def play(self) -> Run:
        """Run to the end, or to where it fails."""
        try:
            self.result = self.simulation.run()
        except RunFailed as error:
            self.failure = error
        except Exception as error:
            # Whatever it is, it is a finding.
            self.error = error
        return self

    @property
    def steps(self) -> list[StepEntry]:
        """Training steps."""
        return self.of(StepEntry)


def make_run(seed: int, recipe: Recipe, conditions: Conditions) -> Run:
    """A run that can be watched."""
    journal = Entries()
    _conditions.append(conditions)
    try:
        with (
            mock.patch.object(simulate_module, "_World", WatchedWorld),
            mock.patch.object(simulate_module, "ElasticFleet", WatchedControl),
            mock.patch.object(simulate_module, "situation_of", _known_situation),
            mock.patch.object(simulate_module, "configured_workload", _given),
        ):
            simulation = WatchedSimulation(recipe, journal)
    finally:
        _conditions.pop()
    return Run(seed, recipe, conditions, simulation, journal)
