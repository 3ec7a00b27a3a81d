"""Prefill and decode on workers of their own: what is computed where, what travels, what is given back.

A turn has 12 tokens of 0.1 s each. Contexts are 3 tokens at first; a worker that ended a request holds all but the last
token that it drew. KV takes 1,024 bytes a token.
"""

from __future__ import annotations

import asyncio

import pytest

from pearl.core.state import Role
from pearl.pipeline.turns import RouterCounts
from pearl.records.ids import TrajectoryId
from pearl.records.tokens import TokenIds, Tokens
from pearl.records.training import LoadMode
from pearl.records.turn import Completion, EndReason, Versions
from pearl.testing.weights import fake_manifest
from tests.unit.pipeline._router import PROMPT, House, SlowToTake, in_house, job, now_s, undisturbed

KIB = 1024


async def play(house: House, *observations: int) -> list[Completion]:
    """A trajectory of one turn more than there are observations, each of so many tokens."""
    context: Tokens = PROMPT
    done = []
    for turn in range(len(observations) + 1):
        completion = await house.router.generate(job("mine", turn=turn, context=context))
        assert completion.token_ids.tolist() == undisturbed(7, 12, len(context))
        assert len(completion.logprobs) == len(completion.versions) == 12
        done.append(completion)
        if turn < len(observations):
            context = context + completion.token_ids + TokenIds([5] * observations[turn])
    return done


def counted(counts: RouterCounts) -> tuple[int, int, int, int, int]:
    return (
        counts.handoffs,
        counts.appended_turns,
        counts.readbacks,
        counts.failed_handoffs,
        counts.handoff_bytes // KIB,
    )


def test_a_turn_is_prefilled_on_one_worker_and_decoded_on_the_other() -> None:
    async def test(house: House) -> tuple[Completion, float, House]:
        house.add_shape("PD")
        [completion] = await play(house)
        return completion, now_s(), house

    completion, ended_s, house = in_house(test)
    assert completion.workers == (0, 1)
    assert completion.end is EndReason.STOP
    assert ended_s == pytest.approx(1.2)  # no token is drawn twice
    assert completion.computed_prompt_tokens == 3 + 1
    assert [engine.generated_tokens for engine in house.engines.values()] == [1, 11]
    assert counted(house.router.counts) == (1, 0, 0, 0, 3)
    assert (house.router.counts.turns, house.router.counts.continued) == (1, 0)


def test_the_prefill_workers_handle_is_given_back_at_the_first_tokens_of_the_decode() -> None:
    async def test(house: House) -> list[int]:
        house.add_shape("PD")
        turn = house.generate(job())
        left = []
        for at_s in (0.35, 0.45):  # handed over at 0.1 s, tokens are told each 0.3 s
            await asyncio.sleep(at_s - now_s())
            left.append(len(house.engines[0].kv.handles(now_s())))
        await turn
        return left

    assert in_house(test) == [1, 0]


def test_the_second_turn_computes_and_moves_only_what_is_new() -> None:
    async def test(house: House) -> tuple[list[Completion], RouterCounts]:
        house.add_shape("PD")
        return await play(house, 70), house.router.counts

    (_, second), counts = in_house(test)
    # The context has 3 + 12 + 70 = 85 tokens. The prefill worker holds 3, and 11 come back from the decode worker, which
    # holds 14: 71 are computed, and 71 go over. Then one token is left, the first that was drawn.
    assert second.workers == (0, 1)
    assert second.computed_prompt_tokens == 71 + 1
    assert counted(counts) == (2, 0, 1, 0, 3 + 11 + 71)


def test_without_readback_the_prefill_worker_computes_what_the_decode_worker_drew() -> None:
    async def test(house: House) -> tuple[list[Completion], RouterCounts]:
        house.add_shape("PD")
        return await play(house, 70), house.router.counts

    (_, second), counts = in_house(test, readback=False)
    assert second.computed_prompt_tokens == (85 - 3) + 1
    assert counted(counts) == (2, 0, 0, 0, 3 + 71)


@pytest.mark.parametrize(("observation", "appended"), [(63, True), (64, False)])
def test_a_decode_worker_appends_what_is_short(observation: int, appended: bool) -> None:
    async def test(house: House) -> tuple[list[Completion], RouterCounts]:
        house.add_shape("PD")
        return await play(house, observation), house.router.counts

    (_, second), counts = in_house(test)
    # It lacks the observation and the last token that it drew; 64 are allowed.
    if appended:
        assert second.workers == (1,)
        assert second.computed_prompt_tokens == 64
        assert counted(counts) == (1, 1, 0, 0, 3)
    else:
        assert second.workers == (0, 1)
        assert counted(counts) == (2, 0, 1, 0, 3 + 11 + 65)


def test_after_appended_turns_the_readback_of_an_earlier_turn_still_saves_its_part() -> None:
    async def test(house: House) -> tuple[list[Completion], RouterCounts]:
        house.add_shape("PD")
        return await play(house, 70, 5, 70), house.router.counts

    (_, _, third, fourth), counts = in_house(test)
    # Third: context 85 + 12 + 5 = 102, the decode worker holds 85 + 11 = 96.
    assert (third.workers, third.computed_prompt_tokens) == ((1,), 6)
    # Fourth: context 102 + 12 + 70 = 184. The prefill worker holds 85 and gets 96 - 85 back; the decode worker holds 113.
    assert (fourth.workers, fourth.computed_prompt_tokens) == ((0, 1), (184 - 96) + 1)
    assert counted(counts) == (3, 1, 2, 0, (3 + 11 + 71) + (11 + 71))


