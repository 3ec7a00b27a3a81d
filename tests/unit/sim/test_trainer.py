"""A simulated trainer: times by hand, loans, and a ledger that notices what is trained twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pearl.errors import CheckpointError, TrainingError
from pearl.records.ids import GpuId, GroupId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.records.turn import Versions
from pearl.sim.trainer import PAPER_STEP_GPUS, PAPER_STEP_S, SimCheckpoints, SimTrainer, TrainTimes, gpu_s_per_token
from pearl.virtual_time import run_virtual

GPUS = [GpuId("a"), GpuId("b")]


def sample(name: str, trained: tuple[tuple[int, int], ...] = ((10, 30), (40, 45)), version: int = 0) -> TrainingSample:
    count = sum(stop - start for start, stop in trained)
    return TrainingSample(
        trajectory=TrajectoryId(name),
        group=GroupId(name.partition(".")[0]),
        token_ids=TokenIds([1] * 50),
        trained=trained,
        logprobs=Floats([0.0] * count),
        versions=Versions.of([(version, count)]),
        reward=1.0,
    )


def batch(version: int, *samples: TrainingSample) -> TrainingBatch:
    return TrainingBatch(version=WeightVersion(version), samples=samples)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_step_takes_what_its_tokens_take() -> None:
    async def check() -> None:
        trainer = SimTrainer(TrainTimes(gpus=4, gpu_s_per_token=0.2, step_s=3.0))
        report = await trainer.train(batch(0, sample("g0.0"), sample("g0.1")))
        # 100 tokens at 0.2 GPU seconds on 4 GPUs, and 3 s.
        assert now_s() == report.train_s == trainer.busy_s == 8.0
        assert (report.version, report.samples, report.trained_tokens) == (1, 2, 50)
        assert report.metrics["reward"] == 1.0

    run_virtual(check())


def test_a_rate_gives_back_the_step_that_it_is_from() -> None:
    rate = gpu_s_per_token(PAPER_STEP_S, PAPER_STEP_GPUS, 1_000_000)
    assert TrainTimes(gpus=8, gpu_s_per_token=rate).seconds(1_000_000) == pytest.approx(163.8)
    assert TrainTimes(gpus=16, gpu_s_per_token=rate).seconds(500_000) == pytest.approx(40.95)


def test_loans_take_their_times_and_stop_training_from_the_first_moment() -> None:
    async def check() -> None:
        trainer = SimTrainer(
            TrainTimes(gpus=2, gpu_s_per_token=0.0, step_s=5.0, lend_s=6.0, reclaim_s=3.0, lent_bytes_per_gpu=7)
        )
        step = asyncio.create_task(trainer.train(batch(0, sample("g0.0"))))
        await asyncio.sleep(1)
        with pytest.raises(TrainingError, match="a training step is under way"):
            await trainer.lend_gpus(GPUS)
        await step
        lending = asyncio.create_task(trainer.lend_gpus(GPUS))
        await asyncio.sleep(1)
        with pytest.raises(TrainingError, match=r"GPUs \['a', 'b'\] are lent; reclaim them before training"):
            await trainer.train(batch(1, sample("g1.0", version=1)))
        with pytest.raises(TrainingError, match=r"lend of \['b'\]: \['b'\] twice"):
            await trainer.lend_gpus(GPUS[1:])
        report = await lending
        assert (now_s(), report.seconds, report.freed_bytes) == (11.0, 6.0, 14)
        await trainer.reclaim_gpus(GPUS[:1])
        with pytest.raises(TrainingError, match=r"GPUs \['b'\] are lent"):
            await trainer.train(batch(1, sample("g1.0", version=1)))
        with pytest.raises(TrainingError, match=r"reclaim: got \['a'\], want GPUs that are lent: \['b'\]"):
            await trainer.reclaim_gpus(GPUS)
        await trainer.reclaim_gpus(GPUS[1:])
        await trainer.train(batch(1, sample("g1.0", version=1)))
        assert [(at_s, what) for at_s, what, _ in trainer.loans] == [
            (11.0, "lend"),
            (14.0, "reclaim"),
            (17.0, "reclaim"),
        ]

    run_virtual(check())


def test_the_ledger_notices_what_is_trained_twice() -> None:
    async def check() -> None:
        trainer = SimTrainer(TrainTimes(gpus=1, gpu_s_per_token=0.0))
        first = sample("g0.0", ((10, 20), (30, 40)))
        await trainer.train(batch(0, first, sample("g0.1"), sample("g0.2")))
        assert trainer.trained_twice() == ()
        # Other tokens of a trajectory are no harm; one token again is.
        await trainer.train(batch(1, sample("g0.0", ((20, 30),)), sample("g0.2", ((44, 46),))))
        assert trainer.trained_twice() == ("g0.2",)
        assert [entry.step for entry in trainer.consumed] == [0, 0, 0, 1, 1]
        assert trainer.staleness_max == 1

    run_virtual(check())


def test_a_step_that_fails_or_is_cancelled_trains_nothing() -> None:
    async def check() -> None:
        trainer = SimTrainer(TrainTimes(gpus=1, gpu_s_per_token=0.0, step_s=5.0))
        trainer.fail_next()
        with pytest.raises(TrainingError, match="made to fail"):
            await trainer.train(batch(0, sample("g0.0")))
        step = asyncio.create_task(trainer.train(batch(0, sample("g0.0"))))
        await asyncio.sleep(1)
        with pytest.raises(TrainingError, match="a training step is under way, want one at a time"):
            await trainer.train(batch(0, sample("g0.0")))
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        assert (trainer.version, trainer.consumed, trainer.busy_s) == (0, [], 0.0)
        await trainer.train(batch(0, sample("g0.0")))

    run_virtual(check())


def test_checkpoints_are_shared_where_they_are_told_to_be() -> None:
    async def check() -> None:
        times, shared = TrainTimes(gpus=1, gpu_s_per_token=0.0), SimCheckpoints()
        one, two = (SimTrainer(times, checkpoints=shared) for _ in range(2))
        await one.train(batch(0, sample("g0.0")))
        await one.save(Path("there"))
        await one.train(batch(1, sample("g1.0")))
        assert await two.restore(Path("there")) == 1
        assert [entry.trajectory for entry in two.consumed] == ["g0.0"]
        with pytest.raises(CheckpointError, match="there: got model simulated, want other"):
            await SimTrainer(times, model="other", checkpoints=shared).restore(Path("there"))
        with pytest.raises(CheckpointError, match="there: no simulated checkpoint was saved there"):
            await SimTrainer(times).restore(Path("there"))

    run_virtual(check())


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"trainer: gpus: got 0, want >= 1"):
        TrainTimes(gpus=0, gpu_s_per_token=1.0)
    with pytest.raises(ValueError, match=r"trainer: lend_s: got nan, want a finite number >= 0"):
        TrainTimes(gpus=1, gpu_s_per_token=1.0, lend_s=float("nan"))
    with pytest.raises(ValueError, match=r"trainer: got a step of 1 s on 8 GPUs over 0 tokens"):
        gpu_s_per_token(1, 8, 0)
    trainer = SimTrainer(TrainTimes(gpus=1, gpu_s_per_token=0.0))
    odd = replace(sample("g0.0"), logprobs=Floats([0.0]))
    with pytest.raises(TrainingError, match=r"sample g0.0: got 25 trained tokens, 1 log-probabilities and 25 versions"):
        run_virtual(trainer.train(batch(0, odd)))
    with pytest.raises(TrainingError, match=r"got a batch for version 3, want 0"):
        run_virtual(trainer.train(batch(3, sample("g0.0"))))
