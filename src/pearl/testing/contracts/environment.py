"""Contract of `EnvironmentPool` and `Environment`.

Slots are bounded and given in the order of asking; faults have types; `close` always gives the slot back, once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from pearl.errors import EnvironmentFault, EnvironmentHung, EnvironmentLost, EnvironmentNonsense, EnvironmentRaised
from pearl.ports import Environment, EnvironmentPool
from pearl.records.trajectory import EnvironmentReply, Task
from pearl.testing.contracts.base import Contract

ErrorTypes: TypeAlias = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPoolSubject:
    """A pool under test, nothing open."""

    pool: EnvironmentPool
    task: Callable[[str], Task | None]
    """A task whose environment is `plain`, `raises`, `hangs`, `nonsense` or `lost`; None: there is none of that kind."""
    action: str = "act"
    """One that a plain environment understands."""


class EnvironmentPoolContract(Contract):
    """Subclass it and give `pool`."""

    max_steps = 20
    """By which a plain environment is done, and a faulty one has failed."""
    hang_s = 0.2
    """After which a call that does not answer is taken to hang."""
    settle_s = 0.1
    """How long something that must not happen is waited for."""

    def pool(self, slots: int) -> AbstractAsyncContextManager[EnvironmentPoolSubject]:
        """A fresh pool of exactly so many slots."""
        raise NotImplementedError

    def test_an_environment_is_reset_stepped_and_closed(self) -> None:
        async def check() -> None:
            async with self.pool(1) as subject:
                environment = await subject.pool.open(self._plain(subject))
                assert isinstance(await environment.reset(3), str)
                replies: list[EnvironmentReply] = []
                while not (replies and replies[-1].done):
                    assert len(replies) < self.max_steps
                    replies.append(await environment.step(subject.action))
                for reply in replies:
                    assert isinstance(reply.observation, str)
                    assert math.isfinite(reply.reward)
                await environment.close()

        self.check(check())

    def test_a_seed_decides_the_observation(self) -> None:
        async def check() -> None:
            async with self.pool(2) as subject:
                task = self._plain(subject)
                pair = [await subject.pool.open(task) for _ in range(2)]
                assert await pair[0].reset(8) == await pair[1].reset(8)
                for environment in pair:
                    await environment.close()

        self.check(check())

    def test_slots_are_never_exceeded(self) -> None:
        async def check() -> None:
            async with self.pool(3) as subject:
                assert subject.pool.slots == 3
                task = self._plain(subject)
                inside = [await subject.pool.open(task) for _ in range(3)]
                waiter = asyncio.create_task(self._open(subject, task))
                await asyncio.sleep(self.settle_s)
                assert not waiter.done()
                await inside[1].close()
                late = await waiter
                another = asyncio.create_task(self._open(subject, task))
                await asyncio.sleep(self.settle_s)
                assert not another.done()
                for environment in (inside[0], inside[2], late):
                    await environment.close()
                await (await another).close()

        self.check(check())

    def test_slots_are_given_in_the_order_of_asking(self) -> None:
        async def check() -> None:
            async with self.pool(1) as subject:
                task, order = self._plain(subject), []
                first = await subject.pool.open(task)

                async def visit(number: int) -> None:
                    environment = await subject.pool.open(task)
                    order.append(number)
                    await environment.close()

                visits = []
                for number in range(5):
                    visits.append(asyncio.create_task(visit(number)))
                    await asyncio.sleep(0)
                await first.close()
                await asyncio.gather(*visits)
                assert order == [0, 1, 2, 3, 4]

        self.check(check())

    def test_a_waiter_that_gives_up_takes_no_slot(self) -> None:
        async def check() -> None:
            async with self.pool(1) as subject:
                task = self._plain(subject)
                first = await subject.pool.open(task)
                quitter = asyncio.create_task(self._open(subject, task))
                stayer = asyncio.create_task(self._open(subject, task))
                await asyncio.sleep(0)
                quitter.cancel()
                await asyncio.gather(quitter, return_exceptions=True)
                await first.close()
                await (await stayer).close()

        self.check(check())

    def test_a_waiter_that_gives_up_as_its_slot_comes_passes_it_on(self) -> None:
        async def check() -> None:
            async with self.pool(1) as subject:
                task = self._plain(subject)
                first = await subject.pool.open(task)
                quitter = asyncio.create_task(self._open(subject, task))
                stayer = asyncio.create_task(self._open(subject, task))
                await asyncio.sleep(0)
                closing = asyncio.create_task(first.close())
                await asyncio.sleep(0)
                quitter.cancel()
                for outcome in await asyncio.gather(quitter, closing, return_exceptions=True):
                    if outcome is not None and not isinstance(outcome, BaseException):
                        await outcome.close()
                await (await stayer).close()

        self.check(check())

    def test_close_gives_one_slot_back_however_often_it_is_called(self) -> None:
        async def check() -> None:
            async with self.pool(1) as subject:
                task = self._plain(subject)
                first = await subject.pool.open(task)
                await first.close()
                await first.close()
                second = await subject.pool.open(task)
                waiter = asyncio.create_task(self._open(subject, task))
                await first.close()
                await asyncio.sleep(self.settle_s)
                assert not waiter.done()
                await second.close()
                await (await waiter).close()

        self.check(check())

    @pytest.mark.parametrize(
        ("kind", "fault"),
        [("raises", EnvironmentRaised), ("nonsense", EnvironmentNonsense), ("lost", EnvironmentLost)],
    )
    def test_a_fault_has_a_type_and_its_slot_comes_back(self, kind: str, fault: type[EnvironmentFault]) -> None:
        self._check_its_slot_comes_back(kind, fault, times=2)

    def test_a_hanging_environment_can_be_left_and_its_slot_comes_back(self) -> None:
        self._check_its_slot_comes_back("hangs", (TimeoutError, EnvironmentHung), times=1)

    def test_a_fault_touches_no_other_environment(self) -> None:
        async def check() -> None:
            async with self.pool(2) as subject:
                task = subject.task("raises")
                if task is None:
                    return
                plain = await subject.pool.open(self._plain(subject))
                await plain.reset(1)
                faulty = await self._failed(subject, task, EnvironmentRaised)
                assert isinstance(await plain.step(subject.action), EnvironmentReply)
                await faulty.close()
                await plain.close()

        self.check(check())

    def _check_its_slot_comes_back(self, kind: str, fault: ErrorTypes, *, times: int) -> None:
        """The only slot can be had again after so many environments of a kind have failed in it."""

        async def check() -> None:
            async with self.pool(1) as subject:
                task = subject.task(kind)
                if task is None:
                    return
                for _ in range(times):
                    await (await self._failed(subject, task, fault)).close()
                await (await subject.pool.open(self._plain(subject))).close()

        self.check(check())

    async def _failed(self, subject: EnvironmentPoolSubject, task: Task, fault: ErrorTypes) -> Environment:
        """An open environment that has failed as its task says."""
        environment = await subject.pool.open(task)
        with pytest.raises(fault):
            await self._play(environment, subject.action)
        return environment

    def _plain(self, subject: EnvironmentPoolSubject) -> Task:
        task = subject.task("plain")
        assert task is not None, "there must be a plain task"
        return task

    async def _open(self, subject: EnvironmentPoolSubject, task: Task) -> Environment:
        return await subject.pool.open(task)

    async def _play(self, environment: Environment, action: str) -> None:
        async with asyncio.timeout(self.hang_s):
            await environment.reset(1)
        for _ in range(self.max_steps):
            async with asyncio.timeout(self.hang_s):
                await environment.step(action)
