import asyncio
import json
from pathlib import Path

import pytest

from pearl.errors import CheckpointError, TrainingError
from pearl.records.ids import GpuId, GroupId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.records.turn import Versions
from pearl.testing.trainer import Consumed, FakeTrainer
from pearl.testing.virtual_time import run_virtual

A, B = GpuId("a"), GpuId("b")


def sample(
    name: str = "t",
    *,
    trained: tuple[tuple[int, int], ...] = ((1, 2), (3, 5)),
    logprobs: int = 3,
    versions: int = 3,
    reward: float = 1.0,
) -> TrainingSample:
    return TrainingSample(
        trajectory=TrajectoryId(name),
        group=GroupId("g"),
        token_ids=TokenIds([1, 2, 3, 4, 5]),
        trained=trained,
        logprobs=Floats([-0.5] * logprobs),
        versions=Versions.of([(0, versions)]),
        reward=reward,
    )


def batch(version: int, *samples: TrainingSample) -> TrainingBatch:
    return TrainingBatch(version=WeightVersion(version), samples=samples or (sample(),))


def test_a_step_takes_its_time_and_is_in_the_ledger() -> None:
    async def check() -> None:
        trainer = FakeTrainer(train_s=lambda one: 2.0 * len(one.samples))
        report = await trainer.train(batch(0, sample("x", reward=3.0), sample("y", reward=2.0)))
        assert asyncio.get_running_loop().time() == report.train_s == 4
        assert (report.version, report.samples, report.trained_tokens) == (1, 2, 6)
        assert report.metrics["reward"] == 2.5
        assert trainer.version == 1
        assert [one.trajectory for one in trainer.consumed] == ["x", "y"]
        assert trainer.consumed[0] == Consumed(
            step=0,
            trajectory=TrajectoryId("x"),
            group=GroupId("g"),
            trained=((1, 2), (3, 5)),
            versions=((0, 3),),
            reward=3.0,
        )

    run_virtual(check())


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (batch(1), "got a batch for version 1, want 0"),
        (batch(0, sample(logprobs=2)), "3 trained tokens, 2 log-probabilities and 3 versions"),
        (batch(0, sample(versions=4)), "3 trained tokens, 3 log-probabilities and 4 versions"),
        (batch(0, sample(trained=((3, 5), (1, 2)))), "want ascending within 5"),
        (batch(0, sample(trained=((1, 3), (2, 3)))), "want ascending within 5"),
        (batch(0, sample(trained=((-1, 2),))), "want ascending within 5"),
        (batch(0, sample(trained=((3, 6),))), "want ascending within 5"),
    ],
)
def test_a_bad_batch_is_refused_whole(bad: TrainingBatch, why: str) -> None:
    async def check() -> None:
        trainer = FakeTrainer()
        before = trainer.state
        with pytest.raises(TrainingError, match=why):
            await trainer.train(bad)
        assert (trainer.version, trainer.state, trainer.consumed) == (0, before, [])

    run_virtual(check())


def test_every_part_of_a_sample_matters() -> None:
    async def check() -> None:
        variants = [
            sample(),
            sample("other"),
            sample(reward=2.0),
            sample(trained=((1, 3), (4, 5))),
        ]
        states = []
        for one in variants:
            trainer = FakeTrainer()
            await trainer.train(batch(0, one))
            states.append(trainer.state)
        assert len(set(states)) == len(variants)

    run_virtual(check())


def test_a_step_can_be_made_to_fail() -> None:
    async def check() -> None:
        trainer = FakeTrainer()
        trainer.fail_next()
        trainer.fail_next(MemoryError("device"))
        for error in (TrainingError, MemoryError):
            with pytest.raises(error):
                await trainer.train(batch(0))
        assert (trainer.version, trainer.consumed) == (0, [])
        assert (await trainer.train(batch(0))).version == 1

    run_virtual(check())


def test_loans_are_kept_in_a_book() -> None:
    async def check() -> None:
        trainer = FakeTrainer(lend_s=1.5)
        report = await trainer.lend_gpus([A, B])
        assert (report.seconds, report.freed_bytes) == (1.5, 2 << 20)
        await trainer.reclaim_gpus([B])
        assert trainer.lent == {A}
        with pytest.raises(TrainingError, match="are lent; reclaim them"):
            await trainer.train(batch(0))
        with pytest.raises(TrainingError, match="are lent already"):
            await trainer.lend_gpus([A])
        with pytest.raises(TrainingError, match=r"got \['b'\], want GPUs that are lent: \['a'\]"):
            await trainer.reclaim_gpus([A, B])
        await trainer.reclaim_gpus([A])
        assert trainer.loans == [("lend", (A, B)), ("reclaim", (B,)), ("reclaim", (A,))]

    run_virtual(check())


def test_nothing_is_lent_during_a_step() -> None:
    async def check() -> None:
        trainer = FakeTrainer(train_s=5)
        step = asyncio.create_task(trainer.train(batch(0)))
        await asyncio.sleep(1)
        with pytest.raises(TrainingError, match="a training step is under way"):
            await trainer.lend_gpus([A])
        await step
        await trainer.lend_gpus([A])

    run_virtual(check())


def test_a_checkpoint_holds_state_and_ledger(tmp_path: Path) -> None:
    async def check() -> None:
        one, other = FakeTrainer(), FakeTrainer(version=9)
        await one.train(batch(0))
        await one.save(tmp_path / "new" / "folder")
        assert await other.restore(tmp_path / "new" / "folder") == 1
        assert (other.version, other.state, other.consumed) == (one.version, one.state, one.consumed)
        assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["fake_trainer.json"]

    run_virtual(check())


@pytest.mark.parametrize(
    ("key", "value"),
    [("model_hash", "another"), ("version", None), ("state", "xyz"), ("consumed", [{}]), ("consumed", 3)],
)
def test_a_wrong_checkpoint_is_refused(tmp_path: Path, key: str, value: object) -> None:
    async def check() -> None:
        trainer = FakeTrainer()
        await trainer.train(batch(0))
        await trainer.save(tmp_path)
        path = tmp_path / "fake_trainer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        with pytest.raises(CheckpointError, match=r"fake_trainer\.json"):
            await trainer.restore(tmp_path)
        assert trainer.version == 1

    run_virtual(check())


def test_a_checkpoint_with_wrong_ranges_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        trainer = FakeTrainer()
        await trainer.train(batch(0))
        await trainer.save(tmp_path)
        path = tmp_path / "fake_trainer.json"
        content = json.loads(path.read_text())
        content["consumed"][0]["trained"] = "everything"
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError):
            await trainer.restore(tmp_path)

    run_virtual(check())
