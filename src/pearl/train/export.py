"""Publish weights as one safetensors file and the manifest that describes it."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from pearl.errors import WeightsError
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest, Shard
from pearl.train.model import CausalModel


def write_version(model: CausalModel, path: Path, version: WeightVersion) -> Manifest:
    """Write the model's weights to `path`, replacing it at once, and return their manifest.

    Raises:
        WeightsError: the file cannot be written.
    """
    tensors = model.stored()
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(tensors, partial, {"format": "pt", "version": str(version)})
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise WeightsError(f"weights of version {version} cannot be written to {path}: {error}") from error
    dtypes = {name: model.dtype_of(name) for name in tensors}
    return manifest_of(tensors, dtypes, path, version, model.hash)


def manifest_of(
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, str],
    path: Path,
    version: WeightVersion,
    model_hash: str,
) -> Manifest:
    """Describe whole tensors, on the host and by name, that a file holds; `dtypes` as in safetensors."""
    shards = tuple(
        Shard(
            name=name,
            dtype=dtypes[name],
            shape=tuple(tensor.shape),
            start=(0,) * tensor.dim(),
            size_bytes=tensor.nbytes,
            checksum=checksum(tensor),
            locations=(str(path),),
        )
        for name, tensor in sorted(tensors.items())
    )
    return Manifest(version=version, model_hash=model_hash, shards=shards)


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write host tensors to a file; `OSError` when that fails."""
    try:
        save_file(dict(tensors), path, dict(metadata))
    except Exception as error:
        # safetensors reports I/O failures under a type of its own.
        raise OSError(str(error)) from error


def checksum(tensor: torch.Tensor) -> str:
    """CRC-32 of a contiguous host tensor's bytes, `crc32:xxxxxxxx`."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy().data
    return f"crc32:{zlib.crc32(raw):08x}"
