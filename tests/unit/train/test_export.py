"""Published weights: the file, its manifest, and that it appears at once or not at all."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from pearl.errors import WeightsError
from pearl.records.ids import WeightVersion
from pearl.records.training import model_hash
from pearl.train import export
from pearl.train.export import checksum
from pearl.train.trainer import GrpoTrainer

MakeTrainer = Callable[..., GrpoTrainer]


def test_checksum_is_crc32_of_the_raw_bytes() -> None:
    # 1.0 is 0x3f800000 and -2.0 is 0xc0000000, little-endian in memory.
    assert checksum(torch.tensor([[1.0], [-2.0]])) == f"crc32:{zlib.crc32(bytes.fromhex('0000803f000000c0')):08x}"
    assert checksum(torch.tensor([1.0], dtype=torch.bfloat16)) == f"crc32:{zlib.crc32(bytes.fromhex('803f')):08x}"


def test_the_manifest_describes_the_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "v0.safetensors"
    manifest = make_trainer().export(path, WeightVersion(0))
    raw = path.read_bytes()
    with safe_open(path, framework="np") as stored:
        names = list(stored.keys())
        tensors = {name: stored.get_tensor(name) for name in names}
    assert sorted(names) == [shard.name for shard in manifest.shards]
    assert "lm_head.weight" not in names  # tied
    for shard in manifest.shards:
        tensor = tensors[shard.name]
        assert tensor.dtype == np.float32
        assert (shard.dtype, shard.shape, shard.start) == ("F32", tensor.shape, (0,) * tensor.ndim)
        assert shard.size_bytes == tensor.nbytes
        assert shard.checksum == f"crc32:{zlib.crc32(tensor.tobytes()):08x}"
        assert shard.locations == (str(path),)
        assert tensor.tobytes() in raw
    assert manifest.version == 0
    assert manifest.model_hash == model_hash((name, "F32", tensor.shape) for name, tensor in tensors.items())


def test_a_version_replaces_a_file_at_once(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"older version")
    trainer = make_trainer()

    def full(*arguments: object) -> None:
        Path(str(arguments[1])).write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "save_file", full)
        with pytest.raises(WeightsError, match=r"version 0 cannot be written .*no space left"):
            trainer.export(path, WeightVersion(0))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"older version")]
    trainer.export(path, WeightVersion(0))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_size > 300_000


def test_a_place_that_cannot_be_written(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot be written"):
        make_trainer().export(tmp_path / "file" / "v0.safetensors", WeightVersion(0))


def test_an_untied_head_is_exported(tmp_path: Path, make_trainer: MakeTrainer, untied_model: Path) -> None:
    manifest = make_trainer(untied_model).export(tmp_path / "v0.safetensors", WeightVersion(0))
    assert "lm_head.weight" in [shard.name for shard in manifest.shards]
