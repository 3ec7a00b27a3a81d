"""Roles that change while a fleet serves: two workers that take 10 s to start and 4 s to load weights."""

from __future__ import annotations

import asyncio

import pytest

from pearl.core.state import Activity, Role
from pearl.pipeline.router import DRAIN_TIMEOUT_S
from pearl.pipeline.workers import ROLE_TIMEOUT_S
from pearl.records.ids import WorkerId
from pearl.testing.weights import fake_manifest
from tests.unit.pipeline._router import job
from tests.unit.pipeline.test_workers import ACTIVE, ADDED, LOAD_S, REMOVED, START_S, Stage, now_s, on_stage

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
DRAINS, CHANGED = "transitioning", "RoleChanged"
ZERO, ONE = WorkerId(0), WorkerId(1)


def roles(stage: Stage) -> dict[str, dict[int, Role | None]]:
    """What everyone takes the roles for; all must agree."""
    return {
        "router": {worker: stage.workers.router.role(worker) for worker in stage.workers.router.workers},
        "fleet": dict(sorted(stage.fleet.roles.items())),
        "state": {worker.id: worker.role for worker in stage.workers.state.snapshot.workers.values()},
    }


def check_roles(stage: Stage, *want: Role) -> None:
    expected = dict(enumerate(want))
    assert roles(stage) == {"router": expected, "fleet": expected, "state": expected}
    assert set(stage.activity().values()) == {Activity.ACTIVE}


def test_a_worker_takes_another_role_and_keeps_its_process() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        assert await stage.workers.set_role(ZERO, P) is None
        assert await stage.workers.set_role(ONE, D) is None
        assert now_s() == START_S + LOAD_S  # nothing to wait for
        check_roles(stage, P, D)
        return stage

    stage = on_stage(test)
    assert stage.events(0) == stage.events(1) == [ADDED, ACTIVE, DRAINS, CHANGED, ACTIVE]
    assert len(stage.fleet.past_engines) == 2


def test_turns_go_on_while_roles_change() -> None:
    async def test(stage: Stage) -> tuple[int, ...]:
        await stage.start()
        turn = stage.nursery.spawn(stage.workers.router.generate(job()), name="turn")
        await asyncio.sleep(1)
        assert await stage.workers.set_role(ZERO, P) is None
        check_roles(stage, P, C)
        return (await turn).workers

    assert on_stage(test, token_s=0.5) == (0, 1)


def test_a_role_that_a_worker_has_is_no_change_and_side_by_side_the_last_one_asked_for_stays() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        assert await stage.workers.set_role(ZERO, C) is None
        await asyncio.gather(*(stage.workers.set_role(ZERO, role) for role in (P, P, D)))
        check_roles(stage, D, C)
        return stage

    assert on_stage(test).events(0) == [ADDED, ACTIVE, *[DRAINS, CHANGED, ACTIVE] * 2]


@pytest.mark.parametrize("worker", [7, -1])
def test_only_workers_of_the_fleet_have_roles(worker: int) -> None:
    async def test(stage: Stage) -> str | None:
        await stage.start()
        return await stage.workers.set_role(WorkerId(worker), P)

    assert on_stage(test) == f"got worker {worker}, want one of [0, 1]"


def test_training_is_no_role_of_a_rollout_worker() -> None:
    async def test(stage: Stage) -> str | None:
        await stage.start()
        return await stage.workers.set_role(ZERO, Role.TRAINING)

    assert on_stage(test) == "worker 0: got role training, want a role of rollout"


def test_a_refusal_leaves_the_worker_as_it_was() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.fail_next_role(ZERO, "no graphs for that")
        assert await stage.workers.set_role(ZERO, P) == "worker 0: no graphs for that"
        check_roles(stage, C, C)
        stage.fleet.kill(ZERO)
        await asyncio.sleep(1 + START_S + LOAD_S)
        check_roles(stage, C, C)
        assert await stage.workers.set_role(ZERO, P) is None
        check_roles(stage, P, C)
        return stage

    assert on_stage(test).events(0)[:4] == [ADDED, ACTIVE, DRAINS, ACTIVE]


def test_a_worker_that_dies_later_comes_back_in_its_role() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        await stage.workers.set_role(ONE, P)
        stage.fleet.kill(ONE)
        await asyncio.sleep(1 + START_S + LOAD_S)
        check_roles(stage, C, P)
        return stage

    assert on_stage(test).events(1)[-3:] == [REMOVED, ADDED, ACTIVE]


