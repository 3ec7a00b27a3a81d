"""Simulated environments: they play scripts, wait as long as those say, and fail as they are told.

Which script a trajectory plays follows from its task and its attempt: groups are numbered by the end of their tasks' names
(`swe#17`, as `TaskStream` writes them), attempts in the order of asking for an environment. Whether an attempt succeeds is
drawn from (seed, group, attempt), so it is the same whatever the fleet does.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pearl.errors import EnvironmentLost, EnvironmentNonsense, EnvironmentRaised
from pearl.pipeline.tasks import derive_seed
from pearl.records.ids import TaskId
from pearl.records.trajectory import EnvironmentReply, Task
from pearl.sim.codec import Action, Observation
from pearl.sim.script import Script

AT_RESET = -1
"""As the turn of a fault: `reset` goes wrong."""


class Workload(Protocol):
    """Where scripts come from."""

    def script(self, group: int, attempt: int) -> Script:
        """The script of one attempt: a pure function."""


class EnvironmentFaultKind(enum.Enum):
    """How a simulated environment goes wrong."""

    RAISE = "raise"
    HANG = "hang"
    """It never answers."""
    SLOW = "slow"
    """It answers later."""
    NONSENSE = "nonsense"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """What goes wrong with one call."""

    kind: EnvironmentFaultKind
    turn: int = AT_RESET
    """The step, counted from 0, or `AT_RESET`; of no meaning to `SimEnvironmentPool.fail_next`."""
    extra_s: float = 0.0
    """SLOW: how much later; >= 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTimes:
    """What environments take beside their scripts, and how often they are solved."""

    open_s: float = 0.0
    reset_s: float = 0.0
    success_rate: float = 0.5
    """0 .. 1."""

    def __post_init__(self) -> None:
        for name in ("open_s", "reset_s"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"simulated environments: {name}: got {value}, want a finite number >= 0")
        if not 0 <= self.success_rate <= 1:
            raise ValueError(f"simulated environments: success_rate: got {self.success_rate}, want 0..1")


Faults = Callable[[int, int], InjectedFault | None]
"""`(group, attempt)` -> what goes wrong with that attempt: a pure function."""


class SimEnvironment:
    """An `Environment` that plays a script."""

    __slots__ = ("_closed", "_fault", "_lost", "_name", "_pool", "_script", "_success", "_turn")

    def __init__(
        self, pool: SimEnvironmentPool, name: str, script: Script, fault: InjectedFault | None, *, success: bool
    ) -> None:
        self._pool = pool
        self._name = name
        self._script = script
        self._fault = fault
        self._success = success
        self._turn = 0
        self._closed = False
        self._lost = False

    async def reset(self, seed: int) -> Observation:  # noqa: ARG002 - the script is the task's already
        """First observation."""
        await self._answer(self._pool.times.reset_s, AT_RESET)
        self._turn = 0
        return Observation(self._script, 0, 0)

    async def step(self, action: str) -> EnvironmentReply:
        """Answer one action after as long as the script says."""
        if not isinstance(action, Action):
            raise TypeError(f"environment of {self._name}: got {type(action).__name__}, want an Action of `SimCodec`")
        turn = self._turn
        turns = self._script.turns
        if turn >= len(turns):
            raise EnvironmentRaised(f"environment of {self._name}: is done after {len(turns)} steps; open another")
        await self._answer(turns[turn].env_s, turn)
        self._turn = turn + 1
        done = turn + 1 == len(turns)
        return EnvironmentReply(
            observation=Observation(action.script, turn + 1, action.script.starts[turn] + action.tokens),
            reward=float(done and self._success),
            done=done,
            success=self._success if done else None,
        )

    async def close(self) -> None:
        """Give the slot back, once."""
        if not self._closed:
            self._closed = True
            self._pool.give_slot_back()

    async def _answer(self, seconds: float, turn: int) -> None:
        if self._lost or self._closed:
            error = EnvironmentLost if self._lost else EnvironmentRaised
            raise error(f"environment of {self._name}: is {'gone' if self._lost else 'closed'}; open another")
        fault = self._pool.next_fault()
        if fault is None and self._fault is not None and self._fault.turn == turn:
            fault = self._fault
        if fault is not None and fault.kind is EnvironmentFaultKind.SLOW:
            seconds += fault.extra_s
        if seconds > 0:
            await asyncio.sleep(seconds)
        if fault is not None:
            await self._fail(fault.kind)

    async def _fail(self, kind: EnvironmentFaultKind) -> None:
        where = f"environment of {self._name}"
        match kind:
            case EnvironmentFaultKind.SLOW:
                return
            case EnvironmentFaultKind.HANG:
                await asyncio.get_running_loop().create_future()
            case EnvironmentFaultKind.RAISE:
                raise EnvironmentRaised(f"{where}: made to fail")
            case EnvironmentFaultKind.NONSENSE:
                raise EnvironmentNonsense(f"{where}: got reward nan, want a finite number")
            case EnvironmentFaultKind.LOST:
                self._lost = True
                raise EnvironmentLost(f"{where}: its process died")


