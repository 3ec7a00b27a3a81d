"""Times below are multiples of 1/4 s, exact in binary floating point."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenCount, TokenIds, Tokens
from pearl.records.turn import Chunk, EndReason, Sampling, TurnRequest
from pearl.testing.generation import FakeEngineConfig, Generation
from pearl.testing.kv import FakeKv
from pearl.testing.tokens import FAKE_STOP, fake_draws, fake_token
from pearl.testing.virtual_time import run_virtual

STOP, LENGTH, INTERRUPTED = EndReason.STOP, EndReason.LENGTH, EndReason.INTERRUPTED
CONTEXT = TokenIds([5] * 10)


def request(
    name: str = "r",
    *,
    context: Tokens = CONTEXT,
    max_new_tokens: int = 100,
    stops: tuple[int, ...] = (FAKE_STOP,),
    seed: int = 1,
    trajectory: str | None = None,
    turn: int = 0,
) -> TurnRequest:
    return TurnRequest(
        id=RequestId(name),
        trajectory=TrajectoryId(trajectory or name),
        turn=turn,
        context=context,
        sampling=Sampling(seed=seed, stop_token_ids=stops),
        max_new_tokens=max_new_tokens,
        min_version=WeightVersion(0),
    )


class World:
    """A generation, and what it delivers, with the times."""

    def __init__(self, config: FakeEngineConfig, output_tokens: Callable[[TurnRequest], int] | None = None) -> None:
        self.kv = FakeKv(worker=WorkerId(0), model_hash="m", capacity_tokens=10**6, bytes_per_token=1, ttl_s=60)
        self.chunks: list[tuple[float, Chunk]] = []
        self.generation = Generation(config, self.kv, output_tokens or (lambda _: 6), self._deliver)

    def _deliver(self, request: TurnRequest, chunk: Chunk) -> None:
        self.chunks.append((asyncio.get_running_loop().time(), chunk))

    def begin(self, *requests: TurnRequest) -> None:
        now_s = self.generation.settle()
        for one in requests:
            self.generation.begin(one, now_s)
        self.generation.schedule(now_s)

    def interrupt(self, *names: str) -> None:
        self.generation.interrupt([RequestId(name) for name in names], self.generation.settle())

    def timeline(self, name: str = "r") -> list[tuple[float, int, int, EndReason | None]]:
        """`(time, start, tokens, end)` of each chunk of a request."""
        return [(at_s, c.start, len(c.token_ids), c.end) for at_s, c in self.chunks if c.request == name]


def play(work: Callable[[], Coroutine[object, object, None]]) -> None:
    run_virtual(work())


SLOW = FakeEngineConfig(token_s=0.25, progress_interval_s=0.5)


def test_progress_comes_at_its_interval_and_the_end_at_once() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0.25, progress_interval_s=0.75))
        world.begin(request())
        await asyncio.sleep(10)
        # 6 tokens take 1.5 s.
        assert world.timeline() == [(0.75, 10, 3, None), (1.5, 13, 3, STOP)]
        assert len(world.generation) == 0

    play(check)


def test_tokens_are_those_of_the_counter_and_the_last_one_stops() -> None:
    async def check() -> None:
        world = World(SLOW)
        world.begin(request(seed=9))
        await asyncio.sleep(10)
        ids = [token for _, chunk in world.chunks for token in chunk.token_ids.tolist()]  # type: ignore[attr-defined]
        logprobs = [number for _, chunk in world.chunks for number in chunk.logprobs.tolist()]
        assert ids == [fake_token(9, position) for position in range(10, 15)] + [FAKE_STOP]
        assert logprobs == fake_draws(9, 10, 6)[1].tolist()

    play(check)


def test_each_request_has_a_clock_of_its_own() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0.25, progress_interval_s=100))
        world.begin(request("a"))
        await asyncio.sleep(0.5)
        world.begin(request("b"), request("c", max_new_tokens=1))
        await asyncio.sleep(10)
        assert world.timeline("a") == [(1.5, 10, 6, STOP)]
        assert world.timeline("b") == [(2.0, 10, 6, STOP)]
        assert world.timeline("c") == [(0.75, 10, 1, LENGTH)]
        # From 0 to 2.0 there was something to do: 8 iterations of 0.25 s.
        assert (world.generation.busy_s, world.generation.iterations) == (2.0, 8)

    play(check)


def test_time_that_costs_nothing_completes_at_once() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0))
        world.begin(request("a"), request("b", max_new_tokens=4))
        assert world.timeline("a") == [(0, 10, 6, STOP)]
        assert world.timeline("b") == [(0, 10, 4, LENGTH)]
        assert world.generation.iterations == 10
        chunk = world.chunks[0][1]
        assert isinstance(chunk.token_ids, TokenIds)
        assert chunk.token_ids.tolist() == [fake_token(1, position) for position in range(10, 15)] + [FAKE_STOP]
        assert [(run.version, run.tokens) for run in chunk.versions.runs] == [(0, 6)]

    play(check)


@pytest.mark.parametrize("at_s", [0.0, 0.2, 1.0, 1.1, 1.25])
def test_an_interrupt_delivers_every_whole_token(at_s: float) -> None:
    async def check() -> None:
        world = World(SLOW)
        world.begin(request())
        await asyncio.sleep(at_s)
        world.interrupt("nobody", "r", "r")
        await asyncio.sleep(10)
        chunks = world.timeline()
        assert sum(tokens for _, _, tokens, _ in chunks) == int(at_s * 4)
        assert [end for *_, end in chunks if end] == [INTERRUPTED]
        assert chunks[-1][0] == at_s

    play(check)


def test_a_request_that_is_complete_cannot_be_interrupted() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0.25, progress_interval_s=100))
        world.begin(request())
        # At its end, before its timer: the interrupt was scheduled first.
        asyncio.get_running_loop().call_at(1.5, world.interrupt, "r")
        await asyncio.sleep(10)
        assert world.timeline() == [(1.5, 10, 6, STOP)]

    play(check)


def test_an_interrupt_before_the_first_token_has_computed_nothing() -> None:
    async def check() -> None:
        world = World(SLOW)
        world.begin(request())
        world.interrupt("r")
        assert [chunk.computed_prompt_tokens for _, chunk in world.chunks] == [0]
        assert world.kv.used_tokens == 0

    play(check)


def test_what_was_interrupted_leaves_no_end_behind() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0.25, progress_interval_s=100))
        world.begin(request(max_new_tokens=5))
        await asyncio.sleep(1)
        world.interrupt("r")
        world.begin(request(max_new_tokens=5))
        await asyncio.sleep(10)
        assert world.timeline() == [(1.0, 10, 4, INTERRUPTED), (2.25, 10, 5, LENGTH)]

    play(check)


def test_rounding_loses_no_token() -> None:
    async def check() -> None:
        # 0.3 / 0.1 is a little less than 3 in floating point.
        world = World(FakeEngineConfig(token_s=0.1, progress_interval_s=100))
        world.begin(request())
        await asyncio.sleep(0.3)
        world.interrupt("r")
        assert [len(chunk.token_ids) for _, chunk in world.chunks] == [3]
        assert world.generation.iterations == 3

    play(check)


def test_progress_without_a_token_is_not_reported() -> None:
    async def check() -> None:
        world = World(SLOW)
        world.begin(request("a"))
        await asyncio.sleep(0.4)
        world.begin(request("b"))
        await asyncio.sleep(0.2)
        assert [chunk.request for _, chunk in world.chunks] == ["a"]

    play(check)


def test_a_turn_as_long_as_allowed_still_stops() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0))
        world.begin(request("a", max_new_tokens=6), request("b", max_new_tokens=5))
        assert [chunk.end for _, chunk in world.chunks] == [STOP, LENGTH]

    play(check)


def test_a_pause_shifts_what_comes_after() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0.25, progress_interval_s=100))
        world.begin(request())
        await asyncio.sleep(0.6)
        world.generation.pause()
        await asyncio.sleep(0.5)
        world.generation.pause()
        await asyncio.sleep(0.5)
        assert not world.generation.resume()
        assert world.generation.paused
        await asyncio.sleep(1)
        assert world.generation.resume()
        await asyncio.sleep(10)
        [(at_s, start, tokens, end)] = world.timeline()
        assert (start, tokens, end) == (10, 6, STOP)
        assert at_s == pytest.approx(1.5 + 2.0)
        assert world.generation.busy_s == pytest.approx(1.5)

    play(check)


def test_versions_change_between_two_tokens() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0.25, progress_interval_s=100))
        world.begin(request())
        await asyncio.sleep(0.6)
        world.generation.pause()
        world.generation.version = WeightVersion(7)
        world.generation.resume()
        await asyncio.sleep(10)
        [(_, chunk)] = world.chunks
        assert [(run.version, run.tokens) for run in chunk.versions.runs] == [(0, 2), (7, 4)]

    play(check)


def test_a_turn_keeps_its_length_wherever_it_is_continued() -> None:
    async def check() -> None:
        here, there = World(SLOW), World(SLOW)
        there.generation.turn_starts = here.generation.turn_starts
        here.begin(request())
        await asyncio.sleep(1)
        here.interrupt("r")
        there.begin(request("r2", context=TokenIds([5] * 14), trajectory="r"))
        await asyncio.sleep(10)
        assert [tokens for _, _, tokens, _ in there.timeline("r2")] == [2]
        assert there.timeline("r2")[-1] == (1.5, 14, 2, STOP)

    play(check)


def test_the_length_of_a_turn_is_asked_for() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0), lambda one: 3 + one.turn)
        world.begin(request("a"), request("b", turn=4), request("c", stops=(), max_new_tokens=20))
        assert [len(chunk.token_ids) for _, chunk in world.chunks] == [3, 7, 20]

    play(check)


def test_a_stop_token_that_is_drawn_ends_the_turn() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0), lambda _: 50)
        drawn = fake_draws(1, 10, 50)[0].tolist()
        stops = (drawn[20], drawn[4])
        world.begin(request(stops=stops))
        [(_, chunk)] = world.chunks
        count = min(drawn.index(stop) for stop in stops) + 1
        assert isinstance(chunk.token_ids, TokenIds)
        assert chunk.token_ids.tolist() == drawn[:count]
        assert chunk.end is STOP

    play(check)


def test_counts_in_counts_out() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0))
        world.begin(request(context=TokenCount(10)), request("s", context=TokenCount(10), max_new_tokens=2))
        assert [chunk.token_ids for _, chunk in world.chunks] == [TokenCount(6), TokenCount(2)]
        assert [len(chunk.logprobs) for _, chunk in world.chunks] == [6, 2]
        assert [chunk.end for _, chunk in world.chunks] == [STOP, LENGTH]

    play(check)


def test_a_context_is_computed_once() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0))
        world.begin(request("a", trajectory="t"))
        # 10 + 6 tokens, of which the last was never computed: 15 are cached.
        world.begin(request("b", trajectory="t", context=TokenIds([5] * 20), turn=1))
        world.begin(request("c", trajectory="other"))
        assert [chunk.computed_prompt_tokens for _, chunk in world.chunks] == [10, 5, 10]
        assert world.generation.computed_tokens == 25
        # The same context again: one token must be computed to draw from.
        world.begin(request("d", trajectory="other"))
        assert world.chunks[-1][1].computed_prompt_tokens == 1

    play(check)


def test_recomputing_counts_what_was_known() -> None:
    async def check() -> None:
        world = World(SLOW)
        world.begin(request("a"), request("b", context=TokenIds([5] * 3)))
        await asyncio.sleep(0.6)
        world.generation.pause()
        assert world.generation.recompute() == (10 + 2) + (3 + 2)
        world.generation.resume()
        await asyncio.sleep(10)
        ends = {chunk.request: chunk.computed_prompt_tokens for _, chunk in world.chunks if chunk.end}
        assert ends == {"a": 10 + 12, "b": 3 + 5}

    play(check)


def test_kv_tokens_grow_with_the_requests() -> None:
    async def check() -> None:
        world = World(SLOW)
        world.begin(request("a"), request("b"))
        await asyncio.sleep(0.5)
        world.generation.settle()
        assert world.generation.kv_tokens == 2 * 12
        await asyncio.sleep(10)
        assert (world.generation.kv_tokens, world.kv.used_tokens) == (0, 2 * 15)

    play(check)


def test_dropped_requests_say_nothing() -> None:
    async def check() -> None:
        world = World(SLOW)
        world.begin(request())
        await asyncio.sleep(0.3)
        world.generation.drop()
        await asyncio.sleep(10)
        assert world.chunks == []
        assert world.generation.ids == []

    play(check)


def test_thousands_of_requests_in_one_engine_all_end_in_time() -> None:
    async def check() -> None:
        world = World(FakeEngineConfig(token_s=0.25, progress_interval_s=1), lambda one: 1 + int(one.trajectory) % 40)
        world.begin(*[request(str(n)) for n in range(2_000)])
        await asyncio.sleep(100)
        ends = {chunk.request: at_s for at_s, chunk in world.chunks if chunk.end}
        assert ends == {str(n): pytest.approx(0.25 * (1 + n % 40)) for n in range(2_000)}

    play(check)
