"""Bounds of waits: when they expire, and what they let through."""

from __future__ import annotations

import asyncio

import pytest

from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.testing.virtual_time import run_virtual
from tests.unit.pipeline._concurrency import Boom, forever, now_s


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
