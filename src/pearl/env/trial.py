"""Try a recipe's environment before a run begins: what is the matter with it is told at once, within bounds.

Everything that runs the user's code does so in a thread of its own, as it will in a run; one that never returns is left
behind, and ends with the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pearl.config.recipe import Recipe
from pearl.env.registry import build_environment, evaluation_params, player_factory
from pearl.errors import ConfigError

T = TypeVar("T")


def try_environment(recipe: Recipe) -> None:
    """Construct and close the environment, and look for the hooks that the recipe needs.

    Raises:
        ConfigError: it cannot be made, raises, takes longer than `rollout.env_reset_timeout_s`, or lacks a hook.
    """
    kind, params = recipe.environment.kind, recipe.environment.params
    timeout_s = recipe.rollout.env_reset_timeout_s
    environment = _tried(lambda: build_environment(kind, params), f"{kind!r}: construction", timeout_s)
    _tried(environment.close, f"{kind!r}: close", timeout_s)
    if recipe.warmup.steps:
        _tried(lambda: player_factory(kind, recipe.warmup.player), f"{kind!r}: scripted player", timeout_s)
    if recipe.evaluation.rollouts_per_task:
        _tried(lambda: evaluation_params(kind, params), f"{kind!r}: evaluation_params", timeout_s)


def _tried(call: Callable[[], T], what: str, timeout_s: float) -> T:
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            result.set_exception(error)

    thread = threading.Thread(target=work, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not result.done():
        raise ConfigError(
            f"environment.kind: {what}: no return within {timeout_s:g} s; want it done within "
            "rollout.env_reset_timeout_s: raise that, or find what it waits for"
        )
    error = result.exception()
    if error is None or isinstance(error, ConfigError):
        return result.result()
    raise ConfigError(f"environment.kind: {what}: raised {type(error).__name__}: {error}") from error
