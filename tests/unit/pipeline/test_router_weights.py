"""Weights: which a turn may see, and what loading does to turns and workers."""

from __future__ import annotations

import asyncio

import pytest

from pearl.records.training import LoadMode
from pearl.records.turn import Completion, Versions
from pearl.testing.weights import fake_manifest
from tests.unit.pipeline._router import House, in_house, job, now_s, undisturbed


def test_a_turn_never_goes_to_older_weights_than_it_may_see() -> None:
    async def test(house: House) -> list[int]:
        house.add(0, version=3)
        house.add(1, version=4)
        turns = [house.generate(job(f"t{n}", min_version=4)) for n in range(3)]
        return [(await turn).workers[0] for turn in turns]

    assert in_house(test) == [1, 1, 1]


def test_a_trajectory_leaves_its_prefix_when_only_another_worker_has_the_weights() -> None:
    async def test(house: House) -> int:
        house.add(0, version=3)
        await house.generate(job("mine", min_version=3))
        house.add(1, version=4)
        return (await house.generate(job("mine", turn=1, min_version=4))).workers[0]

    assert in_house(test) == 1


def test_a_turn_waits_for_its_weights_to_be_loaded() -> None:
    async def test(house: House) -> tuple[Completion, float]:
        house.add(0, version=1, load_s=5.0)
        turn = house.generate(job(min_version=2))
        await asyncio.sleep(10)
        await house.router.load(fake_manifest(2), LoadMode.KEEP_KV)
        return await turn, now_s()

    completion, ended_s = in_house(test)
    assert completion.versions == Versions.of([(2, 12)])
    assert ended_s == pytest.approx(16.2)


def test_all_workers_load_side_by_side_and_one_that_fails_is_the_only_one_given_up() -> None:
    async def test(house: House) -> tuple[House, float]:
        for worker in range(3):
            house.add(worker, load_s=5.0)
        asyncio.get_running_loop().call_later(2, house.engines[1].kill)
        await house.router.load(fake_manifest(1), LoadMode.RECOMPUTE)
        return house, now_s()

    house, ended_s = in_house(test)
    assert ended_s == 5
    assert [worker for worker, _ in house.lost] == [1]
    assert house.router.workers == (0, 2)
    assert house.router.served_version == 1
    assert [engine.loads for engine in house.engines.values()] == [
        [(1, LoadMode.RECOMPUTE)],
        [],
        [(1, LoadMode.RECOMPUTE)],
    ]


def test_a_worker_that_refuses_the_weights_or_does_not_end_loading_is_given_up() -> None:
    async def test(house: House) -> House:
        house.add(0, load_s=51.0)
        house.add(1)
        await house.router.load(fake_manifest(1), LoadMode.RECOMPUTE)
        await house.router.load(fake_manifest(2, hash_="another model"), LoadMode.RECOMPUTE)
        return house

    house = in_house(test)
    assert [worker for worker, _ in house.lost] == [0, 1]
    assert "no answer within 50 s" in house.lost[0][1]
    assert "another model" in house.lost[1][1]
    assert house.router.served_version is None


def test_a_turn_goes_on_under_new_weights_and_says_where_they_begin() -> None:
    async def test(house: House) -> Completion:
        house.add(0, version=1, load_s=5.0)
        turn = house.generate(job())
        await asyncio.sleep(0.75)
        await house.router.load(fake_manifest(2), LoadMode.KEEP_KV)
        return await turn

    completion = in_house(test)
    assert completion.versions == Versions.of([(1, 7), (2, 5)])
    assert completion.token_ids.tolist() == undisturbed(7, 12)
