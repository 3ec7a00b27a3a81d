"""The environment pool with real processes: slots, typed faults, replacement."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from pearl.cluster import environment_pool
from pearl.cluster.calls import end_actor
from pearl.cluster.environment_pool import RayEnvironmentPool
from pearl.errors import (
    EnvironmentFault,
    EnvironmentHung,
    EnvironmentLost,
    EnvironmentNonsense,
    EnvironmentRaised,
    RunFailed,
    WorkerLost,
)
from pearl.records.ids import TaskId
from pearl.records.trajectory import Task

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("local_ray")]

ECHO = "tests.integration.environments:Echo"


def task(kind: str = ECHO, seed: int = 0, **params: str | int | float) -> Task:
    return Task(id=TaskId(f"t{seed}"), environment=kind, seed=seed, params=params)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await work

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def pool(
    slots: int, processes: int = 1, restarts: int = 4, open_timeout_s: float = 60.0, step_timeout_s: float = 60.0
) -> AsyncIterator[RayEnvironmentPool]:
    made = RayEnvironmentPool(
        slots,
        processes,
        start_timeout_s=60.0,
        open_timeout_s=open_timeout_s,
        step_timeout_s=step_timeout_s,
        max_restarts=restarts,
    )
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def test_a_task_is_played_and_slots_are_never_exceeded(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(slots=3) as environments:
            open_now, open_max = 0, 0

            async def play(seed: int) -> str:
                nonlocal open_now, open_max
                environment = await environments.open(task(seed=seed, folder=str(tmp_path)))
                open_now += 1
                open_max = max(open_max, open_now)
                first = await environment.reset(seed)
                replies = [await environment.step("a") for _ in range(3)]
                open_now -= 1
                await environment.close()
                assert [reply.done for reply in replies] == [False, False, True]
                return first

            names = await asyncio.gather(*(play(seed) for seed in range(10)))
            assert len(set(names)) == 10
            assert open_max == 3

    run(work())


def test_faults_are_typed_and_give_the_slot_back() -> None:
    async def work() -> None:
        async with pool(slots=1) as environments:
            for params, kind, fault in (
                ({"faults": "raise"}, ECHO, EnvironmentRaised),
                ({"faults": "nan"}, "tests.integration.environments:Nonsense", EnvironmentNonsense),
                ({"faults": "type"}, "tests.integration.environments:Nonsense", EnvironmentNonsense),
                ({"faults": "bytes"}, "tests.integration.environments:Nonsense", EnvironmentNonsense),
            ):
                seed = abs(hash(str(params))) % 10_000_000
                environment = await environments.open(task(kind, seed, **params))
                await environment.reset(seed)
                await environment.step("a")
                with pytest.raises(fault):
                    await environment.step("a")
                await environment.close()
            with pytest.raises(EnvironmentFault, match="turnz"):
                await environments.open(task(turnz=3))
            environment = await environments.open(task())
            await environment.close()

    run(work())


def test_a_call_that_does_not_return_costs_the_process_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "STUCK_AFTER_S", 0.3)

    async def work() -> None:
        async with pool(slots=2) as environments:
            (before,) = environments.pids
            hung = await environments.open(task(seed=1, faults="hang"))
            other = await environments.open(task(seed=2))
            await other.reset(2)
            await hung.reset(1)
            await hung.step("a")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await hung.step("a")
            await hung.close()
            # Two new ones fit although the hung call still holds its thread in the old process.
            assert (await other.step("a")).observation == "1"
            first = await environments.open(task(seed=3))
            assert await first.reset(3)
            await first.close()
            await other.close()
            for _ in range(100):
                if before not in environments.pids:
                    break
                await asyncio.sleep(0.1)
            assert before not in environments.pids
            assert environments.restarts == 1

    run(work())


def test_a_process_that_is_stopped_ends_its_environments_as_lost_and_is_killed() -> None:
    async def work() -> None:
        # Bounds of 4 s on a call: silence is noticed after 2 s and the wait of a poll.
        async with pool(slots=64, step_timeout_s=4.0) as environments:
            (before,) = environments.pids
            environment = await environments.open(task(seed=11))
            await environment.reset(11)
            os.kill(before, signal.SIGSTOP)
            with pytest.raises(EnvironmentLost, match="no answer within"):
                await environment.step("a")
            await environment.close()
            again = await environments.open(task(seed=12))
            assert await again.reset(12)
            await again.close()
            assert before not in environments.pids
            while psutil.pid_exists(before):
                await asyncio.sleep(0.1)
            assert environments.restarts == 1

    run(work())


def test_as_many_stuck_calls_as_environments_in_use_cost_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "STUCK_AFTER_S", 0.1)

    async def hang(environments: RayEnvironmentPool, seed: int) -> None:
        hung = await environments.open(task(seed=seed, faults="hang"))
        await hung.reset(seed)
        await hung.step("a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await hung.step("a")
        await hung.close()

    async def work() -> None:
        # A quarter of the slots are far from stuck.
        async with pool(slots=64) as environments:
            (before,) = environments.pids
            sound = await environments.open(task(seed=20))
            await hang(environments, 21)
            await asyncio.sleep(0.3)
            assert environments.pids == (before,), "one that hangs is no reason to doubt the process"
            await hang(environments, 22)
            await sound.close()
            while before in environments.pids:
                await asyncio.sleep(0.1)
            assert environments.restarts == 1

    run(work())


def test_slots_that_do_not_divide_are_all_given() -> None:
    async def work() -> None:
        async with pool(slots=3, processes=2) as environments:
            assert environments.slots == 3
            opened = [await environments.open(task(seed=seed)) for seed in range(3)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await environments.open(task(seed=3))
            for environment in opened:
                await environment.close()

    run(work())


def test_a_construction_that_does_not_end_is_hung() -> None:
    async def work() -> None:
        async with pool(slots=2, open_timeout_s=0.5) as environments:
            with pytest.raises(EnvironmentHung, match=r"Echo: not constructed within 0\.5 s"):
                await environments.open(task(build_s=3600.0))
            sound = await environments.open(task(seed=1))
            await sound.close()

    run(work())


def test_a_start_that_fails_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start_actor = environment_pool.start_actor

    async def second_fails(actor: Any, who: str, timeout_s: float) -> int:
        if who.endswith("1"):
            end_actor(actor)
            raise WorkerLost(f"{who}: made to fail")
        return await start_actor(actor, who, timeout_s)

    def named(process: psutil.Process) -> str:
        try:
            return process.name() + "".join(process.cmdline())
        except psutil.NoSuchProcess:  # it ended, or is about to be buried
            return ""

    def alive() -> list[int]:
        tree = psutil.Process().children(recursive=True)
        return [process.pid for process in tree if "EnvironmentHost" in named(process)]

    async def work() -> None:
        monkeypatch.setattr(environment_pool, "start_actor", second_fails)
        made = RayEnvironmentPool(3, 3, start_timeout_s=60.0, open_timeout_s=60.0, step_timeout_s=60.0, max_restarts=0)
        with pytest.raises(RunFailed, match="made to fail"):
            await made.start()
        await made.stop()

    run(work())
    for _ in range(200):
        if not alive():
            break
        time.sleep(0.1)
    assert alive() == []


def test_a_killed_process_ends_its_environments_as_lost_and_is_replaced() -> None:
    async def work() -> None:
        async with pool(slots=2) as environments:
            environment = await environments.open(task(seed=5))
            await environment.reset(5)
            os.kill(environments.pids[0], signal.SIGKILL)
            with pytest.raises(EnvironmentLost):
                await environment.step("a")
            await environment.close()
            again = await environments.open(task(seed=6))
            assert await again.reset(6)
            await again.close()
            assert environments.restarts == 1

    run(work())


def test_replacements_are_bounded() -> None:
    async def work() -> None:
        async with pool(slots=1, restarts=0) as environments:
            os.kill(environments.pids[0], signal.SIGKILL)
            with pytest.raises((RunFailed, EnvironmentLost)):
                await environments.open(task())
            with pytest.raises(RunFailed, match="max_environment_restarts = 0"):
                await environments.open(task())

    run(work())
