"""What is wrong with a run is found before anything starts."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from pearl.cluster import checkpoints
from pearl.cluster import preflight as module
from pearl.cluster.preflight import preflight, preflight_resumption
from pearl.config.recipe import Recipe
from pearl.errors import CheckpointError, ConfigError, ModelError, UserError
from pearl.records.ids import WeightVersion
from pearl.report.run_folder import RunFolder
from pearl.train.checkpoint import TrainerState, write_checkpoint
from pearl.train.model import CausalModel
from tests.models import make_folder

Usage = namedtuple("Usage", "total used free")


def recipe(folder: Path, **sections: dict[str, object]) -> Recipe:
    return Recipe.model_validate({"model": {"path": str(folder)}, "environment": {"kind": "guess_number"}, **sections})


def test_a_good_recipe_passes(tiny_model: Path) -> None:
    preflight(recipe(tiny_model, warmup={"steps": 1}, evaluation={"rollouts_per_task": 1}))


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"model": {"path": "nowhere"}}, ModelError, "no config.json in nowhere"),
        ({"environment": {"kind": "guess_numbr"}}, ConfigError, "did you mean 'guess_number'"),
        ({"environment": {"kind": "guess_number", "params": {"turnz": 3}}}, ConfigError, "turnz"),
        (
            {
                "environment": {"kind": "tests.integration.environments:Echo"},
                "evaluation": {"rollouts_per_task": 1},
            },
            ConfigError,
            "evaluation_params",
        ),
        (
            {"environment": {"kind": "tests.integration.environments:Echo"}, "warmup": {"steps": 1}},
            ConfigError,
            "scripted",
        ),
        ({"engine": {"pacing": "none.json"}}, ConfigError, "engine.pacing: none.json: no such file; want a file of"),
        ({"weights": {"host_budget_gib": 1e-5}}, ConfigError, "weights.host_budget_gib: got 1e-05, want at least"),
    ],
)
def test_a_mistake_is_named(
    tiny_model: Path,
    sections: dict[str, dict[str, object]],
    error: type[UserError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(error, match=message):
        preflight(recipe(tiny_model, **sections))


@pytest.mark.parametrize("damage", ["architecture", "truncated"])
def test_a_model_that_cannot_be_used_is_named_before_anything_starts(
    tiny_model: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    if damage == "architecture":
        config = folder / "config.json"
        config.write_text(config.read_text().replace("qwen3", "gpt2"))
    else:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelError, match=str(folder)):
        preflight(recipe(folder))


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_device_that_is_not_there(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    want = {0: r"want cpu or auto \(torch finds no GPU", 2: r"want cpu, auto, or cuda:0 to cuda:1 \(the GPUs"}[gpus]
    with pytest.raises(ConfigError, match=f"engine.device: got cuda:2, {want}"):
        preflight(recipe(tiny_model, engine={"device": "cuda:2"}))
    for device in ("cpu", "auto", *(["cuda", "cuda:1"] if gpus else [])):
        preflight(recipe(tiny_model, engine={"device": device}))


class TestSharedMemory:
    @pytest.fixture
    def free(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Bytes that are free, as the only entry."""
        free = [200 * 2**20]
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Usage(free[0], 0, free[0]))
        return free

    def test_the_object_store_must_fit(self, tiny_model: Path, free: list[int]) -> None:
        preflight(recipe(tiny_model, cluster={"object_store_mib": 200}))
        with pytest.raises(
            ConfigError, match=r"^cluster\.object_store_mib: got 201, want at most 200, what /.* has free"
        ):
            preflight(recipe(tiny_model, cluster={"object_store_mib": 201}))

    def test_that_of_a_cluster_is_there_already(self, tiny_model: Path, free: list[int]) -> None:
        preflight(recipe(tiny_model, cluster={"object_store_mib": 201, "address": "auto"}))

    def test_with_next_to_none_ray_does_without(self, tiny_model: Path, free: list[int]) -> None:
        free[0] = 64 * 2**20
        preflight(recipe(tiny_model))

    def test_weights_must_fit(self, tiny_model: Path, free: list[int]) -> None:
        free[0] = 2 * (tiny_model / "model.safetensors").stat().st_size
        preflight(recipe(tiny_model))
        free[0] -= 1
        with pytest.raises(ConfigError, match=r"^model\.path: 2 versions of .* has .* free; make room there"):
            preflight(recipe(tiny_model))


