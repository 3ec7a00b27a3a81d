"""What a fake engine draws: a function of (seed, absolute position) alone, so a resumed request draws the same tokens."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from pearl.records.ids import TrajectoryId
from pearl.records.turn import TurnRequest

FAKE_STOP = 0
"""The stop token of the fakes; `fake_token` never gives it."""
FAKE_VOCAB = 97
"""Stop token, the 95 printable ASCII characters, newline: the vocabulary of `FakeCodec`."""

_BLOCK = 128
"""Positions drawn at once; the turns of a trajectory mostly share a block."""
_HASHED = 16
"""Positions per hash: 64 bytes, 4 each."""


def fake_draws(
    seed: int, start: int, count: int, vocab: int = FAKE_VOCAB
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Tokens and log-probabilities at the positions `start .. start + count`; both of shape `[count]`, read-only.

    Tokens are in `1 .. vocab - 1`, log-probabilities in `(-2, -1]`.
    """
    first, last = start // _BLOCK, (start + count - 1) // _BLOCK
    here = slice(start - first * _BLOCK, start - first * _BLOCK + count)
    if first == last:
        tokens, logprobs = _block(seed, first, vocab)
        return tokens[here], logprobs[here]
    blocks = [_block(seed, block, vocab) for block in range(first, last + 1)]
    tokens, logprobs = (np.concatenate(part)[here] for part in zip(*blocks, strict=True))
    return tokens, logprobs


@lru_cache(maxsize=4096)
def _block(seed: int, block: int, vocab: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    key = seed.to_bytes(8, "little")
    first = block * _BLOCK // _HASHED
    parts = range(first, first + _BLOCK // _HASHED)
    words = np.frombuffer(
        b"".join(blake2b(part.to_bytes(8, "little"), key=key).digest() for part in parts), dtype="<u4"
    )
    tokens = (words % np.uint32(vocab - 1)).astype(np.int32) + np.int32(1)
    logprobs = (words >> np.uint32(22)).astype(np.float32) / np.float32(-1024) - np.float32(1)
    tokens.flags.writeable = logprobs.flags.writeable = False
    return tokens, logprobs


def fake_token(seed: int, position: int, vocab: int = FAKE_VOCAB) -> int:
    """The token that every fake engine draws at an absolute position."""
    return int(fake_draws(seed, position, 1, vocab)[0][0])


class TurnStarts:
    """Where each trajectory's turn began; shared by the engines of a fleet, so a continued turn keeps its length."""

    def __init__(self) -> None:
        self._starts: dict[TrajectoryId, tuple[int, int]] = {}

    def generated(self, request: TurnRequest) -> int:
        """Tokens that the turn has already generated before this request."""
        turn, start = self._starts.get(request.trajectory, (-1, 0))
        if turn != request.turn or start > len(request.context):
            start = len(request.context)
            self._starts[request.trajectory] = (request.turn, start)
        return len(request.context) - start
