"""Waiting until something has changed."""

from __future__ import annotations

import asyncio

import pytest

from pearl.pipeline.concurrency import Changed, Nursery
from pearl.testing.virtual_time import Stalled, run_virtual
from tests.unit.pipeline._concurrency import forever, now_s


def test_until_returns_at_once_what_is_there_already_also_when_it_is_false() -> None:
    async def work() -> int:
        return await Changed().until(lambda: 0)

    assert run_virtual(work()) == 0


def test_waiters_wake_in_order_of_waiting_and_only_once_their_predicate_holds() -> None:
    log: list[str] = []

    async def work() -> None:
        changed, stock = Changed(), [0]

        async def take(name: str) -> None:
            def taken() -> bool | None:
                if not stock[0]:
                    return None
                stock[0] -= 1
                return True

            await changed.until(taken)
            log.append(f"{name} at {now_s():g}")

        async with Nursery() as nursery:
            for name in ("a", "b", "c"):
                nursery.spawn(take(name), name=name)
            await asyncio.sleep(1)
            changed.notify()  # nothing there: all wait on
            await asyncio.sleep(1)
            stock[0] = 2
            changed.notify()
            await asyncio.sleep(1)
            stock[0] = 1
            changed.notify()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    run_virtual(work())
    assert log == ["a at 2", "b at 2", "c at 3"]


def test_a_waiter_that_is_cancelled_is_forgotten_and_takes_nothing_from_the_others() -> None:
    async def work() -> bool:
        changed, there = Changed(), [False]
        loop = asyncio.get_running_loop()
        first = loop.create_task(changed.until(lambda: True if there[0] else None))
        second = loop.create_task(changed.until(lambda: True if there[0] else None))
        await asyncio.sleep(1)
        there[0] = True
        changed.notify()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert run_virtual(work())


def test_a_wait_for_what_cannot_come_is_a_stall_that_names_the_waiters() -> None:
    async def work() -> None:
        async with Nursery() as nursery:
            nursery.spawn(Changed().until(lambda: None), name="waits for nothing")
            await forever()

    with pytest.raises(Stalled, match="waits for nothing"):
        run_virtual(work())
