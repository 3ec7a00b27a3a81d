"""Drawing tokens, counter-based: the number drawn for a token depends on the request's seed and its position only.

`word(seed, position)` is output number `position` (from 0) of SplitMix64 whose state begins at `mix(seed)`:

    mix(z):  z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31   (mod 2**64)
    word(seed, position) = mix(mix(seed) + (position + 1) * 0x9E3779B97F4A7C15)

The seed is mixed first so that neighbouring seeds do not give shifted copies of one stream. The uniform number is the top
48 bits of the word: below one by far more than float64 rounding, so the inverse distribution function never runs off its
end and never gives a token of probability zero.

Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_BITS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One token for each of n sequences."""

    token_ids: npt.NDArray[np.int64]
    """Shape `[n]`."""
    logprobs: npt.NDArray[np.float32]
    """Shape `[n]`: under the tempered distribution that the token was drawn from; 0 when greedy."""
    finite: npt.NDArray[np.bool_]
    """Shape `[n]`: False where a NaN or an infinity above all others left nothing to draw from; the token means nothing."""

    def only(self, chosen: npt.NDArray[np.bool_]) -> Draw:
        """The draws of some sequences; `chosen` has shape `[n]`."""
        return Draw(token_ids=self.token_ids[chosen], logprobs=self.logprobs[chosen], finite=self.finite[chosen])


def mix(words: Words) -> Words:
    """SplitMix64's finaliser, a bijection of 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def word(seeds: Words, positions: Words) -> Words:
    """64 random bits for each pair of seed and absolute position."""
    return mix(mix(seeds) + (positions + np.uint64(1)) * _GOLDEN)


def uniform(seeds: Words, positions: Words) -> Doubles:
    """A number in `[0, 1)` for each pair of seed and absolute position."""
    return (word(seeds, positions) >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


@torch.inference_mode()
def draw(logits: Tensor, temperatures: Doubles, uniforms: Doubles) -> Draw:
    """Draw by inverse distribution function, in float64 and in order of token id.

    Args:
        logits: shape `[n, vocabulary]`.
        temperatures: shape `[n]`; 0 takes the most likely token (the lowest id of several), with log-probability 0.
        uniforms: shape `[n]`, in `[0, 1)`.
    """
    greedy = temperatures == 0
    exact = logits.double()
    # Relative to the largest logit first: a tiny temperature must give minus infinity, not a NaN.
    relative = exact - exact.amax(-1, keepdim=True)
    if (temperatures != 1).any():
        scale = torch.from_numpy(np.where(greedy, 1.0, temperatures)).to(logits.device)
        relative.div_(scale.unsqueeze(1))
    below = relative.exp().cumsum_(-1)
    whole = below[:, -1:]
    numbers = torch.from_numpy(uniforms).to(logits.device).unsqueeze(1)
    drawn = torch.searchsorted(below, numbers * whole, right=True)
    drawn.clamp_(max=logits.shape[1] - 1)  # only NaN gets there
    if greedy.any():
        drawn = torch.where(
            torch.from_numpy(greedy).to(logits.device).unsqueeze(1), exact.argmax(-1, keepdim=True), drawn
        )
    chosen = (relative.gather(1, drawn) - whole.log()).squeeze(1).cpu().numpy()
    finite = np.isfinite(chosen)
    return Draw(
        token_ids=drawn.squeeze(1).cpu().numpy(),
        logprobs=np.where(greedy, 0.0, chosen).astype(np.float32),
        finite=finite,
    )
