"""What goes wrong around a hand-off: it costs a computation, never a token, and blames nobody without cause.

A turn has 12 tokens of 0.1 s each, told each 0.3 s: on workers P and D the first is there at 0.1 s, 4 at 0.4 s, 7 at 0.7 s.
"""

from __future__ import annotations

import asyncio

import pytest

from pearl.core.state import Role
from pearl.errors import EngineError
from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.pipeline.seat import CONTROL_TIMEOUT_S
from pearl.records.ids import TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.turn import Completion, EndReason
from tests.unit.pipeline._router import PROMPT, SILENCE_S, House, Puppet, SlowToTake, in_house, job, now_s, undisturbed

P, D = Role.PREFILL, Role.DECODE


@pytest.mark.parametrize(
    ("victim", "at_s", "workers", "computed"),
    [
        (0, 0.0, (0, 1, 2), 3 + 1),
        (0, 0.05, (0, 1, 2), 3 + 1),
        (0, 0.75, (0, 2), 3 + 1),  # it had done its part
        # The token of the first prefill stays, and its worker holds the 3 tokens before it.
        (2, 0.05, (0, 0, 3), 3 + 1 + 1),
        # 7 tokens are there: the next prefill has a context of 10, of which 3 are held.
        (2, 0.75, (0, 2, 0, 3), 3 + 1 + 7 + 1),
    ],
)
def test_a_turn_goes_on_elsewhere_with_the_very_same_tokens(
    victim: int, at_s: float, workers: tuple[int, ...], computed: int
) -> None:
    async def test(house: House) -> tuple[Completion, House, list[object]]:
        house.add_shape("PPDD")
        turn = house.generate(job())
        await asyncio.sleep(at_s)
        house.engines[victim].kill()
        completion = await turn
        house.router.release(TrajectoryId("t0"))
        await asyncio.sleep(1)
        del house.engines[victim]
        return completion, house, house.kv_left()

    completion, house, left = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert len(completion.logprobs) == len(completion.versions) == 12
    assert completion.workers == workers
    assert completion.computed_prompt_tokens == computed
    assert house.lost == [(victim, f"worker {victim}: killed")]
    assert left == []
    assert house.router.counts.failed_requests == 0


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_the_last_worker_of_a_side_may_die(victims: tuple[int, ...]) -> None:
    async def test(house: House) -> Completion:
        house.add_shape("PD")
        turn = house.generate(job())
        await asyncio.sleep(0.55)
        for victim in victims:
            house.engines[victim].kill()
        if len(victims) == 2:
            await asyncio.sleep(10)
            house.add(5, role=D)
        return await turn

    completion = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == {(0,): (0, 1), (1,): (0, 1, 0), (0, 1): (0, 1, 5)}[victims]


@pytest.mark.parametrize("fault", ["owner dead", "expired"])
def test_a_hand_off_that_is_refused_is_tried_again_without_kv(fault: str) -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add(0, role=P, ttl_s=0.5 if fault == "expired" else 60)
        house.add(1, role=D, engine=SlowToTake)
        house.add(2, role=P).hang(mute=False)  # a further prefill worker does not tempt it
        turn = house.generate(job())
        if fault == "owner dead":
            asyncio.get_running_loop().call_later(0.5, house.engines[0].kill)
        return await turn, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    # The worker that refused the KV is not to blame: it serves the turn, and computes all 4 tokens.
    assert completion.workers == (0, 1, 1)
    assert completion.computed_prompt_tokens == 3 + 4
    counts = house.router.counts
    assert (counts.failed_handoffs, counts.failed_requests, counts.continued) == (1, 1, 1)


def test_an_owner_that_is_known_to_be_gone_is_not_asked() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        prefill = Puppet()
        house.router.admit(WorkerId(0), prefill, WeightVersion(0), P)
        house.add(1, role=D)
        turn = house.generate(job())
        request = await prefill.next_request()
        exporter = house.add(2, role=P)
        handle = exporter.kv.export(request.context, WeightVersion(0), now_s())
        prefill.say(request, undisturbed(7, 12)[:1], end=EndReason.LENGTH, kv=handle)
        # In the same moment: the token arrives, then the news of the death.
        asyncio.get_running_loop().call_soon(house.router.retire, WorkerId(0), "gone")
        return await turn, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 13)  # 12 of them by worker 1
    assert completion.workers == (0, 1)
    assert house.router.counts.handoffs == 0
    assert house.router.counts.failed_requests == 0


def test_a_prefill_without_a_handle_is_followed_by_a_whole_request() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        prefill = Puppet()
        house.router.admit(WorkerId(0), prefill, WeightVersion(0), P)
        house.add(1, role=D)
        turn = house.generate(job())
        prefill.say(await prefill.next_request(), undisturbed(7, 12)[:1], end=EndReason.LENGTH)
        return await turn, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 13)  # 12 of them by worker 1
    assert (completion.workers, completion.computed_prompt_tokens) == ((0, 1), 4)
    assert (house.router.counts.handoffs, house.router.counts.continued) == (0, 0)


