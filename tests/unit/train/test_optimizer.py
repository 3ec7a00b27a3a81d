"""Learning rate by step, and AdamW's first update by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pearl.config.train import TrainConfig
from pearl.errors import TrainingError
from pearl.train.optimizer import Optimizer, learning_rate


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.8, 0.6, 0.4, 0.2]),
        # 0.2 + 0.8 * (1 + cos(pi * k / 4)) / 2
        ("cosine", [1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2]),
    ],
)
def test_decay_ends_at_the_final_fraction_at_the_last_step(decay: str, rates: list[float]) -> None:
    config = TrainConfig.model_validate({"learning_rate": 1.0, "decay": decay, "final_fraction": 0.2})
    assert [learning_rate(config, step, 5) for step in range(5)] == pytest.approx(rates)
    assert learning_rate(config, 7, 5) == pytest.approx(rates[-1])
    assert learning_rate(config, 0, 1) == 1.0


def test_the_ramp_multiplies_the_decayed_rate() -> None:
    config = TrainConfig(learning_rate=1.0, decay="linear", final_fraction=0.2, ramp_steps=4)
    rates = [learning_rate(config, step, 5) for step in range(5)]
    assert rates == pytest.approx([1.0 * 0.25, 0.8 * 0.5, 0.6 * 0.75, 0.4, 0.2])


def parameters() -> dict[str, nn.Parameter]:
    return {"matrix": nn.Parameter(torch.ones(2, 2)), "gain": nn.Parameter(torch.ones(2))}


def with_gradients(own: dict[str, nn.Parameter], matrix: float, gain: float) -> None:
    own["matrix"].grad, own["gain"].grad = torch.full((2, 2), matrix), torch.full((2,), gain)


def test_first_update_by_hand() -> None:
    own = parameters()
    optimizer = Optimizer(own, TrainConfig(learning_rate=9.0, weight_decay=0.5, gradient_clip=100))
    with_gradients(own, 2.0, -3.0)
    # Norm: sqrt(4 * 2**2 + 2 * 3**2). Adam's first step is rate * sign; decay 1 - rate * 0.5 on the matrix only.
    assert optimizer.update(0.1) == pytest.approx(math.sqrt(34))
    torch.testing.assert_close(own["matrix"].detach(), torch.full((2, 2), 0.95 - 0.1))
    torch.testing.assert_close(own["gain"].detach(), torch.full((2,), 1.1))
    assert optimizer.updates == 1


def test_clipping_scales_all_gradients_and_reports_the_norm_before() -> None:
    own = parameters()
    optimizer = Optimizer(own, TrainConfig(gradient_clip=1.0))
    with_gradients(own, 3.0, 0.0)
    assert optimizer.update(0.1) == pytest.approx(6.0)
    first, second = optimizer.moments()
    # Clipped gradient 3 / 6 = 0.5; moments (1 - beta) * g and (1 - beta) * g**2.
    torch.testing.assert_close(first["matrix"], torch.full((2, 2), 0.05))
    torch.testing.assert_close(second["matrix"], torch.full((2, 2), 0.01 * 0.25))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    own = parameters()
    optimizer = Optimizer(own, TrainConfig())
    with_gradients(own, bad, 1.0)
    with pytest.raises(TrainingError, match="gradient norm"):
        optimizer.update(0.1)
    assert own["matrix"].tolist() == [[1, 1], [1, 1]]
    assert optimizer.updates == 0
    assert optimizer.moments() == ({}, {})


def test_a_parameter_without_gradient_keeps_its_value_and_has_moments() -> None:
    own = parameters()
    optimizer = Optimizer(own, TrainConfig())
    own["matrix"].grad = torch.ones(2, 2)
    optimizer.update(0.1)
    assert own["gain"].tolist() == [1, 1]
    assert optimizer.moments()[0]["gain"].tolist() == [0, 0]


def test_loaded_state_continues_exactly() -> None:
    one, other = parameters(), parameters()
    first, second = Optimizer(one, TrainConfig()), Optimizer(other, TrainConfig())
    with_gradients(one, 2.0, 1.0)
    first.update(0.1)
    with torch.no_grad():
        for name, parameter in other.items():
            parameter.copy_(one[name])
    second.load(first.updates, *first.moments())
    for own, optimizer in ((one, first), (other, second)):
        with_gradients(own, -0.5, 4.0)
        optimizer.update(0.05)
    assert all(torch.equal(one[name], other[name]) for name in one)
    # What was handed over is a copy: going on with one does not move the other.
    assert not torch.equal(first.moments()[0]["gain"], torch.tensor([0.1, 0.1]))
    second.load(0, {}, {})
    assert second.moments() == ({}, {})
