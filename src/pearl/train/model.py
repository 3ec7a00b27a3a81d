"""A checkpoint's model in float32, with the tensor names and dtypes of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pearl.errors import ModelError
from pearl.records.training import model_hash
from pearl.train.batching import MicroBatch

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that a checkpoint may have; the trainer computes in float32 and publishes in the checkpoint's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What the model says about T trained tokens; shapes `[T]`, float32."""

    logprobs: torch.Tensor
    """Of the tokens, under the tempered distribution."""
    entropy: torch.Tensor
    """Of the distributions that predict them, in nats; carries a gradient only when asked for."""


class CausalModel:
    """The weights being trained, and their forward pass."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Load the checkpoint.

        Raises:
            ModelError: missing, damaged or unsupported.
        """
        self.folder = folder
        self.device = device
        self._dtypes = {name: dtype for name, (dtype, _) in _stored(folder).items()}
        self.module = _load(folder).to(device)
        self.parameters: Mapping[str, nn.Parameter] = dict(self.module.named_parameters())
        self._check_names()
        self._check_forward()

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self.module.get_input_embeddings().weight.shape[0])

    @property
    def hash(self) -> str:
        """Hash of names, dtypes and shapes as the checkpoint stores them."""
        return model_hash((name, self.dtype_of(name), tuple(p.shape)) for name, p in self.parameters.items())

    def dtype_of(self, name: str) -> str:
        """Dtype of a tensor in the checkpoint, as in safetensors."""
        return self._dtypes[name]

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the weights as the checkpoint stores them: on the host, in its dtypes, tied tensors once."""
        return {
            name: parameter.detach().to("cpu", SAFETENSORS_DTYPES[self._dtypes[name]]).contiguous()
            for name, parameter in self.parameters.items()
        }

    def host_copy(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights on the host, float32."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.parameters.items()}

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take float32 weights by name, all of them."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def score(self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False) -> TokenScores:
        """Run the model and score the trained tokens; only their positions go through the output layer."""
        hidden = self.module.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        logits = self.module.get_output_embeddings()(hidden[batch.rows, batch.predictors]).float()
        if temperature != 1:
            logits = logits / temperature
        all_logprobs = torch.log_softmax(logits, dim=-1)
        logprobs = all_logprobs.gather(-1, batch.targets[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return TokenScores(logprobs=logprobs, entropy=entropy)

    def _check_names(self) -> None:
        tied = {"lm_head.weight"} if self.module.config.tie_word_embeddings else set()
        differ = sorted((set(self._dtypes) - tied) ^ set(self.parameters))
        if differ:
            raise ModelError(
                f"model.path: {self.folder}: tensor names of the file and of {type(self.module).__name__} differ "
                f"({len(differ)}, first: {differ[0]}); want a checkpoint as transformers saves it"
            )

    def _check_forward(self) -> None:
        # Some architectures do more behind the last hidden state than apply the output layer (scaling, soft caps).
        probe = torch.tensor([[0, 1]], device=self.device)
        with torch.no_grad():
            hidden = self.module.base_model(input_ids=probe, use_cache=False).last_hidden_state
            ours = self.module.get_output_embeddings()(hidden)
            if not torch.allclose(ours, self.module(input_ids=probe, use_cache=False).logits, atol=1e-4):
                raise ModelError(
                    f"model.path: {self.folder}: {type(self.module).__name__} changes its logits behind the output "
                    "layer, which the trainer does not support; want a Llama- or Qwen-like architecture"
                )


def _load(folder: Path) -> Any:
    # A progress bar for the loading of a few tensors would be the only thing that a trainer process prints.
    transformers_logging.disable_progress_bar()
    try:
        module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model.path: {folder}: the model cannot be loaded: {error}") from error
    # Dropout, where an architecture has any, would make pi differ from pi_prox for the same weights.
    return module.eval()


def stored_hash(folder: Path, *, tied: bool) -> str:
    """`CausalModel.hash` of a model folder, from its headers alone; `tied`: the head is the embedding.

    Raises:
        ModelError: missing, damaged or unsupported.
    """
    return model_hash(
        (name, *kind) for name, kind in _stored(folder).items() if not (tied and name == "lm_head.weight")
    )


def _stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> dtype and shape in the checkpoint."""
    index = folder / "model.safetensors.index.json"
    try:
        files = {"model.safetensors"}
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for file in sorted(files):
            with safe_open(folder / file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    part = tensors.get_slice(name)
                    found[name] = (str(part.get_dtype()), tuple(part.get_shape()))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"model.path: {folder}: cannot read model.safetensors: {error}") from error
    for name, (dtype, _) in found.items():
        if dtype not in SAFETENSORS_DTYPES:
            allowed = ", ".join(SAFETENSORS_DTYPES)
            raise ModelError(f"model.path: {folder}: tensor {name} has dtype {dtype}, want one of {allowed}")
    return found
