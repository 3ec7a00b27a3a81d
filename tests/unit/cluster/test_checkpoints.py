"""Checkpoints of a run: whole or not at all, the newest kept, damage told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pearl.cluster.checkpoints import PROGRESS, CheckpointFolder, begin_incarnation, checkpoints, restore
from pearl.errors import CheckpointError, RunFailed, RunFolderError
from pearl.pipeline.rollout import RolloutProgress
from pearl.records.ids import WeightVersion
from pearl.testing.trainer import FakeTrainer

PROGRESS_AT_3 = RolloutProgress(cursor=14, consumed=6, unfinished=(7, 11))


async def saved(root: Path, *versions: int, keep: int = 2) -> None:
    for version in versions:
        await CheckpointFolder(root, FakeTrainer(version=version), keep).save(WeightVersion(version), PROGRESS_AT_3)


def test_trainer_and_progress_come_back_together(tmp_path: Path) -> None:
    async def work() -> None:
        await saved(tmp_path, 3)
        trainer = FakeTrainer()
        assert await restore(tmp_path / "step-000003", trainer) == (3, PROGRESS_AT_3)
        assert trainer.version == 3

    asyncio.run(work())


def test_the_newest_are_kept_and_nothing_partial_is_left(tmp_path: Path) -> None:
    asyncio.run(saved(tmp_path, 1, 2, 10, 9, keep=2))
    # Kept by version, not by the time of writing.
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000009", "step-000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000009", "step-000010"]


def test_a_checkpoint_that_is_written_again_is_replaced(tmp_path: Path) -> None:
    async def work() -> None:
        await saved(tmp_path, 3)
        other = RolloutProgress(cursor=99, consumed=6, unfinished=())
        await CheckpointFolder(tmp_path, FakeTrainer(version=3), 2).save(WeightVersion(3), other)
        assert (await restore(tmp_path / "step-000003", FakeTrainer()))[1] == other

    asyncio.run(work())


def test_a_failing_save_leaves_the_last_one(tmp_path: Path) -> None:
    class Broken(FakeTrainer):
        async def save(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "half").write_text("x")
            raise RunFailed("no space left")

    async def work() -> None:
        await saved(tmp_path, 3)
        with pytest.raises(RunFailed, match="no space"):
            await CheckpointFolder(tmp_path, Broken(version=4), 2).save(WeightVersion(4), PROGRESS_AT_3)
        assert [path.name for path in checkpoints(tmp_path)] == ["step-000003"]
        await saved(tmp_path, 4)
        assert not (tmp_path / "step-000004" / "trainer" / "half").exists()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version: got 2, want 1"),
        ({"cursor": -1}, "cursor"),
        ({"unfinished": "7"}, "unfinished"),
        ({"weight_version": 4}, "version 3, progress at 4"),
        ({"more": 1}, "more"),
    ],
)
def test_damaged_progress_is_told(tmp_path: Path, change: dict[str, object], message: str) -> None:
    async def work() -> None:
        await saved(tmp_path, 3)
        path = tmp_path / "step-000003" / PROGRESS
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(CheckpointError, match=message):
            await restore(tmp_path / "step-000003", FakeTrainer())

    asyncio.run(work())


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-000001"):
        asyncio.run(restore(tmp_path / "step-000001", FakeTrainer()))


def test_a_checkpoint_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # A full disk is no mistake of the user's: the run failed, and can be resumed.
    with pytest.raises(RunFailed, match=r"step-000003 cannot be written: .*make room and resume"):
        asyncio.run(saved(tmp_path / "file", 3))


@pytest.mark.parametrize("text", ["", "many", "1.5"])
def test_a_damaged_count_of_incarnations_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "incarnation").write_text(text)
    with pytest.raises(RunFolderError, match="incarnation"):
        begin_incarnation(tmp_path)


def test_incarnations_are_counted(tmp_path: Path) -> None:
    assert [begin_incarnation(tmp_path) for _ in range(3)] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["incarnation"]
