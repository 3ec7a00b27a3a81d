"""Structured concurrency with a deterministic order, and guarded waits.

`asyncio.TaskGroup` keeps its tasks in a set and cancels them in address order; `Nursery` keeps the order of spawning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from pearl.errors import PearlError

T = TypeVar("T")


class GuardExpired(PearlError):
    """A guarded wait took longer than its bound."""


class guard:  # noqa: N801 - it reads as the verb that it is: `async with guard(5, "...")`
    """Bound a wait; the only place where the pipeline sets a time-out.

    A guard is not progress: a virtual clock may tell its timers from the others, and name the waiter in a stall.

    Raises:
        GuardExpired: the bound passed; the message names the waiter.
    """

    __slots__ = ("_timeout", "_timeout_s", "_waiter")

    def __init__(self, timeout_s: float, waiter: str) -> None:
        self._timeout_s = timeout_s
        self._waiter = waiter
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            if not self._timeout.expired():
                raise
            raise GuardExpired(f"{self._waiter}: no answer within {self._timeout_s:g} s") from expired


class Nursery:
    """Tasks that live no longer than a block.

    The first task that fails cancels the block and the other tasks, in order of spawning, and its error is raised by the
    block. At the end of the block the tasks that still run are cancelled.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._parent: asyncio.Task[Any] | None = None
        self._error: BaseException | None = None
        self._cancelled_parent = False

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task; its failure ends the block."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None or self._error is not None:
            return
        self._error = error
        if self._parent is not None and not self._parent.done():
            self._cancelled_parent = True
            self._parent.cancel()

    async def __aenter__(self) -> Self:
        self._parent = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        parent, self._parent = self._parent, None
        await self.cancel_all()
        if self._error is None:
            return
        if self._cancelled_parent and parent is not None:
            parent.uncancel()
        raise self._error

    async def cancel_all(self) -> None:
        """Cancel the running tasks in order of spawning and wait for each of them."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                self._tasks.pop(task, None)


class Changed:
    """Wakes its waiters when something changed; level-triggered through a predicate."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Wake all waiters, in order of waiting."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, predicate: Callable[[], T | None]) -> T:
        """Wait until the predicate gives something other than None, and return it."""
        while (found := predicate()) is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)
        return found
