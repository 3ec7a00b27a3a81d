"""Carries plans out: steps as soon as what they wait for has succeeded, groups all or nothing.

Laws:

- a step begins when all the steps that it names have succeeded; where one of them has not, neither does it;
- a group of which a step did not succeed is taken back, last step first, where it can be; past a point of no return it only goes
  forward;
- several plans may be under way: one that must be done at once beside one that takes its time;
- a group that is called off begins nothing more, and is taken back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pearl.core.actions import Action, ActionGroup, Admit, GiveBack, GroupKind, Step
from pearl.core.plan import Plan
from pearl.elastic.hands import Hands
from pearl.errors import PearlError
from pearl.pipeline.concurrency import Nursery
from pearl.records.ids import WorkerId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of a group."""

    kind: GroupKind
    done: bool
    why_not: str = ""
    """Of the first step that did not succeed; empty: it was waiting for another group that did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """What became of a plan."""

    groups: tuple[GroupOutcome, ...]
    seconds: float

    @property
    def done(self) -> bool:
        """Whether all of it was."""
        return all(group.done for group in self.groups)


@dataclass(slots=True, eq=False)
class _Group:
    group: ActionGroup
    tasks: dict[int, asyncio.Task[bool]] = field(default_factory=dict)
    """Index of a step -> whether it succeeded."""
    begun: list[int] = field(default_factory=list)
    """Places of steps in the group that have begun, in order."""
    why_not: str = ""
    off: bool = False


@dataclass(slots=True, kw_only=True)
class Executor:
    """Plans under way."""

    hands: Hands
    nursery: Nursery
    _groups: dict[_Group, None] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Whether a plan is under way."""
        return bool(self._groups)

    def carry_out(self, plan: Plan, on_done: Callable[[PlanOutcome], None]) -> None:
        """Begin a plan; `on_done` hears what became of it."""
        self.nursery.spawn(self._carry_out(plan, on_done), name="elastic: plan")

    def call_off(self, workers: Collection[WorkerId]) -> None:
        """Begin nothing more in the groups that bring these workers."""
        for running in self._groups:
            if any(_concerns(step.action, workers) for step in running.group.steps):
                running.off = True
                for task in running.tasks.values():
                    task.cancel()

    async def _carry_out(self, plan: Plan, on_done: Callable[[PlanOutcome], None]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        tasks: dict[int, asyncio.Task[bool]] = {}
        running = [_Group(group) for group in plan.groups]
        for one in running:
            self._groups[one] = None
            for place, step in enumerate(one.group.steps):
                work = self._step(one, place, step, [tasks[index] for index in step.after])
                tasks[step.index] = one.tasks[step.index] = self.nursery.spawn(work, name=f"elastic: step {step.index}")
        outcomes = [await self._finish(one) for one in running]
        on_done(PlanOutcome(groups=tuple(outcomes), seconds=loop.time() - began_s))

    async def _step(self, running: _Group, place: int, step: Step, after: list[asyncio.Task[bool]]) -> bool:
        for before in after:
            if not await asyncio.shield(before):
                return False
        if running.off:
            return False
        running.begun.append(place)
        try:
            await self.hands.perform(step.action)
        except PearlError as error:
            running.why_not = running.why_not or str(error)
            return False
        return True

    async def _finish(self, running: _Group) -> GroupOutcome:
        """Wait for a group's steps, and take it back where that is needed."""
        results = await asyncio.gather(*running.tasks.values(), return_exceptions=True)
        try:
            done = all(result is True for result in results)
            if not done:
                await self._take_back(running)
        finally:
            del self._groups[running]
        why_not = running.why_not or ("called off" if running.off else "")
        return GroupOutcome(kind=running.group.kind, done=done, why_not="" if done else why_not)

    async def _take_back(self, running: _Group) -> None:
        for place in sorted(running.begun, reverse=True):
            for action in running.group.steps[place].undo or ():
                try:
                    await self.hands.perform(action)
                except PearlError as error:
                    _log.warning("taking back %s: %s", type(action).__name__, error)
        _log.warning("group %s was taken back: %s", running.group.kind.value, running.why_not or "called off")


def _workers(action: Action) -> tuple[WorkerId, ...]:
    match action:
        case GiveBack():
            return ()
        case Admit(workers=workers):
            return workers
        case _:
            return (action.worker,)


def _concerns(action: Action, workers: Collection[WorkerId]) -> bool:
    return any(worker in workers for worker in _workers(action))
