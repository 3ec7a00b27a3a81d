"""Work that waits, fails, or notes its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any


class Boom(Exception):
    pass


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def fail_after(seconds: float, error: BaseException) -> None:
    await asyncio.sleep(seconds)
    raise error


def noting(log: list[str], name: str, work: Callable[[], Awaitable[None]] = forever) -> Coroutine[Any, Any, None]:
    """Work that notes its cancellation."""

    async def run() -> None:
        try:
            await work()
        except asyncio.CancelledError:
            log.append(name)
            raise

    return run()
