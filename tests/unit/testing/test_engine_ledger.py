"""What the fake engine keeps count of, in batches and stats."""

from __future__ import annotations

import asyncio

from pearl.testing.engine import FakeEngine
from tests.unit.testing._engine import SLOW, Reader, play, request


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
