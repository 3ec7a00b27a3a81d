"""The `EnvironmentPool` port on Ray: slots over several environment processes.

Laws: never more than `slots` environments; slots are given in the order of asking; a stuck call keeps its thread, so its
slot is gone until the process is replaced, which happens once `STUCK_FRACTION` of a process' slots are stuck; the other
environments of a process that is replaced finish first, within `DRAIN_S`; a process that dies ends its environments as
lost. Replacements are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ray

from pearl.cluster.calls import answer, end_actor, start_actor
from pearl.cluster.environment_host import EnvironmentAnswer, EnvironmentCall, EnvironmentHost, Fault
from pearl.errors import (
    EnvironmentFault,
    EnvironmentHung,
    EnvironmentLost,
    EnvironmentNonsense,
    EnvironmentRaised,
    PearlError,
    RunFailed,
    WorkerLost,
)
from pearl.pipeline.concurrency import Nursery
from pearl.records.trajectory import EnvironmentReply, Task

_log = logging.getLogger(__name__)

STUCK_AFTER_S = 5.0
"""A call that nobody waits for any more is taken for lost after this long; most return in milliseconds."""
STUCK_FRACTION = 0.25
"""Of a process' slots; a replacement costs a second of start-up and the other environments' patience."""
DRAIN_S = 30.0
"""For the healthy environments of a process that is replaced."""
POLL_S = 1.0
"""An idle process is asked again this often; answers arrive at once."""


@dataclass(slots=True)
class _Host:
    number: int
    actor: Any
    pid: int
    capacity: int
    open: int = 0
    stuck: set[int] = field(default_factory=set)
    """Late calls that are taken for lost."""
    late: dict[int, int | None] = field(default_factory=dict)
    """Call that is out -> environment to close when it returns, where nobody waits for it any more."""
    retiring: bool = False
    """No environment is opened in it any more."""
    dead: bool = False
    outbox: list[EnvironmentCall] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: dict[int, asyncio.Future[EnvironmentAnswer]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def free(self) -> int:
        """Slots to give; a late call's slot is still open."""
        return 0 if self.retiring else self.capacity - self.open


