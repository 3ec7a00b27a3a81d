"""The training step: against a naive implementation, and everything that must hold when it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pearl.errors import ConfigError, TrainingError, WeightsError
from pearl.records.ids import GpuId, GroupId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.records.turn import Versions
from pearl.train import trainer as trainer_module
from pearl.train.loss import LossResult, TokenData, decoupled_loss
from pearl.train.optimizer import Optimizer
from pearl.train.trainer import GrpoTrainer

MakeBatch = Callable[..., TrainingBatch]
MakeTrainer = Callable[..., GrpoTrainer]
Weights = Callable[[GrpoTrainer], dict[str, torch.Tensor]]
Gradients = list[dict[str, torch.Tensor]]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> Gradients:
    """What every optimizer update was given."""
    seen: Gradients = []
    original = Optimizer.update

    def update(self: Optimizer, rate: float) -> float:
        seen.append({name: p.grad.clone() for name, p in self._parameters.items() if p.grad is not None})
        return original(self, rate)

    monkeypatch.setattr(Optimizer, "update", update)
    return seen


def naive_gradients(folder: Path, batch: TrainingBatch, config: dict[str, float]) -> dict[str, torch.Tensor]:
    """First update of a step, token by token, in probabilities; one minibatch, so pi_prox = pi in value."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for sample in batch.samples:
        rewards = [other.reward for other in batch.samples if other.group == sample.group]
        advantage = (sample.reward - np.mean(rewards)) / (np.std(rewards) + config["advantage_offset"])
        ids = torch.tensor(sample.token_ids.tolist())
        probabilities = torch.softmax(model(ids[None]).logits[0] / config["temperature"], -1)
        positions = [position for start, stop in sample.trained for position in range(start, stop)]
        for position, logprob in zip(positions, sample.logprobs.tolist(), strict=True):
            pi = probabilities[position - 1, ids[position]]
            prox, mu = pi.item(), math.exp(logprob)
            entropy = -(probabilities[position - 1] * probabilities[position - 1].log()).sum()
            losses.append(
                -min(prox / mu, config["importance_cap"]) * pi / prox * advantage - config["entropy"] * entropy
            )
    loss = torch.stack(losses).mean()
    torch.autograd.backward(loss)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch_tokens", [16384, 40])
def test_the_gradient_is_that_of_a_naive_implementation(
    tiny_model: Path,
    make_trainer: MakeTrainer,
    make_batch: MakeBatch,
    gradients: Gradients,
    micro_batch_tokens: int,
) -> None:
    config = {"advantage_offset": 0.2, "entropy": 0.05, "importance_cap": 1.5}
    trainer = make_trainer(temperature=0.7, micro_batch_tokens=micro_batch_tokens, **config)
    batch = make_batch()
    report = trainer.train(batch)
    (own,) = gradients
    naive = naive_gradients(tiny_model, batch, {**config, "temperature": 0.7})
    assert own.keys() == naive.keys()
    for name, gradient in naive.items():
        torch.testing.assert_close(own[name], gradient, rtol=2e-4, atol=1e-6)
    norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in naive.values()))
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert 0 < report.metrics["cap_fraction"] < 1


