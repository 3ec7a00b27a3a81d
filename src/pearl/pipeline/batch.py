"""Batch assembly: ended groups -> training samples, token for token."""

from __future__ import annotations

import numpy as np

from pearl.records.ids import WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.records.trajectory import Group, Trajectory
from pearl.records.turn import Versions


def assemble(version: WeightVersion, groups: list[Group]) -> TrainingBatch:
    """Build the batch of the training step that begins at `version`; trajectories without a generated token are left out."""
    return TrainingBatch(
        version=version,
        samples=tuple(
            _sample(trajectory) for group in groups for trajectory in group.trajectories if trajectory.generated_tokens
        ),
    )


def _sample(trajectory: Trajectory) -> TrainingSample:
    ids: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    trained: list[tuple[int, int]] = []
    versions = Versions()
    position = 0
    for turn in trajectory.turns:
        prompt, completion = turn.prompt, turn.completion
        if not isinstance(prompt, TokenIds) or not isinstance(completion.token_ids, TokenIds):
            raise TypeError(f"trajectory {trajectory.id}: a training sample needs token ids, got only their count")
        ids += [prompt.array, completion.token_ids.array]
        logprobs.append(completion.logprobs.array)
        start = position + len(prompt)
        position = start + len(completion.token_ids)
        trained.append((start, position))
        versions = versions + completion.versions
    return TrainingSample(
        trajectory=trajectory.id,
        group=trajectory.group,
        token_ids=TokenIds(np.concatenate(ids)),
        trained=tuple(trained),
        logprobs=Floats(np.concatenate(logprobs)),
        versions=versions,
        reward=trajectory.reward,
    )
