"""Ports of the simulated world that note what they see, for oracles that believe nobody's own counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pearl.elastic.control import ElasticFleet
from pearl.errors import EngineError
from pearl.ports import StartReport, WorkerSpec
from pearl.records.ids import GpuId, TaskId, WeightVersion, WorkerId
from pearl.records.training import TrainingBatch, TrainReport
from pearl.records.trajectory import Task
from pearl.sim.environment import EnvironmentFaultKind, SimEnvironment, SimEnvironmentPool
from pearl.sim.fleet import SimFleet
from pearl.sim.trainer import SimTrainer
from pearl.virtual_time import Stall

SETTLE_S = 20.0
"""In which whatever the end of rollout leaves running must have ended."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """What was seen from outside."""

    wrong: list[str] = field(default_factory=list)
    """What must not be, as it was seen."""
    batches: list[TrainingBatch] = field(default_factory=list)
    """Trained to the end, in order."""
    opened: dict[TaskId, int] = field(default_factory=dict)
    """Environments that were asked for."""
    hung: int = 0
    """Environments that do not answer now."""
    stalls: list[tuple[Stall, str]] = field(default_factory=list)
    """With what of the schedule explains it, or nothing."""
    returns_s: list[float] = field(default_factory=list)
    """From a complete batch until it is trained on: what the trainer waits for its GPUs."""
    borrowed: int = 0
    """Loans of GPUs of the trainer, by the trainer's own ledger."""
    withdrawals: list[tuple[float, int, bool]] = field(default_factory=list)
    """`(time, GPUs that the job had, with notice)`."""
    surprised: list[tuple[float, str]] = field(default_factory=list)
    """`(seconds of notice, who)`: workers that were still there when their GPUs went."""
    settled: bool = False
    """The end of the run was looked at."""
    at_end: tuple[str, ...] = ()
    """What was left over."""


class WatchedTrainer(SimTrainer):
    """Looks who is on its GPUs when it trains."""

    watch: Watch
    fleet: WatchedFleet
    gpus: frozenset[GpuId] = frozenset()

    async def train(self, batch: TrainingBatch) -> TrainReport:
        self._look("begins")
        report = await super().train(batch)
        self._look("ends")
        self.watch.batches.append(batch)
        return report

    def _look(self, when: str) -> None:
        used = sorted(self.gpus.intersection(self.fleet.used_gpus()))
        if used or self.lent:
            self.watch.wrong.append(f"training {when} with {used} in use by rollout, {list(self.lent)} lent")


class WatchedFleet(SimFleet):
    """Notes who is asked onto GPUs that somebody has, or that nobody has any more."""

    watch: Watch

    def used_gpus(self) -> Mapping[GpuId, WorkerId]:
        return self._used_gpus()

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        if found := self._conflicts(specs):
            self.watch.wrong.append(f"start where it cannot be: {found}")
        return await super().start(specs, timeout_s)

    async def wake(self, workers: Sequence[WorkerId]) -> None:
        try:
            await super().wake(workers)
        except EngineError as error:
            self.watch.wrong.append(str(error))
            raise


class _WatchedEnvironment(SimEnvironment):
    __slots__ = ()

    async def _fail(self, kind: EnvironmentFaultKind) -> None:
        watch = self._pool.watch  # type: ignore[attr-defined]
        watch.hung += kind is EnvironmentFaultKind.HANG
        try:
            await super()._fail(kind)
        finally:
            watch.hung -= kind is EnvironmentFaultKind.HANG


class WatchedPool(SimEnvironmentPool):
    """Counts who asks, and who hangs."""

    watch: Watch

    async def open(self, task: Task) -> SimEnvironment:
        self.watch.opened[task.id] = self.watch.opened.get(task.id, 0) + 1
        environment = await super().open(task)
        environment.__class__ = _WatchedEnvironment
        return environment


class WatchedControl(ElasticFleet):
    """Takes the time of returns; lets the run settle before its workers end."""

    watch: Watch
    settle: Callable[[], tuple[str, ...]]

    async def training_begin(self, version: WeightVersion) -> None:
        began_s = asyncio.get_running_loop().time()
        await super().training_begin(version)
        self.watch.returns_s.append(asyncio.get_running_loop().time() - began_s)

    async def stop(self) -> None:
        await super().stop()
        if self._scheduler is not None and not self.watch.settled:
            self.watch.settled = True
            await asyncio.sleep(SETTLE_S)
            self.watch.at_end = self.settle()
