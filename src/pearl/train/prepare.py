"""Check a training batch and lay it out as arrays; the trainer touches nothing before this has passed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pearl.errors import TrainingError
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.train.advantage import group_advantages
from pearl.train.batching import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """S samples; G differs per sample."""

    sequences: tuple[TokenSequence, ...]
    behaviour: tuple[npt.NDArray[np.float64], ...]
    """log mu, `[G]` per sample."""
    advantages: tuple[npt.NDArray[np.float64], ...]
    """`[G]` per sample, the same number for all its tokens."""
    rewards: npt.NDArray[np.float64]
    """Shape `[S]`."""
    zero_advantage_groups: float
    """Fraction of groups whose rewards are all equal."""

    @property
    def trained_tokens(self) -> int:
        """Over all samples."""
        return sum(len(sequence.trained) for sequence in self.sequences)


def prepare(batch: TrainingBatch, version: int, vocabulary: int, advantage_offset: float) -> PreparedBatch:
    """Check the batch for a trainer at `version` and compute its advantages.

    Raises:
        TrainingError: the batch is of another version, empty, or a sample is malformed; the message names it.
    """
    if batch.version != version:
        raise TrainingError(f"training batch: got version {batch.version}, want {version} (the trainer's)")
    if not any(sample.trained for sample in batch.samples):
        raise TrainingError(f"training batch of version {version}: got {len(batch.samples)} samples, no trained token")
    for sample in batch.samples:
        _check(sample, version, vocabulary)
    rewards = [sample.reward for sample in batch.samples]
    advantages, zero = group_advantages(rewards, [sample.group for sample in batch.samples], advantage_offset)
    sequences = tuple(TokenSequence.of(sample.ids.array, sample.trained) for sample in batch.samples)
    return PreparedBatch(
        sequences=sequences,
        behaviour=tuple(sample.logprobs.array.astype(np.float64) for sample in batch.samples),
        advantages=tuple(
            np.full(len(sequence.trained), advantage) for sequence, advantage in zip(sequences, advantages, strict=True)
        ),
        rewards=np.asarray(rewards, dtype=np.float64),
        zero_advantage_groups=zero,
    )


def _check(sample: TrainingSample, version: int, vocabulary: int) -> None:
    where = f"training sample {sample.trajectory}"
    length, end = len(sample.token_ids), 1  # position 0 has nothing before it that could predict it
    for start, stop in sample.trained:
        if not end <= start < stop <= length:
            raise TrainingError(
                f"{where}: trained range [{start}, {stop}) is empty, overlaps, or lies outside 1..{length - 1}"
            )
        end = stop
    generated = sum(stop - start for start, stop in sample.trained)
    if len(sample.logprobs) != generated or len(sample.versions) != generated:
        raise TrainingError(
            f"{where}: {generated} trained tokens but {len(sample.logprobs)} log-probabilities "
            f"and {len(sample.versions)} versions"
        )
    if not np.isfinite(sample.logprobs.array).all():
        raise TrainingError(f"{where}: a log-probability is not finite")
    if not np.isfinite(sample.reward):
        raise TrainingError(f"{where}: reward: got {sample.reward}, want a finite number")
    ids = sample.ids.array
    if length and (ids.min() < 0 or ids.max() >= vocabulary):
        raise TrainingError(f"{where}: token ids {ids.min()}..{ids.max()}, want 0..{vocabulary - 1} (the model's)")
    newest = max((run.version for run in sample.versions.runs), default=version)
    if newest > version:
        raise TrainingError(f"{where}: has tokens of version {newest}, newer than the trainer's {version}")
