"""Run asyncio code on a clock that jumps to the next timer: time-outs of an hour pass in microseconds, in exact order.

Laws:

- *jump*: time passes only while nothing is ready, and then exactly to the next timer.
- *order*: callbacks run in the order in which they became ready, timers of equal times in the order of setting; nothing
  depends on addresses, hashes or the wall clock.
- *stall*: timers are progress or guard (`call_guard`: time-outs, which only say that something took too long). When nothing
  is ready and only guards remain, nothing can happen any more but that something is given up: the loop reports who waits,
  and lets the first guard fire. Without any timer it raises `Stalled`.
- *closed*: sockets, threads, processes and signals belong to the real world and are refused.

Cancelled timers, most guards among them, are thrown away once they are more than half: what is kept is bounded by what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_NAMED = 10
"""Waiting tasks, and guards, that a stall names."""
_KEPT_STALLS = 100
"""Stalls that are kept with their names; the rest are counted."""
_SELDOM = (50_000, 20, 50)
"""Thresholds of the garbage collector for `rare_collections`."""
_FEW = 256
"""Cancelled timers that are not worth throwing away."""


class Stalled(RuntimeError):
    """Nothing is ready and no timer but guards is set: the code waits for something that cannot come."""


class RealWorldRefused(RuntimeError):
    """Code on virtual time asked for real I/O, a thread or a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Nothing but guards was left to wait for."""

    at_s: float
    """Virtual time since which nothing can happen."""
    until_s: float
    """When the first guard fires."""
    tasks: tuple[str, ...]
    """Names of waiting tasks, sorted, the first few."""
    guards: tuple[str, ...]
    """What the guards guard, in order of firing, the first few."""
    waiting_tasks: int
    waiting_guards: int

    def __str__(self) -> str:
        return (
            f"from {self.at_s:g} s until {self.until_s:g} s only guards are left "
            f"({_listed(self.guards, self.waiting_guards)}) while these tasks wait: "
            f"{_listed(self.tasks, self.waiting_tasks)}"
        )


class _Call(asyncio.Handle):
    """A callback that is ready; as asyncio's without what it keeps for debugging."""

    __slots__ = ()
    _repr = None
    _source_traceback = None

    def __init__(
        self,
        callback: Callable[..., object] | None,
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False


class _Timers:
    """A heap of timers in order of (time, setting)."""

    __slots__ = ("cancelled", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, _Timer]] = []
        self.cancelled = 0
        """Timers in the heap that were cancelled."""

    def forget(self) -> None:
        """Another one was cancelled; throw them away when they are most of the heap."""
        self.cancelled += 1
        if self.cancelled > _FEW and 2 * self.cancelled > len(self.heap):
            self.heap[:] = [entry for entry in self.heap if not entry[2]._cancelled]  # noqa: SLF001
            heapq.heapify(self.heap)
            self.cancelled = 0

    def first_s(self) -> float:
        """Time of the next one that was not cancelled; never, if there is none."""
        heap = self.heap
        while heap:
            if not heap[0][2]._cancelled:  # noqa: SLF001 - see `VirtualLoop._run_once`
                return heap[0][0]
            heapq.heappop(heap)
            self.cancelled -= 1
        return math.inf


