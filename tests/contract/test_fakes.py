"""The fakes keep the contracts of the ports that they stand for, on a virtual clock and on the real one."""

from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from pearl.core.state import Role
from pearl.ports import GpuSourceEvent, WorkerSpec
from pearl.records.ids import GpuId, GroupId, TaskId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, TokenCount, TokenIds, Tokens
from pearl.records.training import Manifest, TrainingBatch, TrainingSample
from pearl.records.trajectory import Task
from pearl.records.turn import KvHandle, Versions
from pearl.testing.codec import CountCodec, FakeCodec
from pearl.testing.contracts.codec import CodecContract, CodecSubject
from pearl.testing.contracts.engine import EngineContract, EngineSubject
from pearl.testing.contracts.environment import EnvironmentPoolContract, EnvironmentPoolSubject
from pearl.testing.contracts.fleet import FleetContract, FleetSubject
from pearl.testing.contracts.gpu_source import GpuSourceContract, GpuSourceSubject
from pearl.testing.contracts.journal import JournalSinkContract, JournalSinkSubject
from pearl.testing.contracts.trainer import TrainerContract, TrainerSubject
from pearl.testing.contracts.weights import WeightStoreContract, WeightStoreSubject
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.environment import AT_RESET, Behaviour, FakeEnvironmentPool, Fault
from pearl.testing.fleet import FakeFleet
from pearl.testing.gpu_source import FakeGpuSource
from pearl.testing.journal import ListSink
from pearl.testing.trainer import FakeTrainer
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import FakeWeightStore, fake_manifest


class OnVirtualTime:
    """Runs a suite on a clock that jumps."""

    def run_work(self, work: Coroutine[object, object, None]) -> None:
        run_virtual(work)


async def _manifest(version: int) -> Manifest:
    return fake_manifest(version)


async def _foreign_manifest(version: int) -> Manifest:
    return fake_manifest(version, hash_="0123456789abcdef")


def _engine_subject(engine: FakeEngine) -> EngineSubject:
    async def kill() -> None:
        engine.kill()

    async def sleep() -> None:
        engine.sleep()

    async def wake() -> None:
        engine.wake()

    def foreign_handle(handle: KvHandle) -> KvHandle:
        return replace(handle, payload=replace(handle.payload, model_hash="0123456789abcdef"))

    return EngineSubject(
        engine=engine,
        vocab=engine.config.vocab,
        manifest=_manifest,
        foreign_manifest=_foreign_manifest,
        kill=kill,
        sleep=sleep,
        wake=wake,
        foreign_handle=foreign_handle,
    )


class FakeEngineSuite(EngineContract):
    config = FakeEngineConfig(
        token_s=0.001, progress_interval_s=0.003, load_s=0.002, turn_tokens=10**9, max_context_tokens=512
    )

    @asynccontextmanager
    async def engines(self, count: int) -> AsyncIterator[list[EngineSubject]]:
        yield [_engine_subject(FakeEngine(self.config, worker=worker)) for worker in range(count)]


class TestFakeEngine(OnVirtualTime, FakeEngineSuite):
    pass


class TestFakeEngineOnTheRealClock(FakeEngineSuite):
    # Long enough that a slow machine still answers in time.
    long_tokens = 400


class TestFakeEngineOnCounts(OnVirtualTime, FakeEngineSuite):
    has_ids = False

    def context(self, vocab: int, tokens: int, salt: int) -> Tokens:
        return TokenCount(tokens)


class TestFakeFleet(OnVirtualTime, FleetContract):
    too_short_s = 0.5

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[FleetSubject]:
        fleet = FakeFleet(start_s=2.0)

        async def kill(worker: WorkerId) -> None:
            fleet.kill(worker)

        yield FleetSubject(
            fleet=fleet,
            specs=[WorkerSpec(worker=WorkerId(n), gpus=(GpuId(f"gpu{n}"),), role=Role.COLOCATED) for n in range(4)],
            kill=kill,
            fail_next_start=fleet.fail_next_start,
        )


