"""Measuring a whole profile but for what needs processes: tests/integration/test_profile.py."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pearl.cluster import hand_off
from pearl.cluster import profile as subject
from pearl.cluster.hand_off import fit
from pearl.cluster.profile import ProfileRequest, engine_config, export_checkpoint, measure_profile
from pearl.cluster.weights import shared_memory_root
from pearl.core.profile import HandOff, parse_profile
from pearl.engine.embedded.architecture import read_architecture
from pearl.engine.embedded.weights import read_checkpoint, read_manifest
from pearl.errors import ConfigError, ModelError, WorkerLost


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "find_spec", lambda name: None)


def small(model: Path, **values: Any) -> ProfileRequest:
    return ProfileRequest(
        model=model, **{"device": "cpu", "max_context_tokens": 32, "max_sequences": 2, "quick": True, **values}
    )


@pytest.mark.usefixtures("without_ray")
class TestWithoutRay:
    def test_everything_else_is_measured(self, tiny_model: Path) -> None:
        said: list[tuple[str, str]] = []
        before = set(shared_memory_root().glob("pearl-profile-*"))
        profile = measure_profile(small(tiny_model, kv_bytes=51_200), lambda name, text: said.append((name, text)))
        # 2 layers of keys and values of 2 heads of 16 numbers of 4 bytes.
        assert (profile.kv_bytes_per_token, profile.kv_capacity_tokens) == (512, 100)
        assert (profile.model, profile.dtype, profile.tp) == ("tiny-qwen3", "float32", 1)
        assert profile.device.startswith("cpu ")
        assert profile.iterations.prefill_tokens == (0, 64)
        assert profile.iterations.decoding == (0, 1, 2)
        assert profile.iterations.context_tokens == (4, 32)
        assert min(profile.weight_load_s, profile.sleep_s, profile.wake_s) > 0
        assert (profile.hand_off, profile.engine_start_s) == (None, None)
        assert parse_profile(profile.to_json()) == profile
        assert [name for name, _ in said] == ["model", *["iterations"] * 4, "states", "processes"]
        assert said[-1][1].startswith("left out: Ray is not installed")
        assert set(shared_memory_root().glob("pearl-profile-*")) == before

    def test_a_cpu_has_a_budget_by_default(self, tiny_model: Path) -> None:
        profile = measure_profile(small(tiny_model, dtype="bfloat16"), lambda *_: None)
        assert (profile.kv_bytes_per_token, profile.kv_capacity_tokens) == (256, 2**30 // 256)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"device": "gpu"}, "--device: got 'gpu'"),
            ({"dtype": "int8"}, "--dtype: got 'int8'"),
            ({"max_context_tokens": 513}, r"--max-context: got 513, want <= 512 \(max_position_embeddings of "),
        ],
    )
    def test_a_wrong_option_is_named(self, tiny_model: Path, values: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            measure_profile(small(tiny_model, **values), lambda *_: None)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_no_gpu(self, tiny_model: Path) -> None:
        with pytest.raises(ConfigError, match="--device: got cuda, want cpu or auto"):
            measure_profile(small(tiny_model, device="cuda"), lambda *_: None)

    def test_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="no such folder"):
            measure_profile(small(tmp_path / "none"), lambda *_: None)

    def test_an_unsupported_architecture(self, tiny_model: Path, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
        with pytest.raises(ModelError, match="model_type: got 'mamba', want one of"):
            measure_profile(small(folder), lambda *_: None)


def test_the_context_is_the_models_up_to_a_bound(tiny_model: Path) -> None:
    architecture, request = read_architecture(tiny_model), ProfileRequest(model=tiny_model)
    assert engine_config(request, architecture).max_context_tokens == 512
    assert engine_config(request, replace(architecture, max_positions=40_960)).max_context_tokens == 2048


def test_processes_that_fail_are_left_out_with_a_note(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fail(folder: Path, config: Any, **arguments: Any) -> None:
        asked.update(arguments, folder=folder, config=config)
        raise WorkerLost("worker 1: not up within 120 s")

    monkeypatch.setattr(hand_off, "measure_processes", fail)
    said: list[str] = []
    profile = measure_profile(small(tiny_model), lambda _, text: said.append(text))
    assert (profile.hand_off, profile.engine_start_s) == (None, None)
    assert said[-1] == "left out, no hand-off and no engine start in the profile: worker 1: not up within 120 s"
    assert (asked["folder"], asked["vocabulary"], asked["kv_bytes_per_token"]) == (tiny_model, 98, 512)
    assert asked["config"].max_context_tokens == 32


def test_the_published_weights_are_the_folders(tiny_model: Path, tmp_path: Path) -> None:
    architecture = read_architecture(tiny_model)
    manifest = export_checkpoint(tiny_model, architecture, tmp_path / "w.safetensors")
    kinds = read_checkpoint(tiny_model, architecture).kinds
    got, want = read_manifest(manifest, kinds), load_file(tiny_model / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert manifest.size_bytes == sum(tensor.nbytes for tensor in want.values())


def test_no_room_for_the_weights(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="of weights cannot be written here"):
        export_checkpoint(tiny_model, read_architecture(tiny_model), tmp_path / "none" / "w.safetensors")


class TestFit:
    def test_a_line_through_two_sizes(self) -> None:
        assert fit(((100, 3.0), (300, 4.0))) == HandOff(fixed_s=2.5, s_per_byte=0.005)

    def test_noise_makes_nothing_negative(self) -> None:
        # Faster with more bytes: a size that does not matter. Far steeper than the small one allows: no fixed part.
        assert fit(((100, 3.0), (300, 2.0))) == HandOff(fixed_s=3.0, s_per_byte=0.0)
        assert fit(((100, 1.0), (200, 4.0))) == HandOff(fixed_s=0.0, s_per_byte=0.03)
        assert fit(((100, -1.0), (200, -2.0))) == HandOff(fixed_s=0.0, s_per_byte=0.0)
