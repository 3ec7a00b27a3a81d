"""Frequencies of every scaling method against transformers' own, and configurations that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pearl.engine.embedded.rotary import read_rotary

HEAD_DIM = 32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize("base", [500.0, 10_000.0, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        {**LLAMA3, "original_max_position_embeddings": 8192, "high_freq_factor": 2.0},
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "truncate": False, "attention_factor": 0.7},
    ],
)
def test_frequencies_are_those_of_transformers(base: float, scaling: dict[str, Any]) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": base, **scaling}
    config = Qwen3Config(head_dim=HEAD_DIM, max_position_embeddings=1024, rope_parameters=parameters)
    want, growth = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rotary = read_rotary({"rope_parameters": parameters})
    torch.testing.assert_close(rotary.frequencies(HEAD_DIM), want, rtol=1e-6, atol=0)
    turned = rotary.rotation(HEAD_DIM, 5)
    torch.testing.assert_close(turned.abs(), torch.full((5, HEAD_DIM // 2), float(growth)))
    torch.testing.assert_close(turned[1].angle(), want)


def test_the_plain_one_by_hand() -> None:
    frequencies = read_rotary({"rope_theta": 100.0}).frequencies(4)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
    assert read_rotary({}).frequencies(4)[1].item() == pytest.approx(0.01)
    turned = read_rotary({}).rotation(4, 3)
    assert turned.shape == (3, 2)
    assert turned[2, 0].real.item() == pytest.approx(math.cos(2))


def test_both_layouts_of_transformers() -> None:
    new = read_rotary({"rope_parameters": {"rope_theta": 50.0, "rope_type": "linear", "factor": 2.0}})
    old = read_rotary({"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert new == old


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling: got 'linear', want an object"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: got rope_type 'longrope', want one of"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.factor: got None, want a number > 0"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": -1}}, r"low_freq_factor: got -1"),
        ({"rope_parameters": {**YARN, "factor": True}}, r"factor: got True"),
        ({"rope_parameters": {**YARN, "mscale": 1.0}}, "got mscale, want none of them"),
        ({"rope_theta": 0}, r"rope_theta: got 0"),
    ],
)
def test_what_is_not_implemented_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_rotary(config)
