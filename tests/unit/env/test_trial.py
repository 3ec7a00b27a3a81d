"""A recipe's environment is tried before a run: whatever it does is an error of the recipe, in bounded time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pytest

from pearl.config.recipe import Recipe
from pearl.env.trial import try_environment
from pearl.errors import ConfigError
from pearl.records.trajectory import EnvironmentReply

Do = Callable[[], None]


def nothing() -> None:
    pass


def fail(error: BaseException) -> Do:
    def do() -> None:
        raise error

    return do


def made(build: Do, close: Do, evaluation: Do = nothing) -> type:
    class Mine:
        closed = 0

        def __init__(self) -> None:
            build()

        def reset(self, seed: int) -> str:
            return ""

        def step(self, action: str) -> EnvironmentReply:
            return EnvironmentReply(observation="", reward=0.0, done=True)

        def close(self) -> None:
            type(self).closed += 1
            close()

        @classmethod
        def evaluation_params(cls) -> list[dict[str, int]]:
            evaluation()
            return [{}]

    return Mine


def attempt(monkeypatch: pytest.MonkeyPatch, mine: type, timeout_s: float = 60.0) -> None:
    module = ModuleType("tried_environment")
    module.Mine = mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tried_environment", module)
    sections = {
        "model": {"path": "nowhere"},
        "environment": {"kind": "tried_environment:Mine"},
        "rollout": {"env_reset_timeout_s": timeout_s},
        "evaluation": {"rollouts_per_task": 1},
    }
    try_environment(Recipe.model_validate(sections))


def test_a_sound_one_is_made_and_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = made(nothing, nothing)
    attempt(monkeypatch, mine)
    assert vars(mine)["closed"] == 1


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (made(fail(RuntimeError("no licence")), nothing), "construction: raised RuntimeError: no licence"),
        (made(fail(TimeoutError("no server")), nothing), "construction: raised TimeoutError: no server"),
        (made(fail(SystemExit(3)), nothing), "construction: raised SystemExit: 3"),
        (made(fail(ValueError("turns")), nothing), "refused {}: turns"),
        (made(nothing, fail(OSError("gone"))), "close: raised OSError: gone"),
        (made(nothing, nothing, fail(RuntimeError("none"))), "evaluation_params.*RuntimeError: none"),
    ],
)
def test_what_it_raises_is_an_error_of_the_recipe(mine: type, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"environment\..*tried_environment:Mine.*{message}"):
        attempt(monkeypatch, mine)


@pytest.mark.parametrize("where", ["construction", "close", "evaluation_params"])
def test_what_does_not_return_is_not_waited_for(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()

    def hang() -> None:
        told.wait()

    stages = {name: hang if name == where else nothing for name in ("construction", "close", "evaluation_params")}
    try:
        with pytest.raises(
            ConfigError, match=rf"Mine': {where}: no return within 0\.2 s.*rollout\.env_reset_timeout_s"
        ):
            attempt(monkeypatch, made(stages["construction"], stages["close"], stages["evaluation_params"]), 0.2)
    finally:
        told.set()
