"""The driver's side of one environment process: calls go out and answers come back in batches.

Laws: a call is answered once, or fails as lost when the process does; a process that says nothing for `silence_s`, stopped
or thrashing, is as good as dead. What is to be done about it is the pool's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pearl.cluster.calls import answer_within, end_actor
from pearl.cluster.environment_host import EnvironmentAnswer, EnvironmentCall
from pearl.errors import EnvironmentLost, PearlError

POLL_S = 1.0
"""An idle process is asked again this often; answers arrive at once."""


@dataclass(slots=True, kw_only=True, eq=False)
class EnvironmentProcess:
    """One process, and what is open in it; `begin` it, and `end` it."""

    number: int
    actor: Any
    pid: int
    capacity: int
    """Slots."""
    silence_s: float
    """Beyond the wait of a poll."""
    on_late: Callable[[EnvironmentProcess, int], None]
    """A call of `late` was answered."""
    on_death: Callable[[EnvironmentProcess, str], None]
    open: int = 0
    stuck: set[int] = field(default_factory=set)
    """Late calls that are taken for lost."""
    late: dict[int, int | None] = field(default_factory=dict)
    """Call that is out -> environment to close when it returns, where nobody waits for it any more."""
    retiring: bool = False
    """No environment is opened in it any more."""
    dead: bool = False
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    _outbox: list[EnvironmentCall] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: dict[int, asyncio.Future[EnvironmentAnswer]] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def who(self) -> str:
        """Its name in messages."""
        return f"environment process {self.number}"

    @property
    def free(self) -> int:
        """Slots to give; a late call's slot is still open."""
        return 0 if self.retiring else self.capacity - self.open

    @property
    def in_use(self) -> int:
        """Open environments that somebody waits for."""
        return self.open - len(self.late)

    def begin(self) -> None:
        """Send and receive from now on."""
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]

    async def call(self, call: EnvironmentCall) -> EnvironmentAnswer:
        """Make a call and wait for its answer.

        Raises:
            EnvironmentLost: the process is gone.
        """
        if self.dead:
            raise EnvironmentLost(f"{self.who} is gone")
        waiting: asyncio.Future[EnvironmentAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[call.id] = waiting
        self.post(call)
        return await waiting

    def post(self, call: EnvironmentCall) -> None:
        """Make a call whose answer nobody waits for."""
        self._outbox.append(call)
        self._wake.set()

    def is_out(self, call: int) -> bool:
        """Whether a call is not answered yet."""
        return call in self._waiting

    def fail(self, detail: str) -> None:
        """No call will be answered any more."""
        self.dead = self.retiring = True
        self.open -= len(self.late)
        self.late.clear()
        self.stuck.clear()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EnvironmentLost(detail))

    async def end(self, detail: str) -> None:
        """End the process at once, whatever state it is in."""
        self.retiring = True
        mine = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.fail(detail)
        # Ray asks first, and kills a process that does not react, such as a stopped one, after five seconds.
        end_actor(self.actor)

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            calls, self._outbox = self._outbox, []
            try:
                await answer_within(self.actor.submit.remote(calls), self.who, self.silence_s)
            except PearlError as error:
                self.on_death(self, str(error))
                return

    async def _receive(self) -> None:
        while True:
            try:
                answers: list[EnvironmentAnswer] = await answer_within(
                    self.actor.poll.remote(POLL_S), self.who, POLL_S + self.silence_s
                )
            except PearlError as error:
                self.on_death(self, str(error))
                return
            for one in answers:
                waiting = self._waiting.pop(one.call, None)
                if one.call in self.late:
                    self.on_late(self, one.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(one)
