"""One turn: what is drawn, how its chunks are joined, what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pearl.errors import WorkerLost
from pearl.pipeline.router import Router
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.turn import Completion, EndReason, Sampling, TurnRequest, Versions
from pearl.testing.engine import fake_token
from tests.unit.pipeline._router import PROMPT, House, Puppet, T, in_house, job, now_s, undisturbed


def test_a_turn_is_what_the_engine_drew() -> None:
    async def test(house: House) -> tuple[Completion, float]:
        house.add(0, version=4)
        return await house.router.generate(job()), now_s()

    completion, ended_s = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert len(completion.logprobs) == 12
    assert completion.versions == Versions.of([(4, 12)])
    assert completion.end is EndReason.STOP
    assert completion.workers == (0,)
    assert completion.computed_prompt_tokens == 3
    assert ended_s == pytest.approx(1.2)


def test_a_turn_longer_than_allowed_ends_at_its_length() -> None:
    async def test(house: House) -> tuple[Completion, float]:
        house.add(0)
        return await house.router.generate(job(tokens=5)), now_s()

    completion, ended_s = in_house(test)
    assert completion.token_ids.tolist() == [fake_token(7, 3 + n) for n in range(5)]
    assert completion.end is EndReason.LENGTH
    assert ended_s == pytest.approx(0.5)


def test_turns_and_tokens_are_counted() -> None:
    async def test(house: House) -> Router:
        house.add(0)
        house.generate(job("a"))
        await house.router.generate(job("b", tokens=5))
        await asyncio.sleep(1)
        return house.router

    counts = in_house(test).counts
    assert (counts.turns, counts.generated_tokens, counts.computed_prompt_tokens) == (2, 17, 6)
    assert (counts.continued, counts.worker_losses, counts.failed_requests) == (0, 0, 0)


def with_puppet(test: Callable[[House, Puppet, asyncio.Task[Completion]], Awaitable[T]]) -> T:
    async def work(house: House) -> T:
        puppet = Puppet()
        house.router.admit(WorkerId(0), puppet, WeightVersion(0))
        return await test(house, puppet, house.generate(job()))

    return in_house(work)


def test_chunks_are_joined_in_order() -> None:
    async def test(house: House, puppet: Puppet, turn: asyncio.Task[Completion]) -> Completion:
        request = await puppet.next_request()
        puppet.say(request, [1, 2])
        puppet.say(request, [])
        await asyncio.sleep(1)
        puppet.say(request, [3], offset=2, end=EndReason.STOP)
        return await turn

    completion = with_puppet(test)
    assert completion.token_ids.tolist() == [1, 2, 3]
    assert completion.logprobs.tolist() == [-1 / 8, -2 / 8, -3 / 8]


def test_a_chunk_that_comes_twice_counts_once() -> None:
    async def test(house: House, puppet: Puppet, turn: asyncio.Task[Completion]) -> Completion:
        request = await puppet.next_request()
        for _ in range(2):
            puppet.say(request, [1, 2])
        puppet.say(request, [1, 2, 3])  # overlaps what is there: see below
        puppet.chunks._items.pop()
        for _ in range(2):
            puppet.say(request, [3, 4], offset=2, end=EndReason.STOP)
        return await turn

    completion = with_puppet(test)
    assert completion.token_ids.tolist() == [1, 2, 3, 4]
    assert len(completion.logprobs) == len(completion.versions) == 4


@pytest.mark.parametrize(
    ("ids", "offset", "end"),
    [([4, 5], 3, None), ([4, 5], 3, EndReason.STOP), ([2, 3], 1, None), ([1, 2, 3], 0, EndReason.STOP)],
    ids=["gap", "gap at the end", "overlap", "overlap at the end"],
)
def test_a_gap_or_overlap_ends_the_request_and_the_turn_goes_on_behind_the_last_good_token(
    ids: list[int], offset: int, end: EndReason | None
) -> None:
    async def test(house: House, puppet: Puppet, turn: asyncio.Task[Completion]) -> tuple[Completion, list[RequestId]]:
        first = await puppet.next_request()
        puppet.say(first, [1, 2])
        puppet.say(first, ids, offset=offset, end=end)
        second = await puppet.next_request()
        assert second.context.tolist() == [*PROMPT.tolist(), 1, 2]
        assert second.max_new_tokens == 18
        puppet.say(first, [9], offset=2)  # the first request is over
        puppet.say(second, [3], end=EndReason.STOP)
        completion = await turn
        assert house.router.counts.failed_requests == 1
        return completion, [one for one in puppet.interrupted if one == first.id]

    completion, interrupted = with_puppet(test)
    assert completion.token_ids.tolist() == [1, 2, 3]
    # The worker is told to stop what nobody listens to any more.
    assert len(interrupted) == (end is None)


def test_an_engine_that_fails_a_request_after_some_tokens_keeps_them() -> None:
    async def test(house: House, puppet: Puppet, turn: asyncio.Task[Completion]) -> Completion:
        first = await puppet.next_request()
        puppet.say(first, [1, 2], end=EndReason.FAILED, error="out of memory")
        second = await puppet.next_request()
        puppet.say(second, [3], end=EndReason.LENGTH)
        return await turn

    assert with_puppet(test).token_ids.tolist() == [1, 2, 3]


def test_chunks_of_unknown_requests_are_ignored() -> None:
    async def test(house: House, puppet: Puppet, turn: asyncio.Task[Completion]) -> Completion:
        request = await puppet.next_request()
        stranger = TurnRequest(
            id=RequestId("nobody's"),
            trajectory=TrajectoryId("x"),
            turn=0,
            context=PROMPT,
            sampling=Sampling(seed=1),
            max_new_tokens=1,
            min_version=WeightVersion(0),
        )
        puppet.say(stranger, [9], end=EndReason.STOP)
        puppet.say(request, [1], end=EndReason.STOP)
        return await turn

    assert with_puppet(test).token_ids.tolist() == [1]


def test_a_turn_that_all_tokens_arrived_of_is_complete_although_its_end_was_not_told() -> None:
    async def test(house: House) -> Completion:
        puppet = Puppet()
        house.router.admit(WorkerId(0), puppet, WeightVersion(0))
        turn = house.generate(job(tokens=2))
        request = await puppet.next_request()
        puppet.say(request, [5, 6])
        await asyncio.sleep(1)
        puppet.chunks.close(WorkerLost("gone"), drop=False)
        return await turn

    completion = in_house(test)
    assert completion.token_ids.tolist() == [5, 6]
    assert completion.end is EndReason.LENGTH
