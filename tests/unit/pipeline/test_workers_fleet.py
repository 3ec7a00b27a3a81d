"""Parts of a fleet that somebody else shapes: weights, admission, who hears of losses; times as `test_workers` has them."""

from __future__ import annotations

import asyncio

from pearl.core.state import Activity, ActivityChanged, GpusJoined, Role, WorkerAdded
from pearl.ports import WorkerSpec
from pearl.records.ids import WorkerId
from pearl.testing.weights import fake_manifest
from pearl.testing.world import fake_gpus
from tests.unit.pipeline.test_workers import LOAD_S, START_S, Stage, now_s, on_stage

ZERO, ONE = WorkerId(0), WorkerId(1)
C = Role.COLOCATED


async def two_up(stage: Stage) -> list[tuple[int, str]]:
    """Two processes that do not serve; returns what is lost."""
    lost: list[tuple[int, str]] = []
    stage.workers.on_lost = lambda worker, detail: lost.append((worker, detail))
    stage.workers.begin(fake_manifest(3))
    stage.workers.state.submit(GpusJoined(gpus=fake_gpus(2)))
    specs = [WorkerSpec(worker=WorkerId(n), gpus=(gpu.id,), role=C) for n, gpu in enumerate(fake_gpus(2))]
    for spec in specs:
        stage.workers.state.submit(WorkerAdded(worker=spec.worker, gpus=spec.gpus, role=C))
    await stage.fleet.start(specs, 60)
    return lost


def test_workers_are_admitted_together_with_weights_that_they_have() -> None:
    async def test(stage: Stage) -> None:
        await two_up(stage)
        assert await stage.workers.load(ZERO) is None
        assert now_s() == START_S + LOAD_S
        assert await stage.workers.admit({ZERO: C, ONE: Role.DECODE}) is None
        assert now_s() == START_S + 2 * LOAD_S  # the other one's
        assert [stage.workers.router.role(worker) for worker in (ZERO, ONE)] == [C, Role.DECODE]
        assert [len(engine.loads) for engine in stage.fleet.past_engines] == [1, 1]
        assert stage.workers.router.served_version == 3

    on_stage(test)


def test_weights_that_were_published_meanwhile_are_loaded_before_admission() -> None:
    async def test(stage: Stage) -> None:
        await two_up(stage)
        await asyncio.gather(stage.workers.load(ZERO), stage.workers.load(ONE))
        await stage.workers.publish(fake_manifest(4))
        assert await stage.workers.admit({ZERO: C, ONE: C}) is None
        assert stage.workers.router.served_version == 4
        await stage.workers.publish(fake_manifest(5))
        assert stage.workers.router.served_version == 5

    on_stage(test)


def test_a_publication_and_an_admission_wait_for_each_other() -> None:
    async def test(stage: Stage) -> None:
        await two_up(stage)
        admitting = stage.nursery.spawn(stage.workers.admit({ZERO: C}), name="admit")
        await asyncio.sleep(1)
        await stage.workers.publish(fake_manifest(4))
        assert await admitting is None
        assert stage.workers.router.served_version == 4

    on_stage(test)


def test_one_that_cannot_be_admitted_keeps_all_out() -> None:
    async def test(stage: Stage) -> None:
        await two_up(stage)
        stage.fleet.kill(ONE)
        why_not = await stage.workers.admit({ZERO: C, ONE: C})
        assert why_not is not None
        assert "worker 1" in why_not
        assert stage.workers.router.workers == ()
        assert "worker 1" in (await stage.workers.load(ONE) or "")

    on_stage(test)


def test_losses_are_told_to_whoever_deals_with_them_and_nothing_is_restarted() -> None:
    async def test(stage: Stage) -> None:
        lost = await two_up(stage)
        await stage.workers.admit({ZERO: C, ONE: C})
        stage.fleet.kill(ONE, "out of memory")
        await asyncio.sleep(60)
        assert [worker for worker, _ in lost] == [1, 1]  # its stream, and the fleet
        assert stage.workers.router.workers == (ZERO,)
        assert len(stage.fleet.past_engines) == 2
        assert stage.workers.restarts == 0

    on_stage(test)


def test_a_stop_ends_all_but_training_workers() -> None:
    async def test(stage: Stage) -> None:
        await two_up(stage)
        await stage.workers.admit({ZERO: C})
        stage.workers.state.submit(ActivityChanged(worker=ZERO, activity=Activity.ACTIVE))
        await stage.workers.stop()
        assert stage.fleet.engines == {}
        assert stage.activity() == {}

    on_stage(test)
