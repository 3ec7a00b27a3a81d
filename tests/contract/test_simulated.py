"""The simulated engine and fleet keep the contracts of their ports, on counts of tokens and virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace

from pearl.core.profile import HandOff
from pearl.core.state import Role
from pearl.ports import WorkerSpec
from pearl.records.ids import GpuId, WorkerId
from pearl.records.tokens import Tokens
from pearl.records.training import Manifest
from pearl.records.turn import KvHandle
from pearl.sim.engine import SimEngine
from pearl.sim.fleet import SimFleet, WorkerTimes
from pearl.sim.limits import Limits, Mixing
from pearl.sim.script import ScriptedTokens, ScriptTurn, script_of
from pearl.sim.settings import EngineSettings, EngineWorld
from pearl.testing.contracts.engine import EngineContract, EngineSubject
from pearl.testing.contracts.fleet import FleetContract, FleetSubject
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import FAKE_MODEL_HASH, fake_manifest
from tests.platforms import engine_profile, linear_times

LONG = script_of(tuple(ScriptTurn(1, 10**9, 0.0) for _ in range(3)))
"""Turns that end at whatever limit comes first."""


class OnVirtualTime:
    def run_work(self, work: Coroutine[object, object, None]) -> None:
        run_virtual(work)


def settings(mixing: Mixing = Mixing.CHUNKED, longest_run: int = 1 << 40) -> EngineSettings:
    profile = engine_profile(
        1,
        linear_times(0.001, 1e-5, 1e-6),
        capacity=4096,
        kv_bytes=1024,
        hand_off=HandOff(fixed_s=0.002, s_per_byte=1e-9),
    )
    return EngineSettings(
        profile=replace(profile, model_hash=FAKE_MODEL_HASH, weight_load_s=0.002),
        limits=Limits(max_sequences=32, chunk_tokens=64, mixing=mixing, longest_run=longest_run),
        max_context_tokens=512,
        progress_interval_s=0.003,
        report_interval_s=0.003,
    )


async def manifest(version: int) -> Manifest:
    return fake_manifest(version)


async def foreign_manifest(version: int) -> Manifest:
    return fake_manifest(version, hash_="0123456789abcdef")


def subject(engine: SimEngine) -> EngineSubject:
    async def kill() -> None:
        engine.kill()

    async def wake() -> None:
        engine.wake()

    def foreign_handle(handle: KvHandle) -> KvHandle:
        return replace(handle, payload=replace(handle.payload, model_hash="0123456789abcdef"))  # type: ignore[type-var]

    return EngineSubject(
        engine=engine,
        vocab=97,
        manifest=manifest,
        foreign_manifest=foreign_manifest,
        kill=kill,
        sleep=engine.sleep,
        wake=wake,
        foreign_handle=foreign_handle,
    )


class TestSimEngine(OnVirtualTime, EngineContract):
    has_ids = False
    settings = settings()

    def context(self, vocab: int, tokens: int, salt: int) -> Tokens:
        return ScriptedTokens(tokens, LONG)

    @asynccontextmanager
    async def engines(self, count: int) -> AsyncIterator[list[EngineSubject]]:
        yield [subject(SimEngine(WorkerId(worker), self.settings, EngineWorld())) for worker in range(count)]


class TestSimEngineThatPrefillsAlone(TestSimEngine):
    settings = settings(mixing=Mixing.ALONE)


class TestSimEngineStepByStep(TestSimEngine):
    settings = settings(longest_run=1)


class TestSimFleet(OnVirtualTime, FleetContract):
    too_short_s = 0.5

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[FleetSubject]:
        times = WorkerTimes(start_s=2.0, sleep_s=0.5, wake_s=1.0, role_change_s=0.1, stop_s=0.05)
        fleet = SimFleet(lambda _: settings(), lambda _: times)

        async def kill(worker: WorkerId) -> None:
            fleet.kill(worker)

        yield FleetSubject(
            fleet=fleet,
            specs=[WorkerSpec(worker=WorkerId(n), gpus=(GpuId(f"gpu{n}"),), role=Role.COLOCATED) for n in range(4)],
            kill=kill,
            fail_next_start=fleet.fail_next_start,
        )
