"""An ordered, batched stream from synchronous writers to one asynchronous reader."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items are taken in the order they were put in; never blocks the writer."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item; ignored once the mailbox is closed."""
        if self._error is None:
            self._items.append(item)
            self._wake()

    def close(self, error: BaseException, *, drop: bool) -> None:
        """End the stream with an error: at once when `drop`, else behind the items that are already there."""
        if drop:
            self._items.clear()
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> tuple[T, ...]:
        """Wait for at least one item and take all of them."""
        while not self._items:
            if self._error is not None:
                raise self._error
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        items, self._items = tuple(self._items), []
        return items

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
