"""A fleet on fakes and virtual time, without a run around it.

Reserved `r0`, `r1`; external `e0`, `e1` under lease `L`; training `t0`, `t1`, on which worker 0 trains (not now) and the overlap
workers 1 and 2 sleep. Starting takes 10 s, loading weights 4 s, sleeping 2 s, waking 3 s, a role 1 s, a loan or return 1 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from pearl.core.actions import (
    Action,
    ActionGroup,
    Admit,
    Drain,
    GroupKind,
    LoadWeights,
    SetRole,
    Start,
    Step,
    Wake,
    undo_of,
)
from pearl.core.state import (
    Activity,
    ActivityChanged,
    Gpu,
    GpuOwner,
    GpusJoined,
    LeaseBegan,
    Role,
    StateEvent,
    WorkerAdded,
)
from pearl.elastic.executor import Executor, PlanOutcome
from pearl.elastic.hands import Hands
from pearl.elastic.loans import Loans
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.state import StateHolder
from pearl.pipeline.workers import Workers
from pearl.ports import WorkerSpec
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId
from pearl.records.journal import StateEntry
from pearl.records.training import LoadMode
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.fleet import FakeFleet
from pearl.testing.gpu_source import FakeGpuSource
from pearl.testing.journal import ListSink
from pearl.testing.trainer import FakeTrainer
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import fake_manifest

START_S, LOAD_S, SLEEP_S, WAKE_S, ROLE_S, LEND_S = 10.0, 4.0, 2.0, 3.0, 1.0, 1.0
TIMEOUT_S = 50.0
P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
T = TypeVar("T")


def w(slot: int) -> WorkerId:
    return WorkerId(slot)


def g(*names: str) -> tuple[GpuId, ...]:
    return tuple(GpuId(name) for name in names)


def gpus_of(letter: str, owner: GpuOwner, count: int = 2) -> tuple[Gpu, ...]:
    return tuple(Gpu(id=GpuId(f"{letter}{n}"), node=NodeId(f"{letter}-node"), owner=owner) for n in range(count))


EXTERNAL = gpus_of("e", GpuOwner.EXTERNAL)


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Stage:
    """Everything that hands reach."""

    def __init__(self, nursery: Nursery) -> None:
        config = FakeEngineConfig(token_s=0.5, turn_tokens=20, load_s=LOAD_S)
        self.nursery = nursery
        self.fleet = FakeFleet(lambda spec: FakeEngine(config, worker=spec.worker), START_S)
        self.fleet.sleep_s, self.fleet.wake_s, self.fleet.role_s = SLEEP_S, WAKE_S, ROLE_S
        self.trainer = FakeTrainer(lend_s=LEND_S)
        self.source = FakeGpuSource()
        self.journal = ListSink()
        self.lost: list[int] = []
        self.workers = Workers(
            fleet=self.fleet,
            state=StateHolder(self.journal, 0.0),
            nursery=nursery,
            start_timeout_s=100.0,
            load_timeout_s=60.0,
            load_mode=LoadMode.RECOMPUTE,
            max_restarts=2,
            max_turn_attempts=5,
            silence_s=600.0,
            on_lost=lambda worker, _: self.lost.append(worker),
        )
        self.loans = Loans(trainer=self.trainer, nursery=nursery, timeout_s=TIMEOUT_S)
        self.hands = Hands(
            workers=self.workers, loans=self.loans, source=self.source, nursery=nursery, timeout_s=TIMEOUT_S
        )
        self.executor = Executor(hands=self.hands, nursery=nursery)
        self.outcomes: list[tuple[float, PlanOutcome]] = []

    async def begin(self) -> None:
        self.workers.begin(fake_manifest(0))
        for owner, letter in ((GpuOwner.RESERVED, "r"), (GpuOwner.TRAINING, "t")):
            self.submit(GpusJoined(gpus=gpus_of(letter, owner)))
        self.submit(LeaseBegan(lease=LeaseId("L"), gpus=EXTERNAL, at_s=0.0))
        self.submit(WorkerAdded(worker=w(0), gpus=g("t0", "t1"), role=Role.TRAINING))
        self.submit(ActivityChanged(worker=w(0), activity=Activity.INACTIVE))
        for slot, gpu in ((1, "t0"), (2, "t1")):
            self.fleet.delay_next_start(w(slot), 0.0)
            await self.fleet.start([WorkerSpec(worker=w(slot), gpus=g(gpu), role=C)], 10.0)
            self.fleet.sleep_s = 0.0
            await self.fleet.sleep([w(slot)])
            self.fleet.sleep_s = SLEEP_S
            self.submit(WorkerAdded(worker=w(slot), gpus=g(gpu), role=C))
            self.submit(ActivityChanged(worker=w(slot), activity=Activity.INACTIVE))

    def submit(self, event: StateEvent) -> None:
        assert self.workers.state.submit(event) is None

    async def do(self, *actions: Action) -> None:
        for action in actions:
            await self.hands.perform(action)

    async def serve(self, slot: int, gpu: str, role: Role = C) -> None:
        """Have a dedicated worker serve."""
        await self.do(start(slot, gpu, role=role), LoadWeights(worker=w(slot)), Admit(workers=(w(slot),)))

    def carry_out(self, *groups: tuple[GroupKind, list[tuple[Action, tuple[int, ...]]]]) -> None:
        """A plan of groups of (action, indices of those before it)."""
        self.executor.carry_out_groups(self.plan(*groups), lambda outcome: self.outcomes.append((now_s(), outcome)))

    def plan(self, *groups: tuple[GroupKind, list[tuple[Action, tuple[int, ...]]]]) -> tuple[ActionGroup, ...]:
        index, made = 0, []
        for kind, actions in groups:
            steps: list[Step] = []
            for action, after in actions:
                undo = undo_of(self.workers.state.snapshot, action)
                steps.append(Step(index=index, action=action, after=after, undo=undo))
                index += 1
            made.append(ActionGroup(kind=kind, steps=tuple(steps), gap=False))
        return tuple(made)

    def ends(self) -> list[tuple[float, list[tuple[str, bool, bool]]]]:
        """When each plan ended, and (kind, done, called off) of its groups."""
        return [(at_s, [(g.kind.value, g.done, g.called_off) for g in o.groups]) for at_s, o in self.outcomes]

    def activity(self) -> dict[int, str]:
        """Of all rollout workers."""
        workers = self.workers.state.snapshot.workers.values()
        return {each.id: each.activity.value for each in workers if each.role is not Role.TRAINING}

    def refused(self) -> list[str]:
        return [entry.event for entry in self.journal.of(StateEntry) if entry.refused]


def start(slot: int, *gpus: str, role: Role = C) -> Start:
    return Start(worker=w(slot), gpus=g(*gpus), role=role)


def expand(first: int, starts: Iterable[Start | Wake]) -> tuple[GroupKind, list[tuple[Action, tuple[int, ...]]]]:
    """A group that brings workers; its first step has this index."""
    starts = list(starts)
    steps: list[tuple[Action, tuple[int, ...]]] = [(each, ()) for each in starts]
    steps += [(LoadWeights(worker=each.worker), (first + n,)) for n, each in enumerate(starts)]
    ready = tuple(range(first + len(starts), first + 2 * len(starts)))
    return GroupKind.EXPAND, [*steps, (Admit(workers=tuple(each.worker for each in starts)), ready)]


def turn(first: int, slot: int, role: Role) -> tuple[GroupKind, list[tuple[Action, tuple[int, ...]]]]:
    """A group in which one worker changes its role."""
    return GroupKind.ROLES, [
        (Drain(worker=w(slot)), ()),
        (SetRole(worker=w(slot), role=role), (first,)),
        (Admit(workers=(w(slot),)), (first + 1,)),
    ]


def on_stage(test: Callable[[Stage], Awaitable[T]]) -> T:
    async def play() -> T:
        async with Nursery() as nursery:
            stage = Stage(nursery)
            await stage.begin()
            found = await test(stage)
            assert stage.refused() == []
            return found

    return run_virtual(play())
