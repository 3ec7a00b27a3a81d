"""Whole runs under a policy, on fakes and virtual time, with faults and GPUs that come and go, all from a seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import numpy as np

from pearl.config.recipe import Recipe
from pearl.core.decision import Situation
from pearl.core.makespan import Candidates, Forecast, Infeasible, Predictions, Profile, Target
from pearl.core.progress import Progress
from pearl.core.state import Gpu, GpuOwner, Role
from pearl.elastic.control import ElasticFleet, ElasticOptions
from pearl.pipeline.run import RunResult
from pearl.pipeline.tasks import derive_seed
from pearl.ports import GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId
from pearl.records.journal import ChangeEntry, ChoiceEntry, StateEntry
from pearl.records.training import LendReport, TrainingBatch, TrainReport
from pearl.records.trajectory import Task
from pearl.report.planning import policy_of, situation_of
from pearl.testing.engine import FakeEngineConfig
from pearl.testing.environment import Behaviour
from pearl.testing.fleet import FakeFleet
from pearl.testing.gpu_source import FakeGpuSource
from pearl.testing.trainer import FakeTrainer
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_recipe

PER_NODE = 4
TIMES_S = 250.0
"""Within which things happen."""
LONGEST_S = 20_000.0
"""A run that takes longer waits for something that does not come."""


def gpus(count: int, owner: GpuOwner, letter: str) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(id=GpuId(f"{letter}{n}"), node=NodeId(f"{letter}-node{n // PER_NODE}"), owner=owner) for n in range(count)
    )


class WatchedTrainer(FakeTrainer):
    """Says when rollout sits on its GPUs while it trains, and what it was asked that it had to refuse."""

    fleet: FakeFleet
    training_gpus: frozenset[GpuId] = frozenset()
    wrong: list[str]

    def __init__(self, train_s: float, lend_s: float) -> None:
        super().__init__(train_s, lend_s=lend_s)
        self.wrong = []

    async def train(self, batch: TrainingBatch) -> TrainReport:
        self._look("training begins")
        report = await super().train(batch)
        self._look("training ends")
        return report

    async def lend_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        if self._training or self.lent.intersection(gpus):
            self.wrong.append(f"lend of {list(gpus)}, lent are {sorted(self.lent)}, training {self._training}")
        return await super().lend_gpus(gpus)

    async def reclaim_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        if not self.lent.issuperset(gpus) or not gpus:
            self.wrong.append(f"reclaim of {list(gpus)}, lent are {sorted(self.lent)}")
        if used := self.awake().intersection(gpus):
            self.wrong.append(f"reclaim of {list(gpus)}, of which {sorted(used)} are in use")
        return await super().reclaim_gpus(gpus)

    def awake(self) -> frozenset[GpuId]:
        """Its GPUs on which a process of rollout is up and not asleep, or starts."""
        return self.training_gpus.intersection(self.fleet._used_gpus())

    def _look(self, when: str) -> None:
        if self.lent or self.awake():
            self.wrong.append(f"{when} with {sorted(self.lent)} lent, {sorted(self.awake())} in use")


@dataclass(slots=True)
class Moody:
    """A predictor that is of another mind every 5 s: so every change is made at some time, and unmade soon after.

    Not at each decision: where a change takes no time, there would be no end of them at one moment.
    """

    seed: int
    close_s: float
    """Of one GPU, about."""
    name: str = "moody"
    appends: bool = True

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        mood = int(asyncio.get_running_loop().time() // 5)

        def predict(candidates: Candidates) -> Predictions:
            targets = [candidates.target(index) for index in range(len(candidates))]
            close_s = np.array([self._close_s(target, mood) for target in targets])
            served = np.isfinite(close_s)
            return Predictions(
                close_s=close_s,
                error_s=np.where(served, 0.1 * close_s, np.inf),
                infeasible=np.where(served, int(Infeasible.NO), int(Infeasible.NO_WORKERS)),
            )

        return predict

    def _close_s(self, target: Target, mood: int) -> float:
        roles = {pool.role for pool in target.shape.pools}
        if not (Role.COLOCATED in roles or {Role.PREFILL, Role.DECODE} <= roles):
            return float("inf")
        like = 0.3 + derive_seed("moody", self.seed, mood, str(target)) % 1000 / 1000
        return like * self.close_s / target.shape.gpus**0.5


@dataclass(slots=True)
class Run:
    """One run, before and after."""

    recipe: Recipe
    world: FakeWorld
    trainer: WatchedTrainer
    control: ElasticFleet
    source: FakeGpuSource
    faults: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    result: RunResult | None = None

    def play(self) -> RunResult:
        """Run to the end, and judge it."""

        async def work() -> RunResult:
            loop = asyncio.get_running_loop()
            for at_s, _, fault in self.faults:
                loop.call_at(at_s, fault)
            return await asyncio.wait_for(self.world.run(), LONGEST_S)

        self.result = run_virtual(work())
        self.check()
        return self.result

    def check(self) -> None:
        world = self.world
        world.check_ledger()
        assert self.trainer.wrong == []
        assert not self.trainer.awake()
        workers = world.workers
        assert workers is not None
        assert not [w for w in workers.state.snapshot.workers.values() if w.role.value != "training"]
        choices, changes = world.journal.of(ChoiceEntry), world.journal.of(ChangeEntry)
        assert [entry.number for entry in choices] == list(range(len(choices)))
        told = [entry.number for entry in changes]
        assert len(told) == len(set(told)), "the end of a plan was told twice"
        assert {e.number for e in choices if e.plan} >= set(told)

    def story(self) -> str:
        """What happened, in order."""
        lines = [(at_s, f"! {what}") for at_s, what, _ in self.faults]
        for entry in self.world.journal.entries:
            match entry:
                case ChoiceEntry():
                    plan = "; ".join(f"{kind}: {', '.join(steps)}" for kind, steps in entry.plan)
                    what = f"{entry.number} {entry.moment} {entry.reason} {entry.serving} -> {entry.chosen}"
                    lines.append((entry.at_s, f"{what} | {plan} {entry.inputs['ahead'] or ''}"))
                case ChangeEntry():
                    lines.append((entry.at_s, f"  end of {entry.number}: {entry.groups}"))
                case StateEntry():
                    lines.append((entry.at_s, f"    {entry.event} {dict(entry.inputs)} {entry.refused or ''}"))
                case _:
                    pass
        return "\n".join(f"{at_s:8.2f} {line}" for at_s, line in sorted(lines, key=lambda line: line[0]))


@cache
def _situation(recipe: str) -> Situation:
    """Made once for recipes that are alike: shaping a prior takes longer than a run."""
    return situation_of(Recipe.model_validate_json(recipe))


def make(
    recipe: Recipe,
    *,
    script: Sequence[tuple[float, GpuSourceEvent]] | None = (),
    behaviour: Callable[[Task, int], Behaviour] = lambda _task, _attempt: Behaviour(turns=3, step_s=2.0, reward=1.0),
    engine: FakeEngineConfig | None = None,
    start_s: float = 20.0,
    train_s: float = 20.0,
    lend_s: float = 1.0,
    **options: float,
) -> Run:
    """A run on the fleet of its recipe; without a `script` there is no source of GPUs."""
    source = FakeGpuSource(script or ())
    training = gpus(recipe.fleet.training_gpus, GpuOwner.TRAINING, "t")
    control = ElasticFleet(
        replace(
            ElasticOptions(
                policy=policy_of(recipe),
                situation=_situation(recipe.model_dump_json()),
                reserved=gpus(recipe.fleet.reserved_gpus, GpuOwner.RESERVED, "r"),
                training=training,
                overlap_tp=recipe.fleet.overlap_tp,
                refit_share=recipe.elastic.refit_share,
            ),
            **options,
        ),
        None if script is None else source,
    )
    trainer = WatchedTrainer(train_s, lend_s)
    config = engine or FakeEngineConfig(token_s=0.2, turn_tokens=10, load_s=1.0)
    world = FakeWorld(recipe, engine=config, script=behaviour, start_s=start_s, control=control, trainer=trainer)
    world.fleet.sleep_s, world.fleet.wake_s, world.fleet.role_s = 2.0, 3.0, 1.0
    trainer.fleet, trainer.training_gpus = world.fleet, frozenset(gpu.id for gpu in training)
    return Run(recipe, world, trainer, control, source)


def small_recipe(policy: str = "pearl", **sections: dict[str, object]) -> Recipe:
    """Two reserved, two training GPUs; 3 steps of 2 groups of 2."""
    tree: dict[str, dict[str, object]] = {
        "run": {"steps": 3},
        "rollout": {
            "groups_per_batch": 2,
            "group_size": 2,
            "max_staleness": 1,
            "max_turns": 6,
            "max_context_tokens": 8192,
            "turn_timeout_s": 400.0,
        },
        "fleet": {"reserved_gpus": 2, "training_gpus": 2, "external_gpus": 4, "tp": [1], "overlap_tp": 1},
        "elastic": {"policy": policy},
        "cluster": {"max_worker_restarts": 1000, "start_timeout_s": 100.0},
        "workload": {"prior": "webshop"},
        "platform": {"start_s": 10, "activate_s": 2, "return_s": 1, "role_change_s": 1, "stop_s": 1, "finalise_s": 1},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return fake_recipe(**tree)


POLICIES = (
    ("pearl", {}),
    ("paper", {}),
    ("rlboost_plus", {}),
    ("rlboost_plus_seeding", {"seeding_s": 30}),
    ("borrow_all", {}),
    ("roll", {}),
    ("static", {"shape": "1P1D@tp1"}),
    ("static", {"shape": "2C@tp1"}),
)


def random_run(seed: int) -> Run:
    """A schedule of everything that can happen."""
    rng = Random(seed)
    policy, elastic = rng.choice(POLICIES)
    moody = rng.random() < 0.7
    tps = [1] if policy == "static" else rng.choice(([1], [1, 2], [2]))
    recipe = small_recipe(
        policy,
        run={"steps": 3},
        rollout={"groups_per_batch": rng.randint(1, 2), "max_staleness": rng.randint(0, 1)},
        fleet={
            "reserved_gpus": rng.choice((2, 2, 4)),
            "training_gpus": rng.choice((0, 2, 2, 4)),
            "external_gpus": 4,
            "tp": tps,
            "overlap_tp": rng.choice(tps),
            "hybrid": rng.random() < 0.5,
        },
        elastic=elastic,
    )
    step_s = rng.choice((0.5, 5.0, 40.0))
    turns = [rng.randint(1, 6) for _ in range(64)]

    def behaviour(task: Task, attempt: int) -> Behaviour:
        return Behaviour(turns=turns[(task.seed + attempt) % 64], step_s=step_s, reward=1.0)

    run = make(
        recipe,
        script=random_script(rng),
        behaviour=behaviour,
        start_s=rng.choice((0.0, 10.0, 50.0)),
        train_s=rng.choice((0.0, 30.0)),
        lend_s=rng.choice((0.0, 2.0)),
    )
    if moody:
        predictor = Moody(seed, rng.choice((50.0, 300.0)))
        run.control.options = replace(
            run.control.options,
            policy=replace(run.control.options.policy, predictor=predictor, lease_aware=seed % 2 == 0),
        )
    fleet = run.world.fleet
    fleet.sleep_s, fleet.wake_s, fleet.role_s = (rng.choice((0.0, 1.0, 5.0)) for _ in range(3))
    for _ in range(rng.randint(0, 12)):
        _add_fault(run, rng)
    run.faults.sort(key=lambda fault: fault[0])
    return run


def _add_fault(run: Run, rng: Random) -> None:
    at_s, fleet = rng.uniform(0.0, TIMES_S), run.world.fleet
    if rng.random() < 0.3:
        at_s = float(round(at_s, -1))  # several things at the very same time
    slot, pick = WorkerId(rng.randint(0, 6)), rng.random()

    def up() -> WorkerId | None:
        workers = sorted(fleet.engines)
        return workers[int(pick * len(workers))] if workers else None

    def kill() -> None:
        if (worker := up()) is not None:
            fleet.kill(worker)

    def hang() -> None:
        if (worker := up()) is not None:
            fleet.engines[worker].hang(mute=slot % 2 == 0)

    def unwell() -> None:
        if (worker := up()) is not None:
            fleet.report_unwell(worker)

    kinds: list[tuple[str, Callable[[], None]]] = [
        ("kill", kill),
        ("kill", kill),
        ("hang", hang),
        ("unwell", unwell),
        (f"fail next start of {slot}", lambda: fleet.fail_next_start(slot)),
        (f"delay next start of {slot}", lambda: fleet.delay_next_start(slot, 90.0)),
        (f"late next start of {slot}", lambda: fleet.delay_next_start(slot, 200.0)),
        (f"hang next change of {slot}", lambda: fleet.hang_next(slot)),
        (f"refuse next role of {slot}", lambda: fleet.fail_next_role(slot)),
    ]
    name, fault = rng.choice(kinds)
    run.faults.append((at_s, name, fault))


def random_script(rng: Random) -> list[tuple[float, GpuSourceEvent]]:
    """Four external GPUs in two pairs that come and go, with notice or without."""
    script: list[tuple[float, GpuSourceEvent]] = []
    external = gpus(4, GpuOwner.EXTERNAL, "e")
    for number, pair in enumerate((external[:2], external[2:])):
        at_s = rng.uniform(0.0, 100.0)
        for lease in range(rng.randint(0, 3)):
            ids = tuple(gpu.id for gpu in pair)
            lasts_s = rng.choice((5.0, 40.0, 120.0, 300.0))
            end_s = at_s + lasts_s if rng.random() < 0.3 else None
            script.append((at_s, Offered(lease=LeaseId(f"lease{number}.{lease}"), gpus=pair, end_s=end_s)))
            if rng.random() < 0.5:
                notice_s = rng.choice((0.0, 5.0, 30.0, 120.0))
                gone = ids if rng.random() < 0.7 else ids[:1]
                script.append((max(at_s, at_s + lasts_s - notice_s), Notice(gpus=gone, deadline_s=at_s + lasts_s)))
            if rng.random() < 0.2:
                script.append((at_s + lasts_s / 2, Withdrawn(gpus=ids[:1])))
            script.append((at_s + lasts_s, Withdrawn(gpus=ids)))
            at_s += lasts_s + rng.choice((0.0, 1.0, 60.0))
    return script
