"""The clock that jumps: time, order, stalls, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.virtual_time import RealWorldRefused, Stall, Stalled, VirtualLoop, rare_collections, run_virtual


def test_an_hour_passes_at_once() -> None:
    async def check() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    # On a real clock this would run into the time-out of the test.
    assert run_virtual(check()) == 3600


def test_timers_fire_in_their_order() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        order: list[tuple[str, float]] = []

        async def note(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            order.append((name, loop.time()))

        await asyncio.gather(note("late", 3), note("soon", 1), note("between", 2), note("now", 0))
        assert order == [("now", 0), ("soon", 1), ("between", 2), ("late", 3)]

    run_virtual(check())


def test_a_time_out_is_exact() -> None:
    async def check() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(6)
        assert asyncio.get_running_loop().time() == 5

    run_virtual(check())


def test_waiting_for_what_cannot_come_is_reported_by_name() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    async def check() -> None:
        await asyncio.create_task(wait(), name="the one who waits")

    with pytest.raises(Stalled, match="the one who waits"):
        run_virtual(check())


def test_errors_come_out() -> None:
    async def check() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        run_virtual(check())


def test_decades_pass_as_well() -> None:
    # Between two numbers of this size there is more than the nanosecond within which a timer is due.
    async def check() -> float:
        for _ in range(3):
            await asyncio.sleep(10 * 365 * 24 * 3600)
            await asyncio.sleep(0.25)
        return asyncio.get_running_loop().time()

    assert run_virtual(check()) == pytest.approx(3 * (10 * 365 * 24 * 3600 + 0.25))


def the_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def test_the_clock_stands_on_the_timer_exactly() -> None:
    # 0.1 + 0.2 and 0.3 are two numbers: times are those that were asked for, not sums of jumps.
    async def check() -> None:
        loop, seen = the_loop(), []
        for when in (0.3, 0.1, 0.1 + 0.2, 1e-12):
            loop.call_at(when, lambda: seen.append(loop.time()))
        await asyncio.sleep(1)
        assert seen == [1e-12, 0.1, 0.3, 0.1 + 0.2]

    run_virtual(check())


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_equal_times_come_in_order_of_setting(timers: list[tuple[int, bool]]) -> None:
    async def check() -> list[int]:
        loop, order = the_loop(), []
        for number, (when, is_guard) in enumerate(timers):
            if is_guard:
                loop.call_guard(when, lambda number=number: order.append(number), f"guard {number}")
            else:
                loop.call_later(when, order.append, number)
        await asyncio.sleep(5)
        return order

    assert run_virtual(check()) == [number for _, number in sorted((when, n) for n, (when, _) in enumerate(timers))]


def test_what_is_past_comes_soon_and_the_clock_never_goes_back() -> None:
    async def check() -> None:
        await asyncio.sleep(5)
        seen = []
        the_loop().call_at(2, lambda: seen.append(the_loop().time()))
        the_loop().call_later(-1, lambda: seen.append(the_loop().time()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen == [5, 5]

    run_virtual(check())


def test_a_time_must_be_a_number() -> None:
    async def check() -> None:
        with pytest.raises(ValueError, match=r"virtual time: got a timer at nan s, want a number"):
            the_loop().call_at(float("nan"), print)

    run_virtual(check())


def test_what_is_to_come_never_is_nothing_to_wait_for() -> None:
    async def check() -> None:
        the_loop().call_at(float("inf"), print).cancel()
        await asyncio.sleep(float("inf"))

    with pytest.raises(Stalled, match="no timer is set"):
        run_virtual(check())


def test_callbacks_run_round_by_round() -> None:
    # As on a real loop: what becomes ready in a round waits for those that are ready already.
    async def check() -> list[str]:
        loop, order = the_loop(), []

        def first() -> None:
            order.append("first")
            loop.call_soon(order.append, "of the next round")

        loop.call_soon(first)
        loop.call_soon(order.append, "second")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return order

    assert run_virtual(check()) == ["first", "second", "of the next round"]


def test_when_only_guards_remain_the_loop_says_so_and_lets_them_fire() -> None:
    async def wait(seconds: float, waiter: str) -> float:
        with pytest.raises(GuardExpired, match=f"{waiter}: no answer within"):
            async with guard(seconds, waiter):
                await never()
        return the_loop().time()

    async def check() -> list[Stall]:
        await asyncio.sleep(2)
        tasks = [asyncio.create_task(wait(s, f"waiter {s}"), name=f"task {s}") for s in (9, 4)]
        assert list(await asyncio.gather(*tasks)) == [11, 6]
        assert told == the_loop().stalls
        assert the_loop().stall_count == 2
        return the_loop().stalls

    told: list[Stall] = []
    loop = VirtualLoop(on_stall=told.append)
    main = loop.create_task(check(), name="main")
    first, second = loop.run_until_complete(main)
    loop.close()
    assert (first.at_s, first.until_s, second.at_s, second.until_s) == (2, 6, 6, 11)
    assert (first.guards, first.waiting_guards) == (("waiter 4", "waiter 9"), 2)
    assert [name for name in first.tasks if name.startswith("task")] == ["task 4", "task 9"]
    assert first.waiting_tasks == 3
    assert (second.guards, second.waiting_guards) == (("waiter 9",), 1)
    assert str(second).startswith("from 6 s until 11 s only guards are left (waiter 9) while these tasks wait: main, ")


def test_a_guard_that_fires_while_others_go_on_is_no_stall() -> None:
    async def check() -> None:
        other = asyncio.create_task(asyncio.sleep(10))
        with pytest.raises(GuardExpired):
            async with guard(3, "waiter"):
                await never()
        await other
        assert the_loop().stalls == []

    run_virtual(check())


def test_a_guard_of_no_time_is_no_stall() -> None:
    async def check() -> None:
        with pytest.raises(GuardExpired):
            async with guard(0, "waiter"):
                await never()
        assert the_loop().stalls == []

    run_virtual(check(), strict=True)


def test_a_strict_loop_raises_at_the_first_stall() -> None:
    ended = []

    async def check() -> None:
        try:
            async with guard(60, "who waits"):
                await never()
        finally:
            ended.append(True)

    with pytest.raises(Stalled, match=r"virtual time: from 0 s until 60 s only guards are left \(who waits\)"):
        run_virtual(check(), strict=True)
    assert ended == [True]


def test_stalls_are_kept_within_bounds() -> None:
    async def check() -> None:
        for _ in range(150):
            with pytest.raises(GuardExpired):
                async with guard(1, "waiter"):
                    await never()
        assert (len(the_loop().stalls), the_loop().stall_count) == (100, 150)

    run_virtual(check())


def test_many_waiters_are_counted() -> None:
    async def check() -> None:
        tasks = [asyncio.create_task(never(), name=f"task {n:02}") for n in range(30)]
        timers = [the_loop().call_guard(n + 1, never, f"guard {n}") for n in range(20)]
        timers[0].cancel()
        the_loop()._jump()
        (stall,) = the_loop().stalls
        assert (stall.waiting_tasks, len(stall.tasks)) == (31, 10)
        assert (stall.waiting_guards, stall.guards) == (19, tuple(f"guard {n}" for n in range(1, 11)))
        assert "guard 10 and 9 more" in str(stall)
        for waiting in (*tasks, *timers):
            waiting.cancel()

    run_virtual(check())


def test_cancelled_guards_do_not_pile_up() -> None:
    async def check() -> None:
        loop = the_loop()
        kept = [loop.call_guard(10, print, f"kept {n}") for n in range(100)]
        most = 0
        for _ in range(20_000):
            loop.call_guard(3600, print, "guard").cancel()
            loop.call_later(3600, print).cancel()
            most = max(most, len(loop._guards.heap), len(loop._progress.heap))
        # More than half of what is kept is alive, or there are few.
        assert most <= 2 * len(kept) + 257
        assert loop.timers == 100
        for timer in kept:
            timer.cancel()
            timer.cancel()
        assert loop.timers == 0

    run_virtual(check())


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), max_size=60))
def test_cancelled_timers_never_fire_and_the_others_do(timers: list[tuple[int, bool, bool]]) -> None:
    async def check() -> None:
        loop, fired = the_loop(), []
        handles = []
        for number, (when, is_guard, _) in enumerate(timers):
            fire: Callable[[], None] = lambda number=number: fired.append((loop.time(), number))  # noqa: E731
            handles.append(loop.call_guard(when, fire, "") if is_guard else loop.call_later(when, fire))
        for handle, (_, _, cancelled) in zip(handles, timers, strict=True):
            if cancelled:
                handle.cancel()
        await asyncio.sleep(30)
        assert fired == sorted((when, n) for n, (when, _, cancelled) in enumerate(timers) if not cancelled)
        assert loop.timers == 0

    run_virtual(check())


def test_the_real_world_is_refused() -> None:
    async def check() -> None:
        loop = the_loop()
        with pytest.raises(
            RealWorldRefused, match=r"virtual time: run_in_executor: real I/O, threads, .*use a simulated"
        ):
            await asyncio.to_thread(print)
        with pytest.raises(RealWorldRefused, match=r"create_connection"):
            await asyncio.open_connection("localhost", 1)
        with pytest.raises(RealWorldRefused, match=r"subprocess_exec"):
            await asyncio.create_subprocess_exec("true")
        with pytest.raises(RealWorldRefused, match=r"add_reader"):
            loop.add_reader(0, print)

    run_virtual(check())


def test_other_threads_are_refused() -> None:
    async def check() -> None:
        loop, errors = the_loop(), []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RealWorldRefused as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(errors) == 1
        assert "call_soon_threadsafe from another thread" in errors[0]
        # Signal handlers, which run in this thread, may.
        came = loop.create_future()
        loop.call_soon_threadsafe(came.set_result, None)
        await came

    run_virtual(check())


def test_a_callback_that_fails_is_reported_and_the_rest_goes_on() -> None:
    async def check() -> None:
        loop, reports = the_loop(), []
        loop.set_exception_handler(lambda _, context: reports.append(context))

        def fail() -> None:
            raise KeyError("mine")

        loop.call_soon(fail)
        loop.call_later(1, fail)
        await asyncio.sleep(2)
        assert [type(report["exception"]) for report in reports] == [KeyError, KeyError]
        assert "exception in callback" in reports[0]["message"]

    run_virtual(check())


def test_a_closed_loop_takes_nothing() -> None:
    loop = VirtualLoop()
    loop.call_later(1, print)
    loop.close()
    assert loop.timers == 0
    for call in (lambda: loop.call_soon(print), lambda: loop.call_at(1, print)):
        with pytest.raises(RuntimeError, match="the event loop is closed"):
            call()


def test_a_loop_can_be_stopped_and_run_again() -> None:
    loop = VirtualLoop()
    loop.call_later(3, loop.stop)
    loop.run_forever()
    assert loop.time() == 3
    assert loop.run_until_complete(asyncio.sleep(2, "slept")) == "slept"
    assert loop.time() == 5
    loop.close()


def test_timers_fire_as_on_a_heap_by_hand() -> None:
    # Chains of timers that set timers: against a list of (time, order of setting) worked off one by one.
    steps = [0.5, 0.25, 0.75, 0.5, 0.0]

    async def check() -> list[tuple[float, int]]:
        loop, seen = the_loop(), []

        def fire(chain: int, left: int) -> None:
            seen.append((loop.time(), chain))
            if left:
                loop.call_later(steps[(chain + left) % 5], fire, chain, left - 1)

        for chain in range(4):
            loop.call_later(chain * 0.25, fire, chain, 6)
        await asyncio.sleep(60)
        return seen

    numbers = itertools.count()
    heap = [(chain * 0.25, next(numbers), chain, 6) for chain in range(4)]
    expected = []
    while heap:
        now, _, chain, left = heapq.heappop(heap)
        expected.append((now, chain))
        if left:
            heapq.heappush(heap, (now + steps[(chain + left) % 5], next(numbers), chain, left - 1))
    assert run_virtual(check()) == expected


def test_collections_are_as_before_afterwards() -> None:
    before = gc.get_threshold()
    error = KeyError("mine")

    def fail() -> None:
        with rare_collections():
            assert gc.get_threshold()[0] > before[0]
            raise error

    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == before
