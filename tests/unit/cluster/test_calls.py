"""Waiting for an actor's answer, no longer than it is allowed to take."""

from __future__ import annotations

import asyncio
import time

import pytest

from pearl.cluster import calls
from pearl.cluster.calls import answer_within
from pearl.errors import WeightsError, WorkerLost
from pearl.testing.virtual_time import run_virtual


async def after(delay_s: float) -> int:
    await asyncio.sleep(delay_s)
    return 7


def test_an_answer_in_time() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert await answer_within(after(9.9), "worker 3", 10.0) == 7
        assert loop.time() == pytest.approx(9.9)

    run_virtual(work())


def test_an_answer_that_is_late_is_a_loss() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(WorkerLost, match=r"worker 3: no answer within 10 s"):
            await answer_within(after(1e6), "worker 3", 10.0)
        assert loop.time() == pytest.approx(10.0)

    run_virtual(work())


def test_what_was_raised_is_raised() -> None:
    async def refuse() -> None:
        raise WeightsError("no such version")

    async def work() -> None:
        with pytest.raises(WeightsError, match="no such version"):
            await answer_within(refuse(), "worker 3", 10.0)

    run_virtual(work())


def test_after_this_process_stood_still_nobody_else_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "TICK_S", 0.1)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[int] = loop.create_future()

        def stand_still() -> None:
            time.sleep(1.0)
            loop.call_later(0.01, answered.set_result, 7)

        loop.call_soon(stand_still)
        assert await answer_within(answered, "worker 3", 0.4) == 7

    asyncio.run(work())
