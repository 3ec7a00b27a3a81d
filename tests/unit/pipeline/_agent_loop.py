"""An agent loop's surroundings, and what holds of every end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pearl.pipeline.agent_loop import AgentLoop, AgentPorts, Attempt
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.router import Router
from pearl.records.ids import GroupId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.journal import TrajectoryEntry, TurnEntry
from pearl.records.trajectory import Task, Trajectory
from pearl.records.turn import TurnRequest
from pearl.testing.codec import FakeCodec
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.environment import Behaviour, FakeEnvironmentPool
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import fake_recipe, fake_task

T = TypeVar("T")

BEGAN_S = 1000.0
"""Loop time at which the run began, so that times since then are told from times of the loop."""


@dataclass
class Stage:
    """One agent loop's surroundings: an engine of 10 tokens a second and turns of 8 tokens."""

    nursery: Nursery
    behaviour: Behaviour
    rollout: dict[str, object]
    output_tokens: Callable[[TurnRequest], int] | None = None
    slots: int = 1
    journal: ListSink = field(default_factory=ListSink)
    engine: FakeEngine = field(init=False)
    pool: FakeEnvironmentPool = field(init=False)
    ports: AgentPorts = field(init=False)

    def __post_init__(self) -> None:
        router = Router(self.nursery, 3, lambda _worker, _detail: None)
        self.engine = FakeEngine(FakeEngineConfig(token_s=0.1, turn_tokens=8), output_tokens=self.output_tokens)
        router.admit(WorkerId(0), self.engine, WeightVersion(0))
        self.pool = FakeEnvironmentPool(self.slots, lambda _task, _attempt: self.behaviour)
        limits = {"turn_timeout_s": 40, "env_reset_timeout_s": 20, "env_step_timeout_s": 30, **self.rollout}
        self.ports = AgentPorts(
            router=router,
            environments=self.pool,
            codec=FakeCodec(),
            journal=self.journal,
            limits=fake_recipe(rollout=limits).rollout,
            max_new_tokens=10,
            temperature=1.0,
            start_s=-BEGAN_S,
        )

    def loop(self, name: str = "g0.0", task: Task | None = None) -> AgentLoop:
        attempt = Attempt(
            id=TrajectoryId(name),
            group=GroupId("g0"),
            task=task or fake_task(),
            sampling_seed=7,
            min_version=WeightVersion(0),
        )
        return AgentLoop(ports=self.ports, attempt=attempt)

    def check(self, trajectory: Trajectory) -> None:
        """What holds of every end: journalled once and alike, slot and prefix given back, nothing left running."""
        (entry,) = self.journal.of(TrajectoryEntry)
        assert entry.status == trajectory.status.value
        assert (entry.trajectory, entry.group) == (trajectory.id, trajectory.group)
        assert entry.turns == len(trajectory.turns) == len(self.journal.of(TurnEntry))
        assert entry.generated == trajectory.generated_tokens
        assert (entry.reward, entry.success) == (trajectory.reward, trajectory.success)
        assert (entry.started_s, entry.at_s) == (trajectory.started_s, trajectory.ended_s)
        assert self.pool.open_now == 0
        assert not self.engine.busy
        if not self.engine.gone:
            assert self.engine.kv.cached_tokens(trajectory.id) == 0


def on_stage(
    test: Callable[[Stage], Awaitable[T]],
    behaviour: Behaviour | None = None,
    *,
    output_tokens: Callable[[TurnRequest], int] | None = None,
    slots: int = 1,
    **rollout: object,
) -> T:
    async def work() -> T:
        async with Nursery() as nursery:
            return await test(Stage(nursery, behaviour or Behaviour(), rollout, output_tokens, slots))

    return run_virtual(work())


async def play(stage: Stage) -> Trajectory:
    trajectory = await stage.loop().run()
    await asyncio.sleep(1)  # for what was told to the engine to arrive
    stage.check(trajectory)
    return trajectory
