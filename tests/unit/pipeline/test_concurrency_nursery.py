# ruff: noqa: PT012 - what is tested here are blocks that raise

"""Tasks that end with their block: order, errors, cancellation, guards around."""

from __future__ import annotations

import asyncio

import pytest

from pearl.pipeline.concurrency import GuardExpired, Nursery, guard
from pearl.testing.virtual_time import run_virtual
from tests.unit.pipeline._concurrency import Boom, fail_after, forever, noting, now_s


def test_nursery_cancels_what_still_runs_at_the_end_in_order_of_spawning() -> None:
    log: list[str] = []

    async def work() -> None:
        async with Nursery() as nursery:
            for name in "cabd":
                nursery.spawn(noting(log, name), name=name)
            await asyncio.sleep(1)

    run_virtual(work())
    assert log == ["c", "a", "b", "d"]


def test_the_first_task_that_fails_cancels_block_and_siblings_and_is_raised() -> None:
    log: list[str] = []

    async def work() -> None:
        async with Nursery() as nursery:
            nursery.spawn(noting(log, "early"), name="early")
            nursery.spawn(fail_after(1, Boom("first")), name="a")
            nursery.spawn(fail_after(2, Boom("second")), name="b")
            nursery.spawn(noting(log, "late"), name="late")
            await noting(log, "block")

    with pytest.raises(Boom, match="first"):
        run_virtual(work())
    assert log == ["block", "early", "late"]


def test_the_error_of_the_block_is_not_replaced_by_one_from_the_tasks_that_it_cancels() -> None:
    async def bad_loser() -> None:
        try:
            await forever()
        finally:
            raise Boom("while being cancelled")

    async def work() -> None:
        async with Nursery() as nursery:
            nursery.spawn(bad_loser(), name="bad loser")
            await asyncio.sleep(1)
            raise ValueError("the block's own")

    with pytest.raises(ValueError, match="the block's own"):
        run_virtual(work())


def test_an_error_from_a_task_that_is_cancelled_at_the_end_of_the_block_is_raised() -> None:
    async def bad_loser() -> None:
        try:
            await forever()
        finally:
            raise Boom("while being cancelled")

    async def work() -> None:
        async with Nursery() as nursery:
            nursery.spawn(bad_loser(), name="bad loser")
            await asyncio.sleep(1)

    with pytest.raises(Boom):
        run_virtual(work())


def test_a_failed_task_leaves_no_cancellation_behind_in_its_parent() -> None:
    async def work() -> int:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(Boom):
            async with Nursery() as nursery:
                nursery.spawn(fail_after(1, Boom()), name="a")
                await forever()
        await asyncio.sleep(1)
        return task.cancelling()

    assert run_virtual(work()) == 0


def test_a_cancellation_of_the_block_from_outside_waits_for_the_tasks_and_is_raised() -> None:
    log: list[str] = []

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(5)
            log.append(f"ended at {now_s():g}")

    async def block() -> None:
        async with Nursery() as nursery:
            nursery.spawn(slow_to_end(), name="slow")
            await forever()

    async def work() -> None:
        task = asyncio.get_running_loop().create_task(block())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        log.append("cancelled")

    run_virtual(work())
    assert log == ["ended at 6", "cancelled"]


def test_a_guard_around_a_nursery_expires_although_the_tasks_take_their_time_or_fail_meanwhile() -> None:
    async def bad_loser() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(1)
            raise Boom("too late to be first")

    async def work() -> float:
        with pytest.raises(GuardExpired):
            async with guard(2, "x"), Nursery() as nursery:
                nursery.spawn(bad_loser(), name="bad loser")
                await forever()
        return now_s()

    assert run_virtual(work()) == 3


def test_a_guard_that_expires_between_a_failure_and_its_arrival_does_not_hide_it() -> None:
    async def work() -> int:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(Boom):
            async with guard(9, "x") as around, Nursery() as nursery:
                failing = nursery.spawn(fail_after(2, Boom()), name="a")
                failing.add_done_callback(lambda _: around._expire())
                await forever()
        return task.cancelling()

    assert run_virtual(work()) == 0


def test_a_second_cancellation_during_the_end_neither_leaves_tasks_running_nor_loses_the_first_error() -> None:
    log: list[str] = []

    async def stubborn() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
            log.append("stubborn ended")

    async def block() -> None:
        async with Nursery() as nursery:
            nursery.spawn(stubborn(), name="stubborn")
            nursery.spawn(fail_after(1, Boom("first")), name="a")
            await forever()

    async def work() -> None:
        task = asyncio.get_running_loop().create_task(block())
        await asyncio.sleep(3)
        task.cancel()
        with pytest.raises(Boom, match="first"):
            await task
        log.append("raised")

    run_virtual(work())
    assert log == ["stubborn ended", "raised"]


def test_what_is_spawned_while_the_nursery_ends_never_begins() -> None:
    log: list[str] = []

    async def spawner(nursery: Nursery) -> None:
        try:
            await forever()
        finally:
            nursery.spawn(noting(log, "begun"), name="too late")
            log.append("spawned")

    async def work() -> None:
        async with Nursery() as nursery:
            nursery.spawn(spawner(nursery), name="spawner")
            await asyncio.sleep(1)

    run_virtual(work())
    assert log == ["spawned"]


def test_a_task_that_somebody_cancels_does_not_end_the_block() -> None:
    async def work() -> str:
        async with Nursery() as nursery:
            task = nursery.spawn(forever(), name="a")
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(1)
            return "went on"

    assert run_virtual(work()) == "went on"


def test_an_error_of_an_inner_nursery_passes_through_the_outer_one() -> None:
    log: list[str] = []

    async def inner() -> None:
        async with Nursery() as nursery:
            nursery.spawn(fail_after(1, Boom("inner")), name="a")
            await noting(log, "inner block")

    async def work() -> None:
        async with Nursery() as nursery:
            nursery.spawn(inner(), name="inner")
            await noting(log, "outer block")

    with pytest.raises(Boom, match="inner"):
        run_virtual(work())
    assert log == ["inner block", "outer block"]
