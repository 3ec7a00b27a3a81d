"""The suite accepts the fake, and finds broken trainers made from it."""

import inspect
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pearl.errors import CheckpointError
from pearl.records.ids import GpuId, GroupId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import LendReport, TrainingBatch, TrainingSample, TrainReport
from pearl.records.turn import Versions
from pearl.testing.contracts.trainer import TrainerContract, TrainerSubject
from pearl.testing.trainer import FakeTrainer
from pearl.testing.virtual_time import run_virtual


class SkipsAVersion(FakeTrainer):
    async def train(self, batch: TrainingBatch) -> TrainReport:
        report = await super().train(batch)
        self.version = WeightVersion(self.version + 1)
        return replace(report, version=self.version)


class CountsSamplesAsTokens(FakeTrainer):
    async def train(self, batch: TrainingBatch) -> TrainReport:
        return replace(await super().train(batch), trained_tokens=len(batch.samples))


class Diverges(FakeTrainer):
    async def train(self, batch: TrainingBatch) -> TrainReport:
        return replace(await super().train(batch), metrics={"loss": float("nan")})


class DrawsFromNowhere(FakeTrainer):
    async def train(self, batch: TrainingBatch) -> TrainReport:
        self.state = random.SystemRandom().randbytes(8)
        return await super().train(batch)


class IgnoresItsData(FakeTrainer):
    async def train(self, batch: TrainingBatch) -> TrainReport:
        return replace(await super().train(batch), metrics={"loss": 1.0})


class TrainsAnything(FakeTrainer):
    async def train(self, batch: TrainingBatch) -> TrainReport:
        return await super().train(replace(batch, version=self.version))


class RefusesTooLate(FakeTrainer):
    async def train(self, batch: TrainingBatch) -> TrainReport:
        if batch.version != self.version:
            self.state = b"spoilt"
        return await super().train(batch)


class ForgetsItsState(FakeTrainer):
    async def restore(self, folder: Path) -> WeightVersion:
        version = await super().restore(folder)
        self.state = b"forgotten"
        return version


class SavesOnce(FakeTrainer):
    async def save(self, folder: Path) -> None:
        if not folder.exists():
            await super().save(folder)


class BeginsAgainWithoutACheckpoint(FakeTrainer):
    async def restore(self, folder: Path) -> WeightVersion:
        try:
            return await super().restore(folder)
        except CheckpointError:
            return self.version


class SpoilsItsStateWithABadCheckpoint(FakeTrainer):
    async def restore(self, folder: Path) -> WeightVersion:
        self.state = b"spoilt"
        return await super().restore(folder)


class TrainsOnLentGpus(FakeTrainer):
    def _check(self, batch: TrainingBatch) -> None:
        pass


class ComesBackChanged(FakeTrainer):
    async def reclaim_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        self.state = b"changed"
        return await super().reclaim_gpus(gpus)


def batch(version: int, salt: int) -> TrainingBatch:
    sample = TrainingSample(
        trajectory=TrajectoryId(f"t{salt}"),
        group=GroupId("g"),
        token_ids=TokenIds([1, 2, 3]),
        trained=((1, 3),),
        logprobs=Floats([-0.5, -1.0]),
        versions=Versions.of([(version, 2)]),
        reward=1.0,
    )
    return TrainingBatch(version=WeightVersion(version), samples=(sample,))


class Suite(TrainerContract):
    def __init__(self, make: type[FakeTrainer]) -> None:
        self.make = make

    def run_work(self, work) -> None:  # type: ignore[no-untyped-def]
        run_virtual(work)

    @asynccontextmanager
    async def trainers(self, count: int) -> AsyncIterator[list[TrainerSubject]]:
        yield [TrainerSubject(trainer=self.make(), batch=batch, gpus=(GpuId("a"),)) for _ in range(count)]


BREACHES = [
    (SkipsAVersion, "a_step_raises_the_version_by_one"),
    (CountsSamplesAsTokens, "a_step_raises_the_version_by_one"),
    (Diverges, "a_step_raises_the_version_by_one"),
    (DrawsFromNowhere, "equal_trainers_take_equal_steps"),
    (IgnoresItsData, "equal_trainers_take_equal_steps"),
    (TrainsAnything, "a_batch_of_a_wrong_version_changes_nothing"),
    (RefusesTooLate, "a_batch_of_a_wrong_version_changes_nothing"),
    (ForgetsItsState, "a_restored_trainer_takes_the_same_next_step"),
    (ForgetsItsState, "a_trainer_goes_back_to_its_checkpoint"),
    (SavesOnce, "a_checkpoint_that_is_saved_again_is_replaced"),
    (BeginsAgainWithoutACheckpoint, "a_missing_or_damaged_checkpoint_changes_nothing"),
    (SpoilsItsStateWithABadCheckpoint, "a_missing_or_damaged_checkpoint_changes_nothing"),
    (TrainsOnLentGpus, "a_loan_changes_nothing"),
    (ComesBackChanged, "a_loan_changes_nothing"),
]


def run_test(make: type[FakeTrainer], name: str, folder: Path) -> None:
    test = getattr(Suite(make), f"test_{name}")
    test(*[folder for _ in inspect.signature(test).parameters])


@pytest.mark.parametrize("name", sorted({name for _, name in BREACHES}))
def test_a_sound_trainer_is_accepted(name: str, tmp_path: Path) -> None:
    run_test(FakeTrainer, name, tmp_path)


@pytest.mark.parametrize(("broken", "name"), BREACHES)
def test_a_broken_trainer_is_found(
    broken: type[FakeTrainer], name: str, tmp_path: Path, rejected: Callable[[Callable[[], None]], None]
) -> None:
    rejected(lambda: run_test(broken, name, tmp_path))
