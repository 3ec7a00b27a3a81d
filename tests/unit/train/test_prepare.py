"""Batches that must not reach the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pearl.errors import TrainingError
from pearl.records.ids import WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.records.turn import Versions
from pearl.train.prepare import PreparedBatch, prepare

MakeSample = Callable[..., TrainingSample]


def prepared(*samples: TrainingSample, version: int = 3, at: int = 3) -> PreparedBatch:
    return prepare(TrainingBatch(version=WeightVersion(version), samples=samples), at, 98, 0.25)


def test_arrays_by_hand(make_sample: MakeSample) -> None:
    fields: dict[str, Any] = {
        "token_ids": TokenIds([5, 6, 7, 8]),
        "trained": ((1, 2), (3, 4)),
        "logprobs": Floats([-1.0, -2.0]),
        "versions": Versions.of([(2, 1), (3, 1)]),
    }
    one, other = make_sample(0, reward=1.0, **fields), make_sample(1, reward=3.0, **fields)
    batch = prepared(one, other)
    assert batch.trained_tokens == 4
    assert batch.sequences[0].trained.tolist() == [1, 3]
    assert batch.behaviour[1].tolist() == [-1, -2]
    # mean 2, std 1, offset 0.25; the same for every token of a sample
    np.testing.assert_allclose(batch.advantages[0], [-0.8, -0.8])
    np.testing.assert_allclose(batch.advantages[1], [0.8, 0.8])
    assert batch.rewards.tolist() == [1, 3]
    assert batch.zero_advantage_groups == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trained": ((0, 2), (3, 4))}, r"trained range \[0, 2\)"),
        ({"trained": ((1, 2), (3, 5))}, r"trained range \[3, 5\)"),
        ({"trained": ((1, 1), (2, 4))}, r"trained range \[1, 1\)"),
        ({"trained": ((2, 3), (2, 4))}, r"trained range \[2, 4\)"),
        ({"trained": ((3, 4), (1, 2))}, r"trained range \[1, 2\)"),
        ({"trained": ((1, 2),)}, "1 trained tokens but 2 log-probabilities and 2 versions"),
        ({"logprobs": Floats([-1.0])}, "2 trained tokens but 1 log-probabilities"),
        ({"versions": Versions.of([(3, 3)])}, "and 3 versions"),
        ({"logprobs": Floats([-1.0, float("nan")])}, "log-probability is not finite"),
        ({"logprobs": Floats([float("-inf"), -1.0])}, "log-probability is not finite"),
        ({"reward": float("nan")}, "reward: got nan"),
        ({"token_ids": TokenIds([5, 6, 98, 7])}, r"token ids 5\.\.98, want 0\.\.97"),
        ({"token_ids": TokenIds([5, -1, 6, 7])}, r"token ids -1\.\.7"),
        ({"versions": Versions.of([(3, 1), (4, 1)])}, "version 4, newer than the trainer's 3"),
    ],
)
def test_a_malformed_sample_is_named(make_sample: MakeSample, fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "token_ids": TokenIds([5, 6, 7, 8]),
        "trained": ((1, 2), (3, 4)),
        "logprobs": Floats([-1.0, -2.0]),
        "versions": Versions.of([(3, 2)]),
    }
    with pytest.raises(TrainingError, match=f"training sample t1: .*{message}"):
        prepared(make_sample(0, **good), make_sample(1, **{**good, **fields}))


def test_another_version(make_sample: MakeSample) -> None:
    with pytest.raises(TrainingError, match=r"got version 2, want 3"):
        prepared(make_sample(0), version=2, at=3)


def test_nothing_to_train(make_sample: MakeSample) -> None:
    with pytest.raises(TrainingError, match="0 samples, no trained token"):
        prepared()
    nothing = make_sample(0, trained=(), logprobs=Floats(), versions=Versions())
    with pytest.raises(TrainingError, match="1 samples, no trained token"):
        prepared(nothing)
    assert prepared(nothing, make_sample(1)).trained_tokens > 0
