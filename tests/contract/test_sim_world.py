"""The ports of the simulated world beside engine and fleet keep their contracts, on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pearl.ports import Environment, GpuSourceEvent
from pearl.records.ids import GpuId, GroupId, TaskId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.records.trajectory import EnvironmentReply, Task
from pearl.records.turn import Versions
from pearl.sim.codec import Action, Observation, SimCodec
from pearl.sim.environment import EnvironmentFaultKind, InjectedFault, SimEnvironmentPool, group_number
from pearl.sim.gpu_source import SimGpuSource
from pearl.sim.network import Network
from pearl.sim.script import Script, ScriptedTokens, ScriptTurn, script_of
from pearl.sim.trainer import SimCheckpoints, SimTrainer, TrainTimes
from pearl.sim.weights import SimWeightStore
from pearl.testing.contracts.codec import CodecContract, CodecSubject
from pearl.testing.contracts.environment import EnvironmentPoolContract, EnvironmentPoolSubject
from pearl.testing.contracts.gpu_source import GpuSourceContract, GpuSourceSubject
from pearl.testing.contracts.trainer import TrainerContract, TrainerSubject
from pearl.testing.contracts.weights import WeightStoreContract, WeightStoreSubject
from pearl.virtual_time import run_virtual


class OnVirtualTime:
    """Runs a suite on a clock that jumps."""

    def run_work(self, work: Coroutine[object, object, None]) -> None:
        run_virtual(work)


@dataclass
class _Versions:
    version: WeightVersion = WeightVersion(0)  # noqa: RUF009 - a number


class TestSimWeightStore(OnVirtualTime, WeightStoreContract):
    @asynccontextmanager
    async def store(self) -> AsyncIterator[WeightStoreSubject]:
        trainer = _Versions()
        store = SimWeightStore(
            trainer, Network(lambda _: 1e9), {"embedding": 64, "head": 16}, gather_s=3.0, budget_bytes=160
        )

        async def advance() -> WeightVersion:
            trainer.version = WeightVersion(trainer.version + 1)
            return trainer.version

        yield WeightStoreSubject(
            store=store,
            advance=advance,
            damage=lambda manifest, name: store.damage(manifest.version, name),
        )


class _Scripts:
    def script(self, group: int, attempt: int) -> Script:
        return _SCRIPT


_SCRIPT = script_of((ScriptTurn(100, 20, 0.05), ScriptTurn(0, 1, 0.0), ScriptTurn(30, 5, 0.0)))
_KINDS = {
    "raises": EnvironmentFaultKind.RAISE,
    "hangs": EnvironmentFaultKind.HANG,
    "nonsense": EnvironmentFaultKind.NONSENSE,
    "lost": EnvironmentFaultKind.LOST,
}


class _SpeaksPlainly:
    """Lets a suite act with plain texts: every action is as long as the script says."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def reset(self, seed: int) -> str:
        return await self._environment.reset(seed)

    async def step(self, action: str) -> EnvironmentReply:
        return await self._environment.step(Action(_SCRIPT, 20))

    async def close(self) -> None:
        await self._environment.close()


class _PlainPool(SimEnvironmentPool):
    async def open(self, task: Task) -> Environment:  # type: ignore[override]
        return _SpeaksPlainly(await super().open(task))


class TestSimEnvironmentPool(OnVirtualTime, EnvironmentPoolContract):
    @asynccontextmanager
    async def pool(self, slots: int) -> AsyncIterator[EnvironmentPoolSubject]:
        kinds = {group_number(TaskId(name)): kind for name, kind in _KINDS.items()}

        def faults(group: int, attempt: int) -> InjectedFault | None:
            return InjectedFault(kind=kinds[group], turn=1) if group in kinds else None

        def task(kind: str) -> Task:
            return Task(id=TaskId(kind), environment=kind, seed=1)

        yield EnvironmentPoolSubject(pool=_PlainPool(slots, _Scripts(), faults=faults), task=task)


class TestSimCodec(CodecContract):
    def codec(self) -> CodecSubject:
        # Its texts are observations, so no other will do.
        texts = [Observation(_SCRIPT, turn, start) for turn, start in ((1, 120), (2, 121), (1, 107))]
        return CodecSubject(
            codec=SimCodec(), encode=lambda text: ScriptedTokens(7, _SCRIPT), texts=texts, has_ids=False
        )

    def test_the_first_prompt_is_ready_for_the_model(self) -> None:
        codec = SimCodec()
        prompt = codec.first_prompt(Observation(_SCRIPT, 0, 0))
        assert prompt == codec.first_prompt(Observation(_SCRIPT, 0, 0))
        assert len(prompt) > 0


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


class TestSimTrainer(OnVirtualTime, TrainerContract):
    @asynccontextmanager
    async def trainers(self, count: int) -> AsyncIterator[list[TrainerSubject]]:
        times = TrainTimes(gpus=2, gpu_s_per_token=0.5, lend_s=6.0, reclaim_s=3.0)
        checkpoints = SimCheckpoints()
        yield [
            TrainerSubject(
                trainer=SimTrainer(times, checkpoints=checkpoints), batch=_batch, gpus=(GpuId("a"), GpuId("b"))
            )
            for _ in range(count)
        ]


class TestSimGpuSource(OnVirtualTime, GpuSourceContract):
    @asynccontextmanager
    async def source(self) -> AsyncIterator[GpuSourceSubject]:
        source = SimGpuSource()

        async def cause(event: GpuSourceEvent) -> None:
            source.push(event)

        yield GpuSourceSubject(source=source, cause=cause)
