"""Find environments and players by name: a built-in, or `package.module:Name`, imported and never evaluated."""

from __future__ import annotations

import difflib
import importlib
import inspect
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pearl.env.base import Evaluable, Scripted, ScriptedPlayer, TextEnvironment
from pearl.errors import ConfigError
from pearl.records.trajectory import Scalar

BUILT_IN: Mapping[str, str] = MappingProxyType({"guess_number": "pearl.env.guess_number:GuessNumber"})
"""Name in a recipe -> where the class is."""

PlayerFactory = Callable[[TextEnvironment, random.Random], ScriptedPlayer]
"""Makes a player for one task of an environment."""

_METHODS = ("reset", "step", "close")


def environment_class(kind: str) -> type[TextEnvironment]:
    """Return the class of `environment.kind`.

    Raises:
        ConfigError: unknown name, nothing to import there, or not an environment.
    """
    found = _imported(BUILT_IN.get(kind, kind), "environment.kind", kind)
    missing = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if not isinstance(found, type) or missing:
        what = f"a class without {', '.join(missing)}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(f"environment.kind: got {kind!r}, {what}; want a class with {', '.join(_METHODS)}")
    return found


def build_environment(kind: str, params: Mapping[str, Scalar]) -> TextEnvironment:
    """Construct an environment.

    Raises:
        ConfigError: see `environment_class`; a parameter is unknown, missing or refused by the environment.
    """
    cls = environment_class(kind)
    _check_names(cls, kind, params)
    try:
        return cls(**params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment.params: {kind!r} refused {dict(params)}: {error}") from error


def evaluation_params(kind: str, params: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], ...]:
    """Return the full parameters of every task that an evaluation of this environment enumerates.

    Raises:
        ConfigError: see `environment_class`; the environment has no evaluation tasks, or raises.
    """
    cls: object = environment_class(kind)
    try:
        tasks = [{**params, **task} for task in cls.evaluation_params(**params)] if isinstance(cls, Evaluable) else []
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"environment.kind: {kind!r}: evaluation_params({dict(params)}): {type(error).__name__}: {error}; "
            "want a table of parameters for each task"
        ) from error
    if not tasks:
        raise ConfigError(
            f"evaluation.rollouts_per_task: environment {kind!r} enumerates no evaluation tasks; "
            "give it a classmethod evaluation_params, or set rollouts_per_task = 0"
        )
    return tuple(tasks)


def player_factory(kind: str, player: str = "") -> PlayerFactory:
    """Return what makes scripted players: the environment's own, or class `player`, constructed as `Name(environment, rng)`.

    Raises:
        ConfigError: nothing to import there, not a player, or the environment brings none.
    """
    if not player:
        if not hasattr(environment_class(kind), "scripted_player"):
            raise ConfigError(
                f"warmup.player: environment {kind!r} brings no scripted player; "
                "name one as package.module:Name, or set warmup.steps = 0"
            )
        return _own_player
    found = _imported(player, "warmup.player", player)
    if not isinstance(found, type) or not callable(getattr(found, "act", None)):
        raise ConfigError(
            f"warmup.player: got {player!r}, want a class with act, constructed as Name(environment, rng)"
        )
    cls: Callable[[TextEnvironment, random.Random], ScriptedPlayer] = found
    return cls


def _own_player(environment: TextEnvironment, rng: random.Random) -> ScriptedPlayer:
    if not isinstance(environment, Scripted):
        raise TypeError(f"{type(environment).__name__} has no scripted_player")
    return environment.scripted_player(rng)


def _check_names(cls: type[TextEnvironment], kind: str, params: Mapping[str, Scalar]) -> None:
    accepted = inspect.signature(cls).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted):
        return
    names = [p.name for p in accepted if p.kind is not inspect.Parameter.POSITIONAL_ONLY]
    for name in params:
        if name not in names:
            raise ConfigError(
                f"environment.params.{name}: unknown parameter of {kind!r}{_nearest(name, names)}; "
                f"allowed: {', '.join(names) or 'none'}"
            )


def _imported(name: str, key: str, given: str) -> object:
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        allowed = (
            f"{', '.join(BUILT_IN)}, or package.module:Name" if key == "environment.kind" else "package.module:Name"
        )
        near = _nearest(given, BUILT_IN) if key == "environment.kind" else ""
        raise ConfigError(f"{key}: got {given!r}{near}; allowed: {allowed}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's code and may raise anything
        raise ConfigError(
            f"{key}: got {given!r}: import of {module_name} failed: {type(error).__name__}: {error}; "
            "the module must be importable where the run starts"
        ) from error
    if not hasattr(module, attribute):
        public = [public for public in vars(module) if not public.startswith("_")]
        raise ConfigError(f"{key}: got {given!r}: no {attribute} in {module_name}{_nearest(attribute, public)}")
    return getattr(module, attribute)


def _nearest(name: str, known: Mapping[str, str] | list[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