class TestResumption:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return make_folder(tmp_path / "model")

    @pytest.fixture
    def folder(self, model: Path, tmp_path: Path) -> RunFolder:
        return RunFolder.create(recipe(model, run={"root": str(tmp_path / "runs")}), {})

    @staticmethod
    def save(folder: RunFolder, model: Path) -> Path:
        loaded = CausalModel(model, torch.device("cpu"))
        place = folder.checkpoints / "step-000003"
        state = TrainerState(
            version=WeightVersion(3),
            model_hash=loaded.hash,
            seed=0,
            updates=0,
            weights=loaded.host_copy(),
            first_moment={},
            second_moment={},
            reference={},
        )
        write_checkpoint(place / checkpoints.TRAINER, state)
        progress = {"schema_version": 1, "weight_version": 3, "cursor": 0, "consumed": 0, "unfinished": []}
        (place / checkpoints.PROGRESS).write_text(json.dumps(progress))
        return place

    def test_the_model_of_the_run(self, folder: RunFolder, model: Path) -> None:
        preflight_resumption(recipe(model), folder)
        self.save(folder, model)
        preflight_resumption(recipe(model), folder)

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_hash_of_the_headers_is_that_of_the_model(self, tmp_path: Path, tied: bool) -> None:
        other = make_folder(tmp_path / "other", tied=tied)
        folder = RunFolder.create(recipe(other, run={"root": str(tmp_path / "runs")}), {})
        self.save(folder, other)
        preflight_resumption(recipe(other), folder)

    def test_a_copy_elsewhere_and_other_weights_are_fine(self, folder: RunFolder, model: Path, tmp_path: Path) -> None:
        self.save(folder, model)
        other = make_folder(tmp_path / "other", norm_seed=6)
        assert (other / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()
        preflight_resumption(recipe(other), folder)

    @pytest.mark.parametrize(
        ("name", "old", "new"),
        [
            ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
            ("tokenizer.json", "{", "{ "),
            ("tokenizer_config.json", "{", "{ "),
        ],
    )
    def test_another_meaning_of_equal_shapes_is_refused(
        self, folder: RunFolder, model: Path, name: str, old: str, new: str
    ) -> None:
        self.save(folder, model)
        file = model / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
        want = rf"^model\.path: {model}: {name} differ from what the run began with.* by editing {folder.recipe_file}$"
        with pytest.raises(ModelError, match=want):
            preflight_resumption(recipe(model), folder)

    def test_a_file_that_has_come_is_refused(self, folder: RunFolder, model: Path) -> None:
        (model / "added_tokens.json").write_text("{}")
        with pytest.raises(ModelError, match=r"added_tokens\.json differ"):
            preflight_resumption(recipe(model), folder)

    def test_a_folder_that_knows_nothing_of_its_model_is_taken(self, folder: RunFolder, model: Path) -> None:
        versions = json.loads((folder.path / "versions.json").read_text())
        del versions["model"]
        (folder.path / "versions.json").write_text(json.dumps(versions))
        (model / "added_tokens.json").write_text("{}")
        preflight_resumption(recipe(model), folder)

    def test_a_checkpoint_of_other_shapes_is_refused(self, folder: RunFolder, model: Path, tmp_path: Path) -> None:
        place = self.save(folder, make_folder(tmp_path / "other", hidden=32))
        before = sorted(folder.path.rglob("*"))
        want = rf"^checkpoint {place}/trainer: of a model .* by editing {folder.recipe_file}$"
        with pytest.raises(CheckpointError, match=want):
            preflight_resumption(recipe(model), folder)
        assert sorted(folder.path.rglob("*")) == before

    @pytest.mark.parametrize("part", ["progress.json", "trainer/trainer.json"])
    def test_a_damaged_checkpoint_is_refused(self, folder: RunFolder, model: Path, part: str) -> None:
        place = self.save(folder, model)
        (place / part).write_text("{")
        with pytest.raises(CheckpointError, match=str(place / part)):
            preflight_resumption(recipe(model), folder)

    def test_what_a_killed_writer_moved_aside_counts(self, folder: RunFolder, model: Path) -> None:
        place = self.save(folder, model)
        place.rename(place.with_name(".step-000003.replaced"))
        (folder.checkpoints / ".step-000004.partial").mkdir()
        preflight_resumption(recipe(model), folder)
        assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000003"]

    def test_a_model_that_is_gone(self, folder: RunFolder, model: Path) -> None:
        shutil.rmtree(model)
        with pytest.raises(ModelError, match=rf"no config.json in .* by editing {folder.recipe_file}$"):
            preflight_resumption(recipe(model), folder)
