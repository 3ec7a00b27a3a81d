from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from pearl.core.shape import parse_shape
from pearl.core.state import Activity, Role
from pearl.errors import RunFailed
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.state import StateHolder
from pearl.pipeline.workers import Workers, specs_of
from pearl.ports import WorkerSpec
from pearl.records.ids import NodeId, WorkerId
from pearl.records.journal import StateEntry
from pearl.records.training import LoadMode
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.fleet import FakeFleet
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import fake_manifest
from pearl.testing.world import fake_gpus

T = TypeVar("T")

LOAD_S = 4.0
START_S = 10.0


@dataclass
class Stage:
    """Two workers that take 10 s to start and 4 s to load weights."""

    nursery: Nursery
    max_restarts: int = 8
    token_s: float = 0.0
    journal: ListSink = field(default_factory=ListSink)
    fleet: FakeFleet = field(init=False)
    workers: Workers = field(init=False)

    def __post_init__(self) -> None:
        def engine(spec: WorkerSpec) -> FakeEngine:
            return FakeEngine(FakeEngineConfig(load_s=LOAD_S, token_s=self.token_s), worker=spec.worker)

        self.fleet = FakeFleet(engine, START_S)
        self.workers = Workers(
            fleet=self.fleet,
            state=StateHolder(self.journal, 0.0),
            nursery=self.nursery,
            start_timeout_s=60,
            load_timeout_s=50,
            load_mode=LoadMode.RECOMPUTE,
            max_restarts=self.max_restarts,
            max_turn_attempts=8,
            silence_s=300,
        )

    async def start(self) -> None:
        await self.workers.start(fake_gpus(2), specs_of(parse_shape("2C").roles(), fake_gpus(2)), fake_manifest(0))

    def activity(self) -> dict[int, Activity]:
        return {worker.id: worker.activity for worker in self.workers.state.snapshot.workers.values()}

    def events(self, worker: int) -> list[str]:
        """What the fleet state was told of a worker."""
        entries = [entry for entry in self.journal.of(StateEntry) if entry.inputs.get("worker") == worker]
        assert all(entry.refused is None for entry in entries)
        return [str(entry.inputs.get("activity", entry.event)) for entry in entries]


def on_stage(test: Callable[[Stage], Awaitable[T]], **options: Any) -> T:
    async def work() -> T:
        async with Nursery() as nursery:
            return await test(Stage(nursery, **options))

    return run_virtual(work())


def now_s() -> float:
    return asyncio.get_running_loop().time()


ADDED, REMOVED, ACTIVE = "WorkerAdded", "WorkerRemoved", "active"


def test_a_fleet_starts_together_and_serves_with_its_weights_only() -> None:
    async def test(stage: Stage) -> Stage:
        starting = stage.nursery.spawn(stage.start(), name="start")
        await asyncio.sleep(START_S + 1)
        assert stage.workers.router.workers == ()
        assert stage.activity() == {0: Activity.TRANSITIONING, 1: Activity.TRANSITIONING}
        await starting
        assert now_s() == START_S + LOAD_S  # side by side
        assert stage.workers.router.workers == (0, 1)
        assert stage.activity() == {0: Activity.ACTIVE, 1: Activity.ACTIVE}
        return stage

    stage = on_stage(test)
    assert stage.workers.router.served_version == 0
    assert [engine.loads for engine in stage.fleet.past_engines] == [[(0, LoadMode.RECOMPUTE)]] * 2
    assert stage.events(0) == stage.events(1) == [ADDED, ACTIVE]


def test_a_process_that_does_not_start_fails_the_start_and_nothing_is_left() -> None:
    async def test(stage: Stage) -> Stage:
        stage.fleet.fail_next_start(WorkerId(1), "no such GPU")
        with pytest.raises(RunFailed, match="rollout workers: worker 1: worker 1: no such GPU; none was started"):
            await stage.start()
        await stage.workers.stop()
        return stage

    stage = on_stage(test)
    assert stage.fleet.engines == {}
    assert stage.activity() == {}


def test_a_worker_that_dies_is_restarted_in_its_slot() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.kill(WorkerId(1))
        await asyncio.sleep(1)
        assert stage.workers.router.workers == (0,)
        assert stage.activity() == {0: Activity.ACTIVE, 1: Activity.TRANSITIONING}
        await asyncio.sleep(START_S + LOAD_S)
        return stage

    stage = on_stage(test)
    assert stage.workers.router.workers == (0, 1)
    assert stage.workers.restarts == 1
    assert stage.events(1) == [ADDED, ACTIVE, REMOVED, ADDED, ACTIVE]
    assert len(stage.fleet.past_engines) == 3


