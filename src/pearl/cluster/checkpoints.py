"""Checkpoints of a run: trainer state and rollout progress together, in `checkpoints/step-NNNNNN`, written atomically."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from pearl.errors import CheckpointError, RunFailed, RunFolderError
from pearl.pipeline.rollout import RolloutProgress
from pearl.ports import Trainer
from pearl.records.ids import WeightVersion
from pearl.train.whole_folder import written_whole

SCHEMA = 1
TRAINER = "trainer"
PROGRESS = "progress.json"


class _Progress(BaseModel):
    """`progress.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: NonNegativeInt
    weight_version: NonNegativeInt
    cursor: NonNegativeInt
    consumed: NonNegativeInt
    unfinished: list[NonNegativeInt]


class CheckpointFolder:
    """Writes checkpoints of a run and keeps the newest few."""

    def __init__(self, root: Path, trainer: Trainer, keep: int) -> None:
        self._root, self._trainer, self._keep = root, trainer, keep

    async def save(self, version: WeightVersion, progress: RolloutProgress) -> None:
        """Write a checkpoint; it appears whole or not at all.

        Raises:
            RunFailed: it cannot be written; the one before is still there.
        """
        record = _Progress(
            schema_version=SCHEMA,
            weight_version=version,
            cursor=progress.cursor,
            consumed=progress.consumed,
            unfinished=list(progress.unfinished),
        )
        folder = self._root / f"step-{version:06d}"
        try:
            with written_whole(folder) as partial:
                await self._trainer.save(partial / TRAINER)
                (partial / PROGRESS).write_text(json.dumps(record.model_dump()) + "\n")
        except OSError as error:
            raise RunFailed(f"checkpoint {folder} cannot be written: {error}; make room and resume the run") from error
        for old in checkpoints(self._root)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def checkpoints(root: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(root.glob("step-*"))


def read_progress(checkpoint: Path) -> tuple[WeightVersion, RolloutProgress]:
    """Version and progress of the rollout in a checkpoint.

    Raises:
        CheckpointError: missing, damaged, or written by another version of pearl.
    """
    path = checkpoint / PROGRESS
    try:
        record = _Progress.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if record.schema_version != SCHEMA:
        raise CheckpointError(f"{path}: schema_version: got {record.schema_version}, want {SCHEMA}")
    progress = RolloutProgress(cursor=record.cursor, consumed=record.consumed, unfinished=tuple(record.unfinished))
    return WeightVersion(record.weight_version), progress


async def restore(checkpoint: Path, trainer: Trainer) -> tuple[WeightVersion, RolloutProgress]:
    """Give the trainer its state back; returns the version and the rollout's progress.

    Raises:
        CheckpointError: missing, damaged, of another model, or its two parts do not fit together.
    """
    noted, progress = read_progress(checkpoint)
    version = await trainer.restore(checkpoint / TRAINER)
    if version != noted:
        raise CheckpointError(f"{checkpoint}: the trainer is at version {version}, progress at {noted}")
    return version, progress


def begin_incarnation(folder: Path) -> int:
    """Count, in the run's folder, that the run is resumed; returns how often it has been.

    Raises:
        RunFolderError: the file cannot be read or written.
    """
    path = folder / "incarnation"
    try:
        number = (int(path.read_text()) if path.exists() else 0) + 1
        partial = path.with_suffix(".partial")
        partial.write_text(f"{number}\n")
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: how often the run was resumed cannot be counted: {error}") from error
    return number
