"""Rollout workers in processes of their own: KV through the object store, a dead owner, sleep, and the fleet's contract."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from safetensors.torch import load_file

from pearl.cluster.fleet import RayFleet
from pearl.cluster.kv_transport import ObjectStoreTransport
from pearl.config.engine import EngineConfig
from pearl.core.state import Role
from pearl.ports import WorkerGone, WorkerSpec
from pearl.records.ids import GpuId, RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason, Mode, Sampling, TurnRequest
from pearl.testing.contracts.engine_probe import EngineSubject, Log, Probe
from pearl.testing.contracts.fleet import FleetContract, FleetSubject
from tests.models import VOCABULARY, make_folder, publish, tokens

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(300)]

ENGINE = EngineConfig(max_sequences=8, max_context_tokens=256, progress_interval_s=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("processes") / "m", seed=1)


def specs(count: int) -> tuple[WorkerSpec, ...]:
    return tuple(WorkerSpec(worker=WorkerId(n), gpus=(GpuId(f"local/{n}"),), role=Role.COLOCATED) for n in range(count))


class Trio:
    """Two workers that hand over to each other, and one that does everything."""

    def __init__(self, fleet: RayFleet) -> None:
        self.fleet = fleet
        self.prefill, self.decode, self.whole = (
            Probe(
                EngineSubject(
                    engine=fleet.engine(WorkerId(n)), vocab=VOCABULARY, manifest=_none, foreign_manifest=_none
                )
            )
            for n in range(3)
        )


async def _none(version: int) -> Any:
    raise AssertionError(f"nobody asks for version {version}")


@asynccontextmanager
async def trio(folder: Path) -> AsyncIterator[Trio]:
    fleet = RayFleet(folder, ENGINE, health_timeout_s=60.0)
    report = await fleet.start(specs(3), 120.0)
    assert report.failed == {}
    try:
        yield Trio(fleet)
    finally:
        await fleet.stop([WorkerId(n) for n in range(3)], 0.0)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(200):
            await work

    asyncio.run(bounded())


def turn(name: str, context: Sequence[int], new: int, **fields: Any) -> TurnRequest:
    values: dict[str, Any] = {
        "id": RequestId(name),
        "trajectory": TrajectoryId("t"),
        "turn": 0,
        "context": TokenIds(context),
        "sampling": Sampling(seed=9),
        "max_new_tokens": new,
        "min_version": WeightVersion(0),
    }
    return TurnRequest(**{**values, **fields})


def said(*logs: Log) -> tuple[list[int], list[float]]:
    return (
        [token for log in logs for token in log.token_ids.tolist()],  # type: ignore[attr-defined]
        [logprob for log in logs for logprob in log.logprobs.tolist()],
    )


@pytest.mark.parametrize(("length", "stored"), [(60, False), (180, True)])
def test_a_hand_over_between_processes_draws_what_one_process_draws(folder: Path, length: int, stored: bool) -> None:
    """512 bytes per token: what is up to 64 KiB travels with its handle, the rest through the object store."""

    async def work() -> None:
        async with trio(folder) as engines:
            context = tokens(1, length)
            whole = await engines.whole.generate(turn("w", context, 20))
            first = await engines.prefill.generate(turn("p", context, 20, mode=Mode.PREFILL))
            assert first.kv is not None
            assert isinstance(first.kv.payload.data, ray.ObjectRef) == stored  # type: ignore[attr-defined]
            assert 25 < first.kv.expires_s - asyncio.get_running_loop().time() <= 30
            done = said(first)[0]
            second = await engines.decode.generate(
                turn("d", context + done, 19, mode=Mode.DECODE, kv=first.kv, export_kv=True, export_from=length)
            )
            assert said(first, second)[0] == said(whole)[0]
            np.testing.assert_allclose(said(first, second)[1], said(whole)[1], atol=1e-5, rtol=0)
            assert -np.mean(said(whole)[1]) > 1
            assert (first.computed, second.computed) == (length, 1)
            # And back: the prefill worker computes the next observation, and the token that nobody has computed yet.
            longer = context + said(whole)[0] + tokens(2, 30)
            assert second.kv is not None
            back = await engines.prefill.generate(turn("q", longer, 2, mode=Mode.PREFILL, kv=second.kv))
            again = await engines.whole.generate(turn("x", longer, 1))
            assert back.computed == 31
            assert said(back)[0] == said(again)[0]

    run(work())


def test_damage_in_flight_shows(folder: Path) -> None:
    async def work() -> None:
        async with trio(folder) as engines:
            context = tokens(1, 180)
            first = await engines.prefill.generate(turn("p", context, 8, mode=Mode.PREFILL))
            assert first.kv is not None
            good = turn("d", context + said(first)[0], 1, mode=Mode.DECODE, kv=first.kv)
            sound = await engines.decode.generate(good)
            stored = await first.kv.payload.data  # type: ignore[attr-defined]
            exported = np.stack(stored.blocks()).reshape(stored.shape)
            exported[..., 16:32, :] *= -1
            payload = replace(first.kv.payload, data=ObjectStoreTransport().put(exported))  # type: ignore[type-var]
            bad = replace(good, id=RequestId("e"), trajectory=TrajectoryId("u"), kv=replace(first.kv, payload=payload))
            damaged = await engines.decode.generate(bad)
            assert damaged.end is EndReason.LENGTH
            assert abs(damaged.logprobs.array[0] - sound.logprobs.array[0]) > 1e-2

    run(work())


@pytest.mark.chaos
def test_a_dead_owner_costs_a_recompute_at_most(folder: Path) -> None:
    """What it had put into the store may outlive it, as long as Ray likes: the tokens are the same either way."""

    async def work() -> None:
        async with trio(folder) as engines:
            context = tokens(1, 230)
            whole = await engines.whole.generate(turn("w", context, 8))
            events = engines.fleet.events()
            first = await engines.prefill.generate(turn("p", context, 8, mode=Mode.PREFILL))
            os.kill(engines.fleet.pid(WorkerId(0)), signal.SIGKILL)
            assert isinstance(await anext(events), WorkerGone)
            handed = turn("d", context + said(first)[0], 7, mode=Mode.DECODE, kv=first.kv)
            log = await engines.decode.generate(handed)
            if log.end is EndReason.FAILED:
                assert log.error is not None
                assert "was released, or its owner is gone; send the whole context" in log.error
                log = await engines.decode.generate(replace(handed, id=RequestId("e"), mode=Mode.COLOCATED, kv=None))
            assert said(first, log)[0] == said(whole)[0]

    run(work())


def test_sleep_frees_memory_and_waking_takes_it_again(tmp_path: Path) -> None:
    big = make_folder(tmp_path / "m", hidden=512, intermediate=2048, layers=6, heads=8, kv_heads=8, head_dim=64, seed=1)
    config = EngineConfig(max_sequences=32, max_context_tokens=512)

    async def work() -> None:
        fleet = RayFleet(big, config, health_timeout_s=60.0)
        assert (await fleet.start(specs(1), 120.0)).failed == {}
        try:
            worker, process = WorkerId(0), psutil.Process(fleet.pid(WorkerId(0)))
            tensors = load_file(big / "model.safetensors")
            weights = sum(4 * tensor.numel() for tensor in tensors.values())
            kv = 2 * 6 * 8 * 64 * 4 * 32 * 512
            awake = process.memory_info().rss
            await fleet.sleep([worker])
            asleep = process.memory_info().rss
            assert awake - asleep > 0.9 * (weights + kv)
            await fleet.wake([worker])
            await fleet.engine(worker).load(
                publish(tmp_path / "v1.safetensors", tensors, version=1), LoadMode.RECOMPUTE
            )
            again = process.memory_info().rss
            assert again - asleep > 0.9 * (weights + kv)
            await fleet.sleep([worker])
            assert process.memory_info().rss < asleep + 0.1 * (weights + kv)
            assert (await fleet.engine(worker).info()).epoch == 2
        finally:
            await fleet.stop([WorkerId(0)], 0.0)

    run(work())


@pytest.mark.chaos  # a minute of process starts; what a run needs of it is in the tests of runs
class TestRayFleet(FleetContract):
    settle_s = 0.5

    @pytest.fixture(autouse=True)
    def _model(self, folder: Path) -> None:
        self.folder = folder

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[FleetSubject]:
        fleet = RayFleet(self.folder, ENGINE, health_timeout_s=60.0)

        async def kill(worker: WorkerId) -> None:
            os.kill(fleet.pid(worker), signal.SIGKILL)

        try:
            yield FleetSubject(fleet=fleet, specs=specs(3), kill=kill)
        finally:
            await fleet.stop([WorkerId(n) for n in range(3)], 0.0)