class _Timer(asyncio.TimerHandle):
    """A callback at a time."""

    __slots__ = ("_timers", "waiter")
    _repr = None
    _source_traceback = None

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
        timers: _Timers,
        waiter: str = "",
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._cancelled = False
        self._when = when
        self._scheduled = True
        self._timers = timers
        self.waiter = waiter
        """Of a guard: whose."""

    def cancel(self) -> None:
        """Never fire; repeating it does nothing."""
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = None, ()
            if self._scheduled:
                self._timers.forget()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, beginning at 0.

    Of what is private to asyncio it replaces the running of one round (`_run_once`) and reads these four.
    """

    _ready: deque[Any]
    _stopping: bool
    _closed: bool
    _thread_id: int | None

    def __init__(self, *, strict: bool = False, on_stall: Callable[[Stall], None] | None = None) -> None:
        """`strict`: the first stall raises; else it is kept in `stalls`, and `on_stall` is told."""
        super().__init__()
        self._now_s = 0.0
        self._set = 0
        self._progress = _Timers()
        self._guards = _Timers()
        self._strict = strict
        self._on_stall = on_stall
        self.stalls: list[Stall] = []
        """The first hundred, in order."""
        self.stall_count = 0

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    @property
    def timers(self) -> int:
        """Timers that may still fire, guards included."""
        return sum(len(kind.heap) - kind.cancelled for kind in (self._progress, self._guards))

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback in its turn."""
        if self._closed:
            raise RuntimeError("the event loop is closed")
        handle = _Call(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`, for signal handlers; other threads are refused, since when they call is not virtual."""
        if self._thread_id not in (None, threading.get_ident()):
            _refuse("call_soon_threadsafe from another thread")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback after so many seconds."""
        return self._schedule(self._now_s + delay, callback, args, context, self._progress, "")

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a time; soon if it has passed."""
        return self._schedule(when, callback, args, context, self._progress, "")

    def call_guard(self, delay_s: float, callback: Callable[[], object], waiter: str) -> asyncio.TimerHandle:
        """As `call_later`, for time-outs: not a thing to wait for. `waiter` is named in stalls."""
        return self._schedule(self._now_s + delay_s, callback, (), None, self._guards, waiter)

    def close(self) -> None:
        """Drop all timers."""
        super().close()
        for kind in (self._progress, self._guards):
            kind.heap.clear()
            kind.cancelled = 0

    def _schedule(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        kind: _Timers,
        waiter: str,
    ) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("the event loop is closed")
        if when != when:  # not a number
            raise ValueError(f"virtual time: got a timer at {when} s, want a number")
        self._set += 1
        timer = _Timer(when, callback, args, self, context, kind, waiter)
        if when < math.inf:
            heapq.heappush(kind.heap, (when, self._set, timer))
        else:
            timer._scheduled = False  # noqa: SLF001 - never: nothing to wait for
        return timer

    def _run_once(self) -> None:
        """Jump if nothing is ready, then run what is; what becomes ready meanwhile waits for the next round."""
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        now_s = self._now_s
        progress, guards = self._progress.heap, self._guards.heap
        if guards and guards[0][0] <= now_s:
            self._collect()
        while progress and progress[0][0] <= now_s:
            timer = heapq.heappop(progress)[2]
            if timer._cancelled:  # noqa: SLF001 - here and below: a method call apiece, a million times
                self._progress.cancelled -= 1
            else:
                timer._scheduled = False  # noqa: SLF001
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:  # noqa: SLF001
                continue
            try:
                handle._context.run(handle._callback, *handle._args)  # noqa: SLF001
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                context = {"message": f"exception in callback {handle!r}", "exception": error, "handle": handle}
                self.call_exception_handler(context)

    def _jump(self) -> None:
        progress, guards = self._progress.first_s(), self._guards.heap
        if guards and guards[0][0] > progress:
            # Whatever is first of the guards, cancelled or not, comes later.
            if progress > self._now_s:
                self._now_s = progress
            return
        guard = self._guards.first_s()
        if progress == guard == math.inf:
            names = self._waiting_tasks()
            raise Stalled(
                f"virtual time: every task waits, and no timer is set: {_listed(tuple(names[:_NAMED]), len(names))}"
            )
        if progress == math.inf and guard > self._now_s:
            self._stall(guard)
        first_s = progress if progress < guard else guard
        if first_s > self._now_s:
            self._now_s = first_s

    def _collect(self) -> None:
        """Make all timers ready that are due, guards among them, in order of (time, setting)."""
        due: list[tuple[float, int, _Timer]] = []
        for kind in (self._progress, self._guards):
            while kind.first_s() <= self._now_s:
                due.append(heapq.heappop(kind.heap))
        for _, _, timer in sorted(due):
            timer._scheduled = False  # noqa: SLF001
            self._ready.append(timer)

    def _stall(self, until_s: float) -> None:
        self.stall_count += 1
        if len(self.stalls) >= _KEPT_STALLS and not self._strict:
            return
        tasks = self._waiting_tasks()
        guards = heapq.nsmallest(_NAMED, (entry for entry in self._guards.heap if not entry[2].cancelled()))
        stall = Stall(
            at_s=self._now_s,
            until_s=until_s,
            tasks=tuple(tasks[:_NAMED]),
            guards=tuple(timer.waiter for _, _, timer in guards),
            waiting_tasks=len(tasks),
            waiting_guards=len(self._guards.heap) - self._guards.cancelled,
        )
        self.stalls.append(stall)
        if self._strict:
            self._strict = False  # what is left is cancelled now, and may wait for its own guards
            raise Stalled(f"virtual time: {stall}")
        if self._on_stall is not None:
            self._on_stall(stall)

    def _waiting_tasks(self) -> list[str]:
        return sorted(task.get_name() for task in asyncio.all_tasks(self))


def _listed(names: tuple[str, ...], count: int) -> str:
    return (", ".join(names) or "none") + (f" and {count - len(names)} more" if count > len(names) else "")


def _refuse(what: str) -> NoReturn:
    raise RealWorldRefused(
        f"virtual time: {what}: real I/O, threads, processes and signals do not work on a clock that jumps; "
        "use a simulated port or a fake instead"
    )


def _refused(name: str) -> Callable[..., NoReturn]:
    def refused(_self: VirtualLoop, *_args: object, **_named: object) -> NoReturn:
        _refuse(name)

    refused.__name__ = name
    return refused


for _name in (
    *("run_in_executor", "set_default_executor", "getaddrinfo", "getnameinfo"),
    *("create_connection", "create_server", "create_datagram_endpoint", "create_unix_connection", "create_unix_server"),
    *("connect_accepted_socket", "sendfile", "start_tls", "connect_read_pipe", "connect_write_pipe"),
    *("add_reader", "remove_reader", "add_writer", "remove_writer", "add_signal_handler", "remove_signal_handler"),
    *("sock_accept", "sock_connect", "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into"),
    *("sock_sendall", "sock_sendfile", "sock_sendto", "subprocess_exec", "subprocess_shell"),
):
    setattr(VirtualLoop, _name, _refused(_name))


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Look for reference cycles seldom: with thousands of tasks alive that is half of a simulation's time."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_virtual(
    work: Coroutine[Any, Any, T], *, strict: bool = False, on_stall: Callable[[Stall], None] | None = None
) -> T:
    """`asyncio.run` on virtual time.

    Raises:
        Stalled: the work waits for something that cannot come; with `strict`, for nothing but its time-outs, too.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(strict=strict, on_stall=on_stall)) as runner:
        return runner.run(work)
