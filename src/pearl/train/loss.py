"""The decoupled PPO loss.

With pi the current log-probabilities, pi_prox those at the start of the training step, mu those recorded when the token
was drawn (by weights up to `max_staleness` versions older), A the advantage, per trained token:

    ratio  = pi / pi_prox
    policy = min(pi_prox / mu, C) * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    loss   = -policy - entropy_weight * H(pi) + kl_weight * (ref / pi - 1 - log(ref / pi))

averaged over the trained tokens of the minibatch. Only pi carries a gradient. Clipping is centred on pi_prox, so stale
data is not held to the neighbourhood of the old weights; the capped weight pi_prox / mu corrects for who drew it.
Source: AReaL, arXiv 2505.24298, section 5.2; the k3 estimator of the KL: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pearl.config.train import TrainConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20, e**20 = 5e8: far outside any clip range, and finite in float32."""

METRICS = ("loss", "clip_fraction", "entropy", "kl_behaviour", "cap_fraction", "kl_reference")
"""What `LossResult.sums` holds, in order.

`clip_fraction`: tokens whose policy gradient the clip turned off. `kl_behaviour`: estimate of KL(pi || mu), from tokens
drawn by mu. `cap_fraction`: tokens whose weight was cut to C.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """What the loss needs of T trained tokens besides pi; no gradient; shapes `[T]`."""

    prox: torch.Tensor
    """log pi_prox."""
    behaviour: torch.Tensor
    """log mu."""
    advantages: torch.Tensor
    reference: torch.Tensor | None = None
    """log-probabilities under the reference weights; only with `kl` > 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """Loss of one micro batch."""

    loss: torch.Tensor
    """Scalar; its sum over the micro batches of a minibatch is the minibatch's token mean."""
    sums: torch.Tensor
    """Shape `[len(METRICS)]`, float64, detached: sums over tokens."""


def decoupled_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, data: TokenData, config: TrainConfig, minibatch_tokens: int
) -> LossResult:
    """Return the loss of T tokens, given log pi and H(pi) of each (shapes `[T]`)."""
    log_ratio = (logprobs - data.prox).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped = ratio * data.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * data.advantages
    importance = (data.prox - data.behaviour).clamp(max=LOG_RATIO_LIMIT).exp()
    weight = importance.clamp(max=config.importance_cap)
    token_loss = -weight * torch.minimum(unclipped, clipped) - config.entropy * entropy
    kl_reference = torch.zeros_like(logprobs)
    if data.reference is not None:
        away = (data.reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl_reference = away.exp() - 1 - away
        token_loss = token_loss + config.kl * kl_reference
    with torch.no_grad():
        drift = (logprobs - data.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        per_token = (
            token_loss,
            clipped < unclipped,
            entropy,
            # E_mu[r log r] = KL(pi || mu); taking off E_mu[r - 1] = 0 makes every term >= 0.
            drift.exp() * drift - (drift.exp() - 1),
            importance > config.importance_cap,
            kl_reference,
        )
        sums = torch.stack([values.detach().double().sum() for values in per_token])
    return LossResult(loss=token_loss.sum() / minibatch_tokens, sums=sums)
