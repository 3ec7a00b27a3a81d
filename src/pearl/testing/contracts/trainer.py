"""Contract of `Trainer`: a step raises the version by one; equal state and batch give an equal step, whatever was between."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pearl.errors import CheckpointError, PearlError
from pearl.ports import Trainer
from pearl.records.ids import GpuId, WeightVersion
from pearl.records.training import TrainingBatch, TrainReport
from pearl.testing.contracts.base import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSubject:
    """A trainer under test, fresh, at version 0."""

    trainer: Trainer
    batch: Callable[[int, int], TrainingBatch]
    """`(version, salt)` -> a good batch for that version; another salt, another batch."""
    gpus: tuple[GpuId, ...]
    """That it can lend."""


class TrainerContract(Contract):
    """Subclass it and give `trainers`."""

    def trainers(self, count: int) -> AbstractAsyncContextManager[Sequence[TrainerSubject]]:
        """Fresh trainers in equal states."""
        raise NotImplementedError

    def test_a_step_raises_the_version_by_one(self) -> None:
        async def check() -> None:
            async with self.trainers(1) as (subject,):
                for version in range(3):
                    batch = subject.batch(version, version)
                    report = await subject.trainer.train(batch)
                    assert report.version == version + 1
                    assert report.samples == len(batch.samples)
                    assert report.trained_tokens == sum(len(sample.logprobs) for sample in batch.samples)
                    assert report.train_s >= 0
                    assert report.metrics
                    assert all(math.isfinite(value) for value in report.metrics.values())

        self.check(check())

    def test_equal_trainers_take_equal_steps(self) -> None:
        async def check() -> None:
            async with self.trainers(3) as (one, twin, other):
                same = [await self._train(subject, [1, 2]) for subject in (one, twin)]
                different = await self._train(other, [3, 2])
                assert same[0].metrics == same[1].metrics
                assert different.metrics != same[0].metrics

        self.check(check())

    def test_a_batch_of_a_wrong_version_changes_nothing(self) -> None:
        async def check() -> None:
            async with self.trainers(2) as (one, twin):
                for wrong in (1, 5):
                    batch = replace(one.batch(0, 1), version=WeightVersion(wrong))
                    with pytest.raises(PearlError):
                        await one.trainer.train(batch)
                assert (await self._train(one, [1])).metrics == (await self._train(twin, [1])).metrics

        self.check(check())

    def test_a_restored_trainer_takes_the_same_next_step(self, tmp_path: Path) -> None:
        async def check() -> None:
            async with self.trainers(2) as (one, two):
                await self._train(one, [1, 2])
                await one.trainer.save(tmp_path / "checkpoint")
                assert await two.trainer.restore(tmp_path / "checkpoint") == 2
                after = [await subject.trainer.train(subject.batch(2, 7)) for subject in (one, two)]
                assert after[0].version == after[1].version == 3
                assert after[0].metrics == after[1].metrics

        self.check(check())

    def test_a_trainer_goes_back_to_its_checkpoint(self, tmp_path: Path) -> None:
        async def check() -> None:
            async with self.trainers(1) as (subject,):
                await self._train(subject, [1])
                await subject.trainer.save(tmp_path / "checkpoint")
                first = await subject.trainer.train(subject.batch(1, 5))
                assert await subject.trainer.restore(tmp_path / "checkpoint") == 1
                again = await subject.trainer.train(subject.batch(1, 5))
                assert again.metrics == first.metrics

        self.check(check())

    def test_a_checkpoint_that_is_saved_again_is_replaced(self, tmp_path: Path) -> None:
        async def check() -> None:
            async with self.trainers(1) as (subject,):
                await subject.trainer.save(tmp_path / "checkpoint")
                await self._train(subject, [1])
                await subject.trainer.save(tmp_path / "checkpoint")
                assert await subject.trainer.restore(tmp_path / "checkpoint") == 1

        self.check(check())

    def test_a_missing_or_damaged_checkpoint_changes_nothing(self, tmp_path: Path) -> None:
        async def check() -> None:
            async with self.trainers(2) as (one, twin):
                await one.trainer.save(tmp_path / "checkpoint")
                for subject in (one, twin):
                    await self._train(subject, [1])
                with pytest.raises(CheckpointError):
                    await one.trainer.restore(tmp_path / "nothing here")
                for path in sorted(p for p in (tmp_path / "checkpoint").rglob("*") if p.is_file()):
                    content = path.read_bytes()
                    path.write_bytes(content[: len(content) // 2])
                    with pytest.raises(CheckpointError):
                        await one.trainer.restore(tmp_path / "checkpoint")
                    path.write_bytes(content)
                after = [await subject.trainer.train(subject.batch(1, 2)) for subject in (one, twin)]
                assert after[0].metrics == after[1].metrics

        self.check(check())

    def test_a_loan_changes_nothing(self) -> None:
        async def check() -> None:
            async with self.trainers(2) as (one, twin):
                await self._train(one, [1])
                lent = await one.trainer.lend_gpus(one.gpus)
                with pytest.raises(PearlError):
                    await one.trainer.train(one.batch(1, 2))
                reclaimed = await one.trainer.reclaim_gpus(one.gpus)
                assert min(lent.seconds, lent.freed_bytes, reclaimed.seconds, reclaimed.freed_bytes) >= 0
                after = await one.trainer.train(one.batch(1, 2))
                assert after.metrics == (await self._train(twin, [1, 2])).metrics

        self.check(check())

    async def _train(self, subject: TrainerSubject, salts: Sequence[int]) -> TrainReport:
        """Steps from version 0 on; the last report."""
        for version, salt in enumerate(salts):
            report = await subject.trainer.train(subject.batch(version, salt))
        return report
