"""A fake environment pool: what each environment does is scripted per (task, attempt), faults included."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pearl.errors import EnvironmentLost, EnvironmentNonsense, EnvironmentRaised
from pearl.records.ids import TaskId
from pearl.records.trajectory import EnvironmentReply, Task

AT_OPEN = -2
"""As `Behaviour.fault_turn`: the environment cannot be made."""
AT_RESET = -1
"""As `Behaviour.fault_turn`: `reset` goes wrong."""


class Fault(enum.Enum):
    """How an environment can go wrong."""

    RAISE = "raise"
    HANG = "hang"
    NONSENSE = "nonsense"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What one environment does."""

    turns: int = 1
    """The step that ends it, counted from 1."""
    open_s: float = 0.0
    reset_s: float = 0.0
    step_s: float = 0.0
    reward: float = 0.0
    """Given with the last step; the others give 0."""
    success: bool | None = None
    """None: whether the reward is positive."""
    truncated: bool = False
    observation: str = "obs"
    """Observations are `obs 0` (reset), `obs 1`, ..."""
    fault: Fault | None = None
    fault_turn: int = 0
    """The step that goes wrong, counted from 0; or `AT_RESET`, `AT_OPEN`."""


Script = Callable[[Task, int], Behaviour]
"""`(task, attempt)`, attempts of a task counted from 0 in order of opening."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCall:
    """One call to an environment, in the order of asking."""

    call: str
    """`open`, `reset`, `step` or `close`."""
    at_s: float
    task: TaskId
    attempt: int
    environment: int
    """Number of the environment, from 0 in order of opening."""
    text: str = ""
    """The seed (reset) or the action (step)."""


def _one_turn(_task: Task, _attempt: int) -> Behaviour:
    return Behaviour()


class FakeEnvironment:
    """An `Environment` that follows its behaviour."""

    def __init__(self, pool: FakeEnvironmentPool, task: Task, attempt: int, number: int, behaviour: Behaviour) -> None:
        self._pool = pool
        self._task = task
        self._attempt = attempt
        self._number = number
        self._behaviour = behaviour
        self._turn = 0
        self._closed = False
        self._lost = False

    async def reset(self, seed: int) -> str:
        """First observation."""
        self._note("reset", str(seed))
        self._check_usable()
        await asyncio.sleep(self._behaviour.reset_s)
        await self._maybe_fail(AT_RESET)
        self._turn = 0
        return f"{self._behaviour.observation} 0"

    async def step(self, action: str) -> EnvironmentReply:
        """Answer one action."""
        self._note("step", action)
        self._check_usable()
        turn, self._turn = self._turn, self._turn + 1
        await asyncio.sleep(self._behaviour.step_s)
        await self._maybe_fail(turn)
        done = turn + 1 >= self._behaviour.turns
        success = self._behaviour.reward > 0 if self._behaviour.success is None else self._behaviour.success
        return EnvironmentReply(
            observation=f"{self._behaviour.observation} {turn + 1}",
            reward=self._behaviour.reward if done else 0.0,
            done=done,
            truncated=done and self._behaviour.truncated,
            success=success if done else None,
        )

    async def close(self) -> None:
        """Give the slot back, once."""
        if not self._closed:
            self._closed = True
            self._note("close", "")
            self._pool.give_slot_back()

    async def begin(self) -> None:
        """Take the time that opening takes, and fail if scripted."""
        await asyncio.sleep(self._behaviour.open_s)
        await self._maybe_fail(AT_OPEN)

    def _check_usable(self) -> None:
        where = f"environment of task {self._task.id}, attempt {self._attempt}"
        if self._lost:
            raise EnvironmentLost(f"{where}: its process is gone; open another")
        if self._closed:
            raise EnvironmentRaised(f"{where}: is closed; open another")

    async def _maybe_fail(self, turn: int) -> None:
        if self._behaviour.fault is None or turn != self._behaviour.fault_turn:
            return
        where = f"environment of task {self._task.id}, attempt {self._attempt}"
        match self._behaviour.fault:
            case Fault.HANG:
                await asyncio.get_running_loop().create_future()
            case Fault.RAISE:
                raise EnvironmentRaised(f"{where}: ValueError('made to fail')")
            case Fault.NONSENSE:
                raise EnvironmentNonsense(f"{where}: got reward nan, want a finite number")
            case Fault.LOST:
                self._lost = True
                raise EnvironmentLost(f"{where}: its process died")

    def _note(self, call: str, text: str) -> None:
        self._pool.note(call, self._task.id, self._attempt, self._number, text)


class FakeEnvironmentPool:
    """An `EnvironmentPool` in this process, with a ledger of every call."""

    def __init__(self, slots: int, script: Script | None = None) -> None:
        if slots < 1:
            raise ValueError(f"FakeEnvironmentPool: got {slots} slots, want >= 1")
        self._slots = slots
        self._script = script or _one_turn
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._attempts: dict[TaskId, int] = {}
        self._opened = 0
        self.open_now = 0
        """Slots in use."""
        self.open_max = 0
        self.calls: list[EnvironmentCall] = []

    @property
    def slots(self) -> int:
        """Environments open at once, at most."""
        return self._slots

    async def open(self, task: Task) -> FakeEnvironment:
        """Wait for a slot, first come first served, and open an environment in it."""
        await self._take_slot()
        attempt = self._attempts.get(task.id, 0)
        number = self._opened
        self._attempts[task.id] = attempt + 1
        self._opened += 1
        self.note("open", task.id, attempt, number, "")
        try:
            environment = FakeEnvironment(self, task, attempt, number, self._script(task, attempt))
            await environment.begin()
        except BaseException:
            self.give_slot_back()
            raise
        return environment

    def actions(self, task: TaskId) -> list[str]:
        """Action texts sent to the environments of a task, in order."""
        return [call.text for call in self.calls if call.task == task and call.call == "step"]

    def give_slot_back(self) -> None:
        """Pass a slot to the longest waiter, or free it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.open_now -= 1

    def note(self, call: str, task: TaskId, attempt: int, environment: int, text: str) -> None:
        """Add a line to the ledger."""
        now_s = asyncio.get_running_loop().time()
        self.calls.append(
            EnvironmentCall(call=call, at_s=now_s, task=task, attempt=attempt, environment=environment, text=text)
        )

    async def _take_slot(self) -> None:
        if self.open_now < self._slots:
            self.open_now += 1
            self.open_max = max(self.open_max, self.open_now)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_slot_back()
            raise