class TestFakeWeightStore(OnVirtualTime, WeightStoreContract):
    @asynccontextmanager
    async def store(self) -> AsyncIterator[WeightStoreSubject]:
        trainer = FakeTrainer()
        store = FakeWeightStore(trainer)

        async def advance() -> WeightVersion:
            return (await trainer.train(_batch(trainer.version, 1))).version

        yield WeightStoreSubject(
            store=store,
            advance=advance,
            damage=lambda manifest, name: store.damage(manifest.version, name),
        )


def _batch(version: int, salt: int) -> TrainingBatch:
    samples = tuple(
        TrainingSample(
            trajectory=TrajectoryId(f"{salt}-{n}"),
            group=GroupId(f"g{salt}"),
            token_ids=TokenIds([1, 2, 3, 4, 5]),
            trained=((1, 2), (3, 5)),
            logprobs=Floats([-0.5, -1.0, -1.5]),
            versions=Versions.of([(version, 3)]),
            reward=float(n),
        )
        for n in range(2)
    )
    return TrainingBatch(version=WeightVersion(version), samples=samples)


class TestFakeTrainer(OnVirtualTime, TrainerContract):
    @asynccontextmanager
    async def trainers(self, count: int) -> AsyncIterator[list[TrainerSubject]]:
        yield [
            TrainerSubject(trainer=FakeTrainer(train_s=5.0, lend_s=1.0), batch=_batch, gpus=(GpuId("a"), GpuId("b")))
            for _ in range(count)
        ]


_FAULTS = {"plain": None, "raises": Fault.RAISE, "hangs": Fault.HANG, "nonsense": Fault.NONSENSE, "lost": Fault.LOST}


class FakeEnvironmentPoolSuite(EnvironmentPoolContract):
    fault_turn = 1

    @asynccontextmanager
    async def pool(self, slots: int) -> AsyncIterator[EnvironmentPoolSubject]:
        def script(task: Task, attempt: int) -> Behaviour:
            return Behaviour(turns=3, reward=1.0, fault=_FAULTS[task.environment], fault_turn=self.fault_turn)

        def task(kind: str) -> Task:
            return Task(id=TaskId(kind), environment=kind, seed=1)

        yield EnvironmentPoolSubject(pool=FakeEnvironmentPool(slots, script), task=task)


class TestFakeEnvironmentPool(OnVirtualTime, FakeEnvironmentPoolSuite):
    pass


class TestFakeEnvironmentPoolOnTheRealClock(FakeEnvironmentPoolSuite):
    hang_s = 0.05
    settle_s = 0.01


class TestFakeEnvironmentPoolFailingAtReset(OnVirtualTime, FakeEnvironmentPoolSuite):
    fault_turn = AT_RESET


class TestFakeCodec(CodecContract):
    def codec(self) -> CodecSubject:
        codec = FakeCodec()
        return CodecSubject(codec=codec, encode=codec.encode)


class TestCountCodec(CodecContract):
    def codec(self) -> CodecSubject:
        return CodecSubject(codec=CountCodec(), encode=lambda text: TokenCount(len(text)), has_ids=False)


class TestListSink(OnVirtualTime, JournalSinkContract):
    @contextmanager
    def sink(self, capacity: int) -> Iterator[JournalSinkSubject]:
        sink = ListSink(capacity)
        yield JournalSinkSubject(
            sink=sink,
            read=lambda stream: [entry for entry in sink.entries if entry.stream == stream],
            dropped=lambda: sink.dropped,
        )


class TestFakeGpuSource(OnVirtualTime, GpuSourceContract):
    @asynccontextmanager
    async def source(self) -> AsyncIterator[GpuSourceSubject]:
        source = FakeGpuSource()

        async def cause(event: GpuSourceEvent) -> None:
            source.push(event)

        yield GpuSourceSubject(source=source, cause=cause)