def test_report(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    batch = make_batch()
    trainer = make_trainer(minibatches=2, decay="linear", total_steps=11, final_fraction=0.5)
    report = trainer.train(batch)
    rewards = [sample.reward for sample in batch.samples]
    assert (report.version, trainer.version, report.samples) == (1, 1, 16)
    assert report.trained_tokens == sum(len(sample.logprobs) for sample in batch.samples)
    assert report.metrics["reward_mean"] == pytest.approx(np.mean(rewards))
    assert report.metrics["reward_std"] == pytest.approx(np.std(rewards))
    assert report.metrics["zero_advantage_groups"] == 0
    assert report.metrics["learning_rate"] == 1e-3
    assert trainer.train(make_batch(version=1)).metrics["learning_rate"] == pytest.approx(0.95e-3)
    assert all(type(value) is float and math.isfinite(value) for value in report.metrics.values())


def test_zero_advantage_moves_nothing(make_trainer: MakeTrainer, make_batch: MakeBatch, weights: Weights) -> None:
    trainer = make_trainer()
    before = weights(trainer)
    batch = make_batch()
    alike = replace(batch, samples=tuple(replace(sample, reward=0.3) for sample in batch.samples))
    report = trainer.train(alike)
    assert report.metrics["zero_advantage_groups"] == 1
    assert report.metrics["grad_norm"] == 0
    assert same(weights(trainer), before)


def test_prox_is_of_the_start_of_the_step_in_every_update(
    make_trainer: MakeTrainer, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def spy(pi: torch.Tensor, entropy: torch.Tensor, data: TokenData, *rest: Any) -> LossResult:
        seen.append((pi.detach().clone(), data.prox, data.behaviour))
        return decoupled_loss(pi, entropy, data, *rest)

    monkeypatch.setattr(trainer_module, "decoupled_loss", spy)
    batch = make_batch()
    make_trainer(minibatches=3, learning_rate=1e-2).train(batch)
    make_trainer(minibatches=3, learning_rate=0.0).train(batch)
    moving, still = seen[:3], seen[3:]
    assert len(moving) == len(still) == 3
    for number, ((pi, prox, mu), (pi_still, prox_still, mu_still)) in enumerate(zip(moving, still, strict=True)):
        assert torch.equal(mu, mu_still)  # the same samples in the same minibatches
        torch.testing.assert_close(prox, pi_still, atol=1e-6, rtol=0)
        torch.testing.assert_close(prox, prox_still, atol=1e-6, rtol=0)
        assert torch.allclose(pi, prox, atol=1e-6) == (number == 0)


def test_minibatches_share_out_every_sample_once(
    make_trainer: MakeTrainer, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []

    def spy(pi: torch.Tensor, entropy: torch.Tensor, data: TokenData, *rest: Any) -> LossResult:
        seen.append(data.behaviour.tolist())
        return decoupled_loss(pi, entropy, data, *rest)

    monkeypatch.setattr(trainer_module, "decoupled_loss", spy)
    batch = make_batch()
    everything = sorted(value for sample in batch.samples for value in sample.logprobs.tolist())
    for minibatches, updates in ((5, 5), (100, 16)):
        seen.clear()
        make_trainer(minibatches=minibatches).train(batch)
        assert len(seen) == updates
        assert sorted(value for part in seen for value in part) == everything


def test_equal_state_and_batch_give_an_equal_step(
    make_trainer: MakeTrainer, make_batch: MakeBatch, weights: Weights
) -> None:
    one, other, third = make_trainer(minibatches=4), make_trainer(minibatches=4), make_trainer(minibatches=4, seed=1)
    reports = [trainer.train(make_batch()) for trainer in (one, other)]
    third.train(make_batch())
    assert reports[0].metrics == reports[1].metrics
    assert same(weights(one), weights(other))
    assert not same(weights(one), weights(third))  # another shuffle


def test_kl_is_measured_from_version_0_and_holds_the_model_there(
    make_trainer: MakeTrainer, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[torch.Tensor] = []

    def spy(pi: torch.Tensor, entropy: torch.Tensor, data: TokenData, *rest: Any) -> LossResult:
        if data.reference is not None:
            references.append(data.reference)
        return decoupled_loss(pi, entropy, data, *rest)

    monkeypatch.setattr(trainer_module, "decoupled_loss", spy)
    batch = make_batch()
    away = {}
    for kl in (1e-9, 30.0):
        trainer = make_trainer(learning_rate=2e-3, kl=kl)
        for version in range(12):
            again = replace(
                batch,
                version=WeightVersion(version),
                samples=tuple(
                    replace(sample, versions=Versions.of([(0, len(sample.logprobs))])) for sample in batch.samples
                ),
            )
            report = trainer.train(again)
            assert (report.metrics["kl_reference"] > 0) == (version > 0)
        away[kl] = report.metrics["kl_reference"]
    assert away[30.0] < 0.2 * away[1e-9]
    # The reference never moves, so the same batch has the same reference log-probabilities every time.
    assert len(references) == 24
    assert all(torch.equal(reference, references[0]) for reference in references)


def failing_from(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loss be NaN from its given call on."""
    calls = 0

    def broken(*arguments: Any) -> LossResult:
        nonlocal calls
        calls += 1
        result = decoupled_loss(*arguments)
        return LossResult(loss=result.loss * float("nan"), sums=result.sums) if calls > call else result

    monkeypatch.setattr(trainer_module, "decoupled_loss", broken)


@pytest.mark.parametrize("good_updates", [0, 1, 2])
def test_a_step_that_fails_half_way_leaves_no_trace(
    make_trainer: MakeTrainer,
    make_batch: MakeBatch,
    weights: Weights,
    good_updates: int,
) -> None:
    trainer, untouched = make_trainer(minibatches=3), make_trainer(minibatches=3)
    for own in (trainer, untouched):
        own.train(make_batch())
    before = weights(trainer)
    with pytest.MonkeyPatch.context() as patch:
        failing_from(good_updates, patch)
        with pytest.raises(TrainingError, match="the loss is nan"):
            trainer.train(make_batch(version=1))
    assert trainer.version == 1
    assert same(weights(trainer), before)
    # Optimizer state and randomness are untouched, too: the next step is the one that would have been.
    reports = [own.train(make_batch(version=1)) for own in (trainer, untouched)]
    assert reports[0].metrics == reports[1].metrics
    assert same(weights(trainer), weights(untouched))


def test_bad_batches_change_nothing(make_trainer: MakeTrainer, make_batch: MakeBatch, weights: Weights) -> None:
    trainer = make_trainer()
    before = weights(trainer)
    batch = make_batch()
    nan = replace(batch.samples[3], logprobs=Floats([float("nan")] * len(batch.samples[3].logprobs)))
    for bad in (
        make_batch(version=1),
        replace(batch, samples=()),
        replace(batch, samples=(*batch.samples[:3], nan)),
    ):
        with pytest.raises(TrainingError):
            trainer.train(bad)
    assert trainer.version == 0
    assert same(weights(trainer), before)


def test_weights_that_are_not_finite_are_noticed(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.parameters["model.norm.weight"][0] = float("nan")
    with pytest.raises(TrainingError, match="the loss is nan"):
        trainer.train(make_batch())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_greedy_sampling_cannot_be_trained(make_trainer: MakeTrainer, temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.temperature"):
        make_trainer(temperature=temperature)


def test_lending_without_a_gpu_moves_nothing_but_stops_training(
    make_trainer: MakeTrainer, make_batch: MakeBatch, weights: Weights
) -> None:
    trainer, never_lent = make_trainer(), make_trainer()
    gpus = [GpuId("node/0")]
    assert trainer.lend_gpus(gpus).freed_bytes == 0
    assert trainer.lend_gpus(gpus).freed_bytes == 0
    with pytest.raises(TrainingError, match="reclaim them first"):
        trainer.train(make_batch())
    assert trainer.reclaim_gpus(gpus).freed_bytes == 0
    for own in (trainer, never_lent):
        own.train(make_batch())
    assert same(weights(trainer), weights(never_lent))


def test_export(make_trainer: MakeTrainer, make_batch: MakeBatch, weights: Weights, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.train(make_batch())
    path = tmp_path / "new" / "v1.safetensors"
    manifest = trainer.export(path, WeightVersion(1))
    assert manifest.version == 1
    assert same(load_file(path), weights(trainer))
    with pytest.raises(WeightsError, match=r"got version 0, want 1"):
        trainer.export(path, WeightVersion(0))


def test_it_learns(make_trainer: MakeTrainer, tiny_model: Path) -> None:
    """A bandit: answer the prompt with any of ten tokens; on-policy samples come from transformers, not from the trainer."""
    wanted = torch.arange(10, 20)
    trainer = make_trainer(learning_rate=1e-2, total_steps=25, decay="linear")
    prompt = torch.tensor([[5, 6, 7]])
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)

    def distribution() -> torch.Tensor:
        reference.load_state_dict(trainer.model.host_copy(), strict=False)
        reference.tie_weights()
        with torch.no_grad():
            return torch.log_softmax(reference(prompt).logits[0, -1], -1)

    before = distribution().exp()[wanted].sum().item()
    for version in range(25):
        logprobs = distribution()
        drawn = torch.multinomial(logprobs.exp(), 64, replacement=True, generator=generator).tolist()
        samples = tuple(
            TrainingSample(
                trajectory=TrajectoryId(f"{version}-{n}"),
                group=GroupId(f"{version}-{n // 16}"),
                token_ids=TokenIds([5, 6, 7, token]),
                trained=((3, 4),),
                logprobs=Floats([logprobs[token].item()]),
                versions=Versions.of([(version, 1)]),
                reward=float(token in wanted.tolist()),
            )
            for n, token in enumerate(drawn)
        )
        report = trainer.train(TrainingBatch(version=WeightVersion(version), samples=samples))
        # On-policy: pi is mu, up to the rounding of two implementations.
        assert report.metrics["kl_behaviour"] < 1e-6
    assert before < 0.3
    assert distribution().exp()[wanted].sum().item() > 0.9
