"""Batch assembly: ended groups -> training samples, token for token."""

from __future__ import annotations

import numpy as np

from pearl.records.ids import WeightVersion
from pearl.records.tokens import Floats, TokenCount, TokenIds, Tokens, Zeros
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
    tokens: list[Tokens] = []
    logprobs: list[Floats] = []
    trained: list[tuple[int, int]] = []
    versions = Versions()
    position = 0
    for turn in trajectory.turns:
        prompt, completion = turn.prompt, turn.completion
        tokens += [prompt, completion.token_ids]
        logprobs.append(completion.logprobs)
        start = position + len(prompt)
        position = start + len(completion.token_ids)
        trained.append((start, position))
        versions = versions + completion.versions
    return TrainingSample(
        trajectory=trajectory.id,
        group=trajectory.group,
        token_ids=_joined(trajectory, tokens),
        trained=tuple(trained),
        logprobs=_joined_floats(logprobs),
        versions=versions,
        reward=trajectory.reward,
    )


def _joined(trajectory: Trajectory, parts: list[Tokens]) -> TokenIds | TokenCount:
    ids = [part.array for part in parts if isinstance(part, TokenIds)]
    if len(ids) == len(parts):
        return TokenIds(np.concatenate(ids))
    if ids:
        raise TypeError(f"trajectory {trajectory.id}: got token ids and counts of tokens, want one or the other")
    return TokenCount(sum(len(part) for part in parts))


def _joined_floats(parts: list[Floats]) -> Floats:
    if all(isinstance(part, Zeros) for part in parts):
        return Zeros(sum(len(part) for part in parts))
    return Floats(np.concatenate([part.array for part in parts]))
