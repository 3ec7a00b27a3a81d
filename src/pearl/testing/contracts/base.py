"""What all contract suites share: each test is a coroutine, run on a loop of its own within a guard."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Contract:
    """Base of the suites; `run_work` may be replaced to run on a virtual clock."""

    guard_s = 60.0
    """Longest time of one test; what it waits for cannot come any more."""

    def check(self, work: Coroutine[object, object, None]) -> None:
        """Run one test's coroutine within the guard."""
        self.run_work(self._guarded(work))

    def run_work(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine to its end."""
        asyncio.run(work)

    async def _guarded(self, work: Coroutine[object, object, None]) -> None:
        async with asyncio.timeout(self.guard_s):
            await work
