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

    As `asyncio.timeout`, with a name and without its layers: a turn passes several. A guard is not progress: a virtual
    clock that has `call_guard` tells its timers from the others, and names the waiter in a stall.

    Raises:
        GuardExpired: the bound passed; the message names the waiter.
    """

    __slots__ = ("_cancelling", "_expired", "_task", "_timeout_s", "_timer", "_waiter")

    def __init__(self, timeout_s: float, waiter: str) -> None:
        self._timeout_s = timeout_s
        self._waiter = waiter
        self._expired = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None, "a guard bounds the waits of a task"
        self._task = task
        self._cancelling = task.cancelling()
        call_guard = getattr(loop, "call_guard", None)
        if call_guard is None:
            self._timer = loop.call_later(self._timeout_s, self._expire)
        else:
            self._timer = call_guard(self._timeout_s, self._expire, self._waiter)
        return self

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        # Another cancellation that came meanwhile is somebody else's, and goes on.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise GuardExpired(f"{self._waiter}: no answer within {self._timeout_s:g} s") from error


class Nursery:
    """Tasks that live no longer than a block.

    The first task that fails cancels the block and the other tasks, in order of spawning, and its error is raised by the
    block; an error of the block itself, or its cancellation, comes first in the same way. At the end of the block the
    tasks that still run are cancelled, and whatever is spawned from then on is cancelled before it begins.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._parent: asyncio.Task[Any] | None = None
        self._error: BaseException | None = None
        self._cancelled_parent = False
        self._closing = False

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task; its failure ends the block."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        if self._closing:
            task.cancel()
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
        if self._error is None:
            self._error = error
        self._closing = True
        try:
            await self._cancel_all()
        finally:
            if self._cancelled_parent and parent is not None:
                parent.uncancel()
            first, self._error = self._error, None
            if first is not None and first is not error:
                raise first

    async def _cancel_all(self) -> None:
        """Cancel the running tasks in order of spawning and wait for each of them, also when cancelled meanwhile."""
        again: asyncio.CancelledError | None = None
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            except asyncio.CancelledError as cancelled:
                again = cancelled
            for task in tasks:
                self._tasks.pop(task, None)
        if again is not None:
            raise again


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