@pytest.mark.parametrize("letters", ["PD", "PPDD", "PDC", "DD", "PP", "C"])
def test_a_trajectory_that_ends_leaves_nothing_behind(letters: str) -> None:
    async def test(house: House) -> tuple[list[object], list[object]]:
        house.add_shape(letters)
        await play(house, 70, 5, 70)
        before = house.kv_left()
        house.router.release(TrajectoryId("mine"))
        house.router.release(TrajectoryId("mine"))
        await asyncio.sleep(1)
        return before, house.kv_left()

    before, after = in_house(test)
    assert before
    assert after == []


def test_hand_offs_stick_to_the_workers_that_hold_the_prefix() -> None:
    async def test(house: House) -> list[tuple[int, ...]]:
        house.add_shape("PPDD")
        for n in range(3):  # whoever comes meanwhile
            house.generate(job(f"t{n}"))
        await asyncio.sleep(0.01)
        return [one.workers for one in await play(house, 70, 70)]

    # Three others are on workers 0, 1, 0 and 2, 3, 2.
    assert in_house(test) == [(1, 3)] * 3


@pytest.mark.parametrize(("letters", "worker"), [("DD", 0), ("PP", 0)])
def test_workers_of_one_side_alone_serve_whole_turns(letters: str, worker: int) -> None:
    async def test(house: House) -> list[Completion]:
        house.add_shape(letters)
        return await play(house, 70)

    first, second = in_house(test)
    assert first.workers == second.workers == (worker,)
    assert (first.computed_prompt_tokens, second.computed_prompt_tokens) == (3, 71)


def test_a_prefill_that_draws_the_stop_token_is_the_whole_turn() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("PD", turn_tokens=1)
        return await house.router.generate(job()), house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 1)
    assert (completion.workers, completion.end) == ((0,), EndReason.STOP)
    assert counted(house.router.counts) == (0, 0, 0, 0, 0)


def test_a_turn_of_one_token_is_complete_after_its_prefill() -> None:
    async def test(house: House) -> tuple[Completion, list[object]]:
        house.add_shape("PD")
        completion = await house.router.generate(job(tokens=1))
        house.router.release(TrajectoryId("t0"))
        await asyncio.sleep(1)
        return completion, house.kv_left()

    completion, left = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)[:1]
    assert (completion.workers, completion.end) == ((0,), EndReason.LENGTH)
    assert left == []


@pytest.mark.parametrize(("mode", "computed"), [(LoadMode.RECOMPUTE, 3 + 4), (LoadMode.KEEP_KV, 3 + 1)])
def test_weights_loaded_between_prefill_and_decode(mode: LoadMode, computed: int) -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("P")
        house.add(1, role=Role.DECODE, engine=SlowToTake)
        turn = house.generate(job())
        await asyncio.sleep(0.5)
        await house.router.load(fake_manifest(1), mode)
        return await turn, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.versions == Versions.of([(0, 1), (1, 11)])
    # KV of old weights is no use to who recomputes; that is no fault of anybody.
    assert completion.computed_prompt_tokens == computed
    assert counted(house.router.counts) == (1, 0, 0, 0, 3)


def test_new_weights_that_void_kv_are_noticed() -> None:
    async def test(house: House) -> tuple[Completion, Completion, House, list[object]]:
        house.add_shape("PD")
        [first] = await play(house)
        await house.router.load(fake_manifest(1), LoadMode.RECOMPUTE)
        await asyncio.sleep(1)
        left = house.kv_left()
        context = PROMPT + first.token_ids + TokenIds([5] * 5)
        return first, await house.router.generate(job("mine", turn=1, context=context)), house, left

    _, second, house, left = in_house(test)
    assert left == []  # the handle for the readback was given back: nobody would take it
    # Short, but nothing is held any more: 20 tokens are computed, by the prefill worker.
    assert (second.workers, second.computed_prompt_tokens) == ((0, 1), 20 + 1)
    assert counted(house.router.counts) == (2, 0, 0, 0, 3 + 20)


def test_weights_that_keep_kv_change_nothing() -> None:
    async def test(house: House) -> tuple[list[Completion], House]:
        house.add_shape("PD", load_s=0.01)

        async def load() -> None:
            await asyncio.sleep(1.5)  # in the second turn
            await house.router.load(fake_manifest(1), LoadMode.KEEP_KV)

        house.nursery.spawn(load(), name="load")
        return await play(house, 5, 70), house

    (_, second, third), house = in_house(test)
    assert second.versions == Versions.of([(0, 3), (1, 9)])
    # Third: context 20 + 12 + 70 = 102; 14 tokens are on the prefill worker with the readback of the first turn.
    assert (second.computed_prompt_tokens, third.computed_prompt_tokens) == (6, (102 - 14) + 1)
    assert counted(house.router.counts)[:4] == (2, 1, 1, 0)
