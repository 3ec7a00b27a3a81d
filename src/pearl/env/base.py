"""What a user writes: a synchronous text environment, and two optional hooks.

An environment draws randomness from one generator of its own, seeded in `reset`, never from the global one: environments
that share a process must not disturb each other, and the attempts of a group must see the same task.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from pearl.records.trajectory import EnvironmentReply, Scalar


class TextEnvironment(Protocol):
    """One task, acted on in text; may be reset and used again after it is done."""

    def __init__(self, **params: Scalar) -> None:
        """Take the parameters of `environment.params`; `ValueError` for one that makes no sense."""

    def reset(self, seed: int) -> str:
        """Begin the task of this seed (>= 0) and return the first observation."""

    def step(self, action: str) -> EnvironmentReply:
        """Answer one action; an invalid action is an outcome (reward, done), not an exception."""

    def close(self) -> None:
        """Free what the environment holds; called once, last."""


class ScriptedPlayer(Protocol):
    """Plays one task without a model, to show it the format (warm-up)."""

    def act(self, observation: str) -> str:
        """Answer an observation; the first one begins a new task."""


@runtime_checkable
class Evaluable(Protocol):
    """Hook of an environment class: the tasks that an evaluation enumerates."""

    @classmethod
    def evaluation_params(cls, **params: Scalar) -> Sequence[Mapping[str, Scalar]]:
        """Return, per task, the parameters to set over `params` (those of the recipe)."""


@runtime_checkable
class Scripted(Protocol):
    """Hook of an environment: it brings a scripted player."""

    def scripted_player(self, rng: random.Random) -> ScriptedPlayer:
        """Return a player for one task; all its randomness comes from `rng`."""
