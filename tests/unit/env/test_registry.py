"""Names of environments and players."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pearl.env import registry
from pearl.env.guess_number import GuessNumber, GuessNumberPlayer
from pearl.env.registry import build_environment, environment_class, evaluation_params, player_factory
from pearl.errors import ConfigError
from pearl.records.trajectory import EnvironmentReply, Scalar


class Echo:
    """No hooks; takes any parameter but `bad`."""

    def __init__(self, **params: Scalar) -> None:
        if "bad" in params:
            raise ValueError("bad is not good")
        self.params = params

    def reset(self, seed: int) -> str:
        return str(seed)

    def step(self, action: str) -> EnvironmentReply:
        return EnvironmentReply(observation=action, reward=0.0, done=True)

    def close(self) -> None:
        pass


class NoStep:
    def reset(self, seed: int) -> str:
        return ""

    def close(self) -> None:
        pass


class Parrot:
    def __init__(self, environment: Echo, rng: random.Random) -> None:
        self.environment = environment

    def act(self, observation: str) -> str:
        return observation


@pytest.fixture(autouse=True)
def users_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("users_environment")
    for found in (Echo, NoStep, Parrot):
        setattr(module, found.__name__, found)
    module.function = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_environment", module)


def test_a_built_in_by_its_name_and_by_its_place() -> None:
    assert environment_class("guess_number") is GuessNumber
    assert environment_class("pearl.env.guess_number:GuessNumber") is GuessNumber


def test_a_users_class_is_imported() -> None:
    environment = build_environment("users_environment:Echo", {"size": 3})
    assert isinstance(environment, Echo)
    assert environment.params == {"size": 3}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gues_number", r"did you mean 'guess_number'\?.*allowed: guess_number, or package.module:Name"),
        ("", "allowed: guess_number"),
        ("os.system('ls')", "allowed: guess_number"),
        ("users_environment:", "allowed"),
        (":Echo", "allowed"),
        ("users_environment:Echo()", "allowed"),
        ("no_such_package_anywhere:X", "import of no_such_package_anywhere failed: ModuleNotFoundError"),
        ("users_environment:Ecko", r"no Ecko in users_environment \(did you mean 'Echo'\?\)"),
        ("users_environment:function", "a function; want a class with reset, step, close"),
        ("users_environment:NoStep", "a class without step; want"),
    ],
)
def test_names_that_lead_nowhere(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment_class(kind)


def test_a_module_that_cannot_be_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_environment_module.py").write_text("raise RuntimeError('no licence file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="RuntimeError: no licence file"):
        environment_class("broken_environment_module:X")


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("guess_number", {"hihg": 9}, r"environment\.params\.hihg: .*did you mean 'high'.*low, high, turns, target"),
        ("guess_number", {"low": 9}, "refused .*want 0 <= low < high"),
        ("guess_number", {"low": "a"}, "refused"),
        ("users_environment:Echo", {"bad": 1}, "bad is not good"),
    ],
)
def test_parameters_that_are_refused(kind: str, params: dict[str, Scalar], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_environment(kind, params)


def test_evaluation_tasks_come_with_the_recipes_parameters() -> None:
    assert evaluation_params("guess_number", {"high": 2, "turns": 1}) == (
        {"high": 2, "turns": 1, "target": 1},
        {"high": 2, "turns": 1, "target": 2},
    )


def test_an_environment_without_evaluation_tasks() -> None:
    with pytest.raises(ConfigError, match="enumerates no evaluation tasks"):
        evaluation_params("users_environment:Echo", {})


@pytest.mark.parametrize(("returned", "message"), [(None, "RuntimeError: no licence"), ([3], "TypeError")])
def test_evaluation_tasks_that_go_wrong(
    returned: list[int] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluation_params(**params: Scalar) -> list[int]:
        if returned is None:
            raise RuntimeError("no licence")
        return returned

    monkeypatch.setattr(Echo, "evaluation_params", evaluation_params, raising=False)
    with pytest.raises(ConfigError, match=rf"Echo'.*{message}.*want a table of parameters for each task"):
        registry.evaluation_params("users_environment:Echo", {})


def test_players() -> None:
    game, echo, rng = GuessNumber(), Echo(), random.Random(0)
    assert isinstance(player_factory("guess_number")(game, rng), GuessNumberPlayer)
    player = player_factory("users_environment:Echo", "users_environment:Parrot")(echo, rng)
    assert isinstance(player, Parrot)
    assert player.environment is echo


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: player_factory("users_environment:Echo"), "brings no scripted player"),
        (lambda: player_factory("guess_number", "users_environment:Echo"), "want a class with act"),
        (lambda: player_factory("guess_number", "parrot"), "allowed: package.module:Name"),
    ],
)
def test_players_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
