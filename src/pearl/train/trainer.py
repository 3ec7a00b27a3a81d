"""GRPO on one device: the training step, and everything that must be exact around it.

*All or nothing*: a step that cannot be completed raises `TrainingError` and leaves weights, optimizer and version as they
were. *Repeatable*: whatever is random in a step is drawn from `(seed, version)`, so equal state and batch give an equal step.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pearl.config.train import TrainConfig
from pearl.errors import CheckpointError, ConfigError, TrainingError, WeightsError
from pearl.records.ids import GpuId, WeightVersion
from pearl.records.training import LendReport, Manifest, TrainingBatch, TrainReport
from pearl.train.batching import MicroBatch, micro_batches
from pearl.train.checkpoint import TrainerState, read_checkpoint, write_checkpoint
from pearl.train.export import write_version
from pearl.train.loss import METRICS, LossResult, TokenData, decoupled_loss
from pearl.train.model import CausalModel
from pearl.train.optimizer import Optimizer, learning_rate
from pearl.train.prepare import PreparedBatch, prepare


class GrpoTrainer:
    """The synchronous trainer of one process; the process is its own (thread count, device)."""

    def __init__(
        self,
        model_folder: Path,
        config: TrainConfig,
        seed: int,
        total_steps: int,
        *,
        temperature: float = 1.0,
        device: str = "cpu",
    ) -> None:
        """Load the model as version 0.

        Raises:
            ModelError: the checkpoint is missing, damaged or unsupported.
            ConfigError: a greedy temperature.
        """
        if not temperature > 0:
            raise ConfigError(
                f"sampling.temperature: got {temperature:g}, want > 0 for training "
                "(greedy sampling has no log-probabilities to learn from)"
            )
        torch.set_num_threads(config.threads)
        self.model = CausalModel(model_folder, torch.device(device))
        self._config = config
        self._seed = seed
        self._total_steps = total_steps
        self._temperature = temperature
        self._version = WeightVersion(0)
        self._optimizer = Optimizer(self.model.parameters, config)
        self._reference: CausalModel | None = None
        self._lent = False

    @property
    def version(self) -> WeightVersion:
        """Training steps done."""
        return self._version

    @property
    def micro_batch_tokens(self) -> int:
        """Padded tokens per forward pass, at most."""
        return self._config.micro_batch_tokens

    def train(self, batch: TrainingBatch) -> TrainReport:
        """Do one training step; the version rises by one.

        Raises:
            TrainingError: a malformed batch, or numbers that are not finite; the state is unchanged.
        """
        started_s = time.perf_counter()
        if self._lent:
            raise TrainingError("training step: the training GPUs are lent to rollout; reclaim them first")
        prepared = prepare(batch, self._version, self.model.vocabulary, self._config.advantage_offset)
        if self._config.kl > 0 and self._reference is None:
            self._reference = self._frozen_copy()
        minibatches = self._minibatches(prepared)
        # One update is checked before it is applied; of several, a later one may fail after an earlier one was applied.
        before = self._state() if len(minibatches) > 1 else None
        rate = learning_rate(self._config, self._version, self._total_steps)
        try:
            sums, norms = self._update_all(prepared, minibatches, rate)
        except BaseException:
            if before is not None:
                self._load(before)
            raise
        finally:
            self._optimizer.zero_gradients()
        self._version = WeightVersion(self._version + 1)
        return TrainReport(
            version=self._version,
            train_s=time.perf_counter() - started_s,
            samples=len(batch.samples),
            trained_tokens=prepared.trained_tokens,
            metrics={
                **dict(zip(METRICS, (sums / prepared.trained_tokens).tolist(), strict=True)),
                "grad_norm": sum(norms) / len(norms),
                "learning_rate": rate,
                "reward_mean": float(prepared.rewards.mean()),
                "reward_std": float(prepared.rewards.std()),
                "zero_advantage_groups": prepared.zero_advantage_groups,
            },
        )

    def export(self, path: Path, version: WeightVersion) -> Manifest:
        """Write the current weights to a safetensors file at `path`, atomically.

        Raises:
            WeightsError: `version` is not the trainer's, or the file cannot be written.
        """
        if version != self._version:
            raise WeightsError(f"export: got version {version}, want {self._version} (the trainer's)")
        return write_version(self.model, path, version)

    def lend_gpus(self, gpus: Sequence[GpuId]) -> LendReport:  # noqa: ARG002 - the port's signature; one rank has one GPU
        """Move training state to the host; without a GPU there is nothing to move. Lending twice changes nothing."""
        return self._move(torch.device("cpu"), lent=True)

    def reclaim_gpus(self, gpus: Sequence[GpuId]) -> LendReport:  # noqa: ARG002
        """Bring training state back, unchanged."""
        return self._move(self.model.device, lent=False)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, atomically.

        Raises:
            RunFailed: it cannot be written.
        """
        write_checkpoint(folder, self._state())

    def restore(self, folder: Path) -> WeightVersion:
        """Read a checkpoint back, bit for bit, and return its version.

        Raises:
            CheckpointError: missing, damaged, or of another model; the state is unchanged.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.parameters.items()}
        state = read_checkpoint(folder, self.model.hash, shapes)
        if self._config.kl > 0 and state.version > 0 and not state.reference:
            raise CheckpointError(
                f"checkpoint {folder}: has no reference weights, which train.kl = {self._config.kl:g} needs; "
                "resume with the train.kl = 0 that the run began with"
            )
        self._load(state)
        return self._version

    def _minibatches(self, prepared: PreparedBatch) -> list[tuple[MicroBatch, ...]]:
        order = np.random.default_rng((self._seed, self._version)).permutation(len(prepared.sequences))
        trained = [int(index) for index in order if len(prepared.sequences[index].trained)]
        parts = np.array_split(trained, min(self._config.minibatches, len(trained)))
        budget = self._config.micro_batch_tokens
        return [micro_batches(prepared.sequences, part.tolist(), budget, self.model.device) for part in parts]

    def _update_all(
        self, prepared: PreparedBatch, minibatches: Sequence[tuple[MicroBatch, ...]], rate: float
    ) -> tuple[torch.Tensor, list[float]]:
        # The first update begins at the weights of the step's start: its own forward pass gives pi_prox.
        prox = [[None] * len(minibatches[0])] + [
            [self._score_frozen(self.model, micro) for micro in minibatch] for minibatch in minibatches[1:]
        ]
        sums = torch.zeros(len(METRICS), dtype=torch.float64)
        norms: list[float] = []
        for minibatch, own_prox in zip(minibatches, prox, strict=True):
            self._optimizer.zero_gradients()
            tokens = sum(micro.tokens for micro in minibatch)
            for micro, micro_prox in zip(minibatch, own_prox, strict=True):
                result = self._loss(prepared, micro, micro_prox, tokens)
                if not math.isfinite(loss := result.loss.item()):
                    raise TrainingError(f"training step of version {self._version}: the loss is {loss}")
                torch.autograd.backward(result.loss)
                sums += result.sums.cpu()
            norms.append(self._optimizer.update(rate))
        return sums, norms

    def _loss(
        self, prepared: PreparedBatch, micro: MicroBatch, prox: torch.Tensor | None, minibatch_tokens: int
    ) -> LossResult:
        scores = self.model.score(micro, self._temperature, entropy_gradient=self._config.entropy > 0)
        data = TokenData(
            prox=scores.logprobs.detach() if prox is None else prox,
            behaviour=micro.flat(prepared.behaviour),
            advantages=micro.flat(prepared.advantages),
            reference=None if self._reference is None else self._score_frozen(self._reference, micro),
        )
        return decoupled_loss(scores.logprobs, scores.entropy, data, self._config, minibatch_tokens)

    def _score_frozen(self, model: CausalModel, micro: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            return model.score(micro, self._temperature).logprobs

    def _frozen_copy(self) -> CausalModel:
        reference = copy.deepcopy(self.model)
        reference.parameters = dict(reference.module.named_parameters())
        return reference

    def _state(self) -> TrainerState:
        first, second = self._optimizer.moments()
        return TrainerState(
            version=self._version,
            model_hash=self.model.hash,
            seed=self._seed,
            updates=self._optimizer.updates,
            weights=self.model.host_copy(),
            first_moment=first,
            second_moment=second,
            reference={} if self._reference is None else self._reference.host_copy(),
        )

    def _load(self, state: TrainerState) -> None:
        self.model.load(state.weights)
        self._optimizer.load(state.updates, state.first_moment, state.second_moment)
        self._reference = None
        if state.reference:
            self._reference = self._frozen_copy()
            self._reference.load(state.reference)
        self._version, self._seed = state.version, state.seed

    def _move(self, device: torch.device, *, lent: bool) -> LendReport:
        started_s = time.perf_counter()
        self._lent = lent
        if self.model.device.type != "cuda":
            return LendReport(seconds=time.perf_counter() - started_s, freed_bytes=0)
        before_bytes = torch.cuda.memory_reserved(self.model.device)
        for model in (self.model, self._reference):
            if model is not None:
                model.module.to(device)
        self._optimizer.move(device)
        torch.cuda.synchronize(self.model.device)
        torch.cuda.empty_cache()
        moved_bytes = abs(torch.cuda.memory_reserved(self.model.device) - before_bytes)
        return LendReport(seconds=time.perf_counter() - started_s, freed_bytes=moved_bytes)
