"""Workers that drain and take other roles while turns go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pearl.core.state import Role
from pearl.pipeline.router import DRAIN_TIMEOUT_S
from pearl.records.ids import RequestId, TrajectoryId, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.training import LoadMode
from pearl.records.turn import Completion, EndReason
from pearl.testing.engine import FakeEngine
from pearl.testing.weights import fake_manifest
from tests.unit.pipeline._router import PROMPT, House, SlowToTake, in_house, job, now_s, undisturbed


def test_what_a_draining_worker_had_goes_on_elsewhere() -> None:
    async def test(house: House) -> tuple[Completion, House, bool, float]:
        house.add_shape("CC")
        turn = house.generate(job())
        await asyncio.sleep(0.55)
        drained = await house.router.drain(WorkerId(0))
        drained_s = now_s()
        return await turn, house, drained, drained_s

    completion, house, drained, drained_s = in_house(test)
    assert (drained, drained_s) == (True, pytest.approx(0.55))
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == (0, 1)
    assert [engine.generated_tokens for engine in house.engines.values()] == [5, 7]  # not a token twice
    assert not house.engines[0].busy
    assert (house.lost, house.router.counts.worker_losses) == ([], 0)


def test_the_kv_of_a_draining_decode_worker_helps_the_next_prefill() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("PDD")
        turn = house.generate(job())
        await asyncio.sleep(0.35)
        assert await house.router.drain(WorkerId(1))
        return await turn, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == (0, 1, 0, 2)
    # Interrupted with a context of 3 + 3, of which the last token's KV is missing: that one is computed by the prefill
    # worker, and the one it draws by the decode worker.
    assert completion.computed_prompt_tokens == (3 + 1) + (1 + 1)
    assert house.router.counts.readbacks == 1


@pytest.mark.parametrize("at_s", [0.05, 0.55])
def test_the_only_decode_worker_may_drain(at_s: float) -> None:
    async def test(house: House) -> Completion:
        house.add_shape("PD")
        turn = house.generate(job())
        await asyncio.sleep(at_s)
        assert await house.router.drain(WorkerId(1))
        return await turn

    completion = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == ((0, 0) if at_s == 0.05 else (0, 1, 0))


def test_a_worker_that_changed_its_role_meanwhile_is_handed_nothing() -> None:
    async def test(house: House) -> Completion:
        house.add_shape("PDD")
        turn = house.generate(job())
        await asyncio.sleep(0.05)
        assert await house.router.drain(WorkerId(1))
        house.router.set_role(WorkerId(1), Role.PREFILL)
        return await turn

    completion = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == (0, 0, 2)


def test_a_request_that_was_not_sent_yet_goes_elsewhere_at_once() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("CC")
        await asyncio.sleep(0)  # the senders wait
        turn = house.generate(job())
        await asyncio.sleep(0)
        assert await house.router.drain(WorkerId(0))
        return await turn, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == (0, 1)
    assert house.engines[0].delivered == []


def test_a_drain_waits_for_requests_that_were_given_up() -> None:
    async def test(house: House) -> bool:
        engine = house.add(0, engine=SlowToTake)
        turn = house.generate(job())
        await asyncio.sleep(0.5)
        turn.cancel()
        await asyncio.sleep(0)
        await house.router.drain(WorkerId(0))
        return engine.busy

    assert in_house(test) is False


def test_a_drained_worker_gets_nothing_until_it_has_a_role_again() -> None:
    async def test(house: House) -> tuple[Completion, float]:
        house.add(0)
        assert await house.router.drain(WorkerId(0))
        assert await house.router.drain(WorkerId(0))
        turn = house.generate(job())
        await asyncio.sleep(50)
        house.router.set_role(WorkerId(0), Role.COLOCATED)
        return await turn, now_s()

    completion, ended_s = in_house(test)
    assert completion.workers == (0,)
    assert ended_s == pytest.approx(51.2)


def test_a_worker_that_does_not_drain_in_time_is_lost() -> None:
    async def test(house: House) -> tuple[House, bool, float]:
        house.add(0).hang(mute=False)
        house.generate(job())
        await asyncio.sleep(0.5)
        return house, await house.router.drain(WorkerId(0)), now_s()

    house, drained, ended_s = in_house(test)
    assert (drained, ended_s) == (False, DRAIN_TIMEOUT_S + 0.5)
    assert house.lost == [(0, f"worker 0: drain: no answer within {DRAIN_TIMEOUT_S:g} s")]


@pytest.mark.parametrize("load_first", [True, False])
def test_a_load_under_way_does_not_count_against_the_time_of_a_drain(
    load_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pearl.pipeline.router.DRAIN_TIMEOUT_S", 10.0)

    class AnswersBehindTheLoad(FakeEngine):
        """As an engine does that takes one command after the other."""

        async def interrupt(self, ids: Sequence[RequestId]) -> None:
            asyncio.get_running_loop().call_later(40, self._interrupt, ids)

    async def test(house: House) -> tuple[House, bool, float]:
        house.add(0, load_s=45, engine=AnswersBehindTheLoad)
        house.generate(job())
        await asyncio.sleep(0.5)
        load = house.router.load(fake_manifest(1), LoadMode.KEEP_KV)
        if load_first:
            house.nursery.spawn(load, "load")
            await asyncio.sleep(0)
            drain = house.router.drain(WorkerId(0))
        else:
            drain = house.nursery.spawn(house.router.drain(WorkerId(0)), "drain")
            await asyncio.sleep(0)
            house.nursery.spawn(load, "load")
        return house, await drain, now_s()

    house, drained, ended_s = in_house(test)
    assert (drained, ended_s) == (True, pytest.approx(40.5))
    assert house.lost == []


def test_a_worker_that_dies_while_it_drains_is_lost() -> None:
    async def test(house: House) -> tuple[House, bool]:
        engine = house.add(0)
        engine.hang(mute=False)
        house.generate(job())
        await asyncio.sleep(0.5)
        asyncio.get_running_loop().call_later(1, engine.kill)
        return house, await house.router.drain(WorkerId(0))

    house, drained = in_house(test)
    assert not drained
    assert house.lost == [(0, "worker 0: killed")]


def test_nobody_is_not_drained() -> None:
    async def test(house: House) -> bool:
        house.router.set_role(WorkerId(7), Role.DECODE)
        return await house.router.drain(WorkerId(7))

    assert in_house(test) is False


def test_a_prefix_stays_where_it_is_when_the_role_changes() -> None:
    async def test(house: House) -> tuple[list[Completion], list[object], int]:
        house.add_shape("DP")
        first = await house.router.generate(job())  # 14 tokens are on worker 0, 3 on worker 1
        for worker, role in ((0, Role.PREFILL), (1, Role.DECODE)):
            assert await house.router.drain(WorkerId(worker))
            house.router.set_role(WorkerId(worker), role)
            assert house.router.role(WorkerId(worker)) is role
        context = PROMPT + first.token_ids + TokenIds([5] * 70)
        second = await house.router.generate(job(turn=1, context=context))
        house.router.release(TrajectoryId("t0"))
        await asyncio.sleep(1)
        return [first, second], house.kv_left(), house.router.counts.readbacks

    (first, second), left, readbacks = in_house(test)
    assert first.workers == (1, 0)
    # What would come back to the prefill worker is on it already.
    assert readbacks == 0
    assert (second.workers, second.computed_prompt_tokens) == ((0, 1), 71 + 1)
    assert second.end is EndReason.STOP
    assert left == []


def test_a_worker_that_leaves_is_no_loss_and_its_turns_go_on() -> None:
    async def test(house: House) -> tuple[Completion, House]:
        house.add_shape("CC")
        turn = house.generate(job())
        await asyncio.sleep(0.65)
        house.router.leave(WorkerId(0))
        house.router.leave(WorkerId(7))  # nobody
        assert house.router.workers == (1,)
        return await turn, house

    completion, house = in_house(test)
    assert completion.token_ids.tolist() == undisturbed(7, 12)
    assert completion.workers == (0, 1)
    assert (house.lost, house.router.counts.worker_losses) == ([], 0)


def test_the_bound_of_append_prefill_can_change_while_turns_go_on() -> None:
    async def test(house: House) -> House:
        house.add_shape("PD")
        assert house.router.append_tokens == 64
        first = await house.generate(job())
        context = TokenIds([*PROMPT.tolist(), *first.token_ids.tolist(), 5, 6, 7])
        house.router.append_tokens = 2
        await house.generate(job(turn=1, context=context))
        assert house.router.counts.appended_turns == 0
        house.router.append_tokens = 100
        again = TokenIds([*context.tolist(), *undisturbed(7, 12, behind=len(context)), 8])
        await house.generate(job(turn=2, context=again))
        return house

    house = in_house(test)
    assert house.router.counts.appended_turns == 1
