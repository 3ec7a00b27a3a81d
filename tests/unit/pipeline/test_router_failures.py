"""Requests that fail or are refused, and turns that are cancelled; the workers stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pearl.errors import EngineError
from pearl.pipeline.router import Router
from pearl.records.ids import WeightVersion, WorkerId
from pearl.records.turn import Completion, EndReason, TurnRequest
from pearl.testing.engine import FakeEngine
from tests.unit.pipeline._router import House, Puppet, in_house, job, undisturbed


def test_a_turn_is_given_up_after_its_attempts_with_the_reason_of_the_last() -> None:
    async def test(house: House) -> Router:
        house.add(0).fail_next(99)
        with pytest.raises(EngineError, match=r"t0, turn 0: given up after 3 attempts on workers \[0, 0, 0\].*made to"):
            await house.router.generate(job())
        return house.router

    counts = in_house(test, max_attempts=3).counts
    assert (counts.failed_requests, counts.turns) == (3, 0)


def test_a_failed_turn_is_tried_elsewhere_although_the_worker_that_fails_has_the_least_to_do() -> None:
    async def test(house: House) -> Completion:
        house.add(0).fail_next(99)
        house.add(1)
        busy = [house.generate(job(f"t{n}")) for n in range(4)]
        completion = await house.generate(job("mine"))
        for turn in busy:
            await turn
        return completion

    completion = in_house(test, max_attempts=2)
    assert completion.workers[-1] == 1
    assert completion.token_ids.tolist() == undisturbed(7, 12)


def test_an_engine_that_takes_none_of_a_batch_fails_its_turns_and_stays() -> None:
    class Picky(Puppet):
        refusals = 1

        async def submit(self, requests: Sequence[TurnRequest]) -> None:
            if self.refusals:
                self.refusals -= 1
                raise EngineError("request ids are in use")
            await super().submit(requests)

    async def test(house: House) -> tuple[Completion, House]:
        puppet = Picky()
        house.router.admit(WorkerId(0), puppet, WeightVersion(0))
        turn = house.generate(job())
        puppet.say(await puppet.next_request(), [1], end=EndReason.STOP)
        return await turn, house

    completion, house = in_house(test)
    assert completion.workers == (0, 0)
    assert house.router.counts.failed_requests == 1
    assert house.lost == []


def test_a_turn_returns_to_the_worker_that_failed_it_when_no_other_serves() -> None:
    async def test(house: House) -> Completion:
        house.add(0).fail_next(2)
        return await house.router.generate(job())

    completion = in_house(test)
    assert completion.workers == (0, 0, 0)
    assert completion.token_ids.tolist() == undisturbed(7, 12)


def test_a_cancelled_turn_interrupts_its_request_and_loses_no_other() -> None:
    async def test(house: House) -> tuple[FakeEngine, Completion]:
        engine = house.add(0)
        mine, other = house.generate(job("mine")), house.generate(job("other"))
        await asyncio.sleep(0.55)
        mine.cancel()
        await asyncio.sleep(0)
        completion = await other
        return engine, completion

    engine, completion = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert engine.generated_tokens == 12 + 5
    assert [one.chunk.end for one in engine.delivered if one.trajectory == "mine"][-1] is EndReason.INTERRUPTED


def test_a_turn_cancelled_before_it_was_sent_is_never_generated() -> None:
    async def test(house: House) -> FakeEngine:
        engine = house.add(0)
        turn = house.generate(job())
        asyncio.get_running_loop().call_soon(turn.cancel)
        await asyncio.sleep(100)
        return engine

    assert in_house(test).generated_tokens == 0


def test_a_turn_given_up_while_its_worker_is_slow_to_take_requests_is_not_sent() -> None:
    class Slow(Puppet):
        async def submit(self, requests: Sequence[TurnRequest]) -> None:
            await asyncio.sleep(1)
            await super().submit(requests)

    async def test(house: House) -> list[str]:
        puppet = Slow()
        house.router.admit(WorkerId(0), puppet, WeightVersion(0))
        house.generate(job("first"))
        await asyncio.sleep(0.5)
        house.generate(job("second")).cancel()
        given_up = house.generate(job("third"))
        await asyncio.sleep(0.1)
        given_up.cancel()
        house.generate(job("fourth"))
        await asyncio.sleep(10)
        return [request.trajectory for request in await puppet._requests.take()]

    assert in_house(test) == ["first", "fourth"]
