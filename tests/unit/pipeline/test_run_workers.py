"""Whole runs whose workers die, hang, refuse, or do not start or load; and their bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pearl.errors import EngineError, RunFailed, WeightsError
from pearl.records.ids import WorkerId
from pearl.records.journal import TrajectoryEntry
from pearl.records.trajectory import TrajectoryStatus
from pearl.records.turn import TurnRequest
from pearl.testing.engine import FakeEngine
from pearl.testing.fleet import FakeFleet
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_recipe
from tests.unit.pipeline._run import ENGINE, play, quick, steps


@pytest.mark.parametrize("seed", range(8))
def test_workers_that_die_at_any_time_cost_nothing_but_time(seed: int) -> None:
    rng = random.Random(seed)
    undisturbed = FakeWorld(fake_recipe(run={"steps": 6}), engine=ENGINE, script=quick, train_s=5)
    play(undisturbed)
    recipe = fake_recipe(run={"steps": 6}, cluster={"max_worker_restarts": 4})
    world = FakeWorld(recipe, engine=ENGINE, script=quick, train_s=5, start_s=2)
    kills = [(rng.uniform(2.1, 35), rng.randrange(2)) for _ in range(4)]

    def kill(worker: int) -> None:
        if WorkerId(worker) in world.fleet.engines:
            world.fleet.kill(WorkerId(worker))

    result = play(world, *((at_s, lambda worker=worker: kill(worker)) for at_s, worker in kills))
    assert result.version == 6
    assert result.worker_restarts == result.worker_losses <= 4
    assert result.faults == {}
    # What was trained on is, token for token, what it would have been.
    assert _trained(world) == _trained(undisturbed)


def _trained(world: FakeWorld) -> dict[str, list[int]]:
    return {s.trajectory: s.token_ids.tolist() for batch in world.trainer.batches for s in batch.samples}


def test_a_worker_that_dies_beyond_the_bound_on_restarts_fails_the_run() -> None:
    world = FakeWorld(fake_recipe(cluster={"max_worker_restarts": 1}), engine=ENGINE, script=quick, train_s=10)
    with pytest.raises(RunFailed, match=r"rollout worker 1: lost .*all cluster\.max_worker_restarts = 1 are used up"):
        play(world, *((at_s, lambda: world.fleet.kill(WorkerId(1))) for at_s in (2, 16)))
    assert steps(world) == [1]


@pytest.mark.parametrize("unwell", [True, False])
@pytest.mark.parametrize("mute", [True, False])
def test_a_worker_that_hangs_is_replaced_and_the_run_goes_on(mute: bool, unwell: bool) -> None:
    recipe = fake_recipe(rollout={"turn_timeout_s": 100}, cluster={"max_worker_restarts": 1})
    world = FakeWorld(recipe, engine=ENGINE, script=quick, train_s=10)

    def hang() -> None:
        world.fleet.engines[WorkerId(1)].hang(mute=mute)
        if unwell:
            world.fleet.report_unwell(WorkerId(1))

    result = play(world, (0.5, hang))
    assert result.version == 4
    assert result.worker_restarts == 1
    # Found at once, which costs the one token that it had not told yet; or when its turns give up and begin again.
    assert world.steps[0].at_s == pytest.approx(14.125 if unwell else 114)
    assert result.faults == ({} if unwell else {TrajectoryStatus.ENGINE_FAILED: 4})


def test_a_worker_that_fails_every_request_does_not_starve_the_run() -> None:
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick, train_s=10)
    result = play(world, (0, lambda: world.fleet.engines[WorkerId(0)].fail_next(10**6)))
    assert result.version == 4
    assert result.faults == {}


def test_workers_that_do_not_start_fail_the_run_at_once() -> None:
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick, start_s=5)
    world.fleet.fail_next_start(WorkerId(1), "CUDA out of memory")
    with pytest.raises(RunFailed, match=r"rollout workers: .*CUDA out of memory; none was started"):
        play(world)
    assert world.journal.of(TrajectoryEntry) == []


def test_workers_that_take_too_long_to_start_fail_the_run() -> None:
    world = FakeWorld(fake_recipe(cluster={"start_timeout_s": 30}), engine=ENGINE, script=quick, start_s=31)
    with pytest.raises(RunFailed, match="not up within 30 s"):
        play(world)


def test_weights_that_one_worker_cannot_load_cost_that_worker_only() -> None:
    world = FakeWorld(fake_recipe(), engine=replace(ENGINE, load_s=2), script=quick, train_s=10)

    def kill_while_loading() -> None:
        assert world.weights.published == [0, 1]
        world.fleet.kill(WorkerId(0))

    # Loading 2 s, rollout 4, training 10: version 1 is loaded from 16 to 18 s.
    result = play(world, (17, kill_while_loading))
    assert result.version == 4
    assert result.worker_restarts == 1
    assert [engine.version for engine in world.fleet.past_engines] == [0, 4, 4]


def test_a_store_that_cannot_publish_fails_the_run() -> None:
    world = FakeWorld(fake_recipe(), engine=ENGINE, script=quick)
    world.weights._budget_bytes = 1
    with pytest.raises(WeightsError, match=r"weights\.host_budget_gib"):
        play(world)


def test_a_request_that_an_engine_refuses_is_tried_again_and_the_engine_kept() -> None:
    class Refusing(FakeEngine):
        refusals = 3

        async def submit(self, requests: Sequence[TurnRequest]) -> None:
            if Refusing.refusals:
                Refusing.refusals -= 1
                raise EngineError("not now")
            await super().submit(requests)

    world = FakeWorld(fake_recipe())
    world.fleet = FakeFleet(lambda spec: Refusing(worker=spec.worker))
    result = run_virtual(world.run())
    assert Refusing.refusals == 0
    assert result.version == world.recipe.run.steps
    assert result.worker_losses == 0
    world.check_ledger()
