"""Which worker a turn goes to: the least busy, or the one that has its prefix."""

from __future__ import annotations

import asyncio

import pytest

from pearl.pipeline.placement import STICKY_SLACK
from pearl.records.ids import TrajectoryId
from pearl.records.turn import Completion
from tests.unit.pipeline._router import House, in_house, job, now_s, undisturbed


def test_turns_go_to_the_worker_with_the_least_outstanding_work_ties_to_the_lowest_slot() -> None:
    async def test(house: House) -> list[int]:
        for worker in (2, 0, 1):
            house.add(worker)
        turns = [house.generate(job(f"t{n}")) for n in range(7)]
        return [(await turn).workers[0] for turn in turns]

    assert in_house(test) == [0, 1, 2, 0, 1, 2, 0]


def test_the_next_turn_of_a_trajectory_stays_where_its_prefix_is() -> None:
    async def test(house: House) -> list[int]:
        house.add(0)
        house.add(1)
        house.generate(job("other"))  # worker 0
        first = await house.generate(job("mine"))
        second = await house.generate(job("mine", turn=1))
        return [*first.workers, *second.workers]

    assert in_house(test) == [1, 1]


@pytest.mark.parametrize(("others", "want"), [(STICKY_SLACK, 1), (STICKY_SLACK + 1, 0)])
def test_a_prefix_is_worth_so_many_requests_and_no_more(others: int, want: int) -> None:
    async def test(house: House) -> int:
        house.add(1)
        await house.generate(job("mine"))
        for n in range(others):
            house.generate(job(f"t{n}"))
        await asyncio.sleep(0)
        house.add(0)
        return (await house.generate(job("mine", turn=1))).workers[0]

    assert in_house(test) == want


def test_a_trajectory_that_moves_leaves_no_prefix_behind() -> None:
    async def test(house: House) -> tuple[int, int]:
        first = house.add(1)
        await house.generate(job("mine"))
        for n in range(STICKY_SLACK + 1):
            house.generate(job(f"t{n}"))
        await asyncio.sleep(0)
        second = house.add(0)
        await house.generate(job("mine", turn=1))
        await asyncio.sleep(0)
        return first.kv.cached_tokens(TrajectoryId("mine")), second.kv.cached_tokens(TrajectoryId("mine"))

    on_first, on_second = in_house(test)
    assert on_first == 0
    assert on_second > 0


def test_a_trajectory_forgets_a_home_that_is_gone_although_its_slot_is_filled_again() -> None:
    async def test(house: House) -> int:
        house.add(0)
        await house.generate(job("mine"))
        house.engines[0].kill()
        await asyncio.sleep(0)
        house.add(1)
        house.add(0)
        house.generate(job("other"))  # worker 0
        await asyncio.sleep(0)
        return (await house.generate(job("mine", turn=1))).workers[0]

    assert in_house(test) == 1


def test_releasing_a_trajectory_reaches_the_engine() -> None:
    async def test(house: House) -> tuple[int, int]:
        engine = house.add(0)
        await house.router.generate(job())
        before = engine.kv.cached_tokens(TrajectoryId("t0"))
        house.router.release(TrajectoryId("t0"))
        house.router.release(TrajectoryId("t0"))
        house.router.release(TrajectoryId("never seen"))
        await asyncio.sleep(1)
        return before, engine.kv.cached_tokens(TrajectoryId("t0"))

    before, after = in_house(test)
    assert before > 0
    assert after == 0


def test_a_turn_waits_for_a_worker_and_goes_to_the_one_that_appears() -> None:
    async def test(house: House) -> tuple[Completion, float]:
        turn = house.generate(job())
        await asyncio.sleep(500)
        house.add(3)
        return await turn, now_s()

    completion, ended_s = in_house(test)
    assert completion.workers == (3,)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert ended_s == pytest.approx(501.2)
