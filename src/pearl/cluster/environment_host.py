"""A process that runs many environments, each call in a thread of its own; it runs the user's code and nothing else.

Calls and answers travel in batches: a turn costs the driver a share of two messages, not a remote call. A call that never
returns costs this process one thread; the pool replaces the process when too many are stuck.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pearl.cluster.calls import LINGER_S
from pearl.env.base import TextEnvironment
from pearl.env.registry import build_environment
from pearl.env.validate import check_observation, check_reply
from pearl.errors import ConfigError, EnvironmentNonsense
from pearl.records.trajectory import EnvironmentReply, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCall:
    """One call of an environment; exactly one of the last four says which."""

    id: int
    environment: int
    open: Task | None = None
    reset: int | None = None
    """Seed."""
    step: str | None = None
    """Action."""
    close: bool = False


class Fault(enum.Enum):
    """What went wrong in an environment's code."""

    RAISED = "raised"
    NONSENSE = "nonsense"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentAnswer:
    """What came of a call."""

    call: int
    observation: str | None = None
    """Of a reset."""
    reply: EnvironmentReply | None = None
    """Of a step."""
    fault: Fault | None = None
    detail: str = ""


class EnvironmentHost:
    """Runs in the environments' process (an async actor)."""

    def __init__(self, slots: int) -> None:
        self._environments: dict[int, TextEnvironment] = {}
        # One thread per slot, and some to close environments while every slot hangs.
        self._threads = ThreadPoolExecutor(max_workers=slots + 4, thread_name_prefix="environment")
        self._answers: list[EnvironmentAnswer] = []
        self._answered = asyncio.Event()

    async def start(self) -> int:
        """Returns the process id."""
        return os.getpid()

    async def submit(self, calls: Sequence[EnvironmentCall]) -> None:
        """Begin calls."""
        loop = asyncio.get_running_loop()
        for call in calls:
            future = loop.run_in_executor(self._threads, self._serve, call)
            future.add_done_callback(self._answer)

    async def poll(self, wait_s: float) -> list[EnvironmentAnswer]:
        """The answers since the last poll, waiting up to `wait_s` for the first."""
        try:
            async with asyncio.timeout(wait_s):
                await self._answered.wait()
        except TimeoutError:
            return []
        await asyncio.sleep(LINGER_S)
        self._answered.clear()
        answers, self._answers = self._answers, []
        return answers

    def _answer(self, future: asyncio.Future[EnvironmentAnswer]) -> None:
        if not future.cancelled():
            self._answers.append(future.result())
            self._answered.set()

    def _serve(self, call: EnvironmentCall) -> EnvironmentAnswer:
        try:
            return self._call(call)
        except EnvironmentNonsense as error:
            return EnvironmentAnswer(call=call.id, fault=Fault.NONSENSE, detail=str(error))
        except ConfigError as error:
            return EnvironmentAnswer(call=call.id, fault=Fault.RAISED, detail=str(error))
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            detail = f"{type(error).__name__}: {error}"
            return EnvironmentAnswer(call=call.id, fault=Fault.RAISED, detail=detail[:500])

    def _call(self, call: EnvironmentCall) -> EnvironmentAnswer:
        if call.open is not None:
            self._environments[call.environment] = build_environment(call.open.environment, call.open.params)
            return EnvironmentAnswer(call=call.id)
        if call.close:
            closing = self._environments.pop(call.environment, None)
            if closing is not None:
                closing.close()
            return EnvironmentAnswer(call=call.id)
        environment = self._environments[call.environment]
        where = f"environment {call.environment}"
        if call.reset is not None:
            return EnvironmentAnswer(call=call.id, observation=check_observation(environment.reset(call.reset), where))
        reply = check_reply(environment.step(call.step or ""), where)
        return EnvironmentAnswer(call=call.id, reply=reply)
