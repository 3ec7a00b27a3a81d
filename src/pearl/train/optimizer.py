"""AdamW with a learning rate by training step, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from pearl.config.train import TrainConfig
from pearl.errors import TrainingError

BETAS = (0.9, 0.99)
"""A run has hundreds of updates, not hundred thousands: with 0.999 the second moment is still that of the first ones."""


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Return the rate of training step `step` (from 0); the last one of `total_steps`, and any beyond, has the final rate.

    It is the decayed rate times a ramp that reaches 1 at step `ramp_steps` (counted from 1).
    """
    progress = min(step / (total_steps - 1), 1.0) if total_steps > 1 else 0.0
    match config.decay:
        case "constant":
            left = 1.0
        case "linear":
            left = 1 - progress
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
    fraction = 1.0 if config.decay == "constant" else config.final_fraction + (1 - config.final_fraction) * left
    ramp = min(1.0, (step + 1) / config.ramp_steps) if config.ramp_steps else 1.0
    return config.learning_rate * fraction * ramp


class Optimizer:
    """AdamW over named parameters; weight decay on matrices only."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig) -> None:
        self._parameters = parameters
        self._gradient_clip = config.gradient_clip
        matrices = [p for p in parameters.values() if p.dim() >= 2]
        others = [p for p in parameters.values() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS)
        self.updates = 0

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def update(self, rate: float) -> float:
        """Clip the accumulated gradients, apply them, and return their norm before clipping.

        Raises:
            TrainingError: the norm is not finite; nothing was applied.
        """
        for parameter in self._parameters.values():
            if parameter.grad is None:  # so that all parameters have seen the same number of updates
                parameter.grad = torch.zeros_like(parameter)
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self._gradient_clip))
        if not math.isfinite(norm):
            raise TrainingError(f"optimizer update {self.updates}: the gradient norm is {norm}")
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.updates += 1
        return norm

    def moments(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return copies of Adam's moments on the host, by parameter name; empty before the first update."""
        if self.updates == 0:
            return {}, {}
        first, second = (
            {name: self._adam.state[p][key].detach().to("cpu", copy=True) for name, p in self._parameters.items()}
            for key in ("exp_avg", "exp_avg_sq")
        )
        return first, second

    def load(self, updates: int, first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
        """Take the state of after `updates` updates."""
        self._adam.state.clear()
        self.updates = updates
        if updates == 0:
            return
        for name, parameter in self._parameters.items():
            self._adam.state[parameter] = {
                "step": torch.tensor(float(updates)),
                "exp_avg": first[name].to(parameter.device, copy=True),
                "exp_avg_sq": second[name].to(parameter.device, copy=True),
            }

    def move(self, device: torch.device) -> None:
        """Move the state to where the parameters are."""
        for state in self._adam.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(device)
