"""The forward pass against transformers, sequence by sequence, and the checkpoint's names and dtypes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pearl.errors import ModelError
from pearl.records.training import model_hash
from pearl.train.batching import TokenSequence, micro_batches
from pearl.train.model import CausalModel

CPU = torch.device("cpu")


def sequences(count: int) -> list[TokenSequence]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(count):
        length = int(rng.integers(3, 40))
        trained = np.sort(rng.choice(np.arange(1, length), size=int(rng.integers(1, length - 1)), replace=False))
        made.append(TokenSequence(token_ids=rng.integers(0, 90, length).astype(np.int32), trained=trained))
    return made


@pytest.fixture
def copy_of(tiny_model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the demo's model that a test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(tiny_model, tmp_path / name))

    return copy


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_those_of_unpadded_single_sequences(tiny_model: Path, temperature: float) -> None:
    model = CausalModel(tiny_model, CPU)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    own = sequences(12)
    (micro,) = micro_batches(own, range(len(own)), 10**6, CPU)
    with torch.no_grad():
        scores = model.score(micro, temperature)
        logprobs, entropies = [], []
        for index in micro.indices:
            ids = torch.tensor(own[index].token_ids.tolist())
            everywhere = torch.log_softmax(reference(ids[None]).logits[0] / temperature, -1)
            for position in own[index].trained.tolist():
                logprobs.append(everywhere[position - 1, ids[position]])
                entropies.append(torch.distributions.Categorical(logits=everywhere[position - 1]).entropy())
    torch.testing.assert_close(scores.logprobs, torch.stack(logprobs), atol=2e-6, rtol=0)
    torch.testing.assert_close(scores.entropy, torch.stack(entropies), atol=2e-6, rtol=0)


def test_entropy_has_a_gradient_only_when_asked(tiny_model: Path) -> None:
    model = CausalModel(tiny_model, CPU)
    (micro,) = micro_batches(sequences(2), [0, 1], 100, CPU)
    assert not model.score(micro, 1.0).entropy.requires_grad
    assert model.score(micro, 1.0, entropy_gradient=True).entropy.requires_grad
    assert model.score(micro, 1.0).logprobs.requires_grad


def test_names_hash_and_sizes_are_those_of_the_file(tiny_model: Path) -> None:
    model = CausalModel(tiny_model, CPU)
    stored = load_file(tiny_model / "model.safetensors")
    assert set(model.parameters) == set(stored)
    assert model.hash == model_hash((name, "F32", tuple(tensor.shape)) for name, tensor in stored.items())
    assert model.vocabulary == len(stored["model.embed_tokens.weight"])
    for name, tensor in model.stored().items():
        assert torch.equal(tensor, stored[name]), name


def test_a_bfloat16_checkpoint_is_trained_in_float32_and_stored_in_bfloat16(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("bf16")
    file = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(rounded, file, {"format": "pt"})
    model = CausalModel(folder, CPU)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters.values())
    assert {model.dtype_of(name) for name in model.parameters} == {"BF16"}
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in model.stored().items())


def test_a_checkpoint_in_several_files(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("sharded")
    whole = CausalModel(folder, CPU)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = CausalModel(folder, CPU)
    assert model.hash == whole.hash
    assert all(torch.equal(parameter, whole.parameters[name]) for name, parameter in model.parameters.items())


def test_folders_that_cannot_be_trained(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read model\.safetensors"):
        CausalModel(tmp_path / "absent", CPU)
    damaged = copy_of("damaged")
    (damaged / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"cannot read model\.safetensors"):
        CausalModel(damaged, CPU)
    unconfigured = copy_of("unconfigured")
    (unconfigured / "config.json").unlink()
    with pytest.raises(ModelError, match="the model cannot be loaded"):
        CausalModel(unconfigured, CPU)
    double = copy_of("double")
    tensors = {name: tensor.double() for name, tensor in load_file(double / "model.safetensors").items()}
    save_file(tensors, double / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="has dtype F64, want one of F32, BF16, F16"):
        CausalModel(double, CPU)
    missing = copy_of("missing")
    tensors = load_file(missing / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, missing / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"differ \(1, first: model.norm.weight\)"):
        CausalModel(missing, CPU)


def test_an_architecture_that_changes_its_logits_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3ForCausalLM

    original = Qwen3ForCausalLM.forward

    def capped(self: Qwen3ForCausalLM, *args: object, **kwargs: object) -> object:
        output = original(self, *args, **kwargs)
        output.logits = 0.1 * torch.tanh(output.logits / 0.1)
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", capped)
    with pytest.raises(ModelError, match="changes its logits"):
        CausalModel(tiny_model, CPU)
