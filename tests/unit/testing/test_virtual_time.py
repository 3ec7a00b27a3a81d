import asyncio

import pytest

from pearl.testing.virtual_time import Stalled, run_virtual


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
