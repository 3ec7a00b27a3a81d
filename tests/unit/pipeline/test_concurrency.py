# ruff: noqa: PT012 - what is tested here are blocks that raise

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from pearl.pipeline.concurrency import Changed, GuardExpired, Nursery, guard
from pearl.testing.virtual_time import Stalled, run_virtual


class Boom(Exception):
    pass


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def fail_after(seconds: float, error: BaseException) -> None:
    await asyncio.sleep(seconds)
    raise error


def noting(log: list[str], name: str, work: Callable[[], Awaitable[None]] = forever) -> Coroutine[Any, Any, None]:
    """Work that notes its cancellation."""

    async def run() -> None:
        try:
            await work()
        except asyncio.CancelledError:
            log.append(name)
            raise

    return run()


# --- guard -----------------------------------------------------------------------------------------------------------


def test_guard_lets_a_wait_within_its_bound_pass_and_leaves_no_timer() -> None:
    async def work() -> tuple[str, float]:
        async with guard(5, "the answer"):
            await asyncio.sleep(4.9)
        before_s = now_s()
        await asyncio.sleep(100)  # a timer left behind would cancel this
        return "done", before_s

    assert run_virtual(work()) == ("done", pytest.approx(4.9))


def test_guard_ends_a_wait_at_its_bound_and_names_the_waiter() -> None:
    async def work() -> float:
        with pytest.raises(GuardExpired, match=r"^step 3 of g1\.2: no answer within 2\.5 s$"):
            async with guard(2.5, "step 3 of g1.2"):
                await forever()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return now_s()

    assert run_virtual(work()) == 2.5


def test_guard_passes_other_errors_on() -> None:
    async def work() -> None:
        async with guard(5, "x"):
            raise Boom

    with pytest.raises(Boom):
        run_virtual(work())


def test_guard_does_not_take_a_timeout_error_of_its_body_for_its_own() -> None:
    async def work() -> None:
        async with guard(5, "x"):
            async with asyncio.timeout(1):
                await forever()

    with pytest.raises(TimeoutError):
        run_virtual(work())


def test_the_inner_of_two_guards_expires_first_and_the_outer_goes_on() -> None:
    async def work() -> float:
        async with guard(5, "outer"):
            with pytest.raises(GuardExpired, match="inner"):
                async with guard(2, "inner"):
                    await forever()
            await asyncio.sleep(2)
        return now_s()

    assert run_virtual(work()) == 4


def test_the_outer_of_two_guards_ends_a_wait_inside_the_inner() -> None:
    async def work() -> float:
        with pytest.raises(GuardExpired, match="outer"):
            async with guard(2, "outer"), guard(5, "inner"):
                await forever()
        return now_s()

    assert run_virtual(work()) == 2


def test_of_two_guards_that_expire_together_the_outer_wins() -> None:
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(GuardExpired, match="outer"):
            async with guard(2, "outer"), guard(2, "inner"):
                await forever()
        assert task.cancelling() == 0

    run_virtual(work())


def test_a_cancellation_from_outside_goes_through_a_guard() -> None:
    async def work() -> None:
        async def guarded() -> None:
            async with guard(50, "x"):
                await forever()

        task = asyncio.get_running_loop().create_task(guarded())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(work())


@pytest.mark.parametrize("cancel_first", [False, True])
def test_a_cancellation_in_the_very_moment_in_which_a_guard_expires_is_not_swallowed(cancel_first: bool) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()

        async def guarded() -> None:
            async with guard(2, "x"):
                await forever()

        if cancel_first:
            loop.call_at(2, lambda: task.cancel())
        task = loop.create_task(guarded())
        await asyncio.sleep(0)
        if not cancel_first:
            loop.call_at(2, lambda: task.cancel())
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(work())


def test_an_answer_in_the_very_moment_in_which_a_guard_expires_gives_one_of_the_two_and_no_cancellation_later() -> None:
    async def work() -> bool:
        answered = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_at(2, lambda: answered.set_result(True))
        try:
            async with guard(2, "x"):
                await answered
        except GuardExpired:
            pass
        await asyncio.sleep(1)
        return True

    assert run_virtual(work())


def test_a_guard_used_while_its_task_is_being_cancelled_still_expires() -> None:
    async def work() -> float:
        async def cleaning_up() -> None:
            try:
                await forever()
            finally:
                with pytest.raises(GuardExpired):
                    async with guard(3, "close"):
                        await forever()

        task = asyncio.get_running_loop().create_task(cleaning_up())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return now_s()

    assert run_virtual(work()) == 4


# --- nursery ---------------------------------------------------------------------------------------------------------


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


# --- changed ---------------------------------------------------------------------------------------------------------


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
