"""Decisions under any order of events.

Invariants, after every step:

- GPUs are conserved: those of the trainer are all there, and no two workers that serve share one;
- no action names a worker that is draining or initialising;
- the same question has the same answer, and leaves the state as it was;
- once a plan is applied the same question asks for nothing more;
- while training has its GPUs, and once the return is due, no overlap worker serves;
- there is a way to whatever is chosen;
- noise below the thresholds moves nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import pytest

from pearl.core.actions import Action, Admit, Drain, GiveBack, LoadWeights, SetRole, Sleep, Start, Stop, Wake, events_of
from pearl.core.decide import decide
from pearl.core.decision import Decision, Moment, Reason, Situation
from pearl.core.gate import Thresholds
from pearl.core.lines import Space
from pearl.core.makespan import Target
from pearl.core.plan import Plan
from pearl.core.policy import POLICIES, Borrow, Policy, PolicyOptions, policy_named
from pearl.core.progress import Progress
from pearl.core.shape import parse_shape
from pearl.core.state import (
    Activity,
    FleetState,
    Gpu,
    GpuOwner,
    GpusLeft,
    LeaseBegan,
    LeaseEnded,
    NoticeGiven,
    Role,
    StateEvent,
    WorkerRemoved,
    fold,
)
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId
from tests.fleets import Formula, situation

SEEDS, STEPS = 3, 15
OPTIONS = PolicyOptions(fixed_tp=2, hybrid=True, gpus=6, shape=parse_shape("1P2D@tp2"), seeding_s=60.0)


def seconds(left: float, salt: int) -> Formula:
    """Times that fall with more GPUs, differ by mode and ratio as if by chance, and with what is left of the batch."""

    def of(target: Target) -> float:
        shape, pools = target.shape, target.shape.pools
        has = {pool.role for pool in pools}
        if Role.COLOCATED not in has and not {Role.PREFILL, Role.DECODE} <= has:
            return math.inf
        if len(has) == 2 and Role.COLOCATED in has:
            return math.inf
        chance = zlib.crc32(f"{salt} {sorted(has, key=str)} {[pool.tp for pool in pools]}".encode()) / 2**32
        prefill = sum(pool.workers * pool.tp for pool in pools if pool.role is Role.PREFILL) / shape.gpus
        ratio = 0.6 * abs(prefill - 0.35) if Role.PREFILL in has else 0.1
        return left * (1 + 0.5 * chance + ratio + (0.02 if target.append_tokens else 0.0)) / shape.gpus

    return Formula(of, error_share=0.1)


def policies(name: str, left: float, salt: int) -> Policy:
    return replace(policy_named(name, OPTIONS), predictor=seconds(left, salt))


@dataclass
class World:
    """A fleet under one policy, and what happens to it."""

    name: str
    seed: int
    rng: np.random.Generator = field(init=False)
    state: FleetState = field(init=False)
    about: Situation = field(init=False)
    now_s: float = 0.0
    left: float = 2000.0
    leases: int = 0
    half_done: list[Iterator[Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.about = replace(situation(1, 2, 4), since_training_s=0.0)
        gpus = [
            Gpu(id=GpuId(f"{prefix}{i}"), node=NodeId(f"{prefix}{i // 4}"), owner=owner)
            for prefix, owner, count in (
                ("r", GpuOwner.RESERVED, int(self.rng.integers(0, 7))),
                ("t", GpuOwner.TRAINING, 4),
            )
            for i in range(count)
        ]
        state = FleetState(gpus=MappingProxyType({gpu.id: gpu for gpu in gpus}))
        for slot, first in enumerate((0, 2)):
            start = Start(worker=WorkerId(slot), gpus=(GpuId(f"t{first}"), GpuId(f"t{first + 1}")), role=Role.COLOCATED)
            for action in (start, Sleep(worker=WorkerId(slot))):
                for event in events_of(action):
                    state = folded(state, event)
        self.state = state

    # -- what happens ------------------------------------------------------------------------------------------------

    def step(self) -> Moment:
        """One thing, at random; time passes."""
        waits = float(self.rng.choice([0.0, 1.0, 15.0, 90.0]))
        self.now_s += waits
        if self.about.since_training_s is not None:
            self.about = replace(self.about, since_training_s=self.about.since_training_s + waits)
        happens = (
            self.lease_begins,
            self.notice,
            self.gpus_leave,
            self.worker_lost,
            self.training,
            self.progress,
            self.go_on,
            self.go_on,
        )
        return happens[int(self.rng.integers(len(happens)))]()

    def lease_begins(self) -> Moment:
        self.leases += 1
        count = int(self.rng.integers(1, 6))
        gpus = tuple(
            Gpu(id=GpuId(f"x{self.leases}-{i}"), node=NodeId(f"x{self.leases}"), owner=GpuOwner.EXTERNAL)
            for i in range(count)
        )
        end_s = None if self.rng.random() < 0.5 else self.now_s + float(self.rng.uniform(1, 900))
        self.fold(LeaseBegan(lease=LeaseId(f"l{self.leases}"), gpus=gpus, at_s=self.now_s, end_s=end_s))
        return Moment.GPUS_CHANGED

    def notice(self) -> Moment:
        external = [gpu.id for gpu in self.state.gpus.values() if gpu.owner is GpuOwner.EXTERNAL]
        if external:
            some = tuple(sorted(self.rng.choice(external, size=min(2, len(external)), replace=False).tolist()))
            due_s = self.now_s + float(self.rng.uniform(0, 120))
            self.fold(NoticeGiven(gpus=some, deadline_s=due_s, at_s=self.now_s))
        return Moment.GPUS_CHANGED

    def gpus_leave(self) -> Moment:
        """What is due goes, whoever sits there; else now and then a whole lease, unannounced."""
        gone = tuple(gpu for gpu, end_s in sorted(self.state.ends_s().items()) if end_s <= self.now_s)
        if gone:
            self.fold(GpusLeft(gpus=gone))
        elif self.state.leases and self.rng.random() < 0.5:
            self.fold(LeaseEnded(lease=sorted(self.state.leases)[0]))
        return Moment.GPUS_CHANGED

    def worker_lost(self) -> Moment:
        dedicated = [slot for slot in sorted(self.state.workers) if not self.state.is_overlap(slot)]
        if dedicated:
            self.fold(WorkerRemoved(worker=dedicated[int(self.rng.integers(len(dedicated)))]))
        return Moment.WORKERS_CHANGED

    def training(self) -> Moment:
        if self.about.training:
            self.left = 2000.0
            self.about = replace(self.about, training=False, since_training_s=0.0)
            return Moment.TRAINING_FINISHED
        self.about = replace(self.about, training=True, since_training_s=None)
        return Moment.TRAINING_BEGAN

    def progress(self) -> Moment:
        self.left *= float(self.rng.choice([0.9, 0.5, 0.01]))
        closed = self.left < 1.0
        progress = Progress(
            batch_trajectories=64, unfinished=0 if closed else 32, live_groups=4, needed_groups=0 if closed else 2
        )
        self.about = replace(self.about, progress=progress)
        return Moment.REFITTED

    def go_on(self) -> Moment:
        """What was cut off goes on, as far as it still can; then workers left in transition serve, or are gone."""
        for rest in self.half_done:
            for action in rest:
                if not self.act(action):
                    break
        self.half_done.clear()
        for slot in sorted(self.state.workers):
            worker = self.state.workers[slot]
            if worker.activity is Activity.TRANSITIONING:
                if self.state.is_overlap(slot):
                    self.act(Sleep(worker=slot))
                elif self.rng.random() < 0.5 or not self.act(Admit(workers=(slot,))):
                    self.act(Stop(worker=slot))
        return Moment.WORKERS_CHANGED

    def fold(self, event: StateEvent) -> None:
        self.state = folded(self.state, event)

    def act(self, action: Action) -> bool:
        """Whether the state took it: it may have changed since it was planned."""
        state = self.state
        for event in events_of(action):
            after = fold(state, event)
            if not isinstance(after, FleetState):
                return False
            state = after
        self.state = state
        return True

    # -- what is decided ---------------------------------------------------------------------------------------------

    def decide(self, moment: Moment) -> Decision:
        policy = policies(self.name, self.left, self.seed)
        before = self.state.hash
        made = decide(policy, self.state, self.about, moment, self.now_s)
        assert self.state.hash == before
        assert decide(policy, self.state, self.about, moment, self.now_s) == made
        self.check_plan(made)
        return made

    def check_plan(self, made: Decision) -> None:
        assert made.reason is not Reason.NO_PLAN, (made.refusal, made.chosen)
        if made.plan is None:
            return
        for group in made.plan.groups:
            for step in group.steps:
                for slot in named(step.action):
                    worker = self.state.workers.get(slot)
                    assert worker is None or worker.activity is not Activity.TRANSITIONING or is_new(made.plan, slot)

    def apply(self, made: Decision, moment: Moment) -> None:
        """Wholly, or cut off in the middle."""
        if made.chosen is not None:
            self.about = replace(self.about, append_tokens=made.chosen.target.append_tokens)
        if made.plan is None:
            return
        actions = [step.action for group in made.plan.groups for step in group.steps]
        if self.rng.random() < 0.3:
            cut = int(self.rng.integers(len(actions)))
            for action in actions[:cut]:
                assert self.act(action)
            if self.rng.random() < 0.5:
                self.half_done.append(iter(actions[cut:]))
            return
        for action in actions:
            assert self.act(action)
        again = self.decide(moment)
        assert again.plan is None, (made.reason, made.chosen, again.reason, again.chosen, again.gates)
        if made.chosen is not None and again.reason is not Reason.IN_TRANSITION:
            assert again.chosen is not None
            assert again.chosen.target == made.chosen.target, (made, again)

    def check(self, made: Decision, moment: Moment) -> None:
        active = self.state.active()
        held = [gpu for worker in active for gpu in worker.gpus]
        assert len(held) == len(set(held))
        assert set(held) <= set(self.state.gpus)
        training = {gpu.id for gpu in self.state.gpus.values() if gpu.owner is GpuOwner.TRAINING}
        assert training == {"t0", "t1", "t2", "t3"}
        lent = [worker for worker in active if self.state.is_overlap(worker.id)]
        returned = any(each.gate == "return" and each.verdict.passed for each in made.gates)
        if self.about.training or moment is Moment.TRAINING_BEGAN or self.about.progress.needed_groups == 0 or returned:
            assert not lent
        if made.chosen is not None and made.chosen.borrowed and made.reason is not Reason.IN_TRANSITION:
            assert made.look_again_s is not None
            assert made.look_again_s >= self.now_s


def folded(state: FleetState, event: StateEvent) -> FleetState:
    after = fold(state, event)
    assert isinstance(after, FleetState), after
    return after


def is_new(plan: Plan, slot: WorkerId) -> bool:
    return any(each.worker == slot for each in plan.added)


def named(action: Action) -> tuple[WorkerId, ...]:
    """Workers that an action names."""
    match action:
        case Admit(workers=workers):
            return workers
        case GiveBack():
            return ()
        case Drain(worker=worker) | Stop(worker=worker) | Sleep(worker=worker) | SetRole(worker=worker):
            return (worker,)
        case Start(worker=worker) | Wake(worker=worker) | LoadWeights(worker=worker):
            return (worker,)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "oracle"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_of_events(name: str, seed: int) -> None:
    world = World(name, seed)
    moment = Moment.STARTED
    for _ in range(STEPS):
        made = world.decide(moment)
        uncut = world.state
        world.apply(made, moment)
        if made.plan is None or world.state.hash != uncut.hash:
            whole = not any(w.activity is Activity.TRANSITIONING for w in world.state.workers.values())
            if whole and not world.half_done:
                world.check(made, moment)
        moment = world.step()


@pytest.mark.parametrize("seed", range(12))
def test_noise_below_the_thresholds_moves_nothing(seed: int) -> None:
    # Of shapes that are all equally good, each prediction up to 4 % too low: less than the smallest threshold but that of size.
    rng = np.random.default_rng(seed)
    policy = Policy(
        name="p",
        predictor=seconds(1.0, 0),
        space=Space(hybrid=True, append_tokens=(0, 256)),
        borrow=Borrow.ANY,
        thresholds=Thresholds(),
    )
    world = World("pearl", seed)
    state, moved, append_tokens = world.state, 0, 0
    about = replace(situation(1, 2), append_tokens=0)
    for _ in range(12):
        noise = int(rng.integers(2**31))

        def of(target: Target, noise: int = noise) -> float:
            if len({pool.role for pool in target.shape.pools} & {Role.PREFILL, Role.DECODE}) == 1:
                return math.inf
            return 1000.0 / target.shape.gpus * (1 - 0.04 * zlib.crc32(f"{noise} {target}".encode()) / 2**32)

        made = decide(
            replace(policy, predictor=Formula(of)),
            state,
            replace(about, append_tokens=append_tokens),
            Moment.REFITTED,
            10.0,
        )
        if made.chosen is not None:
            append_tokens = made.chosen.target.append_tokens
        moved += made.plan is not None or made.reason is Reason.MOVED
        for group in () if made.plan is None else made.plan.groups:
            for step in group.steps:
                for event in events_of(step.action):
                    state = folded(state, event)
    assert moved <= 1