class SimEnvironmentPool:
    """An `EnvironmentPool` of scripts."""

    def __init__(
        self,
        slots: int,
        workload: Workload,
        *,
        seed: int = 0,
        times: EnvironmentTimes | None = None,
        faults: Faults | None = None,
    ) -> None:
        """`seed` decides who succeeds; `faults` says what goes wrong with an attempt, `fail_next` adds to it.

        Raises:
            ValueError: no slot.
        """
        if slots < 1:
            raise ValueError(f"simulated environments: got {slots} slots, want >= 1")
        self._slots = slots
        self._free = asyncio.Semaphore(slots)
        self._workload = workload
        self._seed = seed
        self._faults = faults
        self._next_faults: deque[InjectedFault] = deque()
        self._attempts: dict[TaskId, int] = {}
        self.times = times or EnvironmentTimes()
        self.open_now = 0
        """Slots in use."""
        self.opened = 0

    @property
    def slots(self) -> int:
        """Environments open at once, at most."""
        return self._slots

    async def open(self, task: Task) -> SimEnvironment:
        """Wait for a slot, first come first served, and open the task's next attempt in it."""
        attempt = self._attempts.get(task.id, 0)
        self._attempts[task.id] = attempt + 1
        await self._free.acquire()
        self.open_now += 1
        try:
            if self.times.open_s > 0:
                await asyncio.sleep(self.times.open_s)
            group = group_number(task.id)
            environment = SimEnvironment(
                self,
                f"task {task.id}, attempt {attempt}",
                self._workload.script(group, attempt),
                None if self._faults is None else self._faults(group, attempt),
                success=self.success(group, attempt),
            )
        except BaseException:
            self.give_slot_back()
            raise
        self.opened += 1
        return environment

    def success(self, group: int, attempt: int) -> bool:
        """Whether an attempt solves its task, if it comes to its end."""
        drawn = derive_seed("success", self._seed, group, attempt) / 2**63
        return drawn < self.times.success_rate

    def fail_next(self, fault: InjectedFault) -> None:
        """Let the next call that begins, of whatever environment, go wrong; each call of this adds one."""
        self._next_faults.append(fault)

    def next_fault(self) -> InjectedFault | None:
        """What goes wrong with the call that begins now, by `fail_next`."""
        return self._next_faults.popleft() if self._next_faults else None

    def give_slot_back(self) -> None:
        """Pass a slot to the longest waiter, or free it."""
        self.open_now -= 1
        self._free.release()


def group_number(task: TaskId) -> int:
    """The number at the end of a task's name behind its last `#`; of other names a number of their own, from 2**31 on."""
    name, _, number = task.rpartition("#")
    # Evaluation has its own tasks of the same numbers; they play other scripts.
    if number.isdecimal() and name != "evaluation":
        return int(number)
    return 2**31 + derive_seed("task name", task) % 2**31