@pytest.mark.parametrize("when", ["draining", "changing"])
def test_a_worker_that_dies_on_the_way_comes_back_in_its_new_role(when: str) -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        if when == "draining":
            stage.fleet.engines[ZERO].hang(mute=False)
            stage.nursery.spawn(stage.workers.router.generate(job()), name="turn")
            await asyncio.sleep(0)
            await asyncio.sleep(0.5)
        else:
            stage.fleet.role_s = 5.0
        asyncio.get_running_loop().call_later(1, stage.fleet.kill, ZERO)
        assert await stage.workers.set_role(ZERO, P) is None
        await asyncio.sleep(6 + START_S + LOAD_S)
        check_roles(stage, P, C)
        return stage

    stage = on_stage(test)
    assert stage.workers.restarts == 1
    assert stage.events(0) == [ADDED, ACTIVE, DRAINS, REMOVED, ADDED, ACTIVE]


@pytest.mark.parametrize("hangs", ["drain", "change"])
def test_a_worker_that_hangs_on_the_way_is_restarted_in_its_new_role(hangs: str) -> None:
    async def test(stage: Stage) -> tuple[Stage, float]:
        await stage.start()
        if hangs == "drain":
            stage.fleet.engines[ZERO].hang(mute=False)
            stage.nursery.spawn(stage.workers.router.generate(job()), name="turn")
            await asyncio.sleep(0.5)
        else:
            stage.fleet.role_s = 1000.0
        began_s = now_s()
        await stage.workers.set_role(ZERO, P)
        took_s = now_s() - began_s
        await asyncio.sleep(1 + START_S + LOAD_S)
        check_roles(stage, P, C)
        return stage, took_s

    stage, took_s = on_stage(test)
    assert took_s == (DRAIN_TIMEOUT_S if hangs == "drain" else ROLE_TIMEOUT_S)
    assert stage.workers.restarts == 1


@pytest.mark.parametrize("after_s", [0.0, 1.0, START_S + 1])
def test_a_worker_that_is_being_restarted_ends_up_in_the_role_asked_for_meanwhile(after_s: float) -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.kill(ZERO)
        await asyncio.sleep(0)
        await asyncio.sleep(after_s)
        assert await stage.workers.set_role(ZERO, P) is None
        await asyncio.sleep(1 + START_S + LOAD_S)
        check_roles(stage, P, C)
        return stage

    assert on_stage(test).workers.restarts == 1


def test_a_restarted_worker_that_refuses_its_role_is_started_in_it() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.kill(ZERO)
        await asyncio.sleep(1)
        stage.fleet.fail_next_role(ZERO)
        await stage.workers.set_role(ZERO, P)
        await asyncio.sleep(1 + 2 * (START_S + LOAD_S))
        check_roles(stage, P, C)
        return stage

    assert on_stage(test).workers.restarts == 2


def test_roles_may_change_before_a_worker_serves_for_the_first_time() -> None:
    async def test(stage: Stage) -> Stage:
        starting = stage.nursery.spawn(stage.start(), name="start")
        await asyncio.sleep(START_S + 1)
        assert await stage.workers.set_role(ZERO, D) is None
        await starting
        check_roles(stage, D, C)
        return stage

    assert on_stage(test).events(0) == [ADDED, CHANGED, ACTIVE]


def test_new_weights_come_to_a_worker_that_changes_its_role_too() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.role_s = 2.0
        await asyncio.gather(stage.workers.set_role(ZERO, P), stage.workers.publish(fake_manifest(1)))
        check_roles(stage, P, C)
        return stage

    stage = on_stage(test)
    assert stage.workers.router.served_version == 1
    assert [engine.version for engine in stage.fleet.past_engines] == [1, 1]


def test_a_change_goes_on_when_its_caller_is_cancelled() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.role_s = 2.0
        change = stage.nursery.spawn(stage.workers.set_role(ZERO, P), name="change")
        await asyncio.sleep(1)
        change.cancel()
        await asyncio.sleep(2)
        check_roles(stage, P, C)
        return stage

    on_stage(test)


def test_a_fleet_that_stops_ends_changes_too() -> None:
    async def test(stage: Stage) -> Stage:
        await stage.start()
        stage.fleet.role_s = 2.0
        change = stage.nursery.spawn(stage.workers.set_role(ZERO, P), name="change")
        await asyncio.sleep(1)
        await stage.workers.stop()
        assert await change is None
        assert await stage.workers.set_role(ZERO, D) == "worker 0: the fleet is being stopped"
        return stage

    stage = on_stage(test)
    assert stage.activity() == {}
    assert stage.events(0) == [ADDED, ACTIVE, DRAINS, REMOVED]
