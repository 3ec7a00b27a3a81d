"""Shapes and GPUs by name: sizes against what is known of the checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pearl.errors import ProfileError
from pearl.silicon.specs import GPUS, MODELS, ExpertShape, gpu_named, model_named


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # Parameters as the model cards count them.
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.53),
        ("qwen2.5-7b", 7.62),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
    ],
)
def test_weights(name: str, billions: float) -> None:
    assert MODELS[name].weight_bytes == pytest.approx(2e9 * billions, rel=0.003)


def test_there_is_no_other_model() -> None:
    assert len(MODELS) == 10
    assert all(name == shape.name.lower() for name, shape in MODELS.items())


@pytest.mark.parametrize(
    ("name", "tp", "size_bytes"),
    [
        # 2 * 2 bytes * layers * heads * dimensions; below one head on a GPU they repeat.
        ("qwen3-8b", 1, 147_456),
        ("qwen3-8b", 8, 147_456),
        ("qwen3-8b", 16, 2 * 147_456),
        ("qwen3-30b-a3b", 4, 98_304),
        ("qwen3-30b-a3b", 8, 196_608),
        ("qwen2.5-7b", 1, 57_344),
        ("llama-3.1-70b", 4, 327_680),
    ],
)
def test_kv(name: str, tp: int, size_bytes: int) -> None:
    assert MODELS[name].kv_bytes_per_token(tp) == size_bytes


@pytest.mark.parametrize("name", ["h100", "H100"])
def test_a_gpu_in_any_case(name: str) -> None:
    found = gpu_named(name)
    assert found is GPUS["h100"]
    assert (found.flops_per_s, found.memory_bytes_per_s, found.link_bytes_per_s) == (989e12, 3.35e12, 450e9)
    assert found.memory_bytes == 80 * 2**30


def test_an_h800_is_an_h100_with_fewer_links() -> None:
    assert gpu_named("h800") == replace(gpu_named("h100"), name="h800", link_bytes_per_s=200e9)


def test_unknown_names() -> None:
    with pytest.raises(ProfileError) as caught:
        gpu_named("H300")
    assert str(caught.value) == (
        "GPU: got 'H300', want one of a100, a800, h100, h800, h200, h20, b200, l40s; or describe it"
    )
    with pytest.raises(
        ProfileError, match=r"^model: got 'gpt', want one of qwen3-0\.6b, .*llama-3\.1-70b; or describe it$"
    ):
        model_named("gpt")


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("field", ["flops_per_s", "memory_bytes_per_s", "memory_bytes", "link_bytes_per_s"])
def test_gpus_have_numbers_above_0(field: str, value: float) -> None:
    with pytest.raises(ProfileError, match=rf"^GPU: {field}: got {value}, want a number > 0$"):
        replace(GPUS["h100"], **{field: value})


@pytest.mark.parametrize("field", ["layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary", "intermediate"])
def test_models_have_numbers_above_0(field: str) -> None:
    with pytest.raises(ProfileError, match=rf"^model: {field}: got 0, want a number > 0$"):
        replace(MODELS["qwen3-8b"], **{field: 0})


def test_heads_share_kv_evenly() -> None:
    with pytest.raises(ProfileError, match=r"^model: kv_heads: got 5, want a divisor of heads, 32$"):
        replace(MODELS["qwen3-8b"], kv_heads=5)


def test_experts() -> None:
    assert ExpertShape(count=4, per_token=4, intermediate=1).per_token == 4
    with pytest.raises(ProfileError, match=r"^experts: per_token: got 5, want <= count, 4$"):
        ExpertShape(count=4, per_token=5, intermediate=1)
    with pytest.raises(ProfileError, match=r"^experts: count: got 0, want a number > 0$"):
        ExpertShape(count=0, per_token=1, intermediate=1)
