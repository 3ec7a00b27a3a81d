"""KV that the fake engine exports and takes over."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pearl.errors import WeightsError
from pearl.records.ids import RequestId
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason, Mode, TurnRequest
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.weights import fake_manifest
from tests.unit.testing._engine import FAILED, SLOW, STOP, Reader, play, request


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
            handed = replace(handed, context=handed.context[:9])
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


def test_an_interrupted_request_exports_what_it_has() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        reader = Reader(engine)
        await engine.submit([request("a", export_kv=True), request("b", export_kv=True)])
        await asyncio.sleep(0.6)  # 2 tokens each
        await engine.interrupt([RequestId("a")])
        await asyncio.sleep(0.25)
        engine.shut_down()
        await asyncio.sleep(1)
        exported = {chunk.request: chunk.kv and chunk.kv.tokens for chunk in reader.chunks if chunk.end}
        assert exported == {"a": 10 + 2 - 1, "b": 10 + 3 - 1}

    play(check)


def test_a_request_interrupted_before_its_first_token_exports_what_came_along() -> None:
    async def check() -> None:
        owner, engine = FakeEngine(worker=1), FakeEngine(SLOW, worker=2)
        handed = replace(await handed_over(owner), export_kv=True)
        reader = Reader(engine)
        await engine.submit([handed, request("alone", export_kv=True)])
        await engine.interrupt([handed.id, RequestId("alone")])
        await asyncio.sleep(1)
        exported = {chunk.request: chunk.kv and chunk.kv.tokens for chunk in reader.chunks if chunk.end}
        assert exported == {"d": 10, "alone": None}

    play(check)


def test_the_version_of_kv_is_that_of_the_oldest_part() -> None:
    async def check() -> None:
        engine = FakeEngine(SLOW)
        reader = Reader(engine)
        for name, mode in (("kept", LoadMode.KEEP_KV), ("computed", LoadMode.RECOMPUTE)):
            before = engine.version
            await engine.submit([request(name, export_kv=True)])
            await asyncio.sleep(0.6)
            await engine.load(fake_manifest(before + 1), mode)
            await asyncio.sleep(5)
        handles = [chunk.kv for chunk in reader.chunks if chunk.kv]
        # The first began at version 0 and kept its KV, the second began at 1 and computed it again at 2.
        assert [handle.version for handle in handles] == [0, 2]

    play(check)


def test_a_sleeper_loads_nothing_and_a_wake_of_who_does_not_sleep_changes_nothing() -> None:
    async def check() -> None:
        engine = FakeEngine()
        reader = Reader(engine)
        engine.wake()
        await engine.submit([request("a")])
        engine.sleep()
        with pytest.raises(WeightsError, match="it sleeps; wake it first"):
            await engine.load(fake_manifest(1), LoadMode.RECOMPUTE)
        await asyncio.sleep(1)
        assert reader.ends() == {"a": STOP}

    play(check)
