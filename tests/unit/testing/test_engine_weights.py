"""The fake engine while it loads weights, and without any."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pearl.errors import WeightsError, WorkerLost
from pearl.records.ids import RequestId, WeightVersion
from pearl.records.training import LoadMode
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.weights import FakeWeightStore, fake_manifest
from tests.unit.testing._engine import FAILED, INTERRUPTED, SLOW, STOP, Reader, play, request


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
