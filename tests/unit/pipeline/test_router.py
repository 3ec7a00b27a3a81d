from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from pearl.errors import EngineError, WorkerLost
from pearl.pipeline.concurrency import GuardExpired, Nursery, guard
from pearl.pipeline.router import CONTROL_TIMEOUT_S, STICKY_SLACK, Router, TurnJob
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import LoadMode, LoadReport, Manifest
from pearl.records.turn import Chunk, Completion, EndReason, KvHandle, Sampling, TurnRequest, Versions
from pearl.testing.engine import FakeEngine, FakeEngineConfig, fake_token
from pearl.testing.mailbox import Mailbox
from pearl.testing.tokens import FAKE_STOP, TurnStarts
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import fake_manifest

T = TypeVar("T")

PROMPT = TokenIds([11, 12, 13])
SILENCE_S = 100.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


def job(trajectory: str = "t0", *, seed: int = 7, turn: int = 0, tokens: int = 20, min_version: int = 0) -> TurnJob:
    return TurnJob(
        trajectory=TrajectoryId(trajectory),
        turn=turn,
        context=PROMPT,
        sampling=Sampling(seed=seed, stop_token_ids=(FAKE_STOP,)),
        max_new_tokens=tokens,
        min_version=WeightVersion(min_version),
    )


def undisturbed(seed: int, count: int) -> list[int]:
    """What any engine draws behind `PROMPT`: a turn of `count` tokens, the last of them the stop token."""
    return [fake_token(seed, len(PROMPT) + n) for n in range(count - 1)] + [FAKE_STOP]


@dataclass
class House:
    """A router over fake engines of 10 tokens a second; a turn has 12 tokens."""

    nursery: Nursery
    max_attempts: int = 8
    lost: list[tuple[int, str]] = field(default_factory=list)
    engines: dict[int, FakeEngine] = field(default_factory=dict)
    router: Router = field(init=False)
    _starts: TurnStarts = field(default_factory=TurnStarts)

    def __post_init__(self) -> None:
        self.router = Router(
            self.nursery,
            self.max_attempts,
            lambda worker, detail: self.lost.append((worker, detail)),
            load_timeout_s=50,
            silence_s=SILENCE_S,
        )

    def add(self, worker: int, *, version: int = 0, **config: float) -> FakeEngine:
        settings = FakeEngineConfig(
            token_s=0.1, turn_tokens=12, progress_interval_s=0.3, version=version, load_s=config.get("load_s", 0.0)
        )
        engine = FakeEngine(settings, worker=worker)
        engine.share_turn_starts(self._starts)
        self.engines[worker] = engine
        self.router.admit(WorkerId(worker), engine, WeightVersion(version))
        return engine

    def generate(self, one: TurnJob) -> asyncio.Task[Completion]:
        return self.nursery.spawn(self.router.generate(one), name=f"turn of {one.trajectory}")


def in_house(test: Callable[[House], Awaitable[T]], **options: int) -> T:
    async def work() -> T:
        async with Nursery() as nursery:
            return await test(House(nursery, **options))

    return run_virtual(work())


# --- one turn, undisturbed -------------------------------------------------------------------------------------------


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


# --- where it goes ---------------------------------------------------------------------------------------------------


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


# --- interruption and loss -------------------------------------------------------------------------------------------


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


# --- workers that hang -----------------------------------------------------------------------------------------------


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


# --- loading weights -------------------------------------------------------------------------------------------------


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


# --- what arrives ----------------------------------------------------------------------------------------------------


class Puppet:
    """An engine that says what the test says."""

    def __init__(self) -> None:
        self.chunks: Mailbox[Chunk] = Mailbox()
        self.interrupted: list[RequestId] = []
        self._requests: Mailbox[TurnRequest] = Mailbox()

    async def next_request(self) -> TurnRequest:
        (request,) = await self._requests.take()
        return request

    def say(
        self, request: TurnRequest, ids: list[int], *, offset: int = 0, end: EndReason | None = None, error: str = ""
    ) -> None:
        self.chunks.put(
            Chunk(
                request=request.id,
                start=len(request.context) + offset,
                token_ids=TokenIds(ids),
                logprobs=Floats([-token / 8 for token in ids]),
                versions=Versions.of([(0, len(ids))]),
                end=end,
                error=error or None,
            )
        )

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        for request in requests:
            self._requests.put(request)

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        self.interrupted += ids

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None: ...

    async def info(self) -> object:
        raise NotImplementedError

    async def stats(self) -> object:
        raise NotImplementedError

    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        raise NotImplementedError

    async def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
        while True:
            yield await self.chunks.take()


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
