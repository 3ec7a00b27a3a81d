"""A whole run on fakes: what `pearl.pipeline.run.run` needs, with the ledgers to judge it by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pearl.config.recipe import Recipe
from pearl.core.shape import parse_shape
from pearl.core.state import Gpu, GpuOwner
from pearl.pipeline.rollout import RESTARTED, RolloutProgress
from pearl.pipeline.run import FleetControl, RunObserver, RunPorts, RunResult, RunStart, run
from pearl.pipeline.training_loop import Baseline, NoHooks, StepOutcome, TrainingHooks
from pearl.pipeline.workers import Workers
from pearl.ports import WorkerSpec
from pearl.records.ids import GpuId, NodeId, TaskId, WeightVersion
from pearl.records.journal import GroupEntry, StateEntry, TrajectoryEntry, TurnEntry
from pearl.records.tokens import TokenIds, Tokens
from pearl.records.training import TrainingBatch
from pearl.records.trajectory import GroupStatus, Task, TrajectoryStatus
from pearl.records.turn import TurnRequest
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
        output_tokens: Callable[[TurnRequest], int] | None = None,
        script: Script | None = None,
        train_s: float | Callable[[TrainingBatch], float] = 0.0,
        start_s: float = 0.0,
        start: RunStart | None = None,
        hooks: TrainingHooks | None = None,
        control: FleetControl | None = None,
        trainer: FakeTrainer | None = None,
    ) -> None:
        """Make the ports; `start_s` is what a worker takes to start, `train_s` a training step of the `trainer` made here."""
        self.recipe = recipe
        config = engine or FakeEngineConfig()

        def make_engine(spec: WorkerSpec) -> FakeEngine:
            return FakeEngine(config, worker=spec.worker, output_tokens=output_tokens, store=self.weights)

        self.fleet = FakeFleet(make_engine, start_s)
        self.trainer = trainer or FakeTrainer(train_s, version=start.version if start else 0)
        self.weights = FakeWeightStore(self.trainer)
        self.environments = FakeEnvironmentPool(recipe.environment.slots, script)
        self.journal = ListSink()
        self.checkpointer = ListCheckpointer()
        self.hooks: TrainingHooks = hooks or NoHooks()
        self.control = control
        self.baselines: list[Baseline] = []
        self.steps: list[StepOutcome] = []
        self.stages: list[tuple[str, str]] = []
        self.workers: Workers | None = None
        """Of the run that goes on or has ended, to change roles with."""
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
            hooks=self.hooks,
            control=self.control,
        )

    async def run(self) -> RunResult:
        """Run the recipe."""
        observer = RunObserver(
            begin=self.baselines.append,
            step=self.steps.append,
            stage=lambda name, text: self.stages.append((name, text)),
            workers=self._see,
        )
        return await run(self.recipe, self.ports, self.start, observer)

    def _see(self, workers: Workers) -> None:
        self.workers = workers

    def resumed_start(self) -> RunStart:
        """Where a run begins that goes on from the last checkpoint."""
        version, progress = self.checkpointer.saved[-1]
        return replace(
            self.start,
            version=version,
            progress=progress,
            incarnation=self.start.incarnation + 1,
            is_restored=True,
        )

    def check_ledger(self) -> None:
        """Assert what must hold of every run that has ended, whatever happened in it.

        Every trajectory and group ended exactly once; nothing is left open or running; nothing was trained twice, staler
        than allowed, or after a fault; every trained token is one that an engine delivered, with its log-probability and
        version; and the journal says so.
        """
        assert self.environments.open_now == 0, "an environment slot was not given back"
        assert not self.fleet.engines, "a worker was left running"
        self._check_training(self._check_ends())
        self._check_tokens()
        self._check_turns()
        self._check_state()

    def _check_ends(self) -> dict[str, str]:
        """Each end once; returns trajectory -> status."""
        ends = self.journal.of(TrajectoryEntry)
        status = {entry.trajectory: entry.status for entry in ends}
        assert len(ends) == len(status), "a trajectory ended twice"
        groups = [entry for entry in self.journal.of(GroupEntry) if entry.status != RESTARTED]
        assert len(groups) == len({entry.group for entry in groups}), "a group ended twice"
        begun: dict[str, int] = {}
        for entry in ends:
            begun[entry.group] = begun.get(entry.group, 0) + 1
        assert all(begun.get(entry.group, 0) == entry.attempts for entry in groups), "an attempt has no end"
        return status

    def _check_training(self, status: dict[str, str]) -> None:
        consumed = [one.trajectory for one in self.trainer.consumed]
        assert len(consumed) == len(set(consumed)), "a trajectory was trained twice"
        trainable = {s.value for s in TrajectoryStatus if s.trainable}
        assert all(status[trajectory] in trainable for trajectory in consumed), "a fault was trained on"
        for batch in self.trainer.batches:
            assert 0 <= batch.staleness_max <= self.recipe.rollout.max_staleness, "staler than allowed"
            assert len(batch.groups) <= self.recipe.rollout.groups_per_batch, "a batch has too many groups"
        completed = {g.group for g in self.journal.of(GroupEntry) if g.status == GroupStatus.COMPLETED.value}
        trained = [group for batch in self.trainer.batches for group in batch.groups]
        assert len(trained) == len(set(trained)), "a group was trained twice"
        assert completed.issuperset(trained), "a group was trained that did not complete"

    def _check_tokens(self) -> None:
        delivered: dict[tuple[str, int], list[tuple[int, float, int]]] = {}
        for engine in self.fleet.past_engines:
            for one in engine.delivered:
                chunk = one.chunk
                versions = [run.version for run in chunk.versions.runs for _ in range(run.tokens)]
                tokens = zip(_ids(chunk.token_ids), chunk.logprobs.tolist(), versions, strict=True)
                for position, token in enumerate(tokens, start=chunk.start):
                    delivered.setdefault((one.trajectory, position), []).append(token)
        for batch in self.trainer.batches:
            for sample in batch.samples:
                ids = sample.ids.tolist()
                positions = [n for start, stop in sample.trained for n in range(start, stop)]
                versions = [run.version for run in sample.versions.runs for _ in range(run.tokens)]
                for position, *drawn in zip(positions, sample.logprobs.tolist(), versions, strict=True):
                    token = (ids[position], *drawn)
                    assert token in delivered[sample.trajectory, position], "a trained token was never delivered"

    def _check_turns(self) -> None:
        turns: dict[str, list[int]] = {}
        tokens: dict[str, int] = {}
        for turn in self.journal.of(TurnEntry):
            turns.setdefault(turn.trajectory, []).append(turn.turn)
            tokens[turn.trajectory] = tokens.get(turn.trajectory, 0) + turn.generated
        for end in self.journal.of(TrajectoryEntry):
            assert turns.pop(end.trajectory, []) == list(range(end.turns)), "a turn is missing in the journal"
            assert tokens.get(end.trajectory, 0) == end.generated, "turns and trajectory disagree on tokens"
        assert not turns, "turns of a trajectory without an end"

    def _check_state(self) -> None:
        entries = self.journal.of(StateEntry)
        assert all(entry.refused is None for entry in entries), "the fleet state refused an event"
        versions = [entry.state_version for entry in entries]
        assert versions == list(range(1, len(versions) + 1)), "a version of the fleet state is missing"


def _ids(tokens: Tokens) -> list[int]:
    assert isinstance(tokens, TokenIds)
    return tokens.tolist()


def fake_gpus(count: int) -> tuple[Gpu, ...]:
    """GPUs of one node, reserved."""
    return tuple(Gpu(id=GpuId(f"gpu{n}"), node=NodeId("node0"), owner=GpuOwner.RESERVED) for n in range(count))


def fake_task(name: str = "task") -> Task:
    """A task for tests of single parts."""
    return Task(id=TaskId(name), environment="fake", seed=1)
