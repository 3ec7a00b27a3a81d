"""Checkpoints: exact, atomic, and refused when they are not what they should be."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pearl.errors import CheckpointError, RunFailed
from pearl.records.training import TrainingBatch
from pearl.train import checkpoint
from pearl.train.trainer import GrpoTrainer

MakeBatch = Callable[..., TrainingBatch]
MakeTrainer = Callable[..., GrpoTrainer]
Weights = Callable[[GrpoTrainer], dict[str, torch.Tensor]]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def saved(make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path) -> Path:
    """The checkpoint of a trainer with seed 5 at version 2."""
    trainer = make_trainer(seed=5, minibatches=2)
    for version in range(2):
        trainer.train(make_batch(version=version))
    trainer.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_next_step_after_restoring_is_the_one_without(
    make_trainer: MakeTrainer, make_batch: MakeBatch, weights: Weights, tmp_path: Path, kl: float, steps: int
) -> None:
    trainer = make_trainer(seed=5, minibatches=3, kl=kl, decay="linear")
    for version in range(steps):
        trainer.train(make_batch(version=version))
    trainer.save(tmp_path / "saved")
    # Another seed, other weights and another history than the one that was saved.
    restored = make_trainer(seed=6, minibatches=3, kl=kl, decay="linear")
    restored.train(make_batch(seed=9))
    assert restored.restore(tmp_path / "saved") == steps
    assert restored.version == steps
    assert same(weights(restored), weights(trainer))
    for version in range(steps, steps + 2):
        reports = [own.train(make_batch(version=version)) for own in (trainer, restored)]
        assert reports[0].metrics == reports[1].metrics
        assert same(weights(trainer), weights(restored))


def test_saving_again_replaces(make_trainer: MakeTrainer, make_batch: MakeBatch, saved: Path) -> None:
    trainer = make_trainer()
    trainer.save(saved)
    assert make_trainer().restore(saved) == 0
    assert sorted(path.name for path in saved.parent.iterdir()) == ["saved"]


def test_there_is_no_pickle(saved: Path) -> None:
    assert {path.suffix for path in saved.iterdir()} == {".json", ".safetensors"}


def test_a_save_that_fails_keeps_the_one_before(
    make_trainer: MakeTrainer, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    trainer = make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_safetensors", _full)
        with pytest.raises(RunFailed, match="cannot be written: no space left"):
            trainer.save(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def _full(*_: object) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize("rename_that_fails", [1, 2])
def test_an_interruption_while_replacing_keeps_the_one_before(
    make_trainer: MakeTrainer, saved: Path, monkeypatch: pytest.MonkeyPatch, rename_that_fails: int
) -> None:
    trainer, calls = make_trainer(), 0
    original = os.rename

    def rename(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == rename_that_fails:
            raise KeyboardInterrupt
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            trainer.save(saved)
    assert make_trainer().restore(saved) == 2
    trainer.save(saved)
    assert make_trainer().restore(saved) == 0
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_what_a_killed_process_left_behind_is_cleared_away(
    make_trainer: MakeTrainer, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Killed between the two renames: the old checkpoint is aside, the new one not yet in its place.
    saved.rename(saved.with_name(".saved.replaced"))
    saved.with_name(".saved.partial").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_safetensors", _full)
        with pytest.raises(RunFailed):
            make_trainer().save(saved)
    assert make_trainer().restore(saved) == 2
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def flip_a_byte(path: Path, where: float) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(where * (len(raw) - 1))] ^= 0x10
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = ("trainer.json", *(f"trainer-{name}.safetensors" for name in ("weights", "first-moment", "second-moment")))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: flip_a_byte(path, 0.01), id="head"),
        pytest.param(lambda path: flip_a_byte(path, 0.5), id="middle"),
        pytest.param(lambda path: flip_a_byte(path, 0.95), id="tail"),
        pytest.param(truncate, id="truncated"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.unlink(), id="missing"),
    ],
)
def test_damage_is_noticed_and_changes_nothing(
    make_trainer: MakeTrainer, weights: Weights, saved: Path, file: str, damage: Callable[[Path], None]
) -> None:
    trainer = make_trainer()
    before = weights(trainer)
    damage(saved / file)
    with pytest.raises(CheckpointError, match=r"damaged|is missing"):
        trainer.restore(saved)
    assert trainer.version == 0
    assert same(weights(trainer), before)


def test_no_checkpoint_there(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no trainer checkpoint in .*absent"):
        make_trainer().restore(tmp_path / "absent")


def test_a_checkpoint_of_another_model(make_trainer: MakeTrainer, saved: Path, untied_model: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"of a model \w{16}, and model\.path has a model \w{16} \(other tensor names"
    ):
        make_trainer(untied_model).restore(saved)


def rewrite(saved: Path, **changed: object) -> None:
    """Change numbers and keep the checksum right, as a newer version of pearl would."""
    path = saved / "trainer.json"
    numbers = json.loads(path.read_text())
    del numbers["checksum"]
    numbers |= changed
    path.write_text(json.dumps({**numbers, "checksum": checkpoint._json_checksum(numbers)}))


def test_a_checkpoint_of_another_format(make_trainer: MakeTrainer, saved: Path) -> None:
    rewrite(saved, format=2)
    with pytest.raises(CheckpointError, match="another version of pearl"):
        make_trainer().restore(saved)


def test_whole_files_of_another_checkpoint_do_not_mix(make_trainer: MakeTrainer, saved: Path, tmp_path: Path) -> None:
    fresh = make_trainer()
    fresh.save(tmp_path / "fresh")
    shutil.copy(tmp_path / "fresh" / "trainer-weights.safetensors", saved)
    with pytest.raises(CheckpointError, match=r"trainer-weights.safetensors: damaged"):
        make_trainer().restore(saved)
    # Moments are missing though there were updates: the checksums fit, the state does not.
    shutil.rmtree(saved)
    fresh.save(saved)
    rewrite(saved, updates=3)
    with pytest.raises(CheckpointError, match="tensors of first_moment are not those of the model"):
        make_trainer().restore(saved)


def test_kl_needs_the_reference_that_the_run_began_with(make_trainer: MakeTrainer, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="has no reference weights"):
        make_trainer(kl=0.1).restore(saved)
