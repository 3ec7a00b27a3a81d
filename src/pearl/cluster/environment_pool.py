"""The `EnvironmentPool` port on Ray: slots over several environment processes.

Laws: never more than `slots` environments; slots are given in the order of asking; a stuck call keeps its thread, so its
slot is gone until the process is replaced, which happens once `STUCK_FRACTION` of a process' slots are stuck, or as many
as are in use; the other environments of a process that is replaced finish first, within `DRAIN_S`; a process that dies or
falls silent ends its environments as lost. Replacements are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque

import ray

from pearl.cluster.calls import start_actor
from pearl.cluster.environment_host import EnvironmentAnswer, EnvironmentCall, EnvironmentHost, Fault
from pearl.cluster.environment_process import EnvironmentProcess
from pearl.errors import (
    EnvironmentFault,
    EnvironmentHung,
    EnvironmentNonsense,
    EnvironmentRaised,
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
STUCK_AT_LEAST = 2
"""Before stuck calls are compared with what else is open: one that hangs is no reason to doubt the process."""
DRAIN_S = 30.0
"""For the healthy environments of a process that is replaced."""
SILENCE_FRACTION = 0.5
"""Of the shortest bound on a call: a process that stands still costs each of its attempts one fault, not a second one."""
SILENCE_S = (2.0, 30.0)
"""Least and most of it. Importing a large library may hold up a sound process for a second or two."""


class RayEnvironmentPool:
    """Use inside a running event loop; `start` before `open`, `stop` at the end."""

    def __init__(
        self,
        slots: int,
        processes: int,
        *,
        start_timeout_s: float,
        open_timeout_s: float,
        step_timeout_s: float,
        max_restarts: int,
    ) -> None:
        """`open_timeout_s` bounds the construction of an environment, not the wait for a slot; `step_timeout_s`: the caller's."""
        self._slots = slots
        self._capacities = [len(range(first, slots, processes)) for first in range(min(slots, processes))]
        """Slots of each process: as even as can be."""
        self._start_timeout_s, self._open_timeout_s = start_timeout_s, open_timeout_s
        least_s, most_s = SILENCE_S
        self._silence_s = min(most_s, max(least_s, SILENCE_FRACTION * min(open_timeout_s, step_timeout_s)))
        self._max_restarts = max_restarts
        self._hosts: dict[int, EnvironmentProcess] = {}
        self._started = 0
        self._serial = 0
        self._asking: deque[asyncio.Future[EnvironmentProcess]] = deque()
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

    async def _slot(self) -> EnvironmentProcess:
        if self._broken is not None:
            raise self._broken
        asked: asyncio.Future[EnvironmentProcess] = asyncio.get_running_loop().create_future()
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
            taken = sum(h.in_use for h in self._hosts.values())
            if host is None or host.free < 1 or taken >= self._slots:
                return
            host.open += 1
            self._asking.popleft().set_result(host)

    def give_back(self, host: EnvironmentProcess) -> None:
        """A slot is free again."""
        host.open -= 1
        if host.retiring and not host.in_use:
            host.drained.set()
        self._give()

    def keep_late(self, host: EnvironmentProcess, call: int, environment: int | None) -> None:
        """Keep the slot of an environment that nobody waits for until its last call returns."""
        if not host.is_out(call):
            self.give_back(host)
            return
        host.late[call] = environment
        if host.retiring and not host.in_use:
            host.drained.set()
        asyncio.get_running_loop().call_later(STUCK_AFTER_S, self._check_stuck, host, call)

    def _check_stuck(self, host: EnvironmentProcess, call: int) -> None:
        if call not in host.late or host.retiring:
            return
        host.stuck.add(call)
        stuck = len(host.stuck)
        if stuck >= max(1, int(host.capacity * STUCK_FRACTION)) or stuck >= max(STUCK_AT_LEAST, host.in_use):
            host.retiring = True
            self._replace(host, f"{stuck} calls do not return")

    def _late_answer(self, host: EnvironmentProcess, call: int) -> None:
        environment = host.late.pop(call)
        host.stuck.discard(call)
        if environment is not None:
            host.post(EnvironmentCall(id=self.next_number(), environment=environment, close=True))
        self.give_back(host)

    def _replace(self, host: EnvironmentProcess, detail: str) -> None:
        if self._stopping:
            return
        task = asyncio.create_task(self._replacement(host, detail), name=f"replace environment process {host.number}")
        self._replacing[task] = None
        task.add_done_callback(lambda done: self._replacing.pop(done, None))

    async def _replacement(self, host: EnvironmentProcess, detail: str) -> None:
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
        if not host.in_use:
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
        host = EnvironmentProcess(
            number=number,
            actor=actor,
            pid=pid,
            capacity=capacity,
            silence_s=self._silence_s,
            on_late=self._late_answer,
            on_death=self._died,
        )
        self._hosts[number] = host
        host.begin()
        self._give()

    def _died(self, host: EnvironmentProcess, detail: str) -> None:
        was_retiring = host.retiring
        host.fail(detail)
        if not was_retiring:
            self._replace(host, detail)

    async def _end(self, host: EnvironmentProcess, detail: str) -> None:
        self._hosts.pop(host.number, None)
        await host.end(detail)

    def next_number(self) -> int:
        """A number for an environment or a call, unique in the pool."""
        self._serial += 1
        return self._serial


class RayEnvironment:
    """The `Environment` port: one environment in another process."""

    def __init__(self, pool: RayEnvironmentPool, host: EnvironmentProcess) -> None:
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
            result = await self._host.call(call)
        except EnvironmentFault:
            self._outstanding = None
            raise
        self._outstanding = None
        if result.fault is Fault.NONSENSE:
            raise EnvironmentNonsense(result.detail)
        if result.fault is Fault.RAISED:
            raise EnvironmentRaised(result.detail)
        return result
