"""Calls of Ray actors from asyncio, with Ray's errors turned into ours."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from pearl.errors import PearlError, WorkerLost

T = TypeVar("T")

LINGER_S = 0.003
"""What the first event of a batch waits for company: a message between processes costs each side about a millisecond of
CPU, a turn that waits costs nothing while others are under way."""


async def answer(reference: Awaitable[T], who: str) -> T:
    """Wait for an actor's answer.

    Raises:
        WorkerLost: the actor's process is gone, or its code raised something that is none of ours: it cannot be relied on.
        PearlError: whatever of ours the actor raised.
    """
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, PearlError):
            raise type(cause)(str(cause)) from error
        raise WorkerLost(f"{who}: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise WorkerLost(f"{who}: its process is gone ({_first_line(error)})") from error
    except RayError as error:
        raise WorkerLost(f"{who}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
