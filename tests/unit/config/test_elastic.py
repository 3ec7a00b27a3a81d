"""Sections of fleet, policy, workload and platform: defaults that change nothing, names that the core knows, bounds."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from pearl.config.elastic import ElasticConfig, FleetConfig, PlatformConfig, WorkloadConfig
from pearl.config.load import dump_toml, load_recipe
from pearl.core.gate import Z_95, Thresholds
from pearl.core.platform import Platform, TransitionCosts
from pearl.core.policy import POLICIES, PolicyOptions
from pearl.core.priors import PLATFORM_PRIORS, WORKLOAD_PRIORS, platform_prior
from pearl.errors import ConfigError

MINIMAL = '[model]\npath = "m"\n[environment]\nkind = "k"\n'


def test_defaults() -> None:
    """Those of hysteresis were fixed before anything was evaluated."""
    elastic, fleet = ElasticConfig(), FleetConfig()
    assert (elastic.policy, elastic.refit_share, elastic.return_z) == ("pearl", 0.3, 1.645)
    assert (elastic.switch_gain_ratio, elastic.switch_gain_mode, elastic.switch_gain_tp) == (0.05, 0.10, 0.10)
    assert (elastic.shape, elastic.seeding_s, elastic.fixed_gpus) == ("", 60, None)
    assert (fleet.gpus_per_node, fleet.tp, fleet.overlap_tp, fleet.hybrid, fleet.tp_pairs) == (8, (1,), 1, False, None)
    assert (fleet.reserved_gpus, fleet.external_gpus, fleet.training_gpus) == (0, 0, 0)
    assert (WorkloadConfig().prior, WorkloadConfig().trajectories) == ("swe", None)
    assert (PlatformConfig().prior, PlatformConfig().profiles) == ("qwen3-8b-h100", ())


def test_limits_of_an_engine_default_to_those_of_the_core() -> None:
    platform = Platform(by_tp=platform_prior("qwen3-8b-h100").by_tp)
    for name in ("max_sequences", "prefill_chunk_tokens", "readback"):
        assert getattr(PlatformConfig(), name) == getattr(platform, name)


def test_names_of_priors_are_those_of_the_core() -> None:
    assert get_args(WorkloadConfig.model_fields["prior"].annotation) == WORKLOAD_PRIORS
    assert get_args(PlatformConfig.model_fields["prior"].annotation) == PLATFORM_PRIORS


def test_each_cost_can_be_set() -> None:
    for each in fields(TransitionCosts):
        assert PlatformConfig.model_fields[each.name].default is None


def test_each_cost_takes_a_day_at_most() -> None:
    for each in fields(TransitionCosts):
        assert getattr(PlatformConfig(**{each.name: 86_400}), each.name) == 86_400
        with pytest.raises(ValidationError):
            PlatformConfig(**{each.name: 86_401})


@pytest.mark.parametrize("name", ["switch_gain_ratio", "switch_gain_mode", "switch_gain_tp"])
def test_thresholds_are_those_that_the_core_takes(name: str) -> None:
    """Every share of the configuration is one of `Thresholds`, up to the last below 1."""
    largest = math.nextafter(1, 0)
    core = name.removeprefix("switch_gain_")
    for share in (0, largest):
        assert getattr(Thresholds(**{core: getattr(ElasticConfig(**{name: share}), name)}), core) == share


def test_defaults_are_those_of_the_core() -> None:
    elastic, options = ElasticConfig(), PolicyOptions()
    assert (elastic.return_z, elastic.seeding_s) == (Z_95, options.seeding_s)
    assert Thresholds() == Thresholds(
        ratio=elastic.switch_gain_ratio, mode=elastic.switch_gain_mode, tp=elastic.switch_gain_tp
    )


def test_policies_are_those_of_the_core() -> None:
    """But for the oracle, which nobody can have."""
    assert {*get_args(ElasticConfig.model_fields["policy"].annotation), "oracle"} == set(POLICIES)


def test_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        MINIMAL
        + '[fleet]\ntp = [1, 2]\ntp_pairs = [[1, 2], [2, 2]]\nhybrid = true\n[elastic]\npolicy = "static"\nshape = "2C"\n'
        + '[workload]\ntrajectories = "t.jsonl"\n[platform]\nprofiles = ["a.json", "b.json"]\nstart_s = 3\n'
    )
    recipe = load_recipe(file).recipe
    assert recipe.fleet.tp == (1, 2)
    assert recipe.fleet.tp_pairs == ((1, 2), (2, 2))
    assert recipe.workload.trajectories == Path("t.jsonl")
    assert recipe.platform.profiles == (Path("a.json"), Path("b.json"))
    assert (recipe.platform.start_s, recipe.platform.stop_s) == (3.0, None)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_toml(recipe))
    assert load_recipe(copy).recipe == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fleet.tp=[]", "fleet.tp: got []"),
        ('fleet.tp=[1, "2"]', 'fleet.tp: got [1, "2"]'),
        ("fleet.tp_pairs=[[1, 2, 3]]", "fleet.tp_pairs: got [[1, 2, 3]]"),
        ("fleet.gpus_per_node=0", "fleet.gpus_per_node: got 0, want an integer 1..1024"),
        ("fleet.reserved_gpus=-1", "fleet.reserved_gpus: got -1, want an integer 0..100000"),
        ("elastic.switch_gain_mode=1.7", "elastic.switch_gain_mode: got 1.7, want a number >= 0 and < 1 (The fraction"),
        ("elastic.switch_gain_ratio=-0.1", "elastic.switch_gain_ratio: got -0.1, want a number >= 0 and < 1"),
        ("elastic.refit_share=0", "elastic.refit_share: got 0, want a number > 0 and <= 1"),
        ("elastic.policy=best", 'elastic.policy: got "best", want one of "pearl", "paper"'),
        ("workload.prior=chess", 'workload.prior: got "chess", want one of "swe", "terminal", "tau"'),
        ("platform.prior=gpt", 'platform.prior: got "gpt", want one of "qwen3-8b-h100"'),
        ("platform.start_s=-1", "platform.start_s: got -1, want a number 0..86400"),
        ("fleet.gpus_per_node=1025", "fleet.gpus_per_node: got 1025, want an integer 1..1024"),
        ("fleet.reserved_gpus=100001", "fleet.reserved_gpus: got 100001, want an integer 0..100000"),
        ("fleet.external_gpus=100001", "fleet.external_gpus: got 100001, want an integer 0..100000"),
        ("fleet.training_gpus=100001", "fleet.training_gpus: got 100001, want an integer 0..100000"),
        ("elastic.fixed_gpus=100001", "elastic.fixed_gpus: got 100001, want an integer 1..100000"),
        ("elastic.switch_gain_tp=1", "elastic.switch_gain_tp: got 1, want a number >= 0 and < 1"),
        ("elastic.seeding_s=86401", "elastic.seeding_s: got 86401, want a number 0..86400"),
        (
            "elastic.return_z=5.1",
            "elastic.return_z: got 5.1, want a number 0..5 (Standard deviations of the predicted end",
        ),
        ("elastic.return_z=-0.1", "elastic.return_z: got -0.1, want a number 0..5"),
        ("elastic.return_z=nan", 'elastic.return_z: got "nan", want a number 0..5'),
        ("elastic.return_confidence=0.9", "elastic.return_confidence: unknown key"),
        ("platform.max_sequences=1000001", "platform.max_sequences: got 1000001, want an integer 1..1000000"),
        ("platform.prefill_chunk_tokens=0", "platform.prefill_chunk_tokens: got 0, want an integer 1..1000000"),
        ("platform.stop_s=inf", "platform.stop_s: got inf, want a number 0..86400"),
        ("elastic.switch_gain=0.1", "elastic.switch_gain: unknown key; did you mean elastic.switch_gain_"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, message: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(MINIMAL)
    with pytest.raises(ConfigError) as caught:
        load_recipe(file, [override])
    assert f"command line: {message}" in str(caught.value)
