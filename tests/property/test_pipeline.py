"""Whole runs under schedules of faults, on virtual time.

Invariants, whatever happens (`FakeWorld.check_ledger`): each trajectory and group ends once; every slot and worker is
given back; no trajectory is trained twice, after a fault, or staler than allowed; every trained token is one that an
engine delivered; no worker has two requests of one trajectory; the run ends, or fails because a bound that the recipe
states was passed.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl.core.shape import parse_shape
from pearl.core.state import Role
from pearl.errors import RunFailed
from pearl.records.ids import WorkerId
from pearl.records.journal import StepEntry
from pearl.records.trajectory import Task
from pearl.records.turn import TurnRequest
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.environment import AT_OPEN, AT_RESET, Behaviour, Fault
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_recipe

BOUNDS = (
    "cluster.max_worker_restarts",
    "rollout.max_failed_groups",
    "none was started",
)
"""A run may fail for these reasons, and for no other."""

LONGEST_S = 1e6
"""No schedule below can last this long when every wait is bounded."""


@dataclass(frozen=True)
class WorkerFault:
    at_s: float
    worker: int
    kind: str


@dataclass(frozen=True)
class Schedule:
    seed: int
    steps: int
    shape: str
    append_prefill_tokens: int
    readback: bool
    kv_ttl_s: float
    role_s: float
    groups_per_batch: int
    group_size: int
    spare_slots: int
    max_staleness: int
    max_replacements: int
    max_failed_groups: int
    max_worker_restarts: int
    straggler_timeout_s: float
    on_load: str
    load_s: float
    start_s: float
    env_fault_rate: float
    slow_rate: float
    faults: tuple[WorkerFault, ...]


ROLES = {"to_prefill": Role.PREFILL, "to_decode": Role.DECODE, "to_colocated": Role.COLOCATED}
KINDS = (
    *("kill", "hang", "mute", "fail_requests", "unwell", "fail_start", "slow_start", "damage"),
    *ROLES,
    "fail_role",
    "forget_kv",
)
SHAPES = ("1C", "2C", "3C", "1P1D", "1P2D", "2P1D", "1P1D1C", "2P2D+1C")

worker_faults = st.builds(
    WorkerFault,
    at_s=st.one_of(st.just(0.0), st.floats(0, 5), st.floats(0, 60)),
    worker=st.integers(0, 4),
    kind=st.sampled_from(KINDS),
)

schedules = st.builds(
    Schedule,
    seed=st.integers(0, 2**20),
    steps=st.integers(1, 5),
    shape=st.sampled_from(SHAPES),
    append_prefill_tokens=st.sampled_from([0, 4, 64]),
    readback=st.booleans(),
    kv_ttl_s=st.sampled_from([0.05, 3.0, 60.0]),
    role_s=st.sampled_from([0.0, 1.0, 40.0]),
    groups_per_batch=st.integers(1, 3),
    group_size=st.integers(1, 3),
    spare_slots=st.integers(0, 12),
    max_staleness=st.integers(0, 3),
    max_replacements=st.integers(0, 4),
    max_failed_groups=st.integers(0, 8),
    max_worker_restarts=st.integers(0, 8),
    straggler_timeout_s=st.sampled_from([20.0, 100.0, 1000.0]),
    on_load=st.sampled_from(["keep_kv", "recompute"]),
    load_s=st.sampled_from([0.0, 0.5, 3.0]),
    start_s=st.sampled_from([0.0, 4.0]),
    env_fault_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    slow_rate=st.sampled_from([0.0, 0.05]),
    faults=st.lists(worker_faults, max_size=10).map(tuple),
)


def _script(schedule: Schedule) -> Callable[[Task, int], Behaviour]:
    def behaviour(task: Task, attempt: int) -> Behaviour:
        rng = random.Random(f"{schedule.seed}|{task.id}|{attempt}")
        fault = rng.choice(list(Fault)) if rng.random() < schedule.env_fault_rate else None
        slow = 50 if rng.random() < schedule.slow_rate else 1
        return Behaviour(
            turns=rng.randint(1, 4),
            open_s=rng.choice([0.0, 0.3]),
            reset_s=rng.choice([0.0, 0.5]),
            step_s=rng.choice([0.0, 1.0]) * slow,
            reward=rng.random(),
            fault=fault,
            fault_turn=rng.choice([AT_OPEN, AT_RESET, 0, 1]),
        )

    return behaviour


def make_world(schedule: Schedule) -> FakeWorld:
    def output_tokens(request: TurnRequest) -> int:
        return random.Random(f"{schedule.seed}|{request.trajectory}|{request.turn}").randint(1, 20)

    recipe = fake_recipe(
        run={"steps": schedule.steps, "seed": schedule.seed},
        environment={"kind": "fake", "slots": schedule.group_size + schedule.spare_slots},
        engine={
            "shape": schedule.shape,
            "on_load": schedule.on_load,
            "append_prefill_tokens": schedule.append_prefill_tokens,
            "readback": schedule.readback,
        },
        sampling={"max_new_tokens": 12},
        rollout={
            "groups_per_batch": schedule.groups_per_batch,
            "group_size": schedule.group_size,
            "max_staleness": schedule.max_staleness,
            "max_replacements": schedule.max_replacements,
            "max_failed_groups": schedule.max_failed_groups,
            "max_turns": 3,
            "env_reset_timeout_s": 10,
            "env_step_timeout_s": 100,
            "turn_timeout_s": 60,
            "trajectory_timeout_s": 300,
            "straggler_timeout_s": schedule.straggler_timeout_s,
        },
        cluster={"max_worker_restarts": schedule.max_worker_restarts, "start_timeout_s": 30},
        weights={"timeout_s": 40},
        checkpoint={"every_steps": 2},
    )
    world = FakeWorld(
        recipe,
        engine=FakeEngineConfig(
            token_s=0.1,
            load_s=schedule.load_s,
            progress_interval_s=0.3,
            kv_ttl_s=schedule.kv_ttl_s,
            on_load=schedule.on_load,
        ),
        output_tokens=output_tokens,
        script=_script(schedule),
        train_s=lambda batch: random.Random(f"{schedule.seed}|{batch.version}").choice([0.0, 2.0, 10.0]),
        start_s=schedule.start_s,
    )
    world.fleet.role_s = schedule.role_s
    return world


async def _inject(world: FakeWorld, schedule: Schedule) -> None:
    loop = asyncio.get_running_loop()
    workers = parse_shape(schedule.shape).workers
    changes: list[asyncio.Task[str | None]] = []
    for fault in sorted(schedule.faults, key=lambda one: one.at_s):
        await asyncio.sleep(fault.at_s - loop.time())
        worker = WorkerId(fault.worker % workers)
        engine = world.fleet.engines.get(worker)
        if fault.kind in ROLES and world.workers is not None:
            changes.append(loop.create_task(world.workers.set_role(worker, ROLES[fault.kind])))
        elif engine is not None:
            _disturb(engine, fault.kind)
        _disturb_fleet(world, worker, fault.kind)
    await asyncio.gather(*changes)


def _disturb(engine: FakeEngine, kind: str) -> None:
    match kind:
        case "kill":
            engine.kill()
        case "hang" | "mute":
            engine.hang(mute=kind == "mute")
        case "fail_requests":
            engine.fail_next(5)
        case "forget_kv":
            engine.kv.forget_all()


def _disturb_fleet(world: FakeWorld, worker: WorkerId, kind: str) -> None:
    match kind:
        case "fail_start":
            world.fleet.fail_next_start(worker)
        case "fail_role":
            world.fleet.fail_next_role(worker)
        case "slow_start":
            world.fleet.delay_next_start(worker, 31.0)
        case "unwell":
            world.fleet.report_unwell(worker)
        case "damage":
            if world.weights.kept:
                world.weights.damage(world.weights.kept[-1], "head")


def play(schedule: Schedule) -> tuple[FakeWorld, RunFailed | None]:
    """Run a schedule to its end."""
    world = make_world(schedule)

    async def work() -> RunFailed | None:
        injecting = asyncio.get_running_loop().create_task(_inject(world, schedule))
        try:
            async with asyncio.timeout(LONGEST_S):
                await world.run()
        except RunFailed as failed:
            return failed
        finally:
            injecting.cancel()
        return None

    return world, run_virtual(work())


def _check_requests(world: FakeWorld) -> None:
    for engine in world.fleet.past_engines:
        running: dict[str, str] = {}
        for one in engine.delivered:
            request = one.chunk.request
            assert running.setdefault(one.trajectory, request) == request, "two requests of a trajectory on one worker"
            if one.chunk.end is not None:
                del running[one.trajectory]


def check(schedule: Schedule) -> None:
    world, failed = play(schedule)
    world.check_ledger()
    _check_requests(world)
    steps = [entry.version for entry in world.journal.of(StepEntry)]
    assert steps == list(range(1, len(steps) + 1))
    if failed is None:
        assert len(steps) == schedule.steps
        assert world.checkpointer.saved[-1][0] == schedule.steps
    else:
        assert any(bound in str(failed) for bound in BOUNDS), failed


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules)
def test_whatever_happens_the_ledger_holds_and_the_run_ends(schedule: Schedule) -> None:
    check(schedule)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules)
def test_a_schedule_played_twice_is_the_same_run(schedule: Schedule) -> None:
    (first, _), (second, _) = play(schedule), play(schedule)
    assert first.journal.entries == second.journal.entries


@pytest.mark.chaos
@pytest.mark.timeout(0)
@pytest.mark.skipif(os.environ.get("PEARL_CHAOS") != "1", reason="thousands of schedules: set PEARL_CHAOS=1")
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules)
def test_whatever_happens_in_thousands_of_schedules(schedule: Schedule) -> None:
    check(schedule)
