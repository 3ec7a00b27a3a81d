"""Check what an environment's code returned before anything else sees it."""

from __future__ import annotations

import math
from numbers import Real

from pearl.errors import EnvironmentNonsense
from pearl.records.trajectory import EnvironmentReply
from pearl.units import MIB, format_bytes

MAX_OBSERVATION_BYTES = MIB
"""Of UTF-8. Far beyond any context window; protects the driver from an environment that returns its whole log."""


def check_observation(value: object, where: str) -> str:
    """Return a valid observation.

    Raises:
        EnvironmentNonsense: not a string, not valid Unicode, or too long; the message begins with `where`.
    """
    if not isinstance(value, str):
        raise EnvironmentNonsense(f"{where}: observation: got {type(value).__name__}, want str")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise EnvironmentNonsense(
            f"{where}: observation: got an unpaired surrogate at character {error.start}, want valid Unicode"
        ) from error
    if size_bytes > MAX_OBSERVATION_BYTES:
        raise EnvironmentNonsense(
            f"{where}: observation: got {format_bytes(size_bytes)}, want at most {format_bytes(MAX_OBSERVATION_BYTES)}"
        )
    # A subclass of str may carry anything; only the text goes on.
    return str(value)


def check_reply(value: object, where: str) -> EnvironmentReply:
    """Return a valid reply made of plain Python values.

    Raises:
        EnvironmentNonsense: a field has the wrong type or no meaning; the message begins with `where`.
    """
    if not isinstance(value, EnvironmentReply):
        raise EnvironmentNonsense(f"{where}: reply: got {type(value).__name__}, want EnvironmentReply")
    # The fields of a record are only annotated, so whatever a user's code put there arrives here.
    reward: object = value.reward
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise EnvironmentNonsense(f"{where}: reward: got {reward!r:.80}, want a number")
    if not math.isfinite(reward):
        raise EnvironmentNonsense(f"{where}: reward: got {float(reward)}, want a finite number")
    done = _flag(value.done, "done", where)
    truncated = _flag(value.truncated, "truncated", where)
    if truncated and not done:
        raise EnvironmentNonsense(f"{where}: truncated: got True with done = False, want it only together with done")
    return EnvironmentReply(
        observation=check_observation(value.observation, where),
        reward=float(reward),
        done=done,
        truncated=truncated,
        success=None if value.success is None else _flag(value.success, "success", where),
    )


def _flag(value: object, name: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise EnvironmentNonsense(f"{where}: {name}: got {value!r:.80}, want True or False")
    return value