@pytest.mark.parametrize("mute", [False, True])
def test_a_worker_that_is_unwell_is_ended_and_restarted(mute: bool) -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.engines[WorkerId(0)].hang(mute=mute)
        stage.fleet.report_unwell(WorkerId(0))
        stage.fleet.report_unwell(WorkerId(0))  # said twice, done once
        await asyncio.sleep(1 + START_S + LOAD_S)
        return stage

    stage = on_stage(test)
    assert stage.workers.router.workers == (0, 1)
    assert stage.workers.restarts == 1
    assert stage.fleet.past_engines[0].gone


def test_news_of_workers_that_were_never_there_is_ignored() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.report_unwell(WorkerId(7))
        await asyncio.sleep(1)
        return stage

    stage = on_stage(test)
    assert stage.workers.restarts == 0
    assert stage.events(7) == []


@pytest.mark.parametrize("at_s", [START_S, START_S + 1, START_S + LOAD_S - 0.1])
def test_a_worker_that_dies_before_it_serves_is_restarted_like_any_other(at_s: float) -> None:
    async def test(stage: Stage) -> Stage:
        starting = stage.nursery.spawn(stage.start(), name="start")
        await asyncio.sleep(at_s)
        await asyncio.sleep(0)
        stage.fleet.kill(WorkerId(1))
        await starting
        await asyncio.sleep(2 * (START_S + LOAD_S))
        return stage

    stage = on_stage(test)
    assert stage.workers.router.workers == (0, 1)
    assert stage.workers.restarts == 1
    assert stage.events(1) == [ADDED, REMOVED, ADDED, ACTIVE]


def test_a_worker_taken_for_lost_while_it_loads_does_not_serve_beside_its_successor() -> None:
    async def test(stage: Stage) -> Stage:
        starting = stage.nursery.spawn(stage.start(), name="start")
        await asyncio.sleep(START_S + 1)
        # It takes a moment to end: meanwhile the load does.
        stop = stage.fleet.stop

        async def slow_stop(workers: Sequence[WorkerId], grace_s: float) -> None:
            await asyncio.sleep(2 * LOAD_S)
            await stop(workers, grace_s)

        stage.fleet.stop = slow_stop  # type: ignore[method-assign]
        stage.workers.lost(WorkerId(0), "a suspicion")
        await starting
        await asyncio.sleep(3 * (START_S + LOAD_S))
        return stage

    stage = on_stage(test)
    assert stage.workers.router.workers == (0, 1)
    assert stage.events(0) == [ADDED, REMOVED, ADDED, ACTIVE]
    assert stage.workers.router.engine(WorkerId(0)) is stage.fleet.engines[WorkerId(0)]


def test_restarts_are_bounded_over_the_run_and_the_error_says_what_happened_last() -> None:
    async def test(stage: Stage) -> None:
        await stage.start()
        for detail in ("first", "second", "third"):
            stage.fleet.kill(WorkerId(0), detail)
            await asyncio.sleep(1 + START_S + LOAD_S)

    with pytest.raises(
        RunFailed, match=r"rollout worker 0: lost \(.*third\), and all cluster\.max_worker_restarts = 2 are used up"
    ):
        on_stage(test, max_restarts=2)


def test_a_restart_that_fails_is_tried_again_and_counts() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.fail_next_start(WorkerId(0))
        stage.fleet.fail_next_start(WorkerId(0))
        stage.fleet.kill(WorkerId(0))
        await asyncio.sleep(1 + 3 * START_S + LOAD_S)
        return stage

    stage = on_stage(test)
    assert stage.workers.router.workers == (0, 1)
    assert stage.workers.restarts == 3
    assert stage.events(0) == [ADDED, ACTIVE, REMOVED, ADDED, REMOVED, ADDED, REMOVED, ADDED, ACTIVE]


def test_a_restarted_worker_that_cannot_load_the_weights_says_so_in_the_end() -> None:
    async def test(stage: Stage) -> None:
        await stage.start()
        stage.workers._newest = fake_manifest(1, hash_="another model")
        stage.fleet.kill(WorkerId(0))
        await asyncio.sleep(100)

    with pytest.raises(RunFailed, match="got model another model"):
        on_stage(test, max_restarts=1)