async def second_turn(house: House, first: Completion) -> Completion:
    """Its context has 85 tokens; the prefill worker holds 3, and could have 11 more back."""
    context = PROMPT + first.token_ids + TokenIds([5] * 70)
    completion = await house.router.generate(job(turn=1, context=context))
    assert completion.token_ids.tolist() == undisturbed(7, 12, 85)
    return completion


def test_an_expired_readback_is_not_used() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("PD", ttl_s=5.0)
        first = await house.router.generate(job())
        await asyncio.sleep(6)
        return await second_turn(house, first), house

    completion, house = in_house(test)
    assert (completion.workers, completion.computed_prompt_tokens) == ((0, 1), 82 + 1)
    assert (house.router.counts.readbacks, house.router.counts.failed_requests) == (0, 0)


def test_an_expired_readback_is_let_go_while_its_trajectory_acts() -> None:
    """Whoever keeps a handle keeps its KV in memory; the next turn of anybody is the occasion to let go."""

    async def test(house: House) -> list[bool]:
        house.add_shape("PD", ttl_s=5.0)
        await house.router.generate(job())
        trail = house.router._trails.of(TrajectoryId("t0"))
        kept = [trail.readback is not None]
        for wait_s in (1, 5):
            await asyncio.sleep(wait_s)
            await house.router.generate(job(f"after {wait_s}"))
            kept.append(trail.readback is not None)
        return kept

    assert in_house(test) == [True, True, False]


def test_a_readback_that_is_refused_is_tried_again_without() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("PD")
        first = await house.router.generate(job())
        [handle] = house.engines[1].kv.handles(now_s())
        house.engines[1].kv.release(handle)
        return await second_turn(house, first), house

    completion, house = in_house(test)
    # The prefill worker is not to blame, and hand-offs go on.
    assert (completion.workers, completion.computed_prompt_tokens) == ((0, 0, 1), 82 + 1)
    assert (house.router.counts.readbacks, house.router.counts.failed_handoffs) == (1, 1)


def test_a_readback_of_a_dead_worker_is_forgotten() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("PDD")
        first = await house.router.generate(job())
        house.engines[1].kill()
        await asyncio.sleep(1)
        return await second_turn(house, first), house

    completion, house = in_house(test)
    assert (completion.workers, completion.computed_prompt_tokens) == ((0, 2), 82 + 1)
    assert (house.router.counts.readbacks, house.router.counts.failed_requests) == (0, 0)


def test_workers_that_fail_are_left_by_side() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("PPDD")
        house.engines[0].fail_next(99)
        house.engines[2].fail_next(99)
        return await house.router.generate(job()), house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    # 0 fails the prefill; 2 fails the hand-off, which the KV is blamed for, and then the whole turn without any.
    assert completion.workers == (0, 1, 2, 2, 3)
    assert (house.router.counts.failed_requests, house.router.counts.failed_handoffs) == (3, 1)


def test_a_turn_that_nobody_serves_is_given_up_after_its_attempts() -> None:
    async def test(house: House) -> House:
        house.add_shape("PD")
        for engine in house.engines.values():
            engine.fail_next(99)
        with pytest.raises(EngineError, match=r"given up after 4 attempts on workers \[0, 1, 1, 1\].*made to fail"):
            await house.router.generate(job())
        return house

    assert in_house(test, max_attempts=4).router.counts.turns == 0


@pytest.mark.parametrize(("worker", "workers"), [(0, (0, 1)), (1, (0, 1, 0))])
def test_a_worker_that_answers_no_call_is_lost_and_the_other_side_does_it_all(
    worker: int, workers: tuple[int, ...]
) -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("PD")
        house.engines[worker].hang()
        return await house.router.generate(job()), house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == workers
    assert house.lost == [(worker, f"worker {worker}: taking requests: no answer within {CONTROL_TIMEOUT_S:g} s")]


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_takes_requests_and_says_nothing_is_lost_when_the_turn_gives_up(worker: int) -> None:
    async def test(house: House) -> House:
        house.add_shape("PD")
        house.engines[worker].hang(mute=False)
        with pytest.raises(GuardExpired):
            async with guard(SILENCE_S + 1, "turn"):
                await house.router.generate(job())
        return house

    assert [lost for lost, _ in in_house(test).lost] == [worker]


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.15, 0.55])
def test_a_cancelled_turn_leaves_no_handle_and_no_load(at_s: float) -> None:
    async def test(house: House) -> tuple[list[object], list[int]]:
        house.add_shape("PD")
        turn = house.generate(job())
        await asyncio.sleep(at_s)
        turn.cancel()
        await asyncio.sleep(0)
        house.router.release(TrajectoryId("t0"))
        await asyncio.sleep(5)
        return house.kv_left(), [seat.load for seat in house.router._seats.values()]

    assert in_house(test) == ([], [0, 0])


def test_a_turn_cancelled_as_its_end_arrives_gives_the_handle_back() -> None:
    async def test(house: House) -> list[object]:
        house.add_shape("PD")
        turn = house.generate(job())
        loop = asyncio.get_running_loop()
        while not house.engines[1].kv.handles(now_s()):
            await asyncio.sleep(0.1)
        loop.call_soon(turn.cancel)
        await asyncio.gather(turn, return_exceptions=True)
        house.router.release(TrajectoryId("t0"))
        await asyncio.sleep(5)
        return house.kv_left()

    assert in_house(test) == []
