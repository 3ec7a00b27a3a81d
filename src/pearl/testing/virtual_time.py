"""Run asyncio code on a clock that jumps to the next timer: time-outs of an hour pass in microseconds, in exact order."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_NAMED = 10
"""Waiting tasks that a stall names."""


class Stalled(RuntimeError):
    """Nothing is ready and no timer is set: the code waits for something that cannot come."""


class _JumpingSelector(selectors.BaseSelector):
    """Never waits: advances the clock instead."""

    def __init__(self, waiters: Callable[[], str]) -> None:
        self.now_s = 0.0
        self._waiters = waiters
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled(f"virtual time: every task waits, and no timer is set: {self._waiters()}")
        self.now_s += max(timeout, 0.0)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, beginning at 0; real I/O and threads do not work on it."""

    def __init__(self) -> None:
        self._virtual = _JumpingSelector(self._waiters)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now_s

    @property
    def _clock_resolution(self) -> float:
        # A timer is due at `time() + resolution`; after three months a fixed nanosecond is less than one step of the float.
        return max(1e-9, 2 * math.ulp(self._virtual.now_s))

    @_clock_resolution.setter
    def _clock_resolution(self, _: float) -> None:
        """Asked of the real clock by the base class."""

    def _waiters(self) -> str:
        names = sorted(task.get_name() for task in asyncio.all_tasks(self))
        return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time.

    Raises:
        Stalled: the work waits for something that cannot come.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
