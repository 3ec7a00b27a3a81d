"""The simulated engine on virtual time: what it tells and when, by hand; hand-offs, deaths, loads, wrong requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pearl.core.profile import HandOff
from pearl.errors import EngineError, WeightsError, WorkerLost
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenCount, Tokens, Zeros
from pearl.records.training import LoadMode, Manifest
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, Sampling, TurnRequest
from pearl.sim.engine import SimEngine
from pearl.sim.limits import Limits
from pearl.sim.script import Script, ScriptedTokens, ScriptTurn, script_of
from pearl.sim.settings import EngineSettings, EngineWorld
from pearl.testing.virtual_time import run_virtual
from tests.platforms import engine_profile, linear_times

SCRIPT = script_of((ScriptTurn(100, 50, 0.0), ScriptTurn(30, 20, 0.0)))
HAND_OFF = HandOff(fixed_s=0.1, s_per_byte=0.001)
"""10 bytes per token: 10 ms."""


class Links:
    """Takes a second per transfer, or loses an end."""

    def __init__(self, lost: bool = False) -> None:
        self.lost = lost
        self.moved: list[tuple[str, str, float]] = []

    async def transfer(self, source: str, target: str, size_bytes: float) -> None:
        self.moved.append((source, target, size_bytes))
        await asyncio.sleep(1.0)
        if self.lost:
            raise WorkerLost("its link is gone")


class Weights:
    def __init__(self, error: WeightsError | None = None) -> None:
        self.error, self.pulled = error, list[tuple[str, int]]()

    async def pull(self, receiver: str, manifest: Manifest) -> None:
        self.pulled.append((receiver, manifest.version))
        await asyncio.sleep(2.0)
        if self.error is not None:
            raise self.error


class Rig:
    """An engine of 10 ms per iteration, 1 ms per decoding request, 0.1 ms per prompt token, and what it told."""

    def __init__(self, worker: int = 0, world: EngineWorld | None = None, **changes: Any) -> None:
        profile = engine_profile(1, linear_times(0.010, 0.001, 0.0001), capacity=1000, kv_bytes=10, hand_off=HAND_OFF)
        settings = EngineSettings(profile=profile, limits=Limits(chunk_tokens=1000))
        self.engine = SimEngine(WorkerId(worker), replace(settings, **changes), world or EngineWorld())
        self.told: list[tuple[float, Chunk]] = []
        self.lost: str | None = None
        self.reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for chunks in self.engine.events():
                self.told += [(asyncio.get_running_loop().time(), chunk) for chunk in chunks]
        except WorkerLost as error:
            self.lost = str(error)

    async def until_told(self, count: int = 1) -> Chunk:
        while len(self.told) < count:
            await asyncio.sleep(0.001)
        return self.told[count - 1][1]

    @property
    def ends(self) -> list[tuple[float, str, int, EndReason | None]]:
        return [(at_s, one.request, len(one.token_ids), one.end) for at_s, one in self.told]


def request(
    name: str,
    tokens: int = 100,
    *,
    turn: int = 0,
    script: Script = SCRIPT,
    context: Tokens | None = None,
    **changes: Any,
) -> TurnRequest:
    base = TurnRequest(
        id=RequestId(name),
        trajectory=TrajectoryId("t"),
        turn=turn,
        context=ScriptedTokens(tokens, script) if context is None else context,
        sampling=Sampling(seed=0),
        max_new_tokens=1000,
        min_version=WeightVersion(0),
    )
    return replace(base, **changes)


def manifest(version: int = 1, model: str = "h") -> Manifest:
    return Manifest(version=WeightVersion(version), model_hash=model, shards=())


def at(*ends: tuple[float, str, int, EndReason | None]) -> list[Any]:
    return [(pytest.approx(at_s), *rest) for at_s, *rest in ends]


def test_a_turn_is_as_long_as_its_script_says() -> None:
    async def check() -> None:
        rig = Rig()
        await rig.engine.submit([request("a")])
        await asyncio.sleep(5)
        # 20 ms for the prompt and a token, 49 more in 11 ms each.
        assert rig.ends == at((0.559, "a", 50, EndReason.STOP))
        chunk = rig.told[0][1]
        assert (chunk.start, chunk.computed_prompt_tokens, chunk.logprobs) == (100, 100, Zeros(50))
        assert isinstance(chunk.token_ids, ScriptedTokens)
        # 149 of the 180 tokens are cached: 31 in 13.1 ms, then 5 of 20 tokens.
        await rig.engine.submit([request("b", 180, turn=1, max_new_tokens=5)])
        await asyncio.sleep(5)
        assert rig.ends[1:] == at((5 + 0.0131 + 4 * 0.011, "b", 5, EndReason.LENGTH))
        assert rig.told[1][1].computed_prompt_tokens == 31
        await rig.engine.submit([request("c", 200, turn=1)])
        await asyncio.sleep(0)
        assert rig.ends[2:] == at((10, "c", 0, EndReason.STOP))

    run_virtual(check())


def test_what_cannot_be_served_fails_alone() -> None:
    async def check() -> None:
        rig = Rig(max_context_tokens=400)
        bad = [
            (request("ids", context=TokenCount(5)), "context: got TokenCount, want ScriptedTokens"),
            (request("none", 0), "context: got 0 tokens, want 1 .. 400"),
            (request("long", 401), "context: got 401 tokens, want 1 .. 400"),
            (request("turn", turn=2), "turn: got 2, want 0 .. 1, the turns of its script"),
            (request("new", max_new_tokens=0), "max_new_tokens: got 0, want >= 1"),
            (request("from", export_from=-1), "export_from: got -1, want >= 0"),
            (request("version", min_version=WeightVersion(1)), "min_version: got 1, want <= 0; load weights first"),
            (request("kv", mode=Mode.DECODE), "got no KV handle, want one with mode decode"),
        ]
        await rig.engine.submit([one for one, _ in bad])
        await asyncio.sleep(0)
        assert [(one.end, one.error) for _, one in rig.told] == [
            (EndReason.FAILED, f"worker 0: request {one.id}: {error}") for one, error in bad
        ]
        await rig.engine.submit([request("a")])
        with pytest.raises(EngineError, match="request a is here already, want an id per attempt"):
            await rig.engine.submit([request("a")])

    run_virtual(check())


def test_kv_is_handed_over_in_the_time_of_its_transfer() -> None:
    async def check() -> None:
        links = Links()
        prefill, decode = (Rig(n, EngineWorld(links=links), kv_ttl_s=5.0) for n in range(2))
        await prefill.engine.submit([request("p", mode=Mode.PREFILL)])
        first = await prefill.until_told()
        assert (first.end, len(first.token_ids)) == (EndReason.LENGTH, 1)
        handle = first.kv
        assert handle is not None
        assert (handle.tokens, handle.size_bytes, handle.expires_s) == (100, 1000, pytest.approx(5.020))
        assert (await prefill.engine.stats()).kv_used_tokens == 100
        await asyncio.sleep(1 - asyncio.get_running_loop().time())
        await decode.engine.submit([request("d", 101, mode=Mode.DECODE, kv=handle)])
        assert (await decode.engine.stats()).kv_used_tokens == 101
        await asyncio.sleep(5)
        # From 1 s: 0.1 s and a second on the way, then 49 tokens in 11 ms each; one token of context computed.
        assert decode.ends == at((2.1 + 49 * 0.011, "d", 49, EndReason.STOP))
        assert decode.told[0][1].computed_prompt_tokens == 1
        assert links.moved == [("worker 0", "worker 1", 1000)]
        # It was read.
        await decode.engine.submit([request("again", 101, trajectory=TrajectoryId("u"), mode=Mode.DECODE, kv=handle)])
        await asyncio.sleep(0)
        assert "expired" in (decode.told[1][1].error or "")

    run_virtual(check())


@pytest.mark.parametrize("how", ["died", "slept", "expired", "link", "interrupted", "released"])
def test_kv_that_does_not_arrive_fails_its_request_alone(how: str) -> None:
    async def check() -> None:
        links = Links(lost=how == "link")
        prefill, decode = (
            Rig(n, EngineWorld(links=links), kv_ttl_s=0.5 if how == "expired" else 60.0) for n in range(2)
        )
        await prefill.engine.submit([request("p", mode=Mode.PREFILL)])
        handle = (await prefill.until_told()).kv
        assert isinstance(handle, KvHandle)
        await decode.engine.submit(
            [request("d", 101, mode=Mode.DECODE, kv=handle), request("o", 100, trajectory=TrajectoryId("o"))]
        )
        await asyncio.sleep(0.3)
        match how:
            case "died":
                prefill.engine.kill()
            case "slept":
                await prefill.engine.sleep()
            case "interrupted":
                await decode.engine.interrupt([RequestId("d")])
            case "released":
                await prefill.engine.release(TrajectoryId("t"), handle)
        await asyncio.sleep(5)
        told = {chunk.request: chunk for _, chunk in decode.told}
        assert told[RequestId("o")].end is EndReason.STOP
        if how == "interrupted":
            assert (told[RequestId("d")].end, len(told[RequestId("d")].token_ids)) == (EndReason.INTERRUPTED, 0)
        else:
            assert told[RequestId("d")].end is EndReason.FAILED
            why = {
                "died": "is gone",
                "slept": "got epoch 0, want 1",
                "expired": "expired",
                "link": "its link",
                "released": "released",
            }
            assert why[how] in (told[RequestId("d")].error or "")
        assert (await decode.engine.stats()).running == 0

    run_virtual(check())


def test_without_links_a_hand_off_takes_what_the_profile_says() -> None:
    async def check() -> None:
        prefill, decode = Rig(0), Rig(1)
        await prefill.engine.submit([request("p", mode=Mode.PREFILL)])
        first = await prefill.until_told()
        began_s = asyncio.get_running_loop().time()
        await decode.engine.submit([request("d", 101, mode=Mode.DECODE, kv=first.kv, export_kv=True, export_from=100)])
        await asyncio.sleep(5)
        # 1,000 bytes: 0.1 + 1 s.
        assert decode.ends == at((began_s + 1.1 + 49 * 0.011, "d", 49, EndReason.STOP))
        back = decode.told[0][1].kv
        assert back is not None
        assert (back.start, back.tokens, back.size_bytes) == (100, 149, 490)
        # The next turn's prefill takes it back, and computes 31 tokens.
        await prefill.engine.submit([request("q", 180, turn=1, mode=Mode.PREFILL, kv=back)])
        await asyncio.sleep(5)
        assert prefill.told[1][1].computed_prompt_tokens == 31

    run_virtual(check())


def test_a_death_loses_what_is_younger_than_the_last_multiple_of_the_interval() -> None:
    async def check() -> None:
        rig = Rig(progress_interval_s=0.1)
        await rig.engine.submit([request("a")])
        await asyncio.sleep(0.290)
        rig.engine.kill("power")
        rig.engine.kill("again")
        await asyncio.sleep(0)
        # By 0.2 s: 1 + 16 tokens (20 + 176 ms); by 0.29 s: 1 + 24.
        assert rig.ends == at((0.290, "a", 17, None))
        assert (rig.engine.lost_tokens, rig.lost) == (8, "worker 0: power")
        for call in (rig.engine.info(), rig.engine.stats(), rig.engine.submit([]), rig.engine.interrupt([])):
            with pytest.raises(WorkerLost, match="worker 0: power"):
                await call

    run_virtual(check())


def test_progress_is_told_to_who_listens_for_it() -> None:
    async def check() -> None:
        rig = Rig(report_interval_s=0.2)
        await rig.engine.submit([request("a")])
        await asyncio.sleep(5)
        assert rig.ends == at((0.2, "a", 17, None), (0.4, "a", 18, None), (0.559, "a", 15, EndReason.STOP))

    run_virtual(check())


def test_new_weights_take_their_way_and_pause_the_engine() -> None:
    async def check() -> None:
        weights = Weights()
        rig = Rig(world=EngineWorld(weights=weights))
        await rig.engine.submit([request("a")])
        await asyncio.sleep(0.025)
        loads = asyncio.gather(*(rig.engine.load(manifest(version), LoadMode.KEEP_KV) for version in (1, 2)))
        await asyncio.sleep(1)
        await rig.engine.submit([request("b", trajectory=TrajectoryId("b"), min_version=WeightVersion(1))])
        await rig.engine.submit([request("c", trajectory=TrajectoryId("c"))])
        assert (await rig.engine.stats()).waiting == 2
        await rig.engine.interrupt([RequestId("c")])
        first, second = await loads
        # At the boundary at 31 ms; two seconds on the way and one to take them; one after the other.
        assert (first.load_s, second.version) == (pytest.approx(3.006), 2)
        assert asyncio.get_running_loop().time() == pytest.approx(6.031)
        assert weights.pulled == [("worker 0", 1), ("worker 0", 2)]
        await asyncio.sleep(5)
        ends = {chunk.request: chunk for _, chunk in rig.told}
        assert [(run.version, run.tokens) for run in ends[RequestId("a")].versions.runs] == [(0, 2), (2, 48)]
        assert ends[RequestId("b")].versions.oldest == 2
        assert ends[RequestId("c")].end is EndReason.INTERRUPTED

    run_virtual(check())


def test_weights_that_cannot_be_had_change_nothing() -> None:
    async def check() -> None:
        rig = Rig(world=EngineWorld(weights=Weights(WeightsError("no longer kept"))))
        await rig.engine.submit([request("a")])
        with pytest.raises(WeightsError, match="no longer kept"):
            await rig.engine.load(manifest(), LoadMode.RECOMPUTE)
        with pytest.raises(WeightsError, match="got model other, want h"):
            await rig.engine.load(manifest(model="other"), LoadMode.RECOMPUTE)
        await asyncio.sleep(5)
        assert rig.told[0][1].versions.oldest == 0

    run_virtual(check())


def test_a_death_ends_a_load() -> None:
    async def check() -> None:
        rig = Rig(world=EngineWorld(weights=Weights()))
        load = asyncio.ensure_future(rig.engine.load(manifest(), LoadMode.RECOMPUTE))
        await asyncio.sleep(0.5)
        rig.engine.kill()
        with pytest.raises(WorkerLost):
            await load
        assert asyncio.get_running_loop().time() == 0.5

    run_virtual(check())


def test_a_load_that_is_given_up_lets_the_engine_go_on() -> None:
    async def check() -> None:
        rig = Rig(world=EngineWorld(weights=Weights()))
        await rig.engine.submit([request("a")])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await rig.engine.load(manifest(), LoadMode.RECOMPUTE)
        await asyncio.sleep(5)
        # Nothing had begun when it paused.
        assert rig.ends == at((1.559, "a", 50, EndReason.STOP))

    run_virtual(check())


def test_a_hung_engine_goes_on_where_it_stopped() -> None:
    async def check() -> None:
        rig = Rig()
        await rig.engine.submit([request("a")])
        await asyncio.sleep(0.1)
        rig.engine.hang()
        rig.engine.hang()
        call = asyncio.ensure_future(rig.engine.stats())
        await asyncio.sleep(10)
        assert not call.done()
        assert not rig.told
        rig.engine.unhang()
        assert (await call).generated_tokens == 8
        await asyncio.sleep(5)
        assert rig.ends == at((10.559, "a", 50, EndReason.STOP))

    run_virtual(check())


def test_a_slow_engine_takes_longer() -> None:
    async def check() -> None:
        rig = Rig(time_scale=2.0)
        await rig.engine.submit([request("a")])
        rig.engine.slow(1.5)
        with pytest.raises(ValueError, match=r"worker 0: slow: got 0, want a finite number > 0"):
            rig.engine.slow(0)
        await asyncio.sleep(5)
        assert rig.ends == at((3 * 0.559, "a", 50, EndReason.STOP))

    run_virtual(check())


def test_leaving_and_sleeping_lose_no_token() -> None:
    async def check() -> None:
        leaves, sleeps = Rig(0), Rig(1)
        for rig in (leaves, sleeps):
            await rig.engine.submit([request("a")])
        await asyncio.sleep(0.025)
        leaves.engine.shut_down()
        await sleeps.engine.sleep()
        await asyncio.sleep(0)
        # The iteration under way until 31 ms comes to nothing, or is waited for.
        assert leaves.ends == at((0.025, "a", 1, EndReason.INTERRUPTED))
        assert sleeps.ends == at((0.031, "a", 2, EndReason.INTERRUPTED))
        assert (leaves.lost, leaves.engine.lost_tokens) == ("worker 0: stopped", 0)
        assert (await sleeps.engine.info()).epoch == 1
        for state in ("asleep; wake it and load weights", "awake without weights; load weights"):
            await sleeps.engine.submit([request(state)])
            await asyncio.sleep(0)
            assert sleeps.told[-1][1].error == f"worker 1: request {state}: the engine is {state}"
            sleeps.engine.wake()
        await sleeps.engine.load(manifest(), LoadMode.RECOMPUTE)
        await sleeps.engine.submit([request("b")])
        await asyncio.sleep(5)
        assert sleeps.ends[-1][1:] == ("b", 50, EndReason.STOP)

    run_virtual(check())
