"""From token sequences to padded micro batches, and back to flat trained tokens.

Padding is on the right, so under causal attention no real token ever sees it and no attention mask is needed. A trained
token at position t is predicted at position t - 1: that shift happens here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MIN_FILL = 0.6
"""A sequence shorter than this part of a micro batch's longest begins another one, if the first is worth a forward pass."""

WORTHWHILE_TOKENS = 1024
"""Padded tokens from which a forward pass costs more than its fixed overhead (measured: about 5 ms on a CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One trajectory."""

    token_ids: npt.NDArray[np.int32]
    """Shape `[L]`."""
    trained: npt.NDArray[np.int64]
    """Shape `[G]`: positions of the trained tokens, ascending, each in 1..L-1."""

    @classmethod
    def of(cls, token_ids: npt.NDArray[np.int32], ranges: Sequence[tuple[int, int]]) -> TokenSequence:
        """Build from half-open ranges of trained positions."""
        parts = [np.arange(start, stop, dtype=np.int64) for start, stop in ranges]
        return cls(token_ids=token_ids, trained=np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass: B sequences padded to L, holding T trained tokens row after row."""

    indices: tuple[int, ...]
    """Of the sequences, in row order."""
    input_ids: torch.Tensor
    """Shape `[B, L]`, int64."""
    rows: torch.Tensor
    """Shape `[T]`: row of each trained token."""
    predictors: torch.Tensor
    """Shape `[T]`: position whose output predicts the token."""
    targets: torch.Tensor
    """Shape `[T]`: the token."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return len(self.targets)

    def flat(self, values: Sequence[npt.NDArray[np.float64]]) -> torch.Tensor:
        """Line up per-sequence values (one `[G]` array per sequence of the whole batch) with the trained tokens, float32."""
        return torch.as_tensor(
            np.concatenate([values[index] for index in self.indices]), dtype=torch.float32, device=self.input_ids.device
        )


def micro_batches(
    sequences: Sequence[TokenSequence], chosen: Sequence[int], budget_tokens: int, device: torch.device
) -> tuple[MicroBatch, ...]:
    """Pack the chosen sequences, longest first, into micro batches of at most `budget_tokens` padded tokens.

    A sequence that is longer than the budget gets a micro batch of its own.
    """
    by_length = sorted(chosen, key=lambda index: (-len(sequences[index].token_ids), index))
    packs: list[list[int]] = []
    for index in by_length:
        length = len(sequences[index].token_ids)
        if packs:
            longest = len(sequences[packs[-1][0]].token_ids)
            size = longest * len(packs[-1])
            wasteful = length < MIN_FILL * longest and size >= WORTHWHILE_TOKENS
            if size + longest <= budget_tokens and not wasteful:
                packs[-1].append(index)
                continue
        packs.append([index])
    return tuple(_padded(sequences, pack, device) for pack in packs)


def _padded(sequences: Sequence[TokenSequence], pack: Sequence[int], device: torch.device) -> MicroBatch:
    own = [sequences[index] for index in pack]
    ids = np.zeros((len(own), len(own[0].token_ids)), dtype=np.int64)
    for row, sequence in enumerate(own):
        ids[row, : len(sequence.token_ids)] = sequence.token_ids
    rows = np.repeat(np.arange(len(own)), [len(sequence.trained) for sequence in own])
    positions = np.concatenate([sequence.trained for sequence in own])
    return MicroBatch(
        indices=tuple(pack),
        input_ids=torch.from_numpy(ids).to(device),
        rows=torch.from_numpy(rows).to(device),
        predictors=torch.from_numpy(positions - 1).to(device),
        targets=torch.from_numpy(ids[rows, positions]).to(device),
    )
