"""A whole run on fakes: what `pearl.pipeline.run.run` needs, with the ledgers to judge it by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.config.recipe import Recipe
from pearl.core.shape import parse_shape
from pearl.core.state import Gpu, GpuOwner
from pearl.pipeline.rollout import RolloutProgress
from pearl.pipeline.run import RunObserver, RunPorts, RunResult, RunStart, run
from pearl.pipeline.training_loop import StepOutcome
from pearl.ports import WorkerSpec
from pearl.records.ids import GpuId, NodeId, TaskId, WeightVersion
from pearl.records.journal import GroupEntry, TrajectoryEntry
from pearl.records.training import TrainingBatch
from pearl.records.trajectory import Task, TrajectoryStatus
from pearl.testing.codec import FakeCodec
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.environment import FakeEnvironmentPool, Script
from pearl.testing.fleet import FakeFleet
from pearl.testing.journal import ListSink
from pearl.testing.trainer import FakeTrainer
from pearl.testing.weights import FakeWeightStore


@dataclass(slots=True)
class ListCheckpointer:
    """Keeps what would be saved."""

    saved: list[tuple[WeightVersion, RolloutProgress]] = field(default_factory=list)

    async def save(self, version: WeightVersion, progress: RolloutProgress) -> None:
        """Keep it."""
        self.saved.append((version, progress))


def fake_recipe(**sections: dict[str, object]) -> Recipe:
    """A small recipe: batches of 2 groups of 2, 4 steps; `sections` replace values, e.g. `rollout={"group_size": 4}`."""
    tree: dict[str, dict[str, object]] = {
        "run": {"steps": 4},
        "model": {"path": "fake"},
        "environment": {"kind": "fake", "slots": 64},
        "rollout": {"groups_per_batch": 2, "group_size": 2, "max_context_tokens": 10_000},
        "engine": {"shape": "2C"},
        "sampling": {"max_new_tokens": 64},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Recipe.model_validate(tree)


class FakeWorld:
    """All ports of a run in this process."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        engine: FakeEngineConfig | None = None,
        output_tokens: Callable[..., int] | None = None,
        script: Script | None = None,
        train_s: float | Callable[[TrainingBatch], float] = 0.0,
        start: RunStart | None = None,
    ) -> None:
        self.recipe = recipe
        config = engine or FakeEngineConfig()

        def make_engine(spec: WorkerSpec) -> FakeEngine:
            return FakeEngine(config, worker=spec.worker, output_tokens=output_tokens)

        self.fleet = FakeFleet(make_engine)
        self.trainer = FakeTrainer(train_s, version=start.version if start else 0)
        self.weights = FakeWeightStore(self.trainer)
        self.environments = FakeEnvironmentPool(recipe.environment.slots, script)
        self.journal = ListSink()
        self.checkpointer = ListCheckpointer()
        self.steps: list[StepOutcome] = []
        self.start = start or RunStart(gpus=fake_gpus(parse_shape(recipe.engine.shape).gpus))

    @property
    def ports(self) -> RunPorts:
        """For `pearl.pipeline.run.run`."""
        return RunPorts(
            fleet=self.fleet,
            weights=self.weights,
            trainer=self.trainer,
            environments=self.environments,
            codec=FakeCodec(),
            journal=self.journal,
            checkpointer=self.checkpointer,
        )

    async def run(self) -> RunResult:
        """Run the recipe."""
        return await run(self.recipe, self.ports, self.start, RunObserver(step=self.steps.append))

    def check_ledger(self) -> None:
        """Assert what must hold of every run, whatever happened in it.

        Every attempt that opened an environment ended exactly once; environments were all closed; no trajectory was
        trained twice; nothing was staler than allowed; every trained token is one that an engine delivered.
        """
        ends = [entry.trajectory for entry in self.journal.of(TrajectoryEntry)]
        assert len(ends) == len(set(ends)), "a trajectory ended twice"
        assert self.environments.open_now == 0, "an environment slot was not given back"
        consumed = [one.trajectory for one in self.trainer.consumed]
        assert len(consumed) == len(set(consumed)), "a trajectory was trained twice"
        status = {entry.trajectory: entry.status for entry in self.journal.of(TrajectoryEntry)}
        trainable = {s.value for s in TrajectoryStatus if s.trainable}
        assert all(status[trajectory] in trainable for trajectory in consumed), "a fault was trained on"
        for batch in self.trainer.batches:
            assert 0 <= batch.staleness_max <= self.recipe.rollout.max_staleness, "staler than allowed"
        groups = [entry.group for entry in self.journal.of(GroupEntry)]
        assert len(groups) == len(set(groups)), "a group ended twice"
        self._check_tokens()

    def _check_tokens(self) -> None:
        delivered: dict[str, int] = {}
        for engine in self.fleet.past_engines:
            for one in engine.delivered:
                delivered[one.trajectory] = delivered.get(one.trajectory, 0) + len(one.chunk.token_ids)
        for batch in self.trainer.batches:
            for sample in batch.samples:
                assert len(sample.logprobs) <= delivered[sample.trajectory], "a trained token was never delivered"


def fake_gpus(count: int) -> tuple[Gpu, ...]:
    """GPUs of one node, reserved."""
    return tuple(Gpu(id=GpuId(f"gpu{n}"), node=NodeId("node0"), owner=GpuOwner.RESERVED) for n in range(count))


def fake_task(name: str = "task") -> Task:
    """A task for tests of single parts."""
    return Task(id=TaskId(name), environment="fake", seed=1)
