"""Workers that die, leave, hang or fall silent, and the turns that they had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.pipeline.seat import CONTROL_TIMEOUT_S
from pearl.pipeline.turns import TurnJob
from pearl.records.ids import WeightVersion, WorkerId
from pearl.records.turn import Chunk, Completion, EndReason, Versions
from tests.unit.pipeline._router import SILENCE_S, House, Puppet, in_house, job, now_s, undisturbed


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.35, 0.61, 1.05, 1.15])
def test_a_turn_whose_worker_dies_goes_on_elsewhere_with_the_very_same_tokens(at_s: float) -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add(0)
        house.add(1)
        turn = house.generate(job())
        await asyncio.sleep(at_s)
        house.engines[0].kill()
        return await turn, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert len(completion.logprobs) == len(completion.versions) == 12
    assert completion.end is EndReason.STOP
    assert completion.workers == (0, 1)
    assert house.lost == [(0, "worker 0: killed")]
    assert house.router.counts.continued == 1
    assert house.router.counts.worker_losses == 1
    # What the dead worker delivered was kept: only the rest was generated again.
    assert house.engines[1].generated_tokens == 12 - house.engines[0].delivered_tokens


def test_what_a_dead_worker_had_delivered_is_not_generated_again() -> None:
    async def test(house: House) -> House:
        house.add(0)
        house.add(1)
        turn = house.generate(job())
        await asyncio.sleep(0.95)  # progress at 0.3, 0.6, 0.9
        house.engines[0].kill()
        await turn
        return house

    house = in_house(test)
    assert house.engines[0].delivered_tokens == 9
    assert house.engines[1].generated_tokens == 3


def test_a_turn_that_its_worker_interrupts_goes_on_with_the_very_same_tokens() -> None:
    async def test(house: House) -> Completion:
        house.add(0)
        turn = house.generate(job())
        await asyncio.sleep(0.55)
        house.engines[0].shut_down()
        house.add(1)
        return await turn

    completion = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == (0, 1)


def test_a_turn_that_changes_workers_keeps_the_version_of_each_token() -> None:
    async def test(house: House) -> Completion:
        house.add(0, version=3)
        house.add(1, version=4)
        turn = house.generate(job())
        await asyncio.sleep(0.5)
        house.engines[0].kill()  # 3 tokens were delivered at 0.3 s
        return await turn

    completion = in_house(test)
    assert completion.versions == Versions.of([(3, 3), (4, 9)])
    assert completion.token_ids.tolist() == undisturbed(7, 12)


def test_a_retired_worker_gets_nothing_more_and_its_late_tokens_are_dropped() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add(0)
        turn = house.generate(job())
        await asyncio.sleep(0.55)
        house.router.retire(WorkerId(0), "unwell")
        house.router.retire(WorkerId(0), "unwell")
        house.add(1)
        completion = await turn
        await asyncio.sleep(5)  # worker 0 goes on all this time
        return completion, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == (0, 1)
    assert house.router.workers == (1,)
    assert house.router.counts.worker_losses == 1
    assert house.lost == []  # whoever retires a worker knows


def test_a_worker_that_is_admitted_again_gets_the_turns_of_the_one_before() -> None:
    async def test(house: House) -> Completion:
        house.add(0)
        turn = house.generate(job())
        await asyncio.sleep(0.35)
        house.add(0)
        return await turn

    completion = in_house(test)
    assert completion.workers == (0, 0)
    assert completion.token_ids.tolist() == undisturbed(7, 12)


def test_workers_that_leave_at_the_end_of_a_run_are_not_lost() -> None:
    async def test(house: House) -> House:
        house.add(0)
        house.add(1)
        await house.router.generate(job())
        house.router.close()
        for engine in house.engines.values():
            engine.shut_down()
        await asyncio.sleep(1)
        return house

    house = in_house(test)
    assert house.router.workers == ()
    assert house.router.counts.worker_losses == 0
    assert house.lost == []


def test_a_stream_that_ends_is_a_worker_that_is_lost() -> None:
    class Ending(Puppet):
        async def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
            for _ in ():
                yield ()

    async def test(house: House) -> House:
        house.router.admit(WorkerId(0), Ending(), WeightVersion(0))
        await asyncio.sleep(0)
        return house

    assert in_house(test).lost == [(0, "its event stream ended")]


def test_a_worker_that_answers_no_call_is_lost() -> None:
    async def test(house: House) -> tuple[Completion, float, House]:
        house.add(0).hang()
        house.add(1)
        completion = await house.router.generate(job())
        return completion, now_s(), house

    completion, ended_s, house = in_house(test)
    assert completion.workers == (0, 1)
    assert ended_s == pytest.approx(CONTROL_TIMEOUT_S + 1.2)
    assert house.lost == [(0, f"worker 0: taking requests: no answer within {CONTROL_TIMEOUT_S:g} s")]


async def give_up(house: House, one: TurnJob, after_s: float) -> None:
    with pytest.raises(GuardExpired):
        async with guard(after_s, "turn"):
            await house.router.generate(one)


def test_a_worker_that_takes_requests_and_generates_nothing_is_lost_when_a_turn_gives_up() -> None:
    async def test(house: House) -> House:
        house.add(0).hang(mute=False)
        await give_up(house, job(), SILENCE_S + 1)
        return house

    assert in_house(test).lost == [(0, f"silent for {SILENCE_S + 1:g} s with requests to work on")]


def test_a_worker_that_falls_silent_in_the_middle_of_a_turn_is_lost_too() -> None:
    async def test(house: House) -> House:
        engine = house.add(0)
        asyncio.get_running_loop().call_later(0.75, lambda: engine.hang(mute=False))
        await give_up(house, job(), SILENCE_S + 1)
        return house

    assert in_house(test).lost == [(0, f"silent for {SILENCE_S + 0.4:g} s with requests to work on")]


def test_a_turn_that_gives_up_sooner_says_nothing_about_its_worker() -> None:
    async def test(house: House) -> House:
        house.add(0).hang(mute=False)
        await give_up(house, job(), SILENCE_S - 1)
        return house

    assert in_house(test).lost == []


def test_a_worker_that_works_on_other_requests_is_not_taken_for_silent() -> None:
    async def test(house: House) -> House:
        puppet = Puppet()
        house.router.admit(WorkerId(0), puppet, WeightVersion(0))
        house.generate(job("other"))
        request = await puppet.next_request()
        asyncio.get_running_loop().call_later(SILENCE_S, lambda: puppet.say(request, [5]))
        await give_up(house, job("mine"), SILENCE_S + 10)
        return house

    assert in_house(test).lost == []
