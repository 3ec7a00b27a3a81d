"""A simulated process: calls wait while it hangs, and end with it."""

from __future__ import annotations

import asyncio

import pytest

from pearl.errors import WorkerLost
from pearl.records.ids import WorkerId
from pearl.sim.process import Process
from pearl.testing.virtual_time import run_virtual


def test_calls_end_with_the_process() -> None:
    async def check() -> None:
        process = Process(WorkerId(3))
        await process.answer()
        assert await process.call(asyncio.sleep(1.0, "done"), "nap") == "done"
        event: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        process.hang()
        calls = [
            asyncio.ensure_future(one)
            for one in (process.call(asyncio.sleep(9.0), "nap"), process.wait(event), process.answer())
        ]
        await asyncio.sleep(1.0)
        assert process.is_hung
        assert not any(call.done() for call in calls)
        process.end("power")
        for call in calls:
            with pytest.raises(WorkerLost, match="worker 3: power"):
                await call
        with pytest.raises(WorkerLost):
            await process.answer()
        assert process.is_gone

    run_virtual(check())


def test_who_gives_a_call_up_is_told_so() -> None:
    async def check() -> None:
        process = Process(WorkerId(3))
        call = asyncio.ensure_future(process.call(asyncio.sleep(9.0), "nap"))
        await asyncio.sleep(1.0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run_virtual(check())


def test_it_answers_again() -> None:
    async def check() -> None:
        process = Process(WorkerId(3))
        process.hang()
        call = asyncio.ensure_future(process.answer())
        await asyncio.sleep(1.0)
        process.unhang()
        process.unhang()
        await call
        assert not process.is_hung

    run_virtual(check())