class RayEnvironmentPool:
    """Use inside a running event loop; `start` before `open`, `stop` at the end."""

    def __init__(
        self, slots: int, processes: int, *, start_timeout_s: float, open_timeout_s: float, max_restarts: int
    ) -> None:
        """`open_timeout_s` bounds the construction of an environment, not the wait for a slot."""
        self._slots = slots
        self._capacities = [len(range(first, slots, processes)) for first in range(min(slots, processes))]
        """Slots of each process: as even as can be."""
        self._start_timeout_s, self._open_timeout_s = start_timeout_s, open_timeout_s
        self._max_restarts = max_restarts
        self._hosts: dict[int, _Host] = {}
        self._started = 0
        self._serial = 0
        self._asking: deque[asyncio.Future[_Host]] = deque()
        self._replacing: dict[asyncio.Task[None], None] = {}
        self._stopping = False
        self._broken: RunFailed | None = None
        self.restarts = 0

    @property
    def slots(self) -> int:
        """Environments open at once, at most."""
        return self._slots

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the hosts."""
        return tuple(host.pid for host in self._hosts.values())

    async def start(self) -> None:
        """Start the processes.

        Raises:
            RunFailed: one did not start.
        """
        async with Nursery() as nursery:
            starts = [nursery.spawn(self._start_host(n), "start environments") for n in self._capacities]
            await asyncio.gather(*starts)

    async def stop(self) -> None:
        """End the processes."""
        self._stopping = True
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        for host in list(self._hosts.values()):
            await self._end(host, "the pool was stopped")

    async def open(self, task: Task) -> RayEnvironment:
        """Open an environment, waiting for a free slot."""
        environment = RayEnvironment(self, await self._slot())
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await environment.begin(task)
        except BaseException as error:
            await environment.close()
            if isinstance(error, TimeoutError):
                raise EnvironmentHung(
                    f"environment {task.environment}: not constructed within {self._open_timeout_s:g} s"
                ) from error
            raise
        return environment

    # --- slots ---------------------------------------------------------------------------------------------------

    async def _slot(self) -> _Host:
        if self._broken is not None:
            raise self._broken
        asked: asyncio.Future[_Host] = asyncio.get_running_loop().create_future()
        self._asking.append(asked)
        self._give()
        try:
            return await asked
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled() and asked.exception() is None:
                self.give_back(asked.result())
            raise

    def _give(self) -> None:
        while self._asking:
            if self._asking[0].done():
                self._asking.popleft()
                continue
            host = max(self._hosts.values(), key=lambda h: (h.free, -h.number), default=None)
            # While a process is replaced, the old one's environments and the new one's share the slots.
            taken = sum(h.open - len(h.late) for h in self._hosts.values())
            if host is None or host.free < 1 or taken >= self._slots:
                return
            host.open += 1
            self._asking.popleft().set_result(host)

    def give_back(self, host: _Host) -> None:
        """A slot is free again."""
        host.open -= 1
        if host.retiring and host.open == len(host.late):
            host.drained.set()
        self._give()

    def keep_late(self, host: _Host, call: int, environment: int | None) -> None:
        """Keep the slot of an environment that nobody waits for until its last call returns."""
        if call not in host.waiting:
            self.give_back(host)
            return
        host.late[call] = environment
        if host.retiring and host.open == len(host.late):
            host.drained.set()
        asyncio.get_running_loop().call_later(STUCK_AFTER_S, self._check_stuck, host, call)

    def _check_stuck(self, host: _Host, call: int) -> None:
        if call not in host.late or host.retiring:
            return
        host.stuck.add(call)
        if len(host.stuck) >= max(1, int(host.capacity * STUCK_FRACTION)):
            host.retiring = True
            self._replace(host, f"{len(host.stuck)} calls do not return")

    def _late_answer(self, host: _Host, call: int) -> None:
        environment = host.late.pop(call)
        host.stuck.discard(call)
        if environment is not None:
            host.outbox.append(EnvironmentCall(id=self.next_number(), environment=environment, close=True))
            host.wake.set()
        self.give_back(host)

    def _replace(self, host: _Host, detail: str) -> None:
        if self._stopping:
            return
        task = asyncio.create_task(self._replacement(host, detail), name=f"replace environment process {host.number}")
        self._replacing[task] = None
        task.add_done_callback(lambda done: self._replacing.pop(done, None))

    async def _replacement(self, host: _Host, detail: str) -> None:
        _log.warning("environment process %d is replaced: %s", host.number, detail)
        self.restarts += 1
        try:
            if self.restarts > self._max_restarts:
                raise RunFailed(
                    f"environment processes: {detail}, and all cluster.max_environment_restarts = "
                    f"{self._max_restarts} are used up"
                )
            await self._start_host(host.capacity)
        except RunFailed as error:
            self._break(error)
        except Exception as error:
            # Whatever it was: who waits for a slot of this process must not wait for ever.
            self._break(RunFailed(f"environment process {host.number} cannot be replaced: {error!r}"))
            raise
        if host.open == len(host.late):
            host.drained.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await host.drained.wait()
        await self._end(host, detail)

    def _break(self, error: RunFailed) -> None:
        self._broken = error
        for asked in self._asking:
            if not asked.done():
                asked.set_exception(error)

    # --- processes -----------------------------------------------------------------------------------------------

    async def _start_host(self, capacity: int) -> None:
        number = self._started
        self._started += 1
        remote = ray.remote(num_cpus=0, max_restarts=0)(EnvironmentHost)
        actor = remote.remote(capacity)
        try:
            pid = await start_actor(actor, f"environment process {number}", self._start_timeout_s)
        except WorkerLost as error:
            raise RunFailed(f"{error} (cluster.start_timeout_s)") from error
        host = _Host(number, actor, pid, capacity)
        self._hosts[number] = host
        host.tasks = [asyncio.create_task(self._send(host)), asyncio.create_task(self._receive(host))]
        self._give()

    async def _send(self, host: _Host) -> None:
        while True:
            await host.wake.wait()
            host.wake.clear()
            calls, host.outbox = host.outbox, []
            try:
                await answer(host.actor.submit.remote(calls), f"environment process {host.number}")
            except PearlError as error:
                self._died(host, str(error))
                return

    async def _receive(self, host: _Host) -> None:
        while True:
            try:
                answers: list[EnvironmentAnswer] = await answer(
                    host.actor.poll.remote(POLL_S), f"environment process {host.number}"
                )
            except PearlError as error:
                self._died(host, str(error))
                return
            for one in answers:
                waiting = host.waiting.pop(one.call, None)
                if one.call in host.late:
                    self._late_answer(host, one.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(one)

    def _died(self, host: _Host, detail: str) -> None:
        was_retiring, host.retiring = host.retiring, True
        self._fail(host, detail)
        if not was_retiring:
            self._replace(host, detail)

    def _fail(self, host: _Host, detail: str) -> None:
        """No call of this process will be answered any more."""
        host.dead = True
        host.open -= len(host.late)
        host.late.clear()
        waiting, host.waiting = host.waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EnvironmentLost(detail))

    async def _end(self, host: _Host, detail: str) -> None:
        self._hosts.pop(host.number, None)
        host.retiring = True
        mine = asyncio.current_task()
        tasks = [task for task in host.tasks if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(host, detail)
        end_actor(host.actor)

    async def call(self, host: _Host, call: EnvironmentCall) -> EnvironmentAnswer:
        """Make a call on a host and wait for its answer."""
        if host.dead:
            raise EnvironmentLost(f"environment process {host.number} is gone")
        waiting: asyncio.Future[EnvironmentAnswer] = asyncio.get_running_loop().create_future()
        host.waiting[call.id] = waiting
        host.outbox.append(call)
        host.wake.set()
        return await waiting

    def next_number(self) -> int:
        """A number for an environment or a call, unique in the pool."""
        self._serial += 1
        return self._serial


class RayEnvironment:
    """The `Environment` port: one environment in another process."""

    def __init__(self, pool: RayEnvironmentPool, host: _Host) -> None:
        self._pool, self._host, self._number = pool, host, pool.next_number()
        self._outstanding: int | None = None
        self._closed = False

    async def begin(self, task: Task) -> None:
        """Construct it."""
        await self._call(EnvironmentCall(id=self._pool.next_number(), environment=self._number, open=task))

    async def reset(self, seed: int) -> str:
        """First observation."""
        call = EnvironmentCall(id=self._pool.next_number(), environment=self._number, reset=seed)
        return (await self._call(call)).observation or ""

    async def step(self, action: str) -> EnvironmentReply:
        """Answer one action."""
        call = EnvironmentCall(id=self._pool.next_number(), environment=self._number, step=action)
        result = await self._call(call)
        if result.reply is None:
            raise EnvironmentNonsense(f"environment {self._number}: step gave no reply")
        return result.reply

    async def close(self) -> None:
        """Give the slot back: at once, or when the call that is still out has returned."""
        if self._closed:
            return
        self._closed = True
        if self._outstanding is not None:
            self._hand_back(self._number)
            return
        try:
            with contextlib.suppress(EnvironmentFault):
                call = EnvironmentCall(id=self._pool.next_number(), environment=self._number, close=True)
                await self._call(call)
        finally:
            self._hand_back(None)

    def _hand_back(self, environment: int | None) -> None:
        if self._outstanding is None:
            self._pool.give_back(self._host)
        else:
            self._pool.keep_late(self._host, self._outstanding, environment)

    async def _call(self, call: EnvironmentCall) -> EnvironmentAnswer:
        self._outstanding = call.id
        try:
            result = await self._pool.call(self._host, call)
        except EnvironmentFault:
            self._outstanding = None
            raise
        self._outstanding = None
        if result.fault is Fault.NONSENSE:
            raise EnvironmentNonsense(result.detail)
        if result.fault is Fault.RAISED:
            raise EnvironmentRaised(result.detail)
        return result
