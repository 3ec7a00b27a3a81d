"""An ordered stream from one simulated thing to its one reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """What was put in since the reader last looked is read at once, in order; writing never waits."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._end: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Add an item; behind the end it is ignored."""
        if self._end is None:
            self._items.append(item)
            self._wake()

    def close(self, error: Exception) -> None:
        """End the stream with an error, behind what it holds."""
        if self._end is None:
            self._end = error
            self._wake()

    def __len__(self) -> int:
        return len(self._items)

    async def read(self) -> AsyncIterator[tuple[T, ...]]:
        """Batches, until the end.

        Raises (from the iterator):
            Exception: what the stream was closed with.
        """
        while True:
            while not self._items:
                if self._end is not None:
                    raise self._end
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            items, self._items = tuple(self._items), []
            yield items

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
