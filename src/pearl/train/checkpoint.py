"""Trainer state on disk: tensors in safetensors, numbers in JSON, never pickle.

*Atomic*: a folder with the right name is complete (`whole_folder`).
*Exact*: what is read back equals what was written, bit for bit, or reading fails; CRC-32 over every file says which.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pearl.errors import CheckpointError, RunFailed
from pearl.records.ids import WeightVersion
from pearl.train.export import write_safetensors
from pearl.train.whole_folder import written_whole

FORMAT = 1
STATE_FILE = "trainer.json"
TENSOR_FILES = ("weights", "first_moment", "second_moment", "reference")
"""Fields of `TrainerState`, each `trainer-<name>.safetensors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Everything that the next training step depends on, besides the configuration and the batch."""

    version: WeightVersion
    model_hash: str
    seed: int
    """Random state: everything random in a step is drawn from `(seed, version)`, so there is no generator to save."""
    updates: int
    """Optimizer updates so far."""
    weights: Mapping[str, torch.Tensor]
    """Float32, by parameter name, on the host; so are the others."""
    first_moment: Mapping[str, torch.Tensor]
    """Adam's; empty before the first update."""
    second_moment: Mapping[str, torch.Tensor]
    reference: Mapping[str, torch.Tensor]
    """Weights of version 0; empty unless the loss needs them."""


def write_checkpoint(folder: Path, state: TrainerState) -> None:
    """Write a checkpoint; one that is already there is replaced.

    Raises:
        RunFailed: it cannot be written; one that is already there stays.
    """
    try:
        with written_whole(folder) as partial:
            checksums = {name: _write_tensors(partial, name, getattr(state, name)) for name in TENSOR_FILES}
            numbers = {
                "format": FORMAT,
                "version": state.version,
                "model_hash": state.model_hash,
                "seed": state.seed,
                "updates": state.updates,
                "checksums": checksums,
            }
            text = json.dumps({**numbers, "checksum": _json_checksum(numbers)}, indent=2)
            (partial / STATE_FILE).write_text(f"{text}\n")
    except OSError as error:
        raise RunFailed(f"checkpoint {folder} cannot be written: {error}; make room and resume the run") from error


def read_checkpoint(folder: Path, model_hash: str, shapes: Mapping[str, tuple[int, ...]]) -> TrainerState:
    """Read a checkpoint of the model with this hash and these parameters.

    Raises:
        CheckpointError: missing, damaged, or of another model.
    """
    numbers = check_model(folder, model_hash)
    tensors = {name: _read_tensors(folder, name, numbers.checksums.get(name)) for name in TENSOR_FILES}
    for name, group in tensors.items():
        may_be_empty = name == "reference" or (numbers.updates == 0 and name != "weights")
        found = {key: tuple(tensor.shape) for key, tensor in group.items()}
        if found != shapes and (found or not may_be_empty):
            raise CheckpointError(f"checkpoint {folder}: tensors of {name} are not those of the model {model_hash}")
    return TrainerState(
        version=WeightVersion(numbers.version),
        model_hash=model_hash,
        seed=numbers.seed,
        updates=numbers.updates,
        weights=tensors["weights"],
        first_moment=tensors["first_moment"],
        second_moment=tensors["second_moment"],
        reference=tensors["reference"],
    )


def check_model(folder: Path, model_hash: str) -> Numbers:
    """Find out, without reading a tensor, whether a checkpoint can be one of the model with this hash.

    Raises:
        CheckpointError: missing, damaged, or of another model.
    """
    numbers = _read_numbers(folder)
    if numbers.model_hash != model_hash:
        raise CheckpointError(
            f"checkpoint {folder}: of a model {numbers.model_hash}, and model.path has a model {model_hash} "
            "(other tensor names, dtypes or shapes)"
        )
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a checkpoint holds besides tensors."""

    version: int
    model_hash: str
    seed: int
    updates: int
    checksums: Mapping[str, str]


def _read_numbers(folder: Path) -> Numbers:
    path = folder / STATE_FILE
    try:
        parsed = json.loads(path.read_text())
        recorded = parsed.pop("checksum")
        if recorded != _json_checksum(parsed):
            raise ValueError("its checksum does not match")
        if parsed.pop("format") != FORMAT:
            raise CheckpointError(f"{path}: written by another version of pearl, want format {FORMAT}")
        return Numbers(**parsed)
    except FileNotFoundError as error:
        raise CheckpointError(f"no trainer checkpoint in {folder}: {STATE_FILE} is missing") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}; without this checkpoint a run goes on from the one before it")


def _read_tensors(folder: Path, name: str, recorded: str | None) -> dict[str, torch.Tensor]:
    path = _tensor_path(folder, name)
    try:
        if _file_checksum(path) != recorded:
            raise _damaged(path, "its checksum does not match")
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    return tensors


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    path = _tensor_path(folder, name)
    write_safetensors(tensors, path, {"format": "pt"})
    return _file_checksum(path)


def _tensor_path(folder: Path, name: str) -> Path:
    return folder / f"trainer-{name.replace('_', '-')}.safetensors"


def _file_checksum(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return f"crc32:{crc:08x}"


def _json_checksum(numbers: Mapping[str, object]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(numbers, sort_keys=True).encode()):08x}"
