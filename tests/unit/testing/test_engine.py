"""What the fake engine adds to the contract: faults, ledgers, waits. (Its streams: `test_generation.py`.)"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace

import pytest

from pearl.errors import EngineError, WeightsError, WorkerLost
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import TokenIds, Tokens
from pearl.records.training import LoadMode
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, Sampling, TurnRequest
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import FakeWeightStore, fake_manifest

SLOW = FakeEngineConfig(token_s=0.25, progress_interval_s=0.5, turn_tokens=8)
STOP, FAILED, INTERRUPTED = EndReason.STOP, EndReason.FAILED, EndReason.INTERRUPTED


def request(
    name: str,
    *,
    context: Tokens | None = None,
    max_new_tokens: int = 100,
    min_version: int = 0,
    mode: Mode = Mode.COLOCATED,
    kv: KvHandle | None = None,
    export_kv: bool = False,
) -> TurnRequest:
    return TurnRequest(
        id=RequestId(name),
        trajectory=TrajectoryId(f"of {name}"),
        turn=0,
        context=TokenIds([5] * 10) if context is None else context,
        sampling=Sampling(seed=1, stop_token_ids=(0,)),
        max_new_tokens=max_new_tokens,
        min_version=WeightVersion(min_version),
        mode=mode,
        kv=kv,
        export_kv=export_kv,
    )


class Reader:
    """Collects what an engine delivers, until it dies."""

    def __init__(self, engine: FakeEngine) -> None:
        self.batches: list[tuple[float, tuple[Chunk, ...]]] = []
        self.error: WorkerLost | None = None
        self.task = asyncio.create_task(self._read(engine))

    async def _read(self, engine: FakeEngine) -> None:
        try:
            async for batch in engine.events():
                self.batches.append((asyncio.get_running_loop().time(), batch))
        except WorkerLost as error:
            self.error = error

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for _, batch in self.batches for chunk in batch]

    def ends(self) -> dict[str, EndReason]:
        return {chunk.request: chunk.end for chunk in self.chunks if chunk.end}

    def tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


def play(work: Callable[[], Coroutine[object, object, None]]) -> None:
    run_virtual(work())


async def every_call(engine: FakeEngine) -> list[Awaitable[object]]:
    return [
        engine.info(),
        engine.submit([request("late")]),
        engine.interrupt([RequestId("r")]),
        engine.release(TrajectoryId("t")),
        engine.load(fake_manifest(1), LoadMode.KEEP_KV),
        engine.stats(),
    ]


def test_all_that_is_ready_comes_in_one_batch() -> None:
    async def check() -> None:
        engine = FakeEngine()
        await engine.submit([request("a"), request("b")])
        await engine.submit([request("c")])
        reader = Reader(engine)
        await asyncio.sleep(1)
        assert [len(batch) for _, batch in reader.batches] == [3]

    play(check)


def test_the_ledger_holds_what_was_delivered() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        reader = Reader(engine)
        await engine.submit([request("a"), request("b", max_new_tokens=3)])
        await asyncio.sleep(10)
        assert [one.chunk for one in engine.delivered] == reader.chunks
        assert [one.at_s for one in engine.delivered] == [at_s for at_s, batch in reader.batches for _ in batch]
        assert {one.trajectory for one in engine.delivered} == {"of a", "of b"}
        assert engine.delivered_tokens == engine.generated_tokens == 11
        assert engine.lost_tokens == 0

    play(check)


def test_a_kill_loses_what_the_last_delta_did_not_carry() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        reader = Reader(engine)
        told: list[str] = []
        engine.on_death.append(told.append)
        await engine.submit([request("a"), request("b")])
        # At 1.8 s each has 7 tokens, 6 of which the delta of 1.5 s carried.
        await asyncio.sleep(1.8)
        engine.kill("out of memory")
        engine.kill("twice")
        await asyncio.sleep(10)
        assert reader.tokens() == 12
        assert (engine.generated_tokens, engine.lost_tokens) == (14, 2)
        assert str(reader.error) == "worker 0: out of memory"
        assert reader.ends() == {}
        assert told == ["out of memory"]
        assert engine.gone

    play(check)


def test_a_kill_loses_what_nobody_has_read() -> None:
    async def check() -> None:
        engine = FakeEngine()
        await engine.submit([request("a")])
        engine.kill()
        reader = Reader(engine)
        await asyncio.sleep(1)
        assert (reader.chunks, engine.lost_tokens) == ([], 8)
        assert reader.error is not None

    play(check)


def test_every_call_to_the_dead_says_so() -> None:
    async def check() -> None:
        engine = FakeEngine(worker=3)
        engine.kill()
        for call in await every_call(engine):
            with pytest.raises(WorkerLost, match="worker 3: killed"):
                await call

    play(check)


def test_a_mute_hang_answers_nothing_until_it_is_over() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        reader = Reader(engine)
        await engine.submit([request("r")])
        await asyncio.sleep(0.6)
        engine.hang()
        engine.hang()
        calls = [asyncio.ensure_future(call) for call in await every_call(engine)]
        await asyncio.sleep(100)
        assert not any(call.done() for call in calls)
        assert reader.tokens() == 2
        engine.unhang()
        engine.unhang()
        await asyncio.gather(*calls)
        await asyncio.sleep(10)
        assert reader.ends() == {"r": INTERRUPTED, "late": STOP}

    play(check)


def test_a_hang_ends_with_the_death() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        engine.hang()
        calls = [asyncio.ensure_future(call) for call in await every_call(engine)]
        await asyncio.sleep(1)
        engine.kill()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, WorkerLost)
        engine.unhang()
        engine.hang()
        with pytest.raises(WorkerLost):
            await engine.stats()

    play(check)


def test_a_hang_that_answers_produces_nothing() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        reader = Reader(engine)
        await engine.submit([request("a")])
        engine.hang(mute=False)
        await engine.submit([request("b")])
        await engine.interrupt([RequestId("a")])
        stats = await engine.stats()
        assert (stats.running, stats.waiting, engine.busy) == (1, 1, True)
        await asyncio.sleep(10)
        assert reader.chunks == []
        engine.unhang()
        await asyncio.sleep(10)
        assert reader.ends() == {"a": STOP, "b": STOP}
        assert not engine.busy

    play(check)


def test_the_next_requests_can_be_made_to_fail() -> None:
    async def check() -> None:
        engine = FakeEngine()
        reader = Reader(engine)
        engine.fail_next(2)
        await engine.submit([request(name) for name in "abc"])
        await asyncio.sleep(1)
        assert reader.ends() == {"a": FAILED, "b": FAILED, "c": STOP}
        assert reader.chunks[0].error == "worker 0: request a: made to fail"

    play(check)


def test_a_request_id_is_taken_once() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        await engine.submit([request("a")])
        with pytest.raises(EngineError, match="request a is here already"):
            await engine.submit([request("b"), request("a")])
        assert (await engine.stats()).running == 1

    play(check)


def test_requests_wait_while_weights_are_loaded() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        engine = FakeEngine(replace(SLOW, load_s=2.0))
        reader = Reader(engine)
        await engine.submit([request("before")])
        await asyncio.sleep(1)
        load = asyncio.create_task(engine.load(fake_manifest(4), LoadMode.KEEP_KV))
        await asyncio.sleep(1)
        await engine.submit([request("meanwhile", min_version=4), request("withdrawn")])
        assert (await engine.stats()).waiting == 2
        await engine.interrupt([RequestId("withdrawn")])
        report = await load
        assert (loop.time(), report.load_s, report.version, report.recomputed_tokens) == (3, 2, 4, 0)
        await asyncio.sleep(10)
        assert reader.ends() == {"withdrawn": INTERRUPTED, "before": STOP, "meanwhile": STOP}
        ended_s = {chunk.request: at_s for at_s, batch in reader.batches for chunk in batch if chunk.end}
        # 8 tokens take 2 s: 1 s before the load and 1 s behind it; or 2 s behind it.
        assert (ended_s["before"], ended_s["meanwhile"]) == (4, 5)
        assert engine.loads == [(4, LoadMode.KEEP_KV)]

    play(check)


def test_a_death_ends_a_load() -> None:
    async def check() -> None:
        engine = FakeEngine(FakeEngineConfig(load_s=2.0))
        load = asyncio.create_task(engine.load(fake_manifest(1), LoadMode.KEEP_KV))
        await asyncio.sleep(1)
        engine.kill()
        with pytest.raises(WorkerLost):
            await load
        assert (engine.version, engine.loads) == (0, [])

    play(check)


def test_a_load_that_is_given_up_lets_the_engine_go_on() -> None:
    async def check() -> None:
        engine = FakeEngine(FakeEngineConfig(token_s=0.25, load_s=100))
        reader = Reader(engine)
        await engine.submit([request("a")])
        load = asyncio.create_task(engine.load(fake_manifest(1), LoadMode.KEEP_KV))
        await asyncio.sleep(1)
        load.cancel()
        await asyncio.sleep(10)
        assert reader.ends() == {"a": STOP}
        assert engine.version == 0

    play(check)


@pytest.mark.parametrize("vanish", [True, False])
def test_weights_come_from_the_store_where_there_is_one(vanish: bool) -> None:
    async def check() -> None:
        store = FakeWeightStore()
        engine = FakeEngine(store=store)
        good = await store.publish(WeightVersion(1))
        await engine.load(good, LoadMode.KEEP_KV)
        bad = await store.publish(WeightVersion(2))
        if vanish:
            store.forget(WeightVersion(2))
        else:
            store.damage(WeightVersion(2), "head")
        with pytest.raises(WeightsError, match="version 2"):
            await engine.load(bad, LoadMode.KEEP_KV)
        assert engine.version == 1
        assert engine.loads == [(1, LoadMode.KEEP_KV)]

    play(check)


def test_a_sleeper_serves_nothing_until_it_has_weights_again() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        reader = Reader(engine)
        await engine.submit([request("a")])
        await asyncio.sleep(0.3)
        engine.sleep()
        await engine.submit([request("asleep")])
        engine.wake()
        await engine.submit([request("awake")])
        await engine.load(fake_manifest(0), LoadMode.RECOMPUTE)
        await engine.submit([request("again")])
        await asyncio.sleep(10)
        assert reader.ends() == {"a": INTERRUPTED, "asleep": FAILED, "awake": FAILED, "again": STOP}
        errors = [chunk.error for chunk in reader.chunks if chunk.error]
        assert ["asleep; wake it" in errors[0], "awake without weights" in errors[1]] == [True, True]
        assert (await engine.info()).epoch == 1

    play(check)


def test_a_shut_down_delivers_what_it_has() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        await engine.submit([request("a")])
        await asyncio.sleep(0.8)
        engine.shut_down()
        engine.shut_down()
        reader = Reader(engine)
        await asyncio.sleep(1)
        assert (reader.tokens(), reader.ends(), engine.lost_tokens) == (3, {"a": INTERRUPTED}, 0)
        assert str(reader.error) == "worker 0: stopped"

    play(check)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request("r", context=TokenIds()), "got a context of 0 tokens, want 1 .. 19"),
        (request("r", context=TokenIds(range(20))), "got a context of 20 tokens, want 1 .. 19"),
        (request("r", max_new_tokens=0), "got max_new_tokens 0, want >= 1"),
        (request("r", min_version=1), "got min_version 1, want <= 0; load weights first"),
        (request("r", mode=Mode.DECODE), "got no KV handle of a fake engine"),
    ],
)
def test_a_refusal_says_what_is_wrong(bad: TurnRequest, why: str) -> None:
    async def check() -> None:
        engine = FakeEngine(FakeEngineConfig(max_context_tokens=20))
        reader = Reader(engine)
        await engine.submit([bad])
        await asyncio.sleep(1)
        assert why in (reader.chunks[0].error or "")

    play(check)


async def handed_over(prefill: FakeEngine) -> TurnRequest:
    """A decode request behind a prefill."""
    reader = Reader(prefill)
    first = request("r", mode=Mode.PREFILL)
    await prefill.submit([first])
    await asyncio.sleep(1)
    [chunk] = reader.chunks
    assert (len(chunk.token_ids), chunk.end, chunk.computed_prompt_tokens) == (1, EndReason.LENGTH, 10)
    assert chunk.kv is not None
    assert (chunk.kv.tokens, chunk.kv.owner) == (10, prefill.worker)
    return replace(first, id=RequestId("d"), mode=Mode.DECODE, kv=chunk.kv, context=first.context + chunk.token_ids)


def test_a_decode_computes_only_the_first_token() -> None:
    async def check() -> None:
        prefill, decode = FakeEngine(worker=1), FakeEngine(worker=2)
        decode.share_turn_starts(prefill._generation.turn_starts)
        await decode.submit([await handed_over(prefill)])
        reader = Reader(decode)
        await asyncio.sleep(1)
        [chunk] = reader.chunks
        assert (len(chunk.token_ids), chunk.end, chunk.computed_prompt_tokens) == (7, STOP, 1)

    play(check)


@pytest.mark.parametrize("fault", ["killed", "slept", "expired", "too long"])
def test_a_decode_needs_kv_that_its_owner_still_has(fault: str) -> None:
    async def check() -> None:
        prefill, decode = FakeEngine(FakeEngineConfig(kv_ttl_s=5), worker=1), FakeEngine(worker=2)
        handed = await handed_over(prefill)
        if fault == "killed":
            prefill.kill()
        elif fault == "slept":
            prefill.sleep()
        elif fault == "expired":
            await asyncio.sleep(6)
        else:
            handed = replace(handed, context=handed.context[:10])
        reader = Reader(decode)
        await decode.submit([handed])
        await asyncio.sleep(1)
        assert reader.ends() == {"d": FAILED}
        assert reader.chunks[0].computed_prompt_tokens == 0

    play(check)


def test_kv_is_exported_on_request() -> None:
    async def check() -> None:
        engine = FakeEngine(FakeEngineConfig(kv_bytes_per_token=3))
        reader = Reader(engine)
        await engine.submit([request("a", export_kv=True), request("b")])
        await asyncio.sleep(1)
        # 10 + 8 tokens, of which the last was never computed.
        handles = [chunk.kv for chunk in reader.chunks]
        assert handles[0] is not None
        assert (handles[0].tokens, handles[0].size_bytes) == (17, 51)
        assert handles[1] is None

    play(check)


def test_stats_count() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        Reader(engine)
        await engine.submit([request("a"), request("b", max_new_tokens=4)])
        await asyncio.sleep(1.5)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.version) == (1, 0, 0)
        assert (stats.generated_tokens, stats.computed_prompt_tokens) == (10, 20)
        assert (stats.busy_s, stats.iterations) == (1.5, 6)
        # a: 10 + 6 tokens; b: 10 + 4, its last one not computed.
        assert stats.kv_used_tokens == 16 + 13

    play(check)
