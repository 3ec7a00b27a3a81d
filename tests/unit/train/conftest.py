"""Batches of made-up trajectories, and trainers on the demo's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pearl.config.train import TrainConfig
from pearl.records.ids import GroupId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.records.turn import Versions
from pearl.train.trainer import GrpoTrainer

MakeSample = Callable[..., TrainingSample]
MakeBatch = Callable[..., TrainingBatch]
MakeTrainer = Callable[..., GrpoTrainer]
Weights = Callable[[GrpoTrainer], dict[str, torch.Tensor]]


def _sample(number: int = 0, group: int = 0, reward: float = 0.0, version: int = 0, **fields: Any) -> TrainingSample:
    """Two turns of random tokens; lengths differ from sample to sample."""
    rng = np.random.default_rng(number)
    start, middle = int(rng.integers(2, 6)), int(rng.integers(8, 14))
    trained = ((start, start + 2), (middle, middle + int(rng.integers(1, 4))))
    count = sum(stop - begin for begin, stop in trained)
    return TrainingSample(
        **{
            "trajectory": TrajectoryId(f"t{number}"),
            "group": GroupId(f"g{group}"),
            "token_ids": TokenIds(rng.integers(2, 90, trained[-1][1])),
            "trained": trained,
            "logprobs": Floats(-rng.uniform(3, 6, count)),
            "versions": Versions.of([(version, count)]),
            "reward": reward,
            **fields,
        }
    )


def _batch(version: int = 0, groups: int = 4, group_size: int = 4, seed: int = 0) -> TrainingBatch:
    rewards = np.random.default_rng((seed, version)).uniform(0, 1, groups * group_size)
    samples = tuple(
        _sample(1000 * seed + 100 * version + n, group=n // group_size, reward=float(reward), version=version)
        for n, reward in enumerate(rewards)
    )
    return TrainingBatch(version=WeightVersion(version), samples=samples)


@pytest.fixture
def make_sample() -> MakeSample:
    return _sample


@pytest.fixture
def make_batch() -> MakeBatch:
    return _batch


@pytest.fixture
def make_trainer(tiny_model: Path) -> MakeTrainer:
    def make(
        folder: Path = tiny_model, *, seed: int = 0, total_steps: int = 10, temperature: float = 1.0, **train: Any
    ) -> GrpoTrainer:
        config = TrainConfig(**{"learning_rate": 1e-3, **train})
        return GrpoTrainer(folder, config, seed=seed, total_steps=total_steps, temperature=temperature)

    return make


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output layer has weights of its own."""
    from scripts.make_tiny_qwen3 import TinyQwen3, make_tiny_qwen3

    folder = tmp_path_factory.mktemp("models") / "untied"
    make_tiny_qwen3(folder, TinyQwen3(tied=False))
    return folder


@pytest.fixture
def weights() -> Weights:
    """Copies of a trainer's weights."""
    return lambda trainer: {name: tensor.clone() for name, tensor in trainer.model.host_copy().items()}
