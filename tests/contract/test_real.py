"""The real implementations keep the contracts of their ports.

Engine and trainer run here behind a stand-in for a Ray actor handle, in this process: what a process of their own adds is
tested in tests/integration.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl.cluster import environment_pool
from pearl.cluster.engine_actor import EngineActor, RayEngine
from pearl.cluster.environment_pool import RayEnvironmentPool
from pearl.cluster.trainer_actor import RayTrainer, TrainerActor
from pearl.cluster.weights import SharedMemoryWeights
from pearl.config.engine import EngineConfig
from pearl.config.recipe import Recipe
from pearl.env.codec import ChatCodec
from pearl.errors import WorkerLost
from pearl.records.ids import GpuId, GroupId, TaskId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import Manifest, TrainingBatch, TrainingSample
from pearl.records.trajectory import Task
from pearl.records.turn import Versions
from pearl.report.journal import JournalWriter, count_dropped, read_stream
from pearl.testing.contracts.codec import CodecContract, CodecSubject
from pearl.testing.contracts.engine import EngineContract, EngineSubject
from pearl.testing.contracts.environment import EnvironmentPoolContract, EnvironmentPoolSubject
from pearl.testing.contracts.journal import JournalSinkContract, JournalSinkSubject
from pearl.testing.contracts.trainer import TrainerContract, TrainerSubject
from pearl.testing.contracts.weights import WeightStoreContract, WeightStoreSubject

VOCABULARY = 98


class LocalActor:
    """Looks like a Ray actor handle, runs in this process; `die` ends it like a killed process."""

    def __init__(self, target: object) -> None:
        self._target = target
        self._dead: asyncio.Future[None] | None = None

    def die(self) -> None:
        if self._dead is None:
            self._dead = asyncio.get_running_loop().create_future()
        if not self._dead.done():
            self._dead.set_exception(WorkerLost("killed by the test"))
            self._dead.exception()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> asyncio.Future[Any]:
                return asyncio.ensure_future(self._call(method, arguments))

        return Method

    async def _call(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self._dead is None:
            self._dead = asyncio.get_running_loop().create_future()
        if self._dead.done():
            return await self._dead
        result = method(*arguments)
        if not inspect.isawaitable(result):
            return result
        working = asyncio.ensure_future(result)
        await asyncio.wait([working, self._dead], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else await self._dead


def recipe(model: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": str(model)},
            "environment": {"kind": "guess_number"},
            "run": {"steps": 10},
            "train": {"learning_rate": 1e-3, "minibatches": 2},
        }
    )


def batch(version: int, salt: int) -> TrainingBatch:
    rng = np.random.default_rng((version, salt))
    samples = []
    for number in range(4):
        ids = rng.integers(2, VOCABULARY, 12)
        samples.append(
            TrainingSample(
                trajectory=TrajectoryId(f"g{number // 2}.{number}"),
                group=GroupId(f"g{number // 2}"),
                token_ids=TokenIds(ids),
                trained=((4, 7), (9, 12)),
                logprobs=Floats(rng.uniform(-5, -4, 6)),
                versions=Versions.of([(version, 6)]),
                reward=float(rng.integers(0, 5)) + number % 2,
            )
        )
    return TrainingBatch(version=WeightVersion(version), samples=tuple(samples))


def trainer(model: Path, folder: Path) -> RayTrainer:
    return RayTrainer(LocalActor(TrainerActor(recipe(model), str(folder / "trained.jsonl"))))


class TestRayTrainer(TrainerContract):
    @pytest.fixture(autouse=True)
    def _places(self, tiny_model: Path, tmp_path: Path) -> None:
        self.model, self.folder = tiny_model, tmp_path

    @asynccontextmanager
    async def trainers(self, count: int) -> AsyncIterator[Sequence[TrainerSubject]]:
        made = [trainer(self.model, self.folder) for _ in range(count)]
        for one in made:
            await one.start(60.0)
        yield [TrainerSubject(trainer=one, batch=batch, gpus=(GpuId("local/0"),)) for one in made]


class TestSharedMemoryWeights(WeightStoreContract):
    @pytest.fixture(autouse=True)
    def _places(self, tiny_model: Path, tmp_path: Path) -> None:
        self.model, self.folder = tiny_model, tmp_path

    @asynccontextmanager
    async def store(self) -> AsyncIterator[WeightStoreSubject]:
        source = trainer(self.model, self.folder)
        await source.start(60.0)
        store = SharedMemoryWeights(source, budget_gib=1.0)
        steps = 0

        async def advance() -> WeightVersion:
            nonlocal steps
            report = await source.train(batch(steps, 0))
            steps += 1
            return report.version

        def damage(manifest: Manifest, name: str) -> None:
            (shard,) = (shard for shard in manifest.shards if shard.name == name)
            path = Path(shard.locations[0])
            header = int.from_bytes(path.read_bytes()[:8], "little")
            raw = bytearray(path.read_bytes())
            offset = json.loads(raw[8 : 8 + header])[name]["data_offsets"][0]
            raw[8 + header + offset] ^= 0xFF
            path.write_bytes(bytes(raw))

        try:
            yield WeightStoreSubject(store=store, advance=advance, damage=damage)
        finally:
            store.close()
        assert not store.folder.exists()


class TestChatCodec(CodecContract):
    @pytest.fixture(autouse=True)
    def _places(self, tiny_model: Path) -> None:
        self.model = tiny_model

    def codec(self) -> CodecSubject:
        codec = ChatCodec(self.model)
        return CodecSubject(codec=codec, encode=lambda text: codec.answer(text)[:-1])


class TestJournalWriter(JournalSinkContract):
    @pytest.fixture(autouse=True)
    def _places(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @contextmanager
    def sink(self, capacity: int) -> Iterator[JournalSinkSubject]:
        writer = JournalWriter(self.folder, capacity=capacity)
        try:
            yield JournalSinkSubject(
                sink=writer,
                read=lambda stream: list(read_stream(self.folder, stream)),
                dropped=lambda: sum(writer.dropped.values()),
            )
        finally:
            writer.close()
        assert count_dropped(self.folder, "turns") == writer.dropped.get("turns", 0)


@pytest.mark.integration
@pytest.mark.usefixtures("local_ray")
class TestRayEngine(EngineContract):
    long_tokens = 300
    takes_kv_back = False
    logprob_tolerance = 1e-5

    @pytest.fixture(autouse=True)
    def _places(self, tiny_model: Path, tmp_path: Path) -> None:
        self.model, self.folder = tiny_model, tmp_path

    @asynccontextmanager
    async def engines(self, count: int) -> AsyncIterator[list[EngineSubject]]:
        config = EngineConfig(max_sequences=16, max_context_tokens=512, progress_interval_s=0.001)
        actors = [EngineActor(str(self.model), config, number, 0) for number in range(count)]
        for actor in actors:
            await actor.start()
        source = trainer(self.model, self.folder)
        await source.start(60.0)
        try:
            yield [self._subject(WorkerId(number), actor, source) for number, actor in enumerate(actors)]
        finally:
            for actor in actors:
                await actor.stop()

    def _subject(self, worker: WorkerId, actor: EngineActor, source: RayTrainer) -> EngineSubject:
        handle = LocalActor(actor)

        async def manifest(version: int) -> Manifest:
            made = await source.export(self.folder / f"{worker}-{version}.safetensors", WeightVersion(0))
            return dataclasses.replace(made, version=WeightVersion(version))

        async def foreign(version: int) -> Manifest:
            return dataclasses.replace(await manifest(version), model_hash="0123456789abcdef")

        async def kill() -> None:
            handle.die()

        engine = RayEngine(handle, worker)
        return EngineSubject(
            engine=engine,
            sleep=engine.sleep,
            wake=engine.wake,
            vocab=VOCABULARY,
            manifest=manifest,
            foreign_manifest=foreign,
            kill=kill,
        )


@pytest.mark.integration
@pytest.mark.usefixtures("local_ray")
class TestRayEnvironmentPool(EnvironmentPoolContract):
    hang_s = 5.0  # Ray may take a second to tell that a process has died
    settle_s = 0.3

    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(environment_pool, "STUCK_AFTER_S", 0.2)
        self.folder = tmp_path
        self.opened = 0

    @asynccontextmanager
    async def pool(self, slots: int) -> AsyncIterator[EnvironmentPoolSubject]:
        pool = RayEnvironmentPool(
            slots, 1, start_timeout_s=60.0, open_timeout_s=60.0, step_timeout_s=60.0, max_restarts=8
        )
        await pool.start()
        try:
            yield EnvironmentPoolSubject(pool=pool, task=self._task, action="a")
        finally:
            await pool.stop()

    def _task(self, kind: str) -> Task | None:
        self.opened += 1
        faults = {"plain": "", "raises": "raise", "hangs": "hang", "nonsense": "nan", "lost": "die"}[kind]
        name = "Nonsense" if kind == "nonsense" else "Echo"
        return Task(
            id=TaskId(kind),
            environment=f"tests.integration.environments:{name}",
            seed=self.opened,
            params={"faults": faults, "folder": str(self.folder), "named": False, "always": True},
        )
