"""The process that a simulated thing would live in: it answers, hangs, and dies, and with it every call under way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pearl.errors import WorkerLost
from pearl.records.ids import WorkerId

T = TypeVar("T")


class Process:
    """Of one worker."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._gone: str | None = None
        self._unhung: asyncio.Future[None] | None = None
        self._calls: dict[asyncio.Task[Any], None] = {}

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self._gone is not None

    @property
    def is_hung(self) -> bool:
        """Whether calls wait until it goes on."""
        return self._unhung is not None

    @property
    def loss(self) -> WorkerLost:
        """What callers of a process that is gone are told."""
        return WorkerLost(f"worker {self._worker}: {self._gone}")

    async def answer(self) -> None:
        """Wait while it hangs.

        Raises:
            WorkerLost: it is gone.
        """
        while self._unhung is not None and self._gone is None:
            await asyncio.shield(self._unhung)
        if self._gone is not None:
            raise self.loss

    async def call(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Do something that takes time.

        Raises:
            WorkerLost: it ended meanwhile.
        """
        task = self.spawn(work, name)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._gone is not None and not (current is not None and current.cancelling()):
                raise self.loss from None
            raise

    async def wait(self, event: asyncio.Future[T]) -> T:
        """Wait for something.

        Raises:
            WorkerLost: it ended meanwhile.
        """

        async def happened() -> T:
            return await event

        return await self.call(happened(), "waiting")

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Do something beside; it is cancelled with the process."""
        task = asyncio.get_running_loop().create_task(work, name=f"worker {self._worker}: {name}")
        self._calls[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._calls.pop(task, None)

    def hang(self) -> None:
        """Answer nobody."""
        if self._unhung is None:
            self._unhung = asyncio.get_running_loop().create_future()

    def unhang(self) -> None:
        """Answer again."""
        unhung, self._unhung = self._unhung, None
        if unhung is not None and not unhung.done():
            unhung.set_result(None)

    def end(self, detail: str) -> None:
        """Die, or leave: calls under way raise `WorkerLost`."""
        self._gone = detail
        self.unhang()
        for task in list(self._calls):
            task.cancel()
