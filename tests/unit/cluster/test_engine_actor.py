"""What the actor adds to an engine: KV is fetched before the engine sees a request, and nobody waits for somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster import engine_actor
from pearl.cluster.engine_actor import EngineActor
from pearl.config.engine import EngineConfig
from pearl.errors import EngineError
from pearl.records.ids import RequestId, TrajectoryId
from pearl.records.turn import EndReason, Mode, TurnRequest
from tests import handoffs
from tests.handoffs import handle
from tests.models import make_folder

ENGINE = EngineConfig(max_sequences=4, max_context_tokens=64)


def request(name: str, *, handed: bool) -> TurnRequest:
    kv = handle(None, expires_s=1e9) if handed else None
    return handoffs.request(kv, name=name, mode=Mode.COLOCATED, max_new_tokens=4)


class Stage:
    """An actor whose fetches wait: `come(name)` lets the KV of a request come, which is gone then."""

    def __init__(self, folder: Path) -> None:
        self.actor = EngineActor(str(folder), ENGINE, 0, 0)
        self._come: dict[str, asyncio.Event] = {}

    async def fetched(self, one: TurnRequest) -> TurnRequest:
        await self._event(one.id).wait()
        return request(one.id, handed=False)

    def come(self, name: str) -> None:
        self._event(name).set()

    def _event(self, name: str) -> asyncio.Event:
        return self._come.setdefault(name, asyncio.Event())

    async def ends(self, *names: str) -> dict[str, EndReason]:
        """Wait until these requests have ended."""
        ends: dict[str, EndReason] = {}
        while not set(names) <= set(ends):
            for chunk in await self.actor.poll(1.0):
                if chunk.end is not None:
                    ends[chunk.request] = chunk.end
        return ends


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "m")


@pytest.fixture
def stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(folder)
    monkeypatch.setattr(engine_actor, "fetched", stage.fetched)
    return stage


def play(stage: Stage, work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await stage.actor.start()
            try:
                await work
                assert not stage.actor._fetching
                assert not stage.actor._interrupted
            finally:
                await stage.actor.stop()

    asyncio.run(bounded())


def test_nobody_waits_for_the_kv_of_another(stage: Stage) -> None:
    async def work() -> None:
        batch = [request("slow", handed=True), request("quick", handed=True), request("bare", handed=False)]
        submitted = asyncio.create_task(stage.actor.call([], "submit", batch))
        stage.come("quick")
        assert await stage.ends("quick", "bare") == {"quick": EndReason.LENGTH, "bare": EndReason.LENGTH}
        assert not submitted.done()
        stage.come("slow")
        assert await stage.ends("slow") == {"slow": EndReason.LENGTH}
        await submitted

    play(stage, work())


def test_an_interrupt_finds_a_request_whose_kv_is_on_its_way(stage: Stage) -> None:
    async def work() -> None:
        batch = [request("a", handed=True), request("b", handed=True)]
        submitted = asyncio.create_task(stage.actor.call([], "submit", batch))
        await asyncio.sleep(0)
        await stage.actor.call([], "interrupt", [RequestId("a"), RequestId("unknown")])
        stage.come("a")
        stage.come("b")
        assert await stage.ends("a", "b") == {"a": EndReason.INTERRUPTED, "b": EndReason.LENGTH}
        await submitted

    play(stage, work())


def test_sleep_interrupts_a_request_whose_kv_is_on_its_way(stage: Stage) -> None:
    async def work() -> None:
        submitted = asyncio.create_task(stage.actor.call([], "submit", [request("a", handed=True)]))
        await asyncio.sleep(0)
        await stage.actor.call([], "sleep")
        stage.come("a")
        assert await stage.ends("a") == {"a": EndReason.INTERRUPTED}
        await submitted

    play(stage, work())


def test_an_id_is_in_use_while_its_kv_is_on_its_way(stage: Stage) -> None:
    async def work() -> None:
        first = asyncio.create_task(stage.actor.call([], "submit", [request("a", handed=True)]))
        await asyncio.sleep(0)
        for handed in (True, False):
            with pytest.raises(EngineError, match="request a: this id is in use"):
                await stage.actor.call([], "submit", [request("b", handed=False), request("a", handed=handed)])
        stage.come("a")
        assert await stage.ends("a") == {"a": EndReason.LENGTH}, "b was not taken either"
        await first

    play(stage, work())


def test_releases_come_before_the_call_that_they_travel_with(stage: Stage) -> None:
    async def work() -> None:
        actor = stage.actor
        await actor.call([], "submit", [request("a", handed=False)])
        await stage.ends("a")
        held = (await actor.call([], "stats")).kv_used_tokens
        after = (await actor.call([(TrajectoryId("a"), None)], "stats")).kv_used_tokens
        assert (held > 0, after) == (True, 0)

    play(stage, work())