def test_a_worker_that_dies_while_it_restarts_is_started_again() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.kill(WorkerId(0))
        await asyncio.sleep(START_S + 1)  # up again, loading
        stage.fleet.kill(WorkerId(0))
        await asyncio.sleep(1 + START_S + LOAD_S)
        return stage

    stage = on_stage(test)
    assert stage.workers.router.workers == (0, 1)
    assert stage.workers.restarts == 2


@pytest.mark.parametrize("after_s", [0.5, START_S - 0.5, START_S + 0.5, START_S + LOAD_S - 0.5])
def test_a_worker_that_starts_during_a_publication_ends_up_with_the_newest_weights(after_s: float) -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.kill(WorkerId(0))
        await asyncio.sleep(after_s)
        await stage.workers.publish(fake_manifest(1))
        assert stage.workers.router.served_version == 1  # nobody serves older weights
        await asyncio.sleep(2 * (START_S + LOAD_S))
        return stage

    stage = on_stage(test)
    assert stage.workers.router.workers == (0, 1)
    assert stage.workers.router.served_version == 1
    assert [engine.version for engine in stage.fleet.engines.values()] == [1, 1]


def test_a_worker_that_dies_while_it_loads_a_publication_holds_the_others_up_no_longer() -> None:
    async def test(stage: Stage) -> tuple[Stage, float]:
        await stage.start()
        began_s = now_s()
        publishing = stage.nursery.spawn(stage.workers.publish(fake_manifest(1)), name="publish")
        await asyncio.sleep(1)
        stage.fleet.kill(WorkerId(1))
        await publishing
        took_s = now_s() - began_s
        await asyncio.sleep(2 * (START_S + LOAD_S))
        return stage, took_s

    stage, took_s = on_stage(test)
    assert took_s == LOAD_S
    assert stage.workers.router.workers == (0, 1)
    assert [engine.version for engine in stage.fleet.engines.values()] == [1, 1]


@pytest.mark.parametrize("after_s", [0.0, START_S / 2, START_S + 1])
def test_stopping_ends_workers_that_are_being_restarted_too(after_s: float) -> None:
    async def test(stage: Stage) -> tuple[Stage, float]:
        await stage.start()
        stage.fleet.kill(WorkerId(0))
        await asyncio.sleep(after_s)
        await stage.workers.stop()
        stopped_s = now_s()
        await asyncio.sleep(5 * START_S)
        return stage, stopped_s

    stage, stopped_s = on_stage(test)
    assert stopped_s == START_S + LOAD_S + after_s  # it does not wait for the restart
    assert stage.fleet.engines == {}
    assert stage.activity() == {}
    assert stage.workers.router.workers == ()


def test_a_fleet_that_is_stopped_has_lost_nobody() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        await stage.workers.stop()
        await asyncio.sleep(1)
        return stage

    stage = on_stage(test)
    assert stage.workers.router.counts.worker_losses == 0
    assert stage.workers.restarts == 0
    assert stage.events(0) == [ADDED, ACTIVE, REMOVED]


def test_a_fleet_that_cannot_be_is_refused_before_anything_starts() -> None:
    async def test(stage: Stage) -> Stage:
        first, second = fake_gpus(2)
        gpus = (first, replace(second, node=NodeId("node1")))
        with pytest.raises(RunFailed, match="rollout workers: worker 0: its GPUs sit on several nodes"):
            await stage.workers.start(gpus, specs_of(parse_shape("1C@tp2").roles(), gpus), fake_manifest(0))
        return stage

    stage = on_stage(test)
    assert stage.fleet.starts == []


def test_each_worker_of_a_shape_has_its_slot_and_its_gpus() -> None:
    specs = specs_of(parse_shape("1P1D@tp2").roles(), fake_gpus(4))
    assert [(spec.worker, spec.role, spec.gpus) for spec in specs] == [
        (0, Role.PREFILL, ("gpu0", "gpu1")),
        (1, Role.DECODE, ("gpu2", "gpu3")),
    ]


def test_a_shape_that_needs_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(RunFailed, match="shape: worker 1 needs 2 GPUs, but only 1 of 3 are left"):
        specs_of(parse_shape("2C@tp2").roles(), fake_gpus(3))
