"""Presets reproduce what was published of them, within stated tolerances, and recipes get what they name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pearl.config.elastic import WorkloadConfig
from pearl.core.distribution import constant
from pearl.core.priors import WORKLOAD_PRIORS, workload_prior
from pearl.errors import ProfileError
from pearl.sim.generate import SyntheticWorkload
from pearl.sim.presets import configured_workload, preset
from pearl.sim.recorded import RecordedWorkload
from pearl.sim.script import Script, ScriptTurn

GROUPS, GROUP_SIZE = 1500, 4


@cache
def made(name: str) -> Sequence[Sequence[Script]]:
    work = preset(name, seed=11)
    return [[work.script(group, attempt) for attempt in range(GROUP_SIZE)] for group in range(GROUPS)]


NUMBERS: dict[str, Callable[[Script], list[float]]] = {
    "turns": lambda script: [len(script.turns)],
    "new_tokens": lambda script: [turn.input_tokens for turn in script.turns[1:]],
    "generated_tokens": lambda script: [turn.output_tokens for turn in script.turns],
    "env_s": lambda script: [turn.env_s for turn in script.turns],
}


def numbers(name: str, field: str) -> list[float]:
    return [number for group in made(name) for script in group for number in NUMBERS[field](script)]


@pytest.mark.parametrize(
    ("name", "field", "mean", "p50", "p95"),
    [
        ("swe", "turns", 50.7, 45, 112),
        ("swe", "new_tokens", 701, 262, 2256),
        ("swe", "generated_tokens", 258, 145, 784),
        ("swe", "env_s", 3.41, 0.04, 11.1),
        ("tau", "turns", 12.3, 11, 25),
        ("tau", "new_tokens", 136, 34, 359),
        ("tau", "generated_tokens", 62, 43, 179),
        ("webshop", "turns", 6.9, 7, 14),
        ("webshop", "new_tokens", 59, 9, 200),
        ("webshop", "generated_tokens", 17, 10, 46),
        ("terminal", "turns", 47.3, 20, None),
        ("terminal", "new_tokens", None, 694, None),
        ("terminal", "generated_tokens", None, 223, None),
        ("terminal", "env_s", 2.9, 0.04, None),
        ("game", "turns", None, None, 10),
        ("game", "generated_tokens", None, None, 100),
    ],
)
def test_published_figures(name: str, field: str, mean: float | None, p50: float | None, p95: float | None) -> None:
    """Means to 8 %, quantiles to 12 %: 1,500 tasks know the length of a trajectory to 2-5 %, points are 3 to 10 % apart."""
    found = numbers(name, field)
    if mean is not None:
        assert np.mean(found) == pytest.approx(mean, rel=0.08)
    for share, want in ((0.5, p50), (0.95, p95)):
        if want is not None:
            assert np.quantile(found, share) == pytest.approx(want, rel=0.12)


@pytest.mark.parametrize(("name", "p90", "p99"), [("swe", 9.54, 20.5), ("terminal", 9.0, 20.6)])
def test_few_calls_hold_most_of_the_waiting(name: str, p90: float, p99: float) -> None:
    """Published: the middle call takes 0.04 s, and 5 % of calls hold 33-74 % of the waiting."""
    waits = np.sort(numbers(name, "env_s"))
    assert np.quantile(waits, 0.9) == pytest.approx(p90, rel=0.05)
    assert np.quantile(waits, 0.99) == pytest.approx(p99, rel=0.1)
    assert 0.33 <= waits[int(0.95 * len(waits)) :].sum() / waits.sum() <= 0.74


@pytest.mark.parametrize("name", ["swe", "tau", "webshop"])
def test_the_longest_of_a_group(name: str) -> None:
    """Published: 1.27 times the mean of the attempts; in the middle of all tasks, to 4 %."""
    outputs = np.array([[sum(turn.output_tokens for turn in script.turns) for script in group] for group in made(name)])
    ratio = np.median(outputs.max(axis=1) / outputs.mean(axis=1))
    assert ratio == pytest.approx(1.27, rel=0.04)


@pytest.mark.parametrize("name", WORKLOAD_PRIORS)
def test_contexts_grow_with_turns(name: str) -> None:
    """By as much per turn as the prior says, on average over all turns of 1,500 tasks."""
    profile = workload_prior(name)
    grown = sum(script.starts[-1] - script.starts[0] for group in made(name) for script in group)
    steps = sum(len(script.turns) - 1 for group in made(name) for script in group)
    assert grown / steps == pytest.approx(profile.growth_tokens, rel=0.08)
    assert np.mean([group[0].starts[0] for group in made(name)]) == profile.prompt_tokens.mean


def test_another_name() -> None:
    with pytest.raises(ProfileError, match=r"^workload: got 'chess', want one of swe, terminal, tau, webshop, game$"):
        preset("chess", seed=0)


class TestConfigured:
    def test_a_prior(self) -> None:
        found = configured_workload(WorkloadConfig(prior="game"), seed=4)
        assert isinstance(found, SyntheticWorkload)
        assert found.script(1, 2) == preset("game", seed=4).script(1, 2)

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(json.dumps({"turns": [{"input_tokens": 5, "output_tokens": 7}]}))
        found = configured_workload(WorkloadConfig(prior="webshop", trajectories=path), seed=0)
        assert isinstance(found, RecordedWorkload)
        assert found.waits == "not recorded: the prior webshop"
        assert workload_prior("webshop").env_s == constant(0.1)
        assert found.script(0, 0).turns == (ScriptTurn(5, 7, 0.1),)

    @pytest.mark.parametrize("text", ["", '{"turns": [{"input_tokens": 0, "output_tokens": 7}]}'])
    def test_a_file_of_no_use(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(text)
        with pytest.raises(ProfileError, match=r"^workload\.trajectories: .*t\.jsonl: "):
            configured_workload(WorkloadConfig(trajectories=path), seed=0)
