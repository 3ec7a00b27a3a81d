"""Calls of Ray actors from asyncio, with Ray's errors turned into ours."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from pearl.errors import PearlError, WorkerLost

T = TypeVar("T")

LINGER_S = 0.003
"""What the first event of a batch waits for company: a message between processes costs each side about a millisecond of
CPU, a turn that waits costs nothing while others are under way."""

TICK_S = 0.5
"""As far as a bound on an answer is late, at most."""


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


async def answer_within(reference: Awaitable[T], who: str, timeout_s: float) -> T:
    """Wait for an actor's answer, which should come within a time; rounded up to ticks of `TICK_S`.

    The time is counted in ticks of this process: after it stood still itself, nobody else is to blame for it.

    Raises:
        WorkerLost: as `answer`, or there was no answer.
        PearlError: whatever of ours the actor raised.
    """
    waiting = asyncio.ensure_future(answer(reference, who))
    try:
        for _ in range(math.ceil(timeout_s / TICK_S)):
            await asyncio.wait((waiting,), timeout=TICK_S)
            if waiting.done():
                return waiting.result()
    finally:
        waiting.cancel()
    raise WorkerLost(f"{who}: no answer within {timeout_s:g} s")


async def start_actor(actor: Any, who: str, timeout_s: float) -> int:
    """Wait for the `start` of an actor, which gives its process id; an actor that does not start is ended.

    Raises:
        WorkerLost: it died, failed, or took too long.
        PearlError: whatever of ours it raised.
    """
    try:
        async with asyncio.timeout(timeout_s):
            pid: int = await answer(actor.start.remote(), who)
            return pid
    except BaseException as error:
        # Cancellation, too: nobody else knows of the process yet.
        end_actor(actor)
        if isinstance(error, TimeoutError):
            raise WorkerLost(f"{who}: not up within {timeout_s:g} s") from error
        raise


def end_actor(actor: Any) -> None:
    """End the process of an actor at once; one that is gone is fine."""
    with contextlib.suppress(RayError):
        ray.kill(actor)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
