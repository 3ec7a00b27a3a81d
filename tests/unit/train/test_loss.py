"""The decoupled loss, by hand and against a naive implementation."""

from __future__ import annotations

import math

import pytest
import torch

from pearl.config.train import TrainConfig
from pearl.train.loss import METRICS, LossResult, TokenData, decoupled_loss

CONFIG = TrainConfig(clip_low=0.1, clip_high=0.1, importance_cap=1.5, entropy=0.1, kl=0.5)


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float32).log()


def loss_of(
    pi: torch.Tensor,
    *,
    prox: torch.Tensor,
    mu: torch.Tensor,
    advantages: tuple[float, ...],
    entropy: tuple[float, ...] | None = None,
    reference: torch.Tensor | None = None,
    config: TrainConfig = CONFIG,
    tokens: int | None = None,
) -> LossResult:
    data = TokenData(prox=prox, behaviour=mu, advantages=torch.tensor(advantages), reference=reference)
    own = torch.tensor(entropy or (0.0,) * len(pi))
    return decoupled_loss(pi, own, data, config, len(pi) if tokens is None else tokens)


def test_two_tokens_by_hand() -> None:
    # Token 0: ratio 0.6/0.5 = 1.2, clipped 1.1; weight 0.5/0.25 = 2, capped 1.5; A = 2:    1.5 * 2.2 = 3.3
    # Token 1: ratio 0.3/0.4 = 0.75, clipped 0.9; weight 0.4/0.8 = 0.5;            A = -1:  0.5 * -0.9 = -0.45
    # Entropy 0.1 * (0.7 + 0.3) = 0.1. KL: ref = pi for token 0; ref/pi = 2 for token 1: 2 - 1 - ln 2.
    kl = 1 - math.log(2)
    result = loss_of(
        log(0.6, 0.3),
        prox=log(0.5, 0.4),
        mu=log(0.25, 0.8),
        advantages=(2.0, -1.0),
        entropy=(0.7, 0.3),
        reference=log(0.6, 0.6),
    )
    assert result.loss.item() == pytest.approx((-3.3 + 0.45 - 0.1 + 0.5 * kl) / 2, rel=1e-6)
    # KL(pi || mu): r ln r - (r - 1) with r = 0.6/0.25 and 0.3/0.8.
    drift = 2.4 * math.log(2.4) - 1.4 + 0.375 * math.log(0.375) + 0.625
    expected = {
        "loss": 2 * result.loss.item(),
        "clip_fraction": 2.0,
        "entropy": 1.0,
        "kl_behaviour": drift,
        "cap_fraction": 1.0,
        "kl_reference": kl,
    }
    assert dict(zip(METRICS, result.sums.tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("pi", "advantage", "gradient"),
    # prox = 0.5, mu = 0.4: weight 1.25. d loss / d log pi = -weight * A * ratio, or 0 where the clip holds.
    [
        (0.525, 2.0, -1.25 * 2.0 * 1.05),
        (0.525, -2.0, 1.25 * 2.0 * 1.05),
        (0.60, 2.0, 0.0),
        (0.60, -2.0, 1.25 * 2.0 * 1.2),
        (0.40, -2.0, 0.0),
        (0.40, 2.0, -1.25 * 2.0 * 0.8),
    ],
)
def test_the_clip_turns_the_gradient_off_only_where_it_would_go_too_far(
    pi: float, advantage: float, gradient: float
) -> None:
    logprob = log(pi).requires_grad_()
    config = CONFIG.model_copy(update={"entropy": 0.0})
    result = loss_of(logprob, prox=log(0.5), mu=log(0.4), advantages=(advantage,), config=config)
    torch.autograd.backward(result.loss)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(gradient, rel=1e-5, abs=1e-9)
    assert result.sums[METRICS.index("clip_fraction")].item() == (gradient == 0)


def test_low_and_high_clip_are_told_apart() -> None:
    config = TrainConfig(clip_low=0.2, clip_high=0.5)
    up = loss_of(log(0.9), prox=log(0.5), mu=log(0.5), advantages=(1.0,), config=config)
    down = loss_of(log(0.1), prox=log(0.5), mu=log(0.5), advantages=(-1.0,), config=config)
    assert up.loss.item() == pytest.approx(-1.5)
    assert down.loss.item() == pytest.approx(0.8)


def test_micro_batches_add_up_to_the_minibatch() -> None:
    pi, prox, mu = log(0.2, 0.5, 0.3), log(0.25, 0.45, 0.3), log(0.2, 0.4, 0.35)
    whole = loss_of(pi, prox=prox, mu=mu, advantages=(1.0, -0.5, 2.0))
    parts = [
        loss_of(pi[:1], prox=prox[:1], mu=mu[:1], advantages=(1.0,), tokens=3),
        loss_of(pi[1:], prox=prox[1:], mu=mu[1:], advantages=(-0.5, 2.0), tokens=3),
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-6)
    assert (parts[0].sums + parts[1].sums).tolist() == pytest.approx(whole.sums.tolist(), rel=1e-6, abs=1e-9)


def test_only_pi_gets_a_gradient() -> None:
    others = [log(0.5).requires_grad_() for _ in range(3)]
    data = TokenData(
        prox=others[0].detach(), behaviour=others[1].detach(), advantages=torch.ones(1), reference=others[2].detach()
    )
    entropy = torch.ones(1, requires_grad=True)
    result = decoupled_loss(log(0.5).requires_grad_(), entropy, data, CONFIG, 1)
    torch.autograd.backward(result.loss)
    assert entropy.grad is not None
    assert entropy.grad.item() == pytest.approx(-0.1)
    assert not result.sums.requires_grad


def test_extreme_ratios_stay_finite() -> None:
    far = torch.tensor([-1e4, 0.0])
    logprob = torch.tensor([0.0, -1e4], requires_grad=True)
    result = loss_of(logprob, prox=far, mu=far.flip(0), advantages=(-1.0, -1.0), reference=far)
    torch.autograd.backward(result.loss)
    assert torch.isfinite(result.loss)
    assert torch.isfinite(result.sums).all()
    assert logprob.grad is not None
    assert torch.isfinite(logprob.grad).all()


def test_kl_estimates_are_unbiased() -> None:
    # Over a whole vocabulary, weighting each token by the distribution it is drawn from gives the exact divergence.
    generator = torch.Generator().manual_seed(0)
    pi, mu, ref = (torch.softmax(torch.randn(7, generator=generator), 0) for _ in range(3))
    kl_behaviour = kl_reference = 0.0
    for token in range(7):
        result = loss_of(
            pi[token : token + 1].log(),
            prox=pi[token : token + 1].log(),
            mu=mu[token : token + 1].log(),
            advantages=(0.0,),
            reference=ref[token : token + 1].log(),
        )
        sums = dict(zip(METRICS, result.sums.tolist(), strict=True))
        kl_behaviour += mu[token].item() * sums["kl_behaviour"]
        kl_reference += pi[token].item() * sums["kl_reference"]
    assert kl_behaviour == pytest.approx((pi * (pi / mu).log()).sum().item(), rel=1e-5)
    assert kl_reference == pytest.approx((pi * (pi / ref).log()).sum().item(), rel=1e-5)
