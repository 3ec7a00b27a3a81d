"""Faults of the fake engine: kills, hangs, failures, refusals, shut-downs. (Its streams: `test_generation.py`.)"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from pearl.errors import EngineError, WorkerLost
from pearl.records.ids import RequestId, TrajectoryId
from pearl.records.tokens import TokenIds
from pearl.records.training import LoadMode
from pearl.records.turn import Mode, TurnRequest
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.weights import fake_manifest
from tests.unit.testing._engine import FAILED, INTERRUPTED, SLOW, STOP, Reader, play, request


async def every_call(engine: FakeEngine) -> list[Awaitable[object]]:
    return [
        engine.info(),
        engine.submit([request("late")]),
        engine.interrupt([RequestId("r")]),
        engine.release(TrajectoryId("t")),
        engine.load(fake_manifest(1), LoadMode.KEEP_KV),
        engine.stats(),
    ]


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
        (request("r", context=TokenIds()), "got a context of 0 tokens, want 1 .. 20"),
        (request("r", context=TokenIds(range(21))), "got a context of 21 tokens, want 1 .. 20"),
        (request("r", max_new_tokens=0), "got max_new_tokens 0, want >= 1"),
        (request("r", min_version=1), "got min_version 1, want <= 0; load weights first"),
        (request("r", mode=Mode.DECODE), "got no KV handle, want one with mode decode"),
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
